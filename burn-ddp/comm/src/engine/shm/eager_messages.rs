//! Small messages, which travel with the announcement of their call.
#![allow(unsafe_code)]

use std::ops::Range;

use super::engine::ShmEngine;
use super::peer_waits::{Board, Sign};
use super::rank_cell::{Announcement, LINE_BYTES, LINE_WORDS, Line};
use crate::call::{Call, CallInfo, Collective};
use crate::engine::checked_weights;
use crate::reduce::{Reduction, Source, reduce_to};
use crate::tensor_type::Shape;
use crate::{DType, ReduceOp, Result};

/// The carrier of a small payload. All ranks choose it by the longest payload of the call.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Carrier {
    /// In the line itself, in this many words.
    Line(usize),
    /// In the eager buffer of the round.
    Eager,
}

/// The sign of a peer's line of this round.
struct Announced<'a> {
    board: &'a Board,
    call: &'a Call,
    round: u64,
    fingerprint: u64,
    /// Number of calls between this rank and each peer alone, by group rank.
    pair_rounds: &'a [u64],
}

impl ShmEngine {
    /// The carrier of payloads of at most `longest` bytes, if they are small.
    pub(super) fn carrier(&self, longest: usize) -> Option<Carrier> {
        if longest <= LINE_BYTES {
            return Some(Carrier::Line(longest.div_ceil(8)));
        }
        (longest <= self.board.layout().eager_bytes()).then_some(Carrier::Eager)
    }

    /// Announces `call` with a `note`, and waits until all ranks have announced the same call; `heard` then has their
    /// announcements.
    pub(super) fn announce(&mut self, call: &Call, note: u64) -> Result<()> {
        self.publish(call, note, &[], 0);
        self.hear(call, 0)
    }

    /// [`announce`](Self::announce) with a payload.
    pub(super) fn say(&mut self, call: &Call, carrier: Carrier, payload: &[u8]) -> Result<()> {
        match carrier {
            Carrier::Line(words) => {
                self.publish(call, 0, payload, words);
                self.hear(call, words)
            }
            Carrier::Eager => {
                let room = self.board.layout().eager(self.board.rank(), self.round + 1, payload.len());
                // SAFETY: this buffer was last used two rounds ago, and all ranks have read what they need: else they
                // would not have announced the round in between, which this rank has heard of all. They read it again
                // after the publication below.
                unsafe { self.board.segment().bytes_mut(room) }.copy_from_slice(payload);
                self.publish(call, 0, &[], 0);
                self.hear(call, 0)
            }
        }
    }

    /// The bytes `range` of the payload of `peer` in this round, which came by `carrier`.
    pub(super) fn said(&self, carrier: Carrier, peer: usize, range: Range<usize>) -> &[u8] {
        match carrier {
            Carrier::Line(_) => &bytemuck::cast_slice(&self.heard[peer].payload)[range],
            Carrier::Eager => {
                let start = self.board.layout().eager(peer, self.round, range.end).start;
                // SAFETY: the peer has published this round, and writes this buffer again in the round after the next,
                // which it cannot begin before this rank has announced the next. Announcing needs the engine mutably,
                // so not while the slice borrows the engine.
                unsafe { self.board.segment().bytes(start + range.start..start + range.end) }
            }
        }
    }

    /// Reduces the bytes `range` of all peers' payloads and `out`, which holds this rank's, into `out`. `op` is `None`
    /// for the weighted mean.
    pub(super) fn reduce_said(
        &self,
        carrier: Carrier,
        dtype: DType,
        op: Option<ReduceOp>,
        range: Range<usize>,
        out: &mut [u8],
    ) -> Result<()> {
        let source = |peer| match peer == self.board.rank() {
            true => Source::Output,
            false => Source::Bytes(self.said(carrier, peer, range.clone())),
        };
        self.reduce(dtype, op, source, out)
    }

    /// Reduces the `source` of every rank into `out`.
    pub(super) fn reduce<'a>(
        &self,
        dtype: DType,
        op: Option<ReduceOp>,
        source: impl Fn(usize) -> Source<'a>,
        out: &mut [u8],
    ) -> Result<()> {
        self.reduce_to(dtype, op, source, (out, None))
    }

    /// Reduces the `source` of every rank into one place, or two.
    pub(super) fn reduce_to<'a>(
        &self,
        dtype: DType,
        op: Option<ReduceOp>,
        source: impl Fn(usize) -> Source<'a>,
        (out, also): (&mut [u8], Option<&mut [u8]>),
    ) -> Result<()> {
        const FEW: usize = 16;
        let n = self.board.size();
        let mut few = [Source::Output; FEW];
        let mut many = Vec::new();
        let sources = match few.get_mut(..n) {
            Some(few) => few,
            None => {
                many.resize(n, Source::Output);
                &mut many[..]
            }
        };
        sources.iter_mut().enumerate().for_each(|(rank, room)| *room = source(rank));
        reduce_to(dtype, self.reduction(op), sources, out, also)
    }

    fn reduction(&self, op: Option<ReduceOp>) -> Reduction<'_> {
        match op {
            Some(op) => Reduction::Op(op),
            None if self.sums => Reduction::Sums(&self.weights),
            None => Reduction::Weighted(&self.weights),
        }
    }

    /// Fails, on all ranks alike, if `op` is the weighted mean and the weights cannot be used.
    pub(super) fn check_weights(&self, call: &Call, op: Option<ReduceOp>) -> Result<()> {
        if op.is_none() {
            checked_weights(call, &self.weights)?;
        }
        Ok(())
    }

    pub(super) fn reduce_all(&mut self, call: &Call, dtype: DType, buf: &mut [u8], op: Option<ReduceOp>) -> Result<()> {
        let Some(carrier) = self.carrier(buf.len()) else { return self.reduce_chunks(call, dtype, buf, op) };
        self.say(call, carrier, buf)?;
        self.check_weights(call, op)?;
        self.reduce_said(carrier, dtype, op, 0..buf.len(), buf)
    }

    /// Publishes the line of the next round.
    #[inline]
    pub(super) fn publish(&mut self, call: &Call, note: u64, payload: &[u8], words: usize) {
        self.round += 1;
        self.sums = call.info.collective == Collective::AllReduceLeaves;
        self.fingerprint = fingerprint(&call.info, call.stage, self.round);
        let mut line =
            Announcement { fingerprint: self.fingerprint, weight: call.weight, note, payload: [0; LINE_WORDS] };
        bytemuck::bytes_of_mut(&mut line.payload)[..payload.len()].copy_from_slice(payload);
        self.line(self.board.rank()).publish(self.round, &line, words);
    }

    /// Waits for all peers' lines of the round that was [published](Self::publish).
    #[inline]
    pub(super) fn hear(&mut self, call: &Call, words: usize) -> Result<()> {
        let sign = Announced {
            board: &self.board,
            call,
            round: self.round,
            fingerprint: self.fingerprint,
            pair_rounds: &self.pair_rounds,
        };
        self.board.wait(call, self.board.peers(), &sign)?;
        self.weights[self.board.rank()] = call.weight;
        for nth in 0..self.board.peers().len() {
            let peer = self.board.peers()[nth];
            let line = self.line(peer).read(words);
            self.weights[peer] = line.weight;
            self.heard[peer] = line;
        }
        Ok(())
    }

    fn line(&self, rank: usize) -> &Line {
        self.board.cell(rank).line(self.round)
    }
}

impl Sign for Announced<'_> {
    fn is_there(&self, peer: usize) -> bool {
        self.line(peer).is_there(self.round)
    }

    fn arrived(&self, peer: usize) -> Result<()> {
        if self.line(peer).read(0).fingerprint == self.fingerprint {
            return Ok(());
        }
        Err(self.board.mismatch(self.call, peer))
    }

    /// Fails if the peer is in a call with this rank alone: neither call can complete before the other.
    fn instead(&self, peer: usize) -> Result<()> {
        let pair = self.board.pair(peer, self.board.rank());
        if pair.is_there(self.pair_rounds[peer] + 1) && !self.is_there(peer) {
            return Err(self.board.mismatch(self.call, peer));
        }
        Ok(())
    }
}

impl Announced<'_> {
    fn line(&self, peer: usize) -> &Line {
        self.board.cell(peer).line(self.round)
    }
}

/// A hash of the arguments that must be equal on all ranks in `round`.
pub(super) fn fingerprint(info: &CallInfo, stage: u8, round: u64) -> u64 {
    // Calls with a root have no digest.
    let root = info.root.map_or(u64::from(info.digest), |root| root as u64 + 1);
    let kind = u64::from(info.collective.code())
        | u64::from(stage) << 8
        | u64::from(info.reduce.map_or(u8::MAX, ReduceOp::code)) << 16
        | u64::from(info.dtype.map_or(u8::MAX, DType::code)) << 24
        | root << 32;
    let shape = info.shape.map_or(0, Shape::code);
    let words = [kind, info.len_elems, shape, info.tag, info.group, info.sequence];
    hash(round, words)
}

pub(super) fn hash<const N: usize>(seed: u64, words: [u64; N]) -> u64 {
    const ODD: u64 = 0x9e37_79b9_7f4a_7c15;
    let mix = |hash: u64, word: u64| {
        let product = u128::from(hash ^ word) * u128::from(ODD);
        (product >> 64) as u64 ^ product as u64
    };
    words.into_iter().fold(seed ^ 0x2545_f491_4f6c_dd1d, mix)
}
