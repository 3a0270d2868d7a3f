//! Reductions between machines, chunk by chunk: while one chunk is on the wire, a machine reduces the next one, and
//! hands out the one before.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use super::between_machines::{Wire, floats};
use super::schedule::{
    Plan, Shares, Subtree, Turn, announcements, chunks, partial_bytes, segments, steps_of, subtrees, turns,
};
use crate::call::Call;
use crate::engine::checked_weights;
use crate::engine::shm::{Made, Parts};
use crate::engine::tcp::FramesUnderWay;
use crate::reduce::{Form, Leaf, Reduction, Terms};
use crate::{DType, ReduceOp, Result};

/// Bytes of a chunk, in the buffer of a rank.
const CHUNK_BYTES: usize = 512 << 10;

/// A reduction, the same on all ranks.
pub(super) struct Reducing {
    terms: Terms,
    subtrees: Vec<Subtree>,
    /// By machine, the bytes per element of all its partial results.
    partial_bytes: Vec<usize>,
    /// Bytes of an element.
    size: usize,
}

/// Bytes from which on a block is used again: a frame of a few numbers must not take a large one.
const SMALLEST_SPARE: usize = 4096;

/// Memory that is used again and again: at most what the chunks under way need.
#[derive(Default)]
pub(super) struct SpareMemory {
    blocks: Vec<Vec<u8>>,
}

impl SpareMemory {
    /// `len` bytes of unspecified content.
    pub(super) fn take(&mut self, len: usize) -> Vec<u8> {
        if len < SMALLEST_SPARE {
            return vec![0; len];
        }
        let fitting = self.blocks.iter().position(|block| block.len() == len);
        let mut block = match fitting {
            Some(nth) => self.blocks.swap_remove(nth),
            None => self.blocks.pop().unwrap_or_default(),
        };
        block.resize(len, 0);
        block
    }

    fn put_back(&mut self, blocks: impl IntoIterator<Item = Vec<u8>>) {
        self.blocks.extend(blocks.into_iter().filter(|block| block.len() >= SMALLEST_SPARE));
    }
}

/// Number of the step in which the machines exchange weights: that of [`announcements`].
const WEIGHTS: usize = 0;

impl Wire {
    /// All-reduces `len` bytes. `op` is `None` for the weighted mean: then `weights` holds the weights of all ranks
    /// afterwards, and nothing is reduced if no mean can use them.
    ///
    /// Machines exchange their weights along with the first partial results, which assume the weights of the last
    /// weighted reduction. If a weight has changed, all ranks find that at the same place and begin again.
    pub(super) fn all_reduce(
        &mut self,
        call: &Call,
        (dtype, op): (DType, Option<ReduceOp>),
        len: usize,
        parts: &mut dyn Parts,
        weights: &mut Vec<f64>,
    ) -> Result<()> {
        let (ranks, len) = (self.machines.rank_count(), len / dtype.size_bytes());
        let mut frames = FramesUnderWay::default();
        let reduction = match op {
            Some(op) => Reduction::Op(op),
            None => {
                self.queue_weights(call, parts.weights(), &mut frames);
                Reduction::of_weights(call, &self.weights)
            }
        };
        let reducing = self.reducing(dtype, Terms::new(dtype, reduction, ranks)?);
        let plans = self.all_reduce_plans(&reducing, len);
        let confirm = op.is_none().then_some(&mut *weights);
        let chunks = Chunks { wire: self, call, reducing: &reducing, parts: &mut *parts, frames };
        if chunks.reduce(&plans, confirm)? {
            return Ok(());
        }
        if checked_weights(call, weights).is_ok() {
            self.weights.clone_from(weights);
            let reducing = self.reducing(dtype, Terms::new(dtype, Reduction::of_weights(call, weights), ranks)?);
            let plans = self.all_reduce_plans(&reducing, len);
            let frames = FramesUnderWay::default();
            Chunks { wire: self, call, reducing: &reducing, parts, frames }.reduce(&plans, None)?;
        }
        Ok(())
    }

    /// Reduces rows of `len` bytes, of which each rank gets its own.
    pub(super) fn reduce_scatter(
        &mut self,
        call: &Call,
        (dtype, op): (DType, ReduceOp),
        len: usize,
        parts: &mut dyn Parts,
    ) -> Result<()> {
        let reducing = self.reducing(dtype, Terms::new(dtype, Reduction::Op(op), self.machines.rank_count())?);
        let most = CHUNK_BYTES / reducing.size / self.machines.rank_count();
        let len = len / reducing.size;
        let plan = |chunk| Plan::reduce_scatter(&self.machines, self.me, len, chunk);
        let plans: Vec<Plan> = chunks(len, most).map(plan).collect();
        let frames = FramesUnderWay::default();
        Chunks { wire: self, call, reducing: &reducing, parts, frames }.reduce(&plans, None).map(drop)
    }

    fn reducing(&self, dtype: DType, terms: Terms) -> Reducing {
        let subtrees = subtrees(&self.machines, &terms);
        let partial_bytes = partial_bytes(&subtrees, self.machines.count());
        Reducing { terms, subtrees, partial_bytes, size: dtype.size_bytes() }
    }

    /// This rank's plans of an all-reduce of `len` elements, chunk by chunk.
    fn all_reduce_plans(&mut self, reducing: &Reducing, len: usize) -> Vec<Plan> {
        let known = self.shares.take().filter(|known| known.are_of(&reducing.partial_bytes, reducing.size));
        let shares = known.unwrap_or_else(|| Shares::new(&reducing.partial_bytes, reducing.size));
        let plan = |chunk| Plan::all_reduce(&self.machines, self.me, &segments(chunk, &shares));
        let plans = chunks(len, CHUNK_BYTES / reducing.size).map(plan).collect();
        self.shares = Some(shares);
        plans
    }

    /// Queues the frames with weights: those of this machine's ranks go out, and those of each other machine come in.
    fn queue_weights(&mut self, call: &Call, of_machine: &[f64], frames: &mut FramesUnderWay) {
        let bytes = |machine| size_of::<f64>() * self.machines.ranks_of(machine).len();
        let lens: Vec<usize> = (0..self.machines.count()).map(bytes).collect();
        let step = announcements(&self.machines, self.me, &lens);
        self.queue(call, &step, &Arc::new(bytemuck::cast_slice(of_machine).to_vec()), frames);
    }

    /// Waits for the weights that were [queued](Self::queue_weights); returns those of all ranks.
    fn all_weights(&mut self, call: &Call, of_machine: &[f64], frames: &mut FramesUnderWay) -> Result<Vec<f64>> {
        self.flat.transport().complete(call, frames, WEIGHTS)?;
        let mut by_machine: Vec<Vec<f64>> = frames.received(WEIGHTS).iter().map(|bytes| floats(bytes)).collect();
        by_machine.insert(self.here, of_machine.to_vec());
        let mut weights = vec![0.0; self.machines.rank_count()];
        for (machine, of_ranks) in by_machine.into_iter().enumerate() {
            let ranks = self.machines.ranks_of(machine).iter();
            ranks.zip(of_ranks).for_each(|(rank, weight)| weights[*rank] = weight);
        }
        Ok(weights)
    }

    /// Makes this machine's partial results of `range`, in bytes of the buffer; `sources` are the bytes of this
    /// machine's ranks there.
    fn fold(
        &self,
        reducing: &Reducing,
        plan: &Plan,
        range: &Range<usize>,
        sources: &[&[u8]],
        partials: &mut [u8],
    ) -> Result<()> {
        let Reducing { terms, subtrees, partial_bytes, size, .. } = reducing;
        let range = range.start / size..range.end / size;
        let mut before = 0;
        for (_, piece) in &plan.pieces {
            let room = &mut partials[before..][..piece.len() * partial_bytes[self.here]];
            before += room.len();
            let (start, end) = (range.start.max(piece.start), range.end.min(piece.end));
            if start >= end {
                continue;
            }
            let mut rest = room;
            for subtree in subtrees.iter().filter(|subtree| subtree.machine == self.here) {
                let (room, behind) = rest.split_at_mut(piece.len() * subtree.size);
                rest = behind;
                let of_rank = |place: usize| {
                    let source = sources[self.machines.local_rank_of(terms.ranks()[place])];
                    let bytes = &source[(start - range.start) * size..(end - range.start) * size];
                    Leaf { places: place..place + 1, bytes }
                };
                let leaves: Vec<_> = subtree.places.clone().map(of_rank).collect();
                let out = &mut room[(start - piece.start) * subtree.size..(end - piece.start) * subtree.size];
                terms.reduce(subtree.places.clone(), &leaves, Form::Partial, out)?;
            }
        }
        Ok(())
    }

    /// Puts the partial results of all machines together: this machine's are in `own`, the others' in `received`, in
    /// the order of `plan.receives`.
    fn put_together(
        &self,
        reducing: &Reducing,
        plan: &Plan,
        own: &[u8],
        received: &[Vec<u8>],
        out: &mut [u8],
    ) -> Result<()> {
        let Reducing { terms, subtrees, size, .. } = reducing;
        let all = plan.own();
        let mut cuts: Vec<usize> = plan.receives.iter().map(|from| from.range.start).collect();
        cuts.extend([all.start, all.end]);
        cuts.sort_unstable();
        cuts.dedup();
        for range in cuts.windows(2).map(|pair| pair[0]..pair[1]) {
            let mut leaves = Vec::with_capacity(subtrees.len());
            for machine in 0..self.machines.count() {
                let (start, len, bytes) = if machine == self.here {
                    (all.start, all.len(), own)
                } else {
                    let here = |peer: usize| self.machines.machine_of(peer) == machine;
                    let sent = plan.receives.iter().zip(received);
                    let mut fitting = sent.filter(|(from, _)| here(from.peer) && from.range.contains(&range.start));
                    let Some((from, bytes)) = fitting.next() else { continue };
                    (from.range.start, from.range.len(), &bytes[..])
                };
                let mut rest = bytes;
                for subtree in subtrees.iter().filter(|subtree| subtree.machine == machine) {
                    let (bytes, behind) = rest.split_at(len * subtree.size);
                    rest = behind;
                    let bytes = &bytes[(range.start - start) * subtree.size..(range.end - start) * subtree.size];
                    leaves.push(Leaf { places: subtree.places.clone(), bytes });
                }
            }
            leaves.sort_by_key(|leaf| leaf.places.start);
            let out = &mut out[(range.start - all.start) * size..(range.end - all.start) * size];
            terms.reduce(0..terms.ranks().len(), &leaves, Form::Final, out)?;
        }
        Ok(())
    }
}

/// A reduction under way.
struct Chunks<'a> {
    wire: &'a mut Wire,
    call: &'a Call,
    reducing: &'a Reducing,
    parts: &'a mut dyn Parts,
    frames: FramesUnderWay,
}

impl Chunks<'_> {
    /// Reduces chunk by chunk, as in `plans`.
    ///
    /// `confirm`, if given, holds the weights of all ranks afterwards. Returns false, with nothing handed out and no
    /// frame under way, if the reduction assumed other weights, or no mean can use these.
    fn reduce(mut self, plans: &[Plan], mut confirm: Option<&mut Vec<f64>>) -> Result<bool> {
        let (mut partials, mut results) = (VecDeque::new(), VecDeque::new());
        for turn in turns(plans.len()) {
            match turn {
                Turn::SendPartials(nth) => partials.push_back(self.send_partials(nth, &plans[nth])?),
                Turn::PutTogether(nth) => {
                    if let Some(weights) = confirm.take()
                        && !self.confirm(weights)?
                    {
                        let (last, _) = steps_of(partials.len() - 1);
                        let received = self.complete(last)?;
                        self.wire.spare.put_back(received);
                        return Ok(false);
                    }
                    if let Some(own) = partials.pop_front() {
                        results.push_back(self.put_together(nth, &plans[nth], own)?);
                    }
                }
                Turn::HandOut(nth) => {
                    if let Some(own) = results.pop_front() {
                        self.hand_out(nth, &plans[nth], own)?;
                    }
                }
            }
        }
        Ok(true)
    }

    /// Waits for the weights of all ranks. Returns false if the reduction assumed others, or no mean can use these.
    fn confirm(&mut self, weights: &mut Vec<f64>) -> Result<bool> {
        *weights = self.wire.all_weights(self.call, self.parts.weights(), &mut self.frames)?;
        // Terms leave out ranks whose weight is not above 0, so a weight that must be refused may look like 0.
        Ok(checked_weights(self.call, weights).is_ok()
            && self.reducing.terms.are_of(Reduction::of_weights(self.call, weights), weights.len())?)
    }

    /// Waits for all frames up to `step`; returns the payloads that arrived.
    fn complete(&mut self, step: usize) -> Result<Vec<Vec<u8>>> {
        self.wire.flat.transport().complete(self.call, &mut self.frames, step)?;
        Ok(self.frames.received(step))
    }

    /// Makes this machine's partial results of a chunk for this rank's work, and sends them to the ranks that put them
    /// together.
    fn send_partials(&mut self, nth: usize, plan: &Plan) -> Result<Arc<Vec<u8>>> {
        let Chunks { wire, reducing, parts, .. } = self;
        let work: usize = plan.pieces.iter().map(|(_, range)| range.len()).sum();
        let mut partials = wire.spare.take(work * reducing.partial_bytes[wire.here]);
        let bytes = plan.work_bytes(reducing);
        parts.fold(&bytes, &mut |range, sources| wire.fold(reducing, plan, &range, sources, &mut partials))?;

        let step = plan.partials(nth, (&wire.machines, wire.me), &reducing.partial_bytes);
        let partials = Arc::new(partials);
        self.wire.queue(self.call, &step, &partials, &mut self.frames);
        self.wire.flat.transport().advance(self.call, &mut self.frames)?;
        Ok(partials)
    }

    /// Puts this rank's own elements of a chunk together, and sends the results to the ranks that want them.
    fn put_together(&mut self, nth: usize, plan: &Plan, partials: Arc<Vec<u8>>) -> Result<Arc<Vec<u8>>> {
        let (step, _) = steps_of(nth);
        let received = self.complete(step)?;
        let Chunks { wire, reducing, .. } = self;
        let (all, ours) = (plan.own(), reducing.partial_bytes[wire.here]);
        let pieces_before = plan.pieces.iter().take_while(|(peer, _)| peer.is_some());
        let start = pieces_before.map(|(_, range)| range.len()).sum::<usize>() * ours;
        let own = if all.is_empty() { &[][..] } else { &partials[start..start + all.len() * ours] };
        let mut result = wire.spare.take(all.len() * reducing.size);
        wire.put_together(reducing, plan, own, &received, &mut result)?;
        wire.spare.put_back(received);
        wire.spare.put_back(Arc::into_inner(partials));

        let result = Arc::new(result);
        let step = plan.results(nth, reducing.size);
        wire.queue(self.call, &step, &result, &mut self.frames);
        Ok(result)
    }

    /// Hands the results of a chunk to the ranks of this machine.
    fn hand_out(&mut self, nth: usize, plan: &Plan, own: Arc<Vec<u8>>) -> Result<()> {
        let (_, step) = steps_of(nth);
        let received = self.complete(step)?;
        let mut others = received.iter();
        let size = self.reducing.size;
        let piece = |(peer, range): &(Option<usize>, Range<usize>)| -> Option<Made<'_>> {
            let bytes = if peer.is_some() { others.next()? } else { &*own };
            Some((range.start * size..range.end * size, bytes))
        };
        let mine: Vec<Made<'_>> = plan.pieces.iter().filter_map(piece).collect();
        self.parts.spread(&plan.work_bytes(self.reducing), &mine)?;
        self.wire.spare.put_back(received);
        self.wire.spare.put_back(Arc::into_inner(own));
        Ok(())
    }
}

impl Plan {
    /// The work of each rank of this machine, in bytes of elements of `reducing`.
    pub(super) fn work_bytes(&self, reducing: &Reducing) -> Vec<Vec<Range<usize>>> {
        let bytes = |range: &Range<usize>| range.start * reducing.size..range.end * reducing.size;
        self.work.iter().map(|ranges| ranges.iter().map(bytes).collect()).collect()
    }
}
