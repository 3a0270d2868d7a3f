//! Reductions of the sums of several subtrees per rank.

use std::ops::Range;

use super::{Engine, checked_weights};
use crate::call::Call;
use crate::logical_ranks::LogicalRanks;
use crate::reduce::{Form, Leaf, Terms, halves};
use crate::{DType, Result};

/// What one rank adds to a mean over leaves: the sums of its [subtrees](LogicalRanks::subtrees), and their weights.
#[derive(Clone, Copy, Debug)]
pub struct OwnLeaves<'a> {
    /// Division of the leaves between the ranks.
    pub division: LogicalRanks,
    /// Weight of each [row](LogicalRanks::rows): what its leaves add to the divisor, added up the tree. Rows behind the
    /// last subtree weigh 0. Empty for a sum, which is not divided.
    pub weights: &'a [f64],
}

/// Reduces one range of elements per rank, of which this rank gets its own, `out`: `ranges`, in bytes of a row.
/// `buffer` is `[rows, n]`. Costs an [`Engine::all_to_all`].
pub(crate) fn reduce_leaf_rows<E: Engine + ?Sized>(
    engine: &mut E,
    call: &Call,
    (dtype, own): (DType, OwnLeaves<'_>),
    buffer: &[u8],
    ranges: &[Range<usize>],
    out: &mut [u8],
) -> Result<()> {
    let OwnLeaves { division, weights } = own;
    let (world, rows) = (ranges.len(), division.rows());
    let row_bytes = buffer.len() / rows;
    let longest = ranges.iter().map(Range::len).max().unwrap_or_default();
    // The message to a rank: its range of each row, then the weights.
    let weight_bytes = size_of_val(weights);
    let message = rows * longest + weight_bytes;
    let mut sends = vec![0; world * message];
    for (range, send) in ranges.iter().zip(sends.chunks_mut(message.max(1))) {
        for row in 0..rows {
            let from = row * row_bytes + range.start;
            send[row * longest..][..range.len()].copy_from_slice(&buffer[from..from + range.len()]);
        }
        send[rows * longest..].copy_from_slice(bytemuck::cast_slice(weights));
    }
    let mut received = vec![0; world * message];
    engine.all_to_all(call, &sends, &mut received)?;

    let mut leaves = Vec::with_capacity(world * rows);
    let mut weighted = Vec::with_capacity(world * rows);
    let mut of_ranks = Vec::with_capacity(world);
    for (rank, bytes) in received.chunks(message.max(1)).enumerate() {
        let of_rows: Vec<f64> = bytes[rows * longest..].chunks_exact(8).map(bytemuck::pod_read_unaligned).collect();
        of_ranks.push(of_rows.iter().sum());
        for (row, places) in division.subtrees(rank).into_iter().enumerate() {
            weighted.push((places.clone(), of_rows.get(row).copied().unwrap_or_default()));
            leaves.push(Leaf { places, bytes: &bytes[row * longest..][..out.len()] });
        }
    }
    let everything = 0..division.count();
    let total = match weights {
        [] => 1.0,
        _ => {
            checked_weights(call, &of_ranks)?;
            sum_up(everything.clone(), &weighted)
        }
    };
    Terms::of_leaves(dtype, division.count(), total)?.reduce(everything, &leaves, Form::Final, out)
}

/// The sum of the weights of these subtrees, which make up `tree`, in the order in which their elements are added.
fn sum_up(tree: Range<usize>, subtrees: &[(Range<usize>, f64)]) -> f64 {
    match subtrees {
        [] => 0.0,
        [(_, weight)] => *weight,
        _ => {
            let (left, right) = halves(tree);
            let (of_left, of_right) = subtrees.split_at(subtrees.partition_point(|(at, _)| at.start < right.start));
            sum_up(left, of_left) + sum_up(right, of_right)
        }
    }
}
