//! The table of operators: what Tandem knows of an operator on any device, beyond its schema and PyTorch's tags.
//!
//! **Why.** Capture, the TraceGraph and plans treat some operators specially. This table and those of the devices are
//! the only places that map operators to such treatment; other files get functions and properties, not names. An
//! operator without a row is captured and treated according to its schema.
//! **Names.** [`crate::ops::names`] says how names are looked up; some columns apply to exactly the named overloads.
//! Each column is looked up separately. Point-wise operators have expressions instead, in [`crate::ops::pointwise`].

use std::collections::BTreeMap;
use std::sync::LazyLock;

use tandem_tracegraph::call::Call;
use tandem_tracegraph::ops::{Bound, FedLists, Raises, Traits};

use crate::ops::express::Base;
use crate::ops::flops::{self, Flops};
use crate::ops::names::{ByName, base, short};
use crate::ops::outputs::{self, Gives, OutputRule};

/// Why a kernel of PyTorch for the default backend is kept instead of being captured.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DefaultKernel {
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

/// A row: some operators, and what is known of them.
#[derive(Clone, Copy)]
struct Row {
    /// Names, separated by spaces.
    names: &'static str,
    kept: Option<DefaultKernel>,
    /// Rule for the outputs' metadata. It applies to exactly the named overloads.
    outputs: Option<Gives>,
    flops: Option<Flops>,
    /// Whether the operator multiplies matrices, for which other operators do not delay a run.
    contraction: bool,
    /// Whether the operator overwrites all of its first argument without reading it.
    overwrites: bool,
    /// Whether PyTorch's CPU kernel divides tensors of any size among threads, and has the same bits on one thread.
    always_parallel: bool,
    traits: Traits,
}

const fn op(names: &'static str) -> Row {
    Row {
        names,
        kept: None,
        outputs: None,
        flops: None,
        contraction: false,
        overwrites: false,
        always_parallel: false,
        traits: Traits::NONE,
    }
}

impl Row {
    const fn kept(self, why: DefaultKernel) -> Row {
        Row { kept: Some(why), ..self }
    }
    const fn outputs(self, gives: Gives) -> Row {
        Row { outputs: Some(gives), ..self }
    }
    const fn flops(self, flops: Flops) -> Row {
        Row { flops: Some(flops), ..self }
    }
    const fn contraction(self) -> Row {
        Row { contraction: true, ..self }
    }
    const fn hidden_writes(self, arguments: &'static [usize]) -> Row {
        Row { traits: Traits { hidden_writes: arguments, ..self.traits }, ..self }
    }
    const fn overwrites(self) -> Row {
        Row { overwrites: true, ..self }
    }
    /// PyTorch's CPU kernel calls `at::parallel_for` with a grain of 0 or 1, and no sum spans its parts.
    const fn always_parallel(self) -> Row {
        Row { always_parallel: true, ..self }
    }
    /// Output shapes depend on data, although PyTorch does not tag the operator accordingly.
    const fn dynamic_shape(self) -> Row {
        Row { traits: Traits { dynamic_shape: true, ..self.traits }, ..self }
    }
    /// Output shapes depend on data only in calls with a mask among the inputs.
    const fn dynamic_by_mask(self) -> Row {
        Row { traits: Traits { dynamic_by_mask: true, ..self.traits }, ..self }
    }
    /// Output shapes of an operator of another library follow from the metadata of its inputs.
    const fn static_shape(self) -> Row {
        Row { traits: Traits { static_shape: true, ..self.traits }, ..self }
    }
    /// The operator raises `LinAlgError` for some values of its inputs.
    const fn raises(self, raises: Raises) -> Row {
        Row { traits: Traits { raises: Some(raises), ..self.traits }, ..self }
    }
    /// Output shapes depend on numbers.
    const fn sized_by_number(self) -> Row {
        Row { traits: Traits { sized_by_number: true, ..self.traits }, ..self }
    }
    /// Outputs are clones of whole storages, with the storage offsets of inputs.
    const fn keeps_offset(self) -> Row {
        Row { traits: Traits { keeps_offset: true, ..self.traits }, ..self }
    }
    /// Plain ints are bounds of the numbers that are drawn. They are fed instead of being attributes.
    const fn fed_ints(self) -> Row {
        Row { traits: Traits { fed_ints: true, ..self.traits }, ..self }
    }
    /// Lists of ints are fed instead of being attributes. `shape` returns the number in them on which output shapes
    /// depend.
    const fn fed_lists(self, arguments: &'static [usize], shape: fn(&Call<'_>) -> Option<i64>) -> Row {
        Row { traits: Traits { lists: Some(FedLists { arguments, shape }), ..self.traits }, ..self }
    }
    /// PyTorch raises for other values of these arguments.
    const fn bounds(self, bounds: &'static [(usize, Bound)]) -> Row {
        Row { traits: Traits { bounds, ..self.traits }, ..self }
    }
}

const POSITIVE: Bound = Bound::Within(f64::MIN_POSITIVE, f64::INFINITY);
const NOT_NEGATIVE: Bound = Bound::Within(0.0, f64::INFINITY);
const PROBABILITY: Bound = Bound::Within(0.0, 1.0);

#[rustfmt::skip]
static TABLE: &[Row] = &[
    // --- Matrix products and convolutions
    op("mm").outputs(outputs::mm).flops(flops::product_0).contraction(),
    op("addmm").outputs(outputs::mm).flops(flops::product_1).contraction(),
    op("bmm").outputs(outputs::bmm).flops(flops::product_0).contraction(),
    op("baddbmm").outputs(outputs::bmm).flops(flops::product_1).contraction(),
    op("addmm_ baddbmm_ linear linear_backward").contraction(),
    op("mv").outputs(outputs::mv).flops(flops::dot),
    op("addmv").outputs(outputs::mv).flops(flops::product_1),
    op("dot").flops(flops::dot),
    op("convolution").outputs(outputs::convolution).flops(flops::convolution).contraction(),
    op("convolution_backward").outputs(outputs::convolution_backward).flops(flops::convolution_backward).contraction(),
    op("_convolution").flops(flops::convolution),
    op("convolution_overrideable convolution_backward_overrideable").contraction(),
    op("_scaled_dot*").contraction(),
    op("_scaled_dot_product_flash_attention_for_cpu").outputs(outputs::attention::forward).flops(flops::attention).bounds(&[(3, Bound::Within(0.0, 0.0))]),
    op("_scaled_dot_product_flash_attention_for_cpu_backward").outputs(outputs::attention::backward).flops(flops::attention_backward),
    op("tandem::attention").flops(flops::attention).static_shape(),
    op("tandem::attention_backward").flops(flops::attention_backward).static_shape(),
    op("scaled_dot_product_attention _scaled_dot_product_attention_math _scaled_dot_product_attention_math_for_mps").flops(flops::attention),
    op("_scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention").flops(flops::attention),
    op("_scaled_dot_product_cudnn_attention _scaled_dot_product_fused_attention_overrideable").flops(flops::attention),
    op("_scaled_dot_product_flash_attention_backward _scaled_dot_product_efficient_attention_backward").flops(flops::attention_backward),
    op("_scaled_dot_product_cudnn_attention_backward _scaled_dot_product_fused_attention_overrideable_backward").flops(flops::attention_backward),

    // --- Reductions, scans and sorting
    op("sum").outputs(outputs::of_all),
    op("sum.dim_IntList").outputs(outputs::of_dims),
    op("mean").outputs(outputs::of_all),
    op("mean.dim").outputs(outputs::of_dims),
    op("var.correction").outputs(outputs::variance),
    op("std.correction").outputs(outputs::variance),
    op("amax").outputs(outputs::selection::extreme_value),
    op("amin").outputs(outputs::selection::extreme_value),
    op("max").outputs(outputs::selection::extreme_of_all),
    op("min").outputs(outputs::selection::extreme_of_all),
    op("max.dim").outputs(outputs::selection::extreme),
    op("min.dim").outputs(outputs::selection::extreme),
    op("argmax").outputs(outputs::selection::position),
    op("argmin").outputs(outputs::selection::position),
    op("any _is_any_true").outputs(outputs::truth),
    op("all _is_all_true").outputs(outputs::truth),
    op("logsumexp").outputs(outputs::logsumexp),
    op("_cdist_forward").bounds(&[(2, NOT_NEGATIVE)]),
    op("_pdist_forward").bounds(&[(1, NOT_NEGATIVE)]),
    op("renorm renorm_").bounds(&[(1, POSITIVE), (3, NOT_NEGATIVE)]),
    op("histc").bounds(&[(3, Bound::EndOf(2))]),
    op("nanquantile.scalar quantile.scalar").bounds(&[(1, PROBABILITY)]),
    op("cumsum").outputs(outputs::selection::scan),
    op("cumprod").outputs(outputs::selection::scan),
    op("logcumsumexp _logcumsumexp").outputs(outputs::selection::log_scan),
    op("sort").outputs(outputs::selection::sort),
    op("sort.stable").outputs(outputs::selection::sort_stable),
    op("topk").outputs(outputs::selection::topk),
    op("_unique2 unique_dim unique_consecutive bincount").dynamic_shape(),

    // --- Softmax, norms, cells and losses
    op("_softmax").outputs(outputs::softmax),
    op("_safe_softmax").outputs(outputs::softmax),
    op("_log_softmax").outputs(outputs::softmax),
    op("_softmax_backward_data").outputs(outputs::softmax_backward),
    op("_log_softmax_backward_data").outputs(outputs::softmax_backward),
    op("native_layer_norm").outputs(outputs::layer_norm).always_parallel(),
    op("native_layer_norm_backward").outputs(outputs::layer_norm_backward),
    op("native_batch_norm").outputs(outputs::batch_norm).hidden_writes(&[3, 4]),
    op("native_batch_norm_backward").outputs(outputs::batch_norm_backward),
    op("_thnn_fused_lstm_cell").outputs(outputs::cells::lstm),
    op("_thnn_fused_lstm_cell_backward_impl").outputs(outputs::cells::lstm_backward),
    op("_thnn_fused_gru_cell").outputs(outputs::cells::gru),
    op("_thnn_fused_gru_cell_backward").outputs(outputs::cells::gru_backward),
    op("nll_loss_forward").outputs(outputs::nll_loss),
    op("nll_loss_backward").outputs(outputs::nll_loss_backward),
    op("_ctc_loss").outputs(outputs::ctc::loss).fed_lists(&[2, 3], outputs::ctc::longest_target),
    op("_ctc_loss_backward").outputs(outputs::ctc::backward).fed_lists(&[3, 4], outputs::ctc::longest_target_backward),
    op("mse_loss").outputs(outputs::loss::loss),
    op("mse_loss_backward").outputs(outputs::loss::loss_backward),
    op("huber_loss").outputs(outputs::loss::huber).bounds(&[(3, POSITIVE)]),
    op("huber_loss_backward").outputs(outputs::loss::loss_backward),
    op("smooth_l1_loss").outputs(outputs::loss::loss).bounds(&[(3, NOT_NEGATIVE)]),
    op("smooth_l1_loss_backward").outputs(outputs::loss::loss_backward),
    op("binary_cross_entropy_backward").outputs(outputs::loss::cross_entropy_backward),
    op("binary_cross_entropy_with_logits").outputs(outputs::loss::cross_entropy_of_logits),

    // --- Element-wise operators without an expression, or with bounds
    op("masked_fill.Scalar").outputs(outputs::masked_fill),
    op("celu celu_").bounds(&[(1, Bound::NotZero)]),
    op("elu_backward").bounds(&[(1, NOT_NEGATIVE)]),
    op("leaky_relu_backward").bounds(&[(2, NOT_NEGATIVE)]),
    op("softshrink").bounds(&[(1, Bound::Within(0.0, f64::MAX))]),
    op("pow pow_ _foreach_pow _foreach_pow_").bounds(&[(1, Bound::Natural)]),
    op("div.Tensor_mode div.out_mode div_.Tensor_mode").bounds(&[(1, Bound::Divisor)]),
    op("floor_divide floor_divide_ fmod fmod_ remainder remainder_").bounds(&[(1, Bound::Divisor)]),

    // --- Copies, fills and windows
    op("copy").keeps_offset(),
    op("copy_ fill_ zero_ normal_ uniform_").overwrites(),
    op("empty.memory_format").outputs(outputs::empty),
    op("empty_strided").outputs(outputs::empty_strided),
    op("arange").sized_by_number(),
    op("linspace").sized_by_number(),
    op("logspace").sized_by_number(),
    op("range").sized_by_number(),
    op("cat").outputs(outputs::cat),
    op("flip").outputs(outputs::selection::flip),
    op("roll").outputs(outputs::selection::roll),
    op("repeat").outputs(outputs::selection::repeat),
    op("tril").outputs(outputs::triangle),
    op("triu").outputs(outputs::triangle),
    op("select_backward").outputs(outputs::select_backward),
    op("slice_backward").outputs(outputs::slice_backward),
    op("select_scatter").keeps_offset(),
    op("slice_scatter").keeps_offset(),
    op("diagonal_scatter").keeps_offset(),
    op("as_strided_scatter").keeps_offset(),
    op("constant_pad_nd").outputs(outputs::pad),

    // --- Indexing
    op("embedding").outputs(outputs::embedding),
    op("embedding_dense_backward").outputs(outputs::embedding_backward),
    op("index_select").outputs(outputs::selection::index_select),
    op("take").outputs(outputs::selection::take),
    op("index.Tensor").outputs(outputs::selection::index).dynamic_by_mask(),
    op("gather").outputs(outputs::selection::gather),
    op("scatter.src scatter.value").outputs(outputs::selection::scatter),
    op("scatter_.src scatter_.value scatter_add_").outputs(outputs::selection::scatter_in_place),
    op("scatter_add").outputs(outputs::selection::scatter),
    op("scatter_reduce.two").outputs(outputs::selection::scatter),
    op("scatter_reduce_.two").outputs(outputs::selection::scatter_in_place),
    op("index_add").outputs(outputs::selection::index_add),
    op("index_add_").outputs(outputs::selection::index_add_in_place),
    op("index_put_ _index_put_impl_").outputs(outputs::selection::index_put_in_place),

    // --- Pooling and interpolation
    op("max_pool2d_with_indices").outputs(outputs::pooling::max).always_parallel(),
    op("max_pool2d_with_indices_backward").outputs(outputs::pooling::max_backward),
    op("avg_pool2d").outputs(outputs::pooling::average).always_parallel(),
    op("avg_pool2d_backward").outputs(outputs::pooling::average_backward),
    op("_adaptive_avg_pool2d").outputs(outputs::pooling::adaptive),
    op("_adaptive_avg_pool2d_backward").outputs(outputs::pooling::adaptive_backward),
    op("upsample* _upsample*").sized_by_number(),

    // --- Random numbers
    op("uniform_").outputs(outputs::drawn).bounds(&[(2, Bound::EndOf(1))]),
    op("normal_").outputs(outputs::drawn).bounds(&[(2, NOT_NEGATIVE)]),
    op("multinomial").outputs(outputs::sampled),
    op("normal.Tensor_float").bounds(&[(1, NOT_NEGATIVE)]),
    op("random_").fed_ints(),
    op("random_.from").bounds(&[(2, Bound::Above(1))]),
    op("random_.to").bounds(&[(1, Bound::Within(1.0, f64::INFINITY))]),
    op("bernoulli").bounds(&[(1, PROBABILITY)]),
    op("bernoulli_").bounds(&[(1, PROBABILITY)]),
    op("bernoulli_.float").outputs(outputs::drawn),
    op("exponential_").bounds(&[(1, POSITIVE)]),
    op("geometric_").bounds(&[(1, Bound::Within(f64::MIN_POSITIVE, 1.0 - f64::EPSILON))]),
    op("log_normal_").bounds(&[(2, POSITIVE)]),
    op("cauchy_").bounds(&[(2, POSITIVE)]),
    op("native_dropout").bounds(&[(1, PROBABILITY)]),
    op("rrelu_with_noise_backward").bounds(&[(3, NOT_NEGATIVE), (4, NOT_NEGATIVE)]),

    // --- Optimizers and lists of tensors
    op("_foreach_copy").keeps_offset(),
    op("_fused_adam_ _fused_adamw_ _fused_sgd_ _fused_adagrad_").always_parallel(),

    // --- Linear algebra that raises at the call
    op("_linalg_check_errors _linalg_eigh _linalg_eigvals _linalg_svd").raises(Raises::Always),
    op("cholesky cholesky_inverse linalg_eig linalg_eigvals linalg_lstsq").raises(Raises::Always),
    op("linalg_matrix_sqrth linalg_pinv linalg_polar").raises(Raises::Always),
    op("_linalg_solve_ex linalg_cholesky_ex linalg_inv_ex").raises(Raises::IfAsked),
    op("linalg_ldl_factor_ex linalg_lu_factor_ex linalg_solve_ex").raises(Raises::IfAsked),

    // --- Other libraries
    op("torchvision::roi_align").static_shape(),
    op("torchvision::_roi_align_backward").static_shape(),
    op("tandem::collective_start tandem::collective_wait").static_shape(),
    op("torchvision::roi_pool torchvision::deform_conv2d torchvision::_deform_conv2d_backward").static_shape(),

    // --- Kernels of PyTorch for the default backend that are kept
    op("alias as_strided_ detach detach_ diagonal expand lift_fresh permute select slice slice_inverse split").kept(DefaultKernel::View),
    op("split_with_sizes squeeze squeeze_ t t_ transpose transpose_ unbind unsafe_split").kept(DefaultKernel::View),
    op("unsafe_split_with_sizes unsqueeze unsqueeze_ view _unsafe_view _conj _neg_view _fw_primal").kept(DefaultKernel::View),
    op("_make_dual _lazy_clone lift swapaxes_ swapdims_").kept(DefaultKernel::View),
    op("arange bartlett_window blackman_window empty_like empty_permuted empty_quantized eye fft_fftfreq").kept(DefaultKernel::Factory),
    op("fft_rfftfreq from_file full full_like hamming_window hann_window linspace logspace new_empty").kept(DefaultKernel::Factory),
    op("new_empty_strided new_full new_ones new_zeros normal_functional ones ones_like rand rand_like").kept(DefaultKernel::Factory),
    op("randint randint_like randn randn_like randperm range scalar_tensor tril_indices triu_indices").kept(DefaultKernel::Factory),
    op("zeros zeros_like _efficientzerotensor _new_zeros_with_same_feature_meta").kept(DefaultKernel::Factory),
    op("is_pinned _pin_memory is_same_size _has_same_storage_numel dense_dim sparse_dim").kept(DefaultKernel::Metadata),
    op("is_coalesced _coalesced sym_constrain_range sym_constrain_range_for_size").kept(DefaultKernel::Metadata),
    op("_assert_tensor_metadata _resize_output _resize_output_ resize resize_as resize_as_ set").kept(DefaultKernel::Metadata),
    op("is_non_overlapping_and_dense").kept(DefaultKernel::Metadata),
    op("bernoulli.p clone copy_ _to_copy _copy_from_and_resize _pack_padded_sequence").kept(DefaultKernel::Composite),
    op("repeat_interleave").kept(DefaultKernel::Composite),
    op("shallow_copy_data_").kept(DefaultKernel::Composite),
    op("values indices _values _indices crow_indices col_indices ccol_indices row_indices").kept(DefaultKernel::Elsewhere),
    op("lstm_mps_backward to_mkldnn").kept(DefaultKernel::Elsewhere),
    op("_test* _sparse* sparse* _nested* _to_sparse* to_sparse* mkldnn* miopen* cudnn* _cudnn*").kept(DefaultKernel::Elsewhere),
    op("_mps* mps* _foobar* _philox* _mkldnn* _lstm* to_padded*").kept(DefaultKernel::Elsewhere),
];

static BY_NAME: LazyLock<ByName<Row>> = LazyLock::new(|| ByName::new(TABLE, |row| row.names));

/// Why the default-backend kernel of an operator (`aten::op.overload`) is kept, or `None` if it is captured.
pub fn kept_default(name: &str) -> Option<DefaultKernel> {
    let overload = short(name).split_once('.').map_or("", |(_, overload)| overload);
    // `x_copy` variants of views and generated `out=` variants call the functional operator and copy its output.
    let is_copied_view = base(name).ends_with("_copy") && base(short(name)) != "index_copy";
    let is_out =
        is_copied_view || base(name).ends_with("_out") || overload == "out" || overload.ends_with("_out");
    BY_NAME.find(name, |row| row.kept).or_else(|| is_out.then_some(DefaultKernel::Composite))
}

/// The properties of an operator for the TraceGraph.
pub fn traits(name: &str) -> Traits {
    let bounds = BY_NAME.find(name, |row| Some(row.traits.bounds).filter(|bounds| !bounds.is_empty()));
    Traits {
        dynamic_shape: BY_NAME.is(name, |row| row.traits.dynamic_shape),
        dynamic_by_mask: BY_NAME.is(name, |row| row.traits.dynamic_by_mask),
        static_shape: BY_NAME.is(name, |row| row.traits.static_shape),
        raises: BY_NAME.find(name, |row| row.traits.raises),
        sized_by_number: BY_NAME.is(name, |row| row.traits.sized_by_number),
        keeps_offset: BY_NAME.is(name, |row| row.traits.keeps_offset),
        fed_ints: BY_NAME.is(name, |row| row.traits.fed_ints),
        hidden_writes: hidden_writes(name),
        bounds: bounds.unwrap_or_default(),
        lists: BY_NAME.exact(name, |row| row.traits.lists),
    }
}

/// The rule for the metadata of an operator's outputs, or `None` if there is none. `written` says for each argument
/// of the schema whether the operator writes it.
pub fn outputs_of(name: &str, written: &[bool]) -> Option<OutputRule> {
    let own = BY_NAME.exact(name, |row| row.outputs).map(OutputRule::Own);
    own.or_else(|| Base::of(name, written).map(OutputRule::Pointwise))
}

/// Whether an operator's outputs have the storage offsets of its inputs.
pub fn keeps_offset(name: &str) -> bool {
    BY_NAME.is(name, |row| row.traits.keeps_offset)
}

/// The number of arithmetic operations of an operator's calls.
pub fn flops_of(name: &str) -> Flops {
    BY_NAME.find(name, |row| row.flops).unwrap_or(flops::elementwise)
}

/// Whether an operator multiplies matrices.
pub fn is_contraction(name: &str) -> bool {
    BY_NAME.is(name, |row| row.contraction)
}

/// The arguments that an operator writes although its schema does not declare it. A call must not run both Tandem's and
/// PyTorch's kernel, because the second one would write again.
pub fn hidden_writes(name: &str) -> &'static [usize] {
    let written = |row: &Row| (!row.traits.hidden_writes.is_empty()).then_some(row.traits.hidden_writes);
    BY_NAME.exact(name, written).unwrap_or_default()
}

/// Whether an operator overwrites all of its first argument, regardless of the previous contents.
pub fn overwrites(name: &str) -> bool {
    BY_NAME.is(name, |row| row.overwrites)
}

/// Whether PyTorch's CPU kernel divides tensors of any size among threads, and has the same bits on one thread.
pub fn is_always_parallel(name: &str) -> bool {
    BY_NAME.is(name, |row| row.always_parallel)
}

/// The operators of the table, and the columns that are set for each.
pub fn columns() -> BTreeMap<String, Vec<&'static str>> {
    BY_NAME.listing(|row| {
        [
            ("kept", row.kept.is_some()),
            ("outputs", row.outputs.is_some()),
            ("flops", row.flops.is_some()),
            ("contraction", row.contraction),
            ("overwrites", row.overwrites),
            ("always parallel", row.always_parallel),
            ("dynamic shape", row.traits.dynamic_shape),
            ("dynamic by mask", row.traits.dynamic_by_mask),
            ("static shape", row.traits.static_shape),
            ("raises", row.traits.raises.is_some()),
            ("sized by number", row.traits.sized_by_number),
            ("keeps offset", row.traits.keeps_offset),
            ("fed ints", row.traits.fed_ints),
            ("fed lists", row.traits.lists.is_some()),
            ("hidden writes", !row.traits.hidden_writes.is_empty()),
            ("bounds", !row.traits.bounds.is_empty()),
        ]
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::names::repeated;

    #[test]
    fn default_kernels_are_captured_unless_listed() {
        assert_eq!(kept_default("aten::add.Tensor"), None);
        assert_eq!(kept_default("aten::convolution"), None);
        assert_eq!(kept_default("aten::transpose.int"), Some(DefaultKernel::View));
        assert_eq!(kept_default("aten::convolution.out"), Some(DefaultKernel::Composite));
        assert_eq!(kept_default("aten::permute_copy"), Some(DefaultKernel::Composite));
        assert_eq!(kept_default("aten::index_copy"), None);
        assert_eq!(kept_default("aten::_sparse_sum"), Some(DefaultKernel::Elsewhere));
    }

    #[test]
    fn columns_are_found_by_overload_then_by_operator() {
        assert!(outputs_of("aten::sum.dim_IntList", &[false; 4]).is_some());
        assert!(outputs_of("aten::sum.dim_DimnameList", &[false; 4]).is_none());
        assert_eq!(traits("aten::random_.to").bounds, &[(1, Bound::Within(1.0, f64::INFINITY))]);
        assert!(traits("aten::random_.to").fed_ints);
        assert!(traits("aten::upsample_nearest2d.vec").sized_by_number);
        assert!(overwrites("aten::normal_") && !overwrites("aten::normal.Tensor_Tensor"));
        assert!(is_contraction("aten::_scaled_dot_product_attention_math"));
        assert!(!is_contraction("aten::mul.Tensor"));
        assert!(
            is_always_parallel("aten::_fused_adam_") && is_always_parallel("aten::_fused_adam_.tensor_lr")
        );
    }

    #[test]
    fn no_operator_is_twice_in_a_column() {
        assert_eq!(repeated(&columns()), None);
    }
}
