//! The op table: properties of operators that their schemas do not state.
//!
//! An operator needs an entry only where its schema and PyTorch's tags are not sufficient. Any other operator is
//! captured and treated according to its schema.

use crate::call::{Arg, Call, Input, Place};
use crate::ids::OpId;
use crate::tensor_meta::{Dtype, flags};

/// The role of an argument in a node (DESIGN: attributes, shapes and values).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ArgClass {
    /// A tensor, an optional tensor or a list of tensors.
    Tensor,
    /// A size (`SymInt` in the schema). It is part of the variant, not of the node.
    Shape,
    /// An integer, bool, string, dtype or similar. It is part of the node.
    Attr,
    /// A float or a `Scalar`. Its type is part of the node, its value is fed.
    Value,
    /// A device.
    Device,
    /// A random generator, which is fed.
    Generator,
}

/// An operator overload.
#[derive(Clone, Debug)]
pub struct OpInfo {
    /// Number of the overload.
    pub id: OpId,
    /// Full name, for example `aten::add.Tensor`.
    pub name: Box<str>,
    /// Class of each argument.
    pub args: Box<[ArgClass]>,
    /// For each argument, whether the operator writes it.
    pub written: Box<[bool]>,
    /// Whether the operator writes any argument.
    pub writes: bool,
    /// Whether an output is not a tensor, so that a call is a fetch.
    pub returns_host: bool,
    /// Whether output shapes depend on data, so that a call is a fetch of shapes.
    pub dynamic_shape: bool,
    /// Whether `dynamic_shape` applies only to calls with a mask among their inputs.
    dynamic_by_mask: bool,
    /// Whether the operator raises `LinAlgError` for some values of its inputs.
    raises_lin_alg: bool,
    /// Whether `raises_lin_alg` applies only to calls whose last argument, `check_errors`, is true.
    raises_if_asked: bool,
    /// Whether numbers decide output shapes, and not only sizes do. They are then part of the variant.
    pub sized_by_number: bool,
    /// Whether the operator draws from a generator.
    pub random: bool,
    /// Whether the operator only computes each element of its outputs from corresponding elements of its inputs.
    pub pointwise: bool,
    /// Whether an argument is a fed number or has a bound.
    has_numbers: bool,
    /// Bounds of the values that arguments may have, by index.
    bounds: Box<[(usize, Bound)]>,
}

/// The reason why a kernel of PyTorch for the default backend is kept instead of being captured.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Left {
    /// The operator returns another window on the same storage.
    View,
    /// The operator creates a tensor by calling captured operators (`empty` and a fill).
    Factory,
    /// The operator only uses metadata.
    Metadata,
    /// The operator calls `_copy_from` or other captured operators.
    Composite,
    /// The operator is for layouts or devices that Tandem does not support, or for PyTorch's own tests.
    Elsewhere,
}

macro_rules! left {
    ($($why:ident: $($name:literal)*;)*) => {
        /// The reviewed list of default-backend kernels that are kept, by name without overload.
        pub const LEFT: &[(&str, Left)] = &[$($(($name, Left::$why),)*)*];
    };
}

left! {
    View:
        "alias" "as_strided_" "detach" "detach_" "diagonal" "expand" "lift_fresh" "permute" "select" "slice"
        "slice_inverse" "split" "split_with_sizes" "squeeze" "squeeze_" "t" "t_" "transpose" "transpose_"
        "unbind" "unsafe_split" "unsafe_split_with_sizes" "unsqueeze" "unsqueeze_" "view" "_unsafe_view" "_conj"
        "_neg_view" "_fw_primal" "_make_dual" "_lazy_clone" "lift" "swapaxes_" "swapdims_";
    Factory:
        "arange" "bartlett_window" "blackman_window" "empty_like" "empty_permuted" "empty_quantized" "eye"
        "fft_fftfreq" "fft_rfftfreq" "from_file" "full" "full_like" "hamming_window" "hann_window"
        "linspace" "logspace" "new_empty" "new_empty_strided" "new_full" "new_ones" "new_zeros" "normal_functional"
        "ones" "ones_like" "rand" "rand_like" "randint" "randint_like" "randn" "randn_like" "randperm" "range"
        "scalar_tensor" "tril_indices" "triu_indices" "zeros" "zeros_like" "_efficientzerotensor"
        "_new_zeros_with_same_feature_meta";
    Metadata:
        "is_pinned" "_pin_memory" "is_same_size" "_has_same_storage_numel" "dense_dim" "sparse_dim"
        "is_coalesced" "_coalesced" "sym_constrain_range" "sym_constrain_range_for_size" "_assert_tensor_metadata"
        "_resize_output" "_resize_output_" "resize" "resize_as" "resize_as_" "set" "is_non_overlapping_and_dense";
    Composite:
        "clone" "copy_" "_to_copy" "_copy_from_and_resize" "_pack_padded_sequence" "repeat_interleave" "shallow_copy_data_";
    Elsewhere:
        "values" "indices" "_values" "_indices" "crow_indices" "col_indices" "ccol_indices" "row_indices" "lstm_mps"
        "lstm_mps_backward" "to_mkldnn";
}

const LEFT_PREFIXES: &[&str] = &[
    "_test",
    "_sparse",
    "sparse",
    "_nested",
    "_to_sparse",
    "to_sparse",
    "mkldnn",
    "miopen",
    "cudnn",
    "_cudnn",
    "_mps",
    "mps",
    "_foobar",
    "_philox",
    "_mkldnn",
    "_lstm",
    "to_padded",
];

/// The reason why the default-backend kernel of `name` (`aten::op.overload`) is kept, or `None` if it is captured.
pub fn leaves_default(name: &str) -> Option<Left> {
    let name = name.strip_prefix("aten::").unwrap_or(name);
    let (base, overload) = name.split_once('.').unwrap_or((name, ""));
    if let Some((_, why)) = LEFT.iter().find(|(n, _)| *n == base) {
        return Some(*why);
    }
    if LEFT_PREFIXES.iter().any(|p| base.starts_with(p)) {
        return Some(Left::Elsewhere);
    }
    // `x_copy` variants of views and generated `out=` variants call the functional operator and copy its output.
    (base.ends_with("_copy") || overload == "out" || overload.ends_with("_out") || base.ends_with("_out"))
        .then_some(Left::Composite)
}

/// Operators whose output shapes depend on data, although PyTorch does not tag them accordingly.
const DYNAMIC: &[&str] =
    &["aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::bincount"];

/// Operators that raise `LinAlgError` for some values of their inputs. Programs catch the exception at the call, so
/// the call waits for its outputs, as on CUDA.
const RAISING: &[&str] = &[
    "aten::_linalg_check_errors",
    "aten::_linalg_eigh",
    "aten::_linalg_eigvals",
    "aten::_linalg_svd",
    "aten::cholesky",
    "aten::cholesky_inverse",
    "aten::linalg_eig",
    "aten::linalg_eigvals",
    "aten::linalg_lstsq",
    "aten::linalg_matrix_sqrth",
    "aten::linalg_pinv",
    "aten::linalg_polar",
];

/// Operators of other libraries whose output shapes follow from the metadata of their inputs.
const STATIC_FOREIGN: &[&str] = &[
    "torchvision::roi_align",
    "torchvision::_roi_align_backward",
    "torchvision::roi_pool",
    "torchvision::deform_conv2d",
    "torchvision::_deform_conv2d_backward",
];

/// Operators whose output shapes depend on numbers, by prefix.
const SIZED_BY_NUMBER: &[&str] =
    &["aten::arange", "aten::range", "aten::linspace", "aten::logspace", "aten::upsample", "aten::_upsample"];

/// The values that an operator's kernels accept for a number. No bound accepts NaN.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Bound {
    /// A range, including both ends.
    Within(f64, f64),
    /// Any number but 0.
    NotZero,
    /// For integer tensors, a number of at least 0.
    Natural,
    /// For integer tensors, a number other than 0. This includes zero-dimensional host tensors, which Python
    /// numbers become.
    Divisor,
    /// The end of a range that begins at the number in another argument. The length must fit the tensor's dtype.
    EndOf(usize),
    /// A number greater than that in another argument.
    Above(usize),
}

/// Bounds of arguments: an operator's name with or without overload, the argument's index, and the bound. PyTorch
/// raises for other values.
#[rustfmt::skip]
const BOUNDS: &[(&str, usize, Bound)] = &[
    ("_cdist_forward", 2, Bound::Within(0.0, f64::INFINITY)),
    ("_foreach_pow", 1, Bound::Natural),
    ("_foreach_pow_", 1, Bound::Natural),
    ("_pdist_forward", 1, Bound::Within(0.0, f64::INFINITY)),
    ("_scaled_dot_product_flash_attention_for_cpu", 3, Bound::Within(0.0, 0.0)),
    ("bernoulli", 1, Bound::Within(0.0, 1.0)),
    ("bernoulli_", 1, Bound::Within(0.0, 1.0)),
    ("cauchy_", 2, Bound::Within(f64::MIN_POSITIVE, f64::INFINITY)),
    ("celu", 1, Bound::NotZero),
    ("celu_", 1, Bound::NotZero),
    ("div.Tensor_mode", 1, Bound::Divisor),
    ("div.out_mode", 1, Bound::Divisor),
    ("div_.Tensor_mode", 1, Bound::Divisor),
    ("elu_backward", 1, Bound::Within(0.0, f64::INFINITY)),
    ("exponential_", 1, Bound::Within(f64::MIN_POSITIVE, f64::INFINITY)),
    ("floor_divide", 1, Bound::Divisor),
    ("floor_divide_", 1, Bound::Divisor),
    ("fmod", 1, Bound::Divisor),
    ("fmod_", 1, Bound::Divisor),
    ("geometric_", 1, Bound::Within(f64::MIN_POSITIVE, 1.0 - f64::EPSILON)),
    ("histc", 3, Bound::EndOf(2)),
    ("huber_loss", 3, Bound::Within(f64::MIN_POSITIVE, f64::INFINITY)),
    ("leaky_relu_backward", 2, Bound::Within(0.0, f64::INFINITY)),
    ("log_normal_", 2, Bound::Within(f64::MIN_POSITIVE, f64::INFINITY)),
    ("native_dropout", 1, Bound::Within(0.0, 1.0)),
    ("normal.Tensor_float", 1, Bound::Within(0.0, f64::INFINITY)),
    ("normal_", 2, Bound::Within(0.0, f64::INFINITY)),
    ("pow", 1, Bound::Natural),
    ("pow_", 1, Bound::Natural),
    ("random_.from", 2, Bound::Above(1)),
    ("random_.to", 1, Bound::Within(1.0, f64::INFINITY)),
    ("remainder", 1, Bound::Divisor),
    ("remainder_", 1, Bound::Divisor),
    ("renorm", 1, Bound::Within(f64::MIN_POSITIVE, f64::INFINITY)),
    ("renorm", 3, Bound::Within(0.0, f64::INFINITY)),
    ("renorm_", 1, Bound::Within(f64::MIN_POSITIVE, f64::INFINITY)),
    ("renorm_", 3, Bound::Within(0.0, f64::INFINITY)),
    ("rrelu_with_noise_backward", 3, Bound::Within(0.0, f64::INFINITY)),
    ("rrelu_with_noise_backward", 4, Bound::Within(0.0, f64::INFINITY)),
    ("smooth_l1_loss", 3, Bound::Within(0.0, f64::INFINITY)),
    ("softshrink", 1, Bound::Within(0.0, f64::MAX)),
    ("uniform_", 2, Bound::EndOf(1)),
];

/// The bounds of an operator's arguments.
fn bounds_of(name: &str) -> Box<[(usize, Bound)]> {
    let name = name.strip_prefix("aten::").unwrap_or(name);
    let base = name.split('.').next().unwrap_or(name);
    let own = BOUNDS.iter().filter(|(of, ..)| *of == base || *of == name);
    own.map(|&(_, argument, bound)| (argument, bound)).collect()
}

impl Bound {
    fn takes(self, arg: &Arg<'_>, call: &Call<'_>, dtype: Dtype) -> bool {
        let other = |argument: usize| call.args.get(argument).and_then(number);
        let is_length = |x: f64| x >= 0.0 && x.is_finite() && fits(&Arg::Float(x), dtype);
        match arg {
            Arg::Scalars(list) => list.iter().all(|x| self.takes(x, call, dtype)),
            Arg::Tensor => self != Bound::Divisor || !has_zero(call),
            _ => number(arg).is_none_or(|x| match self {
                Bound::Within(least, greatest) => (least..=greatest).contains(&x),
                Bound::NotZero => x != 0.0,
                Bound::Natural => dtype.is_floating() || x >= 0.0,
                Bound::Divisor => dtype.is_floating() || x != 0.0,
                Bound::EndOf(begin) => other(begin).is_none_or(|y| is_length(x - y)),
                Bound::Above(least) => other(least).is_none_or(|y| x > y),
            }),
        }
    }
}

fn number(arg: &Arg<'_>) -> Option<f64> {
    match arg {
        Arg::Float(x) => Some(*x),
        Arg::Int(x) => Some(*x as f64),
        _ => None,
    }
}

/// Whether no input is floating-point and one is a zero-dimensional host tensor that is zero.
fn has_zero(call: &Call<'_>) -> bool {
    call.inputs.iter().any(|input| input.flags & flags::ZERO != 0)
        && !call.inputs.iter().any(|input| input.dtype.is_floating())
}

/// Whether a number is representable in a dtype as PyTorch checks it: its kernels raise if the conversion
/// overflows.
#[inline]
fn fits(number: &Arg<'_>, dtype: Dtype) -> bool {
    let within = |x: f64| dtype.range().is_none_or(|(least, greatest)| (least..=greatest).contains(&x));
    match number {
        Arg::Float(x) => within(*x) || !x.is_finite() && dtype.is_floating(),
        Arg::Int(x) => within(*x as f64),
        Arg::Complex(..) => dtype.is_complex(),
        Arg::Unsigned(_) => false,
        Arg::Scalars(list) => list.iter().all(|x| fits(x, dtype)),
        _ => true,
    }
}

impl OpInfo {
    /// Whether PyTorch accepts the numbers of a call for all tensor values, because they are in the range of the
    /// first tensor's dtype and within the operator's bounds, and executors can represent them. Other calls must run on PyTorch's own kernel at once,
    /// which may raise.
    #[inline]
    pub fn takes(&self, call: &Call<'_>) -> bool {
        if !self.has_numbers {
            return true;
        }
        let mut present = call.inputs.iter().filter(|input| !matches!(input.place, Place::Absent));
        let mut numbers = call.args.iter().zip(&self.args).filter(|(_, class)| **class == ArgClass::Value);
        let Some(dtype) = present.next().map(|input| input.dtype) else {
            return !numbers.any(|(number, _)| matches!(number, Arg::Unsigned(_)));
        };
        numbers.all(|(number, _)| fits(number, dtype))
            && self.bounds.iter().all(|(argument, bound)| {
                call.args.get(*argument).is_none_or(|arg| bound.takes(arg, call, dtype))
            })
    }

    /// Whether a call must run before Python continues, because its output shapes depend on data or because it may
    /// raise an exception that programs catch.
    #[inline]
    pub fn is_dynamic(&self, call: &Call<'_>) -> bool {
        let mask = |input: &Input<'_>| matches!(input.dtype, Dtype::BOOL | Dtype::UINT8);
        self.dynamic_shape && (!self.dynamic_by_mask || call.inputs.iter().skip(1).any(mask))
            || self.raises_lin_alg && (!self.raises_if_asked || call.args.last() == Some(&Arg::Bool(true)))
    }
}

/// Operators whose plain ints are bounds of the numbers that they draw. They are fed instead of being attributes.
const FED_INTS: &[&str] = &["aten::random_"];

/// The arguments that an operator writes although its schema does not declare it: running statistics.
pub fn written_unsaid(name: &str) -> &'static [usize] {
    if name == "aten::native_batch_norm" { &[3, 4] } else { &[] }
}

/// Operators that overwrite their first argument without reading it.
const OVERWRITING: &[&str] =
    &["aten::copy_", "aten::fill_", "aten::zero_", "aten::normal_", "aten::uniform_"];

/// Whether an operator overwrites all of its first argument, regardless of the previous contents.
pub fn overwrites(name: &str) -> bool {
    OVERWRITING.contains(&name.split('.').next().unwrap_or(name))
}

/// The properties of an operator that its schema and tags state.
#[derive(Debug)]
pub struct OpDecl<'a> {
    /// Full name, for example `aten::add.Tensor`.
    pub name: &'a str,
    /// Class of each argument.
    pub args: Vec<ArgClass>,
    /// For each argument, whether the operator writes it.
    pub written: Vec<bool>,
    /// Whether an output is not a tensor.
    pub returns_host: bool,
    /// Whether the operator is tagged as having data-dependent output shapes.
    pub dynamic_shape: bool,
    /// Whether the operator is tagged as drawing from a generator.
    pub random: bool,
    /// Whether the operator is tagged as point-wise.
    pub pointwise: bool,
    /// Whether the operator is not one of PyTorch's own.
    pub foreign: bool,
}

/// Combines schema, tags and the op table.
pub fn describe(id: OpId, decl: OpDecl<'_>) -> OpInfo {
    let base = decl.name.split('.').next().unwrap_or(decl.name);
    let mut args = decl.args;
    if FED_INTS.contains(&base) {
        args.iter_mut().filter(|c| **c == ArgClass::Attr).for_each(|c| *c = ArgClass::Value);
    }
    let draws = args.contains(&ArgClass::Generator);
    let foreign_dynamic = decl.foreign && !STATIC_FOREIGN.contains(&base);
    let bounds = bounds_of(decl.name);
    let raises_if_asked = base.contains("linalg_") && base.ends_with("_ex");
    OpInfo {
        id,
        name: decl.name.into(),
        has_numbers: args.contains(&ArgClass::Value) || !bounds.is_empty(),
        bounds,
        args: args.into(),
        writes: decl.written.contains(&true),
        written: decl.written.into(),
        returns_host: decl.returns_host,
        dynamic_shape: decl.dynamic_shape || foreign_dynamic || DYNAMIC.contains(&base),
        dynamic_by_mask: decl.name == "aten::index.Tensor",
        raises_lin_alg: RAISING.contains(&base) || raises_if_asked,
        raises_if_asked,
        sized_by_number: SIZED_BY_NUMBER.iter().any(|p| base.starts_with(p)),
        random: decl.random || draws,
        pointwise: decl.pointwise,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_kernels_are_captured_unless_listed() {
        assert_eq!(leaves_default("aten::add.Tensor"), None);
        assert_eq!(leaves_default("aten::convolution"), None);
        assert_eq!(leaves_default("aten::transpose.int"), Some(Left::View));
        assert_eq!(leaves_default("aten::convolution.out"), Some(Left::Composite));
        assert_eq!(leaves_default("aten::permute_copy"), Some(Left::Composite));
        assert_eq!(leaves_default("aten::_sparse_sum"), Some(Left::Elsewhere));
    }
}
