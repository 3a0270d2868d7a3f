//! The algorithms of engines between hosts, once for all transports.
//!
//! Every collective begins with a frame from everybody to everybody, even where only the header has something to say.
//! So every rank compares its call with every other's, and nobody is ever more than one collective ahead.

use super::{Engine, Incoming, Outgoing, Transport};
use crate::call::Call;
use crate::reduce::{Reduction, Source, reduce};
use crate::{DType, Error, ReduceOp, Result};

/// Up to this many bytes from all ranks together, everybody sends everything to everybody and reduces all of it: half
/// the latency, more bytes, the same bits.
const ONE_EXCHANGE_MAX_BYTES: usize = 64 * 1024;

/// An [`Engine`] over a [`Transport`].
#[derive(Debug)]
pub struct HostEngine<T> {
    transport: T,
    /// What came from peers and waits to be reduced. Kept, since fresh memory costs page faults.
    scratch: Vec<u8>,
}

impl<T: Transport> HostEngine<T> {
    /// The collectives over `transport`.
    pub fn new(transport: T) -> HostEngine<T> {
        HostEngine { transport, scratch: Vec::new() }
    }

    fn peers(&self) -> impl Iterator<Item = usize> + use<T> {
        let rank = self.transport.rank();
        (0..self.transport.world_size()).filter(move |peer| *peer != rank)
    }

    fn reduce_all(&mut self, call: &Call, dtype: DType, buf: &mut [u8], op: Option<ReduceOp>) -> Result<()> {
        if buf.len().saturating_mul(self.transport.world_size()) <= ONE_EXCHANGE_MAX_BYTES {
            let whole: &[u8] = buf;
            let sends: Vec<_> = self.peers().map(|peer| Outgoing { peer, payload: whole }).collect();
            let weights = self.collect(call, &sends, buf.len())?;
            return self.reduce_scratch(dtype, op, &weights, buf);
        }
        self.reduce_by_slices(call, dtype, buf, op)
    }

    /// Slice `j` of everybody goes straight to rank `j`, which reduces it and sends the result to everybody.
    fn reduce_by_slices(&mut self, call: &Call, dtype: DType, buf: &mut [u8], op: Option<ReduceOp>) -> Result<()> {
        let rank = self.transport.rank();
        let mut slices = slices(buf, dtype, self.transport.world_size());
        let sends: Vec<_> = self.peers().map(|peer| Outgoing { peer, payload: &*slices[peer] }).collect();
        let weights = self.collect(call, &sends, slices[rank].len())?;
        self.reduce_scratch(dtype, op, &weights, slices[rank])?;

        let mut result: &mut [u8] = &mut [];
        let mut receives = Vec::with_capacity(slices.len() - 1);
        for (peer, slice) in slices.drain(..).enumerate() {
            if peer == rank {
                result = slice;
            } else {
                receives.push(Incoming::new(peer, slice));
            }
        }
        let sends: Vec<_> = self.peers().map(|peer| Outgoing { peer, payload: &*result }).collect();
        let call = Call { stage: call.stage + 1, ..call.clone() };
        self.transport.exchange(&call, &sends, &mut receives)
    }

    /// Exchanges `sends` for `len` bytes from each peer, which go to `scratch` in rank order. Yields everybody's weight.
    fn collect(&mut self, call: &Call, sends: &[Outgoing<'_>], len: usize) -> Result<Vec<f64>> {
        let world_size = self.transport.world_size();
        let peers = self.peers();
        self.scratch.resize(len * (world_size - 1), 0);
        let rooms = rows(&mut self.scratch, len);
        let mut receives: Vec<_> = peers.zip(rooms).map(|(peer, room)| Incoming::new(peer, room)).collect();
        self.transport.exchange(call, sends, &mut receives)?;
        let mut weights = vec![call.weight; world_size];
        for receive in &receives {
            weights[receive.peer] = receive.weight;
        }
        Ok(weights)
    }

    /// Reduces what `collect` left in `scratch`, and `out`, into `out`. `op` is `None` for the weighted mean.
    fn reduce_scratch(&self, dtype: DType, op: Option<ReduceOp>, weights: &[f64], out: &mut [u8]) -> Result<()> {
        let reduction = match op {
            Some(op) => Reduction::Op(op),
            None => Reduction::Weighted(checked(weights)?),
        };
        let mut sources = vec![Source::Output; self.transport.world_size()];
        for (nth, peer) in self.peers().enumerate() {
            sources[peer] = Source::Bytes(&self.scratch[nth * out.len()..][..out.len()]);
        }
        reduce(dtype, reduction, &sources, out)
    }
}

impl<T: Transport> Engine for HostEngine<T> {
    fn name(&self) -> &'static str {
        self.transport.name()
    }

    fn barrier(&mut self, call: &Call) -> Result<()> {
        let sends: Vec<_> = self.peers().map(|peer| Outgoing { peer, payload: &[] }).collect();
        let mut receives: Vec<_> = self.peers().map(|peer| Incoming::new(peer, &mut [])).collect();
        self.transport.exchange(call, &sends, &mut receives)
    }

    fn all_reduce(&mut self, call: &Call, dtype: DType, buf: &mut [u8], op: ReduceOp) -> Result<()> {
        self.reduce_all(call, dtype, buf, Some(op))
    }

    fn all_reduce_weighted(&mut self, call: &Call, dtype: DType, buf: &mut [u8]) -> Result<()> {
        self.reduce_all(call, dtype, buf, None)
    }

    fn broadcast(&mut self, call: &Call, buf: &mut [u8], root: usize) -> Result<()> {
        if self.transport.rank() == root {
            let sends: Vec<_> = self.peers().map(|peer| Outgoing { peer, payload: &*buf }).collect();
            let mut receives: Vec<_> = self.peers().map(|peer| Incoming::new(peer, &mut [])).collect();
            return self.transport.exchange(call, &sends, &mut receives);
        }
        let sends: Vec<_> = self.peers().map(|peer| Outgoing { peer, payload: &[] }).collect();
        let mut receives: Vec<_> =
            self.peers().filter(|peer| *peer != root).map(|peer| Incoming::new(peer, &mut [])).collect();
        receives.push(Incoming::new(root, buf));
        self.transport.exchange(call, &sends, &mut receives)
    }

    fn all_gather(&mut self, call: &Call, input: &[u8], outputs: &mut [&mut [u8]]) -> Result<()> {
        let rank = self.transport.rank();
        outputs[rank].copy_from_slice(input);
        let sends: Vec<_> = self.peers().map(|peer| Outgoing { peer, payload: input }).collect();
        let mut receives: Vec<_> = outputs
            .iter_mut()
            .enumerate()
            .filter(|(peer, _)| *peer != rank)
            .map(|(peer, output)| Incoming::new(peer, output))
            .collect();
        self.transport.exchange(call, &sends, &mut receives)
    }

    fn reduce_scatter(
        &mut self,
        call: &Call,
        dtype: DType,
        input: &[u8],
        output: &mut [u8],
        op: ReduceOp,
    ) -> Result<()> {
        let len = output.len();
        let row = |rank: usize| &input[rank * len..][..len];
        let sends: Vec<_> = self.peers().map(|peer| Outgoing { peer, payload: row(peer) }).collect();
        let weights = self.collect(call, &sends, len)?;
        output.copy_from_slice(row(self.transport.rank()));
        self.reduce_scratch(dtype, Some(op), &weights, output)
    }
}

/// All ranks see the same weights here, so all of them find the same fault, and the group stays usable.
fn checked(weights: &[f64]) -> Result<&[f64]> {
    let refuse = |rank, message| Err(Error::InvalidArgument { message, rank, during: None });
    if let Some(rank) = weights.iter().position(|weight| !weight.is_finite() || *weight < 0.0) {
        return refuse(
            Some(rank),
            format!("the weight of rank {rank} is {}: weights are finite and not negative", weights[rank]),
        );
    }
    if weights.iter().all(|weight| *weight == 0.0) {
        return refuse(None, "the weights of all ranks are 0: there is nothing to average".to_string());
    }
    Ok(weights)
}

/// `buf` in `count` runs of whole elements whose lengths differ by at most one.
fn slices(mut buf: &mut [u8], dtype: DType, count: usize) -> Vec<&mut [u8]> {
    let size = dtype.size_bytes();
    let (share, longer) = (buf.len() / size / count, buf.len() / size % count);
    (0..count)
        .map(|nth| {
            let elements = share + usize::from(nth < longer);
            let (slice, rest) = std::mem::take(&mut buf).split_at_mut(elements * size);
            buf = rest;
            slice
        })
        .collect()
}

/// `buf` in rows of `len` bytes; without end if `len` is 0.
fn rows(mut buf: &mut [u8], len: usize) -> impl Iterator<Item = &mut [u8]> {
    std::iter::from_fn(move || {
        let (row, rest) = std::mem::take(&mut buf).split_at_mut_checked(len)?;
        buf = rest;
        Some(row)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_cover_the_buffer_in_whole_elements() {
        for (elements, lens) in [(0, [0, 0, 0]), (2, [4, 4, 0]), (7, [12, 8, 8])] {
            let mut buf = vec![0; elements * 4];
            let got: Vec<usize> = slices(&mut buf, DType::F32, 3).iter().map(|slice| slice.len()).collect();
            assert_eq!(got, lens);
        }
    }
}
