//! ResNet-18 with synchronised batch normalisation: two ranks with half of the batch each follow one rank with all of
//! it.

use anyhow::{Result, ensure};
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::optim::SgdConfig;
use burn::optim::momentum::MomentumConfig;
use burn::prelude::*;
use burn::store::ModuleRecord;
use burn::tensor::{Bytes, DType, TensorData};
use burn_ddp::nn::SyncBatchNorm;
use burn_ddp::prelude::*;
use burn_ddp_examples::vision::resnet::Depth;
use burn_ddp_examples::vision::{Classifier, ResNet, ResNetConfig};
use burn_ddp_tests::device;

const BATCH: usize = 16;
const STEPS: usize = 10;
const SIDE: usize = 16;
const CLASSES: usize = 4;

/// Casts all parameters and buffers to a dtype.
struct Cast(DType);

impl ModuleMapper for Cast {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let dtype = self.0;
        param.map(|old| {
            let requires_grad = old.is_require_grad();
            let new = old.detach().cast(dtype).detach();
            if requires_grad { new.require_grad() } else { new }
        })
    }
}

/// Paths and values of parameters and running statistics.
#[derive(Default)]
struct Read {
    path: Vec<String>,
    all: Vec<(String, Vec<f64>)>,
}

impl ModuleVisitor for Read {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let values = param.base().into_data().iter::<f64>().collect();
        self.all.push((self.path.join("."), values));
    }
}

fn network(device: &Device) -> ResNet<SyncBatchNorm> {
    let config = ResNetConfig { depth: Depth::D18, classes: CLASSES, side: SIDE, width: 4, zero_init_residual: false };
    config.init(device)
}

/// Pictures of a step, and their classes.
fn batch(step: usize, dtype: DType, device: &Device) -> (Tensor<4>, Tensor<1, Int>) {
    let shape = [BATCH, 3, SIDE, SIDE];
    let value = |i: usize| ((i * 37 + step * 101) % 89) as f64 / 32.0 - 1.375;
    let values: Vec<f64> = (0..shape.iter().product()).map(value).collect();
    let labels: Vec<i64> = (0..BATCH).map(|i| ((i * 7 + step) % CLASSES) as i64).collect();
    let values = TensorData::new(values, shape).convert_dtype(dtype);
    (Tensor::from_data(values, (device, dtype)), Tensor::from_data(TensorData::new(labels, [BATCH]), device))
}

fn train(ddp: &Ddp, initial: &[u8], dtype: DType) -> Result<Read> {
    let device = ddp.device()?.autodiff();
    let record = ModuleRecord::from_bytes(Bytes::from_bytes_vec(initial.to_vec()))?;
    let mut net = ddp.wrap(network(&device).try_load_record(record)?.map(&mut Cast(dtype)))?;
    let momentum = MomentumConfig::new().with_momentum(0.9).with_dampening(0.0);
    let mut optim = SgdConfig::new().with_momentum(Some(momentum)).init();
    let each = BATCH / ddp.world_size();
    let own = ddp.rank() * each..(ddp.rank() + 1) * each;
    for step in 0..STEPS {
        let (pictures, labels) = batch(step, dtype, &device);
        let logits = net.forward(pictures.slice_dim(0, own.clone()));
        let loss = CrossEntropyLossConfig::new().init(&device).forward(logits, labels.slice_dim(0, own.clone()));
        let grads = ddp.backward(&loss, &net)?.expect("averages");
        net = optim.step(0.02, net, grads);
    }
    let mut read = Read::default();
    // Running statistics are up to date in evaluation.
    net.valid().visit(&mut read);
    Ok(read)
}

#[test]
fn two_ranks_of_8_are_one_rank_of_16_after_10_steps() -> Result<()> {
    // One initialisation only: in f32 a rounding may switch a ReLU, after which any two runs diverge.
    let device = device();
    device.seed(4);
    let initial = network(&device).into_record().into_bytes().map_err(|e| anyhow::anyhow!("{e}"))?;
    for (dtype, tolerance) in [(DType::F64, 1e-9), (DType::F32, 1e-3)] {
        let one = Ddp::spawn(1, |ddp| train(&ddp, &initial, dtype))?;
        let two = Ddp::spawn(2, |ddp| train(&ddp, &initial, dtype))?;
        ensure!(two[0].all == two[1].all, "the ranks differ");
        let moved = one[0].all.iter().filter(|(path, _)| path.contains("running_mean")).count();
        ensure!(moved == 20, "{moved} running means, of 20 normalisations");
        for ((path, one), (_, two)) in one[0].all.iter().zip(&two[0].all) {
            let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>().sqrt();
            let error = norm(&mut one.iter().zip(two).map(|(a, b)| a - b)) / norm(&mut one.iter().copied());
            ensure!(error <= tolerance, "{path} in {dtype:?} is off by {error:e}");
        }
    }
    Ok(())
}
