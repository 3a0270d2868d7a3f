//! The tcp engine: between processes, on one machine or several.
//!
//! Each group has links of its own, one per pair of ranks that exchange anything, so no group waits behind another's
//! bytes. A link is connected when it is first used; a link between machines may consist of several sockets (flows). An
//! exchange makes progress with all peers at once, both ways, on the calling thread: it writes and reads what it can,
//! then `poll` waits for a socket, a change of membership, or the deadline. Payloads are written from and read into the
//! caller's memory. Elements to be reduced are read in pieces that stay in the cache until they are reduced. Pipelines
//! over several machines queue frames in memory of their own. With
//! [`WorldOptions::encrypt_data`](crate::WorldOptions::encrypt_data) all bytes travel in encrypted records.

mod connector;
mod data_stream;
mod exchange;
mod fabric;
mod flows;
#[cfg(target_os = "linux")]
mod frames_under_way;
mod group_links;
mod link;
mod spin;
mod transport;

pub(crate) use self::connector::Reach;
#[cfg(feature = "fuzzing")]
pub(crate) use self::data_stream::fuzz as fuzz_data_stream;
pub(crate) use self::fabric::TcpFabric;
#[cfg(target_os = "linux")]
pub(in crate::engine) use self::frames_under_way::FramesUnderWay;
#[cfg(target_os = "linux")]
pub(in crate::engine) use self::transport::TcpTransport;

pub(crate) const NAME: &str = "tcp";
