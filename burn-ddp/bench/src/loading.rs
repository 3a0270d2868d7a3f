//! `loading`: the time of a training step whose items take long to read, by the number of workers that read ahead.

use std::time::{Duration, Instant};

use anyhow::Result;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::{Dataset, DatasetError};
use burn::nn::{Linear, LinearConfig};
use burn::optim::SgdConfig;
use burn::tensor::{Device, Tensor};
use burn_ddp::prelude::*;
use clap::Args;

use crate::machine::describe;
use crate::table::Table;

/// Number of steps at the beginning that are not timed.
const WARM_UP: usize = 5;

/// Measures a training step with a slow dataset, by the number of workers that read ahead.
///
/// Reading an item sleeps, as if it waited for a disk or a network. Ranks are threads.
#[derive(Args, Debug)]
pub(crate) struct Loading {
    /// Number of ranks.
    #[arg(long, default_value_t = 1)]
    world: usize,
    /// Numbers of workers per rank.
    #[arg(long, value_delimiter = ',', default_value = "0,1,2,4")]
    workers: Vec<usize>,
    /// Times to read an item, in microseconds; with 0, the step only computes.
    #[arg(long, value_delimiter = ',', default_value = "0,500,1000,4000")]
    item_us: Vec<u64>,
    /// Items of a batch.
    #[arg(long, default_value_t = 8)]
    batch_size: usize,
    /// Inputs and outputs of the layer that is trained.
    #[arg(long, default_value_t = 1024)]
    features: usize,
    /// Measured steps.
    #[arg(long, default_value_t = 60)]
    steps: usize,
}

struct Slow {
    items: usize,
    read: Duration,
}

impl Dataset<usize> for Slow {
    fn get(&self, index: usize) -> Result<usize, DatasetError> {
        std::thread::sleep(self.read);
        Ok(index)
    }

    fn len(&self) -> usize {
        self.items
    }
}

struct Rows {
    features: usize,
}

impl Batcher<usize, Tensor<2>> for Rows {
    fn batch(&self, items: Vec<usize>, device: &Device) -> Tensor<2> {
        Tensor::ones([items.len(), self.features], device)
    }
}

impl Loading {
    pub(crate) fn run(&self) -> Result<()> {
        let mut table = Table::new(["reading a batch"]);
        self.workers.iter().for_each(|workers| table.add_column(format!("{workers} workers")));
        for &item_us in &self.item_us {
            let read = Duration::from_micros(item_us);
            let mut row = vec![format!("{:.1} ms", millis(read * self.batch_size as u32))];
            for &workers in &self.workers {
                let steps = Ddp::spawn(self.world, |ddp| self.step(&ddp, read, workers))?;
                row.push(format!("{:.1} ms", millis(steps[0])));
            }
            table.add(row);
        }
        println!(
            "time of a step, {} rank(s), {} items each, on {}\n\n{table}",
            self.world,
            self.batch_size,
            describe()
        );
        Ok(())
    }

    /// Mean time of a step.
    fn step(&self, ddp: &Ddp, read: Duration, workers: usize) -> Result<Duration> {
        let device = ddp.device()?.autodiff();
        let layer = LinearConfig::new(self.features, self.features).init(&device);
        let (mut model, mut optim): (Linear, _) = (ddp.wrap(layer)?, SgdConfig::new().init());
        let items = (WARM_UP + self.steps) * self.batch_size * self.world;
        let loader = ddp.loader(Rows { features: self.features }).batch_size(self.batch_size).num_workers(workers);
        let loader = loader.build(Slow { items, read })?;
        let mut began = Instant::now();
        for (step, batch) in loader.iter().enumerate() {
            if step == WARM_UP {
                began = Instant::now();
            }
            let Some(grads) = ddp.backward(&model.forward(batch?).mean(), &model)? else { continue };
            model = optim.step(1e-3, model, grads);
        }
        Ok(began.elapsed() / self.steps as u32)
    }
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
