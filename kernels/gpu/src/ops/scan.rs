//! Running accumulations along a dimension: sums, products, extremes, logarithms of sums.
//!
//! A team of threads scans a row, or a single thread if neighbouring rows are adjacent in memory. Rows that are few and
//! long are split into parts. A first kernel accumulates each part, a second kernel scans the results of the parts, and
//! a third kernel scans the members.

use tandem_tracegraph::tensor_meta::Dtype;

use crate::kernel::{Kernel, RowBuilder, highest, lowest, team};
use crate::lower::{Lowering, Operand, Source, dense};
use crate::ops::reduce::Extreme;
use crate::ops::reduce::{FILL, exponentials, kept_as};
use crate::ops::softmax::{DimRows, at};
use tandem_executor::ir::{E, Mem, Ty};

/// Accumulation along a row.
struct Running<'f, const N: usize> {
    /// Initial accumulators, which are neutral in `merge`.
    init: [E; N],
    /// Accumulators of a single member, from its value and number.
    member: &'f dyn Fn(E, &E) -> [E; N],
    /// Merges the accumulators of two parts, in any order.
    merge: &'f dyn Fn([E; N], [E; N]) -> [E; N],
    /// Values to be stored for a member, from the accumulators after it.
    finish: &'f dyn Fn([E; N]) -> Vec<E>,
}

/// Rows of a tensor, divided into parts.
struct Division<'x> {
    x: &'x Operand,
    rows: DimRows,
    /// Number of parts of each row.
    parts: i64,
    /// Number of members of a part. The last part of a row may have fewer.
    chunk: i64,
    /// Number of threads that scan a part.
    team: u32,
}

impl<'x> Division<'x> {
    fn new(x: &'x Operand, dim: usize) -> Division<'x> {
        let rows = DimRows::new(x, dim, x);
        let threads = rows.count() * i64::from(rows.team);
        let least = if rows.team == 1 { 64 } else { 1024 };
        let parts = if threads < FILL / 2 && rows.len >= 4 * least {
            (FILL / threads).min(rows.len / least).clamp(1, 4096)
        } else {
            1
        };
        let chunk = (rows.len + parts - 1) / parts;
        let team = if rows.team == 1 { 1 } else { team(chunk, false) };
        Division { x, rows, parts, chunk, team }
    }
}

/// Parts of rows in a kernel. Consecutive numbers are the same part of neighbouring rows.
struct Parts<'d> {
    division: &'d Division<'d>,
    rows: E,
    len: E,
    chunk: E,
    source: Source,
}

/// A part of a row.
struct Part {
    row: E,
    /// Number of the part within its row.
    number: E,
    /// Coordinates of the row.
    coords: Vec<E>,
}

impl<'d> Parts<'d> {
    fn new(l: &Lowering<'_>, k: &mut Kernel, division: &'d Division<'d>) -> Parts<'d> {
        let Division { x, rows, chunk, .. } = division;
        let [count, len, chunk] = [rows.count(), rows.len, *chunk].map(|size| k.size(size));
        let source = l.read(k, &rows.view(x));
        Parts { division, rows: count, len, chunk, source }
    }

    fn whole(&self) -> bool {
        self.division.parts == 1
    }

    /// Row and part with a number.
    fn place(&self, number: &E) -> (E, E) {
        if self.whole() { (number.clone(), E::u32(0)) } else { (number % &self.rows, number / &self.rows) }
    }

    /// Number of members of the part with a number.
    fn len(&self, number: &E) -> E {
        if self.whole() {
            return self.len.clone();
        }
        let (_, part) = self.place(number);
        let begin = (part * &self.chunk).min(&self.len);
        (&self.len - begin).min(&self.chunk)
    }

    /// Number within its row of a part's member `j`.
    fn member(&self, part: &Part, j: &E) -> E {
        if self.whole() { j.clone() } else { &part.number * &self.chunk + j }
    }

    /// Accumulators after a part's member `j`.
    fn step<const N: usize>(
        &self,
        k: &Kernel,
        part: &Part,
        j: &E,
        a: [E; N],
        running: &Running<'_, N>,
    ) -> [E; N] {
        let j = self.member(part, j);
        let value = self.source.at(k, &at(&part.coords, &j));
        (running.merge)(a, (running.member)(value, &j))
    }

    /// Makes a kernel use a team of threads for each part. `body` adds the stages.
    fn each(&self, k: &mut Kernel, body: impl FnOnce(&mut RowBuilder<'_>, &Part)) {
        let Division { rows, parts, team, .. } = self.division;
        k.rows_of(
            rows.count() * parts,
            |_, n| self.len(n),
            *team,
            |r, number| {
                let (row, number) = self.place(number);
                let coords = r.k.coords(&rows.kept, &row);
                body(r, &Part { row, number, coords });
            },
        );
    }
}

fn scan<const N: usize>(
    l: &mut Lowering<'_>,
    x: &Operand,
    dim: usize,
    outs: &[&Operand],
    running: &Running<'_, N>,
) -> Option<()> {
    if x.numel() == 0 {
        return Some(());
    }
    let division = Division::new(x, dim);
    let rows = &division.rows;
    // Accumulators after each part. A part begins with the accumulators after the previous part.
    let before = if division.parts > 1 { Some(scan_parts(l, &division, running)?) } else { None };
    let mut k = Kernel::new("scan");
    let parts = Parts::new(l, &mut k, &division);
    let targets: Option<Vec<_>> = outs.iter().map(|o| l.write(&mut k, &rows.view(o))).collect();
    let targets = targets?;
    let before: Vec<Source> = before.iter().flatten().map(|x| l.read(&mut k, x)).collect();
    let rounds = k.size(division.chunk);
    parts.each(&mut k, |r, part| {
        // The first part begins with `init`. The value that it loads is not used.
        let first = part.number.eq(0u32);
        let previous = first.select(&part.number, &part.number - 1u32);
        let start = std::array::from_fn(|n| match before.get(n) {
            Some(source) => {
                let init = &running.init[n];
                let value = source.at(r.k, &[part.row.clone(), previous.clone()]).cast(init.ty());
                first.select(init, value)
            }
            None => running.init[n].clone(),
        });
        r.scan(
            rounds,
            running.init.clone(),
            start,
            |k, j, a| parts.step(k, part, j, a, running),
            running.merge,
            |k, j, a| {
                let to = at(&part.coords, &parts.member(part, j));
                targets.iter().zip((running.finish)(a)).map(|(t, v)| k.store(t, &to, v)).collect()
            },
        );
    });
    l.launch(k)
}

/// Computes the accumulators of each row after each of its parts.
fn scan_parts<const N: usize>(
    l: &mut Lowering<'_>,
    division: &Division<'_>,
    running: &Running<'_, N>,
) -> Option<Vec<Operand>> {
    let (count, parts) = (division.rows.count(), division.parts);
    let mut temps = || -> Option<Vec<Operand>> {
        running.init.iter().map(|e| l.temp(&[count, parts], kept_as(e.ty()))).collect()
    };
    let (alone, scanned) = (temps()?, temps()?);

    let mut k = Kernel::new("scan_parts");
    let own = Parts::new(l, &mut k, division);
    let targets: Option<Vec<_>> = alone.iter().map(|o| l.write(&mut k, o)).collect();
    let targets = targets?;
    own.each(&mut k, |r, part| {
        let step = |k: &mut Kernel, j: &E, a| own.step(k, part, j, a, running);
        let a = r.reduce(running.init.clone(), step, running.merge);
        r.once(|k| {
            let to = [part.row.clone(), part.number.clone()];
            targets.iter().zip(a).map(|(t, v)| k.store(t, &to, v)).collect()
        });
    });
    l.launch(k)?;

    let mut k = Kernel::new("scan_of_parts");
    let sources: Vec<Source> = alone.iter().map(|x| l.read(&mut k, x)).collect();
    let targets: Option<Vec<_>> = scanned.iter().map(|o| l.write(&mut k, o)).collect();
    let targets = targets?;
    let rounds = k.size(parts);
    k.rows(count, parts, team(parts, false), |r, row| {
        r.scan(
            rounds,
            running.init.clone(),
            running.init.clone(),
            |k, j, a| {
                let b = std::array::from_fn(|n| {
                    sources[n].at(k, &[row.clone(), j.clone()]).cast(running.init[n].ty())
                });
                (running.merge)(a, b)
            },
            running.merge,
            |k, j, a| targets.iter().zip(a).map(|(t, v)| k.store(t, &[row.clone(), j.clone()], v)).collect(),
        );
    });
    l.launch(k)?;
    Some(scanned)
}

/// `cumsum(self, dim, dtype)`.
pub fn cumsum(l: &mut Lowering<'_>) -> Option<()> {
    sums(l, false)
}

/// `cumprod(self, dim, dtype)`.
pub fn cumprod(l: &mut Lowering<'_>) -> Option<()> {
    sums(l, true)
}

fn sums(l: &mut Lowering<'_>, product: bool) -> Option<()> {
    let x = l.tensor(0)?;
    let dim = l.dim(1, x.ndim())?;
    let given = if l.in_place() {
        Some(x.dtype)
    } else if l.has_out() {
        Some(l.tensor(3)?.dtype)
    } else {
        None
    };
    let dtype = match (l.dtype(2)?, given) {
        (Some(d), Some(g)) if d != g => return None,
        (Some(d), _) | (None, Some(d)) => d,
        (None, None) if !x.dtype.is_floating() => Dtype::INT64,
        (None, None) => x.dtype,
    };
    if dtype == Dtype::BOOL {
        return None;
    }
    let ty = Mem::of(dtype)?.ty();
    let out = l.destination(0, &x.sizes, &dense(&x.sizes), dtype)?;
    let running = Running {
        init: [E::lit(ty, f64::from(u8::from(product)))],
        member: &|x, _| [x.cast(ty)],
        merge: &|[a], [b]| [if product { a * b } else { a + b }],
        finish: &|a| a.to_vec(),
    };
    scan(l, &x, dim, &[&out], &running)
}

/// `cummax(self, dim)`, `cummin`: of equal values, the last one's index.
pub fn extremes(l: &mut Lowering<'_>, which: Extreme) -> Option<()> {
    let x = l.tensor(0)?;
    let dim = l.dim(1, x.ndim())?;
    let strides = dense(&x.sizes);
    let values = l.destination(0, &x.sizes, &strides, x.dtype)?;
    let indices = l.destination(1, &x.sizes, &strides, Dtype::INT64)?;
    let largest = which == Extreme::Max;
    let ty = if x.mem.ty() == Ty::Bool { Ty::I32 } else { x.mem.ty() };
    let running = Running {
        init: [if largest { lowest(ty) } else { highest(ty) }, E::u32(0)],
        member: &|x, j| [x.cast(ty), j.clone()],
        merge: &|[a, i], [b, j]| {
            let later = j.gt(&i);
            let ahead = if largest { b.gt(&a) } else { b.lt(&a) };
            let wins = ahead.or(b.eq(&a).and(&later));
            let wins = if ty.is_float() {
                let (na, nb) = (a.is_nan(), b.is_nan());
                nb.and(na.not().or(&later)).or(na.not().and(wins))
            } else {
                wins
            };
            [wins.select(&b, &a), wins.select(&j, &i)]
        },
        finish: &|[a, i]| vec![a.cast(x.mem.ty()), i.cast(Ty::I64)],
    };
    scan(l, &x, dim, &[&values, &indices], &running)
}

/// `logcumsumexp(self, dim)`.
pub fn exponential_sums(l: &mut Lowering<'_>) -> Option<()> {
    let x = l.tensor(0)?;
    let dim = l.dim(1, x.ndim())?;
    if !x.dtype.is_floating() || x.mem.ty() != Ty::F32 {
        return None;
    }
    let out = l.destination(0, &x.sizes, &dense(&x.sizes), x.dtype)?;
    let acc = exponentials();
    let running = Running {
        init: acc.init.clone(),
        member: &|x, _| [x, E::lit(Ty::F32, 1.0)],
        merge: acc.merge,
        finish: &|[max, sum]| vec![max + sum.log()],
    };
    scan(l, &x, dim, &[&out], &running)
}
