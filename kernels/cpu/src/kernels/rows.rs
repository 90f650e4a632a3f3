//! Kernels that compute the rows of their windows apart: each thread gets the elements of some rows as slices.
//!
//! What these slices rely on is checked here once, when the kernel is made: a window is contiguous, has elements of the
//! slice's type, and has the same number of them for each row.

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use smallvec::SmallVec;

use crate::kernels::kernel::{Addresses, Kernel, SendPtr};
use crate::kernels::short_rows::{LONG, each_range};
use crate::kernels::{count, is_contiguous};
use tandem_executor::host::HostKernels;
use tandem_executor::ir::Mem;
use tandem_executor::ops::express::{Param, TensorGeometry};

/// A type of elements.
///
/// # Safety
/// Elements of the formats that [`Element::is`] accepts have this type's size, and all their bits are valid.
pub unsafe trait Element: Copy + Send + Sync + 'static {
    /// Whether elements of this format are of this type.
    fn is(mem: Mem) -> bool;
}

macro_rules! element {
    ($type:ty: $($mem:ident)|+) => {
        // SAFETY: the formats have the size of this number, of which all bits are valid.
        unsafe impl Element for $type {
            fn is(mem: Mem) -> bool {
                matches!(mem, $(Mem::$mem)|+)
            }
        }
    };
}

element!(f32: F32);
element!(f64: F64);
element!(i64: I64);
element!(u8: Bool | U8);

/// A window of a kernel that is put together, and then its index and the number of elements that a thread gets for a row.
struct Place {
    window: Option<TensorGeometry>,
    index: usize,
    each: usize,
}

impl Place {
    fn of(window: TensorGeometry) -> Place {
        Place { window: Some(window), index: 0, each: 0 }
    }

    /// Moves the window to `windows`, if it is contiguous and its elements, of type `T`, are `rows` times as many as
    /// those of a row.
    fn bind<T: Element>(&mut self, rows: usize, windows: &mut SmallVec<[TensorGeometry; 4]>) -> Option<()> {
        let window = self.window.take()?;
        let all = count(&window.sizes);
        if !T::is(window.mem) || !is_contiguous(&window) || rows == 0 || !all.is_multiple_of(rows) {
            return None;
        }
        (self.index, self.each) = (windows.len(), all / rows);
        windows.push(window);
        Some(())
    }
}

/// Windows of which a thread gets the elements of some rows: a window, an optional one, or several.
pub trait Rows: Send + Sync + 'static {
    /// The elements of some rows.
    type Elements<'a>;

    /// Moves the windows to those of a kernel of this many rows. `None` if one of them has not that many rows of elements
    /// of its type.
    fn bind(&mut self, rows: usize, windows: &mut SmallVec<[TensorGeometry; 4]>) -> Option<()>;

    /// Returns the elements of the rows of a range.
    ///
    /// # Safety
    /// - The windows were bound to the kernel whose addresses these are, and the range is one of its rows'.
    /// - While the elements are in use, nobody writes elements that are read, or uses the rows of the range that are
    ///   written.
    unsafe fn elements<'a>(&self, data: Addresses<'_>, range: Range<usize>) -> Self::Elements<'a>;
}

/// Rows that are read.
pub struct Read<T>(Place, PhantomData<T>);
/// A window that is read as a whole for each row.
pub struct Whole<T>(Place, PhantomData<T>);
/// Rows that are written.
pub struct Written<T>(Place, PhantomData<T>);

pub fn read<T: Element>(window: TensorGeometry) -> Read<T> {
    Read(Place::of(window), PhantomData)
}

pub fn whole<T: Element>(window: TensorGeometry) -> Whole<T> {
    Whole(Place::of(window), PhantomData)
}

pub fn written<T: Element>(window: TensorGeometry) -> Written<T> {
    Written(Place::of(window), PhantomData)
}

impl<T: Element> Rows for Read<T> {
    type Elements<'a> = &'a [T];

    fn bind(&mut self, rows: usize, windows: &mut SmallVec<[TensorGeometry; 4]>) -> Option<()> {
        self.0.bind::<T>(rows, windows)
    }

    unsafe fn elements<'a>(&self, data: Addresses<'_>, range: Range<usize>) -> &'a [T] {
        let each = self.0.each;
        // SAFETY: the window has `each` elements for each of the rows, which nobody writes.
        unsafe { data.of::<T>(self.0.index).read(range.start * each, range.len() * each) }
    }
}

impl<T: Element> Rows for Whole<T> {
    type Elements<'a> = &'a [T];

    fn bind(&mut self, _: usize, windows: &mut SmallVec<[TensorGeometry; 4]>) -> Option<()> {
        self.0.bind::<T>(1, windows)
    }

    unsafe fn elements<'a>(&self, data: Addresses<'_>, _: Range<usize>) -> &'a [T] {
        // SAFETY: the window has `each` elements, which nobody writes.
        unsafe { data.of::<T>(self.0.index).read(0, self.0.each) }
    }
}

impl<T: Element> Rows for Written<T> {
    type Elements<'a> = &'a mut [T];

    fn bind(&mut self, rows: usize, windows: &mut SmallVec<[TensorGeometry; 4]>) -> Option<()> {
        self.0.bind::<T>(rows, windows)
    }

    unsafe fn elements<'a>(&self, data: Addresses<'_>, range: Range<usize>) -> &'a mut [T] {
        let each = self.0.each;
        // SAFETY: the window has `each` elements for each of the rows. It overlaps no other window, and nobody else uses
        // these rows.
        unsafe { data.of::<T>(self.0.index).slice(range.start * each, range.len() * each) }
    }
}

impl<R: Rows> Rows for Option<R> {
    type Elements<'a> = Option<R::Elements<'a>>;

    fn bind(&mut self, rows: usize, windows: &mut SmallVec<[TensorGeometry; 4]>) -> Option<()> {
        self.as_mut().map_or(Some(()), |window| window.bind(rows, windows))
    }

    unsafe fn elements<'a>(&self, data: Addresses<'_>, range: Range<usize>) -> Self::Elements<'a> {
        // SAFETY: this function has the same requirements.
        self.as_ref().map(|window| unsafe { window.elements(data, range) })
    }
}

macro_rules! several {
    ($($name:ident $at:tt),*) => {
        impl<$($name: Rows),*> Rows for ($($name,)*) {
            type Elements<'a> = ($($name::Elements<'a>,)*);

            fn bind(&mut self, rows: usize, windows: &mut SmallVec<[TensorGeometry; 4]>) -> Option<()> {
                $(self.$at.bind(rows, windows)?;)*
                Some(())
            }

            unsafe fn elements<'a>(&self, data: Addresses<'_>, range: Range<usize>) -> Self::Elements<'a> {
                // SAFETY: this function has the same requirements.
                unsafe { ($(self.$at.elements(data, range.clone()),)*) }
            }
        }
    };
}

several!(A 0, B 1);
several!(A 0, B 1, C 2);
several!(A 0, B 1, C 2, D 3, E 4, F 5);
several!(A 0, B 1, C 2, D 3, E 4, F 5, G 6, H 7);

/// Rows of a kernel, as they are divided among threads.
#[derive(Clone, Copy)]
pub struct Division {
    pub rows: usize,
    /// Number of elements of a row, and the number of additions that an element takes.
    pub n: usize,
    pub cost: usize,
}

impl Kernel {
    /// The kernel that computes rows apart. `compute` is called with the elements of some rows, on several threads if
    /// there are enough rows, and with the bits of `params`. It returns false if PyTorch's kernel must run instead. The
    /// result is `None` if a window has not as many contiguous rows of its type.
    pub fn of_rows<R: Rows>(
        by: Division,
        mut windows: R,
        params: SmallVec<[Param; 2]>,
        compute: impl for<'a> Fn(&[u64], R::Elements<'a>) -> bool + Send + Sync + 'static,
    ) -> Option<Kernel> {
        let mut all = SmallVec::new();
        windows.bind(by.rows, &mut all)?;
        let work = move |host: &dyn HostKernels, data: Addresses<'_>, params: &[u64]| {
            let done = AtomicBool::new(true);
            each_range(host, [by.rows, by.n], by.cost, by.n < LONG, &|from, to| {
                // SAFETY: the windows are this kernel's. Ranges of different threads are disjoint.
                if !compute(params, unsafe { windows.elements(data, from..to) }) {
                    done.store(false, Ordering::Relaxed);
                }
            });
            done.into_inner()
        };
        Some(Kernel::new(all, params, work))
    }

    /// As [`Kernel::of_rows`], with `compute` called for one row after the other.
    pub fn of_each_row<R: Rows>(
        by: Division,
        mut windows: R,
        params: SmallVec<[Param; 2]>,
        compute: impl for<'a> Fn(&[u64], R::Elements<'a>) + Send + Sync + 'static,
    ) -> Option<Kernel> {
        let mut all = SmallVec::new();
        windows.bind(by.rows, &mut all)?;
        let work = move |host: &dyn HostKernels, data: Addresses<'_>, params: &[u64]| {
            each_range(host, [by.rows, by.n], by.cost, false, &|from, to| {
                for row in from..to {
                    // SAFETY: the windows are this kernel's. Ranges of different threads are disjoint.
                    compute(params, unsafe { windows.elements(data, row..row + 1) });
                }
            });
            true
        };
        Some(Kernel::new(all, params, work))
    }
}

/// Calls `body` with ranges of `rows` rows and with their items, `items.len() / rows` for each row, on several threads if
/// there are enough. `cost` is the number of additions that a row takes.
pub fn divided<T: Copy + Send>(
    host: &dyn HostKernels,
    items: &mut [T],
    rows: usize,
    cost: usize,
    body: &(dyn Fn(Range<usize>, &mut [T]) + Sync),
) {
    let each = items.len() / rows.max(1);
    let items = SendPtr(items.as_mut_ptr());
    crate::kernels::each_row(host, rows, cost, &|from, to| {
        // SAFETY: the range is within the rows, which have `each` items each. Ranges of different threads are disjoint,
        // and nobody else has the items while they are borrowed.
        body(from..to, unsafe { items.slice(from * each, (to - from) * each) });
    });
}
