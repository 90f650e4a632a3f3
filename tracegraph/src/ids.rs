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
    /// A loop of the TraceGraph or of the symbolic graph.
    LoopId(u32);
    /// A storage that is alive or whose release is on its way; reused afterwards.
    StorageId(u32);
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
    /// The iteration found it: a parameter, a buffer, whatever the program carried over.
    pub const STATE: Name = Name(u64::MAX);
    /// Any storage: an input that has come from too many places to list.
    pub const ANY: Name = Name(u64::MAX - 1);

    /// The `fresh`-th storage made by `node`, in whichever round of a loop.
    pub fn made_by(node: NodeId, fresh: u16) -> Name {
        Name(u64::from(node.0) << 16 | u64::from(fresh))
    }

    /// The node that makes the storage and its number there.
    pub fn as_made(self) -> Option<(NodeId, u16)> {
        (self < Name::ANY).then_some((NodeId((self.0 >> 16) as u32), self.0 as u16))
    }
}

impl std::fmt::Display for Name {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.as_made() {
            Some((node, 0)) => write!(f, "%{}", node.0),
            Some((node, fresh)) => write!(f, "%{}.{fresh}", node.0),
            None if *self == Name::STATE => write!(f, "state"),
            None => write!(f, "any"),
        }
    }
}

impl std::fmt::Debug for Name {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{self}")
    }
}
