//! Prints walks over squares: operands that lie along the rows go through workgroup memory, so that neighbouring threads
//! load and store neighbouring elements.

use std::fmt::Write as _;

use crate::kernel::THREADS;
use crate::linear::{is_linear, operands};
use crate::print::writer::{MAIN, Writer, name};
use crate::squares::{SIDE, Squares};
use tandem_executor::ir::{E, Node, Var};

/// Elements of a square that a thread computes.
const EACH: u32 = SIDE * SIDE / THREADS;
/// Distance in elements between the rows of a square in workgroup memory. It is one more than a row's length, so that
/// the elements of a column are in different banks.
const STRIDE: u32 = SIDE + 1;

/// The loads for which the elements of neighbouring rows are adjacent in memory, but not the elements of neighbouring
/// columns.
fn turned(squares: &Squares) -> Vec<E> {
    let [_, row, column] = squares.vars;
    let mut found: Vec<E> = Vec::new();
    let mut rest: Vec<E> = squares.stores.iter().map(|s| s.value.clone()).collect();
    while let Some(e) = rest.pop() {
        match e.node() {
            Node::Load { at, guard: None, .. }
                if is_linear(at, row) && at.depends_on(column) && !is_linear(at, column) =>
            {
                if !found.iter().any(|known| known.address() == e.address()) {
                    found.push(e);
                }
            }
            _ => rest.extend(operands(&e)),
        }
    }
    found
}

impl Writer<'_> {
    pub(super) fn squares(&mut self, squares: &Squares) -> String {
        let loads = turned(squares);
        let [plane, row, column] = squares.vars.map(name);
        let [rows, columns] = squares.extent.each_ref().map(|e| self.outside(e));
        let [down, across, total] = squares.squares.each_ref().map(|e| self.outside(e));
        let first = self.plus_first();
        let vars: Vec<Var> = squares.vars.into();
        let mut memory = String::new();
        for (n, load) in loads.iter().enumerate() {
            let ty = self.ty(load.ty());
            let _ = writeln!(memory, "var<workgroup> turned{n}: array<{ty}, {}>;", SIDE * STRIDE);
        }
        let (mut bring, mut stores) = (String::new(), String::new());
        for i in 0..EACH {
            let [fast, slow] =
                [format!("lane % {SIDE}u"), format!("lane / {SIDE}u + {}u", i * THREADS / SIDE)];
            let own = self.block(&vars, |w| {
                for (n, load) in loads.iter().enumerate() {
                    let value = w.emit(load);
                    w.line(&format!("turned{n}[({slow}) * {STRIDE}u + {fast}] = {value};"));
                }
            });
            // Beyond the edges, the elements at the edges are loaded. They are not stored.
            let _ = write!(
                bring,
                "  {{\n    let {row} = min(row0 + {fast}, {rows} - 1u);\n    \
                 let {column} = min(column0 + {slow}, {columns} - 1u);\n{own}  }}\n"
            );
            let own = self.block(&vars, |w| {
                for (n, load) in loads.iter().enumerate() {
                    w.known(load, format!("turned{n}[({fast}) * {STRIDE}u + {slow}]"));
                }
                w.stores(&squares.stores);
            });
            let _ = write!(
                stores,
                "  {{\n    let {row} = row0 + {slow};\n    let {column} = column0 + {fast};\n    \
                 if ({row} < {rows} && {column} < {columns}) {{\n{own}    }}\n  }}\n"
            );
        }
        format!(
            "{memory}{MAIN}  let asked = group(wg, grid);\n  if (asked >= {total}) {{ return; }}\n  \
             let number = asked{first};\n  \
             let {plane} = number / ({down} * {across});\n  let within = number % ({down} * {across});\n  \
             let row0 = (within / {across}) * {SIDE}u;\n  let column0 = (within % {across}) * {SIDE}u;\n\
             {bring}  workgroupBarrier();\n{stores}}}\n"
        )
    }
}
