//! The structure of a kernel: all properties that its text depends on, without the cost of printing the text.
//!
//! A new shape needs the same kernels as earlier shapes, with other parameters. Their pipelines are found by structure,
//! so that only kernels of new structures are printed.

use rustc_hash::FxHashMap;

use crate::bundle::Place;
use crate::kernel::{Kernel, Skeleton};
use crate::store::{Buf, Ref, Scan, Stage, Store, Word};
use tandem_executor::ir::{E, Guard, Node, Typed, Var};

/// The structure of a kernel as numbers. Kernels of equal structure have equal texts.
pub fn structure(kernel: &Kernel) -> Box<[u32]> {
    let mut s = Structure::default();
    s.push(kernel.words.len() as u32);
    s.push(kernel.words.iter().position(|w| *w == Word::Tag).map_or(0, |at| at as u32 + 1));
    s.push(kernel.bufs.len() as u32);
    for Buf { tensor, mem, written, atomic, wide, base } in &kernel.bufs {
        let flags = [*written, *atomic, *wide, *tensor == Ref::Faults];
        let flags = flags.iter().fold(0, |bits, flag| bits << 1 | u32::from(*flag));
        s.push((*mem as u32) << 8 | flags);
        s.push(base.map_or(0, |base| base + 1));
    }
    s.expressions(&kernel.faults);
    s.expressions(kernel.first.as_slice());
    match &kernel.skeleton {
        Skeleton::Map { count, element, stores, lanes } => {
            s.push(1);
            s.expression(count);
            s.vars(&[*element]);
            s.push(*lanes);
            s.stores(stores);
        }
        Skeleton::Rows { rows, len, row, team, stages } => {
            s.push(2);
            s.expression(rows);
            s.expression(len);
            s.vars(&[*row]);
            s.words.extend([team.threads, team.held]);
            s.push(stages.len() as u32);
            stages.iter().for_each(|stage| s.stage(stage));
        }
        Skeleton::Contract(c) => {
            s.push(3);
            let t = c.tile;
            [t.m, t.n, t.k, t.thread_m, t.thread_n].into_iter().for_each(|size| s.push(size));
            s.vars(&c.vars);
            s.vars(&[c.sum]);
            for e in c.extent.iter().chain(&c.parts).chain(&c.tiles) {
                s.expression(e);
            }
            for side in &c.sides {
                s.expression(&side.value);
                s.push(u32::from(side.vector) << 8 | side.along as u32);
            }
            s.stores(&c.stores);
        }
        Skeleton::Squares(squares) => {
            s.push(6);
            s.vars(&squares.vars);
            for e in squares.extent.iter().chain(&squares.squares) {
                s.expression(e);
            }
            s.stores(&squares.stores);
        }
        Skeleton::Raw { source, factors } => {
            s.push(4);
            s.push(u32::from(factors.is_some()));
            s.text(source);
        }
        Skeleton::Bundle(b) => {
            s.push(5);
            s.expression(&b.count);
            s.vars(&[b.element]);
            s.stores(&b.stores);
            s.expressions(&b.loads);
            s.words.extend([b.lanes, b.bufs.len() as u32, b.own, b.step]);
            b.bufs.iter().for_each(|bufs| s.words.extend(bufs));
            s.words.extend(b.places.iter().map(|place| match place {
                Place::Shared(at) => at << 1,
                Place::Own(at) => at << 1 | 1,
            }));
        }
    }
    s.words.into()
}

#[derive(Default)]
struct Structure {
    words: Vec<u32>,
    /// Numbers of the expressions that have been visited.
    known: FxHashMap<*const Typed, u32>,
}

impl Structure {
    fn push(&mut self, word: u32) {
        self.words.push(word);
    }

    fn text(&mut self, text: &str) {
        self.push(text.len() as u32);
        let bytes = text.as_bytes().chunks(4);
        self.words.extend(bytes.map(|c| c.iter().fold(0, |word, byte| word << 8 | u32::from(*byte))));
    }

    fn vars(&mut self, vars: &[Var]) {
        self.push(vars.len() as u32);
        self.words.extend(vars.iter().map(|var| var.0));
    }

    fn expressions(&mut self, all: &[E]) {
        self.push(all.len() as u32);
        all.iter().for_each(|e| self.expression(e));
    }

    /// Appends an expression: its number if it has been visited, otherwise its operator and operands.
    fn expression(&mut self, e: &E) {
        let key = std::rc::Rc::as_ptr(&e.0);
        if let Some(number) = self.known.get(&key) {
            let number = *number;
            self.words.extend([0, number]);
            return;
        }
        let ty = (e.ty() as u32) << 16;
        match e.node() {
            Node::Lit(bits) => self.words.extend([ty | 1, *bits as u32, (*bits >> 32) as u32]),
            Node::Var(var) => self.words.extend([ty | 2, var.0]),
            Node::Param(word) => self.words.extend([ty | 3, *word]),
            Node::Load { buf, at, guard } => {
                self.words.extend([ty | 4 | u32::from(guard.is_some()) << 8, *buf]);
                self.expression(at);
                if let Some(Guard { condition, default }) = guard {
                    self.expression(condition);
                    self.expression(default);
                }
            }
            Node::Un(op, a) => {
                self.push(ty | 5 | (*op as u32) << 8);
                self.expression(a);
            }
            Node::Bin(op, a, b) => {
                self.push(ty | 6 | (*op as u32) << 8);
                self.expression(a);
                self.expression(b);
            }
            Node::Select(c, a, b) => {
                self.push(ty | 7);
                [c, a, b].into_iter().for_each(|e| self.expression(e));
            }
            Node::Cast(a) => {
                self.push(ty | 8);
                self.expression(a);
            }
            Node::Call(function, args) => {
                self.push(ty | 9);
                self.text(function);
                self.expressions(args);
            }
            Node::Fold { count, vars, init, body } => {
                self.push(ty | 10);
                self.vars(vars);
                self.expression(count);
                self.expressions(init);
                self.expressions(body);
            }
            Node::Item(fold, n) => {
                self.words.extend([ty | 11, *n as u32]);
                self.expression(fold);
            }
        }
        self.known.insert(key, self.known.len() as u32);
    }

    fn stores(&mut self, stores: &[Store]) {
        self.push(stores.len() as u32);
        for Store { buf, at, value, put, guard, linear } in stores {
            self.words.extend([*buf, (*put as u32) << 8 | u32::from(*linear)]);
            self.expression(at);
            self.expression(value);
            self.expressions(guard.as_slice());
        }
    }

    fn stage(&mut self, stage: &Stage) {
        match stage {
            Stage::Reduce { member, acc, other, init, step, merge } => {
                self.push(1);
                self.vars(&[*member]);
                self.vars(acc);
                self.vars(other);
                [init, step, merge].into_iter().for_each(|all| self.expressions(all));
            }
            Stage::Scan(Scan { rounds, member, acc, other, init, start, step, merge, stores }) => {
                self.push(2);
                self.expression(rounds);
                self.vars(&[*member]);
                self.vars(acc);
                self.vars(other);
                [init, start, step, merge].into_iter().for_each(|all| self.expressions(all));
                self.stores(stores);
            }
            Stage::Each(member, stores) => {
                self.push(3);
                self.vars(&[*member]);
                self.stores(stores);
            }
            Stage::Once(stores) => {
                self.push(4);
                self.stores(stores);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::print::{Target, wgsl};
    use tandem_executor::ir::{Mem, Ty};

    /// A kernel that adds 1.5 and multiplies by `number`, `times` times.
    fn kernel(n: i64, times: usize, number: f32, mem: Mem) -> Kernel {
        let mut k = Kernel::new("some");
        let x = k.window(Ref::Input(0), mem, &[n], &[1], false);
        let out = k.window(Ref::NewStorage(0), Mem::F32, &[n], &[1], true);
        let factor = k.constant(number);
        k.map(&[n], |k, coords, number| {
            let mut value = k.load_at(&x, coords, number).cast(Ty::F32);
            for _ in 0..times {
                value = (&value + 1.5) * &factor;
            }
            vec![k.store_linear(&out, number, value)]
        });
        k
    }

    #[test]
    fn equal_structures_are_those_of_equal_texts() {
        let all = [
            kernel(8, 1, 2.0, Mem::F32),
            kernel(9, 1, 3.0, Mem::F32),
            kernel(8, 2, 2.0, Mem::F32),
            kernel(8, 1, 2.0, Mem::I32),
            kernel(8, 1, 2.0, Mem::Bf16),
        ];
        for a in &all {
            for b in &all {
                let texts = [a, b].map(|k| wgsl(k, Target::default()));
                assert_eq!(structure(a) == structure(b), texts[0] == texts[1]);
            }
        }
        assert_eq!(structure(&all[0]), structure(&all[1]), "sizes and numbers are parameters");
    }
}
