//! Every pair of features: N ranks train like plain Burn on one device with all rows.
//!
//! Burn's trainer has a loop of its own: `trainer/main.rs` crosses it with the others, but for `join` (its loaders end
//! on all ranks at once) and two models (a `Learner` has one).

use std::path::Path;

use burn::module::{Module, ModuleMapper, Param};
use burn::nn::{BatchNormConfig, Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::prelude::*;
use burn::tensor::DType;
use burn_ddp::nn::SyncBatchNorm;
use burn_ddp::{Ddp, DdpOptimizer, LossScaling, Precision, WrapConfig};
use burn_ddp_tests::awkward::{Outcome, PARTS, Run, sgd};
use burn_ddp_tests::distance;

/// A feature that a training may have.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Feature {
    /// Two micro-batches per step, in epochs of five.
    Accumulation,
    /// Branches of the model that some ranks use in some steps.
    UnusedParameters,
    /// Ranks whose data end at different steps.
    Join,
    /// The second epoch is trained by another number of ranks.
    ResumeElsewhere,
    /// The same; in addition the checkpoint holds the last micro-batch of the first epoch, which is not reduced yet.
    ResumeHeld,
    /// Two wrapped models with an optimizer each.
    TwoModels,
    SyncBatchNorm,
    GradientCheckpointing,
    /// The user maps the model between backward and step.
    Mapper,
    WorldOfOne,
    /// Two leaves per rank and step.
    LogicalRanks,
    /// Forward and backward in f16, with a loss scale.
    Halves,
    /// The last rank wishes to stop in each epoch; the ranks agree, and train on.
    Stop,
}

use Feature::*;

const ALL: [Feature; 13] = [
    Accumulation,
    UnusedParameters,
    Join,
    ResumeElsewhere,
    ResumeHeld,
    TwoModels,
    SyncBatchNorm,
    GradientCheckpointing,
    Mapper,
    WorldOfOne,
    LogicalRanks,
    Halves,
    Stop,
];

/// Reason why two features do not go together.
fn forbidden(a: Feature, b: Feature) -> Option<&'static str> {
    match (a, b) {
        (Join, SyncBatchNorm) => Some("all ranks must make the same passes through the layer"),
        (Join, ResumeHeld) => Some("`join` reduces what is held, so nothing waits at the end of an epoch"),
        (ResumeHeld, LogicalRanks) => Some("a step that is held needs as many leaves: `logical_ranks.rs` has them"),
        (SyncBatchNorm, LogicalRanks) => Some("running statistics of leaves are averaged, not one after the other"),
        _ => None,
    }
}

const EPOCHS: usize = 2;

#[derive(Module, Debug)]
struct Net {
    trunk: Linear,
    norm: Option<SyncBatchNorm>,
    branches: Vec<Linear>,
}

impl Net {
    fn new(cell: &Cell, device: &Device) -> Self {
        let linear = || LinearConfig::new(6, 6).init(device);
        Net {
            trunk: linear(),
            norm: cell.has(SyncBatchNorm).then(|| BatchNormConfig::new(6).init(device).into()),
            branches: (0..if cell.has(UnusedParameters) { 3 } else { 1 }).map(|_| linear()).collect(),
        }
    }

    /// A sum over the rows of `parts`, which go through a branch each.
    fn loss(&self, run: &Run, micro_batch: usize, parts: &[usize], computes: DType) -> Tensor<1> {
        let x: Vec<_> = parts.iter().map(|part| run.x(micro_batch, *part).cast(computes)).collect();
        let rows = x[0].dims()[0];
        let mut h = self.trunk.forward(Tensor::cat(x, 0)).tanh();
        if let Some(norm) = &self.norm {
            h = norm.forward(h);
        }
        let of_part = |(nth, part): (usize, &usize)| {
            let branch = &self.branches[(micro_batch + part / 2) % self.branches.len()];
            branch.forward(h.clone().narrow(0, nth * rows, rows)).cast(run.dtype).powf_scalar(2.0).sum()
        };
        parts.iter().enumerate().map(of_part).reduce(|a, b| a + b).expect("every rank has a part")
    }
}

/// Models that are wrapped as one, and their optimizer.
struct Unit {
    nets: Vec<Net>,
    optim: DdpOptimizer,
    /// Type in which they compute.
    computes: DType,
}

impl Unit {
    fn loss(&self, run: &Run, micro_batch: usize, parts: &[usize]) -> Tensor<1> {
        let losses = self.nets.iter().map(|net| net.loss(run, micro_batch, parts, self.computes));
        losses.reduce(|a, b| a + b).expect("a unit has a model")
    }

    /// Steps the optimizer, if there are averages.
    fn step(&mut self, cell: &Cell, grads: Option<GradientsParams>) {
        let Some(grads) = grads else { return };
        let mut nets = std::mem::take(&mut self.nets);
        if cell.has(Mapper) {
            nets = nets.map(&mut Shrink);
        }
        self.nets = self.optim.step(0.05, nets, grads);
    }
}

/// A weight decay that the user's program applies itself.
struct Shrink;

impl ModuleMapper for Shrink {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|t| match t.is_require_grad() {
            true => (t * 0.75).detach().require_grad(),
            false => t,
        })
    }
}

/// Cell of the table: two features, or a single one if both are equal.
struct Cell([Feature; 2]);

impl Cell {
    fn has(&self, feature: Feature) -> bool {
        self.0.contains(&feature)
    }

    fn accumulation(&self) -> usize {
        if self.has(Accumulation) || self.has(ResumeHeld) || self.has(LogicalRanks) { 2 } else { 1 }
    }

    fn resumes(&self) -> bool {
        self.has(ResumeElsewhere) || self.has(ResumeHeld)
    }

    /// True if an epoch ends with micro-batches that were not reduced.
    fn leaves_held(&self, epoch: usize) -> bool {
        self.has(ResumeHeld) && epoch + 1 < EPOCHS
    }

    /// Micro-batches of a rank in an epoch.
    fn micro_batches(&self, rank: usize, world: usize) -> usize {
        match self.has(Join) {
            true => 3 + usize::from(rank + 1 == world),
            false => 5,
        }
    }

    /// A run of this rank, and its models before the first step. Several models are one unit where `join` wants it.
    fn start(&self, ddp: &Ddp) -> anyhow::Result<(Run, Vec<Unit>)> {
        let mut run = Run::new(ddp)?;
        if self.has(GradientCheckpointing) {
            run.device = ddp.device()?.autodiff().gradient_checkpointing();
        }
        if self.has(Join) || self.has(Halves) || self.resumes() {
            // Burn cannot load optimizer state of f64.
            run.dtype = DType::F32;
        }
        let nets: Vec<Net> = (0..1 + usize::from(self.has(TwoModels))).map(|_| Net::new(self, &run.device)).collect();
        let nets = run.fill(nets);
        let units = if self.has(Join) { vec![nets] } else { nets.into_iter().map(|net| vec![net]).collect() };
        let units = units.into_iter().map(|nets| Unit { nets, optim: sgd(), computes: run.dtype }).collect();
        Ok((run, units))
    }

    fn wrap(&self, run: &Run, units: &mut [Unit]) -> anyhow::Result<()> {
        let config = WrapConfig::new()
            .with_accumulation(self.accumulation())
            .with_single_rank_reduction(self.has(WorldOfOne))
            .with_replica_check(2);
        let scaling = LossScaling { initial_scale_power: 8, ..LossScaling::default() };
        let config = match self.has(Halves) {
            true => config.with_compute_dtype(Precision::F16).with_loss_scaling(scaling),
            false => config,
        };
        for unit in units {
            unit.computes = if self.has(Halves) { DType::F16 } else { unit.computes };
            unit.nets = run.wrap_with(std::mem::take(&mut unit.nets), config.clone())?;
        }
        Ok(())
    }
}

/// Parts of a rank; their number differs between ranks.
fn parts(rank: usize, world: usize) -> Vec<usize> {
    let ends: &[usize] = match world {
        1 => &[PARTS],
        2 => &[4, PARTS],
        _ => &[3, 5, PARTS],
    };
    let start = if rank == 0 { 0 } else { ends[rank - 1] };
    (start..ends[rank]).collect()
}

/// Trains this rank for an epoch.
fn epoch(cell: &Cell, run: &Run, units: &mut [Unit], number: usize) -> anyhow::Result<()> {
    let (ddp, rank, world) = (&run.ddp, run.ddp.rank(), run.ddp.world_size());
    let parts = parts(rank, world);
    let mut stops = Vec::new();
    for micro_batch in 0..cell.micro_batches(rank, world) {
        if cell.has(Stop) && micro_batch == 1 && rank + 1 == world {
            ddp.request_stop();
        }
        for unit in &mut *units {
            let loss = unit.loss(run, 10 * number + micro_batch, &parts) * (1.0 / parts.len() as f64);
            let grads = ddp.weighted(parts.len() as f64).backward(&loss, &unit.nets)?;
            unit.step(cell, grads);
            stops.push(ddp.stop_requested());
        }
    }
    for unit in &mut *units {
        if cell.has(Join) {
            ddp.join(&mut unit.nets, &mut unit.optim)?;
        } else if !cell.leaves_held(number) {
            let grads = ddp.flush(&unit.nets)?;
            unit.step(cell, grads);
        }
    }
    if cell.has(Stop) && number == 0 {
        let first = stops.iter().position(|stops| *stops).map_or(-1, |call| call as i64);
        let all = ddp.group().all_gather(&[first])?;
        // The wish of the second micro-batch reaches all in the next step that is reduced.
        let calls = units.len() * cell.accumulation();
        assert!(all.iter().all(|call| *call == all[0]), "{:?}: {all:?}", cell.0);
        assert!((units.len()..units.len() + calls).contains(&(all[0] as usize)), "{:?}: {all:?}", cell.0);
    }
    Ok(())
}

fn outcome(cell: &Cell, run: &Run, units: &[Unit]) -> anyhow::Result<Outcome> {
    assert_eq!(run.ddp.telemetry().stats().skipped, 0);
    // `valid` brings running statistics up to date.
    let outcomes = units.iter().map(|unit| run.outcome(&unit.nets.valid()));
    let outcome = outcomes.reduce(|a, b| Ok(a?.and(b?))).expect("there is a unit")?;
    let tolerance = match run.dtype {
        _ if cell.has(Halves) => 5e-3,
        DType::F64 => 1e-10,
        _ => 1e-5,
    };
    Ok(outcome.within(tolerance))
}

/// Trains with `worlds[epoch]` ranks in each epoch, and returns the outcomes of the ranks after the last epoch.
fn train(cell: &Cell, worlds: [usize; EPOCHS], directory: &Path) -> Vec<Outcome> {
    let trained = |world, numbers: std::ops::Range<usize>| {
        Ddp::spawn(world, |ddp| {
            if cell.has(LogicalRanks) {
                ddp.set_logical_ranks(world * cell.accumulation())?;
            }
            let (run, mut units) = cell.start(&ddp)?;
            cell.wrap(&run, &mut units)?;
            let checkpoints = cell.resumes().then(|| ddp.checkpoints(directory)).transpose()?;
            if let Some(saved) = checkpoints.as_ref().map(|c| c.latest()).transpose()?.flatten() {
                for (number, unit) in units.iter_mut().enumerate() {
                    let saved = saved.named(&number.to_string());
                    unit.nets = saved.model(std::mem::take(&mut unit.nets))?;
                    unit.optim = saved.optimizer(std::mem::replace(&mut unit.optim, sgd()), &unit.nets)?;
                }
            }
            for number in numbers.clone() {
                epoch(cell, &run, &mut units, number)?;
            }
            if let Some(checkpoints) = checkpoints {
                checkpoints.save(numbers.end as u64, |c| {
                    for (number, unit) in units.iter().enumerate() {
                        c.named(&number.to_string()).model(&unit.nets)?;
                        c.named(&number.to_string()).optimizer(&unit.optim, &unit.nets)?;
                    }
                    Ok(())
                })?;
            }
            outcome(cell, &run, &units)
        })
    };
    let name = |e| panic!("{:?}, {worlds:?} ranks: {e}", cell.0);
    if !cell.resumes() {
        return trained(worlds[0], 0..EPOCHS).unwrap_or_else(name);
    }
    trained(worlds[0], 0..1).unwrap_or_else(name);
    trained(worlds[1], 1..EPOCHS).unwrap_or_else(name)
}

/// Plain Burn with the rows of all ranks: one backward per step and unit.
fn oracle(cell: &Cell, worlds: [usize; EPOCHS]) -> Outcome {
    let outcome = Ddp::spawn(1, |ddp| {
        let (run, mut units) = cell.start(&ddp)?;
        let mut to_come: Vec<(usize, usize, usize)> = Vec::new();
        for (number, world) in worlds.into_iter().enumerate() {
            let rows_of = |micro_batch: usize, world: usize| -> Vec<usize> {
                let trains = |rank: &usize| micro_batch < cell.micro_batches(*rank, world);
                (0..world).filter(trains).flat_map(|rank| parts(rank, world)).collect()
            };
            to_come.extend((0..cell.micro_batches(world - 1, world)).map(|micro_batch| (number, world, micro_batch)));
            let held = if cell.leaves_held(number) { to_come.len() % cell.accumulation() } else { 0 };
            let micro_batches: Vec<_> = to_come.drain(..to_come.len() - held).collect();
            for step in micro_batches.chunks(cell.accumulation()) {
                for unit in &mut units {
                    let (mut loss, mut items) = (None, 0);
                    for &(number, world, micro_batch) in step {
                        let rows = rows_of(micro_batch, world);
                        let of_micro_batch = unit.loss(&run, 10 * number + micro_batch, &rows);
                        items += rows.len();
                        loss = Some(loss.map_or(of_micro_batch.clone(), |loss| loss + of_micro_batch));
                    }
                    let grads = (loss.expect("a step has a micro-batch") * (1.0 / items as f64)).backward();
                    let grads = GradientsParams::from_grads(grads, &unit.nets);
                    unit.step(cell, Some(grads));
                }
            }
        }
        outcome(cell, &run, &units)
    });
    outcome.unwrap().remove(0)
}

/// Runs `feature` alone and with every later one.
fn cross(feature: Feature) {
    let first = ALL.iter().position(|other| *other == feature).expect("the feature is in the list");
    for other in ALL[first..].iter().copied() {
        if let Some(reason) = forbidden(feature, other) {
            eprintln!("{feature:?} and {other:?} do not go together: {reason}");
            continue;
        }
        let cell = Cell([feature, other]);
        let worlds: &[[usize; EPOCHS]] = match (cell.has(WorldOfOne), cell.resumes()) {
            (true, true) => &[[1, 2], [3, 1]],
            (true, false) => &[[1, 1]],
            (false, true) => &[[2, 3], [3, 2]],
            (false, false) => &[[2, 2], [3, 3]],
        };
        for &worlds in worlds {
            let expected = oracle(&cell, worlds);
            let directory = tempfile::tempdir().unwrap();
            let ranks = train(&cell, worlds, directory.path());
            for (rank, outcome) in ranks.iter().enumerate() {
                let what = format!("{:?}, rank {rank} of {worlds:?}", cell.0);
                assert_eq!(outcome.hash, ranks[0].hash, "{what}: not the bits of rank 0");
                let d = distance(&outcome.values, &expected.values);
                assert!(d <= outcome.tolerance, "{what}: {d:e} away from one rank, allowed {:e}", outcome.tolerance);
            }
        }
    }
}

macro_rules! rows {
    ($($name:ident $feature:ident),* $(,)?) => {
        $(#[test]
        fn $name() {
            cross($feature);
        })*
        /// Every feature has a row.
        const _: [Feature; ALL.len()] = [$($feature),*];
    };
}

rows! {
    accumulation Accumulation,
    unused_parameters UnusedParameters,
    join Join,
    resume_elsewhere ResumeElsewhere,
    resume_held ResumeHeld,
    two_models TwoModels,
    sync_batch_norm SyncBatchNorm,
    gradient_checkpointing GradientCheckpointing,
    mapper Mapper,
    world_of_one WorldOfOne,
    logical_ranks LogicalRanks,
    halves Halves,
    stop Stop,
}
