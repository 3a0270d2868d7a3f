//! Contenders of a comparison: our engines, the peers that are installed, and the hardware's limits.

mod python_peers;
mod start;

use std::fmt;

use burn_ddp_comm::DType;
use clap::{Args, ValueEnum};

use crate::neighbours::Neighbours;
use crate::rank::BufferKind;
use crate::simulated_machines::Machines;
pub(crate) use python_peers::Script;
pub(crate) use start::{describe_allocator, envs, start};

/// An engine of this project.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, ValueEnum)]
pub(crate) enum Engine {
    /// Shared memory.
    Shm,
    /// Sockets.
    Tcp,
    /// The engine that groups get by default: shared memory on a machine, sockets between machines.
    Auto,
    /// Ranks as threads of one process.
    Threads,
    /// GPUs, for training with `BURN_DEVICE=cuda`.
    Nccl,
}

/// A peer or a limit to compare with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, ValueEnum)]
pub(crate) enum Peer {
    /// torch.distributed's gloo.
    Gloo,
    Mpich,
    Openmpi,
    /// Limit: each rank copies the same bytes.
    Memcpy,
    /// Limit: each rank writes a cache line and reads the others'.
    Cacheline,
    /// Limit: two ranks exchange the same bytes through one socket, and add them once.
    Pump,
    /// Limit: the copies and sums of all ranks, evenly spread over the cores.
    Floor,
}

/// Model to train.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, ValueEnum)]
pub(crate) enum Model {
    /// Bare parameters, of a given number of bytes and tensors, and a loss that is their sum.
    Tensors,
    /// The network of PyTorch's MNIST example, with Adam.
    Cnn,
    /// Square layers of 1 MiB.
    Mlp,
    /// A decoder-only transformer of blocks of 3 MiB over items of 64 tokens, with Adam.
    Gpt,
    /// `Gpt` on a device with gradient checkpointing. Only with Burn.
    GptCheckpointing,
}

/// Inputs and outputs of a layer of [`Model::Mlp`].
pub(crate) const MLP_WIDTH: usize = 512;

/// Layers of [`Model::Mlp`] with `bytes` of weights.
pub(crate) fn mlp_layers(bytes: usize) -> usize {
    (bytes / (4 * MLP_WIDTH * MLP_WIDTH)).max(1)
}

/// Way of training: with or without data parallelism.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, ValueEnum)]
pub(crate) enum Side {
    /// Each rank trains by itself.
    Plain,
    /// Each rank trains by itself; the ranks meet at a bare barrier after each step.
    Barrier,
    /// Like `Barrier`, with each parameter read through an autodiff node that does nothing: the least that intercepting
    /// its gradient costs. Only [`Model::Tensors`], with Burn.
    Nodes,
    /// Data-parallel by `Ddp::wrap`, or by torch's `DistributedDataParallel`.
    Wrapped,
    /// Data-parallel with sharded parameters, by `Ddp::wrap_with` or torch's `fully_shard`. Only the models `Gpt` and
    /// `GptCheckpointing`.
    Sharded,
}

/// Framework with which a rank trains.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Framework {
    /// Burn, over this engine.
    Burn(Engine),
    Torch,
}

/// A rank that trains.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Trainer {
    pub(crate) framework: Framework,
    pub(crate) model: Model,
    pub(crate) side: Side,
    /// Size of buckets; `None` for the framework's default.
    pub(crate) bucket_bytes: Option<usize>,
    /// True if glibc's allocator keeps freed memory instead of returning it to the system.
    pub(crate) keeps_memory: bool,
}

/// A contender of a comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Contender {
    Ours(Engine, BufferKind),
    Theirs(Peer),
    /// The limit [`Peer::Floor`] for buffers of this kind.
    Floor(BufferKind),
    Training(Trainer),
}

/// Setting that all contenders of a comparison share.
#[derive(Clone, Copy)]
pub(crate) struct Setting<'a> {
    /// Number of ranks.
    pub(crate) world: usize,
    pub(crate) dtype: DType,
    pub(crate) programs: &'a Programs,
    /// Simulated machines of the ranks; `None` if all run on this machine.
    pub(crate) machines: Option<&'a Machines>,
    /// Programs that compute while the ranks are measured.
    pub(crate) neighbours: Option<&'a Neighbours>,
}

impl<'a> Setting<'a> {
    /// The setting of ranks on this machine.
    pub(crate) fn here(world: usize, dtype: DType, programs: &'a Programs) -> Setting<'a> {
        Setting { world, dtype, programs, machines: None, neighbours: None }
    }
}

/// Options with the programs of the peers.
#[derive(Args, Clone, Debug)]
pub(crate) struct Programs {
    /// A Python that can import torch, for gloo and DDP.
    #[arg(long, default_value = "python3", value_name = "PROGRAM")]
    pub(crate) python: String,
}

impl Contender {
    /// True for this project's contenders, which must not fail.
    pub(crate) fn is_ours(self) -> bool {
        match self {
            Contender::Ours(..) => true,
            Contender::Training(trainer) => cfg!(feature = "burn") && trainer.framework != Framework::Torch,
            Contender::Theirs(_) | Contender::Floor(_) => false,
        }
    }

    /// True if the contender can be measured with `bytes` per rank and `world` ranks.
    pub(crate) fn applies(self, bytes: usize, world: usize) -> bool {
        match self {
            Contender::Ours(..) | Contender::Training(_) => true,
            Contender::Theirs(peer) => peer.applies(bytes, world),
            Contender::Floor(_) => Peer::Floor.applies(bytes, world),
        }
    }

    /// True for a limit of the hardware, false for a library.
    pub(crate) fn is_limit(self) -> bool {
        match self {
            Contender::Ours(..) | Contender::Training(_) => false,
            Contender::Theirs(peer) => matches!(peer, Peer::Memcpy | Peer::Cacheline | Peer::Pump | Peer::Floor),
            Contender::Floor(_) => true,
        }
    }
}

/// Contenders of this project: each engine with each kind of buffers.
pub(crate) fn ours(engines: &[Engine], kinds: &[BufferKind]) -> Vec<Contender> {
    engines.iter().flat_map(|engine| kinds.iter().map(|kind| Contender::Ours(*engine, *kind))).collect()
}

/// Contenders of `peers`; the limit [`Floor`](Peer::Floor) has one for each kind of buffers.
pub(crate) fn theirs(peers: &[Peer], kinds: &[BufferKind]) -> Vec<Contender> {
    let contenders = |peer: &Peer| match peer {
        Peer::Floor => kinds.iter().map(|kind| Contender::Floor(*kind)).collect(),
        _ => vec![Contender::Theirs(*peer)],
    };
    peers.iter().flat_map(contenders).collect()
}

impl Peer {
    fn applies(self, bytes: usize, world: usize) -> bool {
        match self {
            Peer::Gloo | Peer::Mpich | Peer::Openmpi => true,
            Peer::Memcpy => bytes >= 4096,
            Peer::Cacheline => bytes <= 4096,
            Peer::Pump => world == 2,
            Peer::Floor => bytes >= 65536 && world > 1,
        }
    }
}

/// Shows types as the values of their options.
macro_rules! shown_as_value {
    ($($kind:ty),*) => {$(
        impl fmt::Display for $kind {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.to_possible_value().map_or(Ok(()), |value| f.write_str(value.get_name()))
            }
        }
    )*};
}
shown_as_value!(Engine, Peer, BufferKind, Model, Side);

impl fmt::Display for Trainer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.framework, self.side) {
            (Framework::Burn(_), Side::Plain) => f.write_str("burn"),
            (Framework::Burn(_), Side::Barrier) => f.write_str("burn + barrier"),
            (Framework::Burn(_), Side::Nodes) => f.write_str("burn + barrier + nodes"),
            (Framework::Burn(engine), Side::Wrapped) => write!(f, "burn-ddp/{engine}"),
            (Framework::Burn(engine), Side::Sharded) => write!(f, "burn-ddp/{engine}, sharded"),
            (Framework::Torch, Side::Plain) => f.write_str("torch"),
            (Framework::Torch, Side::Barrier | Side::Nodes) => f.write_str("torch + barrier"),
            (Framework::Torch, Side::Wrapped) => f.write_str("torch DDP"),
            (Framework::Torch, Side::Sharded) => f.write_str("torch FSDP2"),
        }?;
        self.bucket_bytes.map_or(Ok(()), |bytes| write!(f, " ({})", crate::table::bytes(bytes)))
    }
}

impl fmt::Display for Contender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Contender::Ours(engine, kind) => write!(f, "{engine}/{kind}"),
            Contender::Theirs(peer) => write!(f, "{peer}"),
            Contender::Floor(kind) => write!(f, "floor/{kind}"),
            Contender::Training(trainer) => write!(f, "{trainer}"),
        }
    }
}
