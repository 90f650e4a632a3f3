//! Outputs of operators that move, select, order or scan elements.

use tandem_tracegraph::call::{Arg, Call, Input};
use tandem_tracegraph::node::Outputs;
use tandem_tracegraph::tensor_meta::{Dtype, TensorMeta};

use crate::ops::arguments::{asked, dimension, int, ints, plain, tensor};
use crate::ops::outputs::{one, outputs_in_place, push, reduction};
use crate::shapes::{Dims, dense};

/// A contiguous tensor argument with elements.
fn contiguous<'c>(call: &'c Call<'_>, arg: usize) -> Option<&'c Input<'c>> {
    tensor(call, arg).filter(|x| x.strides == &dense(x.sizes)[..] && !x.sizes.contains(&0))
}

/// Whether all operators below can compare elements of this dtype in PyTorch.
fn is_ordered(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::FLOAT32 | Dtype::FLOAT64 | Dtype::INT32 | Dtype::INT64)
}

/// Two outputs of these sizes: values, and their positions.
pub(super) fn values_and_positions(dtype: Dtype, sizes: &[i64]) -> Outputs {
    let mut outputs = Outputs::default();
    for dtype in [dtype, Dtype::INT64] {
        push(&mut outputs, Some(TensorMeta::new(sizes, &dense(sizes), dtype, 0)));
    }
    outputs
}

/// Sizes without dimension `dim`, or with size 1 there if argument `keep` is true.
fn reduced(call: &Call<'_>, sizes: &[i64], dim: usize, keep: usize) -> Option<Dims> {
    let Some(Arg::Bool(keeps)) = call.args.get(keep) else { return None };
    let mut sizes: Dims = sizes.into();
    if *keeps {
        sizes[dim] = 1;
    } else {
        sizes.remove(dim);
    }
    Some(sizes)
}

/// `max.dim(self, dim, keepdim)` and `min.dim`.
pub(crate) fn extreme(call: &Call<'_>) -> Option<Outputs> {
    let x = contiguous(call, 0).filter(|x| is_ordered(x.dtype))?;
    let dim = dimension(int(call, 1)?, x.sizes.len())?;
    Some(values_and_positions(x.dtype, &reduced(call, x.sizes, dim, 2)?))
}

/// `argmax(self, dim, keepdim)` and `argmin`.
pub(crate) fn position(call: &Call<'_>) -> Option<Outputs> {
    let x = contiguous(call, 0).filter(|x| is_ordered(x.dtype))?;
    match (call.args.get(1)?, call.args.get(2)?) {
        (Arg::None, Arg::Bool(false)) => one(Dtype::INT64, &[]),
        (Arg::Int(dim), _) => {
            let dim = dimension(*dim, x.sizes.len())?;
            one(Dtype::INT64, &reduced(call, x.sizes, dim, 2)?)
        }
        _ => None,
    }
}

/// `amax(self, dim, keepdim)` and `amin`.
pub(crate) fn extreme_value(call: &Call<'_>) -> Option<Outputs> {
    contiguous(call, 0)?;
    reduction(call, Some(2), usize::MAX)
}

/// `max(self)` and `min(self)`.
pub(crate) fn extreme_of_all(call: &Call<'_>) -> Option<Outputs> {
    let x = contiguous(call, 0).filter(|x| is_ordered(x.dtype) && call.args.len() == 1)?;
    one(x.dtype, &[])
}

/// `sort(self, dim, descending)`.
pub(crate) fn sort(call: &Call<'_>) -> Option<Outputs> {
    sorted(call, 1)
}

/// `sort.stable(self, stable, dim, descending)`.
pub(crate) fn sort_stable(call: &Call<'_>) -> Option<Outputs> {
    sorted(call, 2)
}

fn sorted(call: &Call<'_>, dim: usize) -> Option<Outputs> {
    let x = contiguous(call, 0).filter(|x| is_ordered(x.dtype))?;
    dimension(int(call, dim)?, x.sizes.len())?;
    Some(values_and_positions(x.dtype, x.sizes))
}

/// `topk(self, k, dim, largest, sorted)`.
pub(crate) fn topk(call: &Call<'_>) -> Option<Outputs> {
    let x = contiguous(call, 0).filter(|x| is_ordered(x.dtype))?;
    let dim = dimension(int(call, 2)?, x.sizes.len())?;
    let mut sizes: Dims = x.sizes.into();
    sizes[dim] = int(call, 1).filter(|k| (0..=sizes[dim]).contains(k))?;
    Some(values_and_positions(x.dtype, &sizes))
}

/// `cumsum(self, dim, dtype)` and `cumprod`.
pub(crate) fn scan(call: &Call<'_>) -> Option<Outputs> {
    let x = contiguous(call, 0)?;
    let same = matches!(x.dtype, Dtype::FLOAT32 | Dtype::FLOAT64 | Dtype::INT64) && asked(call, 2)?.is_none();
    dimension(int(call, 1)?, x.sizes.len())?;
    same.then(|| one(x.dtype, x.sizes))?
}

/// `logcumsumexp(self, dim)`.
pub(crate) fn log_scan(call: &Call<'_>) -> Option<Outputs> {
    let x = contiguous(call, 0).filter(|x| matches!(x.dtype, Dtype::FLOAT32 | Dtype::FLOAT64))?;
    dimension(int(call, 1)?, x.sizes.len())?;
    one(x.dtype, x.sizes)
}

/// `flip(self, dims)` of different dimensions.
pub(crate) fn flip(call: &Call<'_>) -> Option<Outputs> {
    let x = contiguous(call, 0)?;
    let dims: Option<Dims> =
        ints(call, 1)?.iter().map(|d| Some(dimension(*d, x.sizes.len())? as i64)).collect();
    let mut dims = dims?;
    dims.sort_unstable();
    let differ = dims.windows(2).all(|pair| pair[0] != pair[1]);
    differ.then(|| one(x.dtype, x.sizes))?
}

/// `roll(self, shifts, dims)` along one dimension, or in memory order.
pub(crate) fn roll(call: &Call<'_>) -> Option<Outputs> {
    let x = contiguous(call, 0)?;
    let ([_], dims) = (ints(call, 1)?, ints(call, 2)?) else { return None };
    match dims {
        [] => {}
        [dim] => drop(dimension(*dim, x.sizes.len())?),
        _ => return None,
    }
    one(x.dtype, x.sizes)
}

/// `repeat(self, repeats)`.
pub(crate) fn repeat(call: &Call<'_>) -> Option<Outputs> {
    let (x, repeats) = (tensor(call, 0)?, ints(call, 1)?);
    let new = repeats.len().checked_sub(x.sizes.len())?;
    let mut sizes: Dims = repeats.into();
    for (size, n) in sizes[new..].iter_mut().zip(x.sizes) {
        *size = size.checked_mul(*n)?;
    }
    repeats.iter().all(|n| *n > 0).then(|| one(x.dtype, &sizes))?
}

/// The indexed tensor, the indices and the dimension of `gather` and `scatter`, whose other dimensions are equal.
fn indexed<'c>(call: &'c Call<'_>) -> Option<(&'c Input<'c>, &'c Input<'c>)> {
    let x = contiguous(call, 0)?;
    let index = tensor(call, 2).filter(|index| index.dtype == Dtype::INT64)?;
    let dim = dimension(int(call, 1)?, x.sizes.len())?;
    let equal = |d: usize| d == dim || index.sizes[d] == x.sizes[d];
    (index.sizes.len() == x.sizes.len() && (0..x.sizes.len()).all(equal)).then_some((x, index))
}

/// `gather(self, dim, index, sparse_grad)`.
pub(crate) fn gather(call: &Call<'_>) -> Option<Outputs> {
    let (x, index) = indexed(call)?;
    one(x.dtype, index.sizes)
}

/// `scatter(self, dim, index, src)`, `scatter(self, dim, index, value)` and `scatter_add(self, dim, index, src)`.
pub(crate) fn scatter(call: &Call<'_>) -> Option<Outputs> {
    let (x, index) = indexed(call)?;
    let fits = match call.args.get(3)? {
        Arg::Tensor => {
            tensor(call, 3).is_some_and(|source| source.dtype == x.dtype && source.sizes == index.sizes)
        }
        Arg::Int(_) | Arg::Float(_) => x.dtype.is_floating(),
        _ => false,
    };
    fits.then(|| one(x.dtype, x.sizes))?
}

/// `scatter_` and `scatter_add_`.
pub(crate) fn scatter_in_place(call: &Call<'_>) -> Option<Outputs> {
    scatter(call)?;
    outputs_in_place(call)
}

/// `index_select(self, dim, index)`.
pub(crate) fn index_select(call: &Call<'_>) -> Option<Outputs> {
    let x = contiguous(call, 0)?;
    let index = tensor(call, 2).filter(|index| index.dtype == Dtype::INT64 && index.sizes.len() == 1)?;
    let mut sizes = Dims::from_slice(x.sizes);
    sizes[dimension(int(call, 1)?, x.sizes.len())?] = index.sizes[0];
    one(x.dtype, &sizes)
}

/// `take(self, index)`.
pub(crate) fn take(call: &Call<'_>) -> Option<Outputs> {
    let index = tensor(call, 1).filter(|index| index.dtype == Dtype::INT64)?;
    one(tensor(call, 0)?.dtype, index.sizes)
}

/// `index_add(self, dim, index, source, alpha)`.
pub(crate) fn index_add(call: &Call<'_>) -> Option<Outputs> {
    let x = added_to(call)?;
    one(x.dtype, x.sizes)
}

/// `index_add_(self, dim, index, source, alpha)`.
pub(crate) fn index_add_in_place(call: &Call<'_>) -> Option<Outputs> {
    added_to(call)?;
    outputs_in_place(call)
}

/// The tensor that `index_add` adds to.
fn added_to<'c>(call: &'c Call<'_>) -> Option<&'c Input<'c>> {
    let (x, source) = (contiguous(call, 0).filter(|x| x.dtype.is_floating())?, tensor(call, 3)?);
    let index = tensor(call, 2).filter(|index| index.dtype == Dtype::INT64 && index.sizes.len() == 1)?;
    let dim = dimension(int(call, 1)?, x.sizes.len())?;
    let size = |d: usize| if d == dim { index.sizes[0] } else { x.sizes[d] };
    let fits = source.dtype == x.dtype && source.sizes.len() == x.sizes.len();
    (fits && (0..x.sizes.len()).all(|d| source.sizes[d] == size(d))).then_some(x)
}

/// `index_put_(self, indices, values, accumulate)` with one tensor of indices.
pub(crate) fn index_put_in_place(call: &Call<'_>) -> Option<Outputs> {
    let Some(Arg::Tensors(1)) = call.args.get(1) else { return None };
    let x = contiguous(call, 0).filter(|x| !x.sizes.is_empty())?;
    let index = plain(call.inputs.get(1)?).filter(|index| index.dtype == Dtype::INT64)?;
    let values = tensor(call, 2).filter(|values| values.dtype == x.dtype)?;
    values.sizes.iter().eq(index.sizes.iter().chain(&x.sizes[1..])).then(|| outputs_in_place(call))?
}

/// `tensor[index]` with one tensor of indices, both contiguous.
pub(crate) fn index(call: &Call<'_>) -> Option<Outputs> {
    let Some(Arg::Tensors(1)) = call.args.get(1) else { return None };
    let x = contiguous(call, 0).filter(|x| !x.sizes.is_empty())?;
    let index = plain(call.inputs.get(1)?).filter(|index| index.dtype == Dtype::INT64)?;
    let sizes: Dims = index.sizes.iter().chain(&x.sizes[1..]).copied().collect();
    (index.strides == &dense(index.sizes)[..] && !sizes.contains(&0)).then(|| one(x.dtype, &sizes))?
}
