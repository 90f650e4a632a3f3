//! Call locations: where in the program an op was issued.
//!
//! A forward op's location is the stack of Python frames, innermost first, each a code object and the
//! instruction in it. An op that autograd issues adds the forward location of the node that runs, and its
//! number among the ops of that node.

use rustc_hash::FxHashMap;

use crate::ids::LocationId;

/// A Python frame: an interned code object and `f_lasti`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Frame {
    /// The code object, as the bridge numbers it.
    pub code: u32,
    /// Instruction offset in it.
    pub instruction: i32,
}

/// What the op has to do with autograd.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Backward {
    /// Location of the forward op that made the running node.
    pub forward: LocationId,
    /// Number of the op among those of this node.
    pub ordinal: u32,
}

/// A call location.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Location {
    /// Innermost first.
    pub frames: Box<[Frame]>,
    /// Set while autograd runs a node.
    pub backward: Option<Backward>,
}

/// All locations of a program; equal ones share an id.
#[derive(Debug)]
pub struct Locations {
    table: Vec<Location>,
    ids: FxHashMap<Location, LocationId>,
}

impl Default for Locations {
    fn default() -> Self {
        let unknown = Location { frames: Box::default(), backward: None };
        Locations {
            ids: FxHashMap::from_iter([(unknown.clone(), LocationId::UNKNOWN)]),
            table: vec![unknown],
        }
    }
}

impl Locations {
    /// The id of a location.
    pub fn intern(&mut self, location: Location) -> LocationId {
        if let Some(&id) = self.ids.get(&location) {
            return id;
        }
        let id = LocationId(self.table.len() as u32);
        self.table.push(location.clone());
        self.ids.insert(location, id);
        id
    }

    /// The location of an id.
    pub fn get(&self, id: LocationId) -> &Location {
        &self.table[id.index()]
    }

    /// The frames that name a user's line best: those of the forward op, for a backward one.
    pub fn user_frames(&self, id: LocationId) -> &[Frame] {
        let location = self.get(id);
        match location.backward {
            Some(b) if b.forward != LocationId::UNKNOWN => self.user_frames(b.forward),
            _ => &location.frames,
        }
    }
}
