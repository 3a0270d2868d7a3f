//! State of the fake machine: handles, memory, injected faults, and a record of the launches.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use super::fake_comm::FakeComm;
use super::fake_rendezvous::FakeRendezvous;
use super::fake_stream::{Delays, FakeEvent, FakeStream};
use crate::driver::Raw;
use crate::nccl::RawComm;
use crate::poison_free_lock::lock;

/// Fault injected on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Making a communicator on the device fails.
    InitFails,
    /// A communicator on the device never gets ready.
    InitHangs,
    /// Each communicator refuses launches after this many.
    LaunchFails(u64),
    /// Launches after this many stay in the background until they are aborted.
    LaunchHangs(u64),
    /// Collectives launched after this many launches never complete.
    Hangs(u64),
    /// Collectives launched after this many launches never complete, and an error appears in the background.
    AsyncError(u64),
}

/// State behind a machine.
pub(super) struct State {
    /// Tells contexts of this machine from those of others.
    pub(super) id: usize,
    pub(super) devices: usize,
    /// Handles and addresses are never used twice.
    pub(super) next: AtomicU64,
    pub(super) streams: Mutex<HashMap<u64, Arc<FakeStream>>>,
    pub(super) events: Mutex<HashMap<u64, Arc<FakeEvent>>>,
    /// By address.
    pub(super) memory: Mutex<BTreeMap<u64, Allocation>>,
    /// Lengths of the pinned memory of the host, by address.
    pub(super) pinned: Mutex<HashMap<usize, usize>>,
    pub(super) rendezvous: Mutex<HashMap<[u8; 128], Arc<FakeRendezvous>>>,
    pub(super) comms: Mutex<HashMap<u64, Arc<FakeComm>>>,
    /// Ops with a factor: the communicator and the factor's bytes.
    pub(super) ops: Mutex<HashMap<i32, (u64, [u8; 8])>>,
    pub(super) faults: Mutex<HashMap<usize, Fault>>,
    /// Launches in their order: device, rendezvous, number of launches of the rendezvous before.
    pub(super) launches: Mutex<Vec<(usize, u64, u64)>>,
    /// Descriptions of misuse so far.
    pub(super) misuse: Arc<Mutex<Vec<String>>>,
    /// Shared with streams' threads, which may outlive the machine.
    pub(super) delays: Arc<Delays>,
}

/// Memory of a device.
#[derive(Clone)]
pub(super) struct Allocation {
    pub(super) ordinal: usize,
    pub(super) bytes: Arc<Mutex<Vec<u8>>>,
}

impl State {
    pub(super) fn new(devices: usize) -> State {
        static MACHINES: AtomicUsize = AtomicUsize::new(1);
        let id = MACHINES.fetch_add(1, Ordering::Relaxed);
        State {
            id,
            devices,
            next: AtomicU64::new(0x7000_0000_0000),
            streams: Mutex::default(),
            events: Mutex::default(),
            memory: Mutex::default(),
            pinned: Mutex::default(),
            rendezvous: Mutex::default(),
            comms: Mutex::default(),
            ops: Mutex::default(),
            faults: Mutex::default(),
            launches: Mutex::default(),
            misuse: Arc::default(),
            delays: Arc::new(Delays::default()),
        }
    }

    pub(super) fn stream(&self, raw: Raw) -> Option<Arc<FakeStream>> {
        lock(&self.streams).get(&(raw as u64)).cloned()
    }

    pub(super) fn event(&self, raw: Raw) -> Option<Arc<FakeEvent>> {
        lock(&self.events).get(&(raw as u64)).cloned()
    }

    pub(super) fn comm(&self, raw: RawComm) -> Option<Arc<FakeComm>> {
        lock(&self.comms).get(&(raw as u64)).cloned()
    }

    pub(super) fn handle(&self) -> u64 {
        self.next.fetch_add(0x100, Ordering::Relaxed)
    }

    pub(super) fn fault(&self, ordinal: usize) -> Option<Fault> {
        lock(&self.faults).get(&ordinal).copied()
    }

    pub(super) fn misused(&self, what: String) {
        lock(&self.misuse).push(what);
    }

    pub(super) fn within(&self, pointer: u64, len_bytes: usize) -> Option<(Allocation, usize)> {
        let memory = lock(&self.memory);
        let (start, allocation) = memory.range(..=pointer).next_back()?;
        let offset = (pointer - start) as usize;
        let len = lock(&allocation.bytes).len();
        (offset.checked_add(len_bytes)? <= len).then(|| (allocation.clone(), offset))
    }

    pub(super) fn read(&self, pointer: u64, len_bytes: usize) -> Option<Vec<u8>> {
        let (allocation, offset) = self.within(pointer, len_bytes)?;
        Some(lock(&allocation.bytes)[offset..offset + len_bytes].to_vec())
    }

    pub(super) fn write(&self, pointer: u64, bytes: &[u8]) -> bool {
        let Some((allocation, offset)) = self.within(pointer, bytes.len()) else { return false };
        lock(&allocation.bytes)[offset..offset + bytes.len()].copy_from_slice(bytes);
        true
    }

    /// Describes two devices on which collectives of common rendezvous were launched in different orders.
    pub(super) fn disorder(&self) -> Option<String> {
        let launches = lock(&self.launches);
        let on = |ordinal: usize| {
            launches.iter().filter(move |(on, ..)| *on == ordinal).map(|(_, rendezvous, nth)| (*rendezvous, *nth))
        };
        for a in 0..self.devices {
            for b in a + 1..self.devices {
                let common = |one: usize, other: usize| {
                    let theirs: HashSet<_> = on(other).collect();
                    on(one).filter(move |launch| theirs.contains(launch)).collect::<Vec<_>>()
                };
                let (first, second) = (common(a, b), common(b, a));
                if let Some(at) = (0..first.len()).find(|at| first[*at] != second[*at]) {
                    return Some(format!(
                        "devices {a} and {b} launched the same collectives in different orders: number {at} is {:x?} \
                         (rendezvous, launch) on {a}, and {:x?} on {b}",
                        first[at], second[at]
                    ));
                }
            }
        }
        None
    }
}
