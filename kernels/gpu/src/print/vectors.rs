//! Vectors of four neighbouring elements: which buffers have them, and how they are loaded and drawn.

use std::fmt::Write as _;

use crate::kernel::{Kernel, Skeleton};
use crate::linear::{VECTOR, buffer, has_vectors, loads_of_steps, loads_of_stores};
use crate::print::writer::Writer;
use crate::store::{Buf, Stage, Store};
use tandem_executor::ir::{E, Node, Var};

/// For each buffer of a kernel, whether its declared type is an array of vectors of four elements. `int16` says whether the
/// device stores 16-bit integers.
pub fn wide(kernel: &Kernel, int16: bool) -> Vec<bool> {
    let mut found: Vec<u32> = Vec::new();
    let mut add = |loads: Option<Vec<E>>, stores: &[Store]| {
        if let Some(loads) = loads {
            found.extend(loads.iter().filter_map(buffer).chain(stores.iter().map(|s| s.buf)));
        }
    };
    match &kernel.skeleton {
        Skeleton::Map { element, stores, lanes: VECTOR, .. } => {
            add(loads_of_stores(stores, *element), stores);
        }
        Skeleton::Rows { stages, .. } => stages.iter().for_each(|stage| match stage {
            Stage::Reduce { member, step, .. } => {
                add(loads_of_steps(&kernel.bufs, int16, step, *member), &[])
            }
            Stage::Each(member, stores) => add(loads_of_stores(stores, *member), stores),
            Stage::Scan(_) | Stage::Once(_) => {}
        }),
        Skeleton::Contract(c) => {
            found.extend(c.sides.iter().filter(|side| side.vector).filter_map(|side| buffer(&side.value)));
            if c.stores_vectors() {
                found.extend(c.stores.iter().map(|store| store.buf));
            }
        }
        Skeleton::Bundle(bundle) if bundle.lanes == VECTOR => found.extend(bundle.accessed()),
        Skeleton::Map { .. } | Skeleton::Squares(_) | Skeleton::Bundle(_) | Skeleton::Raw { .. } => {}
    }
    let is_wide =
        |(i, buf): (usize, &Buf)| has_vectors(buf, int16) && (buf.wide || found.contains(&(i as u32)));
    kernel.bufs.iter().enumerate().map(is_wide).collect()
}

impl Writer<'_> {
    /// Code that loads or draws the vectors of four elements from `element` on, and code that does so for `element`
    /// alone.
    pub(super) fn vectors(&mut self, loads: &[E], element: Var) -> Vectors {
        let mut known: Vec<String> = Vec::new();
        let (mut of, mut parameters) = (Vec::new(), String::new());
        let mut single = Vec::new();
        let whole = self.block(&[element], |w| {
            for e in loads {
                let text = match e.node() {
                    Node::Load { buf, at, .. } if w.wide[*buf as usize] => {
                        format!("lv{buf}({})", w.address(*buf, at))
                    }
                    Node::Call(_, args) => {
                        let [low, high, counter, stream] = [0, 1, 2, 3].map(|arg| w.emit(&args[arg]));
                        format!("philox(vec2<u32>({low}, {high}), {counter}, {stream})")
                    }
                    _ => {
                        of.push(None);
                        continue;
                    }
                };
                let n = known.iter().position(|k| *k == text).unwrap_or_else(|| {
                    let n = known.len();
                    w.line(&format!("let w{n} = {text};"));
                    let ty = w.ty(e.ty());
                    let _ = write!(parameters, ", l{n}: {ty}");
                    single.push(e.clone());
                    known.push(text);
                    n
                });
                of.push(Some(n));
            }
        });
        let one = self.block(&[element], |w| {
            for (n, e) in single.iter().enumerate() {
                let value = w.emit(e);
                w.line(&format!("let w{n} = {value};"));
            }
        });
        Vectors { of, count: known.len(), parameters, whole, one }
    }
}

/// Loads and draws of vectors.
pub(super) struct Vectors {
    /// Number of the vector of each load or draw; `None` for loads of single elements.
    of: Vec<Option<usize>>,
    /// Number of vectors.
    pub(super) count: usize,
    /// Declarations of parameters for the elements of the vectors.
    pub(super) parameters: String,
    /// Code that loads the vectors.
    pub(super) whole: String,
    /// Code that loads single elements instead.
    pub(super) one: String,
}

impl Vectors {
    /// Names the values of the loads that have vectors.
    pub(super) fn name(&self, w: &mut Writer<'_>, loads: &[E], name: impl Fn(usize) -> String) {
        for (e, n) in loads.iter().zip(&self.of) {
            if let Some(n) = n {
                w.known(e, name(*n));
            }
        }
    }
}
