//! Text and DOT forms of the graphs, for people and for tests.
//!
//! A symbolic graph is printed and parsed as a [`Listing`]:
//!
//! ```text
//! l0 = while(b1): b1 b2
//! start -> b0
//! b0:
//!   %1 = aten::relu(state) : float32[4]  x2
//!   output_fetch
//!   -> case_select(b1, end)
//! b1 in l0:
//!   %2 = aten::add.Tensor(phi(%1, %2), feed:int) : float32[4]
//!   -> loop_cond(b1; b2)
//! ```
//!
//! An op is printed as its node, the operator, the sources of its inputs (`state` for a storage from before the
//! iteration, `feed` for a value from the host), the output shapes of its first variant, and the number of variants
//! if it is not 1.

use std::fmt::{self, Display, Write};
use std::str::FromStr;

use thiserror::Error;

use crate::graph::TraceGraph;
use crate::ids::{BlockId, LoopId, NodeId, OpId};
use crate::node::{ArgSpec, Attr, Node, OutSpec, Sources};
use crate::symbolic::SymbolicGraph;

/// The text form of a symbolic graph.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Listing {
    /// Whiles, by id.
    pub loops: Vec<ListedLoop>,
    /// Blocks that may begin an iteration.
    pub entry: Exit,
    /// Blocks, by id.
    pub blocks: Vec<ListedBlock>,
}

/// A While.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ListedLoop {
    /// Block that begins a round.
    pub header: BlockId,
    /// While that directly contains this one.
    pub parent: Option<LoopId>,
    /// All blocks of the While.
    pub blocks: Vec<BlockId>,
}

/// A block.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ListedBlock {
    /// Innermost While that contains the block.
    pub within: Option<LoopId>,
    /// Ops in order.
    pub ops: Vec<ListedOp>,
    /// Whether a value is fetched after the block.
    pub fetched: bool,
    /// Blocks that may follow.
    pub exit: Exit,
}

/// An op.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ListedOp {
    /// Node of the op.
    pub node: NodeId,
    /// Full name of the operator.
    pub op: String,
    /// Arguments in their text form.
    pub args: Vec<String>,
    /// Outputs, in the form `float32[4]`.
    pub outs: Vec<String>,
    /// Number of variants.
    pub variants: usize,
}

/// The blocks that may follow a block.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Exit {
    /// Blocks that begin another round of a While.
    pub again: Vec<BlockId>,
    /// All other blocks.
    pub cases: Vec<BlockId>,
    /// Whether the iteration may end.
    pub end: bool,
}

impl Listing {
    /// The listing of a symbolic graph. `name` returns the name of an operator.
    pub fn of(symbolic: &SymbolicGraph, graph: &TraceGraph, name: &dyn Fn(OpId) -> String) -> Listing {
        let exit = |from: Option<BlockId>, ends: bool| {
            let repeats = |to: &&BlockId| from.is_some_and(|f| symbolic.repeats(f, **to).is_some());
            let (again, cases) = symbolic.cases(from).iter().partition(repeats);
            Exit { again, cases, end: ends }
        };
        let blocks = symbolic.blocks.iter().enumerate().map(|(i, block)| ListedBlock {
            within: block.within,
            ops: block.nodes.iter().map(|n| list_op(graph, *n, name)).collect(),
            fetched: block.fetched,
            exit: exit(Some(BlockId(i as u32)), block.ends),
        });
        let loops = symbolic.whiles.iter().map(|w| ListedLoop {
            header: w.header,
            parent: w.parent,
            blocks: w.blocks.clone(),
        });
        Listing { loops: loops.collect(), entry: exit(None, symbolic.empty), blocks: blocks.collect() }
    }
}

/// The listing of a single op of a TraceGraph.
pub fn list_op(graph: &TraceGraph, id: NodeId, name: &dyn Fn(OpId) -> String) -> ListedOp {
    let node = graph.node(id);
    list_call(id, node, 0, name(node.key.op), node.sources.iter().map(source_text))
}

/// Lists an op with its outputs under a variant. `inputs` are the texts of its inputs.
pub fn list_call(
    id: NodeId,
    node: &Node,
    variant: usize,
    op: String,
    mut inputs: impl Iterator<Item = String>,
) -> ListedOp {
    let outputs = node.variants.get(variant).map(|variant| &variant.outputs.outs);
    ListedOp {
        node: id,
        op,
        args: node.key.args.iter().map(|a| arg_text(a, &mut inputs)).collect(),
        outs: outputs.map_or_else(Vec::new, |outs| outs.iter().filter_map(shape).collect()),
        variants: node.variants.len(),
    }
}

fn source_text(sources: &Sources) -> String {
    match sources.names() {
        [] => "feed".into(),
        [one] => one.to_string(),
        several => format!("phi({})", several.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")),
    }
}

fn arg_text(spec: &ArgSpec, inputs: &mut impl Iterator<Item = String>) -> String {
    match spec {
        ArgSpec::None => "none".into(),
        ArgSpec::Tensor => inputs.next().unwrap_or_default(),
        ArgSpec::Tensors(n) => {
            let items: Vec<String> = inputs.take(*n as usize).collect();
            format!("[{}]", items.join(", "))
        }
        ArgSpec::Attr(Attr::Int(i)) => i.to_string(),
        ArgSpec::Attr(Attr::Bool(b)) => b.to_string(),
        ArgSpec::Attr(Attr::Str(s)) => format!("{s:?}"),
        ArgSpec::Attr(Attr::Ints(v)) => format!("{v:?}"),
        ArgSpec::Attr(Attr::Bools(v)) => format!("bools{v:?}"),
        ArgSpec::Any => "any".into(),
        ArgSpec::Size => "size".into(),
        ArgSpec::Sizes => "sizes".into(),
        ArgSpec::Value(n) => format!("feed:{n:?}").to_lowercase(),
        ArgSpec::Floats(n) | ArgSpec::Ints(n) => format!("feed:{n}"),
        ArgSpec::Values(n) => format!("feed:{}", n.len()),
        ArgSpec::Device(_) => "device".into(),
        ArgSpec::Generator => "generator".into(),
    }
}

fn shape(out: &OutSpec) -> Option<String> {
    match out {
        OutSpec::NewStorage { meta, .. } | OutSpec::Alias { meta, .. } => {
            Some(format!("{}{:?}", meta.dtype.name(), meta.sizes()))
        }
        OutSpec::Same(i) => Some(format!("input {i}")),
        OutSpec::Undefined | OutSpec::Host(_) | OutSpec::List(_) => None,
    }
}

// --- Printing ---------------------------------------------------------------------------------------------

impl Display for ListedOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "%{} = {}({})", self.node.0, self.op, self.args.join(", "))?;
        if !self.outs.is_empty() {
            write!(f, " : {}", self.outs.join(", "))?;
        }
        if self.variants != 1 {
            write!(f, "  x{}", self.variants)?;
        }
        Ok(())
    }
}

impl Display for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = |blocks: &[BlockId]| blocks.iter().map(|b| format!("b{}", b.0)).collect::<Vec<_>>();
        let mut others = names(&self.cases);
        others.extend(self.end.then(|| "end".to_owned()));
        match (&self.again[..], &others[..]) {
            ([], [one]) => write!(f, "-> {one}"),
            ([], _) => write!(f, "-> case_select({})", others.join(", ")),
            _ => write!(f, "-> loop_cond({}; {})", names(&self.again).join(", "), others.join(", ")),
        }
    }
}

impl Display for Listing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, l) in self.loops.iter().enumerate() {
            write!(f, "l{i} = while(b{})", l.header.0)?;
            if let Some(parent) = l.parent {
                write!(f, " in l{}", parent.0)?;
            }
            let blocks: Vec<String> = l.blocks.iter().map(|b| format!("b{}", b.0)).collect();
            writeln!(f, ": {}", blocks.join(" "))?;
        }
        writeln!(f, "start {}", self.entry)?;
        for (i, block) in self.blocks.iter().enumerate() {
            match block.within {
                Some(l) => writeln!(f, "b{i} in l{}:", l.0)?,
                None => writeln!(f, "b{i}:")?,
            }
            block.ops.iter().try_for_each(|op| writeln!(f, "  {op}"))?;
            if block.fetched {
                writeln!(f, "  output_fetch")?;
            }
            writeln!(f, "  {}", block.exit)?;
        }
        Ok(())
    }
}

// --- Parsing ----------------------------------------------------------------------------------------------

/// An error in the text form.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[error("line {line}: expected {expected}, got {got:?}")]
pub struct ParseError {
    /// Line number, counted from 1.
    pub line: usize,
    /// Description of the text that was expected.
    pub expected: &'static str,
    /// Line that was found.
    pub got: String,
}

/// A result whose error is the description of the text that was expected.
type Parsed<T> = Result<T, &'static str>;

fn id(text: &str, prefix: char) -> Option<u32> {
    text.trim().strip_prefix(prefix)?.parse().ok()
}

fn block_id(text: &str) -> Parsed<BlockId> {
    id(text, 'b').map(BlockId).ok_or("a block, as b0")
}

fn loop_id(text: &str) -> Parsed<LoopId> {
    id(text, 'l').map(LoopId).ok_or("a while, as l0")
}

/// Splits a text at commas outside of brackets and strings.
fn split(text: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let (mut depth, mut quoted, mut escaped) = (0, false, false);
    for c in text.chars() {
        match c {
            '"' if !escaped => quoted = !quoted,
            '(' | '[' if !quoted => depth += 1,
            ')' | ']' if !quoted => depth -= 1,
            _ => {}
        }
        escaped = quoted && c == '\\' && !escaped;
        if c == ',' && depth == 0 && !quoted {
            parts.push(String::new());
        } else if let Some(last) = parts.last_mut() {
            last.push(c);
        }
    }
    parts.iter().map(|p| p.trim().to_owned()).filter(|p| !p.is_empty()).collect()
}

/// The position of the bracket that closes the one at the start of a text.
fn closing(text: &str) -> Option<usize> {
    let (mut depth, mut quoted, mut escaped) = (0, false, false);
    for (at, c) in text.char_indices() {
        match c {
            '"' if !escaped => quoted = !quoted,
            '(' if !quoted => depth += 1,
            ')' if !quoted => depth -= 1,
            _ => {}
        }
        escaped = quoted && c == '\\' && !escaped;
        if depth == 0 {
            return Some(at);
        }
    }
    None
}

fn parse_exit(text: &str) -> Parsed<Exit> {
    let text = text.trim().strip_prefix("-> ").ok_or("-> and what follows")?;
    let inside = |name: &str| text.strip_prefix(name)?.strip_prefix('(')?.strip_suffix(')');
    let (again, cases) = match (inside("loop_cond"), inside("case_select")) {
        (Some(list), _) => list.split_once(';').ok_or("; in loop_cond")?,
        (_, Some(list)) => ("", list),
        _ => ("", text),
    };
    let mut exit =
        Exit { again: split(again).iter().map(|b| block_id(b)).collect::<Parsed<_>>()?, ..Exit::default() };
    for case in split(cases) {
        if case == "end" {
            exit.end = true;
        } else {
            exit.cases.push(block_id(&case)?);
        }
    }
    Ok(exit)
}

fn parse_op(text: &str) -> Parsed<ListedOp> {
    let (node, rest) = text.split_once(" = ").ok_or("an op, as %1 = aten::relu(state)")?;
    let node = NodeId(id(node, '%').ok_or("a node, as %1")?);
    let open = rest.find('(').ok_or("arguments in brackets")?;
    let close = open + closing(&rest[open..]).ok_or("a closing bracket")?;
    let (mut tail, mut variants) = (&rest[close + 1..], 1);
    if let Some((outs, number)) = tail.rsplit_once("  x") {
        variants = number.parse().map_err(|_| "a number of variants")?;
        tail = outs;
    }
    let outs = tail.strip_prefix(" : ").map_or_else(Vec::new, split);
    Ok(ListedOp { node, op: rest[..open].to_owned(), args: split(&rest[open + 1..close]), outs, variants })
}

fn parse_loop(text: &str) -> Parsed<ListedLoop> {
    let (_, rest) = text.split_once(" = while(").ok_or("a while, as l0 = while(b1): b1 b2")?;
    let (header, rest) = rest.split_once(')').ok_or("a closing bracket")?;
    let (parent, blocks) = rest.split_once(':').ok_or(": and blocks")?;
    let parent = parent.strip_prefix(" in ").map(loop_id).transpose()?;
    let blocks = blocks.split_whitespace().map(block_id).collect::<Parsed<_>>()?;
    Ok(ListedLoop { header: block_id(header)?, parent, blocks })
}

impl Listing {
    fn parse_line(&mut self, line: &str) -> Parsed<()> {
        if let Some(exit) = line.strip_prefix("start ") {
            self.entry = parse_exit(exit)?;
        } else if line.starts_with('l') {
            self.loops.push(parse_loop(line)?);
        } else if line.starts_with('b') {
            let (name, within) = line.trim_end_matches(':').split_once(" in ").unzip();
            let number = block_id(name.unwrap_or(line.trim_end_matches(':')))?;
            if number.index() != self.blocks.len() {
                return Err("the next block");
            }
            self.blocks
                .push(ListedBlock { within: within.map(loop_id).transpose()?, ..ListedBlock::default() });
        } else {
            let block = self.blocks.last_mut().ok_or("a block")?;
            match line.trim() {
                "output_fetch" => block.fetched = true,
                exit if exit.starts_with("->") => block.exit = parse_exit(exit)?,
                op => block.ops.push(parse_op(op)?),
            }
        }
        Ok(())
    }
}

impl FromStr for Listing {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Listing, ParseError> {
        let mut listing = Listing::default();
        for (i, line) in text.lines().enumerate().filter(|(_, l)| !l.trim().is_empty()) {
            let failed = |expected| ParseError { line: i + 1, expected, got: line.to_owned() };
            listing.parse_line(line).map_err(failed)?;
        }
        Ok(listing)
    }
}

impl Listing {
    /// The graph in Graphviz's DOT language.
    pub fn dot(&self) -> String {
        let mut text = String::from("digraph symbolic {\n  node [shape=box, fontname=\"monospace\"];\n");
        let edges = |from: &str, exit: &Exit| {
            let mut text = String::new();
            for to in &exit.again {
                let _ = writeln!(text, "  {from} -> b{} [style=dashed];", to.0);
            }
            for to in &exit.cases {
                let _ = writeln!(text, "  {from} -> b{};", to.0);
            }
            if exit.end {
                let _ = writeln!(text, "  {from} -> end;");
            }
            text
        };
        text += &edges("start", &self.entry);
        for (i, block) in self.blocks.iter().enumerate() {
            let ops: Vec<String> = block.ops.iter().map(|op| format!("%{} {}", op.node.0, op.op)).collect();
            let label = format!("b{i}\n{}", ops.join("\n"));
            let _ = writeln!(text, "  b{i} [label={label:?}];");
            text += &edges(&format!("b{i}"), &block.exit);
        }
        text + "}\n"
    }
}

/// The TraceGraph in Graphviz's DOT language.
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
