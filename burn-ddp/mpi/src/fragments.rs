//! Fragmentation: how a frame is cut into messages.
//!
//! The first message has the header and the first bytes of the payload, and is short enough for MPI to send it at once.
//! Each later message has the next bytes of the payload. Sender and receiver cut alike.

use std::ops::Range;

use burn_ddp_comm::frame::MAX_HEADER_BYTES;

/// Bytes of the payload in the first message: whole elements of any type, and together with the header no more than
/// what MPIs send without asking the receiver.
const FIRST_BYTES: usize = 3712;

/// Bytes of the longest first message.
pub(crate) const FIRST_ROOM: usize = MAX_HEADER_BYTES + FIRST_BYTES;

/// Bytes of one later message from each peer, added up over the peers of the group, within the limits below.
const ALL_BYTES: usize = 1 << 20;
const MIN_BYTES: usize = 64 * 1024;
const MAX_BYTES: usize = 512 * 1024;

/// Lengths of the fragments into which the frames of a group are cut.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fragments {
    /// Bytes of each fragment but the first and the last: whole elements of any type.
    pub(crate) len: usize,
}

impl Fragments {
    /// Lengths for a group of `world_size` ranks.
    pub(crate) fn of(world_size: usize) -> Fragments {
        let share = ALL_BYTES / world_size.saturating_sub(1).max(1);
        Fragments { len: share.clamp(MIN_BYTES, MAX_BYTES) / 64 * 64 }
    }

    /// Number of fragments of a payload, at least one.
    pub(crate) fn count(self, payload_bytes: usize) -> usize {
        1 + payload_bytes.saturating_sub(FIRST_BYTES).div_ceil(self.len)
    }

    /// Bytes of the payload in the `nth` fragment.
    pub(crate) fn range(self, nth: usize, payload_bytes: usize) -> Range<usize> {
        let end_of = |nth: usize| (FIRST_BYTES + nth * self.len).min(payload_bytes);
        let start = if nth == 0 { 0 } else { end_of(nth - 1) };
        start..end_of(nth)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_the_payload_in_whole_elements() {
        for world_size in [1, 2, 3, 5, 17, 200] {
            let fragments = Fragments::of(world_size);
            let edges = [0, FIRST_BYTES, FIRST_BYTES + fragments.len, FIRST_BYTES + 7 * fragments.len];
            for payload_bytes in edges.into_iter().flat_map(|edge| edge.saturating_sub(1)..=edge + 1) {
                check(fragments, payload_bytes);
            }
        }
    }

    fn check(fragments: Fragments, payload_bytes: usize) {
        let mut end = 0;
        for nth in 0..fragments.count(payload_bytes) {
            let range = fragments.range(nth, payload_bytes);
            assert_eq!((range.start, range.start % 64), (end, 0));
            assert!(nth == 0 || !range.is_empty());
            assert!(range.len() <= if nth == 0 { FIRST_BYTES } else { fragments.len });
            end = range.end;
        }
        assert_eq!(end, payload_bytes);
    }
}
