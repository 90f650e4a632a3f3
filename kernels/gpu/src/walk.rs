//! How point-wise kernels walk over their elements.
//!
//! | operands                                                     | skeleton                               |
//! |--------------------------------------------------------------|----------------------------------------|
//! | all contiguous                                               | [`Skeleton::Map`], in vectors          |
//! | all with stride 1, or 0, in the last dimension               | [`Skeleton::Rows`], in vectors         |
//! | results with stride 1 in the last, operands in another one   | [`Skeleton::Squares`]                  |
//! | others                                                       | [`Skeleton::Map`], one by one          |

use crate::kernel::{Groups, Kernel, Skeleton, THREADS};
use crate::linear::VECTOR;
use crate::squares::{SIDE, Squares};
use crate::store::{Store, Tensor};
use tandem_executor::ir::{E, Ty};

/// Smallest size of the last dimension, and of the other dimension of squares, for which a walk is not a map.
const LEAST: i64 = 16;

/// Maximum number of bytes of workgroup memory for squares, which is WebGPU's default limit.
const MAX_BYTES: u32 = 16 << 10;

/// The skeleton of a point-wise kernel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Walk {
    /// Elements in row-major order.
    Map,
    /// Rows along the last dimension.
    Rows,
    /// Squares of this dimension and the last one.
    Squares(usize),
}

impl Walk {
    fn of(sizes: &[i64], outs: &[&Tensor], ins: &[&Tensor]) -> Walk {
        let Some(last) = sizes.len().checked_sub(1).filter(|last| *last > 0) else { return Walk::Map };
        let along = |t: &&Tensor| t.strides[last] == 1;
        let in_order = outs.iter().chain(ins).all(|t| t.is_contiguous());
        if in_order || sizes[last] < LEAST || !outs.iter().all(along) {
            return Walk::Map;
        }
        if ins.iter().all(|t| along(t) || t.strides[last] == 0) {
            return if sizes[last] % i64::from(VECTOR) == 0 { Walk::Rows } else { Walk::Map };
        }
        // Elements of less than 16 bits share words, and one thread must store a whole word.
        if outs.iter().any(|t| t.mem.size() < 2) {
            return Walk::Map;
        }
        let across = |dim: usize, t: &Tensor| t.strides[dim] == 1 && t.strides[last] > 1;
        let fits = |dim: &usize| {
            let turned = ins.iter().filter(|t| across(*dim, t));
            let bytes: u32 = turned.map(|t| t.mem.size().max(4) * SIDE * (SIDE + 1)).sum();
            sizes[*dim] >= LEAST && (1..=MAX_BYTES).contains(&bytes)
        };
        (0..last).find(fits).map_or(Walk::Map, Walk::Squares)
    }
}

/// Function that returns the store of an element. Its arguments are the kernel, the target, the element's coordinates and
/// row-major number, and the value.
pub type Put<'p> = &'p dyn Fn(&Kernel, &Tensor, &[E], &E, E) -> Store;

impl Kernel {
    /// Uses a thread for each element of an index space, or for some neighbours. `outs` and `ins` are the operands.
    /// `body` receives the element's coordinates, its row-major number, and the function that stores the element.
    pub fn walk(
        &mut self,
        sizes: &[i64],
        outs: &[&Tensor],
        ins: &[&Tensor],
        body: impl FnOnce(&mut Kernel, &[E], &E, Put<'_>) -> Vec<Store>,
    ) {
        match Walk::of(sizes, outs, ins) {
            Walk::Map => self.map(sizes, |k, coords, number| {
                body(k, coords, number, &|k, t, coords, number, value| {
                    // Elements with a fault are not stored, so elements that share a word are stored one by one.
                    let linear = t.is_contiguous() && k.faults.is_empty();
                    if linear { k.store_linear(t, number, value) } else { k.store(t, coords, value) }
                })
            }),
            Walk::Rows => self.walk_rows(sizes, body),
            Walk::Squares(dim) => self.walk_squares(sizes, dim, body),
        }
    }

    fn walk_rows(&mut self, sizes: &[i64], body: impl FnOnce(&mut Kernel, &[E], &E, Put<'_>) -> Vec<Store>) {
        let (outer, len) = sizes.split_at(sizes.len() - 1);
        let threads = (len[0] as u64 / u64::from(VECTOR)).next_power_of_two().min(u64::from(THREADS));
        self.rows(outer.iter().product(), len[0], threads as u32, |r, row| {
            let mut coords = r.k.coords(outer, row);
            let first = row * r.k.size(len[0]);
            r.each(|k, member| {
                coords.push(member.clone());
                body(k, &coords, &(first + member), &|k, t, coords, _, value| {
                    k.store(t, coords, value).side_by_side()
                })
            });
        });
    }

    fn walk_squares(
        &mut self,
        sizes: &[i64],
        dim: usize,
        body: impl FnOnce(&mut Kernel, &[E], &E, Put<'_>) -> Vec<Store>,
    ) {
        let last = sizes.len() - 1;
        let others: Vec<usize> = (0..last).filter(|d| *d != dim).collect();
        let planes: Vec<i64> = others.iter().map(|d| sizes[*d]).collect();
        let [down, across] = [sizes[dim], sizes[last]].map(|size| (size as u64).div_ceil(u64::from(SIDE)));
        let total = planes.iter().product::<i64>() as u64 * down * across;
        let extent = [sizes[dim], sizes[last]].map(|size| self.size(size));
        let squares = [down, across, total].map(|count| self.size(count as i64));
        let vars = [(); 3].map(|()| self.fresh_var());
        let [plane, row, column] = vars.map(|var| E::var(Ty::U32, var));
        let mut coords = vec![E::u32(0); sizes.len()];
        for (d, coord) in others.iter().zip(self.coords(&planes, &plane)) {
            coords[*d] = coord;
        }
        (coords[dim], coords[last]) = (row, column);
        let number = (1..sizes.len()).fold(coords[0].clone(), |number, d| {
            let size = self.size(sizes[d]);
            number * size + &coords[d]
        });
        let stores = body(self, &coords, &number, &|k, t, coords, _, value| k.store(t, coords, value));
        self.groups = Groups::Linear(total);
        self.skeleton = Skeleton::Squares(Squares { extent, squares, vars, stores });
    }
}
