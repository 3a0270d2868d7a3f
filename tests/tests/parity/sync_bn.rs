//! `SyncBatchNorm` over two and three ranks with uneven parts, against torch's `BatchNorm` over the whole batch.

use std::collections::BTreeMap;
use std::ops::Range;

use anyhow::{Context, Result, ensure};
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{BatchNormConfig, Linear, LinearConfig, PaddingConfig2d};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{GradientsParams, SgdConfig};
use burn::prelude::*;
use burn::tensor::DType;
use burn::tensor::activation::relu;
use burn_ddp::nn::SyncBatchNorm;
use burn_ddp::prelude::*;
use burn_ddp_tests::to_f64;
use serde::Deserialize;

use super::close;

#[derive(Deserialize)]
struct Torch {
    layers: BTreeMap<String, Layer>,
    training: Training,
}

#[derive(Deserialize)]
struct Layer {
    shape: Vec<usize>,
    output: Vec<f64>,
    running_mean: Vec<f64>,
    /// Running mean of the unbiased variances.
    running_var: Vec<f64>,
    input_gradient: Vec<f64>,
    weight_gradient: Vec<f64>,
    bias_gradient: Vec<f64>,
}

#[derive(Deserialize)]
struct Training {
    steps: usize,
    batch: usize,
    lr: f64,
    momentum: f64,
    losses: Vec<f64>,
    first_gradients: BTreeMap<String, Vec<f64>>,
    r#final: BTreeMap<String, Vec<f64>>,
    running_means: BTreeMap<String, Vec<f64>>,
}

fn torch() -> Torch {
    serde_json::from_str(include_str!("../../parity/torch_sync_bn.json")).expect("the script wrote it")
}

/// The items of this rank: each rank but the last takes about half of the items that the ranks before it have left.
fn part(items: usize, ddp: &Ddp) -> Range<usize> {
    let mut start = 0;
    for _ in 0..ddp.rank() {
        start += (items - start).div_ceil(2);
    }
    let is_last = ddp.rank() + 1 == ddp.world_size();
    start..if is_last { items } else { start + (items - start).div_ceil(2) }
}

/// The function `table` of the script.
fn table<const D: usize>(shape: [usize; D], salt: usize, dtype: DType, device: &Device) -> Tensor<D> {
    let inner: usize = shape[2..].iter().product();
    let value = |i: usize| {
        let channel = (i / inner % shape[1]) as f64;
        (((i * 37 + salt * 11) % 101) as f64 - 50.0) / 32.0 * (channel + 1.0) / 2.0 + channel * 3.0
    };
    let values: Vec<f64> = (0..shape.iter().product()).map(value).collect();
    Tensor::from_data(TensorData::new(values, shape).convert_dtype(dtype), (device, dtype))
}

fn values<const D: usize>(x: Tensor<D>) -> Vec<f64> {
    x.into_data().iter::<f64>().collect()
}

#[test]
fn layers() -> Result<()> {
    let layers = torch().layers;
    for (world_size, dtype, tolerance) in [(2, DType::F64, 1e-12), (3, DType::F64, 1e-12), (3, DType::F32, 1e-5)] {
        layer::<2>(&layers["1d"], world_size, dtype, tolerance)?;
        layer::<3>(&layers["1d_length"], world_size, dtype, tolerance)?;
        layer::<4>(&layers["2d"], world_size, dtype, tolerance)?;
    }
    Ok(())
}

fn layer<const D: usize>(torch: &Layer, world_size: usize, dtype: DType, tolerance: f64) -> Result<()> {
    let shape = <[usize; D]>::try_from(torch.shape.clone()).expect("a shape of D dimensions");
    let channels = shape[1];
    let results = Ddp::spawn(world_size, |ddp| {
        let device = ddp.device()?.autodiff();
        let per_channel = |first: f64, step: f64| -> Tensor<1> {
            let values: Vec<f64> = (0..channels).map(|c| first + c as f64 * step).collect();
            Tensor::from_data(TensorData::new(values, [channels]).convert_dtype(dtype), (&device, dtype))
        };
        let mut norm = BatchNormConfig::new(channels).init(&device);
        norm.gamma = norm.gamma.map(|_| per_channel(0.5, 0.25).require_grad());
        norm.beta = norm.beta.map(|_| per_channel(-0.25, 0.125).require_grad());
        let norm = if dtype == DType::F64 { to_f64(norm) } else { norm };
        // The loss is a sum over items.
        let config = WrapConfig::new().with_reduction(GradientReduction::Sum).with_buffers(BufferPolicy::Local);
        let norm = ddp.wrap_with(SyncBatchNorm::from(norm), &config)?;
        let items = part(shape[0], &ddp);
        let mine = |salt| table(shape, salt, dtype, &device).slice_dim(0, items.clone());
        norm.forward(mine(1));
        let x = mine(2).require_grad();
        let y = norm.forward(x.clone());
        let loss = (y.clone().powi_scalar(3) * mine(3) / 16.0).sum();
        let (own, grads) = ddp.scope(&norm, || loss.backward())?;
        let input_gradient = x.grad(&own).context("x has a gradient")?;
        let grads = grads.context("the backward is a step")?;
        let gradient = |param: &Param<Tensor<1>>| grads.get::<1>(param.id).map(values).context("it has a gradient");
        let inner = &norm.norm;
        let parameters = [gradient(&inner.gamma)?, gradient(&inner.beta)?];
        let running = [values(inner.running_mean.value_sync()), values(inner.running_var.value_sync())];
        Ok((values(y.inner()), values(input_gradient), parameters, running))
    })?;
    let outputs: Vec<f64> = results.iter().flat_map(|r| r.0.clone()).collect();
    let gradients: Vec<f64> = results.iter().flat_map(|r| r.1.clone()).collect();
    close(&outputs, &torch.output, tolerance).context("output")?;
    close(&gradients, &torch.input_gradient, tolerance).context("gradient of the input")?;
    let n = (torch.output.len() / channels) as f64;
    for (_, _, [weight, bias], [mean, variance]) in &results {
        close(weight, &torch.weight_gradient, tolerance).context("gradient of the weight")?;
        close(bias, &torch.bias_gradient, tolerance).context("gradient of the bias")?;
        close(mean, &torch.running_mean, tolerance).context("running mean")?;
        // After two updates by 0.1, the start value 1 still contributes 0.81.
        let unbiased: Vec<f64> = variance.iter().map(|v| 0.81 + (v - 0.81) * n / (n - 1.0)).collect();
        close(&unbiased, &torch.running_var, tolerance).context("running variance")?;
        ensure!([mean, variance] == [&results[0].3[0], &results[0].3[1]], "ranks keep other running statistics");
    }
    Ok(())
}

#[derive(Module, Debug)]
struct Net {
    conv1: Conv2d,
    norm1: SyncBatchNorm,
    conv2: Conv2d,
    norm2: SyncBatchNorm,
    fc: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        let conv =
            |i, o| Conv2dConfig::new([i, o], [3, 3]).with_padding(PaddingConfig2d::Same).with_bias(false).init(device);
        let norm = |channels| BatchNormConfig::new(channels).init(device).into();
        let fc = LinearConfig::new(6, 3).init(device);
        Net { conv1: conv(2, 4), norm1: norm(4), conv2: conv(4, 6), norm2: norm(6), fc }
    }

    fn forward(&self, x: Tensor<4>) -> Tensor<2> {
        let x = relu(self.norm1.forward(self.conv1.forward(x)));
        let x = self.norm2.forward(self.conv2.forward(x));
        self.fc.forward(x.mean_dims(&[2, 3]).flatten(1, 3))
    }
}

#[test]
fn training() -> Result<()> {
    let torch = torch().training;
    for (world_size, dtype, tolerance) in [(2, DType::F64, 1e-9), (3, DType::F64, 1e-9), (3, DType::F32, 1e-4)] {
        let results = Ddp::spawn(world_size, |ddp| train(&torch, &ddp, dtype))?;
        for (losses, first, last, means, hash) in &results {
            close(losses, &torch.losses, tolerance).context("losses")?;
            compare(first, &torch.first_gradients, tolerance).context("first gradients")?;
            compare(last, &torch.r#final, tolerance).context("final weights")?;
            compare(means, &torch.running_means, tolerance).context("running means")?;
            ensure!(*hash == results[0].4, "ranks hold other weights");
        }
    }
    Ok(())
}

type Named = BTreeMap<String, Vec<f64>>;

fn compare(ours: &Named, torch: &Named, tolerance: f64) -> Result<()> {
    ensure!(ours.keys().eq(torch.keys()), "{:?}, torch has {:?}", ours.keys(), torch.keys());
    for (name, values) in ours {
        close(values, &torch[name], tolerance).context(name.clone())?;
    }
    Ok(())
}

fn train(torch: &Training, ddp: &Ddp, dtype: DType) -> Result<(Vec<f64>, Named, Named, Named, String)> {
    let device = ddp.device()?.autodiff();
    let net = Net::new(&device).map(&mut Initial { path: vec![], count: 0, dtype });
    let mut net = ddp.wrap(net)?;
    let momentum = MomentumConfig { momentum: torch.momentum, dampening: 0.0, nesterov: false };
    let mut optim = SgdConfig::new().with_momentum(Some(momentum)).init();
    let (mut losses, mut first) = (Vec::new(), None);
    for step in 0..torch.steps {
        let items = part(torch.batch, ddp);
        let x = table([torch.batch, 2, 5, 5], step, dtype, &device).slice_dim(0, items.clone());
        let labels: Vec<i64> = items.clone().map(|i| ((step * torch.batch + i) * 7 % 3) as i64).collect();
        let labels = Tensor::<1, Int>::from_data(TensorData::new(labels, [items.len()]), &device);
        let loss = CrossEntropyLossConfig::new().init(&device).forward(net.forward(x), labels);
        let mine = loss.clone().into_data().iter::<f64>().sum::<f64>();
        losses.push(ddp.sum(mine * items.len() as f64)? / torch.batch as f64);
        let grads = ddp.weighted(items.len() as f64).backward(&loss, &net)?.context("every backward is a step")?;
        first.get_or_insert_with(|| as_torch(&net, Some(&grads)));
        net = optim.step(torch.lr, net, grads);
    }
    // Other threads see the running statistics one update late.
    drop(net.valid());
    let mean = |norm: &SyncBatchNorm| values(norm.norm.running_mean.value());
    let means =
        [("norm1.running_mean".into(), mean(&net.norm1)), ("norm2.running_mean".into(), mean(&net.norm2))].into();
    Ok((losses, first.context("no step was made")?, as_torch(&net, None), means, param_hash(&net)?))
}

/// Torch's name of a parameter of ours; `None` for running statistics.
fn name(path: &[String]) -> Option<String> {
    let path = path.join(".").replace("gamma", "weight").replace("beta", "bias");
    (!path.contains("running")).then_some(path)
}

/// Gives convolutions and linear layers the weights of the script's `initial`, and all parameters the dtype.
struct Initial {
    path: Vec<String>,
    count: usize,
    dtype: DType,
}

impl ModuleMapper for Initial {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let dtype = self.dtype;
        let Some(name) = name(&self.path) else { return param.map(|old| old.cast(dtype)) };
        let salt = self.count;
        self.count += 1;
        let linear = name == "fc.weight";
        let mut dims = param.dims();
        if linear {
            dims.swap(0, 1);
        }
        let columns: usize = dims[1..].iter().product();
        let fan_in = if D > 1 { columns } else { 1 };
        let scale = 0.5f64.powi(((usize::BITS - fan_in.leading_zeros()) / 2) as i32);
        let value = |i: usize| (((i * 53 + salt * 29 + 7) % 97) as f64 - 48.0) / 128.0 * scale;
        param.map(|old| {
            if name.contains("norm") {
                return old.cast(dtype).detach().require_grad();
            }
            let values: Vec<f64> = (0..dims.iter().product()).map(value).collect();
            let new = TensorData::new(values, dims).convert_dtype(dtype);
            let new = Tensor::<D>::from_data(new, (&old.device(), dtype));
            let new = if linear { new.swap_dims(0, 1).detach() } else { new };
            new.require_grad()
        })
    }
}

/// Gradients if given, otherwise values, by torch's names and in torch's layout.
fn as_torch(net: &Net, grads: Option<&GradientsParams>) -> Named {
    struct Read<'a> {
        path: Vec<String>,
        grads: Option<&'a GradientsParams>,
        all: Named,
    }
    impl ModuleVisitor for Read<'_> {
        fn enter_module(&mut self, name: &str, _: &str) {
            self.path.push(name.into());
        }

        fn exit_module(&mut self, _: &str, _: &str) {
            self.path.pop();
        }

        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let Some(name) = name(&self.path) else { return };
            let value = match self.grads {
                Some(grads) => grads.get::<D>(param.id).expect("every parameter is used"),
                None => param.base().inner(),
            };
            let value = if name == "fc.weight" { value.swap_dims(0, 1) } else { value };
            self.all.insert(name, values(value));
        }
    }
    let mut read = Read { path: vec![], grads, all: Named::new() };
    net.visit(&mut read);
    read.all
}
