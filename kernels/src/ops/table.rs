//! The table of operators: what Tandem knows of an operator beyond its schema and PyTorch's tags.
//!
//! **Why.** Capture, the TraceGraph, plans and both executors treat some operators specially. This is the only place
//! that maps operators to such treatment; other files get functions and properties, not names. An operator without a
//! row is captured and treated according to its schema, and PyTorch's kernel computes it.
//! **Names.** A row lists operators without `aten::`. A name without an overload stands for all overloads, except
//! where a column says otherwise; a name that ends with `*` is a prefix. An operator may be in several rows. Each
//! column is looked up for itself: first by the full name, then by the name without overload, then by prefix.
//! Point-wise operators have expressions instead, in [`crate::ops::pointwise`].

use std::sync::LazyLock;

use rustc_hash::FxHashMap;
use tandem_tracegraph::call::Call;
use tandem_tracegraph::node::Outputs;
use tandem_tracegraph::ops::{Bound, Raises, Traits};

use crate::cpu::own::{self, MakeKernel};
use crate::cpu::random::{self, Draw};
use crate::gpu::lower::Lower;
use crate::gpu::ops as gpu;
use crate::ops::express::Base;
use crate::ops::flops::{self, Flops};
use crate::ops::outputs::{self, Gives, OutputRule};
use crate::ops::pointwise;
use crate::plan::RowSums;

/// The reason why a kernel of PyTorch for the default backend is kept instead of being captured.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kept {
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

/// Function that returns a call as sums over rows, which a plan can fuse with the operators before it.
type MakeRowSums = fn(&Call<'_>, &Outputs) -> Option<RowSums>;

/// A row: some operators, and what is known of them.
#[derive(Clone, Copy)]
struct Row {
    /// Names, separated by spaces.
    names: &'static str,
    kept: Option<Kept>,
    /// Rule for the outputs' metadata. Applies to exactly the named overloads.
    outputs: Option<Gives>,
    /// Tandem's kernel on the CPU, for overloads that write no argument, or their first one alone.
    cpu: Option<MakeKernel>,
    /// Kernel on the CPU that draws from PyTorch's generator. Applies to exactly the named overloads.
    draw: Option<Draw>,
    /// Applies to exactly the named overloads.
    row_sums: Option<MakeRowSums>,
    /// Lowering to kernels on a GPU. The in-place form of an operator has it too.
    gpu: Option<Lower>,
    /// Whether the lowering draws random numbers.
    draws: bool,
    flops: Option<Flops>,
    /// Whether the operator multiplies matrices, for which other operators do not delay a run.
    contraction: bool,
    /// Whether the operator overwrites all of its first argument without reading it.
    overwrites: bool,
    traits: Traits,
}

const fn op(names: &'static str) -> Row {
    Row {
        names,
        kept: None,
        outputs: None,
        cpu: None,
        draw: None,
        row_sums: None,
        gpu: None,
        draws: false,
        flops: None,
        contraction: false,
        overwrites: false,
        traits: Traits::NONE,
    }
}

impl Row {
    const fn kept(self, why: Kept) -> Row {
        Row { kept: Some(why), ..self }
    }
    const fn outputs(self, gives: Gives) -> Row {
        Row { outputs: Some(gives), ..self }
    }
    const fn cpu(self, make: MakeKernel) -> Row {
        Row { cpu: Some(make), ..self }
    }
    const fn draw(self, draw: Draw) -> Row {
        Row { draw: Some(draw), ..self }
    }
    const fn row_sums(self, make: MakeRowSums) -> Row {
        Row { row_sums: Some(make), ..self }
    }
    const fn gpu(self, lower: Lower) -> Row {
        Row { gpu: Some(lower), ..self }
    }
    const fn random_on_gpu(self, lower: Lower) -> Row {
        Row { gpu: Some(lower), draws: true, ..self }
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
    op("mm").outputs(outputs::mm).cpu(own::matmul::mm).gpu(gpu::matmul::mm).flops(flops::product_0).contraction(),
    op("addmm").outputs(outputs::mm).cpu(own::matmul::addmm).gpu(gpu::matmul::addmm).flops(flops::product_1).contraction(),
    op("_addmm_activation").gpu(gpu::matmul::addmm),
    op("bmm").outputs(outputs::bmm).cpu(own::matmul::bmm).gpu(gpu::matmul::bmm).flops(flops::product_0).contraction(),
    op("baddbmm").outputs(outputs::bmm).cpu(own::matmul::baddbmm).gpu(gpu::matmul::baddbmm).flops(flops::product_1).contraction(),
    op("addmm_ baddbmm_ linear linear_backward").contraction(),
    op("addbmm").gpu(gpu::matmul::addbmm),
    op("mv").outputs(outputs::mv).cpu(own::matmul::mv).gpu(gpu::matmul::mv).flops(flops::dot),
    op("addmv").outputs(outputs::mv).cpu(own::matmul::addmv).gpu(gpu::matmul::addmv).flops(flops::product_1),
    op("dot").cpu(own::sums::dot).row_sums(own::sums::of_products).gpu(gpu::matmul::dot).flops(flops::dot),
    op("vdot").gpu(gpu::matmul::dot),
    op("addr").gpu(gpu::matmul::addr),
    op("convolution").outputs(outputs::convolution).cpu(own::conv::forward).gpu(gpu::conv::convolution)
        .flops(flops::convolution).contraction(),
    op("convolution_backward").outputs(outputs::convolution_backward).cpu(own::conv::backward)
        .gpu(gpu::conv::convolution_backward).flops(flops::convolution_backward).contraction(),
    op("_convolution").flops(flops::convolution),
    op("convolution_overrideable convolution_backward_overrideable").contraction(),
    op("_scaled_dot*").contraction(),
    op("_scaled_dot_product_flash_attention_for_cpu").outputs(outputs::attention::forward).cpu(own::attention::forward).gpu(gpu::attention::forward)
        .flops(flops::attention).bounds(&[(3, Bound::Within(0.0, 0.0))]),
    op("_scaled_dot_product_flash_attention_for_cpu_backward").outputs(outputs::attention::backward).cpu(own::attention::backward).gpu(gpu::attention::backward)
        .flops(flops::attention_backward),
    op("tandem::attention").gpu(gpu::attention::dropping_forward).flops(flops::attention).static_shape(),
    op("tandem::attention_backward").gpu(gpu::attention::dropping_backward).flops(flops::attention_backward).static_shape(),
    op("scaled_dot_product_attention _scaled_dot_product_attention_math _scaled_dot_product_attention_math_for_mps")
        .flops(flops::attention),
    op("_scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention").flops(flops::attention),
    op("_scaled_dot_product_cudnn_attention _scaled_dot_product_fused_attention_overrideable").flops(flops::attention),
    op("_scaled_dot_product_flash_attention_backward _scaled_dot_product_efficient_attention_backward")
        .flops(flops::attention_backward),
    op("_scaled_dot_product_cudnn_attention_backward _scaled_dot_product_fused_attention_overrideable_backward")
        .flops(flops::attention_backward),

    // --- Reductions, scans and sorting
    op("sum").outputs(outputs::of_all).cpu(own::sums::summed).row_sums(own::sums::of_row_sums).gpu(gpu::reduce::sums),
    op("sum.dim_IntList").outputs(outputs::of_dims).row_sums(own::sums::of_row_sums),
    op("mean").outputs(outputs::of_all).cpu(own::sums::mean).row_sums(own::sums::of_row_means).gpu(gpu::reduce::sums),
    op("mean.dim").outputs(outputs::of_dims).row_sums(own::sums::of_row_means),
    op("nansum prod").gpu(gpu::reduce::sums),
    op("var std var_mean std_mean").gpu(gpu::reduce::variance),
    op("var.correction").outputs(outputs::variance).cpu(own::moments::variance),
    op("std.correction").outputs(outputs::variance).cpu(own::moments::deviation),
    op("amax").outputs(outputs::selection::extreme_value).cpu(own::order::amax).gpu(gpu::reduce::extreme),
    op("amin").outputs(outputs::selection::extreme_value).cpu(own::order::amin).gpu(gpu::reduce::extreme),
    op("aminmax").gpu(gpu::reduce::aminmax),
    op("max").outputs(outputs::selection::extreme_of_all).cpu(own::order::max_of_all).gpu(gpu::reduce::max_min),
    op("min").outputs(outputs::selection::extreme_of_all).cpu(own::order::min_of_all).gpu(gpu::reduce::max_min),
    op("max.dim").outputs(outputs::selection::extreme).cpu(own::order::max),
    op("min.dim").outputs(outputs::selection::extreme).cpu(own::order::min),
    op("argmax").outputs(outputs::selection::position).cpu(own::order::argmax).gpu(gpu::reduce::arg_extreme),
    op("argmin").outputs(outputs::selection::position).cpu(own::order::argmin).gpu(gpu::reduce::arg_extreme),
    op("any _is_any_true").outputs(outputs::truth).cpu(own::logic::any).gpu(gpu::reduce::any_all),
    op("all _is_all_true").outputs(outputs::truth).cpu(own::logic::all).gpu(gpu::reduce::any_all),
    op("count_nonzero").gpu(gpu::reduce::count_nonzero),
    op("linalg_vector_norm").cpu(own::moments::vector_norm).gpu(gpu::reduce::vector_norm),
    op("logsumexp").outputs(outputs::logsumexp).cpu(own::rows::logsumexp).gpu(gpu::reduce::logsumexp),
    op("dist").gpu(gpu::reduce::dist),
    op("_cdist_forward").gpu(gpu::reduce::cdist).bounds(&[(2, NOT_NEGATIVE)]),
    op("_euclidean_dist").gpu(gpu::reduce::cdist),
    op("_cdist_backward").gpu(gpu::reduce::cdist_backward),
    op("_pdist_forward").bounds(&[(1, NOT_NEGATIVE)]),
    op("renorm renorm_").gpu(gpu::reduce::renorm).bounds(&[(1, POSITIVE), (3, NOT_NEGATIVE)]),
    op("histc").bounds(&[(3, Bound::EndOf(2))]),
    op("cumsum").outputs(outputs::selection::scan).cpu(own::scans::cumsum).gpu(gpu::scan::sums),
    op("cumprod").outputs(outputs::selection::scan).cpu(own::scans::cumprod).gpu(gpu::scan::sums),
    op("cummax cummin").gpu(gpu::scan::extremes),
    op("logcumsumexp _logcumsumexp").gpu(gpu::scan::exponential_sums),
    op("sort").outputs(outputs::selection::sort).cpu(own::order::sort).gpu(gpu::sort::sort),
    op("sort.stable").outputs(outputs::selection::sort_stable).cpu(own::order::sort_stable),
    op("topk").outputs(outputs::selection::topk).cpu(own::order::topk).gpu(gpu::sort::topk),
    op("kthvalue").gpu(gpu::sort::kthvalue),
    op("median nanmedian").gpu(gpu::sort::median),
    op("searchsorted").gpu(|l| gpu::sort::search(l, 0, 1)),
    op("bucketize").gpu(|l| gpu::sort::search(l, 1, 0)),
    op("_unique2 unique_dim unique_consecutive bincount").dynamic_shape(),

    // --- Softmax, norms, cells and losses
    op("_softmax").outputs(outputs::softmax).cpu(own::rows::softmax).gpu(gpu::softmax::forward),
    op("_safe_softmax").outputs(outputs::softmax).cpu(own::rows::safe_softmax).gpu(gpu::softmax::forward),
    op("_log_softmax").outputs(outputs::softmax).cpu(own::rows::log_softmax).gpu(gpu::softmax::forward),
    op("_softmax_backward_data").outputs(outputs::softmax_backward).cpu(own::rows::softmax_backward).gpu(gpu::softmax::backward),
    op("_log_softmax_backward_data").outputs(outputs::softmax_backward).cpu(own::rows::log_softmax_backward)
        .gpu(gpu::softmax::backward),
    op("native_layer_norm").outputs(outputs::layer_norm).cpu(own::norm::layer_norm).gpu(gpu::norm::layer_norm),
    op("native_layer_norm_backward").outputs(outputs::layer_norm_backward).cpu(own::norm::layer_norm_backward)
        .gpu(gpu::norm::layer_norm_backward),
    op("native_group_norm").cpu(own::channel_norms::group::forward).gpu(gpu::norm::group_norm),
    op("native_group_norm_backward").cpu(own::channel_norms::group::backward).gpu(gpu::norm::group_norm_backward),
    op("native_batch_norm").outputs(outputs::batch_norm).cpu(own::channel_norms::batch::forward).gpu(gpu::norm::batch_norm)
        .hidden_writes(&[3, 4]),
    op("_native_batch_norm_legit _native_batch_norm_legit_no_training").gpu(gpu::norm::batch_norm),
    op("_batch_norm_with_update _batch_norm_no_update").gpu(gpu::norm::batch_norm),
    op("native_batch_norm_backward").outputs(outputs::batch_norm_backward).cpu(own::channel_norms::batch::backward)
        .gpu(gpu::norm::batch_norm_backward),
    op("batch_norm_backward").gpu(gpu::norm::batch_norm_backward),
    op("_thnn_fused_lstm_cell").outputs(outputs::attention::lstm).cpu(own::cells::lstm).gpu(gpu::cells::lstm),
    op("_thnn_fused_lstm_cell_backward_impl").outputs(outputs::attention::lstm_backward).cpu(own::cells::lstm_backward).gpu(gpu::cells::lstm_backward),
    op("_thnn_fused_gru_cell").outputs(outputs::attention::gru).cpu(own::cells::gru).gpu(gpu::cells::gru),
    op("_thnn_fused_gru_cell_backward").outputs(outputs::attention::gru_backward).cpu(own::cells::gru_backward).gpu(gpu::cells::gru_backward),
    op("nll_loss_forward").outputs(outputs::nll_loss).cpu(own::loss::forward).gpu(gpu::loss::nll_loss),
    op("nll_loss_backward").outputs(outputs::nll_loss_backward).cpu(own::loss::backward).gpu(gpu::loss::nll_loss_backward),
    op("nll_loss2d_forward").gpu(gpu::loss::nll_loss),
    op("nll_loss2d_backward").gpu(gpu::loss::nll_loss_backward),
    op("mse_loss").outputs(outputs::loss::loss).cpu(own::pairs::mse).gpu(gpu::loss::loss),
    op("mse_loss_backward").outputs(outputs::loss::loss_backward).cpu(own::pairs::mse_backward).gpu(gpu::loss::loss_backward),
    op("huber_loss").outputs(outputs::loss::huber).cpu(own::pairs::huber).gpu(gpu::loss::loss).bounds(&[(3, POSITIVE)]),
    op("huber_loss_backward").outputs(outputs::loss::loss_backward).cpu(own::pairs::huber_backward).gpu(gpu::loss::loss_backward),
    op("smooth_l1_loss").outputs(outputs::loss::loss).cpu(own::pairs::smooth_l1).gpu(gpu::loss::loss).bounds(&[(3, NOT_NEGATIVE)]),
    op("smooth_l1_loss_backward").outputs(outputs::loss::loss_backward).cpu(own::pairs::smooth_l1_backward)
        .gpu(gpu::loss::loss_backward),
    op("soft_margin_loss").gpu(gpu::loss::loss),
    op("soft_margin_loss_backward").gpu(gpu::loss::loss_backward),
    op("binary_cross_entropy").cpu(own::pairs::cross_entropy).gpu(gpu::loss::cross_entropy),
    op("binary_cross_entropy_backward").outputs(outputs::loss::cross_entropy_backward).cpu(own::pairs::cross_entropy_backward)
        .gpu(gpu::loss::cross_entropy_backward),
    op("binary_cross_entropy_with_logits").outputs(outputs::loss::cross_entropy_of_logits)
        .cpu(own::pairs::cross_entropy_of_logits).gpu(gpu::loss::cross_entropy_with_logits),

    // --- Element-wise operators without an expression, or with bounds
    op("where").gpu(gpu::pointwise::where_),
    op("masked_fill").gpu(gpu::pointwise::masked_fill),
    op("masked_fill.Scalar").outputs(outputs::masked_fill),
    op("ldexp").gpu(gpu::pointwise::ldexp),
    op("polygamma").gpu(gpu::pointwise::polygamma),
    op("glu").gpu(gpu::activation::glu),
    op("glu_backward").gpu(gpu::activation::glu_backward),
    op("log_sigmoid_forward").gpu(gpu::activation::log_sigmoid),
    op("log_sigmoid_backward").gpu(gpu::activation::log_sigmoid_backward),
    op("_prelu_kernel_backward").gpu(gpu::activation::prelu_backward),
    op("celu celu_").gpu(gpu::activation::celu).bounds(&[(1, Bound::NotZero)]),
    op("elu_backward").bounds(&[(1, NOT_NEGATIVE)]),
    op("leaky_relu_backward").bounds(&[(2, NOT_NEGATIVE)]),
    op("softshrink").bounds(&[(1, Bound::Within(0.0, f64::MAX))]),
    op("pow pow_ _foreach_pow _foreach_pow_").bounds(&[(1, Bound::Natural)]),
    op("div.Tensor_mode div.out_mode div_.Tensor_mode").bounds(&[(1, Bound::Divisor)]),
    op("floor_divide floor_divide_ fmod fmod_ remainder remainder_").bounds(&[(1, Bound::Divisor)]),

    // --- Copies, fills and windows
    op("copy").gpu(gpu::fill::copy),
    op("fill").gpu(gpu::fill::fill),
    op("zero").gpu(gpu::fill::zero),
    op("copy_ fill_ zero_ normal_ uniform_").overwrites(),
    op("empty").cpu(own::pieces::empty).gpu(gpu::fill::empty),
    op("empty.memory_format").outputs(outputs::empty),
    op("empty_strided").outputs(outputs::empty_strided).cpu(own::pieces::empty).gpu(gpu::fill::empty),
    op("new_empty new_empty_strided empty_like").cpu(own::pieces::empty),
    op("arange").gpu(gpu::fill::arange).sized_by_number(),
    op("linspace").gpu(gpu::fill::linspace).sized_by_number(),
    op("logspace").gpu(gpu::fill::logspace).sized_by_number(),
    op("range").sized_by_number(),
    op("eye").gpu(gpu::fill::eye),
    op("cat").outputs(outputs::cat).cpu(own::pieces::join).gpu(gpu::join::cat),
    op("concat concatenate").gpu(gpu::join::cat),
    op("stack").cpu(own::pieces::join).gpu(gpu::join::stack),
    op("block_diag").gpu(gpu::join::block_diag),
    op("flip").outputs(outputs::selection::flip).cpu(own::moves::flip).gpu(gpu::join::flip),
    op("rot90").gpu(gpu::join::rot90),
    op("roll").outputs(outputs::selection::roll).cpu(own::moves::roll).gpu(gpu::join::roll),
    op("repeat").outputs(outputs::selection::repeat).cpu(own::moves::repeat).gpu(gpu::join::repeat),
    op("tril").outputs(outputs::triangle).cpu(own::moves::tril).gpu(gpu::join::triangle),
    op("triu").outputs(outputs::triangle).cpu(own::moves::triu).gpu(gpu::join::triangle),
    op("diag_embed").gpu(gpu::join::diag_embed),
    op("trace").gpu(gpu::join::trace),
    op("select_backward").outputs(outputs::select_backward).cpu(own::pieces::select_backward)
        .gpu(gpu::views::select_backward),
    op("slice_backward").outputs(outputs::slice_backward).cpu(own::pieces::slice_backward)
        .gpu(gpu::views::slice_backward),
    op("diagonal_backward").gpu(gpu::views::diagonal_backward),
    op("select_scatter").gpu(gpu::views::select_scatter).keeps_offset(),
    op("slice_scatter").gpu(gpu::views::slice_scatter).keeps_offset(),
    op("diagonal_scatter").gpu(gpu::views::diagonal_scatter).keeps_offset(),
    op("as_strided_scatter").keeps_offset(),
    op("unfold_backward").gpu(gpu::views::unfold_backward),
    op("constant_pad_nd").outputs(outputs::pad).cpu(own::pieces::constant_pad).gpu(gpu::pad::constant_pad),
    op("reflection_pad1d reflection_pad2d reflection_pad3d").gpu(gpu::pad::pad),
    op("replication_pad1d replication_pad2d replication_pad3d").gpu(gpu::pad::pad),
    op("reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward").gpu(gpu::pad::reflected),
    op("replication_pad1d_backward replication_pad2d_backward replication_pad3d_backward").gpu(gpu::pad::replicated),
    op("im2col").gpu(gpu::pad::im2col),
    op("col2im").gpu(gpu::pad::col2im),
    op("pixel_shuffle").gpu(gpu::pad::pixel_shuffle),
    op("pixel_unshuffle").gpu(gpu::pad::pixel_unshuffle),
    op("channel_shuffle native_channel_shuffle").gpu(gpu::pad::channel_shuffle),

    // --- Indexing
    op("embedding").outputs(outputs::embedding).cpu(own::gather::embedding).gpu(gpu::index::embedding),
    op("embedding_dense_backward").outputs(outputs::embedding_backward).cpu(own::gather::embedding_backward)
        .gpu(gpu::scatter::embedding_dense_backward),
    op("index_select").outputs(outputs::selection::index_select).cpu(own::gather::index_select).gpu(gpu::index::index_select),
    op("index").gpu(gpu::index::index),
    op("index.Tensor").outputs(outputs::selection::index).cpu(own::gather::index).dynamic_by_mask(),
    op("_unsafe_index").gpu(gpu::index::index),
    op("gather").outputs(outputs::selection::gather).cpu(own::scatter::gather).gpu(gpu::index::gather),
    op("take").gpu(gpu::index::take),
    op("scatter").cpu(own::scatter::scatter).gpu(gpu::scatter::scatter),
    op("scatter.src scatter.value").outputs(outputs::selection::scatter),
    op("scatter_").cpu(own::scatter::scatter),
    op("scatter_.src scatter_.value scatter_add_").outputs(outputs::selection::scatter_in_place),
    op("scatter_add").outputs(outputs::selection::scatter).cpu(own::scatter::scatter_add).gpu(gpu::scatter::scatter_add),
    op("scatter_add_").cpu(own::scatter::scatter_add),
    op("scatter_reduce").cpu(own::scatter::scatter_reduce).gpu(gpu::scatter::scatter_reduce),
    op("scatter_reduce.two").outputs(outputs::selection::scatter),
    op("scatter_reduce_").cpu(own::scatter::scatter_reduce),
    op("scatter_reduce_.two").outputs(outputs::selection::scatter_in_place),
    op("index_add").outputs(outputs::selection::index_add).cpu(own::scatter::index_add).gpu(gpu::scatter::index_add),
    op("index_add_").outputs(outputs::selection::index_add_in_place).cpu(own::scatter::index_add),
    op("index_copy").gpu(gpu::scatter::index_copy),
    op("index_fill").gpu(gpu::scatter::index_fill),
    op("index_reduce").gpu(gpu::scatter::index_reduce),
    op("index_put _unsafe_index_put").cpu(own::scatter::index_put).gpu(gpu::scatter::index_put),
    op("index_put_ _index_put_impl_").outputs(outputs::selection::index_put_in_place).cpu(own::scatter::index_put),
    op("_index_put_impl").gpu(gpu::scatter::index_put),
    op("put").gpu(gpu::scatter::put),

    // --- Pooling and interpolation
    op("max_pool2d_with_indices").outputs(outputs::pooling::max).cpu(own::pooling::max).gpu(gpu::pool::max_pool),
    op("max_pool2d_with_indices_backward").outputs(outputs::pooling::max_backward).cpu(own::pooling::max_backward)
        .gpu(gpu::pool::max_pool_backward),
    op("max_pool3d_with_indices").gpu(gpu::pool::max_pool),
    op("max_pool3d_with_indices_backward").gpu(gpu::pool::max_pool_backward),
    op("adaptive_max_pool2d adaptive_max_pool3d").gpu(gpu::pool::adaptive_max_pool),
    op("adaptive_max_pool2d_backward adaptive_max_pool3d_backward").gpu(gpu::pool::adaptive_max_pool_backward),
    op("avg_pool2d").outputs(outputs::pooling::average).cpu(own::pooling::average).gpu(gpu::pool::avg_pool),
    op("avg_pool2d_backward").outputs(outputs::pooling::average_backward).cpu(own::pooling::average_backward)
        .gpu(gpu::pool::avg_pool_backward),
    op("avg_pool3d").gpu(gpu::pool::avg_pool),
    op("avg_pool3d_backward").gpu(gpu::pool::avg_pool_backward),
    op("_adaptive_avg_pool2d").outputs(outputs::pooling::adaptive).cpu(own::pooling::adaptive).gpu(gpu::pool::adaptive_avg_pool),
    op("_adaptive_avg_pool2d_backward").outputs(outputs::pooling::adaptive_backward).cpu(own::pooling::adaptive_backward)
        .gpu(gpu::pool::adaptive_avg_pool_backward),
    op("_adaptive_avg_pool3d").gpu(gpu::pool::adaptive_avg_pool),
    op("_adaptive_avg_pool3d_backward").gpu(gpu::pool::adaptive_avg_pool_backward),
    op("max_unpool2d").gpu(gpu::pool::max_unpool2d),
    op("upsample* _upsample*").sized_by_number(),
    op("upsample_nearest1d upsample_nearest2d upsample_nearest3d").gpu(gpu::upsample::forward),
    op("_upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d").gpu(gpu::upsample::forward),
    op("upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d").gpu(gpu::upsample::forward),
    op("upsample_nearest1d_backward upsample_nearest2d_backward upsample_nearest3d_backward").gpu(gpu::upsample::backward),
    op("_upsample_nearest_exact1d_backward _upsample_nearest_exact2d_backward").gpu(gpu::upsample::backward),
    op("_upsample_nearest_exact3d_backward upsample_linear1d_backward").gpu(gpu::upsample::backward),
    op("upsample_bilinear2d_backward upsample_trilinear3d_backward upsample_bicubic2d_backward").gpu(gpu::upsample::backward),
    op("grid_sampler_2d").gpu(gpu::upsample::grid_sampler),
    op("grid_sampler_2d_backward").gpu(gpu::upsample::grid_sampler_backward),

    // --- Random numbers
    op("uniform").random_on_gpu(gpu::random::uniform),
    op("uniform_").outputs(outputs::drawn).bounds(&[(2, Bound::EndOf(1))]),
    op("normal").random_on_gpu(gpu::random::normal),
    op("normal_").outputs(outputs::drawn).bounds(&[(2, NOT_NEGATIVE)]),
    op("normal.Tensor_float").bounds(&[(1, NOT_NEGATIVE)]),
    op("random").random_on_gpu(gpu::random::random),
    op("random_").fed_ints(),
    op("random_.from").bounds(&[(2, Bound::Above(1))]),
    op("random_.to").bounds(&[(1, Bound::Within(1.0, f64::INFINITY))]),
    op("bernoulli").random_on_gpu(gpu::random::bernoulli).bounds(&[(1, PROBABILITY)]),
    op("bernoulli_").bounds(&[(1, PROBABILITY)]),
    op("bernoulli_.float").outputs(outputs::drawn).draw(random::draw_bernoulli),
    op("exponential").random_on_gpu(gpu::random::exponential),
    op("exponential_").bounds(&[(1, POSITIVE)]),
    op("geometric").random_on_gpu(gpu::random::geometric),
    op("geometric_").bounds(&[(1, Bound::Within(f64::MIN_POSITIVE, 1.0 - f64::EPSILON))]),
    op("log_normal").random_on_gpu(gpu::random::log_normal),
    op("log_normal_").bounds(&[(2, POSITIVE)]),
    op("cauchy").random_on_gpu(gpu::random::cauchy),
    op("cauchy_").bounds(&[(2, POSITIVE)]),
    op("native_dropout").random_on_gpu(gpu::random::native_dropout).bounds(&[(1, PROBABILITY)]),
    op("native_dropout_backward").random_on_gpu(gpu::random::native_dropout_backward),
    op("rrelu_with_noise").random_on_gpu(gpu::random::rrelu_with_noise),
    op("rrelu_with_noise_backward").random_on_gpu(gpu::random::rrelu_with_noise_backward)
        .bounds(&[(3, NOT_NEGATIVE), (4, NOT_NEGATIVE)]),
    op("randperm").random_on_gpu(gpu::random::randperm),
    op("multinomial").random_on_gpu(gpu::random::multinomial),

    // --- Optimizers and lists of tensors
    op("_fused_adam _fused_adamw").gpu(gpu::optim::adam),
    op("_fused_sgd").gpu(gpu::optim::sgd),
    op("_fused_adagrad").gpu(gpu::optim::adagrad),
    op("_amp_foreach_non_finite_check_and_unscale").gpu(gpu::optim::unscale),
    op("_amp_update_scale").gpu(gpu::optim::update_scale),
    op("_foreach_copy").gpu(gpu::foreach::copy),
    op("_foreach_clone").gpu(gpu::foreach::clone),
    op("_foreach_zero").gpu(gpu::foreach::zero),
    op("_foreach_norm _foreach_powsum").gpu(gpu::foreach::norm),
    op("_foreach_norm.Scalar").cpu(own::sums::norms),
    op("_foreach_max").gpu(gpu::foreach::max),

    // --- Linear algebra that raises at the call
    op("_linalg_check_errors _linalg_eigh _linalg_eigvals _linalg_svd").raises(Raises::Always),
    op("cholesky cholesky_inverse linalg_eig linalg_eigvals linalg_lstsq").raises(Raises::Always),
    op("linalg_matrix_sqrth linalg_pinv linalg_polar").raises(Raises::Always),
    op("_linalg_solve_ex linalg_cholesky_ex linalg_inv_ex").raises(Raises::IfAsked),
    op("linalg_ldl_factor_ex linalg_lu_factor_ex linalg_solve_ex").raises(Raises::IfAsked),

    // --- Other libraries
    op("torchvision::roi_align").cpu(own::roi_align::forward).static_shape(),
    op("torchvision::_roi_align_backward").cpu(own::roi_align::backward).static_shape(),
    op("tandem::collective_start tandem::collective_wait").static_shape(),
    op("torchvision::roi_pool torchvision::deform_conv2d torchvision::_deform_conv2d_backward").static_shape(),

    // --- Kernels of PyTorch for the default backend that are kept
    op("alias as_strided_ detach detach_ diagonal expand lift_fresh permute select slice slice_inverse split").kept(Kept::View),
    op("split_with_sizes squeeze squeeze_ t t_ transpose transpose_ unbind unsafe_split").kept(Kept::View),
    op("unsafe_split_with_sizes unsqueeze unsqueeze_ view _unsafe_view _conj _neg_view _fw_primal").kept(Kept::View),
    op("_make_dual _lazy_clone lift swapaxes_ swapdims_").kept(Kept::View),
    op("arange bartlett_window blackman_window empty_like empty_permuted empty_quantized eye fft_fftfreq").kept(Kept::Factory),
    op("fft_rfftfreq from_file full full_like hamming_window hann_window linspace logspace new_empty").kept(Kept::Factory),
    op("new_empty_strided new_full new_ones new_zeros normal_functional ones ones_like rand rand_like").kept(Kept::Factory),
    op("randint randint_like randn randn_like randperm range scalar_tensor tril_indices triu_indices").kept(Kept::Factory),
    op("zeros zeros_like _efficientzerotensor _new_zeros_with_same_feature_meta").kept(Kept::Factory),
    op("is_pinned _pin_memory is_same_size _has_same_storage_numel dense_dim sparse_dim").kept(Kept::Metadata),
    op("is_coalesced _coalesced sym_constrain_range sym_constrain_range_for_size").kept(Kept::Metadata),
    op("_assert_tensor_metadata _resize_output _resize_output_ resize resize_as resize_as_ set").kept(Kept::Metadata),
    op("is_non_overlapping_and_dense").kept(Kept::Metadata),
    op("bernoulli.p clone copy_ _to_copy _copy_from_and_resize _pack_padded_sequence").kept(Kept::Composite),
    op("repeat_interleave").kept(Kept::Composite),
    op("shallow_copy_data_").kept(Kept::Composite),
    op("values indices _values _indices crow_indices col_indices ccol_indices row_indices").kept(Kept::Elsewhere),
    op("lstm_mps lstm_mps_backward to_mkldnn").kept(Kept::Elsewhere),
    op("_test* _sparse* sparse* _nested* _to_sparse* to_sparse* mkldnn* miopen* cudnn* _cudnn*").kept(Kept::Elsewhere),
    op("_mps* mps* _foobar* _philox* _mkldnn* _lstm* to_padded*").kept(Kept::Elsewhere),
];

struct Index {
    rows: FxHashMap<&'static str, Vec<&'static Row>>,
    prefixes: Vec<(&'static str, &'static Row)>,
}

static INDEX: LazyLock<Index> = LazyLock::new(|| {
    let mut index = Index { rows: FxHashMap::default(), prefixes: Vec::new() };
    for row in TABLE {
        for name in row.names.split(' ') {
            match name.strip_suffix('*') {
                Some(prefix) => index.prefixes.push((prefix, row)),
                None => index.rows.entry(name).or_default().push(row),
            }
        }
    }
    index
});

fn short(name: &str) -> &str {
    name.strip_prefix("aten::").unwrap_or(name)
}

/// The name without its overload.
fn base(name: &str) -> &str {
    name.split('.').next().unwrap_or(name)
}

/// A column of the rows with exactly this name.
fn exact<T>(name: &str, column: impl Fn(&Row) -> Option<T>) -> Option<T> {
    INDEX.rows.get(name)?.iter().find_map(|row| column(row))
}

/// A column, by the full name, the name without overload, or a prefix.
fn lookup<T>(name: &str, column: impl Fn(&Row) -> Option<T> + Copy) -> Option<T> {
    let name = short(name);
    exact(name, column).or_else(|| exact(base(name), column)).or_else(|| {
        let mut rows = INDEX.prefixes.iter().filter(|(prefix, _)| name.starts_with(prefix));
        rows.find_map(|(_, row)| column(row))
    })
}

fn is(name: &str, column: impl Fn(&Row) -> bool + Copy) -> bool {
    lookup(name, |row| column(row).then_some(())).is_some()
}

/// The name in the table of an operator's lowering: without namespace, overload, and the underscore of the in-place
/// form. `written` says for each argument of the schema whether the operator writes it.
fn lowered_name<'n>(name: &'n str, written: &[bool]) -> &'n str {
    let base = base(short(name));
    let in_place = written.first() == Some(&true) && !base.starts_with("__");
    if in_place { base.strip_suffix('_').unwrap_or(base) } else { base }
}

/// Why the default-backend kernel of an operator (`aten::op.overload`) is kept, or `None` if it is captured.
pub fn kept_default(name: &str) -> Option<Kept> {
    let overload = short(name).split_once('.').map_or("", |(_, overload)| overload);
    // `x_copy` variants of views and generated `out=` variants call the functional operator and copy its output.
    let is_out = base(name).ends_with("_copy")
        || base(name).ends_with("_out")
        || overload == "out"
        || overload.ends_with("_out");
    lookup(name, |row| row.kept).or_else(|| is_out.then_some(Kept::Composite))
}

/// The properties of an operator for the TraceGraph.
pub fn traits(name: &str) -> Traits {
    let bounds = lookup(name, |row| Some(row.traits.bounds).filter(|bounds| !bounds.is_empty()));
    Traits {
        dynamic_shape: is(name, |row| row.traits.dynamic_shape),
        dynamic_by_mask: is(name, |row| row.traits.dynamic_by_mask),
        static_shape: is(name, |row| row.traits.static_shape),
        raises: lookup(name, |row| row.traits.raises),
        sized_by_number: is(name, |row| row.traits.sized_by_number),
        keeps_offset: is(name, |row| row.traits.keeps_offset),
        fed_ints: is(name, |row| row.traits.fed_ints),
        hidden_writes: hidden_writes(name),
        bounds: bounds.unwrap_or_default(),
    }
}

/// The rule for the metadata of an operator's outputs, or `None` if there is none. `written` says for each argument
/// of the schema whether the operator writes it.
pub fn outputs_of(name: &str, written: &[bool]) -> Option<OutputRule> {
    let own = exact(short(name), |row| row.outputs).map(OutputRule::Own);
    own.or_else(|| Base::of(name, written).map(OutputRule::Pointwise))
}

/// Tandem's kernel on the CPU, for overloads that write no argument.
pub(crate) fn cpu_kernel(name: &str) -> Option<MakeKernel> {
    lookup(name, |row| row.cpu)
}

/// The kernel on the CPU that draws from PyTorch's generator.
pub(crate) fn cpu_draw(name: &str) -> Option<Draw> {
    exact(short(name), |row| row.draw)
}

/// The function that returns a call as sums over rows.
pub(crate) fn row_sums(name: &str) -> Option<MakeRowSums> {
    exact(short(name), |row| row.row_sums)
}

/// The lowering of an operator to kernels on a GPU, and the operator's name in the lowering's family. `written` says
/// for each argument of the schema whether the operator writes it.
pub(crate) fn lowering<'n>(name: &'n str, written: &[bool]) -> Option<(&'n str, Lower)> {
    let name = lowered_name(name, written);
    let lower = exact(name, |row| row.gpu);
    let pointwise = || match name.strip_prefix("_foreach_") {
        Some(inner) => pointwise::find(inner).map(|_| gpu::foreach::pointwise as Lower),
        None => pointwise::find(name).map(|_| gpu::pointwise::lower as Lower),
    };
    lower.or_else(pointwise).map(|lower| (name, lower))
}

/// Whether an operator's lowering to a GPU draws random numbers.
pub(crate) fn draws_on_gpu(name: &str, written: &[bool]) -> bool {
    exact(lowered_name(name, written), |row| row.draws.then_some(())).is_some()
}

/// Whether an operator's outputs have the storage offsets of its inputs.
pub(crate) fn keeps_offset(name: &str) -> bool {
    is(name, |row| row.traits.keeps_offset)
}

/// The number of arithmetic operations of an operator's calls.
pub(crate) fn flops_of(name: &str) -> Flops {
    lookup(name, |row| row.flops).unwrap_or(flops::elementwise)
}

/// Whether an operator multiplies matrices.
pub fn is_contraction(name: &str) -> bool {
    is(name, |row| row.contraction)
}

/// The arguments that an operator writes although its schema does not declare it. PyTorch's kernel must not run in
/// addition to Tandem's.
pub(crate) fn hidden_writes(name: &str) -> &'static [usize] {
    let written = |row: &Row| (!row.traits.hidden_writes.is_empty()).then_some(row.traits.hidden_writes);
    exact(short(name), written).unwrap_or_default()
}

/// Whether an operator overwrites all of its first argument, regardless of the previous contents.
pub(crate) fn overwrites(name: &str) -> bool {
    is(name, |row| row.overwrites)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_kernels_are_captured_unless_listed() {
        assert_eq!(kept_default("aten::add.Tensor"), None);
        assert_eq!(kept_default("aten::convolution"), None);
        assert_eq!(kept_default("aten::transpose.int"), Some(Kept::View));
        assert_eq!(kept_default("aten::convolution.out"), Some(Kept::Composite));
        assert_eq!(kept_default("aten::permute_copy"), Some(Kept::Composite));
        assert_eq!(kept_default("aten::_sparse_sum"), Some(Kept::Elsewhere));
    }

    #[test]
    fn columns_are_found_by_overload_then_by_operator() {
        assert!(outputs_of("aten::sum.dim_IntList", &[false; 4]).is_some());
        assert!(outputs_of("aten::sum.dim_DimnameList", &[false; 4]).is_none());
        assert!(cpu_kernel("aten::sum.dim_IntList").is_some());
        assert_eq!(traits("aten::random_.to").bounds, &[(1, Bound::Within(1.0, f64::INFINITY))]);
        assert!(traits("aten::random_.to").fed_ints);
        assert!(traits("aten::upsample_nearest2d.vec").sized_by_number);
        assert!(is_contraction("aten::_scaled_dot_product_attention_math"));
        assert!(!is_contraction("aten::mul.Tensor"));
    }

    #[test]
    fn lowerings_cover_the_forms_of_an_operator() {
        let found = |name, written: &[bool]| lowering(name, written).map(|(name, _)| name);
        assert_eq!(found("aten::add_.Tensor", &[true, false, false]), Some("add"));
        assert_eq!(found("aten::_foreach_mul_.List", &[true, false]), Some("_foreach_mul"));
        assert_eq!(found("aten::__ilshift__.Scalar", &[true, false]), Some("__ilshift__"));
        assert_eq!(found("aten::_foreach_mm", &[false, false]), None);
        assert_eq!(found("torchvision::roi_align", &[false]), None);
        assert!(draws_on_gpu("aten::bernoulli_.float", &[true, false, false]));
        assert!(overwrites("aten::normal_") && !overwrites("aten::normal.Tensor_Tensor"));
    }

    #[test]
    fn no_operator_is_twice_in_a_column() {
        let mut seen = rustc_hash::FxHashSet::default();
        for row in TABLE {
            for name in row.names.split(' ') {
                let Row { kept, outputs, cpu, draw, row_sums, gpu, flops, .. } = *row;
                let columns = [
                    kept.is_some(),
                    outputs.is_some(),
                    cpu.is_some(),
                    draw.is_some(),
                    row_sums.is_some(),
                    gpu.is_some(),
                    flops.is_some(),
                    row.overwrites,
                    row.contraction,
                    !row.traits.bounds.is_empty(),
                ];
                for (column, _) in columns.iter().enumerate().filter(|(_, is_set)| **is_set) {
                    assert!(seen.insert((name, column)), "{name} has two rows for column {column}");
                }
            }
        }
    }
}
