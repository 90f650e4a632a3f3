//! Kernels with one thread per element of their outputs.

use crate::kernel::Kernel;
use crate::lower::{Dims, Lowering, Operand, Source};
use crate::store::{Store, Tensor};
use tandem_executor::ir::{E, Ty};
use tandem_executor::shapes;
use tandem_executor::shapes::is_contiguous;

/// Launches a [`kernel`].
pub fn launch(
    l: &mut Lowering<'_>,
    label: &'static str,
    outs: &[&Operand],
    ins: &[(&Operand, Ty)],
    body: impl FnOnce(&Lowering<'_>, &mut Kernel, &[E], &E) -> Option<Vec<E>>,
) -> Option<()> {
    let kernel = kernel(l, label, outs, ins, body)?;
    l.launch(kernel)
}

/// A kernel that computes `outs` point-wise from `ins`. All `outs` have the same sizes, to which `ins` are broadcast.
/// `body` gets the values of `ins`, converted to the given types, and the number of the element in the order of the
/// first output's memory.
pub fn kernel(
    l: &Lowering<'_>,
    label: &'static str,
    outs: &[&Operand],
    ins: &[(&Operand, Ty)],
    body: impl FnOnce(&Lowering<'_>, &mut Kernel, &[E], &E) -> Option<Vec<E>>,
) -> Option<Kernel> {
    let sizes = outs.first()?.sizes.clone();
    let outs: Vec<Operand> = outs.iter().map(|o| (*o).clone()).collect();
    let ins: Vec<(Operand, Ty)> = ins.iter().map(|(x, ty)| (x.expanded(&sizes), *ty)).collect();
    let operands: Vec<&Operand> = outs.iter().chain(ins.iter().map(|(x, _)| x)).collect();
    let (sizes, strides) = coalesce(&sizes, &operands);
    let mut views = operands.iter().zip(&strides).map(|(x, s)| x.viewed(&sizes, s));
    let outs: Vec<Operand> = views.by_ref().take(outs.len()).collect();
    let ins: Vec<(Operand, Ty)> = views.zip(ins.iter().map(|(_, ty)| *ty)).collect();

    let mut k = Kernel::new(label);
    let sources: Vec<(Source, Ty)> = ins.iter().map(|(x, ty)| (l.read_as(&mut k, x, *ty), *ty)).collect();
    let targets: Option<Vec<_>> = outs.iter().map(|o| l.write(&mut k, o)).collect();
    let targets = targets?;
    let mut fits = true;
    let read: Vec<&Tensor> = sources.iter().filter_map(|(source, _)| source.window()).collect();
    let written: Vec<&Tensor> = targets.iter().collect();
    k.walk(&sizes, &written, &read, |k, coords, number, put| {
        let values: Vec<E> = sources
            .iter()
            .map(|(source, ty)| {
                let value = match source {
                    Source::TensorGeometry(t) => k.load_at(t, coords, number),
                    Source::Value(e) => e.clone(),
                };
                value.cast(*ty)
            })
            .collect();
        let Some(results) = body(l, k, &values, number) else {
            fits = false;
            return Vec::new();
        };
        targets.iter().zip(results).map(|(t, value)| put(k, t, coords, number, value)).collect()
    });
    fits.then_some(k)
}

/// Launches a kernel that computes each element of `outs`, which all have the same sizes, from its coordinates.
/// Neighbouring threads compute elements that are adjacent in the first output's memory.
pub fn produce(
    l: &mut Lowering<'_>,
    label: &'static str,
    outs: &[&Operand],
    body: impl FnOnce(&Lowering<'_>, &mut Kernel, &[E]) -> Option<Vec<E>>,
) -> Option<()> {
    let first = outs.first()?;
    let mut order: Vec<usize> = (0..first.ndim()).collect();
    order.sort_by_key(|d| std::cmp::Reverse(first.strides[*d]));
    let along = |dims: &[i64]| -> Dims { order.iter().map(|d| dims[*d]).collect() };
    let sizes = along(&first.sizes);

    let mut k = Kernel::new(label);
    let targets: Option<Vec<Tensor>> = outs.iter().map(|o| l.write(&mut k, o)).collect();
    let targets = targets?;
    let mut fits = true;
    k.map(&sizes, |k, ordered, number| {
        let mut coords = vec![E::u32(0); ordered.len()];
        for (d, coord) in order.iter().zip(ordered) {
            coords[*d] = coord.clone();
        }
        let Some(values) = body(l, k, &coords) else {
            fits = false;
            return Vec::new();
        };
        // Elements with a fault are not stored, so elements that share a word are stored one by one.
        let linear = |t: &Tensor| k.faults.is_empty() && is_contiguous(&sizes, &along(&t.strides));
        let store = |(t, value): (&Tensor, E)| {
            if linear(t) { k.store_linear(t, number, value) } else { k.store(t, &coords, value) }
        };
        targets.iter().zip(values).map(store).collect()
    });
    if !fits {
        return None;
    }
    l.launch(k)
}

/// Launches a kernel with one thread per element of a space. `body` gets the element's coordinates and
/// number.
pub fn each(
    l: &mut Lowering<'_>,
    label: &'static str,
    sizes: &[i64],
    body: impl FnOnce(&Lowering<'_>, &mut Kernel, &[E], &E) -> Option<Vec<Store>>,
) -> Option<()> {
    let mut k = Kernel::new(label);
    let mut stores = None;
    k.map(sizes, |k, coords, number| {
        stores = body(l, k, coords, number);
        stores.clone().unwrap_or_default()
    });
    stores?;
    l.launch(k)
}

/// Joins dimensions that all operands can step through as one, see [`shapes::coalesce`].
pub fn coalesce(sizes: &[i64], operands: &[&Operand]) -> (Dims, Vec<Dims>) {
    let strides: Vec<&[i64]> = operands.iter().map(|x| &x.strides[..]).collect();
    shapes::coalesce(sizes, &strides)
}
