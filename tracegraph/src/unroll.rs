//! Selection of the loops to unroll, and the steps that unrolling makes of each op.
//!
//! A loop is unrolled if every pass through it took the same number of rounds. Passes are compared if they are in
//! the same rounds of the unrolled loops around it. Each round then has its own steps, and a straight line through
//! all rounds is a single block. Other loops become Whiles, whose steps are shared by all rounds. A step is thus an
//! op in given rounds of the unrolled loops that contain it. If the running iteration took an unexpected path in a
//! loop, the rounds in which it did so are known only when the iteration ends. Until then the loop is not unrolled.

use rustc_hash::{FxHashMap, FxHashSet};
use smallvec::SmallVec;

use crate::graph::TraceGraph;
use crate::ids::NodeId;
use crate::loops::{LoopForest, Successors};
use crate::trace::Trace;

/// Maximum number of ops of one pass through an unrolled loop, over all its rounds.
const MAX_UNROLLED_OPS: u64 = 20_000;

/// The rounds of all unrolled loops that contain an op, interned.
type Rounds = u32;

/// The value outside of unrolled loops.
const NO_ROUNDS: Rounds = 0;

/// An op in given rounds of the unrolled loops that contain it.
#[derive(Clone, Debug)]
pub struct Step {
    /// Node of the op.
    pub node: NodeId,
    /// Header of the outermost unrolled loop that contains the op.
    pub unrolled: Option<NodeId>,
    /// Whether a value was fetched after the op.
    pub fetched: bool,
    /// Whether an iteration ended after the op.
    pub ends: bool,
}

/// All steps. The first one stands for [`NodeId::START`].
#[derive(Debug, Default)]
pub struct Steps {
    /// Steps in the order in which traces first reach them.
    pub all: Vec<Step>,
    /// Steps that may follow each step, oldest first.
    pub next: Successors,
    /// Headers of loops whose number of rounds differed between passes.
    pub varying: Vec<NodeId>,
    /// For each node, the header of the outermost loop that contains it.
    pub outermost: Vec<Option<NodeId>>,
    ids: FxHashMap<(NodeId, Rounds), u32>,
}

/// A pass through a loop. `lap` is the index of the loop, `round` the number of the running round, and `ops` the number
/// of ops of the pass so far.
#[derive(Clone, Copy)]
struct Frame {
    lap: u32,
    round: u32,
    ops: u64,
    /// The rounds of the loops around this loop (`outer`), and the same with this loop's round (`inner`).
    outer: Rounds,
    inner: Rounds,
}

/// A walk along traces that determines the rounds of each op. `chains` lists the loops around each node.
struct Walk<'a> {
    forest: &'a LoopForest,
    chains: &'a [SmallVec<[u32; 4]>],
    unrolled: Vec<bool>,
    interned: FxHashMap<(Rounds, u32, u32), Rounds>,
    frames: Vec<Frame>,
}

impl<'a> Walk<'a> {
    fn new(forest: &'a LoopForest, chains: &'a [SmallVec<[u32; 4]>]) -> Walk<'a> {
        let unrolled = vec![false; forest.loops.len()];
        Walk { forest, chains, unrolled, interned: FxHashMap::default(), frames: Vec::new() }
    }

    fn within(&mut self, outer: Rounds, lap: u32, round: u32) -> Rounds {
        if !self.unrolled[lap as usize] {
            return outer;
        }
        let next = self.interned.len() as u32 + 1;
        *self.interned.entry((outer, lap, round)).or_insert(next)
    }

    fn rounds(&self) -> Rounds {
        self.frames.last().map_or(NO_ROUNDS, |f| f.inner)
    }

    fn leave(&mut self, keep: usize, left: &mut impl FnMut(Frame)) {
        while self.frames.len() > keep {
            if let Some(frame) = self.frames.pop() {
                if let Some(outer) = self.frames.last_mut() {
                    outer.ops += frame.ops;
                }
                left(frame);
            }
        }
    }

    /// Advances to an op and returns its rounds. Calls `left` for each pass through a loop that ends here.
    fn go(&mut self, node: NodeId, left: &mut impl FnMut(Frame)) -> Rounds {
        let chain = &self.chains[node.index()];
        let keep = self.frames.iter().zip(chain).take_while(|(f, lap)| f.lap == **lap).count();
        self.leave(keep, left);
        if keep == chain.len()
            && let Some(mut frame) = self.frames.pop()
        {
            if self.forest.loops[frame.lap as usize].header == node.0 {
                frame.round += 1;
                frame.inner = self.within(frame.outer, frame.lap, frame.round);
            }
            self.frames.push(frame);
        }
        for &lap in &chain[keep..] {
            let outer = self.rounds();
            let inner = self.within(outer, lap, 0);
            self.frames.push(Frame { lap, round: 0, ops: 0, outer, inner });
        }
        if let Some(frame) = self.frames.last_mut() {
            frame.ops += 1;
        }
        self.rounds()
    }

    /// The rounds of an op that is entered from outside of its loops, so each loop is in its first round.
    fn entry(&mut self, node: NodeId) -> Rounds {
        let chain = self.chains[node.index()].clone();
        chain.into_iter().fold(NO_ROUNDS, |outer, lap| self.within(outer, lap, 0))
    }

    /// Decides for each loop whether it is unrolled, outer loops first. Returns the headers of loops whose number
    /// of rounds differed between passes.
    fn decide(&mut self, graph: &TraceGraph) -> Vec<NodeId> {
        let depth = |lap: u32| self.forest.loops[lap as usize].depth;
        let levels = (0..self.forest.loops.len() as u32).map(depth).max().map_or(0, |d| d + 1);
        let mut varying = Vec::new();
        let around = |n: NodeId| &self.chains[n.index()];
        let both = |(a, b)| around(a).iter().copied().filter(move |lap| around(b).contains(lap));
        let unsettled: FxHashSet<u32> = graph.unexpected().flat_map(both).collect();
        for level in 0..levels {
            let mut counts: FxHashMap<(u32, Rounds), u32> = FxHashMap::default();
            let mut seen: FxHashSet<u32> = FxHashSet::default();
            let mut varies: FxHashSet<u32> = FxHashSet::default();
            let mut large: FxHashSet<u32> = FxHashSet::default();
            let mut left = |frame: Frame| {
                if self.forest.loops[frame.lap as usize].depth != level {
                    return;
                }
                seen.insert(frame.lap);
                if *counts.entry((frame.lap, frame.outer)).or_insert(frame.round) != frame.round {
                    varies.insert(frame.lap);
                }
                if frame.ops > MAX_UNROLLED_OPS {
                    large.insert(frame.lap);
                }
            };
            for trace in graph.traces().iter() {
                let mut walk = Walk {
                    forest: self.forest,
                    chains: self.chains,
                    unrolled: std::mem::take(&mut self.unrolled),
                    interned: std::mem::take(&mut self.interned),
                    frames: Vec::new(),
                };
                for node in trace.nodes() {
                    walk.go(node, &mut left);
                }
                walk.leave(0, &mut left);
                (self.unrolled, self.interned) = (walk.unrolled, walk.interned);
            }
            for lap in seen {
                let header = NodeId(self.forest.loops[lap as usize].header);
                if varies.contains(&lap) {
                    varying.push(header);
                } else if !graph.node(header).varies && !large.contains(&lap) && !unsettled.contains(&lap) {
                    self.unrolled[lap as usize] = true;
                }
            }
        }
        varying
    }
}

impl Steps {
    /// The steps of a TraceGraph's warm paths.
    pub fn of(graph: &TraceGraph) -> Steps {
        let children: Successors =
            graph.ids().map(|n| graph.warm_children(n).iter().map(|c| c.0).collect()).collect();
        let forest = LoopForest::of(&children);
        let chains: Vec<SmallVec<[u32; 4]>> = graph.ids().map(|n| forest.chain(n.0)).collect();
        let header = |chain: &SmallVec<[u32; 4]>| Some(NodeId(forest.loops[*chain.first()? as usize].header));
        let outermost = chains.iter().map(header).collect();
        let mut walk = Walk::new(&forest, &chains);
        let mut steps = Steps { varying: walk.decide(graph), outermost, ..Steps::default() };
        steps.id(NodeId::START, NO_ROUNDS, None);
        steps.all[0].ends = graph.node(NodeId::START).ends;
        for trace in graph.traces().iter() {
            steps.add_trace(trace, &mut walk);
        }
        steps.add_other_paths(graph, &children, &mut walk);
        steps
    }

    fn id(&mut self, node: NodeId, rounds: Rounds, unrolled: Option<NodeId>) -> u32 {
        *self.ids.entry((node, rounds)).or_insert_with(|| {
            self.all.push(Step { node, unrolled, fetched: false, ends: false });
            self.next.push(SmallVec::new());
            self.all.len() as u32 - 1
        })
    }

    fn link(&mut self, from: u32, to: u32) {
        let next = &mut self.next[from as usize];
        if !next.contains(&to) {
            next.push(to);
        }
    }

    fn add_trace(&mut self, trace: &Trace, walk: &mut Walk<'_>) {
        let mut at = 0;
        for (node, fetched) in trace.ops() {
            let rounds = walk.go(node, &mut |_| {});
            let outermost = walk.frames.iter().find(|f| walk.unrolled[f.lap as usize]);
            let unrolled = outermost.map(|f| NodeId(walk.forest.loops[f.lap as usize].header));
            let step = self.id(node, rounds, unrolled);
            self.all[step as usize].fetched |= fetched;
            self.link(at, step);
            at = step;
        }
        walk.leave(0, &mut |_| {});
        self.all[at as usize].ends = true;
    }

    /// Adds edges that no kept trace takes. Edges within unrolled loops are left out, because the round in which they
    /// were taken is unknown.
    fn add_other_paths(&mut self, graph: &TraceGraph, children: &Successors, walk: &mut Walk<'_>) {
        let mut steps_of: Vec<SmallVec<[u32; 1]>> = vec![SmallVec::new(); graph.len()];
        for (i, step) in self.all.iter().enumerate() {
            steps_of[step.node.index()].push(i as u32);
        }
        let unrolled: Vec<Option<u32>> =
            walk.chains.iter().map(|c| c.iter().copied().find(|l| walk.unrolled[*l as usize])).collect();
        let mut reached = vec![false; graph.len()];
        let mut open = vec![NodeId::START];
        while let Some(node) = open.pop() {
            if std::mem::replace(&mut reached[node.index()], true) {
                continue;
            }
            open.extend(children[node.index()].iter().map(|c| NodeId(*c)));
            if unrolled[node.index()].is_none() {
                let step = self.id(node, NO_ROUNDS, None);
                steps_of[node.index()] = SmallVec::from_elem(step, 1);
                self.all[step as usize].fetched |= graph.node(node).fetched;
                self.all[step as usize].ends |= graph.node(node).ends;
            }
        }
        for node in graph.ids().filter(|n| reached[n.index()]) {
            let from = unrolled[node.index()];
            for &child in &children[node.index()] {
                let to = unrolled[child as usize];
                if from.is_some() && from == to {
                    continue;
                }
                let rounds = if to.is_some() { walk.entry(NodeId(child)) } else { NO_ROUNDS };
                let Some(&target) = self.ids.get(&(NodeId(child), rounds)) else { continue };
                for step in steps_of[node.index()].clone() {
                    let leaves = |s: &Steps| {
                        s.next[step as usize]
                            .iter()
                            .any(|n| unrolled[s.all[*n as usize].node.index()] != from)
                    };
                    if from.is_none() || leaves(self) {
                        self.link(step, target);
                    }
                }
            }
        }
    }

    /// The steps of a sequence of ops, or `None` if the steps do not contain this path.
    pub fn follow(&self, nodes: impl Iterator<Item = NodeId>) -> Option<Vec<u32>> {
        let mut at = 0;
        let mut passed = Vec::new();
        for node in nodes {
            at = *self.next[at as usize].iter().find(|n| self.all[**n as usize].node == node)?;
            passed.push(at);
        }
        Some(passed)
    }
}
