//! Reasons for which an engine cannot serve a group.

use std::fmt;

/// The reason why a fabric cannot open a group; every rank of the group knows it. Another engine may serve the group.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Unavailable {
    /// The buffers wanted are larger than any memory can be.
    TooLarge,
    /// A rank could not create the memory to share.
    NotCreated {
        /// The rank in the world.
        rank: usize,
        /// Bytes wanted.
        len_bytes: usize,
        /// The system's error.
        cause: String,
    },
    /// A rank could not map the memory that another had created.
    NotMapped {
        /// The rank in the world.
        rank: usize,
        /// Bytes wanted.
        len_bytes: usize,
        /// The system's error.
        cause: String,
    },
    /// Two ranks need memory of different sizes: they run different programs.
    SizesDiffer {
        /// The rank that refused, in the world.
        rank: usize,
        /// Bytes that this rank needs.
        own: u64,
        /// Bytes of the memory that it was offered.
        offered: u64,
    },
    /// The reason of another rank, as that rank's message.
    OnPeer(String),
}

impl fmt::Display for Unavailable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Unavailable::TooLarge => f.write_str("the buffers are larger than any memory"),
            Unavailable::NotCreated { rank, len_bytes, cause } => {
                write!(f, "rank {rank} cannot create {len_bytes} bytes of shared memory: {cause}")
            }
            Unavailable::NotMapped { rank, len_bytes, cause } => {
                write!(f, "rank {rank} cannot map {len_bytes} bytes of shared memory: {cause}")
            }
            Unavailable::SizesDiffer { rank, own, offered } => {
                write!(f, "rank {rank} needs {own} bytes of shared memory, not {offered}")
            }
            Unavailable::OnPeer(reason) => f.write_str(reason),
        }
    }
}
