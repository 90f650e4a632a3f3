//! The interpreter of tile programs.

use std::cell::RefCell;
use std::mem::MaybeUninit;

use smallvec::SmallVec;

use crate::ahead;
use crate::ahead::LINE;
use crate::tiles::program::{Fun, Inst, LANES, OpCode, Splat, TILE, TileProgram, ValuePlace, size_of};
use crate::tiles::{math, trig};
use crate::widest::widest;
use tandem_executor::ir::{Bin, Ty, Un};
use tandem_executor::ops::casts::ToInteger;
use tandem_executor::shapes::Dims;

/// An operand in memory.
#[derive(Clone, Debug)]
pub struct MemoryOperand {
    /// Index of the address of the operand's first element.
    pub slot: u16,
    /// Strides in elements, for the dimensions of the launch.
    pub strides: Dims,
    /// Size of an element in bytes.
    pub size: usize,
}

/// A program and its operands.
pub struct Launch<'a> {
    /// The program.
    pub program: &'a TileProgram,
    /// Sizes of the dimensions; the last one is the innermost.
    pub sizes: &'a [i64],
    /// Operands, in the order of their numbers.
    pub windows: &'a [MemoryOperand],
    /// Addresses of first elements, by slot.
    pub data: &'a [*mut u8],
    /// Parameters, in the order of their numbers: the bits of an `i64` or an `f64`.
    pub params: &'a [u64],
}

// SAFETY: sharing a launch shares addresses alone; `run` accesses the memory and is unsafe.
unsafe impl Sync for Launch<'_> {}

thread_local!(static SCRATCH: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) });

impl Launch<'_> {
    /// Returns the address of an operand's first element.
    #[inline(always)]
    fn first(&self, operand: u16) -> *mut u8 {
        self.data[self.windows[operand as usize].slot as usize]
    }

    /// Computes elements `from..to`.
    ///
    /// # Safety
    /// - The program was compiled for these windows and sizes, and has `to` elements or more.
    /// - Elements `from..to` of the windows are in live memory.
    /// - Nobody else writes these elements, or reads the elements that are written.
    pub unsafe fn run(&self, from: usize, to: usize) {
        SCRATCH.with_borrow_mut(|scratch| {
            let words = self.program.scratch as usize / 8 + 16;
            if scratch.len() < words {
                scratch.resize(words, 0);
            }
            let base = scratch.as_mut_ptr().cast::<u8>();
            // SAFETY: the vector is 128 bytes longer than the program's scratch memory, so alignment fits.
            let base = unsafe { base.add(base.align_offset(64)) };
            // SAFETY: `base` has `program.scratch` bytes, and elements `from..to` of the windows are live and not
            // shared, which this function requires.
            unsafe { tiles(self, base, from, to) };
        });
    }
}

widest! {
    /// Implements [`Launch::run`].
    ///
    /// # Safety
    /// The requirements are those of [`Launch::run`], and `scratch` has `program.scratch` bytes.
    unsafe fn tiles(launch: &Launch<'_>, scratch: *mut u8, from: usize, to: usize) => run_tiles
}

/// # Safety
/// The requirements are those of [`tiles`].
#[inline(always)]
unsafe fn run_tiles(launch: &Launch<'_>, scratch: *mut u8, from: usize, to: usize) {
    let program = launch.program;
    // SAFETY: the compiler placed all registers inside `program.scratch` bytes. Elements `from..to` are inside the
    // windows, and `at..at + n` are among them.
    unsafe {
        for (register, ty, splat) in &program.splats {
            fill(scratch.add(*register as usize), *ty, value(launch, *ty, *splat), LANES);
        }
        let mut at = from;
        while at < to {
            let n = (to - at).min(TILE);
            for (register, operand) in &program.gathers {
                walk(launch, *operand, at, n, scratch.add(*register as usize), false);
            }
            let ahead = to - at >= FAR;
            for (number, inst) in program.insts.iter().enumerate() {
                if ahead {
                    fetch_ahead(launch, at + TILE, number);
                }
                step(launch, inst, scratch, at, n);
            }
            for (from, operand) in &program.scatters {
                let size = launch.windows[*operand as usize].size;
                walk(launch, *operand, at, n, place(launch, *from, size, scratch, at), true);
            }
            at += n;
        }
    }
}

/// Minimum number of remaining elements for which the next tile is prefetched. With fewer elements, most of the memory
/// is in a cache already, and prefetching costs more than it saves.
const FAR: usize = 32 * TILE;

/// Prefetches a share of the tile at `next` while instruction `number` computes. Shares are spread over all
/// instructions, since only the first ones read memory and the last ones write it.
#[inline(always)]
fn fetch_ahead(launch: &Launch<'_>, next: usize, number: usize) {
    let program = launch.program;
    let count = program.insts.len();
    if count == 1 && program.cost < WORTH_FETCHING {
        return;
    }
    for (operand, written) in &program.streams {
        let size = launch.windows[*operand as usize].size;
        let lines = TILE * size / LINE;
        let first = launch.first(*operand).wrapping_add(next * size);
        ahead::fetch(first, number * lines / count..(number + 1) * lines / count, *written);
    }
}

/// Cost per element (see [`TileProgram::cost`]) from which prefetching is worth it for a program of one instruction.
const WORTH_FETCHING: u32 = 8;

/// Returns the address of an operand or result: of its register, or of element `at` in memory.
///
/// # Safety
/// - `scratch` has `program.scratch` bytes.
/// - The window of an operand in memory has element `at`, of `size` bytes.
#[inline(always)]
unsafe fn place(launch: &Launch<'_>, place: ValuePlace, size: usize, scratch: *mut u8, at: usize) -> *mut u8 {
    // SAFETY: the program's registers are inside its scratch memory, and element `at` is inside the operand's window.
    unsafe {
        match place {
            ValuePlace::Register(byte) | ValuePlace::Splat(byte) => scratch.add(byte as usize),
            ValuePlace::Memory(operand) => launch.first(operand).add(at * size),
        }
    }
}

/// Returns the bits of a splat, converted to its type, in the lower bytes.
///
/// # Safety
/// The window of a splat that is an element has that element, which nobody writes during the call.
unsafe fn value(launch: &Launch<'_>, ty: Ty, splat: Splat) -> u64 {
    let number = match splat {
        Splat::Literal(bits) => bits,
        Splat::Parameter(number) => launch.params[number as usize],
        Splat::Element(operand) => {
            let first = launch.first(operand);
            // SAFETY: the window has an element of this size, and the access may be unaligned.
            return unsafe {
                match launch.windows[operand as usize].size {
                    1 => u64::from(*first),
                    4 => u64::from(first.cast::<u32>().read_unaligned()),
                    _ => first.cast::<u64>().read_unaligned(),
                }
            };
        }
    };
    match ty {
        Ty::F32 => u64::from((f64::from_bits(number) as f32).to_bits()),
        Ty::F64 | Ty::I64 => number,
        Ty::I32 | Ty::U32 => number & 0xffff_ffff,
        Ty::Bool => u64::from(number != 0),
    }
}

/// Fills a register with `n` copies of a value.
///
/// # Safety
/// `to` has room for `n` elements of this type and is aligned for them.
#[inline(always)]
unsafe fn fill(to: *mut u8, ty: Ty, bits: u64, n: usize) {
    // SAFETY: the register has room for `n` elements of this type, and each type is written as an integer of its size.
    unsafe {
        match size_of(ty) {
            1 => std::slice::from_raw_parts_mut(to, n).fill(bits as u8),
            4 => std::slice::from_raw_parts_mut(to.cast::<u32>(), n).fill(bits as u32),
            _ => std::slice::from_raw_parts_mut(to.cast::<u64>(), n).fill(bits),
        }
    }
}

/// Copies a tile of a strided operand to a register, or from a register if `out`.
///
/// # Safety
/// - The operand's window has elements `at..at + n`.
/// - Nobody writes these elements and, if `out`, nobody else uses them.
/// - `tile` has room for `n` elements.
unsafe fn walk(launch: &Launch<'_>, operand: u16, at: usize, n: usize, tile: *mut u8, out: bool) {
    let MemoryOperand { strides, size, .. } = &launch.windows[operand as usize];
    let (sizes, data) = (launch.sizes, launch.first(operand));
    // SAFETY: elements `at..at + n` are inside the window and `n` in the tile; they are copied as integers of their
    // size.
    unsafe {
        match size {
            1 => walk_rows::<u8>(sizes, strides, data, at, n, tile, out),
            4 => walk_rows::<u32>(sizes, strides, data.cast(), at, n, tile.cast(), out),
            _ => walk_rows::<u64>(sizes, strides, data.cast(), at, n, tile.cast(), out),
        }
    }
}

/// Implements [`walk`] for a size of elements. Copies rows of the innermost dimension in a loop over the next
/// dimension, and advances the outer dimensions only after that.
///
/// # Safety
/// The requirements are those of [`walk`], for a window of elements `T` that begins at `data`.
unsafe fn walk_rows<T: Copy>(
    sizes: &[i64],
    strides: &[i64],
    data: *mut T,
    at: usize,
    n: usize,
    tile: *mut T,
    out: bool,
) {
    let Some((inner, outer)) = sizes.split_last() else { return };
    let inner = *inner as usize;
    let stride = strides[outer.len()] as isize;
    let (rows, outer) = outer.split_last().map_or((1, outer), |(rows, outer)| (*rows as usize, outer));
    let row_stride = if sizes.len() > 1 { strides[outer.len()] as isize } else { 0 };
    let (mut column, rest) = (at % inner, at / inner);
    let (mut row, mut rest) = (rest % rows, rest / rows);
    let mut coords: SmallVec<[usize; 8]> = SmallVec::from_elem(0, outer.len());
    let mut offset = 0isize;
    for d in (0..outer.len()).rev() {
        coords[d] = rest % outer[d] as usize;
        rest /= outer[d] as usize;
        offset += coords[d] as isize * strides[d] as isize;
    }
    let mut done = 0;
    while done < n {
        let mut memory = data.wrapping_offset(offset + row as isize * row_stride + column as isize * stride);
        while row < rows && done < n {
            let run = (inner - column).min(n - done);
            // SAFETY: the row's `run` elements are among elements `at..at + n` of the window, and so many are left in
            // the tile.
            unsafe { copy_run(memory, stride, tile.add(done), run, out) };
            done += run;
            memory = memory.wrapping_offset(row_stride - column as isize * stride);
            (column, row) = (0, row + 1);
        }
        row = 0;
        for d in (0..outer.len()).rev() {
            coords[d] += 1;
            offset += strides[d] as isize;
            if coords[d] < outer[d] as usize {
                break;
            }
            offset -= coords[d] as isize * strides[d] as isize;
            coords[d] = 0;
        }
    }
}

/// Copies a row that is usually short, for which choosing a method of copying takes longer than copying.
///
/// # Safety
/// `from` and `to` have `n` elements, which do not overlap.
#[inline(always)]
unsafe fn copy_row<T: Copy>(from: *const T, to: *mut T, n: usize) {
    const SHORT: usize = 64;
    const PART: usize = 8;
    // SAFETY: each part ends at most at `whole <= n`, the number of elements of both.
    unsafe {
        if n > SHORT {
            return std::ptr::copy_nonoverlapping(from, to, n);
        }
        let whole = n - n % PART;
        for at in (0..whole).step_by(PART) {
            let part = from.add(at).cast::<[T; PART]>().read_unaligned();
            to.add(at).cast::<[T; PART]>().write_unaligned(part);
        }
        for at in whole..n {
            *to.add(at) = *from.add(at);
        }
    }
}

/// Copies a run of elements, `stride` apart, to a register, or from a register if `out`.
///
/// # Safety
/// - The register has room for `n` elements.
/// - The window has `n` elements from `memory` on, `stride` apart.
#[inline(always)]
unsafe fn copy_run<T: Copy>(memory: *mut T, stride: isize, register: *mut T, n: usize, out: bool) {
    // SAFETY: `i < n`, so element `i` is in the register and, at `i * stride`, in the window, which are different
    // memory.
    unsafe {
        match (out, stride) {
            (false, 1) => copy_row(memory, register, n),
            (true, 1) => copy_row(register, memory, n),
            (false, 0) => std::slice::from_raw_parts_mut(register, n).fill(*memory),
            (false, _) => {
                for i in 0..n {
                    *register.add(i) = *memory.offset(i as isize * stride);
                }
            }
            (true, _) => {
                for i in 0..n {
                    *memory.offset(i as isize * stride) = *register.add(i);
                }
            }
        }
    }
}

/// Element types in memory. Booleans are bytes, because bytes of other origin may be neither 0 nor 1.
trait Element: Copy + Default {}
impl Element for u8 {}
impl Element for i32 {}
impl Element for u32 {}
impl Element for i64 {}
impl Element for f32 {}
impl Element for f64 {}

/// Loads `n < LANES` elements; the remaining lanes are 0.
///
/// # Safety
/// `from` has `n` elements, and `n < LANES`.
#[inline(always)]
unsafe fn load<T: Element>(from: *const T, n: usize) -> [T; LANES] {
    // SAFETY: `from` has `n` elements, which fit in the lanes since `n < LANES`.
    unsafe {
        let mut lanes = [T::default(); LANES];
        match n {
            1 => lanes[0] = from.read(),
            _ => std::ptr::copy_nonoverlapping(from, lanes.as_mut_ptr(), n),
        }
        lanes
    }
}

/// Stores `n < LANES` elements. A single element, the most frequent case, is stored directly.
///
/// # Safety
/// `to` has room for `n` elements, and `n < LANES`.
#[inline(always)]
unsafe fn store<T: Element>(lanes: &[T; LANES], to: *mut T, n: usize) {
    // SAFETY: `to` has room for `n` elements, and there are `n` lanes since `n < LANES`.
    unsafe {
        match n {
            1 => to.write(lanes[0]),
            _ => std::ptr::copy_nonoverlapping(lanes.as_ptr(), to, n),
        }
    }
}

/// An instruction's operand: the address of its first lanes, and whether all elements of a tile use these lanes.
#[derive(Clone, Copy)]
struct Lanes {
    first: *const u8,
    splat: bool,
}

impl Lanes {
    /// Returns the distance in bytes from one vector of elements to the next.
    #[inline(always)]
    fn step<T>(self) -> usize {
        if self.splat { 0 } else { std::mem::size_of::<[T; LANES]>() }
    }
}

/// Applies `f` to each lane. Lanes are read before any is written, so the result may replace an operand.
macro_rules! map {
    ($n:expr, $to:expr => $R:ty, [$($arg:ident: $T:ty = $from:expr),+], $f:expr) => {{
        let (mut to, mut left) = ($to.cast::<$R>(), $n);
        $(let mut $arg = ($from.first, $from.step::<$T>());)+
        // Whole vectors: the loop body has no branches.
        while left >= LANES {
            $(let $arg = {
                let lanes = $arg.0.cast::<[$T; LANES]>().read_unaligned();
                $arg.0 = $arg.0.add($arg.1);
                lanes
            };)+
            let mut result = [MaybeUninit::<$R>::uninit(); LANES];
            for lane in 0..LANES {
                result[lane].write($f($($arg[lane]),+));
            }
            // The loop above has written every lane.
            let result = std::mem::transmute::<[MaybeUninit<$R>; LANES], [$R; LANES]>(result);
            to.cast::<[$R; LANES]>().write_unaligned(result);
            to = to.add(LANES);
            left -= LANES;
        }
        if left > 0 {
            $(let $arg: [$T; LANES] = load($arg.0.cast(), left);)+
            let mut result = [<$R>::default(); LANES];
            for lane in 0..LANES {
                result[lane] = $f($($arg[lane]),+);
            }
            store(&result, to, left);
        }
    }};
}

#[inline(always)]
fn larger(a: f32, b: f32) -> f32 {
    let larger = if b > a { b } else { a };
    if b.is_nan() && !a.is_nan() { b } else { larger }
}

#[inline(always)]
fn smaller(a: f32, b: f32) -> f32 {
    let smaller = if b < a { b } else { a };
    if b.is_nan() && !a.is_nan() { b } else { smaller }
}

/// Executes one instruction on a tile.
///
/// # Safety
/// - `scratch` has `program.scratch` bytes.
/// - The windows of the instruction's operands in memory have elements `at..at + n`.
/// - Nobody writes these elements, and nobody else uses the elements that are written.
/// - `n` is at most [`TILE`].
#[inline(always)]
unsafe fn step(launch: &Launch<'_>, inst: &Inst, scratch: *mut u8, at: usize, n: usize) {
    let size = size_of(inst.ty);
    // SAFETY: `place` returns addresses with `n` elements of the types' sizes, in a register or from element `at` on in
    // memory, or with a vector of lanes for a splat, which `Lanes::step` does not advance.
    unsafe {
        let first = if matches!(inst.op, OpCode::Select) { 1 } else { size };
        let operand = |number: usize, size: usize| {
            let splat = matches!(inst.args[number], ValuePlace::Splat(_));
            Lanes { first: place(launch, inst.args[number], size, scratch, at).cast_const(), splat }
        };
        let (a, b, c) = (operand(0, first), operand(1, size), operand(2, size));
        let result = match inst.op {
            OpCode::Cast(to) => size_of(to),
            OpCode::Bin(Bin::Eq | Bin::Ne | Bin::Lt | Bin::Le | Bin::And | Bin::Or)
            | OpCode::Fun(Fun::IsNan) => 1,
            _ => size,
        };
        let to = place(launch, inst.to, result, scratch, at);

        macro_rules! un {
            ($T:ty => $R:ty, $f:expr) => {
                map!(n, to => $R, [x: $T = a], $f)
            };
        }
        macro_rules! bin {
            ($T:ty => $R:ty, $f:expr) => {
                map!(n, to => $R, [x: $T = a, y: $T = b], $f)
            };
        }
        // Comparisons, for all types.
        macro_rules! compare {
            ($f:expr) => {
                match inst.ty {
                    Ty::F32 => bin!(f32 => u8, |x: f32, y: f32| u8::from($f(&x, &y))),
                    Ty::F64 => bin!(f64 => u8, |x: f64, y: f64| u8::from($f(&x, &y))),
                    Ty::I64 => bin!(i64 => u8, |x: i64, y: i64| u8::from($f(&x, &y))),
                    Ty::I32 | Ty::U32 => bin!(i32 => u8, |x: i32, y: i32| u8::from($f(&x, &y))),
                    Ty::Bool => bin!(u8 => u8, |x: u8, y: u8| u8::from($f(&x, &y))),
                }
            };
        }
        macro_rules! arithmetic {
            ($float:tt, $whole:ident) => {
                match inst.ty {
                    Ty::F32 => bin!(f32 => f32, |x: f32, y: f32| x $float y),
                    Ty::F64 => bin!(f64 => f64, |x: f64, y: f64| x $float y),
                    Ty::I64 => bin!(i64 => i64, |x: i64, y: i64| x.$whole(y)),
                    _ => bin!(i32 => i32, |x: i32, y: i32| x.$whole(y)),
                }
            };
        }
        macro_rules! float {
            ($f:ident) => {
                match inst.ty {
                    Ty::F64 => un!(f64 => f64, |x: f64| x.$f()),
                    _ => un!(f32 => f32, |x: f32| x.$f()),
                }
            };
        }
        macro_rules! bits {
            ($op:tt) => {
                match inst.ty {
                    Ty::I64 => bin!(i64 => i64, |x: i64, y: i64| x $op y),
                    Ty::Bool => bin!(u8 => u8, |x: u8, y: u8| x $op y),
                    _ => bin!(i32 => i32, |x: i32, y: i32| x $op y),
                }
            };
        }
        match inst.op {
            OpCode::Copy => match size {
                1 => un!(u8 => u8, |x: u8| x),
                4 => un!(i32 => i32, |x: i32| x),
                _ => un!(i64 => i64, |x: i64| x),
            },
            OpCode::Un(Un::Neg) => match inst.ty {
                Ty::F32 => un!(f32 => f32, |x: f32| -x),
                Ty::F64 => un!(f64 => f64, |x: f64| -x),
                Ty::I64 => un!(i64 => i64, |x: i64| x.wrapping_neg()),
                _ => un!(i32 => i32, |x: i32| x.wrapping_neg()),
            },
            OpCode::Un(Un::Abs) => match inst.ty {
                Ty::F32 => un!(f32 => f32, |x: f32| x.abs()),
                Ty::F64 => un!(f64 => f64, |x: f64| x.abs()),
                Ty::I64 => un!(i64 => i64, |x: i64| x.wrapping_abs()),
                _ => un!(i32 => i32, |x: i32| x.wrapping_abs()),
            },
            OpCode::Un(Un::Not) => un!(u8 => u8, |x: u8| u8::from(x == 0)),
            OpCode::Un(Un::BitNot) => match inst.ty {
                Ty::I64 => un!(i64 => i64, |x: i64| !x),
                Ty::Bool => un!(u8 => u8, |x: u8| u8::from(x == 0)),
                _ => un!(i32 => i32, |x: i32| !x),
            },
            OpCode::Un(Un::Sqrt) => float!(sqrt),
            OpCode::Un(Un::Floor) => float!(floor),
            OpCode::Un(Un::Ceil) => float!(ceil),
            OpCode::Un(Un::Round) => float!(round_ties_even),
            OpCode::Un(Un::Trunc) => float!(trunc),
            OpCode::Un(Un::Bits | Un::FromBits) => un!(u32 => u32, |x: u32| x),
            OpCode::Bin(Bin::Add) => arithmetic!(+, wrapping_add),
            OpCode::Bin(Bin::Sub) => arithmetic!(-, wrapping_sub),
            OpCode::Bin(Bin::Mul) => arithmetic!(*, wrapping_mul),
            OpCode::Bin(Bin::Div) => match inst.ty {
                Ty::F64 => bin!(f64 => f64, |x: f64, y: f64| x / y),
                _ => bin!(f32 => f32, |x: f32, y: f32| x / y),
            },
            OpCode::Bin(Bin::Min) => match inst.ty {
                Ty::F32 => bin!(f32 => f32, |x: f32, y: f32| if y < x { y } else { x }),
                Ty::F64 => bin!(f64 => f64, |x: f64, y: f64| if y < x { y } else { x }),
                Ty::I64 => bin!(i64 => i64, |x: i64, y: i64| x.min(y)),
                _ => bin!(i32 => i32, |x: i32, y: i32| x.min(y)),
            },
            OpCode::Bin(Bin::Max) => match inst.ty {
                Ty::F32 => bin!(f32 => f32, |x: f32, y: f32| if y > x { y } else { x }),
                Ty::F64 => bin!(f64 => f64, |x: f64, y: f64| if y > x { y } else { x }),
                Ty::I64 => bin!(i64 => i64, |x: i64, y: i64| x.max(y)),
                _ => bin!(i32 => i32, |x: i32, y: i32| x.max(y)),
            },
            OpCode::Bin(Bin::Eq) => compare!(PartialEq::eq),
            OpCode::Bin(Bin::Ne) => compare!(PartialEq::ne),
            OpCode::Bin(Bin::Lt) => compare!(PartialOrd::lt),
            OpCode::Bin(Bin::Le) => compare!(PartialOrd::le),
            OpCode::Bin(Bin::And) => bin!(u8 => u8, |x: u8, y: u8| u8::from(x != 0) & u8::from(y != 0)),
            OpCode::Bin(Bin::Or) => bin!(u8 => u8, |x: u8, y: u8| u8::from(x != 0) | u8::from(y != 0)),
            OpCode::Bin(Bin::BitAnd) => bits!(&),
            OpCode::Bin(Bin::BitOr) => bits!(|),
            OpCode::Bin(Bin::BitXor) => bits!(^),
            OpCode::Bin(Bin::Shr) => bin!(u32 => u32, |x: u32, y: u32| x.wrapping_shr(y)),
            OpCode::Bin(Bin::Rem | Bin::Shl) => {}
            OpCode::MulAdd => {
                map!(n, to => f32, [x: f32 = a, y: f32 = b, z: f32 = c], |x: f32, y: f32, z: f32| x * y + z)
            }
            OpCode::Select => match size {
                1 => {
                    map!(n, to => u8, [s: u8 = a, x: u8 = b, y: u8 = c], |s, x, y| if s != 0 { x } else { y })
                }
                4 => {
                    map!(n, to => i32, [s: u8 = a, x: i32 = b, y: i32 = c], |s, x, y| if s != 0 { x } else { y })
                }
                _ => {
                    map!(n, to => i64, [s: u8 = a, x: i64 = b, y: i64 = c], |s, x, y| if s != 0 { x } else { y })
                }
            },
            OpCode::Cast(as_) => match (inst.ty, as_) {
                (Ty::Bool, Ty::F32) => un!(u8 => f32, |x: u8| f32::from(x)),
                (Ty::Bool, Ty::F64) => un!(u8 => f64, |x: u8| f64::from(x)),
                (Ty::Bool, Ty::I64) => un!(u8 => i64, |x: u8| i64::from(x)),
                (Ty::Bool, _) => un!(u8 => i32, |x: u8| i32::from(x)),
                (Ty::F32, Ty::F64) => un!(f32 => f64, |x: f32| f64::from(x)),
                (Ty::F32, Ty::I64) => un!(f32 => i64, f32::to_i64),
                (Ty::F32, _) => un!(f32 => i32, f32::to_i32),
                (Ty::F64, Ty::F32) => un!(f64 => f32, |x: f64| x as f32),
                (Ty::F64, Ty::I64) => un!(f64 => i64, f64::to_i64),
                (Ty::F64, _) => un!(f64 => i32, f64::to_i32),
                (Ty::I64, Ty::F32) => un!(i64 => f32, |x: i64| x as f32),
                (Ty::I64, Ty::F64) => un!(i64 => f64, |x: i64| x as f64),
                (Ty::I64, _) => un!(i64 => i32, |x: i64| x as i32),
                (_, Ty::F32) => un!(i32 => f32, |x: i32| x as f32),
                (_, Ty::F64) => un!(i32 => f64, |x: i32| f64::from(x)),
                (_, Ty::I64) => un!(i32 => i64, |x: i32| i64::from(x)),
                (_, _) => {}
            },
            OpCode::Fun(fun) => match fun {
                Fun::Exp => un!(f32 => f32, math::exp),
                Fun::Exp2 => un!(f32 => f32, math::exp2),
                Fun::Expm1 => un!(f32 => f32, math::expm1),
                Fun::Log => un!(f32 => f32, math::log),
                Fun::Log2 => un!(f32 => f32, math::log2),
                Fun::Log10 => un!(f32 => f32, math::log10),
                Fun::Log1p => un!(f32 => f32, math::log1p),
                Fun::Tanh => un!(f32 => f32, math::tanh),
                Fun::Erf => un!(f32 => f32, math::erf),
                Fun::Erfc => un!(f32 => f32, math::erfc),
                Fun::Sin if is_reduced(a, n) => un!(f32 => f32, trig::sin),
                Fun::Sin => un!(f32 => f32, trig::sin_any),
                Fun::Cos if is_reduced(a, n) => un!(f32 => f32, trig::cos),
                Fun::Cos => un!(f32 => f32, trig::cos_any),
                Fun::Tan if is_reduced(a, n) => un!(f32 => f32, trig::tan),
                Fun::Tan => un!(f32 => f32, trig::tan_any),
                Fun::Asin => un!(f32 => f32, trig::asin),
                Fun::Acos => un!(f32 => f32, trig::acos),
                Fun::Atan => un!(f32 => f32, trig::atan),
                Fun::Atan2 => bin!(f32 => f32, trig::atan2),
                Fun::Sinh => un!(f32 => f32, trig::sinh),
                Fun::Cosh => un!(f32 => f32, trig::cosh),
                Fun::Asinh => un!(f32 => f32, trig::asinh),
                Fun::Acosh => un!(f32 => f32, trig::acosh),
                Fun::Atanh => un!(f32 => f32, trig::atanh),
                Fun::Fmod if all(a, b, n, trig::divides) => bin!(f32 => f32, trig::fmod),
                Fun::Fmod => bin!(f32 => f32, trig::fmod_any),
                Fun::Pow => powers(a, b, to, n),
                Fun::IsNan => un!(f32 => u8, |x: f32| u8::from(x.is_nan())),
                Fun::Larger => bin!(f32 => f32, larger),
                Fun::Smaller => bin!(f32 => f32, smaller),
            },
        }
    }
}

/// Whether a predicate is true for all elements of two operands.
///
/// # Safety
/// `a` and `b` have `n` elements, or a vector of lanes if they are splats.
#[inline(always)]
unsafe fn all(a: Lanes, b: Lanes, n: usize, predicate: impl Fn(f32, f32) -> bool) -> bool {
    let (a, b) = ((a.first.cast::<f32>(), !a.splat), (b.first.cast::<f32>(), !b.splat));
    // SAFETY: `i < n`, and a splat has a first lane.
    let element = |(first, advances): (*const f32, bool), i: usize| unsafe {
        first.add(if advances { i } else { 0 }).read_unaligned()
    };
    (0..n).fold(true, |all, i| all & predicate(element(a, i), element(b, i)))
}

/// Whether all elements have a magnitude for which the circular functions reduce their argument.
///
/// # Safety
/// `a` has `n` elements, or a vector of lanes if it is a splat.
#[inline(always)]
unsafe fn is_reduced(a: Lanes, n: usize) -> bool {
    // SAFETY: the requirements are the same.
    unsafe { all(a, a, n, |x, _| x.abs() < trig::REDUCED) }
}

/// Returns a power. As in PyTorch, frequent exponents are computed by products and roots.
#[inline(always)]
fn power(x: f32, y: f32) -> f32 {
    let general = math::pow(x, y);
    let root = if y == 0.5 { x.sqrt() } else { general };
    let root = if y == -0.5 { 1.0 / x.sqrt() } else { root };
    let inverse = if y == -1.0 { 1.0 / x } else { root };
    let inverse = if y == -2.0 { 1.0 / (x * x) } else { inverse };
    let square = if y == 2.0 { x * x } else { inverse };
    if y == 3.0 { x * x * x } else { square }
}

/// Applies [`power`] to each element, with a shorter loop for a frequent exponent that all elements share.
///
/// # Safety
/// `to` has room for `n` elements, and `a` and `b` have `n` elements, or a vector of lanes if they are splats.
#[inline(always)]
unsafe fn powers(a: Lanes, b: Lanes, to: *mut u8, n: usize) {
    // SAFETY: operands and result have `n` elements, and a splat has a vector of lanes, whose first is the exponent.
    unsafe {
        let exponent = if b.splat { b.first.cast::<f32>().read() } else { f32::NAN };
        match exponent {
            0.5 => map!(n, to => f32, [x: f32 = a], |x: f32| x.sqrt()),
            2.0 => map!(n, to => f32, [x: f32 = a], |x: f32| x * x),
            3.0 => map!(n, to => f32, [x: f32 = a], |x: f32| x * x * x),
            -0.5 => map!(n, to => f32, [x: f32 = a], |x: f32| 1.0 / x.sqrt()),
            -1.0 => map!(n, to => f32, [x: f32 = a], |x: f32| 1.0 / x),
            -2.0 => map!(n, to => f32, [x: f32 = a], |x: f32| 1.0 / (x * x)),
            _ => map!(n, to => f32, [x: f32 = a, y: f32 = b], power),
        }
    }
}
