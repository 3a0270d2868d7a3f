//! The threads engine: between threads of one process, which pass frames through queues in memory.

mod fabric;
mod frame_queues;
mod transport;

pub(crate) use self::fabric::ThreadsFabric;

const NAME: &str = "threads";
