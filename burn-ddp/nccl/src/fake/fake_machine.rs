//! The fake machine as tests see it: some devices in host memory, with driver and NCCL.

use std::sync::Arc;
use std::time::Duration;

use super::fake_state::{Fault, State};
use super::fake_stream::Task;
use crate::driver::Driver;
use crate::nccl::Nccl;
use crate::poison_free_lock::lock;

/// A machine with devices in host memory.
#[derive(Clone)]
pub struct Machine {
    state: Arc<State>,
}

impl Machine {
    /// A machine with this many devices.
    pub fn new(devices: usize) -> Machine {
        Machine { state: Arc::new(State::new(devices)) }
    }

    /// Its driver.
    ///
    /// # Panics
    /// Never: this one always works.
    pub fn driver(&self) -> Driver {
        Driver::of(self.state.clone()).expect("a driver")
    }

    /// Its NCCL.
    ///
    /// # Panics
    /// Never: this one always works.
    pub fn nccl(&self) -> Nccl {
        Nccl::of(self.state.clone()).expect("NCCL")
    }

    /// Makes a device fail from now on.
    pub fn inject(&self, ordinal: usize, fault: Fault) {
        lock(&self.state.faults).insert(ordinal, fault);
    }

    /// Delays streams and launches at random, by up to `most`.
    pub fn set_jitter(&self, most: Duration, seed: u64) {
        self.state.delays.set(most, seed);
    }

    /// Descriptions of misuse so far, such as launches in different orders on different devices.
    pub fn misuse(&self) -> Vec<String> {
        let mut misuse = lock(&self.state.misuse).clone();
        misuse.extend(self.state.disorder());
        misuse
    }

    /// Number of collectives launched on a device.
    pub fn launched(&self, ordinal: usize) -> usize {
        lock(&self.state.launches).iter().filter(|(on, ..)| *on == ordinal).count()
    }

    /// Number of communicators.
    pub fn communicators(&self) -> usize {
        lock(&self.state.comms).len()
    }

    /// Number of allocations, on devices and of pinned memory.
    pub fn allocations(&self) -> usize {
        lock(&self.state.memory).len() + lock(&self.state.pinned).len()
    }

    /// Number of streams and events.
    pub fn streams_and_events(&self) -> (usize, usize) {
        (lock(&self.state.streams).len(), lock(&self.state.events).len())
    }

    /// Writes memory of a device, now.
    ///
    /// # Panics
    /// If it is not allocated.
    pub fn write(&self, pointer: u64, bytes: &[u8]) {
        assert!(self.state.write(pointer, bytes), "{} bytes at {pointer:#x} are not allocated", bytes.len());
    }

    /// Reads memory of a device, now.
    ///
    /// # Panics
    /// If it is not allocated.
    pub fn read(&self, pointer: u64, len_bytes: usize) -> Vec<u8> {
        self.state
            .read(pointer, len_bytes)
            .unwrap_or_else(|| panic!("{len_bytes} bytes at {pointer:#x} are not allocated"))
    }

    /// Enqueues a kernel.
    ///
    /// # Panics
    /// If there is no such stream.
    pub fn launch(&self, stream: &crate::Stream, kernel: impl FnOnce(&Machine) + Send + 'static) {
        let machine = self.clone();
        let stream = self.state.stream(stream.raw()).expect("a stream");
        stream.push(Task::Run(Box::new(move || kernel(&machine))));
    }
}
