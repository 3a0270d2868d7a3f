//! Training of different models at the same time, each by a part of a job's ranks.

use anyhow::{Result, ensure};
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::module::{Module, ModuleMapper, Param};
use burn::nn::{BatchNormConfig, LinearConfig};
use burn::optim::AdamConfig;
use burn::prelude::*;
use burn::tensor::TensorData;
use burn_ddp::nn::SyncBatchNorm;
use burn_ddp::prelude::*;

use crate::{number, rows, widest};

/// A model with a layer that communicates in its forward.
#[derive(Module, Debug)]
pub struct Model {
    a: burn::nn::Linear,
    norm: SyncBatchNorm,
    b: burn::nn::Linear,
}

impl Model {
    /// Mean square of the output for `[n, 6]`.
    pub fn loss(&self, x: Tensor<2>) -> Tensor<1> {
        self.b.forward(self.norm.forward(self.a.forward(x))).powf_scalar(2.0).mean()
    }
}

/// Gives trainable parameters values that depend only on their place in the model and on `salt`.
pub fn numbered<M: Module>(model: M, salt: u64) -> M {
    struct Fill(u64);
    impl ModuleMapper for Fill {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            self.0 += 1;
            param.map(|old| {
                if !old.is_require_grad() {
                    return old;
                }
                let (dims, dtype) = (old.dims(), widest(&old.device()));
                let values: Vec<f64> = (0..dims.iter().product()).map(|i| number(i, self.0)).collect();
                let data = TensorData::new(values, dims).convert_dtype(dtype);
                Tensor::from_data(data, (&old.device(), dtype)).require_grad()
            })
        }
    }
    model.map(&mut Fill(salt))
}

struct Rows(u64);

impl Batcher<usize, Tensor<2>> for Rows {
    fn batch(&self, items: Vec<usize>, device: &Device) -> Tensor<2> {
        Tensor::cat(items.iter().map(|item| rows(*item, 1, 6, self.0, widest(device), device)).collect(), 0)
    }
}

/// Trains the model of `color` on the ranks of `ddp`: other weights, data, batches, epochs and settings for each color.
/// Returns the hash of the model and telemetry's number of steps.
pub fn train(ddp: &Ddp, color: u64) -> Result<(String, u64)> {
    let device = ddp.device()?.autodiff();
    let (salt, items, epochs) = (100 * color, 22 + 9 * color as usize, 3 - color as usize % 2);
    let model = Model {
        a: LinearConfig::new(6, 5 + color as usize).init(&device),
        norm: BatchNormConfig::new(5 + color as usize).init(&device).into(),
        b: LinearConfig::new(5 + color as usize, 2).init(&device),
    };
    // Ranks other than 0 begin with different values, which `wrap` replaces.
    let model = numbered(model, salt + 1000 * ddp.rank() as u64);
    let config = WrapConfig::new().with_accumulation(1 + color as usize % 2).with_bucket_cap_bytes(200);
    let mut model = ddp.wrap_with(model, &config)?;
    let mut optim = AdamConfig::new().init();
    let loader = ddp.loader(Rows(salt + 7)).global_batch_size(5).shuffle(color).set_device(device);
    let loader = loader.build(InMemDataset::new((0..items).collect()))?;
    for epoch in loader.epochs(0..epochs) {
        for x in epoch {
            if let Some(grads) = ddp.backward(&model.loss(x?), &model)? {
                model = optim.step(0.01, model, grads);
            }
        }
    }
    ddp.check_replicas(&model)?;
    Ok((param_hash(&model)?, ddp.telemetry().stats().steps))
}

/// Divides the ranks of `job` by color, the last one left out; each part trains a model of its own. Returns the color
/// of this rank and what [`train`] returns.
pub fn train_in_parts(job: &Ddp) -> Result<Option<(u64, String, u64)>> {
    let last = job.world_size() - 1;
    let color = (job.rank() != last).then_some(job.rank() as u64 % 2);
    let part = job.split(color, 0)?;
    ensure!(part.is_some() == color.is_some(), "a rank without a color has no part");
    let result = match (&part, color) {
        (Some(ddp), Some(color)) => {
            ensure!(ddp.rank() == job.rank() / 2 && ddp.world_size() == last / 2, "{ddp:?}");
            ensure!(ddp.is_main() == (job.rank() < 2), "{ddp:?}");
            ensure!(
                (ddp.local_rank(), ddp.local_world_size()) == (job.local_rank(), job.local_world_size()),
                "{ddp:?}"
            );
            let (hash, steps) = train(ddp, color)?;
            Some((color, hash, steps))
        }
        _ => None,
    };
    // The job goes on together.
    ensure!(job.sum(1.0)? == job.world_size() as f64, "a rank is missing");
    Ok(result)
}
