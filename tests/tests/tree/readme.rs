//! The program of the README, the quickstart and the page on migrating, run. `snippets` compares it with their texts.

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::{Dataset, InMemDataset};
use burn::nn::{Linear, LinearConfig};
use burn::optim::AdamConfig;
use burn::prelude::*;
use burn::tensor::TensorData;

/// The parts that the program of the documents leaves out: a model, a batcher and a data set.
#[derive(Config, Debug)]
pub(super) struct ModelConfig {}

#[derive(Module, Debug)]
pub(super) struct Model {
    layer: Linear,
}

impl ModelConfig {
    pub(super) fn init(&self, device: &Device) -> Model {
        Model { layer: LinearConfig::new(2, 1).init(device) }
    }
}

impl Model {
    pub(super) fn loss(&self, batch: Tensor<2>) -> Tensor<1> {
        (self.layer.forward(batch.clone()) - batch.sum_dim(1)).powf_scalar(2.0).mean()
    }
}

#[derive(Clone)]
pub(super) struct MyBatcher;

impl Batcher<[f32; 2], Tensor<2>> for MyBatcher {
    fn batch(&self, items: Vec<[f32; 2]>, device: &Device) -> Tensor<2> {
        let rows = items.len();
        Tensor::from_data(TensorData::new(items.into_iter().flatten().collect(), [rows, 2]), device)
    }
}

struct MyDataset;

impl MyDataset {
    fn open() -> anyhow::Result<impl Dataset<[f32; 2]> + 'static> {
        Ok(InMemDataset::new((0..100).map(|i| [i as f32 / 100.0, 1.0]).collect()))
    }
}

mod program {
    use super::*;

    // The text of the documents begins at the next line.
    use burn_ddp::prelude::*;

    pub(super) fn main() -> anyhow::Result<()> {
        let ddp = Ddp::init()?;
        let device = ddp.device()?.autodiff();
        ddp.seed(&device, 42);
        let mut model = ddp.wrap(ModelConfig::new().init(&device))?;
        let mut optim = AdamConfig::new().init();
        let train = ddp.loader(MyBatcher).batch_size(64).shuffle(42).build(MyDataset::open()?)?;

        for epoch in train.epochs(0..10) {
            for batch in epoch {
                let Some(grads) = ddp.backward(&model.loss(batch?), &model)? else { continue };
                model = optim.step(1e-3, model, grads);
            }
        }
        ddp.save(&model, "model")?;
        Ok(ddp.finish()?)
    }
}

#[test]
fn the_program_runs() {
    let folder = tempfile::tempdir().unwrap();
    std::env::set_current_dir(&folder).unwrap(); // the other tests of this file name files by their whole path
    program::main().unwrap();
    let files: Vec<_> = std::fs::read_dir(&folder).unwrap().map(|file| file.unwrap().file_name()).collect();
    assert!(files.len() == 1 && files[0].to_string_lossy().starts_with("model"), "{files:?}");
}
