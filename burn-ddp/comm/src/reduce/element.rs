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
    /// Makes every NaN the same one, since it is up to the compiler from which of two operands a sum takes its NaN.
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

/// Without branches and calls, so that loops over it become vector instructions on every processor.
impl Stored for f16 {
    type Acc = f32;
    type Bytes = [u8; 2];

    #[inline(always)]
    fn load(bytes: [u8; 2]) -> f32 {
        widen_f16(u16::from_le_bytes(bytes))
    }

    #[inline(always)]
    fn store(x: f32) -> [u8; 2] {
        round_to_f16(x).to_le_bytes()
    }
}

/// Left shift that puts the mantissa of an f16 where an f32 has its own.
const F16_SHIFT: u32 = 13;

/// The value of an f16, which is exact. A signalling NaN stays one.
#[inline(always)]
fn widen_f16(bits: u16) -> f32 {
    let magnitude = u32::from(bits & 0x7fff) << F16_SHIFT;
    // The exponents differ by 112; multiplying also makes normal numbers of subnormal ones.
    let scaled = (f32::from_bits(magnitude) * f32::from_bits((127 + 112) << 23)).to_bits();
    let not_finite = if magnitude >= 0x1f << 23 { 0xff << 23 } else { 0 };
    f32::from_bits(scaled | not_finite | u32::from(bits & 0x8000) << 16)
}

/// The bits of the nearest f16, ties to even. The only NaN that `x` can be is the canonical one.
#[inline(always)]
fn round_to_f16(x: f32) -> u16 {
    let sign = x.to_bits() & 1 << 31;
    let magnitude = x.to_bits() ^ sign;
    let even = (magnitude >> F16_SHIFT) & 1;
    // Rounding may carry into the exponent, and from the largest exponent into infinity.
    let normal = magnitude.wrapping_sub(112 << 23).wrapping_add(0xfff + even) >> F16_SHIFT;
    // Adding 0.5 makes the processor round at the last place of a subnormal f16.
    let half = f32::from_bits((127 - 1) << 23);
    let subnormal = (f32::from_bits(magnitude) + half).to_bits().wrapping_sub(half.to_bits());
    let not_finite = if magnitude > 0xff << 23 { 0x7e00 } else { 0x7c00 };
    let small = if magnitude < 113 << 23 { subnormal } else { normal };
    let rounded = if magnitude >= 143 << 23 { not_finite } else { small };
    (rounded | sign >> 16) as u16
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

/// The bits of the nearest bf16, ties to even. The only NaN that `x` can be is the canonical one, which stays as it is.
#[inline(always)]
fn round_to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    let even = (bits >> 16) & 1;
    (bits.wrapping_add(0x7fff + even) >> 16) as u16
}

/// A bool as a byte: 0 is false, anything else is true.
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

/// The bits of the canonical NaN.
pub(super) const NAN_F32: u32 = 0x7fc0_0000;
const NAN_F64: u64 = 0x7ff8 << 48;

floats!(f64, NAN_F64; f32, NAN_F32);

#[cfg(test)]
mod tests {
    use super::*;

    /// Every so many of all values; Miri is slow.
    const STEP: usize = if cfg!(miri) { 1009 } else { 1 };

    #[test]
    fn f16_widens_like_the_half_crate() {
        for bits in (0..=u16::MAX).step_by(STEP) {
            let (found, expected) = (widen_f16(bits).canonical(), f16::from_bits(bits).to_f32_const().canonical());
            assert_eq!(found.to_bits(), expected.to_bits(), "{bits:#x}");
        }
    }

    #[test]
    fn f16_rounds_like_the_half_crate() {
        // Around every f16, every point between two, and everywhere.
        let around = (0..=u16::MAX).step_by(STEP).flat_map(|bits| {
            let bits = f16::from_bits(bits).to_f32_const().to_bits();
            [0, 1, 0xfff, 0x1000, 0x1001, 0x1fff].map(|more| bits.wrapping_add(more))
        });
        for bits in around.chain((0..=u32::MAX).step_by(4099 * STEP)) {
            let x = f32::from_bits(bits).canonical();
            assert_eq!(round_to_f16(x), f16::from_f32_const(x).to_bits(), "{:#x}", x.to_bits());
        }
    }

    #[test]
    fn bf16_rounds_like_the_half_crate() {
        for upper in (0..=u16::MAX).step_by(STEP) {
            for lower in [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let x = f32::from_bits(u32::from(upper) << 16 | lower).canonical();
                assert_eq!(round_to_bf16(x), bf16::from_f32(x).to_bits(), "{:#x}", x.to_bits());
            }
        }
    }
}
