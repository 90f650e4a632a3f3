//! Plans: how a run that comes again and again is carried out.
//!
//! **Why.** A training step sends the same runs each time. What depends on their structure alone is found out once:
//! which ops are dead, which are carried out together, which results nobody will read, where feeds are.
//! **Strategy.** Runs that are not alike as a whole are taken segment by segment. A run's structure is its ops and
//! variants, which of its storages are one, the windows' offsets and what the program has dropped ([`Structure`]). It
//! does not depend on how ops are cut into blocks, so that rounds of an unrolled loop share a plan, and plans outlive
//! the symbolic graph. When a structure comes for the second time, or its ops have a plan for other shapes, a plan is
//! made ([`planner`]): neighbouring point-wise ops become a group, and results that die within their group are never
//! stored. A sum over what a group gives may be its end. What carries a group out is the executor's matter ([`Fuser`]).
//! **Bits.** On the cpu executor a group computes what its ops compute one by one.

mod draft;
mod planner;

use std::fmt;
use std::hash::{Hash, Hasher};
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use rustc_hash::{FxHashMap, FxHashSet, FxHasher};
use smallvec::SmallVec;
use tandem_tracegraph::ids::{NodeId, OpId, StorageId};
use tandem_tracegraph::node::Number;
use tandem_tracegraph::tensor_meta::Dtype;

use crate::host::HostKernels;
use crate::ir::Ty;
use crate::ops::express::{Job, Param, Window};
pub use crate::plan::draft::{Draft, Held, Lane};
use crate::plan::planner::Planner;
use crate::run::BlockRun;
use crate::run::{Cursor, Scalar};
use crate::run::{OpRun, Program, Span, with_op};
use crate::run::{Profile, Tally};

/// An executor, as far as plans depend on it.
pub trait Fuser {
    /// What carries ops out together.
    type Group: fmt::Debug;

    /// An op that is carried out by a kernel of its own, given where windows begin and where parameters come from.
    fn alone(
        &mut self,
        op: &OpRun<'_, '_>,
        slot: &dyn Fn(&Window) -> Slot,
        feed: &dyn Fn(Param) -> Feed,
    ) -> Option<Self::Group>;

    /// The computations of an op that may be carried out together with others.
    fn jobs(&mut self, op: &OpRun<'_, '_>) -> Option<Vec<Job>>;

    /// Tensors that a lane of a group can be on at most.
    fn most_tensors(&self) -> usize;

    /// Carries a draft out together with the op before it, whose first new tensor its only lane reads.
    fn behind(&mut self, before: &Before<'_, '_, '_>, draft: &Draft<Slot, Feed>) -> Option<Self::Group>;

    /// Carries a draft out; `same` says whether two slots are in the same memory. `None` where its ops have to be
    /// carried out one by one.
    fn compile(&mut self, draft: Draft<Slot, Feed>, same: &dyn Fn(Slot, Slot) -> bool)
    -> Option<Self::Group>;

    /// An op as sums of rows, which a group that gives their elements may end in.
    fn row_sums(&mut self, _: &OpRun<'_, '_>) -> Option<RowSums> {
        None
    }

    /// Carries a draft of one lane out together with sums of what it gives; see [`Fuser::compile`]. The draft where the
    /// sums have to be carried out by themselves.
    fn compile_with_sums(
        &mut self,
        draft: Draft<Slot, Feed>,
        _: &Ending,
        _: &dyn Fn(Slot, Slot) -> bool,
    ) -> Result<Self::Group, Draft<Slot, Feed>> {
        Err(draft)
    }

    /// What a group is on.
    fn slots(group: &Self::Group) -> &[Slot];

    /// An operator's name.
    fn op_name(&self, op: OpId) -> String;
}

/// An op that adds up rows.
pub struct RowSums {
    /// What is added up: without gaps, in row-major order.
    pub from: Window,
    /// What each element is multiplied by first, likewise.
    pub times: Option<Window>,
    /// The sums.
    pub to: Window,
    /// Its rows.
    pub rows: Rows,
}

/// Rows that are added up.
#[derive(Clone, Copy, Debug)]
pub struct Rows {
    /// How many.
    pub rows: usize,
    /// Elements of one.
    pub n: usize,
    /// What a sum is multiplied by: 1, or less for means.
    pub by: f64,
}

/// [`RowSums`] as a group's end.
pub struct Ending {
    /// Where what is added up begins. Nobody reads it behind the group where its storage is dropped within.
    pub from: Slot,
    /// Where what each element is multiplied by first begins; the group writes it only where that is `from`.
    pub times: Option<Slot>,
    /// Where the sums begin.
    pub to: Slot,
    /// The rows.
    pub rows: Rows,
}

/// Structures that are kept.
const MOST: usize = 1 << 13;
/// The op before a group.
pub struct Before<'b, 'o, 'r> {
    /// Its number in the plan.
    pub number: u32,
    /// It.
    pub op: &'b OpRun<'o, 'r>,
    /// Storages that it makes, by their place.
    pub made: Range<u32>,
    /// Storages that it is given, by their place.
    pub given: &'b [u32],
}

/// What a plan depends on.
#[derive(Clone, Eq, Default, Debug)]
pub struct Structure {
    nodes: Vec<NodeId>,
    variants: Vec<u32>,
    /// For each storage of the run's stream, where it is there for the first time.
    first: Vec<u32>,
    offsets: Vec<i64>,
    /// Storages that the program dropped, by their first place in the stream.
    released: Vec<u32>,
}

impl PartialEq for Structure {
    fn eq(&self, other: &Structure) -> bool {
        are_equal(&self.nodes, &other.nodes)
            && are_equal(&self.variants, &other.variants)
            && are_equal(&self.first, &other.first)
            && are_equal(&self.offsets, &other.offsets)
            && are_equal(&self.released, &other.released)
    }
}

/// Whether lists are equal, of which most are short: asking for bytes to be compared takes longer than a few words.
fn are_equal<T: PartialEq>(a: &[T], b: &[T]) -> bool {
    const SHORT: usize = 16;
    match a.len() {
        n if n != b.len() => false,
        0..SHORT => a.iter().zip(b).all(|(a, b)| a == b),
        _ => a == b,
    }
}

impl Hash for Structure {
    /// Word by word, as [`are_equal`].
    fn hash<H: Hasher>(&self, state: &mut H) {
        for (a, b) in self.nodes.iter().zip(&self.variants) {
            state.write_u64(u64::from(a.0) << 32 | u64::from(*b));
        }
        self.first.iter().for_each(|place| state.write_u32(*place));
        self.offsets.iter().for_each(|offset| state.write_i64(*offset));
        self.released.iter().for_each(|place| state.write_u32(*place));
    }
}

/// The plans of an executor.
pub struct Plans<G> {
    known: FxHashMap<u64, Known<G>>,
    /// Hashes of structures that came once.
    once: FxHashSet<u64>,
    /// Hashes of the ops of structures that have a plan.
    planned: FxHashSet<u64>,
    whole: Chance,
    /// By storage: the run that it was in last, and its first place there.
    places: Vec<(u32, u32)>,
    epoch: u32,
    now: Structure,
    /// Dropped storages that the run does not use.
    unused: Vec<StorageId>,
}

struct Known<G> {
    structure: Structure,
    plan: Arc<Plan<G>>,
}

/// What is carried out, in order.
#[derive(Debug)]
pub struct Plan<G> {
    /// The ops of the run, with where their feeds begin; dead ones are not there.
    pub ops: Vec<(NodeId, u32, Cursor)>,
    /// What happens.
    pub actions: Vec<Action<G>>,
}

/// Something that happens.
#[derive(Debug)]
pub enum Action<G> {
    /// One of the plan's ops.
    Op(u32),
    /// Some of the plan's ops together.
    Group(Box<Fused<G>>),
    /// The storage at this place of the stream is not used any more.
    Release(u32),
}

/// Ops that are carried out together.
#[derive(Debug)]
pub struct Fused<G> {
    /// Which.
    pub ops: Range<u32>,
    /// What computes what they compute.
    pub group: G,
    /// Storages that they make, by their place in the stream, and their bytes.
    pub fresh: Vec<(u32, u64)>,
    /// Storages that must be there, by their place.
    pub needed: Vec<u32>,
    /// Storages that the program drops within it, by their place.
    pub dropped: Vec<u32>,
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
    Host(u32, Dtype, Ty),
    /// The bits of an `i64` or an `f64`.
    Fixed(u64),
}

impl<G> Default for Plans<G> {
    fn default() -> Plans<G> {
        Plans {
            known: FxHashMap::default(),
            once: FxHashSet::default(),
            planned: FxHashSet::default(),
            whole: Chance::default(),
            places: Vec::new(),
            epoch: 0,
            now: Structure::default(),
            unused: Vec::new(),
        }
    }
}

impl<G: fmt::Debug> Plans<G> {
    /// Forgets all.
    pub fn clear(&mut self) {
        self.known.clear();
        self.once.clear();
        self.planned.clear();
        self.whole = Chance::default();
    }

    /// The plan of a part of a run, once it has come before. Dropped storages that it does not use are in
    /// [`Plans::unused`].
    pub fn find(
        &mut self,
        span: &Span<'_>,
        program: &Program,
        fuser: &mut impl Fuser<Group = G>,
    ) -> Option<Arc<Plan<G>>> {
        self.look(span, program);
        let hash = hash_of(&self.now);
        if let Some(known) = self.known.get(&hash) {
            return (known.structure == self.now).then(|| known.plan.clone());
        }
        let nodes = hash_of(&self.now.nodes);
        if self.once.insert(hash) && !self.planned.contains(&nodes) {
            if self.once.len() > MOST {
                self.once.clear();
            }
            return None;
        }
        if self.known.len() >= MOST {
            self.known.clear();
            self.planned.clear();
        }
        let plan = Arc::new(Planner::new(span, &self.now, program, fuser).make());
        if tracing::enabled!(target: "plan", tracing::Level::TRACE) {
            tracing::trace!(target: "plan", "{}", plan.listing(program, fuser));
        }
        self.planned.insert(nodes);
        self.known.insert(hash, Known { structure: self.now.clone(), plan: plan.clone() });
        Some(plan)
    }

    /// The plan of a whole run; not looked for each time where runs are not alike.
    pub fn find_whole(
        &mut self,
        run: &BlockRun,
        program: &Program,
        fuser: &mut impl Fuser<Group = G>,
    ) -> Option<Arc<Plan<G>>> {
        if run.segments.len() < 2 || !self.whole.is_worth() {
            return None;
        }
        let found = self.find(&Span::whole(run), program, fuser);
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
    fn look(&mut self, span: &Span<'_>, program: &Program) {
        self.epoch += 1;
        let epoch = self.epoch;
        let mut now = std::mem::take(&mut self.now);
        now.nodes.clear();
        span.segments.iter().for_each(|s| now.nodes.extend_from_slice(program.nodes(s)));
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

fn hash_of(it: &impl Hash) -> u64 {
    let mut hasher = FxHasher::default();
    it.hash(&mut hasher);
    hasher.finish()
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

impl<G> Plan<G> {
    /// What a group that begins now will be noted with; nothing where none is measured.
    pub fn timing(
        &self,
        action: &Action<G>,
        profile: &Profile,
        span: &Span<'_>,
        program: &Program,
        host: &dyn HostKernels,
    ) -> Option<(Tally, Instant)> {
        let Action::Group(fused) = action else { return None };
        if !profile.is_on() {
            return None;
        }
        let mut tally = Tally::default();
        let dropped = |id: StorageId| fused.dropped.iter().any(|place| span.storages[*place as usize] == id);
        for (node, variant, cursor) in &self.ops[fused.ops.start as usize..fused.ops.end as usize] {
            let (step, known) = program.op(*node, *variant)?;
            let mut at = cursor.behind(&span.base);
            with_op(&mut at, (*node, *variant, step, known), span.run, false, |op| {
                tally.add(&op, |id| !dropped(id), host);
            });
        }
        Some((tally, Instant::now()))
    }
}

impl<G: fmt::Debug> Plan<G> {
    /// What happens, a line each.
    fn listing(&self, program: &Program, fuser: &impl Fuser<Group = G>) -> String {
        use std::fmt::Write;
        let name = |number: u32| {
            let (node, variant, _) = &self.ops[number as usize];
            program.op(*node, *variant).map(|(step, _)| fuser.op_name(step.key.op)).unwrap_or_default()
        };
        let mut text = String::new();
        for action in &self.actions {
            let _ = match action {
                Action::Op(number) => writeln!(text, "{}", name(*number)),
                Action::Group(fused) => {
                    let names: Vec<String> = fused.ops.clone().map(name).collect();
                    writeln!(text, "{:?} {}", fused.group, names.join(", "))
                }
                Action::Release(_) => Ok(()),
            };
        }
        text
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
