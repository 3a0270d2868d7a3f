//! Element types that collectives carry.

use std::fmt;

use half::{bf16, f16};
use serde::{Deserialize, Serialize};

/// The type of the elements in a collective's buffer.
///
/// # Example
///
/// Elements of a type that is known at run time only travel as bytes:
///
/// ```
/// use burn_ddp_comm::{DType, ReduceOp, World};
///
/// World::spawn(2, |world| {
///     let (group, me) = (world.group()?, world.rank() as u8);
///     let (dtype, other) = (DType::U8, 1 - world.rank());
///     let mut x = [me + 1];
///     group.all_reduce_bytes(dtype, &mut x, ReduceOp::Sum, 0)?; // 0: no tag to compare
///     assert_eq!(x, [3]);
///     let mut mean = f32::from(me).to_le_bytes();
///     group.all_reduce_weighted_bytes(DType::F32, &mut mean, [3.0, 1.0][world.rank()], 0)?;
///     assert_eq!(mean, 0.25_f32.to_le_bytes());
///     let mut most = [me];
///     group.reduce_bytes(dtype, &mut most, ReduceOp::Max, 0)?;
///     group.broadcast_bytes(dtype, &mut most, 0)?;
///     assert_eq!(most, [1]);
///
///     let mut rows = [0; 2];
///     group.all_gather_tagged(dtype, &[me], &mut rows, 7)?; // 7: the step, say, which ranks compare
///     assert_eq!((rows.to_vec(), group.all_gather_bytes(dtype, &[me])?), (vec![0, 1], vec![0, 1]));
///     assert_eq!(group.gather_bytes(dtype, &[me], 0)?, (me == 0).then(|| vec![0, 1]));
///     group.reduce_scatter_bytes(dtype, &rows, &mut x, ReduceOp::Sum)?;
///     assert_eq!(x, [2 * me]);
///     group.scatter_bytes(dtype, (me == 0).then_some(&[5, 6][..]), &mut x, 0)?;
///     assert_eq!(x, [5 + me]);
///     group.all_to_all_bytes(dtype, &[me, 10 + me], &mut rows)?;
///     assert_eq!(rows, [[0, 1], [10, 11]][world.rank()]);
///
///     match me {
///         0 => group.send_bytes(dtype, &[9], 1)?,
///         _ => group.recv_bytes(dtype, &mut x, 0)?,
///     }
///     group.send_recv_bytes(dtype, &[me], other, &mut x, other)?;
///     assert_eq!(x, [1 - me]);
///     Ok::<_, burn_ddp_comm::Error>(())
/// }).into_iter().collect::<Result<(), _>>()?;
/// # Ok::<(), burn_ddp_comm::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum DType {
    /// 64-bit float.
    F64,
    /// 32-bit float.
    F32,
    /// IEEE half precision; accumulated in f32.
    F16,
    /// bfloat16; accumulated in f32.
    BF16,
    /// 64-bit signed integer; wraps on overflow.
    I64,
    /// 32-bit signed integer; wraps on overflow.
    I32,
    /// 8-bit signed integer; wraps on overflow.
    I8,
    /// 8-bit unsigned integer; wraps on overflow.
    U8,
    /// One byte per element, 0 or 1.
    Bool,
}

impl DType {
    /// Every dtype, in the order of their codes on the wire.
    pub const ALL: [DType; 9] =
        [DType::F64, DType::F32, DType::F16, DType::BF16, DType::I64, DType::I32, DType::I8, DType::U8, DType::Bool];

    /// Bytes of one element.
    pub const fn size_bytes(self) -> usize {
        match self {
            DType::F64 | DType::I64 => 8,
            DType::F32 | DType::I32 => 4,
            DType::F16 | DType::BF16 => 2,
            DType::I8 | DType::U8 | DType::Bool => 1,
        }
    }

    /// True for floating point types.
    pub const fn is_float(self) -> bool {
        matches!(self, DType::F64 | DType::F32 | DType::F16 | DType::BF16)
    }

    pub(crate) fn code(self) -> u8 {
        self as u8
    }

    pub(crate) fn from_code(code: u8) -> Option<DType> {
        DType::ALL.get(usize::from(code)).copied()
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DType::F64 => "f64",
            DType::F32 => "f32",
            DType::F16 => "f16",
            DType::BF16 => "bf16",
            DType::I64 => "i64",
            DType::I32 => "i32",
            DType::I8 => "i8",
            DType::U8 => "u8",
            DType::Bool => "bool",
        })
    }
}

/// A Rust type that collectives carry: `f64 f32 half::f16 half::bf16 i64 i32 i8 u8 bool`.
pub trait Element: sealed::Bytes + Copy + Send + Sync + 'static {
    /// The run-time name of this type.
    const DTYPE: DType;
}

mod sealed {
    /// Conversion of elements to bytes and back, without `unsafe`.
    pub trait Bytes: Sized {
        /// `len` elements, all zero.
        fn zeros(len: usize) -> Vec<Self>;
        fn bytes(elements: &[Self]) -> &[u8];
        /// Lets `f` rewrite the elements as bytes.
        fn edit<R>(elements: &mut [Self], f: impl FnOnce(&mut [u8]) -> R) -> R;
    }
}

pub(crate) use sealed::Bytes;

macro_rules! plain_elements {
    ($($ty:ty => $dtype:ident),* $(,)?) => {$(
        impl Element for $ty {
            const DTYPE: DType = DType::$dtype;
        }

        impl Bytes for $ty {
            fn zeros(len: usize) -> Vec<Self> {
                bytemuck::zeroed_vec(len)
            }

            fn bytes(elements: &[Self]) -> &[u8] {
                bytemuck::cast_slice(elements)
            }

            fn edit<R>(elements: &mut [Self], f: impl FnOnce(&mut [u8]) -> R) -> R {
                f(bytemuck::cast_slice_mut(elements))
            }
        }
    )*};
}

plain_elements! {
    f64 => F64, f32 => F32, f16 => F16, bf16 => BF16, i64 => I64, i32 => I32, i8 => I8, u8 => U8,
}

impl Element for bool {
    const DTYPE: DType = DType::Bool;
}

impl Bytes for bool {
    fn zeros(len: usize) -> Vec<Self> {
        vec![false; len]
    }

    fn bytes(elements: &[Self]) -> &[u8] {
        bytemuck::cast_slice(elements)
    }

    /// Goes through a copy: a byte from a peer need not be a valid `bool`.
    fn edit<R>(elements: &mut [Self], f: impl FnOnce(&mut [u8]) -> R) -> R {
        let mut bytes = Self::bytes(elements).to_vec();
        let result = f(&mut bytes);
        for (element, byte) in elements.iter_mut().zip(bytes) {
            *element = byte != 0;
        }
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_round_trip() {
        for dtype in DType::ALL {
            assert_eq!(DType::from_code(dtype.code()), Some(dtype));
        }
        assert_eq!(DType::from_code(9), None);
    }

    #[test]
    fn a_foreign_byte_becomes_a_valid_bool() {
        let mut flags = [false, true];
        bool::edit(&mut flags, |bytes| bytes.copy_from_slice(&[7, 0]));
        assert_eq!(flags, [true, false]);
    }
}
