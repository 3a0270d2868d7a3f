//! docs/models.md.
#![allow(unused)]

use burn::nn::loss::CrossEntropyLossConfig;
use burn::tensor::DType;
use burn_ddp::Precision;
use burn_ddp::nn::SyncBatchNorm;

use super::*;

#[derive(Module, Debug)]
struct Net {
    norm: SyncBatchNorm,
    layer: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        Net { norm: BatchNormConfig::new(64).init(device).into(), layer: LinearConfig::new(64, 1).init(device) }
    }
}

impl Net {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.layer.forward(x)
    }
}

type Generator = Net;

fn settings(ddp: &Ddp, device: Device) -> anyhow::Result<()> {
    let config = WrapConfig::new().with_accumulation(4).with_buffers(BufferPolicy::Broadcast);
    let mut model = ddp.wrap_with(Net::new(&device), &config)?;
    Ok(())
}

fn backward(ddp: &Ddp, losses: Vec<Tensor<1>>, model: Net, [generator, critic]: [Net; 2]) -> anyhow::Result<()> {
    for loss in losses {
        let Some(grads) = ddp.backward(&loss, &model)? else { continue };
        let Some((g_grads, c_grads)) = ddp.backward(&loss, (&generator, &critic))? else { continue };
        let average = grads.get::<2>(model.layer.weight.id);
    }
    Ok(())
}

fn parts(ddp: &Ddp, device: Device) -> anyhow::Result<()> {
    let color = if ddp.rank() < 2 { 0 } else { 1 };
    let part = ddp.split(Some(color), 0)?.unwrap();
    let model = part.wrap(Generator::new(&device))?;
    Ok(())
}

fn halves(ddp: &Ddp, device: Device, images: Tensor<2>, labels: Tensor<1, Int>) -> anyhow::Result<()> {
    let loss = CrossEntropyLossConfig::new().init(&device);
    let precision = Precision::Bf16;
    let config = WrapConfig::new().with_compute_dtype(precision).with_full_precision(["*.norm"]);
    let mut model = ddp.wrap_with(Net::new(&device), &config)?;
    let logits = model.forward(images.cast(precision.dtype()));
    let loss = loss.forward(logits.cast(DType::F32), labels);
    Ok(())
}

fn sharding(ddp: &Ddp, model: Net) -> anyhow::Result<()> {
    let config = WrapConfig::new().with_sharding(Sharding::Parameters);
    let mut model = ddp.wrap_with(model, &config)?;
    let mut optim = ddp.optimizer(AdamWConfig::new().init(), &model)?;
    Ok(())
}
