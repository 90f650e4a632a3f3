//! Prints scans, the running accumulations over a row.

use std::fmt::Write as _;

use crate::print::writer::{Writer, name};
use crate::store::Scan;

impl Writer<'_> {
    /// Prints a scan. In each round, every thread of the team takes one member, and the team scans them in
    /// workgroup memory.
    pub(super) fn scan(&mut self, team: u32, len: &str, scan: &Scan) {
        let Scan { rounds, member, acc, other, init, start, step, merge, stores } = scan;
        let j = name(*member);
        let mut vars = vec![*member];
        vars.extend_from_slice(acc);
        let step = self.block(&vars, |w| w.assign(acc, step));
        let put = self.block(&vars, |w| w.stores(stores));
        let start: Vec<String> = start.iter().map(|e| self.emit(e)).collect();
        let declare = |values: &[String], prefix: &str| -> String {
            acc.iter().zip(values).map(|(a, v)| format!("var {prefix}{} = {v}; ", name(*a))).collect()
        };
        if team == 1 {
            let declared = declare(&start, "");
            self.line(&format!(
                "if (row_ok) {{ {declared}for (var {j} = 0u; {j} < {len}; {j}++) {{\n{{\n{step}}}\n{{\n{put}}} }} }}"
            ));
            return;
        }
        let init: Vec<String> = init.iter().map(|e| self.emit(e)).collect();
        let arrays = self.shared_of(&scan.init);
        let mut both = acc.clone();
        both.extend_from_slice(other);
        let merged = self.block(&both, |w| {
            for (a, value) in acc.iter().zip(merge) {
                let value = w.emit(value);
                w.line(&format!("m{} = {value};", name(*a)));
            }
        });
        // Code that sets `m..` to the result of merging an earlier and a later value.
        let merge = |earlier: &dyn Fn(usize) -> String, later: &dyn Fn(usize) -> String| -> String {
            let mut text = String::from("{ ");
            for (n, a) in acc.iter().enumerate() {
                text += &format!("let e{} = {}; ", name(*a), earlier(n));
            }
            for (n, o) in other.iter().enumerate() {
                text += &format!("let {} = {}; ", name(*o), later(n));
            }
            for a in acc {
                text += &format!("let {0} = e{0}; ", name(*a));
            }
            text + &merged + " }\n"
        };
        let all = |f: &dyn Fn(usize, &str) -> String| -> String {
            acc.iter().enumerate().map(|(n, a)| f(n, &name(*a))).collect()
        };
        let own = |n: usize| name(acc[n]);
        let carry = |n: usize| format!("c{}", name(acc[n]));
        let share = all(&|n, a| format!("sh{}[lane] = {a}; ", arrays[n]));
        let take = all(&|_, a| format!("{a} = m{a}; "));
        let mut code = declare(&init, "") + &declare(&init, "m");
        let _ = write!(code, "let {j} = base + worker;\nif ({j} < {len}) {{\n{step}}}\n{share}\n");
        let mut distance = 1;
        while distance < team {
            let earlier = |n: usize| format!("sh{}[lane - {distance}u]", arrays[n]);
            let merged = merge(&earlier, &own);
            let _ = write!(
                code,
                "workgroupBarrier();\nif (worker >= {distance}u) {{ {merged}{take}}}\nworkgroupBarrier();\n{share}\n"
            );
            distance *= 2;
        }
        let _ = write!(
            code,
            "workgroupBarrier();\n{}{take}if (row_ok && {j} < {len}) {{\n{put}}}\n{}{}workgroupBarrier();\n",
            merge(&carry, &own),
            merge(&carry, &|n| format!("sh{}[lane - worker + {}u]", arrays[n], team - 1)),
            all(&|_, a| format!("c{a} = m{a}; ")),
        );
        let rounds = self.outside(rounds);
        let declared = declare(&start, "c");
        self.line(&format!(
            "{{ {declared}for (var base = 0u; base < {rounds}; base += {team}u) {{\n{code}}} }}"
        ));
    }
}
