//! Random traces are merged and cut into blocks; small graphs are printed.

use std::collections::HashMap;
use std::sync::Arc;

use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;
use tandem_tracegraph::call::{Arg, Call, Input, Place};
use tandem_tracegraph::graph::{Slots, TraceGraph};
use tandem_tracegraph::ids::{BlockId, LocationId, Name, NodeId, OpId, StorageId};
use tandem_tracegraph::node::{OutSpec, Outputs, Variant};
use tandem_tracegraph::ops::{ArgClass, OpDecl, OpInfo, describe};
use tandem_tracegraph::symbolic::{SymbolicGraph, generate};
use tandem_tracegraph::tensor_meta::{Dtype, TensorMeta};
use tandem_tracegraph::text;
use tandem_tracegraph::verify::verify;

const ADD: OpId = OpId(0);
const RELU: OpId = OpId(1);
const NONZERO: OpId = OpId(2);
const NAMES: [&str; 3] = ["aten::add.Tensor", "aten::relu", "aten::nonzero"];
const INPUTS: [usize; 3] = [2, 1, 1];

fn info(op: OpId) -> OpInfo {
    let n = INPUTS[op.index()];
    let mut args = vec![ArgClass::Tensor; n];
    if op == ADD {
        args.push(ArgClass::Value);
    }
    describe(
        op,
        OpDecl {
            name: NAMES[op.index()],
            written: vec![false; args.len()],
            args,
            returns_host: false,
            dynamic_shape: op == NONZERO,
            random: false,
            foreign: false,
        },
    )
}

/// What the runtime keeps of storages, as far as merging needs it.
#[derive(Default)]
struct Program {
    graph: TraceGraph,
    slots: Slots,
    names: HashMap<StorageId, Name>,
    homes: HashMap<StorageId, Name>,
    storages: u32,
    at: Option<NodeId>,
    grew: bool,
}

impl Program {
    fn storage(&mut self) -> StorageId {
        self.storages += 1;
        StorageId(self.storages - 1)
    }

    /// An iteration; whether it added something.
    fn iteration(&mut self, body: impl FnOnce(&mut Program)) -> bool {
        self.names.clear();
        self.slots.clear();
        self.graph.next_iteration();
        self.at = Some(NodeId::START);
        self.grew = false;
        body(self);
        let last = self.at.unwrap();
        self.grew |= !self.graph.node(last).ends;
        self.graph.node_mut(last).ends = true;
        self.grew
    }

    /// One op on vectors of `n` elements.
    fn op(&mut self, op: OpId, location: u32, inputs: &[StorageId], n: i64) -> (NodeId, StorageId) {
        let sizes = [n];
        let input = |id: &StorageId| Input {
            place: Place::Storage {
                id: *id,
                name: self.names.get(id).copied().unwrap_or(Name::NONE),
                home: self.homes.get(id).copied().unwrap_or(Name::NONE),
            },
            sizes: &sizes,
            strides: &[1],
            offset: 0,
            dtype: Dtype(6),
            flags: 0,
        };
        let mut args: Vec<Arg<'_>> = vec![Arg::Tensor; inputs.len()];
        if op == ADD {
            args.push(Arg::Int(1));
        }
        let call = Call {
            op,
            args: args.into_iter().collect(),
            inputs: inputs.iter().map(input).collect(),
            grad_enabled: false,
            default_dtype: Dtype::FLOAT32,
        };
        let info = info(op);
        let at = self.at.unwrap();
        let (node, bindings, grew) = self.graph.merge(at, &call, &info, LocationId(location), &self.slots);
        self.grew |= grew;
        for (id, name) in bindings {
            self.names.insert(id, name);
            if let Some(slot) = name.as_slot() {
                self.homes.insert(id, name);
                self.slots.bind(slot);
            }
        }
        if self.graph.node(node).variant(&call, &info, 0).is_none() {
            let meta = TensorMeta::new(&sizes, &[1], Dtype(6), 0);
            let outputs = Outputs {
                outs: vec![OutSpec::Fresh { storage: 0, meta, offset: 0 }],
                fresh: [n as u64 * 4].into_iter().collect(),
                resized: vec![],
            };
            let variant = Variant::of(&self.graph.node(node).key, &call, &info, outputs);
            self.graph.node_mut(node).add_variant(Arc::new(variant));
        }
        let made = self.storage();
        self.names.insert(made, Name::made_by(node, 0));
        self.at = Some(node);
        (node, made)
    }

    fn symbolic(&self) -> SymbolicGraph {
        generate(&self.graph, &|_| false)
    }

    fn print(&self) -> String {
        let symbolic = self.symbolic();
        assert_eq!(verify(&symbolic, &self.graph), []);
        text::print(&symbolic, &self.graph, &|op| NAMES[op.index()].to_owned())
    }
}

// --- Random walks ---------------------------------------------------------------------------------------

/// A place of a random program.
#[derive(Clone, Debug)]
struct Point {
    op: OpId,
    /// Inputs: how many ops back, or a storage that outlives iterations.
    inputs: [Result<usize, u32>; 2],
    fetched: bool,
    numel: i64,
    /// Where the program may go from here, relative to this place; back is a loop.
    next: Vec<i8>,
}

const STATE: u32 = 3;

fn point() -> impl Strategy<Value = Point> {
    let input = || prop_oneof![2 => (1..4usize).prop_map(Ok), 1 => (0..STATE).prop_map(Err)];
    let next = prop_oneof![
        3 => Just(vec![1i8]),
        2 => prop::collection::vec(1..5i8, 1..4),
        1 => prop::collection::vec(-4..4i8, 1..4),
    ];
    let op = prop_oneof![4 => Just(ADD), 4 => Just(RELU), 1 => Just(NONZERO)];
    let numel = prop_oneof![3 => Just(4i64), 1 => Just(300_000i64)];
    (op, [input(), input()], prop::bool::weighted(0.1), numel, next)
        .prop_map(|(op, inputs, fetched, numel, next)| Point { op, inputs, fetched, numel, next })
}

/// The places that a walk passes.
fn walk(points: &[Point], choices: &[u8]) -> Vec<usize> {
    let mut at = 0i64;
    let mut passed = Vec::new();
    for choice in choices {
        let Some(point) = usize::try_from(at).ok().and_then(|i| points.get(i)) else { break };
        passed.push(at as usize);
        at += i64::from(point.next[*choice as usize % point.next.len()]);
    }
    passed
}

/// Traces a walk; the nodes that it merged into.
fn trace(p: &mut Program, points: &[Point], places: &[usize]) -> (Vec<NodeId>, bool) {
    let mut nodes = Vec::new();
    let grew = p.iteration(|p| {
        let mut made: Vec<StorageId> = Vec::new();
        for place in places {
            let point = &points[*place];
            let input = |i: &Result<usize, u32>| match i {
                Ok(back) if *back <= made.len() => made[made.len() - back],
                Ok(back) => StorageId(*back as u32 % STATE),
                Err(state) => StorageId(*state),
            };
            let inputs: Vec<StorageId> = point.inputs[..INPUTS[point.op.index()]].iter().map(input).collect();
            let (node, storage) = p.op(point.op, *place as u32 + 1, &inputs, point.numel);
            p.graph.node_mut(node).fetched |= point.fetched;
            nodes.push(node);
            made.push(storage);
        }
    });
    (nodes, grew)
}

/// Follows a trace through the blocks, as PythonRunner's cursor does.
fn follow(symbolic: &SymbolicGraph, nodes: &[NodeId]) -> Result<(), String> {
    let mut block: Option<BlockId> = None;
    let mut next = 0;
    for node in nodes {
        if block.is_none_or(|b| next == symbolic.block(b).nodes.len()) {
            let heads = |b: &&BlockId| symbolic.block(**b).nodes[0] == *node;
            block = Some(
                *symbolic.cases(block).iter().find(heads).ok_or(format!("no case begins with {node:?}"))?,
            );
            next = 0;
        }
        let expected = symbolic.block(block.unwrap()).nodes[next];
        if expected != *node {
            return Err(format!("{expected:?} is expected, not {node:?}"));
        }
        next += 1;
    }
    let at_end =
        block.map_or(symbolic.empty, |b| symbolic.block(b).ends && next == symbolic.block(b).nodes.len());
    at_end.then_some(()).ok_or("the iteration may not end here".into())
}

/// Paths from start to end, counted over blocks.
fn paths(symbolic: &SymbolicGraph) -> u64 {
    fn behind(s: &SymbolicGraph, block: BlockId, known: &mut HashMap<BlockId, u64>) -> u64 {
        if let Some(n) = known.get(&block) {
            return *n;
        }
        let ends = u64::from(s.block(block).ends);
        let n = s.block(block).cases.iter().fold(ends, |n, b| n.saturating_add(behind(s, *b, known)));
        known.insert(block, n);
        n
    }
    let mut known = HashMap::new();
    let empty = u64::from(symbolic.empty);
    symbolic.entry.iter().fold(empty, |n, b| n.saturating_add(behind(symbolic, *b, &mut known)))
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 1_000,
        failure_persistence: Some(Box::new(FileFailurePersistence::Direct(
            "proptest-regressions/merge_and_generate.txt",
        ))),
        ..ProptestConfig::default()
    })]

    #[test]
    fn every_trace_is_a_path_of_the_graph_and_of_its_blocks(
        points in prop::collection::vec(point(), 1..13),
        choices in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..25), 1..10),
    ) {
        let mut p = Program { storages: STATE, ..Program::default() };
        let walks: Vec<Vec<usize>> = choices.iter().map(|c| walk(&points, c)).collect();
        for places in &walks {
            let (nodes, _) = trace(&mut p, &points, places);
            let mut at = NodeId::START;
            for (node, place) in nodes.iter().zip(places) {
                prop_assert!(p.graph.children(at).contains(node), "a path");
                let key = &p.graph.node(*node).key;
                prop_assert_eq!((key.op, key.location.0), (points[*place].op, *place as u32 + 1));
                at = *node;
            }
            // It is found again, at once.
            let (again, grew) = trace(&mut p, &points, places);
            prop_assert_eq!((again, grew), (nodes, false));
        }
        let symbolic = p.symbolic();
        prop_assert_eq!(verify(&symbolic, &p.graph), []);
        prop_assert!(p.graph.paths() > 0, "a cycle");
        prop_assert_eq!(paths(&symbolic), p.graph.paths());
        for block in &symbolic.blocks {
            let (last, inside) = block.nodes.split_last().unwrap();
            prop_assert!(inside.iter().all(|n| !p.graph.node(*n).fetched), "a fetched value ends its block");
            let dynamic = p.graph.node(*last).dynamic;
            prop_assert!(!dynamic || inside.is_empty(), "an op of unknown shapes is a block of its own");
        }
        // All traces have a place in the end, and tracing comes to rest.
        let mut rounds = 0;
        loop {
            let mut grew = false;
            for places in &walks {
                let (nodes, more) = trace(&mut p, &points, places);
                grew |= more;
                prop_assert_eq!(follow(&symbolic, &nodes), Ok(()));
            }
            rounds += 1;
            prop_assert!(rounds < 4, "tracing the same again keeps adding something");
            if !grew {
                break;
            }
        }
    }
}

// --- Text -----------------------------------------------------------------------------------------------

#[test]
fn a_straight_line_is_one_block() {
    let mut p = Program::default();
    let w = p.storage();
    for n in [4, 4, 6] {
        p.iteration(|p| {
            let (_, a) = p.op(ADD, 1, &[w, w], n);
            let (_, b) = p.op(RELU, 2, &[a], n);
            p.op(ADD, 3, &[b, w], n);
        });
    }
    insta::assert_snapshot!(p.print(), @r#"
    start -> b0
    b0:
      %1 = aten::add.Tensor(s0, s0, feed:int) : float32[4]  x2
      %2 = aten::relu(%1) : float32[4]  x2
      %3 = aten::add.Tensor(%2, s0, feed:int) : float32[4]  x2
      -> end
    "#);
}

#[test]
fn a_branch_is_rejoined() {
    let mut p = Program::default();
    let w = p.storage();
    for i in 0..3 {
        p.iteration(|p| {
            let (_, a) = p.op(ADD, 1, &[w, w], 4);
            let (_, b) = if i == 1 { p.op(RELU, 2, &[a], 4) } else { p.op(RELU, 3, &[a], 4) };
            let (_, c) = p.op(ADD, 4, &[b, a], 4);
            p.op(RELU, 5, &[c], 4);
        });
    }
    insta::assert_snapshot!(p.print(), @r#"
    start -> b0
    b0:
      %1 = aten::add.Tensor(s0, s0, feed:int) : float32[4]
      -> switch(b3, b1)
    b1:
      %5 = aten::relu(%1) : float32[4]
      -> b2
    b2:
      %3 = aten::add.Tensor(%2|%5, %1, feed:int) : float32[4]
      %4 = aten::relu(%3) : float32[4]
      -> end
    b3:
      %2 = aten::relu(%1) : float32[4]
      -> b2
    "#);
}

#[test]
fn an_iteration_may_end_early_or_be_empty() {
    let mut p = Program::default();
    let w = p.storage();
    for n in [2, 1, 0] {
        p.iteration(|p| {
            (0..n).for_each(|i| {
                p.op(RELU, i, &[w], 4);
            });
        });
    }
    insta::assert_snapshot!(p.print(), @r#"
    start -> switch(b0, end)
    b0:
      %1 = aten::relu(s0) : float32[4]
      -> switch(b1, end)
    b1:
      %2 = aten::relu(s0) : float32[4]
      -> end
    "#);
}

#[test]
fn a_fetch_and_an_op_of_unknown_shape_cut() {
    let mut p = Program::default();
    let w = p.storage();
    p.iteration(|p| {
        let (a, x) = p.op(RELU, 1, &[w], 4);
        p.graph.node_mut(a).fetched = true;
        let (_, y) = p.op(RELU, 2, &[x], 4);
        let (_, z) = p.op(NONZERO, 3, &[y], 4);
        p.op(RELU, 4, &[z], 2);
    });
    insta::assert_snapshot!(p.print(), @r#"
    start -> b0
    b0:
      %1 = aten::relu(s0) : float32[4]
      -> b1
    b1:
      %2 = aten::relu(%1) : float32[4]
      -> b2
    b2:
      %3 = aten::nonzero(%2) : float32[4]
      -> b3
    b3:
      %4 = aten::relu(%3) : float32[2]
      -> end
    "#);
}

#[test]
fn loops_of_different_counts_are_branches() {
    let mut p = Program::default();
    let w = p.storage();
    for n in [3, 1] {
        p.iteration(|p| {
            let mut x = w;
            (0..n).for_each(|_| x = p.op(RELU, 1, &[x], 4).1);
            p.op(ADD, 2, &[x, w], 4);
        });
    }
    insta::assert_snapshot!(p.print(), @r#"
    start -> b0
    b0:
      %1 = aten::relu(s0) : float32[4]
      -> switch(b2, b1)
    b1:
      %4 = aten::add.Tensor(%3|%1, s0, feed:int) : float32[4]
      -> end
    b2:
      %2 = aten::relu(%1) : float32[4]
      %3 = aten::relu(%2) : float32[4]
      -> b1
    "#);
}

#[test]
fn the_verifier_tells_every_violation() {
    let mut p = Program::default();
    let w = p.storage();
    for line in [2, 3] {
        p.iteration(|p| {
            let (_, a) = p.op(ADD, 1, &[w, w], 4);
            p.op(RELU, line, &[a], 4);
        });
    }
    let mut symbolic = p.symbolic();
    symbolic.blocks[0].cases.reverse();
    symbolic.blocks[0].ends = true;
    let found: Vec<String> = verify(&symbolic, &p.graph).iter().map(ToString::to_string).collect();
    insta::assert_snapshot!(found.join("\n"), @r#"
    block 0 and its ops disagree on where an iteration ends
    the cases behind block Some(0) are not the children of its last op
    "#);
    let moved = symbolic.blocks[1].nodes.pop().unwrap();
    symbolic.blocks[0].nodes.push(moved);
    let found: Vec<String> = verify(&symbolic, &p.graph).iter().map(ToString::to_string).collect();
    insta::assert_snapshot!(found.join("\n"), @r#"
    op 3 follows op 1 inside block 0, but is not its only successor
    the cases behind block Some(0) are not the children of its last op
    block 1 has no ops
    "#);
}

#[test]
fn dot() {
    let mut p = Program::default();
    let w = p.storage();
    for line in [1, 2] {
        p.iteration(|p| {
            p.op(RELU, line, &[w], 4);
        });
    }
    insta::assert_snapshot!(text::dot(&p.graph, &|op| NAMES[op.index()].to_owned()), @r#"
    digraph TraceGraph {
      node [shape=box, fontname="monospace"];
      n0 [label="start"];
      n0 -> n1;
      n0 -> n2;
      n1 [label="aten::relu"];
      n2 [label="aten::relu"];
    }
    "#);
}
