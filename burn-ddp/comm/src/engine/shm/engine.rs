//! One rank's side of a group in shared memory: each collective chooses between the ways of small and of large
//! messages.

use std::sync::Arc;

use super::NAME;
use super::peer_waits::Board;
use super::rank_cell::Announcement;
use crate::auth::job_key::LinkKey;
use crate::call::Call;
use crate::engine::{Engine, Incoming, Outgoing};
use crate::{DType, PartReduction, ReduceOp, Result, RowDivision, SharedBuffer, SharedView};

/// Engine of a rank in a group on one machine.
pub(in crate::engine) struct ShmEngine {
    pub(super) board: Board,
    pub(super) key: LinkKey,
    /// Number of calls that the group has announced; the same on all ranks.
    pub(super) round: u64,
    /// Hash of this rank's last announcement.
    pub(super) fingerprint: u64,
    /// Last announcement of each peer, by group rank; the entry of this rank is unused.
    pub(super) heard: Vec<Announcement>,
    /// Weights of all ranks in the call, by group rank.
    pub(super) weights: Vec<f64>,
    /// True if the ranks' elements in the call have these weights in them.
    pub(super) sums: bool,
    /// Number of calls between this rank and each peer alone, by group rank; the same on both ranks.
    pub(super) pair_rounds: Vec<u64>,
    /// Token that each shared buffer of this group carries, by which buffers of other groups are recognised.
    pub(super) token: Arc<()>,
    /// Number of shared buffers made; the same on all ranks.
    pub(super) buffers: u64,
    /// Number of segments made; the same on all ranks.
    pub(super) segments: u64,
}

impl ShmEngine {
    pub(super) fn new(board: Board, key: LinkKey) -> ShmEngine {
        let n = board.size();
        ShmEngine {
            board,
            key,
            round: 0,
            fingerprint: 0,
            heard: vec![Announcement::default(); n],
            weights: vec![1.0; n],
            sums: false,
            pair_rounds: vec![0; n],
            token: Arc::new(()),
            buffers: 0,
            segments: 1,
        }
    }

    /// The weight of each rank in its last call, by group rank.
    pub(in crate::engine) fn weights(&self) -> &[f64] {
        &self.weights
    }
}

impl Engine for ShmEngine {
    fn name(&self) -> &'static str {
        NAME
    }

    fn barrier(&mut self, call: &Call) -> Result<()> {
        self.announce(call, 0)
    }

    fn all_reduce(&mut self, call: &Call, dtype: DType, buf: &mut [u8], op: ReduceOp) -> Result<()> {
        self.reduce_all(call, dtype, buf, Some(op))
    }

    fn all_reduce_weighted(&mut self, call: &Call, dtype: DType, buf: &mut [u8]) -> Result<()> {
        self.reduce_all(call, dtype, buf, None)
    }

    fn broadcast(&mut self, call: &Call, buf: &mut [u8], root: usize) -> Result<()> {
        if let Some(carrier) = self.carrier(buf.len()) {
            let payload = if self.board.rank() == root { &*buf } else { &[] };
            self.say(call, carrier, payload)?;
            if self.board.rank() != root {
                buf.copy_from_slice(self.said(carrier, root, 0..buf.len()));
            }
            return Ok(());
        }
        self.broadcast_chunks(call, buf, root)
    }

    fn all_gather(&mut self, call: &Call, input: &[u8], outputs: &mut [&mut [u8]]) -> Result<()> {
        let longest = outputs.iter().map(|output| output.len()).max().unwrap_or(0);
        outputs[self.board.rank()].copy_from_slice(input);
        if let Some(carrier) = self.carrier(longest) {
            self.say(call, carrier, input)?;
            for &peer in self.board.peers() {
                let len = outputs[peer].len();
                outputs[peer].copy_from_slice(self.said(carrier, peer, 0..len));
            }
            return Ok(());
        }
        self.all_gather_chunks(call, input, longest, outputs)
    }

    fn reduce_scatter(
        &mut self,
        call: &Call,
        dtype: DType,
        input: &[u8],
        output: &mut [u8],
        op: ReduceOp,
    ) -> Result<()> {
        let row = self.board.rank() * output.len()..(self.board.rank() + 1) * output.len();
        if let Some(carrier) = self.carrier(input.len()) {
            self.say(call, carrier, input)?;
            output.copy_from_slice(&input[row.clone()]);
            return self.reduce_said(carrier, dtype, Some(op), row, output);
        }
        self.reduce_scatter_chunks(call, dtype, input, output, op)
    }

    fn reduce(&mut self, call: &Call, dtype: DType, buf: &mut [u8], op: ReduceOp, root: usize) -> Result<()> {
        let Some(carrier) = self.carrier(buf.len()) else {
            return self.reduce_chunks_to(call, dtype, buf, op, root);
        };
        let is_root = self.board.rank() == root;
        self.say(call, carrier, if is_root { &[] } else { buf })?;
        if is_root { self.reduce_said(carrier, dtype, Some(op), 0..buf.len(), buf) } else { Ok(()) }
    }

    fn gather(&mut self, call: &Call, input: &[u8], mut outputs: Option<&mut [&mut [u8]]>, root: usize) -> Result<()> {
        if let Some(outputs) = &mut outputs {
            outputs[root].copy_from_slice(input);
        }
        let Some(carrier) = self.carrier(input.len()) else { return self.gather_chunks(call, input, outputs, root) };
        self.say(call, carrier, if outputs.is_some() { &[] } else { input })?;
        if let Some(outputs) = outputs {
            for &peer in self.board.peers() {
                outputs[peer].copy_from_slice(self.said(carrier, peer, 0..input.len()));
            }
        }
        Ok(())
    }

    fn scatter(&mut self, call: &Call, inputs: Option<&[&[u8]]>, output: &mut [u8], root: usize) -> Result<()> {
        if let Some(inputs) = inputs {
            output.copy_from_slice(inputs[root]);
        }
        let len = output.len();
        let Some(carrier) = self.carrier(len * self.board.size()) else {
            return self.scatter_chunks(call, inputs, output, root);
        };
        let rows = inputs.map(|inputs| inputs.concat()).unwrap_or_default();
        self.say(call, carrier, &rows)?;
        if inputs.is_none() {
            let row = self.board.rank() * len;
            output.copy_from_slice(self.said(carrier, root, row..row + len));
        }
        Ok(())
    }

    fn all_to_all(&mut self, call: &Call, input: &[u8], output: &mut [u8]) -> Result<()> {
        let (me, len) = (self.board.rank(), input.len() / self.board.size());
        output[me * len..][..len].copy_from_slice(&input[me * len..][..len]);
        let Some(carrier) = self.carrier(input.len()) else { return self.all_to_all_chunks(call, input, output, len) };
        self.say(call, carrier, input)?;
        for &peer in self.board.peers() {
            output[peer * len..][..len].copy_from_slice(self.said(carrier, peer, me * len..(me + 1) * len));
        }
        Ok(())
    }

    fn send_recv(&mut self, call: &Call, send: Option<Outgoing<'_>>, receive: Option<&mut Incoming<'_>>) -> Result<()> {
        self.transfer(call, send, receive)
    }

    fn shared_buffers(&mut self, call: &Call, lens: &[usize]) -> Result<Vec<SharedBuffer>> {
        self.make_shared(call, lens)
    }

    fn all_reduce_shared(
        &mut self,
        call: &Call,
        dtype: DType,
        buffer: &mut SharedBuffer,
        op: Option<ReduceOp>,
    ) -> Result<SharedView> {
        self.reduce_shared(call, dtype, buffer, op)
    }

    fn all_gather_shared(
        &mut self,
        call: &Call,
        division: RowDivision,
        part: &[u8],
        buffer: &mut SharedBuffer,
    ) -> Result<SharedView> {
        self.gather_shared(call, division, part, buffer)
    }

    fn reduce_scatter_shared(
        &mut self,
        call: &Call,
        divided: (DType, RowDivision),
        buffer: &mut SharedBuffer,
        reduction: &PartReduction,
        part: &mut [u8],
    ) -> Result<()> {
        self.reduce_shared_rows(call, divided, buffer, reduction, part)
    }
}
