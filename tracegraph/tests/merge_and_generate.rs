//! Merges random traces and generates symbolic graphs from them; prints small graphs.

use std::collections::HashMap;
use std::sync::Arc;

use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;
use tandem_tracegraph::call::{Arg, Call, Input, Place};
use tandem_tracegraph::graph::TraceGraph;
use tandem_tracegraph::ids::{BlockId, LocationId, Name, NodeId, OpId, StorageId};
use tandem_tracegraph::node::{NodeKey, OutSpec, Outputs, Variant};
use tandem_tracegraph::ops::{ArgClass, OpDecl, OpInfo, Traits, describe};
use tandem_tracegraph::svg::svg;
use tandem_tracegraph::symbolic::{SymbolicGraph, generate};
use tandem_tracegraph::tensor_meta::{Dtype, TensorMeta};
use tandem_tracegraph::text::{self, Listing};
use tandem_tracegraph::trace::Trace;
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
            pointwise: false,
            foreign: false,
        },
        &Traits::NONE,
    )
}

/// A program as the runtime sees it: its graph, the names of its storages, and the running trace.
#[derive(Default)]
struct Program {
    graph: TraceGraph,
    names: HashMap<StorageId, Name>,
    storages: u32,
    trace: Trace,
    at: Option<NodeId>,
    grew: bool,
}

impl Program {
    fn storage(&mut self) -> StorageId {
        self.storages += 1;
        StorageId(self.storages - 1)
    }

    /// Runs an iteration. Returns whether it added anything to the graph.
    fn iteration(&mut self, body: impl FnOnce(&mut Program)) -> bool {
        self.names.clear();
        self.at = Some(NodeId::START);
        self.grew = false;
        body(self);
        let last = self.at.unwrap();
        self.grew |= !self.graph.node(last).ends;
        self.graph.node_mut(last).ends = true;
        let trace = std::mem::take(&mut self.trace);
        self.graph.next_iteration(Some(trace));
        self.grew
    }

    /// Issues an op on vectors of `n` elements.
    fn op(&mut self, op: OpId, location: u32, inputs: &[StorageId], n: i64) -> (NodeId, StorageId) {
        let sizes = [n];
        let input = |id: &StorageId| Input {
            place: Place::Storage { id: *id, name: self.names.get(id).copied().unwrap_or(Name::STATE) },
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
            device: 0,
            grad_enabled: false,
            default_dtype: Dtype::FLOAT32,
            numbers_fit: true,
        };
        let info = info(op);
        let at = self.at.unwrap();
        let key = NodeKey::of(&call, &info, LocationId(location));
        let (node, grew) = self.graph.merge(at, &call, &info, key);
        self.grew |= grew;
        self.trace.push(node);
        if self.graph.node(node).variant(&call, &info, 0).is_none() {
            let meta = TensorMeta::new(&sizes, &[1], Dtype(6), 0);
            let outputs = Outputs {
                outs: vec![OutSpec::NewStorage { storage: 0, meta, offset: 0 }],
                new_storages: [n as u64 * 4].into_iter().collect(),
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

    /// Fetches a value after the last op.
    fn fetch(&mut self) {
        let at = self.at.unwrap();
        self.graph.node_mut(at).fetched = true;
        self.trace.mark_fetched();
    }

    fn print(&self) -> String {
        let symbolic = self.symbolic();
        assert_eq!(verify(&symbolic, &self.graph), []);
        let listing = Listing::of(&symbolic, &self.graph, &|op| NAMES[op.index()].to_owned());
        let text = listing.to_string();
        assert_eq!(text.parse(), Ok(listing));
        text
    }
}

// --- Running symbolic graphs ------------------------------------------------------------------------------

/// The choices that PythonRunner sends to GraphRunner along a trace: the index of the case at the end of each
/// block.
fn select(symbolic: &SymbolicGraph, nodes: &[NodeId]) -> Result<Vec<usize>, String> {
    let mut selected = Vec::new();
    let mut at = None;
    let mut rest = nodes;
    while let Some(head) = rest.first() {
        let begins = |b: &BlockId| symbolic.block(*b).nodes[0] == *head;
        let case =
            symbolic.cases(at).iter().position(begins).ok_or(format!("no case begins with {head:?}"))?;
        selected.push(case);
        let block = symbolic.cases(at)[case];
        rest = rest
            .strip_prefix(&symbolic.block(block).nodes[..])
            .ok_or(format!("{block:?} is not taken whole"))?;
        at = Some(block);
    }
    let may_end = at.map_or(symbolic.empty, |b| symbolic.block(b).ends);
    may_end.then_some(selected).ok_or("the iteration may not end here".into())
}

/// The ops that GraphRunner runs for these choices.
fn interpret(symbolic: &SymbolicGraph, selected: &[usize]) -> Vec<NodeId> {
    let mut at = None;
    let mut ran = Vec::new();
    for case in selected {
        let block = symbolic.cases(at)[*case];
        ran.extend(&symbolic.block(block).nodes);
        at = Some(block);
    }
    ran
}

fn assert_runs(symbolic: &SymbolicGraph, nodes: &[NodeId]) -> Result<(), TestCaseError> {
    let selected = select(symbolic, nodes).map_err(TestCaseError::fail)?;
    prop_assert_eq!(interpret(symbolic, &selected), nodes);
    Ok(())
}

fn config(cases: u32) -> ProptestConfig {
    ProptestConfig {
        cases,
        failure_persistence: Some(Box::new(FileFailurePersistence::Direct(
            "proptest-regressions/merge_and_generate.txt",
        ))),
        ..ProptestConfig::default()
    }
}

// --- Random structured programs -----------------------------------------------------------------------------

/// A statement of a random program. Locations are numbered while the program runs.
#[derive(Clone, Debug)]
enum Statement {
    Op {
        relu: bool,
        fetched: bool,
    },
    /// A choice between branches, one of which may be empty.
    Branch(Vec<Vec<Statement>>),
    /// A loop with a constant number of rounds or, for `None`, a chosen one.
    Loop {
        rounds: Option<u8>,
        body: Vec<Statement>,
    },
    /// A return from the iteration, if chosen.
    Return,
}

fn statements(depth: u32) -> BoxedStrategy<Vec<Statement>> {
    let op = (any::<bool>(), prop::bool::weighted(0.1))
        .prop_map(|(relu, fetched)| Statement::Op { relu, fetched });
    if depth == 0 {
        return prop::collection::vec(op, 1..4).boxed();
    }
    let branch = prop::collection::vec(prop_oneof![1 => Just(Vec::new()), 4 => statements(depth - 1)], 2..4);
    let rounds = prop_oneof![(1..4u8).prop_map(Some), Just(None)];
    let body = (rounds, statements(depth - 1)).prop_map(|(rounds, body)| Statement::Loop { rounds, body });
    let statement = prop_oneof![
        6 => op,
        2 => branch.prop_map(Statement::Branch),
        2 => body,
        1 => Just(Statement::Return),
    ];
    prop::collection::vec(statement, 1..6).boxed()
}

/// A program with at most 12 branches, in sequence or nested. The paths of each branch rejoin after it.
fn dag() -> impl Strategy<Value = Vec<Statement>> {
    let op = || any::<bool>().prop_map(|relu| Statement::Op { relu, fetched: false });
    let leaf = move || prop::collection::vec(op(), 0..3);
    let inner = (leaf(), leaf(), leaf()).prop_map(|(a, b, c)| {
        let mut first = a;
        first.push(Statement::Branch(vec![b, c]));
        first
    });
    let branch = (inner, leaf()).prop_map(|(a, b)| Statement::Branch(vec![a, b]));
    prop::collection::vec(prop_oneof![op(), branch], 1..7)
}

/// An interpreter of statements. Its branches and rounds follow `choices`.
struct Interpreter<'a> {
    program: &'a mut Program,
    choices: &'a mut dyn Iterator<Item = u8>,
    last: StorageId,
    nodes: Vec<NodeId>,
}

impl Interpreter<'_> {
    fn choose(&mut self) -> usize {
        usize::from(self.choices.next().unwrap_or(0))
    }

    /// Runs statements. Returns whether the iteration goes on. `place` counts statements.
    fn run(&mut self, statements: &[Statement], place: &mut u32) -> bool {
        statements.iter().all(|s| self.step(s, place))
    }

    fn step(&mut self, statement: &Statement, place: &mut u32) -> bool {
        *place += 1;
        match statement {
            Statement::Op { relu, fetched } => {
                let inputs = [self.last, StorageId(0)];
                let op = if *relu { RELU } else { ADD };
                let (node, made) = self.program.op(op, *place, &inputs[..INPUTS[op.index()]], 4);
                if *fetched {
                    self.program.fetch();
                }
                self.nodes.push(node);
                self.last = made;
            }
            Statement::Branch(cases) => {
                let taken = self.choose() % cases.len();
                let mut goes_on = true;
                for (i, case) in cases.iter().enumerate() {
                    if i == taken {
                        goes_on = self.run(case, place);
                    } else {
                        *place += size(case);
                    }
                }
                return goes_on;
            }
            Statement::Loop { rounds, body } => {
                let rounds = rounds.map_or_else(|| self.choose() % 4, usize::from);
                let begin = *place;
                for _ in 0..rounds {
                    *place = begin;
                    if !self.run(body, place) {
                        return false;
                    }
                }
                *place = begin + size(body);
            }
            Statement::Return => return self.choose() % 4 != 3,
        }
        true
    }
}

/// Number of locations of statements.
fn size(statements: &[Statement]) -> u32 {
    let inner = |s: &Statement| match s {
        Statement::Op { .. } | Statement::Return => 0,
        Statement::Branch(cases) => cases.iter().map(|c| size(c)).sum(),
        Statement::Loop { body, .. } => size(body),
    };
    statements.iter().map(|s| 1 + inner(s)).sum()
}

fn run_once(p: &mut Program, statements: &[Statement], choices: &[u8]) -> (Vec<NodeId>, bool) {
    let mut nodes = Vec::new();
    let grew = p.iteration(|p| {
        let mut choices = choices.iter().copied();
        let mut run =
            Interpreter { program: p, choices: &mut choices, last: StorageId(0), nodes: Vec::new() };
        run.run(statements, &mut 0);
        nodes = run.nodes;
    });
    (nodes, grew)
}

proptest! {
    #![proptest_config(config(5_000))]

    #[test]
    fn nested_loops_and_branches_run_as_they_were_traced(
        statements in statements(3),
        choices in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..20), 2..8),
    ) {
        let mut p = Program { storages: 1, ..Program::default() };
        // Runs the first iteration, whose edges the symbolic graph leaves out unless a later iteration takes them too.
        run_once(&mut p, &statements, &choices[0]);
        let mut traces = Vec::new();
        for choices in &choices {
            let (nodes, _) = run_once(&mut p, &statements, choices);
            let (again, grew) = run_once(&mut p, &statements, choices);
            prop_assert_eq!((&again, grew), (&nodes, false), "it is found again");
            traces.push(nodes);
        }
        let symbolic = p.symbolic();
        prop_assert_eq!(verify(&symbolic, &p.graph), []);
        for nodes in traces.iter().rev().take(8) {
            assert_runs(&symbolic, nodes)?;
        }
        let listing = Listing::of(&symbolic, &p.graph, &|op| NAMES[op.index()].to_owned());
        prop_assert_eq!(listing.to_string().parse::<Listing>(), Ok(listing));
        // Loops that are known to vary become Whiles, so traces that are no longer kept run too.
        for header in &symbolic.varying {
            p.graph.node_mut(*header).varies = true;
        }
        let symbolic = p.symbolic();
        prop_assert_eq!(verify(&symbolic, &p.graph), []);
        if symbolic.blocks.iter().all(|b| b.unrolled.is_none()) {
            traces.iter().try_for_each(|nodes| assert_runs(&symbolic, nodes))?;
        }
    }

    #[test]
    fn all_paths_of_branches_that_rejoin_run(
        statements in dag(),
        choices in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..14), 2..20),
    ) {
        let mut p = Program { storages: 1, ..Program::default() };
        run_once(&mut p, &statements, &choices[0]);
        let traces: Vec<Vec<NodeId>> = choices.iter().map(|c| run_once(&mut p, &statements, c).0).collect();
        let symbolic = p.symbolic();
        prop_assert_eq!(verify(&symbolic, &p.graph), []);
        prop_assert!(symbolic.whiles.is_empty());
        for nodes in &traces {
            assert_runs(&symbolic, nodes)?;
        }
        // Any path through the blocks is a path through the TraceGraph, even if no trace took it.
        let mut at = None;
        let mut nodes = vec![NodeId::START];
        for choice in choices.iter().flatten() {
            let cases = symbolic.cases(at);
            let Some(block) = cases.get(usize::from(*choice) % cases.len().max(1)) else { break };
            nodes.extend(&symbolic.block(*block).nodes);
            at = Some(*block);
        }
        for pair in nodes.windows(2) {
            prop_assert!(p.graph.warm_children(pair[0]).contains(&pair[1]));
        }
    }
}

// --- Random jumps -------------------------------------------------------------------------------------------

/// A location of a program with arbitrary jumps.
#[derive(Clone, Debug)]
struct Point {
    op: OpId,
    /// Inputs: the output of the n-th last op, or a storage that outlives iterations.
    inputs: [Result<usize, u32>; 2],
    fetched: bool,
    numel: i64,
    /// Possible next locations, relative to this one. A negative number makes a loop.
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

/// The locations that a walk passes.
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

/// Traces a walk. Returns the nodes of its ops, and whether the graph grew.
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
            if point.fetched {
                p.fetch();
            }
            nodes.push(node);
            made.push(storage);
        }
    });
    (nodes, grew)
}

proptest! {
    #![proptest_config(config(2_000))]

    #[test]
    fn programs_that_jump_about_run_as_they_were_traced(
        points in prop::collection::vec(point(), 1..13),
        choices in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..25), 1..10),
    ) {
        let mut p = Program { storages: STATE, ..Program::default() };
        let walks: Vec<Vec<usize>> = choices.iter().map(|c| walk(&points, c)).collect();
        let mut traces = Vec::new();
        for places in &walks {
            let (nodes, _) = trace(&mut p, &points, places);
            for (node, place) in nodes.iter().zip(places) {
                let key = &p.graph.node(*node).key;
                prop_assert_eq!((key.op, key.location.0), (points[*place].op, *place as u32 + 1));
            }
            // A second trace of the same walk adds nothing.
            let (again, grew) = trace(&mut p, &points, places);
            prop_assert_eq!((&again, grew), (&nodes, false));
            traces.push(nodes);
        }
        prop_assert!(p.graph.len() <= points.len() + 1, "a node for each place");
        let symbolic = p.symbolic();
        prop_assert_eq!(verify(&symbolic, &p.graph), []);
        for nodes in traces.iter().rev().take(8) {
            assert_runs(&symbolic, nodes)?;
        }
        for block in &symbolic.blocks {
            let (last, inside) = block.nodes.split_last().unwrap();
            let dynamic = p.graph.node(*last).dynamic;
            prop_assert!(!dynamic || inside.is_empty(), "an op of unknown shapes is a block of its own");
        }
    }
}

// --- Text ---------------------------------------------------------------------------------------------------

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
      %1 = aten::add.Tensor(state, state, feed:int) : float32[4]  x2
      %2 = aten::relu(%1) : float32[4]  x2
      %3 = aten::add.Tensor(%2, state, feed:int) : float32[4]  x2
      -> end
    "#);
}

/// Terra, figure 3: a trace with a branch that is not in the graph is merged, and the branches join again.
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
      %1 = aten::add.Tensor(state, state, feed:int) : float32[4]
      -> case_select(b1, b3)
    b1:
      %2 = aten::relu(%1) : float32[4]
      -> b2
    b2:
      %3 = aten::add.Tensor(phi(%2, %5), %1, feed:int) : float32[4]
      %4 = aten::relu(%3) : float32[4]
      -> end
    b3:
      %5 = aten::relu(%1) : float32[4]
      -> b2
    "#);
}

/// Terra, figure 4: nested and consecutive branches become Switch-Cases, a loop with a varying number of rounds
/// becomes a While, and a fetch becomes an Output Fetching.
#[test]
fn switch_case_and_while() {
    let mut p = Program::default();
    let w = p.storage();
    for (i, rounds) in [2, 2, 3, 1, 4].into_iter().enumerate() {
        p.iteration(|p| {
            let (_, mut x) = p.op(RELU, 1, &[w], 4);
            if i % 2 == 0 {
                x = p.op(RELU, 2, &[x], 4).1;
                if i == 2 {
                    x = p.op(RELU, 3, &[x], 4).1;
                }
            } else {
                x = p.op(ADD, 4, &[x, w], 4).1;
            }
            for _ in 0..rounds {
                x = p.op(ADD, 5, &[x, w], 4).1;
                x = p.op(RELU, 6, &[x], 4).1;
            }
            p.fetch();
            p.op(ADD, 7, &[x, x], 4);
        });
    }
    insta::assert_snapshot!(p.print(), @r#"
    l0 = while(b2): b2
    start -> b0
    b0:
      %1 = aten::relu(state) : float32[4]
      -> case_select(b1, b5)
    b1:
      %2 = aten::relu(%1) : float32[4]
      -> case_select(b2, b4)
    b2 in l0:
      %3 = aten::add.Tensor(phi(%2, %4, %6, %7), state, feed:int) : float32[4]
      %4 = aten::relu(%3) : float32[4]
      output_fetch
      -> loop_cond(b2; b3)
    b3:
      %5 = aten::add.Tensor(%4, %4, feed:int) : float32[4]
      -> end
    b4:
      %7 = aten::relu(%2) : float32[4]
      -> b2
    b5:
      %6 = aten::add.Tensor(%1, state, feed:int) : float32[4]
      -> b2
    "#);
}

#[test]
fn a_loop_with_a_constant_count_is_unrolled() {
    let mut p = Program::default();
    let w = p.storage();
    for _ in 0..3 {
        p.iteration(|p| {
            let mut x = w;
            for inner in [1, 2] {
                x = p.op(RELU, 1, &[x], 4).1;
                for _ in 0..inner {
                    x = p.op(ADD, 2, &[x, w], 4).1;
                }
            }
            p.op(RELU, 3, &[x], 4);
        });
    }
    insta::assert_snapshot!(p.print(), @r#"
    start -> b0
    b0:
      %1 = aten::relu(phi(state, %2)) : float32[4]
      %2 = aten::add.Tensor(phi(%1, %2), state, feed:int) : float32[4]
      %1 = aten::relu(phi(state, %2)) : float32[4]
      %2 = aten::add.Tensor(phi(%1, %2), state, feed:int) : float32[4]
      %2 = aten::add.Tensor(phi(%1, %2), state, feed:int) : float32[4]
      %3 = aten::relu(%2) : float32[4]
      -> end
    "#);
}

#[test]
fn a_loop_of_changing_count_in_an_unrolled_one() {
    let mut p = Program::default();
    let w = p.storage();
    for count in [1, 3, 2] {
        p.iteration(|p| {
            let mut x = w;
            for _ in 0..2 {
                x = p.op(RELU, 1, &[x], 4).1;
                for _ in 0..count {
                    x = p.op(ADD, 2, &[x, w], 4).1;
                }
            }
        });
    }
    insta::assert_snapshot!(p.print(), @r#"
    l0 = while(b1): b1
    l1 = while(b3): b3
    start -> b0
    b0:
      %1 = aten::relu(phi(state, %2)) : float32[4]
      -> b1
    b1 in l0:
      %2 = aten::add.Tensor(phi(%1, %2), state, feed:int) : float32[4]
      -> loop_cond(b1; b2)
    b2:
      %1 = aten::relu(phi(state, %2)) : float32[4]
      -> b3
    b3 in l1:
      %2 = aten::add.Tensor(phi(%1, %2), state, feed:int) : float32[4]
      -> loop_cond(b3; end)
    "#);
}

#[test]
fn an_iteration_may_end_early_or_be_empty() {
    let mut p = Program::default();
    let w = p.storage();
    for n in [2, 2, 1, 0] {
        p.iteration(|p| {
            (0..n).for_each(|i| {
                p.op(RELU, i, &[w], 4);
            });
        });
    }
    insta::assert_snapshot!(p.print(), @r#"
    start -> case_select(b0, end)
    b0:
      %1 = aten::relu(state) : float32[4]
      -> case_select(b1, end)
    b1:
      %2 = aten::relu(state) : float32[4]
      -> end
    "#);
}

#[test]
fn a_fetch_and_an_op_of_unknown_shape_cut() {
    let mut p = Program::default();
    let w = p.storage();
    p.iteration(|p| {
        let (_, x) = p.op(RELU, 1, &[w], 4);
        p.fetch();
        let (_, y) = p.op(RELU, 2, &[x], 4);
        let (_, z) = p.op(NONZERO, 3, &[y], 4);
        p.op(RELU, 4, &[z], 2);
    });
    insta::assert_snapshot!(p.print(), @r#"
    start -> b0
    b0:
      %1 = aten::relu(state) : float32[4]
      output_fetch
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
fn the_verifier_tells_every_violation() {
    let mut p = Program::default();
    let w = p.storage();
    for i in 0..4 {
        p.iteration(|p| {
            let (_, mut a) = p.op(ADD, 1, &[w, w], 4);
            for _ in 0..i {
                a = p.op(RELU, 2, &[a], 4).1;
            }
            p.op(ADD, 3, &[a, w], 4);
        });
    }
    let good = p.symbolic();
    assert_eq!(verify(&good, &p.graph), []);
    let check = |change: &dyn Fn(&mut SymbolicGraph)| {
        let mut symbolic = good.clone();
        change(&mut symbolic);
        verify(&symbolic, &p.graph).iter().map(|v| format!("{v}\n")).collect::<String>()
    };
    let mut found = String::new();
    found += &check(&|s| s.blocks[2].ends = false);
    found += &check(&|s| s.blocks[1].cases.truncate(1));
    found += &check(&|s| s.blocks[0].cases.push(BlockId(1)));
    found += &check(&|s| s.blocks[0].nodes.clear());
    found += &check(&|s| s.blocks[0].nodes.push(NodeId(1)));
    found += &check(&|s| s.whiles[0].blocks.clear());
    insta::assert_snapshot!(found, @r#"
    a trace has no way through the blocks at its op 5, which is op 0
    a trace has no way through the blocks at its op 4, which is op 0
    a trace has no way through the blocks at its op 3, which is op 0
    a trace has no way through the blocks at its op 4, which is op 2
    a trace has no way through the blocks at its op 3, which is op 2
    a trace has no way through the blocks at its op 2, which is op 2
    op 2 followed op 3, but cannot
    several cases after block Some(0) begin with op 3
    block 0 has no ops
    block 1 is not where it says
    block 2 is not where it says
    op 1 never followed op 1, but it does at block 0
    block 0 is not where it says
    block 1 is not where it says
    block 2 is not where it says
    while 0 is not a loop at block 1
    "#);
}

#[test]
fn what_is_no_listing_does_not_parse() {
    let errors: Vec<String> =
        ["start b0", "b1:", "b0:\n  %1 = aten::relu(state", "b0:\n  -> loop_cond(b0, b1)", "  x"]
            .iter()
            .map(|text| text.parse::<Listing>().unwrap_err().to_string())
            .collect();
    insta::assert_snapshot!(errors.join("\n"), @r#"
    line 1: expected -> and what follows, got "start b0"
    line 1: expected the next block, got "b1:"
    line 2: expected a closing bracket, got "  %1 = aten::relu(state"
    line 2: expected ; in loop_cond, got "  -> loop_cond(b0, b1)"
    line 1: expected a block, got "  x"
    "#);
}

#[test]
fn pictures() {
    let mut p = Program::default();
    let w = p.storage();
    for rounds in [1, 2, 3] {
        p.iteration(|p| {
            let mut x = w;
            (0..rounds).for_each(|_| x = p.op(RELU, 1, &[x], 4).1);
            p.op(ADD, 2, &[x, w], 4);
        });
    }
    let listing = Listing::of(&p.symbolic(), &p.graph, &|op| NAMES[op.index()].to_owned());
    insta::assert_snapshot!(listing.dot(), @r#"
    digraph symbolic {
      node [shape=box, fontname="monospace"];
      start -> b0;
      b0 [label="b0\n%1 aten::relu"];
      b0 -> b0 [style=dashed];
      b0 -> b1;
      b1 [label="b1\n%2 aten::add.Tensor"];
      b1 -> end;
    }
    "#);
    let picture = svg(&listing);
    assert_eq!(picture.matches("<rect").count(), 2);
    assert_eq!(picture.matches("<path class=\"again\"").count(), 1);
    assert_eq!(picture.matches("<text").count(), picture.matches("</text>").count());
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
