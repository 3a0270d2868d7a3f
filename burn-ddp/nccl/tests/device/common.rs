//! Ranks as threads, each with a device of one machine.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use burn_ddp_comm::engine::OnDevice;
use burn_ddp_comm::membership::Membership;
use burn_ddp_comm::{DType, Error, ProcessGroup, ReduceOp, Result, World, WorldOptions};
use burn_ddp_nccl::fake::Machine;
use burn_ddp_nccl::{Device, DeviceBuffer, DeviceElements, Event, HostMemory, NcclFabric, Piece, Stream};

/// Limit for what must happen without waiting for the deadline of [`patient`].
pub const AT_ONCE: Duration = Duration::from_secs(10);

pub struct Rank {
    pub machine: Machine,
    pub world: World,
    pub device: Device,
    pub membership: Arc<Membership>,
    /// Stream of this rank's kernels.
    pub stream: Stream,
}

pub fn patient() -> WorldOptions {
    WorldOptions { timeout: Duration::from_secs(30), ..WorldOptions::default() }
}

pub fn hasty(timeout_ms: u64) -> WorldOptions {
    WorldOptions { timeout: Duration::from_millis(timeout_ms), ..WorldOptions::default() }
}

/// Runs `n` ranks; returns their results, in rank order.
pub fn run<R: Send>(
    machine: &Machine,
    n: usize,
    (options, memory): (WorldOptions, HostMemory),
    rank_main: impl Fn(Rank) -> R + Sync,
) -> Vec<R> {
    let ranks: Vec<Rank> = World::threads(n, options).into_iter().map(|world| rank(machine, world, memory)).collect();
    thread::scope(|scope| {
        let rank_main = &rank_main;
        let running: Vec<_> = ranks.into_iter().map(|rank| scope.spawn(move || rank_main(rank))).collect();
        running.into_iter().map(|rank| rank.join().expect("a rank panicked")).collect()
    })
}

fn rank(machine: &Machine, world: World, memory: HostMemory) -> Rank {
    let device = Device::new(&machine.driver(), world.rank()).expect("a device");
    let mut memberships = None;
    world
        .set_fabric(|own, membership| {
            memberships = Some(membership.clone());
            let fabric = NcclFabric::new(own, membership, machine.nccl(), device.clone(), memory)?;
            Ok::<_, Error>(Arc::new(fabric) as _)
        })
        .expect("a fabric");
    let stream = device.stream().expect("a stream");
    Rank { machine: machine.clone(), world, device, membership: memberships.expect("a membership"), stream }
}

pub fn on_devices<R: Send>(
    machine: &Machine,
    n: usize,
    options: WorldOptions,
    rank_main: impl Fn(Rank) -> R + Sync,
) -> Vec<R> {
    run(machine, n, (options, HostMemory::ByHost), rank_main)
}

impl Rank {
    pub fn rank(&self) -> usize {
        self.world.rank()
    }

    /// This rank, for another of its threads.
    pub fn on_another_stream(&self) -> Rank {
        let Rank { machine, world, device, membership, .. } = self;
        let stream = device.stream().expect("a stream");
        Rank {
            machine: machine.clone(),
            world: world.clone(),
            device: device.clone(),
            membership: membership.clone(),
            stream,
        }
    }

    /// Room for some f32 on the device.
    pub fn room(&self, len: usize) -> DeviceBuffer {
        self.device.alloc(len * 4).expect("memory")
    }

    /// Enqueues a kernel that takes `for_long` and then writes `values`. Returns the event recorded behind it.
    pub fn compute(&self, to: &DeviceBuffer, values: Vec<f32>, for_long: Duration) -> Event {
        let pointer = to.pointer();
        self.machine.launch(&self.stream, move |machine| {
            thread::sleep(for_long);
            machine.write(pointer, &bytes(&values));
        });
        let ready = self.device.event().expect("an event");
        self.stream.record(&ready).expect("recorded");
        ready
    }

    /// Contents of the buffer, read by this rank's stream after it has waited for `after`.
    pub fn result(&self, from: &DeviceBuffer, after: Option<&Event>) -> Vec<f32> {
        after.into_iter().for_each(|event| self.stream.wait(event).expect("a wait"));
        let (sender, receiver) = std::sync::mpsc::channel();
        let (pointer, len) = (from.pointer(), from.len_bytes());
        self.machine.launch(&self.stream, move |machine| {
            let _ = sender.send(machine.read(pointer, len));
        });
        floats(&receiver.recv_timeout(AT_ONCE).expect("the stream goes on"))
    }
}

pub fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

pub fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
}

/// An in-place reduction of all these buffers as one.
pub fn place(ordinal: usize, buffers: &[&DeviceBuffer], ready: Option<Event>) -> DeviceElements {
    let piece = |buffer: &&DeviceBuffer| Piece::reduced(buffer.pointer(), buffer.pointer(), buffer.len_bytes() / 4);
    // SAFETY: the machine is a fake: access outside an allocation is an error, and harms nothing.
    unsafe { DeviceElements::new(ordinal, buffers.iter().map(piece).collect(), ready) }
}

pub fn all_reduce(group: &ProcessGroup, place: &mut DeviceElements, len_elems: usize, op: ReduceOp) -> Result<()> {
    group.all_reduce_on_device(OnDevice { dtype: DType::F32, len_elems, place }, op, 0)
}

/// Waits until `done`; fails if that takes too long.
pub fn soon(what: &str, done: impl Fn() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < AT_ONCE, "{what}");
        thread::sleep(Duration::from_millis(2));
    }
}

/// Fails if the machine was misused, or if anything of the ended ranks is left on it.
pub fn assert_clean(machine: &Machine) {
    soon("communicators are left", || machine.communicators() == 0);
    soon("memory is left", || machine.allocations() == 0);
    soon("streams or events are left", || machine.streams_and_events() == (0, 0));
    assert_eq!(machine.misuse(), [] as [String; 0]);
}
