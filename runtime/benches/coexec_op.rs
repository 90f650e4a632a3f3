//! `in place`: the call is prepared beforehand, so the figure is for dispatch alone. `new output`: each op has a new output,
//! and the figure includes preparing the call and dropping the previous tensor, as on the program's thread. `send`: the
//! figure includes the last op of a block, which wakes GraphRunner.

#[path = "../tests/fakes/mod.rs"]
mod fakes;

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use fakes::{CoExecution, F32, Machine, Op, Store, Tensor, V};
use tandem_runtime::engine::{Engine, Progress, Results, Sink};
use tandem_runtime::site::Site;
use tandem_runtime::storage::{NewStorage, collects_deaths, died};
use tandem_tracegraph::call::{Arg, Call, Input, Place};
use tandem_tracegraph::ids::StorageId;
use tandem_tracegraph::tensor_meta::Dtype;

const OPS: usize = 64;

struct Made(StorageId);

impl Sink for Made {
    fn outputs(&mut self, _: &Call<'_>, results: Results<'_>, new_storages: &[NewStorage]) {
        black_box(&results);
        if let [made] = new_storages {
            self.0 = made.id;
        }
    }
}

fn input(id: StorageId, engine: &mut Engine) -> Input<'static> {
    let place = Place::Storage { id, name: engine.storages().name(id) };
    Input { place, sizes: &[4], strides: &[1], offset: 0, dtype: Dtype(F32), flags: 0 }
}

fn call(op: Op, a: StorageId, b: StorageId, engine: &mut Engine) -> Call<'static> {
    let mut call = Call { grad_enabled: true, ..Call::blank(op.id()) };
    // Pushed one by one, because `collect` would move the whole inline capacity.
    call.args.push(Arg::Tensor);
    call.args.push(Arg::Tensor);
    call.args.push(Arg::Float(0.5));
    call.inputs.push(input(a, engine));
    call.inputs.push(input(b, engine));
    call
}

fn id(t: &Tensor) -> StorageId {
    let Store::Tandem(id) = *t.store else { unreachable!("a device tensor") };
    id
}

/// Returns a machine in steady state, and the two tensors with which its iterations begin.
fn steady(op: Op) -> (CoExecution, Tensor, Tensor) {
    let mut m = CoExecution::new();
    let (x, w) = (m.state(&[1.0; 4]), m.state(&[2.0; 4]));
    for _ in 0..5 {
        let mut at = x.clone();
        (0..OPS).for_each(|i| at = m.one(i as u32, op, &[V::T(&at), V::T(&w), V::F(0.5)]));
        m.step();
    }
    m.synchronize().expect("GraphRunner lives");
    assert_eq!(m.steps(), (2, 3));
    assert_eq!(m.engine().symbolic().blocks.len(), 1);
    (m, x, w)
}

fn dispatch(engine: &mut Engine, call: &Call<'_>, sink: &mut Made) {
    let site = Site { program_thread: true, ..Site::default() };
    assert!(matches!(engine.dispatch(black_box(call), &site, sink), Ok(Progress::Done)));
}

fn in_place(m: &CoExecution, x: &Tensor, w: &Tensor, timed: usize) -> Duration {
    let mut engine = m.engine();
    let mut sink = Made(id(x));
    // The first op names the storages; the names last until the iteration ends.
    let first = call(Op::Nop_, id(x), id(w), &mut engine);
    dispatch(&mut engine, &first, &mut sink);
    // One call is used for all ops. The bridge prepares each call in the memory of the previous call.
    let call = call(Op::Nop_, id(x), id(w), &mut engine);
    let begin = Instant::now();
    (0..timed).for_each(|_| dispatch(&mut engine, &call, &mut sink));
    let elapsed = begin.elapsed();
    (timed..OPS - 1).for_each(|_| dispatch(&mut engine, &call, &mut sink));
    engine.mark_step();
    elapsed
}

fn new_output(m: &CoExecution, x: &Tensor, w: &Tensor, timed: usize) -> Duration {
    let mut engine = m.engine();
    let mut sink = Made(id(x));
    let mut elapsed = Duration::ZERO;
    let begin = Instant::now();
    for i in 0..OPS {
        let before = sink.0;
        let c = call(Op::Add, before, id(w), &mut engine);
        dispatch(&mut engine, &c, &mut sink);
        if i > 0 {
            died(before);
        }
        if i + 1 == timed {
            elapsed = begin.elapsed();
        }
    }
    died(sink.0);
    engine.mark_step();
    elapsed
}

type Iteration = fn(&CoExecution, &Tensor, &Tensor, usize) -> Duration;

fn coexec_op(c: &mut Criterion) {
    let _collector = collects_deaths();
    let mut group = c.benchmark_group("coexec_op");
    let cases: [(&str, Op, Iteration, usize); 4] = [
        ("in place", Op::Nop_, in_place, OPS - 2),
        ("in place, send", Op::Nop_, in_place, OPS - 1),
        ("new output", Op::Add, new_output, OPS - 1),
        ("new output, send", Op::Add, new_output, OPS),
    ];
    for (name, op, iteration, timed) in cases {
        group.throughput(Throughput::Elements(timed as u64));
        group.bench_function(name, |b| {
            let (m, x, w) = steady(op);
            b.iter_custom(|n| {
                let one = |_| {
                    let elapsed = iteration(&m, &x, &w, timed);
                    m.synchronize().expect("GraphRunner lives");
                    elapsed
                };
                (0..n).map(one).sum()
            });
            assert_eq!(m.divergences(), 0);
        });
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default().warm_up_time(Duration::from_secs(1)).measurement_time(Duration::from_secs(3));
    targets = coexec_op
}
criterion_main!(benches);
