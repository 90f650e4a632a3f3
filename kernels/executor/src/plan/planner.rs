//! Construction of a plan.
//!
//! Adjacent point-wise ops become a group if each window that an op of the group writes either equals or does not
//! overlap each window that another op of the group accesses.

use std::ops::Range;

use rustc_hash::{FxHashMap, FxHashSet};
use tandem_tracegraph::call::{Arg, Call};
use tandem_tracegraph::ids::NodeId;
use tandem_tracegraph::node::{ArgSpec, InputSpec, NodeKey, Number};

use crate::ir::Mem;
use crate::ops::express::{Assignment, Operand, Owner, Param, TensorGeometry};
use crate::plan::action::{Action, Feed, Fused, Plan, Slot};
use crate::plan::draft::Draft;
use crate::plan::fuser::{Before, Ending, Fuser, RowSums};
use crate::plan::structure::Structure;
use crate::run::{Cursor, Liveness, OpRun, Program, Span, numbers_of, of_arg, with_op};
use crate::shapes::{Dims, is_contiguous};

/// Maximum number of ops in a group.
const GROUP_OPS: usize = 48;

/// An access of the open group to a storage or a fed host tensor.
#[derive(Clone)]
struct Access {
    lane: usize,
    offset: i64,
    mem: Mem,
    sizes: Dims,
    strides: Dims,
    written: bool,
}

pub struct Planner<'p, F: Fuser> {
    span: &'p Span<'p>,
    structure: &'p Structure,
    program: &'p Program,
    fuser: &'p mut F,
    plan: Plan<F::Group>,
    /// Open group: its draft, ops, sizes of lanes, accesses by storage, new storages, and storages to release after it.
    draft: Option<Draft<Slot, Feed>>,
    members: Range<u32>,
    lanes: Vec<Dims>,
    accesses: FxHashMap<Slot0, Vec<Access>>,
    new_storages: Vec<(u32, u64)>,
    waiting: Vec<u32>,
    /// Whether an op of the open group has no expression, so that the group's ops have to run one by one.
    broken: bool,
    /// Sums that the open group ends in, with the number of storages that the ops before the sums create.
    ending: Option<(Ending, usize)>,
    /// Latest op that runs by itself: index of the op in the plan, and index of its action.
    last: Option<(u32, usize)>,
}

/// A storage, by the index of its first occurrence in the span, or a fed host tensor, by its index.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Slot0 {
    Storage(u32),
    Host(u32),
}

/// An op's key and the position of its feeds in the streams. `inputs` is the number of inputs on storages.
struct At<'a> {
    key: &'a NodeKey,
    cursor: Cursor,
    inputs: u32,
}

impl<'p, F: Fuser> Planner<'p, F> {
    pub fn new(
        span: &'p Span<'p>,
        structure: &'p Structure,
        program: &'p Program,
        fuser: &'p mut F,
    ) -> Planner<'p, F> {
        Planner {
            span,
            structure,
            program,
            fuser,
            plan: Plan { ops: Vec::new(), actions: Vec::new() },
            draft: None,
            members: 0..0,
            lanes: Vec::new(),
            accesses: FxHashMap::default(),
            new_storages: Vec::new(),
            waiting: Vec::new(),
            broken: false,
            ending: None,
            last: None,
        }
    }

    pub fn make(mut self) -> Plan<F::Group> {
        let (span, program, structure) = (self.span, self.program, self.structure);
        let ops = program.ops(span);
        let mut liveness = Liveness::default();
        liveness.look(span, ops.iter().map(|(_, _, declared, variant)| (*declared, *variant)));
        let mut cursor = span.base;
        for (i, op) in ops.iter().copied().enumerate() {
            self.release(&mut liveness, i);
            let (at, dead) = (cursor.since(&span.base), liveness.is_dead(i));
            with_op(&mut cursor, op, span.run, dead, |op| {
                if dead {
                    return;
                }
                let inputs =
                    op.declared.key.inputs.iter().filter(|i| **i == InputSpec::Storage).count() as u32;
                let at = At { key: &op.declared.key, cursor: at, inputs };
                let new_storages = &op.variant.outputs.new_storages;
                let (slot, feed) = (|w: &TensorGeometry| slot(w, &at, structure), |p| feed(p, op.call, &at));
                let alone = self.fuser.alone(&op, &slot, &feed);
                let (is_alone, entry) = (alone.is_some(), (op.node, op.number, at.cursor));
                let action = |number: u32| match alone {
                    Some(group) => {
                        let first = at.cursor.storages as u32 + at.inputs;
                        let new_storages: Vec<(u32, u64)> =
                            (first..).zip(new_storages.iter().copied()).collect();
                        Self::fused(number..number + 1, group, &new_storages, &[])
                    }
                    None => Action::Op(number),
                };
                if op.call.inputs.is_empty() && !op.declared.draws {
                    self.put_ahead(entry, action);
                    return;
                }
                let number = self.plan.ops.len() as u32;
                self.plan.ops.push(entry);
                if is_alone {
                    if self.end(number, &op, &at, new_storages) {
                        return;
                    }
                    self.close();
                    self.plan.actions.push(action(number));
                    return;
                }
                let assignments = self.fuser.assignments(&op);
                if !assignments
                    .is_some_and(|assignments| self.join(number, op.call, &at, &assignments, new_storages))
                {
                    self.close();
                    self.last = Some((number, self.plan.actions.len()));
                    self.plan.actions.push(Action::Op(number));
                }
            });
        }
        self.release(&mut liveness, ops.len());
        self.close();
        self.plan
    }

    /// Inserts an op without inputs before the open group. If the group may become an epilogue of the preceding op,
    /// inserts the new op before that op, so that the group and that op stay adjacent.
    fn put_ahead(&mut self, op: (NodeId, u32, Cursor), action: impl FnOnce(u32) -> Action<F::Group>) {
        let group = if self.draft.is_some() { self.members.start } else { self.plan.ops.len() as u32 };
        let before = self.last.filter(|(number, _)| number + 1 == group);
        let (number, at) = before.unwrap_or((group, self.plan.actions.len()));
        self.plan.ops.insert(number as usize, op);
        self.plan.actions.insert(at, action(number));
        if before.is_some() {
            self.plan.actions[at + 1] = Action::Op(number + 1);
            self.last = Some((number + 1, at + 1));
        }
        self.members = self.members.start + 1..self.members.end + 1;
    }

    /// The action of a group. `made` lists the storages that the group's ops create, with their sizes in bytes, and
    /// `dropped` the storages that are not needed after the group.
    fn fused(ops: Range<u32>, group: F::Group, made: &[(u32, u64)], dropped: &[u32]) -> Action<F::Group> {
        let needed = |slot: &Slot| match slot {
            Slot::Storage(place, _) => (!made.iter().any(|(m, _)| m == place)).then_some(*place),
            Slot::Host(_) => None,
        };
        let needed = F::slots(&group).iter().filter_map(needed).collect();
        let new_storages = made.iter().filter(|(place, _)| !dropped.contains(place)).copied().collect();
        Action::Group(Box::new(Fused { ops, group, new_storages, needed, dropped: dropped.into() }))
    }

    /// Releases the storages that no op with an index of `i` or above uses. While a group is open, the release waits
    /// for the end of the group.
    fn release(&mut self, liveness: &mut Liveness, i: usize) {
        while let Some(id) = liveness.ended_before(i) {
            let place = self.span.storages.iter().position(|s| *s == id);
            let Some(place) = place else { continue };
            if self.draft.is_some() {
                self.waiting.push(place as u32);
            } else {
                self.plan.actions.push(Action::Release(place as u32));
            }
        }
    }

    /// Adds an op to the open group, or to a new one. Returns false if the op has to run by itself.
    fn join(
        &mut self,
        number: u32,
        call: &Call<'_>,
        at: &At<'_>,
        assignments: &[Assignment],
        new_storages: &[u64],
    ) -> bool {
        if assignments.iter().any(|assignment| assignment.out.sizes.contains(&0)) {
            return false;
        }
        let alike = self.draft.is_some()
            && self.ending.is_none()
            && self.members.len() < GROUP_OPS
            && assignments.len() == self.lanes.len()
            && assignments.iter().zip(&self.lanes).all(|(assignment, sizes)| assignment.out.sizes == *sizes);
        if !alike || !self.access(at, assignments) {
            self.close();
            self.lanes = assignments.iter().map(|assignment| assignment.out.sizes.clone()).collect();
            if !self.access(at, assignments) {
                self.accesses.clear();
                return false;
            }
            self.draft = Some(Draft::default());
            self.members = number..number;
        }
        let Some(draft) = &mut self.draft else { return false };
        let structure = self.structure;
        let added = draft.add(call, assignments, |w| slot(w, at, structure), |p| feed(p, call, at));
        self.members.end = number + 1;
        self.broken |= added.is_none();
        let first = at.cursor.storages as u32 + at.inputs;
        self.new_storages.extend(new_storages.iter().zip(first..).map(|(nbytes, place)| (place, *nbytes)));
        true
    }

    /// Makes an op the end of the open group if the op sums over the group's results. Returns false otherwise.
    fn end(&mut self, number: u32, op: &OpRun<'_, '_>, at: &At<'_>, new_storages: &[u64]) -> bool {
        let open = self.draft.is_some() && !self.broken && self.ending.is_none() && self.lanes.len() == 1;
        if !open || self.members.end != number {
            return false;
        }
        let Some(RowSums { from, times, to, rows }) = self.fuser.row_sums(op) else { return false };
        // Multiplication is commutative: if the group does not write `from`, it may write `times`.
        let (from, times) = match times {
            Some(times) if !self.gives(&from, at) => (times, Some(from)),
            times => (from, times),
        };
        let slot = |window: &TensorGeometry| slot(window, at, self.structure);
        let (first, factor) = (slot(&from), times.as_ref().map(slot));
        let read_only = |slot: Slot| match slot {
            Slot::Storage(place, _) => {
                self.accesses.get(&Slot0::Storage(place)).is_none_or(|all| !all.iter().any(|a| a.written))
            }
            Slot::Host(_) => false,
        };
        if !self.gives(&from, at) || !factor.is_none_or(|factor| factor == first || read_only(factor)) {
            return false;
        }
        let ending = Ending { from: first, times: factor, to: slot(&to), rows };
        self.ending = Some((ending, self.new_storages.len()));
        self.members.end = number + 1;
        let first = at.cursor.storages as u32 + at.inputs;
        self.new_storages.extend((first..).zip(new_storages.iter().copied()));
        true
    }

    /// Whether the open group writes a contiguous window and accesses that window's storage in no other way.
    fn gives(&self, window: &TensorGeometry, at: &At<'_>) -> bool {
        let Slot::Storage(place, offset) = slot(window, at, self.structure) else { return false };
        let Some(all) = self.accesses.get(&Slot0::Storage(place)) else { return false };
        let count = |sizes: &[i64]| sizes.iter().product::<i64>();
        let same = |a: &Access| {
            a.offset == offset
                && a.mem == window.mem
                && count(&a.sizes) == count(&window.sizes)
                && is_contiguous(&a.sizes, &a.strides)
        };
        all.iter().all(same) && all.iter().any(|a| a.written)
    }

    /// Records the accesses of an op. Returns false if the op cannot join the open group; the caller then discards the
    /// recorded accesses.
    fn access(&mut self, at: &At<'_>, assignments: &[Assignment]) -> bool {
        for (lane, assignment) in assignments.iter().enumerate() {
            let read = assignment.ins.iter().filter_map(|operand| match operand {
                Operand::TensorGeometry(window) => Some((window, false)),
                _ => None,
            });
            for (window, written) in read.chain([(&assignment.out, true)]) {
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
                let TensorGeometry { mem, sizes, strides, .. } = window;
                let (mem, sizes, strides) = (*mem, sizes.clone(), strides.clone());
                all.push(Access { lane, offset, mem, sizes, strides, written });
            }
        }
        self.tensors() <= self.fuser.most_tensors()
    }

    /// The number of storages that the first lane accesses, except the storages that the program drops within the
    /// group.
    fn tensors(&self) -> usize {
        let dropped: FxHashSet<Slot0> = self.waiting.iter().map(|place| Slot0::Storage(*place)).collect();
        let kept = self.accesses.iter().filter(|(storage, _)| !dropped.contains(storage));
        kept.filter(|(_, all)| all.iter().any(|a| a.lane == 0)).count()
    }

    /// Ends the open group.
    fn close(&mut self) {
        self.accesses.clear();
        self.lanes.clear();
        let mut made = std::mem::take(&mut self.new_storages);
        let waiting = std::mem::take(&mut self.waiting);
        let ending = self.ending.take();
        if let Some(mut draft) = self.draft.take() {
            let summed = ending.as_ref().map(|(ending, _)| ending.from);
            draft.drop_slots(|slot| {
                Some(slot) != summed && matches!(slot, Slot::Storage(place, _) if waiting.contains(&place))
            });
            match ending {
                None => self.close_with(draft, self.members.clone(), &made, &waiting),
                Some((ending, before)) => match self.fuser.compile_with_sums(draft, &ending, &same_storage) {
                    Ok(group) => {
                        let fused = Self::fused(self.members.clone(), group, &made, &waiting);
                        self.plan.actions.push(fused);
                    }
                    Err(draft) => {
                        let sums = self.members.end - 1;
                        let read = |place: &u32| {
                            let is = |slot| matches!(slot, Slot::Storage(p, _) if p == *place);
                            is(ending.from) || ending.times.is_some_and(is)
                        };
                        let dropped: Vec<u32> = waiting.iter().copied().filter(|p| !read(p)).collect();
                        made.truncate(before);
                        self.close_with(draft, self.members.start..sums, &made, &dropped);
                        self.plan.actions.push(Action::Op(sums));
                    }
                },
            }
        }
        self.plan.actions.extend(waiting.into_iter().map(Action::Release));
    }

    /// Adds the actions of a draft: as an epilogue of the preceding op, as a group, or op by op.
    fn close_with(
        &mut self,
        draft: Draft<Slot, Feed>,
        ops: Range<u32>,
        made: &[(u32, u64)],
        dropped: &[u32],
    ) {
        if std::mem::take(&mut self.broken) {
            self.plan.actions.extend(ops.map(Action::Op));
        } else if draft.lanes.iter().all(|lane| lane.stores().next().is_none()) {
            // Nothing is stored, because the program has dropped all results of the group.
        } else if let Some((group, at, own)) = self.epilogue(&draft) {
            // The preceding op allocates its storages itself. They are not needed before the group, and not allocated
            // for the group.
            let made: Vec<(u32, u64)> =
                made.iter().copied().chain(own.clone().map(|place| (place, 0))).collect();
            let dropped: Vec<u32> = dropped.iter().copied().chain(own).collect();
            self.plan.actions[at] = Self::fused(ops.start - 1..ops.end, group, &made, &dropped);
        } else {
            match self.fuser.compile(draft, &same_storage) {
                Some(group) => self.plan.actions.push(Self::fused(ops, group, made, dropped)),
                None => self.plan.actions.extend(ops.map(Action::Op)),
            }
        }
    }
}

/// Whether two slots are in the same memory.
fn same_storage(a: Slot, b: Slot) -> bool {
    match (a, b) {
        (Slot::Storage(a, _), Slot::Storage(b, _)) => a == b,
        (a, b) => a == b,
    }
}

impl<F: Fuser> Planner<'_, F> {
    /// Compiles the draft as an epilogue of the op directly before it. Returns the group, the index of that op's
    /// action, which the group's action replaces, and the storages that the op creates.
    fn epilogue(&mut self, draft: &Draft<Slot, Feed>) -> Option<(F::Group, usize, Range<u32>)> {
        let (number, at) = self.last.filter(|(number, _)| number + 1 == self.members.start)?;
        let (node, variant, cursor) = self.plan.ops[number as usize];
        let (declared, known) = self.program.op(node, variant)?;
        let inputs = declared.key.inputs.iter().filter(|i| **i == InputSpec::Storage).count();
        let given = &self.structure.first[cursor.storages..cursor.storages + inputs];
        let first = (cursor.storages + inputs) as u32;
        let made = first..first + known.outputs.new_storages.len() as u32;
        let (mut cursor, mut group) = (cursor.absolute(&self.span.base), None);
        with_op(&mut cursor, (node, variant, declared, known), self.span.run, false, |op| {
            group = self.fuser.epilogue(&Before { number, op: &op, made: made.clone(), given }, draft);
        });
        Some((group?, at, made))
    }
}

/// The number of inputs of a kind before the input with flat index `flat`.
fn before(key: &NodeKey, flat: u32, kind: InputSpec) -> u32 {
    key.inputs[..flat as usize].iter().filter(|i| **i == kind).count() as u32
}

fn slot(window: &TensorGeometry, at: &At<'_>, structure: &Structure) -> Slot {
    let size = i64::from(window.mem.size());
    match window.owner {
        Owner::NewStorage(i) => {
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
