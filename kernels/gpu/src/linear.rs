//! Elements that are loaded and stored in the order of memory, so that a thread can take four at once.

use rustc_hash::FxHashSet;

use crate::store::{Buf, Put, Store};
use tandem_executor::ir::{Bin, E, Mem, Node, Var};

/// Elements that are loaded or stored at once.
pub const VECTOR: u32 = 4;

/// Operands of an expression, without loops.
pub fn operands(e: &E) -> Vec<E> {
    match &e.0.node {
        Node::Lit(_) | Node::Param(_) | Node::Var(_) | Node::Fold { .. } | Node::Item(..) => Vec::new(),
        Node::Load { at, guard, .. } => {
            let guard = guard.iter().flat_map(|g| [g.condition.clone(), g.default.clone()]);
            std::iter::once(at.clone()).chain(guard).collect()
        }
        Node::Un(_, a) | Node::Cast(a) => vec![a.clone()],
        Node::Bin(_, a, b) => vec![a.clone(), b.clone()],
        Node::Select(a, b, c) => vec![a.clone(), b.clone(), c.clone()],
        Node::Call(_, args) => args.clone(),
    }
}

/// Whether an address is the element's number plus a value that is the same for all elements.
pub fn is_linear(at: &E, element: Var) -> bool {
    match &at.0.node {
        Node::Var(var) => *var == element,
        Node::Bin(Bin::Add, a, b) => {
            let same = |e: &E| !e.0.free.contains(&element);
            is_linear(a, element) && same(b) || same(a) && is_linear(b, element)
        }
        _ => false,
    }
}

/// Whether an expression is an affine function of a variable, so that equal steps of the variable are equal steps of
/// the expression.
pub fn is_affine(e: &E, var: Var) -> bool {
    match e.node() {
        _ if !e.depends_on(var) => true,
        Node::Var(_) => true,
        Node::Bin(Bin::Add | Bin::Sub, a, b) => is_affine(a, var) && is_affine(b, var),
        Node::Bin(Bin::Mul, a, b) => {
            is_affine(a, var) && !b.depends_on(var) || !a.depends_on(var) && is_affine(b, var)
        }
        _ => false,
    }
}

/// Whether a draw takes word `e % 4` of the counter `e / 4`, so that four neighbours take the words of one counter.
/// `args` are the arguments of `random_part`.
fn draws_in_order(args: &[E], element: Var) -> bool {
    let of = |e: &E, op: Bin| match e.node() {
        Node::Bin(of, a, b) if *of == op => {
            matches!((a.node(), b.node()), (Node::Var(var), Node::Lit(4)) if *var == element)
        }
        _ => false,
    };
    matches!(args, [_, _, counter, _, part] if of(counter, Bin::Div) && of(part, Bin::Rem))
}

/// The loads and draws of values that depend on the element, each once. `None` if an element is not in the order of
/// memory, or if there is a loop.
pub fn loads<'v>(values: impl IntoIterator<Item = &'v E>, element: Var) -> Option<Vec<E>> {
    let mut visited = FxHashSet::default();
    let mut found = Vec::new();
    let mut rest: Vec<E> = values.into_iter().cloned().collect();
    while let Some(e) = rest.pop() {
        if !visited.insert(e.address()) {
            continue;
        }
        match &e.0.node {
            Node::Fold { .. } | Node::Item(..) => return None,
            Node::Load { .. } if !e.0.free.contains(&element) => {}
            Node::Load { at, guard: None, .. } if is_linear(at, element) => found.push(e),
            Node::Load { .. } => return None,
            Node::Call("random_part", args) if draws_in_order(args, element) => found.push(e),
            _ => rest.extend(operands(&e)),
        }
    }
    Some(found)
}

/// Whether a value contains a loop.
pub fn has_loops(values: &[E]) -> bool {
    let mut visited = FxHashSet::default();
    let mut rest: Vec<E> = values.to_vec();
    while let Some(e) = rest.pop() {
        if matches!(e.node(), Node::Fold { .. } | Node::Item(..)) {
            return true;
        }
        if visited.insert(e.address()) {
            rest.extend(operands(&e));
        }
    }
    false
}

/// The loads of the values of stores, if all loads and stores are in the order of memory.
pub fn loads_of_stores(stores: &[Store], element: Var) -> Option<Vec<E>> {
    let linear =
        |s: &Store| s.linear && s.put == Put::Assign && s.guard.is_none() && is_linear(&s.at, element);
    let values = stores.iter().map(|s| &s.value);
    stores.iter().all(linear).then(|| loads(values, element)).flatten()
}

/// The buffer of a load.
pub fn buffer(load: &E) -> Option<u32> {
    match load.node() {
        Node::Load { buf, .. } => Some(*buf),
        _ => None,
    }
}

/// Whether a buffer's elements can be accessed as vectors of four. `int16` says whether the device can store 16 bits.
pub fn has_vectors(buf: &Buf, int16: bool) -> bool {
    match buf.mem {
        Mem::F32 | Mem::I32 => !buf.atomic,
        Mem::F16 | Mem::Bf16 => !buf.written || int16 && !buf.atomic,
        _ => false,
    }
}

/// The loads of a reduction's steps, if there are any and all of them can be loaded as vectors.
pub fn loads_of_steps(bufs: &[Buf], int16: bool, steps: &[E], member: Var) -> Option<Vec<E>> {
    let vectors = |e: &E| buffer(e).is_some_and(|buf| has_vectors(&bufs[buf as usize], int16));
    loads(steps, member).filter(|loads| !loads.is_empty() && loads.iter().all(vectors))
}
