//! Typed ids: an index into one table, never a bare number.

macro_rules! ids {
    ($($(#[$doc:meta])* $name:ident($int:ty);)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
        pub struct $name(pub $int);

        impl $name {
            /// The id as an index into its table.
            pub fn index(self) -> usize {
                self.0 as usize
            }
        }
    )*};
}

ids! {
    /// An operator overload, numbered as the shim declares it.
    OpId(u32);
    /// A node of the TraceGraph; [`NodeId::START`] is the node before every iteration's first op.
    NodeId(u32);
    /// A block of the symbolic graph.
    BlockId(u32);
    /// A lowered block in an executor.
    PlanId(u32);
    /// A storage that is alive or whose release is on its way; reused afterwards.
    StorageId(u32);
    /// A storage that an iteration found, numbered by first use.
    SlotId(u32);
    /// A call location, see [`crate::location`].
    LocationId(u32);
}

impl NodeId {
    /// The node before every iteration's first op.
    pub const START: NodeId = NodeId(0);
}

impl LocationId {
    /// No location is known.
    pub const UNKNOWN: LocationId = LocationId(0);
}

/// What a trace calls a storage: relative to its iteration, so that one graph serves every iteration.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name(u64);

impl Name {
    /// The storage has not been used in this iteration and was not made in it.
    pub const NONE: Name = Name(u64::MAX);
    const SLOT: u64 = 1 << 63;

    /// The `fresh`-th storage made by `node`.
    pub fn made_by(node: NodeId, fresh: u16) -> Name {
        Name(u64::from(node.0) << 16 | u64::from(fresh))
    }

    /// A storage that the iteration found.
    pub fn slot(slot: SlotId) -> Name {
        Name(Name::SLOT | u64::from(slot.0))
    }

    /// The slot, where the name is one.
    pub fn as_slot(self) -> Option<SlotId> {
        (self != Name::NONE && self.0 & Name::SLOT != 0).then_some(SlotId(self.0 as u32))
    }

    /// The node that makes the storage and its number there.
    pub fn as_made(self) -> Option<(NodeId, u16)> {
        (self.0 & Name::SLOT == 0).then_some((NodeId((self.0 >> 16) as u32), self.0 as u16))
    }
}

impl std::fmt::Debug for Name {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match (self.as_slot(), self.as_made()) {
            (Some(slot), _) => write!(f, "s{}", slot.0),
            (None, Some((node, 0))) => write!(f, "%{}", node.0),
            (None, Some((node, fresh))) => write!(f, "%{}.{fresh}", node.0),
            (None, None) => write!(f, "?"),
        }
    }
}
