//! Compares tile programs with the same arithmetic computed element by element.

use proptest::prelude::*;
use tandem_cpu::tiles::compile;
use tandem_cpu::tiles::{Launch, Layout, MemoryOperand, TILE};
use tandem_executor::ir::{E, Mem, Ty, larger, smaller};

fn load(number: u32) -> E {
    E::load(Mem::F32, number, E::int(Ty::I64, 0), None)
}

/// Operands in memory: their common sizes, and the strides and elements of each.
struct Operands {
    sizes: Vec<i64>,
    strides: Vec<Vec<i64>>,
    data: Vec<Vec<f32>>,
}

impl Operands {
    /// `count` contiguous operands of `n` elements.
    fn flat(n: usize, count: usize) -> Operands {
        let element = |operand: usize, i: usize| ((i * 7 + operand * 3) % 23) as f32 / 4.0 - 2.5;
        Operands {
            sizes: vec![n as i64],
            strides: vec![vec![1]; count],
            data: (0..count).map(|o| (0..n).map(|i| element(o, i)).collect()).collect(),
        }
    }

    fn layouts(&self) -> Vec<Layout> {
        let layout = |strides: &Vec<i64>| {
            let mut expected = 1;
            let linear = self.sizes.iter().zip(strides).rev().all(|(size, stride)| {
                let fits = *stride == expected;
                expected *= size;
                fits
            });
            match (linear, strides.iter().all(|s| *s == 0)) {
                (true, _) => Layout::Linear,
                (_, true) => Layout::Single,
                _ => Layout::Strided,
            }
        };
        self.strides.iter().map(layout).collect()
    }

    /// Evaluates expressions and stores each to its operand, in calls of at most `part` elements.
    fn run(&mut self, stores: &[(u16, E)], params: &[f64], part: usize) {
        let program = compile(stores, &self.layouts(), |a, b| a == b).expect("there are loops for it");
        let data: Vec<*mut u8> = self.data.iter_mut().map(|data| data.as_mut_ptr().cast()).collect();
        let strides = self.strides.iter().map(|strides| strides.iter().copied().collect());
        let windows: Vec<MemoryOperand> =
            (0..).zip(strides).map(|(slot, strides)| MemoryOperand { slot, strides, size: 4 }).collect();
        let params: Vec<u64> = params.iter().map(|p| p.to_bits()).collect();
        let (sizes, windows) = (&self.sizes, &windows);
        let launch = Launch { program: &program, sizes, windows, data: &data, params: &params };
        let n = self.sizes.iter().product::<i64>() as usize;
        for from in (0..n).step_by(part) {
            // SAFETY: the program was compiled for these windows, which are within the vectors in `self.data`, which is
            // borrowed mutably.
            unsafe { launch.run(from, (from + part).min(n)) };
        }
    }
}

const LENGTHS: [usize; 9] = [1, 2, 15, 16, 17, TILE - 1, TILE, TILE + 1, 3 * TILE + 5];

#[test]
fn all_lengths_and_parts_give_the_same() {
    for n in LENGTHS {
        for part in [n, 7, TILE + 3] {
            let mut x = Operands::flat(n, 3);
            let (a, b) = (x.data[0].clone(), x.data[1].clone());
            let value = (load(0) + load(1) * E::param(Ty::F32, 0)).abs().sqrt();
            x.run(&[(2, value)], &[0.5], part);
            let expected: Vec<f32> = a.iter().zip(&b).map(|(a, b)| (a + b * 0.5).abs().sqrt()).collect();
            assert_eq!(x.data[2], expected, "{n} {part}");
        }
    }
}

#[test]
fn what_is_overwritten_is_read_before() {
    let mut x = Operands::flat(700, 3);
    let (a, b) = (x.data[0].clone(), x.data[1].clone());
    // Swaps the first two operands and stores the old value of the first one, plus 1, to the third.
    x.run(&[(0, load(1)), (1, load(0)), (2, load(0) + 1.0)], &[], 700);
    assert_eq!((&x.data[0], &x.data[1]), (&b, &a));
    assert_eq!(x.data[2], a.iter().map(|a| a + 1.0).collect::<Vec<_>>());
}

#[test]
fn a_copy_of_what_changes_in_place_is_of_its_old_value() {
    let mut x = Operands::flat(700, 2);
    let a = x.data[0].clone();
    x.run(&[(0, larger(&load(0), &load(0).like(-1.0))), (1, load(0))], &[], 64);
    assert_eq!(x.data[1], a);
    assert_eq!(x.data[0], a.iter().map(|a| a.max(-1.0)).collect::<Vec<_>>());
}

#[test]
fn strides_broadcasts_and_single_elements() {
    let (rows, columns) = (37, 41);
    let mut x = Operands::flat(rows * columns, 4);
    x.sizes = vec![rows as i64, columns as i64];
    // A transposed operand, a broadcast row, a broadcast element and a contiguous output.
    x.strides = vec![vec![1, rows as i64], vec![0, 1], vec![0, 0], vec![columns as i64, 1]];
    let data = x.data.clone();
    x.run(&[(3, load(0) * load(1) - load(2))], &[], 100);
    for r in 0..rows {
        for c in 0..columns {
            let expected = data[0][r + c * rows] * data[1][c] - data[2][0];
            assert_eq!(x.data[3][r * columns + c], expected);
        }
    }
    // A transposed output.
    x.strides[3] = vec![1, rows as i64];
    x.run(&[(3, load(1) + 1.0)], &[], 100);
    assert!((0..rows * columns).all(|i| x.data[3][i] == data[1][i / rows] + 1.0));
}

#[test]
fn comparisons_nan_and_choices() {
    let mut x = Operands::flat(100, 3);
    (x.data[0][3], x.data[1][5]) = (f32::NAN, f32::NAN);
    let (a, b) = (load(0), load(1));
    let low = smaller(&a, &b);
    let value = a.lt(&b).or(a.is_nan()).select(&low, larger(&a, &b) * 2.0);
    x.run(&[(2, value)], &[], 100);
    for i in 0..100 {
        let (a, b) = (x.data[0][i], x.data[1][i]);
        let nan = a.is_nan() || b.is_nan();
        let expected = if a < b { a } else { a * 2.0 };
        assert!(if nan { x.data[2][i].is_nan() } else { x.data[2][i] == expected }, "{i}");
    }
}

#[test]
fn a_power_does_not_depend_on_its_exponent_being_one_for_all() {
    for exponent in [2.0, 3.0, 0.5, -0.5, -1.0, -2.0, 0.7] {
        let mut x = Operands::flat(600, 4);
        x.data[0].iter_mut().for_each(|x| *x = x.abs() + 0.1);
        x.data[1].fill(exponent as f32);
        let power = |y: E| E::call("pow_", Ty::F32, [load(0), y]);
        x.run(&[(2, power(load(1))), (3, power(E::param(Ty::F32, 0)))], &[exponent], 600);
        assert_eq!(x.data[2], x.data[3], "{exponent}");
    }
}

#[test]
fn many_numbers_and_what_is_stored_from_one() {
    let mut x = Operands::flat(1300, 2);
    let numbers: Vec<f64> = (0..40).map(|i| f64::from(i) / 8.0).collect();
    let sum = (0..40).fold(load(0), |sum, i| sum + E::param(Ty::F32, i));
    let expected: Vec<f32> =
        x.data[0].iter().map(|a| numbers.iter().fold(*a, |sum, n| sum + *n as f32)).collect();
    x.run(&[(1, sum)], &numbers, 500);
    assert_eq!(x.data[1], expected);
    // An output with stride 2.
    let mut x = Operands::flat(1300, 1);
    x.sizes = vec![650];
    x.strides = vec![vec![2]];
    let before = x.data[0].clone();
    x.run(&[(0, E::param(Ty::F32, 0))], &[3.5], 650);
    assert!((0..1300).all(|i| x.data[0][i] == if i % 2 == 0 { 3.5 } else { before[i] }));
}

#[test]
fn whole_numbers_are_not_divided() {
    let whole = E::load(Mem::I64, 0, E::int(Ty::I64, 0), None);
    let quotient = &whole / &whole;
    assert!(compile(&[(1, quotient)], &[Layout::Linear; 2], |_, _| false).is_none());
}

/// An expression of two operands and a parameter, with its value for one element.
#[derive(Clone, Debug)]
enum Tree {
    Leaf(u8),
    Neg(Box<Tree>),
    Op(u8, Box<Tree>, Box<Tree>),
}

impl Tree {
    fn expression(&self) -> E {
        match self {
            Tree::Leaf(0) => load(0),
            Tree::Leaf(1) => load(1),
            Tree::Leaf(2) => E::param(Ty::F32, 0),
            Tree::Leaf(n) => E::lit(Ty::F32, f64::from(*n)),
            Tree::Neg(a) => -a.expression(),
            Tree::Op(op, a, b) => {
                let (a, b) = (a.expression(), b.expression());
                match op {
                    0 => a + b,
                    1 => a - b,
                    2 => a * b,
                    3 => larger(&a, &b),
                    _ => a.lt(&b).select(&b, a * 0.5),
                }
            }
        }
    }

    fn value(&self, x: f32, y: f32, p: f32) -> f32 {
        match self {
            Tree::Leaf(0) => x,
            Tree::Leaf(1) => y,
            Tree::Leaf(2) => p,
            Tree::Leaf(n) => f32::from(*n),
            Tree::Neg(a) => -a.value(x, y, p),
            Tree::Op(op, a, b) => {
                let (a, b) = (a.value(x, y, p), b.value(x, y, p));
                match op {
                    0 => a + b,
                    1 => a - b,
                    2 => a * b,
                    3 if a.is_nan() || b.is_nan() => f32::NAN,
                    3 => {
                        if b > a {
                            b
                        } else {
                            a
                        }
                    }
                    _ => {
                        if a < b {
                            b
                        } else {
                            a * 0.5
                        }
                    }
                }
            }
        }
    }
}

fn tree() -> impl Strategy<Value = Tree> {
    let leaf = (0u8..5).prop_map(Tree::Leaf);
    leaf.prop_recursive(6, 40, 2, |inner| {
        prop_oneof![
            inner.clone().prop_map(|a| Tree::Neg(Box::new(a))),
            (0u8..5, inner.clone(), inner).prop_map(|(op, a, b)| Tree::Op(op, Box::new(a), Box::new(b))),
        ]
    })
}

proptest! {
    /// Compares several expressions at once, some of which are stored to operands that others read.
    #[test]
    fn programs_compute_what_their_expressions_say(
        trees in prop::collection::vec(tree(), 1..4),
        targets in Just([0u16, 1, 2]).prop_shuffle(),
        n in 1usize..1100,
        p in -2.0f32..2.0,
    ) {
        let mut x = Operands::flat(n, 3);
        let before = x.data.clone();
        let stores: Vec<(u16, E)> = targets.iter().copied().zip(trees.iter().map(Tree::expression)).collect();
        x.run(&stores, &[f64::from(p)], n);
        for (target, tree) in targets.iter().zip(&trees) {
            let operands = before[0].iter().zip(&before[1]);
            for ((a, b), got) in operands.zip(&x.data[*target as usize]) {
                let (expected, got) = (tree.value(*a, *b, p), *got);
                prop_assert!(got == expected || got.is_nan() && expected.is_nan(), "{got} {expected}");
            }
        }
    }
}
