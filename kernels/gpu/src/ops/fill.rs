//! Copies, conversions, and tensors that are computed from numbers.

use tandem_tracegraph::call::Arg;

use crate::kernel::Kernel;
use crate::lower::{Lowering, Spot, dense};
use crate::ops::elementwise::launch;
use crate::ops::index::bits;
use crate::ops::types::{broadcast, channels_last, preserved};
use tandem_executor::ir::{E, Ty};

/// `copy_(self, src)`, with conversion and broadcasting.
pub fn copy(l: &mut Lowering<'_>) -> Option<()> {
    if !l.in_place() {
        return None;
    }
    let (to, from) = (l.tensor(0)?, l.tensor(1)?);
    // A write to a host tensor is a fetch, for which there is no kernel.
    matches!(l.call.inputs[0].place, tandem_tracegraph::call::Place::Storage { .. }).then_some(())?;
    if broadcast([&to.sizes[..], &from.sizes[..]])? != to.sizes {
        return None;
    }
    let (sizes, dtype) = (to.sizes.clone(), to.dtype);
    let out = l.destination(0, &sizes, &to.strides, dtype)?;
    let moves = from.dtype == dtype && matches!(from.place, Spot::Memory(_));
    if moves && from.sizes == sizes && from.is_contiguous() && to.is_contiguous() {
        l.moves();
    }
    let (out, from) = if moves { (bits(&out), bits(&from)) } else { (out, from) };
    let ty = from.mem.ty();
    launch(l, "copy", &[&out], &[(&from, ty)], |_, _, x, _| Some(vec![x[0].clone()]))
}

/// `fill(self, value)`.
pub fn fill(l: &mut Lowering<'_>) -> Option<()> {
    let (to, value) = (l.tensor(0)?, l.operand(1)?);
    if value.ndim() != 0 {
        return None;
    }
    let ty = to.mem.ty();
    let out = l.destination(0, &to.sizes, &preserved(&to), to.dtype)?;
    launch(l, "fill", &[&out], &[(&value, ty)], |_, _, x, _| Some(vec![x[0].clone()]))
}

/// `zero(self)`.
pub fn zero(l: &mut Lowering<'_>) -> Option<()> {
    let to = l.tensor(0)?;
    let out = bits(&l.destination(0, &to.sizes, &preserved(&to), to.dtype)?);
    let ty = out.mem.ty();
    launch(l, "zero", &[&out], &[], |_, _, _, _| Some(vec![E::lit(ty, 0.0)]))
}

/// `arange.start_out(start, end, step, out)`; the factory function has created the output.
pub fn arange(l: &mut Lowering<'_>) -> Option<()> {
    let Some([.., Arg::Tensor]) = l.call.args.get(..4) else { return None };
    let given = l.tensor(3)?;
    let (start, end, step) = (l.pin(0)?, l.pin(1)?, l.pin(2)?);
    let count = ((end - start) / step).ceil();
    if step == 0.0 || !(0.0..2e9).contains(&count) {
        return None;
    }
    let dtype = given.dtype;
    let ty = if dtype.is_floating() { given.mem.ty() } else { Ty::I64 };
    let out = l.destination(0, &[count as i64], &[1], dtype)?;
    launch(l, "arange", &[&out], &[], |l, k, _, i| {
        let (start, step) = (l.number(k, 0, ty), l.number(k, 2, ty));
        Some(vec![(start + i.cast(ty) * step).cast(out.mem.ty())])
    })
}

/// `linspace.out(start, end, steps, out)`, computed from both ends: PyTorch's result is symmetric.
pub fn linspace(l: &mut Lowering<'_>) -> Option<()> {
    let Some([_, _, Arg::Int(steps), Arg::Tensor]) = l.call.args.get(..4) else { return None };
    let steps = *steps;
    let given = l.tensor(3)?;
    if steps < 0 || given.mem.ty() != Ty::F32 {
        return None;
    }
    let out = l.destination(0, &[steps], &[1], given.dtype)?;
    launch(l, "linspace", &[&out], &[], |l, k, _, i| Some(vec![spaced(l, k, steps, i)]))
}

/// `logspace.out(start, end, steps, base, out)`.
pub fn logspace(l: &mut Lowering<'_>) -> Option<()> {
    let Some([_, _, Arg::Int(steps), Arg::Float(_), Arg::Tensor]) = l.call.args.get(..5) else { return None };
    let steps = *steps;
    let given = l.tensor(4)?;
    if steps < 0 || given.mem.ty() != Ty::F32 {
        return None;
    }
    let out = l.destination(0, &[steps], &[1], given.dtype)?;
    launch(l, "logspace", &[&out], &[], |l, k, _, i| {
        let base = l.number(k, 3, Ty::F32);
        Some(vec![E::call("pow_", Ty::F32, [base, spaced(l, k, steps, i)])])
    })
}

/// Returns the `i`-th of `steps` numbers from the first argument to the second, computed from the nearer end.
fn spaced(l: &Lowering<'_>, k: &mut Kernel, steps: i64, i: &E) -> E {
    let (start, end) = (l.number(k, 0, Ty::F32), l.number(k, 1, Ty::F32));
    let last = k.size((steps - 1).max(1));
    let half = k.size(steps / 2);
    let step = (&end - &start) / last.cast(Ty::F32);
    let front = &start + i.cast(Ty::F32) * &step;
    let back = &end - (last - i).cast(Ty::F32) * &step;
    i.lt(half).select(front, if steps == 1 { start } else { back })
}

/// `eye.m_out(n, m, out)` and `eye.out(n, out)`.
pub fn eye(l: &mut Lowering<'_>) -> Option<()> {
    let arg = l.call.args.iter().position(|a| *a == Arg::Tensor)?;
    let given = l.tensor(arg)?;
    let n = l.int(0)?;
    let m = if arg == 2 { l.int(1)? } else { n };
    if n < 0 || m < 0 {
        return None;
    }
    let out = l.destination(0, &[n, m], &dense(&[n, m]), given.dtype)?;
    let mut k = Kernel::new("eye");
    let t = l.write(&mut k, &out)?;
    k.map(&[n, m], |k, c, _| vec![k.store(&t, c, c[0].eq(&c[1]).cast(out.mem.ty()))]);
    l.launch(k)
}

/// `empty.memory_format(size, dtype, layout, device, pin_memory, memory_format)`.
pub fn empty(l: &mut Lowering<'_>) -> Option<()> {
    let sizes = l.ints(0)?;
    let strides = match if l.has(5) { l.int(5)? } else { 0 } {
        0 => dense(&sizes),
        2 | 3 => channels_last(&sizes),
        _ => return None,
    };
    let dtype = l.dtype(1)?.unwrap_or(l.call.default_dtype);
    l.new_storage(&sizes, &strides, dtype).map(|_| ())
}

/// `empty_strided(size, stride, dtype, layout, device, pin_memory)`.
pub fn empty_strided(l: &mut Lowering<'_>) -> Option<()> {
    let (sizes, strides) = (l.ints(0)?, l.ints(1)?);
    let dtype = l.dtype(2)?.unwrap_or(l.call.default_dtype);
    l.new_storage(&sizes, &strides, dtype).map(|_| ())
}
