//! All plans of an executor, by structure.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use rustc_hash::{FxHashMap, FxHashSet, FxHasher};
use smallvec::SmallVec;
use tandem_tracegraph::ids::StorageId;

use crate::plan::action::Plan;
use crate::plan::fuser::Fuser;
use crate::plan::planner::Planner;
use crate::plan::structure::Structure;
use crate::run::{BlockRun, Cursor, Program, Span};

/// Maximum number of structures that are kept.
const MAX_STRUCTURES: usize = 1 << 13;

/// All plans of an executor.
pub struct Plans<G> {
    known: FxHashMap<u64, Known<G>>,
    /// Hashes of structures that have occurred once.
    once: FxHashSet<u64>,
    /// Hashes of the ops of structures that have a plan.
    planned: FxHashSet<u64>,
    whole: Chance,
    /// For each storage, the last epoch in which it occurred, with its first index in a span or its last segment in
    /// a run.
    places: Vec<(u32, u32)>,
    epoch: u32,
    now: Structure,
    /// Storages that the program dropped and that the latest span does not use.
    unused: Vec<StorageId>,
}

struct Known<G> {
    structure: Structure,
    plan: Arc<Plan<G>>,
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

impl<G: fmt::Display> Plans<G> {
    /// Discards all plans.
    pub fn clear(&mut self) {
        self.known.clear();
        self.once.clear();
        self.planned.clear();
        self.whole = Chance::default();
    }

    /// The plan of a part of a run, or `None` if the part's structure occurs for the first time. Afterwards,
    /// [`Plans::unused`] returns the dropped storages that the part does not use.
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
            if self.once.len() > MAX_STRUCTURES {
                self.once.clear();
            }
            return None;
        }
        if self.known.len() >= MAX_STRUCTURES {
            self.known.clear();
            self.planned.clear();
        }
        let plan = Arc::new(Planner::new(span, &self.now, program, fuser).make());
        if tracing::enabled!(target: "plan", tracing::Level::TRACE) {
            tracing::trace!(target: "plan", "{}", plan.listing(program, fuser.operators()));
        }
        self.planned.insert(nodes);
        self.known.insert(hash, Known { structure: self.now.clone(), plan: plan.clone() });
        Some(plan)
    }

    /// The plan of a whole run, or `None` if there is none. If whole runs rarely have a plan, only some runs are looked
    /// up.
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

    /// The dropped storages that the latest part passed to [`Plans::find`] does not use.
    pub fn unused(&self) -> &[StorageId] {
        &self.unused
    }

    /// Splits a run into its segments, each with the dropped storages that no later segment uses.
    pub fn parts(&mut self, run: &BlockRun, program: &Program) -> Parts {
        let mut parts = Parts::default();
        let (mut cursor, mut ops) = (Cursor::default(), 0);
        self.epoch += 1;
        let epoch = self.epoch;
        let all = program.ops(&Span::whole(run));
        for (number, segment) in run.segments.iter().enumerate() {
            let from = cursor.storages;
            for (_, _, declared, variant) in &all[ops..ops + (segment.to - segment.from) as usize] {
                cursor.pass(declared, variant);
            }
            ops += (segment.to - segment.from) as usize;
            // Record the last segment that uses each storage.
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

    /// Determines the structure of a part of a run and stores it in `now`.
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

/// The ends of a run's segments: for each segment, the position in the run's streams, the index of the op, and the
/// index in the dropped storages.
#[derive(Default)]
pub struct Parts {
    ends: SmallVec<[(Cursor, usize, usize); 16]>,
    released: Vec<StorageId>,
}

impl Parts {
    /// The parts as spans of the run.
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

/// Statistics on how often recent whole runs had a plan.
#[derive(Default)]
struct Chance {
    tries: u32,
    hits: u32,
    skipped: u32,
}

impl Chance {
    /// Number of lookups before the hit rate is considered.
    const MANY: u32 = 32;
    /// While the hit rate is low, one of this many runs is looked up.
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
