//! Sums and means of single numbers over all ranks, in the type of the number.

use burn_ddp_comm::ReduceOp;

use crate::{Ddp, Result};

/// A number that [`Ddp::sum`] adds up: `f32`, `f64`, and the integers of 32 and 64 bits.
pub trait Scalar: Copy + sealed::Reduce {}

/// A number that [`Ddp::mean`] averages: `f32` or `f64`.
pub trait FloatScalar: Scalar {}

impl Ddp {
    /// The mean of a number over all ranks, computed in `f64`. *Collective*. Every rank passes one number, all get the
    /// same mean. Costs one step, in which a rank sends 16 bytes to each other rank.
    ///
    /// # Errors
    ///
    /// [`Error::Comm`](crate::Error::Comm) if a peer failed.
    ///
    /// ```
    /// # use burn_ddp::prelude::*;
    /// let means = Ddp::spawn(2, |ddp| Ok(ddp.mean(ddp.rank() as f32)?))?;
    /// assert_eq!(means, [0.5_f32; 2]);
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    #[track_caller]
    pub fn mean<T: FloatScalar>(&self, value: T) -> Result<T> {
        value.reduce(self, ReduceOp::Mean)
    }

    /// The sum of a number over all ranks: floats are added in `f64`, integers exactly. *Collective*. Every rank passes
    /// one number of the same type, all get the same sum. Costs one step, in which a rank sends 16 bytes (24 for
    /// integers) to each other rank.
    ///
    /// # Errors
    ///
    /// [`Error::Comm`](crate::Error::Comm) if a peer failed; [`Error::Invalid`](crate::Error::Invalid), on every rank,
    /// if a sum of integers is outside its type.
    ///
    /// ```
    /// # use burn_ddp::prelude::*;
    /// let sums = Ddp::spawn(3, |ddp| Ok((ddp.sum(1_usize)?, ddp.sum(0.5_f32)?)))?;
    /// assert_eq!(sums, [(3_usize, 1.5_f32); 3]);
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    #[track_caller]
    pub fn sum<T: Scalar>(&self, value: T) -> Result<T> {
        value.reduce(self, ReduceOp::Sum)
    }
}

/// What to do instead of a sum of floats over processes.
const EXACT: &str = "`ddp.exact_sums()` adds up without rounding";

mod sealed {
    use super::*;
    use crate::Error;

    pub trait Reduce: Sized {
        /// The number reduced over all ranks.
        fn reduce(self, ddp: &Ddp, op: ReduceOp) -> Result<Self>;
    }

    macro_rules! floats {
        ($($float:ty),*) => {$(
            impl Reduce for $float {
                #[track_caller]
                fn reduce(self, ddp: &Ddp, op: ReduceOp) -> Result<Self> {
                    ddp.state().leaves.refuse_if_exact("a mean or sum of floats over processes", EXACT)?;
                    let stop = &ddp.state().stop;
                    let mut value = [f64::from(self), f64::from(u8::from(stop.is_wished()))];
                    ddp.group().all_reduce(&mut value, op)?;
                    stop.agree(value[1] > 0.0);
                    Ok(value[0] as $float)
                }
            }
            impl Scalar for $float {}
            impl FloatScalar for $float {}
        )*};
    }
    floats!(f32, f64);

    macro_rules! integers {
        ($($integer:ty),*) => {$(
            impl Reduce for $integer {
                #[track_caller]
                fn reduce(self, ddp: &Ddp, op: ReduceOp) -> Result<Self> {
                    // The lower 32 bits and the bits above them: their sums over all ranks do not overflow.
                    let value = self as i128;
                    let stop = &ddp.state().stop;
                    let wished = i64::from(stop.is_wished());
                    let mut halves = [(value & 0xffff_ffff) as i64, (value >> 32) as i64, wished];
                    ddp.group().all_reduce(&mut halves, op)?;
                    stop.agree(halves[2] > 0);
                    let sum = (i128::from(halves[1]) << 32) + i128::from(halves[0]);
                    let integer = stringify!($integer);
                    let outside = || format!("the sum over all ranks is {sum}, outside of {integer}");
                    sum.try_into().map_err(|_| Error::invalid(outside()))
                }
            }
            impl Scalar for $integer {}
        )*};
    }
    integers!(i32, u32, i64, u64, usize);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_are_exact_and_overflow_is_an_error() {
        let sums = Ddp::spawn(3, |ddp| {
            let rank = ddp.rank() as i64;
            let large = ddp.sum(u64::MAX / 3 - ddp.rank() as u64)?;
            let error = ddp.sum(u32::MAX).unwrap_err().to_string();
            Ok((large, ddp.sum(-rank)?, ddp.sum(i64::MIN / 3)?, ddp.sum(7_i32)?, ddp.sum(1_usize)?, error))
        })
        .unwrap();
        let error = "the sum over all ranks is 12884901885, outside of u32".to_string();
        assert_eq!(sums, [0; 3].map(|_| (u64::MAX - 3, -3, 3 * (i64::MIN / 3), 21, 3, error.clone())));
    }

    #[test]
    fn floats_are_added_in_f64() {
        let sums = Ddp::spawn(3, |ddp| {
            let value = [16_777_216.0_f32, 1.0, 1.0][ddp.rank()]; // in f32 each 1 alone would be lost
            Ok((ddp.sum(value)?, ddp.mean(value)?))
        })
        .unwrap();
        assert_eq!(sums, [(16_777_218.0, 5_592_406.0); 3]);
    }
}
