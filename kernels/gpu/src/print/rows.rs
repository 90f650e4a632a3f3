//! Prints kernels with a team of threads per row: reductions, scans, and stores per member or per row.

use std::fmt::Write as _;

use crate::kernel::{Skeleton, THREADS, Team, lanes};
use crate::linear::{self, VECTOR};
use crate::print::held::Held;
use crate::print::writer::{MAIN, Writer, name};
use crate::store::{Scan, Stage, Store};
use tandem_executor::ir::{E, Ty, Var};

impl Writer<'_> {
    pub(super) fn rows(&mut self, rows: &E, len: &E, row: Var, shape: Team, stages: &[Stage]) -> String {
        let team = shape.threads;
        let per = THREADS / team;
        let x = name(row);
        let (rows, first) = (self.outside(rows), self.plus_first());
        let mut shared = String::new();
        if team > 1 {
            for (n, ty) in self.kernel_shared() {
                let ty = self.ty(ty);
                let _ = writeln!(shared, "var<workgroup> sh{n}: array<{ty}, {THREADS}>;");
            }
        }
        let body = self.block(&[row], |w| {
            let len = w.emit(len);
            let held = Held::of(w, shape, stages);
            if let Some(held) = &held {
                held.load(w, team, &len);
            }
            for stage in stages {
                match stage {
                    Stage::Reduce { member, acc, other, init, step, merge } => {
                        w.accumulators(acc, init);
                        match &held {
                            Some(held) => held.reduce(w, *member, acc, step),
                            None => w.reduce(team, &len, *member, acc, step),
                        }
                        w.merge(team, acc, other, init, merge);
                    }
                    Stage::Scan(scan) => w.scan(team, &len, scan),
                    Stage::Each(member, stores) => match &held {
                        Some(held) => held.each(w, *member, stores),
                        None => w.each(team, &len, *member, stores),
                    },
                    Stage::Once(stores) => {
                        let body = w.block(&[], |w| w.stores(stores));
                        w.line(&format!("if (row_ok && worker == 0u) {{\n{body}}}"));
                    }
                }
            }
        });
        format!(
            "{shared}{MAIN}  let worker = lane % {team}u;\n  \
             let asked = group(wg, grid) * {per}u + lane / {team}u;\n  let row_ok = asked < {rows};\n  \
             let {x} = min(asked, {rows} - 1u){first};\n{body}}}\n"
        )
    }

    /// Prints the stores of each member. Adjacent members share words or vectors, so a thread stores whole words or
    /// vectors if the row begins at a boundary.
    fn each(&mut self, team: u32, len: &str, member: Var, stores: &[Store]) {
        let faultless = self.kernel.faults.is_empty();
        let loads = linear::loads_of_stores(stores, member).filter(|_| faultless);
        let lanes = match &loads {
            Some(_) => VECTOR,
            None if faultless => lanes(&self.kernel.bufs, stores),
            None => 1,
        };
        let loads = loads.unwrap_or_default();
        let j = name(member);
        let single = self.block(&[member], |w| w.stores(stores));
        if lanes == 1 {
            self.line(&format!(
                "if (row_ok) {{ for (var {j} = worker; {j} < {len}; {j} += {team}u) {{\n{single}}} }}"
            ));
            return;
        }
        let vectors = self.vectors(&loads, member);
        let code = vectors.whole.clone()
            + &self.together(member, stores, lanes, |w, p| vectors.name(w, &loads, |n| format!("w{n}[{p}]")));
        self.line(&format!(
            "if (row_ok) {{ for (var first = worker * {lanes}u; first < {len}; first += {}u) {{\n\
             if (first + {lanes}u <= {len}) {{\nlet {j} = first;\n{code}}} else {{\n\
             for (var {j} = first; {j} < {len}; {j}++) {{\n{single}}} }} }} }}",
            team * lanes
        ));
    }

    /// Code that stores the values of `lanes` members together, from member `first` on. `known` names the values of a
    /// member, given its number.
    pub(super) fn together(
        &mut self,
        member: Var,
        stores: &[Store],
        lanes: u32,
        known: impl Fn(&mut Self, u32),
    ) -> String {
        let j = name(member);
        let mut code = String::new();
        for (n, store) in stores.iter().enumerate() {
            let ty = self.ty(self.kernel.bufs[store.buf as usize].mem.ty());
            for p in 0..lanes {
                let _ = writeln!(code, "var r{p}_{n}: {ty};");
            }
        }
        for p in 0..lanes {
            let values = self.block(&[member], |w| {
                known(w, p);
                for (n, store) in stores.iter().enumerate() {
                    let value = w.emit(&store.value);
                    w.line(&format!("r{p}_{n} = {value};"));
                }
            });
            let _ = writeln!(code, "{{ let {j} = first + {p}u;\n{values}}}");
        }
        for (n, store) in stores.iter().enumerate() {
            let at = self.block(&[member], |w| {
                let at = w.address(store.buf, &store.at);
                w.line(&format!("let at = {at};"));
            });
            let words = self.words(store, lanes, |p| format!("r{p}_{n}"));
            let _ = writeln!(code, "{{ let {j} = first; {at}{words} }}");
        }
        code
    }

    fn accumulators(&mut self, acc: &[Var], init: &[E]) {
        for (var, init) in acc.iter().zip(init) {
            let value = self.emit(init);
            self.line(&format!("var {} = {value};", name(*var)));
        }
    }

    /// Prints the reduction of a thread's share of the members: every `team`-th member, or every `team`-th vector of
    /// four members if all loads have vectors. Four members are loaded before the first of them is needed.
    fn reduce(&mut self, team: u32, len: &str, member: Var, acc: &[Var], step: &[E]) {
        let mut vars = vec![member];
        vars.extend_from_slice(acc);
        let body = self.block(&vars, |w| w.assign(acc, step));
        let j = name(member);
        let loads =
            linear::loads_of_steps(&self.kernel.bufs, self.target.int16, step, member).filter(|_| team > 1);
        if let Some(loads) = loads {
            let vectors = self.vectors(&loads, member);
            let mut code = format!("let {j} = first;\n{}", vectors.whole);
            for p in 0..VECTOR {
                let own = self.block(&vars, |w| {
                    vectors.name(w, &loads, |n| format!("w{n}[{p}]"));
                    w.assign(acc, step);
                });
                let _ = writeln!(code, "{{ let {j} = first + {p}u;\n{own}}}");
            }
            self.line(&format!(
                "for (var first = worker * {VECTOR}u; first < {len}; first += {}u) {{\n\
                 if (first + {VECTOR}u <= {len}) {{\n{code}}} else {{\n\
                 for (var {j} = first; {j} < {len}; {j}++) {{\n{body}}} }} }}",
                team * VECTOR
            ));
            return;
        }
        let worker = if team == 1 { "0u" } else { "worker" };
        let unrolled: String = match linear::has_loops(step) {
            true => String::new(),
            false => {
                let own: String =
                    (0..VECTOR).map(|p| format!("{{ let {j} = at + {}u;\n{body}}}\n", p * team)).collect();
                format!("for (; at + {}u < {len}; at += {}u) {{\n{own}}}\n", 3 * team, VECTOR * team)
            }
        };
        self.line(&format!(
            "{{ var at = {worker};\n{unrolled}for (; at < {len}; at += {team}u) {{ let {j} = at;\n{body}}} }}"
        ));
    }

    /// Prints a tree reduction over the team's threads, with four values per merge, after which all threads have
    /// the result. Barriers cost more than merges and need uniform control flow, so the tree is unrolled.
    fn merge(&mut self, team: u32, acc: &[Var], other: &[Var], init: &[E], merge: &[E]) {
        if team == 1 {
            return;
        }
        let arrays = self.shared_of(init);
        let put: String =
            acc.iter().zip(&arrays).map(|(a, n)| format!("sh{n}[lane] = {}; ", name(*a))).collect();
        let mut vars = acc.to_vec();
        vars.extend_from_slice(other);
        let body = self.block(&vars, |w| w.assign(acc, merge));
        let join = |at: &str| -> String {
            let take = other.iter().zip(&arrays).map(|(o, n)| format!("let {} = sh{n}[{at}]; ", name(*o)));
            format!("{{ {}\n{body}}}\n", take.collect::<String>())
        };
        let mut left = team;
        self.line(&put);
        while left > 4 {
            left /= 4;
            let joined: String = (1..4).map(|n| join(&format!("lane + {}u", n * left))).collect();
            self.line("workgroupBarrier();");
            self.line(&format!("if (worker < {left}u) {{\n{joined}{put}}}"));
        }
        self.line("workgroupBarrier();");
        // Every thread merges the remaining values in the same order.
        let first = acc.iter().zip(&arrays).map(|(a, n)| format!("{} = sh{n}[lane - worker]; ", name(*a)));
        self.line(&first.collect::<String>());
        (1..left).for_each(|n| self.line(&join(&format!("lane - worker + {n}u"))));
        self.line("workgroupBarrier();");
    }

    fn kernel_shared(&self) -> Vec<(usize, Ty)> {
        let Skeleton::Rows { stages, .. } = &self.kernel.skeleton else { return Vec::new() };
        let accumulators = stages.iter().map(|s| match s {
            Stage::Reduce { init, .. } | Stage::Scan(Scan { init, .. }) => init.iter().map(E::ty).collect(),
            _ => Vec::new(),
        });
        self.shared_types(accumulators).into_iter().enumerate().collect()
    }

    /// Types of the workgroup arrays that merges need: for each type, the largest number that one stage uses.
    fn shared_types(&self, stages: impl Iterator<Item = Vec<Ty>>) -> Vec<Ty> {
        let mut needed: Vec<Ty> = Vec::new();
        for stage in stages {
            let mut rest = needed.clone();
            for ty in stage {
                match rest.iter().position(|t| *t == ty) {
                    Some(at) => {
                        rest.remove(at);
                    }
                    None => needed.push(ty),
                }
            }
        }
        needed
    }

    /// Indices of the workgroup arrays for some accumulators.
    pub(super) fn shared_of(&self, init: &[E]) -> Vec<usize> {
        let mut free = self.kernel_shared();
        let one = |e: &E| {
            let at = free.iter().position(|(_, t)| *t == e.ty()).unwrap_or(0);
            free.remove(at).0
        };
        init.iter().map(one).collect()
    }
}
