//! Functions: the recording of a call, and the template that replays it.
//!
//! **Why.** In a co-executed step of many small ops, Python itself takes the time. A function that issues the same ops
//! in every call need not run in Python.
//! **Strategy.** A [`Recording`] has all that a call sends to GraphRunner, with storages numbered in the order in which
//! they occur. Once consecutive calls have equal recordings, the last one becomes a template: a replay sends its runs
//! again and replaces the storages.
//! **Branches.** A call may read values. A replay stops at each value, which ends a stage, and goes on only if the
//! value is the recorded one. Otherwise the replay is abandoned: [`Undo`] says what has to be restored.
//! **Limits.** A call whose ops did not all go to GraphRunner has a [`Reason`] and is never replayed.

use rustc_hash::{FxHashMap, FxHashSet};
use tandem_executor::host::Generator;
use tandem_executor::run::{BlockRun, Cursor, HostFeed};
use tandem_tracegraph::call::InlineValue;
use tandem_tracegraph::ids::{LocationId, Name, NodeId, OpId, StorageId};
use tandem_tracegraph::node::Node;

use crate::storage::NewStorage;

/// Storage of a recording.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Slot {
    /// Storage that existed before the call, by order of first use.
    Given(u32),
    /// Storage that the call created, by order of creation.
    Made(u32),
}

/// Reason why a call cannot be replayed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reason {
    /// The program reads a tensor's elements.
    Fetch,
    /// The program reads a value after the call has ended an iteration, or has drawn from a generator that it passes to
    /// an op.
    Late,
    /// An op fails, has inputs that overlap, or is not traced. A later call may be without such an op.
    Unrecorded,
    /// The output shapes of an op, or an error that it raises, depend on data.
    Dynamic,
    /// A storage is created or resized outside of any op, or an op resizes a tensor.
    Storage,
    /// The call shares a tensor with an op of another thread, and one of the two writes or makes the tensor.
    Thread,
    /// The state of a generator is read or set, or random numbers are drawn on the host.
    Random,
    /// A tensor that the call made is in use after the call, and is neither a result nor a gradient.
    Kept,
}

/// The reason why a call is not replayable, and the op at which this was found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NotReplayable {
    /// Reason.
    pub why: Reason,
    /// Operator of that op; `None` outside of ops.
    pub op: Option<OpId>,
    /// Location of that op, or of the op before.
    pub location: LocationId,
}

/// Value that the program reads.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Scalar {
    /// Truth value.
    Bool(bool),
    /// Integer.
    Int(i64),
    /// Floating-point number, as the bits of an `f64`.
    Float(u64),
}

/// Value that a recorded call has read.
#[derive(Clone, Copy, Debug)]
struct Fetched {
    /// Number of ops before the value.
    at: usize,
    /// Slot of the storage that the value was read from.
    slot: Slot,
    value: Scalar,
    op: Option<OpId>,
    location: LocationId,
}

/// Recorded op.
#[derive(Clone, Copy, Debug)]
pub struct Step {
    /// Node of the op.
    pub node: NodeId,
    /// Index of the node's variant.
    pub variant: u32,
    /// Positions of the op's feeds in the recording's streams.
    at: Cursor,
    /// Number of the op's inputs on storages.
    inputs: u32,
    /// Number of storages that earlier ops made.
    made: u32,
}

/// Storage that a call created.
#[derive(Clone, Copy, Debug)]
pub struct Made {
    /// Size in bytes.
    pub nbytes: u64,
    /// Device index.
    pub device: u8,
    /// Name of the storage in the iteration that creates it.
    pub name: Name,
    /// Whether the storage is in use after the call.
    pub kept: bool,
    /// Whether the call reads a value after it has made the storage. A replay that is abandoned at the value must be
    /// able to drop the storage.
    held: bool,
    /// Number of the last part whose ops use the storage. Its run releases a storage that does not last.
    dropped: u32,
    storage: NewStorage,
}

/// Numbers of storages and host tensors that a call has used.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Used {
    /// Number of storages that existed before the call.
    pub given: usize,
    /// Number of host tensors that were fed.
    pub hosts: usize,
}

/// The changes that a call makes before it reads a value for the last time. A replay that is abandoned at a value
/// undoes them.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Undo {
    /// Storages that existed before the call and that it has written, by number.
    pub written: Vec<u32>,
    /// Whether random numbers were drawn.
    pub draws: bool,
}

/// The storages and host tensors that a replay uses in place of the recorded ones.
#[derive(Debug)]
pub struct Values<'a> {
    /// Storages in place of those that existed before the recorded call, each with the offset to which the recorded
    /// offsets of windows are relative.
    pub given: &'a [(StorageId, i64)],
    /// Storages in place of those that the recorded call made, as far as the replay has made them.
    pub made: Vec<StorageId>,
    /// Host tensors that are fed again, by number.
    pub hosts: FxHashMap<usize, HostFeed>,
}

/// Ops between two ends of iterations or values that the call reads.
#[derive(Clone, Debug)]
pub struct Part {
    /// Number of the part.
    pub number: u32,
    /// Number of values that are read before the part.
    pub stage: usize,
    /// Ops as a range of [`Recording::steps`].
    pub steps: std::ops::Range<usize>,
    /// Whether an iteration ends after the ops.
    pub ends: bool,
}

/// Difference between two recordings.
#[derive(Clone, PartialEq, Debug)]
pub struct Unequal {
    /// Location of the first op that differs.
    pub location: LocationId,
    /// Operator of this op in both recordings.
    pub ops: (Option<OpId>, Option<OpId>),
    /// Property in which the op differs.
    pub what: Property,
}

/// Property in which two recordings differ.
#[derive(Clone, PartialEq, Debug)]
pub enum Property {
    /// Operators or attributes.
    Op,
    /// Shapes, dtypes or strides.
    Shape,
    /// Fed number, as bits.
    Number(u64, u64),
    /// Value that is read: its number among the values of the call, and the value in either recording. All ops before
    /// it are equal.
    Fetched(usize, Option<Scalar>, Option<Scalar>),
    /// Contents of a fed host tensor.
    Host,
    /// Offset of a window, in elements.
    Offset,
    /// Storage that an input is on.
    Storage,
    /// Ends of iterations.
    Ends,
    /// Tensors that are in use after the call.
    Kept,
}

/// Everything that a call of a function sent to GraphRunner.
#[derive(Debug, Default)]
pub struct Recording {
    steps: Vec<Step>,
    slots: Vec<Slot>,
    offsets: Vec<i64>,
    numbers: Vec<u64>,
    /// Fed host tensors; `None` for a tensor that each call reads again.
    hosts: Vec<Option<HostFeed>>,
    generators: Vec<Generator>,
    given: Vec<StorageId>,
    made: Vec<Made>,
    /// Numbers of ops after which an iteration ended.
    ends: Vec<usize>,
    fetched: Vec<Fetched>,
    /// Latest fetch, unless it is known to read a single value.
    open_fetch: Option<NotReplayable>,
    refused: Option<NotReplayable>,
    draws: bool,
    /// Storages that existed before the call and that ops have written, by number.
    given_writes: Vec<u32>,
    /// Slots by storage id. An id may be reused during the call.
    places: FxHashMap<StorageId, Slot>,
    /// Storages that the call has written.
    written: FxHashSet<StorageId>,
    undo: Undo,
    /// Storages that ops of other threads have used during the call.
    elsewhere: FxHashMap<StorageId, Elsewhere>,
}

/// Use of a storage by an op of another thread.
#[derive(Clone, Copy, Debug)]
struct Elsewhere {
    op: Option<OpId>,
    /// Whether the op writes the storage, or makes it.
    writes: bool,
}

/// The feeds of a run from a position on.
pub struct Tail<'a> {
    run: &'a BlockRun,
    from: Cursor,
}

impl<'a> Tail<'a> {
    /// Returns the feeds of `run` from a position on.
    pub fn new(run: &'a BlockRun, from: Cursor) -> Tail<'a> {
        Tail { run, from }
    }
}

/// Returns the position after all feeds of a run.
pub fn end_of(run: &BlockRun) -> Cursor {
    Cursor {
        storages: run.storages.len(),
        offsets: run.offsets.len(),
        numbers: run.numbers.len(),
        hosts: run.hosts.len(),
        generators: run.generators.len(),
        ops: run.len(),
    }
}

impl Made {
    /// Returns the storage that the recorded call made.
    pub fn storage(&self) -> NewStorage {
        self.storage
    }

    /// Returns the same entry for the storage that a replay makes instead.
    pub fn on(&self, storage: NewStorage) -> Made {
        Made { storage, ..*self }
    }

    /// Returns whether a replay creates the storage for the program, and not for GraphRunner alone.
    pub fn lasts(&self) -> bool {
        self.kept || self.held
    }
}

impl Recording {
    /// Adds an op whose feeds are `fed`. The last storages among the feeds are those that the op creates, `new_storages`, with
    /// their sizes in bytes.
    pub fn push<'m>(
        &mut self,
        node: NodeId,
        variant: u32,
        fed: &Tail<'_>,
        new_storages: impl ExactSizeIterator<Item = (NewStorage, &'m u64)>,
        device: u8,
    ) {
        let (run, from) = (fed.run, fed.from);
        let inputs = run.storages.len() - from.storages - new_storages.len();
        let at = Cursor {
            storages: self.slots.len(),
            offsets: self.offsets.len(),
            numbers: self.numbers.len(),
            hosts: self.hosts.len(),
            generators: self.generators.len(),
            ops: self.steps.len(),
        };
        self.steps.push(Step { node, variant, at, inputs: inputs as u32, made: self.made.len() as u32 });
        for id in &run.storages[from.storages..from.storages + inputs] {
            let slot = self.slot_of(*id);
            self.slots.push(slot);
        }
        self.offsets.extend_from_slice(&run.offsets[from.offsets..]);
        self.numbers.extend_from_slice(&run.numbers[from.numbers..]);
        self.hosts.extend(run.hosts[from.hosts..].iter().cloned().map(Some));
        self.generators.extend_from_slice(&run.generators[from.generators..]);
        for (i, (storage, nbytes)) in (0..).zip(new_storages) {
            let slot = Slot::Made(self.made.len() as u32);
            self.places.insert(storage.id, slot);
            self.written.remove(&storage.id);
            self.elsewhere.remove(&storage.id);
            self.slots.push(slot);
            let name = Name::made_by(node, i);
            self.made.push(Made {
                nbytes: *nbytes,
                device,
                name,
                kept: false,
                held: false,
                dropped: 0,
                storage,
            });
        }
    }

    fn slot_of(&mut self, id: StorageId) -> Slot {
        let next = Slot::Given(self.given.len() as u32);
        let slot = *self.places.entry(id).or_insert(next);
        if slot == next {
            self.given.push(id);
            self.part_from(id, |elsewhere| elsewhere.writes);
        }
        slot
    }

    /// Records that the latest op has written a storage.
    pub fn note_written(&mut self, id: StorageId) {
        if let Slot::Given(given) = self.slot_of(id)
            && !self.given_writes.contains(&given)
        {
            self.given_writes.push(given);
        }
        self.written.insert(id);
        self.part_from(id, |_| true);
    }

    /// Makes the call not replayable if an op of another thread has used the storage in a way that `matters`.
    fn part_from(&mut self, id: StorageId, matters: impl Fn(&Elsewhere) -> bool) {
        if let Some(Elsewhere { op, .. }) = self.elsewhere.get(&id).copied().filter(matters) {
            self.refuse(NotReplayable { why: Reason::Thread, op, location: LocationId::UNKNOWN });
        }
    }

    /// Records that an op of another thread reads or writes a storage. The op is not recorded. If the call uses the
    /// storage too, and one of the two writes or makes it, the order of both matters, so the call is not replayable.
    pub fn used_elsewhere(&mut self, id: StorageId, op: Option<OpId>, writes: bool) {
        let use_here =
            self.places.get(&id).map(|slot| matches!(slot, Slot::Made(_)) || self.written.contains(&id));
        let all = self.elsewhere.entry(id).or_insert(Elsewhere { op, writes });
        all.writes |= writes;
        if use_here.is_some_and(|writes_here| writes_here || writes) {
            self.refuse(NotReplayable { why: Reason::Thread, op, location: LocationId::UNKNOWN });
        }
    }

    /// Records that another thread makes a storage. Its id may be that of a dead storage which the call has used.
    pub fn made_elsewhere(&mut self, id: StorageId, op: Option<OpId>) {
        self.places.remove(&id);
        self.written.remove(&id);
        self.elsewhere.insert(id, Elsewhere { op, writes: true });
    }

    /// Records that the latest op has made a storage larger. Returns false if the call has not made the storage,
    /// because a replay does not tell the program new sizes of the program's tensors.
    pub fn grow(&mut self, id: StorageId, nbytes: u64) -> bool {
        let Slot::Made(made) = self.slot_of(id) else { return false };
        self.made[made as usize].nbytes = nbytes;
        true
    }

    /// Records that the program fetches something. Unless [`Recording::read`] follows, the call is not replayable.
    pub fn fetch(&mut self, op: OpId, location: LocationId) {
        self.close_fetch();
        self.open_fetch = Some(NotReplayable { why: Reason::Fetch, op: Some(op), location });
    }

    fn close_fetch(&mut self) {
        if let Some(refused) = self.open_fetch.take() {
            self.refuse(refused);
        }
    }

    /// Records that the latest fetch has read a single value from a storage. Returns the storage's slot, and the
    /// numbers of storages and host tensors that the call has used so far.
    pub fn read(&mut self, id: StorageId, value: Scalar) -> Option<(Slot, Used)> {
        let NotReplayable { op, location, .. } = self.open_fetch.take()?;
        if !self.ends.is_empty() || (self.draws && !self.generators.is_empty()) {
            self.refuse(NotReplayable { why: Reason::Late, op, location });
        }
        self.undo.draws = self.draws;
        self.undo.written = self.given_writes.clone();
        let slot = self.slot_of(id);
        self.fetched.push(Fetched { at: self.steps.len(), slot, value, op, location });
        Some((slot, Used { given: self.given.len(), hosts: self.hosts.len() }))
    }

    /// Records that an iteration ended.
    pub fn end_iteration(&mut self) {
        self.ends.push(self.steps.len());
    }

    /// Marks the call as not replayable. The first reason stays, except that any reason replaces
    /// [`Reason::Unrecorded`], which later calls may not have.
    pub fn refuse(&mut self, refused: NotReplayable) {
        if self.refused.is_none_or(|known| known.why == Reason::Unrecorded) {
            self.refused = Some(refused);
        }
    }

    /// Records whether the latest op draws random numbers.
    pub fn note_draws(&mut self, random: bool) {
        self.draws |= random;
    }

    /// Ends the recording. `lives` says whether a storage is still in use.
    pub fn finish(&mut self, lives: impl Fn(NewStorage) -> bool) {
        self.close_fetch();
        let read = self.fetched.last().map_or(0, |last| last.at);
        let made_before = self.steps.get(read).map_or(self.made.len(), |step| step.made as usize);
        self.made[..made_before].iter_mut().for_each(|made| made.held = read > 0);
        for made in &mut self.made {
            made.kept = lives(made.storage);
        }
        self.places = FxHashMap::default();
        self.written = FxHashSet::default();
        self.elsewhere = FxHashMap::default();
        let parts = self.parts();
        for part in &parts {
            for i in part.steps.clone() {
                for slot in self.slots_of(i) {
                    if let Slot::Made(made) = self.slots[slot] {
                        self.made[made as usize].dropped = part.number;
                    }
                }
            }
        }
    }

    /// Makes the offsets of windows on the storages that existed before the call relative to `bases`, one offset for
    /// each such storage.
    pub fn rebase(&mut self, bases: &[i64]) {
        for step in &self.steps {
            let n = step.inputs as usize;
            let slots = &self.slots[step.at.storages..step.at.storages + n];
            for (offset, slot) in self.offsets[step.at.offsets..][..n].iter_mut().zip(slots) {
                if let Slot::Given(given) = slot {
                    *offset -= bases[*given as usize];
                }
            }
        }
    }

    /// Records that each replay reads the host tensor of this number again.
    pub fn feed_again(&mut self, number: usize) {
        self.hosts[number] = None;
    }

    /// Returns the recorded ops.
    pub fn steps(&self) -> &[Step] {
        &self.steps
    }

    /// Returns the slots of an op's inputs on storages, and the slots of the storages that the op creates.
    pub fn operands(&self, step: usize) -> (&[Slot], &[Slot]) {
        let slots = &self.slots[self.slots_of(step)];
        slots.split_at(self.steps[step].inputs as usize)
    }

    /// Returns the values that are read before the op with this number: the slot of the storage, the value, and the
    /// location.
    pub fn reads_before(&self, step: usize) -> impl Iterator<Item = (Slot, Scalar, LocationId)> {
        let reads = self.fetched.iter().filter(move |fetched| fetched.at == step);
        reads.map(|fetched| (fetched.slot, fetched.value, fetched.location))
    }

    /// Returns whether an iteration ends before the op with this number.
    pub fn ends_before(&self, step: usize) -> bool {
        self.ends.contains(&step)
    }

    /// Returns the storages that existed before the call, in order of first use.
    pub fn given(&self) -> &[StorageId] {
        &self.given
    }

    /// Returns the storages that the call made.
    pub fn made(&self) -> &[Made] {
        &self.made
    }

    /// Returns the number of fed host tensors.
    pub fn hosts(&self) -> usize {
        self.hosts.len()
    }

    /// Returns whether an op draws random numbers.
    pub fn draws(&self) -> bool {
        self.draws
    }

    /// Returns whether an op writes a storage that existed before the call.
    pub fn writes(&self) -> bool {
        !self.given_writes.is_empty()
    }

    /// Returns the changes that a replay which is abandoned at a value has to undo.
    pub fn undo(&self) -> &Undo {
        &self.undo
    }

    /// Returns the reason why the call cannot be replayed, if there is one.
    pub fn refused(&self) -> Option<NotReplayable> {
        self.refused
    }

    /// Returns the number of values that the call has read.
    pub fn fetches(&self) -> usize {
        self.fetched.len()
    }

    /// Returns whether iterations end within the call.
    pub fn ends(&self) -> bool {
        !self.ends.is_empty()
    }

    /// Returns the parts of the call, which end where it reads a value or ends an iteration. All values are read before
    /// the first iteration ends.
    pub fn parts(&self) -> Vec<Part> {
        let reads = self.fetched.iter().map(|fetched| (fetched.at, false));
        let ends = self.ends.iter().map(|&end| (end, true));
        let mut parts: Vec<Part> = Vec::new();
        let mut from = 0;
        for (to, ends) in reads.chain(ends).chain([(self.steps.len(), false)]) {
            let number = parts.len();
            let steps = from..to.max(from);
            from = steps.end;
            let is_last = number == self.fetched.len() + self.ends.len();
            if !(is_last && steps.is_empty()) {
                let stage = number.min(self.fetched.len());
                parts.push(Part { number: number as u32, stage, steps, ends });
            }
        }
        parts
    }

    fn end(&self, i: usize) -> Cursor {
        self.steps.get(i + 1).map_or_else(
            || Cursor {
                storages: self.slots.len(),
                offsets: self.offsets.len(),
                numbers: self.numbers.len(),
                hosts: self.hosts.len(),
                generators: self.generators.len(),
                ops: self.steps.len(),
            },
            |next| next.at,
        )
    }

    fn slots_of(&self, i: usize) -> std::ops::Range<usize> {
        self.steps[i].at.storages..self.end(i).storages
    }

    /// Returns the fed numbers as floats: first the numbers of ops, then the host tensors of one element. `None` stands
    /// for a number that cannot be replaced: one that decides an op's output shapes, and a host tensor of another size.
    /// `is_sized` says whether a node's output shapes depend on its numbers.
    pub fn numbers(&self, is_sized: impl Fn(NodeId) -> bool) -> Vec<Option<f64>> {
        let mut numbers: Vec<Option<f64>> =
            self.numbers.iter().map(|bits| Some(f64::from_bits(*bits))).collect();
        for (i, step) in self.steps.iter().enumerate().filter(|(_, step)| is_sized(step.node)) {
            numbers[step.at.numbers..self.end(i).numbers].fill(None);
        }
        let element = |host: &Option<HostFeed>| match host {
            Some(HostFeed::Inline(value)) => Some(float_of(value)),
            _ => None,
        };
        numbers.extend(self.hosts.iter().map(element));
        numbers
    }

    /// Replaces fed numbers. A place is an index into [`Recording::numbers`].
    pub fn set_numbers(&mut self, numbers: &[(usize, f64)]) {
        for (place, number) in numbers {
            match place.checked_sub(self.numbers.len()) {
                None => self.numbers[*place] = number.to_bits(),
                Some(host) => self.hosts[host] = Some(HostFeed::Inline(element_of(*number))),
            }
        }
    }

    /// Returns the first difference from another recording. `node` returns a node of the TraceGraph. Nodes that differ
    /// only in their locations count as equal, because a function may be called at several places. Fed numbers at the
    /// indices `free` into [`Recording::numbers`] may differ.
    pub fn difference<'n>(
        &self,
        other: &Recording,
        free: &FxHashSet<usize>,
        node: impl Fn(NodeId) -> &'n Node,
    ) -> Option<Unequal> {
        let op = |recording: &Recording, i: usize| recording.steps.get(i).map(|s| node(s.node).key.op);
        let at = |i: usize, what| {
            let step = self.steps.get(i).or(other.steps.get(i)).or(self.steps.last());
            let location = step.map_or(LocationId::UNKNOWN, |s| node(s.node).key.location);
            Some(Unequal { location, ops: (op(other, i), op(self, i)), what })
        };
        for (i, (one, two)) in self.steps.iter().zip(&other.steps).enumerate() {
            if let Some(unequal) = self.fetched_unequal(other, i) {
                return Some(unequal);
            }
            let (a, b) = (node(one.node), node(two.node));
            let same = one.node == two.node
                || (a.key.op, &a.key.args, &a.key.inputs, a.key.device, a.key.modes)
                    == (b.key.op, &b.key.args, &b.key.inputs, b.key.device, b.key.modes);
            if !same {
                return at(i, Property::Op);
            }
            if (one.node, one.variant) != (two.node, two.variant)
                && a.variants[one.variant as usize] != b.variants[two.variant as usize]
            {
                return at(i, Property::Shape);
            }
            let (from, end, from2, end2) = (one.at, self.end(i), two.at, other.end(i));
            let numbers = &self.numbers[from.numbers..end.numbers];
            let pairs = numbers.iter().zip(&other.numbers[from2.numbers..end2.numbers]);
            for (place, (x, y)) in (from.numbers..).zip(pairs) {
                if x != y && !free.contains(&place) {
                    return at(i, Property::Number(*y, *x));
                }
            }
            let hosts = self.hosts[from.hosts..end.hosts].iter().zip(&other.hosts[from2.hosts..end2.hosts]);
            for (place, (x, y)) in (self.numbers.len() + from.hosts..).zip(hosts) {
                if !same_contents(x, y) && !free.contains(&place) {
                    return at(i, Property::Host);
                }
            }
            if self.slots[from.storages..end.storages] != other.slots[from2.storages..end2.storages] {
                return at(i, Property::Storage);
            }
            if self.offsets[from.offsets..end.offsets] != other.offsets[from2.offsets..end2.offsets] {
                return at(i, Property::Offset);
            }
            let drawn = |recording: &Recording, from: Cursor, end: Cursor| {
                let drawn = &recording.generators[from.generators..end.generators];
                drawn.iter().map(Generator::as_ptr).collect::<Vec<_>>()
            };
            if drawn(self, from, end) != drawn(other, from2, end2) {
                return at(i, Property::Op);
            }
        }
        let common = self.steps.len().min(other.steps.len());
        if let Some(unequal) = self.fetched_unequal(other, common) {
            return Some(unequal);
        }
        if self.steps.len() != other.steps.len() {
            return at(common, Property::Op);
        }
        if self.ends != other.ends {
            return at(common, Property::Ends);
        }
        let unequal = self.made.iter().zip(&other.made).find(|(a, b)| a.kept != b.kept);
        if let Some((made, _)) = unequal {
            let maker = made.name.as_made().map_or(NodeId::START, |(node, _)| node);
            let location = node(maker).key.location;
            return Some(Unequal { location, ops: (None, None), what: Property::Kept });
        }
        None
    }

    /// Returns the first difference in the values that two calls read before the op with this number.
    fn fetched_unequal(&self, other: &Recording, before: usize) -> Option<Unequal> {
        let number = self.fetched.iter().zip(&other.fetched);
        let number = number.take_while(|(a, b)| (a.at, a.slot, a.value) == (b.at, b.slot, b.value)).count();
        let at = |recording: &'_ Recording| {
            recording.fetched.get(number).copied().filter(|fetched| fetched.at <= before)
        };
        let (now, known) = (at(self), at(other));
        let Fetched { op, location, .. } = now.or(known)?;
        let same = now.zip(known).is_none_or(|(a, b)| a.slot == b.slot);
        let value = |fetched: Option<Fetched>| fetched.map(|fetched| fetched.value);
        let what = if same { Property::Fetched(number, value(known), value(now)) } else { Property::Storage };
        Some(Unequal { location, ops: (op, op), what })
    }

    /// Adds the feeds of a part's ops to a run. `make` creates a storage in place of one that the recorded call made.
    pub fn replay(
        &self,
        part: &Part,
        run: &mut BlockRun,
        values: &mut Values<'_>,
        mut make: impl FnMut(&Made) -> StorageId,
    ) {
        let Values { given, made, hosts } = values;
        let Some(first) = self.steps.get(part.steps.start) else { return };
        let (from, end) = (first.at, self.end(part.steps.end - 1));
        run.variants.extend(self.steps[part.steps.clone()].iter().map(|step| step.variant));
        run.storages.reserve(end.storages - from.storages);
        for slot in &self.slots[from.storages..end.storages] {
            let id = match *slot {
                Slot::Given(i) => given[i as usize].0,
                Slot::Made(i) => match made.get(i as usize) {
                    Some(id) => *id,
                    None => {
                        let id = make(&self.made[i as usize]);
                        made.push(id);
                        id
                    }
                },
            };
            run.storages.push(id);
        }
        let bases = given.iter().any(|(_, base)| *base != 0);
        let offset = run.offsets.len();
        run.offsets.extend_from_slice(&self.offsets[from.offsets..end.offsets]);
        if bases {
            let mut next = offset;
            for step in &self.steps[part.steps.clone()] {
                let slots = &self.slots[step.at.storages..][..step.inputs as usize];
                for slot in slots {
                    if let Slot::Given(i) = slot {
                        run.offsets[next] += given[*i as usize].1;
                    }
                    next += 1;
                }
            }
        }
        run.numbers.extend_from_slice(&self.numbers[from.numbers..end.numbers]);
        for (i, known) in (from.hosts..).zip(&self.hosts[from.hosts..end.hosts]) {
            run.hosts.extend(known.clone().or_else(|| hosts.remove(&i)));
        }
        run.generators.extend(self.generators[from.generators..end.generators].iter().cloned());
        let dropped = self.made.iter().zip(made.iter());
        let dropped = dropped.filter(|(m, _)| !m.lasts() && m.dropped == part.number);
        run.released.extend(dropped.map(|(_, id)| *id));
    }
}

/// Returns an element as a float of 64 bits. For an element of another type, that is zero or a tiny number.
fn float_of(element: &InlineValue) -> f64 {
    let [a, b, c, d, e, f, g, h, ..] = element.0;
    f64::from_ne_bytes([a, b, c, d, e, f, g, h])
}

fn element_of(number: f64) -> InlineValue {
    let mut element = [0; 16];
    element[..8].copy_from_slice(&number.to_ne_bytes());
    InlineValue(element)
}

/// Returns whether two fed host tensors have the same bytes.
fn same_contents(one: &Option<HostFeed>, two: &Option<HostFeed>) -> bool {
    match (one, two) {
        (None, None) => true,
        (Some(HostFeed::Inline(a)), Some(HostFeed::Inline(b))) => a == b,
        (Some(HostFeed::Buffer(a)), Some(HostFeed::Buffer(b))) => a.equals(b),
        _ => false,
    }
}
