//! Agreement of the ranks on a model and its settings, rank 0's values on every rank, and the reducer of the model's
//! gradients.

use std::collections::{HashMap, VecDeque};
#[cfg(feature = "train")]
use std::ops::Range;
use std::panic::Location;
use std::sync::Arc;

use burn::module::{Module, ParamId};
use burn::tensor::{Device, FloatDType};
use burn_ddp_comm::ProcessGroup;
#[cfg(feature = "train")]
use burn_ddp_comm::RowDivision;

use super::attach::Taps;
use super::inspect_model::{Inspected, inspect};
use super::memory_estimate::{casts, memory, sums_of_leaves};
use super::{WrapConfig, bucket_size, leaves, local_parameters, rank_placement, read_types, treatment};
use crate::ddp::Ddp;
use crate::gradients::{Caps, OwnRun, ReducerSettings, Slot};
use crate::intercept::{SyncedStatistics, open_model};
use crate::model::running_stats::BufferPolicy;
use crate::model::schema::Entry;
use crate::model::{broadcast, running_stats};
use crate::telemetry::MemoryUse;
use crate::{Error, Result, agreement, engine_choice, seed};

/// Description of a model that all ranks hold.
pub(crate) struct AgreedModel {
    pub(crate) device: Device,
    /// Group that reduces the gradients.
    group: ProcessGroup,
    /// True if no other rank adds to the gradients.
    alone: bool,
    /// True if gradients are reduced on their device.
    on_device: bool,
    /// Size limits of buckets.
    caps: Caps,
    slots: Vec<Slot>,
    /// True for each slot whose parameter the settings divide.
    divided: Vec<bool>,
    /// Type to which reads of each slot cast.
    compute: Vec<Option<FloatDType>>,
    /// Slot of each float parameter and buffer, in traversal order.
    slot_of: VecDeque<Option<treatment::Place>>,
    /// For each float parameter and buffer, true if it is a running statistic that the ranks average or broadcast.
    is_shared_buffer: Vec<bool>,
    /// Paths of the shared buffers.
    shared_buffers: Vec<String>,
    /// Parameters and buffers left to each rank.
    local: Vec<Entry>,
    /// For each parameter and buffer, true if it is left to each rank.
    is_local: HashMap<ParamId, bool>,
    config: WrapConfig,
    /// Memory of the wrapped model on this rank.
    memory: MemoryUse,
    /// This rank's leaves, if the job has logical ranks.
    run: Option<OwnRun>,
    /// Line of the program that called `wrap`.
    site: &'static Location<'static>,
}

/// Checks `model` and `config`, and compares them between the ranks. Returns the model with rank 0's values, and the
/// description from which taps are made. *Collective*.
#[track_caller]
pub(crate) fn agree_and_broadcast<M: Module + 'static>(
    ddp: &Ddp,
    model: M,
    config: &WrapConfig,
) -> Result<(M, AgreedModel)> {
    let world = ddp.group();
    let run = leaves::of_model(ddp, config);
    let inspected = run.and_then(|run| Ok((run, inspect(&model, config, run)?)));
    let (run, inspected) = agreement::on_outcome(world, "wrap its model", inspected)?;
    let Inspected { device, schema, first_clone, is_buffer, is_local, halves, bases } = inspected;
    if let Some(difference) = agreement::on_settings(world, &leaves::with_number(ddp, config.settings()))? {
        return Err(Error::invalid(format!("the ranks wrap with different settings: {difference}")));
    }
    match agreement::on_model(world, &schema.shared(&is_local)) {
        Err(Error::ModelsDiffer { rank, difference }) => {
            // `agreement::on_model` fails on all ranks or on none, so all of them enter this collective.
            return Err(match local_parameters::disagreement(world, &schema.paths(), &is_local)? {
                Some(path) => Error::invalid(format!("the ranks wrap with different settings: {path}")),
                None => Error::ModelsDiffer { rank, difference },
            });
        }
        outcome => outcome?,
    }
    let alone = ddp.world_size() == 1 && !config.single_rank_reduction;
    let on_device = engine_choice::reduces_on_device(ddp, &device, !alone)?;
    if config.exact {
        let buffers = is_buffer.contains(&true).then_some(config.buffers);
        let exact = leaves::refuse_inexact(ddp, &device, on_device, buffers);
        agreement::on_outcome(world, "wrap its model", exact)?;
    }
    let first_clone = broadcast::first_clones(world, 0, first_clone, &is_local)?;
    let (mut slots, slot_of) = {
        let divides = |entry: &Entry| config.divides(&entry.dims, world.world_size()) && !bases.contains(&entry.path);
        treatment::slots(&schema, &first_clone, &is_buffer, &is_local, divides)
    };
    let divided = slots.iter().map(|slot| slot.sharded).collect();
    let compute = read_types::of_slots(config, &slots, &halves);
    if ddp.world_size() == 1 {
        // The part is the whole, and is trained like any other parameter.
        slots.iter_mut().for_each(|slot| slot.sharded = false);
    }
    let mut group = ddp.state().new_group()?;
    // Errors in backward name the model by the line of its `wrap`.
    let site = Location::caller();
    group.attribute_to(site);
    // On the device buffers hold flags only.
    let in_host_memory = !alone && !on_device;
    let measured = match in_host_memory && !config.sets_bucket_size() {
        true => bucket_size::measure(ddp, &group, &slots)?,
        false => None,
    };
    let caps = config.caps(!in_host_memory, measured);
    let place = (world.rank(), world.world_size());
    let sums = match run {
        Some(run) => sums_of_leaves(run.leaves().len()),
        None => usize::from(config.micro_batches() > 1),
    };
    let memory = memory(&schema, &first_clone, &slots, place, in_host_memory.then_some(caps), sums);
    let memory = MemoryUse { casts: casts(&slots, &halves), ..memory };
    let devices = broadcast::devices(&model);
    // Ranks that are threads may have started from one model, whose clones share running statistics.
    let model = if is_buffer.contains(&true) { running_stats::unshared(model) } else { model };
    let source = (ddp.world_size() > 1).then_some((ddp, &group, 0));
    let model = broadcast::values(model, source, devices, &schema, first_clone, &is_local)?;
    rank_placement::advise(ddp, &group);
    ddp.state().note_model_device(&device);
    seed::separate_ranks(ddp, &device)?;
    let is_shared_buffer = schema.floats(&is_local).zip(is_buffer).map(|(is_local, is_buffer)| is_buffer && !is_local);
    let is_shared_buffer: Vec<bool> = is_shared_buffer.collect();
    let paths = schema.paths();
    let shared_buffers = schema.floats(&paths).zip(&is_shared_buffer).filter(|(_, is_shared)| **is_shared);
    let shared_buffers = shared_buffers.map(|(path, _)| path.to_owned()).collect();
    let of_ids = schema.ids.into_iter().zip(is_local.iter().copied()).collect();
    let entries = schema.entries.into_iter().zip(is_local);
    let local = entries.filter_map(|(entry, is_local)| is_local.then_some(entry)).collect();
    let config = config.clone();
    let agreed = AgreedModel {
        device,
        group,
        alone,
        on_device,
        caps,
        slots,
        divided,
        compute,
        slot_of,
        is_shared_buffer,
        shared_buffers,
        local,
        is_local: of_ids,
        config,
        memory,
        run,
        site,
    };
    Ok((model, agreed))
}

impl AgreedModel {
    /// The parameters that the settings divide, by path: shape of the whole, and rows of this rank.
    #[cfg(feature = "train")]
    pub(crate) fn divided(&self, ddp: &Ddp) -> HashMap<String, (Vec<usize>, Range<usize>)> {
        let divided = self.slots.iter().zip(&self.divided).filter_map(|(slot, divided)| divided.then_some(slot));
        let own = |slot: &Slot| {
            let row_bytes = slot.len_bytes() / slot.dims[0];
            let rows = RowDivision { rows: slot.dims[0], row_bytes, world_size: ddp.world_size() }.rows_of(ddp.rank());
            (slot.path.clone(), (slot.dims.clone(), rows))
        };
        divided.map(own).collect()
    }

    /// The local parameters.
    #[cfg(feature = "train")]
    pub(crate) fn local(&self) -> &[Entry] {
        &self.local
    }

    /// Taps of the agreed model, whose running statistics are those of `model`. *Collective*.
    pub(crate) fn taps<M: Module + 'static>(self, ddp: &Ddp, model: &M) -> Result<Taps> {
        let AgreedModel { device, group, alone, on_device, caps, slots, divided, compute, slot_of, .. } = self;
        let (is_shared_buffer, local, is_local) = (self.is_shared_buffer, self.local, self.is_local);
        let shared_buffers = self.shared_buffers;
        let (config, memory, site, run) = (self.config, ddp.state().meter.holds(self.memory), self.site, self.run);
        let settings = ReducerSettings {
            reduction: config.reduction,
            accumulation: run.map_or(config.micro_batches(), |run| run.division.of_rank(0).len()),
            run,
            caps,
            timeout: ddp.world().options().timeout,
            replica_check: if alone { 0 } else { config.replica_check as u64 },
            exact_replicas: config.exact_replicas,
            exact: config.exact,
            reduce: config.reduce_dtype.half(),
            scaling: config.scaling(),
            finite: config.finite_gradients,
            // Without overlap a backward would wait for the device's reductions at its end, and the device would idle.
            overlap: on_device || !alone && config.overlap.unwrap_or_else(|| overlap_pays(ddp, &device)),
            on_device,
            alone,
        };
        // The leaves of a rank that is alone are averaged like those of several ranks.
        let policy = if alone && run.is_none() { BufferPolicy::Local } else { config.buffers };
        // Also where each rank keeps its own: those of a step that fails are put back.
        let statistics = running_stats::handle(model, &is_shared_buffer)
            .map(|buffers| SyncedStatistics::new(buffers, shared_buffers, policy, settings.tree()));
        let shards = match divided.contains(&true) {
            true => {
                let mut group = ddp.state().new_group()?;
                group.attribute_to(site);
                Some(group)
            }
            false => None,
        };
        let wrapped = open_model(ddp.without_presence(), device, group, slots, settings, statistics)?;
        let wrapped =
            wrapped.with_local(local, is_local).with_shards(divided, compute, shards, on_device)?.with_memory(memory);
        Ok(Taps::new(ddp, Arc::new(wrapped), slot_of))
    }
}

/// True if a communication thread pays: it waits for a network, or has a core of its own, or backward runs on a GPU.
fn overlap_pays(ddp: &Ddp, device: &Device) -> bool {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let state = ddp.state();
    state.host_engine.contains("tcp") || cores >= 2 * ddp.local_world_size() || crate::device::is_asynchronous(device)
}
