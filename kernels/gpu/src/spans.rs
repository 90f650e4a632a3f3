//! The bytes of its tensors that a part of a kernel accesses.
//!
//! **Why.** Adapters limit the size of a binding, and a tensor may be larger. **Strategy.** A kernel on such a
//! tensor runs in parts, each a range of its elements or rows with smaller bindings. Contractions are divided when they
//! are lowered, and such a kernel is one part. The bytes that a part accesses
//! are derived from the kernel's addresses and conditions by interval arithmetic, so operators do not have to
//! declare them. An address without known bounds, such as an index that is loaded and not compared with anything,
//! may access the whole tensor; if that is too large for a binding, the call takes the host path.

use std::collections::{HashMap, HashSet};
use std::rc::Rc;

use smallvec::SmallVec;

use crate::contract::Contract;
use crate::kernel::{Groups, Kernel, Skeleton, THREADS};
use crate::squares::Squares;
use crate::store::{Buf, Ref, Stage, Store, Word};
use tandem_executor::ir::{Bin, E, Node, Ty, Typed, Var};

/// Bytes of a tensor, relative to its first element.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ByteRange {
    /// First byte.
    pub begin: u64,
    /// End of the bytes, exclusive.
    pub end: u64,
}

/// A range of a kernel's elements or rows that one dispatch computes.
#[derive(Clone, Debug)]
pub struct Part {
    /// First element or row.
    pub first: u32,
    /// Number of elements or rows.
    pub count: u32,
    /// Number of workgroups.
    pub groups: Groups,
    /// Bytes of each tensor that the part accesses.
    pub spans: SmallVec<[ByteRange; 8]>,
}

/// Maximum number of parts of a kernel.
const MAX_PARTS: u64 = 256;

/// Splits a kernel into as few parts as possible such that no part accesses more than `limit` bytes of a tensor.
/// Returns `None` if the kernel cannot be split in this way.
///
/// `bytes` holds the sizes of the tensors. `section` is a buffer and the part of its tensor that the whole kernel
/// accesses.
pub fn parts(
    kernel: &Kernel,
    bytes: &[u64],
    limit: u64,
    section: Option<(usize, ByteRange)>,
) -> Option<Vec<Part>> {
    let (units, a_group, step) = match &kernel.skeleton {
        Skeleton::Map { count, lanes, .. } => {
            let a_group = THREADS * lanes;
            (kernel.fixed(count)?, a_group, u64::from(a_group))
        }
        Skeleton::Rows { rows, team, .. } => (kernel.fixed(rows)?, THREADS / team.threads, 1),
        Skeleton::Squares(squares) => {
            let [down, across, total] = squares.squares.each_ref().map(|e| kernel.fixed(e));
            (total?, 1, u64::from(down?) * u64::from(across?))
        }
        Skeleton::Contract(_) => (1, 1, 1),
        Skeleton::Bundle(_) | Skeleton::Raw { .. } => return None,
    };
    // A tensor that is bound twice would need one window that covers the accesses of both bindings.
    let bufs = &kernel.bufs;
    if bufs.iter().enumerate().any(|(i, buf)| bufs[..i].iter().any(|b| b.tensor == buf.tensor)) {
        return None;
    }
    let divided = bytes.iter().enumerate().filter(|(buf, _)| section.is_none_or(|(other, _)| other != *buf));
    let least = divided.map(|(_, bytes)| bytes.div_ceil(limit)).max().unwrap_or(1).clamp(1, u64::from(units));
    (least..=MAX_PARTS.min(u64::from(units))).find_map(|n| {
        let each = u64::from(units).div_ceil(n).next_multiple_of(step) as usize;
        let part = |first: u64| {
            let count = (u64::from(units) - first).min(each as u64) as u32;
            let mut spans = Reach::of(kernel, first as u32, count).spans(kernel, bytes);
            if let Some((buf, section)) = section {
                spans[buf] = section;
            }
            let fits = spans.iter().all(|s| s.end - s.begin <= limit);
            let groups = match kernel.skeleton {
                Skeleton::Contract(_) => kernel.groups,
                _ => Groups::Linear(u64::from(count.div_ceil(a_group))),
            };
            fits.then_some(Part { first: first as u32, count, groups, spans })
        };
        (0..u64::from(units)).step_by(each).map(part).collect()
    })
}

/// The bytes of each tensor that the first element or row of a kernel accesses.
pub fn reached(kernel: &Kernel, bytes: &[u64]) -> SmallVec<[ByteRange; 8]> {
    Reach::of(kernel, 0, 1).spans(kernel, bytes)
}

/// Interval of integers, both ends inclusive.
type Range = (i64, i64);

/// All values of a type.
fn all(ty: Ty) -> Range {
    match ty {
        Ty::U32 => (0, i64::from(u32::MAX)),
        Ty::I32 => (i64::from(i32::MIN), i64::from(i32::MAX)),
        _ => (i64::MIN, i64::MAX),
    }
}

struct Reach<'k> {
    kernel: &'k Kernel,
    vars: HashMap<Var, Range>,
    /// Intervals that follow from the condition of the current access.
    implied: HashMap<*const Typed, Range>,
    /// Intervals that [`Reach::wide`] has found.
    ranges: HashMap<*const Typed, Option<Range>>,
    visited: HashSet<*const Typed>,
    /// Elements of each buffer that are accessed: an empty interval at first, and `None` if there are no known bounds.
    reached: Vec<Option<Range>>,
}

impl<'k> Reach<'k> {
    /// Analyzes `count` elements or rows from `first` on.
    fn of(kernel: &'k Kernel, first: u32, count: u32) -> Reach<'k> {
        let mut reach = Reach {
            kernel,
            vars: HashMap::new(),
            implied: HashMap::new(),
            ranges: HashMap::new(),
            visited: HashSet::new(),
            reached: vec![Some((i64::MAX, i64::MIN)); kernel.bufs.len()],
        };
        let own = (i64::from(first), i64::from(first) + i64::from(count) - 1);
        match &kernel.skeleton {
            Skeleton::Map { element, stores, .. } => {
                reach.vars.insert(*element, own);
                reach.stores(stores);
            }
            Skeleton::Rows { len, row, stages, .. } => {
                reach.vars.insert(*row, own);
                reach.visit(len);
                let members = (0, (reach.range(len).1 - 1).max(0));
                stages.iter().for_each(|stage| reach.stage(stage, members));
            }
            Skeleton::Contract(contract) => reach.contract(contract),
            Skeleton::Squares(squares) => reach.squares(squares, own),
            Skeleton::Bundle(_) | Skeleton::Raw { .. } => reach.reached.fill(None),
        }
        kernel.faults.iter().for_each(|e| reach.visit(e));
        reach
    }

    /// Analyzes a contraction as a whole, because its callers divide the result over several kernels.
    fn contract(&mut self, contract: &Contract) {
        let number = |e: &E| self.kernel.fixed(e).map(i64::from);
        let numbers = [contract.extent.each_ref().map(number), contract.tiles.each_ref().map(number)];
        let [[Some(m), Some(n), Some(k)], [Some(down), Some(across), Some(total)]] = numbers else {
            return self.reached.fill(None);
        };
        let products = total / (down * across).max(1);
        let parts = number(&contract.parts[0]).unwrap_or(1).max(1);
        for (var, count) in contract.vars.iter().zip([products / parts, m, n, k]) {
            self.vars.insert(*var, (0, (count - 1).max(0)));
        }
        contract.sides.iter().for_each(|side| self.visit(&side.value));
        // In the stores, the batch counts the parts of all products.
        self.vars.insert(contract.vars[0], (0, (products - 1).max(0)));
        self.ranges.clear();
        self.stores(&contract.stores);
    }

    /// Analyzes the planes of some squares.
    fn squares(&mut self, of: &Squares, (first, last): Range) {
        let number = |e: &E| self.kernel.fixed(e).map(i64::from);
        let numbers = [of.extent.each_ref().map(number), [number(&of.squares[0]), number(&of.squares[1])]];
        let [[Some(rows), Some(columns)], [Some(down), Some(across)]] = numbers else {
            return self.reached.fill(None);
        };
        let plane = (down * across).max(1);
        let ranges = [(first / plane, last / plane), (0, rows - 1), (0, columns - 1)];
        self.vars.extend(of.vars.into_iter().zip(ranges));
        self.stores(&of.stores);
    }

    fn spans(&self, kernel: &Kernel, bytes: &[u64]) -> SmallVec<[ByteRange; 8]> {
        let span = |((reached, buf), bytes): ((&Option<Range>, &Buf), &u64)| {
            let size = u64::from(buf.mem.size());
            match *reached {
                None => ByteRange { begin: 0, end: *bytes },
                Some((first, last)) if first > last => ByteRange { begin: 0, end: size.min(*bytes) },
                // Addresses below 0 wrap. If the wrapped addresses are beyond the end of the tensor, the kernel does
                // not access them.
                Some((first, _)) if (all(Ty::U32).1 + first) < (bytes / size) as i64 => {
                    ByteRange { begin: 0, end: *bytes }
                }
                Some((first, last)) => {
                    let end = ((last + 1).max(0) as u64 * size).min(*bytes);
                    ByteRange { begin: (first.max(0) as u64 * size).min(end), end }
                }
            }
        };
        self.reached.iter().zip(&kernel.bufs).zip(bytes).map(span).collect()
    }

    fn stage(&mut self, stage: &Stage, members: Range) {
        match stage {
            Stage::Reduce { member, init, step, merge, .. } => {
                self.vars.insert(*member, members);
                init.iter().chain(step).chain(merge).for_each(|e| self.visit(e));
            }
            Stage::Scan(scan) => {
                self.vars.insert(scan.member, members);
                let all = scan.init.iter().chain(&scan.start).chain(&scan.step).chain(&scan.merge);
                all.for_each(|e| self.visit(e));
                self.stores(&scan.stores);
            }
            Stage::Each(member, stores) => {
                self.vars.insert(*member, members);
                self.stores(stores);
            }
            Stage::Once(stores) => self.stores(stores),
        }
    }

    fn stores(&mut self, stores: &[Store]) {
        for store in stores {
            [&store.at, &store.value].into_iter().chain(&store.guard).for_each(|e| self.visit(e));
            self.note(store.buf, &store.at, store.guard.as_ref());
        }
    }

    /// Records the loads of an expression.
    fn visit(&mut self, e: &E) {
        if !self.visited.insert(Rc::as_ptr(&e.0)) {
            return;
        }
        match &e.0.node {
            Node::Lit(_) | Node::Var(_) | Node::Param(_) => {}
            Node::Load { buf, at, guard } => {
                self.visit(at);
                guard.iter().flat_map(|g| [&g.condition, &g.default]).for_each(|e| self.visit(e));
                self.note(*buf, at, guard.as_ref().map(|guard| &guard.condition));
            }
            Node::Un(_, a) | Node::Cast(a) | Node::Item(a, _) => self.visit(a),
            Node::Bin(_, a, b) => [a, b].into_iter().for_each(|e| self.visit(e)),
            Node::Select(a, b, c) => [a, b, c].into_iter().for_each(|e| self.visit(e)),
            Node::Call(_, args) => args.iter().for_each(|e| self.visit(e)),
            Node::Fold { count, vars, init, body } => {
                self.visit(count);
                init.iter().for_each(|e| self.visit(e));
                let rounds = (0, (self.range(count).1 - 1).max(0));
                self.vars.insert(vars[0], rounds);
                body.iter().for_each(|e| self.visit(e));
            }
        }
    }

    /// Records an access to a buffer at `at`, which happens only if the condition is true.
    fn note(&mut self, buf: u32, at: &E, condition: Option<&E>) {
        let Some(condition) = condition else { return self.note_at(buf, at) };
        let mut implied = HashMap::new();
        self.assume(condition, &mut implied);
        if implied.values().all(|(first, last)| first <= last) {
            self.implied = implied;
            let known = std::mem::take(&mut self.ranges);
            self.note_at(buf, at);
            self.ranges = known;
            self.implied.clear();
        }
    }

    /// Adds to `implied` the intervals of the operands of a condition's comparisons, given that the condition is true.
    fn assume(&mut self, condition: &E, implied: &mut HashMap<*const Typed, Range>) {
        let Node::Bin(op, a, b) = &condition.0.node else { return };
        let less = match op {
            Bin::Lt => 1,
            Bin::Le => 0,
            Bin::And => return [a, b].into_iter().for_each(|e| self.assume(e, implied)),
            _ => return,
        };
        let (of_a, of_b) = (self.range(a), self.range(b));
        let mut narrow = |e: &E, all: Range, to: Range| {
            let known = implied.entry(Rc::as_ptr(&e.0)).or_insert(all);
            *known = (known.0.max(to.0), known.1.min(to.1));
        };
        narrow(a, of_a, (i64::MIN, of_b.1.saturating_sub(less)));
        narrow(b, of_b, (of_a.0.saturating_add(less), i64::MAX));
    }

    fn note_at(&mut self, buf: u32, at: &E) {
        let Buf { tensor, mem, .. } = self.kernel.bufs[buf as usize];
        let range = match tensor {
            Ref::Input(_) => self.relative(at, Word::Offset(tensor, mem)),
            _ => self.wide(at),
        };
        // Kernels only access elements of the tensor, and addresses below 0 wrap to addresses far beyond its end.
        let range =
            range.map(|(first, last)| (first.max(0), last)).filter(|(_, last)| *last < all(Ty::U32).1);
        let reached = &mut self.reached[buf as usize];
        *reached = match (*reached, range) {
            (Some(known), Some(more)) => Some((known.0.min(more.0), known.1.max(more.1))),
            _ => None,
        };
    }

    /// Interval of an address without the window's offset parameter. Returns `None` if the address is not a sum
    /// with that parameter as a term.
    fn relative(&mut self, at: &E, offset: Word) -> Option<Range> {
        match &at.0.node {
            Node::Param(word) if self.kernel.words[*word as usize] == offset => Some((0, 0)),
            Node::Bin(Bin::Add, a, b) => {
                let (base, rest) = match self.relative(a, offset) {
                    Some(base) => (base, b),
                    None => (self.relative(b, offset)?, a),
                };
                let rest = self.wide(rest)?;
                Some((base.0 + rest.0, base.1 + rest.1))
            }
            _ => None,
        }
    }

    /// Interval of an integer expression. It comprises all values of the type if there are no known bounds, or if the
    /// expression may overflow.
    fn range(&mut self, e: &E) -> Range {
        let whole = all(e.ty());
        let fits = |range: &Range| whole.0 <= range.0 && range.1 <= whole.1;
        self.wide(e).filter(fits).unwrap_or(whole)
    }

    /// Interval of an integer expression as if integers had any number of bits; `None` if there are no known bounds. A
    /// sum, difference or product that wraps equals a number in the interval modulo the number of values of the type.
    fn wide(&mut self, e: &E) -> Option<Range> {
        let key = Rc::as_ptr(&e.0);
        if let Some(implied) = self.implied.get(&key) {
            return Some(*implied);
        }
        if let Some(known) = self.ranges.get(&key) {
            return *known;
        }
        let range = match e.ty() {
            Ty::U32 | Ty::I32 | Ty::I64 => self.compute(e),
            _ => None,
        };
        self.ranges.insert(key, range);
        range
    }

    fn compute(&mut self, e: &E) -> Option<Range> {
        Some(match &e.0.node {
            Node::Lit(bits) => (*bits as i64, *bits as i64),
            Node::Var(var) => *self.vars.get(var)?,
            Node::Param(word) => match (self.kernel.words[*word as usize], e.ty()) {
                (Word::Fixed(value), Ty::U32) => (i64::from(value), i64::from(value)),
                (Word::Fixed(value), Ty::I32) => (i64::from(value as i32), i64::from(value as i32)),
                _ => return None,
            },
            Node::Select(_, a, b) => {
                let (a, b) = (self.range(a), self.range(b));
                (a.0.min(b.0), a.1.max(b.1))
            }
            Node::Cast(a) if matches!(a.ty(), Ty::U32 | Ty::I32 | Ty::I64) => {
                let (range, whole) = (self.range(a), all(e.ty()));
                (whole.0 <= range.0 && range.1 <= whole.1).then_some(range)?
            }
            Node::Bin(op @ (Bin::Add | Bin::Sub | Bin::Mul), a, b) => {
                let (a, b) = (self.wide(a)?, self.wide(b)?);
                match op {
                    Bin::Add => (a.0.checked_add(b.0)?, a.1.checked_add(b.1)?),
                    Bin::Sub => (a.0.checked_sub(b.1)?, a.1.checked_sub(b.0)?),
                    _ => {
                        let ends = [(a.0, b.0), (a.0, b.1), (a.1, b.0), (a.1, b.1)];
                        let ends = ends.map(|(a, b)| a.checked_mul(b));
                        let [Some(w), Some(x), Some(y), Some(z)] = ends else { return None };
                        (w.min(x).min(y).min(z), w.max(x).max(y).max(z))
                    }
                }
            }
            Node::Bin(op, a, b) => {
                let (a, b) = (self.range(a), self.range(b));
                let natural = a.0 >= 0 && b.0 >= 0;
                match op {
                    Bin::Div if natural && b.0 > 0 => (a.0 / b.1, a.1 / b.0),
                    Bin::Rem if natural && b.0 == b.1 && b.0 > 0 && a.0 / b.0 == a.1 / b.0 => {
                        (a.0 % b.0, a.1 % b.0)
                    }
                    Bin::Rem if natural && b.0 > 0 => (0, a.1.min(b.1 - 1)),
                    Bin::Min => (a.0.min(b.0), a.1.min(b.1)),
                    Bin::Max => (a.0.max(b.0), a.1.max(b.1)),
                    _ => return None,
                }
            }
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Tensor;
    use tandem_executor::ir::Mem;

    const LIMIT: u64 = 1 << 20;

    /// Windows on float tensors, the last of which is written.
    fn windows(k: &mut Kernel, sizes: &[i64], strides: &[&[i64]]) -> Vec<Tensor> {
        let last = strides.len() - 1;
        let window = |(i, strides): (usize, &&[i64])| {
            let tensor = if i == last { Ref::NewStorage(0) } else { Ref::Input(i as u32) };
            k.window(tensor, Mem::F32, sizes, strides, i == last)
        };
        strides.iter().enumerate().map(window).collect()
    }

    fn sum_of(sizes: &[i64], strides: &[&[i64]]) -> Kernel {
        let mut k = Kernel::new("sum");
        let t = windows(&mut k, sizes, strides);
        k.map(sizes, |k, c, _| {
            let values = t[..t.len() - 1].iter().map(|t| k.load(t, c)).reduce(|a, b| a + b);
            vec![k.store(&t[t.len() - 1], c, values.unwrap_or_else(|| E::lit(Ty::F32, 0.0)))]
        });
        k
    }

    /// Whether each part starts at the end of the previous one and all parts together cover all units.
    fn covers(parts: &[Part], units: u32) -> bool {
        let mut next = 0;
        parts.iter().all(|p| std::mem::replace(&mut next, p.first + p.count) == p.first) && next == units
    }

    #[test]
    fn elements_in_order_reach_as_much_of_each_tensor() {
        let n = 1_000_001;
        let k = sum_of(&[n], &[&[1], &[0], &[1]]);
        let bytes = [4 * n as u64, 4, 4 * n as u64];
        let parts = parts(&k, &bytes, LIMIT, None).expect("parts");
        assert!(parts.len() == 4 && covers(&parts, n as u32));
        for part in &parts {
            let own =
                ByteRange { begin: u64::from(part.first) * 4, end: u64::from(part.first + part.count) * 4 };
            assert_eq!(part.spans[..], [own, ByteRange { begin: 0, end: 4 }, own]);
        }
    }

    #[test]
    fn a_broadcast_row_is_reached_by_all_parts() {
        let (rows, columns) = (1000, 1000);
        let k = sum_of(&[rows, columns], &[&[columns, 1], &[0, 1], &[columns, 1]]);
        let bytes = [4_000_000, 4000, 4_000_000];
        let parts = parts(&k, &bytes, LIMIT, None).expect("parts");
        assert!(covers(&parts, 1_000_000));
        assert!(parts.iter().all(|p| p.spans[1] == ByteRange { begin: 0, end: 4000 }));
        // A part may begin within a row, but the bytes accessed are those of whole rows.
        for part in &parts {
            assert!(part.spans[0].begin <= u64::from(part.first) * 4);
            assert!(part.spans[0].end >= u64::from(part.first + part.count) * 4);
        }
    }

    #[test]
    fn what_is_transposed_has_no_parts() {
        let k = sum_of(&[1000, 1000], &[&[1, 1000], &[1000, 1]]);
        assert!(parts(&k, &[4_000_000, 4_000_000], LIMIT, None).is_none());
        let k = sum_of(&[1000, 1000], &[&[1, 1000], &[1000, 1]]);
        assert!(parts(&k, &[4_000_000, 4_000_000], 4_000_000, None).is_some_and(|p| p.len() == 1));
    }

    #[test]
    fn rows_reach_their_members() {
        let (rows, len) = (300, 5000);
        let mut k = Kernel::new("rows");
        let t = windows(&mut k, &[rows, len], &[&[len, 1], &[1, 0]]);
        k.rows(rows, len, 32, |r, row| {
            let sum = r.sum(Ty::F32, |k, j| k.load(&t[0], &[row.clone(), j.clone()]));
            r.once(|k| vec![k.store(&t[1], &[row.clone(), E::u32(0)], sum)]);
        });
        let parts = parts(&k, &[(rows * len * 4) as u64, rows as u64 * 4], LIMIT, None).expect("parts");
        assert!(covers(&parts, rows as u32));
        for part in &parts {
            let row = |row: u32| u64::from(row) * len as u64 * 4;
            let own = ByteRange { begin: row(part.first), end: row(part.first + part.count) };
            assert_eq!(part.spans[0], own);
        }
    }

    #[test]
    fn conditions_narrow_what_is_reached() {
        let (rows, len) = (300, 5000);
        let mut k = Kernel::new("pick");
        let table = k.window(Ref::Input(0), Mem::F32, &[rows, len], &[len, 1], false);
        let index = k.window(Ref::Input(1), Mem::I64, &[rows], &[1], false);
        let out = k.window(Ref::NewStorage(0), Mem::F32, &[rows], &[1], true);
        k.map(&[rows], |k, c, _| {
            let at = k.load(&index, c);
            let inside = at.ge(0.0).and(at.lt(k.size(len).cast(Ty::I64)));
            let value = k.load_if(&table, &[c[0].clone(), at.cast(Ty::U32)], inside, E::lit(Ty::F32, 0.0));
            vec![k.store(&out, c, value)]
        });
        // The parts of a map are multiples of a workgroup, so there are two.
        let found = parts(&k, &[6_000_000, 2400, 1200], 5_200_000, None).expect("parts");
        assert_eq!(found[0].spans[0], ByteRange { begin: 0, end: 256 * 20_000 });
        assert_eq!(found[1].spans[0], ByteRange { begin: 256 * 20_000, end: 300 * 20_000 });
    }

    #[test]
    fn what_is_looked_up_is_reached_whole() {
        let mut k = Kernel::new("look up");
        let table = k.window(Ref::Input(0), Mem::F32, &[1000], &[1], false);
        let index = k.window(Ref::Input(1), Mem::I32, &[1 << 20], &[1], false);
        let out = k.window(Ref::NewStorage(0), Mem::F32, &[1 << 20], &[1], true);
        k.map(&[1 << 20], |k, c, _| {
            let at = k.load(&index, c).cast(Ty::U32);
            vec![k.store(&out, c, k.load(&table, &[at]))]
        });
        let found = parts(&k, &[4000, 4 << 20, 4 << 20], LIMIT, None).expect("parts");
        assert!(found.iter().all(|p| p.spans[0] == ByteRange { begin: 0, end: 4000 }));
        assert!(parts(&k, &[4 << 20, 4 << 20, 4 << 20], LIMIT, None).is_none());
    }
}
