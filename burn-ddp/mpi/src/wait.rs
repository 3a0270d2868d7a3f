//! Waits for MPI, which wakes no thread: a wait polls.

use std::time::Duration;

use burn_ddp_comm::membership::Membership;
use burn_ddp_comm::{PollPause, core_per_rank};

/// Time for which a wait spins on its core, if ranks do not outnumber cores.
const SPINS: Duration = Duration::from_micros(500);
/// Time after which a wait sleeps between two polls; until then it yields its core.
const YIELDS: Duration = Duration::from_millis(1);

/// Pauses of the waits of one rank.
pub(crate) fn poll_pause(membership: &Membership) -> PollPause {
    let spins = core_per_rank(membership.rank(), membership.peers());
    PollPause::new(if spins { SPINS } else { Duration::ZERO }, YIELDS)
}

/// Pauses of waits before the ranks of a world know each other.
pub(crate) fn poll_pause_alone() -> PollPause {
    PollPause::new(SPINS, YIELDS)
}
