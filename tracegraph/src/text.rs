//! Text and DOT forms of the graphs, for people and for tests.

use std::fmt::Write;

use crate::graph::TraceGraph;
use crate::ids::{NodeId, OpId};
use crate::node::{ArgSpec, Attr, OutSpec};
use crate::symbolic::SymbolicGraph;

fn arg(spec: &ArgSpec, sources: &mut impl Iterator<Item = String>) -> String {
    match spec {
        ArgSpec::None => "none".into(),
        ArgSpec::Tensor => sources.next().unwrap_or_default(),
        ArgSpec::Tensors(n) => {
            let items: Vec<String> = sources.take(*n as usize).collect();
            format!("[{}]", items.join(", "))
        }
        ArgSpec::Attr(Attr::Int(i)) => i.to_string(),
        ArgSpec::Attr(Attr::Bool(b)) => b.to_string(),
        ArgSpec::Attr(Attr::Str(s)) => format!("{s:?}"),
        ArgSpec::Attr(Attr::Ints(v)) => format!("{v:?}"),
        ArgSpec::Attr(Attr::Bools(v)) => format!("bools{v:?}"),
        ArgSpec::Size => "size".into(),
        ArgSpec::Sizes => "sizes".into(),
        ArgSpec::Value(n) => format!("feed:{n:?}").to_lowercase(),
        ArgSpec::Floats(n) => format!("feed:{n}"),
        ArgSpec::Values(n) => format!("feed:{}", n.len()),
        ArgSpec::Device(_) => "device".into(),
        ArgSpec::Generator => "generator".into(),
    }
}

/// One line for an op: `%3 = aten::add.Tensor(%1, s0|s2, feed:int)  x2`, the last its number of variants.
pub fn node_line(graph: &TraceGraph, id: NodeId, name: &dyn Fn(OpId) -> String) -> String {
    let node = graph.node(id);
    let mut sources = node.sources.iter().map(|names| {
        let names: Vec<String> = names.iter().map(|n| format!("{n:?}")).collect();
        if names.is_empty() { "feed".to_owned() } else { names.join("|") }
    });
    let args: Vec<String> = node.key.args.iter().map(|a| arg(a, &mut sources)).collect();
    let mut line = format!("%{} = {}({})", id.0, name(node.key.op), args.join(", "));
    if let Some(v) = node.variants.first() {
        let shapes: Vec<String> = v.outputs.outs.iter().filter_map(shape).collect();
        let _ = write!(line, " : {}", shapes.join(", "));
    }
    if node.variants.len() > 1 {
        let _ = write!(line, "  x{}", node.variants.len());
    }
    line
}

fn shape(out: &OutSpec) -> Option<String> {
    match out {
        OutSpec::Fresh { meta, .. } | OutSpec::Alias { meta, .. } => {
            Some(format!("{}{:?}", meta.dtype.name(), meta.sizes()))
        }
        OutSpec::Same(i) => Some(format!("input {i}")),
        OutSpec::Undefined | OutSpec::Host(_) | OutSpec::List(_) => None,
    }
}

/// The symbolic graph, block by block.
pub fn print(symbolic: &SymbolicGraph, graph: &TraceGraph, name: &dyn Fn(OpId) -> String) -> String {
    let mut text = String::new();
    let cases = |cases: &[crate::ids::BlockId], ends: bool| {
        let mut all: Vec<String> = cases.iter().map(|b| format!("b{}", b.0)).collect();
        if ends {
            all.push("end".into());
        }
        if all.len() > 1 { format!("switch({})", all.join(", ")) } else { all.join("") }
    };
    let _ = writeln!(text, "start -> {}", cases(&symbolic.entry, symbolic.empty));
    for (i, block) in symbolic.blocks.iter().enumerate() {
        let _ = writeln!(text, "b{i}:");
        for node in &block.nodes {
            let _ = writeln!(text, "  {}", node_line(graph, *node, name));
        }
        let _ = writeln!(text, "  -> {}", cases(&block.cases, block.ends));
    }
    text
}

/// The TraceGraph in Graphviz' DOT language.
pub fn dot(graph: &TraceGraph, name: &dyn Fn(OpId) -> String) -> String {
    let mut text = String::from("digraph TraceGraph {\n  node [shape=box, fontname=\"monospace\"];\n");
    for id in graph.ids() {
        let label = if id == NodeId::START { "start".to_owned() } else { name(graph.node(id).key.op) };
        let _ = writeln!(text, "  n{} [label={label:?}];", id.0);
        for child in graph.children(id) {
            let _ = writeln!(text, "  n{} -> n{};", id.0, child.0);
        }
    }
    text + "}\n"
}
