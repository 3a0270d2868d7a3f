//! Memory that a rank needs for a model, from the shapes of its parameters.

use std::collections::HashSet;

use burn::module::Module;
use burn_ddp_comm::{DType, RowDivision};

use super::inspect_model::{Inspected, inspect};
use super::{WrapConfig, treatment};
use crate::gradients::{Caps, Slot};
use crate::intercept::MOST_SHARED_BYTES;
use crate::model::schema::{Entry, Schema};
use crate::telemetry::MemoryUse;
use crate::{Error, Result};

impl MemoryUse {
    /// Memory for `model`, wrapped with `config`, on the one of `world_size` ranks that holds most.
    /// [`MemoryUse::with_optimizer`] adds the optimizer's state. Buckets count with 1 MiB unless their size is set;
    /// between machines `wrap` may choose up to 25 MiB, which takes 72 MiB more. An accumulation of k counts with the
    /// ⌊log₂ k⌋ + 1 sums that logical ranks hold; without them there is one. Not collective; `world_size` need not
    /// be that of this job.
    ///
    /// # Errors
    ///
    /// Those of [`Ddp::wrap_with`](crate::Ddp::wrap_with) that a rank sees alone; [`Error::Invalid`] if
    /// `world_size` is 0.
    ///
    /// # Example
    ///
    /// ```
    /// # use burn::{nn::LinearConfig, optim::AdamConfig};
    /// # use burn_ddp::MemoryUse;
    /// # use burn_ddp::prelude::*;
    /// let ddp = Ddp::init()?;
    /// let model = LinearConfig::new(1024, 1024).with_bias(false).init(&ddp.device()?.autodiff()); // 4 MiB
    /// let config = WrapConfig::new().with_sharding(Sharding::Parameters);
    /// let memory = MemoryUse::estimate(&model, &config, 4)?.with_optimizer(&AdamConfig::new().init())?;
    /// assert_eq!((memory.parameters, memory.gradients, memory.optimizer), (1 << 20, 1 << 20, Some(2 << 20)));
    /// assert_eq!(memory.whole_parameters, 4 << 20);
    /// assert_eq!(memory.gathered, 8 << 20); // the weight and its gradient, for a moment
    /// println!("{} bytes: {memory}", memory.total());
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    pub fn estimate<M: Module>(model: &M, config: &WrapConfig, world_size: usize) -> Result<MemoryUse> {
        if world_size == 0 {
            return Err(Error::invalid("a job has at least one rank"));
        }
        let Inspected { schema, first_clone, is_buffer, is_local, bases, halves, .. } = inspect(model, config, None)?;
        // In a world of 1 the part is the whole.
        let divides =
            |entry: &Entry| world_size > 1 && config.divides(&entry.dims, world_size) && !bases.contains(&entry.path);
        let (slots, _) = treatment::slots(&schema, &first_clone, &is_buffer, &is_local, divides);
        let alone = world_size == 1 && !config.single_rank_reduction;
        // Rank 0 has the longest parts.
        let caps = (!alone).then(|| config.caps(false, None));
        let memory =
            memory(&schema, &first_clone, &slots, (0, world_size), caps, sums_of_leaves(config.micro_batches()));
        Ok(MemoryUse { casts: casts(&slots, &halves), ..memory })
    }
}

/// Memory for the values of parameters in half precision, from forward to backward. Sharded ones are not kept.
pub(super) fn casts(slots: &[Slot], halves: &HashSet<String>) -> u64 {
    let in_half = slots.iter().filter(|slot| !slot.sharded && halves.contains(&slot.path));
    in_half.map(|slot| 2 * slot.len_elems() as u64).sum()
}

/// Sums of gradients that a rank holds for as many leaves: those of subtrees that are not complete, and of the leaf.
pub(super) fn sums_of_leaves(leaves: usize) -> usize {
    if leaves > 1 { leaves.ilog2() as usize + 1 } else { 0 }
}

/// Memory of one rank of a world, given as `(rank, world_size)`. `caps` are the sizes of its buckets; `None` means that
/// it has no buffers in host memory. The rank holds so many `sums` over micro-batches, which are of whole parameters.
pub(super) fn memory(
    schema: &Schema,
    first_clone: &[usize],
    slots: &[Slot],
    (rank, world): (usize, usize),
    caps: Option<Caps>,
    sums: usize,
) -> MemoryUse {
    let (mut parameters, mut gradients) = (0, 0);
    // Clones of a parameter share its memory.
    for (nth, entry) in schema.entries.iter().enumerate().filter(|(nth, _)| first_clone[*nth] == *nth) {
        let bytes = entry.dims.iter().product::<usize>() * schema.dtypes[nth].size();
        parameters += bytes;
        gradients += if entry.trainable { bytes } else { 0 };
    }
    let whole_parameters = parameters as u64;
    let (mut sharded, mut largest, mut largest_gradient) = (0, 0, 0);
    let mut largest_in_buffer = 0;
    let largest_whole = slots.iter().filter(|s| !s.sharded).map(Slot::len_bytes).max().unwrap_or(0);
    for s in slots.iter().filter(|s| s.sharded) {
        let rows = RowDivision { rows: s.dims[0], row_bytes: s.len_bytes() / s.dims[0], world_size: world };
        let (whole, part) = (s.len_bytes(), rows.bytes_of(rank).len());
        parameters -= whole - part;
        if s.trainable {
            gradients -= whole - part;
            sharded += part;
            largest_gradient = largest_gradient.max(whole);
        }
        largest = largest.max(whole);
        if whole <= MOST_SHARED_BYTES {
            largest_in_buffer = largest_in_buffer.max(whole);
        }
    }
    // A parameter above the cap has a bucket of its own.
    let of_three = |caps: Caps| caps.bytes.max(largest_whole).saturating_mul(3);
    let buckets = caps.map_or(0, |caps| of_three(caps).min(gradients - sharded));
    // This rank's input, and its share of the result; a larger parameter has memory of its own.
    let shared = largest_in_buffer + largest_in_buffer / world;
    let shared = if largest > MOST_SHARED_BYTES { shared + largest } else { shared };
    let of_slot = |s: &Slot| s.len_elems() * if s.dtype == DType::F64 { 8 } else { 4 };
    let gradients = gradients + sums * slots.iter().filter(|s| s.trainable).map(of_slot).sum::<usize>();
    MemoryUse {
        parameters: parameters as u64,
        whole_parameters,
        gradients: gradients as u64,
        optimizer: None,
        casts: 0,
        gathered: (largest_gradient + largest) as u64,
        engine_buffers: caps.map_or(0, |_| buckets + shared) as u64,
    }
}
