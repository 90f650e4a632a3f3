//! Fused optimizer steps, and operators for gradient scaling.

use tandem_tracegraph::call::Arg;
use tandem_tracegraph::tensor_meta::Dtype;

use crate::kernel::Kernel;
use crate::lower::{Lowering, Operand, Source, Spot};
use crate::ops::{chunks, elementwise};
use crate::store::{Store, Word};
use tandem_executor::ir::{E, Mem, Ty, larger};

/// Indices of a step's arguments.
struct Places<'p> {
    /// Lists with a tensor for each parameter: the parameter, its gradient, its state.
    lists: &'p [usize],
    /// Number of steps of each parameter.
    steps: Option<usize>,
    /// Learning rate.
    rate: usize,
    /// Weight decay.
    decay: usize,
    maximize: usize,
    /// `grad_scale`, which `found_inf` follows.
    scale: usize,
}

/// Arguments that the steps of all optimizers have in common.
struct OptimizerStep {
    /// Lists with a tensor for each parameter: the parameter, its gradient, its state.
    lists: Vec<Vec<Operand>>,
    /// Number of steps of each parameter.
    steps: Option<Vec<Operand>>,
    rate: Operand,
    decay: usize,
    maximize: bool,
    scale: Option<Operand>,
    skip: Option<Operand>,
}

/// Values of an element.
struct Values<'l, 'a, 'k> {
    l: &'l Lowering<'a>,
    k: &'k mut Kernel,
    /// Values in the order of the lists.
    x: Vec<E>,
    step: E,
    rate: E,
    /// Weight decay.
    decay: E,
}

impl Values<'_, '_, '_> {
    fn number(&mut self, arg: usize) -> E {
        self.l.number(self.k, arg, Ty::F32)
    }

    /// Returns 1 - x for a number x among the arguments. The difference is taken from the number's 64 bits, because a
    /// 32-bit x close to 1 lacks most bits of it.
    fn one_less(&mut self, arg: usize) -> E {
        let word = |upper| Word::Number(arg as u32, 0, Ty::F64, upper);
        let (low, high) = (self.k.word(Ty::U32, word(false)), self.k.word(Ty::U32, word(true)));
        E::call("one_less", Ty::F32, [low, high])
    }
}

/// Returns 1 - x^exponent, given 1 - x.
fn one_less_power(one_less: &E, exponent: &E) -> E {
    -(exponent * (-one_less).f("log1p_")).f("expm1_")
}

impl OptimizerStep {
    /// Reads the arguments. `None` if they do not fit together.
    fn new(l: &mut Lowering<'_>, places: &Places<'_>) -> Option<OptimizerStep> {
        let Places { lists, steps, rate, decay, maximize, scale } = *places;
        let lists: Option<Vec<Vec<Operand>>> = lists.iter().map(|arg| l.tensors(*arg)).collect();
        let (lists, steps) = (lists?, steps.map(|arg| l.tensors(arg)));
        let steps = match steps {
            Some(steps) => Some(steps?),
            None => None,
        };
        let (first, all) = (lists.first()?, lists.iter().chain(&steps));
        if all.clone().any(|list| list.len() != first.len()) {
            return None;
        }
        for list in &lists {
            let fits = |(x, p): (&Operand, &Operand)| {
                x.sizes == p.sizes && x.dtype == p.dtype && x.mem.ty() == Ty::F32 && !x.overlaps()
            };
            if !list.iter().zip(first).all(fits) {
                return None;
            }
        }
        let single = |x: &Operand| x.numel() == 1 && x.ndim() <= 1;
        if steps.iter().flatten().any(|s| !single(s)) {
            return None;
        }
        let rate = l.operand(rate)?;
        let (scale, skip) = (l.optional(scale)?, l.optional(scale + 1)?);
        if !single(&rate) && rate.ndim() != 0 || scale.iter().chain(&skip).any(|x| !single(x)) {
            return None;
        }
        Some(OptimizerStep { lists, steps, rate, decay, maximize: l.flag(maximize, false), scale, skip })
    }

    /// Launches kernels for the parameters. `body` returns the next value for each list, or `None` if the list does not
    /// change.
    fn launch(
        &self,
        l: &mut Lowering<'_>,
        label: &'static str,
        body: impl Fn(&mut Values<'_, '_, '_>) -> Vec<Option<E>>,
    ) -> Option<()> {
        let mut kernels = Vec::new();
        for item in 0..self.lists[0].len() {
            let tensors: Vec<&Operand> = self.lists.iter().map(|list| &list[item]).collect();
            if tensors[0].numel() == 0 {
                continue;
            }
            // The gradient is written only if it is unscaled.
            let outs: Vec<&Operand> = tensors
                .iter()
                .enumerate()
                .filter(|(n, _)| *n != 1 || self.scale.is_some())
                .map(|(_, x)| *x)
                .collect();
            let mut ins: Vec<(&Operand, Ty)> = tensors.iter().map(|x| (*x, Ty::F32)).collect();
            let others = [
                self.steps.as_ref().map(|s| &s[item]),
                Some(&self.rate),
                self.scale.as_ref(),
                self.skip.as_ref(),
            ];
            ins.extend(others.iter().flatten().map(|x| (*x, Ty::F32)));
            kernels.push(elementwise::kernel(l, label, &outs, &ins, |l, k, x, _| {
                let (own, rest) = x.split_at(tensors.len());
                let mut rest = rest.iter().cloned();
                let step = self.steps.as_ref().and_then(|_| rest.next());
                let rate = rest.next()?;
                let scale = self.scale.as_ref().and_then(|_| rest.next());
                let skip = self.skip.as_ref().and_then(|_| rest.next());
                let mut values = own.to_vec();
                if let Some(scale) = scale {
                    values[1] = &values[1] / scale;
                }
                let unscaled = values[1].clone();
                if self.maximize {
                    values[1] = -&values[1];
                }
                let decay = l.number(k, self.decay, Ty::F32);
                let step = step.unwrap_or_else(|| E::lit(Ty::F32, 0.0));
                let next = body(&mut Values { l, k, x: values, step, rate, decay });
                let mut results = Vec::new();
                for (n, (next, old)) in next.into_iter().zip(own).enumerate() {
                    let next = match (n, &self.scale) {
                        (1, None) => continue,
                        (1, Some(_)) => unscaled.clone(),
                        _ => next.unwrap_or_else(|| old.clone()),
                    };
                    results.push(match &skip {
                        Some(skip) => skip.eq(1.0).select(old, next),
                        None => next,
                    });
                }
                Some(results)
            })?);
        }
        l.launch_all(kernels)
    }
}

/// `_fused_adam_(self, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps, lr, beta1, beta2, weight_decay,
/// eps, amsgrad, maximize, grad_scale, found_inf)`.
pub fn adam(l: &mut Lowering<'_>) -> Option<()> {
    moments(l, false)
}

/// `_fused_adamw_`, with the arguments of `_fused_adam_`. Its weight decay does not change the gradient.
pub fn adamw(l: &mut Lowering<'_>) -> Option<()> {
    moments(l, true)
}

/// The step of Adam, and with `decoupled` of AdamW, whose weight decay does not change the gradient.
fn moments(l: &mut Lowering<'_>, decoupled: bool) -> Option<()> {
    let amsgrad = l.flag(11, false);
    let lists: &[usize] = if amsgrad { &[0, 1, 2, 3, 4] } else { &[0, 1, 2, 3] };
    let places = Places { lists, steps: Some(5), rate: 6, decay: 9, maximize: 12, scale: 13 };
    let step = OptimizerStep::new(l, &places)?;
    step.launch(l, "adam", |v| {
        let (rate, decay, steps) = (v.rate.clone(), v.decay.clone(), v.step.clone());
        let (beta1, beta2, eps) = (v.number(7), v.number(8), v.number(10));
        let (rest1, rest2) = (v.one_less(7), v.one_less(8));
        let (mut p, mut g) = (v.x[0].clone(), v.x[1].clone());
        if decoupled {
            p = &p - &rate * &decay * &p;
        } else {
            g = decay.ne(0.0).select(&g + &decay * &p, &g);
        }
        let average = &v.x[2] * &beta1 + &g * &rest1;
        let square = &v.x[3] * &beta2 + &g * &g * &rest2;
        let most = v.x.get(4).map(|most| larger(most, &square));
        let root = most.as_ref().unwrap_or(&square).sqrt() / one_less_power(&rest2, &steps).sqrt() + eps;
        let size = rate / one_less_power(&rest1, &steps);
        let next = p - size * &average / root;
        let mut results = vec![Some(next), None, Some(average), Some(square)];
        results.extend(most.map(Some));
        results
    })
}

/// `_fused_sgd_(self, grads, momentum_buffer_list, weight_decay, momentum, lr, dampening, nesterov, maximize,
/// is_first_step, grad_scale, found_inf)`.
pub fn sgd(l: &mut Lowering<'_>) -> Option<()> {
    let Some(Arg::Tensors(buffers)) = l.call.args.get(2) else { return None };
    let lists: &[usize] = if *buffers > 0 { &[0, 1, 2] } else { &[0, 1] };
    let places = Places { lists, steps: None, rate: 5, decay: 3, maximize: 8, scale: 10 };
    let step = OptimizerStep::new(l, &places)?;
    let (nesterov, first) = (l.flag(7, false), l.flag(9, false));
    if *buffers == 0 {
        l.within(4, 0.0, 0.0)?;
    }
    step.launch(l, "sgd", |v| {
        let (p, mut g) = (v.x[0].clone(), v.x[1].clone());
        g = v.decay.ne(0.0).select(&g + &v.decay * &p, &g);
        let Some(momentum) = v.x.get(2).cloned() else {
            return vec![Some(p - g * &v.rate), None];
        };
        let (keep, rest) = (v.number(4), v.one_less(6));
        let momentum = if first { g.clone() } else { momentum * &keep + &g * rest };
        let direction = if nesterov { g + &momentum * keep } else { momentum.clone() };
        vec![Some(p - direction * &v.rate), None, Some(momentum)]
    })
}

/// `_fused_adagrad_(self, grads, state_sums, state_steps, lr, lr_decay, weight_decay, eps, maximize, grad_scale,
/// found_inf)`.
pub fn adagrad(l: &mut Lowering<'_>) -> Option<()> {
    let places = Places { lists: &[0, 1, 2], steps: Some(3), rate: 4, decay: 6, maximize: 8, scale: 9 };
    let step = OptimizerStep::new(l, &places)?;
    step.launch(l, "adagrad", |v| {
        let (slow, eps) = (v.number(5), v.number(7));
        let rate = &v.rate / ((&v.step - 1.0) * slow + 1.0);
        let (p, g) = (&v.x[0], &v.x[1]);
        let g = v.decay.ne(0.0).select(g + &v.decay * p, g);
        let sum = &v.x[2] + &g * &g;
        vec![Some(p - rate * g / (sum.sqrt() + eps)), None, Some(sum)]
    })
}

/// `_amp_foreach_non_finite_check_and_unscale_(self, found_inf, inv_scale)`.
pub fn unscale(l: &mut Lowering<'_>) -> Option<()> {
    let (grads, found, scale) = (l.tensors(0)?, l.tensor(1)?, l.tensor(2)?);
    if found.dtype != Dtype::FLOAT32 || found.numel() != 1 || scale.numel() != 1 {
        return None;
    }
    let found = l.written_item(1, 0, &found.sizes, found.dtype)?.viewed(&[1], &[1]);
    let mut together = Vec::new();
    let in_memory =
        scale.mem == Mem::F32 && matches!(scale.place, Spot::Memory(_)) && !l.share_storages(&grads);
    for (item, grad) in grads.iter().enumerate() {
        if !grad.dtype.is_floating() {
            return None;
        }
        let grad = l.written_item(0, item, &grad.sizes, grad.dtype)?;
        if grad.numel() == 0 {
            continue;
        }
        if in_memory && chunks::is_unscaled(l, &grad) {
            together.push(grad);
            continue;
        }
        let (sizes, strides) = elementwise::coalesce(&grad.sizes, &[&grad]);
        let (grad, ty) = (grad.viewed(&sizes, &strides[0]), grad.mem.ty());
        let mut k = Kernel::new("unscale");
        let (g, f) = (l.write(&mut k, &grad)?, l.write(&mut k, &found)?);
        let scale = l.read_as(&mut k, &scale.viewed(&[1], &[1]), ty);
        k.map(&sizes, |k, coords, _| {
            let value = k.load(&g, coords);
            let scale = scale.at(k, &[E::u32(0)]).cast(ty);
            let bad = value.abs().lt(f64::INFINITY).not();
            let mark = Store { guard: Some(bad), ..k.store(&f, &[E::u32(0)], E::lit(Ty::F32, 1.0)) };
            vec![k.store(&g, coords, value * scale), mark]
        });
        l.launch(k)?;
    }
    chunks::unscale(l, &together, &found, &scale.viewed(&[1], &[1]))
}

/// `_amp_update_scale_(self, growth_tracker, found_inf, scale_growth_factor, scale_backoff_factor, growth_interval)`.
pub fn update_scale(l: &mut Lowering<'_>) -> Option<()> {
    let (scale, tracker, found) = (l.tensor(0)?, l.tensor(1)?, l.tensor(2)?);
    let single = [&scale, &tracker, &found].into_iter().all(|x| x.numel() == 1);
    if !single || scale.mem != Mem::F32 || tracker.mem != Mem::I32 || found.mem != Mem::F32 {
        return None;
    }
    let scale = l.written_item(0, 0, &scale.sizes, scale.dtype)?.viewed(&[1], &[1]);
    let tracker = l.written_item(1, 0, &tracker.sizes, tracker.dtype)?.viewed(&[1], &[1]);
    l.returns(l.flat(0));
    let mut k = Kernel::new("update_scale");
    let (s, t) = (l.write(&mut k, &scale)?, l.write(&mut k, &tracker)?);
    let Source::TensorGeometry(found) = l.read(&mut k, &found.viewed(&[1], &[1])) else { return None };
    let (growth, backoff) = (l.number(&mut k, 3, Ty::F32), l.number(&mut k, 4, Ty::F32));
    let interval = l.number(&mut k, 5, Ty::I32);
    k.map(&[1], |k, at, _| {
        let (old, count) = (k.load(&s, at), k.load(&t, at) + 1.0);
        let bad = k.load(&found, at).ne(0.0);
        let grown = &old * growth;
        let due = count.eq(interval);
        let grown = grown.abs().lt(f64::INFINITY).and(&due).select(grown, &old);
        let next = bad.select(&old * backoff, grown);
        let count = bad.or(due).select(E::int(Ty::I32, 0), count);
        vec![k.store(&s, at, next), k.store(&t, at, count)]
    });
    l.launch(k)
}
