//! Lowerings of operators: one file per family, and the table that finds them by name.

mod activation;
mod attention;
mod cells;
mod conv;
pub mod elementwise;
mod fill;
mod foreach;
mod index;
mod join;
mod loss;
mod matmul;
mod norm;
mod optim;
mod pad;
mod pointwise;
mod pool;
mod random;
mod reduce;
mod scan;
mod scatter;
mod softmax;
mod sort;
pub mod types;
mod upsample;
mod views;

use crate::gpu::lower::Lowering;

/// Function that adds the kernels of a call to a lowering. It returns `None` if the call must take the host path.
pub type Lower = fn(&mut Lowering<'_>) -> Option<()>;

/// Returns the lowering of an operator (`aten::add_.Tensor`), and its name without namespace, overload and the
/// underscore of the in-place form. `written` says which arguments its schema marks as written.
pub fn lowering<'n>(name: &'n str, written: &[bool]) -> Option<(&'n str, Lower)> {
    let name = name.strip_prefix("aten::")?;
    let base = name.split('.').next().unwrap_or(name);
    let in_place = written.first() == Some(&true) && !base.starts_with("__");
    let base = if in_place { base.strip_suffix('_').unwrap_or(base) } else { base };
    let families: &[fn(&str) -> Option<Lower>] = &[
        pointwise_table,
        activation::table,
        attention::table,
        cells::table,
        conv::table,
        fill::table,
        foreach::table,
        index::table,
        join::table,
        loss::table,
        matmul::table,
        norm::table,
        optim::table,
        pad::table,
        pool::table,
        random::table,
        reduce::table,
        scan::table,
        scatter::table,
        softmax::table,
        sort::table,
        upsample::table,
        views::table,
    ];
    families.iter().find_map(|table| table(base)).map(|lower| (base, lower))
}

/// Whether the operator with this base name draws random numbers.
pub fn draws(base: &str) -> bool {
    random::table(base).is_some()
}

fn pointwise_table(base: &str) -> Option<Lower> {
    Some(match base {
        "div" | "divide" => pointwise::div,
        "lerp" => pointwise::lerp,
        "clamp" | "clip" | "clamp_min" | "clamp_max" => pointwise::clamps,
        "where" => pointwise::where_,
        "masked_fill" => pointwise::masked_fill,
        "elu_backward" => pointwise::elu_backward,
        "ldexp" => pointwise::ldexp,
        "polygamma" => pointwise::polygamma,
        base if crate::ops::pointwise::knows(base) => pointwise::lower,
        _ => return None,
    })
}
