//! Typed ids. Each is an index into one table.

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
    /// The id of an operator overload, as numbered by the shim.
    OpId(u32);
    /// The id of a node of the TraceGraph.
    NodeId(u32);
    /// The id of a block of the symbolic graph.
    BlockId(u32);
    /// The id of a loop of the TraceGraph or of the symbolic graph.
    LoopId(u32);
    /// The id of a storage. It is reused after the storage's release has been processed.
    StorageId(u32);
    /// The id of a call location; see [`crate::location`].
    LocationId(u32);
}

impl NodeId {
    /// The node before every iteration's first op.
    pub const START: NodeId = NodeId(0);
}

impl BlockId {
    /// First id of the blocks of functions. The symbolic graph's ids are below it.
    const FUNCTIONS: u32 = 1 << 31;

    /// The id of the function's block with this number.
    pub fn of_function(number: u32) -> BlockId {
        BlockId(BlockId::FUNCTIONS | number)
    }

    /// The number of a function's block, or `None` for a block of the symbolic graph.
    #[inline]
    pub fn as_function(self) -> Option<usize> {
        self.0.checked_sub(BlockId::FUNCTIONS).map(|number| number as usize)
    }
}

impl LocationId {
    /// An unknown location.
    pub const UNKNOWN: LocationId = LocationId(0);
}

/// The name of a storage in traces. It is relative to the iteration, so that one graph is valid for all iterations.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name(u64);

impl Name {
    /// A storage that existed before the iteration, such as a parameter or a buffer.
    pub const STATE: Name = Name(u64::MAX);
    /// Any storage, for an input with too many different sources.
    pub const ANY: Name = Name(u64::MAX - 1);

    /// The storage with index `number` among those that `node` creates, in any round of a loop.
    pub fn made_by(node: NodeId, number: u16) -> Name {
        Name(u64::from(node.0) << 16 | u64::from(number))
    }

    /// The node that creates the storage, and the storage's index there. `None` for [`Name::STATE`] and
    /// [`Name::ANY`].
    pub fn as_made(self) -> Option<(NodeId, u16)> {
        (self < Name::ANY).then_some((NodeId((self.0 >> 16) as u32), self.0 as u16))
    }
}

impl std::fmt::Display for Name {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.as_made() {
            Some((node, 0)) => write!(f, "%{}", node.0),
            Some((node, number)) => write!(f, "%{}.{number}", node.0),
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
