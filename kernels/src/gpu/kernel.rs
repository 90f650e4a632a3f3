//! Kernels: what threads do with expressions, and the skeletons that arrange them.
//!
//! - [`Kernel::map`]: one thread an element of an index space.
//! - [`Kernel::rows`]: a team of threads a row; reductions over its members, each visible to what comes behind.
//! - [`Kernel::contract`]: a tile of threads a tile of a (batched) matrix product.
//! - [`Kernel::raw`]: WGSL by hand, for what does not fit (sorting, attention).

use crate::error::Fault;
use crate::gpu::contract::{Contract, Side};
use crate::gpu::store::{Buf, Put, Ref, Scan, Stage, Store, Tensor, Word};
use crate::gpu::tiling::{Extent, Tiling, ceil_div};
use crate::ir::{E, Mem, Node, Ty, Var, larger};

/// How threads are arranged.
#[derive(Debug)]
pub enum Skeleton {
    /// One thread an element.
    Map {
        /// Elements.
        count: E,
        /// The element's number.
        element: Var,
        /// What each does.
        stores: Vec<Store>,
    },
    /// A team a row.
    Rows {
        /// Rows.
        rows: E,
        /// Members of a row; it may depend on the row's number.
        len: E,
        /// The row's number.
        row: Var,
        /// Threads a row: 1, 32 or 256.
        team: u32,
        /// What each team does.
        stages: Vec<Stage>,
    },
    /// A tile a tile, see [`crate::gpu::print`].
    Contract(Contract),
    /// By hand: everything behind the declarations.
    Raw(String),
}

/// Workgroups of a dispatch, before they are spread over the grid.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Groups {
    /// So many, along x and then y.
    Linear(u64),
    /// As they are.
    Grid(u32, u32, u32),
}

/// A kernel in the making.
#[derive(Debug)]
pub struct Kernel {
    /// For people.
    pub label: &'static str,
    /// Its buffers, in binding order.
    pub bufs: Vec<Buf>,
    /// Its parameters.
    pub words: Vec<Word>,
    /// Conditions under which it reports a fault, for each element of a map.
    pub faults: Vec<E>,
    /// The kind of fault that they are.
    pub fault_kind: Option<Fault>,
    /// What it does.
    pub skeleton: Skeleton,
    /// Workgroups.
    pub groups: Groups,
    /// What it writes must be no other buffer of it: elements are computed in another order than one by one.
    pub apart: bool,
    /// The first element or row that it computes, where it runs in parts.
    pub first: Option<E>,
    vars: u32,
}

/// Threads of a workgroup, but for [`Kernel::raw`].
pub const THREADS: u32 = 256;

impl Kernel {
    /// A kernel that does nothing yet.
    pub fn new(label: &'static str) -> Kernel {
        Kernel {
            label,
            bufs: Vec::new(),
            words: Vec::new(),
            faults: Vec::new(),
            fault_kind: None,
            skeleton: Skeleton::Raw(String::new()),
            groups: Groups::Linear(0),
            apart: false,
            first: None,
            vars: 0,
        }
    }

    /// A variable of its own.
    pub fn fresh_var(&mut self) -> Var {
        self.vars += 1;
        Var(self.vars)
    }

    /// A variable of its own, as an expression.
    pub fn variable(&mut self, ty: Ty) -> (Var, E) {
        let var = self.fresh_var();
        (var, E::var(ty, var))
    }

    /// A parameter.
    pub fn word(&mut self, ty: Ty, word: Word) -> E {
        self.words.push(word);
        E::param(ty, self.words.len() as u32 - 1)
    }

    /// A size, or another number below 2^32 that metadata decide.
    pub fn size(&mut self, value: i64) -> E {
        self.word(Ty::U32, Word::Fixed(value as u32))
    }

    /// A float that metadata decide.
    pub fn constant(&mut self, value: f32) -> E {
        self.word(Ty::F32, Word::Fixed(value.to_bits()))
    }

    /// Both words of a fed value, or its only one.
    pub fn value(&mut self, ty: Ty, word: impl Fn(bool) -> Word) -> E {
        let first = self.word(ty, word(false));
        if ty.words() == 2 {
            self.words.push(word(true));
        }
        first
    }

    /// A window on a tensor. Windows on one tensor share its buffer.
    pub fn window(&mut self, tensor: Ref, mem: Mem, sizes: &[i64], strides: &[i64], written: bool) -> Tensor {
        let offset = match tensor {
            Ref::Input(_) => Some(Word::Offset(tensor, mem)),
            Ref::Fresh(_) | Ref::Temp(_) | Ref::Slot(_) | Ref::Faults => None,
        };
        self.window_from(offset, tensor, mem, (sizes, strides), written)
    }

    /// A window that begins at an offset, where that is not 0.
    pub fn window_from(
        &mut self,
        offset: Option<Word>,
        tensor: Ref,
        mem: Mem,
        (sizes, strides): (&[i64], &[i64]),
        written: bool,
    ) -> Tensor {
        let known = self.bufs.iter().position(|b| b.tensor == tensor && b.mem == mem);
        let buf = known.unwrap_or_else(|| {
            self.bufs.push(Buf { tensor, mem, written, atomic: false, wide: false, base: None });
            self.bufs.len() - 1
        });
        self.bufs[buf].written |= written;
        let offset = offset.map(|word| self.word(Ty::U32, word));
        let steps = sizes
            .iter()
            .zip(strides)
            .map(|(size, stride)| (*size != 1 && *stride > 1).then(|| self.size(*stride)))
            .collect();
        Tensor { buf: buf as u32, mem, sizes: sizes.into(), strides: strides.into(), offset, steps }
    }

    /// The element of a window at coordinates, from the buffer's start.
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

    /// The value at coordinates of the element with this number, in the window's own order.
    pub fn load_at(&self, t: &Tensor, coords: &[E], number: &E) -> E {
        if !t.is_contiguous() {
            return self.load(t, coords);
        }
        let at = t.offset.as_ref().map_or(number.clone(), |offset| offset + number);
        E::load(t.mem, t.buf, at, None)
    }

    /// The value at coordinates.
    pub fn load(&self, t: &Tensor, coords: &[E]) -> E {
        let at = self.address(t, coords);
        E::load(t.mem, t.buf, at, None)
    }

    /// The value at coordinates where `inside` is true, elsewhere `default`.
    pub fn load_if(&self, t: &Tensor, coords: &[E], inside: E, default: E) -> E {
        let at = self.address(t, coords);
        E::load(t.mem, t.buf, at, Some((inside, default)))
    }

    /// A store at coordinates.
    pub fn store(&self, t: &Tensor, coords: &[E], value: E) -> Store {
        self.put(t, coords, value, Put::Assign)
    }

    /// A store at coordinates, in some way.
    pub fn put(&self, t: &Tensor, coords: &[E], value: E, put: Put) -> Store {
        let at = self.address(t, coords);
        Store { buf: t.buf, at, value: value.cast(t.mem.ty()), put, guard: None, linear: false }
    }

    /// A loop in one thread: `body` gets the round and the accumulators, and gives their next values.
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

    /// Loops within loops in one thread, a round of each number in `counts`; `body` gets the rounds, outermost first.
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

    /// Coordinates in an index space of `sizes` of the element with this number.
    pub fn coords(&mut self, sizes: &[i64], number: &E) -> Vec<E> {
        let mut rest = number.clone();
        let mut coords = vec![E::u32(0); sizes.len()];
        // Dimensions of one element have one coordinate; the first other one needs no remainder.
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

    /// One thread an element of an index space: `body` gets the element's coordinates and its number, and gives what
    /// is stored.
    pub fn map(&mut self, sizes: &[i64], body: impl FnOnce(&mut Kernel, &[E], &E) -> Vec<Store>) {
        let total: i64 = sizes.iter().product();
        let count = self.size(total);
        let (element, number) = self.variable(Ty::U32);
        let coords = self.coords(sizes, &number);
        let stores = body(self, &coords, &number);
        let lanes = lanes(&self.bufs, &stores);
        self.groups = Groups::Linear((total as u64).div_ceil(u64::from(THREADS * lanes)));
        self.skeleton = Skeleton::Map { count, element, stores };
    }

    /// A store of a map's element into a tensor that is dense in the map's order.
    pub fn store_linear(&self, t: &Tensor, number: &E, value: E) -> Store {
        let at = match &t.offset {
            Some(offset) => offset + number,
            None => number.clone(),
        };
        Store { buf: t.buf, at, value: value.cast(t.mem.ty()), put: Put::Assign, guard: None, linear: true }
    }

    /// Rows of `len` members: `body` gets the row's number and describes the stages.
    pub fn rows(&mut self, rows: i64, len: i64, team: u32, body: impl FnOnce(&mut Rows<'_>, &E)) {
        self.rows_of(rows, |k, _| k.size(len), team, body);
    }

    /// Rows of which each has a length of its own.
    pub fn rows_of(
        &mut self,
        rows: i64,
        len: impl FnOnce(&mut Kernel, &E) -> E,
        team: u32,
        body: impl FnOnce(&mut Rows<'_>, &E),
    ) {
        let rows_e = self.size(rows);
        let (row, number) = self.variable(Ty::U32);
        let len_e = len(self, &number);
        let mut builder = Rows { k: self, stages: Vec::new() };
        body(&mut builder, &number);
        let stages = builder.stages;
        self.groups = Groups::Linear((rows as u64).div_ceil(u64::from(THREADS / team)));
        self.skeleton = Skeleton::Rows { rows: rows_e, len: len_e, row, team, stages };
    }

    /// WGSL by hand. `ld0(i)`, `st1(i, v)` reach the buffers, `w(2)` is replaced by the third parameter as `u32`.
    pub fn raw(&mut self, source: String, groups: Groups) {
        self.skeleton = Skeleton::Raw(source);
        self.groups = groups;
    }

    /// Makes it run in parts of its elements or rows, see [`crate::gpu::spans`].
    pub fn divide(&mut self) {
        if let Skeleton::Map { count, .. } | Skeleton::Rows { rows: count, .. } = &self.skeleton
            && let Node::Param(word) = count.0.node
        {
            self.words[word as usize] = Word::Count;
        }
        self.first = Some(self.word(Ty::U32, Word::First));
        for buf in &mut self.bufs {
            // The addresses in inputs have their offset already.
            if matches!(buf.tensor, Ref::Fresh(_) | Ref::Temp(_)) {
                buf.base = Some(self.words.len() as u32);
                self.words.push(Word::Offset(buf.tensor, buf.mem));
            }
        }
    }

    /// Reports a fault where an expression is true; the element's stores are left out. A kernel has faults of one kind.
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

/// Elements that one thread of a map computes: as many as share a word, where all stores are linear.
pub fn lanes(bufs: &[Buf], stores: &[Store]) -> u32 {
    if !stores.iter().all(|s| s.linear && s.put == Put::Assign && s.guard.is_none()) {
        return 1;
    }
    stores.iter().map(|s| 4 / bufs[s.buf as usize].mem.size().min(4)).max().unwrap_or(1)
}

impl Skeleton {
    /// What is stored, stage by stage. `None` where that is not known.
    pub fn stores(&mut self) -> Option<Vec<&mut Vec<Store>>> {
        Some(match self {
            Skeleton::Map { stores, .. } => vec![stores],
            Skeleton::Contract(contract) => vec![&mut contract.stores],
            Skeleton::Rows { stages, .. } => {
                let stores = stages.iter_mut().filter_map(|stage| match stage {
                    Stage::Reduce { .. } => None,
                    Stage::Scan(scan) => Some(&mut scan.stores),
                    Stage::Each(_, stores) | Stage::Once(stores) => Some(stores),
                });
                stores.collect()
            }
            Skeleton::Raw(_) => return None,
        })
    }
}

/// Describes what the team of a row does.
pub struct Rows<'k> {
    /// The kernel.
    pub k: &'k mut Kernel,
    stages: Vec<Stage>,
}

impl Rows<'_> {
    /// Accumulates over the row: `step` gets a member's number and the accumulators, `merge` two threads'. The results
    /// may be used in all that comes behind.
    pub fn reduce<const N: usize>(
        &mut self,
        init: [E; N],
        step: impl FnOnce(&mut Kernel, &E, [E; N]) -> [E; N],
        merge: impl FnOnce([E; N], [E; N]) -> [E; N],
    ) -> [E; N] {
        let (member, number) = self.k.variable(Ty::U32);
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

    /// The sum over the row of what `member` gives.
    pub fn sum(&mut self, ty: Ty, member: impl FnOnce(&mut Kernel, &E) -> E) -> E {
        let [sum] = self.reduce([E::lit(ty, 0.0)], |k, j, [a]| [a + member(k, j)], |[a], [b]| [a + b]);
        sum
    }

    /// The largest of what `member` gives, NaN where one is.
    pub fn max(&mut self, ty: Ty, member: impl FnOnce(&mut Kernel, &E) -> E) -> E {
        let [max] =
            self.reduce([lowest(ty)], |k, j, [a]| [larger(&a, &member(k, j))], |[a], [b]| [larger(&a, &b)]);
        max
    }

    /// Accumulates over the row in order: `step` and `merge` as for `reduce`, the merge's first argument being the
    /// earlier one; `body` gets a member's number and the accumulators behind it, and gives what is stored. No row is
    /// longer than `rounds`; accumulation begins with `start`.
    pub fn scan<const N: usize>(
        &mut self,
        rounds: E,
        init: [E; N],
        start: [E; N],
        step: impl FnOnce(&mut Kernel, &E, [E; N]) -> [E; N],
        merge: impl FnOnce([E; N], [E; N]) -> [E; N],
        body: impl FnOnce(&mut Kernel, &E, [E; N]) -> Vec<Store>,
    ) {
        let (member, number) = self.k.variable(Ty::U32);
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

    /// For each member what is stored. Where all stores are linear (members lie side by side), words are stored whole.
    pub fn each(&mut self, body: impl FnOnce(&mut Kernel, &E) -> Vec<Store>) {
        let (member, number) = self.k.variable(Ty::U32);
        let stores = body(self.k, &number);
        self.stages.push(Stage::Each(member, stores));
    }

    /// Once what is stored.
    pub fn once(&mut self, body: impl FnOnce(&mut Kernel) -> Vec<Store>) {
        let stores = body(self.k);
        self.stages.push(Stage::Once(stores));
    }
}

/// The smallest value of a type.
pub fn lowest(ty: Ty) -> E {
    match ty {
        Ty::Bool | Ty::U32 => E::int(ty, 0),
        Ty::I32 => E::int(ty, i64::from(i32::MIN)),
        Ty::I64 => E::int(ty, i64::MIN),
        Ty::F32 | Ty::F64 => E::lit(ty, f64::NEG_INFINITY),
    }
}

/// The largest value of a type.
pub fn highest(ty: Ty) -> E {
    match ty {
        Ty::Bool => E::int(ty, 1),
        Ty::U32 => E::int(ty, i64::from(u32::MAX)),
        Ty::I32 => E::int(ty, i64::from(i32::MAX)),
        Ty::I64 => E::int(ty, i64::MAX),
        Ty::F32 | Ty::F64 => E::lit(ty, f64::INFINITY),
    }
}

/// Threads that reduce a row of `len`: a fixed function of metadata. `together` says that neighbouring rows, not
/// neighbouring members, lie side by side in memory.
pub fn team(len: i64, together: bool) -> u32 {
    match len {
        ..=16 => 1,
        17..=4096 if together => 1,
        17..=512 => 32,
        _ => THREADS,
    }
}

impl Kernel {
    /// A contraction. `sides` gets batch, m, n and k and gives the operands; `finish` gets the batch (times the parts,
    /// and the part), m, n and the sum, and gives what is stored. A store that is linear lies behind its neighbour
    /// of the column before.
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
        for side in &sides {
            if let (true, Node::Load { buf, .. }) = (side.vector, &side.value.0.node) {
                self.bufs[*buf as usize].wide = true;
            }
        }
        let (sum, value) = self.variable(Ty::F32);
        let [batch, m, n, _] = coords;
        let stores = finish(self, &[batch, m, n], value)?;
        self.groups = Groups::Linear(total as u64);
        self.skeleton = Skeleton::Contract(Contract { extent, vars, sides, sum, stores, tile, parts, tiles });
        Some(())
    }
}
