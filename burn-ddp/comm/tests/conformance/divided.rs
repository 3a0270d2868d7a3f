//! Tensors whose rows are divided between the ranks, evenly or not.

use std::ops::Range;

use burn_ddp_comm::{DType, Error, PartReduction, ProcessGroup, ReduceOp, RowDivision, SharedBuffer};

use crate::harness::{Make, WORLDS, at_once, fatal, groups, refused};
use crate::reference_values::{Sample, assert_bits, samples};

/// Elements of a row.
pub const WIDTH: usize = 3;

/// Divisions of f32 rows between `n` ranks: of no row, fewer rows than ranks, as many, and more.
pub fn divisions(n: usize) -> impl Iterator<Item = RowDivision> {
    let rows = [0, 1, n - 1, n, n + 1, 3 * n - 1, 5 * n, 4001];
    rows.into_iter().map(move |rows| RowDivision { rows, row_bytes: 4 * WIDTH, world_size: n })
}

pub fn elements(division: RowDivision, rank: usize) -> Range<usize> {
    let bytes = division.bytes_of(rank);
    bytes.start / 4..bytes.end / 4
}

pub fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_ne_bytes()).collect()
}

pub fn values(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|x| f32::from_ne_bytes(*x)).collect()
}

pub fn parts_of_every_division_are_gathered(make: Make) {
    for n in WORLDS {
        groups(make, n, |group| {
            for division in divisions(n) {
                let whole: Vec<f32> = samples(5, 0, WIDTH * division.rows);
                let part = bytes(&whole[elements(division, group.rank())]);
                let mut room = vec![1; division.len_bytes()];
                group.all_gather_parts(DType::F32, division, &part, &mut room, 7).unwrap();
                assert_bits(&values(&room), |index| whole[index], || format!("{division:?}"));
                let pending = group.all_gather_parts_async(DType::F32, division, part, 7);
                assert_bits(&values(&pending.wait().unwrap()), |index| whole[index], || format!("{division:?}, async"));
            }
        });
    }
}

pub fn parts_are_gathered_in_shared_buffers(make: Make) {
    for n in WORLDS {
        groups(make, n, |group| {
            let most = divisions(n).map(RowDivision::len_bytes).max().unwrap();
            let mut buffers = group.shared_buffers(&[most, most]).unwrap();
            let mut views = Vec::new();
            for (turn, division) in divisions(n).chain(divisions(n)).enumerate() {
                let whole: Vec<f32> = samples(turn, 0, WIDTH * division.rows);
                let part = bytes(&whole[elements(division, group.rank())]);
                // In every third turn rank 0 has a buffer of another index, and after every other one a view.
                let buffer = &mut buffers[usize::from(turn % 3 == 2 && group.rank() == 0)];
                buffer.set_len(division.len_bytes());
                let view = group.all_gather_parts_shared(DType::F32, division, &part, buffer, 7).unwrap();
                assert_bits(&values(&view), |index| whole[index], || format!("{division:?}, turn {turn}"));
                views = if turn % 2 == 1 && group.rank() == 0 { vec![(view, whole)] } else { vec![] };
                group.barrier().unwrap();
                for (view, whole) in &views {
                    assert_bits(&values(view), |index| whole[index], || format!("{division:?}, later"));
                }
            }
            drop(views);
        });
    }
}

pub fn parts_of_every_division_are_reduced(make: Make) {
    /// The parts that each of the calls returns; ranks pass buffers of the same index, and of different ones.
    fn all(
        group: &ProcessGroup,
        buffers: &mut [SharedBuffer],
        division: RowDivision,
        reduction: PartReduction,
    ) -> [Vec<u8>; 4] {
        let whole = bytes(&samples(group.rank(), 0, WIDTH * division.rows));
        let part = group.reduce_scatter_parts(DType::F32, division, &whole, &reduction, 7).unwrap();
        let shared = [0, usize::from(group.rank() == 0)].map(|index| {
            let buffer = &mut buffers[index];
            buffer.set_len(division.len_bytes());
            buffer.bytes_mut().copy_from_slice(&whole);
            group.reduce_scatter_parts_shared(DType::F32, division, buffer, &reduction, 7).unwrap()
        });
        let pending = group.reduce_scatter_parts_async(DType::F32, division, whole, reduction, 7);
        let [same, different] = shared;
        [part, same, different, pending.wait().unwrap()]
    }
    for n in WORLDS {
        groups(make, n, |group| {
            let rank = group.rank();
            let most = divisions(n).map(RowDivision::len_bytes).max().unwrap();
            let mut buffers = group.shared_buffers(&[most, most]).unwrap();
            for division in divisions(n) {
                let (mine, equal) = (elements(division, rank), PartReduction::Weighted(vec![2.5; n]));
                for (op, reduction) in [
                    (ReduceOp::Sum, PartReduction::Op(ReduceOp::Sum)),
                    (ReduceOp::Max, PartReduction::Op(ReduceOp::Max)),
                    (ReduceOp::Mean, equal),
                ] {
                    let samples = |index: usize| -> Vec<f32> { (0..n).map(|rank| f32::sample(rank, index)).collect() };
                    let expected = |index: usize| f32::expected(op, &samples(mine.start + index));
                    for part in all(group, &mut buffers, division, reduction.clone()) {
                        assert_eq!(part.len(), 4 * mine.len());
                        assert_bits(&values(&part), expected, || format!("{reduction:?} of {division:?}"));
                    }
                }
            }
        });
    }
}

pub fn divisions_that_do_not_fit_are_refused_by_all(make: Make) {
    for n in [2, 3] {
        groups(make, n, |group| {
            let division = RowDivision { rows: n, row_bytes: 4, world_size: n };
            let reduce = |division, whole: &[u8], reduction: &PartReduction| {
                let error = refused(group.reduce_scatter_parts(DType::F32, division, whole, reduction, 0));
                error.to_string()
            };
            let (whole, sum) = (vec![0; 4 * n], PartReduction::Op(ReduceOp::Sum));
            let other = RowDivision { world_size: n + 1, ..division };
            assert!(reduce(other, &whole, &sum).contains("a RowDivision between"));
            let odd = RowDivision { row_bytes: 3, ..division };
            assert!(reduce(odd, &whole[..3 * n], &sum).contains("not a whole number of f32 elements"));
            assert!(reduce(division, &whole[4..], &sum).contains("but the RowDivision has"));
            let bad = [(vec![1.0; n + 1], "weights for"), (vec![0.0; n], "are 0"), (vec![-1.0; n], "negative")];
            for (weights, why) in bad {
                assert!(reduce(division, &whole, &PartReduction::Weighted(weights)).contains(why));
            }
            let gathered = group.all_gather_parts(DType::F32, division, &[0; 8], &mut vec![0; 4 * n], 0);
            assert!(refused(gathered).to_string().contains("a buffer of 8 bytes, but the RowDivision has 4"));
            group.barrier().unwrap();
        });
    }
}

/// In the first pair of divisions the longest parts are equally long, in the second also the wholes.
pub fn divisions_that_differ_are_an_error_on_all_ranks(make: Make) {
    let gather = |group: &ProcessGroup, division: RowDivision| {
        let (part, mut whole) = (vec![0; division.bytes_of(group.rank()).len()], vec![0; division.len_bytes()]);
        group.all_gather_parts(DType::F32, division, &part, &mut whole, 0)
    };
    let reduce = |group: &ProcessGroup, division: RowDivision| {
        let (whole, sum) = (vec![0; division.len_bytes()], PartReduction::Op(ReduceOp::Sum));
        group.reduce_scatter_parts(DType::F32, division, &whole, &sum, 0).map(drop)
    };
    let gather_shared = |group: &ProcessGroup, division: RowDivision| {
        let buffer = &mut group.shared_buffers(&[64])?[0];
        buffer.set_len(division.len_bytes());
        let part = vec![0; division.bytes_of(group.rank()).len()];
        group.all_gather_parts_shared(DType::F32, division, &part, buffer, 0).map(drop)
    };
    let reduce_shared = |group: &ProcessGroup, division: RowDivision| {
        let (buffer, sum) = (&mut group.shared_buffers(&[64])?[0], PartReduction::Op(ReduceOp::Sum));
        buffer.set_len(division.len_bytes());
        group.reduce_scatter_parts_shared(DType::F32, division, buffer, &sum, 0).map(drop)
    };
    type Call<'a> = &'a (dyn Fn(&ProcessGroup, RowDivision) -> Result<(), Error> + Sync);
    for call in [&gather as Call, &reduce, &gather_shared, &reduce_shared] {
        for (usual, odd) in [((6, 4), (5, 4)), ((4, 4), (2, 8))] {
            let results = at_once(|| {
                groups(make, 3, |group| {
                    let (rows, row_bytes) = if group.rank() == 2 { odd } else { usual };
                    call(group, RowDivision { rows, row_bytes, world_size: 3 })
                })
            });
            for result in results {
                let error = fatal(result);
                assert!(matches!(&error, Error::Mismatch { .. }), "{error}");
                assert!(error.to_string().contains("rows"), "{error}");
            }
        }
    }
}
