//! Random programs on both machines: every value that a program sees must be the same.
//!
//! The machines run in lockstep, op by op. If the engine raises an exception for an op, the reference must know the
//! result to be poisoned, and the program continues without the result.

mod fakes;

use std::collections::VecDeque;
use std::rc::Rc;

use fakes::{CoExecution, Imperative, Machine, Op, Tensor, V};
use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;
use tandem_runtime::config::Config;

/// Number of a variable.
type Var = usize;
const VARS: usize = 6;

#[derive(Clone, Debug)]
enum Stmt {
    Add(Var, Var, Var, f64),
    AddSelf(Var, Var),
    Mul(Var, Var),
    Relu(Var, Var),
    /// View made without an op.
    Slice(Var, Var, u8, u8, u8),
    /// View made by an operator.
    Narrow(Var, Var, u8),
    AddOut(Var, Var, Var),
    Copy(Var, Var),
    Cat(Var, Var, Var),
    Halves(Var, Var, Var),
    Full(Var, u8),
    Arange(Var, u8),
    Feed(Var, u8),
    /// Feed into an existing tensor.
    FeedInto(Var),
    Uniform(Var, u8),
    Nonzero(Var, Var),
    Check(Var, Var),
    Item(Var),
    Fetch(Var),
    /// Op issued by a thread other than the program's.
    Elsewhere(Var, Var),
    Assign(Var, Var),
    Drop(Var),
    /// Value that is held for this many steps and then compared.
    Hold(Var, u8),
    /// Branch: iterations whose choice has this bit run the first list, others the second list.
    If(u8, Vec<Stmt>, Vec<Stmt>),
    /// Loop whose number of rounds depends on the iteration's size.
    Repeat(u8, Vec<Stmt>),
    EndIf(u8),
}

fn stmt() -> impl Strategy<Value = Stmt> {
    use Stmt::*;
    let v = || 0..VARS;
    let leaf = prop_oneof![
        4 => (v(), v(), v(), -2.0..2.0).prop_map(|(a, b, c, n)| Add(a, b, c, n)),
        1 => (v(), v()).prop_map(|(a, b)| AddSelf(a, b)),
        3 => (v(), v()).prop_map(|(a, b)| Mul(a, b)),
        3 => (v(), v()).prop_map(|(a, b)| Relu(a, b)),
        3 => (v(), v(), 0..4u8, 1..4u8, 1..3u8).prop_map(|(a, b, s, l, t)| Slice(a, b, s, l, t)),
        1 => (v(), v(), 0..4u8).prop_map(|(a, b, s)| Narrow(a, b, s)),
        1 => (v(), v(), v()).prop_map(|(a, b, c)| AddOut(a, b, c)),
        2 => (v(), v()).prop_map(|(a, b)| Copy(a, b)),
        1 => (v(), v(), v()).prop_map(|(a, b, c)| Cat(a, b, c)),
        1 => (v(), v(), v()).prop_map(|(a, b, c)| Halves(a, b, c)),
        1 => (v(), 0..6u8).prop_map(|(a, n)| Full(a, n)),
        1 => (v(), 1..6u8).prop_map(|(a, n)| Arange(a, n)),
        2 => (v(), 1..6u8).prop_map(|(a, n)| Feed(a, n)),
        1 => v().prop_map(FeedInto),
        2 => (v(), 1..4u8).prop_map(|(a, n)| Uniform(a, n)),
        1 => (v(), v()).prop_map(|(a, b)| Nonzero(a, b)),
        1 => (v(), v()).prop_map(|(a, b)| Check(a, b)),
        1 => v().prop_map(Item),
        1 => v().prop_map(Fetch),
        1 => (v(), v()).prop_map(|(a, b)| Elsewhere(a, b)),
        1 => (v(), v()).prop_map(|(a, b)| Assign(a, b)),
        1 => v().prop_map(Drop),
        1 => (v(), 1..6u8).prop_map(|(a, n)| Hold(a, n)),
        1 => (0..3u8).prop_map(EndIf),
    ];
    leaf.prop_recursive(3, 24, 5, |inner| {
        let body = || prop::collection::vec(inner.clone(), 0..5);
        prop_oneof![
            3 => (0..3u8, body(), body()).prop_map(|(bit, a, b)| If(bit, a, b)),
            1 => (0..3u8, body()).prop_map(|(n, a)| Repeat(n, a)),
        ]
    })
}

/// Parameters that differ between iterations.
#[derive(Clone, Debug)]
struct Iteration {
    choices: u8,
    size: u8,
    number: f32,
}

fn iteration() -> impl Strategy<Value = Iteration> {
    // Most iterations take the same path, so that there is something to co-execute.
    let choices = prop_oneof![3 => Just(0u8), 2 => 0..8u8];
    let size = prop_oneof![2 => Just(0u8), 1 => 0..3u8];
    (choices, size, -1.0..1.0f32).prop_map(|(choices, size, number)| Iteration { choices, size, number })
}

/// One value on both machines.
#[derive(Clone)]
struct Pair {
    expected: Tensor,
    /// Value on the engine; `None` if an exception was raised instead.
    got: Option<Tensor>,
}

struct Both {
    eager: Imperative,
    engine: CoExecution,
    vars: Vec<Option<Pair>>,
    held: VecDeque<(usize, Pair)>,
    /// Stores of the reference machine whose values depend on a failure.
    poisoned: Vec<Rc<fakes::Store>>,
    now: usize,
    line: u32,
}

/// Early end of the iteration.
struct Ended;

/// Argument for both machines.
enum A<'a> {
    P(&'a Pair),
    List(Vec<&'a Pair>),
    Host(Vec<f32>),
    V(V<'a>),
}

impl Both {
    fn new() -> Both {
        // The low limit also tests back-pressure.
        let mut engine = CoExecution::with(Config { max_pending: 4, ..Config::default() });
        let mut eager = Imperative::new();
        let mut state = |i: usize| {
            let values: Vec<f32> = (0..3 + i % 3).map(|k| (k * 7 + i) as f32 / 4.0 - 1.0).collect();
            Pair { expected: eager.state(&values), got: Some(engine.state(&values)) }
        };
        let vars = (0..VARS).map(|i| Some(state(i))).collect();
        Both { eager, engine, vars, held: VecDeque::new(), poisoned: Vec::new(), now: 0, line: 0 }
    }

    fn is_poisoned(&self, p: &Pair) -> bool {
        self.poisoned.iter().any(|s| Rc::ptr_eq(s, &p.expected.store))
    }

    fn poison(&mut self, p: &Pair) {
        if !self.is_poisoned(p) {
            self.poisoned.push(p.expected.store.clone());
        }
    }

    /// Drops the engine's tensors on a store that a failed op would have written.
    fn forget(&mut self, store: &Rc<fakes::Store>) {
        let pairs = self.vars.iter_mut().flatten().chain(self.held.iter_mut().map(|(_, p)| p));
        pairs.filter(|p| Rc::ptr_eq(&p.expected.store, store)).for_each(|p| p.got = None);
    }

    /// Issues an op on both machines. `written` is the input that the op writes.
    fn issue(&mut self, op: Op, args: &[A<'_>], written: Option<&Pair>) -> Vec<Pair> {
        let pairs: Vec<&Pair> = args
            .iter()
            .flat_map(|a| match a {
                A::P(p) => vec![*p],
                A::List(list) => list.clone(),
                A::Host(_) | A::V(_) => vec![],
            })
            .collect();
        // A store that is completely overwritten is no longer poisoned.
        if let (Op::Copy_, Some(to)) = (op, written)
            && to.expected.is_whole()
            && !pairs[1..].iter().any(|p| Rc::ptr_eq(&p.expected.store, &to.expected.store))
        {
            self.poisoned.retain(|s| !Rc::ptr_eq(s, &to.expected.store));
        }
        let poisoned = pairs.iter().any(|p| self.is_poisoned(p));
        // The reference uses a tensor as a stand-in for a poisoned result.
        let hosts: Vec<_> = args
            .iter()
            .map(|a| if let A::Host(v) = a { Some((self.eager.host(v), self.engine.host(v))) } else { None })
            .collect();
        let expected_args: Vec<V<'_>> = args
            .iter()
            .zip(&hosts)
            .map(|(a, host)| match (a, host) {
                (_, Some((t, _))) => V::T(t),
                (A::P(p), _) => V::T(&p.expected),
                (A::List(list), _) => V::List(list.iter().map(|p| &p.expected).collect()),
                (A::V(v), _) => v.clone(),
                (A::Host(_), None) => unreachable!(),
            })
            .collect();
        let expected = self.eager.call(self.line, op, &expected_args);
        let raised = expected.is_err();
        let stand_in = || vec![pairs[0].expected.clone()];
        let expected = expected.unwrap_or_else(|_| vec![self.eager.relu(0, &stand_in()[0])]);
        let bad = poisoned || raised;

        let got = pairs.iter().all(|p| p.got.is_some()).then(|| {
            let own: Vec<V<'_>> = args
                .iter()
                .zip(&hosts)
                .map(|(a, host)| match (a, host) {
                    (_, Some((_, t))) => V::T(t),
                    (A::P(p), _) => V::T(p.got.as_ref().unwrap()),
                    (A::List(list), _) => V::List(list.iter().map(|p| p.got.as_ref().unwrap()).collect()),
                    (A::V(v), _) => v.clone(),
                    (A::Host(_), None) => unreachable!(),
                })
                .collect();
            self.engine.call(self.line, op, &own)
        });
        let got = match got {
            Some(Ok(tensors)) => {
                assert_eq!(tensors.len(), expected.len());
                tensors.into_iter().map(Some).collect()
            }
            Some(Err(error)) => {
                assert!(bad, "{op:?} on line {}: {error}", self.line);
                vec![None; expected.len()]
            }
            None => vec![None; expected.len()],
        };
        let failed = got.iter().any(Option::is_none);
        let made: Vec<Pair> =
            expected.into_iter().zip(got).map(|(expected, got)| Pair { expected, got }).collect();
        if bad {
            made.iter().for_each(|p| self.poison(p));
            written.inspect(|w| self.poison(w));
        }
        if failed && let Some(w) = written {
            self.forget(&w.expected.store);
        }
        for p in &made {
            if let Some(got) = &p.got {
                assert_eq!(*got.window.borrow(), *p.expected.window.borrow(), "{op:?} on line {}", self.line);
            }
        }
        made
    }

    fn get(&self, v: Var) -> Option<Pair> {
        self.vars[v].clone()
    }

    fn set(&mut self, v: Var, made: Vec<Pair>) {
        self.vars[v] = made.into_iter().next();
    }

    fn slice(p: &Pair, start: i64, len: i64, step: i64) -> Pair {
        let cut = |t: &Tensor| t.slice(start, len, step);
        Pair { expected: cut(&p.expected), got: p.got.as_ref().map(cut) }
    }

    /// Returns two windows of the same length.
    fn same_length(&self, a: Var, b: Var) -> Option<(Pair, Pair)> {
        let (a, b) = (self.get(a)?, self.get(b)?);
        let n = a.expected.len().min(b.expected.len());
        let cut = |p: &Pair| if p.expected.len() == n { p.clone() } else { Both::slice(p, 0, n, 1) };
        (n > 0).then(|| (cut(&a), cut(&b)))
    }

    fn compare(&mut self, p: &Pair) {
        let Some(got) = &p.got else { return };
        let fetched = self.engine.fetch(self.line, got);
        if self.is_poisoned(p) {
            assert!(fetched.is_err(), "line {}: poison was read", self.line);
        } else {
            let bits = |v: Vec<f32>| v.into_iter().map(f32::to_bits).collect::<Vec<_>>();
            let fetched = fetched.unwrap_or_else(|e| panic!("line {}: {e}", self.line));
            assert_eq!(bits(fetched), bits(self.eager.peek(&p.expected)), "line {}", self.line);
        }
    }

    /// Runs one statement. Returns `None` if a variable is missing, which is not an error.
    fn run(&mut self, stmt: &Stmt, it: &Iteration) -> Option<()> {
        let len = |n: u8| i64::from(n + it.size);
        match *stmt {
            Stmt::Add(to, a, b, alpha) => {
                let (a, b) = self.same_length(a, b)?;
                let alpha = A::V(V::F(alpha * f64::from(it.number)));
                let made = self.issue(Op::Add, &[A::P(&a), A::P(&b), alpha], None);
                self.set(to, made);
            }
            Stmt::AddSelf(to, a) => {
                let a = self.get(a)?;
                let made = self.issue(Op::Add, &[A::P(&a), A::P(&a), A::V(V::I(1))], None);
                self.set(to, made);
            }
            Stmt::Mul(a, b) => {
                let (a, b) = self.same_length(a, b)?;
                self.issue(Op::Mul_, &[A::P(&a), A::P(&b)], Some(&a));
            }
            Stmt::Relu(to, a) => {
                let a = self.get(a)?;
                let made = self.issue(Op::Relu, &[A::P(&a)], None);
                self.set(to, made);
            }
            Stmt::Slice(to, a, start, n, step) => {
                let a = self.get(a)?;
                let start = (i64::from(start) + i64::from(it.choices)).min(a.expected.len());
                let n = i64::from(n).min((a.expected.len() - start) / i64::from(step));
                self.vars[to] = Some(Both::slice(&a, start, n, i64::from(step)));
            }
            Stmt::Narrow(to, a, start) => {
                let a = self.get(a)?;
                let start = i64::from(start).min(a.expected.len());
                let rest = a.expected.len() - start;
                let made = self.issue(Op::Narrow, &[A::P(&a), A::V(V::I(start)), A::V(V::I(rest))], None);
                self.set(to, made);
            }
            Stmt::AddOut(a, b, out) => {
                let (a, b) = self.same_length(a, b)?;
                let out = self.get(out)?;
                // A resized window would be contiguous.
                if out.expected.window.borrow().strides != [1] {
                    return None;
                }
                self.issue(Op::AddOut, &[A::P(&a), A::P(&b), A::V(V::F(0.5)), A::P(&out)], Some(&out));
            }
            Stmt::Copy(to, from) => {
                let (to, from) = self.same_length(to, from)?;
                self.issue(Op::Copy_, &[A::P(&to), A::P(&from)], Some(&to));
            }
            Stmt::Cat(to, a, b) => {
                let (a, b) = (self.get(a)?, self.get(b)?);
                if a.expected.len() + b.expected.len() > 16 {
                    return None;
                }
                let made = self.issue(Op::Cat, &[A::List(vec![&a, &b, &a])], None);
                self.set(to, made);
            }
            Stmt::Halves(first, second, a) => {
                let a = self.get(a)?;
                let made = self.issue(Op::Halves, &[A::P(&a)], None);
                self.vars[second] = made.get(1).cloned();
                self.set(first, made);
            }
            Stmt::Full(to, n) => {
                let sizes = [len(n)];
                let value = A::V(V::F(f64::from(it.number)));
                let made = self.issue(Op::Full, &[A::V(V::Ints(&sizes)), value], None);
                self.set(to, made);
            }
            Stmt::Arange(to, n) => {
                let made = self.issue(Op::Arange, &[A::V(V::I(len(n)))], None);
                self.set(to, made);
            }
            Stmt::Feed(to, n) => {
                let values = (0..len(n)).map(|i| it.number + i as f32).collect();
                let made = self.issue(Op::ToDevice, &[A::Host(values)], None);
                self.set(to, made);
            }
            Stmt::FeedInto(to) => {
                let to = self.get(to)?;
                let values = (0..to.expected.len()).map(|i| it.number - i as f32).collect();
                self.issue(Op::Copy_, &[A::P(&to), A::Host(values)], Some(&to));
            }
            Stmt::Uniform(to, n) => {
                let sizes = [len(n)];
                let made = self.issue(Op::Uniform, &[A::V(V::Ints(&sizes)), A::V(V::None)], None);
                self.set(to, made);
            }
            Stmt::Nonzero(to, a) => {
                let a = self.get(a)?;
                // The op's output shape depends on data, so the engine raises the poison at the call.
                if self.is_poisoned(&a) {
                    return None;
                }
                let made = self.issue(Op::Nonzero, &[A::P(&a)], None);
                self.set(to, made);
            }
            Stmt::Check(to, a) => {
                let a = self.get(a)?;
                let made = self.issue(Op::Check, &[A::P(&a)], None);
                self.set(to, made);
            }
            Stmt::Item(a) => {
                let a = self.get(a)?;
                let own = a.got.clone()?;
                if a.expected.len() == 0 {
                    return None;
                }
                let item = self.engine.item(self.line, &own);
                if self.is_poisoned(&a) {
                    assert!(item.is_err(), "line {}: poison was read", self.line);
                } else {
                    let expected = self.eager.item(self.line, &a.expected).unwrap();
                    assert_eq!(item.unwrap().to_bits(), expected.to_bits(), "line {}", self.line);
                }
            }
            Stmt::Fetch(a) => {
                let a = self.get(a)?;
                self.compare(&a);
            }
            Stmt::Elsewhere(a, b) => {
                let (a, b) = self.same_length(a, b)?;
                self.engine.other_thread = true;
                self.issue(Op::Mul_, &[A::P(&a), A::P(&b)], Some(&a));
                self.engine.other_thread = false;
            }
            Stmt::Assign(to, a) => self.vars[to] = self.get(a),
            Stmt::Drop(a) => self.vars[a] = None,
            Stmt::Hold(a, steps) => {
                let a = self.get(a)?;
                self.held.push_back((self.now + steps as usize, a));
            }
            Stmt::If(..) | Stmt::Repeat(..) | Stmt::EndIf(_) => unreachable!("run_all runs them"),
        }
        Some(())
    }

    fn run_all(&mut self, stmts: &[Stmt], mut line: u32, it: &Iteration) -> Result<u32, Ended> {
        for stmt in stmts {
            line += 1;
            self.line = line;
            match stmt {
                Stmt::If(bit, then, or) => {
                    let taken = it.choices >> bit & 1 == 1;
                    if taken {
                        self.run_all(then, line, it)?;
                    } else {
                        self.run_all(or, line + count(then), it)?;
                    }
                    line += count(then) + count(or);
                }
                Stmt::Repeat(n, body) => {
                    for _ in 0..n + it.size {
                        self.run_all(body, line, it)?;
                    }
                    line += count(body);
                }
                Stmt::EndIf(bit) if it.choices >> bit & 1 == 1 => return Err(Ended),
                Stmt::EndIf(_) => {}
                other => {
                    self.run(other, it);
                }
            }
        }
        Ok(line)
    }

    fn end_iteration(&mut self) {
        self.engine.step();
        self.now += 1;
        self.line = 100_000;
        let due: Vec<Pair>;
        (due, self.held) = {
            let now = self.now;
            let (due, later): (Vec<_>, Vec<_>) = self.held.drain(..).partition(|(at, _)| *at <= now);
            (due.into_iter().map(|(_, p)| p).collect(), later.into())
        };
        due.iter().for_each(|p| self.compare(p));
        // Poisoned stores that no variable holds are dropped.
        self.poisoned.retain(|s| Rc::strong_count(s) > 1);
    }

    fn finish(mut self) {
        self.line = 200_000;
        for p in std::mem::take(&mut self.vars).into_iter().flatten() {
            self.compare(&p);
        }
        for (_, p) in std::mem::take(&mut self.held) {
            self.compare(&p);
        }
        self.engine.step();
        self.engine.synchronize().expect("GraphRunner lives");
        self.engine.engine().take_failures();
        assert_eq!(self.engine.leaked(), (0, 0), "buffers and exceptions that leaked");
    }
}

fn count(stmts: &[Stmt]) -> u32 {
    stmts
        .iter()
        .map(|s| match s {
            Stmt::If(_, a, b) => 1 + count(a) + count(b),
            Stmt::Repeat(_, a) => 1 + count(a),
            _ => 1,
        })
        .sum()
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 2_000,
        failure_persistence: Some(Box::new(FileFailurePersistence::Direct("proptest-regressions/random_programs.txt"))),
        ..ProptestConfig::default()
    })]

    #[test]
    fn every_value_is_the_reference_s(
        program in prop::collection::vec(stmt(), 1..14),
        iterations in prop::collection::vec(iteration(), 8),
    ) {
        let mut both = Both::new();
        for it in &iterations {
            let _ = both.run_all(&program, 0, it);
            both.end_iteration();
        }
        both.finish();
    }
}
