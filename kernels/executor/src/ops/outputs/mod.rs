//! Output metadata of operators (shapes, strides and dtypes), computed from the arguments alone.
//!
//! **Why.** When an op meets a new combination of input shapes, the program needs the metadata of the outputs before it
//! can go on. Where a rule computes them, the op itself need not run first.
//! **Strategy.** A rule covers only calls that PyTorch accepts, and returns exactly the metadata that PyTorch's CPU
//! kernels produce. In doubtful cases, the rule returns `None`. While calls are traced, the results of rules are
//! compared with the actual outputs.

pub(crate) mod attention;
pub(crate) mod cells;
pub(crate) mod ctc;
pub(crate) mod loss;
pub(crate) mod pooling;
pub(crate) mod selection;

use smallvec::smallvec;
use tandem_tracegraph::call::{Arg, Call, Input};
use tandem_tracegraph::node::{OutSpec, Outputs};
use tandem_tracegraph::tensor_meta::{Dtype, TensorMeta};

use crate::ops::arguments::{asked, dimension, floats, int, ints, optional, plain, tensor};
use crate::ops::convolution;
use crate::ops::express::{Base, Formats, assignments, new_outputs};
use crate::shapes::{Dims, channels_last, dense, is_non_overlapping, suggests_channels_last};

/// A rule: returns a call's outputs, or `None` where only running the call can determine them.
pub type Gives = fn(&Call<'_>) -> Option<Outputs>;

/// How to determine an operator's outputs without running the operator.
#[derive(Clone)]
pub enum OutputRule {
    /// By type promotion and broadcasting of point-wise operands.
    Pointwise(Base),
    /// By a function for this operator.
    Own(Gives),
}

/// Maximum number of dimensions of a tensor for PyTorch's operators that have an argument `dim`
/// (`at::dim_bitset_size`).
const DIM_BITSET_SIZE: usize = 64;

impl OutputRule {
    /// A call's outputs, or `None` where only running the call can determine them.
    pub fn outputs(&self, call: &Call<'_>) -> Option<Outputs> {
        let outputs = match self {
            OutputRule::Own(_) if call.inputs.iter().any(|x| x.sizes.len() > DIM_BITSET_SIZE) => return None,
            OutputRule::Own(gives) => gives(call)?,
            OutputRule::Pointwise(base) => {
                let outputs = if base.in_place() { outputs_in_place(call) } else { new_outputs(base, call) }?;
                // PyTorch may raise for a call that has no expression.
                assignments(base, call, &outputs, Formats::Exact).map(|_| outputs)?
            }
        };
        have_sizes(&outputs).then_some(outputs)
    }
}

/// Whether the size in bytes of each new tensor fits an `i64`. If it does not, PyTorch raises.
pub fn have_sizes(outputs: &Outputs) -> bool {
    outputs.outs.iter().all(|out| match out {
        OutSpec::NewStorage { meta, .. } => {
            let (item, dims) = (meta.dtype.size() as i64, meta.sizes().iter().zip(meta.strides()));
            let further = |last: i64, dim: (&i64, &i64)| last.checked_add((dim.0 - 1).checked_mul(*dim.1)?);
            let last =
                dims.clone().try_fold(0, further).and_then(|last| last.checked_add(1)?.checked_mul(item));
            // PyTorch also computes the size of a row-major tensor of the same shape, which may overflow even if this
            // tensor's size does not.
            let bytes = dims.clone().try_fold(item, |bytes, dim| bytes.checked_mul(*dim.0));
            let expanded = dims.clone().any(|(_, stride)| *stride == 0);
            meta.sizes().contains(&0) || (last.is_some() && (bytes.is_some() || expanded))
        }
        _ => true,
    })
}

/// The outputs of an operator that writes its first argument.
pub fn outputs_in_place(call: &Call<'_>) -> Option<Outputs> {
    let outs = match call.args.first()? {
        Arg::Tensor => vec![OutSpec::Same(0)],
        _ => Vec::new(),
    };
    Some(Outputs { outs, ..Outputs::default() })
}

/// Largest number of categories that `multinomial` accepts, as floats count no further.
const MAX_CATEGORIES: i64 = 1 << 24;

/// The outputs of an operator that fills its first argument with random numbers. `None` if elements of the argument
/// overlap, for which PyTorch raises.
pub(crate) fn drawn(call: &Call<'_>) -> Option<Outputs> {
    let x = floats(call, 0)?;
    is_non_overlapping(x.sizes, x.strides).then(|| outputs_in_place(call))?
}

/// `multinomial(self, num_samples, replacement)`: indices of categories, as many as the samples of each row.
pub(crate) fn sampled(call: &Call<'_>) -> Option<Outputs> {
    let (x, samples) = (floats(call, 0)?, int(call, 1)?);
    let Some(Arg::Bool(replaced)) = call.args.get(2) else { return None };
    let (categories, rows) = x.sizes.split_last()?;
    let fits =
        (1..=MAX_CATEGORIES).contains(categories) && samples > 0 && (*replaced || samples <= *categories);
    let sizes: Dims = rows.iter().copied().chain([samples]).collect();
    (fits && rows.len() < 2 && !rows.contains(&0)).then(|| one(Dtype::INT64, &sizes))?
}

/// A reduction over all dimensions: `(self, dtype)`.
pub(crate) fn of_all(call: &Call<'_>) -> Option<Outputs> {
    reduction(call, None, 1)
}

/// A reduction over some dimensions: `(self, dim, keepdim, dtype)`.
pub(crate) fn of_dims(call: &Call<'_>) -> Option<Outputs> {
    reduction(call, Some(2), 3)
}

/// `logsumexp`: `(self, dim, keepdim)`.
pub(crate) fn logsumexp(call: &Call<'_>) -> Option<Outputs> {
    reduction(call, Some(2), usize::MAX)
}

/// `var.correction` and `std.correction`: `(self, dim, correction, keepdim)`.
pub(crate) fn variance(call: &Call<'_>) -> Option<Outputs> {
    reduction(call, Some(3), usize::MAX)
}

/// Outputs that are new contiguous tensors of these sizes; `None` stands for an undefined tensor.
pub(crate) fn new_tensors<'s>(dtype: Dtype, sizes: impl IntoIterator<Item = Option<&'s [i64]>>) -> Outputs {
    let mut outputs = Outputs::default();
    for sizes in sizes {
        let meta = sizes.map(|sizes| TensorMeta::new(sizes, &dense(sizes), dtype, 0));
        push(&mut outputs, meta);
    }
    outputs
}

/// Adds an output: a new tensor, or an undefined one.
fn push(outputs: &mut Outputs, meta: Option<TensorMeta>) {
    outputs.outs.push(match meta {
        Some(meta) => {
            outputs.new_storages.push(meta.extent_bytes(0));
            OutSpec::NewStorage { storage: outputs.new_storages.len() as u16 - 1, meta, offset: 0 }
        }
        None => OutSpec::Undefined,
    });
}

/// A single new contiguous tensor.
fn one(dtype: Dtype, sizes: &[i64]) -> Option<Outputs> {
    Some(new_tensors(dtype, [Some(sizes)]))
}

/// `empty(size, dtype, layout, device, pin_memory, memory_format)`.
pub(crate) fn empty(call: &Call<'_>) -> Option<Outputs> {
    let (sizes, dtype) = (ints(call, 0)?, asked(call, 1)?.unwrap_or(call.default_dtype));
    let plain = matches!(call.args.get(5), None | Some(Arg::None | Arg::Int(0)));
    let laid_out = matches!(call.args.get(2), None | Some(Arg::None | Arg::Int(0)));
    (plain && laid_out && sizes.iter().all(|n| *n >= 0)).then(|| one(dtype, sizes))?
}

/// `empty_strided(size, stride, dtype, layout, device, pin_memory)`.
pub(crate) fn empty_strided(call: &Call<'_>) -> Option<Outputs> {
    let (sizes, strides) = (ints(call, 0)?, ints(call, 1)?);
    let dtype = asked(call, 2)?.unwrap_or(call.default_dtype);
    let laid_out = matches!(call.args.get(3), None | Some(Arg::None | Arg::Int(0)));
    let fits = sizes.len() == strides.len() && sizes.iter().chain(strides).all(|n| *n >= 0);
    if !fits || !laid_out {
        return None;
    }
    let mut outputs = Outputs::default();
    push(&mut outputs, Some(TensorMeta::new(sizes, strides, dtype, 0)));
    Some(outputs)
}

/// A reduction of a floating-point tensor over the dimensions in argument 1. `keep` and `dtype` are the indices of
/// the arguments `keepdim` and `dtype`. Without `keep`, the reduction is over all dimensions.
fn reduction(call: &Call<'_>, keep: Option<usize>, dtype: usize) -> Option<Outputs> {
    let x = floats(call, 0)?;
    let dtype = asked(call, dtype)?.unwrap_or(x.dtype);
    let mut reduced = vec![true; x.sizes.len()];
    let mut keeps = false;
    if let Some(keep) = keep {
        keeps = matches!(call.args.get(keep), Some(Arg::Bool(true)));
        let dims: &[i64] = match call.args.get(1)? {
            Arg::None => &[],
            Arg::Ints(dims) => dims,
            _ => return None,
        };
        if !dims.is_empty() {
            reduced.fill(false);
        }
        for d in dims {
            // PyTorch raises if a dimension is listed twice.
            let d = dimension(*d, x.sizes.len()).filter(|d| !reduced[*d])?;
            reduced[d] = true;
        }
    }
    if !dtype.is_floating() {
        return None;
    }
    let kept = x.sizes.iter().zip(&reduced);
    let sizes: Dims =
        kept.filter(|(_, r)| keeps || !**r).map(|(n, reduced)| if *reduced { 1 } else { *n }).collect();
    one(dtype, &sizes)
}

/// `_softmax(self, dim, half_to_float)`, `_log_softmax` with the same arguments, and
/// `_safe_softmax(self, dim, dtype)`.
pub(crate) fn softmax(call: &Call<'_>) -> Option<Outputs> {
    let x = floats(call, 0)?;
    dimension(int(call, 1)?, x.sizes.len())?;
    let same = match call.args.get(2) {
        None | Some(Arg::None | Arg::Bool(false)) => true,
        Some(Arg::Int(dtype)) => Dtype(*dtype as u8) == x.dtype,
        _ => false,
    };
    same.then(|| one(x.dtype, x.sizes))?
}

/// `_softmax_backward_data(grad_output, output, dim, input_dtype)` and `_log_softmax_backward_data`.
pub(crate) fn softmax_backward(call: &Call<'_>) -> Option<Outputs> {
    let (grad, y) = (floats(call, 0)?, floats(call, 1)?);
    dimension(int(call, 2)?, y.sizes.len())?;
    let same = grad.sizes == y.sizes && grad.dtype == y.dtype && asked(call, 3)? == Some(y.dtype);
    same.then(|| one(grad.dtype, grad.sizes))?
}

/// `tril(self, diagonal)` and `triu`.
pub(crate) fn triangle(call: &Call<'_>) -> Option<Outputs> {
    let x = tensor(call, 0).filter(|x| x.sizes.len() >= 2)?;
    one(x.dtype, x.sizes)
}

/// `cat(tensors, dim)` of tensors of one dtype. Tensors of shape `[0]` are ignored, as in PyTorch.
pub(crate) fn cat(call: &Call<'_>) -> Option<Outputs> {
    let Some(Arg::Tensors(n)) = call.args.first() else { return None };
    let given = call.inputs.get(..*n as usize)?;
    let all: Option<Vec<&Input<'_>>> = given.iter().filter(|x| x.sizes != [0]).map(plain).collect();
    let all = all?;
    let first = *all.first()?;
    let dim = dimension(int(call, 1)?, first.sizes.len())?;
    let fits = |x: &&Input<'_>| {
        let alike = x.sizes.iter().zip(first.sizes).enumerate().all(|(d, (a, b))| d == dim || a == b);
        alike && x.sizes.len() == first.sizes.len()
    };
    let one_dtype = given.iter().all(|x| x.dtype == first.dtype);
    if !one_dtype || !all.iter().all(fits) || all.iter().any(|x| suggests_channels_last(x.sizes, x.strides)) {
        return None;
    }
    let mut sizes: Dims = first.sizes.into();
    sizes[dim] = all.iter().map(|x| x.sizes[dim]).sum();
    one(first.dtype, &sizes)
}

/// The number of leading dimensions, over which a tensor is not normalized.
fn leading(x: &Input<'_>, normalized: &[i64]) -> Option<usize> {
    let leading = x.sizes.len().checked_sub(normalized.len())?;
    (!normalized.is_empty() && x.sizes[leading..] == *normalized).then_some(leading)
}

/// `native_layer_norm(input, normalized_shape, weight, bias, eps)`.
pub(crate) fn layer_norm(call: &Call<'_>) -> Option<Outputs> {
    let (x, normalized) = (floats(call, 0)?, ints(call, 1)?);
    let leading = leading(x, normalized)?;
    optional(call, 2, normalized, x.dtype)?;
    optional(call, 3, normalized, x.dtype)?;
    let mut rows: Dims = x.sizes.into();
    rows[leading..].fill(1);
    Some(new_tensors(x.dtype, [Some(x.sizes), Some(&rows), Some(&rows)]))
}

/// The three flags of an `output_mask` argument.
fn wanted(call: &Call<'_>, arg: usize) -> Option<[bool; 3]> {
    match call.args.get(arg)? {
        Arg::Bools([a, b, c]) => Some([*a != 0, *b != 0, *c != 0]),
        _ => None,
    }
}

/// `native_layer_norm_backward(grad_out, input, normalized_shape, mean, rstd, weight, bias, output_mask)`.
pub(crate) fn layer_norm_backward(call: &Call<'_>) -> Option<Outputs> {
    let (grad, x, normalized) = (floats(call, 0)?, floats(call, 1)?, ints(call, 2)?);
    leading(x, normalized)?;
    let given = [optional(call, 5, normalized, x.dtype)?, optional(call, 6, normalized, x.dtype)?];
    let [input, weight, bias] = wanted(call, 7)?;
    let fits = grad.sizes == x.sizes && grad.dtype == x.dtype;
    if !fits || (weight && !given[0]) || (bias && !given[1]) {
        return None;
    }
    let gradients = [(input, x.sizes), (weight, normalized), (bias, normalized)];
    Some(new_tensors(x.dtype, gradients.map(|(wanted, sizes)| wanted.then_some(sizes))))
}

/// A contiguous `float32` tensor argument.
fn exact<'c>(call: &'c Call<'_>, arg: usize) -> Option<&'c Input<'c>> {
    tensor(call, arg).filter(|x| x.dtype == Dtype::FLOAT32 && x.strides == &dense(x.sizes)[..])
}

/// PyTorch's memory format of a new tensor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum MemoryFormat {
    Contiguous,
    ChannelsLast,
}

impl MemoryFormat {
    fn strides(self, sizes: &[i64]) -> Dims {
        match self {
            MemoryFormat::Contiguous => dense(sizes),
            MemoryFormat::ChannelsLast => channels_last(sizes),
        }
    }
}

/// A `float32` tensor argument and its memory format. `None` for other strides, and for sizes for which both formats
/// have the same strides or PyTorch has to guess the format.
pub(crate) fn formatted<'c>(call: &'c Call<'_>, arg: usize) -> Option<(&'c Input<'c>, MemoryFormat)> {
    if let Some(x) = exact(call, arg) {
        return Some((x, MemoryFormat::Contiguous));
    }
    let x = tensor(call, arg)
        .filter(|x| x.dtype == Dtype::FLOAT32 && x.strides == &channels_last(x.sizes)[..])?;
    let &[_, channels, height, width] = x.sizes else { return None };
    (channels > 1 && height * width > 1).then_some((x, MemoryFormat::ChannelsLast))
}

/// Outputs that are new tensors of these sizes and formats; `None` stands for an undefined tensor.
pub(crate) fn new_formatted<'s>(
    dtype: Dtype,
    tensors: impl IntoIterator<Item = Option<(&'s [i64], MemoryFormat)>>,
) -> Outputs {
    let mut outputs = Outputs::default();
    for tensor in tensors {
        push(
            &mut outputs,
            tensor.map(|(sizes, format)| TensorMeta::new(sizes, &format.strides(sizes), dtype, 0)),
        );
    }
    outputs
}

/// The common dtype of matrices, or `None` if their dtypes differ, if a matrix is empty, or if BLAS does not multiply
/// matrices of this dtype.
fn matrices(all: &[&Input<'_>]) -> Option<Dtype> {
    let dtype = all.first()?.dtype;
    let same = all.iter().all(|x| x.dtype == dtype && !x.sizes.contains(&0));
    (same && matches!(dtype, Dtype::FLOAT32 | Dtype::FLOAT64)).then_some(dtype)
}

/// `mm(self, mat2)` and `addmm(self, mat1, mat2)`.
pub(crate) fn mm(call: &Call<'_>) -> Option<Outputs> {
    products(call, |a, b| match (a, b) {
        (&[m, k], &[k2, n]) if k == k2 => Some(smallvec![m, n]),
        _ => None,
    })
}

/// `mv(self, vec)` and `addmv(self, mat, vec)`.
pub(crate) fn mv(call: &Call<'_>) -> Option<Outputs> {
    products(call, |a, b| match (a, b) {
        (&[m, k], &[k2]) if k == k2 => Some(smallvec![m]),
        _ => None,
    })
}

/// `bmm(self, mat2)` and `baddbmm(self, batch1, batch2)`.
pub(crate) fn bmm(call: &Call<'_>) -> Option<Outputs> {
    products(call, |a, b| match (a, b) {
        (&[count, m, k], &[count2, k2, n]) if (count, k) == (count2, k2) => Some(smallvec![count, m, n]),
        _ => None,
    })
}

/// The output of a product of the last two tensors. `sizes` maps the operands' sizes to the output's. The first of three
/// tensors is a bias, which broadcasts to the output.
fn products(call: &Call<'_>, sizes: fn(&[i64], &[i64]) -> Option<Dims>) -> Option<Outputs> {
    let added = call.inputs.len().checked_sub(2)?;
    let (a, b) = (tensor(call, added)?, tensor(call, added + 1)?);
    let sizes = sizes(a.sizes, b.sizes)?;
    let mut dtype = matrices(&[a, b])?;
    if added > 0 {
        let bias = tensor(call, 0)?;
        let fits = bias.sizes.iter().rev().zip(sizes.iter().rev()).all(|(size, to)| *size == 1 || size == to);
        (fits && bias.sizes.len() <= sizes.len()).then_some(())?;
        dtype = matrices(&[a, bias])?;
    }
    one(dtype, &sizes)
}

/// `convolution(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups)`.
pub(crate) fn convolution(call: &Call<'_>) -> Option<Outputs> {
    let ((x, of_x), (weight, of_weight)) = (formatted(call, 0)?, formatted(call, 1)?);
    let sizes = convolution::sizes(x.sizes, weight.sizes, call, 3)?;
    optional(call, 2, &[sizes[1]], Dtype::FLOAT32)?;
    let format = one_format([of_x, of_weight]);
    (!x.sizes.contains(&0)).then(|| new_formatted(Dtype::FLOAT32, [Some((&sizes[..], format))]))
}

/// The format of an output of two operands: channels last if an operand is channels last.
fn one_format(formats: [MemoryFormat; 2]) -> MemoryFormat {
    if formats.contains(&MemoryFormat::ChannelsLast) {
        MemoryFormat::ChannelsLast
    } else {
        MemoryFormat::Contiguous
    }
}

/// `convolution_backward(grad_output, input, weight, bias_sizes, stride, padding, dilation, transposed,
/// output_padding, groups, output_mask)`.
pub(crate) fn convolution_backward(call: &Call<'_>) -> Option<Outputs> {
    let (grad, _) = formatted(call, 0)?;
    let ((x, of_x), (weight, of_weight)) = (formatted(call, 1)?, formatted(call, 2)?);
    let sizes = convolution::sizes(x.sizes, weight.sizes, call, 4)?;
    let wanted = wanted(call, 10)?;
    // oneDNN computes the gradients of weight and bias together. If only the bias's is asked for, PyTorch returns both.
    if wanted[2] && !wanted[1] {
        return None;
    }
    let bias = [sizes[1]];
    let all = [(wanted[0], x.sizes), (wanted[1], weight.sizes), (wanted[2], &bias[..])];
    let fits = grad.sizes == &sizes[..] && !x.sizes.contains(&0);
    let format = one_format([of_x, of_weight]);
    // For a single image, and a weight with the same strides in both formats, the output's strides depend on PyTorch's
    // algorithm.
    let same = weight.sizes[1] == 1 || weight.sizes[2..].iter().product::<i64>() == 1;
    if format == MemoryFormat::ChannelsLast && x.sizes[0] == 1 && same {
        return None;
    }
    let of = |sizes: &[i64]| if sizes.len() > 1 { format } else { MemoryFormat::Contiguous };
    fits.then(|| {
        let all = all.map(|(wanted, sizes)| wanted.then_some((sizes, of(sizes))));
        new_formatted(Dtype::FLOAT32, all)
    })
}

/// `native_batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps)`. Outside of
/// training, the tensors saved for the backward pass are empty.
pub(crate) fn batch_norm(call: &Call<'_>) -> Option<Outputs> {
    let (x, format) = formatted(call, 0)?;
    if x.sizes.len() < 2 || x.sizes.contains(&0) {
        return None;
    }
    let channels = [x.sizes[1]];
    let [mean, variance] = [3, 4].map(|arg| optional(call, arg, &channels, Dtype::FLOAT32));
    let training = int(call, 5)? != 0;
    if mean? != variance? || !(training || mean?) {
        return None;
    }
    let saved: &[i64] = &[if training { channels[0] } else { 0 }];
    let saved = (saved, MemoryFormat::Contiguous);
    Some(new_formatted(x.dtype, [(x.sizes, format), saved, saved].map(Some)))
}

/// `native_batch_norm_backward(grad_out, input, weight, running_mean, running_var, save_mean, save_invstd, train,
/// eps, output_mask)`.
pub(crate) fn batch_norm_backward(call: &Call<'_>) -> Option<Outputs> {
    let ((grad, _), (x, format)) = (formatted(call, 0)?, formatted(call, 1)?);
    if x.sizes.len() < 2 || x.sizes.contains(&0) {
        return None;
    }
    let channels = [x.sizes[1]];
    let wanted = wanted(call, 9)?;
    let fits = grad.sizes == x.sizes && grad.dtype == x.dtype && optional(call, 2, &channels, x.dtype)?;
    let weight = (&channels[..], MemoryFormat::Contiguous);
    let all = [(x.sizes, format), weight, weight];
    let one = |number: usize| wanted[number].then_some(all[number]);
    fits.then(|| new_formatted(x.dtype, [one(0), one(1), one(2)]))
}

fn is_index(x: &Input<'_>) -> bool {
    matches!(x.dtype, Dtype::INT32 | Dtype::INT64)
}

/// `embedding(weight, indices, padding_idx, ...)`.
pub(crate) fn embedding(call: &Call<'_>) -> Option<Outputs> {
    let (table, indices) = (tensor(call, 0)?, tensor(call, 1).filter(|x| is_index(x))?);
    let [_, each] = table.sizes[..] else { return None };
    let sizes: Dims = indices.sizes.iter().copied().chain([each]).collect();
    one(table.dtype, &sizes)
}

/// `embedding_dense_backward(grad_output, indices, num_weights, padding_idx, scale_grad_by_freq)`.
pub(crate) fn embedding_backward(call: &Call<'_>) -> Option<Outputs> {
    let (grad, indices) = (floats(call, 0)?, tensor(call, 1).filter(|x| is_index(x))?);
    let (each, rows) = grad.sizes.split_last()?;
    let weights = int(call, 2).filter(|n| *n > 0)?;
    (rows == indices.sizes).then(|| one(grad.dtype, &[weights, *each]))?
}

/// `select_backward(grad_output, input_sizes, dim, index)`.
pub(crate) fn select_backward(call: &Call<'_>) -> Option<Outputs> {
    let (grad, sizes) = (tensor(call, 0)?, ints(call, 1)?);
    let dim = dimension(int(call, 2)?, sizes.len())?;
    dimension(int(call, 3)?, sizes[dim] as usize)?;
    let rest = sizes.iter().enumerate().filter(|(d, _)| *d != dim).map(|(_, n)| n);
    rest.eq(grad.sizes).then(|| one(grad.dtype, sizes))?
}

/// `slice_backward(grad_output, input_sizes, dim, start, end, step)`.
pub(crate) fn slice_backward(call: &Call<'_>) -> Option<Outputs> {
    let (grad, sizes) = (tensor(call, 0)?, ints(call, 1)?);
    let dim = dimension(int(call, 2)?, sizes.len())?;
    let within = |i: i64| (if i < 0 { i + sizes[dim] } else { i }).clamp(0, sizes[dim]);
    let (start, end) = (within(int(call, 3)?), within(int(call, 4)?));
    let step = int(call, 5).filter(|step| *step > 0)?;
    let many = ((end - start).max(0) + step - 1) / step;
    let mut part: Dims = sizes.into();
    part[dim] = many;
    (part[..] == *grad.sizes).then(|| one(grad.dtype, sizes))?
}

/// `constant_pad_nd(self, pad, value)`. `pad` lists the numbers of elements added before and after each dimension,
/// the last dimension first.
pub(crate) fn pad(call: &Call<'_>) -> Option<Outputs> {
    let (x, pad) = (tensor(call, 0)?, ints(call, 1)?);
    let fits = pad.len().is_multiple_of(2) && pad.len() / 2 <= x.sizes.len();
    if !fits || suggests_channels_last(x.sizes, x.strides) {
        return None;
    }
    let mut sizes: Dims = x.sizes.into();
    for (size, around) in sizes.iter_mut().rev().zip(pad.chunks(2)) {
        *size += around[0] + around[1];
    }
    // Without positive padding, PyTorch returns a clone of a narrowed view. The clone's strides follow the input's, and
    // are ambiguous for dimensions of size 1.
    let clear = pad.iter().any(|n| *n > 0) || (x.strides == &dense(x.sizes)[..] && !sizes.contains(&1));
    (clear && sizes.iter().all(|n| *n > 0) && !x.sizes.contains(&0)).then(|| one(x.dtype, &sizes))?
}

/// The number of rows and of classes of a loss whose target is a class index for each row.
fn classes(x: &Input<'_>, target: &Input<'_>, weight: usize, call: &Call<'_>) -> Option<[i64; 2]> {
    let shape @ [rows, classes] = <[i64; 2]>::try_from(x.sizes).ok()?;
    optional(call, weight, &[classes], x.dtype)?;
    (target.sizes[..] == [rows] && target.dtype == Dtype::INT64).then_some(shape)
}

/// `nll_loss_forward(self, target, weight, reduction, ignore_index)`.
pub(crate) fn nll_loss(call: &Call<'_>) -> Option<Outputs> {
    let (x, target) = (floats(call, 0)?, tensor(call, 1)?);
    let [rows, _] = classes(x, target, 2, call)?;
    let loss: &[i64] = if int(call, 3)? == 0 { &[rows] } else { &[] };
    Some(new_tensors(x.dtype, [Some(loss), Some(&[])]))
}

/// `nll_loss_backward(grad_output, self, target, weight, reduction, ignore_index, total_weight)`.
pub(crate) fn nll_loss_backward(call: &Call<'_>) -> Option<Outputs> {
    let (grad, x, target) = (floats(call, 0)?, floats(call, 1)?, tensor(call, 2)?);
    let [rows, _] = classes(x, target, 3, call)?;
    let expected: &[i64] = if int(call, 4)? == 0 { &[rows] } else { &[] };
    let fits = grad.sizes == expected && grad.dtype == x.dtype;
    fits.then(|| one(x.dtype, x.sizes))?
}

/// `all(self)` and `any(self)` of elements other than bytes, for which PyTorch returns a byte.
pub(crate) fn truth(call: &Call<'_>) -> Option<Outputs> {
    tensor(call, 0).filter(|x| x.dtype != Dtype::UINT8).map(|_| one(Dtype::BOOL, &[]))?
}

/// `masked_fill(self, mask, value)` with a number as `value`.
pub(crate) fn masked_fill(call: &Call<'_>) -> Option<Outputs> {
    let (x, mask) = (floats(call, 0)?, tensor(call, 1).filter(|mask| mask.dtype == Dtype::BOOL)?);
    let number = matches!(call.args.get(2), Some(Arg::Int(_) | Arg::Float(_) | Arg::Bool(_)));
    let lead = x.sizes.len().checked_sub(mask.sizes.len())?;
    let spreads = mask.sizes.iter().zip(&x.sizes[lead..]).all(|(m, n)| m == n || *m == 1);
    (number && spreads && x.strides == &dense(x.sizes)[..]).then(|| one(x.dtype, x.sizes))?
}
