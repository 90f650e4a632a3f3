//! Prints kernels with one thread per element of an index space.

use std::fmt::Write as _;

use crate::gpu::kernel::{THREADS, lanes};
use crate::gpu::print::writer::{MAIN, Writer, name};
use crate::gpu::store::Store;
use crate::ir::{E, Var};

impl Writer<'_> {
    pub(super) fn map(&mut self, count: &E, element: Var, stores: &[Store]) -> String {
        let lanes = lanes(&self.kernel.bufs, stores);
        let x = name(element);
        if lanes == 1 {
            let body = self.block(&[element], |w| w.stores(stores));
            let (count, first) = (self.outside(count), self.plus_first());
            return format!(
                "{MAIN}  let own = group(wg, grid) * {THREADS}u + lane;\n  if (own < {count}) {{\n    \
                 let {x} = own{first};\n{body}  }}\n}}\n"
            );
        }
        // Neighbouring elements share words, so a thread computes whole words. It stores single elements at the end
        // of the index space, and if a window does not begin at a word boundary.
        let mut results = String::new();
        let mut assign = String::new();
        let types: Vec<&'static str> =
            stores.iter().map(|s| self.ty(self.kernel.bufs[s.buf as usize].mem.ty())).collect();
        let body = self.block(&[element], |w| {
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
            let _ = writeln!(single, "    {{ let {x} = first + k;\n{at}    st{b}(at, r.v{n}); }}");
            let words = self.words(store, lanes, |p| format!("r{p}.v{n}"));
            let _ = write!(assign, "    {{ let {x} = first;\n{at}    {words} }}\n");
        }
        let (count, begin) = (self.outside(count), self.plus_first());
        let calls: String = (0..lanes).map(|p| format!("    let r{p} = each(first + {p}u);\n")).collect();
        format!(
            "struct Each {{ {results}}}\nfn each({x}: u32) -> Each {{\n{body}}}\n{MAIN}  \
             let own = (group(wg, grid) * {THREADS}u + lane) * {lanes}u;\n  let first = own{begin};\n  \
             if (own + {lanes}u <= {count}) {{\n{calls}{assign}  }} else {{\n    \
             for (var k = 0u; own + k < {count}; k++) {{ let r = each(first + k);\n{single}    }}\n  }}\n}}\n"
        )
    }
}
