//! Prints bundles: maps of one structure on different tensors.

use std::fmt::Write as _;

use crate::bundle::Bundle;
use crate::kernel::THREADS;
use crate::linear::{VECTOR, buffer};
use crate::print::expressions::word_at;
use crate::print::writer::{MAIN, Writer, name};
use crate::store::Store;
use tandem_executor::ir::Node;

impl Writer<'_> {
    pub(super) fn bundle(&mut self, b: &Bundle) -> String {
        let (x, lanes) = (name(b.element), b.lanes);
        let each = self.element(b);
        let addresses = self.block(&[b.element], |w| {
            for (n, load) in b.loads.iter().enumerate() {
                if let Node::Load { at, .. } = load.node() {
                    let at = w.emit(at);
                    w.line(&format!("let a{n} = {at};"));
                }
            }
            for (n, store) in b.stores.iter().enumerate() {
                let at = w.emit(&store.at);
                w.line(&format!("let s{n} = {at};"));
            }
        });
        let whole = if lanes == VECTOR { self.whole(b, &addresses) } else { String::new() };
        let (loads, stores) = (self.loads(b, false), self.single(b));
        let given: String = (0..b.loads.len()).map(|n| format!(", l{n}")).collect();
        let members = b.bufs.len() as u32;
        let member: String = (0..members - 1).map(|n| format!(" + u32(g >= {})", word_at("", n))).collect();
        let count = self.outside(&b.count);
        format!(
            "var<private> own_words: u32;\n{each}{MAIN}  let g = group(wg, grid);\n  \
             let member = 0u{member};\n  own_words = {}u + member * {}u;\n  \
             let own = ((g - {}) * {THREADS}u + lane) * {lanes}u;\n{whole}  \
             for (var k = own; k < min(own + {lanes}u, {count}); k++) {{\n    let {x} = k;\n{addresses}{loads}    \
             let r = each({x}{given});\n{stores}  }}\n}}\n",
            b.own / 4,
            b.step / 4,
            word_at("own_words + ", 0),
        )
    }

    /// The function that computes an element from the values of the loads.
    fn element(&mut self, b: &Bundle) -> String {
        let (mut parameters, mut results) = (String::new(), String::new());
        for (n, load) in b.loads.iter().enumerate() {
            let _ = write!(parameters, ", l{n}: {}", self.ty(load.ty()));
        }
        for (n, store) in b.stores.iter().enumerate() {
            let _ = write!(results, "v{n}: {}, ", self.ty(store.value.ty()));
        }
        let body = self.block(&[b.element], |w| {
            for (n, load) in b.loads.iter().enumerate() {
                w.known(load, format!("l{n}"));
            }
            let values: Vec<String> = b.stores.iter().map(|s| w.emit(&s.value)).collect();
            w.line(&format!("return Each({});", values.join(", ")));
        });
        let x = name(b.element);
        format!("struct Each {{ {results}}}\nfn each({x}: u32{parameters}) -> Each {{\n{body}}}\n")
    }

    /// Computes whole vectors, if they are at the boundaries of vectors in memory.
    fn whole(&mut self, b: &Bundle, addresses: &str) -> String {
        let x = name(b.element);
        let count = self.outside(&b.count);
        let loads =
            b.loads.iter().enumerate().filter(|(_, load)| b.differs(load)).map(|(n, _)| format!("a{n}"));
        let all: Vec<String> = loads.chain((0..b.stores.len()).map(|n| format!("s{n}"))).collect();
        let part = |p: u32| {
            let of = |(n, load)| if b.differs(load) { format!(", l{n}[{p}]") } else { format!(", l{n}") };
            let given: String = b.loads.iter().enumerate().map(of).collect();
            format!("    let r{p} = each({x} + {p}u{given});\n")
        };
        let parts: String = (0..VECTOR).map(part).collect();
        let loads = self.loads(b, true);
        let stores = self.of_members(b, |w, bufs| {
            let store = |(n, store): (usize, &Store)| {
                let to = bufs[store.buf as usize];
                format!("b{to}[s{n} >> 2u] = {}; ", w.vector(to, |p| format!("r{p}.v{n}")))
            };
            b.stores.iter().enumerate().map(store).collect()
        });
        format!(
            "  if (own + {VECTOR}u <= {count}) {{\n    let {x} = own;\n{addresses}    \
             if ((({}) & 3u) == 0u) {{\n{loads}{parts}{stores}    return;\n    }}\n  }}\n",
            all.join(" | ")
        )
    }

    /// Loads of an element, or of vectors of elements.
    fn loads(&mut self, b: &Bundle, vectors: bool) -> String {
        let mut text = String::new();
        let load = |n: usize, to: u32| match vectors && b.differs(&b.loads[n]) {
            true => format!("lv_whole{to}(a{n})"),
            false => format!("ld{to}(a{n})"),
        };
        let mut own = Vec::new();
        for (n, e) in b.loads.iter().enumerate() {
            let Some(buf) = buffer(e) else { continue };
            let ty = self.ty(e.ty());
            match b.shared(buf) {
                Some(to) => {
                    let _ = writeln!(text, "    let l{n} = {};", load(n, to));
                }
                None if vectors && b.differs(e) => {
                    let _ = writeln!(text, "    var l{n}: vec4<{ty}>;");
                    own.push((n, buf));
                }
                None => {
                    let _ = writeln!(text, "    var l{n}: {ty};");
                    own.push((n, buf));
                }
            }
        }
        if own.is_empty() {
            return text;
        }
        text + &self.of_members(b, |_, bufs| {
            own.iter().map(|(n, buf)| format!("l{n} = {}; ", load(*n, bufs[*buf as usize]))).collect()
        })
    }

    /// Stores of the results of an element.
    fn single(&mut self, b: &Bundle) -> String {
        self.of_members(b, |_, bufs| {
            let store =
                |(n, store): (usize, &Store)| format!("st{}(s{n}, r.v{n}); ", bufs[store.buf as usize]);
            b.stores.iter().enumerate().map(store).collect()
        })
    }

    /// A branch for each member, on the workgroup's member.
    fn of_members(&self, b: &Bundle, body: impl Fn(&Self, &[u32]) -> String) -> String {
        let mut text = "    switch member {\n".to_string();
        for (n, bufs) in b.bufs.iter().enumerate() {
            let case = if n + 1 < b.bufs.len() { format!("case {n}u") } else { "default".into() };
            let _ = writeln!(text, "      {case}: {{ {}}}", body(self, bufs));
        }
        text + "    }\n"
    }
}
