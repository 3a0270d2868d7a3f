//! Flags behind the gradients of a bucket: which slots have a gradient on any rank. They are reduced with the
//! gradients: by a weighted mean, which infinity survives where 1 may become 0 (in f16, if the rank has one item of
//! 2²⁵).

use burn_ddp_comm::DType;
use half::{bf16, f16};

/// Writes a flag (0 or infinity) as element `elem` of a buffer of floats.
pub(crate) fn set_flag(dtype: DType, buffer: &mut [u8], elem: usize, up: bool) {
    let value = if up { f64::INFINITY } else { 0.0 };
    let at = elem * dtype.size_bytes();
    match dtype {
        DType::F64 => buffer[at..at + 8].copy_from_slice(&f64::to_ne_bytes(value)),
        DType::F32 => buffer[at..at + 4].copy_from_slice(&(value as f32).to_ne_bytes()),
        DType::F16 => buffer[at..at + 2].copy_from_slice(&f16::from_f64(value).to_ne_bytes()),
        DType::BF16 => buffer[at..at + 2].copy_from_slice(&bf16::from_f64(value).to_ne_bytes()),
        other => unreachable!("gradients are floats, got {other}"),
    }
}

/// True if the flag at element `elem` was up on any rank with a weight: reduced flags are zero otherwise.
pub(crate) fn flag_is_up(dtype: DType, buffer: &[u8], elem: usize) -> bool {
    let size = dtype.size_bytes();
    buffer[elem * size..(elem + 1) * size].iter().any(|&b| b != 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gradients::AlignedBytes;

    #[test]
    fn flags_survive_every_float_type() {
        for dtype in [DType::F64, DType::F32, DType::F16, DType::BF16] {
            let mut b = AlignedBytes::zeroed(3 * dtype.size_bytes());
            set_flag(dtype, b.bytes_mut(), 1, true);
            assert_eq!([0, 1, 2].map(|e| flag_is_up(dtype, b.bytes(), e)), [false, true, false]);
            set_flag(dtype, b.bytes_mut(), 1, false);
            assert!(!flag_is_up(dtype, b.bytes(), 1));
        }
    }
}
