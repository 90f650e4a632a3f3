//! Rows that a team of threads holds in registers, so that each stage uses the same loads.

use std::fmt::Write as _;

use crate::kernel::Team;
use crate::linear::{self, VECTOR};
use crate::print::writer::{Writer, name};
use crate::store::{Stage, Store};
use tandem_executor::ir::{E, Node, Var};

/// A row in registers: each load is printed once, before the first stage, and all stages use its values.
pub(super) struct Held {
    /// Number of vectors that each thread holds for each load.
    vectors: u32,
    /// Loads of all stages, each once.
    loads: Vec<E>,
    /// Index of a member in all stages.
    member: Var,
}

/// Maximum number of vectors that a thread holds: 64 registers, a quarter of a thread's registers on most devices.
const MAX_HELD: usize = 16;

impl Held {
    /// The loads of the stages, if all of them are vectors of neighbouring members.
    pub(super) fn of(w: &Writer<'_>, team: Team, stages: &[Stage]) -> Option<Held> {
        let (bufs, int16) = (&w.kernel.bufs, w.target.int16);
        let mut all: Vec<E> = Vec::new();
        let mut of = None;
        for stage in stages {
            let (member, loads) = match stage {
                Stage::Reduce { member, step, .. } => {
                    (*member, linear::loads_of_steps(bufs, int16, step, *member)?)
                }
                Stage::Each(member, stores) => (*member, linear::loads_of_stores(stores, *member)?),
                Stage::Scan(_) => return None,
                Stage::Once(_) => continue,
            };
            if *of.get_or_insert(member) != member {
                return None;
            }
            for load in loads {
                if !linear::buffer(&load).is_some_and(|buf| w.wide[buf as usize]) {
                    return None;
                }
                if !all.iter().any(|known| known.same(&load)) {
                    all.push(load);
                }
            }
        }
        let fits = w.kernel.faults.is_empty() && team.held as usize * all.len() <= MAX_HELD;
        let member = of.filter(|_| fits && team.held > 0 && !all.is_empty())?;
        Some(Held { vectors: team.held, loads: all, member })
    }

    /// Prints the loads. There are no branches between them, so they are issued together.
    pub(super) fn load(&self, w: &mut Writer<'_>, team: u32, len: &str) {
        let j = name(self.member);
        let (mut whole, mut single, mut joined) = (String::new(), String::new(), Vec::new());
        for v in 0..self.vectors {
            w.line(&format!("let first{v} = (worker + {}u) * {VECTOR}u;", v * team));
            w.line(&format!("let has{v} = first{v} < {len};"));
            for (i, load) in self.loads.iter().enumerate() {
                let Node::Load { buf, at, .. } = load.node() else { continue };
                let code = w.block(&[self.member], |w| {
                    let at = w.address(*buf, at);
                    w.line(&format!("a{i}_{v} = {at};"));
                });
                let ty = w.ty(load.ty());
                w.line(&format!("var a{i}_{v}: u32; {{ let {j} = select(0u, first{v}, has{v});\n{code}}}"));
                w.line(&format!("var h{i}_{v}: vec4<{ty}>;"));
                let _ = writeln!(whole, "h{i}_{v} = lv_whole{buf}(a{i}_{v});");
                let _ = writeln!(single, "h{i}_{v} = lv{buf}(a{i}_{v});");
                joined.push(format!("a{i}_{v}"));
            }
        }
        let joined = joined.join(" | ");
        w.line(&format!("if ((({joined}) & 3u) == 0u) {{\n{whole}}} else {{\n{single}}}"));
    }

    /// Names the values of a stage's loads for the member `p` of vector `v`.
    fn name(&self, w: &mut Writer<'_>, loads: &[E], v: u32, p: u32) {
        for load in loads {
            if let Some(i) = self.loads.iter().position(|known| known.same(load)) {
                w.known(load, format!("h{i}_{v}[{p}]"));
            }
        }
    }

    pub(super) fn reduce(&self, w: &mut Writer<'_>, member: Var, acc: &[Var], step: &[E]) {
        let loads = linear::loads(step, member).unwrap_or_default();
        let mut vars = vec![member];
        vars.extend_from_slice(acc);
        for v in 0..self.vectors {
            let mut code = String::new();
            for p in 0..VECTOR {
                let own = w.block(&vars, |w| {
                    self.name(w, &loads, v, p);
                    w.assign(acc, step);
                });
                let _ = writeln!(code, "{{ let {} = first{v} + {p}u;\n{own}}}", name(member));
            }
            w.line(&format!("if (has{v}) {{\n{code}}}"));
        }
    }

    pub(super) fn each(&self, w: &mut Writer<'_>, member: Var, stores: &[Store]) {
        let loads = linear::loads_of_stores(stores, member).unwrap_or_default();
        for v in 0..self.vectors {
            let code = w.together(member, stores, VECTOR, |w, p| self.name(w, &loads, v, p));
            w.line(&format!("if (row_ok && has{v}) {{ let first = first{v};\n{code}}}"));
        }
    }
}
