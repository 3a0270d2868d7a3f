//! One group's channel to MPI: routes to the peers, requests under way, and the frames that they carry.

use std::ffi::c_int;

use burn_ddp_comm::{Error, PollPause, Result};

use crate::ffi::Requests;
use crate::fragments::Fragments;

/// Number of fragments of a frame under way at a time: one that moves, and one that is filled or read.
pub(crate) const WINDOW: usize = 2;

/// Address of a peer in MPI: its process, and the tags of both directions.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Route {
    /// Rank of its process in the communicator.
    pub(crate) process: c_int,
    /// Tag of messages to it.
    pub(crate) send: c_int,
    /// Tag of messages from it.
    pub(crate) receive: c_int,
}

/// State of one group's messages on one rank.
pub(crate) struct Channel {
    /// By group rank; this rank's own entry is not used.
    pub(crate) routes: Vec<Route>,
    /// By group rank: true if the rank has closed its side.
    pub(crate) closed: Vec<bool>,
    pub(crate) requests: Requests<Key>,
    pub(crate) pause: PollPause,
    /// Spare buffers: of first fragments, and of all other fragments.
    first_buffers: Vec<Vec<u8>>,
    buffers: Vec<Vec<u8>>,
}

impl Channel {
    pub(crate) fn new(routes: Vec<Route>, requests: Requests<Key>, pause: PollPause) -> Channel {
        let closed = vec![false; routes.len()];
        Channel { routes, closed, requests, pause, first_buffers: Vec::new(), buffers: Vec::new() }
    }

    /// Route to the group rank `peer`.
    pub(crate) fn route(&self, peer: usize) -> Result<Route> {
        let message = || format!("an exchange with rank {peer}, which is not in the group");
        self.routes.get(peer).copied().ok_or_else(|| Error::Internal { message: message() })
    }

    /// An empty buffer for a first fragment.
    pub(crate) fn first_buffer(&mut self) -> Vec<u8> {
        self.first_buffers.pop().unwrap_or_default()
    }

    /// A buffer for any other fragment.
    pub(crate) fn buffer(&mut self, fragments: Fragments) -> Vec<u8> {
        self.buffers.pop().unwrap_or_else(|| vec![0; fragments.len])
    }

    /// Keeps a buffer for later messages.
    pub(crate) fn recycle(&mut self, fragments: Fragments, buffer: Vec<u8>) {
        // A buffer of a first fragment is always shorter.
        if buffer.len() == fragments.len { self.buffers.push(buffer) } else { self.first_buffers.push(buffer) }
    }
}

/// Key of a message under way: its place in the exchange.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Key {
    Sent(usize),
    Received { from: usize, nth: usize },
}

/// A frame to a peer.
pub(crate) struct Sending<'a> {
    pub(crate) peer: usize,
    pub(crate) payload: &'a [u8],
    /// Number of fragments passed to MPI, and number of those that MPI still has.
    pub(crate) begun: usize,
    pub(crate) under_way: usize,
}

impl<'a> Sending<'a> {
    pub(crate) fn new(peer: usize, payload: &'a [u8]) -> Sending<'a> {
        Sending { peer, payload, begun: 0, under_way: 0 }
    }

    pub(crate) fn is_out(&self, fragments: Fragments) -> bool {
        self.under_way == 0 && self.begun == fragments.count(self.payload.len())
    }
}

/// A frame from a peer.
pub(crate) struct Receiving<'a> {
    pub(crate) peer: usize,
    pub(crate) len: usize,
    /// Room for the payload; `None` if fragments are passed on to a `take`.
    pub(crate) room: Option<&'a mut [u8]>,
    /// Weight in the header; `None` until that has come.
    pub(crate) weight: Option<f64>,
    /// Number of fragments requested, and number of those that were taken.
    pub(crate) begun: usize,
    pub(crate) taken: usize,
    /// Fragments that wait to be taken, by their number modulo [`WINDOW`].
    pub(crate) waiting: [Option<Waiting>; WINDOW],
}

/// A fragment that waits to be taken.
pub(crate) struct Waiting {
    pub(crate) buffer: Vec<u8>,
    /// Bytes before the payload.
    pub(crate) skip: usize,
}

impl<'a> Receiving<'a> {
    pub(crate) fn new(peer: usize, len: usize, room: Option<&'a mut [u8]>) -> Receiving<'a> {
        Receiving { peer, len, room, weight: None, begun: 0, taken: 0, waiting: [None, None] }
    }

    /// Weight of the peer, once the exchange is done.
    pub(crate) fn weight(&self) -> f64 {
        self.weight.unwrap_or(f64::NAN)
    }

    pub(crate) fn is_complete(&self, fragments: Fragments) -> bool {
        self.taken == fragments.count(self.len)
    }
}
