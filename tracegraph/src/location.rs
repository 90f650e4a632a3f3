//! Call locations: where in the program an op was issued.
//!
//! A forward op's location is the stack of Python frames, innermost first, each a code object and the
//! instruction in it. An op that autograd issues adds the forward location of the node that runs, and its
//! number among the ops of that node.
//!
//! Recursion is folded: frames that repeat those just above them count once ([`fold_recursion`]), so a recursive
//! program has as many locations as it has ways to call itself, however deep it goes.

use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use crate::ids::LocationId;

/// A Python frame: an interned code object and `f_lasti`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Frame {
    /// The code object, as the bridge numbers it.
    pub code: u32,
    /// Instruction offset in it.
    pub instruction: i32,
}

/// Frames that may make up one round of a recursion.
const MAX_PERIOD: usize = 24;
/// Rounds of code that calls itself in changing ways, beyond which all of them count as one.
const MAX_ROUNDS: usize = 8;

/// Leaves out what repeats in a stack: a run of frames equal to the run just above it, and beyond a depth all
/// frames between two of the same code.
pub fn fold_recursion(frames: &mut SmallVec<[Frame; 48]>) {
    let mut folded: SmallVec<[Frame; 48]> = SmallVec::new();
    for frame in frames.iter().rev() {
        folded.push(*frame);
        let n = folded.len();
        let repeats = |p: &usize| folded[n - 2 * p..n - p] == folded[n - p..];
        if let Some(period) = (1..=MAX_PERIOD.min(n / 2)).find(repeats) {
            folded.truncate(n - period);
        }
    }
    // What is left of deep recursion are different ways to recurse, one in the other.
    while let Some(code) = crowded(&folded) {
        let of_code = |f: &Frame| f.code == code;
        let (Some(first), Some(last)) = (folded.iter().position(of_code), folded.iter().rposition(of_code))
        else {
            break;
        };
        folded.drain(first..last);
    }
    folded.reverse();
    *frames = folded;
}

/// A code object that a stack shows too often.
fn crowded(frames: &[Frame]) -> Option<u32> {
    if frames.len() <= 2 * MAX_PERIOD {
        return None;
    }
    let mut times: FxHashMap<u32, usize> = FxHashMap::default();
    frames
        .iter()
        .find(|f| {
            let seen = times.entry(f.code).or_default();
            *seen += 1;
            *seen > MAX_ROUNDS
        })
        .map(|f| f.code)
}

/// What the op has to do with autograd.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Backward {
    /// Location of the forward op that made the running node, or the last one that had such an op.
    pub forward: LocationId,
    /// Nodes without a forward op since that one.
    pub behind: u32,
    /// Number of the op among those of this node that were issued from the same frames: what a hook issues does
    /// not count for what comes behind it.
    pub ordinal: u32,
}

/// An interned stack of frames.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct StackId(u32);

/// A call location.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Location {
    /// The frames.
    pub stack: StackId,
    /// Set while autograd runs a node.
    pub backward: Option<Backward>,
}

/// All locations of a program; equal ones share an id.
#[derive(Debug)]
pub struct Locations {
    stacks: Vec<Box<[Frame]>>,
    stack_ids: FxHashMap<Box<[Frame]>, StackId>,
    table: Vec<Location>,
    ids: FxHashMap<Location, LocationId>,
}

impl Default for Locations {
    fn default() -> Self {
        let mut locations = Locations {
            stacks: Vec::new(),
            stack_ids: FxHashMap::default(),
            table: Vec::new(),
            ids: FxHashMap::default(),
        };
        let stack = locations.intern_stack(&[]);
        let unknown = locations.intern(Location { stack, backward: None });
        debug_assert_eq!(unknown, LocationId::UNKNOWN);
        locations
    }
}

impl Locations {
    /// The id of frames, innermost first.
    pub fn intern_stack(&mut self, frames: &[Frame]) -> StackId {
        if let Some(&id) = self.stack_ids.get(frames) {
            return id;
        }
        let id = StackId(self.stacks.len() as u32);
        self.stacks.push(frames.into());
        self.stack_ids.insert(frames.into(), id);
        id
    }

    /// The id of a location.
    pub fn intern(&mut self, location: Location) -> LocationId {
        let next = LocationId(self.table.len() as u32);
        let id = *self.ids.entry(location).or_insert(next);
        if id == next {
            self.table.push(location);
        }
        id
    }

    /// The location of an id.
    pub fn get(&self, id: LocationId) -> Location {
        self.table[id.index()]
    }

    /// The frames of a location, innermost first.
    pub fn frames(&self, id: LocationId) -> &[Frame] {
        &self.stacks[self.get(id).stack.0 as usize]
    }

    /// The frames that name a user's line best: those of the forward op, for a backward one.
    pub fn user_frames(&self, id: LocationId) -> &[Frame] {
        match self.get(id).backward {
            Some(b) if b.forward != LocationId::UNKNOWN => self.user_frames(b.forward),
            _ => self.frames(id),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Frames outermost first: code and instruction.
    fn fold(stack: &[(u32, i32)]) -> Vec<(u32, i32)> {
        let mut frames = stack.iter().rev().map(|(code, i)| Frame { code: *code, instruction: *i }).collect();
        fold_recursion(&mut frames);
        frames.iter().rev().map(|f| (f.code, f.instruction)).collect()
    }

    #[test]
    fn recursion_of_any_depth_is_one_location() {
        assert_eq!(fold(&[(0, 1), (7, 3), (7, 9)]), [(0, 1), (7, 3), (7, 9)]);
        assert_eq!(fold(&[(0, 1), (7, 3), (7, 3), (7, 3), (7, 9)]), [(0, 1), (7, 3), (7, 9)]);
    }

    #[test]
    fn two_recursive_calls_have_few_locations() {
        // All ways down a binary tree of depth 12.
        let ways = (0..1u32 << 12).map(|way| {
            let calls = (0..12).map(|level| (7, if way >> level & 1 == 0 { 3 } else { 5 }));
            fold(&[(0, 1)].into_iter().chain(calls).chain([(7, 9)]).collect::<Vec<_>>())
        });
        assert!(ways.collect::<std::collections::HashSet<_>>().len() <= 6);
    }

    #[test]
    fn modules_in_modules_are_no_recursion() {
        let stack = [(0, 1), (1, 4), (2, 4), (3, 8), (1, 4), (2, 4), (4, 8), (1, 4), (2, 4), (5, 8)];
        assert_eq!(fold(&stack), stack);
    }

    #[test]
    fn many_ways_to_recurse_are_bounded() {
        // Square-free: no run of calls repeats. Each call stands for three frames.
        let mut word = vec![0];
        while word.len() < 500 {
            word =
                word.iter().flat_map(|c| [vec![0, 1, 2], vec![0, 2], vec![1]][*c as usize].clone()).collect();
        }
        let stack: Vec<(u32, i32)> = word.iter().flat_map(|c| [(1, 4), (2, 4), (7, *c)]).collect();
        assert!(fold(&stack).len() <= 2 * MAX_PERIOD);
    }
}
