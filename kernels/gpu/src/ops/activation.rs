//! Activations that are not in the point-wise table: `glu` and `log_sigmoid` with their derivatives, the derivative of
//! `prelu`, and `celu`.

use crate::kernel::Kernel;
use crate::lower::{Dims, Lowering, Operand, Source, dense};
use crate::ops::elementwise::launch;
use crate::ops::types::{broadcast, output_strides, preserved};
use tandem_executor::ir::E;

/// Returns a dimension of a float tensor and the sizes of the tensor's halves along it.
fn halves(l: &Lowering<'_>, x: &Operand, arg: usize) -> Option<(usize, Dims)> {
    let d = l.dim(arg, x.ndim())?;
    let mut sizes = x.sizes.clone();
    let size = sizes.get_mut(d)?;
    if *size % 2 != 0 || !x.dtype.is_floating() {
        return None;
    }
    *size /= 2;
    Some((d, sizes))
}

/// Returns the coordinates, given in the first half, of the same element in the second half.
fn second(k: &mut Kernel, coords: &[E], d: usize, half: i64) -> Vec<E> {
    let mut at = coords.to_vec();
    at[d] = &coords[d] + k.size(half);
    at
}

/// `glu(self, dim)`: the first half times the sigmoid of the second half.
pub fn glu(l: &mut Lowering<'_>) -> Option<()> {
    let x = l.tensor(0)?;
    let (d, sizes) = halves(l, &x, 1)?;
    let half = x.viewed(&sizes, &x.strides);
    let strides = output_strides(&sizes, &[half.clone(), half]);
    let out = l.destination(0, &sizes, &strides, x.dtype)?;
    crate::ops::elementwise::produce(l, "glu", &[&out], |l, k, coords| {
        let Source::TensorGeometry(t) = l.read(k, &x) else { return None };
        let gate = second(k, coords, d, sizes[d]);
        Some(vec![k.load(&t, coords) * k.load(&t, &gate).sigmoid()])
    })
}

/// `glu_backward(grad_output, self, dim)`.
pub fn glu_backward(l: &mut Lowering<'_>) -> Option<()> {
    let (grad, x) = (l.tensor(0)?, l.tensor(1)?);
    let (d, sizes) = halves(l, &x, 2)?;
    if grad.sizes != sizes || grad.dtype != x.dtype {
        return None;
    }
    let out = l.destination(0, &x.sizes, &dense(&x.sizes), x.dtype)?;
    let mut k = Kernel::new("glu_backward");
    let (Source::TensorGeometry(g), Source::TensorGeometry(t)) = (l.read(&mut k, &grad), l.read(&mut k, &x))
    else {
        return None;
    };
    let target = l.write(&mut k, &out)?;
    k.map(&sizes, |k, coords, _| {
        let gate = second(k, coords, d, sizes[d]);
        let (value, s) = (k.load(&t, coords), k.load(&t, &gate).sigmoid());
        let g = k.load(&g, coords);
        let below = (1.0 - &s) * &s * &g * value;
        vec![k.store(&target, coords, s * g), k.store(&target, &gate, below)]
    });
    l.launch(k)
}

/// `log_sigmoid_forward(self)`: also returns `exp(-|self|)`, which PyTorch's CPU kernel keeps for the derivative.
pub fn log_sigmoid(l: &mut Lowering<'_>) -> Option<()> {
    let x = l.tensor(0)?;
    x.dtype.is_floating().then_some(())?;
    let strides = dense(&x.sizes);
    let out = l.destination(0, &x.sizes, &strides, x.dtype)?;
    let buffer = l.destination(1, &x.sizes, &strides, x.dtype)?;
    launch(l, "log_sigmoid", &[&out, &buffer], &[(&x, x.mem.ty())], |_, _, x, _| {
        let z = (-x[0].abs()).exp();
        Some(vec![x[0].min(0.0) - z.f("log1p_"), z])
    })
}

/// `log_sigmoid_backward(grad_output, self, buffer)`.
pub fn log_sigmoid_backward(l: &mut Lowering<'_>) -> Option<()> {
    let (grad, x) = (l.tensor(0)?, l.tensor(1)?);
    if grad.sizes != x.sizes || grad.dtype != x.dtype || !x.dtype.is_floating() {
        return None;
    }
    let ty = x.mem.ty();
    let out = l.destination(0, &x.sizes, &preserved(&grad), x.dtype)?;
    launch(l, "log_sigmoid_backward", &[&out], &[(&grad, ty), (&x, ty)], |_, _, v, _| {
        Some(vec![&v[0] * (-&v[1]).sigmoid()])
    })
}

/// `_prelu_kernel_backward(grad_output, self, weight)`: returns the gradients of `self` and `weight`.
pub fn prelu_backward(l: &mut Lowering<'_>) -> Option<()> {
    let (grad, x, weight) = (l.tensor(0)?, l.tensor(1)?, l.tensor(2)?);
    let operands = [x, weight, grad];
    let sizes = broadcast(operands.iter().map(|o| &o.sizes[..]))?;
    let [x, weight, grad] = &operands;
    if x.dtype != weight.dtype || x.dtype != grad.dtype || !x.dtype.is_floating() {
        return None;
    }
    let ty = x.mem.ty();
    let strides = output_strides(&sizes, &operands);
    let by_x = l.destination(0, &sizes, &strides, x.dtype)?;
    let by_weight = l.destination(1, &sizes, &strides, x.dtype)?;
    launch(l, "prelu_backward", &[&by_x, &by_weight], &[(x, ty), (weight, ty), (grad, ty)], |_, _, v, _| {
        let (x, w, g) = (&v[0], &v[1], &v[2]);
        let above = x.gt(0.0);
        Some(vec![above.select(g, w * g), above.select(0.0, x * g)])
    })
}

/// `celu(self, alpha)`: `elu` with a scale of 1 and an input scale of 1 / alpha.
pub fn celu(l: &mut Lowering<'_>) -> Option<()> {
    let x = l.tensor(0)?;
    if l.pin(1)? == 0.0 || !x.dtype.is_floating() {
        return None;
    }
    let ty = x.mem.ty();
    let strides = output_strides(&x.sizes, std::slice::from_ref(&x));
    let out = l.destination(0, &x.sizes, &strides, x.dtype)?;
    launch(l, "celu", &[&out], &[(&x, ty)], |l, k, v, _| {
        let alpha = l.number(k, 1, ty);
        let below = (&v[0] / &alpha).f("expm1_") * alpha;
        Some(vec![v[0].gt(0.0).select(&v[0], below)])
    })
}
