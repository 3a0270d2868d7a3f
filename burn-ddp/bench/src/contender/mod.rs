//! Who is compared: our engines, the peers that are installed, and the hardware's limits.

mod script;
mod start;

use std::fmt;

use burn_ddp_comm::DType;
use clap::{Args, ValueEnum};

use crate::link::Link;
use crate::rank::BufferKind;
pub(crate) use script::Script;
pub(crate) use start::{envs, start};

/// An engine of this project.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, ValueEnum)]
pub(crate) enum Engine {
    /// Shared memory.
    Shm,
    /// Sockets.
    Tcp,
    /// Ranks as threads of one process.
    Threads,
    /// GPUs, of what trains with `BURN_DEVICE=cuda`.
    Nccl,
}

/// Somebody to compare with.
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
    /// Limit: the same bytes both ways through one socket, and one sum.
    Pump,
    /// Limit: the copies and sums of all ranks, evenly spread over the cores.
    Floor,
}

/// What is trained.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, ValueEnum)]
pub(crate) enum Model {
    /// So many bytes in so many tensors, and a loss that is their sum.
    Tensors,
    /// The network of PyTorch's MNIST example, with Adam.
    Cnn,
    /// Square layers of 1 MiB.
    Mlp,
}

/// How it is trained.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, ValueEnum)]
pub(crate) enum Side {
    /// Each rank for itself.
    Plain,
    /// Each rank for itself, but they meet at a bare barrier after each step.
    Barrier,
    /// The same, and each parameter is read through two nodes of autodiff that do nothing: the least that intercepting its gradient
    /// takes. Of [`Model::Tensors`], in Burn.
    Nodes,
    /// With `Ddp::wrap`, or torch's `DistributedDataParallel`.
    Wrapped,
}

/// What trains.
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
    /// The size of buckets, if not the framework's own.
    pub(crate) bucket_bytes: Option<usize>,
    /// The allocator gives nothing back between steps.
    pub(crate) keeps_memory: bool,
}

/// One column of a comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Contender {
    Ours(Engine, BufferKind),
    Theirs(Peer),
    /// The limit of ranks with buffers of this kind.
    Floor(BufferKind),
    Training(Trainer),
}

/// What all contenders of a comparison have in common.
#[derive(Clone, Copy)]
pub(crate) struct Setting<'a> {
    /// Ranks.
    pub(crate) world: usize,
    pub(crate) dtype: DType,
    pub(crate) programs: &'a Programs,
    /// Two machines, if the ranks are not to be on this one.
    pub(crate) link: Option<&'a Link>,
}

impl<'a> Setting<'a> {
    /// On this machine.
    pub(crate) fn here(world: usize, dtype: DType, programs: &'a Programs) -> Setting<'a> {
        Setting { world, dtype, programs, link: None }
    }
}

/// Where the peers' programs are.
#[derive(Args, Clone, Debug)]
pub(crate) struct Programs {
    /// A Python that can import torch, for gloo; found in PATH otherwise.
    #[arg(long, default_value = "python3", value_name = "PROGRAM")]
    pub(crate) python: String,
}

impl Contender {
    /// Whether it is this project's, and must not fail.
    pub(crate) fn is_ours(self) -> bool {
        match self {
            Contender::Ours(..) => true,
            Contender::Training(trainer) => cfg!(feature = "burn") && trainer.framework != Framework::Torch,
            Contender::Theirs(_) | Contender::Floor(_) => false,
        }
    }

    /// Whether it says something about messages of this size between so many ranks.
    pub(crate) fn applies(self, bytes: usize, world: usize) -> bool {
        match self {
            Contender::Ours(..) | Contender::Training(_) => true,
            Contender::Theirs(peer) => peer.applies(bytes, world),
            Contender::Floor(_) => Peer::Floor.applies(bytes, world),
        }
    }

    /// Whether it stands for the hardware, rather than for somebody else's library.
    pub(crate) fn is_limit(self) -> bool {
        match self {
            Contender::Ours(..) | Contender::Training(_) => false,
            Contender::Theirs(peer) => matches!(peer, Peer::Memcpy | Peer::Cacheline | Peer::Pump | Peer::Floor),
            Contender::Floor(_) => true,
        }
    }
}

/// Each engine with each kind of buffers.
pub(crate) fn ours(engines: &[Engine], kinds: &[BufferKind]) -> Vec<Contender> {
    engines.iter().flat_map(|engine| kinds.iter().map(|kind| Contender::Ours(*engine, *kind))).collect()
}

/// These peers; the limit [`Floor`](Peer::Floor) once for each kind of buffers.
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

impl fmt::Display for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Engine::Shm => "shm",
            Engine::Tcp => "tcp",
            Engine::Threads => "threads",
            Engine::Nccl => "nccl",
        })
    }
}

impl fmt::Display for BufferKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            BufferKind::Slice => "slice",
            BufferKind::Arena => "arena",
        })
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Peer::Gloo => "gloo",
            Peer::Mpich => "mpich",
            Peer::Openmpi => "openmpi",
            Peer::Memcpy => "memcpy",
            Peer::Cacheline => "cacheline",
            Peer::Pump => "pump",
            Peer::Floor => "floor",
        })
    }
}

impl fmt::Display for Trainer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.framework, self.side) {
            (Framework::Burn(_), Side::Plain) => f.write_str("burn"),
            (Framework::Burn(_), Side::Barrier) => f.write_str("burn + barrier"),
            (Framework::Burn(_), Side::Nodes) => f.write_str("burn + barrier + nodes"),
            (Framework::Burn(engine), Side::Wrapped) => write!(f, "burn-ddp/{engine}"),
            (Framework::Torch, Side::Plain) => f.write_str("torch"),
            (Framework::Torch, Side::Barrier | Side::Nodes) => f.write_str("torch + barrier"),
            (Framework::Torch, Side::Wrapped) => f.write_str("torch DDP"),
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
