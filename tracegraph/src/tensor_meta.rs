//! Tensor metadata: the properties of a window except its storage and offset.

use smallvec::SmallVec;

/// A dtype, as the number of PyTorch's `ScalarType`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Dtype(pub u8);

impl Dtype {
    /// `torch.uint8`.
    pub const UINT8: Dtype = Dtype(0);
    /// `torch.int8`.
    pub const INT8: Dtype = Dtype(1);
    /// `torch.int16`.
    pub const INT16: Dtype = Dtype(2);
    /// `torch.int32`.
    pub const INT32: Dtype = Dtype(3);
    /// `torch.int64`.
    pub const INT64: Dtype = Dtype(4);
    /// `torch.float16`.
    pub const FLOAT16: Dtype = Dtype(5);
    /// `torch.float32`, PyTorch's default dtype.
    pub const FLOAT32: Dtype = Dtype(6);
    /// `torch.float64`.
    pub const FLOAT64: Dtype = Dtype(7);
    /// `torch.bool`.
    pub const BOOL: Dtype = Dtype(11);
    /// `torch.bfloat16`.
    pub const BFLOAT16: Dtype = Dtype(15);

    /// Size of an element in bytes.
    pub fn size(self) -> usize {
        match self.0 {
            0 | 1 | 11 | 12 | 13 | 23..=26 | 44 => 1, // bytes, bool, quantized bytes, float8
            2 | 5 | 15 | 27 => 2,                     // short, half, bfloat16, uint16
            3 | 6 | 8 | 14 | 28 => 4,                 // int, float, complex half, qint32, uint32
            4 | 7 | 9 | 29 => 8,                      // long, double, complex float, uint64
            10 => 16,                                 // complex double
            _ => 1,
        }
    }

    /// Whether elements are complex numbers.
    pub fn is_complex(self) -> bool {
        matches!(self.0, 8..=10)
    }

    /// Whether the dtype is a floating-point type that CPU kernels compute in.
    pub fn is_floating(self) -> bool {
        matches!(self.0, 5..=7 | 15)
    }

    /// The least and the greatest finite value, or `None` if PyTorch does not check the range of numbers for this
    /// dtype.
    pub fn range(self) -> Option<(f64, f64)> {
        let greatest = match self {
            Dtype::UINT8 => return Some((0.0, 255.0)),
            Dtype::INT8 => return Some((-128.0, 127.0)),
            Dtype::INT16 => return Some((-32768.0, 32767.0)),
            Dtype::INT32 => return Some((f64::from(i32::MIN), f64::from(i32::MAX))),
            // The greatest `int64` that a double represents exactly.
            Dtype::INT64 => return Some((i64::MIN as f64, (i64::MAX - 1023) as f64)),
            Dtype::FLOAT16 | Dtype(8) => 65504.0,
            Dtype::BFLOAT16 => f64::from(f32::from_bits(0x7f7f_0000)),
            Dtype::FLOAT32 | Dtype(9) => f64::from(f32::MAX),
            _ => return None,
        };
        Some((-greatest, greatest))
    }

    /// The dtype's name in Python.
    pub fn name(self) -> &'static str {
        const NAMES: [&str; 16] = [
            "uint8",
            "int8",
            "int16",
            "int32",
            "int64",
            "float16",
            "float32",
            "float64",
            "complex32",
            "complex64",
            "complex128",
            "bool",
            "qint8",
            "quint8",
            "qint32",
            "bfloat16",
        ];
        NAMES.get(self.0 as usize).copied().unwrap_or("other")
    }
}

/// Bits of a tensor that affect what an op computes.
pub mod flags {
    /// The tensor requires grad. This is part of a node's grad bits and not of metadata.
    pub const REQUIRES_GRAD: u16 = 1;
    /// The tensor is lazily conjugated.
    pub const CONJ: u16 = 2;
    /// The tensor is lazily negated.
    pub const NEG: u16 = 4;
    /// The tensor was made from a Python number, and takes part in type promotion as a number.
    pub const WRAPPED: u16 = 8;
    /// The tensor is the same object as an earlier input.
    pub const SAME: u16 = 16;
    /// The tensor is a different object from an earlier input with the same window.
    pub const APART: u16 = 32;
    /// The tensor is a zero-dimensional host integer that becomes zero in some dtype. The bit is known only during the
    /// call, and is not part of metadata.
    pub const ZERO: u16 = 64;
    /// The bits that are part of metadata.
    pub const META: u16 = CONJ | NEG | WRAPPED | SAME | APART;
}

/// Sizes and strides in elements, dtype, and the bits of [`flags::META`].
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct TensorMeta {
    /// Element type.
    pub dtype: Dtype,
    /// Bits of [`flags::META`].
    pub flags: u16,
    dims: SmallVec<[i64; 8]>,
}

impl TensorMeta {
    /// Copies borrowed metadata.
    pub fn new(sizes: &[i64], strides: &[i64], dtype: Dtype, flags: u16) -> TensorMeta {
        debug_assert_eq!(sizes.len(), strides.len());
        let dims = sizes.iter().chain(strides).copied().collect();
        TensorMeta { dtype, flags: flags & flags::META, dims }
    }

    /// Number of dimensions.
    pub fn ndim(&self) -> usize {
        self.dims.len() / 2
    }

    /// Size of each dimension, in elements.
    pub fn sizes(&self) -> &[i64] {
        &self.dims[..self.ndim()]
    }

    /// Stride of each dimension, in elements.
    pub fn strides(&self) -> &[i64] {
        &self.dims[self.ndim()..]
    }

    /// Number of elements.
    pub fn numel(&self) -> i64 {
        self.sizes().iter().product()
    }

    /// Number of bytes from the start of the storage to the end of a window at `offset` elements.
    pub fn extent_bytes(&self, offset: i64) -> u64 {
        if self.sizes().contains(&0) {
            return 0;
        }
        let last: i64 =
            self.sizes().iter().zip(self.strides()).map(|(size, stride)| (size - 1) * stride).sum();
        (offset + last + 1) as u64 * self.dtype.size() as u64
    }

    /// Whether borrowed metadata is equal.
    #[inline]
    pub fn matches(&self, sizes: &[i64], strides: &[i64], dtype: Dtype, flags: u16) -> bool {
        self.dtype == dtype
            && self.flags == flags & flags::META
            && self.dims.len() == sizes.len() * 2
            // A loop, because calling `memcmp` for a few numbers is slower than comparing them.
            && self.dims.iter().zip(sizes.iter().chain(strides)).all(|(a, b)| a == b)
    }
}
