//! docs/data.md.
#![allow(unused)]

use std::path::PathBuf;

use burn::data::dataset::DatasetError;
use burn_ddp::data::{Stream, StreamShard, StreamSource};

use super::*;

type Parts = (Model, ModuleOptimizer);

fn loaders(ddp: &Ddp, batcher: MyBatcher, [train_data, test_data]: [Data; 2], parts: Parts) -> anyhow::Result<()> {
    let (mut model, mut optim) = parts;
    let train = ddp.loader(batcher.clone()).batch_size(64).shuffle(42).build(train_data)?;
    let test = ddp.eval_loader(batcher).batch_size(64).build(test_data)?;
    for epoch in train.epochs(0..10) {
        for batch in epoch {
            let Some(grads) = ddp.backward(&model.loss(batch?), &model)? else { continue };
            model = optim.step(1e-3, model, grads);
        }
    }
    Ok(())
}

struct Batch {
    tokens: usize,
}

fn tokens(ddp: &Ddp, batcher: impl Batcher<String, Batch> + 'static, dataset: Vec<String>) -> anyhow::Result<()> {
    let dataset = InMemDataset::new(dataset);
    let train = ddp.loader(batcher).batch_size(8).weigh(|batch: &Batch| batch.tokens as f64).build(dataset)?;
    Ok(())
}

fn accumulation(ddp: &Ddp, parts: Parts, train: &ShardedLoader<Tensor<2>>, lr: f64) -> anyhow::Result<()> {
    let (mut model, mut optim) = parts;
    for epoch in train.epochs(0..10) {
        for batch in epoch {
            let loss = model.loss(batch?);
            let Some(grads) = ddp.backward(&loss, &model)? else { continue };
            model = optim.step(lr, model, grads);
        }
    }
    if let Some(grads) = ddp.flush(&model)? {
        model = optim.step(lr, model, grads);
    }
    Ok(())
}

fn logical_ranks(ddp: &Ddp, batcher: MyBatcher, dataset: Data) -> anyhow::Result<()> {
    ddp.set_logical_ranks(8)?;
    let train = ddp.loader(batcher).batch_size(16).build(dataset)?;
    Ok(())
}

fn position(checkpoints: &Checkpoints, train: &ShardedLoader<Tensor<2>>, step: u64) -> anyhow::Result<()> {
    checkpoints.save(step, |c| c.value("position", &train.position()))?;
    if let Some(checkpoint) = checkpoints.latest()? {
        train.resume(&checkpoint.value("position")?)?;
        for epoch in train.epochs(0..10) {
            assert!(epoch.count() > 0);
        }
    }
    Ok(())
}

#[derive(Clone)]
struct Record(PathBuf);

fn stream(ddp: &Ddp, paths: Vec<PathBuf>, batcher: impl Batcher<Record, Batch> + 'static) -> anyhow::Result<()> {
    struct Files {
        paths: Vec<PathBuf>,
    }

    let files = Files { paths };

    impl StreamSource<Record> for Files {
        fn open(&self, shard: StreamShard) -> Result<Stream<Record>, DatasetError> {
            let own = self.paths.iter().enumerate().filter(|(nth, _)| shard.has(*nth));
            let own: Vec<_> = own.map(|(_, path)| Ok(Record(path.clone()))).collect();
            Ok(Box::new(own.into_iter()))
        }
    }
    let train = ddp.stream(files, batcher).batch_size(64).num_workers(2).build()?;
    Ok(())
}

fn join(ddp: &Ddp, mut model: Model, mut optim: ModuleOptimizer) -> anyhow::Result<()> {
    let missed = ddp.join(&mut model, &mut optim)?;
    Ok(())
}
