//! Frames that move while this rank does something else.
//!
//! An exchange borrows its payloads until all of them are through. A pipeline has several steps under way: it queues
//! the frames of a step in memory of their own, and completes the frames steps later. Until then as much of them moves
//! as the kernel buffers.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use super::exchange::{Ended, Exchange};
use super::link::{Receiving, Sending};
use super::transport::TcpTransport;
use crate::Result;
use crate::call::Call;
use crate::membership::Watch;

/// Frames of one call between this rank and others, in the order in which they travel. Their steps ascend.
#[derive(Default)]
pub(in crate::engine) struct FramesUnderWay {
    outgoing: VecDeque<Outbound>,
    incoming: VecDeque<Inbound>,
    /// Early ends, remembered between waits: a connection reports its end only once.
    ended: Vec<Ended>,
}

struct Outbound {
    step: usize,
    peer: usize,
    header: Vec<u8>,
    payload: Arc<Vec<u8>>,
    /// The bytes of `payload` that the frame carries.
    range: Range<usize>,
    /// Bytes of the header and the payload that have been written.
    out: usize,
}

struct Inbound {
    step: usize,
    peer: usize,
    /// The call that the frame must fit.
    call: Call,
    room: Vec<u8>,
    /// Bytes of the payload that have arrived; `None` before the header has.
    filled: Option<usize>,
}

impl FramesUnderWay {
    /// Queues a frame of `step` to `peer`; its payload is `range` of `payload`.
    pub(in crate::engine) fn send(
        &mut self,
        call: &Call,
        step: usize,
        peer: usize,
        (payload, range): (&Arc<Vec<u8>>, Range<usize>),
    ) {
        let mut header = Vec::new();
        call.header(peer, range.len()).encode(&mut header);
        self.outgoing.push_back(Outbound { step, peer, header, payload: payload.clone(), range, out: 0 });
    }

    /// Queues a frame of `step` from `peer`, whose payload fills `room`.
    pub(in crate::engine) fn receive(&mut self, call: &Call, step: usize, peer: usize, room: Vec<u8>) {
        self.incoming.push_back(Inbound { step, peer, call: call.clone(), room, filled: None });
    }

    /// The payloads of a step that is complete, in the order in which they were queued.
    pub(in crate::engine) fn received(&mut self, step: usize) -> Vec<Vec<u8>> {
        let of_step = self.incoming.iter().take_while(|frame| frame.step <= step).count();
        self.incoming.drain(..of_step).map(|frame| frame.room).collect()
    }
}

impl TcpTransport {
    /// Moves what can be moved of `frames` without waiting for a frame. It does wait for connections that it makes to
    /// lower ranks, which answer without being in a call.
    ///
    /// # Errors
    /// Those of [`complete`](Self::complete).
    pub(in crate::engine) fn advance(&mut self, call: &Call, frames: &mut FramesUnderWay) -> Result<()> {
        self.run_frames(call, frames, (0, 0))
    }

    /// Connects to the lower ranks among the peers of all frames, then waits until the frames of all steps up to `step`
    /// are complete in both directions; later frames move meanwhile.
    ///
    /// Ranks that complete steps in one order never wait for each other in a circle, whatever they do in between: a
    /// rank that has completed a step has nothing of that step left to read or write.
    ///
    /// # Errors
    /// Those of [`Transport::exchange`](crate::engine::Transport::exchange).
    pub(in crate::engine) fn complete(&mut self, call: &Call, frames: &mut FramesUnderWay, step: usize) -> Result<()> {
        let outgoing = frames.outgoing.iter().take_while(|frame| frame.step <= step).count();
        let incoming = frames.incoming.iter().take_while(|frame| frame.step <= step).count();
        self.run_frames(call, frames, (outgoing, incoming))
    }

    /// Moves `frames` until the first `needed` of both directions are complete.
    fn run_frames(&mut self, call: &Call, frames: &mut FramesUnderWay, needed: (usize, usize)) -> Result<()> {
        let mut sending = Vec::with_capacity(frames.outgoing.len());
        for frame in &frames.outgoing {
            let of_header = frame.out.min(frame.header.len());
            let payload = &frame.payload[frame.range.clone()];
            let rest = Sending::new(&frame.header[of_header..], &payload[frame.out - of_header..]);
            let before = sending.iter().rposition(|(peer, _): &(usize, Sending<'_>)| *peer == frame.peer);
            sending.push((frame.peer, rest.after(before)));
        }
        let mut receiving: Vec<Receiving<'_>> = Vec::with_capacity(frames.incoming.len());
        for frame in &mut frames.incoming {
            let before = receiving.iter().rposition(|earlier| earlier.peer() == frame.peer);
            receiving.push(Receiving::resumed(frame.peer, &frame.call, &mut frame.room, frame.filled).after(before));
        }
        let peers = sending.iter().map(|(peer, _)| *peer).chain(receiving.iter().map(Receiving::peer));
        let (links, spin, membership, waker) = self.connected(call, peers)?;
        let watch = Watch::new(membership, call);
        let ended = &mut frames.ended;
        let exchange = Exchange {
            call,
            membership,
            waker,
            sending: &mut sending,
            receiving: &mut receiving,
            needed,
            ended,
            watch,
        };
        exchange.run(links, spin, None)?;
        let left: Vec<usize> = sending.iter().map(|(_, frame)| frame.len()).collect();
        let filled: Vec<Option<usize>> = receiving.iter().map(Receiving::filled).collect();
        for (frame, left) in frames.outgoing.iter_mut().zip(left) {
            frame.out = frame.header.len() + frame.range.len() - left;
        }
        frames.incoming.iter_mut().zip(filled).for_each(|(frame, filled)| frame.filled = filled);
        frames.outgoing.retain(|frame| frame.out < frame.header.len() + frame.range.len());
        Ok(())
    }
}
