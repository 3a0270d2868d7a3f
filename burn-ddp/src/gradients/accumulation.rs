//! Gradients as bytes: buffers, flags, and sums over micro-batches.

use burn_ddp_comm::DType;
use half::{bf16, f16};

/// Bytes aligned for every dtype. Owned by whoever holds it: the reducer while filling, the worker while reducing.
#[derive(Debug, Default)]
pub(crate) struct Buffer {
    words: Vec<u64>,
    len_bytes: usize,
}

impl Buffer {
    pub(crate) fn zeroed(len_bytes: usize) -> Self {
        Buffer { words: vec![0; len_bytes.div_ceil(8)], len_bytes }
    }

    pub(crate) fn of(bytes: &[u8]) -> Self {
        let mut buffer = Buffer::zeroed(bytes.len());
        buffer.bytes_mut().copy_from_slice(bytes);
        buffer
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[..self.len_bytes]
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.words)[..self.len_bytes]
    }
}

/// Writes `value` (a flag: 0 or 1, exact in every dtype) at element `elem` of a buffer of floats.
pub(crate) fn set_flag(dtype: DType, buffer: &mut [u8], elem: usize, up: bool) {
    let value = if up { 1.0 } else { 0.0 };
    let at = elem * dtype.size_bytes();
    match dtype {
        DType::F64 => buffer[at..at + 8].copy_from_slice(&f64::to_ne_bytes(value)),
        DType::F32 => buffer[at..at + 4].copy_from_slice(&(value as f32).to_ne_bytes()),
        DType::F16 => buffer[at..at + 2].copy_from_slice(&f16::from_f64(value).to_ne_bytes()),
        DType::BF16 => buffer[at..at + 2].copy_from_slice(&bf16::from_f64(value).to_ne_bytes()),
        other => unreachable!("gradients are floats, got {other}"),
    }
}

/// Whether the flag at element `elem` was up on some rank: reduced flags are positive then, and zero otherwise.
pub(crate) fn flag_is_up(dtype: DType, buffer: &[u8], elem: usize) -> bool {
    let size = dtype.size_bytes();
    buffer[elem * size..(elem + 1) * size].iter().any(|&b| b != 0)
}

/// A gradient summed over micro-batches, f64 for f64 and f32 for everything narrower, rounded once when it is written.
#[derive(Debug)]
pub(crate) enum Sum {
    F32(Vec<f32>),
    F64(Vec<f64>),
}

impl Sum {
    pub(crate) fn zeros(dtype: DType, len_elems: usize) -> Self {
        match dtype {
            DType::F64 => Sum::F64(vec![0.0; len_elems]),
            _ => Sum::F32(vec![0.0; len_elems]),
        }
    }

    /// Adds `weight * gradient`. A weight of 1 adds the gradient as it is; at weight 0 the gradient is ignored, even NaN.
    pub(crate) fn add(&mut self, dtype: DType, gradient: &[u8], weight: f64) {
        if weight == 0.0 {
            return;
        }
        match self {
            Sum::F64(sum) => zip(sum, gradient, |s, x: f64| *s += weight * x),
            Sum::F32(sum) => {
                let w = weight as f32;
                match dtype {
                    DType::F32 => zip(sum, gradient, |s, x: f32| *s += w * x),
                    DType::F16 => zip(sum, gradient, |s, x: f16| *s += w * x.to_f32()),
                    DType::BF16 => zip(sum, gradient, |s, x: bf16| *s += w * x.to_f32()),
                    other => unreachable!("gradients are floats, got {other}"),
                }
            }
        }
    }

    /// Writes `sum / divisor` as `dtype`.
    pub(crate) fn write(&self, dtype: DType, divisor: f64, out: &mut [u8]) {
        match self {
            Sum::F64(sum) => fill(out, sum, |s| f64::to_ne_bytes(s / divisor)),
            Sum::F32(sum) => {
                let d = divisor as f32;
                match dtype {
                    DType::F32 => fill(out, sum, |s| (s / d).to_ne_bytes()),
                    DType::F16 => fill(out, sum, |s| f16::from_f32(s / d).to_ne_bytes()),
                    DType::BF16 => fill(out, sum, |s| bf16::from_f32(s / d).to_ne_bytes()),
                    other => unreachable!("gradients are floats, got {other}"),
                }
            }
        }
    }
}

fn zip<A, T: bytemuck::AnyBitPattern>(sum: &mut [A], gradient: &[u8], add: impl Fn(&mut A, T)) {
    for (s, x) in sum.iter_mut().zip(gradient.chunks_exact(size_of::<T>())) {
        add(s, bytemuck::pod_read_unaligned(x));
    }
}

fn fill<A: Copy, const N: usize>(out: &mut [u8], sum: &[A], value: impl Fn(A) -> [u8; N]) {
    for (o, &s) in out.chunks_exact_mut(N).zip(sum) {
        o.copy_from_slice(&value(s));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_survive_every_float_type() {
        for dtype in [DType::F64, DType::F32, DType::F16, DType::BF16] {
            let mut b = Buffer::zeroed(3 * dtype.size_bytes());
            set_flag(dtype, b.bytes_mut(), 1, true);
            assert_eq!([0, 1, 2].map(|e| flag_is_up(dtype, b.bytes(), e)), [false, true, false]);
            set_flag(dtype, b.bytes_mut(), 1, false);
            assert!(!flag_is_up(dtype, b.bytes(), 1));
        }
    }

    #[test]
    fn weighted_sums_round_once() {
        // 1/256 is lost when it is added to 1 in bf16 one at a time; summed in f32 it is not.
        let one = bf16::from_f32(1.0).to_ne_bytes();
        let small = bf16::from_f32(1.0 / 256.0).to_ne_bytes();
        let mut sum = Sum::zeros(DType::BF16, 1);
        sum.add(DType::BF16, &one, 1.0);
        for _ in 0..4 {
            sum.add(DType::BF16, &small, 1.0);
        }
        let mut out = [0u8; 2];
        sum.write(DType::BF16, 1.0, &mut out);
        assert_eq!(bf16::from_ne_bytes(out).to_f32(), 1.015625);
    }

    #[test]
    fn weight_zero_ignores_nan_and_weights_multiply() {
        let mut sum = Sum::zeros(DType::F64, 1);
        sum.add(DType::F64, &f64::NAN.to_ne_bytes(), 0.0);
        sum.add(DType::F64, &2.0f64.to_ne_bytes(), 3.0);
        sum.add(DType::F64, &5.0f64.to_ne_bytes(), 1.0);
        let mut out = [0u8; 8];
        sum.write(DType::F64, 4.0, &mut out);
        assert_eq!(f64::from_ne_bytes(out), 11.0 / 4.0);
    }
}
