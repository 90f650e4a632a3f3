//! The table of lowerings: the operators that run as kernels on a GPU, and the functions that make the kernels of a
//! call.
//!
//! A row stands for all overloads of an operator and for its in-place form. An operator without a row is lowered by its
//! expression ([`tandem_executor::ops::pointwise`]), or runs on the host.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use tandem_executor::ops::losses::Loss;
use tandem_executor::ops::names::{ByName, functional};
use tandem_executor::ops::pointwise;

use crate::lower::Lower;
use crate::ops;
use crate::ops::loss::{loss, loss_backward};
use crate::ops::norm::{BatchNorm, batch_norm};
use crate::ops::pad::{self, Fill};
use crate::ops::pooling;
use crate::ops::reduce::{Extreme, Spread, Sums, arg_extreme, extreme, max_min, sums, variance};
use crate::ops::softmax::Kind;
use crate::ops::upsample::{self, Interpolation};

/// A row of the table: some operators and their lowering.
#[derive(Clone, Copy)]
struct Row {
    /// Names, separated by spaces.
    names: &'static str,
    lower: Option<Lower>,
    /// Whether the lowering draws random numbers.
    draws: bool,
}

const fn op(names: &'static str) -> Row {
    Row { names, lower: None, draws: false }
}

impl Row {
    const fn lower(self, lower: Lower) -> Row {
        Row { lower: Some(lower), ..self }
    }
    const fn draws(self, lower: Lower) -> Row {
        Row { lower: Some(lower), draws: true, ..self }
    }
}

#[rustfmt::skip]
static TABLE: &[Row] = &[
    // --- Matrix products and convolutions
    op("mm").lower(ops::matmul::mm),
    op("addmm").lower(ops::matmul::addmm),
    op("_addmm_activation").lower(ops::matmul::addmm_activation),
    op("bmm").lower(ops::matmul::bmm),
    op("baddbmm").lower(ops::matmul::baddbmm),
    op("addbmm").lower(ops::matmul::addbmm),
    op("mv").lower(ops::matmul::mv),
    op("addmv").lower(ops::matmul::addmv),
    op("dot").lower(ops::matmul::dot),
    op("vdot").lower(ops::matmul::dot),
    op("addr").lower(ops::matmul::addr),
    op("convolution").lower(ops::conv::convolution),
    op("convolution_backward").lower(ops::conv::convolution_backward),
    op("_scaled_dot_product_flash_attention_for_cpu").lower(ops::attention::forward),
    op("_scaled_dot_product_flash_attention_for_cpu_backward").lower(ops::attention::backward),
    op("tandem::attention").lower(ops::attention::dropping_forward),
    op("tandem::attention_backward").lower(ops::attention::dropping_backward),

    // --- Reductions, scans and sorting
    op("sum").lower(|l| sums(l, Sums::Sum)),
    op("nansum").lower(|l| sums(l, Sums::Nansum)),
    op("mean").lower(|l| sums(l, Sums::Mean)),
    op("prod").lower(|l| sums(l, Sums::Prod)),
    op("var").lower(|l| variance(l, Spread { deviation: false, mean: false })),
    op("std").lower(|l| variance(l, Spread { deviation: true, mean: false })),
    op("var_mean").lower(|l| variance(l, Spread { deviation: false, mean: true })),
    op("std_mean").lower(|l| variance(l, Spread { deviation: true, mean: true })),
    op("amax").lower(|l| extreme(l, Extreme::Max)),
    op("amin").lower(|l| extreme(l, Extreme::Min)),
    op("aminmax").lower(ops::reduce::aminmax),
    op("max").lower(|l| max_min(l, Extreme::Max)),
    op("min").lower(|l| max_min(l, Extreme::Min)),
    op("argmax").lower(|l| arg_extreme(l, Extreme::Max)),
    op("argmin").lower(|l| arg_extreme(l, Extreme::Min)),
    op("any _is_any_true").lower(ops::reduce::any),
    op("all _is_all_true").lower(ops::reduce::all),
    op("count_nonzero").lower(ops::reduce::count_nonzero),
    op("isin").lower(ops::reduce::isin),
    op("linalg_vector_norm").lower(ops::vector_norm::vector_norm),
    op("norm").lower(ops::vector_norm::norm),
    op("logsumexp").lower(ops::reduce::logsumexp),
    op("dist").lower(ops::vector_norm::dist),
    op("_cdist_forward").lower(ops::vector_norm::cdist),
    op("_euclidean_dist").lower(ops::vector_norm::euclidean_dist),
    op("_cdist_backward").lower(ops::vector_norm::cdist_backward),
    op("renorm renorm_").lower(ops::vector_norm::renorm),
    op("cumsum").lower(ops::scan::cumsum),
    op("cumprod").lower(ops::scan::cumprod),
    op("cummax").lower(|l| ops::scan::extremes(l, Extreme::Max)),
    op("cummin").lower(|l| ops::scan::extremes(l, Extreme::Min)),
    op("logcumsumexp _logcumsumexp").lower(ops::scan::exponential_sums),
    op("sort").lower(ops::sort::sort),
    op("topk").lower(ops::sort::topk),
    op("kthvalue").lower(ops::sort::kthvalue),
    op("median").lower(ops::sort::median),
    op("nanmedian").lower(ops::sort::nanmedian),
    op("searchsorted").lower(|l| ops::sort::search(l, 0, 1)),
    op("bucketize").lower(|l| ops::sort::search(l, 1, 0)),

    // --- Softmax, norms, cells and losses
    op("_softmax").lower(|l| ops::softmax::forward(l, Kind::Softmax)),
    op("_safe_softmax").lower(|l| ops::softmax::forward(l, Kind::Safe)),
    op("_log_softmax").lower(|l| ops::softmax::forward(l, Kind::Log)),
    op("_softmax_backward_data").lower(|l| ops::softmax::backward(l, Kind::Softmax)),
    op("_log_softmax_backward_data").lower(|l| ops::softmax::backward(l, Kind::Log)),
    op("native_layer_norm").lower(ops::norm::layer_norm),
    op("native_layer_norm_backward").lower(ops::norm::layer_norm_backward),
    op("native_group_norm").lower(ops::norm::group_norm),
    op("native_group_norm_backward").lower(ops::norm::group_norm_backward),
    op("native_batch_norm _native_batch_norm_legit").lower(|l| batch_norm(l, BatchNorm::Native)),
    op("_native_batch_norm_legit_no_training").lower(|l| batch_norm(l, BatchNorm::NoTraining)),
    op("_batch_norm_with_update").lower(|l| batch_norm(l, BatchNorm::WithUpdate)),
    op("_batch_norm_no_update").lower(|l| batch_norm(l, BatchNorm::NoUpdate)),
    op("native_batch_norm_backward").lower(ops::norm::batch_norm_backward),
    op("batch_norm_backward").lower(ops::norm::batch_norm_backward),
    op("_thnn_fused_lstm_cell").lower(ops::cells::lstm),
    op("_thnn_fused_lstm_cell_backward_impl").lower(ops::cells::lstm_backward),
    op("_thnn_fused_gru_cell").lower(ops::cells::gru),
    op("_thnn_fused_gru_cell_backward").lower(ops::cells::gru_backward),
    op("nll_loss_forward").lower(|l| ops::loss::nll_loss(l, false)),
    op("nll_loss_backward").lower(|l| ops::loss::nll_loss_backward(l, false)),
    op("nll_loss2d_forward").lower(|l| ops::loss::nll_loss(l, true)),
    op("nll_loss2d_backward").lower(|l| ops::loss::nll_loss_backward(l, true)),
    op("mse_loss").lower(|l| loss(l, Loss::Mse)),
    op("mse_loss_backward").lower(|l| loss_backward(l, Loss::Mse)),
    op("huber_loss").lower(|l| loss(l, Loss::Huber)),
    op("huber_loss_backward").lower(|l| loss_backward(l, Loss::Huber)),
    op("smooth_l1_loss").lower(|l| loss(l, Loss::SmoothL1)),
    op("smooth_l1_loss_backward").lower(|l| loss_backward(l, Loss::SmoothL1)),
    op("soft_margin_loss").lower(|l| loss(l, Loss::SoftMargin)),
    op("soft_margin_loss_backward").lower(|l| loss_backward(l, Loss::SoftMargin)),
    op("binary_cross_entropy").lower(ops::loss::cross_entropy),
    op("binary_cross_entropy_backward").lower(ops::loss::cross_entropy_backward),
    op("binary_cross_entropy_with_logits").lower(ops::loss::cross_entropy_with_logits),

    // --- Element-wise operators without an expression, or with bounds
    op("where").lower(ops::pointwise::where_),
    op("masked_fill").lower(ops::pointwise::masked_fill),
    op("ldexp").lower(ops::pointwise::ldexp),
    op("glu").lower(ops::activation::glu),
    op("glu_backward").lower(ops::activation::glu_backward),
    op("log_sigmoid_forward").lower(ops::activation::log_sigmoid),
    op("log_sigmoid_backward").lower(ops::activation::log_sigmoid_backward),
    op("_prelu_kernel_backward").lower(ops::activation::prelu_backward),
    op("celu celu_").lower(ops::activation::celu),

    // --- Copies, fills and windows
    op("copy").lower(ops::fill::copy),
    op("fill").lower(ops::fill::fill),
    op("zero").lower(ops::fill::zero),
    op("empty").lower(ops::fill::empty),
    op("empty_strided").lower(ops::fill::empty_strided),
    op("arange").lower(ops::fill::arange),
    op("linspace").lower(ops::fill::linspace),
    op("logspace").lower(ops::fill::logspace),
    op("eye").lower(ops::fill::eye),
    op("cat").lower(ops::cat_flip::cat),
    op("concat concatenate").lower(ops::cat_flip::cat),
    op("stack").lower(ops::cat_flip::stack),
    op("block_diag").lower(ops::cat_flip::block_diag),
    op("flip").lower(ops::cat_flip::flip),
    op("rot90").lower(ops::cat_flip::rot90),
    op("roll").lower(ops::cat_flip::roll),
    op("repeat").lower(ops::cat_flip::repeat),
    op("tril").lower(ops::cat_flip::tril),
    op("triu").lower(ops::cat_flip::triu),
    op("diag_embed").lower(ops::cat_flip::diag_embed),
    op("trace").lower(ops::cat_flip::trace),
    op("select_backward").lower(ops::views::select_backward),
    op("slice_backward").lower(ops::views::slice_backward),
    op("diagonal_backward").lower(ops::views::diagonal_backward),
    op("select_scatter").lower(ops::views::select_scatter),
    op("slice_scatter").lower(ops::views::slice_scatter),
    op("diagonal_scatter").lower(ops::views::diagonal_scatter),
    op("unfold_backward").lower(ops::views::unfold_backward),
    op("constant_pad_nd").lower(ops::pad::constant_pad),
    op("reflection_pad1d").lower(|l| pad::pad(l, 1, Fill::Reflection)),
    op("reflection_pad2d").lower(|l| pad::pad(l, 2, Fill::Reflection)),
    op("reflection_pad3d").lower(|l| pad::pad(l, 3, Fill::Reflection)),
    op("replication_pad1d").lower(|l| pad::pad(l, 1, Fill::Replication)),
    op("replication_pad2d").lower(|l| pad::pad(l, 2, Fill::Replication)),
    op("replication_pad3d").lower(|l| pad::pad(l, 3, Fill::Replication)),
    op("reflection_pad1d_backward").lower(|l| pad::reflection_backward(l, 1)),
    op("reflection_pad2d_backward").lower(|l| pad::reflection_backward(l, 2)),
    op("reflection_pad3d_backward").lower(|l| pad::reflection_backward(l, 3)),
    op("replication_pad1d_backward").lower(|l| pad::replication_backward(l, 1)),
    op("replication_pad2d_backward").lower(|l| pad::replication_backward(l, 2)),
    op("replication_pad3d_backward").lower(|l| pad::replication_backward(l, 3)),
    op("im2col").lower(ops::pad::im2col),
    op("col2im").lower(ops::pad::col2im),
    op("pixel_shuffle").lower(ops::pad::pixel_shuffle),
    op("pixel_unshuffle").lower(ops::pad::pixel_unshuffle),
    op("channel_shuffle native_channel_shuffle").lower(ops::pad::channel_shuffle),

    // --- Indexing
    op("embedding").lower(ops::index::embedding),
    op("embedding_dense_backward").lower(ops::scatter::embedding_dense_backward),
    op("index_select").lower(ops::index::index_select),
    op("index").lower(ops::index::index),
    op("_unsafe_index").lower(ops::index::index),
    op("gather").lower(ops::index::gather),
    op("take").lower(ops::index::take),
    op("scatter").lower(ops::scatter::scatter),
    op("scatter_add").lower(ops::scatter::scatter_add),
    op("scatter_reduce").lower(ops::scatter::scatter_reduce),
    op("index_add").lower(ops::scatter::index_add),
    op("index_copy").lower(ops::scatter::index_copy),
    op("index_fill").lower(ops::scatter::index_fill),
    op("index_reduce").lower(ops::scatter::index_reduce),
    op("index_put _unsafe_index_put").lower(ops::scatter::index_put),
    op("_index_put_impl").lower(ops::scatter::index_put),
    op("put").lower(ops::scatter::put),

    // --- Pooling and interpolation
    op("max_pool2d_with_indices").lower(|l| pooling::max_pool(l, 2)),
    op("max_pool2d_with_indices_backward").lower(|l| pooling::max_pool_backward(l, 2)),
    op("max_pool3d_with_indices").lower(|l| pooling::max_pool(l, 3)),
    op("max_pool3d_with_indices_backward").lower(|l| pooling::max_pool_backward(l, 3)),
    op("adaptive_max_pool2d").lower(|l| pooling::adaptive_max_pool(l, 2)),
    op("adaptive_max_pool3d").lower(|l| pooling::adaptive_max_pool(l, 3)),
    op("adaptive_max_pool2d_backward").lower(|l| pooling::adaptive_max_pool_backward(l, 2)),
    op("adaptive_max_pool3d_backward").lower(|l| pooling::adaptive_max_pool_backward(l, 3)),
    op("avg_pool2d").lower(|l| pooling::avg_pool(l, 2)),
    op("avg_pool2d_backward").lower(|l| pooling::avg_pool_backward(l, 2)),
    op("avg_pool3d").lower(|l| pooling::avg_pool(l, 3)),
    op("avg_pool3d_backward").lower(|l| pooling::avg_pool_backward(l, 3)),
    op("_adaptive_avg_pool2d").lower(|l| pooling::adaptive_avg_pool(l, 2)),
    op("_adaptive_avg_pool2d_backward").lower(|l| pooling::adaptive_avg_pool_backward(l, 2)),
    op("_adaptive_avg_pool3d").lower(|l| pooling::adaptive_avg_pool(l, 3)),
    op("_adaptive_avg_pool3d_backward").lower(|l| pooling::adaptive_avg_pool_backward(l, 3)),
    op("max_unpool2d").lower(ops::pooling::max_unpool2d),
    op("upsample_nearest1d").lower(|l| upsample::forward(l, Interpolation::Nearest, 1)),
    op("upsample_nearest2d").lower(|l| upsample::forward(l, Interpolation::Nearest, 2)),
    op("upsample_nearest3d").lower(|l| upsample::forward(l, Interpolation::Nearest, 3)),
    op("_upsample_nearest_exact1d").lower(|l| upsample::forward(l, Interpolation::NearestExact, 1)),
    op("_upsample_nearest_exact2d").lower(|l| upsample::forward(l, Interpolation::NearestExact, 2)),
    op("_upsample_nearest_exact3d").lower(|l| upsample::forward(l, Interpolation::NearestExact, 3)),
    op("upsample_linear1d").lower(|l| upsample::forward(l, Interpolation::Linear, 1)),
    op("upsample_bilinear2d").lower(|l| upsample::forward(l, Interpolation::Linear, 2)),
    op("upsample_trilinear3d").lower(|l| upsample::forward(l, Interpolation::Linear, 3)),
    op("upsample_bicubic2d").lower(|l| upsample::forward(l, Interpolation::Cubic, 2)),
    op("upsample_nearest1d_backward").lower(|l| upsample::backward(l, Interpolation::Nearest, 1)),
    op("upsample_nearest2d_backward").lower(|l| upsample::backward(l, Interpolation::Nearest, 2)),
    op("upsample_nearest3d_backward").lower(|l| upsample::backward(l, Interpolation::Nearest, 3)),
    op("_upsample_nearest_exact1d_backward").lower(|l| upsample::backward(l, Interpolation::NearestExact, 1)),
    op("_upsample_nearest_exact2d_backward").lower(|l| upsample::backward(l, Interpolation::NearestExact, 2)),
    op("_upsample_nearest_exact3d_backward").lower(|l| upsample::backward(l, Interpolation::NearestExact, 3)),
    op("upsample_linear1d_backward").lower(|l| upsample::backward(l, Interpolation::Linear, 1)),
    op("upsample_bilinear2d_backward").lower(|l| upsample::backward(l, Interpolation::Linear, 2)),
    op("upsample_trilinear3d_backward").lower(|l| upsample::backward(l, Interpolation::Linear, 3)),
    op("upsample_bicubic2d_backward").lower(|l| upsample::backward(l, Interpolation::Cubic, 2)),
    op("grid_sampler_2d").lower(ops::upsample::grid_sampler),
    op("grid_sampler_2d_backward").lower(ops::upsample::grid_sampler_backward),

    // --- Random numbers
    op("uniform").draws(ops::random::uniform),
    op("normal").draws(ops::random::normal),
    op("random").draws(ops::random::random),
    op("bernoulli").draws(ops::random::bernoulli),
    op("exponential").draws(ops::random::exponential),
    op("geometric").draws(ops::random::geometric),
    op("log_normal").draws(ops::random::log_normal),
    op("cauchy").draws(ops::random::cauchy),
    op("native_dropout").draws(ops::random::native_dropout),
    op("native_dropout_backward").draws(ops::random::native_dropout_backward),
    op("rrelu_with_noise").draws(ops::random::rrelu_with_noise),
    op("rrelu_with_noise_backward").draws(ops::random::rrelu_with_noise_backward),
    op("randperm").draws(ops::random::randperm),
    op("multinomial").draws(ops::random::multinomial),

    // --- Optimizers and lists of tensors
    op("_fused_adam").lower(ops::optim::adam),
    op("_fused_adamw").lower(ops::optim::adamw),
    op("_fused_sgd").lower(ops::optim::sgd),
    op("_fused_adagrad").lower(ops::optim::adagrad),
    op("_amp_foreach_non_finite_check_and_unscale").lower(ops::optim::unscale),
    op("_amp_update_scale").lower(ops::optim::update_scale),
    op("_foreach_copy").lower(ops::foreach::copy),
    op("_foreach_clone").lower(ops::foreach::clone),
    op("_foreach_zero").lower(ops::foreach::zero),
    op("_foreach_norm").lower(ops::foreach::norm),
    op("_foreach_powsum").lower(ops::foreach::powsum),
    op("_foreach_max").lower(ops::foreach::max),
];

static BY_NAME: LazyLock<ByName<Row>> = LazyLock::new(|| ByName::new(TABLE, |row| row.names));

/// The lowering of an operator, and the operator's name in the lowering's family. `written` says for each argument of
/// the schema whether the operator writes it.
pub(crate) fn lowering<'n>(name: &'n str, written: &[bool]) -> Option<(&'n str, Lower)> {
    let name = functional(name, written);
    let lower = BY_NAME.exact(name, |row| row.lower);
    let pointwise = || match name.strip_prefix("_foreach_") {
        Some(inner) => pointwise::find(inner).map(|_| ops::foreach::pointwise as Lower),
        None => pointwise::find(name).map(|_| ops::pointwise::lower as Lower),
    };
    lower.or_else(pointwise).map(|lower| (name, lower))
}

/// Whether an operator's lowering draws random numbers.
pub(crate) fn draws(name: &str, written: &[bool]) -> bool {
    BY_NAME.exact(functional(name, written), |row| row.draws.then_some(())).is_some()
}

/// The operators of the table, and the columns that are set for each.
pub fn columns() -> BTreeMap<String, Vec<&'static str>> {
    BY_NAME.listing(|row| [("lowering", row.lower.is_some()), ("draws", row.draws)])
}

#[cfg(test)]
mod tests {
    use tandem_executor::ops::names::repeated;

    use super::*;

    #[test]
    fn lowerings_cover_the_forms_of_an_operator() {
        let found = |name, written: &[bool]| lowering(name, written).map(|(name, _)| name);
        assert_eq!(found("aten::add_.Tensor", &[true, false, false]), Some("add"));
        assert_eq!(found("aten::_foreach_mul_.List", &[true, false]), Some("_foreach_mul"));
        assert_eq!(found("aten::__ilshift__.Scalar", &[true, false]), Some("__ilshift__"));
        assert_eq!(found("aten::_foreach_mm", &[false, false]), None);
        assert_eq!(found("torchvision::roi_align", &[false]), None);
        assert!(draws("aten::bernoulli_.float", &[true, false, false]));
    }

    #[test]
    fn no_operator_is_twice_in_a_column() {
        assert_eq!(repeated(&columns()), None);
    }
}
