//! A machine with devices and NCCL in host memory, for tests where there is no GPU.
//!
//! It is asynchronous, as the real one is: each stream is a thread that does what was enqueued in order, calls of communicators that do not
//! block return before they have enqueued anything, and each communicator waits on its stream for those of the other ranks. So a missing
//! wait gives wrong numbers, and launches in different orders on two devices wait for each other until somebody's deadline. Addresses are
//! numbers that mean nothing to the host, and what is not in an allocation is an error. All of it can be told to [fail](Fault).
//!
//! Reductions are those of burn-ddp's host engines, bit by bit, so that the suite that these pass can be run here. NCCL's own are not:
//! they add in another order, and in the elements' type.
//!
//! | what | where |
//! |---|---|
//! | devices: contexts, streams, events, memory | `fake_driver.rs` |
//! | communicators | `fake_nccl.rs`, `clique.rs` |
//! | arithmetic | `arithmetic.rs` |
#![allow(unsafe_code)]

mod clique;
mod fake_driver;
mod fake_nccl;
mod arithmetic;

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use self::clique::Clique;
use self::fake_driver::{FakeEvent, FakeStream};
use self::fake_nccl::FakeComm;
use crate::driver::Driver;
use crate::nccl::Nccl;
use crate::watchdog::lock;

/// What goes wrong on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Its communicators cannot be made.
    InitFails,
    /// Its communicators are never ready.
    InitHangs,
    /// The launch after this many is refused.
    LaunchFails(u64),
    /// What is launched after this many launches never completes.
    Hangs(u64),
    /// What is launched after this many launches never completes, and an error appears in the background.
    AsyncError(u64),
}

/// A machine.
#[derive(Clone)]
pub struct Machine {
    inner: Arc<Inner>,
}

struct Inner {
    /// Tells the contexts of machines apart.
    id: usize,
    devices: usize,
    /// Handles and addresses are never used twice.
    next: AtomicU64,
    streams: Mutex<HashMap<u64, Arc<FakeStream>>>,
    events: Mutex<HashMap<u64, Arc<FakeEvent>>>,
    /// By address.
    memory: Mutex<BTreeMap<u64, Allocation>>,
    /// Memory of the host, by address, with its length.
    pinned: Mutex<HashMap<usize, usize>>,
    cliques: Mutex<HashMap<[u8; 128], Arc<Clique>>>,
    comms: Mutex<HashMap<u64, Arc<FakeComm>>>,
    /// Ops with a factor: the communicator and the factor's bytes.
    ops: Mutex<HashMap<i32, (u64, [u8; 8])>>,
    faults: Mutex<HashMap<usize, Fault>>,
    /// What was launched, in order: device, clique, how many before it there.
    launches: Mutex<Vec<(usize, u64, u64)>>,
    /// What no program may do.
    misuse: Arc<Mutex<Vec<String>>>,
    /// Shared with streams' threads, which may outlive the machine.
    delays: Arc<Delays>,
}

/// Random ones, up to `most_us`.
struct Delays {
    most_us: AtomicU64,
    seed: AtomicU64,
}

impl Delays {
    fn dawdle(&self) {
        let most = self.most_us.load(Ordering::Relaxed);
        if most == 0 {
            return;
        }
        let seed = self.seed.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed);
        let mixed = (seed ^ seed >> 31).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 33;
        if !mixed.is_multiple_of(3) {
            std::thread::sleep(Duration::from_micros(mixed % most));
        }
    }
}

/// Memory of a device.
#[derive(Clone)]
struct Allocation {
    ordinal: usize,
    bytes: Arc<Mutex<Vec<u8>>>,
}

impl Machine {
    /// With this many devices.
    pub fn new(devices: usize) -> Machine {
        static MACHINES: AtomicUsize = AtomicUsize::new(1);
        let id = MACHINES.fetch_add(1, Ordering::Relaxed);
        Machine {
            inner: Arc::new(Inner {
                id,
                devices,
                next: AtomicU64::new(0x7000_0000_0000),
                streams: Mutex::default(),
                events: Mutex::default(),
                memory: Mutex::default(),
                pinned: Mutex::default(),
                cliques: Mutex::default(),
                comms: Mutex::default(),
                ops: Mutex::default(),
                faults: Mutex::default(),
                launches: Mutex::default(),
                misuse: Arc::default(),
                delays: Arc::new(Delays { most_us: AtomicU64::new(0), seed: AtomicU64::new(1) }),
            }),
        }
    }

    /// Its driver.
    ///
    /// # Panics
    /// Never: this one always works.
    pub fn driver(&self) -> Driver {
        Driver::of(self.inner.clone()).expect("a driver")
    }

    /// Its NCCL.
    ///
    /// # Panics
    /// Never: this one always works.
    pub fn nccl(&self) -> Nccl {
        Nccl::of(self.inner.clone()).expect("NCCL")
    }

    /// From now on this goes wrong on a device.
    pub fn inject(&self, ordinal: usize, fault: Fault) {
        lock(&self.inner.faults).insert(ordinal, fault);
    }

    /// Streams and launches take up to this long, at random.
    pub fn set_jitter(&self, most: Duration, seed: u64) {
        self.inner.delays.most_us.store(most.as_micros() as u64, Ordering::Relaxed);
        self.inner.delays.seed.store(seed, Ordering::Relaxed);
    }

    /// What was done that no program may do, such as launching what different ranks launched in different orders.
    pub fn misuse(&self) -> Vec<String> {
        let mut misuse = lock(&self.inner.misuse).clone();
        misuse.extend(self.inner.disorder());
        misuse
    }

    /// How many collectives were launched on a device.
    pub fn launched(&self, ordinal: usize) -> usize {
        lock(&self.inner.launches).iter().filter(|(on, ..)| *on == ordinal).count()
    }

    /// How many communicators there are.
    pub fn communicators(&self) -> usize {
        lock(&self.inner.comms).len()
    }

    /// How many allocations there are, on devices and of pinned memory.
    pub fn allocations(&self) -> usize {
        lock(&self.inner.memory).len() + lock(&self.inner.pinned).len()
    }

    /// How many streams and events there are.
    pub fn streams_and_events(&self) -> (usize, usize) {
        (lock(&self.inner.streams).len(), lock(&self.inner.events).len())
    }

    /// Writes memory of a device, now.
    ///
    /// # Panics
    /// If it is not allocated.
    pub fn write(&self, pointer: u64, bytes: &[u8]) {
        assert!(self.inner.write(pointer, bytes), "{} bytes at {pointer:#x} are not allocated", bytes.len());
    }

    /// Reads memory of a device, now.
    ///
    /// # Panics
    /// If it is not allocated.
    pub fn read(&self, pointer: u64, len_bytes: usize) -> Vec<u8> {
        self.inner
            .read(pointer, len_bytes)
            .unwrap_or_else(|| panic!("{len_bytes} bytes at {pointer:#x} are not allocated"))
    }

    /// Enqueues a kernel.
    ///
    /// # Panics
    /// If there is no such stream.
    pub fn launch(&self, stream: &crate::Stream, kernel: impl FnOnce(&Machine) + Send + 'static) {
        let machine = self.clone();
        let stream = self.inner.stream(stream.raw()).expect("a stream");
        stream.push(fake_driver::Task::Run(Box::new(move || kernel(&machine))));
    }
}

impl Inner {
    fn handle(&self) -> u64 {
        self.next.fetch_add(0x100, Ordering::Relaxed)
    }

    fn fault(&self, ordinal: usize) -> Option<Fault> {
        lock(&self.faults).get(&ordinal).copied()
    }

    fn misused(&self, what: String) {
        lock(&self.misuse).push(what);
    }

    fn within(&self, pointer: u64, len_bytes: usize) -> Option<(Allocation, usize)> {
        let memory = lock(&self.memory);
        let (start, allocation) = memory.range(..=pointer).next_back()?;
        let offset = (pointer - start) as usize;
        let len = lock(&allocation.bytes).len();
        (offset.checked_add(len_bytes)? <= len).then(|| (allocation.clone(), offset))
    }

    fn read(&self, pointer: u64, len_bytes: usize) -> Option<Vec<u8>> {
        let (allocation, offset) = self.within(pointer, len_bytes)?;
        Some(lock(&allocation.bytes)[offset..offset + len_bytes].to_vec())
    }

    fn write(&self, pointer: u64, bytes: &[u8]) -> bool {
        let Some((allocation, offset)) = self.within(pointer, bytes.len()) else { return false };
        lock(&allocation.bytes)[offset..offset + bytes.len()].copy_from_slice(bytes);
        true
    }

    /// Two devices on which collectives of common cliques were launched in different orders.
    fn disorder(&self) -> Option<String> {
        let launches = lock(&self.launches);
        let on = |ordinal: usize| {
            launches.iter().filter(move |(on, ..)| *on == ordinal).map(|(_, clique, nth)| (*clique, *nth))
        };
        for a in 0..self.devices {
            for b in a + 1..self.devices {
                let common = |one: usize, other: usize| {
                    let theirs: std::collections::HashSet<_> = on(other).collect();
                    on(one).filter(move |launch| theirs.contains(launch)).collect::<Vec<_>>()
                };
                let (first, second) = (common(a, b), common(b, a));
                if let Some(at) = (0..first.len()).find(|at| first[*at] != second[*at]) {
                    return Some(format!("launch {at} is {:x?} on device {a} and {:x?} on {b}", first[at], second[at]));
                }
            }
        }
        None
    }
}
