//! Failing and panicking kernels, with fakes: where their exceptions are raised, which storages they poison, and which
//! ops still run.

mod fakes;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use fakes::{CoExecution, Machine, Op, Tensor, V};
use tandem_runtime::config::Config;
use tandem_runtime::engine::Phase;
use tandem_runtime::error::CallError;
use tandem_runtime::graph_runner::{Message, Waited};
use tandem_runtime::placement::RunPlace;

/// Issues ops, one of which fails if `x[0]` is negative. Returns a tensor that depends on this op, and a tensor that
/// does not.
fn failing(m: &mut CoExecution, x: &[f32]) -> (Tensor, Tensor) {
    let x = m.feed(1, x);
    let checked = m.one(2, Op::Check, &[V::T(&x)]);
    let dependent = m.relu(3, &checked);
    let independent = m.add(4, &x, &x, 1.0);
    (dependent, independent)
}

#[test]
fn a_failure_while_tracing_is_raised_at_the_op() {
    let mut m = CoExecution::new();
    let x = m.feed(1, &[-1.0]);
    let raised = m.call(2, Op::Check, &[V::T(&x)]);
    assert!(matches!(&raised, Err(CallError::Raised(f)) if f.name == "aten::check"), "{:?}", raised.err());
    // The program has caught the exception and continues.
    assert_eq!(m.item(3, &x).unwrap(), -1.0);
    m.step();
    drop((x, raised));
    assert_eq!(m.leaked(), (0, 0));
}

#[test]
fn a_failure_poisons_its_dependants_only_and_is_raised_at_the_fetch() {
    let mut m = CoExecution::new();
    for _ in 0..4 {
        failing(&mut m, &[1.0, 2.0]);
        m.step();
    }
    assert_eq!(m.phase(), Phase::CoExecution);
    m.synchronize().unwrap();
    m.torch.take_calls();
    let (dependent, independent) = failing(&mut m, &[-1.0, 2.0]);
    m.step();
    m.synchronize().unwrap();
    assert_eq!(m.torch.take_calls(), [Op::ToDevice, Op::Check, Op::Add]);
    assert_eq!(m.peek(&independent), [-2.0, 4.0]);
    for line in 10..12 {
        let raised = m.item(line, &dependent);
        let Err(CallError::Poisoned(failure)) = raised else { panic!("{raised:?}") };
        assert_eq!(failure.name, "aten::check");
        assert_eq!(m.lines(failure.location), [2]);
    }
    assert_eq!(m.item(12, &independent).unwrap(), -2.0);
    // Ops that are issued after a failure run.
    let (dependent, _) = failing(&mut m, &[3.0, 2.0]);
    assert_eq!(m.fetch(13, &dependent).unwrap(), [3.0, 2.0]);
    m.step();
    assert_eq!(m.engine().take_failures().len(), 0, "it was seen");
    assert_eq!(m.divergences(), 0);
}

#[test]
fn a_failure_in_place_poisons_what_it_would_have_written() {
    let mut m = CoExecution::new();
    let w = m.state(&[1.0, 1.0]);
    for i in 0..6 {
        let x = m.feed(1, &[if i == 5 { -1.0 } else { 1.0 }, 2.0]);
        let checked = m.one(2, Op::Check, &[V::T(&x)]);
        m.mul_(3, &w, &checked);
        m.step();
    }
    assert!(matches!(m.item(4, &w), Err(CallError::Poisoned(f)) if f.name == "aten::check"));
}

#[test]
fn failures_and_what_they_hold_are_freed() {
    let mut m = CoExecution::new();
    for i in 0..12 {
        failing(&mut m, &[if i >= 4 { -1.0 } else { 1.0 }, 2.0]);
        m.step();
    }
    m.synchronize().unwrap();
    assert!(m.torch.exceptions() > 0);
    m.engine().take_failures();
    assert_eq!(m.leaked(), (0, 0));
}

#[test]

fn the_same_op_failing_again_by_poison_is_not_the_op_that_raised() {
    let mut m = CoExecution::new();
    let mut carried = m.feed(1, &[1.0]);
    m.step();
    for _ in 0..4 {
        carried = m.one(2, Op::Check, &[V::T(&carried)]);
        let flip = m.feed(3, &[1.0]);
        m.mul_(4, &carried, &flip);
        m.step();
    }
    let x = m.one(2, Op::Check, &[V::T(&carried)]);
    let flip = m.feed(3, &[-1.0]);
    m.mul_(4, &x, &flip);
    m.step();
    // This op fails on GraphRunner's thread, after the call has returned.
    let y = m.one(2, Op::Check, &[V::T(&x)]);
    let flip = m.feed(3, &[1.0]);
    m.mul_(4, &y, &flip);
    m.step();
    // A divergence: the op now runs immediately and reads poison.
    let more = m.feed(9, &[1.0]);
    let raised = m.call(10, Op::Check, &[V::T(&y)]);
    assert!(matches!(raised, Err(CallError::Poisoned(_))), "{:?}", raised.err());
    drop(more);
}

/// Prepares co-execution of an op that panics if `x` is negative, and makes `x` negative.
fn panicking(m: &mut CoExecution) -> Tensor {
    let x = m.state(&[1.0]);
    for _ in 0..4 {
        m.one(1, Op::Panic, &[V::T(&x)]);
        m.step();
    }
    let minus = m.host(&[-1.0]);
    m.synchronize().unwrap();
    m.torch.take_calls();
    m.call(2, Op::Copy_, &[V::T(&x), V::T(&minus)]).unwrap();
    m.step();
    x
}

#[test]
fn a_dead_graph_runner_raises_and_does_not_hang() {
    let mut m = CoExecution::with(Config { place: Some(RunPlace::Beside), ..Config::default() });
    let x = panicking(&mut m);
    m.one(1, Op::Panic, &[V::T(&x)]);
    m.step();
    // GraphRunner's thread takes the run, because no other thread waits.
    while !m.torch.take_calls().contains(&Op::Panic) {
        std::thread::yield_now();
    }
    let raised = m.item(3, &x);
    assert!(matches!(raised, Err(CallError::Dead)), "{raised:?}");
    // Later calls raise the error again, including calls that wait because too many runs are pending.
    let mut ahead = 0;
    let outcome = loop {
        match m.call(1, Op::Panic, &[V::T(&x)]) {
            Ok(_) if ahead < 200 => ahead += 1,
            outcome => break outcome.map(drop),
        }
        m.step();
    };
    assert!(matches!(outcome, Err(CallError::Dead)), "{outcome:?}");
    assert!(ahead <= 64);
}

#[test]

fn a_panic_on_a_thread_that_helps_is_not_a_hang_later() {
    let mut m = CoExecution::new();
    let x = panicking(&mut m);
    let waiter = m.engine().runner().waiter();
    let helped = {
        let engine = m.engine();
        // This test holds the executor's lock until the message is sent, so that its own thread may be the first to
        // take the message.
        let executor = engine.runner().executor();
        let ticket = engine.runner().send(Message::Run(Box::default(), fakes::kernels::PANIC));
        drop(executor);
        catch_unwind(AssertUnwindSafe(|| waiter.wait(ticket, &mut || false)))
    };
    drop(helped);
    let begin = Instant::now();
    let last = m.engine().flush();
    let (waited, _) = waiter.wait(last, &mut || begin.elapsed() > Duration::from_secs(2));
    assert_eq!(waited, Waited::Dead);
    drop(x);
}

#[test]
fn a_kernel_that_panics_while_tracing_leaves_the_engine_usable() {
    let mut m = CoExecution::new();
    let x = m.state(&[-1.0]);
    let outcome = catch_unwind(AssertUnwindSafe(|| m.call(2, Op::Panic, &[V::T(&x)])));
    assert!(outcome.is_err(), "it is the program's own panic");
    assert_eq!(m.item(3, &x).unwrap(), -1.0);
}

#[test]
fn a_dropped_engine_ends_its_thread_and_frees_what_it_has() {
    let mut m = CoExecution::new();
    let x = m.state(&[1.0]);
    m.relu(1, &x);
    m.step();
    m.drop_engine();
    let begin = Instant::now();
    while m.torch.live() > 0 && begin.elapsed() < Duration::from_secs(1) {
        std::thread::yield_now();
    }
    assert_eq!(m.torch.live(), 0);
}
