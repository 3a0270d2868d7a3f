//! The algorithms of the collectives over a [`Transport`], the same for all transports.
//!
//! Every collective of a group begins with a frame from each rank to each other rank, even if it is only a header. So
//! each rank compares its call with the call of every other rank, and no rank is ever more than one collective ahead.

use super::{Engine, Incoming, Outgoing, Piece, Transport};
use crate::call::Call;
use crate::reduce::{Reduction, Source, reduce};
use crate::{DType, Error, ReduceOp, Result};

/// True if `ranks` buffers of `bytes` are so small that each is sent whole to every rank that needs a part of it: in
/// one exchange instead of several, with more bytes in all and the same bits.
pub(super) fn fit_one_exchange(bytes: usize, ranks: usize) -> bool {
    const MOST_BYTES: usize = 64 * 1024;
    bytes.saturating_mul(ranks) <= MOST_BYTES
}

/// An [`Engine`] over a [`Transport`].
#[derive(Debug)]
pub struct HostEngine<T> {
    transport: T,
    /// Bytes from peers that are to be reduced. Kept between calls, since fresh memory costs page faults.
    scratch: Vec<u8>,
    /// This rank's slice of a reduction whose result another rank gets. Kept for the same reason.
    slice: Vec<u8>,
}

impl<T: Transport> HostEngine<T> {
    /// The collectives over `transport`.
    pub fn new(transport: T) -> HostEngine<T> {
        HostEngine { transport, scratch: Vec::new(), slice: Vec::new() }
    }

    /// The transport, for exchanges beside those of the collectives.
    #[cfg(target_os = "linux")]
    pub(super) fn transport(&mut self) -> &mut T {
        &mut self.transport
    }

    fn peers(&self) -> impl Iterator<Item = usize> + use<T> {
        let rank = self.transport.rank();
        (0..self.transport.world_size()).filter(move |peer| *peer != rank)
    }

    fn reduce_all(&mut self, call: &Call, dtype: DType, buf: &mut [u8], op: Option<ReduceOp>) -> Result<()> {
        if fit_one_exchange(buf.len(), self.transport.world_size()) {
            // Each rank reduces all.
            let whole: &[u8] = buf;
            let sends: Vec<_> = self.peers().map(|peer| Outgoing { peer, payload: whole }).collect();
            let weights = self.collect(call, &sends, buf.len())?;
            return self.reduce_scratch(call, dtype, op, &weights, buf);
        }
        self.reduce_by_slices(call, dtype, buf, op)
    }

    /// Slice `j` of each rank goes straight to rank `j`, which reduces it and sends the result to all.
    fn reduce_by_slices(&mut self, call: &Call, dtype: DType, buf: &mut [u8], op: Option<ReduceOp>) -> Result<()> {
        let rank = self.transport.rank();
        let mut slices = slices(buf, dtype, self.transport.world_size());
        let result = std::mem::take(&mut slices[rank]);
        let sends: Vec<_> = self.peers().map(|peer| Outgoing { peer, payload: &*slices[peer] }).collect();
        self.reduce_arriving(call, dtype, op, &sends, result)?;

        let mut receives = from_others(rank, slices);
        let sends: Vec<_> = self.peers().map(|peer| Outgoing { peer, payload: &*result }).collect();
        self.transport.exchange(&call.next_stage(), &sends, &mut receives)
    }

    /// [`Engine::reduce`] of small buffers: each rank sends its whole buffer to the root.
    fn reduce_whole(&mut self, call: &Call, dtype: DType, buf: &mut [u8], op: ReduceOp, root: usize) -> Result<()> {
        if self.transport.rank() != root {
            return self.tell_root(call, buf, root);
        }
        let sends: Vec<_> = self.peers().map(|peer| Outgoing { peer, payload: &[] }).collect();
        let weights = self.collect(call, &sends, buf.len())?;
        self.reduce_scratch(call, dtype, Some(op), &weights, buf)
    }

    /// [`Engine::reduce`] of large buffers: slice `j` of each rank goes to rank `j`, which reduces it aside and sends
    /// the result to the root.
    fn reduce_sliced(&mut self, call: &Call, dtype: DType, buf: &mut [u8], op: ReduceOp, root: usize) -> Result<()> {
        let rank = self.transport.rank();
        let mut slices = slices(buf, dtype, self.transport.world_size());
        let own = std::mem::take(&mut slices[rank]);
        let sends: Vec<_> = self.peers().map(|peer| Outgoing { peer, payload: &*slices[peer] }).collect();
        if rank != root {
            let mut slice = std::mem::take(&mut self.slice);
            slice.clear();
            slice.extend_from_slice(own);
            self.reduce_arriving(call, dtype, Some(op), &sends, &mut slice)?;
            self.transport.exchange(&call.next_stage(), &[Outgoing { peer: root, payload: &slice }], &mut [])?;
            self.slice = slice;
            return Ok(());
        }
        self.reduce_arriving(call, dtype, Some(op), &sends, own)?;
        let mut receives = from_others(rank, slices);
        self.transport.exchange(&call.next_stage(), &[], &mut receives)
    }

    /// An exchange in which this rank sends a payload to the root and headers to the other ranks, and receives only
    /// headers.
    fn tell_root(&mut self, call: &Call, payload: &[u8], root: usize) -> Result<()> {
        let payload = |peer: usize| if peer == root { payload } else { &[] };
        let sends: Vec<_> = self.peers().map(|peer| Outgoing { peer, payload: payload(peer) }).collect();
        let mut receives: Vec<_> = self.peers().map(|peer| Incoming::new(peer, &mut [])).collect();
        self.transport.exchange(call, &sends, &mut receives)
    }

    /// Exchanges `sends` for `len` bytes from each peer, which go to `scratch` in rank order. Yields the weights of all
    /// ranks.
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

    /// Exchanges `sends` for as many bytes as `out` has from each peer, and reduces them and `out` into `out` as they
    /// arrive. `op` is `None` for the weighted mean.
    fn reduce_arriving(
        &mut self,
        call: &Call,
        dtype: DType,
        op: Option<ReduceOp>,
        sends: &[Outgoing<'_>],
        out: &mut [u8],
    ) -> Result<()> {
        let (rank, out_len) = (self.transport.rank(), out.len());
        // The reduction fails on all ranks alike. The exchange is completed all the same, so the group stays usable.
        let mut result = Ok(());
        let mut reduce_piece = |piece: Piece<'_>| {
            let len = piece.rows.first().map_or(out.len(), |row| row.len());
            let reduction = match op {
                Some(op) => Reduction::Op(op),
                None => Reduction::of_weights(call, checked_weights(call, piece.weights)?),
            };
            let mut sources = Vec::with_capacity(piece.rows.len() + 1);
            sources.extend(piece.rows.iter().map(|row| Source::Bytes(row)));
            sources.insert(rank, Source::Output);
            reduce(dtype, reduction, &sources, &mut out[piece.start..piece.start + len])
        };
        let mut take = |piece: Piece<'_>| {
            if result.is_ok() {
                result = reduce_piece(piece);
            }
        };
        self.transport.collect(call, sends, out_len, &mut self.scratch, &mut take)?;
        result
    }

    /// Reduces the peers' bytes that `collect` left in `scratch`, and `out`, into `out`. `op` is `None` for the
    /// weighted mean.
    fn reduce_scratch(
        &self,
        call: &Call,
        dtype: DType,
        op: Option<ReduceOp>,
        weights: &[f64],
        out: &mut [u8],
    ) -> Result<()> {
        let reduction = match op {
            Some(op) => Reduction::Op(op),
            None => Reduction::of_weights(call, checked_weights(call, weights)?),
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

    fn leave(&mut self) {
        self.transport.leave();
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
        let mut receives = from_others(rank, outputs.iter_mut().map(|output| &mut **output));
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
        output.copy_from_slice(row(self.transport.rank()));
        self.reduce_arriving(call, dtype, Some(op), &sends, output)
    }

    fn reduce(&mut self, call: &Call, dtype: DType, buf: &mut [u8], op: ReduceOp, root: usize) -> Result<()> {
        if fit_one_exchange(buf.len(), self.transport.world_size()) {
            return self.reduce_whole(call, dtype, buf, op, root);
        }
        self.reduce_sliced(call, dtype, buf, op, root)
    }

    fn gather(&mut self, call: &Call, input: &[u8], outputs: Option<&mut [&mut [u8]]>, root: usize) -> Result<()> {
        let rank = self.transport.rank();
        let Some(outputs) = outputs else {
            return self.tell_root(call, input, root);
        };
        outputs[rank].copy_from_slice(input);
        let sends: Vec<_> = self.peers().map(|peer| Outgoing { peer, payload: &[] }).collect();
        let mut receives = from_others(rank, outputs.iter_mut().map(|output| &mut **output));
        self.transport.exchange(call, &sends, &mut receives)
    }

    fn scatter(&mut self, call: &Call, inputs: Option<&[&[u8]]>, output: &mut [u8], root: usize) -> Result<()> {
        let payload = |peer: usize| inputs.map_or(&[][..], |inputs| inputs[peer]);
        let sends: Vec<_> = self.peers().map(|peer| Outgoing { peer, payload: payload(peer) }).collect();
        if inputs.is_some() {
            output.copy_from_slice(payload(self.transport.rank()));
        }
        let mut from_root = Some(output).filter(|_| inputs.is_none());
        let mut room = |peer: usize| from_root.take_if(|_| peer == root).unwrap_or_default();
        let mut receives: Vec<_> = self.peers().map(|peer| Incoming::new(peer, room(peer))).collect();
        self.transport.exchange(call, &sends, &mut receives)
    }

    fn all_to_all(&mut self, call: &Call, input: &[u8], output: &mut [u8]) -> Result<()> {
        let (rank, len) = (self.transport.rank(), input.len() / self.transport.world_size());
        let row = |peer: usize| &input[peer * len..][..len];
        output[rank * len..][..len].copy_from_slice(row(rank));
        let sends: Vec<_> = self.peers().map(|peer| Outgoing { peer, payload: row(peer) }).collect();
        let mut receives = from_others(rank, rows(output, len).take(self.transport.world_size()));
        self.transport.exchange(call, &sends, &mut receives)
    }

    /// The sender's call travels with the payload, and the receiver's call the other way; then the receiver confirms
    /// that it has the payload.
    fn send_recv(&mut self, call: &Call, send: Option<Outgoing<'_>>, receive: Option<&mut Incoming<'_>>) -> Result<()> {
        let (to, from) = (send.map(|send| send.peer), receive.as_ref().map(|receive| receive.peer));
        let mut sends: Vec<Outgoing<'_>> = send.into_iter().collect();
        sends.extend(from.filter(|from| to != Some(*from)).map(|peer| Outgoing { peer, payload: &[] }));
        let mut receives: Vec<Incoming<'_>> =
            receive.map(|receive| Incoming::new(receive.peer, &mut *receive.payload)).into_iter().collect();
        receives.extend(to.filter(|to| from != Some(*to)).map(|peer| Incoming::new(peer, &mut [])));
        self.transport.exchange(call, &sends, &mut receives)?;

        let sends: Vec<_> = from.map(|peer| Outgoing { peer, payload: &[] }).into_iter().collect();
        let mut receives: Vec<_> = to.map(|peer| Incoming::new(peer, &mut [])).into_iter().collect();
        self.transport.exchange(&call.next_stage(), &sends, &mut receives)
    }
}

/// `weights`, one per rank of the group of `call`, if a mean can use them.
///
/// All ranks pass the same weights, so all of them get the same error, and the group stays usable.
///
/// # Errors
/// [`Error::InvalidArgument`] if one is negative or not finite, or all are 0.
pub fn checked_weights<'a>(call: &Call, weights: &'a [f64]) -> Result<&'a [f64]> {
    let refuse = |rank, message| Err(Error::InvalidArgument { message, rank, during: None });
    if let Some(at) = weights.iter().position(|weight| !weight.is_finite() || *weight < 0.0) {
        let rank = call.world_rank(at);
        let why = format!("the weight of rank {rank} is {}: weights are finite and not negative", weights[at]);
        return refuse(Some(rank), why);
    }
    if weights.iter().all(|weight| *weight == 0.0) {
        return refuse(None, "the weights of all ranks are 0: there is nothing to average".to_string());
    }
    Ok(weights)
}

/// Frames expected from all ranks but `rank`, each into the sender's entry of `places`, which has one per rank.
fn from_others<'a>(rank: usize, places: impl IntoIterator<Item = &'a mut [u8]>) -> Vec<Incoming<'a>> {
    let others = places.into_iter().enumerate().filter(|(peer, _)| *peer != rank);
    others.map(|(peer, place)| Incoming::new(peer, place)).collect()
}

/// Cuts `buf` into `count` runs of whole elements; their lengths differ by one element at most.
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

/// Cuts `buf` into rows of `len` bytes; yields empty rows without end if `len` is 0.
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
