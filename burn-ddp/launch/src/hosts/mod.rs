//! Several machines from one terminal: a connection by `ssh` to each host, on which `burnrun remote` runs one launcher.
//!
//! | | |
//! |---|---|
//! | [`Host`] | a line of a hostfile |
//! | [`FanOut`] | the local end: starts the connections, passes on output and signals, names the host that fails |
//! | [`Order`], [`Answer`] | messages between the two ends, as lines of JSON |
//! | [`Remote`] | the end on a host |
//!
//! The command line of ssh names only the path of burnrun, since other users of the host can read it. `burnrun remote`
//! writes [`Answer::Ready`]; then it receives on stdin the order with the job's secret, and later the signals. When its
//! stdin ends (the local burnrun or the connection is gone), it ends its part of the job, as after SIGTERM.

mod fan_out;
mod hostfile;
mod remote_end;
mod remote_messages;
mod ssh_connection;
mod ssh_failure;

pub use fan_out::FanOut;
pub use hostfile::Host;
pub use remote_end::Remote;
pub use remote_messages::{Answer, Order};

/// Parses `bytes` as a hostfile and as a line of a connection.
#[cfg(feature = "fuzzing")]
pub(crate) fn fuzz(bytes: &[u8]) {
    hostfile::fuzz(&String::from_utf8_lossy(bytes));
    remote_messages::fuzz(bytes);
}
