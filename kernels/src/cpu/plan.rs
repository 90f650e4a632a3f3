//! Plans: how a run that comes again and again is carried out.
//!
//! **Why.** A training step sends the same runs each time. What depends on their structure alone is found out once:
//! which ops are dead, which are carried out together, which results nobody will read, where feeds are.
//! **Strategy.** Runs that are not alike as a whole are taken segment by segment. A run's structure is its ops and variants, which of its storages are one, the windows' offsets and what
//! the program has dropped ([`Structure`]). When it comes for the second time, a plan is made. Neighbouring point-wise
//! ops become a group if each window that one of them writes is for the others either the same window or other memory;
//! results that die within their group are never stored.
//! **Bits.** A group computes what its ops compute one by one.

use std::hash::{Hash, Hasher};
use std::ops::Range;
use std::sync::Arc;

use rustc_hash::{FxHashMap, FxHashSet, FxHasher};
use smallvec::SmallVec;
use tandem_tracegraph::call::{Arg, Call, Place};
use tandem_tracegraph::ids::{NodeId, StorageId};
use tandem_tracegraph::node::{ArgSpec, InputSpec, NodeKey, Number};

use super::computation::Computation;
use super::express::{Job, Operand, Owner, Param, Window, jobs};
use super::group::Builder;
use super::native::{Natives, Scalar, of_arg};
use super::own::Kernel;
use crate::executor::{BlockRun, HostKernels, Segment};
use crate::feeds::{Cursor, numbers_of};
use crate::ir::{Mem, Ty};
use crate::liveness::Liveness;
use crate::program::{Program, Span, with_op};
use crate::shapes::Dims;

/// Structures that are kept.
const MOST: usize = 1 << 10;
/// Ops of a group at most.
const GROUP_OPS: usize = 48;

/// What a plan depends on.
#[derive(Clone, PartialEq, Eq, Hash, Default, Debug)]
pub struct Structure {
    segments: Vec<(u32, u32, u32)>,
    variants: Vec<u32>,
    /// For each storage of the run's stream, where it is there for the first time.
    first: Vec<u32>,
    offsets: Vec<i64>,
    /// Storages that the program dropped, by their first place in the stream.
    released: Vec<u32>,
}

/// The plans of an executor.
#[derive(Default)]
pub struct Plans {
    known: FxHashMap<u64, Known>,
    /// Hashes of structures that came once.
    once: FxHashSet<u64>,
    whole: Chance,
    /// By storage: the run that it was in last, and its first place there.
    places: Vec<(u32, u32)>,
    epoch: u32,
    now: Structure,
    /// Dropped storages that the run does not use.
    unused: Vec<StorageId>,
}

struct Known {
    structure: Structure,
    plan: Arc<Plan>,
}

/// What is carried out, in order.
#[derive(Debug)]
pub struct Plan {
    /// The ops of the run, with where their feeds begin; dead ones are not there.
    pub ops: Vec<(NodeId, u32, Cursor)>,
    /// What happens.
    pub actions: Vec<Action>,
}

/// Something that happens.
#[derive(Debug)]
pub enum Action {
    /// One of the plan's ops.
    Op(u32),
    /// Some of the plan's ops together.
    Group(Box<Fused>),
    /// The storage at this place of the stream is not used any more.
    Release(u32),
}

/// Ops that are carried out together.
#[derive(Debug)]
pub struct Fused {
    /// Which.
    pub ops: Range<u32>,
    /// What they compute.
    pub computation: Computation<Slot, Feed>,
    /// Storages that they make, by their place in the stream, and their bytes.
    pub fresh: Vec<(u32, u64)>,
    /// Storages that must be there, by their place.
    pub needed: Vec<u32>,
}

/// Where a window begins.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Slot {
    /// In the storage at a place of the stream, at so many bytes.
    Storage(u32, i64),
    /// In a fed host tensor.
    Host(u32),
}

/// Where a parameter comes from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Feed {
    /// A fed number.
    Number(u32, Number, Ty),
    /// A fed host tensor without dimensions.
    Host(u32, tandem_tracegraph::tensor_meta::Dtype, Ty),
    /// The bits of an `i64` or an `f64`.
    Fixed(u64),
}

impl Plans {
    /// Forgets all.
    pub fn clear(&mut self) {
        self.known.clear();
        self.once.clear();
        self.whole = Chance::default();
    }

    /// The plan of a part of a run, once it has come before. Dropped storages that it does not use are in
    /// [`Plans::unused`].
    pub fn find(
        &mut self,
        span: &Span<'_>,
        program: &Program,
        natives: &mut Natives,
        host: &'static dyn HostKernels,
    ) -> Option<Arc<Plan>> {
        self.look(span);
        let mut hasher = FxHasher::default();
        self.now.hash(&mut hasher);
        let hash = hasher.finish();
        if let Some(known) = self.known.get(&hash) {
            return (known.structure == self.now).then(|| known.plan.clone());
        }
        if self.once.insert(hash) {
            if self.once.len() > MOST {
                self.once.clear();
            }
            return None;
        }
        if self.known.len() >= MOST {
            self.known.clear();
        }
        let plan = Arc::new(Planner::new(span, &self.now, program, natives, host).make());
        if tracing::enabled!(target: "plan", tracing::Level::TRACE) {
            tracing::trace!(target: "plan", "{}", plan.listing(program, host));
        }
        self.known.insert(hash, Known { structure: self.now.clone(), plan: plan.clone() });
        Some(plan)
    }

    /// The plan of a whole run; not looked for each time where runs are not alike.
    pub fn find_whole(
        &mut self,
        run: &BlockRun,
        program: &Program,
        natives: &mut Natives,
        host: &'static dyn HostKernels,
    ) -> Option<Arc<Plan>> {
        if run.segments.len() < 2 || !self.whole.is_worth() {
            return None;
        }
        let found = self.find(&Span::whole(run), program, natives, host);
        self.whole.note(found.is_some());
        found
    }

    /// See [`Plans::find`].
    pub fn unused(&self) -> &[StorageId] {
        &self.unused
    }

    /// A run's segments one by one, each with the dropped storages that none behind it uses.
    pub fn parts(&mut self, run: &BlockRun, program: &Program) -> Parts {
        let mut parts = Parts::default();
        let (mut cursor, mut ops) = (Cursor::default(), 0);
        self.epoch += 1;
        let epoch = self.epoch;
        let all = program.ops(&Span::whole(run));
        for (number, segment) in run.segments.iter().enumerate() {
            let from = cursor.storages;
            for (_, _, step, variant) in &all[ops..ops + (segment.to - segment.from) as usize] {
                cursor.pass(step, variant);
            }
            ops += (segment.to - segment.from) as usize;
            // The last segment that uses each storage.
            for id in &run.storages[from..cursor.storages] {
                *self.place(*id) = (epoch, number as u32);
            }
            parts.ends.push((cursor, ops, 0));
        }
        let segment = |id: &StorageId| match *self.place(*id) {
            (seen, segment) if seen == epoch => (segment, *id),
            _ => (0, *id),
        };
        let mut released: Vec<(u32, StorageId)> = run.released.iter().map(segment).collect();
        released.sort_by_key(|(segment, _)| *segment);
        for (number, (_, _, end)) in parts.ends.iter_mut().enumerate() {
            *end = released.partition_point(|(segment, _)| *segment as usize <= number);
        }
        parts.released = released.into_iter().map(|(_, id)| id).collect();
        parts
    }

    fn place(&mut self, id: StorageId) -> &mut (u32, u32) {
        if self.places.len() <= id.index() {
            self.places.resize(id.index() + 1, (0, 0));
        }
        &mut self.places[id.index()]
    }

    /// Finds a part's structure.
    fn look(&mut self, span: &Span<'_>) {
        self.epoch += 1;
        let epoch = self.epoch;
        let mut now = std::mem::take(&mut self.now);
        now.segments.clear();
        now.segments.extend(span.segments.iter().map(|Segment { block, from, to }| (block.0, *from, *to)));
        now.variants.clear();
        now.variants.extend_from_slice(span.variants);
        now.offsets.clear();
        now.offsets.extend_from_slice(span.offsets);
        now.first.clear();
        for (place, id) in span.storages.iter().enumerate() {
            let known = self.place(*id);
            if known.0 != epoch {
                *known = (epoch, place as u32);
            }
            now.first.push(known.1);
        }
        now.released.clear();
        self.unused.clear();
        for id in span.released {
            match *self.place(*id) {
                (seen, place) if seen == epoch => now.released.push(place),
                _ => self.unused.push(*id),
            }
        }
        now.released.sort_unstable();
        self.now = now;
    }
}

/// Where the segments of a run end: in its streams, its ops, and the storages that the program dropped.
#[derive(Default)]
pub struct Parts {
    ends: SmallVec<[(Cursor, usize, usize); 16]>,
    released: Vec<StorageId>,
}

impl Parts {
    /// The parts.
    pub fn spans<'p>(&'p self, run: &'p BlockRun) -> impl Iterator<Item = Span<'p>> {
        (0..self.ends.len()).map(move |number| {
            let begin = number.checked_sub(1).map_or((Cursor::default(), 0, 0), |before| self.ends[before]);
            let ((base, first, gone), (end, last, goes)) = (begin, self.ends[number]);
            Span {
                run,
                base,
                segments: &run.segments[number..=number],
                variants: &run.variants[first..last],
                storages: &run.storages[base.storages..end.storages],
                offsets: &run.offsets[base.offsets..end.offsets],
                released: &self.released[gone..goes],
            }
        })
    }
}

/// How often whole runs had a plan of late.
#[derive(Default)]
struct Chance {
    tries: u32,
    hits: u32,
    skipped: u32,
}

impl Chance {
    /// Tries after which the shares are looked at.
    const MANY: u32 = 32;
    /// Runs between two tries where it is not worth it.
    const SELDOM: u32 = 16;

    fn is_worth(&mut self) -> bool {
        let worth = self.tries < Chance::MANY || self.hits * 4 >= self.tries;
        self.skipped = if worth { 0 } else { (self.skipped + 1) % Chance::SELDOM };
        self.skipped == 0
    }

    fn note(&mut self, hit: bool) {
        if self.tries >= 4 * Chance::MANY {
            (self.tries, self.hits) = (self.tries / 2, self.hits / 2);
        }
        self.tries += 1;
        self.hits += u32::from(hit);
    }
}

impl Plan {
    /// What happens, a line each.
    fn listing(&self, program: &Program, host: &dyn HostKernels) -> String {
        use std::fmt::Write;
        let name = |number: u32| {
            let (node, variant, _) = &self.ops[number as usize];
            program.op(*node, *variant).map(|(step, _)| host.op_name(step.key.op)).unwrap_or_default()
        };
        let mut text = String::new();
        for action in &self.actions {
            let _ = match action {
                Action::Op(number) => writeln!(text, "{}", name(*number)),
                Action::Group(fused) => {
                    let names: Vec<String> = fused.ops.clone().map(name).collect();
                    writeln!(text, "{} {}", fused.computation, names.join(", "))
                }
                Action::Release(_) => Ok(()),
            };
        }
        text
    }
}

/// The accesses of a group to a storage.
#[derive(Clone)]
struct Access {
    lane: usize,
    offset: i64,
    mem: Mem,
    sizes: Dims,
    strides: Dims,
    written: bool,
}

struct Planner<'p> {
    span: &'p Span<'p>,
    structure: &'p Structure,
    program: &'p Program,
    natives: &'p mut Natives,
    host: &'static dyn HostKernels,
    plan: Plan,
    /// The group that is being made: its builder, ops, accesses by storage, releases that wait for its end.
    builder: Option<Builder<Slot, Feed>>,
    members: Range<u32>,
    lanes: Vec<Dims>,
    accesses: FxHashMap<Slot0, Vec<Access>>,
    fresh: Vec<(u32, u64)>,
    waiting: Vec<u32>,
    /// An op of the group has no expression: its ops are carried out one by one.
    broken: bool,
}

/// A storage or a fed host tensor.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Slot0 {
    Storage(u32),
    Host(u32),
}

/// An op's place in the streams.
struct At<'a> {
    key: &'a NodeKey,
    cursor: Cursor,
    inputs: u32,
}

impl<'p> Planner<'p> {
    fn new(
        span: &'p Span<'p>,
        structure: &'p Structure,
        program: &'p Program,
        natives: &'p mut Natives,
        host: &'static dyn HostKernels,
    ) -> Planner<'p> {
        Planner {
            span,
            structure,
            program,
            natives,
            host,
            plan: Plan { ops: Vec::new(), actions: Vec::new() },
            builder: None,
            members: 0..0,
            lanes: Vec::new(),
            accesses: FxHashMap::default(),
            fresh: Vec::new(),
            waiting: Vec::new(),
            broken: false,
        }
    }

    fn make(mut self) -> Plan {
        let (span, program) = (self.span, self.program);
        let ops = program.ops(span);
        let mut liveness = Liveness::default();
        liveness.look(span, ops.iter().map(|(_, _, step, variant)| (*step, *variant)));
        let mut cursor = span.base;
        for (i, op) in ops.iter().copied().enumerate() {
            self.release(&mut liveness, i);
            let (at, dead) = (cursor.since(&span.base), liveness.is_dead(i));
            with_op(&mut cursor, op, span.run, dead, |op| {
                if dead {
                    return;
                }
                let number = self.plan.ops.len() as u32;
                self.plan.ops.push((op.node, op.number, at));
                let inputs = op.step.key.inputs.iter().filter(|i| **i == InputSpec::Storage).count() as u32;
                let at = At { key: &op.step.key, cursor: at, inputs };
                let id = (op.node, op.number);
                let base = self.natives.base(op.call.op, self.host);
                let base = base.filter(|_| self.natives.is_native(id, op.call, op.variant, self.host));
                if let Some(kernel) = base.as_ref().and_then(|b| b.own()?(op.call, &op.variant.outputs)) {
                    self.alone(number, kernel, op.call, &at, &op.variant.outputs.fresh);
                    return;
                }
                let jobs = base.map(|base| jobs(&base, op.call, &op.variant.outputs));
                // The contents of a fed host tensor may become a storage's without a copy.
                let fed = op.step.key.inputs.contains(&InputSpec::Host)
                    && self.natives.is_copy(op.call.op, self.host)
                    && matches!(op.call.inputs.get(1).map(|i| i.place), Some(Place::Buffer(_)));
                let joined = jobs
                    .flatten()
                    .filter(|_| !fed)
                    .is_some_and(|jobs| self.join(number, op.call, &at, &jobs, &op.variant.outputs.fresh));
                if !joined {
                    self.close();
                    self.plan.actions.push(Action::Op(number));
                }
            });
        }
        self.release(&mut liveness, ops.len());
        self.close();
        self.plan
    }

    /// Storages that no op from the `i`-th on uses go, behind the open group.
    fn release(&mut self, liveness: &mut Liveness, i: usize) {
        while let Some(id) = liveness.ended_before(i) {
            let place = self.span.storages.iter().position(|s| *s == id);
            let Some(place) = place else { continue };
            if self.builder.is_some() {
                self.waiting.push(place as u32);
            } else {
                self.plan.actions.push(Action::Release(place as u32));
            }
        }
    }

    /// Adds an op that has a kernel of its own.
    fn alone(&mut self, number: u32, kernel: Kernel, call: &Call<'_>, at: &At<'_>, fresh: &[u64]) {
        self.close();
        let structure = self.structure;
        let computation = Computation::of(kernel, |w| slot(w, at, structure), |p| feed(p, call, at));
        let first = at.cursor.storages as u32 + at.inputs;
        let fresh: Vec<(u32, u64)> = (first..).zip(fresh.iter().copied()).collect();
        let made: Vec<u32> = fresh.iter().map(|(place, _)| *place).collect();
        let needed = needed(&computation, &made);
        let ops = number..number + 1;
        self.plan.actions.push(Action::Group(Box::new(Fused { ops, computation, fresh, needed })));
    }

    /// Adds an op to the open group, or to a new one. False where it has to be carried out by itself.
    fn join(&mut self, number: u32, call: &Call<'_>, at: &At<'_>, jobs: &[Job], fresh: &[u64]) -> bool {
        if jobs.iter().any(|job| job.out.sizes.contains(&0)) {
            return false;
        }
        let alike = self.builder.is_some()
            && self.members.len() < GROUP_OPS
            && jobs.len() == self.lanes.len()
            && jobs.iter().zip(&self.lanes).all(|(job, sizes)| job.out.sizes == *sizes);
        if !alike || !self.access(at, jobs) {
            self.close();
            self.lanes = jobs.iter().map(|job| job.out.sizes.clone()).collect();
            if !self.access(at, jobs) {
                self.accesses.clear();
                return false;
            }
            self.builder = Some(Builder::default());
            self.members = number..number;
        }
        let Some(builder) = &mut self.builder else { return false };
        let structure = self.structure;
        let added = builder.add(call, jobs, |w| slot(w, at, structure), |p| feed(p, call, at));
        self.members.end = number + 1;
        self.broken |= added.is_none();
        let first = at.cursor.storages as u32 + at.inputs;
        self.fresh.extend(fresh.iter().zip(first..).map(|(nbytes, place)| (place, *nbytes)));
        true
    }

    /// Notes what an op touches. False, and nothing noted of the op that matters, where it does not go with the group.
    fn access(&mut self, at: &At<'_>, jobs: &[Job]) -> bool {
        for (lane, job) in jobs.iter().enumerate() {
            let read = job.ins.iter().filter_map(|operand| match operand {
                Operand::Window(window) => Some((window, false)),
                _ => None,
            });
            for (window, written) in read.chain([(&job.out, true)]) {
                let (storage, offset) = match slot(window, at, self.structure) {
                    Slot::Storage(place, bytes) => (Slot0::Storage(place), bytes),
                    Slot::Host(number) => (Slot0::Host(number), 0),
                };
                let all = self.accesses.entry(storage).or_default();
                let fits = all.iter().all(|a| {
                    let same = a.lane == lane
                        && a.offset == offset
                        && a.mem == window.mem
                        && a.sizes == window.sizes
                        && a.strides == window.strides;
                    same || !(a.written || written)
                });
                if !fits {
                    return false;
                }
                let Window { mem, sizes, strides, .. } = window;
                let (mem, sizes, strides) = (*mem, sizes.clone(), strides.clone());
                all.push(Access { lane, offset, mem, sizes, strides, written });
            }
        }
        true
    }

    /// Ends the open group.
    fn close(&mut self) {
        self.accesses.clear();
        self.lanes.clear();
        let fresh = std::mem::take(&mut self.fresh);
        let waiting = std::mem::take(&mut self.waiting);
        if let Some(mut builder) = self.builder.take() {
            let dropped = |slot| matches!(slot, Slot::Storage(place, _) if waiting.contains(&place));
            builder.drop_slots(dropped);
            let same = |a, b| match (a, b) {
                (Slot::Storage(a, _), Slot::Storage(b, _)) => a == b,
                (a, b) => a == b,
            };
            let made: Vec<u32> = fresh.iter().map(|(place, _)| *place).collect();
            let ops = self.members.clone();
            let broken = std::mem::take(&mut self.broken);
            match builder.finish(same).filter(|_| !broken) {
                Some(computation) => {
                    let needed = needed(&computation, &made);
                    let fresh = fresh.into_iter().filter(|(place, _)| !waiting.contains(place)).collect();
                    self.plan.actions.push(Action::Group(Box::new(Fused {
                        ops,
                        computation,
                        fresh,
                        needed,
                    })));
                }
                None => self.plan.actions.extend(ops.map(Action::Op)),
            }
        }
        self.plan.actions.extend(waiting.into_iter().map(Action::Release));
    }
}

/// The storages that must be there: all but those that are made.
fn needed(computation: &Computation<Slot, Feed>, made: &[u32]) -> Vec<u32> {
    let storage = |slot: &Slot| match slot {
        Slot::Storage(place, _) if !made.contains(place) => Some(*place),
        _ => None,
    };
    computation.slots.iter().filter_map(storage).collect()
}

/// Inputs of a kind before the `flat`-th.
fn before(key: &NodeKey, flat: u32, kind: InputSpec) -> u32 {
    key.inputs[..flat as usize].iter().filter(|i| **i == kind).count() as u32
}

fn slot(window: &Window, at: &At<'_>, structure: &Structure) -> Slot {
    let size = i64::from(window.mem.size());
    match window.owner {
        Owner::Fresh(i) => {
            let place = at.cursor.storages as u32 + at.inputs + u32::from(i);
            Slot::Storage(structure.first[place as usize], window.offset * size)
        }
        Owner::Input(flat) if at.key.inputs[flat as usize] == InputSpec::Host => {
            Slot::Host(at.cursor.hosts as u32 + before(at.key, flat, InputSpec::Host))
        }
        Owner::Input(flat) => {
            let number = before(at.key, flat, InputSpec::Storage) as usize;
            let place = structure.first[at.cursor.storages + number];
            Slot::Storage(place, structure.offsets[at.cursor.offsets + number] * size)
        }
    }
}

fn feed(param: Param, call: &Call<'_>, at: &At<'_>) -> Feed {
    match param {
        Param::Fixed(bits) => Feed::Fixed(bits),
        Param::Host(flat, ty) => {
            let number = at.cursor.hosts as u32 + before(at.key, flat, InputSpec::Host);
            Feed::Host(number, call.inputs[flat as usize].dtype, ty)
        }
        Param::Number(arg, item, ty) => {
            let earlier: usize = at.key.args[..arg as usize].iter().map(numbers_of).sum();
            let from = at.cursor.numbers + earlier;
            match &at.key.args[arg as usize] {
                ArgSpec::Value(number) => Feed::Number(from as u32, *number, ty),
                ArgSpec::Values(list) => {
                    let width = |n: &Number| if *n == Number::Complex { 2 } else { 1 };
                    let within: usize = list[..item as usize].iter().map(width).sum();
                    Feed::Number((from + within) as u32, list[item as usize], ty)
                }
                _ => {
                    let value: &Arg<'_> = &call.args[arg as usize];
                    Feed::Fixed(of_arg(value).bits(ty))
                }
            }
        }
    }
}

impl Feed {
    /// The parameter's bits in a part of a run.
    pub fn bits(self, span: &Span<'_>) -> u64 {
        let (run, base) = (span.run, &span.base);
        match self {
            Feed::Fixed(bits) => bits,
            Feed::Number(at, number, ty) => {
                let bits = run.numbers[base.numbers + at as usize];
                let scalar = match number {
                    Number::Float => Scalar::Float(f64::from_bits(bits)),
                    _ => Scalar::Int(bits as i64),
                };
                scalar.bits(ty)
            }
            Feed::Host(at, dtype, ty) => {
                Scalar::of_feed(&run.hosts[base.hosts + at as usize], dtype).bits(ty)
            }
        }
    }
}
