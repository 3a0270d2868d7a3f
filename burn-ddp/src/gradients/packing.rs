//! Gradients on their way into buffers: their types, and whether they are finite.

use burn::backend::tensor::{BoolTensor, FloatTensor};
use burn::backend::{TensorMetadata, get_device_settings};
use burn::tensor::{Scalar, read_sync};
use burn_ddp_comm::DType;

use super::accumulation::Sum;
use super::memory::GradientMemory;

/// Bytes that are copied before they are looked at, while they are in the processor's first cache.
const PIECE: usize = 16 << 10;

/// Writes a gradient of one type as the type in which it travels. Returns false if an element is not finite there.
pub(crate) fn pack(dtype: DType, gradient: &[u8], travels: DType, out: &mut [u8]) -> bool {
    if dtype != travels {
        Sum::of(dtype, gradient, 1.0).write(travels, 1.0, out);
        return is_finite(travels, out);
    }
    let mut finite = true;
    for (from, to) in gradient.chunks(PIECE).zip(out.chunks_mut(PIECE)) {
        to.copy_from_slice(from);
        finite &= is_finite(dtype, from);
    }
    finite
}

/// True if all elements are finite.
pub(crate) fn is_finite(dtype: DType, elements: &[u8]) -> bool {
    // A sum of numbers that are not finite is not finite; that of others may be out of range, too.
    let sum = match dtype {
        DType::F32 => sum_of::<f32>(elements).is_finite(),
        DType::F64 => sum_of::<f64>(elements).is_finite(),
        _ => false,
    };
    sum || each_is_finite(dtype, elements)
}

/// Sum in the order in which vector instructions are fastest.
fn sum_of<T: bytemuck::AnyBitPattern + Default + std::ops::AddAssign>(elements: &[u8]) -> T {
    const LANES: usize = 32;
    let mut sums = [T::default(); LANES];
    let chunks = elements.chunks_exact(LANES * size_of::<T>());
    let rest = chunks.remainder();
    for chunk in chunks {
        for (sum, x) in sums.iter_mut().zip(chunk.chunks_exact(size_of::<T>())) {
            *sum += bytemuck::pod_read_unaligned(x);
        }
    }
    let mut total = T::default();
    rest.chunks_exact(size_of::<T>()).for_each(|x| total += bytemuck::pod_read_unaligned(x));
    sums.into_iter().for_each(|sum| total += sum);
    total
}

fn each_is_finite(dtype: DType, elements: &[u8]) -> bool {
    // An exponent of ones, and no other, carries into the sign.
    macro_rules! no_carry {
        ($bits:ty, $exponent:expr, $one:expr) => {
            elements
                .chunks_exact(size_of::<$bits>())
                .map(|x| bytemuck::pod_read_unaligned::<$bits>(x))
                .fold(0, |any, x| any | (x & $exponent) + $one)
                .leading_zeros()
                > 0
        };
    }
    match dtype {
        DType::F64 => no_carry!(u64, 0x7ff0_0000_0000_0000, 0x0010_0000_0000_0000),
        DType::F32 => no_carry!(u32, 0x7f80_0000, 0x0080_0000),
        DType::F16 => no_carry!(u16, 0x7c00, 0x0400),
        DType::BF16 => no_carry!(u16, 0x7f80, 0x0080),
        _ => true,
    }
}

/// The first of the numbered tensors, on their device, with an element that is not finite. One read for all of them.
///
/// # Errors
///
/// The device's.
pub(crate) fn first_not_finite<B: GradientMemory>(
    averages: impl Iterator<Item = (usize, FloatTensor<B>)>,
) -> Result<Option<usize>, String> {
    let (numbers, any): (Vec<_>, Vec<_>) = averages.map(|(number, average)| (number, has_other::<B>(average))).unzip();
    if any.is_empty() {
        return Ok(None);
    }
    let unreadable = |e| format!("reading from the device whether averages are finite: {e:?}");
    let any = read_sync(B::bool_into_data(B::bool_cat(any, 0))).map_err(unreadable)?;
    Ok(numbers.into_iter().zip(any.iter::<bool>()).find_map(|(number, any)| any.then_some(number)))
}

/// One element: true if some element of `average` is not finite.
fn has_other<B: GradientMemory>(average: FloatTensor<B>) -> BoolTensor<B> {
    let dtype = get_device_settings::<B>(&average.device()).bool_dtype;
    // Nor is NaN less than infinity.
    let finite = B::float_lower_elem(B::float_abs(average), Scalar::Float(f64::INFINITY), dtype);
    B::bool_any(B::bool_not(finite))
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;

    #[test]
    fn one_element_that_is_not_finite_is_found_wherever_it_is() {
        let len = PIECE / 4 * 2 + 7;
        for at in [0, 1, len / 2, len - 1] {
            for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut gradient = vec![-1.5f32; len];
                let mut out = vec![0.0f32; len];
                let mut packs = |gradient: &[f32]| {
                    let (from, to) = (bytemuck::cast_slice(gradient), bytemuck::cast_slice_mut(&mut out));
                    pack(DType::F32, from, DType::F32, to)
                };
                assert!(packs(&gradient));
                gradient[at] = bad;
                assert!(!packs(&gradient), "{bad} at {at}");
                assert_eq!(out[at].to_bits(), bad.to_bits());
            }
        }
    }

    #[test]
    fn a_sum_out_of_range_is_of_finite_numbers() {
        assert!(is_finite(DType::F32, bytemuck::cast_slice(&[f32::MAX; 200])));
        assert!(is_finite(DType::F64, bytemuck::cast_slice(&[f64::MIN; 200])));
    }

    #[test]
    fn every_type_knows_its_largest_number() {
        fn is<T: bytemuck::NoUninit>(dtype: DType, x: T) -> bool {
            is_finite(dtype, bytemuck::bytes_of(&x))
        }
        assert!([f64::MAX, f64::MIN, -0.0, f64::MIN_POSITIVE].into_iter().all(|x| is(DType::F64, x)));
        assert!([f32::MAX, f32::MIN, -0.0, f32::MIN_POSITIVE].into_iter().all(|x| is(DType::F32, x)));
        assert!([f16::MAX, f16::MIN].into_iter().all(|x| is(DType::F16, x.to_bits())));
        assert!([bf16::MAX, bf16::MIN].into_iter().all(|x| is(DType::BF16, x.to_bits())));
        assert!([f64::NAN, f64::INFINITY].into_iter().all(|x| !is(DType::F64, x)));
        assert!([f16::NAN, f16::INFINITY].into_iter().all(|x| !is(DType::F16, x.to_bits())));
        assert!([bf16::NAN, bf16::NEG_INFINITY].into_iter().all(|x| !is(DType::BF16, x.to_bits())));
    }

    #[test]
    fn what_a_half_cannot_hold_is_not_finite_there() {
        let mut out = [0; 4];
        let packs = |x: f32, travels, out: &mut [u8]| pack(DType::F32, bytemuck::bytes_of(&x), travels, out);
        assert!(packs(65504.0, DType::F16, &mut out[..2]));
        assert!(!packs(65520.0, DType::F16, &mut out[..2]));
        assert!(packs(65520.0, DType::BF16, &mut out[2..]));
        assert_eq!(bf16::from_ne_bytes([out[2], out[3]]), bf16::from_f32(65520.0));
    }
}
