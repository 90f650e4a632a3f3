//! Losses and their derivatives.

use tandem_tracegraph::tensor_meta::Dtype;

use crate::kernel::{Kernel, THREADS};
use crate::lower::{Lowering, Operand, Source, dense};
use crate::ops::elementwise::{coalesce, launch, produce};
use crate::ops::types::{broadcast, output_strides, preserved, result_type};
use crate::store::Tensor;
use tandem_executor::error::Fault;
use tandem_executor::ir::{E, Ty};
use tandem_executor::ops::losses;
use tandem_executor::ops::losses::{Loss, Reduction};
use tandem_executor::shapes::View;

// This message is PyTorch's.
const NOT_BETWEEN: Fault = Fault::Value("all elements of input should be between 0 and 1");

/// Number of elements that are summed at once. Sums of more elements take two steps.
const PART: i64 = 8192;

/// Sums `values` over all elements. `finish` computes the values of `outs`, which have one element each, from the sums.
fn sums<const N: usize>(
    l: &mut Lowering<'_>,
    label: &'static str,
    outs: [&Operand; N],
    ins: &[(&Operand, Ty)],
    sizes: &[i64],
    values: impl FnOnce(&Lowering<'_>, &mut Kernel, &[E]) -> Option<[E; N]>,
    finish: impl FnOnce(&mut Kernel, [E; N]) -> [E; N],
) -> Option<()> {
    let ty = outs.first()?.mem.ty();
    let ins: Vec<(Operand, Ty)> = ins.iter().map(|(x, ty)| (x.expanded(sizes), *ty)).collect();
    let operands: Vec<&Operand> = ins.iter().map(|(x, _)| x).collect();
    let (sizes, strides) = coalesce(sizes, &operands);
    let total: i64 = sizes.iter().product();
    let parts = (total + PART - 1) / PART;
    let part = (total + parts - 1) / parts;

    let mut k = Kernel::new(label);
    let sources: Vec<(Source, Ty)> = ins
        .iter()
        .zip(&strides)
        .map(|((x, ty), strides)| (l.read_as(&mut k, &x.viewed(&sizes, strides), *ty), *ty))
        .collect();
    // The sums of the parts, if there are several parts.
    let dtype = if ty == Ty::F64 { Dtype::FLOAT64 } else { Dtype::FLOAT32 };
    let temp = if parts > 1 { Some(l.temp(&[N as i64, parts], dtype)?) } else { None };
    let targets = match &temp {
        Some(temp) => vec![l.write(&mut k, temp)?],
        None => outs.iter().map(|out| l.write(&mut k, out)).collect::<Option<Vec<Tensor>>>()?,
    };
    let mut fits = true;
    let mut finish = Some(finish);
    k.rows(parts, part, THREADS, |r, row| {
        let (step, count) = (r.k.size(part), r.k.size(total));
        let zeros: [E; N] = std::array::from_fn(|_| E::lit(ty, 0.0));
        let all = r.reduce(
            zeros.clone(),
            |k, member, acc| {
                let number = row * step + member;
                let inside = number.lt(&count);
                let coords = k.coords(&sizes, &number.min(count - 1.0));
                let x: Vec<E> = sources.iter().map(|(source, ty)| source.at(k, &coords).cast(*ty)).collect();
                let Some(values) = values(l, k, &x) else {
                    fits = false;
                    return acc;
                };
                let mut values = values.into_iter();
                acc.map(|a| match values.next() {
                    Some(value) => a + inside.select(value.cast(ty), 0.0),
                    None => a,
                })
            },
            add,
        );
        r.once(|k| match &temp {
            Some(_) => all
                .iter()
                .enumerate()
                .map(|(n, sum)| k.store(&targets[0], &[E::u32(n as u32), row.clone()], sum.clone()))
                .collect(),
            None => store_all(k, &targets, all, finish.take()),
        });
    });
    if !fits {
        return None;
    }
    l.launch(k)?;
    let Some(temp) = temp else { return Some(()) };

    let mut k = Kernel::new(label);
    let Source::TensorGeometry(source) = l.read(&mut k, &temp) else { return None };
    let targets: Option<Vec<Tensor>> = outs.iter().map(|out| l.write(&mut k, out)).collect();
    let targets = targets?;
    k.rows(1, parts, THREADS, |r, _| {
        let zeros: [E; N] = std::array::from_fn(|_| E::lit(ty, 0.0));
        let all = r.reduce(
            zeros,
            |k, member, acc| {
                let mut n = 0;
                acc.map(|a| {
                    n += 1;
                    a + k.load(&source, &[E::u32(n - 1), member.clone()])
                })
            },
            add,
        );
        r.once(|k| store_all(k, &targets, all, finish.take()));
    });
    l.launch(k)
}

fn add<const N: usize>(a: [E; N], b: [E; N]) -> [E; N] {
    let mut b = b.into_iter();
    a.map(|a| match b.next() {
        Some(b) => a + b,
        None => a,
    })
}

/// Returns the stores of the values that `finish` computes from the sums.
fn store_all<const N: usize>(
    k: &mut Kernel,
    targets: &[Tensor],
    sums: [E; N],
    finish: Option<impl FnOnce(&mut Kernel, [E; N]) -> [E; N]>,
) -> Vec<crate::store::Store> {
    let Some(finish) = finish else { return Vec::new() };
    let values = finish(k, sums);
    targets.iter().zip(values).map(|(t, value)| k.store(t, &[], value)).collect()
}

/// Launches a loss of each element of a view and its reduction. If there is no reduction, the output has the sizes and
/// strides of the view.
fn reduced(
    l: &mut Lowering<'_>,
    label: &'static str,
    reduction: Reduction,
    view: View<'_>,
    dtype: Dtype,
    ins: &[(&Operand, Ty)],
    value: impl FnOnce(&Lowering<'_>, &mut Kernel, &[E]) -> Option<E>,
) -> Option<()> {
    let View { sizes, strides } = view;
    if reduction == Reduction::None {
        let out = l.destination(0, sizes, strides, dtype)?;
        return launch(l, label, &[&out], ins, |l, k, x, _| Some(vec![value(l, k, x)?]));
    }
    let total: i64 = sizes.iter().product();
    if total == 0 {
        return None;
    }
    let out = l.destination(0, &[], &[], dtype)?;
    let value = |l: &Lowering<'_>, k: &mut Kernel, x: &[E]| Some([value(l, k, x)?]);
    sums(l, label, [&out], ins, sizes, value, |k, [sum]| [averaged(k, reduction, sum, total)])
}

fn averaged(k: &mut Kernel, reduction: Reduction, sum: E, total: i64) -> E {
    match reduction {
        Reduction::Mean => &sum / k.size(total).cast(sum.ty()),
        _ => sum,
    }
}

/// Returns `None` if PyTorch rejects the `beta` of `smooth_l1_loss` or the `delta` of `huber_loss`.
fn sound_number(l: &mut Lowering<'_>, of: Loss, arg: usize) -> Option<()> {
    let sound = match of {
        Loss::Huber => l.pin(arg)? > 0.0,
        Loss::SmoothL1 => l.pin(arg)? >= 0.0,
        _ => true,
    };
    sound.then_some(())
}

/// `mse_loss(self, target, reduction)`, `smooth_l1_loss(.., beta)`, `huber_loss(.., delta)` and `soft_margin_loss`.
pub fn loss(l: &mut Lowering<'_>, of: Loss) -> Option<()> {
    let (x, target) = (l.tensor(0)?, l.tensor(1)?);
    let reduction = Reduction::of(l.int(2)?)?;
    sound_number(l, of, 3)?;
    let operands = [x, target];
    let dtype = result_type(&operands, l.call.default_dtype);
    let sizes = broadcast(operands.iter().map(|o| &o.sizes[..]))?;
    let strides = output_strides(&sizes, &operands);
    let [x, target] = &operands;
    if !dtype.is_floating() || of == Loss::SoftMargin && x.sizes != target.sizes {
        return None;
    }
    let ty = tandem_executor::ir::Mem::of(dtype)?.ty();
    let (view, ins) = (View { sizes: &sizes, strides: &strides }, [(x, ty), (target, ty)]);
    reduced(l, "loss", reduction, view, dtype, &ins, |l, k, v| {
        let number = numbered(l, k, of, 3, ty);
        Some(of.value(&v[0], &v[1], &number))
    })
}

/// The number of a loss, such as `beta`. It is an argument if the loss has a number.
fn numbered(l: &Lowering<'_>, k: &mut Kernel, of: Loss, arg: usize, ty: Ty) -> E {
    match of {
        Loss::SmoothL1 | Loss::Huber => l.number(k, arg, ty),
        _ => E::lit(ty, 1.0),
    }
}

/// `*_backward(grad_output, self, target, reduction[, number])` of the losses in `loss`.
pub fn loss_backward(l: &mut Lowering<'_>, of: Loss) -> Option<()> {
    let (grad, x, target) = (l.tensor(0)?, l.tensor(1)?, l.tensor(2)?);
    let reduction = Reduction::of(l.int(3)?)?;
    sound_number(l, of, 4)?;
    let alike = x.sizes == target.sizes && x.dtype == target.dtype && x.dtype == grad.dtype;
    if !alike || !x.dtype.is_floating() || grad.ndim() != 0 && grad.sizes != x.sizes {
        return None;
    }
    let strides = match of {
        Loss::SoftMargin => output_strides(&x.sizes, &[target.clone(), x.clone()]),
        _ => dense(&x.sizes),
    };
    let out = l.destination(0, &x.sizes, &strides, x.dtype)?;
    let (ty, total) = (x.mem.ty(), x.numel());
    launch(l, "loss_backward", &[&out], &[(&grad, ty), (&x, ty), (&target, ty)], |l, k, v, _| {
        let g = averaged(k, reduction, v[0].clone(), total);
        let number = numbered(l, k, of, 4, ty);
        Some(vec![of.derivative(&g, &v[1], &v[2], &number)])
    })
}

/// Whether an optional weight broadcasts to losses of these sizes and has their dtype.
fn weighs(weight: &Option<Operand>, sizes: &[i64], dtype: Dtype) -> bool {
    weight.as_ref().is_none_or(|w| {
        let fits = broadcast([&w.sizes[..], sizes]).is_some_and(|common| common[..] == *sizes);
        fits && w.dtype == dtype
    })
}

/// `binary_cross_entropy(self, target, weight, reduction)`; a probability outside of `[0, 1]` is a fault.
pub fn cross_entropy(l: &mut Lowering<'_>) -> Option<()> {
    let (x, target, weight) = (l.tensor(0)?, l.tensor(1)?, l.optional(2)?);
    let reduction = Reduction::of(l.int(3)?)?;
    let alike = x.sizes == target.sizes && x.dtype == target.dtype && x.dtype.is_floating();
    if !alike || !weighs(&weight, &x.sizes, x.dtype) || x.numel() == 0 {
        return None;
    }
    let (ty, sizes, dtype) = (x.mem.ty(), x.sizes.clone(), x.dtype);
    // A fault is reported where its element is stored, so the losses are stored and another kernel sums them.
    let out = if reduction == Reduction::None {
        l.destination(0, &sizes, &preserved(&x), dtype)?
    } else {
        l.temp(&sizes, if ty == Ty::F64 { Dtype::FLOAT64 } else { Dtype::FLOAT32 })?
    };
    let mut ins = vec![(&x, ty), (&target, ty)];
    ins.extend(weight.iter().map(|w| (w, ty)));
    launch(l, "binary_cross_entropy", &[&out], &ins, |_, k, v, _| {
        let (x, t) = (&v[0], &v[1]);
        k.fault(NOT_BETWEEN, x.ge(0.0).and(x.le(1.0)).not());
        let loss = Loss::BinaryCrossEntropy.value(x, t, &E::lit(ty, 1.0));
        Some(vec![v.get(2).map_or(loss.clone(), |w| loss * w)])
    })?;
    if reduction == Reduction::None {
        return Some(());
    }
    let view = View { sizes: &sizes, strides: &[] };
    reduced(l, "mean", reduction, view, dtype, &[(&out, ty)], |_, _, v| Some(v[0].clone()))
}

/// `binary_cross_entropy_backward(grad_output, self, target, weight, reduction)`.
pub fn cross_entropy_backward(l: &mut Lowering<'_>) -> Option<()> {
    let (grad, x, target, weight) = (l.tensor(0)?, l.tensor(1)?, l.tensor(2)?, l.optional(3)?);
    let reduction = Reduction::of(l.int(4)?)?;
    let alike = x.sizes == target.sizes && x.dtype == target.dtype && x.dtype == grad.dtype;
    let fits = grad.ndim() == 0 || grad.sizes == x.sizes;
    if !alike || !fits || !x.dtype.is_floating() || !weighs(&weight, &x.sizes, x.dtype) {
        return None;
    }
    let out = l.destination(0, &x.sizes, &preserved(&x), x.dtype)?;
    let (ty, total) = (x.mem.ty(), x.numel());
    let mut ins = vec![(&grad, ty), (&x, ty), (&target, ty)];
    ins.extend(weight.iter().map(|w| (w, ty)));
    launch(l, "binary_cross_entropy_backward", &[&out], &ins, |_, k, v, _| {
        let g = averaged(k, reduction, v[0].clone(), total);
        let g = Loss::BinaryCrossEntropy.derivative(&g, &v[1], &v[2], &E::lit(ty, 1.0));
        Some(vec![v.get(3).map_or(g.clone(), |w| g * w)])
    })
}

/// `binary_cross_entropy_with_logits(self, target, weight, pos_weight, reduction)`.
pub fn cross_entropy_with_logits(l: &mut Lowering<'_>) -> Option<()> {
    let (x, target) = (l.tensor(0)?, l.tensor(1)?);
    let (weight, positive) = (l.optional(2)?, l.optional(3)?);
    let reduction = Reduction::of(l.int(4)?)?;
    let alike = x.sizes == target.sizes && x.dtype == target.dtype && x.dtype.is_floating();
    let weighs = |w: &Option<Operand>| weighs(w, &x.sizes, x.dtype);
    if !alike || !weighs(&weight) || !weighs(&positive) {
        return None;
    }
    let ty = x.mem.ty();
    let mut ins = vec![(&x, ty), (&target, ty)];
    ins.extend(positive.iter().chain(&weight).map(|w| (w, ty)));
    let (sizes, strides, dtype) = (x.sizes.clone(), preserved(&target), x.dtype);
    let (with_positive, with_weight) = (positive.is_some(), weight.is_some());
    let view = View { sizes: &sizes, strides: &strides };
    reduced(l, "cross_entropy_with_logits", reduction, view, dtype, &ins, |_, _, v| {
        let positive = with_positive.then(|| &v[2]);
        let loss = losses::cross_entropy_with_logits(&v[0], &v[1], positive);
        Some(if with_weight { loss * &v[v.len() - 1] } else { loss })
    })
}

/// Operands of `nll_loss`: scores, labels, and weights of classes.
struct Labelled {
    x: Operand,
    target: Operand,
    weight: Option<Operand>,
    /// Dimension of the classes.
    class: usize,
}

impl Labelled {
    /// Reads `self, target, weight`, which begin at argument `arg`. With `images`, the operator is `nll_loss2d`, and
    /// samples are images.
    fn of(l: &Lowering<'_>, arg: usize, images: bool) -> Option<Labelled> {
        let (x, target, weight) = (l.tensor(arg)?, l.tensor(arg + 1)?, l.optional(arg + 2)?);
        let class = usize::from(x.ndim() > 1);
        let ndim = if images { 4..=4 } else { 1..=2 };
        let mut sizes = x.sizes.clone();
        let classes = *sizes.get(class)?;
        sizes.remove(class);
        let single = x.ndim() == 1 && target.sizes[..] == [1];
        let fits = ndim.contains(&x.ndim()) && (sizes == target.sizes || single);
        let labels = matches!(target.dtype, Dtype::INT64 | Dtype::UINT8);
        let weighs = weight.as_ref().is_none_or(|w| w.sizes[..] == [classes] && w.dtype == x.dtype);
        let whole = x.numel() > 0 && x.dtype.is_floating();
        // The label of a single sample may have a dimension.
        let target = if single { target.viewed(&[], &[]) } else { target };
        (fits && labels && weighs && whole).then_some(Labelled { x, target, weight, class })
    }
}

/// `nll_loss_forward(self, target, weight, reduction, ignore_index)` and `nll_loss2d_forward`, which return the
/// loss and the sum of the weights.
pub fn nll_loss(l: &mut Lowering<'_>, images: bool) -> Option<()> {
    let n = Labelled::of(l, 0, images)?;
    let reduction = Reduction::of(l.int(3)?)?;
    l.int(4)?;
    let (ty, dtype, sizes) = (n.x.mem.ty(), n.x.dtype, n.target.sizes.clone());
    let each = reduction == Reduction::None && n.x.ndim() > 1;
    if each {
        let out = l.destination(0, &sizes, &dense(&sizes), dtype)?;
        let total = l.destination(1, &[], &[], dtype)?;
        label_losses(l, &n, &[&out])?;
        return launch(l, "total_weight", &[&total], &[], |_, _, _, _| Some(vec![E::lit(ty, 0.0)]));
    }
    let out = l.destination(0, &[], &[], dtype)?;
    let total = l.destination(1, &[], &[], dtype)?;
    // A fault is reported where its element is stored, so the losses are stored and another kernel sums them.
    let wide = if ty == Ty::F64 { Dtype::FLOAT64 } else { Dtype::FLOAT32 };
    let (losses, weights) = (l.temp(&sizes, wide)?, l.temp(&sizes, wide)?);
    label_losses(l, &n, &[&losses, &weights])?;
    let values = |_: &Lowering<'_>, _: &mut Kernel, v: &[E]| Some([v[0].clone(), v[1].clone()]);
    sums(
        l,
        "nll_loss",
        [&out, &total],
        &[(&losses, ty), (&weights, ty)],
        &sizes,
        values,
        |_, [sum, weight]| {
            let mean = weight.eq(0.0).select(f64::NAN, &sum / &weight);
            [if reduction == Reduction::Mean { mean } else { sum }, weight]
        },
    )
}

/// Launches the losses of all labels and, if there is a second output, their weights.
fn label_losses(l: &mut Lowering<'_>, n: &Labelled, outs: &[&Operand]) -> Option<()> {
    let ty = n.x.mem.ty();
    produce(l, "label_losses", outs, |l, k, coords| {
        let (x, labels) = (l.read(k, &n.x), l.read(k, &n.target));
        let (Source::TensorGeometry(x), Source::TensorGeometry(labels)) = (x, labels) else { return None };
        let label = k.load(&labels, coords).cast(Ty::I64);
        let counts = label.ne(l.number(k, 4, Ty::I64));
        let classes = k.size(n.x.sizes[n.class]);
        let inside = label.ge(0.0).and(label.lt(classes.cast(Ty::I64)));
        k.fault(Fault::Index, counts.and(inside.not()));
        let valid = counts.and(inside);
        let label = label.cast(Ty::U32);
        let mut at = coords.to_vec();
        at.insert(n.class, label.clone());
        let zero = E::lit(ty, 0.0);
        let mut score = k.load_if(&x, &at, valid.clone(), zero.clone());
        let mut weight = valid.select(E::lit(ty, 1.0), zero.clone());
        if let Some(w) = &n.weight {
            let Source::TensorGeometry(w) = l.read(k, w) else { return None };
            weight = k.load_if(&w, &[label], valid, zero.clone());
            score = score * &weight;
        }
        Some([zero - score, weight].into_iter().take(outs.len()).collect())
    })
}

/// `nll_loss_backward(grad_output, self, target, weight, reduction, ignore_index, total_weight)`.
pub fn nll_loss_backward(l: &mut Lowering<'_>, images: bool) -> Option<()> {
    let (grad, target) = (l.tensor(0)?, l.tensor(2)?);
    let n = Labelled::of(l, 1, images)?;
    // Unlike the loss, its derivative rejects a label that has a dimension for a single sample.
    if target.sizes != n.target.sizes {
        return None;
    }
    let reduction = Reduction::of(l.int(4)?)?;
    l.int(5)?;
    let total = l.tensor(6)?;
    let each = reduction == Reduction::None && n.x.ndim() > 1;
    let fits = if each { grad.sizes == n.target.sizes } else { grad.numel() == 1 };
    if !fits || grad.dtype != n.x.dtype || total.numel() != 1 || total.dtype != n.x.dtype {
        return None;
    }
    let (ty, sizes) = (n.x.mem.ty(), n.x.sizes.clone());
    let out = l.destination(0, &sizes, &dense(&sizes), n.x.dtype)?;
    let grad = if each { grad } else { grad.viewed(&[], &[]) };
    let total = total.viewed(&[], &[]);
    produce(l, "nll_loss_backward", &[&out], |l, k, coords| {
        let mut sample = coords.to_vec();
        let class = sample.remove(n.class);
        let labels = l.read(k, &n.target);
        let label = labels.at(k, &sample).cast(Ty::I64);
        let chosen = label.eq(class.cast(Ty::I64)).and(label.ne(l.number(k, 5, Ty::I64)));
        let source = l.read(k, &grad);
        let mut g = -source.at(k, if each { &sample } else { &[] });
        if let Some(w) = &n.weight {
            let Source::TensorGeometry(w) = l.read(k, w) else { return None };
            g = g * k.load(&w, std::slice::from_ref(&class));
        }
        if reduction == Reduction::Mean {
            let total = l.read(k, &total);
            g = g / total.at(k, &[]);
        }
        Some(vec![chosen.select(g, E::lit(ty, 0.0))])
    })
}
