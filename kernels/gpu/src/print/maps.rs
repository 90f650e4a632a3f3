//! Prints kernels with one thread per element of an index space.

use std::fmt::Write as _;

use crate::kernel::THREADS;
use crate::linear::{VECTOR, loads_of_stores};
use crate::print::vectors::Vectors;
use crate::print::writer::{MAIN, Writer, name};
use crate::store::Store;
use tandem_executor::ir::{E, Var};

impl Writer<'_> {
    pub(super) fn map(&mut self, count: &E, element: Var, stores: &[Store], lanes: u32) -> String {
        let x = name(element);
        if lanes == 1 {
            let body = self.block(&[element], |w| w.stores(stores));
            let (count, first) = (self.outside(count), self.plus_first());
            return format!(
                "{MAIN}  let own = group(wg, grid) * {THREADS}u + lane;\n  if (own < {count}) {{\n    \
                 let {x} = own{first};\n{body}  }}\n}}\n"
            );
        }
        // Neighbouring elements share words or vectors, so a thread computes whole words or vectors. Elements at the
        // end of the index space are accessed one by one, as are all elements if a window does not begin at the
        // boundary of a word or vector.
        let loads = loads_of_stores(stores, element).filter(|_| lanes == VECTOR).unwrap_or_default();
        let vectors = self.vectors(&loads, element);
        let mut results = String::new();
        let mut assign = String::new();
        let types: Vec<&'static str> =
            stores.iter().map(|s| self.ty(self.kernel.bufs[s.buf as usize].mem.ty())).collect();
        let body = self.block(&[element], |w| {
            vectors.name(w, &loads, |n| format!("l{n}"));
            // An element with a fault is stored like its neighbours: results that depend on it are invalid in any
            // case.
            if let Some(report) = w.fault() {
                w.line(&report);
            }
            let values: Vec<String> = stores.iter().map(|s| w.emit(&s.value)).collect();
            w.line(&format!("return Each({});", values.join(", ")));
        });
        for (n, ty) in types.iter().enumerate() {
            let _ = write!(results, "v{n}: {ty}, ");
        }
        let mut single = String::new();
        for (n, store) in stores.iter().enumerate() {
            let b = store.buf;
            let at = self.block(&[element], |w| {
                let at = w.address(store.buf, &store.at);
                w.line(&format!("let at = {at};"));
            });
            let _ = writeln!(single, "    {{ {at}    st{b}(at, r.v{n}); }}");
            let words = self.words(store, lanes, |p| format!("r{p}.v{n}"));
            let _ = writeln!(assign, "    {{ {at}    {words} }}");
        }
        let (count, begin) = (self.outside(count), self.plus_first());
        let Vectors { parameters, whole, one, .. } = &vectors;
        let given = |p: Option<u32>| -> String {
            let part = |n: usize| p.map_or(format!(", w{n}"), |p| format!(", w{n}[{p}]"));
            (0..vectors.count).map(part).collect()
        };
        let calls: String =
            (0..lanes).map(|p| format!("    let r{p} = each({x} + {p}u{});\n", given(Some(p)))).collect();
        format!(
            "struct Each {{ {results}}}\nfn each({x}: u32{parameters}) -> Each {{\n{body}}}\n{MAIN}  \
             let own = (group(wg, grid) * {THREADS}u + lane) * {lanes}u;\n  \
             if (own + {lanes}u <= {count}) {{\n    let {x} = own{begin};\n{whole}{calls}{assign}  }} else {{\n    \
             for (var k = own; k < {count}; k++) {{\n    let {x} = k{begin};\n{one}    \
             let r = each({x}{});\n{single}    }}\n  }}\n}}\n",
            given(None),
        )
    }
}
