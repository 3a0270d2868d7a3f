//! The right numbers, bit by bit, on every rank.

use burn_ddp_comm::{ProcessGroup, ReduceOp};
use half::{bf16, f16};

use crate::harness::{Make, WORLDS, groups};
use crate::reference_values::{Sample, assert_bits, for_each_dtype, ops, samples};

/// Enough to be cut in slices for any world, and not to divide.
pub const LONG: usize = 65_537;

pub fn all_reduce_of_every_dtype_and_op(make: Make) {
    for n in WORLDS {
        groups(make, n, |group| {
            for len in [0, 1, 2, 10, 1000] {
                for_each_dtype!(T => for op in ops::<T>() { all_reduce_once::<T>(group, op, len) });
            }
        });
    }
}

pub fn all_reduce_of_every_length(make: Make) {
    for n in WORLDS {
        groups(make, n, |group| {
            // Around the limit below which every rank reduces everything, and where slices are shorter than a block.
            for len in [3, 1023, 1024, 1025, 16_384 / n, 16_384 / n + 1, LONG] {
                all_reduce_once::<f32>(group, ReduceOp::Sum, len);
            }
            for_each_dtype!(T => all_reduce_once::<T>(group, ops::<T>().next().unwrap(), LONG));
            all_reduce_once::<bf16>(group, ReduceOp::Mean, LONG);
            all_reduce_once::<f64>(group, ReduceOp::Max, LONG);
        });
    }
}

fn all_reduce_once<T: Sample>(group: &ProcessGroup, op: ReduceOp, len: usize) {
    let n = group.world_size();
    let mut buf: Vec<T> = samples(group.rank(), 0, len);
    group.all_reduce(&mut buf, op).unwrap();
    assert_bits(&buf, |index| reduced(op, n, index), || format!("{op} of {len} {} on {n} ranks", T::DTYPE));
}

fn reduced<T: Sample>(op: ReduceOp, n: usize, index: usize) -> T {
    let values: Vec<T> = (0..n).map(|rank| T::sample(rank, index)).collect();
    T::expected(op, &values)
}

pub fn reduce_scatter_of_every_dtype_and_op(make: Make) {
    fn once<T: Sample>(group: &ProcessGroup, op: ReduceOp, len: usize) {
        let (n, rank) = (group.world_size(), group.rank());
        let input: Vec<T> = samples(rank, 0, n * len);
        let mut output: Vec<T> = samples(99, 0, len);
        group.reduce_scatter(&input, &mut output, op).unwrap();
        assert_bits(
            &output,
            |index| reduced(op, n, rank * len + index),
            || format!("row {rank} of the {op} of {n} × {len} {}", T::DTYPE),
        );
        assert_bits(&input, |index| T::sample(rank, index), || "the input".to_string());
    }
    for n in WORLDS {
        groups(make, n, |group| {
            for len in [0, 1, 10, 1000] {
                for_each_dtype!(T => for op in ops::<T>() { once::<T>(group, op, len) });
            }
            once::<f32>(group, ReduceOp::Mean, LONG);
        });
    }
}

pub fn all_gather_of_every_dtype(make: Make) {
    fn once<T: Sample>(group: &ProcessGroup, len: usize) {
        let n = group.world_size();
        let rows = group.all_gather::<T>(&samples(group.rank(), 0, len)).unwrap();
        assert_eq!(rows.len(), n * len);
        for rank in 0..n {
            let row = &rows[rank * len..][..len];
            assert_bits(row, |index| T::sample(rank, index), || format!("row {rank} of {n} × {len} {}", T::DTYPE));
        }
    }
    for n in WORLDS {
        groups(make, n, |group| {
            for len in [0, 1, 2, 10, 1000] {
                for_each_dtype!(T => once::<T>(group, len));
            }
            once::<i32>(group, LONG);
            let bytes = [group.rank() as u8; 6];
            let gathered = group.all_gather_bytes(burn_ddp_comm::DType::F16, &bytes).unwrap();
            assert!((0..6 * n).all(|at| gathered[at] as usize == at / 6));
        });
    }
}

pub fn broadcast_from_every_root(make: Make) {
    fn once<T: Sample>(group: &ProcessGroup, root: usize, len: usize) {
        let mut buf: Vec<T> = samples(group.rank(), 0, len);
        group.broadcast(&mut buf, root).unwrap();
        assert_bits(&buf, |index| T::sample(root, index), || format!("{len} {} from {root}", T::DTYPE));
    }
    for n in WORLDS {
        groups(make, n, |group| {
            for root in 0..n {
                for len in [0, 1, 2, 10, 1000] {
                    for_each_dtype!(T => once::<T>(group, root, len));
                }
                once::<f64>(group, root, LONG);
            }
        });
    }
}

/// Rounding after each addition, or before the division, gives other numbers.
pub fn half_precision_rounds_once(make: Make) {
    groups(make, 4, |group| {
        let mut x = [f16::from_f32([2048.0, 1.0, 1.0, 1.0][group.rank()])];
        group.all_reduce(&mut x, ReduceOp::Sum).unwrap();
        assert_eq!(x[0].to_f32(), 2052.0);
    });
    groups(make, 3, |group| {
        let mut x = [f16::from_f32([2048.0, 3.0, 0.0][group.rank()])];
        group.all_reduce(&mut x, ReduceOp::Mean).unwrap();
        assert_eq!(x[0].to_f32(), 683.5);

        let mut x = [bf16::from_f32([256.0, 5.0, 0.0][group.rank()])];
        group.all_reduce(&mut x, ReduceOp::Mean).unwrap();
        assert_eq!(x[0].to_f32(), 87.0);
    });
}

pub fn nan_wins_min_and_max(make: Make) {
    fn once<T: Sample>(group: &ProcessGroup, nan: T, is_nan: fn(T) -> bool) {
        for op in [ReduceOp::Min, ReduceOp::Max] {
            for len in [10, LONG] {
                let mut buf: Vec<T> = samples(group.rank(), 0, len);
                let spot = group.rank() * (len - 1) / group.world_size();
                buf[spot] = nan;
                group.all_reduce(&mut buf, op).unwrap();
                let spots: Vec<usize> = (0..len).filter(|index| is_nan(buf[*index])).collect();
                let mut expected: Vec<usize> =
                    (0..group.world_size()).map(|rank| rank * (len - 1) / group.world_size()).collect();
                expected.dedup();
                assert_eq!(spots, expected, "{op} of {}", T::DTYPE);
            }
        }
    }
    for n in [1, 2, 3, 7] {
        groups(make, n, |group| {
            once(group, f64::NAN, f64::is_nan);
            once(group, -f32::NAN, f32::is_nan);
            once(group, f16::NAN, f16::is_nan);
            once(group, bf16::NAN, bf16::is_nan);
        });
    }
}

pub fn integers_wrap(make: Make) {
    groups(make, 3, |group| {
        let mut x = [100_i8, -100];
        group.all_reduce(&mut x, ReduceOp::Sum).unwrap();
        assert_eq!(x, [44, -44]);
        let mut x = [i64::MAX];
        group.all_reduce(&mut x, ReduceOp::Sum).unwrap();
        assert_eq!(x, [i64::MAX - 2]);
        let mut x = [16_u8];
        group.all_reduce(&mut x, ReduceOp::Product).unwrap();
        assert_eq!(x, [0]);
    });
}

pub fn equal_weights_are_the_mean(make: Make) {
    fn once<T: Sample>(group: &ProcessGroup, len: usize, weight: f64) {
        let mut buf: Vec<T> = samples(group.rank(), 0, len);
        group.all_reduce_weighted(&mut buf, weight).unwrap();
        let n = group.world_size();
        let what = || format!("weights {weight} of {len} {} on {n} ranks", T::DTYPE);
        assert_bits(&buf, |index| reduced(ReduceOp::Mean, n, index), what);
    }
    for n in WORLDS {
        groups(make, n, |group| {
            for weight in [1.0, 3.0, 0.1, 1e300] {
                for len in [0, 1, 1000] {
                    once::<f64>(group, len, weight);
                    once::<f32>(group, len, weight);
                    once::<f16>(group, len, weight);
                    once::<bf16>(group, len, weight);
                }
            }
            once::<f32>(group, LONG, 0.7);
        });
    }
}

/// Messages larger than any socket buffer, from all ranks at once.
pub fn large_messages_both_ways(make: Make) {
    const LEN: usize = 4 * 1024 * 1024;
    groups(make, 2, |group| {
        let rank = group.rank() as i32;
        let mut buf: Vec<i32> = (0..LEN as i32).map(|index| index * (rank + 1)).collect();
        group.all_reduce(&mut buf, ReduceOp::Sum).unwrap();
        assert!(buf.iter().zip(0..).all(|(x, index)| *x == index * 3));
        let rows = group.all_gather(&buf).unwrap();
        assert!(rows[..LEN] == buf && rows[LEN..] == buf);
    });
}
