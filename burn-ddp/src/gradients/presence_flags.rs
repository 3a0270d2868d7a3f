//! Flags behind the gradients of a bucket: which slots have a gradient on any rank, and which one that is not finite.
//! They are reduced with the gradients: by a weighted mean, which infinity survives where 1 may become 0 (in f16, if
//! the rank has one item of 2²⁵), and NaN survives infinity.

use burn_ddp_comm::DType;
use half::{bf16, f16};

use super::bucket_plan::Bucket;
use super::not_finite::NotFinite;

/// A flag of one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Flag {
    Down,
    Up,
    /// Up for a gradient that is not finite.
    NotFinite,
}

impl Flag {
    pub(super) fn of(up: bool) -> Flag {
        if up { Flag::Up } else { Flag::Down }
    }
}

/// Writes a flag as element `elem` of a buffer of floats.
pub(super) fn set_flag(dtype: DType, buffer: &mut [u8], elem: usize, flag: Flag) {
    let value = match flag {
        Flag::Down => 0.0,
        Flag::Up => f64::INFINITY,
        Flag::NotFinite => f64::NAN,
    };
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
pub(super) fn flag_is_up(dtype: DType, buffer: &[u8], elem: usize) -> bool {
    let size = dtype.size_bytes();
    buffer[elem * size..(elem + 1) * size].iter().any(|&b| b != 0)
}

/// True if the flag at element `elem` was [`Flag::NotFinite`] on any rank with a weight.
pub(super) fn flag_is_nan(dtype: DType, buffer: &[u8], elem: usize) -> bool {
    let at = elem * dtype.size_bytes();
    match dtype {
        DType::F64 => bytemuck::pod_read_unaligned::<f64>(&buffer[at..at + 8]).is_nan(),
        DType::F32 => bytemuck::pod_read_unaligned::<f32>(&buffer[at..at + 4]).is_nan(),
        DType::F16 => bytemuck::pod_read_unaligned::<f16>(&buffer[at..at + 2]).is_nan(),
        DType::BF16 => bytemuck::pod_read_unaligned::<bf16>(&buffer[at..at + 2]).is_nan(),
        other => unreachable!("gradients are floats, got {other}"),
    }
}

/// Reads the reduced flags of a bucket.
pub(super) fn read(bucket: &Bucket, reduced: &[u8], present: &mut [bool], not_finite: &mut NotFinite) {
    for (nth, &slot) in bucket.slots.iter().enumerate() {
        let elem = bucket.flag_elem(nth);
        present[slot] = flag_is_up(bucket.dtype, reduced, elem);
        if present[slot] && flag_is_nan(bucket.dtype, reduced, elem) {
            not_finite.note(Some(slot));
        }
    }
    if let Some(elem) = bucket.sharded_elem()
        && flag_is_nan(bucket.dtype, reduced, elem)
    {
        not_finite.note(None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gradients::AlignedBytes;

    #[test]
    fn flags_survive_every_float_type() {
        for dtype in [DType::F64, DType::F32, DType::F16, DType::BF16] {
            let mut b = AlignedBytes::zeroed(3 * dtype.size_bytes());
            set_flag(dtype, b.bytes_mut(), 1, Flag::Up);
            assert_eq!([0, 1, 2].map(|e| flag_is_up(dtype, b.bytes(), e)), [false, true, false]);
            assert!(!flag_is_nan(dtype, b.bytes(), 1));
            set_flag(dtype, b.bytes_mut(), 1, Flag::NotFinite);
            assert!(flag_is_up(dtype, b.bytes(), 1) && flag_is_nan(dtype, b.bytes(), 1));
            set_flag(dtype, b.bytes_mut(), 1, Flag::Down);
            assert!(!flag_is_up(dtype, b.bytes(), 1) && !flag_is_nan(dtype, b.bytes(), 1));
        }
    }
}
