//! Checks docs/operator-table.md, the page with the tables of operators.

#[path = "../examples/operators.rs"]
mod operators;

#[test]
fn the_page_is_up_to_date() {
    let page = include_str!("../../../docs/operator-table.md");
    assert!(
        page == operators::page(),
        "cargo run -p tandem-gpu --example operators > docs/operator-table.md"
    );
}
