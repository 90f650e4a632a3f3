//! Builder of kernels. A kernel is a skeleton, which assigns work to threads, filled with expressions.
//!
//! - [`Kernel::map`]: one thread for each element of an index space.
//! - [`Kernel::rows`]: a team of threads for each row. Stages run in order and can use the results of earlier
//!   reductions.
//! - [`Kernel::contract`]: a workgroup for each tile of a (batched) matrix product.
//! - [`Kernel::raw`]: hand-written WGSL, for kernels that need another structure (sorting, attention).

use crate::bundle::Bundle;
use crate::contract::{Contract, Side};
use crate::linear::{VECTOR, loads_of_stores};
use crate::squares::Squares;
use crate::store::{Buf, Put, Ref, Scan, Stage, Store, Tensor, Word};
use crate::tiling::{Extent, Tiling, ceil_div};
use tandem_executor::error::Fault;
use tandem_executor::ir::{E, Guard, Mem, Node, Ty, Var, larger};
use tandem_executor::shapes::View;

/// Assignment of work to threads.
#[derive(Clone, Debug)]
pub enum Skeleton {
    /// One thread for each element.
    Map {
        /// Number of elements.
        count: E,
        /// Index of the element.
        element: Var,
        /// Stores for one element.
        stores: Vec<Store>,
        /// Number of elements that a thread computes, one after the other in memory.
        lanes: u32,
    },
    /// One team of threads for each row.
    Rows {
        /// Number of rows.
        rows: E,
        /// Number of members of a row; may depend on `row`.
        len: E,
        /// Index of the row.
        row: Var,
        /// Threads that work on a row.
        team: Team,
        /// Stages that each team runs, in order.
        stages: Vec<Stage>,
    },
    /// One thread for each element of several tensors.
    Bundle(Bundle),
    /// One workgroup for each square of elements.
    Squares(Squares),
    /// One workgroup for each tile; see [`crate::print`].
    Contract(Contract),
    /// Hand-written WGSL without the declarations of buffers and parameters.
    Raw {
        source: String,
        /// Storage format of the factors of cooperative matrices, if the source uses them.
        factors: Option<Mem>,
    },
}

/// The threads that work on a row.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Team {
    /// Number of threads, a power of two of at most [`THREADS`].
    pub threads: u32,
    /// Number of vectors of [`VECTOR`] members that each thread may keep in registers from stage to stage; 0 if the row
    /// is too long, or if its length is not a multiple of [`VECTOR`].
    pub held: u32,
}

impl Team {
    fn of(threads: u32, len: Option<u32>) -> Team {
        let held = len.map_or(0, |len| held(i64::from(len), threads));
        Team { threads, held }
    }
}

/// Number of vectors of [`VECTOR`] members of a row of `len` that each of `threads` threads may keep in registers.
pub fn held(len: i64, threads: u32) -> u32 {
    let vector = i64::from(VECTOR);
    match len / vector {
        vectors if threads > 1 && len % vector == 0 && vectors <= i64::from(8 * threads) => {
            (vectors as u32).div_ceil(threads).next_power_of_two()
        }
        _ => 0,
    }
}

/// Number of workgroups of a dispatch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Groups {
    /// Total number, which is split over x and y if it exceeds the limit along x.
    Linear(u64),
    /// Numbers along x, y and z.
    Grid(u32, u32, u32),
}

/// A kernel that is being built.
#[derive(Clone, Debug)]
pub struct Kernel {
    /// Name for debugging and error messages.
    pub label: &'static str,
    /// Buffers, in binding order.
    pub bufs: Vec<Buf>,
    /// Parameters.
    pub words: Vec<Word>,
    /// Conditions under which an element reports a fault.
    pub faults: Vec<E>,
    /// Kind of all faults of the kernel.
    pub fault_kind: Option<Fault>,
    /// Work of the threads.
    pub skeleton: Skeleton,
    /// Number of workgroups.
    pub groups: Groups,
    /// Whether a buffer that the kernel writes must not also be bound as another of its buffers, because the kernel
    /// does not compute elements in order.
    pub apart: bool,
    /// First element or row to compute, for a kernel that runs in parts.
    pub first: Option<E>,
    vars: u32,
}

/// Threads per workgroup, except in [`Kernel::raw`].
pub const THREADS: u32 = 256;

impl Skeleton {
    /// The skeleton of a kernel that has none yet.
    pub fn empty() -> Skeleton {
        Skeleton::Raw { source: String::new(), factors: None }
    }
}

impl Kernel {
    /// An empty kernel.
    pub fn new(label: &'static str) -> Kernel {
        Kernel {
            label,
            bufs: Vec::new(),
            words: Vec::new(),
            faults: Vec::new(),
            fault_kind: None,
            skeleton: Skeleton::empty(),
            groups: Groups::Linear(0),
            apart: false,
            first: None,
            vars: 0,
        }
    }

    /// A new variable.
    pub fn fresh_var(&mut self) -> Var {
        self.vars += 1;
        Var(self.vars)
    }

    /// A new variable and the expression that refers to it.
    pub fn variable(&mut self, ty: Ty) -> (Var, E) {
        let var = self.fresh_var();
        (var, E::var(ty, var))
    }

    /// Adds a parameter.
    pub fn word(&mut self, ty: Ty, word: Word) -> E {
        self.words.push(word);
        E::param(ty, self.words.len() as u32 - 1)
    }

    /// The value of an expression, if it is a parameter that follows from metadata.
    pub fn fixed(&self, e: &E) -> Option<u32> {
        match e.node() {
            Node::Param(word) => match self.words[*word as usize] {
                Word::Fixed(value) => Some(value),
                _ => None,
            },
            _ => None,
        }
    }

    /// The number of elements of a map.
    pub fn elements(&self) -> Option<u32> {
        match &self.skeleton {
            Skeleton::Map { count, .. } => self.fixed(count),
            _ => None,
        }
    }

    /// Adds a parameter for a size or another number below 2^32 that follows from metadata.
    pub fn size(&mut self, value: i64) -> E {
        self.word(Ty::U32, Word::Fixed(value as u32))
    }

    /// Adds a parameter for a float that follows from metadata.
    pub fn constant(&mut self, value: f32) -> E {
        self.word(Ty::F32, Word::Fixed(value.to_bits()))
    }

    /// Adds a parameter for a fed value, of one or two words depending on the type. `word` gets true for the upper
    /// word.
    pub fn value(&mut self, ty: Ty, word: impl Fn(bool) -> Word) -> E {
        let first = self.word(ty, word(false));
        if ty.words() == 2 {
            self.words.push(word(true));
        }
        first
    }

    /// Adds a parameter for a number among the call's arguments.
    pub fn number(&mut self, arg: usize, ty: Ty) -> E {
        self.value(ty, |upper| Word::Number(arg as u32, 0, ty, upper))
    }

    /// Adds a window on a tensor. Windows on the same tensor share its buffer.
    pub fn window(&mut self, tensor: Ref, mem: Mem, sizes: &[i64], strides: &[i64], written: bool) -> Tensor {
        let offset = match tensor {
            Ref::Input(_) => Some(Word::Offset(tensor, mem)),
            Ref::NewStorage(_) | Ref::Temp(_) | Ref::Slot(_) | Ref::Faults => None,
        };
        self.window_from(offset, tensor, mem, View { sizes, strides }, written)
    }

    /// Adds a window that starts at `offset` elements, by default at 0.
    pub fn window_from(
        &mut self,
        offset: Option<Word>,
        tensor: Ref,
        mem: Mem,
        view: View<'_>,
        written: bool,
    ) -> Tensor {
        let View { sizes, strides } = view;
        let buf = self.buffer(&Buf { tensor, mem, written, atomic: false, wide: false, base: None });
        let offset = offset.map(|word| self.word(Ty::U32, word));
        let steps = sizes
            .iter()
            .zip(strides)
            .map(|(size, stride)| (*size != 1 && *stride > 1).then(|| self.size(*stride)))
            .collect();
        Tensor { buf, mem, sizes: sizes.into(), strides: strides.into(), offset, steps }
    }

    /// The index of the buffer for a tensor, which is added if the kernel does not have it.
    pub fn buffer(&mut self, buf: &Buf) -> u32 {
        let known = self.bufs.iter().position(|b| b.tensor == buf.tensor && b.mem == buf.mem);
        let at = known.unwrap_or_else(|| {
            self.bufs.push(*buf);
            self.bufs.len() - 1
        });
        self.bufs[at].written |= buf.written;
        at as u32
    }

    /// Index in the buffer of the element at these coordinates of a window.
    pub fn address(&self, t: &Tensor, coords: &[E]) -> E {
        debug_assert_eq!(t.sizes.len(), coords.len(), "{}", self.label);
        let mut at = t.offset.clone();
        for (d, coord) in coords.iter().enumerate() {
            let term = match (t.strides[d], &t.steps[d]) {
                _ if t.sizes[d] == 1 => continue,
                (0, _) => continue,
                (_, Some(step)) => coord * step,
                (_, None) => coord.clone(),
            };
            at = Some(match at {
                Some(at) => at + term,
                None => term,
            });
        }
        at.unwrap_or_else(|| E::u32(0))
    }

    /// Loads the element at these coordinates. `number` is the element's row-major index, by which contiguous windows
    /// are addressed directly.
    pub fn load_at(&self, t: &Tensor, coords: &[E], number: &E) -> E {
        if !t.is_contiguous() {
            return self.load(t, coords);
        }
        let at = t.offset.as_ref().map_or(number.clone(), |offset| offset + number);
        E::load(t.mem, t.buf, at, None)
    }

    /// Loads the element at these coordinates.
    pub fn load(&self, t: &Tensor, coords: &[E]) -> E {
        let at = self.address(t, coords);
        E::load(t.mem, t.buf, at, None)
    }

    /// Loads the element at these coordinates if `inside` is true; `default` otherwise.
    pub fn load_if(&self, t: &Tensor, coords: &[E], inside: E, default: E) -> E {
        let at = self.address(t, coords);
        E::load(t.mem, t.buf, at, Some(Guard { condition: inside, default }))
    }

    /// Stores `value` at these coordinates.
    pub fn store(&self, t: &Tensor, coords: &[E], value: E) -> Store {
        self.put(t, coords, value, Put::Assign)
    }

    /// Stores or accumulates `value` at these coordinates, depending on `put`.
    pub fn put(&self, t: &Tensor, coords: &[E], value: E, put: Put) -> Store {
        let at = self.address(t, coords);
        Store { buf: t.buf, at, value: value.cast(t.mem.ty()), put, guard: None, linear: false }
    }

    /// A loop within one thread. `body` receives the loop index and the accumulators and returns their next values.
    pub fn fold<const N: usize>(
        &mut self,
        count: E,
        init: [E; N],
        body: impl FnOnce(&mut Kernel, &E, [E; N]) -> [E; N],
    ) -> [E; N] {
        let (round, round_e) = self.variable(Ty::U32);
        let acc = init.clone().map(|e| self.variable(e.ty()));
        let next = body(self, &round_e, acc.clone().map(|(_, e)| e));
        let vars = std::iter::once(round).chain(acc.map(|(v, _)| v)).collect();
        let items = E::fold_of(count, vars, init.to_vec(), next.to_vec());
        let mut items = items.into_iter();
        std::array::from_fn(|_| items.next().unwrap_or_else(|| E::u32(0)))
    }

    /// Nested loops within one thread, one for each count. `body` receives the loop indices, outermost first, and
    /// the accumulators, and returns their next values.
    pub fn nest<const N: usize>(
        &mut self,
        counts: &[E],
        init: [E; N],
        mut body: impl FnMut(&mut Kernel, &[E], [E; N]) -> [E; N],
    ) -> [E; N] {
        self.nest_within(counts, init, &mut Vec::new(), &mut body)
    }

    fn nest_within<const N: usize, F>(
        &mut self,
        counts: &[E],
        init: [E; N],
        rounds: &mut Vec<E>,
        body: &mut F,
    ) -> [E; N]
    where
        F: FnMut(&mut Kernel, &[E], [E; N]) -> [E; N],
    {
        let Some((count, inner)) = counts.split_first() else { return body(self, rounds, init) };
        self.fold(count.clone(), init, |k, round, acc| {
            rounds.push(round.clone());
            let next = k.nest_within(inner, acc, rounds, body);
            rounds.pop();
            next
        })
    }

    /// Coordinates of the element with row-major index `number` in an index space of `sizes`.
    pub fn coords(&mut self, sizes: &[i64], number: &E) -> Vec<E> {
        let mut rest = number.clone();
        let mut coords = vec![E::u32(0); sizes.len()];
        // Coordinates in dimensions of size 1 are 0. Of the other dimensions, the outermost needs no remainder.
        let first = sizes.iter().position(|s| *s != 1).unwrap_or(0);
        for d in (0..sizes.len()).rev() {
            if sizes[d] == 1 {
                continue;
            }
            if d == first {
                coords[d] = rest.clone();
                break;
            }
            let size = self.size(sizes[d]);
            coords[d] = &rest % &size;
            rest = rest / size;
        }
        coords
    }

    /// Uses one thread for each element of an index space. `body` receives the element's coordinates and its
    /// row-major index, and returns the stores.
    pub fn map(&mut self, sizes: &[i64], body: impl FnOnce(&mut Kernel, &[E], &E) -> Vec<Store>) {
        let total: i64 = sizes.iter().product();
        let count = self.size(total);
        let (element, number) = self.variable(Ty::U32);
        let coords = self.coords(sizes, &number);
        let stores = body(self, &coords, &number);
        let lanes = self.lanes(element, &stores);
        self.groups = Groups::Linear((total as u64).div_ceil(u64::from(THREADS * lanes)));
        self.skeleton = Skeleton::Map { count, element, stores, lanes };
    }

    /// Number of elements that a thread of a map computes: four if all elements are loaded and stored in the order of
    /// memory, otherwise as many as share a word.
    fn lanes(&self, element: Var, stores: &[Store]) -> u32 {
        match loads_of_stores(stores, element) {
            Some(_) => VECTOR,
            None => lanes(&self.bufs, stores),
        }
    }

    /// Stores a map's element into a tensor whose elements are contiguous in the order of the map.
    pub fn store_linear(&self, t: &Tensor, number: &E, value: E) -> Store {
        let at = match &t.offset {
            Some(offset) => offset + number,
            None => number.clone(),
        };
        Store { buf: t.buf, at, value: value.cast(t.mem.ty()), put: Put::Assign, guard: None, linear: true }
    }

    /// Uses a team of threads for each of `rows` rows of `len` members. `body` receives the row's index and adds
    /// the stages.
    pub fn rows(&mut self, rows: i64, len: i64, team: u32, body: impl FnOnce(&mut RowBuilder<'_>, &E)) {
        self.rows_of(rows, |k, _| k.size(len), team, body);
    }

    /// Like [`Kernel::rows`], for rows whose lengths differ; `len` receives the row's index.
    pub fn rows_of(
        &mut self,
        rows: i64,
        len: impl FnOnce(&mut Kernel, &E) -> E,
        team: u32,
        body: impl FnOnce(&mut RowBuilder<'_>, &E),
    ) {
        let rows_e = self.size(rows);
        let (row, number) = self.variable(Ty::U32);
        let len_e = len(self, &number);
        let member = self.variable(Ty::U32);
        let mut builder = RowBuilder { k: self, member, stages: Vec::new() };
        body(&mut builder, &number);
        let stages = builder.stages;
        self.groups = Groups::Linear((rows as u64).div_ceil(u64::from(THREADS / team)));
        let team = Team::of(team, self.fixed(&len_e));
        self.skeleton = Skeleton::Rows { rows: rows_e, len: len_e, row, team, stages };
    }

    /// Sets hand-written WGSL. `ld0(i)` loads from buffer 0, `st1(i, v)` stores to buffer 1, and `w(2)` is replaced
    /// by the third parameter as a `u32`.
    pub fn raw(&mut self, source: String, groups: Groups) {
        self.skeleton = Skeleton::Raw { source, factors: None };
        self.groups = groups;
    }

    /// Sets hand-written WGSL that uses cooperative matrices with factors in format `factors`. Wide buffers of this
    /// format that are only read have `lh0(i)`, which loads four factors.
    pub fn raw_matrices(&mut self, source: String, factors: Mem, groups: Groups) {
        self.skeleton = Skeleton::Raw { source, factors: Some(factors) };
        self.groups = groups;
    }

    /// Makes the kernel compute a part of its elements or rows in each run; see [`crate::spans`].
    pub fn divide(&mut self) {
        if let Skeleton::Map { count, .. }
        | Skeleton::Rows { rows: count, .. }
        | Skeleton::Squares(Squares { squares: [_, _, count], .. }) = &self.skeleton
        {
            if let Node::Param(word) = count.0.node {
                self.words[word as usize] = Word::Count;
            }
            self.first = Some(self.word(Ty::U32, Word::First));
        }
        for buf in &mut self.bufs {
            // Addresses in inputs already include an offset parameter.
            if matches!(buf.tensor, Ref::NewStorage(_) | Ref::Temp(_)) {
                buf.base = Some(self.words.len() as u32);
                self.words.push(Word::Offset(buf.tensor, buf.mem));
            }
        }
    }

    /// Makes an element report a fault of a kind where `when` is true. The element's stores are skipped, except where a
    /// thread of a map computes several elements.
    pub fn fault(&mut self, kind: Fault, when: E) {
        debug_assert!(self.fault_kind.is_none_or(|known| known == kind));
        self.fault_kind = Some(kind);
        if self.faults.is_empty() {
            let mem = Mem::I32;
            let (tensor, base) = (Ref::Faults, None);
            self.bufs.push(Buf { tensor, mem, written: true, atomic: true, wide: false, base });
            self.words.push(Word::Tag);
        }
        self.faults.push(when);
    }
}

/// Number of elements that share a 32-bit word in the buffer with the smallest elements, if all stores are linear;
/// otherwise 1.
pub fn lanes(bufs: &[Buf], stores: &[Store]) -> u32 {
    if !stores.iter().all(|s| s.linear && s.put == Put::Assign && s.guard.is_none()) {
        return 1;
    }
    stores.iter().map(|s| 4 / bufs[s.buf as usize].mem.size().min(4)).max().unwrap_or(1)
}

impl Skeleton {
    /// Lists of stores, one for each stage that stores. Returns `None` for hand-written WGSL.
    pub fn stores(&mut self) -> Option<Vec<&mut Vec<Store>>> {
        Some(match self {
            Skeleton::Map { stores, .. } => vec![stores],
            Skeleton::Contract(contract) => vec![&mut contract.stores],
            Skeleton::Squares(squares) => vec![&mut squares.stores],
            Skeleton::Rows { stages, .. } => {
                let stores = stages.iter_mut().filter_map(|stage| match stage {
                    Stage::Reduce { .. } => None,
                    Stage::Scan(scan) => Some(&mut scan.stores),
                    Stage::Each(_, stores) | Stage::Once(stores) => Some(stores),
                });
                stores.collect()
            }
            Skeleton::Bundle(_) | Skeleton::Raw { .. } => return None,
        })
    }
}

/// Builder of the stages that the team of a row runs.
pub struct RowBuilder<'k> {
    /// Kernel that the stages belong to.
    pub k: &'k mut Kernel,
    /// Index of a member, the same variable in all stages, so that equal loads are recognized.
    member: (Var, E),
    stages: Vec<Stage>,
}

impl RowBuilder<'_> {
    /// Reduces the members of the row. `step` receives a member's index and the accumulators and returns their next
    /// values; `merge` combines the accumulators of two threads. Later stages can use the results.
    pub fn reduce<const N: usize>(
        &mut self,
        init: [E; N],
        step: impl FnOnce(&mut Kernel, &E, [E; N]) -> [E; N],
        merge: impl FnOnce([E; N], [E; N]) -> [E; N],
    ) -> [E; N] {
        let (member, number) = self.member.clone();
        let acc = init.clone().map(|e| self.k.variable(e.ty()));
        let other = init.clone().map(|e| self.k.variable(e.ty()));
        let values = acc.clone().map(|(_, e)| e);
        let step = step(self.k, &number, values.clone());
        let merge = merge(values.clone(), other.clone().map(|(_, e)| e));
        self.stages.push(Stage::Reduce {
            member,
            acc: acc.map(|(v, _)| v).to_vec(),
            other: other.map(|(v, _)| v).to_vec(),
            init: init.to_vec(),
            step: step.to_vec(),
            merge: merge.to_vec(),
        });
        values
    }

    /// Sum over the row of the values that `member` returns.
    pub fn sum(&mut self, ty: Ty, member: impl FnOnce(&mut Kernel, &E) -> E) -> E {
        let [sum] = self.reduce([E::lit(ty, 0.0)], |k, j, [a]| [a + member(k, j)], |[a], [b]| [a + b]);
        sum
    }

    /// Maximum over the row of the values that `member` returns; NaN if one of these values is NaN.
    pub fn max(&mut self, ty: Ty, member: impl FnOnce(&mut Kernel, &E) -> E) -> E {
        let [max] =
            self.reduce([lowest(ty)], |k, j, [a]| [larger(&a, &member(k, j))], |[a], [b]| [larger(&a, &b)]);
        max
    }

    /// Scans the members of the row in order.
    ///
    /// - `step` and `merge` work as in [`RowBuilder::reduce`]. The first argument of `merge` covers the earlier
    ///   members.
    /// - `body` receives a member's index and the accumulators including that member, and returns the stores.
    /// - `start` are the accumulators before the first member, and `init` are neutral in `merge`.
    /// - `rounds` is an upper bound of the length of all rows.
    pub fn scan<const N: usize>(
        &mut self,
        rounds: E,
        init: [E; N],
        start: [E; N],
        step: impl FnOnce(&mut Kernel, &E, [E; N]) -> [E; N],
        merge: impl FnOnce([E; N], [E; N]) -> [E; N],
        body: impl FnOnce(&mut Kernel, &E, [E; N]) -> Vec<Store>,
    ) {
        let (member, number) = self.member.clone();
        let acc = init.clone().map(|e| self.k.variable(e.ty()));
        let other = init.clone().map(|e| self.k.variable(e.ty()));
        let values = acc.clone().map(|(_, e)| e);
        let step = step(self.k, &number, values.clone());
        let merge = merge(values.clone(), other.clone().map(|(_, e)| e));
        let stores = body(self.k, &number, values);
        self.stages.push(Stage::Scan(Scan {
            rounds,
            member,
            acc: acc.map(|(v, _)| v).to_vec(),
            other: other.map(|(v, _)| v).to_vec(),
            init: init.to_vec(),
            start: start.to_vec(),
            step: step.to_vec(),
            merge: merge.to_vec(),
            stores,
        }));
    }

    /// Stores the values of each member. If all stores are linear, elements that share a word are stored together.
    pub fn each(&mut self, body: impl FnOnce(&mut Kernel, &E) -> Vec<Store>) {
        let (member, number) = self.member.clone();
        let stores = body(self.k, &number);
        self.stages.push(Stage::Each(member, stores));
    }

    /// Stores once per row.
    pub fn once(&mut self, body: impl FnOnce(&mut Kernel) -> Vec<Store>) {
        let stores = body(self.k);
        self.stages.push(Stage::Once(stores));
    }
}

/// Smallest value of a type.
pub fn lowest(ty: Ty) -> E {
    match ty {
        Ty::Bool | Ty::U32 => E::int(ty, 0),
        Ty::I32 => E::int(ty, i64::from(i32::MIN)),
        Ty::I64 => E::int(ty, i64::MIN),
        Ty::F32 | Ty::F64 => E::lit(ty, f64::NEG_INFINITY),
    }
}

/// Largest value of a type.
pub fn highest(ty: Ty) -> E {
    match ty {
        Ty::Bool => E::int(ty, 1),
        Ty::U32 => E::int(ty, i64::from(u32::MAX)),
        Ty::I32 => E::int(ty, i64::from(i32::MAX)),
        Ty::I64 => E::int(ty, i64::MAX),
        Ty::F32 | Ty::F64 => E::lit(ty, f64::INFINITY),
    }
}

/// Number of threads that reduce a row of `len` members. Depends on metadata alone, so results are reproducible.
/// `together` is true if neighbouring rows, rather than neighbouring members, are adjacent in memory.
pub fn team(len: i64, together: bool) -> u32 {
    match len {
        ..=16 => 1,
        17..=4096 if together => 1,
        17..=512 => 32,
        _ => THREADS,
    }
}

impl Kernel {
    /// Computes a contraction.
    ///
    /// - `sides` receives batch, m, n and k and returns the operands.
    /// - `finish` receives the batch, m, n and the sum, and returns the stores. If `k` is split into parts, the batch
    ///   that it gets is `batch * parts + part`. If a store is linear, its target directly follows the target of the
    ///   previous column.
    pub fn contract(
        &mut self,
        e: Extent,
        tiling: Tiling,
        sides: impl FnOnce(&mut Kernel, &[E; 4]) -> Option<[Side; 2]>,
        finish: impl FnOnce(&mut Kernel, &[E; 3], E) -> Option<Vec<Store>>,
    ) -> Option<()> {
        let Tiling { tile, parts, share } = tiling;
        let extent = [e.m, e.n, e.k].map(|size| self.size(size));
        let tiles_m = ceil_div(e.m, i64::from(tile.m));
        let tiles_n = ceil_div(e.n, i64::from(tile.n));
        let total = tiles_m * tiles_n * e.batch * parts;
        let tiles = [tiles_m, tiles_n, total].map(|size| self.size(size));
        let parts = [parts, share].map(|size| self.size(size));
        let vars = [(); 4].map(|()| self.fresh_var());
        let coords = vars.map(|v| E::var(Ty::U32, v));
        let sides = sides(self, &coords)?;
        let (sum, value) = self.variable(Ty::F32);
        let [batch, m, n, _] = coords;
        let stores = finish(self, &[batch, m, n], value)?;
        self.groups = Groups::Linear(total as u64);
        self.skeleton = Skeleton::Contract(Contract { extent, vars, sides, sum, stores, tile, parts, tiles });
        Some(())
    }
}
