//! Training with dropout that stops on request and is resumed by another job; random numbers drawn after `wrap`.

use std::path::PathBuf;

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::nn::{Dropout, DropoutConfig};
use burn::optim::SgdConfig;
use burn::prelude::*;
use burn::tensor::{DType, Distribution};
use burn_ddp::data::Position;
use burn_ddp::prelude::*;
use burn_ddp_tests::{Mlp, rows};

struct Rows;

impl Batcher<usize, Tensor<2>> for Rows {
    fn batch(&self, items: Vec<usize>, device: &Device) -> Tensor<2> {
        Tensor::cat(items.into_iter().map(|item| rows(item, 1, 6, 1, DType::F32, device)).collect(), 0)
    }
}

fn loss(model: &Mlp, dropout: &Dropout, x: Tensor<2>) -> Tensor<1> {
    let h = dropout.forward(model.a.forward(x).tanh());
    model.c.forward(model.b.forward(h).tanh()).powf_scalar(2.0).mean()
}

/// `rank dropout DIR [STOP]`: two epochs of 4 steps. Resumes where an earlier run in `DIR` stopped; stops after `STOP`
/// steps, if given. Prints the hash of the model and the loss of each step.
pub(crate) fn run(ddp: &Ddp) -> anyhow::Result<()> {
    let arg = |n: usize| std::env::args().nth(n);
    let dir = PathBuf::from(arg(2).unwrap_or_default());
    let stop: Option<usize> = arg(3).map(|stop| stop.parse()).transpose()?;
    let device = ddp.device()?.autodiff();
    ddp.seed(&device, 5);
    let saved = std::fs::read_to_string(dir.join("position.json")).ok();
    let model = Mlp::new(&device);
    let model = if saved.is_some() { model.load_file(dir.join("model.bpk")) } else { model };
    let mut model = ddp.wrap(model)?;
    let (mut optim, dropout) = (SgdConfig::new().init(), DropoutConfig::new(0.5).init());
    let dataset = InMemDataset::new((0..22).collect());
    let train = ddp.loader(Rows).global_batch_size(6).shuffle(3).build(dataset)?;
    if let Some(saved) = saved {
        train.resume(&serde_json::from_str::<Position>(&saved)?)?;
    }
    let (mut losses, mut taken) = (Vec::new(), 0);
    'training: for epoch in train.epochs(0..2) {
        for batch in epoch {
            let loss = loss(&model, &dropout, batch?);
            losses.push(loss.clone().into_scalar::<f32>());
            let grads = ddp.backward(&loss, &model)?.expect("averages");
            model = optim.step(0.1, model, grads);
            taken += 1;
            if Some(taken) == stop {
                break 'training;
            }
        }
    }
    if stop.is_some() {
        ddp.save(&model, dir.join("model"))?;
        if ddp.is_main() {
            std::fs::write(dir.join("position.json"), serde_json::to_string(&train.position())?)?;
        }
    }
    println!("hash {}", param_hash(&model)?);
    println!("losses {}", serde_json::to_string(&losses)?);
    ddp.barrier()?;
    Ok(())
}

/// `rank draws SEEDED_BY`: prints two random numbers drawn after `wrap` and two drawn after a batch of the loader. The
/// program seeds the device equally on all ranks (`device`), differently on each rank (`each`), or not at all (`none`).
pub(crate) fn draws(ddp: &Ddp) -> anyhow::Result<()> {
    let device = ddp.device()?.autodiff();
    match std::env::args().nth(2).as_deref() {
        Some("device") => device.seed(5),
        Some("each") => device.seed(5 + ddp.rank() as u64),
        _ => {}
    }
    let _model = ddp.wrap(Mlp::new(&device))?;
    let draw = || Tensor::<1>::random([2], Distribution::Default, &device).into_data().try_to_vec::<f32>();
    let train = ddp.loader(Rows).build(InMemDataset::new(vec![1, 2, 3]))?;
    let after_wrap = draw().unwrap();
    for batch in train.iter() {
        batch?;
        println!("draws {:?}", [after_wrap.clone(), draw().unwrap()].concat());
    }
    Ok(())
}
