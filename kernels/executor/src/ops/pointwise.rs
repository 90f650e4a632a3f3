//! Expressions of point-wise operators: arithmetic, comparison, logic, rounding, exponentials, activations and
//! their derivatives. An executor provides numbers through [`Scope`] and compiles the expressions.

use std::collections::HashMap;
use std::sync::LazyLock;

use tandem_tracegraph::call::Arg;
use tandem_tracegraph::tensor_meta::Dtype;

use crate::ir::{Bin, E, Mem, Ty, Un, Var, larger, smaller};
use crate::ops::promotion::{Kind, result_type};

/// The dtypes that an operator computes in and returns.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DtypeRule {
    /// Computes in and returns the promoted dtype of the operands.
    Same,
    /// Computes in and returns the promoted dtype of the operands, or the default dtype if the promoted dtype is not
    /// floating-point.
    Float,
    /// Computes in the promoted dtype of the operands, and returns bool.
    Bool,
}
use DtypeRule::{Bool, Float, Same};

/// The context that an expression is built in: access to the call, and to numbers that are fed.
pub trait Scope {
    /// The call's arguments.
    fn args(&self) -> &[Arg<'_>];
    /// Whether an argument is given.
    fn has(&self, arg: usize) -> bool;
    /// The dtype of a tensor, or the dtype that a number has in type promotion; `None` for other arguments.
    fn dtype(&self, arg: usize) -> Option<Dtype>;
    /// A number, or an item of a list of numbers, converted to a type.
    fn number(&mut self, arg: usize, item: usize, ty: Ty) -> E;
    /// A float that follows from the call's metadata, passed as a parameter.
    fn constant(&mut self, value: f32) -> E;
    /// Reports an error of the op if `when` is true for an element.
    fn fault(&mut self, when: E);
    /// A new variable, and the expression that reads it.
    fn variable(&mut self, ty: Ty) -> (Var, E);
}

/// Inputs for building an operator's expression.
pub struct Args<'l> {
    /// Context that the expression is built in.
    pub scope: &'l mut dyn Scope,
    /// Values of the operands, all of type `ty`.
    pub x: Vec<E>,
    /// Type that the operator computes in.
    pub ty: Ty,
    /// Dtype that the operator computes in.
    pub dtype: Dtype,
    /// For arguments that are lists: index of the item that is used.
    pub item: usize,
}

impl Args<'_> {
    /// A number argument in the type that the operator computes in; 1 if it is not given.
    fn number(&mut self, arg: usize) -> E {
        if !self.scope.has(arg) {
            return self.lit(1.0);
        }
        let item = if matches!(self.scope.args()[arg], Arg::Scalars(_)) { self.item } else { 0 };
        self.scope.number(arg, item, self.ty)
    }

    /// The factor of a sum's second term; `None` if PyTorch raises for the type of the factor.
    fn alpha(&mut self) -> Option<E> {
        let refused = match self.scope.args().get(2) {
            Some(Arg::Float(_)) => !self.dtype.is_floating(),
            Some(Arg::Bool(_)) => self.dtype != Dtype::BOOL,
            Some(Arg::Complex(..)) => true,
            _ => false,
        };
        (!refused).then(|| self.number(2))
    }

    /// Whether an argument is a bool tensor or a bool.
    fn is_bool(&self, arg: usize) -> bool {
        self.scope.dtype(arg) == Some(Dtype::BOOL)
    }

    /// Whether the arguments in a range have the same dtype, for operators without type promotion.
    fn one_dtype(&self, mut others: std::ops::Range<usize>) -> bool {
        let first = others.next().and_then(|arg| self.scope.dtype(arg));
        others.all(|arg| self.scope.dtype(arg) == first)
    }

    /// The two terms of a difference, the second multiplied by `alpha`. `None` for bools, for which PyTorch raises.
    fn difference(&mut self) -> Option<[E; 2]> {
        if self.ty == Ty::Bool || self.is_bool(0) || self.is_bool(1) {
            return None;
        }
        let alpha = self.alpha()?;
        Some([self.x[0].clone(), self.x[1].clone() * alpha])
    }

    /// The operand rounded to a whole number. `None` for bools, for which PyTorch raises.
    fn whole(&self, op: Un) -> Option<E> {
        let x = self.x[0].clone();
        (self.ty != Ty::Bool).then(|| if self.ty.is_float() { E::un(op, x) } else { x })
    }

    fn lit(&self, value: f64) -> E {
        E::lit(self.ty, value)
    }

    fn string(&self, arg: usize) -> Option<&str> {
        match self.scope.args().get(arg)? {
            Arg::Str(s) => Some(s),
            _ => None,
        }
    }

    /// A loop of `rounds` rounds: `body` maps the accumulators to their next values.
    fn fold<const N: usize>(
        &mut self,
        rounds: u32,
        init: [E; N],
        body: impl FnOnce([E; N]) -> [E; N],
    ) -> [E; N] {
        let (round, _) = self.scope.variable(Ty::U32);
        let acc = init.clone().map(|e| self.scope.variable(e.ty()));
        let next = body(acc.clone().map(|(_, e)| e));
        let vars = std::iter::once(round).chain(acc.map(|(v, _)| v)).collect();
        let items = E::fold_of(E::u32(rounds), vars, init.to_vec(), next.to_vec());
        let mut items = items.into_iter();
        std::array::from_fn(|_| items.next().unwrap_or_else(|| E::u32(0)))
    }

    /// Reports an error of the op if `when` is true for an element.
    fn fault(&mut self, when: E) {
        self.scope.fault(when);
    }
}

/// How the operands of an expression are converted before it is computed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reads {
    /// All operands are converted to the dtype that the operator computes in.
    Promoted,
    /// The only operand is converted to the dtype of the output, which is the operator's first argument.
    Stored,
    /// The first operand is a condition, the others are promoted.
    Selected,
    /// The first operand is a condition, the second a single value, and the third the tensor whose dtype the output
    /// has.
    Masked,
}

/// A point-wise computation.
#[derive(Clone, Copy)]
pub struct Op {
    /// Rule for the dtypes.
    pub rule: DtypeRule,
    /// Indices of the arguments that are operands.
    pub operands: &'static [usize],
    /// Conversion of the operands.
    pub reads: Reads,
    /// Whether PyTorch's `TensorIterator` has the gradient, which is the operator's first operand, as its last operand.
    pub gradient_last: bool,
    /// Whether the output is contiguous if the first operand is a number, whatever strides the other operands have.
    pub contiguous_from_number: bool,
    /// Whether the operator's form for lists of tensors accepts only floating-point tensors.
    pub float_lists: bool,
    /// Whether PyTorch does not round a second operand without dimensions to the dtype of the computation.
    pub exact_scalar: bool,
    /// Builds the expression; `None` if PyTorch raises for such operands or if there is no expression for them.
    pub value: fn(&mut Args<'_>) -> Option<E>,
}

impl Op {
    /// A computation whose operands are the arguments with these indices.
    pub const fn new(
        rule: DtypeRule,
        operands: &'static [usize],
        value: fn(&mut Args<'_>) -> Option<E>,
    ) -> Op {
        Op {
            rule,
            operands,
            reads: Reads::Promoted,
            gradient_last: false,
            contiguous_from_number: false,
            float_lists: false,
            exact_scalar: false,
            value,
        }
    }

    /// The dtypes that the operator computes in and returns for these operands.
    pub fn dtypes(&self, operands: impl IntoIterator<Item = Kind>, default: Dtype) -> (Dtype, Dtype) {
        let common = result_type(operands, default);
        match self.rule {
            Same => (common, common),
            Float if common.is_floating() => (common, common),
            Float => (default, default),
            Bool => (common, Dtype::BOOL),
        }
    }

    /// The half-precision format that an operand is rounded to before the computation in `float32`, because PyTorch
    /// converts operands to the dtype of the computation. `None` if the computation is not in half precision, if the
    /// operand has this dtype already, and for the second operand of some operators ([`Op::exact_scalar`]).
    pub fn rounds_to(&self, number: usize, operand: Kind, computed: Dtype) -> Option<Mem> {
        let mem = Mem::of(computed).filter(|mem| mem.is_half())?;
        let is_exact = operand.dtype == computed || self.exact_scalar && number == 1 && operand.ndim == 0;
        (!is_exact).then_some(mem)
    }
}

/// A point-wise operator.
pub struct Pointwise {
    /// Whether the operator is `copy`.
    pub is_copy: bool,
    /// Whether the operator is a derivative. Autograd passes operands of equal sizes to derivatives.
    pub is_derivative: bool,
    /// Computation of a call with these arguments; `None` if there is no expression for such calls.
    choose: Choice,
}

enum Choice {
    Always(Op),
    ByArguments(fn(&[Arg<'_>]) -> Option<&'static Op>),
}

impl Pointwise {
    /// The computation of a call with these arguments.
    pub fn op(&self, args: &[Arg<'_>]) -> Option<&Op> {
        match &self.choose {
            Choice::Always(op) => Some(op),
            Choice::ByArguments(choose) => choose(args),
        }
    }
}

/// Operands that are the first arguments.
const FIRST: [&[usize]; 4] = [&[], &[0], &[0, 1], &[0, 1, 2]];

static OPERATORS: LazyLock<HashMap<&'static str, Pointwise>> = LazyLock::new(|| {
    let of = |name: &str, choose| Pointwise {
        is_copy: name == "copy",
        is_derivative: name.ends_with("_backward"),
        choose,
    };
    let mut all = HashMap::new();
    for (names, rule, operands, value) in table() {
        for name in names.split(' ') {
            let mut op = Op::new(rule, FIRST[operands], value);
            op.gradient_last = matches!(name, "threshold_backward" | "leaky_relu_backward");
            (op.contiguous_from_number, op.float_lists) = (name == "pow", name == "pow");
            op.exact_scalar = matches!(name, "mul" | "multiply" | "floor_divide");
            all.insert(name, of(name, Choice::Always(op)));
        }
    }
    for (names, choose) in table_by_arguments() {
        for name in names.split(' ') {
            all.insert(name, of(name, Choice::ByArguments(choose)));
        }
    }
    all
});

/// The operator with this name: without namespace, overload, and the underscore of the in-place form.
pub fn find(base: &str) -> Option<&'static Pointwise> {
    OPERATORS.get(base)
}

/// The names of all operators.
pub fn names() -> impl Iterator<Item = &'static str> {
    OPERATORS.keys().copied()
}

type Row = (&'static str, DtypeRule, usize, fn(&mut Args<'_>) -> Option<E>);

fn truth(x: &E) -> E {
    x.cast(Ty::Bool)
}

/// Division with the rounding mode in argument 2. Integers of less than 32 bits are computed in 32 bits and wrap
/// when they are stored.
fn divide(a: &mut Args<'_>) -> Option<E> {
    let mode = if a.scope.has(2) { a.string(2)? } else { "" };
    let (x, y) = (a.x[0].clone(), a.x[1].clone());
    match (a.ty.is_float(), mode) {
        (true, "") => Some(x / y),
        (true, "trunc") => Some(E::un(Un::Trunc, x / y)),
        (true, "floor") => Some(floor_divide(&x, &y)),
        (false, "trunc") => {
            a.fault(y.eq(0.0));
            Some(E::bin(Bin::Div, x, y))
        }
        (false, "floor") => {
            a.fault(y.eq(0.0));
            Some(floor_divide(&x, &y))
        }
        _ => None,
    }
}

/// Computes PyTorch's `div_floor`, which is exact even where the quotient of two floats is rounded.
fn floor_divide(x: &E, y: &E) -> E {
    let apart = |m: &E| m.ne(0.0).and(E::bin(Bin::BitXor, m.lt(0.0), y.lt(0.0)));
    if !x.ty().is_float() {
        let q = x / y;
        let m = x - &q * y;
        return apart(&m).select(&q - 1.0, &q);
    }
    let m = fmod(x, y);
    let q = (x - &m) / y;
    let q = apart(&m).select(&q - 1.0, &q);
    let f = E::un(Un::Floor, q.clone());
    let f = (&q - &f).gt(0.5).select(&f + 1.0, &f);
    let f = q.ne(0.0).select(f, E::lit(x.ty(), 0.0) * &(x / y));
    y.eq(0.0).select(x / y, f)
}

fn fmod(x: &E, y: &E) -> E {
    match x.ty() {
        Ty::F32 => E::call("fmod_", Ty::F32, [x.clone(), y.clone()]),
        _ => x % y,
    }
}

fn remainder(x: &E, y: &E) -> E {
    let m = fmod(x, y);
    m.ne(0.0).and(E::bin(Bin::BitXor, m.lt(0.0), y.lt(0.0))).select(&m + y, &m)
}

const SQRT_HALF: f64 = std::f64::consts::FRAC_1_SQRT_2;
const SQRT_2_OVER_PI: f64 = 0.797_884_560_802_865_4;

/// Whether `gelu` uses the tanh approximation, from its argument `approximate`; `None` for a value for which
/// PyTorch raises.
fn is_tanh(approximate: &str) -> Option<bool> {
    match approximate {
        "tanh" => Some(true),
        "none" => Some(false),
        _ => None,
    }
}

fn normal_cdf(x: &E) -> E {
    0.5 * (1.0 + (x * SQRT_HALF).f("erf_"))
}

fn integer(a: &Args<'_>) -> bool {
    !a.ty.is_float()
}

fn power(a: &mut Args<'_>) -> Option<E> {
    let (x, y) = (a.x[0].clone(), a.x[1].clone());
    match a.ty {
        Ty::F32 => Some(E::call("pow_", Ty::F32, [x, y])),
        // Exponentiation by squaring. With a negative exponent, the result is 0 unless the base is 1 or -1, as in
        // PyTorch.
        Ty::I32 | Ty::I64 => {
            let one = a.lit(1.0);
            let start = [one.clone(), x.clone(), y.clone()];
            let [r, ..] = a.fold(64, start, |[r, b, e]| {
                let odd = E::bin(Bin::BitAnd, e.clone(), e.like(1.0)).ne(0.0);
                [odd.select(&r * &b, &r), &b * &b, E::bin(Bin::Shr, e, E::u32(1))]
            });
            let odd = E::bin(Bin::BitAnd, y.clone(), y.like(1.0)).ne(0.0);
            let minus_one = odd.select(-1.0, E::lit(a.ty, 1.0));
            let below = x.eq(1.0).select(&one, x.eq(-1.0).select(&minus_one, a.lit(0.0)));
            Some(y.lt(0.0).select(below, r))
        }
        _ => None,
    }
}

fn sign(x: &E) -> E {
    match x.ty() {
        Ty::Bool => x.clone(),
        _ => x.gt(0.0).select(x.like(1.0), x.lt(0.0).select(x.like(-1.0), x.like(0.0))),
    }
}

/// A divisor with 0 replaced by 1, for quotients that are discarded where the divisor is 0.
fn nonzero(x: &E) -> E {
    x.eq(0.0).select(x.like(1.0), x)
}

/// The greatest common divisor by Euclid's algorithm. The number of steps is enough for consecutive Fibonacci numbers,
/// the worst case.
fn gcd(a: &mut Args<'_>) -> E {
    let steps = if a.ty == Ty::I64 { 93 } else { 47 };
    let start = [a.x[0].abs(), a.x[1].abs()];
    let [d, _] = a.fold(steps, start, |[x, y]| {
        let over = y.eq(0.0);
        let rest = E::bin(Bin::Rem, x.clone(), nonzero(&y));
        [over.select(&x, &y), over.select(&y, rest)]
    });
    d.abs()
}

/// A shift. For a distance below 0, or of at least the number of bits, a left shift yields 0, and a right shift yields
/// the sign bit in all bits.
fn shift(a: &mut Args<'_>, op: Bin) -> Option<E> {
    let bits = match a.ty {
        Ty::I32 => 32.0,
        Ty::I64 => 64.0,
        _ => return None,
    };
    let (x, by) = (&a.x[0], &a.x[1]);
    let fits = by.ge(0.0).and(by.lt(bits));
    let distance = fits.select(by, bits - 1.0).cast(Ty::U32);
    let shifted = E::bin(op, x.clone(), distance);
    Some(if op == Bin::Shl { fits.select(shifted, 0.0) } else { shifted })
}

/// Rounds to a number of decimals. A negative number of decimals rounds digits before the decimal point.
fn round_to(a: &mut Args<'_>, decimals: i64) -> Option<E> {
    let ten = 10f64.powi(i32::try_from(decimals.abs()).ok()?) as f32;
    if a.ty != Ty::F32 || !ten.is_finite() {
        return None;
    }
    let ten = a.scope.constant(ten);
    let round = |x: E| E::un(Un::Round, x);
    Some(if decimals > 0 { round(&a.x[0] * &ten) / ten } else { round(&a.x[0] / &ten) * ten })
}

fn logit(x: &E) -> E {
    (x / &(1.0 - x)).log()
}

fn softplus(x: &E, beta: &E, threshold: &E) -> E {
    let z = x * beta;
    z.gt(threshold).select(x, z.exp().f("log1p_") / beta)
}

fn logaddexp(a: &E, b: &E, exp: &str) -> E {
    let m = larger(a, b);
    let d = -(a - b).abs();
    let (e, l): (E, E) =
        if exp == "exp_" { (d.exp(), d.exp().f("log1p_")) } else { (d.f("exp2_"), d.f("exp2_")) };
    let r = if exp == "exp_" { l } else { e.f("log1p_") * std::f64::consts::LOG2_E };
    a.eq(b).and(a.abs().eq(f64::INFINITY)).select(a, m + r)
}

#[rustfmt::skip]
fn table() -> Vec<Row> {
    vec![
        // --- Arithmetic
        ("add", Same, 2, |a| match a.ty {
            Ty::Bool => { let alpha = a.alpha()?; Some(a.x[0].or(a.x[1].and(alpha))) }
            _ => { let alpha = a.alpha()?; Some(&a.x[0] + &a.x[1] * alpha) }
        }),
        ("sub subtract", Same, 2, |a| a.difference().map(|[x, y]| x - y)),
        ("rsub", Same, 2, |a| {
            a.x.swap(0, 1);
            a.difference().map(|[x, y]| x - y)
        }),
        ("mul multiply", Same, 2, |a| Some(match a.ty { Ty::Bool => a.x[0].and(&a.x[1]), _ => &a.x[0] * &a.x[1] })),
        ("true_divide", Float, 2, |a| Some(&a.x[0] / &a.x[1])),
        ("floor_divide", Same, 2, |a| {
            if integer(a) { let zero = a.x[1].eq(0.0); a.fault(zero); }
            (a.ty != Ty::Bool).then(|| floor_divide(&a.x[0], &a.x[1]))
        }),
        ("remainder", Same, 2, |a| {
            if integer(a) { let zero = a.x[1].eq(0.0); a.fault(zero); }
            (a.ty != Ty::Bool).then(|| remainder(&a.x[0], &a.x[1]))
        }),
        ("fmod", Same, 2, |a| {
            if integer(a) { let zero = a.x[1].eq(0.0); a.fault(zero); }
            (a.ty != Ty::Bool).then(|| fmod(&a.x[0], &a.x[1]))
        }),
        ("neg negative", Same, 1, |a| (a.ty != Ty::Bool).then(|| -&a.x[0])),
        ("abs absolute", Same, 1, |a| (a.ty != Ty::Bool).then(|| a.x[0].abs())),
        ("sign sgn", Same, 1, |a| Some(sign(&a.x[0]))),
        ("square", Same, 1, |a| (a.ty != Ty::Bool).then(|| &a.x[0] * &a.x[0])),
        ("reciprocal", Float, 1, |a| Some(1.0 / &a.x[0])),
        ("pow", Same, 2, power),
        ("maximum", Same, 2, |a| Some(larger(&a.x[0], &a.x[1]))),
        ("minimum", Same, 2, |a| Some(smaller(&a.x[0], &a.x[1]))),
        ("fmax", Same, 2, |a| { let (x, y) = (&a.x[0], &a.x[1]); Some(y.is_nan().select(x, x.is_nan().select(y, larger(x, y)))) }),
        ("fmin", Same, 2, |a| { let (x, y) = (&a.x[0], &a.x[1]); Some(y.is_nan().select(x, x.is_nan().select(y, smaller(x, y)))) }),
        ("addcmul", Same, 3, |a| { let v = a.number(3); (a.ty != Ty::Bool).then(|| &a.x[0] + v * &a.x[1] * &a.x[2]) }),
        ("addcdiv", Same, 3, |a| { let v = a.number(3); a.ty.is_float().then(|| &a.x[0] + v * &a.x[1] / &a.x[2]) }),
        ("hypot", Same, 2, |a| {
            let (x, y) = (a.x[0].abs(), a.x[1].abs());
            let (big, small) = (larger(&x, &y), smaller(&x, &y));
            let r = &small / &big;
            let h = &big * (1.0 + &r * &r).sqrt();
            let inf = x.eq(f64::INFINITY).or(y.eq(f64::INFINITY));
            Some(inf.select(E::lit(a.ty, f64::INFINITY), big.eq(0.0).select(&big, h)))
        }),
        ("copysign", Float, 2, |a| (a.ty == Ty::F32).then(|| {
            let magnitude = E::bin(Bin::BitAnd, E::un(Un::Bits, a.x[0].clone()), E::u32(0x7fff_ffff));
            let sign = E::bin(Bin::BitAnd, E::un(Un::Bits, a.x[1].clone()), E::u32(0x8000_0000));
            E::un(Un::FromBits, E::bin(Bin::BitOr, magnitude, sign))
        })),
        ("heaviside", Same, 2, |a| {
            let (x, y) = (&a.x[0], &a.x[1]);
            (a.ty != Ty::Bool && a.one_dtype(0..2)).then(|| x.eq(0.0).select(y, x.lt(0.0).or(x.is_nan()).select(x.like(0.0), x.like(1.0))))
        }),
        ("xlogy", Float, 2, |a| {
            let (x, y) = (&a.x[0], &a.x[1]);
            Some(y.is_nan().select(y, x.eq(0.0).select(x.like(0.0), x * y.log())))
        }),
        ("special_xlog1py", Float, 2, |a| {
            let (x, y) = (&a.x[0], &a.x[1]);
            Some(y.is_nan().select(y, x.eq(0.0).select(x.like(0.0), x * y.f("log1p_"))))
        }),
        ("logaddexp", Same, 2, |a| a.ty.is_float().then(|| logaddexp(&a.x[0], &a.x[1], "exp_"))),
        ("logaddexp2", Same, 2, |a| a.ty.is_float().then(|| logaddexp(&a.x[0], &a.x[1], "exp2_"))),
        ("gcd", Same, 2, |a| (a.ty != Ty::Bool && integer(a)).then(|| gcd(a))),
        ("lcm", Same, 2, |a| (a.ty != Ty::Bool && integer(a)).then(|| {
            let (x, y, d) = (a.x[0].clone(), a.x[1].clone(), gcd(a));
            d.eq(0.0).select(a.lit(0.0), (E::bin(Bin::Div, x, nonzero(&d)) * y).abs())
        })),
        ("nextafter", Same, 2, |a| (a.dtype == Dtype::FLOAT32).then(|| {
            E::call("nextafter_", Ty::F32, [a.x[0].clone(), a.x[1].clone()])
        })),
        // --- Comparison and logic
        ("eq", Bool, 2, |a| Some(a.x[0].eq(&a.x[1]))),
        ("ne not_equal", Bool, 2, |a| Some(a.x[0].ne(&a.x[1]))),
        ("lt less", Bool, 2, |a| Some(a.x[0].lt(&a.x[1]))),
        ("le less_equal", Bool, 2, |a| Some(a.x[0].le(&a.x[1]))),
        ("gt greater", Bool, 2, |a| Some(a.x[0].gt(&a.x[1]))),
        ("ge greater_equal", Bool, 2, |a| Some(a.x[0].ge(&a.x[1]))),
        ("logical_and", Bool, 2, |a| Some(truth(&a.x[0]).and(truth(&a.x[1])))),
        ("logical_or", Bool, 2, |a| Some(truth(&a.x[0]).or(truth(&a.x[1])))),
        ("logical_xor", Bool, 2, |a| Some(E::bin(Bin::BitXor, truth(&a.x[0]), truth(&a.x[1])))),
        ("logical_not", Bool, 1, |a| Some(truth(&a.x[0]).not())),
        ("isnan", Bool, 1, |a| Some(a.x[0].is_nan())),
        ("isinf", Bool, 1, |a| Some(if integer(a) { E::int(Ty::Bool, 0) } else { a.x[0].abs().eq(f64::INFINITY) })),
        ("isfinite", Bool, 1, |a| Some(if integer(a) { E::int(Ty::Bool, 1) } else { a.x[0].abs().lt(f64::INFINITY) })),
        ("isposinf", Bool, 1, |a| Some(if integer(a) { E::int(Ty::Bool, 0) } else { a.x[0].eq(f64::INFINITY) })),
        ("isneginf", Bool, 1, |a| Some(if integer(a) { E::int(Ty::Bool, 0) } else { a.x[0].eq(f64::NEG_INFINITY) })),
        ("signbit", Bool, 1, |a| Some(match a.ty {
            Ty::F32 => E::bin(Bin::Shr, E::un(Un::Bits, a.x[0].clone()), E::u32(31)).ne(0.0),
            Ty::Bool => E::int(Ty::Bool, 0),
            _ => a.x[0].lt(0.0),
        })),
        ("bitwise_and __and__ __iand__", Same, 2, |a| integer(a).then(|| E::bin(Bin::BitAnd, a.x[0].clone(), a.x[1].clone()))),
        ("bitwise_or __or__ __ior__", Same, 2, |a| integer(a).then(|| E::bin(Bin::BitOr, a.x[0].clone(), a.x[1].clone()))),
        ("bitwise_xor __xor__ __ixor__", Same, 2, |a| integer(a).then(|| E::bin(Bin::BitXor, a.x[0].clone(), a.x[1].clone()))),
        ("bitwise_not", Same, 1, |a| match a.ty {
            Ty::Bool => Some(a.x[0].not()),
            Ty::I32 | Ty::I64 => Some(E::un(Un::BitNot, a.x[0].clone())),
            _ => None,
        }),
        ("bitwise_left_shift __lshift__ __ilshift__", Same, 2, |a| shift(a, Bin::Shl)),
        ("bitwise_right_shift __rshift__ __irshift__", Same, 2, |a| shift(a, Bin::Shr)),
        // --- Rounding
        ("floor", Same, 1, |a| a.whole(Un::Floor)),
        ("ceil", Same, 1, |a| a.whole(Un::Ceil)),
        ("round", Same, 1, |a| {
            let decimals = match a.scope.args().get(1) { Some(Arg::Int(n)) => *n, _ => 0 };
            if decimals != 0 { return round_to(a, decimals); }
            a.whole(Un::Round)
        }),
        ("trunc fix", Same, 1, |a| a.whole(Un::Trunc)),
        ("frac", Same, 1, |a| a.ty.is_float().then(|| &a.x[0] - E::un(Un::Trunc, a.x[0].clone()))),
        // --- Exponentials and related functions
        ("exp", Float, 1, |a| Some(a.x[0].exp())),
        ("exp2 special_exp2", Float, 1, |a| Some(a.x[0].f("exp2_"))),
        ("expm1 special_expm1", Float, 1, |a| Some(a.x[0].f("expm1_"))),
        ("log", Float, 1, |a| Some(a.x[0].log())),
        ("log2", Float, 1, |a| Some(a.x[0].f("log2_"))),
        ("log10", Float, 1, |a| Some(a.x[0].f("log10_"))),
        ("log1p special_log1p", Float, 1, |a| Some(a.x[0].f("log1p_"))),
        ("sqrt", Float, 1, |a| Some(a.x[0].sqrt())),
        ("rsqrt", Float, 1, |a| Some(1.0 / a.x[0].sqrt())),
        ("sin", Float, 1, |a| Some(a.x[0].f("sin_"))),
        ("cos", Float, 1, |a| Some(a.x[0].f("cos_"))),
        ("tan", Float, 1, |a| Some(a.x[0].f("tan_"))),
        ("asin arcsin", Float, 1, |a| Some(a.x[0].f("asin_"))),
        ("acos arccos", Float, 1, |a| Some(a.x[0].f("acos_"))),
        ("atan arctan", Float, 1, |a| Some(a.x[0].f("atan_"))),
        ("atan2 arctan2", Float, 2, |a| Some(E::call("atan2_", a.ty, [a.x[0].clone(), a.x[1].clone()]))),
        ("sinh", Float, 1, |a| Some(a.x[0].f("sinh_"))),
        ("cosh", Float, 1, |a| Some(a.x[0].f("cosh_"))),
        ("tanh", Float, 1, |a| Some(a.x[0].tanh())),
        ("asinh arcsinh", Float, 1, |a| Some(a.x[0].f("asinh_"))),
        ("acosh arccosh", Float, 1, |a| Some(a.x[0].f("acosh_"))),
        ("atanh arctanh", Float, 1, |a| Some(a.x[0].f("atanh_"))),
        ("erf special_erf", Float, 1, |a| Some(a.x[0].f("erf_"))),
        ("erfc special_erfc", Float, 1, |a| Some(a.x[0].f("erfc_"))),
        ("erfinv special_erfinv", Float, 1, |a| Some(a.x[0].f("erfinv_"))),
        ("lgamma special_gammaln", Float, 1, |a| Some(a.x[0].f("lgamma_"))),
        ("digamma special_digamma special_psi", Float, 1, |a| Some(a.x[0].f("digamma_"))),
        ("sinc special_sinc", Float, 1, |a| {
            let p = &a.x[0] * std::f64::consts::PI;
            Some(a.x[0].eq(0.0).select(a.lit(1.0), p.f("sin_") / p))
        }),
        ("i0 special_i0", Float, 1, |a| Some(a.x[0].f("i0_"))),
        ("special_i0e", Float, 1, |a| Some(a.x[0].f("i0e_"))),
        ("special_i1", Float, 1, |a| Some(a.x[0].f("i1_"))),
        ("special_i1e", Float, 1, |a| Some(a.x[0].f("i1e_"))),
        ("special_erfcx", Float, 1, |a| Some(a.x[0].f("erfcx_"))),
        ("special_log_ndtr", Float, 1, |a| Some(a.x[0].f("log_ndtr_"))),
        ("angle", Float, 1, |a| {
            let x = &a.x[0];
            Some(x.lt(0.0).select(a.lit(std::f64::consts::PI), x.is_nan().select(x, a.lit(0.0))))
        }),
        ("special_entr", Float, 1, |a| {
            let x = &a.x[0];
            let rest = x.eq(0.0).select(x.like(0.0), x.like(f64::NEG_INFINITY));
            Some(x.is_nan().select(x, x.gt(0.0).select(-(x * x.log()), rest)))
        }),
        ("sigmoid special_expit", Float, 1, |a| Some(a.x[0].sigmoid())),
        ("deg2rad", Float, 1, |a| Some(&a.x[0] * (std::f64::consts::PI / 180.0))),
        ("rad2deg", Float, 1, |a| Some(&a.x[0] * (180.0 / std::f64::consts::PI))),
        // --- Activations
        ("relu", Same, 1, |a| (a.ty != Ty::Bool).then(|| larger(&a.x[0], &a.lit(0.0)))),
        ("relu6", Same, 1, |a| (a.ty != Ty::Bool).then(|| smaller(&larger(&a.x[0], &a.lit(0.0)), &a.lit(6.0)))),
        ("gelu", Same, 1, |a| {
            let x = a.x[0].clone();
            a.ty.is_float().then_some(())?;
            Some(if is_tanh(a.string(1)?)? {
                let inner = SQRT_2_OVER_PI * (&x + 0.044715 * (&x * &x * &x));
                0.5 * &x * (1.0 + inner.tanh())
            } else {
                &x * normal_cdf(&x)
            })
        }),
        ("gelu_backward", Same, 2, |a| {
            let (g, x) = (&a.x[0], &a.x[1]);
            a.ty.is_float().then_some(())?;
            Some(if is_tanh(a.string(2)?)? {
                let x2 = x * x;
                let t = (SQRT_2_OVER_PI * (x + 0.044715 * (&x2 * x))).tanh();
                let left = 0.5 * (1.0 + &t);
                let right = 0.5 * x * (1.0 - &t * &t) * (SQRT_2_OVER_PI * (1.0 + 3.0 * 0.044715 * x2));
                g * (left + right)
            } else {
                let pdf = (-0.5 * (x * x)).exp() * 0.398_942_280_401_432_7;
                g * (normal_cdf(x) + x * pdf)
            })
        }),
        ("silu", Same, 1, |a| a.ty.is_float().then(|| &a.x[0] / (1.0 + (-&a.x[0]).exp()))),
        ("silu_backward", Same, 2, |a| {
            let (g, x) = (&a.x[0], &a.x[1]);
            let s = x.sigmoid();
            Some(g * &s * (1.0 + x * (1.0 - &s)))
        }),
        ("mish", Same, 1, |a| a.ty.is_float().then(|| &a.x[0] * softplus(&a.x[0], &a.lit(1.0), &a.lit(20.0)).tanh())),
        ("mish_backward", Same, 2, |a| {
            let (g, x) = (&a.x[0], &a.x[1]);
            let t = softplus(x, &a.lit(1.0), &a.lit(20.0)).tanh();
            Some(g * (&t + x * x.sigmoid() * (1.0 - &t * &t)))
        }),
        ("sigmoid_backward", Same, 2, |a| { let (g, y) = (&a.x[0], &a.x[1]); Some(g * (1.0 - y) * y) }),
        ("tanh_backward", Same, 2, |a| { let (g, y) = (&a.x[0], &a.x[1]); Some(g * (1.0 - y * y)) }),
        ("logit_backward", Same, 2, |a| {
            let (g, x) = (a.x[0].clone(), a.x[1].clone());
            let inner = &g / (&x * (1.0 - &x));
            let inside = |low: &E| x.ge(low).and(x.le(1.0 - low));
            let plain = inside(&a.lit(0.0)).select(&inner, a.lit(f64::NAN));
            if !matches!(a.scope.args().get(2), Some(Arg::Float(_))) {
                return Some(plain);
            }
            let eps = a.number(2);
            Some(eps.lt(0.0).select(plain, inside(&eps).select(inner, a.lit(0.0))))
        }),
        ("logit special_logit", Float, 1, |a| {
            if a.scope.has(1) && !matches!(a.scope.args()[1], Arg::Tensor) {
                let eps = a.number(1);
                let x = a.x[0].clone();
                let high = 1.0 - &eps;
                let x = x.lt(&eps).select(&eps, x.gt(&high).select(&high, &x));
                return Some(logit(&x));
            }
            Some(logit(&a.x[0]))
        }),
        ("softplus", Same, 1, |a| { let (b, t) = (a.number(1), a.number(2)); a.ty.is_float().then(|| softplus(&a.x[0], &b, &t)) }),
        ("softplus_backward", Same, 2, |a| {
            let (b, t) = (a.number(2), a.number(3));
            let (g, x) = (&a.x[0], &a.x[1]);
            let z = x * &b;
            let e = z.exp();
            Some(z.gt(t).select(g, g * &e / (&e + 1.0)))
        }),
        ("elu", Same, 1, |a| {
            let (alpha, scale, input_scale) = (a.number(1), a.number(2), a.number(3));
            let x = &a.x[0];
            a.ty.is_float().then(|| x.lt(0.0).select((x * input_scale).f("expm1_") * (alpha * &scale), x * &scale))
        }),
        ("leaky_relu", Same, 1, |a| { let s = a.number(1); a.ty.is_float().then(|| a.x[0].gt(0.0).select(&a.x[0], &a.x[0] * s)) }),
        ("leaky_relu_backward", Same, 2, |a| { let s = a.number(2); Some(a.x[1].gt(0.0).select(&a.x[0], &a.x[0] * s)) }),
        ("_prelu_kernel", Same, 2, |a| (a.ty.is_float() && a.one_dtype(0..2)).then(|| a.x[0].gt(0.0).select(&a.x[0], &a.x[1] * &a.x[0]))),
        ("threshold", Same, 1, |a| { let (t, v) = (a.number(1), a.number(2)); (a.ty != Ty::Bool).then(|| a.x[0].le(t).select(v, &a.x[0])) }),
        ("threshold_backward", Same, 2, |a| { let t = a.number(2); Some(a.x[1].le(t).select(a.lit(0.0), &a.x[0])) }),
        ("hardtanh", Same, 1, |a| { let (lo, hi) = (a.number(1), a.number(2)); (a.ty != Ty::Bool).then(|| smaller(&larger(&a.x[0], &lo), &hi)) }),
        ("hardtanh_backward", Same, 2, |a| {
            let (lo, hi) = (a.number(2), a.number(3));
            Some(a.x[1].le(lo).or(a.x[1].ge(hi)).select(a.lit(0.0), &a.x[0]))
        }),
        ("hardsigmoid", Same, 1, |a| a.ty.is_float().then(|| smaller(&larger(&(&a.x[0] + 3.0), &a.lit(0.0)), &a.lit(6.0)) / 6.0)),
        ("hardsigmoid_backward", Same, 2, |a| {
            let x = &a.x[1];
            Some(x.gt(-3.0).and(x.lt(3.0)).select(&a.x[0] / 6.0, a.lit(0.0)))
        }),
        ("hardswish", Same, 1, |a| a.ty.is_float().then(|| {
            let x = &a.x[0];
            x * smaller(&larger(&(x + 3.0), &a.lit(0.0)), &a.lit(6.0)) / 6.0
        })),
        ("hardswish_backward", Same, 2, |a| {
            let (g, x) = (&a.x[0], &a.x[1]);
            Some(x.le(-3.0).select(a.lit(0.0), x.lt(3.0).select(g * (x / 3.0 + 0.5), g)))
        }),
        ("hardshrink", Same, 1, |a| { let l = a.number(1); Some(a.x[0].ge(-&l).and(a.x[0].le(&l)).select(a.lit(0.0), &a.x[0])) }),
        ("hardshrink_backward", Same, 2, |a| { let l = a.number(2); Some(a.x[1].ge(-&l).and(a.x[1].le(&l)).select(a.lit(0.0), &a.x[0])) }),
        ("softshrink", Same, 1, |a| {
            let l = a.number(1);
            let x = &a.x[0];
            a.ty.is_float().then(|| x.gt(&l).select(x - &l, x.lt(-&l).select(x + &l, x * 0.0)))
        }),
        ("softshrink_backward", Same, 2, |a| { let l = a.number(2); Some(a.x[1].ge(-&l).and(a.x[1].le(&l)).select(a.lit(0.0), &a.x[0])) }),
        // --- Others. Losses are in `losses.rs`.
        ("nan_to_num", Same, 1, |a| {
            if integer(a) { return Some(a.x[0].clone()); }
            (a.ty == Ty::F32).then_some(())?;
            let big = f64::from(f32::MAX);
            let nan = if a.scope.has(1) { a.number(1) } else { a.lit(0.0) };
            let high = if a.scope.has(2) { a.number(2) } else { a.lit(big) };
            let low = if a.scope.has(3) { a.number(3) } else { a.lit(-big) };
            let x = &a.x[0];
            let x = x.is_nan().select(nan, x.eq(f64::INFINITY).select(high, x.eq(f64::NEG_INFINITY).select(low, x)));
            Some(x)
        }),
    ]
}

type Choose = fn(&[Arg<'_>]) -> Option<&'static Op>;

fn is_given(args: &[Arg<'_>], arg: usize) -> bool {
    !matches!(args.get(arg), None | Some(Arg::None))
}

/// Operators whose computation depends on which arguments a call has, or whose operands are not the first arguments.
fn table_by_arguments() -> Vec<(&'static str, Choose)> {
    vec![
        ("div divide", |args| {
            Some(if matches!(args.get(2), Some(Arg::Str(_))) { &DIVIDE_ROUNDED } else { &DIVIDE })
        }),
        ("lerp", |_| Some(&LERP)),
        ("clamp clip", |args| match (is_given(args, 1), is_given(args, 2)) {
            (true, true) => Some(&CLAMP),
            (true, false) => Some(&CLAMP_MIN),
            (false, true) => Some(&CLAMP_UPPER),
            (false, false) => None,
        }),
        ("clamp_min", |_| Some(&CLAMP_MIN)),
        ("clamp_max", |_| Some(&CLAMP_MAX)),
        ("where", |args| (args.len() == 3).then_some(&WHERE)),
        ("masked_fill", |_| Some(&MASKED_FILL)),
        ("elu_backward", |_| Some(&ELU_BACKWARD)),
        ("polygamma", |args| match args.first() {
            Some(Arg::Int(0)) => Some(&DIGAMMA),
            Some(Arg::Int(1)) => Some(&TRIGAMMA),
            _ => None,
        }),
        ("copy", |_| Some(&COPY)),
        // If a tensor is the value, PyTorch checks it, so PyTorch's kernel has to run.
        ("fill", |args| (!matches!(args.get(1), Some(Arg::Tensor))).then_some(&COPY)),
        ("zero", |_| Some(&ZERO)),
    ]
}

/// `lerp` with its weight, a number or a tensor, as the third operand.
static LERP: Op = Op::new(Same, FIRST[3], |a| {
    let (s, e, w) = (&a.x[0], &a.x[1], &a.x[2]);
    let d = e - s;
    let weight = matches!(a.scope.args().get(2), Some(Arg::Tensor | Arg::Tensors(_)));
    let one_dtype = a.one_dtype(0..if weight { 3 } else { 2 });
    (a.ty.is_float() && one_dtype).then(|| w.abs().lt(0.5).select(s + w * &d, e - &d * (1.0 - w)))
});

static DIVIDE: Op = Op { exact_scalar: true, ..Op::new(Float, FIRST[2], divide) };
static DIVIDE_ROUNDED: Op = Op { exact_scalar: true, ..Op::new(Same, FIRST[2], divide) };

// PyTorch has no `clamp` of bools.
static CLAMP: Op =
    Op::new(Same, FIRST[3], |a| (a.ty != Ty::Bool).then(|| smaller(&larger(&a.x[0], &a.x[1]), &a.x[2])));
static CLAMP_MIN: Op = Op::new(Same, FIRST[2], lower_bound);
static CLAMP_MAX: Op = Op::new(Same, FIRST[2], upper_bound);
/// `clamp` without a lower bound.
static CLAMP_UPPER: Op = Op::new(Same, &[0, 2], upper_bound);

fn lower_bound(a: &mut Args<'_>) -> Option<E> {
    (a.ty != Ty::Bool).then(|| larger(&a.x[0], &a.x[1]))
}

fn upper_bound(a: &mut Args<'_>) -> Option<E> {
    (a.ty != Ty::Bool).then(|| smaller(&a.x[0], &a.x[1]))
}

/// `elu_backward`: the gradient, and the input or the result.
static ELU_BACKWARD: Op = Op::new(Same, &[0, 5], |a| {
    let result = matches!(a.scope.args().get(4), Some(Arg::Bool(true)));
    let (alpha, scale, input_scale) = (a.number(1), a.number(2), a.number(3));
    let (g, y) = (&a.x[0], &a.x[1]);
    let below = if result {
        g * &input_scale * (y + &(&alpha * &scale))
    } else {
        g * &input_scale * (&alpha * &scale) * (y * &input_scale).exp()
    };
    Some(y.le(0.0).select(below, g * scale))
});

/// `polygamma` of order 0.
static DIGAMMA: Op = Op::new(Float, &[1], |a| Some(a.x[0].f("digamma_")));
/// `polygamma` of order 1, the derivative of `digamma`: reflection below 0.5, six steps of the recurrence, and the
/// asymptotic series (Abramowitz and Stegun 6.4.6, 6.4.7 and 6.4.12).
static TRIGAMMA: Op = Op::new(Float, &[1], |a| {
    const PI: f64 = std::f64::consts::PI;
    (a.ty == Ty::F32).then_some(())?;
    let x = &a.x[0];
    let is_reflected = x.lt(0.5);
    let turns = x - 2.0 * E::un(Un::Floor, 0.5 * x);
    let sine = (turns * PI).f("sin_");
    let mut y = is_reflected.select(1.0 - x, x);
    let mut sum = a.lit(0.0);
    for _ in 0..6 {
        sum = sum + 1.0 / (&y * &y);
        y = y + 1.0;
    }
    let square = 1.0 / (&y * &y);
    let series = 1.0 / 6.0 - &square * (1.0 / 30.0 - &square * (1.0 / 42.0));
    let sum = sum + (1.0 + 0.5 / &y + &square * series) / &y;
    Some(is_reflected.select(PI * PI / (&sine * &sine) - &sum, &sum))
});

const SELECT: Op = Op::new(Same, FIRST[3], |a| Some(a.x[0].cast(Ty::Bool).select(&a.x[1], &a.x[2])));
/// `where`: the condition, followed by the two operands to select from.
static WHERE: Op = Op { reads: Reads::Selected, ..SELECT };
/// `masked_fill`: the mask, the value, and the tensor.
static MASKED_FILL: Op = Op { reads: Reads::Masked, operands: &[1, 2, 0], ..SELECT };

static COPY: Op = Op { reads: Reads::Stored, ..Op::new(Same, &[1], |a| Some(a.x[0].clone())) };
static ZERO: Op = Op { reads: Reads::Stored, ..Op::new(Same, &[], |a| Some(E::lit(a.ty, 0.0))) };
