//! Recording and replay of calls of functions, with fakes.

mod fakes;

use std::rc::Rc;

use fakes::{CoExecution, Machine, Store, Tensor, Window};
use tandem_runtime::config::{Config, Mode};
use tandem_runtime::engine::{RecordingId, Replay};
use tandem_runtime::function::{Made, Property, Reason, Scalar, Slot, Undo};
use tandem_tracegraph::ids::StorageId;

/// The recorded function: writes `w` in place, and returns a new tensor.
fn function(m: &mut CoExecution, w: &Tensor, x: &Tensor, alpha: f64, ends: bool) -> Tensor {
    let sum = m.add(1, x, w, alpha);
    let active = m.relu(2, &sum);
    m.mul_(3, w, &active);
    if ends {
        m.engine().mark_step();
    }
    m.add(4, &active, w, 1.0)
}

fn record(m: &mut CoExecution, w: &Tensor, x: &Tensor, alpha: f64, ends: bool) -> (RecordingId, Tensor) {
    m.engine().begin_recording();
    let result = function(m, w, x, alpha, ends);
    let id = m.engine().end_recording();
    (id, result)
}

fn id_of(t: &Tensor) -> StorageId {
    let Store::Tandem(id) = *t.store else { panic!("a host tensor") };
    id
}

/// Replays a stage. `made` are the storages that earlier stages made. Returns the tensors that outlive the replay.
fn replay_stage(
    m: &CoExecution,
    id: RecordingId,
    (stage, made): (usize, &[Tensor]),
    given: &[(StorageId, i64)],
) -> Option<Vec<Tensor>> {
    let mut kept = Vec::new();
    let made: Vec<StorageId> = made.iter().map(id_of).collect();
    loop {
        let replayed = m.engine().replay(id, (stage, &made), given, &[], &mut kept).expect("nothing fails");
        match replayed {
            Replay::Sent => break,
            Replay::Stale => return None,
            Replay::NeedTicket(_) => m.synchronize().expect("GraphRunner lives"),
        }
    }
    let tensor = |made: &Made| {
        let store = Store::Tandem(made.storage().id);
        Tensor::new(Rc::new(store), Window::dense(&[made.nbytes as i64 / 4]))
    };
    Some(kept.iter().map(tensor).collect())
}

fn replay(m: &CoExecution, id: RecordingId, given: &[(StorageId, i64)]) -> Option<Tensor> {
    let kept = replay_stage(m, id, (0, &[]), given)?;
    let [result] = &kept[..] else { panic!("{} tensors", kept.len()) };
    Some(result.clone())
}

/// Calls the function until its ops are co-executed.
fn warm(m: &mut CoExecution, w: &Tensor, x: &Tensor, ends: bool) {
    for _ in 0..6 {
        function(m, w, x, 0.5, ends);
        m.step();
    }
}

fn check(ends: bool) {
    let mut m = CoExecution::new();
    let (w, x) = (m.state(&[0.5, 0.25, -0.5]), m.state(&[1.0, 2.0, 0.5]));
    warm(&mut m, &w, &x, ends);
    let (first, result) = record(&mut m, &w, &x, 0.5, ends);
    m.step();
    let (second, _) = record(&mut m, &w, &x, 0.5, ends);
    m.step();
    drop(result);
    assert_eq!(m.engine().unequal(first, second, &Default::default()), None);
    let given = m.engine().recording(second).expect("it is kept").given().to_vec();
    assert_eq!(given, [id_of(&x), id_of(&w)], "in order of first use");
    assert!(m.engine().make_template(second));
    // Replays on one pair of tensors alternate with calls on another pair.
    let (other, reference) = (m.state(&[2.0, 1.0, 0.5]), m.state(&[2.0, 1.0, 0.5]));
    for i in 0..8 {
        let wide = m.state(&[9.0, 1.0, 2.0 + i as f32, 0.5, 9.0]);
        let expected = function(&mut m, &reference, &wide.slice(1, 3, 1), 0.5, ends);
        m.step();
        let (steps, divergences) = (m.steps(), m.divergences());
        let result = replay(&m, second, &[(id_of(&wide), 1), (id_of(&other), 0)]).expect("it is valid");
        m.step();
        assert_eq!(m.peek(&result), m.peek(&expected));
        assert_eq!(m.peek(&other), m.peek(&reference));
        assert_eq!(m.divergences(), divergences);
        assert_eq!(m.steps().1, steps.1 + 1 + u64::from(ends), "a replay is an iteration like any other");
    }
    m.engine().drop_recording(second);
    assert!(replay(&m, second, &[(id_of(&x), 0), (id_of(&other), 0)]).is_none());
    drop((w, x, other, reference));
    m.synchronize().expect("GraphRunner lives");
    assert_eq!(m.leaked(), (0, 0));
}

#[test]
fn replays_equal_calls() {
    check(false);
}

#[test]
fn iterations_may_end_within_a_call() {
    check(true);
}

#[test]
fn recordings_differ_in_numbers_storages_and_ops() {
    let mut m = CoExecution::new();
    let (w, x) = (m.state(&[0.5, 0.25]), m.state(&[1.0, 2.0]));
    warm(&mut m, &w, &x, false);
    let mut recorded = |w: &Tensor, x: &Tensor, alpha: f64| {
        let (id, _) = record(&mut m, w, x, alpha, false);
        m.step();
        id
    };
    let (one, number, storage) = (recorded(&w, &x, 0.5), recorded(&w, &x, 0.25), recorded(&w, &w, 0.5));
    let differs = |a, b| m.engine().unequal(a, b, &Default::default()).map(|unequal| unequal.what);
    assert_eq!(differs(one, number), Some(Property::Number(0.5f64.to_bits(), 0.25f64.to_bits())));
    assert_eq!(differs(one, storage), Some(Property::Storage));
    m.engine().begin_recording();
    let shorter = m.add(1, &x, &w, 0.5);
    let id = m.engine().end_recording();
    assert_eq!(
        m.engine().unequal(one, id, &Default::default()).map(|unequal| unequal.what),
        Some(Property::Op)
    );
    drop(shorter);
}

#[test]
fn a_replay_feeds_other_numbers() {
    let mut m = CoExecution::new();
    let (w, x) = (m.state(&[0.5, 0.25]), m.state(&[1.0, 2.0]));
    warm(&mut m, &w, &x, false);
    let (one, _) = record(&mut m, &w, &x, 0.5, false);
    m.step();
    let (two, _) = record(&mut m, &w, &x, 0.25, false);
    m.step();
    let numbers = m.engine().numbers(two);
    let places: Vec<usize> = (0..numbers.len()).filter(|i| numbers[*i] == Some(0.25)).collect();
    assert!(!places.is_empty() && numbers.len() == m.engine().numbers(one).len());
    assert_eq!(m.engine().unequal(one, two, &places.iter().copied().collect()), None);
    assert!(m.engine().make_template(two));
    for alpha in [0.75, 0.25, -2.0] {
        let (ours, plain) = (m.state(&[2.0, 1.0]), m.state(&[2.0, 1.0]));
        let expected = function(&mut m, &plain, &x, alpha, false);
        m.step();
        let fed: Vec<(usize, f64)> = places.iter().map(|place| (*place, alpha)).collect();
        m.engine().recording(two).expect("it is kept").set_numbers(&fed);
        let result = replay(&m, two, &[(id_of(&x), 0), (id_of(&ours), 0)]).expect("it is valid");
        m.step();
        assert_eq!(m.peek(&result), m.peek(&expected));
        assert_eq!(m.peek(&ours), m.peek(&plain));
    }
}

#[test]
fn new_ops_are_recorded_as_co_executed_ones() {
    let mut m = CoExecution::new();
    let (w, x) = (m.state(&[0.5, 0.25]), m.state(&[1.0, 2.0]));
    let (new, _) = record(&mut m, &w, &x, 0.5, false);
    m.step();
    warm(&mut m, &w, &x, false);
    let (known, _) = record(&mut m, &w, &x, 0.5, false);
    m.step();
    assert_eq!(m.engine().unequal(new, known, &Default::default()), None);
    m.engine().reset();
    let (id, _) = record(&mut m, &w, &x, 0.5, false);
    assert!(m.engine().make_template(id));
    let (one, two) = (m.state(&[0.5, 0.25]), m.state(&[0.5, 0.25]));
    let replayed = replay(&m, id, &[(id_of(&x), 0), (id_of(&one), 0)]).expect("it is valid");
    let expected = function(&mut m, &two, &x, 0.5, false);
    assert_eq!((m.peek(&replayed), m.peek(&one)), (m.peek(&expected), m.peek(&two)));
}

#[test]
fn a_call_with_a_fetch_is_not_replayable() {
    let mut m = CoExecution::new();
    let (w, x) = (m.state(&[0.5, 0.25]), m.state(&[1.0, 2.0]));
    let why = |m: &CoExecution, id| m.engine().recording(id).expect("it is kept").refused().map(|h| h.why);
    warm(&mut m, &w, &x, false);
    let (id, _) = record(&mut m, &w, &x, 0.5, false);
    assert_eq!(why(&m, id), None);
    m.step();
    m.engine().begin_recording();
    let sum = m.add(1, &x, &w, 0.5);
    m.item(9, &sum).expect("a value");
    let id = m.engine().end_recording();
    assert_eq!(why(&m, id), Some(Reason::Fetch));
}

/// Records a call in the middle of which another thread issues `elsewhere`, on three tensors of the call: one that the
/// call writes, one that it only reads, and one that it has made. Returns why the call is refused, if the other thread
/// comes before and after the call's write.
fn record_beside(
    elsewhere: impl Fn(&mut CoExecution, [&Tensor; 3]) -> Option<Tensor>,
) -> (Option<Reason>, Option<Reason>) {
    let mut m = CoExecution::new();
    let (w, x) = (m.state(&[0.5, 0.25]), m.state(&[1.0, 2.0]));
    warm(&mut m, &w, &x, false);
    let mut why = [None, None];
    for (late, why) in why.iter_mut().enumerate() {
        m.engine().begin_recording();
        let beside = |m: &mut CoExecution, made: &Tensor| {
            m.other_thread = true;
            let given = elsewhere(m, [&w, &x, made]);
            m.other_thread = false;
            given
        };
        let sum = m.add(1, &x, &w, 0.5);
        let early = if late == 0 { beside(&mut m, &sum) } else { None };
        m.mul_(3, &w, &sum);
        let given = early.or_else(|| if late == 1 { beside(&mut m, &sum) } else { None });
        m.relu(2, given.as_ref().unwrap_or(&sum));
        let id = m.engine().end_recording();
        *why = m.engine().recording(id).expect("it is kept").refused().map(|h| h.why);
        m.step();
    }
    (why[0], why[1])
}

#[test]
fn ops_of_other_threads_refuse_a_replay_only_on_tensors_of_the_call() {
    let own = |m: &mut CoExecution, _: [&Tensor; 3]| {
        let other = m.state(&[3.0, 4.0]);
        let sum = m.add(7, &other, &other, 1.0);
        m.mul_(8, &other, &sum);
        None
    };
    assert_eq!(record_beside(own), (None, None));
    let reads_what_is_read = |m: &mut CoExecution, [_, x, _]: [&Tensor; 3]| {
        drop(m.relu(7, x));
        None
    };
    assert_eq!(record_beside(reads_what_is_read), (None, None));
    let refused = (Some(Reason::Thread), Some(Reason::Thread));
    let reads_what_is_written = |m: &mut CoExecution, [w, ..]: [&Tensor; 3]| {
        drop(m.relu(7, w));
        None
    };
    assert_eq!(record_beside(reads_what_is_written), refused);
    let reads_what_is_made = |m: &mut CoExecution, [.., made]: [&Tensor; 3]| {
        drop(m.relu(7, made));
        None
    };
    assert_eq!(record_beside(reads_what_is_made), refused);
    let writes_what_is_read = |m: &mut CoExecution, [_, x, _]: [&Tensor; 3]| {
        m.mul_(7, x, x);
        None
    };
    assert_eq!(record_beside(writes_what_is_read), refused);
    let makes_what_is_used = |m: &mut CoExecution, [_, x, _]: [&Tensor; 3]| Some(m.relu(7, x));
    assert_eq!(record_beside(makes_what_is_used), refused);
}

#[test]
fn one_call_is_recorded_at_a_time() {
    let m = CoExecution::new();
    assert!(m.engine().begin_recording());
    assert!(!m.engine().begin_recording());
    m.engine().pause_recording(true);
    assert!(!m.engine().begin_recording());
    assert!(!m.engine().mark_step_elsewhere(), "the thread that records stays the program's");
    m.engine().pause_recording(false);
    m.engine().cancel_recording();
    assert!(m.engine().begin_recording());
}

/// A function that reads the value of a temporary, and branches on it.
fn branching(m: &mut CoExecution, x: &Tensor) -> Tensor {
    let active = m.relu(1, x);
    let sum = m.add(2, &active, x, 1.0);
    let value = m.item(9, &sum).expect("a value");
    m.engine().note_read(id_of(&sum), Scalar::Float(value.to_bits()));
    if value > 0.0 { m.add(3, &sum, &active, 1.0) } else { m.relu(4, &active) }
}

#[test]
fn a_replay_stops_at_a_value_and_goes_on_as_another_call() {
    let mut m = CoExecution::new();
    let inputs = [m.state(&[1.0, 2.0]), m.state(&[-1.0, 3.0])];
    for i in 0..12 {
        branching(&mut m, &inputs[i % 2]);
        m.step();
    }
    let recorded = inputs.each_ref().map(|x| {
        m.engine().begin_recording();
        let result = branching(&mut m, x);
        let id = m.engine().end_recording();
        m.step();
        let mut engine = m.engine();
        assert!(engine.make_template(id));
        assert_eq!(engine.recording(id).map(|call| (call.refused(), call.fetches())), Some((None, 1)));
        (id, result)
    });
    let values = [2.0f64, -1.0].map(|value| Some(Scalar::Float(value.to_bits())));
    let unequal =
        m.engine().unequal(recorded[0].0, recorded[1].0, &Default::default()).map(|unequal| unequal.what);
    assert_eq!(unequal, Some(Property::Fetched(0, values[0], values[1])));
    let given = [(id_of(&inputs[1]), 0)];
    for (id, other) in [(recorded[1].0, false), (recorded[0].0, true)] {
        let before = replay_stage(&m, id, (0, &[]), &given).expect("it is valid");
        assert_eq!(before.iter().map(|t| m.peek(t)).collect::<Vec<_>>(), [[0.0, 3.0], [-1.0, 6.0]]);
        if other {
            drop(replay_stage(&m, id, (0, &[]), &given).expect("it is valid"));
        }
        let after = replay_stage(&m, recorded[1].0, (1, &before), &given).expect("it is valid");
        drop(before);
        m.step();
        assert_eq!(after.len(), 1);
        assert_eq!(m.peek(&after[0]), m.peek(&recorded[1].1));
    }
    drop((inputs, recorded));
    m.synchronize().expect("GraphRunner lives");
    assert_eq!(m.leaked(), (0, 0));
}

#[test]
fn a_value_that_is_read_after_a_write_names_what_to_restore() {
    let mut m = CoExecution::new();
    let (w, x) = (m.state(&[0.5, 0.25]), m.state(&[1.0, 2.0]));
    let call = |m: &mut CoExecution, to: &Tensor| {
        let sum = m.add(1, &x, &w, 0.5);
        m.mul_(2, to, &sum);
        let value = m.item(9, &sum).expect("a value");
        m.engine().note_read(id_of(&sum), Scalar::Float(value.to_bits()))
    };
    for _ in 0..6 {
        call(&mut m, &w);
        m.step();
    }
    m.engine().begin_recording();
    let (slot, used) = call(&mut m, &w).expect("a call is recorded");
    assert_eq!((slot, used.given, used.hosts), (Slot::Made(0), 2, 0));
    let id = m.engine().end_recording();
    let mut engine = m.engine();
    let recording = engine.recording(id).expect("a recording");
    assert_eq!(recording.refused(), None);
    assert_eq!(*recording.undo(), Undo { written: vec![1], draws: false });
}

#[test]
fn recordings_end_with_the_graph() {
    let mut m = CoExecution::new();
    let (w, x) = (m.state(&[0.5, 0.25]), m.state(&[1.0, 2.0]));
    warm(&mut m, &w, &x, false);
    let (id, _) = record(&mut m, &w, &x, 0.5, false);
    assert!(m.engine().make_template(id));
    m.engine().reset();
    assert!(replay(&m, id, &[(id_of(&x), 0), (id_of(&w), 0)]).is_none());
    warm(&mut m, &w, &x, false);
    let (id, _) = record(&mut m, &w, &x, 0.5, false);
    m.step();
    assert!(m.engine().make_template(id), "blocks are numbered from the start again");
    assert!(replay(&m, id, &[(id_of(&x), 0), (id_of(&w), 0)]).is_some());
}

#[test]
fn a_dropped_recordings_runs_that_are_held_back_still_run() {
    let mut m = CoExecution::with(Config { mode: Mode::Lazy, ..Config::default() });
    let (w, x) = (m.state(&[0.5, 0.25]), m.state(&[1.0, 2.0]));
    let reference = m.state(&[0.5, 0.25]);
    warm(&mut m, &w, &x, false);
    warm(&mut m, &reference, &x, false);
    let (id, _) = record(&mut m, &w, &x, 0.5, false);
    function(&mut m, &reference, &x, 0.5, false);
    m.step();
    assert!(m.engine().make_template(id));
    let replayed = replay(&m, id, &[(id_of(&x), 0), (id_of(&w), 0)]).expect("it is valid");
    m.engine().drop_recording(id);
    let expected = function(&mut m, &reference, &x, 0.5, false);
    assert_eq!((m.peek(&replayed), m.peek(&w)), (m.peek(&expected), m.peek(&reference)));
}
