//! Exchange of batches: every rank receives those of all ranks in rank order, a few at a time.

use burn::tensor::{DType, TensorData, TensorReadError};
use burn_ddp_comm::ProcessGroup;

use super::agreed_stop::metric_error;
use crate::{Result, chunked_broadcast};

/// The tensors of a batch.
pub(super) type Batch = Vec<TensorData>;

/// Shape, dtype and number of bytes of each tensor of each batch of a parcel.
type Contents = Vec<Vec<(Vec<usize>, DType, usize)>>;

/// Bytes from which a parcel (the batches of one collective) is full, so that small batches share a collective.
const PARCEL_BYTES: usize = 16 << 20;

/// Calls `f` with each batch of all ranks, rank 0's first: with the number of batches, the number of this one from 1,
/// and its tensors. *Collective*: each rank passes its `own` batches, and `f` gets the same batches on every rank.
///
/// Batches travel in parcels of about 16 MiB; a larger batch is a parcel of its own. Besides `own`, a rank holds two
/// copies of one parcel.
///
/// # Errors
///
/// An error if a peer failed; otherwise the first error of `f`, which is not called again after it.
pub(super) fn each_batch(
    group: &ProcessGroup,
    own: &[Batch],
    f: impl FnMut(usize, usize, Batch) -> Result<(), TensorReadError>,
) -> Result<(), TensorReadError> {
    in_parcels(group, own, PARCEL_BYTES, f)
}

fn in_parcels(
    group: &ProcessGroup,
    own: &[Batch],
    parcel_bytes: usize,
    mut f: impl FnMut(usize, usize, Batch) -> Result<(), TensorReadError>,
) -> Result<(), TensorReadError> {
    let counts = group.all_gather_object(&own.len()).map_err(metric_error)?;
    let (total, mut number) = (counts.iter().sum(), 0);
    let mut outcome = Ok(());
    for (root, count) in counts.into_iter().enumerate() {
        let mut received = 0;
        while received < count {
            let rest = if group.rank() == root { &own[received..] } else { &[] };
            let parcel = next_parcel(group, root, rest, parcel_bytes).map_err(metric_error)?;
            received += parcel.len();
            for batch in parcel {
                number += 1;
                // Also after an error of `f` this rank must receive the parcels, since the other ranks send them.
                outcome = outcome.and_then(|()| f(total, number, batch?));
            }
        }
    }
    outcome
}

/// The first batches of `root`'s `rest`, at least one. *Collective*. A batch that does not arrive as tensors is an
/// error in its place.
fn next_parcel(
    group: &ProcessGroup,
    root: usize,
    rest: &[Batch],
    parcel_bytes: usize,
) -> Result<Vec<Result<Batch, TensorReadError>>> {
    if group.rank() == root {
        let mut bytes = Vec::new();
        let mut len = 0;
        while len < rest.len() && (len == 0 || bytes.len() < parcel_bytes) {
            rest[len].iter().for_each(|tensor| bytes.extend_from_slice(tensor.as_bytes()));
            len += 1;
        }
        let tensor = |t: &TensorData| (t.shape().to_vec(), t.dtype(), t.as_bytes().len());
        let contents: Contents = rest[..len].iter().map(|batch| batch.iter().map(tensor).collect()).collect();
        group.broadcast_object(Some(contents), root)?;
        chunked_broadcast::send(group, &bytes)?;
        return Ok(rest[..len].iter().cloned().map(Ok).collect());
    }
    let contents: Contents = group.broadcast_object(None, root)?;
    let len = contents.iter().flatten().map(|(_, _, len)| len).sum();
    let bytes = chunked_broadcast::receive(group, len, root)?;
    let mut rest = &bytes[..];
    let mut tensor = |(shape, dtype, len): (Vec<usize>, DType, usize)| {
        let (bytes, behind) = rest.split_at(len);
        rest = behind;
        Ok(TensorData::try_from_bytes_vec(bytes.to_vec(), shape, dtype)?)
    };
    Ok(contents.into_iter().map(|batch| batch.into_iter().map(&mut tensor).collect()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Ddp, Error};

    /// Batch `nth` of a rank: two tensors, of other lengths in each batch.
    fn batch(rank: usize, nth: usize) -> Batch {
        let values = (0..nth * 3).map(|i| (100 * rank + 10 * nth + i) as f32).collect::<Vec<_>>();
        vec![TensorData::new(values, [nth, 3]), TensorData::from([rank as i64, nth as i64])]
    }

    #[test]
    fn all_ranks_get_all_batches_in_rank_order() {
        const COUNTS: [usize; 3] = [4, 0, 7];
        let expected: Vec<Batch> = (0..3).flat_map(|rank| (0..COUNTS[rank]).map(move |nth| batch(rank, nth))).collect();
        // One batch, a few, all of a rank in a parcel.
        for parcel_bytes in [1, 100, 1 << 20] {
            let ranks = Ddp::spawn(3, |ddp| {
                let own: Vec<Batch> = (0..COUNTS[ddp.rank()]).map(|nth| batch(ddp.rank(), nth)).collect();
                let mut all = Vec::new();
                in_parcels(ddp.group(), &own, parcel_bytes, |total, number, batch| {
                    all.push(batch);
                    assert_eq!((total, number), (11, all.len()));
                    Ok(())
                })
                .unwrap();
                Ok(all)
            });
            assert!(ranks.unwrap().iter().all(|all| *all == expected), "parcels of {parcel_bytes} bytes");
        }
    }

    #[test]
    fn an_error_on_one_rank_keeps_no_other_waiting() {
        let calls = Ddp::spawn(2, |ddp| {
            let (own, mut calls) = (vec![batch(0, 1); 5], 0);
            let outcome = in_parcels(ddp.group(), &own, 1, |_, number, _| {
                calls += 1;
                if ddp.rank() == 1 && number == 3 { Err(metric_error(Error::invalid("no"))) } else { Ok(()) }
            });
            assert_eq!(outcome.is_err(), ddp.rank() == 1);
            ddp.barrier()?;
            Ok(calls)
        });
        assert_eq!(calls.unwrap(), [10, 3]);
    }

    /// More than one object can carry.
    #[test]
    fn inputs_may_be_larger_than_any_object() {
        const BATCH: usize = 54 << 20;
        let sums = Ddp::spawn(2, |ddp| {
            let own: Vec<Batch> =
                (0..5 * ddp.rank()).map(|nth| vec![TensorData::new(vec![nth as u8; BATCH], [BATCH])]).collect();
            let mut seen = Vec::new();
            each_batch(ddp.group(), &own, |_, _, batch| {
                let bytes = batch[0].as_bytes();
                seen.push((bytes.len(), bytes[0], bytes[BATCH - 1]));
                Ok(())
            })
            .unwrap();
            Ok(seen)
        });
        let expected: Vec<_> = (0..5).map(|nth| (BATCH, nth, nth)).collect();
        assert_eq!(sums.unwrap(), [expected.clone(), expected]);
    }
}
