//! One operator call as the shim hands it over: borrowed, flat, valid for the call only.

use std::ffi::c_void;

use smallvec::SmallVec;

use crate::ids::{Name, OpId, StorageId};
use crate::tensor_meta::{Dtype, TensorMeta};

/// An operator call. Tensor arguments take their entries from `inputs` in order; `None` among tensors of a
/// list is an entry with [`Place::Absent`].
#[derive(Debug)]
pub struct Call<'a> {
    /// Which operator.
    pub op: OpId,
    /// Arguments in schema order.
    pub args: SmallVec<[Arg<'a>; 12]>,
    /// All tensors, flat.
    pub inputs: SmallVec<[Input<'a>; 6]>,
    /// The device that it runs on, and on which its outputs are.
    pub device: u8,
    /// Whether grad mode is on.
    pub grad_enabled: bool,
    /// The default dtype, which some outputs have.
    pub default_dtype: Dtype,
    /// Whether all numbers are ones that PyTorch takes in any call of these dtypes; see [`OpInfo::takes`].
    ///
    /// [`OpInfo::takes`]: crate::ops::OpInfo::takes
    pub numbers_fit: bool,
}

impl Call<'_> {
    /// A call without arguments, to be filled where it stands: it is large to move.
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

/// One argument.
#[derive(Clone, Debug, PartialEq)]
pub enum Arg<'a> {
    /// `None`, for any optional argument.
    None,
    /// The next of the call's inputs.
    Tensor,
    /// The next `n` of the call's inputs.
    Tensors(u32),
    /// An int, a dtype, a layout or a memory format.
    Int(i64),
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
    /// 0 for this device, 1 for the CPU, 2 for meta.
    Device(i64),
    /// A `torch.Generator`, as the shim's pointer.
    Generator(*mut c_void),
}

/// Where an input's elements are.
#[derive(Clone, Copy, Debug)]
pub enum Place<'a> {
    /// No tensor.
    Absent,
    /// On one of Tandem's storages.
    Storage {
        /// Which.
        id: StorageId,
        /// What the trace calls it.
        name: Name,
    },
    /// In host memory that the program owns, as the shim's pointer to a storage.
    Host(*mut c_void),
    /// In a host buffer of Tandem's, as the shim's pointer to a storage.
    Buffer(*mut c_void),
    /// A single element, by value.
    Inline(&'a InlineValue),
}

/// The bytes of one element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C, align(16))]
pub struct InlineValue(pub [u8; 16]);

/// A window on a storage.
#[derive(Clone, Debug)]
pub struct Input<'a> {
    /// The storage.
    pub place: Place<'a>,
    /// Sizes in elements.
    pub sizes: &'a [i64],
    /// Strides in elements.
    pub strides: &'a [i64],
    /// Offset in elements.
    pub offset: i64,
    /// Element type.
    pub dtype: Dtype,
    /// See [`crate::tensor_meta::flags`].
    pub flags: u16,
}

impl Input<'_> {
    /// An absent tensor.
    pub const ABSENT: Input<'static> =
        Input { place: Place::Absent, sizes: &[], strides: &[], offset: 0, dtype: Dtype(0), flags: 0 };

    /// Owned metadata.
    pub fn meta(&self) -> TensorMeta {
        TensorMeta::new(self.sizes, self.strides, self.dtype, self.flags)
    }
}
