//! Kernels that access a tensor beyond the maximum size of a binding at addresses that they load.
//!
//! Such a kernel cannot run in parts with smaller bindings, because no range of its elements accesses a known part of
//! the tensor, as in the look-up of an embedding. Instead, the kernel runs once for each section of the tensor, and
//! each run stores only the elements that access its section.

use rustc_hash::FxHashSet;

use crate::kernel::{Groups, Kernel, Skeleton, THREADS};
use crate::linear::operands;
use crate::spans::{ByteRange, reached};
use crate::store::{Store, Word};
use tandem_executor::ir::{E, Guard, Known, Mem, Node, Ty};

/// A kernel for a section of one of its tensors.
pub struct Sectioned {
    /// Kernel that accesses no element of the tensor outside of the section.
    pub kernel: Kernel,
    /// Index of the tensor's buffer.
    pub buf: usize,
    /// The section.
    pub section: ByteRange,
}

/// The kernels for all sections of the tensor that `kernel` accesses at loaded addresses. `bytes` holds the sizes of
/// the kernel's tensors. Returns `None` if several such tensors have more than `limit` bytes, or if one store depends
/// on several addresses.
pub fn sections(kernel: &Kernel, bytes: &[u64], limit: u64) -> Option<Vec<Sectioned>> {
    let reached = reached(kernel, bytes);
    let mut large = (0..bytes.len()).filter(|buf| reached[*buf].end - reached[*buf].begin > limit);
    let (Some(buf), None) = (large.next(), large.next()) else { return None };
    let size = u64::from(kernel.bufs[buf].mem.size());
    let each = limit / size * size;
    let section = |begin: u64| {
        let section = ByteRange { begin, end: (begin + each).min(bytes[buf]) };
        Some(Sectioned { kernel: within(kernel, buf as u32, section)?, buf, section })
    };
    (0..bytes[buf]).step_by(each as usize).map(section).collect()
}

/// The kernel with its accesses to a buffer limited to a section.
fn within(kernel: &Kernel, buf: u32, section: ByteRange) -> Option<Kernel> {
    let mut k = kernel.clone();
    let size = u64::from(k.bufs[buf as usize].mem.size());
    let [begin, count] = [section.begin, section.end - section.begin].map(|b| k.size((b / size) as i64));
    let (tensor, mem) = (k.bufs[buf as usize].tensor, k.bufs[buf as usize].mem);
    let offset = k.words.iter().position(|word| *word == Word::Offset(tensor, mem));
    let inside = |at: &E| {
        let at = offset.map_or(at.clone(), |word| at - E::param(Ty::U32, word as u32));
        (at - &begin).lt(&count)
    };
    if !addresses(&k.faults, buf)?.is_empty() {
        return None;
    }
    let all = k.elements()?;
    let Skeleton::Map { stores, lanes, .. } = &mut k.skeleton else { return None };
    (k.groups, *lanes) = (Groups::Linear(u64::from(all.div_ceil(THREADS))), 1);
    for store in stores {
        let mut found = addresses(std::iter::once(&store.value).chain(&store.guard), buf)?;
        found.extend((store.buf == buf).then(|| store.at.clone()));
        let Some(at) = found.first() else { continue };
        let same = found.iter().all(|other| other.address() == at.address());
        if !same || !addresses([&store.at], buf)?.is_empty() {
            return None;
        }
        limit(store, buf, mem, &inside(at))?;
    }
    Some(k)
}

/// Makes a store conditional, and also its loads from a buffer of this format. Loops are left unchanged, because they
/// contain no such loads.
fn limit(store: &mut Store, buf: u32, mem: Mem, inside: &E) -> Option<()> {
    let values = std::iter::once(&store.value).chain(&store.guard);
    let loops = reachable(values).into_iter().filter(|e| matches!(e.node(), Node::Item(..)));
    let mut known: Known = loops.map(|e| (e.address(), e)).collect();
    let mut limited = |e: &E| {
        e.with_leaves(&mut known, &mut |leaf| match leaf.node() {
            Node::Load { buf: from, at, guard } if *from == buf => {
                let guard = match guard {
                    Some(Guard { condition, default }) => {
                        Guard { condition: condition.and(inside), default: default.clone() }
                    }
                    None => Guard { condition: inside.clone(), default: E::lit(leaf.ty(), 0.0) },
                };
                Some(E::load(mem, buf, at.clone(), Some(guard)))
            }
            _ => Some(leaf.clone()),
        })
    };
    store.value = limited(&store.value)?;
    let guard = match &store.guard {
        Some(guard) => limited(guard)?.and(inside),
        None => inside.clone(),
    };
    (store.guard, store.linear) = (Some(guard), false);
    Some(())
}

/// The addresses of the loads from a buffer. Returns `None` if a loop contains such a load.
fn addresses<'v>(values: impl IntoIterator<Item = &'v E>, buf: u32) -> Option<Vec<E>> {
    let mut found = Vec::new();
    for e in reachable(values) {
        match e.node() {
            Node::Load { buf: from, at, .. } if *from == buf => found.push(at.clone()),
            Node::Item(fold, _) => {
                let Node::Fold { count, init, body, .. } = fold.node() else { return None };
                let within = addresses(init.iter().chain(body).chain([count]), buf)?;
                within.is_empty().then_some(())?;
            }
            _ => {}
        }
    }
    Some(found)
}

/// The expressions that values consist of, each once, without the insides of loops.
fn reachable<'v>(values: impl IntoIterator<Item = &'v E>) -> Vec<E> {
    let (mut found, mut visited) = (Vec::new(), FxHashSet::default());
    let mut rest: Vec<E> = values.into_iter().cloned().collect();
    while let Some(e) = rest.pop() {
        if visited.insert(e.address()) {
            rest.extend(operands(&e));
            found.push(e);
        }
    }
    found
}
