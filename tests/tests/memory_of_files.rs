//! Memory that saving and loading need, counted by the allocator of this process: the size of a few parameters, not of
//! the model.

mod bytes_in_use;

use std::path::Path;
use std::sync::atomic::Ordering::Relaxed;

use burn::module::Module;
use burn::nn::{Initializer, Linear, LinearConfig};
use burn::optim::{AdamConfig, GradientsParams};
use burn::prelude::*;
use burn_ddp::prelude::*;
use bytes_in_use::{LIVE, PEAK};

/// Bytes of one parameter.
const PARAMETER: usize = 256 * 256 * 4;
/// Parameters of the model.
const PARAMETERS: usize = 24;
const RANKS: usize = 3;

#[derive(Module, Debug)]
struct Deep {
    layers: Vec<Linear>,
}

impl Deep {
    fn new(device: &Device) -> Self {
        let layer = LinearConfig::new(256, 256).with_bias(false);
        let layer = layer.with_initializer(Initializer::Constant { value: 0.01 });
        Deep { layers: (0..PARAMETERS).map(|_| layer.init(device)).collect() }
    }

    /// Steps without a backward, which would take memory of its own.
    fn step(self, optim: &mut DdpOptimizer) -> Self {
        let mut gradients = GradientsParams::new();
        for layer in &self.layers {
            gradients.register(layer.weight.id, layer.weight.base().inner().mul_scalar(0.5));
        }
        optim.step(0.1, self, gradients)
    }
}

/// Runs `work`; returns its result and the most memory that all ranks together had in use during it, beyond the memory
/// before, as a number of parameters. *Collective*.
fn parameters_needed<T>(ddp: &Ddp, work: impl FnOnce() -> burn_ddp::Result<T>) -> anyhow::Result<(T, f64)> {
    ddp.barrier()?;
    let before = LIVE.load(Relaxed);
    PEAK.store(before, Relaxed);
    ddp.barrier()?;
    let done = work()?;
    ddp.barrier()?;
    let needed = PEAK.load(Relaxed).saturating_sub(before) as f64 / PARAMETER as f64;
    ddp.barrier()?;
    Ok((done, needed))
}

fn measure(directory: &Path, config: &WrapConfig) -> Vec<(&'static str, f64)> {
    let needed = Ddp::spawn(RANKS, |ddp| {
        let model = ddp.wrap_with(Deep::new(&ddp.device()?.autodiff()), config)?;
        let mut optim = ddp.optimizer(AdamConfig::new().init(), &model)?;
        let model = model.step(&mut optim);
        let mut needed = Vec::new();
        let mut note = |what, parameters| needed.push((what, parameters));
        note("hash", parameters_needed(&ddp, || param_hash(&model))?.1);
        note("ddp.save", parameters_needed(&ddp, || ddp.save(&model, directory.join("model")))?.1);
        let checkpoints = ddp.checkpoints(directory.join("checkpoints"))?;
        note("save model", parameters_needed(&ddp, || checkpoints.save(1, |c| c.model(&model)))?.1);
        note("save state", parameters_needed(&ddp, || checkpoints.save(2, |c| c.optimizer(&optim, &model)))?.1);
        let saved = [1, 2].map(|step| checkpoints.at(step));
        let [Some(of_model), Some(of_state)] = saved.map(|found| found.ok().flatten()) else {
            anyhow::bail!("they were saved")
        };
        // Loading frees the old values as the loaded ones replace them.
        let (model, extra) = parameters_needed(&ddp, || of_model.model(model))?;
        note("load model", extra);
        drop(optim);
        let fresh = ddp.optimizer(AdamConfig::new().init(), &model)?;
        let (_state, extra) = parameters_needed(&ddp, || of_state.optimizer(fresh, &model))?;
        note("load state", extra);
        Ok(needed)
    });
    needed.unwrap().remove(0)
}

#[test]
fn saving_and_loading_need_the_memory_of_some_parameters() {
    /// Bytes of Adam's moments, in parameters.
    const STATE: f64 = 2.0 * PARAMETERS as f64;
    /// Parameters and parts of them that the ranks together read, gather, write and send at once.
    const SOME: f64 = 16.0;
    /// Copies of one message, of at most 4 MiB, that the ranks hold.
    const TRAVELS: f64 = 2.0 * ((4 << 20) / PARAMETER) as f64;
    for sharded in [false, true] {
        let config = match sharded {
            true => WrapConfig::new().with_sharding(Sharding::Parameters),
            false => WrapConfig::new(),
        };
        let directory = tempfile::tempdir().unwrap();
        for (work, needed) in measure(directory.path(), &config) {
            // Burn saves and loads the record of an optimizer as a whole.
            let records = match (work, sharded) {
                // Rank 0's record; with sharding a record and its bytes, of the parts of all ranks.
                ("save state", false) => STATE,
                ("save state", true) => 2.0 * STATE,
                // The state and a record of it: on each rank of the whole state, or with sharding of its part.
                ("load state", false) => 2.0 * STATE * RANKS as f64 + TRAVELS,
                ("load state", true) => 2.0 * STATE,
                _ => 0.0,
            };
            assert!(
                needed < records + SOME,
                "{work}, sharded: {sharded}: {needed:.1} parameters, {records} in records"
            );
        }
    }
}
