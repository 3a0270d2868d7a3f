//! Presence of the ranks: each takes part, has ended unheard, or has said goodbye.

use std::sync::atomic::{AtomicU8, Ordering};

/// The rank takes part.
const PRESENT: u8 = 0;
/// The rank seems to have ended; it is not known whether it said goodbye or died.
const UNHEARD: u8 = 1;
/// The rank has said goodbye.
const LEFT: u8 = 2;

/// Presence by rank. A goodbye is final. An end unheard is not, since the rank may connect later.
///
/// Written by ranks and control threads under the lock of `Shared::liveness`, so that both change together; read by
/// every wait.
pub(super) struct Presence(Box<[AtomicU8]>);

impl Presence {
    /// All of `count` ranks take part.
    pub(super) fn of_all(count: usize) -> Presence {
        Presence((0..count).map(|_| AtomicU8::new(PRESENT)).collect())
    }

    /// True if `rank` does not take part any more.
    pub(super) fn has_left(&self, rank: usize) -> bool {
        self.0[rank].load(Ordering::Acquire) != PRESENT
    }

    /// True if `rank` has said goodbye.
    pub(super) fn said_goodbye(&self, rank: usize) -> bool {
        self.0[rank].load(Ordering::Acquire) == LEFT
    }

    /// True if `rank` has ended unheard.
    pub(super) fn ended_unheard(&self, rank: usize) -> bool {
        self.0[rank].load(Ordering::Acquire) == UNHEARD
    }

    /// Notes the goodbye of `rank`.
    pub(super) fn leave(&self, rank: usize) {
        self.0[rank].store(LEFT, Ordering::Release);
    }

    /// Notes that `rank` has ended unheard; false if it did not take part before.
    pub(super) fn end_unheard(&self, rank: usize) -> bool {
        self.change(rank, PRESENT, UNHEARD)
    }

    /// Notes that `rank` takes part although it seemed to have ended; false if it had not seemed so.
    pub(super) fn reappear(&self, rank: usize) -> bool {
        self.change(rank, UNHEARD, PRESENT)
    }

    fn change(&self, rank: usize, from: u8, to: u8) -> bool {
        self.0[rank].compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_goodbye_is_final_before_and_after_an_end_unheard() {
        let presence = Presence::of_all(3);
        presence.leave(0);
        assert!(!presence.end_unheard(0) && !presence.reappear(0));
        assert!(presence.end_unheard(1) && !presence.end_unheard(1));
        presence.leave(1);
        assert!(!presence.reappear(1));
        for rank in [0, 1] {
            assert!(presence.has_left(rank) && presence.said_goodbye(rank) && !presence.ended_unheard(rank));
        }
        assert!(!presence.reappear(2), "it was never gone");
        assert!(presence.end_unheard(2) && presence.ended_unheard(2) && !presence.said_goodbye(2));
        assert!(presence.reappear(2) && !presence.has_left(2));
    }
}
