//! Errors of a device or of NCCL, and the error that ends the world for them.

use std::fmt;
use std::time::{Duration, Instant};

use burn_ddp_comm::membership::Membership;
use burn_ddp_comm::{Call, Error};

/// Reason why a call on a device did not succeed.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum DeviceError {
    /// Message of NCCL or of the CUDA driver.
    Library(String),
    /// An argument that this crate refuses. Nothing was launched.
    InvalidArgument {
        /// The argument, and what it does not fit.
        message: String,
    },
    /// A stream of another device than the communicator's or the memory's. Nothing was launched.
    WrongStream {
        /// Device of the stream.
        stream: usize,
        /// Device of the communicator or of the memory.
        expected: usize,
    },
    /// The world has ended, or the deadline has passed.
    World(Error),
}

impl fmt::Display for DeviceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceError::Library(message) | DeviceError::InvalidArgument { message } => f.write_str(message),
            DeviceError::WrongStream { stream, expected } => {
                write!(f, "a stream of CUDA device {stream}, but the work is on CUDA device {expected}")
            }
            DeviceError::World(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for DeviceError {
    /// Skips the error in `World`, whose message this error has.
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            DeviceError::World(error) => std::error::Error::source(error),
            _ => None,
        }
    }
}

impl DeviceError {
    pub(crate) fn invalid_argument(message: String) -> DeviceError {
        DeviceError::InvalidArgument { message }
    }
}

impl From<String> for DeviceError {
    fn from(text: String) -> DeviceError {
        DeviceError::Library(text)
    }
}

impl From<Error> for DeviceError {
    fn from(error: Error) -> DeviceError {
        DeviceError::World(error)
    }
}

/// Longest time in which the death of a rank becomes known to the others.
const NEWS: Duration = Duration::from_millis(300);

/// Error that ends the world after NCCL or the driver failed on this rank. Prefers an earlier cause, such as a rank
/// that died, for which it waits up to [`NEWS`].
pub(crate) fn root_cause(membership: &Membership, why: &str) -> Error {
    let until = Instant::now() + NEWS;
    while Instant::now() < until {
        if let Err(cause) = membership.check() {
            return cause;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    own_failure(membership, why)
}

/// Error that names this rank as the one that failed.
pub(crate) fn own_failure(membership: &Membership, why: &str) -> Error {
    match membership.peers().get(membership.rank()) {
        Some(peer) => Error::PeerFailed { peer: peer.clone(), cause: why.to_owned(), during: None },
        None => {
            Error::Internal { message: format!("rank {} of {}: {why}", membership.rank(), membership.peers().len()) }
        }
    }
}

/// Group ranks that a call of this rank may be waiting for: all others, or this rank alone in a group of one.
pub(crate) fn awaited_ranks(call: &Call) -> Vec<usize> {
    let all = 0..call.members.count();
    let others: Vec<usize> = all.clone().filter(|peer| call.world_rank(*peer) != call.rank).collect();
    if others.is_empty() { all.collect() } else { others }
}

/// Error of the machine's installation.
pub(crate) fn environment(message: String) -> Error {
    Error::Environment { message }
}
