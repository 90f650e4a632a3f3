//! Scaled dot-product attention and its gradients, a block of queries at a time.
//!
//! **Why.** PyTorch's kernel computes tiles of scores with a running maximum, which takes more and smaller matrix
//! products. Here a block of queries meets all keys at once, so a softmax has its whole row and each block takes one
//! product per operand. Only a block's scores are in memory.

use std::sync::atomic::{AtomicBool, Ordering};

use smallvec::smallvec;
use tandem_tracegraph::call::{Arg, Call};
use tandem_tracegraph::node::{OutSpec, Outputs};

use crate::kernels::accumulate::{products, sum};
use crate::kernels::kernel::{Addresses, Kernel, SendPtr};
use crate::kernels::norm::Windows;
use crate::kernels::scratch::filled;
use crate::kernels::softmax::{at, largest, weight};
use crate::kernels::tensor;
use crate::tiles::math::log;
use crate::widest::widest;
use tandem_executor::host::{HostKernels, Matrix, Product};
use tandem_executor::ir::{Mem, Ty};
use tandem_executor::ops::arguments::is_absent;
use tandem_executor::ops::express::{Param, TensorGeometry, new_geometry};
use tandem_executor::shapes::expanded;

/// Number of queries of a block.
const BLOCK: usize = 64;
/// Maximum number of keys, without and with a causal mask. Longer rows of scores leave the first-level cache between
/// their passes, and PyTorch's tiles are faster by up to a tenth. With a causal mask, the scores that are not computed
/// make up for this.
const MAX_KEYS: i64 = 768;
const MAX_CAUSAL_KEYS: i64 = 1 << 14;
/// Number of multiplications from which another thread is worth waking.
const GRAIN: f64 = (1 << 19) as f64;

/// A window of matrices `[batch, heads, rows, columns]` whose rows are contiguous.
#[derive(Clone, Copy)]
struct Matrices {
    /// Index among the kernel's windows.
    window: usize,
    /// Strides in elements.
    strides: [i64; 3],
}

impl Matrices {
    /// Adds a window to a kernel. Returns `None` if the window does not have these sizes, its elements are not floats,
    /// or its rows are not contiguous.
    fn of(window: TensorGeometry, sizes: [i64; 4], windows: &mut Windows) -> Option<Matrices> {
        let [b, h, r, c] = <[i64; 4]>::try_from(&window.strides[..]).ok()?;
        let rows = sizes[2] == 1 || r >= sizes[3];
        let fits = window.mem == Mem::F32 && window.sizes[..] == sizes && (c == 1 || sizes[3] == 1) && rows;
        let strides = [b, h, if sizes[2] == 1 { sizes[3] } else { r }];
        fits.then(|| Matrices { window: windows.add(window), strides })
    }

    /// Address of row `row` in the matrix of a head.
    fn row(&self, data: Addresses<'_>, [batch, head]: [usize; 2], row: usize) -> SendPtr<f32> {
        let [b, h, r] = self.strides;
        let offset = batch as i64 * b + head as i64 * h + row as i64 * r;
        SendPtr(data.of::<f32>(self.window).get().wrapping_offset(offset as isize))
    }

    /// BLAS operand that begins at an address in the window.
    fn operand(&self, start: SendPtr<f32>, transposed: bool) -> Matrix {
        Matrix { data: start.get().cast(), transposed, ld: self.strides[2] }
    }
}

/// The sizes, the mask and the scale of a call, which the forward and the backward operator have in common.
#[derive(Clone, Copy)]
struct Attention {
    batch: usize,
    heads: usize,
    queries: usize,
    keys: usize,
    width: usize,
    /// Whether query `i` attends to keys up to `i` only.
    is_causal: bool,
    /// Window of numbers that are added to the scores, and its strides, expanded to the scores' shape.
    mask: Option<(usize, [i64; 4])>,
    /// Whether the scale is a number of the call. Otherwise it is 1 / sqrt(width).
    has_scale: bool,
}

impl Attention {
    /// Parses the arguments that both operators have. `dropout` is the index of the first argument after the tensors.
    fn of(
        call: &Call<'_>,
        q: &TensorGeometry,
        k: &TensorGeometry,
        dropout: usize,
        windows: &mut Windows,
    ) -> Option<Attention> {
        let [batch, heads, queries, width] = <[i64; 4]>::try_from(&q.sizes[..]).ok()?;
        let keys = *k.sizes.get(2)?;
        let Some(Arg::Bool(is_causal)) = call.args.get(dropout + 1) else { return None };
        let most = if *is_causal { MAX_CAUSAL_KEYS } else { MAX_KEYS };
        if q.sizes.contains(&0) || keys == 0 || keys > most {
            return None;
        }
        let mask = match is_absent(call, dropout + 2) {
            true => None,
            false => {
                let mask = tensor(call, dropout + 2).filter(|mask| mask.mem == Mem::F32)?;
                let shape = [batch, heads, queries, keys];
                let fits = mask.sizes.len() <= 4
                    && mask.sizes.iter().rev().zip(shape.iter().rev()).all(|(n, all)| n == all || *n == 1);
                let strides = fits.then(|| expanded(&mask.sizes, &mask.strides, &shape))?;
                Some((windows.add(mask), <[i64; 4]>::try_from(&strides[..]).ok()?))
            }
        };
        let has_scale = !matches!(call.args.get(dropout + 3)?, Arg::None);
        let [batch, heads, queries, keys, width] = [batch, heads, queries, keys, width].map(|n| n as usize);
        Some(Attention { batch, heads, queries, keys, width, is_causal: *is_causal, mask, has_scale })
    }

    /// The kernel's parameters: the probability of dropout and, if it is given, the scale.
    fn params(&self, dropout: usize) -> smallvec::SmallVec<[Param; 2]> {
        let number = |arg: usize| Param::Number(arg as u32, 0, Ty::F64);
        let mut params = smallvec![number(dropout)];
        params.extend(self.has_scale.then(|| number(dropout + 3)));
        params
    }

    /// The scale; `None` for a probability of dropout other than 0, which PyTorch's kernel refuses.
    fn scale(&self, params: &[u64]) -> Option<f64> {
        let given = params.get(1).map(|bits| f64::from_bits(*bits));
        (f64::from_bits(params[0]) == 0.0).then(|| given.unwrap_or(1.0 / (self.width as f64).sqrt()))
    }

    /// Number of keys that a block of queries attends to, if it ends before query `end`.
    fn met(&self, end: usize) -> usize {
        if self.is_causal { end.min(self.keys) } else { self.keys }
    }

    /// Calls `body` with ranges of `0..items`. `count` is the number of products of the queries' and keys' sizes that
    /// all items together compute. Returns false if `body` does, for lack of memory or of a BLAS.
    fn each(
        &self,
        host: &dyn HostKernels,
        items: usize,
        count: usize,
        body: &(dyn Fn(usize, usize) -> bool + Sync),
    ) -> bool {
        let cost = count * self.batch * self.heads * self.queries * self.keys * (self.width + 8) / items;
        let done = AtomicBool::new(true);
        let body = |from, to| {
            if !body(from, to) {
                done.store(false, Ordering::Relaxed);
            }
        };
        let grain = GRAIN / cost.max(1) as f64;
        if items < 2 || items as f64 <= grain {
            body(0, items)
        } else {
            host.parallel(items, grain, &body)
        }
        done.into_inner()
    }

    /// Stores the scores of queries `from..to`, one row of `keys` elements for each query. With a causal mask, the
    /// scores of keys after a query are not masked yet.
    ///
    /// # Safety
    /// - The requirements of the kernel.
    /// - `scores` has `BLOCK * keys` elements.
    unsafe fn scores(
        &self,
        (host, data): (&dyn HostKernels, Addresses<'_>),
        (q, k): (&Matrices, &Matrices),
        of: [usize; 2],
        (from, to): (usize, usize),
        scale: f64,
        scores: &mut [f32],
    ) -> bool {
        let n = self.met(to);
        let product = Product {
            double: false,
            m: (to - from) as i64,
            n: n as i64,
            k: self.width as i64,
            alpha: scale,
            beta: 0.0,
            a: q.operand(q.row(data, of, from), false),
            b: k.operand(k.row(data, of, 0), true),
            c: self.rows(scores),
        };
        // SAFETY: the operands are rows of the windows, and the scores are the caller's alone.
        if !unsafe { host.multiply(&product) } {
            return false;
        }
        if let Some((mask, [b, h, r, c])) = self.mask {
            let start = of[0] as i64 * b + of[1] as i64 * h;
            for (row, i) in scores.chunks_exact_mut(self.keys).zip(from..to) {
                let at = data.of::<f32>(mask).get().wrapping_offset((start + i as i64 * r) as isize);
                for (j, score) in row[..n].iter_mut().enumerate() {
                    // SAFETY: the mask, expanded, has an element for each query and key.
                    *score += unsafe { *at.offset(j as isize * c as isize) };
                }
            }
        }
        true
    }

    /// BLAS operand of a block's scores.
    fn rows(&self, scores: &[f32]) -> Matrix {
        Matrix { data: scores.as_ptr().cast_mut().cast(), transposed: false, ld: self.keys as i64 }
    }

    fn transposed(&self, scores: &[f32]) -> Matrix {
        Matrix { transposed: true, ..self.rows(scores) }
    }
}

/// The window of a new output.
fn new_storage(outputs: &Outputs, number: usize) -> Option<TensorGeometry> {
    match outputs.outs.get(number)? {
        OutSpec::NewStorage { storage, meta, offset } => new_geometry(*storage, meta, *offset),
        _ => None,
    }
}

/// Sizes of the keys and values for these queries.
fn key_sizes(q: &TensorGeometry, k: &TensorGeometry) -> Option<[i64; 4]> {
    let [b, h, _, d] = <[i64; 4]>::try_from(&q.sizes[..]).ok()?;
    Some([b, h, *k.sizes.get(2)?, d])
}

/// `_scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout_p, is_causal, attn_mask, scale)`, where
/// query, key and value are `[batch, heads, length, width]`. Returns the output and the logarithms of the softmaxes'
/// sums, `[batch, heads, length]`.
pub fn forward(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    let [q, k, v] = [0, 1, 2].map(|arg| tensor(call, arg));
    let (q, k, v) = (q?, k?, v?);
    let mut windows = Windows::default();
    let it = Attention::of(call, &q, &k, 3, &mut windows)?;
    let (query_sizes, key_sizes) = (<[i64; 4]>::try_from(&q.sizes[..]).ok()?, key_sizes(&q, &k)?);
    let q = Matrices::of(q, query_sizes, &mut windows)?;
    let [k, v] = [k, v].map(|w| Matrices::of(w, key_sizes, &mut windows));
    let (k, v) = (k?, v?);
    let y = Matrices::of(new_storage(outputs, 0)?, query_sizes, &mut windows)?;
    let lse = new_storage(outputs, 1).filter(|w| w.mem == Mem::F32 && w.sizes[..] == query_sizes[..3])?;
    let lse = (lse.strides.clone(), windows.add(lse));
    let blocks = it.queries.div_ceil(BLOCK);
    let work = move |host: &dyn HostKernels, data: Addresses<'_>, params: &[u64]| {
        let Some(scale) = it.scale(params) else { return false };
        it.each(host, it.batch * it.heads * blocks, 2, &|begin, end| {
            let Some(mut scores) = filled(BLOCK.min(it.queries) * it.keys, 0.0f32) else { return false };
            (begin..end).all(|item| {
                let of = [item / blocks / it.heads, item / blocks % it.heads];
                let from = item % blocks * BLOCK;
                let to = (from + BLOCK).min(it.queries);
                let mut shares = [0.0; BLOCK];
                // SAFETY: the windows have these sizes; one thread alone computes a block.
                unsafe {
                    if !it.scores((host, data), (&q, &k), of, (from, to), scale, &mut scores) {
                        return false;
                    }
                    for (row, i) in scores.chunks_exact_mut(it.keys).zip(from..to) {
                        let (met, rest) = row[..it.met(to)].split_at_mut(it.met(i + 1));
                        let mut stats = [0.0; 2];
                        softmax(met, &mut stats);
                        rest.fill(0.0);
                        shares[i - from] = stats[0];
                        let offset = of[0] as i64 * lse.0[0] + of[1] as i64 * lse.0[1] + i as i64 * lse.0[2];
                        *data.of::<f32>(lse.1).get().offset(offset as isize) = stats[1];
                    }
                    let product = Product {
                        double: false,
                        m: (to - from) as i64,
                        n: it.width as i64,
                        k: it.met(to) as i64,
                        alpha: 1.0,
                        beta: 0.0,
                        a: it.rows(&scores),
                        b: v.operand(v.row(data, of, 0), false),
                        c: y.operand(y.row(data, of, from), false),
                    };
                    let done = host.multiply(&product);
                    // A row of the output is usually shorter than a row of scores.
                    for (i, share) in (from..to).zip(shares) {
                        multiply(y.row(data, of, i).slice(0, it.width), share);
                    }
                    done
                }
            })
        })
    };
    let params = it.params(3);
    Some(Kernel::new(windows.0, params, work))
}

/// `_scaled_dot_product_flash_attention_for_cpu_backward(grad_out, query, key, value, out, logsumexp, dropout_p,
/// is_causal, attn_mask, scale)`. Returns the gradients of query, key and value.
pub fn backward(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    let (q, k) = (tensor(call, 1)?, tensor(call, 2)?);
    let mut windows = Windows::default();
    let it = Attention::of(call, &q, &k, 6, &mut windows)?;
    let (query_sizes, key_sizes) = (<[i64; 4]>::try_from(&q.sizes[..]).ok()?, key_sizes(&q, &k)?);
    let mut queries = |window: TensorGeometry| Matrices::of(window, query_sizes, &mut windows);
    let (grad, q, y) = (queries(tensor(call, 0)?)?, queries(q)?, queries(tensor(call, 4)?)?);
    let dq = queries(new_storage(outputs, 0)?)?;
    let mut keys = |window: TensorGeometry| Matrices::of(window, key_sizes, &mut windows);
    let (k, v) = (keys(k)?, keys(tensor(call, 3)?)?);
    let (dk, dv) = (keys(new_storage(outputs, 1)?)?, keys(new_storage(outputs, 2)?)?);
    let lse = tensor(call, 5).filter(|w| w.mem == Mem::F32 && w.sizes[..] == query_sizes[..3])?;
    let lse = (lse.strides.clone(), windows.add(lse));
    let work = move |host: &dyn HostKernels, data: Addresses<'_>, params: &[u64]| {
        let Some(scale) = it.scale(params) else { return false };
        it.each(host, it.batch * it.heads, 5, &|begin, end| {
            let size = BLOCK.min(it.queries) * it.keys;
            let (Some(mut weights), Some(mut slopes)) = (filled(size, 0.0f32), filled(size, 0.0f32)) else {
                return false;
            };
            (begin..end).all(|item| {
                let of = [item / it.heads, item % it.heads];
                for i in 0..it.keys {
                    // SAFETY: the gradients have `keys` rows of `width` elements; one thread alone computes a head.
                    unsafe {
                        dk.row(data, of, i).slice(0, it.width).fill(0.0);
                        dv.row(data, of, i).slice(0, it.width).fill(0.0);
                    }
                }
                (0..it.queries).step_by(BLOCK).all(|from| {
                    let to = (from + BLOCK).min(it.queries);
                    let n = it.met(to);
                    let product =
                        |m: usize, n: usize, k: usize, alpha: f64, beta: f64, [a, b, c]: [Matrix; 3]| {
                            let [m, n, k] = [m, n, k].map(|n| n as i64);
                            let product = Product { double: false, m, n, k, alpha, beta, a, b, c };
                            // SAFETY: the operands are rows of the windows or scores, and `c` belongs to this head.
                            unsafe { host.multiply(&product) }
                        };
                    let [g, x, dx] = [grad, q, dq].map(|w| w.operand(w.row(data, of, from), false));
                    let [ks, dks, dvs] = [k, dk, dv].map(|w| w.operand(w.row(data, of, 0), false));
                    let vs = v.operand(v.row(data, of, 0), true);
                    // SAFETY: the windows have these sizes; one thread alone computes a head.
                    let found = unsafe {
                        it.scores((host, data), (&q, &k), of, (from, to), scale, &mut weights)
                            && product(to - from, n, it.width, 1.0, 0.0, [g, vs, it.rows(&slopes)])
                    };
                    if !found {
                        return false;
                    }
                    let rows = weights.chunks_exact_mut(it.keys).zip(slopes.chunks_exact_mut(it.keys));
                    for ((weights, slopes), i) in rows.zip(from..to) {
                        let offset = of[0] as i64 * lse.0[0] + of[1] as i64 * lse.0[1] + i as i64 * lse.0[2];
                        // SAFETY: the windows have a row of `width` elements, or one element, for each query.
                        let (log_sum, g, y) = unsafe {
                            let row = |w: &Matrices| w.row(data, of, i).read(0, it.width);
                            (*data.of::<f32>(lse.1).get().offset(offset as isize), row(&grad), row(&y))
                        };
                        let met = it.met(i + 1);
                        gradients(&mut weights[..met], &mut slopes[..met], log_sum, g, y);
                        weights[met..n].fill(0.0);
                        slopes[met..n].fill(0.0);
                    }
                    product(to - from, it.width, n, scale, 0.0, [it.rows(&slopes), ks, dx])
                        && product(n, it.width, to - from, scale, 1.0, [it.transposed(&slopes), x, dks])
                        && product(n, it.width, to - from, 1.0, 1.0, [it.transposed(&weights), g, dvs])
                })
            })
        })
    };
    let params = it.params(6);
    Some(Kernel::new(windows.0, params, work))
}

/// Number of scores whose exponentials are added while they are in the first-level cache.
const CHUNK: usize = 512;

widest! {
    /// Replaces scores by exponentials that are proportional to their softmax. `stats` receives the factor of
    /// proportion and the logarithm of the sum of the scores' exponentials. If all scores are `-inf`, all exponentials
    /// are 0, as in PyTorch's kernel.
    fn softmax(scores: &mut [f32], stats: &mut [f32; 2]) => run_softmax
}

#[inline(always)]
fn run_softmax(scores: &mut [f32], stats: &mut [f32; 2]) {
    let most = largest(scores);
    if most == f32::NEG_INFINITY {
        scores.fill(0.0);
        *stats = [0.0; 2];
        return;
    }
    let mut total = 0.0;
    for scores in scores.chunks_mut(CHUNK) {
        for score in scores.iter_mut() {
            *score = weight(*score - most);
        }
        // SAFETY: `i < scores.len()`.
        total += sum(scores.len(), |i| unsafe { at(scores, i) });
    }
    *stats = [(1.0 / total) as f32, most + log(total as f32)];
}

widest! {
    fn multiply(row: &mut [f32], by: f32) => run_multiply
}

#[inline(always)]
fn run_multiply(row: &mut [f32], by: f32) {
    row.iter_mut().for_each(|x| *x *= by);
}

widest! {
    /// Replaces a query's scores by their weights, and the gradients of the weights by the gradients of the scores.
    /// `grad` and `y` are the query's rows of the output's gradient and of the output.
    fn gradients(scores: &mut [f32], slopes: &mut [f32], log_sum: f32, grad: &[f32], y: &[f32]) => run_gradients
}

#[inline(always)]
fn run_gradients(scores: &mut [f32], slopes: &mut [f32], log_sum: f32, grad: &[f32], y: &[f32]) {
    for score in scores.iter_mut() {
        *score = weight(*score - log_sum);
    }
    // The weight of a single key is constant, so its gradient is 0. The difference below would be a rounding error.
    if let [slope] = slopes {
        *slope = 0.0;
        return;
    }
    // SAFETY: both rows have `grad.len()` elements.
    let mean = products(grad.len(), |i| unsafe { at(grad, i) }, |i| unsafe { at(y, i) }) as f32;
    for (score, slope) in scores.iter().zip(slopes) {
        *slope = *score * (*slope - mean);
    }
}
