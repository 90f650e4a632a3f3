//! Random numbers: Philox, with a key that is drawn from the program's generator.
//!
//! The elements of a draw are numbered in row-major order, whatever their strides. Element `e` uses word `e % 4` of
//! the counter `e / 4`, so that a thread that computes four neighbours computes the words of one counter.

use std::f64::consts::{PI, TAU};

use tandem_tracegraph::call::Arg;
use tandem_tracegraph::tensor_meta::Dtype;

use crate::kernel::{Kernel, team};
use crate::lower::{Dims, Lowering, Operand, Source, Spot, dense};
use crate::ops::elementwise;
use crate::ops::types::{broadcast, output_strides, preserved};
use crate::store::{Store, Word};
use tandem_executor::error::Fault;
use tandem_executor::ir::{Bin, E, Mem, Ty, Un};

// These messages are PyTorch's, for values that its kernels refuse.
const NO_PROBABILITY: Fault = Fault::Value("Expected p_in >= 0 && p_in <= 1 to be true, but got false");
const NEGATIVE_STD: Fault = Fault::Value("normal expects all elements of std >= 0.0");
const NO_WEIGHT: Fault = Fault::Value("probability tensor contains either `inf`, `nan` or element < 0");
const NO_DISTRIBUTION: Fault = Fault::Value(
    "invalid multinomial distribution (probability tensor contains either `inf`, `nan` or element < 0, or its sum is <= 0)",
);
const NO_SUM: Fault = Fault::Value("invalid multinomial distribution (sum of probabilities <= 0)");

/// 2^-32, the weight of the last bit of a word that is read as a fraction.
const LAST_BIT: f64 = 1.0 / 4_294_967_296.0;

/// Source of an element's random words.
struct Draw {
    key: (E, E),
    counter: E,
    part: Part,
}

/// Index of an element's word among the four words of its counter.
enum Part {
    Known(u32),
    Computed(E),
}

impl Draw {
    fn words(&self, stream: u32, part: E) -> E {
        let key = self.key.clone();
        E::call("random_part", Ty::U32, [key.0, key.1, self.counter.clone(), E::u32(stream), part])
    }

    /// Returns the element's word of a stream. Streams are independent.
    fn word(&self, stream: u32) -> E {
        match &self.part {
            Part::Known(part) => self.words(stream, E::u32(*part)),
            Part::Computed(part) => self.words(stream, part.clone()),
        }
    }

    /// Returns a uniform number in `(0, 1]`.
    fn positive(&self) -> E {
        positive(&self.word(0))
    }

    /// Returns a standard normal number (Box and Muller): the words of a counter form two pairs, each of which
    /// yields two numbers.
    fn normal(&self) -> E {
        let (radius, angle, odd) = match &self.part {
            Part::Known(part) => (
                self.words(0, E::u32(part & 2)),
                self.words(0, E::u32(part | 1)),
                E::int(Ty::Bool, i64::from(part & 1)),
            ),
            Part::Computed(part) => {
                let bit = |op, mask| E::bin(op, part.clone(), E::u32(mask));
                let (first, second) = (bit(Bin::BitAnd, 2), bit(Bin::BitOr, 1));
                (self.words(0, first), self.words(0, second), bit(Bin::BitAnd, 1).ne(0.0))
            }
        };
        let radius = (positive(&radius).log() * -2.0).sqrt();
        let angle = angle.cast(Ty::F32) * (TAU * LAST_BIT);
        radius * odd.select(angle.f("sin_"), angle.f("cos_"))
    }
}

/// Converts a word to a number in `(0, 1]`. Small numbers keep all their bits.
fn positive(word: &E) -> E {
    (word.cast(Ty::F32) + 0.5) * LAST_BIT
}

/// Converts a word to an exponentially distributed number with rate 1, which is greater than 0.
fn waiting_time(word: &E) -> E {
    (-positive(word).log()).max(2f64.powi(-25))
}

/// Whether a word, as a fraction, is below a probability. All 32 bits of the word count. The result is never true for a
/// probability of 0, and always true for 1.
fn below(word: &E, p: &E) -> E {
    let high = E::bin(Bin::Shr, word.clone(), E::u32(8)).cast(Ty::F32) * 2f64.powi(-24);
    let low = E::bin(Bin::BitAnd, word.clone(), E::u32(255)).cast(Ty::F32) * LAST_BIT;
    (p - high).gt(low)
}

/// Inputs of an element's computation.
struct Point<'l, 'a, 'k> {
    l: &'l Lowering<'a>,
    k: &'k mut Kernel,
    /// Values of the input operands.
    x: Vec<E>,
    /// Whether the element exists; a thread's last elements may be beyond the end.
    inside: E,
    draw: Draw,
}

impl Point<'_, '_, '_> {
    fn number(&mut self, arg: usize, ty: Ty) -> E {
        self.l.number(self.k, arg, ty)
    }

    /// Reports a fault where the condition is false.
    fn require(&mut self, fault: Fault, condition: &E) {
        let outside = self.inside.and(condition.not());
        self.k.fault(fault, outside);
    }
}

/// Launches a kernel that draws. `body` returns the values of `outs` at an element. `ins` are broadcast to the sizes of
/// `outs`.
fn launch(
    l: &mut Lowering<'_>,
    label: &'static str,
    outs: &[&Operand],
    ins: &[(&Operand, Ty)],
    body: impl Fn(&mut Point<'_, '_, '_>) -> Vec<E>,
) -> Option<()> {
    let first = outs.first()?;
    let (n, sizes) = (first.numel(), first.sizes.clone());
    if n == 0 {
        return Some(());
    }
    let ins: Vec<(Operand, Ty)> = ins.iter().map(|(x, ty)| (x.expanded(&sizes), *ty)).collect();
    let fixed = |x: &Operand| !matches!(x.place, Spot::Memory(_));
    let flat =
        outs.iter().all(|o| o.is_contiguous()) && ins.iter().all(|(x, _)| fixed(x) || x.is_contiguous());
    let shape: Dims = if flat { Dims::from_slice(&[n]) } else { sizes };
    let view = |x: &Operand| if flat { x.viewed(&[n], &[1]) } else { x.clone() };

    let mut k = Kernel::new(label);
    let key = l.key(&mut k);
    let sources: Vec<(Source, Ty)> =
        ins.iter().map(|(x, ty)| (l.read_as(&mut k, &view(x), *ty), *ty)).collect();
    let targets: Option<Vec<_>> = outs.iter().map(|o| l.write(&mut k, &view(o))).collect();
    let targets = targets?;
    let each = |l: &Lowering<'_>, k: &mut Kernel, coords: &[E], inside: Option<&E>, draw: Draw| {
        let value = |(source, ty): &(Source, Ty)| match (source, inside) {
            (Source::TensorGeometry(t), None) => k.load(t, coords).cast(*ty),
            (Source::TensorGeometry(t), Some(inside)) => {
                k.load_if(t, coords, inside.clone(), E::lit(t.mem.ty(), 0.0)).cast(*ty)
            }
            (Source::Value(e), _) => e.cast(*ty),
        };
        let x = sources.iter().map(value).collect();
        let inside = inside.cloned().unwrap_or_else(|| E::int(Ty::Bool, 1));
        body(&mut Point { l, k, x, inside, draw })
    };
    if flat {
        k.map(&[n], |k, coords, number| {
            let part = Part::Computed(number % 4u32);
            let draw = Draw { key: key.clone(), counter: number / 4u32, part };
            let values = each(l, k, coords, None, draw);
            // Elements with a fault are not stored.
            let faultless = k.faults.is_empty();
            let stores = targets.iter().zip(values);
            stores.map(|(t, value)| Store { linear: faultless, ..k.store_linear(t, number, value) }).collect()
        });
    } else {
        k.map(&[(n + 3) / 4], |k, _, counter| {
            let count = k.size(n);
            let mut stores: Vec<Store> = Vec::new();
            for part in 0..4 {
                let number = counter * 4u32 + part;
                let inside = number.lt(&count);
                let coords = k.coords(&shape, &number);
                let draw = Draw { key: key.clone(), counter: counter.clone(), part: Part::Known(part) };
                let values = each(l, k, &coords, Some(&inside), draw);
                for (t, value) in targets.iter().zip(values) {
                    stores.push(Store { guard: Some(inside.clone()), ..k.store(t, &coords, value) });
                }
            }
            stores
        });
    }
    l.launch(k)
}

/// Returns the tensor that an op fills in place.
fn filled(l: &mut Lowering<'_>) -> Option<Operand> {
    let to = l.in_place().then(|| l.tensor(0))??;
    l.destination(0, &to.sizes.clone(), &to.strides.clone(), to.dtype)
}

/// Returns the tensor that an op fills in place, if it is a float that is computed in 32 bits.
fn filled_float(l: &mut Lowering<'_>) -> Option<Operand> {
    filled(l).filter(|to| to.mem.ty() == Ty::F32)
}

/// Number of bits of a float's mantissa, with the implicit one.
fn digits(mem: Mem) -> Option<u32> {
    Some(match mem {
        Mem::F16 => 11,
        Mem::Bf16 => 8,
        Mem::F32 => 24,
        Mem::F64 => 53,
        _ => return None,
    })
}

/// `uniform_(self, from, to)`: uses as many random bits as the dtype's mantissa has, so that no fraction is rounded
/// up to 1.
pub fn uniform(l: &mut Lowering<'_>) -> Option<()> {
    let out = filled(l)?;
    let digits = digits(out.mem)?;
    let (from, to) = (l.pin(1)?, l.pin(2)?);
    if !(from <= to && (to - from).is_finite()) {
        return None;
    }
    let ty = out.mem.ty();
    launch(l, "uniform", &[&out], &[], |p| {
        let (from, to) = (p.number(1, ty), p.number(2, ty));
        let word = p.draw.word(0);
        let unit = if ty == Ty::F64 {
            let rest = E::bin(Bin::Shr, p.draw.word(1), E::u32(64 - digits));
            word.cast(ty) * LAST_BIT + rest.cast(ty) * 2f64.powi(-(digits as i32))
        } else {
            E::bin(Bin::Shr, word, E::u32(32 - digits)).cast(ty) * 2f64.powi(-(digits as i32))
        };
        let value = unit * (&to - &from) + &from;
        vec![value.lt(&to).select(value, from)]
    })
}

/// `normal_(self, mean, std)`, `normal.Tensor_float(mean, std)` and so on, `normal.float_float(mean, std, size, ..)`.
pub fn normal(l: &mut Lowering<'_>) -> Option<()> {
    let args = l.call.args;
    if l.in_place() {
        l.within(2, 0.0, f64::MAX)?;
        let out = filled_float(l)?;
        return launch(l, "normal", &[&out], &[], |p| {
            let (mean, std) = (p.number(1, Ty::F32), p.number(2, Ty::F32));
            vec![p.draw.normal() * std + mean]
        });
    }
    if let Some(Arg::Ints(sizes)) = args.get(2) {
        l.within(1, 0.0, f64::MAX)?;
        let sizes = Dims::from_slice(sizes);
        // The overload for `out=` has no dtype argument.
        let dtype = match l.has_out() {
            true => l.tensor(args.len() - 1)?.dtype,
            false => l.dtype(4)?.unwrap_or(l.call.default_dtype),
        };
        let out = l.destination(0, &sizes, &dense(&sizes), dtype)?;
        (out.mem.ty() == Ty::F32).then_some(())?;
        return launch(l, "normal", &[&out], &[], |p| {
            let (mean, std) = (p.number(0, Ty::F32), p.number(1, Ty::F32));
            vec![p.draw.normal() * std + mean]
        });
    }
    // Excludes `normal.out(self, mean, std)`, which has other arguments.
    if !matches!(
        args,
        [Arg::Tensor | Arg::Float(_), Arg::Tensor | Arg::Float(_), Arg::None | Arg::Generator(_), ..]
    ) {
        return None;
    }
    let (mean, std) = (l.operand(0)?, l.operand(1)?);
    let given: Vec<&Operand> =
        [&mean, &std].into_iter().filter(|x| !matches!(x.place, Spot::Number(..))).collect();
    let dtype = given.first()?.dtype;
    if given.iter().any(|x| x.dtype != dtype) || given[0].mem.ty() != Ty::F32 {
        return None;
    }
    let sizes = broadcast(given.iter().map(|x| &x.sizes[..]))?;
    let known = matches!(std.place, Spot::Number(..));
    if known {
        l.within(1, 0.0, f64::MAX)?;
    }
    let out = l.destination(0, &sizes, &dense(&sizes), dtype)?;
    launch(l, "normal", &[&out], &[(&mean, Ty::F32), (&std, Ty::F32)], |p| {
        let (mean, std) = (p.x[0].clone(), p.x[1].clone());
        if !known {
            p.require(NEGATIVE_STD, &std.ge(0.0));
        }
        vec![p.draw.normal() * std + mean]
    })
}

/// Returns the smallest and the largest whole number that `random_` draws for a dtype.
fn whole(mem: Mem) -> (i64, i64) {
    match mem {
        Mem::Bool => (0, 1),
        Mem::U8 => (0, 255),
        Mem::I8 => (-128, 127),
        Mem::I16 => (-(1 << 15), (1 << 15) - 1),
        Mem::I32 => (i64::from(i32::MIN), i64::from(i32::MAX)),
        Mem::I64 => (i64::MIN, i64::MAX),
        Mem::F16 => (-(1 << 11), 1 << 11),
        Mem::Bf16 => (-(1 << 8), 1 << 8),
        Mem::F32 => (-(1 << 24), 1 << 24),
        Mem::F64 => (-(1 << 53), 1 << 53),
    }
}

/// `random_(self)`, `random_.to(self, to)`, `random_.from(self, from, to)`: whole numbers from `from` or 0 on,
/// below `to`.
pub fn random(l: &mut Lowering<'_>) -> Option<()> {
    let out = filled(l)?;
    let (least, greatest) = whole(out.mem);
    let (from, last) = match l.call.args {
        [_, Arg::Int(from), Arg::Int(to), _] => (*from, to.checked_sub(1)?),
        [_, Arg::Int(from), Arg::None, _] => (*from, greatest),
        [_, Arg::Int(to), _] => (0, to.checked_sub(1)?),
        [_, _] => (0, greatest),
        _ => return None,
    };
    for arg in 1..l.call.args.len() {
        if let Arg::Int(_) = l.call.args[arg] {
            l.pin(arg)?;
        }
    }
    if from > last || from < least || last > greatest {
        return None;
    }
    // The number of whole numbers, as an unsigned integer. 0 stands for 2^64.
    let count = last.wrapping_sub(from).wrapping_add(1) as u64;
    let ty = out.mem.ty();
    let long = |k: &mut Kernel, bits: u64| {
        k.value(Ty::I64, |upper| Word::Fixed((bits >> if upper { 32 } else { 0 }) as u32))
    };
    let wide = |draw: &Draw| {
        let high = E::bin(Bin::Shl, draw.word(0).cast(Ty::I64), E::u32(32));
        E::bin(Bin::BitOr, high, draw.word(1).cast(Ty::I64))
    };
    launch(l, "random", &[&out], &[], |p| {
        let Some(range) = u32::try_from(count).ok().filter(|c| *c > 0) else {
            // If there are fewer than 2^63 whole numbers, the result is the remainder of 63 random bits. Otherwise, 64
            // random bits are taken, and values beyond the count begin again at the first number. Comparisons are
            // signed, so all numbers are 2^63 less here.
            let bits = wide(&p.draw);
            let Some(range) = i64::try_from(count).ok().filter(|c| *c > 0) else {
                if count == 0 {
                    return vec![bits.cast(ty)];
                }
                let half = 1 << 63;
                let [beyond, all, start] =
                    [count ^ half, count, from as u64 ^ half].map(|bits| long(p.k, bits));
                let number = bits.ge(&beyond).select(&bits - all, bits);
                return vec![(number + start).cast(ty)];
            };
            let range = long(p.k, range as u64);
            let start = long(p.k, from as u64);
            let positive = E::bin(Bin::BitAnd, bits, E::int(Ty::I64, i64::MAX));
            return vec![(positive % range + start).cast(ty)];
        };
        let size = p.k.size(i64::from(range));
        let value = if range <= 1 << 16 {
            E::call("u32_mul_high", Ty::U32, [p.draw.word(0), size])
        } else {
            E::call("u32_below", Ty::U32, [p.draw.word(0), p.draw.word(1), size])
        };
        if ty == Ty::I64 {
            let start = long(p.k, from as u64);
            return vec![value.cast(ty) + start];
        }
        let start = p.k.word(Ty::I32, Word::Fixed(from as u32));
        vec![(value.cast(Ty::I32) + start).cast(ty)]
    })
}

/// `bernoulli(self)`, whose elements are probabilities; `bernoulli.p(self, p)`, `bernoulli_.float(self, p)`,
/// `bernoulli_.Tensor(self, p)` and the overloads with `out=`.
pub fn bernoulli(l: &mut Lowering<'_>) -> Option<()> {
    let x = l.tensor(0)?;
    let p = match l.call.args.get(1)? {
        Arg::Float(_) => {
            l.within(1, 0.0, 1.0)?;
            l.operand(1)?
        }
        Arg::Tensor => l.tensor(1)?,
        _ => x.clone(),
    };
    if !p.dtype.is_floating() || broadcast([&x.sizes[..], &p.sizes[..]])? != x.sizes {
        return None;
    }
    let out = l.destination(0, &x.sizes, &dense(&x.sizes), x.dtype)?;
    let known = matches!(p.place, Spot::Number(..));
    launch(l, "bernoulli", &[&out], &[(&p, Ty::F32)], |point| {
        let p = point.x[0].clone();
        if !known {
            point.require(NO_PROBABILITY, &p.ge(0.0).and(p.le(1.0)));
        }
        vec![below(&point.draw.word(0), &p)]
    })
}

/// `exponential_(self, lambd)`.
pub fn exponential(l: &mut Lowering<'_>) -> Option<()> {
    l.within(1, f64::MIN_POSITIVE, f64::MAX)?;
    let out = filled_float(l)?;
    launch(l, "exponential", &[&out], &[], |p| {
        let rate = p.number(1, Ty::F32);
        vec![waiting_time(&p.draw.word(0)) / rate]
    })
}

/// `geometric_(self, p)`: number of tosses up to the first success.
pub fn geometric(l: &mut Lowering<'_>) -> Option<()> {
    l.within(1, f64::MIN_POSITIVE, 1.0 - f64::EPSILON)?;
    let out = filled(l)?;
    if matches!(out.mem, Mem::F64 | Mem::Bool) {
        return None;
    }
    launch(l, "geometric", &[&out], &[], |p| {
        let failure = (-p.number(1, Ty::F32)).f("log1p_");
        let tosses = E::un(Un::Ceil, p.draw.positive().log() / failure);
        vec![tosses.max(1.0)]
    })
}

/// `log_normal_(self, mean, std)`.
pub fn log_normal(l: &mut Lowering<'_>) -> Option<()> {
    l.within(2, f64::MIN_POSITIVE, f64::MAX)?;
    let out = filled_float(l)?;
    launch(l, "log_normal", &[&out], &[], |p| {
        let (mean, std) = (p.number(1, Ty::F32), p.number(2, Ty::F32));
        vec![(p.draw.normal() * std + mean).exp()]
    })
}

/// `cauchy_(self, median, sigma)`.
pub fn cauchy(l: &mut Lowering<'_>) -> Option<()> {
    l.within(2, f64::MIN_POSITIVE, f64::MAX)?;
    let out = filled_float(l)?;
    launch(l, "cauchy", &[&out], &[], |p| {
        let (median, sigma) = (p.number(1, Ty::F32), p.number(2, Ty::F32));
        vec![((p.draw.positive() - 0.5) * PI).f("tan_") * sigma + median]
    })
}

/// `native_dropout(input, p, train)`: returns the result, and the mask of elements that are kept.
pub fn native_dropout(l: &mut Lowering<'_>) -> Option<()> {
    let x = l.tensor(0)?;
    let ty = x.mem.ty();
    if !x.dtype.is_floating() || x.numel() == 0 {
        return None;
    }
    let strides = preserved(&x);
    let out = l.destination(0, &x.sizes, &strides, x.dtype)?;
    let mask = l.destination(1, &x.sizes, &strides, Dtype::BOOL)?;
    if !l.flag(2, true) {
        let copied = |x: &[E]| Some(vec![x[0].clone(), E::int(Ty::Bool, 1)]);
        return elementwise::launch(l, "native_dropout", &[&out, &mask], &[(&x, ty)], |_, _, x, _| copied(x));
    }
    l.within(1, 0.0, 1.0)?;
    launch(l, "native_dropout", &[&out, &mask], &[(&x, ty)], |p| {
        let stay = 1.0 - p.number(1, Ty::F32);
        let scale = stay.eq(0.0).select(0.0, 1.0 / &stay);
        let stays = below(&p.draw.word(0), &stay);
        vec![&p.x[0] * stays.cast(ty) * scale.cast(ty), stays]
    })
}

/// `native_dropout_backward(grad_output, mask, scale)`.
pub fn native_dropout_backward(l: &mut Lowering<'_>) -> Option<()> {
    let (grad, mask) = (l.tensor(0)?, l.tensor(1)?);
    if mask.dtype != Dtype::BOOL || !grad.dtype.is_floating() || grad.sizes != mask.sizes {
        return None;
    }
    let ty = grad.mem.ty();
    let strides = output_strides(&grad.sizes, &[grad.clone(), mask.clone()]);
    let out = l.destination(0, &grad.sizes, &strides, grad.dtype)?;
    elementwise::launch(l, "native_dropout_backward", &[&out], &[(&grad, ty), (&mask, ty)], |l, k, x, _| {
        let scale = l.number(k, 2, ty);
        Some(vec![&x[0] * &x[1] * scale])
    })
}

/// `rrelu_with_noise(self, noise, lower, upper, training)`: the slope for values below 0 is drawn and written to
/// `noise`.
pub fn rrelu_with_noise(l: &mut Lowering<'_>) -> Option<()> {
    let (x, noise) = (l.tensor(0)?, l.tensor(1)?);
    let training = l.flag(4, false);
    let plain =
        x.is_contiguous() && noise.is_contiguous() && x.sizes == noise.sizes && x.dtype == noise.dtype;
    if training && !plain || x.mem.ty() != Ty::F32 || l.call.args.len() > 6 {
        return None;
    }
    let (lower, upper) = (l.pin(2)?, l.pin(3)?);
    if lower > upper {
        return None;
    }
    let out = if l.in_place() {
        l.returns(l.flat(0));
        x.clone()
    } else {
        l.new_storage(&x.sizes, &dense(&x.sizes), x.dtype)?
    };
    if !training {
        return elementwise::launch(l, "rrelu", &[&out], &[(&x, Ty::F32)], |l, k, x, _| {
            let slope = (l.number(k, 2, Ty::F32) + l.number(k, 3, Ty::F32)) * 0.5;
            Some(vec![x[0].gt(0.0).select(&x[0], &x[0] * slope)])
        });
    }
    launch(l, "rrelu_with_noise", &[&out, &noise], &[(&x, Ty::F32)], |p| {
        let (lower, upper) = (p.number(2, Ty::F32), p.number(3, Ty::F32));
        let x = p.x[0].clone();
        let slope = p.draw.positive() * (upper - &lower) + lower;
        let slope = x.le(0.0).select(slope, 1.0);
        vec![x * &slope, slope]
    })
}

/// `rrelu_with_noise_backward(grad_output, self, noise, lower, upper, training, self_is_result)`.
pub fn rrelu_with_noise_backward(l: &mut Lowering<'_>) -> Option<()> {
    let (grad, x, noise) = (l.tensor(0)?, l.tensor(1)?, l.tensor(2)?);
    let same = |o: &Operand| o.sizes == grad.sizes && o.dtype == grad.dtype;
    if !same(&x) || !same(&noise) || grad.mem.ty() != Ty::F32 {
        return None;
    }
    let drawn = l.flag(5, false) && l.pin(4)? - l.pin(3)? > 1e-6;
    let other = if drawn { noise } else { x };
    let strides = output_strides(&grad.sizes, &[other.clone(), grad.clone()]);
    let out = l.destination(0, &grad.sizes, &strides, grad.dtype)?;
    let ins = [(&grad, Ty::F32), (&other, Ty::F32)];
    elementwise::launch(l, "rrelu_with_noise_backward", &[&out], &ins, |l, k, x, _| {
        let (grad, other) = (&x[0], &x[1]);
        if drawn {
            return Some(vec![grad * other]);
        }
        let slope = (l.number(k, 3, Ty::F32) + l.number(k, 4, Ty::F32)) * 0.5;
        Some(vec![other.gt(0.0).select(grad, grad * slope)])
    })
}

/// Largest `n` for which `randperm` sorts random keys. For larger `n`, each element of a pseudorandom permutation is
/// computed independently.
const SORTED: i64 = 1024;

/// `randperm.generator_out(n, generator, out)` and `randperm.out(n, out)`.
pub fn randperm(l: &mut Lowering<'_>) -> Option<()> {
    let arg = l.call.args.iter().position(|a| *a == Arg::Tensor)?;
    let (n, given) = (l.int(0)?, l.tensor(arg)?);
    if given.sizes[..] != [n] || n > whole(given.mem).1 || n > i64::from(i32::MAX) || given.mem == Mem::Bool {
        return None;
    }
    let out = l.destination(0, &[n], &given.strides, given.dtype)?;
    if n == 0 {
        return Some(());
    }
    let ty = out.mem.ty();
    if n > SORTED {
        let bits = i64::from(64 - (n as u64 - 1).leading_zeros());
        let mut k = Kernel::new("randperm");
        let (low, high) = l.key(&mut k);
        let t = l.write(&mut k, &out)?;
        let (count, bits) = (k.size(n), k.size(bits));
        k.map(&[n], |k, coords, number| {
            let place = E::call("shuffled", Ty::U32, [low, high, number.clone(), count, bits]);
            vec![k.store(&t, coords, place.cast(ty))]
        });
        return l.launch(k);
    }
    let keys = l.temp(&[n], Dtype::INT64)?;
    launch(l, "random keys", &[&keys], &[], |p| {
        let high = E::bin(Bin::Shl, p.draw.word(0).cast(Ty::I64), E::u32(32));
        vec![E::bin(Bin::BitOr, high, p.draw.word(1).cast(Ty::I64))]
    })?;
    let mut k = Kernel::new("randperm");
    let Source::TensorGeometry(keys) = l.read(&mut k, &keys) else { return None };
    let t = l.write(&mut k, &out)?;
    let count = k.size(n);
    k.map(&[n], |k, coords, number| {
        let own = k.load(&keys, coords);
        let [rank] = k.fold(count, [E::u32(0)], |k, other, [rank]| {
            let key = k.load(&keys, std::slice::from_ref(other));
            let before = key.lt(&own).or(key.eq(&own).and(other.lt(number)));
            [rank + before.cast(Ty::U32)]
        });
        vec![k.store(&t, &[rank], number.cast(ty))]
    });
    l.launch(k)
}

/// Largest number of categories for which sampling without replacement compares all categories with each other.
const COMPARED: i64 = 8192;

/// `multinomial(self, num_samples, replacement)`.
pub fn multinomial(l: &mut Lowering<'_>) -> Option<()> {
    let (weights, samples) = (l.tensor(0)?, l.int(1)?);
    let replaced = l.flag(2, false);
    let (rows, categories) = match weights.sizes[..] {
        [c] => (1, c),
        [r, c] => (r, c),
        _ => return None,
    };
    let possible = samples > 0 && (replaced || samples <= categories) && (1..=1 << 24).contains(&categories);
    if !possible || !weights.dtype.is_floating() || rows == 0 {
        return None;
    }
    let mut sizes: Dims = weights.sizes.clone();
    if let Some(last) = sizes.last_mut() {
        *last = samples;
    }
    let out = l.destination(0, &sizes, &dense(&sizes), Dtype::INT64)?;
    if out.dtype != Dtype::INT64 {
        return None;
    }
    let pair = |x: &Operand, columns: i64| match x.strides[..] {
        [s] => x.viewed(&[1, columns], &[0, s]),
        _ => x.clone(),
    };
    let (weights, out) = (pair(&weights, categories), pair(&out, samples));
    match (samples, replaced) {
        (1, _) => sample_once(l, &weights, &out),
        (_, true) => sample_replaced(l, &weights, &out),
        _ if categories <= COMPARED => sample_apart(l, &weights, &out),
        _ => None,
    }
}

/// Whether a weight is invalid: negative, infinite or NaN.
fn no_weight(w: &E) -> E {
    w.ge(0.0).and(w.lt(f64::INFINITY)).not()
}

/// Samples one category per row: the category with the shortest waiting time, if each arrives at the rate of its
/// weight.
fn sample_once(l: &mut Lowering<'_>, weights: &Operand, out: &Operand) -> Option<()> {
    let (rows, categories) = (weights.sizes[0], weights.sizes[1]);
    let mut k = Kernel::new("multinomial");
    let (low, high) = l.key(&mut k);
    let Source::TensorGeometry(w) = l.read(&mut k, weights) else { return None };
    let t = l.write(&mut k, out)?;
    k.rows(rows, categories, team(categories, false), |r, row| {
        let width = r.k.size(categories);
        let init = [E::lit(Ty::F32, -1.0), E::u32(0), E::u32(0)];
        let [best, chosen, bad] = r.reduce(
            init,
            |k, j, [best, chosen, bad]| {
                let weight = k.load(&w, &[row.clone(), j.clone()]).cast(Ty::F32);
                let word = E::call("random_word", Ty::U32, [low, high, row * width + j]);
                let rate = &weight / waiting_time(&word);
                let better = rate.gt(&best);
                let bad = E::bin(Bin::BitOr, bad, no_weight(&weight).cast(Ty::U32));
                [better.select(rate, best), better.select(j, chosen), bad]
            },
            |[best, chosen, bad], [other, theirs, worse]| {
                let better = other.gt(&best).or(other.eq(&best).and(theirs.lt(&chosen)));
                [better.select(other, best), better.select(theirs, chosen), E::bin(Bin::BitOr, bad, worse)]
            },
        );
        r.k.fault(NO_DISTRIBUTION, bad.ne(0.0).or(best.le(0.0)));
        r.once(|k| vec![k.store(&t, &[row.clone(), E::u32(0)], chosen.cast(Ty::I64))]);
    });
    l.launch(k)
}

/// Samples with replacement by inverting the cumulative distribution in two steps: the sums of chunks, then the
/// weights of a chunk.
fn sample_replaced(l: &mut Lowering<'_>, weights: &Operand, out: &Operand) -> Option<()> {
    let (rows, categories, samples) = (weights.sizes[0], weights.sizes[1], out.sizes[1]);
    let chunk = (categories as f64).sqrt().ceil() as i64;
    let chunks = (categories + chunk - 1) / chunk;
    let sums = l.temp(&[rows, chunks], Dtype::FLOAT32)?;

    let mut k = Kernel::new("multinomial sums");
    let Source::TensorGeometry(w) = l.read(&mut k, weights) else { return None };
    let t = l.write(&mut k, &sums)?;
    let (size, count) = (k.size(chunk), k.size(categories));
    k.map(&[rows, chunks], |k, at, _| {
        let init = [E::lit(Ty::F32, 0.0), E::u32(0)];
        let [sum, bad] = k.fold(size.clone(), init, |k, i, [sum, bad]| {
            let j = &at[1] * &size + i;
            let inside = j.lt(&count);
            let weight = k.load_if(&w, &[at[0].clone(), j], inside, E::lit(w.mem.ty(), 0.0)).cast(Ty::F32);
            [sum + &weight, E::bin(Bin::BitOr, bad, no_weight(&weight).cast(Ty::U32))]
        });
        k.fault(NO_WEIGHT, bad.ne(0.0));
        vec![k.store(&t, at, sum)]
    });
    l.launch(k)?;

    let mut k = Kernel::new("multinomial");
    let (low, high) = l.key(&mut k);
    let Source::TensorGeometry(w) = l.read(&mut k, weights) else { return None };
    let Source::TensorGeometry(sums) = l.read(&mut k, &sums) else { return None };
    let t = l.write(&mut k, out)?;
    let (size, count, parts) = (k.size(chunk), k.size(categories), k.size(chunks));
    k.map(&[rows, samples], |k, at, number| {
        let zero = E::lit(Ty::F32, 0.0);
        let [total] = k.fold(parts.clone(), [zero.clone()], |k, i, [sum]| {
            [sum + k.load(&sums, &[at[0].clone(), i.clone()])]
        });
        k.fault(NO_SUM, total.gt(0.0).not());
        let word = E::call("random_word", Ty::U32, [low, high, number.clone()]);
        let mark = E::bin(Bin::Shr, word, E::u32(8)).cast(Ty::F32) * 2f64.powi(-24) * &total;
        // The sample is the last category with a positive weight whose share of the cumulative sum begins at or before
        // the mark.
        let reached = |sum: &E, weight: &E| weight.gt(0.0).and(sum.le(&mark));
        let init = [zero, E::u32(0), E::lit(Ty::F32, 0.0)];
        let [_, part, start] = k.fold(parts, init, |k, i, [sum, part, start]| {
            let weight = k.load(&sums, &[at[0].clone(), i.clone()]);
            let here = reached(&sum, &weight);
            [&sum + &weight, here.select(i, part), here.select(&sum, start)]
        });
        let first = part * &size;
        let [_, chosen] = k.fold(size.clone(), [start, first.clone()], |k, i, [sum, chosen]| {
            let j = &first + i;
            let inside = j.lt(&count);
            let weight =
                k.load_if(&w, &[at[0].clone(), j.clone()], inside, E::lit(w.mem.ty(), 0.0)).cast(Ty::F32);
            let here = reached(&sum, &weight);
            [&sum + &weight, here.select(j, chosen)]
        });
        vec![k.store(&t, at, chosen.cast(Ty::I64))]
    });
    l.launch(k)
}

/// Samples without replacement: the first categories to arrive, if each arrives at the rate of its weight.
fn sample_apart(l: &mut Lowering<'_>, weights: &Operand, out: &Operand) -> Option<()> {
    let (rows, categories, samples) = (weights.sizes[0], weights.sizes[1], out.sizes[1]);
    let rates = l.temp(&[rows, categories], Dtype::FLOAT32)?;
    launch(l, "multinomial rates", &[&rates], &[(weights, Ty::F32)], |p| {
        let weight = p.x[0].clone();
        p.require(NO_WEIGHT, &no_weight(&weight).not());
        vec![weight / waiting_time(&p.draw.word(0))]
    })?;
    let mut k = Kernel::new("multinomial");
    let Source::TensorGeometry(rates) = l.read(&mut k, &rates) else { return None };
    let t = l.write(&mut k, out)?;
    let (count, limit) = (k.size(categories), k.size(samples));
    k.map(&[rows, categories], |k, at, _| {
        let own = k.load(&rates, at);
        let [rank] = k.fold(count, [E::u32(0)], |k, other, [rank]| {
            let rate = k.load(&rates, &[at[0].clone(), other.clone()]);
            let before = rate.gt(&own).or(rate.eq(&own).and(other.lt(&at[1])));
            [rank + before.cast(Ty::U32)]
        });
        k.fault(NO_SUM, rank.eq(0.0).and(own.le(0.0)));
        let guard = Some(rank.lt(limit));
        vec![Store { guard, ..k.store(&t, &[at[0].clone(), rank], at[1].cast(Ty::I64)) }]
    });
    l.launch(k)
}
