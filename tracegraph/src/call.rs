//! An operator call in the form in which the shim passes it: borrowed, flat, and valid only during the call.

use std::ffi::c_void;

use smallvec::SmallVec;

use crate::ids::{Name, OpId, StorageId};
use crate::tensor_meta::{Dtype, TensorMeta};

/// An operator call. Tensor arguments take their entries from `inputs` in order. A `None` in a list of tensors is
/// an entry with [`Place::Absent`].
#[derive(Debug)]
pub struct Call<'a> {
    /// Operator of the call.
    pub op: OpId,
    /// Arguments in schema order.
    pub args: SmallVec<[Arg<'a>; 12]>,
    /// Tensors of all arguments, flat.
    pub inputs: SmallVec<[Input<'a>; 6]>,
    /// Device of the op and of its outputs.
    pub device: u8,
    /// Whether grad mode is on.
    pub grad_enabled: bool,
    /// Default dtype, which some outputs have.
    pub default_dtype: Dtype,
    /// Whether PyTorch accepts the numbers of the call in any call with the same dtypes; see [`OpInfo::takes`].
    ///
    /// [`OpInfo::takes`]: crate::ops::OpInfo::takes
    pub numbers_fit: bool,
}

impl Call<'_> {
    /// A call without arguments, to be filled in place, since a call is expensive to move.
    pub fn blank(op: OpId) -> Self {
        Call {
            op,
            args: SmallVec::new(),
            inputs: SmallVec::new(),
            device: 0,
            grad_enabled: false,
            default_dtype: Dtype::FLOAT32,
            numbers_fit: true,
        }
    }
}

/// One argument of a call.
#[derive(Clone, Debug, PartialEq)]
pub enum Arg<'a> {
    /// `None` for an optional argument.
    None,
    /// The next input of the call.
    Tensor,
    /// The next `n` inputs of the call.
    Tensors(u32),
    /// An int, a dtype, a layout or a memory format.
    Int(i64),
    /// An int beyond 2**63 - 1.
    Unsigned(u64),
    /// A float.
    Float(f64),
    /// A bool.
    Bool(bool),
    /// A complex number: real and imaginary part.
    Complex(f64, f64),
    /// A string.
    Str(&'a str),
    /// A list of ints.
    Ints(&'a [i64]),
    /// A list of floats.
    Floats(&'a [f64]),
    /// A list of bools, one byte each.
    Bools(&'a [u8]),
    /// A list of numbers of mixed types.
    Scalars(Box<[Arg<'a>]>),
    /// A device: 0 for Tandem's device, 1 for the CPU, 2 for meta.
    Device(i64),
    /// A `torch.Generator`, as a pointer of the shim.
    Generator(*mut c_void),
}

/// The place of an input's elements.
#[derive(Clone, Copy, Debug)]
pub enum Place<'a> {
    /// No tensor.
    Absent,
    /// One of Tandem's storages.
    Storage {
        /// Id of the storage.
        id: StorageId,
        /// Name of the storage in traces.
        name: Name,
    },
    /// Host memory that the program owns, as the shim's pointer to a storage.
    Host(*mut c_void),
    /// A host buffer that Tandem owns, as the shim's pointer to a storage.
    Buffer(*mut c_void),
    /// A single element, by value.
    Inline(&'a InlineValue),
}

/// The bytes of one element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C, align(16))]
pub struct InlineValue(pub [u8; 16]);

/// A tensor that is passed to a call: a window on a storage.
#[derive(Clone, Debug)]
pub struct Input<'a> {
    /// Place of the elements.
    pub place: Place<'a>,
    /// Sizes in elements.
    pub sizes: &'a [i64],
    /// Strides in elements.
    pub strides: &'a [i64],
    /// Offset in elements.
    pub offset: i64,
    /// Element type.
    pub dtype: Dtype,
    /// Bits of [`crate::tensor_meta::flags`].
    pub flags: u16,
}

impl Input<'_> {
    /// An absent tensor.
    pub const ABSENT: Input<'static> =
        Input { place: Place::Absent, sizes: &[], strides: &[], offset: 0, dtype: Dtype(0), flags: 0 };

    /// A copy of the metadata.
    pub fn meta(&self) -> TensorMeta {
        TensorMeta::new(self.sizes, self.strides, self.dtype, self.flags)
    }
}
