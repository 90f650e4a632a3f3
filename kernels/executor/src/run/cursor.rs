//! Conversion of an op's feeds to an operator call.

use tandem_tracegraph::call::{Arg, Call, Input, Place};
use tandem_tracegraph::ids::{Name, StorageId};
use tandem_tracegraph::node::{ArgSpec, Attr, InputSpec, Number, Variant};
use tandem_tracegraph::tensor_meta::{Dtype, TensorMeta};

use crate::ir::Ty;
use crate::ops::casts::ToInteger;
use crate::run::block_run::{BlockRun, HostFeed, OpDeclaration};

/// Position in each stream of a [`BlockRun`].
#[derive(Clone, Copy, Debug, Default)]
pub struct Cursor {
    /// Index into `storages`.
    pub storages: usize,
    /// Index into `offsets`.
    pub offsets: usize,
    /// Index into `numbers`.
    pub numbers: usize,
    /// Index into `hosts`.
    pub hosts: usize,
    /// Index into `generators`.
    pub generators: usize,
    /// Index into `issuers`.
    pub ops: usize,
}

fn take<'r, T>(stream: &'r [T], at: &mut usize) -> &'r T {
    *at += 1;
    &stream[*at - 1]
}

/// Number of entries that an argument takes from the stream of numbers.
pub fn numbers_of(spec: &ArgSpec) -> usize {
    let width = |n: &Number| if *n == Number::Complex { 2 } else { 1 };
    match spec {
        ArgSpec::Value(number) => width(number),
        ArgSpec::Values(list) => list.iter().map(width).sum(),
        ArgSpec::Floats(n) | ArgSpec::Ints(n) => *n as usize,
        _ => 0,
    }
}

impl Cursor {
    /// This position relative to an earlier one, `base`.
    pub fn since(&self, base: &Cursor) -> Cursor {
        Cursor {
            storages: self.storages - base.storages,
            offsets: self.offsets - base.offsets,
            numbers: self.numbers - base.numbers,
            hosts: self.hosts - base.hosts,
            generators: self.generators - base.generators,
            ops: self.ops - base.ops,
        }
    }

    /// The absolute position of a position relative to `base`. Inverse of [`Cursor::since`].
    pub fn absolute(&self, base: &Cursor) -> Cursor {
        Cursor {
            storages: self.storages + base.storages,
            offsets: self.offsets + base.offsets,
            numbers: self.numbers + base.numbers,
            hosts: self.hosts + base.hosts,
            generators: self.generators + base.generators,
            ops: self.ops + base.ops,
        }
    }

    /// Advances past an op.
    pub fn pass(&mut self, declared: &OpDeclaration, variant: &Variant) {
        for spec in &declared.key.inputs {
            match spec {
                InputSpec::Storage => {
                    self.storages += 1;
                    self.offsets += 1;
                }
                InputSpec::Host => self.hosts += 1,
                InputSpec::Absent => {}
            }
        }
        for spec in &declared.key.args {
            self.numbers += numbers_of(spec);
            self.generators += usize::from(matches!(spec, ArgSpec::Generator));
        }
        self.storages += variant.outputs.new_storages.len();
        self.ops += 1;
    }

    /// The issuer of the next op, or 0 if it is not known. Advances past the op.
    pub fn issuer(&mut self, run: &BlockRun) -> u64 {
        self.ops += 1;
        run.issuers.get(self.ops - 1).copied().unwrap_or(0)
    }

    /// The next storage of the stream.
    pub fn storage(&mut self, run: &BlockRun) -> StorageId {
        *take(&run.storages, &mut self.storages)
    }

    fn input<'r>(&mut self, spec: InputSpec, meta: &'r TensorMeta, run: &'r BlockRun) -> Input<'r> {
        let (place, offset) = match spec {
            InputSpec::Host => match take(&run.hosts, &mut self.hosts) {
                HostFeed::Inline(value) => (Place::Inline(value), 0),
                HostFeed::Buffer(buffer) => (Place::Buffer(buffer.as_ptr()), 0),
            },
            InputSpec::Storage | InputSpec::Absent => {
                let id = self.storage(run);
                (Place::Storage { id, name: Name::STATE }, *take(&run.offsets, &mut self.offsets))
            }
        };
        Input {
            place,
            sizes: meta.sizes(),
            strides: meta.strides(),
            offset,
            dtype: meta.dtype,
            flags: meta.flags,
        }
    }

    fn number<'r>(&mut self, number: Number, run: &'r BlockRun) -> Arg<'r> {
        let mut next = || *take(&run.numbers, &mut self.numbers);
        match number {
            Number::Int => Arg::Int(next() as i64),
            Number::Unsigned => Arg::Unsigned(next()),
            Number::Float => Arg::Float(f64::from_bits(next())),
            Number::Bool => Arg::Bool(next() != 0),
            Number::Complex => Arg::Complex(f64::from_bits(next()), f64::from_bits(next())),
        }
    }

    fn arg<'r>(&mut self, spec: &'r ArgSpec, sizes: &mut Sizes<'r>, run: &'r BlockRun) -> Arg<'r> {
        match spec {
            // Calls of nodes that stand for attributes of any value run at once, and are not part of a run.
            ArgSpec::None | ArgSpec::Any => Arg::None,
            ArgSpec::Tensor => Arg::Tensor,
            ArgSpec::Tensors(n) => Arg::Tensors(*n),
            ArgSpec::Attr(Attr::Int(i)) => Arg::Int(*i),
            ArgSpec::Attr(Attr::Bool(b)) => Arg::Bool(*b),
            ArgSpec::Attr(Attr::Str(s)) => Arg::Str(s),
            ArgSpec::Attr(Attr::Ints(v)) => Arg::Ints(v),
            ArgSpec::Attr(Attr::Bools(v)) => Arg::Bools(v),
            ArgSpec::Size => Arg::Int(sizes.take(1)[0]),
            ArgSpec::Sizes => {
                let len = sizes.take(1)[0];
                Arg::Ints(sizes.take(len as usize))
            }
            ArgSpec::Value(n) => {
                sizes.skip_number(if *n == Number::Complex { 2 } else { 1 });
                self.number(*n, run)
            }
            ArgSpec::Floats(n) => {
                sizes.skip_number(*n as usize);
                let from = self.numbers;
                self.numbers += *n as usize;
                Arg::Floats(bytemuck::cast_slice(&run.numbers[from..self.numbers]))
            }
            ArgSpec::Ints(n) => {
                let from = self.numbers;
                self.numbers += *n as usize;
                Arg::Ints(bytemuck::cast_slice(&run.numbers[from..self.numbers]))
            }
            ArgSpec::Values(n) => Arg::Scalars(n.iter().map(|n| self.number(*n, run)).collect()),
            ArgSpec::Device(d) => Arg::Device(*d),
            ArgSpec::Generator => Arg::Generator(take(&run.generators, &mut self.generators).as_ptr()),
        }
    }

    /// Fills in the call of an op under a variant. Storages are given by id.
    pub fn fill<'r>(
        &mut self,
        call: &mut Call<'r>,
        declared: &'r OpDeclaration,
        variant: &'r Variant,
        run: &'r BlockRun,
    ) {
        let mut metas = variant.metas.iter();
        for spec in &declared.key.inputs {
            call.inputs.push(match spec {
                InputSpec::Absent => Input::ABSENT,
                InputSpec::Storage | InputSpec::Host => match metas.next() {
                    Some(meta) => self.input(*spec, meta, run),
                    None => Input::ABSENT,
                },
            });
        }
        let mut sizes = Sizes { rest: &variant.numbers, sized_by_number: declared.sized_by_number };
        for spec in &declared.key.args {
            call.args.push(self.arg(spec, &mut sizes, run));
        }
    }
}

/// The part of a variant's numbers that follows: sizes and, for ops whose numbers decide output shapes, copies of the
/// fed numbers.
struct Sizes<'r> {
    rest: &'r [i64],
    sized_by_number: bool,
}

impl<'r> Sizes<'r> {
    fn take(&mut self, n: usize) -> &'r [i64] {
        let (taken, rest) = self.rest.split_at(n);
        self.rest = rest;
        taken
    }

    fn skip_number(&mut self, n: usize) {
        if self.sized_by_number {
            self.take(n);
        }
    }
}

/// A fed number.
#[derive(Clone, Copy, Debug)]
pub enum Scalar {
    /// An int or a bool.
    Int(i64),
    /// A float.
    Float(f64),
}

impl Scalar {
    /// Converts the number to a type, as the bits of an `i64` or an `f64`.
    pub fn bits(self, ty: Ty) -> u64 {
        match (ty, self) {
            (Ty::F32 | Ty::F64, Scalar::Float(f)) => f.to_bits(),
            (Ty::F32 | Ty::F64, Scalar::Int(i)) => (i as f64).to_bits(),
            (Ty::Bool, Scalar::Float(f)) => u64::from(f != 0.0),
            (Ty::Bool, Scalar::Int(i)) => u64::from(i != 0),
            (Ty::I64, Scalar::Float(f)) => f.to_i64() as u64,
            (_, Scalar::Float(f)) => i64::from(f.to_i32()) as u64,
            (_, Scalar::Int(i)) => i as u64,
        }
    }

    /// The element of a fed zero-dimensional host tensor.
    pub fn of_feed(feed: &HostFeed, dtype: Dtype) -> Scalar {
        match feed {
            HostFeed::Inline(value) => Scalar::of_bytes(&value.0, dtype),
            HostFeed::Buffer(_) => Scalar::Int(0),
        }
    }

    /// The element of a zero-dimensional host tensor, from its bytes.
    pub fn of_bytes(bytes: &[u8], dtype: Dtype) -> Scalar {
        let mut word = [0; 8];
        let size = dtype.size().min(8);
        word[..size].copy_from_slice(&bytes[..size]);
        let [a, b, c, d, ..] = word;
        match dtype {
            Dtype::FLOAT32 => Scalar::Float(f64::from(f32::from_ne_bytes([a, b, c, d]))),
            Dtype::FLOAT64 => Scalar::Float(f64::from_ne_bytes(word)),
            Dtype::INT64 => Scalar::Int(i64::from_ne_bytes(word)),
            Dtype::INT32 => Scalar::Int(i64::from(i32::from_ne_bytes([a, b, c, d]))),
            Dtype::INT16 => Scalar::Int(i64::from(i16::from_ne_bytes([a, b]))),
            Dtype::INT8 => Scalar::Int(i64::from(a as i8)),
            _ => Scalar::Int(i64::from(a)),
        }
    }
}

/// The value of a number argument.
pub fn of_arg(arg: &Arg<'_>) -> Scalar {
    match arg {
        Arg::Int(i) => Scalar::Int(*i),
        Arg::Float(f) => Scalar::Float(*f),
        Arg::Bool(b) => Scalar::Int(i64::from(*b)),
        _ => Scalar::Int(0),
    }
}
