//! Means of unequal weights, bit by bit: products and sums first, one division at the end.

use burn_ddp_comm::{DType, Error, PartReduction, ReduceOp, RowDivision};

use crate::divided::{WIDTH, bytes, divisions, elements, values};
use crate::harness::{Make, WORLDS, groups};
use crate::numerics::LONG;
use crate::reference_values::{Sample, assert_bits, samples};

pub fn unequal_weights_are_exact(make: Make) {
    for n in [2, 3, 4, 7] {
        groups(make, n, |group| {
            for len in [3, LONG] {
                // Whole numbers: all products and sums are exact, so any order yields the same.
                let value = |rank: usize, index: usize| (rank * 5 + index % 100) as f64;
                let weight = |rank: usize| (rank % 3 + 1) as f64;
                let mut buf: Vec<f64> = (0..len).map(|index| value(group.rank(), index)).collect();
                group.all_reduce_weighted(&mut buf, weight(group.rank())).unwrap();
                let total: f64 = (0..n).map(weight).sum();
                let mean = |index: usize| (0..n).map(|rank| weight(rank) * value(rank, index)).sum::<f64>() / total;
                assert_bits(&buf, mean, || format!("weighted mean of {n} ranks"));
            }
        });
    }
}

pub fn weight_zero_means_absent(make: Make) {
    groups(make, 4, |group| {
        for len in [2, LONG] {
            let absent = group.rank() == 1;
            let mut buf: Vec<f32> = if absent { vec![f32::NAN; len] } else { samples(group.rank(), 0, len) };
            group.all_reduce_weighted(&mut buf, if absent { 0.0 } else { 2.5 }).unwrap();
            let present = |index: usize| [0, 2, 3].map(|rank| f32::sample(rank, index));
            assert_bits(&buf, |index| f32::expected(ReduceOp::Mean, &present(index)), || "the others".to_string());
        }
        // NaN of a rank with a weight does count.
        let mut buf = [if group.rank() == 1 { f32::NAN } else { 1.0 }];
        group.all_reduce_weighted(&mut buf, 0.5).unwrap();
        assert!(buf[0].is_nan());
    });
}

pub fn weights_that_differ_are_an_error_on_all_ranks(make: Make) {
    for n in [2, 3, 4] {
        groups(make, n, |group| {
            let rank = group.rank();
            let weights: Vec<f64> = (0..n).map(|of| if (of, rank) == (0, n - 1) { 2.0 } else { 1.0 }).collect();
            let division = RowDivision { rows: n, row_bytes: 4, world_size: n };
            let (whole, weights) = (vec![0; 4 * n], PartReduction::Weighted(weights));
            let error = group.reduce_scatter_parts(DType::F32, division, &whole, &weights, 0).unwrap_err();
            assert!(matches!(error, Error::Mismatch { .. }), "rank {rank} of {n}: {error}");
        });
    }
}

pub fn parts_of_a_weighted_mean_are_those_of_the_whole(make: Make) {
    for n in WORLDS {
        groups(make, n, |group| {
            let rank = group.rank();
            for division in divisions(n) {
                let weights: Vec<f64> = (0..n).map(|rank| [1.5, 0.0, 0.3][rank % 3]).collect();
                let input: Vec<f32> = samples(rank, 0, WIDTH * division.rows);
                let mut whole = input.clone();
                group.all_reduce_weighted(&mut whole, weights[rank]).unwrap();
                let (mine, reduction) = (elements(division, rank), PartReduction::Weighted(weights));
                let part = group.reduce_scatter_parts(DType::F32, division, &bytes(&input), &reduction, 7).unwrap();
                assert_bits(&values(&part), |index| whole[mine.start + index], || format!("{division:?}"));
            }
        });
    }
}
