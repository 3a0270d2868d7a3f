//! The vector instructions of x86-64.
//!
//! A value of [`Avx2`] or [`Avx512`] exists only if the processor was found to have the instructions, which is all that
//! the calls of intrinsics below need to be sound.

#![allow(unsafe_code)]

use std::arch::x86_64::*;
use std::mem::transmute;

use super::element::{NAN_F32, Stored};
use super::fold_and_weights::{Fold, Weights};
use super::portable::{floats, pairs};
use super::simd::{Simd, SimdElement, f32s};
use super::source::Source;

/// Proof that there are AVX2 and F16C.
#[derive(Clone, Copy, Debug)]
pub(super) struct Avx2(());

/// Proof that there are AVX-512F, AVX2 and F16C.
#[derive(Clone, Copy, Debug)]
pub(super) struct Avx512 {
    pub(super) avx2: Avx2,
    _private: (),
}

impl Avx2 {
    pub(super) fn detect() -> Option<Avx2> {
        (is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c")).then_some(Avx2(()))
    }

    pub(super) fn f32s<In: SimdElement, Out: SimdElement>(
        self,
        fold: Fold,
        weights: &Weights,
        sources: &[Source<'_>],
        out: &mut [u8],
    ) {
        // SAFETY: `self` was made where these features were detected.
        unsafe { f32s_avx2::<In, Out>(self, fold, weights, sources, out) }
    }

    pub(super) fn f64s(self, fold: Fold, weights: &Weights, sources: &[Source<'_>], out: &mut [u8]) {
        // SAFETY: `self` was made where this feature was detected.
        unsafe { f64s_avx2(fold, weights, sources, out) }
    }

    pub(super) fn integers<L: Stored>(self, fold: Fold, sources: &[Source<'_>], out: &mut [u8]) {
        // SAFETY: `self` was made where this feature was detected.
        unsafe { integers_avx2::<L>(fold, sources, out) }
    }
}

impl Avx512 {
    pub(super) fn detect() -> Option<Avx512> {
        let avx2 = Avx2::detect()?;
        is_x86_feature_detected!("avx512f").then_some(Avx512 { avx2, _private: () })
    }

    pub(super) fn f32s<In: SimdElement, Out: SimdElement>(
        self,
        fold: Fold,
        weights: &Weights,
        sources: &[Source<'_>],
        out: &mut [u8],
    ) {
        // SAFETY: `self` was made where these features were detected.
        unsafe { f32s_avx512::<In, Out>(self, fold, weights, sources, out) }
    }
}

#[target_feature(enable = "avx2,f16c")]
fn f32s_avx2<In: SimdElement, Out: SimdElement>(
    simd: Avx2,
    fold: Fold,
    weights: &Weights,
    sources: &[Source<'_>],
    out: &mut [u8],
) {
    f32s::<Avx2, In, Out>(simd, fold, weights, sources, out);
}

#[target_feature(enable = "avx512f,avx2,f16c")]
fn f32s_avx512<In: SimdElement, Out: SimdElement>(
    simd: Avx512,
    fold: Fold,
    weights: &Weights,
    sources: &[Source<'_>],
    out: &mut [u8],
) {
    f32s::<Avx512, In, Out>(simd, fold, weights, sources, out);
}

#[target_feature(enable = "avx2")]
fn f64s_avx2(fold: Fold, weights: &Weights, sources: &[Source<'_>], out: &mut [u8]) {
    floats::<f64, f64>(fold, weights, sources, out);
}

#[target_feature(enable = "avx2")]
fn integers_avx2<L: Stored>(fold: Fold, sources: &[Source<'_>], out: &mut [u8]) {
    pairs::<L, L>(fold, sources, out);
}

const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
/// Mask of the second of two bf16 in 32 bits.
const UPPER_HALF: i32 = 0xffff_0000_u32 as i32;

/// `self` is the proof that the intrinsics may be called.
impl Simd for Avx512 {
    type V = __m512;

    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        // SAFETY: AVX-512F, see above.
        unsafe { _mm512_set1_ps(x) }
    }

    #[inline(always)]
    fn add(self, left: __m512, right: __m512) -> __m512 {
        // SAFETY: AVX-512F, see above.
        unsafe { _mm512_add_ps(left, right) }
    }

    #[inline(always)]
    fn mul(self, left: __m512, right: __m512) -> __m512 {
        // SAFETY: AVX-512F, see above.
        unsafe { _mm512_mul_ps(left, right) }
    }

    #[inline(always)]
    fn div(self, left: __m512, right: __m512) -> __m512 {
        // SAFETY: AVX-512F, see above.
        unsafe { _mm512_div_ps(left, right) }
    }

    #[inline(always)]
    fn min(self, left: __m512, right: __m512) -> __m512 {
        // SAFETY: AVX-512F, see above.
        unsafe {
            let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(left, left);
            _mm512_mask_blend_ps(nan, _mm512_min_ps(left, right), left)
        }
    }

    #[inline(always)]
    fn max(self, left: __m512, right: __m512) -> __m512 {
        // SAFETY: AVX-512F, see above.
        unsafe {
            let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(left, left);
            _mm512_mask_blend_ps(nan, _mm512_max_ps(left, right), left)
        }
    }

    #[inline(always)]
    fn canonical(self, x: __m512) -> __m512 {
        // SAFETY: AVX-512F, see above.
        unsafe {
            let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x);
            _mm512_mask_blend_ps(nan, x, _mm512_set1_ps(f32::from_bits(NAN_F32)))
        }
    }

    #[inline(always)]
    fn load_f32(self, bytes: &[u8; 128]) -> [__m512; 2] {
        // SAFETY: any 128 bytes are two such vectors.
        unsafe { transmute(*bytes) }
    }

    #[inline(always)]
    fn store_f32(self, x: [__m512; 2], bytes: &mut [u8; 128]) {
        // SAFETY: two such vectors are 128 bytes.
        *bytes = unsafe { transmute::<[__m512; 2], [u8; 128]>(x) };
    }

    #[inline(always)]
    fn load_f16(self, bytes: &[u8; 64]) -> [__m512; 2] {
        // SAFETY: AVX-512F, and any 64 bytes are two such vectors.
        unsafe {
            let [a, b] = transmute::<[u8; 64], [__m256i; 2]>(*bytes);
            [_mm512_cvtph_ps(a), _mm512_cvtph_ps(b)]
        }
    }

    #[inline(always)]
    fn store_f16(self, [a, b]: [__m512; 2], bytes: &mut [u8; 64]) {
        // SAFETY: AVX-512F, and two such vectors are 64 bytes.
        *bytes = unsafe {
            transmute::<[__m256i; 2], [u8; 64]>([_mm512_cvtps_ph::<NEAREST>(a), _mm512_cvtps_ph::<NEAREST>(b)])
        };
    }

    #[inline(always)]
    fn load_bf16(self, bytes: &[u8; 64]) -> [__m512; 2] {
        // SAFETY: AVX-512F, and any 64 bytes are such a vector.
        unsafe {
            let both = transmute::<[u8; 64], __m512i>(*bytes);
            let odd = _mm512_and_si512(both, _mm512_set1_epi32(UPPER_HALF));
            [_mm512_castsi512_ps(_mm512_slli_epi32::<16>(both)), _mm512_castsi512_ps(odd)]
        }
    }

    #[inline(always)]
    fn store_bf16(self, [even, odd]: [__m512; 2], bytes: &mut [u8; 64]) {
        // SAFETY: AVX-512F, and such a vector is 64 bytes.
        *bytes = unsafe {
            let even = _mm512_srli_epi32::<16>(round_to_bf16_512(even));
            let odd = _mm512_and_si512(round_to_bf16_512(odd), _mm512_set1_epi32(UPPER_HALF));
            transmute::<__m512i, [u8; 64]>(_mm512_or_si512(even, odd))
        };
    }
}

/// In the upper half of each element, the bits of the nearest bf16, ties to even.
#[target_feature(enable = "avx512f")]
#[inline]
fn round_to_bf16_512(x: __m512) -> __m512i {
    let bits = _mm512_castps_si512(x);
    let even = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
    _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), even)
}

/// `self` is the proof that the intrinsics may be called.
impl Simd for Avx2 {
    type V = [__m256; 2];

    #[inline(always)]
    fn splat(self, x: f32) -> [__m256; 2] {
        // SAFETY: AVX2, see above.
        unsafe { [_mm256_set1_ps(x); 2] }
    }

    #[inline(always)]
    fn add(self, [a, b]: [__m256; 2], [c, d]: [__m256; 2]) -> [__m256; 2] {
        // SAFETY: AVX2, see above.
        unsafe { [_mm256_add_ps(a, c), _mm256_add_ps(b, d)] }
    }

    #[inline(always)]
    fn mul(self, [a, b]: [__m256; 2], [c, d]: [__m256; 2]) -> [__m256; 2] {
        // SAFETY: AVX2, see above.
        unsafe { [_mm256_mul_ps(a, c), _mm256_mul_ps(b, d)] }
    }

    #[inline(always)]
    fn div(self, [a, b]: [__m256; 2], [c, d]: [__m256; 2]) -> [__m256; 2] {
        // SAFETY: AVX2, see above.
        unsafe { [_mm256_div_ps(a, c), _mm256_div_ps(b, d)] }
    }

    #[inline(always)]
    fn min(self, [a, b]: [__m256; 2], [c, d]: [__m256; 2]) -> [__m256; 2] {
        // SAFETY: AVX2, see above.
        unsafe { [min(a, c), min(b, d)] }
    }

    #[inline(always)]
    fn max(self, [a, b]: [__m256; 2], [c, d]: [__m256; 2]) -> [__m256; 2] {
        // SAFETY: AVX2, see above.
        unsafe { [max(a, c), max(b, d)] }
    }

    #[inline(always)]
    fn canonical(self, [a, b]: [__m256; 2]) -> [__m256; 2] {
        // SAFETY: AVX2, see above.
        unsafe { [canonical(a), canonical(b)] }
    }

    #[inline(always)]
    fn load_f32(self, bytes: &[u8; 128]) -> [[__m256; 2]; 2] {
        // SAFETY: any 128 bytes are four such vectors.
        unsafe { transmute(*bytes) }
    }

    #[inline(always)]
    fn store_f32(self, x: [[__m256; 2]; 2], bytes: &mut [u8; 128]) {
        // SAFETY: four such vectors are 128 bytes.
        *bytes = unsafe { transmute::<[[__m256; 2]; 2], [u8; 128]>(x) };
    }

    #[inline(always)]
    fn load_f16(self, bytes: &[u8; 64]) -> [[__m256; 2]; 2] {
        // SAFETY: AVX2 and F16C, and any 64 bytes are four such vectors.
        unsafe {
            let [a, b, c, d] = transmute::<[u8; 64], [__m128i; 4]>(*bytes);
            [[_mm256_cvtph_ps(a), _mm256_cvtph_ps(b)], [_mm256_cvtph_ps(c), _mm256_cvtph_ps(d)]]
        }
    }

    #[inline(always)]
    fn store_f16(self, [[a, b], [c, d]]: [[__m256; 2]; 2], bytes: &mut [u8; 64]) {
        const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT;
        // SAFETY: AVX2 and F16C, and four such vectors are 64 bytes.
        *bytes = unsafe {
            transmute::<[__m128i; 4], [u8; 64]>([
                _mm256_cvtps_ph::<NEAREST>(a),
                _mm256_cvtps_ph::<NEAREST>(b),
                _mm256_cvtps_ph::<NEAREST>(c),
                _mm256_cvtps_ph::<NEAREST>(d),
            ])
        };
    }

    #[inline(always)]
    fn load_bf16(self, bytes: &[u8; 64]) -> [[__m256; 2]; 2] {
        // SAFETY: AVX2, and any 64 bytes are two such vectors.
        unsafe {
            let [a, b] = transmute::<[u8; 64], [__m256i; 2]>(*bytes);
            [[even_bf16(a), even_bf16(b)], [odd_bf16(a), odd_bf16(b)]]
        }
    }

    #[inline(always)]
    fn store_bf16(self, [[a, b], [c, d]]: [[__m256; 2]; 2], bytes: &mut [u8; 64]) {
        // SAFETY: AVX2, and two such vectors are 64 bytes.
        *bytes = unsafe { transmute::<[__m256i; 2], [u8; 64]>([pack_bf16(a, c), pack_bf16(b, d)]) };
    }
}

#[target_feature(enable = "avx2")]
#[inline]
fn even_bf16(both: __m256i) -> __m256 {
    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(both))
}

#[target_feature(enable = "avx2")]
#[inline]
fn odd_bf16(both: __m256i) -> __m256 {
    _mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32(UPPER_HALF)))
}

#[target_feature(enable = "avx2")]
#[inline]
fn pack_bf16(even: __m256, odd: __m256) -> __m256i {
    let even = _mm256_srli_epi32::<16>(round_to_bf16(even));
    let odd = _mm256_and_si256(round_to_bf16(odd), _mm256_set1_epi32(UPPER_HALF));
    _mm256_or_si256(even, odd)
}

/// In the upper half of each element, the bits of the nearest bf16, ties to even.
#[target_feature(enable = "avx2")]
#[inline]
fn round_to_bf16(x: __m256) -> __m256i {
    let bits = _mm256_castps_si256(x);
    let even = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
    _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), even)
}

/// See [`Number::min`](super::element::Number::min).
#[target_feature(enable = "avx2")]
#[inline]
fn min(left: __m256, right: __m256) -> __m256 {
    _mm256_blendv_ps(_mm256_min_ps(left, right), left, _mm256_cmp_ps::<_CMP_UNORD_Q>(left, left))
}

/// See [`Number::max`](super::element::Number::max).
#[target_feature(enable = "avx2")]
#[inline]
fn max(left: __m256, right: __m256) -> __m256 {
    _mm256_blendv_ps(_mm256_max_ps(left, right), left, _mm256_cmp_ps::<_CMP_UNORD_Q>(left, left))
}

/// See [`Number::canonical`](super::element::Number::canonical).
#[target_feature(enable = "avx2")]
#[inline]
fn canonical(x: __m256) -> __m256 {
    _mm256_blendv_ps(x, _mm256_set1_ps(f32::from_bits(NAN_F32)), _mm256_cmp_ps::<_CMP_UNORD_Q>(x, x))
}
