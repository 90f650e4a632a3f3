//! Prints a page with all tables of operators: the properties on any device, on the CPU and on a GPU.
//!
//! `cargo run -p tandem-gpu --example operators > docs/operator-table.md`

use std::collections::{BTreeMap, BTreeSet};

use tandem_executor::ops::{pointwise, table};

const HEAD: &str = "# The tables of operators

What Tandem knows of an operator beyond its schema and PyTorch's tags, on any device, on the CPU and on a GPU: the rows
of `kernels/executor/src/ops/table.rs`, `kernels/cpu/src/table.rs` and `kernels/gpu/src/table.rs`, joined by name. A name
without an overload stands for all overloads, and one that ends with `*` is a prefix. A *point-wise* operator is an
expression, `kernels/executor/src/ops/pointwise.rs`, which both devices compile. PyTorch's kernel computes all others.

`cargo run -p tandem-gpu --example operators > docs/operator-table.md` writes this page.

| operator | any device | CPU | GPU |
| --- | --- | --- | --- |
";

/// The page.
pub fn page() -> String {
    let tables = [table::columns(), tandem_cpu::table::columns(), tandem_gpu::table::columns()];
    let pointwise: BTreeSet<&str> = pointwise::names().collect();
    let mut names: BTreeSet<&str> = tables.iter().flat_map(BTreeMap::keys).map(String::as_str).collect();
    names.extend(&pointwise);
    let row = |name: &&str| {
        let cell = |table: &BTreeMap<String, Vec<&str>>| table.get(*name).map(|set| set.join(", "));
        let [shared, cpu, gpu] = tables.each_ref().map(cell);
        let is_pointwise = pointwise.contains(name).then(|| "point-wise".to_owned());
        let shared = [is_pointwise, shared].into_iter().flatten().collect::<Vec<_>>().join(", ");
        format!("| `{name}` | {shared} | {} | {} |\n", cpu.unwrap_or_default(), gpu.unwrap_or_default())
    };
    HEAD.to_owned() + &names.iter().map(row).collect::<String>()
}

#[allow(dead_code)] // The test of the page has no `main`.
fn main() {
    print!("{}", page());
}
