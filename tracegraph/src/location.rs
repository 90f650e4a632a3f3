//! Call locations: the places of the program that issue ops.
//!
//! The location of a forward op is the stack of Python frames, innermost first, each a code object and an
//! instruction in it. The location of an op that autograd issues also contains the forward location of the autograd
//! node that runs, and the index of the op among the ops of that node.
//!
//! Recursion is folded ([`fold_recursion`]): frames that repeat those directly above them count once. The number of
//! locations of a recursive program thus depends on its recursive calls and not on their depth.

use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use crate::ids::LocationId;

/// A Python frame: an interned code object and `f_lasti`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Frame {
    /// Code object, as numbered by the bridge.
    pub code: u32,
    /// Offset of the instruction in the code object.
    pub instruction: i32,
}

/// Maximum number of frames in one round of a recursion.
const MAX_PERIOD: usize = 24;
/// Maximum number of frames of one code object in a deep stack. If there are more, all frames between the first and the
/// last frame of the code object are removed.
const MAX_ROUNDS: usize = 8;

/// Removes repetitions from a stack: each sequence of frames equal to the sequence directly above it and, in deep
/// stacks, all frames between the first and the last frame of a code object that has more than [`MAX_ROUNDS`] frames.
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
    // A stack that is still deep consists of different nested recursive calls.
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

/// A code object with more than [`MAX_ROUNDS`] frames, if the stack is deep.
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

/// The position of an op in the backward pass.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Backward {
    /// Location of the forward op that created the running autograd node. If the node has no forward op, the location
    /// of the latest node that had one.
    pub forward: LocationId,
    /// Number of autograd nodes without a forward op that have run since the latest node with one.
    pub unmatched: u32,
    /// Index of the op among the ops that this autograd node issued from the same frames. Ops that a hook issues have
    /// other frames, so they do not shift the indices of later ops.
    pub ordinal: u32,
}

/// The id of an interned stack of frames.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct StackId(u32);

/// A call location.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Location {
    /// Stack of Python frames.
    pub stack: StackId,
    /// Position in the backward pass, while autograd runs a node.
    pub backward: Option<Backward>,
}

/// All locations of a program, interned.
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
    /// The id of a stack of frames, innermost first.
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

    /// The location with an id.
    pub fn get(&self, id: LocationId) -> Location {
        self.table[id.index()]
    }

    /// The frames of a location, innermost first.
    pub fn frames(&self, id: LocationId) -> &[Frame] {
        &self.stacks[self.get(id).stack.0 as usize]
    }

    /// The frames that lead to the user's line: those of the forward op if the location is in the backward pass.
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

    /// Folds a stack of (code, instruction) pairs, outermost first.
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
        // All paths through a binary tree of depth 12.
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
        // A square-free sequence, in which no run of calls repeats. Each call stands for three frames.
        let mut word = vec![0];
        while word.len() < 500 {
            word =
                word.iter().flat_map(|c| [vec![0, 1, 2], vec![0, 2], vec![1]][*c as usize].clone()).collect();
        }
        let stack: Vec<(u32, i32)> = word.iter().flat_map(|c| [(1, 4), (2, 4), (7, *c)]).collect();
        assert!(fold(&stack).len() <= 2 * MAX_PERIOD);
    }
}
