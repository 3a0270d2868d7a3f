//! Means over leaves: the bits of one tree over all leaves, on any number of ranks.

use std::ops::Range;

use burn_ddp_comm::{DType, Error, LogicalRanks, OwnLeaves};

use crate::harness::{Make, groups};
use crate::numerics::LONG;
use crate::reference_values::{Sample, tree};

/// Weights of the leaves: none, fractions, whole numbers.
fn weight(leaf: usize) -> f64 {
    [1.0, 0.1, 0.0, 7.0, 1e-3][leaf % 5]
}

/// The weighted element of a leaf; −0 for a leaf that adds nothing.
fn element(leaf: usize, index: usize) -> f32 {
    if weight(leaf) == 0.0 { -0.0 } else { weight(leaf) as f32 * f32::sample(leaf, index) }
}

/// A fold of a subtree's leaves in the order of the whole tree, which need not be that of `tree` over the subtree.
fn fold<A: Copy>(leaves: Range<usize>, of: &impl Fn(usize) -> A, add: &impl Fn(A, A) -> A) -> A {
    tree(leaves.map(of).collect(), add)
}

pub fn means_of_leaves_do_not_depend_on_the_ranks(make: Make) {
    for n in [1, 2, 3, 4, 7] {
        groups(make, n, |group| {
            for count in [7, 8, 12, 14] {
                let division = LogicalRanks::new(count, n).unwrap();
                for len in [5, if count == 14 { LONG } else { 20_000 }] {
                    let rows = division.rows();
                    let mut buffer = group.shared_buffers(&[rows * len * 4]).unwrap().remove(0);
                    let (mut elements, mut weights) = (vec![-0.0_f32; rows * len], vec![0.0; rows]);
                    for (row, leaves) in division.subtrees(group.rank()).into_iter().enumerate() {
                        for index in 0..len {
                            let of = |leaf| element(leaf, index);
                            elements[row * len + index] = fold(leaves.clone(), &of, &|a, b| a + b);
                        }
                        weights[row] = fold(leaves, &weight, &|a, b| a + b);
                    }
                    for divides in [true, false] {
                        buffer.set_len(rows * len * 4);
                        let bytes: Vec<u8> = elements.iter().flat_map(|element| element.to_ne_bytes()).collect();
                        buffer.bytes_mut().copy_from_slice(&bytes);
                        let own = OwnLeaves { division, weights: if divides { &weights } else { &[] } };
                        let got = group.all_reduce_leaves_shared(DType::F32, &mut buffer, own, 3).unwrap();
                        let float = |bytes: &[u8]| f32::from_ne_bytes(bytes.try_into().unwrap());
                        let got: Vec<f32> = got.chunks_exact(4).map(float).collect();
                        let total = if divides { fold(0..count, &weight, &|a, b| a + b) as f32 } else { 1.0 };
                        assert_eq!(got.len(), len);
                        for (index, got) in got.into_iter().enumerate() {
                            let sum = fold(0..count, &|leaf| element(leaf, index), &|a, b| a + b);
                            let expected = sum / total;
                            assert_eq!(got.to_bits(), expected.to_bits(), "{count} leaves, {n} ranks, at {index}");
                        }
                    }
                }
            }
        });
    }
}

pub fn leaves_without_weight_are_refused_on_all_ranks_alike(make: Make) {
    for (n, count) in [(2, 4), (2, 6)] {
        groups(make, n, |group| {
            let division = LogicalRanks::new(count, n).unwrap();
            let weights = vec![0.0; division.rows()];
            let mut buffer = group.shared_buffers(&[division.rows() * 8]).unwrap().remove(0);
            let error = |own: OwnLeaves<'_>, buffer: &mut _| {
                group.all_reduce_leaves_shared(DType::F32, buffer, own, 0).map(drop).unwrap_err()
            };
            let zero = error(OwnLeaves { division, weights: &weights }, &mut buffer);
            assert!(zero.to_string().contains("nothing to average") && zero.group_usable(), "{zero}");
            let other = LogicalRanks::new(count, n - 1).unwrap();
            let wrong = error(OwnLeaves { division: other, weights: &[1.0] }, &mut buffer);
            assert!(wrong.to_string().contains("leaves for 1 ranks, but the group has 2"), "{wrong}");
            // The ranks disagree on the number of leaves.
            let division = LogicalRanks::new(count + group.rank() * 4, n).unwrap();
            buffer.set_len(division.rows() * 8);
            let differ = error(OwnLeaves { division, weights: &vec![1.0; division.rows()] }, &mut buffer);
            assert!(matches!(differ, Error::Mismatch { .. }), "{differ}");
        });
    }
}
