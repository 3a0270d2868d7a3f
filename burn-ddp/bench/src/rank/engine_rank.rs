//! Ranks that all-reduce buffers with this project's engines.

use anyhow::{Context, Result, ensure};
use burn_ddp_comm::{DType, LaunchEnv, ProcessGroup, ReduceOp, SharedBuffer, SharedView, World, WorldOptions};

use super::{BufferKind, Workload, determinism_digest};
use crate::exact_inputs;

/// The environment variable that chooses an engine.
const ENGINE: &str = "BURN_DDP_ENGINE";

pub(super) struct EngineRank {
    world: World,
    dtype: DType,
    kind: BufferKind,
    memory: Option<Memory>,
}

/// The buffers, and the group that reduces them. Each size has a new group, so that a group's own memory for a size is
/// freed before the next one.
struct Memory {
    group: ProcessGroup,
    bytes: usize,
    buffers: Buffers,
}

enum Buffers {
    Slice(Vec<Vec<u64>>),
    /// Shared buffers, each with the view of its last result.
    Arena(Vec<(SharedBuffer, Option<SharedView>)>),
}

/// Joins the world that the environment describes.
pub(super) fn join() -> Result<World> {
    let env = LaunchEnv::detect()?.context("no launcher's environment variables are set")?;
    let world = World::join(&env, WorldOptions::from_env()?)?;
    // NCCL is chosen when a model is wrapped.
    if let Some(wanted) = std::env::var(ENGINE).ok().filter(|wanted| wanted != "nccl") {
        ensure!(world.engine() == wanted, "the engine is {}, not {wanted}", world.engine());
    }
    Ok(world)
}

impl EngineRank {
    pub(super) fn new(world: World, dtype: DType, kind: BufferKind) -> EngineRank {
        EngineRank { world, dtype, kind, memory: None }
    }
}

impl Workload for EngineRank {
    fn prepare(&mut self, bytes: usize, count: usize) -> Result<()> {
        self.memory = None;
        let group = self.world.group()?;
        let buffers = match self.kind {
            BufferKind::Slice => Buffers::Slice(vec![vec![0; bytes.div_ceil(8)]; count]),
            BufferKind::Arena => {
                Buffers::Arena(group.shared_buffers(&vec![bytes; count])?.into_iter().map(|b| (b, None)).collect())
            }
        };
        self.memory = Some(Memory { group, bytes, buffers });
        Ok(())
    }

    fn fill(&mut self, nth: usize, seed: u64) {
        let Some(memory) = &mut self.memory else { return };
        let input = exact_inputs::input(self.dtype, self.world.rank(), seed);
        match &mut memory.buffers {
            Buffers::Slice(slices) => input.fill(&mut bytemuck::cast_slice_mut(&mut slices[nth])[..memory.bytes]),
            Buffers::Arena(arenas) => {
                let (buffer, view) = &mut arenas[nth];
                *view = None;
                input.fill(buffer.bytes_mut());
            }
        }
    }

    fn step(&mut self, nth: usize) -> Result<()> {
        let memory = self.memory.as_mut().context("not prepared")?;
        if memory.bytes == 0 {
            return Ok(memory.group.barrier()?);
        }
        match &mut memory.buffers {
            Buffers::Slice(slices) => {
                let bytes = &mut bytemuck::cast_slice_mut(&mut slices[nth])[..memory.bytes];
                memory.group.all_reduce_bytes(self.dtype, bytes, ReduceOp::Sum, 0)?;
            }
            Buffers::Arena(arenas) => {
                let (buffer, view) = &mut arenas[nth];
                // While a view of the last result exists, the next reduction of the buffer costs a copy.
                *view = None;
                *view = Some(memory.group.all_reduce_shared(self.dtype, buffer, ReduceOp::Sum, 0)?);
            }
        }
        Ok(())
    }

    fn check(&mut self, nth: usize, seed: u64, uses: usize) -> Result<()> {
        let memory = self.memory.as_ref().context("not prepared")?;
        let sum = |uses| exact_inputs::sum(self.dtype, self.world.world_size(), seed, uses);
        match &memory.buffers {
            Buffers::Slice(slices) => {
                sum(uses).map_or(Ok(()), |sum| sum.check(&bytemuck::cast_slice(&slices[nth])[..memory.bytes]))
            }
            // The content of the buffer after a reduction is unspecified, so only its first result is known.
            Buffers::Arena(arenas) => match (&arenas[nth].1, sum(uses)) {
                (Some(view), Some(sum)) if uses == 1 => sum.check(view),
                _ => Ok(()),
            },
        }
    }

    fn digest(&mut self, run: u64, pause_us: u64) -> Result<u64> {
        let group = self.world.group()?;
        determinism_digest::digest(&group, self.dtype, self.kind, run, pause_us)
    }
}
