//! Tensors whose rows are divided between the ranks, evenly or not.

use std::ops::Range;

use burn_ddp_comm::{DType, PartReduction, ProcessGroup, ReduceOp, RowDivision};

use crate::harness::{Make, WORLDS, groups, refused};
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
                let mut room = vec![1; division.padded_len_bytes()];
                group.all_gather_parts(DType::F32, division, &part, &mut room, 7).unwrap();
                let gathered = values(&room[..division.len_bytes()]);
                assert_eq!(gathered.len(), whole.len());
                assert_bits(&gathered, |index| whole[index], || format!("{division:?}"));
                let pending = group.all_gather_parts_async(DType::F32, division, part, 7);
                assert_bits(&values(&pending.wait().unwrap()), |index| whole[index], || format!("{division:?}, async"));
            }
        });
    }
}

pub fn parts_of_every_division_are_reduced(make: Make) {
    fn both(group: &ProcessGroup, division: RowDivision, reduction: PartReduction) -> [Vec<u8>; 2] {
        let whole = bytes(&samples(group.rank(), 0, WIDTH * division.rows));
        let part = group.reduce_scatter_parts(DType::F32, division, &whole, &reduction, 7).unwrap();
        let pending = group.reduce_scatter_parts_async(DType::F32, division, whole, reduction, 7);
        [part, pending.wait().unwrap()]
    }
    for n in WORLDS {
        groups(make, n, |group| {
            let rank = group.rank();
            for division in divisions(n) {
                let (mine, equal) = (elements(division, rank), PartReduction::Weighted(vec![2.5; n]));
                for (op, reduction) in [
                    (ReduceOp::Sum, PartReduction::Op(ReduceOp::Sum)),
                    (ReduceOp::Max, PartReduction::Op(ReduceOp::Max)),
                    (ReduceOp::Mean, equal),
                ] {
                    let samples = |index: usize| -> Vec<f32> { (0..n).map(|rank| f32::sample(rank, index)).collect() };
                    let expected = |index: usize| f32::expected(op, &samples(mine.start + index));
                    for part in both(group, division, reduction.clone()) {
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
