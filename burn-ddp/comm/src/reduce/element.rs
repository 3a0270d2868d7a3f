//! Elements as they are in memory, and the accumulators they are reduced in.

use bytemuck::Pod;
use half::{bf16, f16};

/// An element type in memory, and the type it is accumulated in.
pub(super) trait Stored {
    type Acc: Number;
    /// An element's bytes, which need not be aligned.
    type Bytes: Pod;
    fn load(bytes: Self::Bytes) -> Self::Acc;
    fn store(x: Self::Acc) -> Self::Bytes;
}

/// Operations of accumulators; integers wrap.
pub(super) trait Number: Copy {
    const ZERO: Self;
    fn add(self, right: Self) -> Self;
    fn mul(self, right: Self) -> Self;
    fn min(self, right: Self) -> Self;
    fn max(self, right: Self) -> Self;
    /// Every NaN becomes the same one: which of two operands a sum takes its NaN from is up to the compiler.
    fn canonical(self) -> Self;
}

pub(super) trait Float: Number {
    fn div(self, right: Self) -> Self;
    fn from_f64(value: f64) -> Self;
}

macro_rules! plain_lane {
    ($($ty:ty),*) => {$(
        impl Stored for $ty {
            type Acc = $ty;
            type Bytes = [u8; size_of::<$ty>()];

            #[inline(always)]
            fn load(bytes: Self::Bytes) -> $ty {
                <$ty>::from_le_bytes(bytes)
            }

            #[inline(always)]
            fn store(x: $ty) -> Self::Bytes {
                x.to_le_bytes()
            }
        }
    )*};
}

plain_lane!(f64, f32, i64, i32, i8, u8);

/// Converted one by one, with the processor's instruction where it has one: only tails and rare processors come here.
impl Stored for f16 {
    type Acc = f32;
    type Bytes = [u8; 2];

    #[inline(never)]
    fn load(bytes: [u8; 2]) -> f32 {
        f16::from_le_bytes(bytes).to_f32()
    }

    #[inline(never)]
    fn store(x: f32) -> [u8; 2] {
        f16::from_f32(x).to_le_bytes()
    }
}

/// The upper half of an f32. Without branches, so that loops over it become vector instructions.
impl Stored for bf16 {
    type Acc = f32;
    type Bytes = [u8; 2];

    #[inline(always)]
    fn load(bytes: [u8; 2]) -> f32 {
        f32::from_bits(u32::from(u16::from_le_bytes(bytes)) << 16)
    }

    #[inline(always)]
    fn store(x: f32) -> [u8; 2] {
        round_to_bf16(x).to_le_bytes()
    }
}

/// The bits of the nearest bf16, ties to even. Of NaNs only the canonical one comes here, and it stays what it is.
#[inline(always)]
fn round_to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    let even = (bits >> 16) & 1;
    (bits.wrapping_add(0x7fff + even) >> 16) as u16
}

/// A bool as a byte: 0, or anything else.
pub(super) struct Flag;

impl Stored for Flag {
    type Acc = u8;
    type Bytes = [u8; 1];

    #[inline(always)]
    fn load([byte]: [u8; 1]) -> u8 {
        u8::from(byte != 0)
    }

    #[inline(always)]
    fn store(x: u8) -> [u8; 1] {
        [x]
    }
}

macro_rules! integers {
    ($($ty:ty),*) => {$(
        impl Number for $ty {
            const ZERO: $ty = 0;

            #[inline(always)]
            fn add(self, right: Self) -> Self {
                self.wrapping_add(right)
            }

            #[inline(always)]
            fn mul(self, right: Self) -> Self {
                self.wrapping_mul(right)
            }

            #[inline(always)]
            fn min(self, right: Self) -> Self {
                Ord::min(self, right)
            }

            #[inline(always)]
            fn max(self, right: Self) -> Self {
                Ord::max(self, right)
            }

            #[inline(always)]
            fn canonical(self) -> Self {
                self
            }
        }
    )*};
}

integers!(i64, i32, i8, u8);

macro_rules! floats {
    ($($ty:ty, $nan:expr);*) => {$(
        impl Number for $ty {
            const ZERO: $ty = 0.0;

            #[inline(always)]
            fn add(self, right: Self) -> Self {
                self + right
            }

            #[inline(always)]
            fn mul(self, right: Self) -> Self {
                self * right
            }

            /// The right side unless the left is smaller or NaN: so a NaN on either side is the result.
            #[inline(always)]
            fn min(self, right: Self) -> Self {
                if self < right || self.is_nan() { self } else { right }
            }

            #[inline(always)]
            fn max(self, right: Self) -> Self {
                if self > right || self.is_nan() { self } else { right }
            }

            #[inline(always)]
            fn canonical(self) -> Self {
                if self.is_nan() { <$ty>::from_bits($nan) } else { self }
            }
        }

        impl Float for $ty {
            #[inline(always)]
            fn div(self, right: Self) -> Self {
                self / right
            }

            #[inline(always)]
            fn from_f64(value: f64) -> Self {
                value as $ty
            }
        }
    )*};
}

/// The bits of the NaN that results are.
pub(super) const NAN_F32: u32 = 0x7fc0_0000;
const NAN_F64: u64 = 0x7ff8 << 48;

floats!(f64, NAN_F64; f32, NAN_F32);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_rounds_like_the_half_crate() {
        for upper in 0..=u16::MAX {
            for lower in [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let x = f32::from_bits(u32::from(upper) << 16 | lower).canonical();
                assert_eq!(round_to_bf16(x), bf16::from_f32(x).to_bits(), "{:#x}", x.to_bits());
            }
        }
    }
}
