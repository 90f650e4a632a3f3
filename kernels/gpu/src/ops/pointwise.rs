//! Point-wise operators: kernels from the expressions of the point-wise table.

use tandem_tracegraph::call::Arg;
use tandem_tracegraph::tensor_meta::Dtype;

use crate::kernel::Kernel;
use crate::lower::{Lowering, Operand};
use crate::ops::elementwise;
use crate::ops::types::{broadcast, output_strides, result_type};
use tandem_executor::error::Fault;
use tandem_executor::ir::{E, Mem, Ty, Var};
use tandem_executor::ops::pointwise::{Args, DtypeRule, Op, Reads, Scope, find};

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
    let op = find(l.base)?.op(l.call.args).filter(|op| op.reads == Reads::Promoted)?;
    let operands: Option<Vec<Operand>> = op.operands.iter().map(|arg| l.operand(*arg)).collect();
    apply(l, op, &operands?)
}

fn apply(l: &mut Lowering<'_>, op: &Op, operands: &[Operand]) -> Option<()> {
    let (computed, given) = op.dtypes(operands.iter().map(Operand::kind), l.call.default_dtype);
    let sizes = broadcast(operands.iter().map(|o| &o.sizes[..]))?;
    let mut tensors: Vec<Operand> =
        operands.iter().filter(|o| o.ndim() > 0 || sizes.is_empty()).cloned().collect();
    if op.gradient_last {
        tensors.reverse();
    }
    let strides = output_strides(&sizes, &tensors);
    let out = l.destination(0, &sizes, &strides, given)?;
    let ty = Mem::of(computed)?.ty();
    let ins: Vec<(&Operand, Ty)> = operands.iter().map(|x| (x, ty)).collect();
    elementwise::launch(l, "pointwise", &[&out], &ins, |l, k, values, _| {
        let scope = &mut InKernel { l, k };
        let x =
            values.iter().enumerate().map(|(n, x)| x.rounded(op.rounds_to(n, operands[n].kind(), computed)));
        let mut args = Args { scope, x: x.collect(), ty, dtype: computed, item: 0 };
        let value = (op.value)(&mut args)?;
        // The store converts the value to the output's dtype.
        Some(vec![value])
    })
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

/// `ldexp(self, other)`: like PyTorch, multiplies by a power of 2 in the default dtype.
pub fn ldexp(l: &mut Lowering<'_>) -> Option<()> {
    let operands = [l.operand(0)?, l.operand(1)?];
    let [x, by] = &operands;
    let plain = |o: &Operand| o.dtype == Dtype::FLOAT32 || !o.dtype.is_floating();
    if x.dtype != Dtype::FLOAT32 || !plain(by) || l.call.default_dtype != Dtype::FLOAT32 {
        return None;
    }
    let op = Op::new(DtypeRule::Same, &[0, 1], |a| Some(&a.x[0] * a.x[1].f("exp2_")));
    apply(l, &op, &operands)
}
