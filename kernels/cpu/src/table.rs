//! The table of Tandem's kernels for the CPU: the operators that have one, and the function that makes a call's kernel.
//!
//! An operator without a row is computed by its expression ([`tandem_executor::ops::pointwise`]) or by PyTorch's
//! kernel. [`tandem_executor::ops::names`] says how names are looked up.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use tandem_executor::ops::names::ByName;
use tandem_executor::plan::RowSums;
use tandem_tracegraph::call::Call;
use tandem_tracegraph::node::Outputs;

use crate::kernels::{self, MakeKernel};
use crate::random::{self, Draw};

/// Function that returns a call as sums over rows, which a plan can fuse with the operators before it.
type MakeRowSums = fn(&Call<'_>, &Outputs) -> Option<RowSums>;

/// A row: some operators, and their kernels.
#[derive(Clone, Copy)]
struct Row {
    /// Names, separated by spaces.
    names: &'static str,
    /// Kernel for overloads that write no argument, or only their first argument.
    kernel: Option<MakeKernel>,
    /// Kernel that draws from PyTorch's generator. Applies to exactly the named overloads.
    draw: Option<Draw>,
    /// The call as sums over rows. Applies to exactly the named overloads.
    row_sums: Option<MakeRowSums>,
}

const fn op(names: &'static str) -> Row {
    Row { names, kernel: None, draw: None, row_sums: None }
}

impl Row {
    const fn kernel(self, make: MakeKernel) -> Row {
        Row { kernel: Some(make), ..self }
    }
    const fn draw(self, draw: Draw) -> Row {
        Row { draw: Some(draw), ..self }
    }
    const fn row_sums(self, make: MakeRowSums) -> Row {
        Row { row_sums: Some(make), ..self }
    }
}

#[rustfmt::skip]
static TABLE: &[Row] = &[
    // --- Matrix products and convolutions
    op("mm").kernel(kernels::matmul::mm),
    op("addmm").kernel(kernels::matmul::addmm),
    op("bmm").kernel(kernels::matmul::bmm),
    op("baddbmm").kernel(kernels::matmul::baddbmm),
    op("mv").kernel(kernels::matmul::mv),
    op("addmv").kernel(kernels::matmul::addmv),
    op("dot").kernel(kernels::reduce::sums::dot).row_sums(kernels::reduce::sums::of_products),
    op("convolution").kernel(kernels::conv::forward),
    op("convolution_backward").kernel(kernels::conv::backward),
    op("_scaled_dot_product_flash_attention_for_cpu").kernel(kernels::attention::forward),
    op("_scaled_dot_product_flash_attention_for_cpu_backward").kernel(kernels::attention::backward),

    // --- Reductions, scans and sorting
    op("sum").kernel(kernels::reduce::sums::summed).row_sums(kernels::reduce::sums::of_row_sums),
    op("sum.dim_IntList").row_sums(kernels::reduce::sums::of_row_sums),
    op("mean").kernel(kernels::reduce::sums::mean).row_sums(kernels::reduce::sums::of_row_means),
    op("mean.dim").row_sums(kernels::reduce::sums::of_row_means),
    op("var.correction").kernel(kernels::reduce::moments::variance),
    op("std.correction").kernel(kernels::reduce::moments::deviation),
    op("amax").kernel(kernels::sort::amax),
    op("amin").kernel(kernels::sort::amin),
    op("max").kernel(kernels::sort::max_of_all),
    op("min").kernel(kernels::sort::min_of_all),
    op("max.dim").kernel(kernels::sort::max),
    op("min.dim").kernel(kernels::sort::min),
    op("argmax").kernel(kernels::sort::argmax),
    op("argmin").kernel(kernels::sort::argmin),
    op("any _is_any_true").kernel(kernels::reduce::any_all::any),
    op("all _is_all_true").kernel(kernels::reduce::any_all::all),
    op("linalg_vector_norm").kernel(kernels::reduce::moments::vector_norm),
    op("logsumexp").kernel(kernels::softmax::logsumexp),
    op("cumsum").kernel(kernels::scan::cumsum),
    op("cumprod").kernel(kernels::scan::cumprod),
    op("logcumsumexp _logcumsumexp").kernel(kernels::log_scan::logcumsumexp),
    op("sort").kernel(kernels::sort::sort),
    op("sort.stable").kernel(kernels::sort::sort_stable),
    op("topk").kernel(kernels::sort::topk),

    // --- Softmax, norms, cells and losses
    op("_softmax").kernel(kernels::softmax::softmax),
    op("_safe_softmax").kernel(kernels::softmax::safe_softmax),
    op("_log_softmax").kernel(kernels::softmax::log_softmax),
    op("_softmax_backward_data").kernel(kernels::softmax::softmax_backward),
    op("_log_softmax_backward_data").kernel(kernels::softmax::log_softmax_backward),
    op("native_layer_norm").kernel(kernels::norm::layer_norm),
    op("native_layer_norm_backward").kernel(kernels::norm::layer_norm_backward),
    op("native_group_norm").kernel(kernels::channel_norms::group::forward),
    op("native_group_norm_backward").kernel(kernels::channel_norms::group::backward),
    op("native_batch_norm").kernel(kernels::channel_norms::batch::forward),
    op("native_batch_norm_backward").kernel(kernels::channel_norms::batch::backward),
    op("_thnn_fused_lstm_cell").kernel(kernels::cells::lstm),
    op("_thnn_fused_lstm_cell_backward_impl").kernel(kernels::cells::lstm_backward),
    op("_thnn_fused_gru_cell").kernel(kernels::cells::gru),
    op("_thnn_fused_gru_cell_backward").kernel(kernels::cells::gru_backward),
    op("nll_loss_forward").kernel(kernels::nll_loss::forward),
    op("nll_loss_backward").kernel(kernels::nll_loss::backward),
    op("mse_loss").kernel(kernels::loss::mse),
    op("mse_loss_backward").kernel(kernels::loss::mse_backward),
    op("huber_loss").kernel(kernels::loss::huber),
    op("huber_loss_backward").kernel(kernels::loss::huber_backward),
    op("smooth_l1_loss").kernel(kernels::loss::smooth_l1),
    op("smooth_l1_loss_backward").kernel(kernels::loss::smooth_l1_backward),
    op("binary_cross_entropy").kernel(kernels::loss::cross_entropy),
    op("binary_cross_entropy_backward").kernel(kernels::loss::cross_entropy_backward),
    op("binary_cross_entropy_with_logits").kernel(kernels::loss::cross_entropy_of_logits),

    // --- Copies, fills and windows
    op("empty").kernel(kernels::cat_pad::empty),
    op("empty_strided").kernel(kernels::cat_pad::empty),
    op("new_empty new_empty_strided empty_like").kernel(kernels::cat_pad::empty),
    op("cat").kernel(kernels::cat_pad::join),
    op("stack").kernel(kernels::cat_pad::join),
    op("flip").kernel(kernels::flip_roll_repeat::flip),
    op("roll").kernel(kernels::flip_roll_repeat::roll),
    op("repeat").kernel(kernels::flip_roll_repeat::repeat),
    op("tril").kernel(kernels::flip_roll_repeat::tril),
    op("triu").kernel(kernels::flip_roll_repeat::triu),
    op("select_backward").kernel(kernels::cat_pad::select_backward),
    op("slice_backward").kernel(kernels::cat_pad::slice_backward),
    op("constant_pad_nd").kernel(kernels::cat_pad::constant_pad),

    // --- Indexing
    op("embedding").kernel(kernels::index::embedding),
    op("embedding_dense_backward").kernel(kernels::index::embedding_backward),
    op("index_select").kernel(kernels::index::index_select),
    op("take").kernel(kernels::index::take),
    op("index.Tensor").kernel(kernels::index::index),
    op("gather").kernel(kernels::scatter::gather),
    op("scatter").kernel(kernels::scatter::scatter),
    op("scatter_").kernel(kernels::scatter::scatter),
    op("scatter_add").kernel(kernels::scatter::scatter_add),
    op("scatter_add_").kernel(kernels::scatter::scatter_add),
    op("scatter_reduce").kernel(kernels::scatter::scatter_reduce),
    op("scatter_reduce_").kernel(kernels::scatter::scatter_reduce),
    op("index_add").kernel(kernels::scatter::index_add),
    op("index_add_").kernel(kernels::scatter::index_add),
    op("index_put _unsafe_index_put").kernel(kernels::scatter::index_put),
    op("index_put_ _index_put_impl_").kernel(kernels::scatter::index_put),

    // --- Pooling and interpolation
    op("max_pool2d_with_indices").kernel(kernels::pooling::max),
    op("max_pool2d_with_indices_backward").kernel(kernels::pooling::max_backward),
    op("avg_pool2d").kernel(kernels::pooling::average),
    op("avg_pool2d_backward").kernel(kernels::pooling::average_backward),
    op("_adaptive_avg_pool2d").kernel(kernels::pooling::adaptive),
    op("_adaptive_avg_pool2d_backward").kernel(kernels::pooling::adaptive_backward),

    // --- Random numbers
    op("bernoulli_.float").draw(random::draw_bernoulli),
    op("uniform_").draw(random::draw_uniform),
    op("multinomial").draw(random::draw_multinomial),

    // --- Optimizers and lists of tensors
    op("_foreach_norm.Scalar").kernel(kernels::reduce::sums::norms),

    // --- Other libraries
    op("torchvision::roi_align").kernel(kernels::roi_align::forward),
    op("torchvision::_roi_align_backward").kernel(kernels::roi_align::backward),
];

static BY_NAME: LazyLock<ByName<Row>> = LazyLock::new(|| ByName::new(TABLE, |row| row.names));

/// The kernel of an operator, for overloads that write no argument, or only their first argument.
pub(crate) fn kernel_of(name: &str) -> Option<MakeKernel> {
    BY_NAME.find(name, |row| row.kernel)
}

/// The operator's kernel that draws from PyTorch's generator.
pub(crate) fn draw_of(name: &str) -> Option<Draw> {
    BY_NAME.exact(name, |row| row.draw)
}

/// The function that returns a call as sums over rows.
pub(crate) fn row_sums(name: &str) -> Option<MakeRowSums> {
    BY_NAME.exact(name, |row| row.row_sums)
}

/// The operators of the table, and the columns that are set for each.
pub fn columns() -> BTreeMap<String, Vec<&'static str>> {
    BY_NAME.listing(|row| {
        [("kernel", row.kernel.is_some()), ("draw", row.draw.is_some()), ("row sums", row.row_sums.is_some())]
    })
}

#[cfg(test)]
mod tests {
    use tandem_executor::ops::names::repeated;

    use super::*;

    #[test]
    fn columns_are_found_by_overload_then_by_operator() {
        assert!(kernel_of("aten::sum.dim_IntList").is_some());
        assert!(row_sums("aten::sum.dim_IntList").is_some());
        assert!(row_sums("aten::sum.dim_DimnameList").is_none());
        assert!(draw_of("aten::bernoulli_.float").is_some());
        assert!(kernel_of("torchvision::roi_align").is_some());
    }

    #[test]
    fn no_operator_is_twice_in_a_column() {
        assert_eq!(repeated(&columns()), None);
    }
}
