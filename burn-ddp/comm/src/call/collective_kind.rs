//! The kinds of collectives, by which ranks compare calls and errors show them.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Kind of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Collective {
    /// Making a group.
    NewGroup,
    /// All ranks wait for each other.
    Barrier,
    /// Each rank gets the reduction of all ranks' buffers.
    AllReduce,
    /// Each rank gets the weighted mean of all ranks' buffers.
    AllReduceWeighted,
    /// Each rank gets the root's buffer.
    Broadcast,
    /// Each rank gets all ranks' buffers.
    AllGather,
    /// Each rank gets a slice of the reduction.
    ReduceScatter,
    /// Each rank gets the root's value.
    BroadcastObject,
    /// Each rank gets all ranks' values.
    AllGatherObject,
    /// Making buffers to reduce in.
    SharedBuffers,
    /// The root gets the reduction of all ranks' buffers.
    Reduce,
    /// The root gets all ranks' buffers.
    Gather,
    /// Each rank gets a row of the root's buffer.
    Scatter,
    /// Each rank gets a row of each rank's buffer.
    AllToAll,
    /// Each rank passes the color of its sub-group.
    Split,
    /// A buffer goes to one other rank.
    Send,
    /// A buffer comes from one other rank.
    Recv,
    /// Two ranks swap buffers.
    SendRecv,
    /// Each rank gets the mean of the leaves that all ranks have summed.
    AllReduceLeaves,
}

impl Collective {
    /// Every kind, in the order of their codes on the wire.
    pub const ALL: [Collective; 19] = [
        Collective::NewGroup,
        Collective::Barrier,
        Collective::AllReduce,
        Collective::AllReduceWeighted,
        Collective::Broadcast,
        Collective::AllGather,
        Collective::ReduceScatter,
        Collective::BroadcastObject,
        Collective::AllGatherObject,
        Collective::SharedBuffers,
        Collective::Reduce,
        Collective::Gather,
        Collective::Scatter,
        Collective::AllToAll,
        Collective::Split,
        Collective::Send,
        Collective::Recv,
        Collective::SendRecv,
        Collective::AllReduceLeaves,
    ];

    /// Kind of the other rank's call, for a call between two ranks; `None` for calls that all ranks of a group make.
    pub fn counterpart(self) -> Option<Collective> {
        match self {
            Collective::Send => Some(Collective::Recv),
            Collective::Recv => Some(Collective::Send),
            Collective::SendRecv => Some(Collective::SendRecv),
            _ => None,
        }
    }

    pub(crate) fn code(self) -> u8 {
        self as u8
    }

    pub(crate) fn from_code(code: u8) -> Option<Collective> {
        Collective::ALL.get(usize::from(code)).copied()
    }
}

impl fmt::Display for Collective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Collective::NewGroup => "group",
            Collective::Barrier => "barrier",
            Collective::AllReduce => "all_reduce",
            Collective::AllReduceWeighted => "all_reduce_weighted",
            Collective::Broadcast => "broadcast",
            Collective::AllGather => "all_gather",
            Collective::ReduceScatter => "reduce_scatter",
            Collective::BroadcastObject => "broadcast_object",
            Collective::AllGatherObject => "all_gather_object",
            Collective::SharedBuffers => "shared_buffers",
            Collective::Reduce => "reduce",
            Collective::Gather => "gather",
            Collective::Scatter => "scatter",
            Collective::AllToAll => "all_to_all",
            Collective::Split => "split",
            Collective::Send => "send",
            Collective::Recv => "recv",
            Collective::SendRecv => "send_recv",
            Collective::AllReduceLeaves => "all_reduce_leaves",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_round_trip() {
        for collective in Collective::ALL {
            assert_eq!(Collective::from_code(collective.code()), Some(collective));
        }
        assert_eq!(Collective::from_code(Collective::ALL.len() as u8), None);
    }
}
