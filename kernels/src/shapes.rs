//! Sizes and strides of operands that are computed element by element.

use smallvec::SmallVec;

/// Sizes or strides.
pub type Dims = SmallVec<[i64; 6]>;

/// Strides of row-major order.
pub fn dense(sizes: &[i64]) -> Dims {
    let mut strides: Dims = sizes.into();
    let mut stride = 1;
    for d in (0..sizes.len()).rev() {
        strides[d] = stride;
        stride *= sizes[d].max(1);
    }
    strides
}

/// The common size of operands that are broadcast; `None` where they do not fit.
pub fn broadcast<'a>(shapes: impl IntoIterator<Item = &'a [i64]>) -> Option<Dims> {
    let mut common = Dims::new();
    for shape in shapes {
        while common.len() < shape.len() {
            common.insert(0, 1);
        }
        let lead = common.len() - shape.len();
        for (c, s) in common[lead..].iter_mut().zip(shape) {
            match (*c, *s) {
                (_, 1) => {}
                (1, s) => *c = s,
                (c, s) if c == s => {}
                _ => return None,
            }
        }
    }
    Some(common)
}

/// The strides of an operand of these sizes and strides where it is expanded to sizes that broadcasting gave.
pub fn expanded(sizes: &[i64], strides: &[i64], to: &[i64]) -> Dims {
    let lead = to.len() - sizes.len();
    let stride = |d: usize| match d.checked_sub(lead) {
        Some(own) if sizes[own] == to[d] => strides[own],
        _ => 0,
    };
    (0..to.len()).map(stride).collect()
}

/// Orders dimensions by the first operand's strides, and joins those that lie behind one another in all operands.
pub fn coalesce(sizes: &[i64], operands: &[&[i64]]) -> (Dims, Vec<Dims>) {
    let mut order: Vec<usize> = (0..sizes.len()).filter(|d| sizes[*d] != 1).collect();
    if let Some(first) = operands.first() {
        order.sort_by_key(|d| std::cmp::Reverse(first[*d]));
    }
    let mut joined = Dims::new();
    let mut strides: Vec<Dims> = vec![Dims::new(); operands.len()];
    for d in order {
        let follows = !joined.is_empty()
            && operands.iter().zip(&strides).all(|(x, s)| s.last() == Some(&(x[d] * sizes[d])));
        if follows && let Some(last) = joined.last_mut() {
            *last *= sizes[d];
            for (x, s) in operands.iter().zip(&mut strides) {
                if let Some(last) = s.last_mut() {
                    *last = x[d];
                }
            }
        } else {
            joined.push(sizes[d]);
            operands.iter().zip(&mut strides).for_each(|(x, s)| s.push(x[d]));
        }
    }
    if joined.is_empty() {
        joined.push(1);
        strides.iter_mut().for_each(|s| s.push(1));
    }
    (joined, strides)
}
