//! Bundles: maps of the same structure on different tensors, computed by one kernel. An optimizer with many tensors needs
//! one launch for several of them.
//!
//! Each workgroup computes elements of one member. Members differ in the buffers that they are bound to and in their
//! parameters.

use crate::linear::buffer;
use crate::store::Store;
use tandem_executor::ir::{E, Var};

/// Maps that one kernel computes. Their expressions number buffers and parameters as in the map of one member.
#[derive(Clone, Debug)]
pub struct Bundle {
    /// Number of elements of a member.
    pub count: E,
    /// Index of the element.
    pub element: Var,
    /// Stores for one element.
    pub stores: Vec<Store>,
    /// Loads of the stores' values.
    pub loads: Vec<E>,
    /// Number of elements that a thread computes, one after the other in memory.
    pub lanes: u32,
    /// For each member, the kernel's buffer for each buffer of the map.
    pub bufs: Vec<Box<[u32]>>,
    /// Location of each parameter of the map.
    pub places: Box<[Place]>,
    /// Index of the first member's parameters; a multiple of 4.
    pub own: u32,
    /// Number of parameters of a member; a multiple of 4.
    pub step: u32,
}

/// Location of a map's parameter in the kernel's parameters. The kernel's first parameters are the numbers of the
/// members' first workgroups, without the first member's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Place {
    /// Index in the kernel's parameters.
    Shared(u32),
    /// Index in each member's own parameters, of which the first is the number of the member's first workgroup.
    Own(u32),
}

impl Bundle {
    /// The kernel's buffer for a buffer of the map, if all members have the same buffer.
    pub fn shared(&self, buf: u32) -> Option<u32> {
        let mut all = self.bufs.iter().map(|bufs| bufs[buf as usize]);
        let first = all.next()?;
        all.all(|other| other == first).then_some(first)
    }

    /// Whether an expression differs between the elements of a member.
    pub fn differs(&self, e: &E) -> bool {
        e.0.free.contains(&self.element)
    }

    /// The kernel's buffers that are accessed element by element.
    pub fn accessed(&self) -> impl Iterator<Item = u32> {
        let loads = self.loads.iter().filter(|load| self.differs(load)).filter_map(buffer);
        let all = loads.chain(self.stores.iter().map(|s| s.buf));
        all.flat_map(|buf| self.bufs.iter().map(move |bufs| bufs[buf as usize]))
    }
}
