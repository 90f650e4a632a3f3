//! Loops without an end of the iteration, with fakes: what their rounds cost, and when branches are learnt.

mod fakes;

use std::collections::HashMap;

use fakes::{CoExecution, Machine, Op, Tensor, V, chain};
use proptest::prelude::*;

/// One round of a loop without an end of the iteration. The round takes the branches whose bits are set.
fn round(m: &mut dyn Machine, w: &Tensor, branches: u32) -> Tensor {
    let mut a = m.relu(100, w);
    for bit in 0..8 {
        if branches & (1 << bit) != 0 {
            a = m.relu(110 + 10 * bit, &a);
            m.mul_(111 + 10 * bit, &a, w);
        }
    }
    m.add(200, &a, &a, 0.25)
}

/// Returns the numbers of divergences and of traced ops in each call of `pass`.
fn costs(
    m: &mut CoExecution,
    passes: usize,
    mut pass: impl FnMut(&mut CoExecution, usize),
) -> Vec<(u64, u64)> {
    let counters = |m: &CoExecution| {
        let mut engine = m.engine();
        let report = engine.report();
        let diverged = report.divergences.iter().map(|d| d.count).sum::<u64>();
        (diverged, report.ops_captured - report.ops_coexecuted)
    };
    let mut costs = Vec::new();
    for i in 0..passes {
        let before = counters(m);
        pass(m, i);
        let after = counters(m);
        costs.push((after.0 - before.0, after.1 - before.1));
    }
    costs
}

/// Runs training iterations. The ops that the caller issues afterwards are followed by no end of an iteration.
fn trained() -> (CoExecution, Tensor) {
    let mut m = CoExecution::new();
    let w = m.state(&[1.0, -2.0]);
    for _ in 0..4 {
        chain(&mut m, &w, 1, 0.5);
        m.step();
    }
    (m, w)
}

#[test]
fn a_loop_after_training_is_learnt_in_its_second_round() {
    let (mut m, w) = trained();
    let costs = costs(&mut m, 8, |m, _| drop(round(m, &w, 0b101)));
    assert_eq!(costs[0], (1, 6));
    assert!(costs[1].0 == 0 && costs[1].1 <= 1, "{costs:?}");
    assert!(costs[2..].iter().all(|c| *c == (0, 0)), "{costs:?}");
}

#[test]
fn a_branch_of_a_later_loop_is_learnt_when_it_comes_again() {
    let (mut m, w) = trained();
    for _ in 0..4 {
        round(&mut m, &w, 0);
    }
    // An op separates the two loops. The second loop takes other branches.
    m.mul_(300, &w, &w);
    let costs = costs(&mut m, 6, |m, _| drop(round(m, &w, 0b11)));
    assert_eq!(costs[0].0, 1);
    assert!(costs[1..].iter().all(|c| *c == (0, 0)), "{costs:?}");
}

#[test]
fn a_branch_in_an_unrolled_loop_is_learnt_when_it_comes_again() {
    let (mut m, w) = trained();
    for _ in 0..3 {
        for _ in 0..5 {
            round(&mut m, &w, 0);
        }
        chain(&mut m, &w, 1, 0.5);
        m.step();
    }
    assert!(m.engine().symbolic().whiles.is_empty(), "it is unrolled");
    let costs = costs(&mut m, 5, |m, i| drop(round(m, &w, if i == 0 { 0 } else { 0b1 })));
    assert_eq!(costs, [(0, 0), (1, 2), (0, 0), (0, 0), (0, 0)]);
    chain(&mut m, &w, 1, 0.5);
    m.step();
    assert!(m.engine().symbolic().whiles.is_empty(), "it is unrolled again");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    /// If the iteration has taken every edge of a path before, nothing on the path is traced, whether the loop is
    /// unrolled or not.
    #[test]
    fn a_way_that_came_before_co_executes(
        passes in prop::collection::vec((0usize..3, 0u32..16, 1usize..4, prop::bool::weighted(0.1)), 1..24)
    ) {
        let (mut m, w) = trained();
        let mut taken: HashMap<(u32, u32), u32> = HashMap::new();
        let mut at = 0;
        for (body, branches, rounds, ends) in passes {
            let way = way(body as u32, branches);
            for _ in 0..rounds {
                let mut known = true;
                for &line in &way {
                    let times = taken.entry((at, line)).or_default();
                    known &= *times >= 1;
                    *times += 1;
                    at = line;
                }
                let cost = costs(&mut m, 1, |m, _| walk(m, &w, &way))[0];
                prop_assert!(!known || cost == (0, 0), "{cost:?} on {way:?}");
            }
            if ends {
                chain(&mut m, &w, 1, 0.5);
                m.step();
                at = 0;
                taken.clear();
            }
        }
    }
}

/// Returns the lines of a loop's round: the lines of one of three bodies, with the branches whose bits are set.
fn way(body: u32, branches: u32) -> Vec<u32> {
    let mut way: Vec<u32> = (0..4).map(|i| 1000 * (body + 1) + i).collect();
    for bit in (0..4).filter(|bit| branches & (1 << bit) != 0) {
        way.extend([0, 1].map(|i| 1000 * (body + 1) + 100 + 10 * bit + i));
    }
    // Two of the bodies end with the same line.
    way.push(if body == 0 { 1900 } else { 9000 });
    way
}

/// Issues an op at each of the lines.
fn walk(m: &mut dyn Machine, w: &Tensor, lines: &[u32]) {
    for &line in lines {
        let (number, none) = (V::F(0.0), V::None);
        // The line is also an attribute, so that ops of different lines are never the same.
        let args = [V::T(w), number.clone(), number.clone(), number.clone(), number, V::I(i64::from(line))];
        m.one(line, Op::Echo, &[&args[..], &[none.clone(), V::Ints(&[1]), none, V::T(w)]].concat());
    }
}
