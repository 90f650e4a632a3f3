//! Normalizations: layer, group and batch norm, and their derivatives.
//!
//! Layer norm is one kernel with a team of threads per row, unless rows are few and long. In that case, and for the
//! other norms, a reduction that fills the device for any shape computes the statistics, and a point-wise kernel
//! uses them.

use tandem_tracegraph::call::Arg;
use tandem_tracegraph::tensor_meta::Dtype;

use crate::kernel::{Kernel, held, team};
use crate::lower::{Dims, Lowering, Operand, Source, dense};
use crate::ops::elementwise;
use crate::ops::elementwise::coalesce;
use crate::ops::reduce::{Accumulate, Operands, Space, launch, welford};
use crate::ops::types::suggested;
use tandem_executor::ir::{E, Ty};

/// Returns the dtype of parameters and statistics, or `None` if PyTorch rejects the combination of dtypes.
fn parameter_dtype<'o>(
    x: &Operand,
    parameters: impl IntoIterator<Item = &'o Option<Operand>>,
) -> Option<Dtype> {
    let mut given = parameters.into_iter().flatten().map(|p| p.dtype);
    let dtype = given.next().unwrap_or(x.dtype);
    let half = matches!(x.dtype, Dtype::FLOAT16 | Dtype::BFLOAT16);
    let fits = dtype == x.dtype || half && dtype == Dtype::FLOAT32;
    (x.dtype.is_floating() && fits && given.all(|d| d == dtype)).then_some(dtype)
}

/// Dtype in which statistics are computed.
fn computed(x: &Operand) -> Dtype {
    if x.mem.ty() == Ty::F64 { Dtype::FLOAT64 } else { Dtype::FLOAT32 }
}

/// Returns the output mask, an argument that says for each output whether it is requested.
fn mask<const N: usize>(l: &Lowering<'_>, arg: usize) -> Option<[bool; N]> {
    match l.call.args.get(arg)? {
        Arg::Bools(bits) if bits.len() == N => Some(std::array::from_fn(|i| bits[i] != 0)),
        _ => None,
    }
}

/// Mean and reciprocal standard deviation of each row.
struct Statistics {
    mean: Operand,
    rstd: Operand,
}

/// Weight and bias, or their gradients. `None` stands for an absent one.
struct Parameters {
    weight: Option<Operand>,
    bias: Option<Operand>,
}

impl Parameters {
    /// The weight and the bias that are present.
    fn present(&self) -> impl Iterator<Item = &Operand> {
        self.weight.iter().chain(&self.bias)
    }
}

/// Operands of a backward pass. All have the sizes of `x`.
struct Backward<'o> {
    /// Gradient of the output.
    grad: &'o Operand,
    x: &'o Operand,
    statistics: &'o Statistics,
    weight: Option<&'o Operand>,
}

/// Terms that are subtracted from each member's gradient: `shift`, and `slope` times the member's deviation.
struct Losses {
    shift: Operand,
    slope: Operand,
}

/// What the weight multiplies in a backward pass.
#[derive(Clone, Copy, PartialEq)]
enum Weighted {
    /// The gradient of the output.
    Gradient,
    /// The result.
    Result,
}

fn inverse_root(k: &mut Kernel, variance: E, eps: usize) -> E {
    let eps = k.number(eps, variance.ty());
    1.0 / (variance + eps).sqrt()
}

/// `(x - mean) * rstd * weight + bias`.
fn normalized(x: &E, mean: &E, rstd: &E, weight: Option<&E>, bias: Option<&E>) -> E {
    let y = (x - mean) * rstd;
    let y = weight.map_or(y.clone(), |w| y * w);
    bias.map_or(y.clone(), |b| y + b)
}

/// Launches the point-wise part of a forward pass. All operands are expanded to the output's sizes.
fn apply(
    l: &mut Lowering<'_>,
    x: &Operand,
    statistics: &Statistics,
    parameters: &Parameters,
    out: &Operand,
) -> Option<()> {
    let ty = x.mem.ty();
    let Statistics { mean, rstd } = statistics;
    let ins: Vec<(&Operand, Ty)> =
        [x, mean, rstd].into_iter().chain(parameters.present()).map(|x| (x, ty)).collect();
    let (weighted, biased) = (parameters.weight.is_some(), parameters.bias.is_some());
    elementwise::launch(l, "normalize", &[out], &ins, |_, _, v, _| {
        let weight = weighted.then(|| &v[3]);
        let bias = if biased { v.last() } else { None };
        Some(vec![normalized(&v[0], &v[1], &v[2], weight, bias)])
    })
}

/// `(dy - shift - deviation * slope) * rstd`.
fn input_gradient(dy: E, deviation: E, [shift, slope]: [&E; 2], rstd: &E) -> E {
    (dy - shift - deviation * slope) * rstd
}

/// Launches the point-wise part of a backward pass, see [`input_gradient`]. `weighted` is what the weight multiplies.
fn apply_backward(
    l: &mut Lowering<'_>,
    label: &'static str,
    given: &Backward<'_>,
    losses: &Losses,
    weighted: Weighted,
    out: &Operand,
) -> Option<()> {
    let Backward { grad, x, statistics: Statistics { mean, rstd }, weight } = *given;
    let Losses { shift, slope } = losses;
    let ty = x.mem.ty();
    let ins: Vec<(&Operand, Ty)> =
        [grad, x, mean, rstd, shift, slope].into_iter().chain(weight).map(|x| (x, ty)).collect();
    elementwise::launch(l, label, &[out], &ins, |_, _, v, _| {
        let weigh = |value: E, of: Weighted| match v.get(6) {
            Some(weight) if of == weighted => value * weight,
            _ => value,
        };
        let dy = weigh(v[0].clone(), Weighted::Gradient);
        let dx = input_gradient(dy, &v[1] - &v[2], [&v[4], &v[5]], &v[3]);
        Some(vec![weigh(dx, Weighted::Result)])
    })
}

/// Computes the statistics of each row into `saved`. Returns the statistics in the dtype of the computation.
fn statistics(
    l: &mut Lowering<'_>,
    space: &Space,
    x: &Operand,
    saved: &Statistics,
    eps: usize,
) -> Option<Statistics> {
    let ty = x.mem.ty();
    let exact = computed(x);
    let members = space.members();
    let mut outs = vec![saved.mean.clone(), saved.rstd.clone()];
    if saved.mean.dtype != exact {
        for _ in 0..2 {
            let temp = l.temp(&space.result(true), exact)?;
            outs.push(space.spread(&temp));
        }
    }
    let refs: Vec<&Operand> = outs.iter().collect();
    let operands = Operands { ins: &[x], outs: &refs, also: &[] };
    launch(l, "moments", space, operands, &welford(ty), &|_, k, [mean, m2, _], _| {
        let variance = m2 / k.size(members).cast(ty);
        let rstd = inverse_root(k, variance, eps);
        [mean, rstd].into_iter().cycle().take(refs.len()).collect()
    })?;
    let rstd = outs.pop()?;
    Some(Statistics { mean: outs.pop()?, rstd })
}

/// Returns the step that adds `dy` to one sum and `dy * (x - mean)` to another. `dy` is the gradient, times the weight if
/// there is one.
fn gradient_sums(ty: Ty, weighted: bool) -> impl Fn(&mut Kernel, [E; 2], &[E], &E) -> [E; 2] {
    move |_, [sum, dot], v, _| {
        let dy = v[0].cast(ty);
        let dy = if weighted { dy * v[3].cast(ty) } else { dy };
        let deviation = v[1].cast(ty) - v[2].cast(ty);
        [sum + &dy, dot + dy * deviation]
    }
}

fn both([a, b]: [E; 2], [c, d]: [E; 2]) -> [E; 2] {
    [a + c, b + d]
}

// --- Layer norm -----------------------------------------------------------------------------------------

/// Rows over the leading dimensions, with members over the trailing ones, and the operands' strides along both.
struct NormRows {
    kept: Dims,
    members: Dims,
    count: i64,
    len: i64,
    strides: Vec<Dims>,
}

impl NormRows {
    /// The rows of operands that all have the sizes of the first one.
    fn new(leading: usize, operands: &[&Operand]) -> NormRows {
        let part = |range: std::ops::Range<usize>| {
            let of = |x: &Operand| x.viewed(&x.sizes[range.clone()], &x.strides[range.clone()]);
            let views: Vec<Operand> = operands.iter().map(|x| of(x)).collect();
            coalesce(&views[0].sizes.clone(), &views.iter().collect::<Vec<_>>())
        };
        let (kept, outer) = part(0..leading);
        let (members, inner) = part(leading..operands[0].ndim());
        let strides = outer.iter().zip(&inner).map(|(o, i)| o.iter().chain(i).copied().collect()).collect();
        NormRows { count: kept.iter().product(), len: members.iter().product(), kept, members, strides }
    }

    fn view(&self, x: &Operand, n: usize) -> Operand {
        let sizes: Dims = self.kept.iter().chain(&self.members).copied().collect();
        x.viewed(&sizes, &self.strides[n])
    }

    /// Whether members are adjacent in operand `n`.
    fn side_by_side(&self, n: usize) -> bool {
        self.members.len() == 1 && self.strides[n].last() == Some(&1)
    }

    fn coords(&self, k: &mut Kernel, row: &[E], member: &E) -> Vec<E> {
        let mut coords = row.to_vec();
        coords.extend(k.coords(&self.members, member));
        coords
    }

    /// Whether rows are few and long, so that one team per row would leave most of the device idle.
    fn few(&self) -> bool {
        self.count * 256 < 1 << 14 && self.len >= 1 << 15
    }
}

/// Layer norm over the trailing dimensions of `x`. Parameters are expanded to the sizes of `x`.
struct Layer {
    x: Operand,
    space: Space,
    leading: usize,
    normalized: Dims,
}

impl Layer {
    fn of(l: &Lowering<'_>, x: Operand, shape: usize) -> Option<Layer> {
        let normalized = l.ints(shape)?;
        let leading = x.ndim().checked_sub(normalized.len())?;
        if normalized.is_empty() || x.sizes[leading..] != normalized[..] || x.numel() == 0 {
            return None;
        }
        let space = Space::new(&x.sizes, (0..x.ndim()).map(|d| d >= leading).collect());
        Some(Layer { x, space, leading, normalized })
    }

    /// Expands a parameter to the sizes of `x`. The outer `None` means that its sizes do not fit.
    fn parameter(&self, p: &Option<Operand>) -> Option<Option<Operand>> {
        let Some(p) = p else { return Some(None) };
        (p.sizes == self.normalized).then(|| Some(p.expanded(&self.x.sizes)))
    }
}

/// `native_layer_norm(input, normalized_shape, weight, bias, eps)`.
pub fn layer_norm(l: &mut Lowering<'_>) -> Option<()> {
    let layer = Layer::of(l, l.tensor(0)?, 1)?;
    let (weight, bias) = (l.optional(2)?, l.optional(3)?);
    let dtype = parameter_dtype(&layer.x, [&weight, &bias])?;
    let parameters = Parameters { weight: layer.parameter(&weight)?, bias: layer.parameter(&bias)? };
    let Layer { x, space, leading, .. } = &layer;
    let ty = x.mem.ty();
    let out = l.new_storage(&x.sizes, &dense(&x.sizes), x.dtype)?;
    let sizes = space.result(true);
    let mut statistic = || l.new_storage(&sizes, &dense(&sizes), dtype).map(|s| space.spread(&s));
    let saved = Statistics { mean: statistic()?, rstd: statistic()? };

    let mut operands = vec![x, &out, &saved.mean, &saved.rstd];
    operands.extend(parameters.present());
    let rows = NormRows::new(*leading, &operands);
    if rows.few() {
        let statistics = statistics(l, space, x, &saved, 4)?;
        return apply(l, x, &statistics, &parameters, &out);
    }
    let mut k = Kernel::new("layer_norm");
    let source = l.read(&mut k, &rows.view(x, 0));
    let [out, mean, rstd] = [1, 2, 3].map(|n| l.write(&mut k, &rows.view(operands[n], n)));
    let (out, mean, rstd) = (out?, mean?, rstd?);
    let (weighted, biased) = (parameters.weight.is_some(), parameters.bias.is_some());
    let parameters: Vec<Source> =
        (4..operands.len()).map(|n| l.read(&mut k, &rows.view(operands[n], n))).collect();
    let team = team(rows.len, false);
    k.rows(rows.count, rows.len, team, |r, row| {
        let row = r.k.coords(&rows.kept, row);
        let value = |k: &mut Kernel, j: &E| {
            let coords = rows.coords(k, &row, j);
            (source.at(k, &coords), coords)
        };
        let len = r.k.size(rows.len).cast(ty);
        let (average, m2) = if held(rows.len, team) > 0 && (0..2).all(|n| rows.side_by_side(n)) {
            let average = r.sum(ty, |k, j| value(k, j).0.cast(ty)) / &len;
            let m2 = r.sum(ty, |k, j| {
                let deviation = value(k, j).0.cast(ty) - &average;
                &deviation * &deviation
            });
            (average, m2)
        } else {
            let acc = welford(ty);
            let step = |k: &mut Kernel, j: &E, a| {
                let (x, _) = value(k, j);
                (acc.step)(k, a, &[x], j)
            };
            let [average, m2, _] = r.reduce(acc.init.clone(), step, acc.merge);
            (average, m2)
        };
        let variance = m2 / len;
        let root = inverse_root(r.k, variance, 4);
        r.each(|k, j| {
            let (x, coords) = value(k, j);
            let p: Vec<E> = parameters.iter().map(|p| p.at(k, &coords).cast(ty)).collect();
            let bias = if biased { p.last() } else { None };
            let y = normalized(&x, &average, &root, weighted.then(|| &p[0]), bias);
            let store = k.store(&out, &coords, y);
            vec![if rows.side_by_side(1) { store.side_by_side() } else { store }]
        });
        r.once(|k| {
            let first = rows.coords(k, &row, &E::u32(0));
            vec![k.store(&mean, &first, average.clone()), k.store(&rstd, &first, root.clone())]
        });
    });
    l.launch(k)
}

/// `native_layer_norm_backward(grad_out, input, normalized_shape, mean, rstd, weight, bias, output_mask)`.
pub fn layer_norm_backward(l: &mut Lowering<'_>) -> Option<()> {
    let grad = l.tensor(0)?;
    let layer = Layer::of(l, l.tensor(1)?, 2)?;
    let [input, gamma, beta] = mask(l, 7)?;
    let (weight, bias) = (l.optional(5)?, l.optional(6)?);
    let dtype = parameter_dtype(&layer.x, [&weight, &bias])?;
    let Layer { x, space, leading, normalized } = &layer;
    let (mean, rstd) = (l.tensor(3)?, l.tensor(4)?);
    let rows: i64 = x.sizes[..*leading].iter().product();
    let shaped = mean.numel() == rows && rstd.numel() == rows && mean.is_contiguous() && rstd.is_contiguous();
    let given = (!gamma || weight.is_some()) && (!beta || bias.is_some());
    if !shaped || !given || grad.sizes != x.sizes || grad.dtype != x.dtype {
        return None;
    }
    let weight = layer.parameter(&weight)?;
    layer.parameter(&bias)?;
    let kept = space.result(true);
    let [mean, rstd] = [&mean, &rstd].map(|s| space.spread(&s.viewed(&kept, &dense(&kept))));
    let statistics = Statistics { mean, rstd };
    let out = if input {
        Some(l.new_storage(&x.sizes, &dense(&x.sizes), x.dtype)?)
    } else {
        l.returns_undefined();
        None
    };
    let mut parameter = |wanted: bool| {
        if wanted {
            return Some(Some(l.new_storage(normalized, &dense(normalized), dtype)?));
        }
        l.returns_undefined();
        Some(None)
    };
    let gradients = Parameters { weight: parameter(gamma)?, bias: parameter(beta)? };
    let given = Backward { grad: &grad, x, statistics: &statistics, weight: weight.as_ref() };
    if let Some(out) = out {
        layer_input_gradient(l, &layer, &given, &out)?;
    }
    layer_parameter_gradients(l, &layer, &given, &gradients)
}

fn layer_input_gradient(
    l: &mut Lowering<'_>,
    layer: &Layer,
    given: &Backward<'_>,
    out: &Operand,
) -> Option<()> {
    let Backward { grad, x, statistics: Statistics { mean, rstd }, weight } = *given;
    let Layer { space, leading, .. } = layer;
    let ty = x.mem.ty();
    let weighted = weight.is_some();
    let sums = gradient_sums(ty, weighted);
    let acc = Accumulate { init: [E::lit(ty, 0.0), E::lit(ty, 0.0)], step: &sums, merge: &both };
    let operands: Vec<&Operand> = [x, out, grad, mean, rstd].into_iter().chain(weight).collect();
    let rows = NormRows::new(*leading, &operands);
    let len = rows.len;
    // Values of `Losses`.
    let terms = move |k: &mut Kernel, [sum, dot]: [E; 2], rstd: &E| {
        let len = k.size(len).cast(ty);
        [sum / &len, dot * rstd * rstd / len]
    };
    if rows.few() {
        let exact = computed(x);
        let sizes = space.result(true);
        let [shift, slope] = [l.temp(&sizes, exact)?, l.temp(&sizes, exact)?].map(|t| space.spread(&t));
        let ins: Vec<&Operand> = [grad, x, mean].into_iter().chain(weight).collect();
        let operands = Operands { ins: &ins, outs: &[&shift, &slope], also: &[rstd] };
        launch(l, "layer_norm_sums", space, operands, &acc, &|_, k, a, v| {
            terms(k, a, &v[0].cast(ty)).to_vec()
        })?;
        let losses = Losses { shift, slope };
        return apply_backward(l, "normalize_backward", given, &losses, Weighted::Gradient, out);
    }
    let mut k = Kernel::new("layer_norm_backward");
    let target = l.write(&mut k, &rows.view(out, 1))?;
    let sources: Vec<Source> =
        [(grad, 2), (x, 0), (mean, 3), (rstd, 4)].map(|(x, n)| l.read(&mut k, &rows.view(x, n))).into();
    let weight = weight.map(|w| l.read(&mut k, &rows.view(w, 5)));
    k.rows(rows.count, rows.len, team(rows.len, false), |r, row| {
        let row = r.k.coords(&rows.kept, row);
        let values = |k: &mut Kernel, j: &E| {
            let coords = rows.coords(k, &row, j);
            let mut values: Vec<E> = sources[..3].iter().map(|s| s.at(k, &coords).cast(ty)).collect();
            values.extend(weight.iter().map(|w| w.at(k, &coords).cast(ty)));
            (values, coords)
        };
        let step = |k: &mut Kernel, j: &E, a| {
            let (v, _) = values(k, j);
            (acc.step)(k, a, &v, j)
        };
        let a = r.reduce(acc.init.clone(), step, both);
        let first = rows.coords(r.k, &row, &E::u32(0));
        let rstd = sources[3].at(r.k, &first).cast(ty);
        let [shift, slope] = terms(r.k, a, &rstd);
        r.each(|k, j| {
            let (v, coords) = values(k, j);
            let dy = if weighted { &v[0] * &v[3] } else { v[0].clone() };
            let dx = input_gradient(dy, &v[1] - &v[2], [&shift, &slope], &rstd);
            let store = k.store(&target, &coords, dx);
            vec![if rows.side_by_side(1) { store.side_by_side() } else { store }]
        });
    });
    l.launch(k)
}

fn layer_parameter_gradients(
    l: &mut Lowering<'_>,
    layer: &Layer,
    given: &Backward<'_>,
    gradients: &Parameters,
) -> Option<()> {
    let Backward { grad, x, statistics: Statistics { mean, rstd }, .. } = *given;
    let ty = x.mem.ty();
    let space = Space::new(&x.sizes, (0..x.ndim()).map(|d| d < layer.leading).collect());
    let outs: Vec<Operand> = gradients.present().map(|o| space.spread(o)).collect();
    let outs: Vec<&Operand> = outs.iter().collect();
    let zero = E::lit(ty, 0.0);
    let (wants_gamma, wants_beta) = (gradients.weight.is_some(), gradients.bias.is_some());
    match (wants_gamma, wants_beta) {
        (false, false) => Some(()),
        (false, true) => {
            let acc = Accumulate {
                init: [zero],
                step: &|_, [a], v, _| [a + v[0].cast(ty)],
                merge: &|[a], [b]| [a + b],
            };
            let operands = Operands { ins: &[grad], outs: &outs, also: &[] };
            launch(l, "layer_norm_bias", &space, operands, &acc, &|_, _, a, _| a.to_vec())
        }
        _ => {
            let acc = Accumulate {
                init: [zero.clone(), zero],
                step: &|_, [gamma, beta], v, _| {
                    let v: Vec<E> = v.iter().map(|v| v.cast(ty)).collect();
                    [gamma + &v[0] * (&v[1] - &v[2]) * &v[3], beta + &v[0]]
                },
                merge: &both,
            };
            let operands = Operands { ins: &[grad, x, mean, rstd], outs: &outs, also: &[] };
            launch(l, "layer_norm_weight", &space, operands, &acc, &|_, _, a, _| {
                if wants_beta { a.to_vec() } else { a[..1].to_vec() }
            })
        }
    }
}

// --- Group norm -----------------------------------------------------------------------------------------

/// View of a tensor as samples, groups, channels of a group, and the remaining dimensions.
struct Groups {
    sizes: Dims,
    n: i64,
    c: i64,
    groups: i64,
}

impl Groups {
    /// Reads an operator's arguments `N, C, HxW, group`, which begin at `arg`.
    fn of(l: &Lowering<'_>, x: &Operand, arg: usize) -> Option<Groups> {
        let [n, c, area, groups] = [l.int(arg)?, l.int(arg + 1)?, l.int(arg + 2)?, l.int(arg + 3)?];
        let fits = x.ndim() >= 2
            && x.sizes[..2] == [n, c]
            && x.sizes[2..].iter().product::<i64>() == area
            && groups > 0
            && c % groups == 0;
        if !fits || x.numel() == 0 {
            return None;
        }
        let sizes = [n, groups, c / groups].iter().chain(&x.sizes[2..]).copied().collect();
        Some(Groups { sizes, n, c, groups })
    }

    fn view(&self, x: &Operand) -> Operand {
        let within = self.c / self.groups;
        let head = [x.strides[0], x.strides[1] * within, x.strides[1]];
        let strides: Dims = head.iter().chain(&x.strides[2..]).copied().collect();
        x.viewed(&self.sizes, &strides)
    }

    /// Expands a vector of one value per channel.
    fn channels(&self, x: &Operand) -> Operand {
        let mut strides = Dims::from_elem(0, self.sizes.len());
        strides[1] = x.strides[0] * (self.c / self.groups);
        strides[2] = x.strides[0];
        x.viewed(&self.sizes, &strides)
    }

    /// Expands a matrix of one value per sample and group.
    fn statistic(&self, x: &Operand) -> Operand {
        let mut strides = Dims::from_elem(0, self.sizes.len());
        strides[0] = x.strides[0];
        strides[1] = x.strides[1];
        x.viewed(&self.sizes, &strides)
    }

    /// Space that reduces the dimensions from `from` on.
    fn space(&self, from: usize) -> Space {
        Space::new(&self.sizes, (0..self.sizes.len()).map(|d| d >= from).collect())
    }

    fn parameter(&self, p: &Option<Operand>) -> Option<Option<Operand>> {
        let Some(p) = p else { return Some(None) };
        (p.sizes[..] == [self.c]).then(|| Some(self.channels(p)))
    }
}

/// `native_group_norm(input, weight, bias, N, C, HxW, group, eps)`.
pub fn group_norm(l: &mut Lowering<'_>) -> Option<()> {
    let x = l.tensor(0)?;
    let (weight, bias) = (l.optional(1)?, l.optional(2)?);
    let dtype = parameter_dtype(&x, [&weight, &bias])?;
    let groups = Groups::of(l, &x, 3)?;
    let parameters = Parameters { weight: groups.parameter(&weight)?, bias: groups.parameter(&bias)? };
    let out = l.new_storage(&x.sizes, &suggested(&x, &x.sizes), x.dtype)?;
    let sizes = [groups.n, groups.groups];
    let mut statistic = || l.new_storage(&sizes, &dense(&sizes), dtype).map(|s| groups.statistic(&s));
    let saved = Statistics { mean: statistic()?, rstd: statistic()? };
    let (x, out) = (groups.view(&x), groups.view(&out));
    let statistics = statistics(l, &groups.space(2), &x, &saved, 7)?;
    apply(l, &x, &statistics, &parameters, &out)
}

/// `native_group_norm_backward(grad_out, input, mean, rstd, weight, N, C, HxW, group, output_mask)`.
pub fn group_norm_backward(l: &mut Lowering<'_>) -> Option<()> {
    let (grad, x, mean, rstd) = (l.tensor(0)?, l.tensor(1)?, l.tensor(2)?, l.tensor(3)?);
    let weight = l.optional(4)?;
    let [input, gamma, beta] = mask(l, 9)?;
    let dtype = parameter_dtype(&x, [&weight])?;
    let groups = Groups::of(l, &x, 5)?;
    let kept = [groups.n, groups.groups];
    let statistics = [&mean, &rstd].iter().all(|s| s.sizes[..] == kept && s.dtype == mean.dtype);
    if !statistics
        || grad.sizes != x.sizes
        || grad.dtype != x.dtype
        || weight.is_some() && dtype != mean.dtype
    {
        return None;
    }
    let dtype = mean.dtype;
    let weight = groups.parameter(&weight)?;
    let out = if input {
        Some(l.new_storage(&x.sizes, &suggested(&x, &x.sizes), x.dtype)?)
    } else {
        l.returns_undefined();
        None
    };
    let mut parameter = |wanted: bool| {
        if wanted {
            return Some(Some(l.new_storage(&[groups.c], &[1], dtype)?));
        }
        l.returns_undefined();
        Some(None)
    };
    let (gamma, beta) = (parameter(gamma)?, parameter(beta)?);

    let ty = x.mem.ty();
    let exact = computed(&x);
    let statistics = Statistics { mean: groups.statistic(&mean), rstd: groups.statistic(&rstd) };
    let (grad, x) = (groups.view(&grad), groups.view(&x));
    let zeros = [E::lit(ty, 0.0), E::lit(ty, 0.0)];

    // For each sample and channel: the sum of the gradient, and of its product with the deviation.
    let channels = groups.space(3);
    let sizes = channels.result(false);
    let (sum, dot) = (l.temp(&sizes, exact)?, l.temp(&sizes, exact)?);
    let plain = gradient_sums(ty, false);
    let acc = Accumulate { init: zeros.clone(), step: &plain, merge: &both };
    let outs = [&channels.spread(&sum), &channels.spread(&dot)];
    let operands = Operands { ins: &[&grad, &x, &statistics.mean], outs: &outs, also: &[] };
    launch(l, "group_norm_sums", &channels, operands, &acc, &|_, _, a, _| a.to_vec())?;

    let narrow = |x: &Operand| x.viewed(&x.sizes[..3], &x.strides[..3]);
    if let Some(out) = out {
        let within = Space::new(&sizes, vec![false, false, true]);
        let temps = [l.temp(&kept, exact)?, l.temp(&kept, exact)?];
        let spread = temps.each_ref().map(|t| within.spread(t));
        let members = groups.space(2).members();
        let weights = weight.as_ref().map(narrow);
        let weighted = weight.is_some();
        let acc = Accumulate {
            init: zeros.clone(),
            step: &|_, [a, b], v, _| {
                let w = if weighted { v[2].cast(ty) } else { E::lit(ty, 1.0) };
                [a + &v[0] * &w, b + &v[1] * w]
            },
            merge: &both,
        };
        let ins: Vec<&Operand> = [&sum, &dot].into_iter().chain(&weights).collect();
        let also = [&narrow(&statistics.rstd)];
        let operands = Operands { ins: &ins, outs: &[&spread[0], &spread[1]], also: &also };
        launch(l, "group_norm_losses", &within, operands, &acc, &|_, k, [a, b], v| {
            let (members, rstd) = (k.size(members).cast(ty), v[0].cast(ty));
            vec![a / &members, b * &rstd * rstd / members]
        })?;
        let [shift, slope] = temps.map(|t| groups.statistic(&t));
        let given = Backward { grad: &grad, x: &x, statistics: &statistics, weight: weight.as_ref() };
        let (losses, out) = (Losses { shift, slope }, groups.view(&out));
        apply_backward(l, "normalize_backward", &given, &losses, Weighted::Gradient, &out)?;
    }

    let samples = Space::new(&sizes, vec![true, false, false]);
    let outs: Vec<Operand> = gamma.iter().chain(&beta).map(|o| narrow(&groups.channels(o))).collect();
    let outs: Vec<&Operand> = outs.iter().collect();
    if outs.is_empty() {
        return Some(());
    }
    let acc = Accumulate {
        init: zeros,
        step: &|_, [gamma, beta], v, _| [gamma + &v[0] * v[2].cast(ty), beta + &v[1]],
        merge: &both,
    };
    let operands = Operands { ins: &[&dot, &sum, &narrow(&statistics.rstd)], outs: &outs, also: &[] };
    launch(l, "group_norm_weight", &samples, operands, &acc, &|_, _, [a, b], _| {
        gamma.iter().map(|_| a.clone()).chain(beta.iter().map(|_| b.clone())).collect()
    })
}

// --- Batch norm -----------------------------------------------------------------------------------------

/// Expands a vector of one value per channel to a tensor's sizes. Returns `None` if the vector has another size.
fn channels(p: &Operand, x: &Operand) -> Option<Operand> {
    if p.sizes[..] != [x.sizes[1]] {
        return None;
    }
    let mut strides = Dims::from_elem(0, x.ndim());
    strides[1] = p.strides[0];
    Some(p.viewed(&x.sizes, &strides))
}

fn optional_channels(p: &Option<Operand>, x: &Operand) -> Option<Option<Operand>> {
    match p {
        Some(p) => channels(p, x).map(Some),
        None => Some(None),
    }
}

/// Space that reduces all dimensions but the channels.
fn batch_space(x: &Operand) -> Space {
    Space::new(&x.sizes, (0..x.ndim()).map(|d| d != 1).collect())
}

/// An operator for batch norms.
#[derive(Clone, Copy)]
pub enum BatchNorm {
    /// `native_batch_norm`, and `_native_batch_norm_legit` with and without running statistics.
    Native,
    /// `_native_batch_norm_legit_no_training`.
    NoTraining,
    /// `_batch_norm_with_update`.
    WithUpdate,
    /// `_batch_norm_no_update`.
    NoUpdate,
}

/// The arguments that differ among the operators, as indices or values.
struct BatchArgs {
    running: Option<usize>,
    training: bool,
    momentum: usize,
    /// Whether the operator returns a fourth output.
    reserve: bool,
}

fn batch_args(l: &Lowering<'_>, form: BatchNorm) -> Option<BatchArgs> {
    let (running, training, momentum, reserve) = match (form, l.call.args.len()) {
        (BatchNorm::Native, 8) => (Some(3), l.flag(5, false), 6, false),
        (BatchNorm::Native, 6) => (None, l.flag(3, false), 4, false),
        (BatchNorm::NoTraining, 7) => (Some(3), false, 5, false),
        (BatchNorm::WithUpdate, 7) => (Some(3), true, 5, true),
        (BatchNorm::NoUpdate, 7) => (Some(3), false, 5, true),
        _ => return None,
    };
    Some(BatchArgs { running, training, momentum, reserve })
}

/// `native_batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps)` and related
/// operators.
pub fn batch_norm(l: &mut Lowering<'_>, form: BatchNorm) -> Option<()> {
    let args = batch_args(l, form)?;
    let x = l.tensor(0)?;
    let (weight, bias) = (l.optional(1)?, l.optional(2)?);
    let running = match args.running {
        Some(arg) => [l.optional(arg)?, l.optional(arg + 1)?],
        None => [None, None],
    };
    let dtype = parameter_dtype(&x, [&weight, &bias].into_iter().chain(&running))?;
    if x.ndim() < 2 || x.numel() == 0 || running.iter().flatten().any(|r| r.strides[..] == [0]) {
        return None;
    }
    let parameters =
        Parameters { weight: optional_channels(&weight, &x)?, bias: optional_channels(&bias, &x)? };
    let [mean, var] = &running;
    let running = Running { mean: optional_channels(mean, &x)?, var: optional_channels(var, &x)? };
    let out = l.new_storage(&x.sizes, &suggested(&x, &x.sizes), x.dtype)?;
    let saved = if args.training { x.sizes[1] } else { 0 };
    let (save_mean, save_rstd) =
        (l.new_storage(&[saved], &[1], dtype)?, l.new_storage(&[saved], &[1], dtype)?);
    if args.reserve {
        l.new_storage(&[0], &[1], Dtype::UINT8)?;
    }
    if args.training {
        let saved = Statistics { mean: channels(&save_mean, &x)?, rstd: channels(&save_rstd, &x)? };
        let statistics = batch_statistics(l, &x, &saved, &running, args.momentum)?;
        return apply(l, &x, &statistics, &parameters, &out);
    }
    let (mean, var) = (running.mean?, running.var?);
    let ty = x.mem.ty();
    let ins: Vec<(&Operand, Ty)> =
        [&x, &mean, &var].into_iter().chain(parameters.present()).map(|x| (x, ty)).collect();
    let (weighted, biased) = (parameters.weight.is_some(), parameters.bias.is_some());
    let eps = args.momentum + 1;
    elementwise::launch(l, "batch_norm", &[&out], &ins, |_, k, v, _| {
        let rstd = inverse_root(k, v[2].clone(), eps);
        let weight = weighted.then(|| &v[3]);
        let bias = if biased { v.last() } else { None };
        Some(vec![normalized(&v[0], &v[1], &rstd, weight, bias)])
    })
}

/// Running statistics of a batch norm. `None` stands for an absent one.
struct Running {
    mean: Option<Operand>,
    var: Option<Operand>,
}

/// Computes the statistics of a batch into `saved`, for the backward pass, and updates the running statistics. Returns
/// the statistics in the dtype of the computation.
fn batch_statistics(
    l: &mut Lowering<'_>,
    x: &Operand,
    saved: &Statistics,
    running: &Running,
    momentum: usize,
) -> Option<Statistics> {
    let ty = x.mem.ty();
    let exact = computed(x);
    let space = batch_space(x);
    let members = space.members();
    let direct = saved.mean.dtype == exact;
    let mut temp = || l.temp(&[x.sizes[1]], exact).and_then(|t| channels(&t, x));
    let [mean, rstd] = if direct { [saved.mean.clone(), saved.rstd.clone()] } else { [temp()?, temp()?] };
    let squares = if running.var.is_some() { Some(temp()?) } else { None };
    let mut outs = vec![&mean, &rstd];
    outs.extend(&running.mean);
    outs.extend(&squares);
    let also: Vec<&Operand> = running.mean.iter().collect();
    let moved = move |k: &mut Kernel, old: &E, new: &E| {
        let m = k.number(momentum, ty);
        old.cast(ty) * (1.0 - &m) + new * m
    };
    let operands = Operands { ins: &[x], outs: &outs, also: &also };
    launch(l, "batch_moments", &space, operands, &welford(ty), &|_, k, [mean, m2, _], v| {
        let variance = &m2 / k.size(members).cast(ty);
        let rstd = inverse_root(k, variance, momentum + 1);
        let mut values = vec![mean.clone(), rstd];
        values.extend(v.first().map(|old| moved(k, old, &mean)));
        values.push(m2);
        values
    })?;
    let narrow = |x: &Operand| x.viewed(&x.sizes[1..2], &x.strides[1..2]);
    // This is a separate kernel because the running statistics may be parts of one storage, and a kernel can write only
    // one window of a storage.
    if let (Some(var), Some(squares)) = (&running.var, &squares) {
        let (var, squares) = (narrow(var), narrow(squares));
        elementwise::launch(l, "running_var", &[&var], &[(&var, ty), (&squares, ty)], |_, k, v, _| {
            let freedom = k.size(members - 1).cast(ty);
            Some(vec![moved(k, &v[0], &(&v[1] / freedom))])
        })?;
    }
    if !direct {
        let outs = [&narrow(&saved.mean), &narrow(&saved.rstd)];
        let ins = [(&narrow(&mean), ty), (&narrow(&rstd), ty)];
        elementwise::launch(l, "batch_saved", &outs, &ins, |_, _, v, _| Some(v.to_vec()))?;
    }
    Some(Statistics { mean, rstd })
}

/// `native_batch_norm_backward(grad_out, input, weight, running_mean, running_var, save_mean, save_invstd, train,
/// eps, output_mask)`; `batch_norm_backward` has one more argument at the end.
pub fn batch_norm_backward(l: &mut Lowering<'_>) -> Option<()> {
    let (grad, x) = (l.tensor(0)?, l.tensor(1)?);
    let weight = l.optional(2)?;
    let train = l.flag(7, false);
    let [input, gamma, beta] = mask(l, 9)?;
    let first = if train { 5 } else { 3 };
    let (mean, deviation) = (l.tensor(first)?, l.tensor(first + 1)?);
    if x.ndim() < 2 || x.numel() == 0 || grad.sizes != x.sizes || grad.dtype != x.dtype {
        return None;
    }
    let parameters = [weight.clone(), Some(mean.clone()), Some(deviation.clone())];
    let dtype = parameter_dtype(&x, &parameters)?;
    let weight = optional_channels(&weight, &x)?;
    let (mean, deviation) = (channels(&mean, &x)?, channels(&deviation, &x)?);
    let out = if input {
        Some(l.new_storage(&x.sizes, &suggested(&x, &x.sizes), x.dtype)?)
    } else {
        l.returns_undefined();
        None
    };
    let mut parameter = |wanted: bool| {
        if wanted {
            let out = l.new_storage(&[x.sizes[1]], &[1], dtype)?;
            return channels(&out, &x).map(Some);
        }
        l.returns_undefined();
        Some(None)
    };
    let (gamma, beta) = (parameter(gamma)?, parameter(beta)?);

    let ty = x.mem.ty();
    let exact = computed(&x);
    let space = batch_space(&x);
    let members = space.members();
    // Running statistics do not depend on the input, so they add no terms to its gradient.
    let losses = if input && train {
        let mut temp = || l.temp(&[x.sizes[1]], exact).and_then(|t| channels(&t, &x));
        Some(Losses { shift: temp()?, slope: temp()? })
    } else {
        None
    };
    let mut outs: Vec<&Operand> = gamma.iter().chain(&beta).collect();
    outs.extend(losses.iter().flat_map(|Losses { shift, slope }| [shift, slope]));
    let root = move |k: &mut Kernel, v: &E| if train { v.cast(ty) } else { inverse_root(k, v.cast(ty), 8) };
    if !outs.is_empty() {
        let sums = gradient_sums(ty, false);
        let acc = Accumulate { init: [E::lit(ty, 0.0), E::lit(ty, 0.0)], step: &sums, merge: &both };
        let (wants_gamma, wants_beta, wants_losses) = (gamma.is_some(), beta.is_some(), losses.is_some());
        let operands = Operands { ins: &[&grad, &x, &mean], outs: &outs, also: &[&deviation] };
        launch(l, "batch_norm_sums", &space, operands, &acc, &|_, k, [sum, dot], v| {
            let rstd = root(k, &v[0]);
            let mut values = Vec::new();
            if wants_gamma {
                values.push(&dot * &rstd);
            }
            if wants_beta {
                values.push(sum.clone());
            }
            if wants_losses {
                let members = k.size(members).cast(ty);
                values.extend([sum / &members, dot * &rstd * rstd / members]);
            }
            values
        })?;
    }
    let Some(out) = out else { return Some(()) };
    if let Some(losses) = &losses {
        // In training, `deviation` is the reciprocal standard deviation. The weight multiplies the gradient of the
        // normalized value, including the subtracted terms.
        let statistics = Statistics { mean, rstd: deviation };
        let given = Backward { grad: &grad, x: &x, statistics: &statistics, weight: weight.as_ref() };
        return apply_backward(l, "batch_norm_backward", &given, losses, Weighted::Result, &out);
    }
    let ins: Vec<(&Operand, Ty)> = [&grad, &deviation].into_iter().chain(&weight).map(|x| (x, ty)).collect();
    elementwise::launch(l, "batch_norm_backward", &[&out], &ins, |_, k, v, _| {
        let dx = &v[0] * root(k, &v[1]);
        Some(vec![v.get(2).map_or(dx.clone(), |w| dx * w)])
    })
}
