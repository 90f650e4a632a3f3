//! Tests of the phase machine with fakes: tracing, co-execution, feeds, fetches, divergences and freeing.

mod fakes;

use std::time::Duration;

use fakes::{CoExecution, Imperative, Machine, Op, Tensor, V, chain};
use tandem_runtime::config::{Config, Mode};
use tandem_runtime::engine::Phase;
use tandem_runtime::placement::RunPlace;

/// One iteration: takes the state and the iteration's number, and returns the tensors to compare.
type Program<'p> = &'p dyn Fn(&mut dyn Machine, &mut Vec<Tensor>, usize) -> Vec<Tensor>;

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// Runs a program on both machines. One co-executed run compares values after each step; a second one holds all outputs
/// and compares them only at the end. Returns the machine of the second run, with its state.
fn agrees(state: &[f32], steps: usize, program: Program<'_>) -> (CoExecution, Vec<Tensor>) {
    agrees_with(Config::default(), state, steps, program)
}

fn agrees_with(
    config: Config,
    state: &[f32],
    steps: usize,
    program: Program<'_>,
) -> (CoExecution, Vec<Tensor>) {
    let mut eager = Imperative::new();
    let mut expected = Vec::new();
    let mut variables = vec![eager.state(state)];
    for i in 0..steps {
        let outs = program(&mut eager, &mut variables, i);
        expected.push(outs.iter().map(|t| bits(&eager.peek(t))).collect::<Vec<_>>());
    }
    let calls = eager.torch.take_calls();

    let mut each = CoExecution::with(config.clone());
    let mut variables = vec![each.state(state)];
    for (i, expected) in expected.iter().enumerate() {
        let outs = program(&mut each, &mut variables, i);
        each.step();
        let got: Vec<_> = outs.iter().map(|t| bits(&each.peek(t))).collect();
        assert_eq!(&got, expected, "after step {i}");
    }
    assert_eq!(each.torch.take_calls(), calls, "the kernels that ran, in order");
    drop(variables);
    assert_eq!(each.leaked(), (0, 0));

    let mut held = CoExecution::with(config);
    let mut variables = vec![held.state(state)];
    let mut outs = Vec::new();
    for i in 0..steps {
        let made = program(&mut held, &mut variables, i);
        // The output itself may be changed in place in a later step, so a tensor computed from it is held.
        outs.push(made.into_iter().map(|t| held.relu(9_000, &t)).collect::<Vec<_>>());
        held.step();
    }
    for (i, (outs, expected)) in outs.iter().zip(&expected).enumerate() {
        let expected: Vec<Vec<u32>> = expected
            .iter()
            .map(|v| v.iter().map(|b| f32::from_bits(*b).max(0.0).to_bits()).collect())
            .collect();
        let got: Vec<_> = outs.iter().map(|t| bits(&held.peek(t))).collect();
        assert_eq!(got, expected, "held since step {i}");
    }
    let others: Vec<Op> = calls.into_iter().filter(|op| *op != Op::Relu).collect();
    let ran: Vec<Op> = held.torch.take_calls().into_iter().filter(|op| *op != Op::Relu).collect();
    assert_eq!(ran, others, "the kernels that ran, in order");
    (held, variables)
}

#[test]
fn co_execution_begins_when_a_trace_adds_nothing() {
    let mut m = CoExecution::new();
    let w = m.state(&[1.0, 2.0]);
    let mut phases = Vec::new();
    for _ in 0..4 {
        phases.push(m.phase());
        chain(&mut m, &w, 1, 0.5);
        m.step();
    }
    assert_eq!(phases, [Phase::Tracing, Phase::Tracing, Phase::CoExecution, Phase::CoExecution]);
    assert_eq!(m.steps(), (2, 2));
    assert_eq!(m.divergences(), 0);
    assert_eq!(m.engine().graph().len(), 5);
    assert_eq!(m.engine().symbolic().blocks.len(), 1);
}

#[test]
fn a_co_executed_op_needs_no_stack_and_no_wait() {
    let mut m = CoExecution::new();
    let w = m.state(&[1.0, 2.0]);
    for _ in 0..3 {
        chain(&mut m, &w, 1, 0.5);
        m.step();
    }
    let before = (m.stacks, m.waits);
    for _ in 0..20 {
        chain(&mut m, &w, 1, 0.5);
        m.step();
        m.synchronize().unwrap();
    }
    assert_eq!((m.stacks, m.waits), before);
}

#[test]
fn steady_state_equals_the_reference() {
    let (m, _) = agrees(&[1.0, -2.0, 3.0], 10, &|m, s, _| vec![chain(m, &s[0], 1, 0.25), s[0].clone()]);
    assert_eq!(m.steps(), (2, 8));
}

#[test]
fn numbers_are_fed() {
    let (m, _) = agrees(&[1.0, -2.0, 3.0], 10, &|m, s, i| vec![chain(m, &s[0], 1, i as f64 / 7.0)]);
    assert_eq!((m.steps(), m.divergences()), ((2, 8), 0));
}

#[test]
fn host_tensors_are_fed_as_they_are_at_the_call() {
    let (m, _) = agrees(&[0.0; 4], 10, &|m, s, i| {
        let host = m.host(&[i as f32, 1.0, 2.0, 3.0]);
        let every_second = host.slice(i as i64 % 2, 2, 2);
        let a = m.one(1, Op::ToDevice, &[V::T(&host)]);
        let b = m.one(2, Op::ToDevice, &[V::T(&every_second)]);
        // A fetch overwrites the host tensor immediately.
        m.call(3, Op::Copy_, &[V::T(&host), V::T(&s[0])]).unwrap();
        vec![a, b]
    });
    assert_eq!(m.divergences(), 0);
}

#[test]
fn offsets_are_fed() {
    let (m, _) = agrees(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 12, &|m, s, i| {
        let (from, to) = (s[0].slice(i as i64 % 5, 2, 1), s[0].slice((i * 3) as i64 % 5, 2, 1));
        let a = m.add(1, &from, &to, 0.5);
        m.mul_(2, &to, &a);
        let part = m.one(3, Op::Narrow, &[V::T(&to), V::I(1), V::I(1)]);
        m.mul_(4, &part, &a.slice(0, 1, 1));
        vec![a, s[0].clone()]
    });
    assert_eq!((m.steps(), m.divergences()), ((2, 10), 0));
}

#[test]
fn new_shapes_are_variants() {
    let (m, _) = agrees(&[1.0], 12, &|m, _, i| {
        let n = [3, 3, 3, 5, 3, 4, 5, 1][i % 8];
        let x = m.one(1, Op::Full, &[V::Ints(&[n]), V::F(i as f64)]);
        let y = m.one(2, Op::Arange, &[V::I(n)]);
        let z = m.add(3, &x, &y, 2.0);
        let both = m.one(4, Op::Cat, &[V::List(vec![&z, &x, &y])]);
        vec![m.relu(5, &both)]
    });
    assert_eq!((m.steps(), m.divergences()), ((2, 10), 0));
}

#[test]
fn a_branch_is_a_divergence_once_and_a_case_then() {
    let (m, _) = agrees(&[1.0, -2.0], 20, &|m, s, i| {
        let a = m.add(1, &s[0], &s[0], 0.5);
        let b = if i % 7 == 6 { m.one(2, Op::Check, &[V::T(&s[0].slice(0, 1, 1))]) } else { m.relu(3, &a) };
        let c = m.relu(4, &b);
        vec![m.add(5, &c, &c, 1.0)]
    });
    assert_eq!(m.divergences(), 1);
    assert_eq!(m.steps(), (3, 17));
    let mut engine = m.engine();
    assert_eq!(engine.paths(), 2);
    assert!(engine.report().divergences[0].difference.sentence().contains("expected aten::relu"));
    // The paths rejoin, so the graph has the ops after the branch only once.
    assert_eq!(engine.graph().len(), 1 + 1 + 2 + 3);
}

#[test]
fn equal_ops_in_two_cases_are_told_apart_by_their_place() {
    let (m, _) = agrees(&[1.0, -2.0], 12, &|m, s, i| {
        let a = if i % 2 == 0 { m.relu(1, &s[0]) } else { m.relu(2, &s[0]) };
        let b = if i % 2 == 0 { m.relu(3, &a) } else { m.add(4, &a, &a, 1.0) };
        vec![b]
    });
    assert_eq!(m.divergences(), 0);
    assert_eq!(m.engine().paths(), 2);
}

#[test]
fn divergence_at_the_start_of_a_block() {
    let (m, _) = agrees(&[1.0, -2.0], 12, &|m, s, i| {
        if i == 5 {
            m.mul_(9, &s[0], &s[0]);
        }
        vec![chain(m, &s[0], 1, 0.5)]
    });
    assert_eq!(m.divergences(), 1);
    assert_eq!(m.steps(), (3, 9));
}

#[test]
fn divergence_in_the_middle_of_a_block_repeats_and_loses_nothing() {
    // `agrees` compares the lists of kernels that ran.
    let (m, _) = agrees(&[1.0, -2.0], 12, &|m, s, i| {
        let a = m.add(1, &s[0], &s[0], 0.5);
        m.mul_(2, &s[0], &a);
        let r = m.uniform(3, 2);
        if i >= 5 && i % 2 == 1 {
            m.mul_(4, &s[0], &a);
        }
        m.mul_(5, &s[0], &r);
        vec![chain(m, &s[0], 6, 0.5), r]
    });
    assert_eq!(m.divergences(), 1);
    assert_eq!(m.steps(), (3, 9));
}

#[test]
fn divergence_twice_in_a_row() {
    let (m, _) = agrees(&[1.0, -2.0], 12, &|m, s, i| {
        let a = m.add(1, &s[0], &s[0], 0.5);
        match i {
            4 => m.mul_(2, &s[0], &s[0]),
            5 => drop(m.relu(3, &a)),
            _ => {}
        }
        m.mul_(4, &s[0], &a);
        vec![m.relu(5, &a)]
    });
    assert_eq!(m.divergences(), 2);
    assert_eq!(m.steps(), (4, 8));
}

#[test]
fn dataflow_that_differs_at_the_same_place_is_learnt() {
    let (m, _) = agrees(&[1.0, -2.0], 10, &|m, s, i| {
        let a = m.relu(1, &s[0]);
        let b = m.add(2, &a, &a, 1.0);
        let c = if i == 6 { &a } else { &b };
        vec![m.add(3, c, &b, 0.5)]
    });
    assert_eq!((m.steps(), m.divergences()), ((2, 8), 0));
}

#[test]
fn the_same_op_on_other_inputs_at_another_place_is_a_divergence() {
    let (m, _) = agrees(&[1.0, -2.0], 10, &|m, s, i| {
        let a = m.relu(1, &s[0]);
        let b = m.add(2, &a, &a, 1.0);
        vec![if i == 6 { m.add(4, &a, &b, 0.5) } else { m.add(3, &b, &b, 0.5) }]
    });
    assert_eq!(m.divergences(), 1);
    let mut engine = m.engine();
    let difference = &engine.report().divergences[0].difference;
    assert_eq!(difference.sentence(), "expected input 0 from %2, got %1");
}

#[test]
fn requires_grad_is_part_of_an_op() {
    let (m, _) = agrees(&[1.0, -2.0], 10, &|m, s, i| {
        let w = if i == 6 { s[0].clone().with_grad() } else { s[0].clone() };
        vec![m.relu(1, &w)]
    });
    assert_eq!(m.divergences(), 1);
}

#[test]
fn a_loop_of_constant_count_is_one_block() {
    let (m, _) = agrees(&[1.0, -2.0], 10, &|m, s, _| {
        let mut x = m.relu(1, &s[0]);
        for _ in 0..5 {
            x = m.add(2, &x, &s[0], 0.5);
            x = m.relu(3, &x);
        }
        vec![x]
    });
    assert_eq!((m.steps(), m.divergences()), ((2, 8), 0));
    // The graph has the start, three ops, and the relu that `agrees` adds.
    assert_eq!(m.engine().graph().len(), 5);
    assert_eq!(m.engine().symbolic().blocks.len(), 1);
}

#[test]
fn a_loop_of_changing_count_co_executes() {
    let (m, _) = agrees(&[1.0, -2.0], 30, &|m, s, i| {
        let mut x = m.relu(1, &s[0]);
        for j in 0..i * 7 % 5 {
            x = m.add(2, &x, &s[0], j as f64);
            for _ in 0..(i + j) % 3 {
                x = m.relu(3, &x);
            }
        }
        vec![m.relu(4, &x)]
    });
    assert_eq!(m.engine().graph().len(), 6);
    assert!(m.divergences() <= 4);
    assert!(m.steps().0 <= 6, "{:?}", m.steps());
}

/// Function that issues an op at a line of a function with these callers.
type Issue<'m> = &'m mut dyn FnMut(&[i32], u32, Op, &[V<'_>]) -> Tensor;

/// Sums over a tree recursively, with one frame per call.
fn tree(issue: Issue<'_>, frames: &mut Vec<i32>, x: &Tensor, shape: u32, depth: u32) -> Tensor {
    if depth == 0 || shape.is_multiple_of(3) {
        return issue(frames, 1, Op::Relu, &[V::T(x)]);
    }
    frames.push(2);
    let left = tree(issue, frames, x, shape / 2, depth - 1);
    frames.pop();
    frames.push(3);
    let right = tree(issue, frames, x, shape / 3, depth - 1);
    frames.pop();
    issue(frames, 4, Op::Add, &[V::T(&left), V::T(&right), V::F(0.5)])
}

#[test]
fn recursion_folds() {
    let mut m = CoExecution::new();
    let mut eager = Imperative::new();
    let (w, v) = (m.state(&[1.0, -2.0]), eager.state(&[1.0, -2.0]));
    for i in 0..60u32 {
        let shape = i.wrapping_mul(2_654_435_761) >> 8;
        let a = tree(&mut |f, line, op, args| m.call_in(f, line, op, args), &mut vec![], &w, shape, 12);
        let b = tree(&mut |_, line, op, args| eager.one(line, op, args), &mut vec![], &v, shape, 12);
        assert_eq!(bits(&m.peek(&a)), bits(&eager.peek(&b)), "step {i}");
        m.step();
    }
    let mut engine = m.engine();
    assert!(engine.graph().len() <= 16, "{} nodes", engine.graph().len());
    let late: Vec<_> = engine.report().steps.iter().skip(30).copied().collect();
    let (ops, traced): (u64, u64) = (late.iter().map(|s| s.ops).sum(), late.iter().map(|s| s.traced).sum());
    assert!(traced * 100 < ops, "{traced} of {ops} were traced after 30 trees");
}

#[test]
fn co_execution_goes_on_after_what_is_new() {
    let (m, _) = agrees(&[1.0, -2.0], 12, &|m, s, i| {
        let a = chain(m, &s[0], 1, 0.5);
        if i == 6 {
            m.mul_(10, &s[0], &s[0]);
        }
        vec![a, chain(m, &s[0], 20, 0.25)]
    });
    let mut engine = m.engine();
    assert_eq!(engine.report().steps[6].traced, 1);
    assert_eq!(engine.report().steps[6].ops, 11);
}

#[test]
fn an_iteration_without_end_co_executes() {
    let mut m = CoExecution::new();
    let w = m.state(&[1.0, -2.0]);
    for i in 0..2000 {
        let a = chain(&mut m, &w, 1, f64::from(i % 3));
        if i % 4 == 0 {
            m.add(10, &a, &a, 1.0);
        }
    }
    assert_eq!(m.phase(), Phase::CoExecution);
    let mut engine = m.engine();
    assert!(engine.report().ops_coexecuted > 7000, "{}", engine.report().ops_coexecuted);
}

#[test]
fn a_program_that_never_repeats_is_left_alone() {
    let mut m = CoExecution::new();
    let w = m.state(&[1.0, -2.0]);
    let mut grown = 0;
    for i in 0..60 {
        for j in 0..10 {
            m.relu(100 + i * 10 + j, &w);
        }
        m.step();
        grown = grown.max(m.engine().graph().len());
    }
    assert!(grown < 10 * 25, "{grown} nodes");
    assert_eq!(m.phase(), Phase::Imperative);
    assert_eq!(m.engine().report().notes.len(), 1);
}

#[test]
fn lazy_evaluation_runs_nothing_before_a_value_is_needed() {
    let config = Config { mode: Mode::Lazy, ..Config::default() };
    agrees_with(config.clone(), &[1.0, -2.0], 10, &|m, s, i| {
        let mut x = m.uniform(9, 2);
        for _ in 0..i % 4 {
            x = m.add(1, &x, &s[0], 0.5);
        }
        vec![chain(m, &s[0], 2, 0.5), x]
    });
    let mut m = CoExecution::with(config);
    let w = m.state(&[1.0, -2.0]);
    for _ in 0..4 {
        chain(&mut m, &w, 1, 0.5);
        m.step();
    }
    m.synchronize().unwrap();
    m.torch.take_calls();
    let a = (0..3).map(|_| {
        let a = chain(&mut m, &w, 1, 0.5);
        m.step();
        a
    });
    let a: Vec<Tensor> = a.collect();
    std::thread::sleep(Duration::from_millis(5));
    assert_eq!(m.torch.count_calls(), 0);
    m.item(9, &a[0]).unwrap();
    assert_eq!(m.torch.count_calls(), 13);
}

#[test]
fn an_iteration_may_end_early() {
    let (m, _) = agrees(&[1.0, -2.0], 12, &|m, s, i| {
        let a = chain(m, &s[0], 1, 0.5);
        if i % 5 == 4 {
            return vec![a];
        }
        vec![chain(m, &s[0], 10, 0.25)]
    });
    // Both kinds of iteration end with the relu that `agrees` adds.
    assert!(m.divergences() <= 1);
}

#[test]
fn a_fetch_cuts_a_block_and_does_not_diverge() {
    let mut m = CoExecution::new();
    let w = m.state(&[1.0, 2.0]);
    for i in 0..10 {
        let a = m.relu(1, &w);
        if i >= 4 {
            assert_eq!(m.item(2, &a).unwrap(), 1.0);
            assert_eq!(m.fetch(3, &a.slice(1, 1, 1)).unwrap(), [2.0]);
        }
        let b = m.add(4, &a, &a, 1.0);
        m.add(5, &b, &a, 1.0);
        m.step();
        assert_eq!(
            m.engine().symbolic().blocks.len(),
            if i < 1 {
                0
            } else if i < 4 {
                1
            } else {
                2
            }
        );
    }
    assert_eq!((m.steps(), m.divergences()), ((2, 8), 0));
    assert_eq!(m.engine().report().fetches.values().map(|f| f.count).sum::<u64>(), 12);
}

#[test]
fn a_fetch_waits_for_the_value() {
    agrees(&[1.0, -2.0], 10, &|m, s, _| {
        let a = chain(m, &s[0], 1, 0.5);
        let first = m.item(10, &a).unwrap();
        let all = m.fetch(11, &s[0]).unwrap();
        let fed = m.feed(12, &[first as f32, all[0], all[1]]);
        vec![m.relu(13, &fed)]
    });
}

#[test]
fn shapes_that_depend_on_data() {
    let (m, _) = agrees(&[1.0, -2.0, 3.0, 0.5], 12, &|m, s, i| {
        let x = m.add(1, &s[0], &s[0], i as f64 / 4.0 - 2.0);
        let y = m.relu(2, &x);
        let found = m.one(3, Op::Nonzero, &[V::T(&y)]);
        vec![m.one(4, Op::Cat, &[V::List(vec![&found, &found])])]
    });
    assert_eq!((m.steps(), m.divergences()), ((2, 10), 0));
}

#[test]
fn lists_of_outputs() {
    let (m, _) = agrees(&[1.0, -2.0, 3.0], 8, &|m, s, _| {
        let halves = m.call(1, Op::Halves, &[V::T(&s[0])]).unwrap();
        let [first, second] = &halves[..] else { panic!("two") };
        vec![m.relu(2, second), m.relu(3, first)]
    });
    assert_eq!(m.divergences(), 0);
}

#[test]
fn out_arguments_are_resized() {
    let (m, _) = agrees(&[1.0, -2.0, 3.0], 12, &|m, s, i| {
        let out = m.one(1, Op::Full, &[V::Ints(&[0]), V::F(0.0)]);
        let x = s[0].slice(0, 1 + i as i64 % 3, 1);
        m.call(2, Op::AddOut, &[V::T(&x), V::T(&x), V::F(1.0), V::T(&out)]).unwrap();
        assert_eq!(out.len(), x.len());
        let y = m.relu(3, &out);
        // The output already has the right size.
        m.call(4, Op::AddOut, &[V::T(&x), V::T(&y), V::F(2.0), V::T(&out)]).unwrap();
        vec![y, out]
    });
    assert_eq!((m.steps(), m.divergences()), ((2, 10), 0));
}

#[test]

fn a_resized_output_keeps_the_offset_that_it_has_now() {
    agrees(&[1.0, -2.0, 3.0], 10, &|m, s, i| {
        let out = m.one(1, Op::Full, &[V::Ints(&[4]), V::F(7.0)]);
        let window = out.slice(i as i64 % 3, 1, 1);
        m.call(2, Op::AddOut, &[V::T(&s[0]), V::T(&s[0]), V::F(1.0), V::T(&window)]).unwrap();
        vec![m.relu(3, &window), m.relu(4, &out)]
    });
}

#[test]
fn state_carried_from_step_to_step() {
    let (m, _) = agrees(&[1.0, -2.0], 12, &|m, s, i| {
        let next = m.add(1, &s[0], &s[0], 0.25);
        let noise = m.uniform(2, 2);
        m.mul_(3, &next, &noise);
        let out = m.relu(4, &s[0]);
        s[0] = if i % 4 == 3 { m.relu(5, &next) } else { next };
        vec![out]
    });
    assert_eq!(m.divergences(), 1);
}

#[test]
fn outputs_held_over_ten_steps_keep_their_values() {
    let mut m = CoExecution::new();
    let w = m.state(&[1.0, -2.0]);
    let mut held = std::collections::VecDeque::new();
    for i in 0..40 {
        let a = m.add(1, &w, &w, f64::from(i));
        let b = m.relu(2, &a);
        m.mul_(3, &a, &b);
        let first = 1.0 + i as f32;
        held.push_back((b, vec![first, 0.0], a, vec![first * first, 0.0]));
        m.step();
        if held.len() > 10 {
            let (b, expected, a, squared) = held.pop_front().unwrap();
            assert_eq!((m.peek(&b), m.peek(&a)), (expected, squared));
        }
    }
}

#[test]
fn released_storages_are_freed() {
    let mut m = CoExecution::new();
    let w = m.state(&[1.0, -2.0]);
    for i in 0..50 {
        let mut last = chain(&mut m, &w, 1, 0.5);
        for line in 10..30 {
            last = m.relu(line, &last);
        }
        m.step();
        m.synchronize().unwrap();
        // Only storages of this step may be left: their deaths are sent with the next run.
        assert!(m.torch.live() <= 25, "{} buffers after step {i}", m.torch.live());
    }
    assert!(m.engine().storages().held()[0].bytes.live <= 25 * 8);
    drop(w);
    assert_eq!(m.leaked(), (0, 0));
}

#[test]
fn what_nobody_reads_is_not_computed() {
    let mut m = CoExecution::new();
    let w = m.state(&[1.0, -2.0]);
    let program = |m: &mut CoExecution| {
        let a = m.one(1, Op::Neg, &[V::T(&w)]);
        let b = m.one(2, Op::Neg, &[V::T(&a)]);
        m.one(3, Op::Neg, &[V::T(&b)]);
        m.relu(4, &a);
        let kept = m.one(5, Op::Neg, &[V::T(&a)]);
        drop((a, b));
        m.step();
        kept
    };
    for _ in 0..3 {
        program(&mut m);
    }
    m.synchronize().unwrap();
    m.torch.take_calls();
    let kept = program(&mut m);
    // The second and the third neg are dead. The relu runs, because it might fail.
    assert_eq!(m.peek(&kept), [1.0, -2.0]);
    assert_eq!(m.torch.take_calls(), [Op::Neg, Op::Relu, Op::Neg]);
    drop((kept, w));
    assert_eq!(m.leaked(), (0, 0));
}

#[test]
fn random_numbers_are_drawn_once_and_in_order() {
    let mut eager = Imperative::new();
    let mut m = CoExecution::new();
    let own = (eager.torch.buffer(&[0.0, 1.0]), m.torch.buffer(&[0.0, 1.0]));
    let program = |m: &mut dyn Machine, own, i: usize| {
        let a = m.uniform(1, 3);
        let b = m.one(2, Op::Uniform, &[V::Ints(&[2]), V::Generator(own)]);
        if i % 3 == 2 {
            m.uniform(3, 1);
        }
        vec![m.relu(4, &a), m.relu(5, &b), m.uniform(6, 1)]
    };
    for i in 0..14 {
        let expected: Vec<_> = program(&mut eager, &own.0, i).iter().map(|t| eager.peek(t)).collect();
        let got = program(&mut m, &own.1, i);
        m.step();
        let got: Vec<_> = got.iter().map(|t| m.peek(t)).collect();
        assert_eq!(got, expected, "step {i}");
    }
    drop(own);
    assert_eq!(m.leaked(), (0, 0));
}

#[test]
fn ops_of_another_thread_run_between() {
    let mut m = CoExecution::new();
    let w = m.state(&[1.0]);
    let v = m.state(&[1.0]);
    let mut expected = 1.0f32;
    for _ in 0..20 {
        let a = m.add(1, &w, &w, 1.0);
        m.other_thread = true;
        m.mul_(2, &w, &v);
        let b = m.add(3, &a, &v, 1.0);
        m.other_thread = false;
        m.mul_(4, &v, &w);
        let c = m.relu(5, &b);
        m.step();
        assert_eq!(m.peek(&c), [2.0 * expected + 1.0]);
        expected = m.peek(&w)[0];
    }
    assert_eq!((m.steps(), m.divergences()), ((2, 18), 0));
    drop((w, v));
    assert_eq!(m.leaked(), (0, 0));
}

#[test]
fn the_program_runs_ahead_within_bounds() {
    let mut m =
        CoExecution::with(Config { max_pending: 8, place: Some(RunPlace::Beside), ..Config::default() });
    let w = m.state(&[1.0, -2.0]);
    let step = |m: &mut CoExecution| {
        let a = m.one(1, Op::Gate, &[V::T(&w)]);
        m.relu(2, &a);
        m.step();
    };
    (0..4).for_each(|_| step(&mut m));
    m.synchronize().unwrap();
    m.torch.close_gate(true);
    let torch = m.torch;
    let mut most = 0;
    // Eight runs are sent without a wait. The ninth op waits until the gate opens.
    let before = m.waits;
    for _ in 0..8 {
        step(&mut m);
        most = most.max(m.engine().runner().pending());
    }
    assert_eq!((most, m.waits), (8, before));
    let opener = std::thread::spawn(move || {
        std::thread::sleep(std::time::Duration::from_millis(20));
        torch.close_gate(false);
    });
    step(&mut m);
    assert!(m.waits > before);
    assert!(m.engine().runner().pending() <= 8);
    opener.join().unwrap();
    m.synchronize().unwrap();
    assert_eq!(m.torch.take_calls().len(), 2 * 13);
}

#[test]
fn a_program_begins_anew() {
    let mut m = CoExecution::new();
    let w = m.state(&[1.0, -2.0]);
    for _ in 0..3 {
        for i in 0..5 {
            let a = chain(&mut m, &w, 1, 0.125);
            assert_eq!(m.phase(), if i < 2 { Phase::Tracing } else { Phase::CoExecution });
            m.step();
            drop(a);
        }
        m.engine().reset();
        assert_eq!(m.engine().graph().len(), 1);
    }
    drop(w);
    assert_eq!(m.leaked(), (0, 0));
}
