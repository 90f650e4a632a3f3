//! The cursor: PythonRunner's position in the symbolic graph, which says the op that is expected next.

use std::sync::Arc;

use rustc_hash::FxHashMap;
use smallvec::SmallVec;
use tandem_tracegraph::call::Call;
use tandem_tracegraph::difference::{Difference, What};
use tandem_tracegraph::graph::TraceGraph;
use tandem_tracegraph::ids::{BlockId, LocationId, NodeId, OpId};
use tandem_tracegraph::node::{Node, Outputs, Variant, mode_bits, sketch};
use tandem_tracegraph::ops::OpInfo;
use tandem_tracegraph::symbolic::{Block, SymbolicGraph};

/// Position in the symbolic graph: before op `next` of `block`, or at the start if `block` is `None`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Position {
    pub(super) block: Option<BlockId>,
    pub(super) next: u32,
}

impl Position {
    const START: Position = Position { block: None, next: 0 };
}

/// A variant of a node with its index in the node.
#[derive(Clone, Default, Debug)]
pub(super) struct Hint {
    pub(super) number: u32,
    pub(super) variant: Option<Arc<Variant>>,
}

/// Result of comparing a call with the expected ops.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Expected {
    /// The call is this op, at this position.
    Here(NodeId, Position),
    /// The call is this op according to its location. The sources of its inputs may be new.
    ByLocation(NodeId, Position),
    /// The call's Python stack is needed to decide.
    NeedStack,
    /// The call is not expected.
    No,
}

/// Number of cases from which on a branch finds its cases by hash instead of comparing one after the other.
const MANY_CASES: usize = 8;

/// The cases of a branch with at least [`MANY_CASES`] cases.
#[derive(Debug, Default)]
struct Cases {
    /// Cases by the sketch of their first op.
    by_sketch: FxHashMap<u64, SmallVec<[BlockId; 2]>>,
    /// Cases whose first op has no sketch.
    others: SmallVec<[BlockId; 2]>,
}

impl Cases {
    fn of(blocks: &[BlockId], symbolic: &SymbolicGraph, graph: &TraceGraph) -> Cases {
        let mut cases = Cases::default();
        for block in blocks {
            let head = symbolic.block(*block).nodes[0];
            match graph.node(head).key.sketch() {
                Some(sketch) => cases.by_sketch.entry(sketch).or_default().push(*block),
                None => cases.others.push(*block),
            }
        }
        cases
    }

    /// Returns the cases whose first op may be a call with this sketch.
    fn candidates(&self, sketch: u64) -> impl Iterator<Item = BlockId> {
        self.by_sketch.get(&sketch).into_iter().flatten().chain(&self.others).copied()
    }
}

/// The cursor. Its methods take the graphs that it walks.
#[derive(Debug)]
pub(super) struct Cursor {
    /// Latest op that the running iteration has issued.
    at: NodeId,
    position: Position,
    /// Set if the cursor reached the current op by a jump, not along an edge of the symbolic graph.
    jumped: bool,
    /// Variant of the latest call at each step of the symbolic graph.
    hints: Vec<Hint>,
    /// Branches with many cases that the program has reached, by the block before the branch; `None` for the start.
    branches: FxHashMap<Option<BlockId>, Cases>,
}

impl Default for Cursor {
    fn default() -> Cursor {
        Cursor {
            at: NodeId::START,
            position: Position::START,
            jumped: false,
            hints: Vec::new(),
            branches: FxHashMap::default(),
        }
    }
}

impl Cursor {
    /// Returns the latest op that the running iteration has issued.
    #[inline]
    pub(super) fn at(&self) -> NodeId {
        self.at
    }

    /// Returns the block of the position.
    pub(super) fn block(&self) -> Option<BlockId> {
        self.position.block
    }

    /// Returns the next op in the current block, or `None` at its end.
    #[inline]
    fn next_op(&self, symbolic: &SymbolicGraph) -> Option<NodeId> {
        let block = symbolic.block(self.position.block?);
        block.nodes.get(self.position.next as usize).copied()
    }

    /// Returns the op that has to follow, with its position and the variant of the latest call there, or `None` if
    /// several ops or none may follow.
    #[inline(always)]
    pub(super) fn only_next(&self, symbolic: &SymbolicGraph) -> Option<(NodeId, Position, &Hint)> {
        let Position { block, next } = self.position;
        if let Some(block) = block.map(|id| symbolic.block(id))
            && let Some(node) = block.nodes.get(next as usize)
        {
            return Some((*node, self.position, self.hints.get((block.first + next) as usize)?));
        }
        let [only] = *symbolic.cases(block) else { return None };
        let head = symbolic.block(only);
        let position = Position { block: Some(only), next: 0 };
        Some((head.nodes[0], position, self.hints.get(head.first as usize)?))
    }

    /// Returns the variant of the latest call at a position.
    #[inline]
    pub(super) fn hint(&self, symbolic: &SymbolicGraph, position: Position) -> Option<&Hint> {
        let first = position.block.map_or(0, |b| symbolic.block(b).first);
        self.hints.get((first + position.next) as usize)
    }

    /// Finds the expected op that a call is. Operator, attributes and dataflow identify the op if they match exactly
    /// one op that may follow. Otherwise the call's location decides: `locate` determines it from the location of the
    /// latest op, and returns `None` if that takes the Python stack.
    pub(super) fn expect(
        &mut self,
        call: &Call<'_>,
        info: &OpInfo,
        symbolic: &SymbolicGraph,
        graph: &TraceGraph,
        locate: impl FnOnce(LocationId) -> Option<LocationId>,
    ) -> Expected {
        let modes = mode_bits(call);
        let mut found: SmallVec<[(NodeId, Position); 4]> = SmallVec::new();
        let mut compare = |id: NodeId, position: Position| {
            if graph.node(id).key.matches(call, modes) {
                found.push((id, position));
            }
        };
        let begin =
            |block: BlockId| (symbolic.block(block).nodes[0], Position { block: Some(block), next: 0 });
        let (before, cases) = (self.position.block, symbolic.cases(self.position.block));
        if let Some(id) = self.next_op(symbolic) {
            compare(id, self.position);
        } else if cases.len() < MANY_CASES {
            cases.iter().map(|block| begin(*block)).for_each(|(id, position)| compare(id, position));
        } else {
            let cases = self.branches.entry(before).or_insert_with(|| Cases::of(cases, symbolic, graph));
            let candidates = cases.candidates(sketch(call, info, modes));
            candidates.map(begin).for_each(|(id, position)| compare(id, position));
        }
        match found[..] {
            [] => return Expected::No,
            [(id, position)] if graph.node(id).has_sources(call) => return Expected::Here(id, position),
            _ => {}
        }
        let Some(location) = locate(graph.node(self.at).key.location) else { return Expected::NeedStack };
        let here = found.iter().find(|(id, _)| graph.node(*id).key.location == location);
        here.map_or(Expected::No, |&(id, position)| Expected::ByLocation(id, position))
    }

    /// Returns how a call that is not expected differs from the expected ops. `name` returns an operator's name.
    pub(super) fn difference(
        &self,
        call: &Call<'_>,
        symbolic: &SymbolicGraph,
        graph: &TraceGraph,
        name: impl Fn(OpId) -> String,
    ) -> Difference {
        let inside = self.next_op(symbolic);
        let heads = symbolic.cases(self.position.block).iter().map(|b| symbolic.block(*b).nodes[0]);
        let candidates: SmallVec<[NodeId; 4]> = match inside {
            Some(node) => SmallVec::from_elem(node, 1),
            None => heads.collect(),
        };
        let got = || name(call.op);
        match candidates[..] {
            [] => Difference { what: What::End, expected: "the iteration's end".into(), got: got() },
            [one] => Difference::of(graph.node(one), call, name),
            _ => {
                let is_same = |c: &&NodeId| graph.node(**c).key.op == call.op;
                let (known, same) = (candidates.len(), candidates.iter().filter(is_same).count());
                let Some(latest) = candidates.iter().rfind(is_same) else {
                    return Difference {
                        what: What::Branch,
                        expected: format!("{known} known branches"),
                        got: got(),
                    };
                };
                let Difference { expected, got, .. } = Difference::of(graph.node(*latest), call, name);
                let expected =
                    format!("{known} known branches, {same} of them with this operator, one with {expected}");
                Difference { what: What::Branch, expected, got }
            }
        }
    }

    /// Moves past the op at a position of `block`, which runs under a variant of its node. Returns its outputs.
    #[inline(always)]
    pub(super) fn pass(&mut self, position: Position, block: &Block, node: &Node, variant: u32) -> &Outputs {
        self.skip(position);
        let hint = &mut self.hints[(block.first + position.next) as usize];
        if hint.number != variant {
            *hint = Hint { number: variant, variant: None };
        }
        let known = hint.variant.get_or_insert_with(|| node.variants[variant as usize].clone());
        &known.outputs
    }

    /// Moves past the op at a position, which runs under a new variant.
    #[inline(always)]
    pub(super) fn skip(&mut self, position: Position) {
        self.position = Position { next: position.next + 1, ..position };
    }

    /// Moves to an op of the symbolic graph that was not expected.
    pub(super) fn jump(&mut self, position: Position) {
        self.jumped = true;
        self.position = position;
    }

    /// Forgets a jump whose op was not issued.
    pub(super) fn forget_jump(&mut self) {
        self.jumped = false;
    }

    /// Makes an op the latest issued op. If the cursor reached the op by a jump, returns the op before it. Jumps are
    /// reported here and not in [`Cursor::jump`], because the op may raise in between.
    #[inline]
    pub(super) fn issue(&mut self, node: NodeId) -> Option<NodeId> {
        let before = std::mem::replace(&mut self.at, node);
        std::mem::take(&mut self.jumped).then_some(before)
    }

    /// Moves to the position after an op at this place of a new symbolic graph, or to the start if the graph lacks the
    /// op.
    pub(super) fn move_after(&mut self, place: Option<(BlockId, u32)>) {
        self.position =
            place.map_or(Position::START, |(block, at)| Position { block: Some(block), next: at + 1 });
    }

    /// Returns to the start, for another iteration.
    pub(super) fn next_iteration(&mut self) {
        self.at = NodeId::START;
        self.position = Position::START;
        self.jumped = false;
    }

    /// Forgets all hints, for a new symbolic graph with this number of steps.
    pub(super) fn reset_hints(&mut self, steps: u32) {
        self.hints.clear();
        self.hints.resize(steps as usize, Hint::default());
        self.branches.clear();
    }
}

#[cfg(test)]
mod tests {
    use tandem_tracegraph::call::{Arg, Input, Place};
    use tandem_tracegraph::ids::{Name, StorageId};
    use tandem_tracegraph::node::NodeKey;
    use tandem_tracegraph::ops::{ArgClass, OpDecl, Traits, describe};

    use super::*;

    const A: BlockId = BlockId(0);
    const B: BlockId = BlockId(1);
    const C: BlockId = BlockId(2);

    fn info(op: u32) -> OpInfo {
        let decl = OpDecl {
            name: "aten::relu",
            args: vec![ArgClass::Tensor],
            written: vec![false],
            returns_host: false,
            dynamic_shape: false,
            random: false,
            pointwise: true,
            foreign: false,
        };
        describe(OpId(op), decl, &Traits::NONE)
    }

    /// Returns a call with one scalar input that an op made.
    fn call(op: u32, source: Name) -> Call<'static> {
        let place = Place::Storage { id: StorageId(0), name: source };
        let mut call = Call::blank(OpId(op));
        call.args.push(Arg::Tensor);
        call.inputs.push(Input { place, ..Input::ABSENT });
        call
    }

    fn made(node: u32) -> Name {
        Name::made_by(NodeId(node), 0)
    }

    /// Returns a TraceGraph and its symbolic graph: block A has nodes 1 and 2, and is followed by block B with node 3
    /// or block C with node 4. Node `n` has operator `ops[n - 1]`, location 10 + n and an input that node n - 1 made.
    fn graphs(ops: [u32; 4]) -> (SymbolicGraph, TraceGraph) {
        let mut graph = TraceGraph::default();
        for (n, op) in (1..).zip(ops) {
            let call = call(op, made(n - 1));
            let key = NodeKey::of(&call, &info(op), LocationId(10 + n));
            assert_eq!(graph.merge(NodeId(n - 1), &call, &info(op), key).0, NodeId(n));
        }
        let block = |nodes: &[u32], first, cases: &[BlockId]| Block {
            nodes: nodes.iter().copied().map(NodeId).collect(),
            first,
            cases: cases.into(),
            ends: false,
            fetched: false,
            within: None,
            unrolled: None,
            outermost: None,
        };
        let blocks = vec![block(&[1, 2], 0, &[B, C]), block(&[3], 2, &[]), block(&[4], 3, &[])];
        let entry = [A].as_slice().into();
        (SymbolicGraph { blocks, entry, steps: 4, ..SymbolicGraph::default() }, graph)
    }

    fn at(block: BlockId, next: u32) -> Position {
        Position { block: Some(block), next }
    }

    /// Returns a cursor after the op at a position.
    fn after(position: Position) -> Cursor {
        let mut cursor = Cursor::default();
        cursor.skip(position);
        cursor
    }

    fn not_asked(_: LocationId) -> Option<LocationId> {
        panic!("the call is known without its location")
    }

    #[test]
    fn the_only_op_that_may_follow_is_the_next_one_or_the_only_case() {
        let (symbolic, _) = graphs([1, 2, 3, 4]);
        let next = |mut cursor: Cursor| {
            cursor.reset_hints(symbolic.steps);
            cursor.only_next(&symbolic).map(|(node, position, _)| (node, position))
        };
        assert_eq!(next(Cursor::default()), Some((NodeId(1), at(A, 0))));
        assert_eq!(next(after(at(A, 0))), Some((NodeId(2), at(A, 1))));
        assert_eq!(next(after(at(A, 1))), None, "there are two cases");
        assert_eq!(next(after(at(B, 0))), None, "there is no case");
    }

    #[test]
    fn one_expected_op_with_known_sources_is_the_call() {
        let (symbolic, graph) = graphs([1, 2, 3, 4]);
        let expect = |mut cursor: Cursor, call: Call<'_>| {
            cursor.expect(&call, &info(call.op.0), &symbolic, &graph, not_asked)
        };
        assert_eq!(expect(Cursor::default(), call(1, made(0))), Expected::Here(NodeId(1), at(A, 0)));
        assert_eq!(expect(after(at(A, 0)), call(2, made(1))), Expected::Here(NodeId(2), at(A, 1)));
        assert_eq!(expect(after(at(A, 1)), call(4, made(3))), Expected::Here(NodeId(4), at(C, 0)));
        assert_eq!(expect(after(at(A, 0)), call(3, made(1))), Expected::No, "the operator differs");
        assert_eq!(expect(after(at(B, 0)), call(1, made(0))), Expected::No, "nothing may follow");
    }

    #[test]
    fn one_of_many_cases_is_found_by_its_attributes() {
        let decl = OpDecl {
            name: "aten::cumsum",
            args: vec![ArgClass::Tensor, ArgClass::Attr],
            written: vec![false; 2],
            returns_host: false,
            dynamic_shape: false,
            random: false,
            pointwise: false,
            foreign: false,
        };
        let info = describe(OpId(1), decl, &Traits::NONE);
        let call = |dim: i64, op: u32| {
            let mut call = call(op, made(0));
            call.args.push(Arg::Int(dim));
            call
        };
        // The last case takes attributes of any value.
        const CASES: u32 = 20;
        let mut graph = TraceGraph::default();
        for dim in 0..CASES {
            let mut key = NodeKey::of(&call(i64::from(dim), 1), &info, LocationId(10 + dim));
            if dim == CASES - 1 {
                key = key.folded().expect("it has an attribute");
            }
            graph.merge(NodeId::START, &call(i64::from(dim), 1), &info, key);
        }
        let blocks = (0..CASES).map(|i| Block {
            nodes: vec![NodeId(i + 1)],
            first: i,
            cases: Default::default(),
            ends: false,
            fetched: false,
            within: None,
            unrolled: None,
            outermost: None,
        });
        let entry = (0..CASES).map(BlockId).collect();
        let symbolic =
            SymbolicGraph { blocks: blocks.collect(), entry, steps: CASES, ..SymbolicGraph::default() };
        let mut cursor = Cursor::default();
        let mut expect = |call: Call<'_>, location: u32| {
            cursor.expect(&call, &info, &symbolic, &graph, |_| Some(LocationId(location)))
        };
        let case = |i: u32| Expected::ByLocation(NodeId(i + 1), at(BlockId(i), 0));
        for dim in 0..CASES - 1 {
            assert_eq!(expect(call(i64::from(dim), 1), 10 + dim), case(dim));
            assert_eq!(expect(call(i64::from(dim), 1), 10 + CASES - 1), case(CASES - 1));
        }
        assert_eq!(expect(call(99, 1), 0), Expected::Here(NodeId(CASES), at(BlockId(CASES - 1), 0)));
        assert_eq!(expect(call(3, 2), 13), Expected::No, "the operator differs");
    }

    #[test]
    fn the_location_decides_if_sources_are_new_or_several_ops_match() {
        let (symbolic, graph) = graphs([1, 2, 3, 3]);
        let expect = |mut cursor: Cursor, call: Call<'_>, location: Option<u32>| {
            cursor.issue(NodeId(2));
            cursor.expect(&call, &info(call.op.0), &symbolic, &graph, |previous| {
                assert_eq!(previous, LocationId(12), "the last op's");
                location.map(LocationId)
            })
        };
        let new = || call(2, made(9));
        assert_eq!(expect(after(at(A, 0)), new(), None), Expected::NeedStack);
        assert_eq!(expect(after(at(A, 0)), new(), Some(12)), Expected::ByLocation(NodeId(2), at(A, 1)));
        assert_eq!(expect(after(at(A, 0)), new(), Some(13)), Expected::No);
        let branch = || call(3, made(2));
        assert_eq!(expect(after(at(A, 1)), branch(), None), Expected::NeedStack);
        assert_eq!(expect(after(at(A, 1)), branch(), Some(14)), Expected::ByLocation(NodeId(4), at(C, 0)));
    }

    #[test]
    fn a_difference_is_to_the_end_to_one_op_or_to_all_branches() {
        let (symbolic, graph) = graphs([1, 2, 3, 4]);
        let difference = |cursor: Cursor, op| {
            cursor.difference(&call(op, made(0)), &symbolic, &graph, |op| format!("aten::op{}", op.0))
        };
        let end = difference(after(at(B, 0)), 7);
        assert_eq!((end.what, &*end.expected, &*end.got), (What::End, "the iteration's end", "aten::op7"));
        let op = difference(after(at(A, 0)), 7);
        assert_eq!((&*op.expected, &*op.got), ("aten::op2", "aten::op7"));
        let branch = difference(after(at(A, 1)), 7);
        assert_eq!((branch.what, &*branch.expected), (What::Branch, "2 known branches"));
        let same = difference(after(at(A, 1)), 3).expected;
        assert!(
            same.starts_with("2 known branches, 1 of them with this operator, one with input 0 from"),
            "{same}"
        );
    }

    #[test]
    fn the_variant_of_the_last_pass_is_the_hint_of_the_next() {
        let (symbolic, mut graph) = graphs([1, 2, 3, 4]);
        for nbytes in [4, 8] {
            let outputs = Outputs { new_storages: [nbytes].as_slice().into(), ..Outputs::default() };
            graph.node_mut(NodeId(4)).add_variant(Arc::new(Variant::new([].into(), [].into(), outputs)));
        }
        let (block, node) = (symbolic.block(C), graph.node(NodeId(4)));
        let mut cursor = Cursor::default();
        cursor.reset_hints(symbolic.steps);
        for (variant, nbytes) in [(1, 8), (1, 8), (0, 4)] {
            assert_eq!(cursor.pass(at(C, 0), block, node, variant).new_storages[..], [nbytes]);
            assert_eq!(cursor.position, at(C, 1));
            let hint = cursor.hint(&symbolic, at(C, 0)).expect("the step has a hint");
            assert_eq!(hint.number, variant);
            assert_eq!(hint.variant.as_ref().map(|v| v.outputs.new_storages[0]), Some(nbytes));
            let again = Cursor { position: at(C, 0), hints: cursor.hints.clone(), ..Cursor::default() };
            assert_eq!(again.only_next(&symbolic).map(|(_, _, hint)| hint.number), Some(variant));
        }
        assert!(cursor.hint(&symbolic, at(B, 0)).is_some_and(|hint| hint.variant.is_none()));
        cursor.reset_hints(symbolic.steps);
        assert!(cursor.hint(&symbolic, at(C, 0)).is_some_and(|hint| hint.variant.is_none()));
    }

    #[test]
    fn a_jump_is_reported_when_its_op_is_issued() {
        let mut cursor = Cursor::default();
        assert_eq!(cursor.issue(NodeId(1)), None);
        cursor.jump(at(C, 0));
        assert_eq!((cursor.at(), cursor.block()), (NodeId(1), Some(C)));
        assert_eq!(cursor.issue(NodeId(4)), Some(NodeId(1)));
        assert_eq!(cursor.issue(NodeId(3)), None);
        cursor.jump(at(C, 0));
        cursor.forget_jump();
        assert_eq!(cursor.issue(NodeId(4)), None);
        cursor.jump(at(C, 0));
        cursor.next_iteration();
        assert_eq!((cursor.at(), cursor.block()), (NodeId::START, None));
        assert_eq!(cursor.issue(NodeId(1)), None);
    }

    #[test]
    fn a_new_graph_may_lack_the_last_op() {
        let mut cursor = after(at(B, 0));
        cursor.move_after(Some((A, 0)));
        assert_eq!(cursor.position, at(A, 1));
        cursor.move_after(None);
        assert_eq!(cursor.position, Position::START);
    }
}
