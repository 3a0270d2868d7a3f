//! A plain MLP in f32 and f64: all losses, the first averaged gradients, the final weights.

use std::collections::HashMap;

use anyhow::{Context, Result, ensure};
use burn::module::{Module, Param};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Linear, LinearConfig};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamConfig, ModuleOptimizer, SgdConfig};
use burn::prelude::*;
use burn::tensor::DType;
use burn_ddp::prelude::*;
use serde::Deserialize;

use super::{close, difference};

const FEATURES: usize = 8;
const HIDDEN: usize = 16;
const CLASSES: usize = 4;

#[test]
fn f64_follows_torch() -> Result<()> {
    follow(include_str!("../../parity/torch_f64.json"), DType::F64, 1e-10, &WrapConfig::new())
}

/// Torch's FSDP2, on three ranks.
#[test]
fn sharded_f64_follows_torch() -> Result<()> {
    let config = WrapConfig::new().with_sharding(Sharding::Parameters).with_sharding_above(1);
    follow(include_str!("../../parity/torch_fsdp.json"), DType::F64, 1e-10, &config)
}

/// Torch's FSDP2 with Adam.
#[test]
fn sharded_adam_in_f64_follows_torch() -> Result<()> {
    let config = WrapConfig::new().with_sharding(Sharding::Parameters).with_sharding_above(1);
    follow(include_str!("../../parity/torch_fsdp_adam.json"), DType::F64, 1e-10, &config)
}

#[test]
fn f32_follows_torch() -> Result<()> {
    follow(include_str!("../../parity/torch_f32.json"), DType::F32, 1e-5, &WrapConfig::new())
}

#[derive(Deserialize)]
struct Torch {
    world_size: usize,
    steps: usize,
    batch_per_rank: usize,
    lr: f64,
    #[serde(flatten)]
    optimizer: Optimizer,
    initial: HashMap<String, Parameter>,
    first_gradients: HashMap<String, Vec<f64>>,
    losses: Vec<Vec<f64>>,
    r#final: HashMap<String, Parameter>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Optimizer {
    Momentum { momentum: f64 },
    Adam { betas: [f32; 2], epsilon: f32 },
}

impl Optimizer {
    fn init(&self) -> ModuleOptimizer {
        match *self {
            Optimizer::Momentum { momentum } => {
                let momentum = MomentumConfig { momentum, dampening: 0.0, nesterov: false };
                SgdConfig::new().with_momentum(Some(momentum)).init()
            }
            Optimizer::Adam { betas, epsilon } => {
                AdamConfig::new().with_beta_1(betas[0]).with_beta_2(betas[1]).with_epsilon(epsilon).init()
            }
        }
    }
}

#[derive(Deserialize)]
struct Parameter {
    shape: Vec<usize>,
    values: Vec<f64>,
}

/// Linear, tanh, Linear: torch's `0`, `1` and `2`.
#[derive(Module, Debug)]
struct Mlp {
    first: Linear,
    second: Linear,
}

/// Trains as torch did; `tolerance` is relative, by the norm of each tensor.
fn follow(numbers: &str, dtype: DType, tolerance: f64, config: &WrapConfig) -> Result<()> {
    let torch: Torch = serde_json::from_str(numbers)?;
    let results = Ddp::spawn(torch.world_size, |ddp| {
        let device = ddp.device()?.autodiff();
        let mut model = ddp.wrap_with(Mlp::from_torch(&torch.initial, dtype, &device)?, config)?;
        let mut optim = ddp.optimizer(torch.optimizer.init(), &model)?;
        let (mut losses, mut first_gradients) = (Vec::new(), None);
        for step in 0..torch.steps {
            let first_row = (step * ddp.world_size() + ddp.rank()) * torch.batch_per_rank;
            let loss = model.loss(first_row, torch.batch_per_rank, dtype, &device);
            losses.push(loss.clone().into_scalar::<f64>());
            let grads = ddp.backward(&loss, &model)?.context("every backward is a step")?;
            if first_gradients.is_none() {
                let matrix = |param: &Param<Tensor<2>>| whole(&ddp, grads.get(param.id)?).ok();
                first_gradients = Some(model.as_torch(matrix, |param| grads.get(param.id))?);
            }
            model = optim.step(torch.lr, model, grads);
        }
        let hash = param_hash(&model)?;
        let model = ddp.unwrap(model)?;
        let weights = model.as_torch(|param| Some(param.val().inner()), |param| Some(param.val().inner()))?;
        Ok((losses, first_gradients.context("no step was made")?, weights, hash))
    })?;

    for (rank, (losses, first_gradients, weights, hash)) in results.iter().enumerate() {
        close(losses, &torch.losses[rank], tolerance).with_context(|| format!("losses of rank {rank}"))?;
        for name in ["0.weight", "0.bias", "2.weight", "2.bias"] {
            let (initial, last) = (&torch.initial[name].values, &torch.r#final[name].values);
            ensure!(difference(last, initial) > 0.1, "{name} hardly moved, so this test would prove nothing");
            close(&first_gradients[name], &torch.first_gradients[name], tolerance)
                .with_context(|| format!("first gradient of {name} on rank {rank}"))?;
            close(&weights[name], last, tolerance).with_context(|| format!("final {name} on rank {rank}"))?;
        }
        assert_eq!(*hash, results[0].3, "rank {rank} holds other weights than rank 0");
    }
    Ok(())
}

/// The whole gradient of a layer's weight; `part` holds this rank's rows of it if the weight is sharded.
fn whole(ddp: &Ddp, part: Tensor<2>) -> Result<Tensor<2>> {
    let [rows, columns] = part.dims();
    let all = if columns == HIDDEN { FEATURES } else { HIDDEN };
    if rows == all {
        return Ok(part);
    }
    let (device, dtype) = (part.device(), part.dtype());
    let own: Vec<f64> = part.into_data().iter::<f64>().collect();
    let values = ddp.group().all_gather_object(&own)?.concat();
    Ok(Tensor::from_data(TensorData::new(values, [all, columns]), (&device, dtype)))
}

impl Mlp {
    fn from_torch(parameters: &HashMap<String, Parameter>, dtype: DType, device: &Device) -> Result<Self> {
        let get = |name: &str, shape: &[usize]| {
            let parameter = parameters.get(name).with_context(|| format!("{name} is missing"))?;
            ensure!(parameter.shape == shape, "{name} has shape {:?}, not {shape:?}", parameter.shape);
            Ok(TensorData::new(parameter.values.clone(), shape.to_vec()))
        };
        let linear = |name: &str, inputs: usize, outputs: usize| {
            let mut linear = LinearConfig::new(inputs, outputs).init(device);
            let weight = get(&format!("{name}.weight"), &[outputs, inputs])?;
            // Torch keeps [out, in], Burn [in, out].
            linear.weight = Param::from_tensor(Tensor::<2>::from_data(weight, (device, dtype)).transpose());
            let bias = get(&format!("{name}.bias"), &[outputs])?;
            linear.bias = Some(Param::from_tensor(Tensor::from_data(bias, (device, dtype))));
            anyhow::Ok(linear)
        };
        Ok(Self { first: linear("0", FEATURES, HIDDEN)?, second: linear("2", HIDDEN, CLASSES)? })
    }

    /// Values by torch's names and in torch's layout; the functions select a tensor of each parameter.
    fn as_torch(
        &self,
        matrix: impl Fn(&Param<Tensor<2>>) -> Option<Tensor<2>>,
        vector: impl Fn(&Param<Tensor<1>>) -> Option<Tensor<1>>,
    ) -> Result<HashMap<String, Vec<f64>>> {
        let mut values = HashMap::new();
        for (name, linear) in [("0", &self.first), ("2", &self.second)] {
            let weight = matrix(&linear.weight).with_context(|| format!("{name}.weight has none"))?.transpose();
            let bias = linear.bias.as_ref().and_then(&vector).with_context(|| format!("{name}.bias has none"))?;
            values.insert(format!("{name}.weight"), weight.into_data().iter::<f64>().collect());
            values.insert(format!("{name}.bias"), bias.into_data().iter::<f64>().collect());
        }
        Ok(values)
    }

    /// The loss of `rows` rows of the data, from row `first` on, made as by `inputs` and `labels` in the script.
    fn loss(&self, first: usize, rows: usize, dtype: DType, device: &Device) -> Tensor<1> {
        let value = |i: usize| ((i * 37 + 11) % 101) as f64 - 50.0;
        let inputs: Vec<f64> = (first * FEATURES..(first + rows) * FEATURES).map(|i| value(i) / 64.0).collect();
        let labels: Vec<i64> = (first..first + rows).map(|i| ((i * 7 + 3) % 13 % CLASSES) as i64).collect();
        let inputs = Tensor::<2>::from_data(TensorData::new(inputs, [rows, FEATURES]), (device, dtype));
        let labels = Tensor::<1, Int>::from_data(TensorData::new(labels, [rows]), device);
        let logits = self.second.forward(self.first.forward(inputs).tanh());
        CrossEntropyLossConfig::new().init(device).forward(logits, labels)
    }
}
