//! Prints stores: single elements, whole words, atomic updates, and reports of faults.

use std::fmt::Write as _;

use crate::linear::VECTOR;
use crate::print::buffers::pack;
use crate::print::writer::Writer;
use crate::store::{Put, Ref, Store, Word};
use tandem_executor::ir::Mem;

impl Writer<'_> {
    pub(crate) fn stores(&mut self, stores: &[Store]) {
        match self.fault() {
            Some(report) => {
                let body = self.block(&[], |w| w.store_all(stores));
                self.line(&format!("{report} else {{\n{body}}}"));
            }
            None => self.store_all(stores),
        }
    }

    /// Returns the statement that reports a fault of an element, if the kernel has conditions for faults.
    pub(super) fn fault(&mut self) -> Option<String> {
        let all = self.kernel.faults.clone().into_iter().reduce(|a, b| a.or(b))?;
        let condition = self.emit(&all);
        let buf = self.kernel.bufs.iter().position(|b| b.tensor == Ref::Faults).unwrap_or(0);
        let tag = self.kernel.words.iter().position(|w| *w == Word::Tag).unwrap_or(0) as u32;
        let tag = self.parameter_word(tag);
        Some(format!("if ({condition}) {{ atomicMin(&b{buf}[0], bitcast<i32>({tag})); }}"))
    }

    fn store_all(&mut self, stores: &[Store]) {
        // All values are computed first, because a store may overwrite an element that another value reads.
        let parts: Vec<(String, String, Option<String>)> = stores
            .iter()
            .map(|s| {
                (self.address(s.buf, &s.at), self.emit(&s.value), s.guard.as_ref().map(|g| self.emit(g)))
            })
            .collect();
        for (store, (at, value, guard)) in stores.iter().zip(parts) {
            let text = self.store(store, &at, &value);
            match guard {
                Some(guard) => self.line(&format!("if ({guard}) {{ {text} }}")),
                None => self.line(&text),
            }
        }
    }

    fn store(&mut self, store: &Store, at: &str, value: &str) -> String {
        let b = store.buf;
        let buf = &self.kernel.bufs[b as usize];
        if store.put == Put::Assign {
            return format!("st{b}({at}, {value});");
        }
        match (buf.mem, store.put) {
            (Mem::I32, Put::Add) => format!("atomicAdd(&b{b}[{at}], {value});"),
            (Mem::I32, Put::Max) => format!("atomicMax(&b{b}[{at}], {value});"),
            (Mem::I32, Put::Min) => format!("atomicMin(&b{b}[{at}], {value});"),
            // The carry is added to the upper word by a second atomic operation: additions commute.
            (Mem::I64, Put::Add) => {
                let pair = self.to_pair(value);
                format!(
                    "{{ let p = {pair}; let old = atomicAdd(&b{b}[2u * {at}], p.x); \
                     atomicAdd(&b{b}[2u * {at} + 1u], p.y + select(0u, 1u, old + p.x < old)); }}"
                )
            }
            (Mem::I32, Put::Mul) => format!(
                "{{ var old = atomicLoad(&b{b}[{at}]); loop {{ let r = atomicCompareExchangeWeak(&b{b}[{at}], old, \
                 old * ({value})); if (r.exchanged) {{ break; }} old = r.old_value; }} }}"
            ),
            (Mem::F32, Put::Add | Put::Max | Put::Min) => {
                // This is a compare-and-swap loop, because WGSL has atomics on floats only as an extension.
                let next = match store.put {
                    Put::Add => format!("bitcast<f32>(old) + ({value})"),
                    Put::Max => format!("larger_f32(bitcast<f32>(old), {value})"),
                    _ => format!("smaller_f32(bitcast<f32>(old), {value})"),
                };
                format!(
                    "{{ var old = atomicLoad(&b{b}[{at}]); loop {{ let r = atomicCompareExchangeWeak(&b{b}[{at}], old, \
                     bitcast<u32>({next})); if (r.exchanged) {{ break; }} old = r.old_value; }} }}"
                )
            }
            _ => {
                self.lacks = true;
                String::new()
            }
        }
    }

    /// Stores adjacent values from `at` on, as whole vectors or words if `at` is at a boundary of them.
    pub(super) fn words(&self, store: &Store, lanes: u32, value: impl Fn(u32) -> String) -> String {
        let (b, mem) = (store.buf, self.kernel.bufs[store.buf as usize].mem);
        let single: String = (0..lanes).map(|p| format!("st{b}(at + {p}u, {}); ", value(p))).collect();
        if lanes == VECTOR && self.wide[b as usize] {
            let whole = self.vector(b, value);
            return format!("if (at % 4u == 0u) {{ b{b}[at / 4u] = {whole}; }} else {{ {single}}}");
        }
        let size = mem.size();
        if size >= 4 || self.has_halves(&self.kernel.bufs[b as usize]) {
            return single;
        }
        let per = 4 / size;
        let mut words = String::new();
        for word in 0..lanes / per {
            let part = |p: u32| format!("({} << {}u)", pack(mem, &value(word * per + p)), p * size * 8);
            let parts: Vec<String> = (0..per).map(part).collect();
            let _ = write!(words, "atomicStore(&b{b}[at / {per}u + {word}u], {}); ", parts.join(" | "));
        }
        format!("if (at % {per}u == 0u) {{ {words}}} else {{ {single}}}")
    }

    /// The vector of a wide buffer with these values.
    pub(super) fn vector(&self, buf: u32, value: impl Fn(u32) -> String) -> String {
        let parts: Vec<String> = (0..VECTOR).map(value).collect();
        let buf = &self.kernel.bufs[buf as usize];
        if !self.has_halves(buf) {
            return format!("vec4({})", parts.join(", "));
        }
        let bits: Vec<String> = parts.iter().map(|part| pack(buf.mem, part)).collect();
        format!("vec4<u16>(vec4<u32>({}))", bits.join(", "))
    }
}
