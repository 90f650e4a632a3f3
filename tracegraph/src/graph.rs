//! The TraceGraph: all traces of a program, merged (Terra, section 4.1).
//!
//! A directed acyclic graph of ops; every iteration is a path from [`NodeId::START`] to a node that ends one.
//! A new trace follows the children of the last matched node; where none is equal it rejoins an equal node
//! further on, or branches into a new node.

use petgraph::algo::has_path_connecting;
use petgraph::graph::{DiGraph, NodeIndex};
use petgraph::visit::EdgeRef;
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use crate::call::{Call, Place};
use crate::ids::{LocationId, Name, NodeId, OpId, SlotId, StorageId};
use crate::node::{Node, NodeKey, Variants};
use crate::ops::OpInfo;

/// Which slots the running iteration has bound.
#[derive(Debug, Default)]
pub struct Slots {
    bound: Vec<bool>,
}

impl Slots {
    /// Forgets all bindings: a new iteration begins.
    pub fn clear(&mut self) {
        self.bound.fill(false);
    }

    /// Whether the slot names a storage of this iteration already.
    pub fn is_bound(&self, slot: SlotId) -> bool {
        self.bound.get(slot.index()).copied().unwrap_or(false)
    }

    /// Marks a slot as bound.
    pub fn bind(&mut self, slot: SlotId) {
        if self.bound.len() <= slot.index() {
            self.bound.resize(slot.index() + 1, false);
        }
        self.bound[slot.index()] = true;
    }
}

/// Names that matching a call gives to storages, not yet committed.
pub type Bindings = SmallVec<[(StorageId, Name); 4]>;

/// That one op followed another.
#[derive(Clone, Copy, Debug)]
struct Followed {
    /// The iteration that was traced so last.
    last: u64,
}

/// The merged traces.
#[derive(Debug)]
pub struct TraceGraph {
    graph: DiGraph<Node, Followed>,
    by_key: FxHashMap<NodeKey, SmallVec<[NodeId; 1]>>,
    slots: u32,
    /// The iteration in which each node was last merged: those of the running one lead to where it is.
    merged_in: Vec<u64>,
    iteration: u64,
    /// The last iteration in which an op was merged.
    last_merged: u64,
}

const FIRST_ITERATION: u64 = 1;

impl Default for TraceGraph {
    fn default() -> Self {
        let mut graph = DiGraph::new();
        graph.add_node(Node {
            key: NodeKey {
                op: OpId(u32::MAX),
                args: Box::default(),
                inputs: Box::default(),
                modes: 0,
                location: LocationId::UNKNOWN,
            },
            sources: Vec::new(),
            variants: Variants::default(),
            fetched: false,
            ends: false,
            dynamic: false,
        });
        TraceGraph {
            graph,
            by_key: FxHashMap::default(),
            slots: 0,
            merged_in: vec![0],
            iteration: FIRST_ITERATION,
            last_merged: FIRST_ITERATION,
        }
    }
}

fn index(node: NodeId) -> NodeIndex {
    NodeIndex::new(node.index())
}

impl TraceGraph {
    /// Number of nodes, the start included.
    pub fn len(&self) -> usize {
        self.graph.node_count()
    }

    /// Whether no trace was merged yet.
    pub fn is_empty(&self) -> bool {
        self.len() == 1
    }

    /// A node. The start has no meaningful key.
    #[inline]
    pub fn node(&self, id: NodeId) -> &Node {
        &self.graph[index(id)]
    }

    /// A node, to add variants and marks.
    pub fn node_mut(&mut self, id: NodeId) -> &mut Node {
        &mut self.graph[index(id)]
    }

    /// The ops that have followed a node, oldest first.
    pub fn children(&self, id: NodeId) -> SmallVec<[NodeId; 4]> {
        let mut children: SmallVec<[NodeId; 4]> =
            self.graph.neighbors(index(id)).map(|n| NodeId(n.index() as u32)).collect();
        children.reverse();
        children
    }

    /// The ops that have followed a node, without those that did so in the first iteration only. That one sets
    /// up (parameters, an optimizer's state), and its branches would cut every later one to pieces. Where its path
    /// is taken again, that is a divergence, once.
    pub fn warm_children(&self, id: NodeId) -> SmallVec<[NodeId; 4]> {
        let warm = self.graph.edges(index(id)).filter(|e| self.is_warm(e.weight()));
        let mut children: SmallVec<[NodeId; 4]> = warm.map(|e| NodeId(e.target().index() as u32)).collect();
        children.reverse();
        children
    }

    /// How many ops have preceded a node, counted as [`TraceGraph::warm_children`].
    pub fn warm_parents(&self, id: NodeId) -> usize {
        let incoming = self.graph.edges_directed(index(id), petgraph::Incoming);
        incoming.filter(|e| self.is_warm(e.weight())).count()
    }

    fn is_warm(&self, followed: &Followed) -> bool {
        followed.last > FIRST_ITERATION || self.last_merged == FIRST_ITERATION
    }

    /// All ids, the start included.
    pub fn ids(&self) -> impl Iterator<Item = NodeId> + use<> {
        (0..self.len() as u32).map(NodeId)
    }

    /// Number of paths from start to end, saturating.
    pub fn paths(&self) -> u64 {
        let order = petgraph::algo::toposort(&self.graph, None).unwrap_or_default();
        let mut count = vec![0u64; self.len()];
        count[0] = 1;
        let mut total = 0u64;
        for n in order {
            if self.graph[n].ends {
                total = total.saturating_add(count[n.index()]);
            }
            for child in self.graph.neighbors(n) {
                count[child.index()] = count[child.index()].saturating_add(count[n.index()]);
            }
        }
        total
    }

    /// Names for a call's storages such that its inputs come from where `node`'s have come; `None` where
    /// they come from elsewhere.
    #[inline]
    pub fn bind_inputs(&self, node: NodeId, call: &Call<'_>, slots: &Slots) -> Option<Bindings> {
        let mut bindings = Bindings::new();
        for (input, sources) in call.inputs.iter().zip(&self.node(node).sources) {
            let Place::Storage { id, name, .. } = input.place else { continue };
            let name = if name == Name::NONE { pending(&bindings, id) } else { name };
            if name != Name::NONE {
                if !sources.contains(&name) {
                    return None;
                }
                continue;
            }
            let free = |n: &&Name| {
                n.as_slot().is_some_and(|s| !slots.is_bound(s)) && !bindings.iter().any(|(_, b)| b == *n)
            };
            bindings.push((id, *sources.iter().find(free)?));
        }
        Some(bindings)
    }

    /// A new iteration begins.
    pub fn next_iteration(&mut self) {
        self.iteration += 1;
    }

    /// Merges one op of a running trace behind `at`. Returns its node, the names its inputs took, and
    /// whether the graph grew.
    pub fn merge(
        &mut self,
        at: NodeId,
        call: &Call<'_>,
        info: &OpInfo,
        location: LocationId,
        slots: &Slots,
    ) -> (NodeId, Bindings, bool) {
        let key = NodeKey::of(call, info, location);
        let known = self.child(at, &key, call, slots);
        let node = known.or_else(|| self.rejoin(at, &key, call, slots));
        let node = node.unwrap_or_else(|| self.insert(key, info.dynamic_shape));
        self.graph.update_edge(index(at), index(node), Followed { last: self.iteration });
        self.last_merged = self.iteration;
        self.merged_in[node.index()] = self.iteration;
        let (bindings, grew) = self.join_inputs(node, call, slots);
        (node, bindings, grew || known.is_none())
    }

    fn child(&self, at: NodeId, key: &NodeKey, call: &Call<'_>, slots: &Slots) -> Option<NodeId> {
        let mut equal = self.children(at);
        equal.retain(|c| self.node(*c).key == *key);
        self.best(&equal, call, slots)
    }

    /// An equal node that does not lead back to `at`.
    fn rejoin(&self, at: NodeId, key: &NodeKey, call: &Call<'_>, slots: &Slots) -> Option<NodeId> {
        let mut equal: SmallVec<[NodeId; 4]> = self.by_key.get(key)?.iter().copied().collect();
        equal.retain(|n| {
            *n != at
                && self.merged_in[n.index()] != self.iteration
                && !has_path_connecting(&self.graph, index(*n), index(at), None)
        });
        self.best(&equal, call, slots)
    }

    /// Of equal nodes, the first whose inputs come from where the call's come; else the first.
    fn best(&self, equal: &[NodeId], call: &Call<'_>, slots: &Slots) -> Option<NodeId> {
        let fits = |n: &&NodeId| self.bind_inputs(**n, call, slots).is_some();
        equal.iter().find(fits).or(equal.first()).copied()
    }

    fn insert(&mut self, key: NodeKey, dynamic: bool) -> NodeId {
        let sources = vec![SmallVec::new(); key.inputs.len()];
        let node = Node {
            key: key.clone(),
            sources,
            variants: Variants::default(),
            fetched: false,
            ends: false,
            dynamic,
        };
        let id = NodeId(self.graph.add_node(node).index() as u32);
        self.by_key.entry(key).or_default().push(id);
        self.merged_in.push(0);
        id
    }

    /// Names a call's storages as `node` knows them, adding names that are new to it.
    fn join_inputs(&mut self, node: NodeId, call: &Call<'_>, slots: &Slots) -> (Bindings, bool) {
        let mut bindings = Bindings::new();
        let mut grew = false;
        for (i, input) in call.inputs.iter().enumerate() {
            let Place::Storage { id, name, home } = input.place else { continue };
            let mut name = if name == Name::NONE { pending(&bindings, id) } else { name };
            if name == Name::NONE {
                name = self.choose_slot(node, i, home, slots, &bindings);
                bindings.push((id, name));
            }
            let sources = &mut self.graph[index(node)].sources[i];
            if !sources.contains(&name) {
                sources.push(name);
                grew = true;
            }
        }
        (bindings, grew)
    }

    /// A slot that the node knows, else the one the storage had last time, else a new one.
    fn choose_slot(
        &mut self,
        node: NodeId,
        input: usize,
        home: Name,
        slots: &Slots,
        taken: &Bindings,
    ) -> Name {
        let free =
            |n: &Name| n.as_slot().is_some_and(|s| !slots.is_bound(s)) && !taken.iter().any(|(_, b)| b == n);
        let known = self.node(node).sources[input].iter().copied().find(free);
        known.or(Some(home).filter(free)).unwrap_or_else(|| {
            self.slots += 1;
            Name::slot(SlotId(self.slots - 1))
        })
    }
}

fn pending(bindings: &Bindings, id: StorageId) -> Name {
    bindings.iter().find(|(b, _)| *b == id).map_or(Name::NONE, |(_, n)| *n)
}
