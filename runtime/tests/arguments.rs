//! A co-executed kernel receives the same arguments as the program passes, for all types of arguments.

mod fakes;

use fakes::{CoExecution, Imperative, Machine, Op, V};
use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;

#[derive(Clone, Debug)]
enum Value {
    None,
    Int(i64),
    Float(f64),
    Bool(bool),
    Complex(f64, f64),
    Floats(Vec<f64>),
    Scalars(Vec<Value>),
    Str(String),
    Ints(Vec<i64>),
    Bools(Vec<u8>),
}

impl Value {
    fn arg(&self) -> V<'_> {
        match self {
            Value::None => V::None,
            Value::Int(i) => V::I(*i),
            Value::Float(f) => V::F(*f),
            Value::Bool(b) => V::B(*b),
            Value::Complex(re, im) => V::C(*re, *im),
            Value::Floats(v) => V::Floats(v),
            Value::Scalars(v) => V::Scalars(v.iter().map(Value::arg).collect()),
            Value::Str(s) => V::Str(s),
            Value::Ints(v) => V::Ints(v),
            Value::Bools(v) => V::Bools(v),
        }
    }
}

fn number() -> impl Strategy<Value = Value> {
    prop_oneof![
        any::<i64>().prop_map(Value::Int),
        (-1e3..1e3).prop_map(Value::Float),
        any::<bool>().prop_map(Value::Bool),
    ]
}

fn complex() -> impl Strategy<Value = Value> {
    (-1e3..1e3, -1e3..1e3).prop_map(|(re, im)| Value::Complex(re, im))
}

fn value() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(Value::None),
        number(),
        complex(),
        prop::collection::vec(-1e3..1e3, 0..4).prop_map(Value::Floats),
        (prop::collection::vec(number(), 1..3), number()).prop_map(|(mut list, last)| {
            // The list gets values of more than one type, because `a_list_of_scalars_stays_one` covers lists of one
            // type.
            list.push(last);
            list.push(Value::Int(1));
            list.push(Value::Float(1.0));
            Value::Scalars(list)
        }),
    ]
}

fn attribute() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(Value::None),
        any::<i64>().prop_map(Value::Int),
        any::<bool>().prop_map(Value::Bool),
        "[a-z]{0,5}".prop_map(Value::Str),
        prop::collection::vec(any::<i64>(), 0..4).prop_map(Value::Ints),
        prop::collection::vec(0u8..2, 0..4).prop_map(Value::Bools),
    ]
}

fn sizes() -> impl Strategy<Value = Value> {
    prop_oneof![any::<i64>().prop_map(Value::Int), prop::collection::vec(0..9i64, 0..4).prop_map(Value::Ints)]
}

/// Returns the arguments that the kernel received: imperatively, and in each of four steps on the engine.
fn echoes(op: Op, values: &[Value], generator: bool, second: bool) -> (String, Vec<String>) {
    fn run(
        m: &mut dyn Machine,
        op: Op,
        values: &[Value],
        g: Option<&tandem_executor::host::Buffer>,
        second: bool,
    ) {
        let (x, y) = (m.state(&[1.0, 2.0]), m.host(&[3.0]));
        let mut args = vec![V::T(&x)];
        args.extend(values.iter().map(Value::arg));
        if op == Op::Echo {
            args.push(g.map_or(V::None, V::Generator));
            args.push(if second { V::T(&y) } else { V::None });
        }
        m.one(1, op, &args);
        m.step();
    }
    let mut eager = Imperative::new();
    let own = eager.torch.buffer(&[0.0; 2]);
    run(&mut eager, op, values, generator.then_some(&own), second);
    let mut m = CoExecution::new();
    let own = m.torch.buffer(&[0.0; 2]);
    for _ in 0..4 {
        run(&mut m, op, values, generator.then_some(&own), second);
    }
    m.synchronize().expect("GraphRunner lives");
    assert_eq!((m.steps(), m.divergences()), ((2, 2), 0));
    drop(own);
    (eager.torch.take_echoed().remove(0), m.torch.take_echoed())
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 256,
        failure_persistence: Some(Box::new(FileFailurePersistence::Direct("proptest-regressions/arguments.txt"))),
        ..ProptestConfig::default()
    })]

    #[test]
    fn arguments_arrive_as_they_were_passed(
        numbers in prop::collection::vec(value(), 4),
        attributes in prop::collection::vec(attribute(), 2),
        sizes in sizes(),
        generator in any::<bool>(),
        second in any::<bool>(),
    ) {
        let values: Vec<Value> = numbers.into_iter().chain(attributes).chain([sizes]).collect();
        let (expected, got) = echoes(Op::Echo, &values, generator, second);
        prop_assert_eq!(got, vec![expected; 4]);
    }

    #[test]
    fn numbers_that_decide_sizes_arrive_too(numbers in prop::collection::vec(number(), 3)) {
        let (expected, got) = echoes(Op::EchoSized, &numbers, false, false);
        prop_assert_eq!(got, vec![expected; 4]);
    }
}

#[test]

fn a_list_of_scalars_stays_one() {
    for list in [vec![], vec![Value::Float(1.0), Value::Float(2.0)]] {
        let mut values = vec![Value::None; 6];
        values[0] = Value::Scalars(list);
        values.push(Value::Ints(vec![]));
        let (expected, got) = echoes(Op::Echo, &values, false, false);
        assert_eq!(got, vec![expected; 4]);
    }
}

#[test]

fn complex_numbers_may_decide_sizes() {
    let values = [Value::Complex(0.0, 1.0), Value::Float(2.0), Value::Int(3)];
    let (expected, got) = echoes(Op::EchoSized, &values, false, false);
    assert_eq!(got, vec![expected; 4]);
}
