//! The graphs: the running trace, the TraceGraph that it is merged into, and the symbolic graph generated from it.

use std::sync::Arc;

use tandem_executor::ops::registry::Operators;
use tandem_executor::run::OpDeclaration;
use tandem_tracegraph::call::Call;
use tandem_tracegraph::graph::TraceGraph;
use tandem_tracegraph::ids::{BlockId, LocationId, NodeId, OpId};
use tandem_tracegraph::node::{Node, NodeKey, Outputs, Variant};
use tandem_tracegraph::ops::OpInfo;
use tandem_tracegraph::symbolic::{SymbolicGraph, generate};
use tandem_tracegraph::text::Listing;
use tandem_tracegraph::trace::Trace;
use tandem_tracegraph::verify::verify;

use super::schedule::Schedule;

/// Maximum number of ops that the trace of one iteration keeps.
const MAX_TRACE: usize = 200_000;
/// Maximum number of ops that are kept between two collectives.
const MAX_RECENT: usize = 4096;
/// Number of nodes above which the TraceGraph is discarded and started from scratch.
pub(super) const MAX_NODES: usize = 200_000;
/// Number of divergences and jumps in an unrolled loop after which it is no longer unrolled.
const MANY_MISSES: u8 = 8;

/// The trace, the TraceGraph and the symbolic graph.
#[derive(Debug)]
pub(super) struct Graphs {
    graph: TraceGraph,
    symbolic: SymbolicGraph,
    /// Ops of this iteration.
    trace: Trace,
    /// Number of ops of this iteration that are in the TraceGraph already. It is 0 unless the symbolic graph was
    /// generated within the iteration.
    told: usize,
    /// Number of nodes that the executor knows, including the start.
    declared: usize,
    schedule: Schedule,
    /// The ops since the last collective; `None` in a program without collectives.
    recent: Option<Vec<NodeId>>,
}

impl Graphs {
    /// Creates a TraceGraph without ops.
    pub(super) fn new() -> Graphs {
        Graphs {
            graph: TraceGraph::default(),
            symbolic: SymbolicGraph::default(),
            trace: Trace::default(),
            told: 0,
            declared: 1,
            schedule: Schedule::new(),
            recent: None,
        }
    }

    #[inline]
    pub(super) fn graph(&self) -> &TraceGraph {
        &self.graph
    }

    /// Returns the symbolic graph that co-execution walks.
    #[inline]
    pub(super) fn symbolic(&self) -> &SymbolicGraph {
        &self.symbolic
    }

    #[inline]
    pub(super) fn node(&self, id: NodeId) -> &Node {
        self.graph.node(id)
    }

    /// Returns the schedule of the symbolic graph.
    pub(super) fn schedule(&self) -> &Schedule {
        &self.schedule
    }

    /// Returns the schedule of the symbolic graph, for changes.
    pub(super) fn schedule_mut(&mut self) -> &mut Schedule {
        &mut self.schedule
    }

    /// Merges a traced op, which follows `at`. Returns its node.
    pub(super) fn merge(&mut self, at: NodeId, call: &Call<'_>, info: &OpInfo, key: NodeKey) -> NodeId {
        let known = self.graph.len();
        let (node, grew) = self.graph.merge(at, call, info, key);
        self.schedule.note_op(grew, self.graph.len() > known);
        node
    }

    /// Records that the cursor jumped from one op to another.
    pub(super) fn follow(&mut self, at: NodeId, node: NodeId) {
        let new = self.graph.follow(at, node);
        self.schedule.note_op(new, false);
        self.schedule.set_stale();
    }

    /// Records that `node` follows `at` when a function is replayed, as if the program had issued the op.
    pub(super) fn connect(&mut self, at: NodeId, node: NodeId) {
        if !self.graph.follows(at, node) {
            self.follow(at, node);
        }
    }

    /// Adds the sources of a call's inputs to its node.
    pub(super) fn add_sources(&mut self, node: NodeId, call: &Call<'_>) {
        self.graph.node_mut(node).add_sources(call);
    }

    /// Adds a variant for a call to its node. Returns the variant if the executor knows the node and lacks the variant.
    pub(super) fn learn_variant(
        &mut self,
        node: NodeId,
        call: &Call<'_>,
        info: &OpInfo,
        outputs: &Outputs,
    ) -> Option<Arc<Variant>> {
        let entry = self.graph.node(node);
        if entry.dynamic || info.is_dynamic(call) || entry.variant(call, info, 0).is_some() {
            return None;
        }
        let variant = Arc::new(Variant::of(&entry.key, call, info, outputs.clone()));
        let kept = self.graph.node_mut(node).add_variant(variant.clone());
        (kept && node.index() < self.declared).then_some(variant)
    }

    /// Adds an op that was issued to the trace.
    #[inline]
    pub(super) fn push(&mut self, node: NodeId) {
        if self.trace.len() < MAX_TRACE {
            self.trace.push(node);
        }
        if let Some(recent) = &mut self.recent
            && recent.len() < MAX_RECENT
        {
            recent.push(node);
        }
    }

    /// Returns the operators and locations of the ops since the previous call, of the first ones if there were more
    /// than [`MAX_RECENT`]. Only the first call makes ops be kept, so it returns none.
    pub(super) fn take_recent(&mut self) -> Vec<(OpId, LocationId)> {
        let recent = self.recent.get_or_insert_default();
        let place = |node: NodeId| (self.graph.node(node).key.op, self.graph.node(node).key.location);
        recent.drain(..).map(place).collect()
    }

    /// Records that a value was fetched after `at`, the latest op.
    pub(super) fn mark_fetched(&mut self, at: NodeId) {
        self.trace.mark_fetched();
        if !self.graph.node(at).fetched {
            self.graph.node_mut(at).fetched = true;
            self.schedule.set_stale();
        }
    }

    /// Records a divergence in a block. The symbolic graph lacks its path even if the TraceGraph has it.
    pub(super) fn diverged(&mut self, block: Option<BlockId>) {
        self.schedule.set_stale();
        self.missed(block);
    }

    /// Counts a divergence or jump in an unrolled loop. After many of them, the number of its rounds is considered
    /// variable, and the loop is no longer unrolled.
    pub(super) fn missed(&mut self, block: Option<BlockId>) {
        let Some(header) = block.and_then(|b| self.symbolic.block(b).unrolled) else { return };
        let node = self.graph.node_mut(header);
        node.misses = node.misses.saturating_add(1);
        node.varies |= node.misses >= MANY_MISSES;
    }

    /// Returns a hash of the path of the running iteration, or `None` if the trace is not complete.
    pub(super) fn path(&self) -> Option<u64> {
        (self.trace.len() < MAX_TRACE).then(|| self.trace.path())
    }

    /// Ends the trace of an iteration whose last op is `at`. The TraceGraph keeps the trace if the trace may have
    /// something new.
    pub(super) fn end_trace(&mut self, at: NodeId, recorded: bool, ops: u64, traced: u64) {
        let new_end = recorded && !self.graph.node(at).ends;
        self.graph.node_mut(at).ends |= recorded;
        let new = self.schedule.end_iteration(recorded, new_end, ops, traced);
        if new && self.trace.len() < MAX_TRACE {
            let trace = std::mem::take(&mut self.trace);
            self.graph.next_iteration(Some(trace));
        } else {
            self.graph.traces_mut().touch(self.trace.path());
            self.trace.clear();
            self.graph.next_iteration(None);
        }
    }

    /// Begins another iteration.
    pub(super) fn next_iteration(&mut self) {
        self.told = 0;
        self.schedule.next_iteration();
    }

    /// Returns whether the TraceGraph has too many nodes.
    pub(super) fn is_too_large(&self) -> bool {
        self.graph.len() > MAX_NODES
    }

    /// Returns whether the first symbolic graph has to be generated within the running iteration, which does not
    /// seem to end.
    pub(super) fn seems_endless(&self) -> bool {
        self.schedule.seems_endless(self.graph.len())
    }

    /// Returns whether the symbolic graph should be generated now because of an unexpected op that follows `at`. If the
    /// TraceGraph has this edge and the symbolic graph lacks it, the op comes at least for the second time in this
    /// iteration, and is likely to come again. `issued` is the number of ops issued so far.
    pub(super) fn repeats(&self, at: NodeId, node: NodeId, issued: u64) -> bool {
        self.graph.has_news()
            && self.graph.follows(at, node)
            && self.schedule.may_generate_within(issued, self.graph.len())
    }

    /// Marks the path of the running iteration so far in the TraceGraph, before the symbolic graph is generated.
    pub(super) fn tell_path(&mut self) {
        let told = std::mem::replace(&mut self.told, self.trace.len());
        let before = told.checked_sub(1).and_then(|last| self.trace.nodes().nth(last));
        self.graph.took(before.unwrap_or(NodeId::START), self.trace.nodes().skip(told));
    }

    /// Generates the symbolic graph. `issued` is the number of ops issued so far.
    pub(super) fn generate(&mut self, operators: &Operators, issued: u64) {
        let contraction = |n: NodeId| operators.get(self.graph.node(n).key.op).is_contraction;
        self.symbolic = generate(&self.graph, &contraction);
        for header in std::mem::take(&mut self.symbolic.varying) {
            self.graph.node_mut(header).varies = true;
        }
        self.schedule.generated(issued);
        self.graph.reset_news();
    }

    /// Returns the nodes that the executor does not know yet: the id of the first of them, and their ops.
    pub(super) fn declare_nodes(&mut self, ops: &[OpInfo]) -> (NodeId, Vec<OpDeclaration>) {
        let new = (self.declared as u32..self.graph.len() as u32).map(NodeId);
        let declare = |id| {
            let node = self.graph.node(id);
            let info = &ops[node.key.op.index()];
            OpDeclaration {
                key: node.key.clone(),
                variants: node.variants.to_vec(),
                writes: crate::feed::written_inputs(&node.key, info),
                sized_by_number: info.sized_by_number,
                draws: info.random,
                pure: info.pointwise && !info.random && !info.writes,
            }
        };
        let declared = new.map(declare).collect();
        let first = std::mem::replace(&mut self.declared, self.graph.len());
        (NodeId(first as u32), declared)
    }

    /// Returns the nodes of each block.
    pub(super) fn blocks(&self) -> Vec<Box<[NodeId]>> {
        self.symbolic.blocks.iter().map(|b| b.nodes.clone().into_boxed_slice()).collect()
    }

    /// Verifies the generated graph, with `TANDEM_DEBUG=3` and in builds with debug assertions.
    pub(super) fn check(&self, ops: &[OpInfo]) {
        let traced = tracing::enabled!(tracing::Level::TRACE);
        if traced {
            let name = |op: OpId| ops[op.index()].name.to_string();
            tracing::trace!("\n{}", Listing::of(&self.symbolic, &self.graph, &name));
        }
        if traced || cfg!(debug_assertions) {
            let violations = verify(&self.symbolic, &self.graph);
            for violation in &violations {
                tracing::error!(%violation, "the generated graph is wrong; please report it");
            }
            debug_assert!(violations.is_empty(), "{violations:?}");
        }
    }

    /// Discards the TraceGraph and the symbolic graph.
    pub(super) fn forget(&mut self) {
        self.graph = TraceGraph::default();
        self.symbolic = SymbolicGraph::default();
        self.declared = 1;
        self.schedule.forget();
        self.recent.iter_mut().for_each(Vec::clear);
    }
}

#[cfg(test)]
mod tests {
    use tandem_tracegraph::ops::{OpDecl, Traits, describe};

    use super::*;

    const SOME: u64 = 1000;

    /// A program of ops without arguments, each at a location of its own.
    struct Program {
        graphs: Graphs,
        ops: [OpInfo; 1],
        at: NodeId,
        issued: u64,
    }

    impl Program {
        fn new() -> Program {
            let decl = OpDecl {
                name: "aten::rand",
                args: Vec::new(),
                written: Vec::new(),
                returns_host: false,
                dynamic_shape: false,
                random: true,
                pointwise: false,
                foreign: false,
            };
            Program {
                graphs: Graphs::new(),
                ops: [describe(OpId(0), decl, &Traits::NONE)],
                at: NodeId::START,
                issued: 0,
            }
        }

        fn trace(&mut self, location: u32) -> NodeId {
            let call = Call::blank(OpId(0));
            let key = NodeKey::of(&call, &self.ops[0], LocationId(location));
            let node = self.graphs.merge(self.at, &call, &self.ops[0], key);
            self.issue(node);
            node
        }

        fn issue(&mut self, node: NodeId) {
            self.graphs.push(node);
            self.at = node;
            self.issued += 1;
        }

        fn end(&mut self, ops: u64, traced: u64) {
            self.graphs.end_trace(self.at, true, ops, traced);
            self.at = NodeId::START;
        }

        /// Traces an iteration with these locations. Returns whether the next one is co-executed.
        fn iteration(&mut self, locations: &[u32]) -> bool {
            for location in locations {
                self.trace(*location);
            }
            let ops = locations.len() as u64;
            self.end(ops, ops);
            let suffices = self.graphs.schedule.suffices(3);
            self.graphs.next_iteration();
            suffices
        }

        fn generate(&mut self) {
            let operators = Operators::new();
            operators.declare("aten::rand", &[]);
            self.graphs.generate(&operators, self.issued);
            self.graphs.check(&self.ops);
        }

        fn learn(&mut self, node: NodeId, nbytes: u64) -> bool {
            let outputs = Outputs { new_storages: [nbytes].as_slice().into(), ..Outputs::default() };
            self.graphs.learn_variant(node, &Call::blank(OpId(0)), &self.ops[0], &outputs).is_some()
        }
    }

    #[test]
    fn an_end_at_another_op_is_growth() {
        let mut program = Program::new();
        program.iteration(&[1, 2]);
        assert!(!program.iteration(&[1]), "no iteration has ended there");
        assert!(program.iteration(&[1]));
    }

    #[test]
    fn a_graph_is_generated_again_if_it_lacks_something() {
        let mut program = Program::new();
        program.iteration(&[1, 2]);
        program.iteration(&[1, 2]);
        assert!(program.graphs.schedule.must_generate());
        program.generate();
        assert!(!program.graphs.schedule.must_generate());
        let nodes: Vec<_> = program.graphs.symbolic().blocks.iter().map(|b| b.nodes.clone()).collect();
        assert_eq!(nodes, [[NodeId(1), NodeId(2)]]);
        let changes: [fn(&mut Graphs); 4] = [
            |graphs| graphs.follow(NodeId(2), NodeId(1)),
            |graphs| graphs.mark_fetched(NodeId(1)),
            |graphs| graphs.diverged(None),
            |graphs| graphs.end_trace(NodeId(1), true, 1, 0),
        ];
        for change in changes {
            change(&mut program.graphs);
            assert!(program.graphs.schedule.must_generate());
            program.generate();
            assert!(!program.graphs.schedule.must_generate());
        }
        program.graphs.mark_fetched(NodeId(1));
        assert!(!program.graphs.schedule.must_generate(), "the fetch is known");
    }

    #[test]
    fn an_edge_that_the_symbolic_graph_lacks_repeats_the_second_time() {
        let mut program = Program::new();
        program.iteration(&[1, 2, 3]);
        program.iteration(&[1, 2, 3]);
        program.generate();
        let (one, three) = (NodeId(1), NodeId(3));
        assert!(!program.graphs.repeats(one, three, SOME), "nothing has followed it");
        program.graphs.follow(one, three);
        assert!(program.graphs.repeats(one, three, SOME));
        assert!(!program.graphs.repeats(three, one, SOME), "that is another edge");
        assert!(!program.graphs.repeats(one, three, program.issued), "the last generation is too recent");
        program.generate();
        assert!(!program.graphs.repeats(one, three, SOME), "the graph has the edge");
    }

    #[test]
    fn a_loop_that_is_left_often_is_not_unrolled() {
        let mut program = Program::new();
        for _ in 0..3 {
            program.iteration(&[1, 2, 1, 2, 1, 2, 3]);
        }
        program.generate();
        let block = Some(program.graphs.symbolic().entry[0]);
        assert_eq!(program.graphs.symbolic().whiles.len(), 0);
        (1..MANY_MISSES).for_each(|_| program.graphs.missed(block));
        program.generate();
        assert_eq!(program.graphs.symbolic().whiles.len(), 0);
        let block = Some(program.graphs.symbolic().entry[0]);
        program.graphs.missed(block);
        program.generate();
        assert_eq!(program.graphs.symbolic().whiles.len(), 1);
    }

    #[test]
    fn the_executor_learns_each_node_and_each_variant_once() {
        let mut program = Program::new();
        let node = program.trace(1);
        assert!(!program.learn(node, 4), "the executor gets it with the node");
        let (first, steps) = program.graphs.declare_nodes(&program.ops);
        assert_eq!((first, steps.len(), steps[0].variants.len(), steps[0].draws), (NodeId(1), 1, 1, true));
        assert!(!program.learn(node, 4), "the variant is known");
        let later = program.trace(2);
        let (first, steps) = program.graphs.declare_nodes(&program.ops);
        assert_eq!((first, steps.len()), (later, 1));
        assert!(program.learn(later, 4));
        program.graphs.forget();
        program.at = NodeId::START;
        assert_eq!(program.graphs.declare_nodes(&program.ops).1.len(), 0);
        assert_eq!(program.trace(3), NodeId(1));
        assert_eq!(program.graphs.declare_nodes(&program.ops).0, NodeId(1));
    }

    #[test]
    fn a_trace_beyond_the_maximum_is_not_kept() {
        let mut program = Program::new();
        program.iteration(&[1, 2]);
        program.iteration(&[1, 2]);
        let kept = program.graphs.graph().traces().len();
        let node = program.trace(3);
        assert!(program.graphs.path().is_some());
        (0..MAX_TRACE).for_each(|_| program.issue(node));
        assert_eq!(program.graphs.path(), None);
        program.end(MAX_TRACE as u64 + 1, 1);
        assert_eq!(program.graphs.graph().traces().len(), kept);
        assert!(program.graphs.path().is_some(), "the next trace is empty");
        program.iteration(&[1, 3]);
        assert_eq!(program.graphs.graph().traces().len(), kept + 1);
    }
}
