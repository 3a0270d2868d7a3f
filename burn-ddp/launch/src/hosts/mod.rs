//! Several machines from one terminal: a connection by `ssh` to each host, on which `burnrun remote` runs one launcher.
//!
//! | | |
//! |---|---|
//! | [`Host`] | a line of a hostfile |
//! | [`FanOut`] | the local end: starts the connections, passes on output and signals, names the host that fails |
//! | [`Order`], [`Answer`] | what the ends tell each other, as lines of JSON |
//! | [`Remote`] | the end on a host |
//!
//! The command line of ssh holds the path of burnrun and nothing of the job. `burnrun remote` writes
//! [`Answer::Ready`]; then it gets the order with the job's secret, and later signals. The end of its stdin (the local
//! burnrun or the connection is gone) ends its part of the job, as SIGTERM would.

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

/// A hostfile, or a line of a connection.
#[cfg(feature = "fuzzing")]
pub(crate) fn fuzz(bytes: &[u8]) {
    hostfile::fuzz(&String::from_utf8_lossy(bytes));
    remote_messages::fuzz(bytes);
}
