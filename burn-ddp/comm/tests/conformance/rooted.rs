//! Collectives with a root, and all-to-all: the right numbers in the right places, and no other place changed.

use burn_ddp_comm::{DType, Error, ProcessGroup, ReduceOp};

use crate::harness::{Make, WORLDS, at_once, fatal, groups, members, refused};
use crate::reference_values::{Sample, assert_bits, for_each_dtype, ops, samples};

/// Enough to be cut in slices for any world, and not to divide.
const LONG: usize = 65_537;

fn reduce_once<T: Sample>(group: &ProcessGroup, op: ReduceOp, root: usize, len: usize) {
    let (n, rank) = (group.world_size(), group.rank());
    let mut buf: Vec<T> = samples(rank, 0, len);
    group.reduce(&mut buf, op, root).unwrap();
    let what = || format!("{op} of {len} {} on {n} ranks for {root}, on {rank}", T::DTYPE);
    if rank != root {
        return assert_bits(&buf, |index| T::sample(rank, index), what);
    }
    let reduced = |index| T::expected(op, &(0..n).map(|rank| T::sample(rank, index)).collect::<Vec<_>>());
    assert_bits(&buf, reduced, what);
}

pub fn reduce_of_every_dtype_op_and_root(make: Make) {
    for n in WORLDS {
        groups(make, n, |group| {
            for root in 0..n {
                for_each_dtype!(T => for op in ops::<T>() { reduce_once::<T>(group, op, root, 10) });
                for len in [0, 1, 16_384 / n, 16_384 / n + 1, LONG] {
                    reduce_once::<f32>(group, ReduceOp::Mean, root, len);
                }
            }
            for_each_dtype!(T => reduce_once::<T>(group, ops::<T>().next().unwrap(), n - 1, LONG));
        });
    }
}

/// The root of a reduce gets the bits that every rank gets from an all-reduce.
pub fn reduce_is_all_reduce_for_one(make: Make) {
    groups(make, 3, |group| {
        for len in [7, LONG] {
            let mut mine: Vec<half::bf16> = samples(group.rank(), 0, len);
            let mut all = mine.clone();
            group.all_reduce(&mut all, ReduceOp::Sum).unwrap();
            group.reduce(&mut mine, ReduceOp::Sum, 1).unwrap();
            assert!(group.rank() != 1 || mine == all);
        }
    });
}

pub fn gather_to_every_root(make: Make) {
    fn once<T: Sample>(group: &ProcessGroup, root: usize, len: usize) {
        let n = group.world_size();
        let rows = group.gather::<T>(&samples(group.rank(), 0, len), root).unwrap();
        assert_eq!(rows.is_some(), group.rank() == root);
        let Some(rows) = rows else { return };
        assert_eq!(rows.len(), n * len);
        for rank in 0..n {
            let row = &rows[rank * len..][..len];
            assert_bits(row, |index| T::sample(rank, index), || format!("row {rank} of {n} × {len} {}", T::DTYPE));
        }
    }
    for n in WORLDS {
        groups(make, n, |group| {
            for root in 0..n {
                for len in [0, 1, 10, 1000] {
                    for_each_dtype!(T => once::<T>(group, root, len));
                }
                once::<i32>(group, root, LONG);
            }
            let gathered = group.gather_bytes(DType::F16, &[group.rank() as u8; 6], 0).unwrap();
            assert!(gathered.iter().flatten().enumerate().all(|(at, byte)| usize::from(*byte) == at / 6));
        });
    }
}

pub fn scatter_from_every_root(make: Make) {
    fn once<T: Sample>(group: &ProcessGroup, root: usize, len: usize) {
        let (n, rank) = (group.world_size(), group.rank());
        let input: Vec<T> = samples(rank, 0, n * len);
        // Inputs of other ranks than the root are ignored, whatever their length.
        let input = match rank {
            _ if rank == root => Some(&input[..]),
            _ if rank % 2 == 0 => Some(&input[..len / 2]),
            _ => None,
        };
        let mut row: Vec<T> = samples(99, 0, len);
        group.scatter(input, &mut row, root).unwrap();
        let what = || format!("row {rank} of {n} × {len} {} from {root}", T::DTYPE);
        assert_bits(&row, |index| T::sample(root, rank * len + index), what);
    }
    for n in WORLDS {
        groups(make, n, |group| {
            for root in 0..n {
                for len in [0, 1, 10, 1000] {
                    for_each_dtype!(T => once::<T>(group, root, len));
                }
                once::<f64>(group, root, LONG);
            }
        });
    }
}

pub fn all_to_all_of_every_dtype(make: Make) {
    fn once<T: Sample>(group: &ProcessGroup, len: usize) {
        let (n, rank) = (group.world_size(), group.rank());
        let input: Vec<T> = samples(rank, 0, n * len);
        let mut rows: Vec<T> = samples(99, 0, n * len);
        group.all_to_all(&input, &mut rows).unwrap();
        for from in 0..n {
            let row = &rows[from * len..][..len];
            let what = || format!("row {from} of {n} × {len} {} on {rank}", T::DTYPE);
            assert_bits(row, |index| T::sample(from, rank * len + index), what);
        }
        assert_bits(&input, |index| T::sample(rank, index), || "the input".to_string());
    }
    for n in WORLDS {
        groups(make, n, |group| {
            for len in [0, 1, 2, 10, 1000] {
                for_each_dtype!(T => once::<T>(group, len));
            }
            once::<u8>(group, 200_003);
        });
    }
}

pub fn what_cannot_be_is_refused_by_all(make: Make) {
    for n in [1, 3] {
        groups(make, n, |group| {
            let error = refused(group.reduce(&mut [1_i32], ReduceOp::Mean, 0));
            assert!(error.to_string().contains("mean is not defined for i32"), "{error}");
            refused(group.reduce(&mut [1.0_f32], ReduceOp::Sum, n));
            refused(group.reduce_bytes(DType::F32, &mut [0; 7], ReduceOp::Sum, 0));
            refused(group.gather(&[1_u8], n));
            refused(group.gather_bytes(DType::I64, &[1; 9], 0));
            refused(group.scatter(Some(&[1_u8; 9]), &mut [0; 9], n));
            refused(group.scatter_bytes(DType::I64, None, &mut [1; 9], 0));
            refused(group.all_to_all(&vec![1_i8; 2 * n], &mut vec![0; 3 * n]));
            refused(group.all_to_all_bytes(DType::F64, &[0; 12], &mut [0; 12]));
            if n == 3 {
                let error = refused(group.all_to_all(&[1_i8; 4], &mut [0; 4]));
                assert!(error.to_string().contains("an input of 4 elements is not [world, n] = 3 × n"), "{error}");
            }
            group.barrier().unwrap();
        });
    }
}

/// A fault that only the root can see ends the world, since the other ranks would wait.
pub fn a_root_without_rows_is_noticed(make: Make) {
    for input in [None, Some(&[1_u8; 5][..])] {
        let results = at_once(|| {
            groups(make, 2, |group| {
                let input = input.filter(|_| group.rank() == 0);
                group.scatter(input, &mut [0_u8; 3], 0)
            })
        });
        results.into_iter().for_each(|result| {
            let error = fatal(result);
            assert!(matches!(error, Error::PeerFailed { .. }) && error.rank() == Some(0), "{error}");
            let text = error.to_string();
            assert!(text.contains("scatter, as its root") && text.contains(file!()), "{text}");
        });
    }
}

type Call = fn(&ProcessGroup) -> Result<(), Error>;

pub fn each_difference_is_a_mismatch(make: Make) {
    let cases: [(&str, Call, Call); 8] = [
        ("roots", |g| g.reduce(&mut [1.0; 3], ReduceOp::Sum, 0), |g| g.reduce(&mut [1.0; 3], ReduceOp::Sum, 1)),
        ("reduce ops", |g| g.reduce(&mut [1.0; 3], ReduceOp::Sum, 0), |g| g.reduce(&mut [1.0; 3], ReduceOp::Max, 0)),
        ("lengths", |g| g.gather(&[1_u8; 3], 2).map(drop), |g| g.gather(&[1_u8; 4], 2).map(drop)),
        ("roots", |g| g.gather(&[1_u8; 3], 2).map(drop), |g| g.gather(&[1_u8; 3], 0).map(drop)),
        ("dtypes", |g| g.scatter(Some(&[1_u8; 9]), &mut [0; 3], 0), |g| g.scatter(None, &mut [0_i8; 3], 0)),
        ("lengths", |g| g.scatter(Some(&[1_u8; 9]), &mut [0; 3], 0), |g| g.scatter(None, &mut [0_u8; 2], 0)),
        ("lengths", |g| g.all_to_all(&[1_u8; 3], &mut [0; 3]), |g| g.all_to_all(&[1_u8; 6], &mut [0; 6])),
        ("collectives", |g| g.all_to_all(&[1_u8; 3], &mut [0; 3]), |g| g.all_gather(&[1_u8; 3]).map(drop)),
    ];
    for (what, usual, odd) in cases {
        let results = at_once(|| groups(make, 3, |group| if group.rank() == 1 { odd(group) } else { usual(group) }));
        for result in results {
            let error = fatal(result);
            let Error::Mismatch { first, second } = &error else { panic!("{what}: {error}") };
            assert!(first.rank == 1 || second.rank == 1, "{what}: {error}");
            assert!(error.to_string().contains(&format!("({what}")), "{what}: {error}");
            assert_ne!(first.call.site, second.call.site, "{what}: {error}");
        }
    }
}

pub fn a_failure_ends_each_of_them(make: Make) {
    let calls: [Call; 4] = [
        |group| group.reduce(&mut vec![1.0_f32; 100_000], ReduceOp::Sum, 0),
        |group| group.gather(&[1.0_f64; 5], 2).map(drop),
        |group| group.scatter(Some(&[1_i64; 15]), &mut [0; 5], 1),
        |group| group.all_to_all(&[1_i64; 30], &mut [0; 30]),
    ];
    for call in calls {
        let results = at_once(|| {
            members(make, 3, |world, group| {
                if world.rank() == 1 {
                    world.fail("out of memory");
                }
                call(&group)
            })
        });
        for result in results {
            let error = fatal(result);
            assert!(matches!(&error, Error::PeerFailed { peer, .. } if peer.rank == 1), "{error}");
        }
    }
}
