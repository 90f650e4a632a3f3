//! The nested loops of a directed graph: its strongly connected components, found again within each loop without
//! the edges to the loop's header.

use petgraph::algo::kosaraju_scc;
use petgraph::graph::{DiGraph, NodeIndex};
use smallvec::SmallVec;

/// The successors of each vertex.
pub type Successors = Vec<SmallVec<[u32; 2]>>;

/// A loop.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Loop {
    /// Vertex that begins a round: the vertex of the loop with the lowest number, which the program reached first.
    pub header: u32,
    /// Loop that directly contains this one.
    pub parent: Option<u32>,
    /// Number of loops around this one.
    pub depth: u32,
    /// Vertices of the loop, including those of inner loops.
    pub members: Vec<u32>,
}

/// All loops of a graph, outer ones before inner ones.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct LoopForest {
    /// Loops, by index.
    pub loops: Vec<Loop>,
    /// Innermost loop of each vertex.
    innermost: Vec<Option<u32>>,
}

/// Maximum depth of loops. Deeper nesting comes from irregular jumps, so its vertices stay in the enclosing loop.
const MAX_DEPTH: u32 = 8;

const OUTSIDE: u32 = u32::MAX;

impl LoopForest {
    /// The loops of a graph.
    pub fn of(successors: &Successors) -> LoopForest {
        let mut forest = LoopForest { loops: Vec::new(), innermost: vec![None; successors.len()] };
        let mut local = vec![OUTSIDE; successors.len()];
        forest.search((0..successors.len() as u32).collect(), None, successors, &mut local);
        let mut next = 0;
        while next < forest.loops.len() {
            if forest.loops[next].depth + 1 < MAX_DEPTH {
                let members = forest.loops[next].members.clone();
                forest.search(members, Some(next as u32), successors, &mut local);
            }
            next += 1;
        }
        forest
    }

    /// Finds the loops among `members` (the vertices of `parent` if given), without the edges to the header of
    /// `parent`.
    fn search(&mut self, members: Vec<u32>, parent: Option<u32>, successors: &Successors, local: &mut [u32]) {
        let cut = parent.map_or(OUTSIDE, |p| self.loops[p as usize].header);
        let depth = parent.map_or(0, |p| self.loops[p as usize].depth + 1);
        let mut graph: DiGraph<u32, ()> = DiGraph::with_capacity(members.len(), members.len());
        for &v in &members {
            local[v as usize] = graph.add_node(v).index() as u32;
        }
        let inside = |v: u32| v != cut && local[v as usize] != OUTSIDE;
        for &v in &members {
            for &to in successors[v as usize].iter().filter(|to| inside(**to)) {
                let ends = (local[v as usize], local[to as usize]);
                graph.add_edge(NodeIndex::new(ends.0 as usize), NodeIndex::new(ends.1 as usize), ());
            }
        }
        let mut found: Vec<Vec<u32>> = kosaraju_scc(&graph)
            .into_iter()
            .map(|part| part.into_iter().map(|n| graph[n]).collect::<Vec<u32>>())
            .filter(|part| {
                part.len() > 1 || (part[0] != cut && successors[part[0] as usize].contains(&part[0]))
            })
            .collect();
        members.iter().for_each(|v| local[*v as usize] = OUTSIDE);
        found.iter_mut().for_each(|part| part.sort_unstable());
        found.sort_unstable();
        for members in found {
            let id = self.loops.len() as u32;
            members.iter().for_each(|v| self.innermost[*v as usize] = Some(id));
            self.loops.push(Loop { header: members[0], parent, depth, members });
        }
    }

    /// The innermost loop of a vertex.
    pub fn innermost(&self, vertex: u32) -> Option<u32> {
        self.innermost[vertex as usize]
    }

    /// The loops that contain a vertex, outermost first.
    pub fn chain(&self, vertex: u32) -> SmallVec<[u32; 4]> {
        let around = std::iter::successors(self.innermost(vertex), |l| self.loops[*l as usize].parent);
        let mut chain: SmallVec<[u32; 4]> = around.collect();
        chain.reverse();
        chain
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn forest(edges: &[(u32, u32)]) -> Vec<(u32, Option<u32>, Vec<u32>)> {
        let n = edges.iter().map(|(a, b)| a.max(b) + 1).max().unwrap_or(0);
        let mut successors = vec![SmallVec::new(); n as usize];
        edges.iter().for_each(|(a, b)| successors[*a as usize].push(*b));
        LoopForest::of(&successors).loops.into_iter().map(|l| (l.header, l.parent, l.members)).collect()
    }

    #[test]
    fn a_line_has_no_loop() {
        assert_eq!(forest(&[(0, 1), (1, 2), (0, 2)]), []);
    }

    #[test]
    fn one_op_repeated() {
        assert_eq!(forest(&[(0, 1), (1, 1), (1, 2)]), [(1, None, vec![1])]);
    }

    #[test]
    fn nested_loops_with_a_branch() {
        // 1 { 2 { 3 | 4 } 5 } 6
        let edges = [(0, 1), (1, 2), (2, 3), (2, 4), (3, 2), (4, 2), (4, 5), (5, 1), (5, 6)];
        assert_eq!(forest(&edges), [(1, None, vec![1, 2, 3, 4, 5]), (2, Some(0), vec![2, 3, 4])]);
    }

    #[test]
    fn two_loops_in_sequence() {
        let edges = [(0, 1), (1, 2), (2, 1), (2, 3), (3, 3)];
        assert_eq!(forest(&edges), [(1, None, vec![1, 2]), (3, None, vec![3])]);
    }

    #[test]
    fn a_loop_entered_at_two_places_is_one_loop() {
        let edges = [(0, 1), (0, 2), (1, 2), (2, 1), (2, 3)];
        assert_eq!(forest(&edges), [(1, None, vec![1, 2])]);
    }
}
