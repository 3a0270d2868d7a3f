//! Errors of an MPI that cannot be used.

use burn_ddp_comm::Error;
use burn_ddp_comm::membership::Membership;

use crate::ffi::{Failure, library};

/// Error of the machine's installation, or of how the job was started.
pub(crate) fn environment(message: String) -> Error {
    Error::Environment { message }
}

/// Error for a call of MPI that failed outside of any exchange.
pub(crate) fn call_failed(failure: Failure) -> Error {
    environment(format!("{}: {failure}", library()))
}

/// Error that names this rank as the one that failed.
pub(crate) fn own_failure(membership: &Membership, failure: &Failure) -> Error {
    let peer = membership.peers()[membership.rank()].clone();
    Error::PeerFailed { peer, cause: failure.to_string(), during: None }
}
