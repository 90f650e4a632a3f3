//! Point-wise operators: kernels from the expressions of the point-wise table.

use tandem_tracegraph::call::Arg;
use tandem_tracegraph::tensor_meta::Dtype;

use crate::error::Fault;
use crate::gpu::kernel::Kernel;
use crate::gpu::lower::{Lowering, Operand};
use crate::gpu::ops::elementwise;
use crate::gpu::ops::types::{broadcast, output_strides, result_type};
use crate::ir::{E, Mem, Ty, Var};
use crate::ops::pointwise::{
    Args, CLAMP, CLAMP_MAX, CLAMP_MIN, DIVIDE, DIVIDE_ROUNDED, ELU_BACKWARD, LERP, Op, Rule, Scope, find,
};

/// Scope in which the table's expressions become part of a kernel.
pub struct InKernel<'l, 'a> {
    pub(super) l: &'l Lowering<'a>,
    pub(super) k: &'l mut Kernel,
}

impl Scope for InKernel<'_, '_> {
    fn args(&self) -> &[Arg<'_>] {
        self.l.call.args
    }

    fn has(&self, arg: usize) -> bool {
        self.l.has(arg)
    }

    fn dtype(&self, arg: usize) -> Option<Dtype> {
        self.l.operand(arg).map(|x| x.dtype)
    }

    fn number(&mut self, arg: usize, item: usize, ty: Ty) -> E {
        self.l.item(self.k, arg, item, ty)
    }

    fn constant(&mut self, value: f32) -> E {
        self.k.constant(value)
    }

    fn fault(&mut self, when: E) {
        self.k.fault(Fault::Division, when);
    }

    fn variable(&mut self, ty: Ty) -> (Var, E) {
        self.k.variable(ty)
    }
}

/// Lowers a point-wise operator.
pub fn lower(l: &mut Lowering<'_>) -> Option<()> {
    let op = find(l.base)?;
    let operands: Option<Vec<Operand>> = (0..op.operands).map(|i| l.operand(i)).collect();
    apply(l, op, &operands?)
}

fn apply(l: &mut Lowering<'_>, op: &Op, operands: &[Operand]) -> Option<()> {
    let (computed, given) = op.dtypes(operands.iter().map(Operand::kind), l.call.default_dtype);
    let sizes = broadcast(operands.iter().map(|o| &o.sizes[..]))?;
    let mut tensors: Vec<Operand> =
        operands.iter().filter(|o| o.ndim() > 0 || sizes.is_empty()).cloned().collect();
    // PyTorch's iterator has the gradient as the last operand of these derivatives.
    if matches!(l.base, "threshold_backward" | "leaky_relu_backward") {
        tensors.reverse();
    }
    let strides = output_strides(&sizes, &tensors);
    let out = l.destination(0, &sizes, &strides, given)?;
    let ty = Mem::of(computed)?.ty();
    let ins: Vec<(&Operand, Ty)> = operands.iter().map(|x| (x, ty)).collect();
    elementwise::launch(l, "pointwise", &[&out], &ins, |l, k, values, _| {
        let scope = &mut InKernel { l, k };
        let mut args = Args { scope, x: values.to_vec(), ty, dtype: computed, items: Vec::new() };
        let value = (op.value)(&mut args)?;
        // The store converts the value to the output's dtype.
        Some(vec![value])
    })
}

/// `div`, whose dtype depends on its rounding mode.
pub fn div(l: &mut Lowering<'_>) -> Option<()> {
    let rounded = l.has(2) && matches!(l.call.args[2], Arg::Str(_));
    let op = if rounded { &DIVIDE_ROUNDED } else { &DIVIDE };
    let operands = [l.operand(0)?, l.operand(1)?];
    apply(l, op, &operands)
}

/// `lerp(self, end, weight)`, whose weight is a number or a tensor.
pub fn lerp(l: &mut Lowering<'_>) -> Option<()> {
    let operands = [l.operand(0)?, l.operand(1)?, l.operand(2)?];
    apply(l, &LERP, &operands)
}

/// `clamp`, `clamp_min`, `clamp_max` with bounds that are numbers or tensors.
pub fn clamps(l: &mut Lowering<'_>) -> Option<()> {
    let (op, bounds) = match (l.base, l.has(1), l.has(2)) {
        ("clamp_min", ..) => (&CLAMP_MIN, &[1][..]),
        ("clamp_max", ..) => (&CLAMP_MAX, &[1][..]),
        (_, true, true) => (&CLAMP, &[1, 2][..]),
        (_, true, false) => (&CLAMP_MIN, &[1][..]),
        (_, false, true) => (&CLAMP_MAX, &[2][..]),
        (_, false, false) => return None,
    };
    let operands: Option<Vec<Operand>> = [0].iter().chain(bounds).map(|arg| l.operand(*arg)).collect();
    apply(l, op, &operands?)
}

/// `where(condition, self, other)`.
pub fn where_(l: &mut Lowering<'_>) -> Option<()> {
    let operands = [l.operand(0)?, l.operand(1)?, l.operand(2)?];
    let dtype = result_type(&operands[1..], l.call.default_dtype);
    let sizes = broadcast(operands.iter().map(|o| &o.sizes[..]))?;
    let strides = output_strides(&sizes, &operands);
    let out = l.destination(0, &sizes, &strides, dtype)?;
    let ty = Mem::of(dtype)?.ty();
    let ins = [(&operands[0], Ty::Bool), (&operands[1], ty), (&operands[2], ty)];
    elementwise::launch(l, "where", &[&out], &ins, |_, _, x, _| Some(vec![x[0].select(&x[1], &x[2])]))
}

/// `masked_fill(self, mask, value)`.
pub fn masked_fill(l: &mut Lowering<'_>) -> Option<()> {
    let (x, mask, value) = (l.operand(0)?, l.operand(1)?, l.operand(2)?);
    if mask.dtype != Dtype::BOOL || (value.ndim() != 0) {
        return None;
    }
    let sizes = broadcast([&x.sizes[..], &mask.sizes[..]])?;
    let strides = output_strides(&sizes, &[x.clone(), mask.clone()]);
    let out = l.destination(0, &sizes, &strides, x.dtype)?;
    let ty = x.mem.ty();
    let ins = [(&mask, Ty::Bool), (&value, ty), (&x, ty)];
    elementwise::launch(l, "masked_fill", &[&out], &ins, |_, _, x, _| Some(vec![x[0].select(&x[1], &x[2])]))
}

/// `elu_backward(grad, alpha, scale, input_scale, is_result, self_or_result)`.
pub fn elu_backward(l: &mut Lowering<'_>) -> Option<()> {
    let operands = [l.operand(0)?, l.operand(5)?];
    apply(l, &ELU_BACKWARD, &operands)
}

/// `ldexp(self, other)`: like PyTorch, multiplies by a power of 2 in the default dtype.
pub fn ldexp(l: &mut Lowering<'_>) -> Option<()> {
    let operands = [l.operand(0)?, l.operand(1)?];
    let [x, by] = &operands;
    let plain = |o: &Operand| o.dtype == Dtype::FLOAT32 || !o.dtype.is_floating();
    if x.dtype != Dtype::FLOAT32 || !plain(by) || l.call.default_dtype != Dtype::FLOAT32 {
        return None;
    }
    let op = Op { rule: Rule::Same, operands: 2, value: |a| Some(&a.x[0] * a.x[1].f("exp2_")) };
    apply(l, &op, &operands)
}

/// `polygamma(n, self)` for `n` = 0 and `n` = 1.
pub fn polygamma(l: &mut Lowering<'_>) -> Option<()> {
    let operands = [l.operand(1)?];
    let value: fn(&mut Args<'_>) -> Option<E> = match l.pin(0)? as i64 {
        0 => |a| Some(a.x[0].f("digamma_")),
        1 => |a| Some(a.x[0].f("trigamma_")),
        _ => return None,
    };
    apply(l, &Op { rule: Rule::Float, operands: 1, value }, &operands)
}
