//! Ranks that train with Burn, in each way of [`Side`].

use anyhow::{Context, Result, ensure};
use burn::module::{Module, Param};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::pool::{MaxPool2d, MaxPool2dConfig};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamConfig, GradientsParams, ModuleOptimizer};
use burn::prelude::*;
use burn::tensor::activation::relu;
use burn_ddp::prelude::*;
use burn_ddp_comm::{EngineChoice, World};

use super::Workload;
use super::transformer::Transformer;
use crate::contender::{MLP_WIDTH, Model, Side, mlp_layers};
use crate::spin_barrier::Meeting;

/// Items in a batch of [`Model::Cnn`].
const CNN_BATCH: usize = 16;
const LEARNING_RATE: f64 = 1e-4;

pub(super) struct TrainRank {
    ddp: Ddp,
    device: Device,
    what: Model,
    side: Side,
    bucket_bytes: Option<usize>,
    /// Barrier for ranks that reduce nothing.
    meeting: Option<Meeting>,
    trainee: Option<Trainee>,
    /// For [`Model::Tensors`] the first element of the first gradient of the last step, otherwise its loss.
    seen: f32,
}

enum Trainee {
    /// Bare parameters, and the gradients of the last step, which would still exist for the optimizer.
    Tensors(Tensors, Option<GradientsParams>),
    Cnn(Box<(Cnn, ModuleOptimizer, Tensor<4>, Tensor<1, Int>)>),
    Mlp(Box<(Vec<Linear>, Tensor<2>)>),
    /// Model, optimizer and number of items in a batch.
    Transformer(Box<(Transformer, DdpOptimizer, usize)>),
}

/// A model of bare parameters.
#[derive(Module, Debug)]
struct Tensors {
    params: Vec<Param<Tensor<1>>>,
}

/// The network of PyTorch's basic MNIST example, without dropout.
#[derive(Module, Debug)]
struct Cnn {
    conv1: Conv2d,
    conv2: Conv2d,
    pool: MaxPool2d,
    fc1: Linear,
    fc2: Linear,
}

impl Tensors {
    /// A model with `bytes` of f32 in `count` parameters.
    fn new(bytes: usize, count: usize, device: &Device) -> Tensors {
        let (each, more) = (bytes / 4 / count, bytes / 4 % count);
        let param = |nth| Param::from_tensor(Tensor::zeros([each + usize::from(nth < more)], device));
        Tensors { params: (0..count).map(param).collect() }
    }

    /// Loss for which every element of every gradient is `factor`.
    fn loss(&self, side: Side, factor: f32) -> Tensor<1> {
        let sum = |param: &Param<Tensor<1>>| match side {
            Side::Nodes => {
                let value = param.val();
                let len = value.dims()[0];
                value.reshape([1, len]).sum()
            }
            _ => param.val().sum(),
        };
        let sums: Vec<Tensor<1>> = self.params.iter().map(sum).collect();
        Tensor::cat(sums, 0).sum().mul_scalar(factor)
    }
}

impl Cnn {
    fn new(device: &Device) -> Cnn {
        Cnn {
            conv1: Conv2dConfig::new([1, 32], [3, 3]).init(device),
            conv2: Conv2dConfig::new([32, 64], [3, 3]).init(device),
            pool: MaxPool2dConfig::new([2, 2]).with_strides([2, 2]).init(),
            fc1: LinearConfig::new(64 * 12 * 12, 128).init(device),
            fc2: LinearConfig::new(128, 10).init(device),
        }
    }

    fn loss(&self, images: Tensor<4>, labels: Tensor<1, Int>) -> Tensor<1> {
        let x = relu(self.conv2.forward(relu(self.conv1.forward(images))));
        let x = relu(self.fc1.forward(self.pool.forward(x).flatten::<2>(1, 3)));
        CrossEntropyLossConfig::new().init(&labels.device()).forward(self.fc2.forward(x), labels)
    }
}

/// True if ranks of this side meet at a barrier, and reduce nothing.
fn meets(side: Side) -> bool {
    matches!(side, Side::Barrier | Side::Nodes)
}

impl TrainRank {
    pub(super) fn new(
        world: World,
        what: Model,
        side: Side,
        bucket_bytes: Option<usize>,
        meeting: Option<Meeting>,
    ) -> Result<TrainRank> {
        ensure!(!meets(side) || meeting.is_some(), "needs --lines");
        let ddp = Ddp::from_world(world)?;
        let device = ddp.device()?.autodiff();
        let device = if what == Model::GptCheckpointing { device.gradient_checkpointing() } else { device };
        Ok(TrainRank { ddp, device, what, side, bucket_bytes, meeting, trainee: None, seen: f32::NAN })
    }

    fn wrap<M: Module + 'static>(&self, model: M) -> Result<M> {
        let sharding = match self.side {
            Side::Wrapped => Sharding::Off,
            Side::Sharded => Sharding::Parameters,
            Side::Plain | Side::Barrier | Side::Nodes => return Ok(model),
        };
        // A single rank reduces too where the cost of reducing is measured: for bare tensors, and for NCCL on one GPU.
        let is_nccl = self.ddp.world().options().engine == Some(EngineChoice::External("nccl"));
        let config = WrapConfig::new().with_single_rank_reduction(self.what == Model::Tensors || is_nccl);
        let config = config.with_sharding(sharding);
        let config = match self.bucket_bytes {
            Some(bytes) => config.with_bucket_cap_bytes(bytes),
            None => config,
        };
        Ok(self.ddp.wrap_with(model, &config)?)
    }

    /// Gradients of `loss`: of this rank alone, or averaged if `model` is wrapped.
    fn backward<M: Module>(&self, loss: &Tensor<1>, model: &M) -> Result<GradientsParams> {
        match self.side {
            Side::Wrapped | Side::Sharded => {
                self.ddp.backward(loss, model)?.context("without accumulation each backward is a step")
            }
            Side::Plain | Side::Barrier | Side::Nodes => Ok(GradientsParams::from_grads(loss.backward(), model)),
        }
    }

    /// Factor of this rank's loss of [`Tensors`].
    fn factor(&self) -> f32 {
        (self.ddp.rank() + 1) as f32
    }

    fn cnn(&self) -> Result<Trainee> {
        let model = self.wrap(Cnn::new(&self.device))?;
        let pixels: Vec<f32> =
            (0..CNN_BATCH * 784).map(|i| ((i * 7919 + self.ddp.rank()) % 255) as f32 / 255.0).collect();
        let labels: Vec<i64> = (0..CNN_BATCH).map(|i| (i % 10) as i64).collect();
        // Input tensors take no part in autodiff.
        let images = Tensor::from_data(TensorData::new(pixels, [CNN_BATCH, 1, 28, 28]), &self.device);
        let labels = Tensor::from_data(TensorData::new(labels, [CNN_BATCH]), &self.device);
        Ok(Trainee::Cnn(Box::new((model, AdamConfig::new().init(), images, labels))))
    }

    fn mlp(&self, bytes: usize, items: usize) -> Result<Trainee> {
        let layers = mlp_layers(bytes);
        let model: Vec<Linear> =
            (0..layers).map(|_| LinearConfig::new(MLP_WIDTH, MLP_WIDTH).init(&self.device)).collect();
        let values: Vec<f32> = (0..items * MLP_WIDTH).map(|i| ((i * 31) % 17) as f32 / 17.0).collect();
        let x = Tensor::from_data(TensorData::new(values, [items, MLP_WIDTH]), &self.device);
        Ok(Trainee::Mlp(Box::new((self.wrap(model)?, x))))
    }
}

impl Workload for TrainRank {
    /// Makes the model; `count` is the number of tensors, or of items in a batch.
    fn prepare(&mut self, bytes: usize, count: usize) -> Result<()> {
        self.trainee = None;
        ensure!(count > 0, "a model has at least one tensor");
        self.trainee = Some(match self.what {
            Model::Tensors => Trainee::Tensors(self.wrap(Tensors::new(bytes, count, &self.device))?, None),
            Model::Cnn => self.cnn()?,
            Model::Mlp => self.mlp(bytes, count)?,
            Model::Gpt | Model::GptCheckpointing => {
                let model = self.wrap(Transformer::new(bytes, &self.device))?;
                let optim = self.ddp.optimizer(AdamConfig::new().init(), &model)?;
                Trainee::Transformer(Box::new((model, optim, count)))
            }
        });
        Ok(())
    }

    fn buffers(&self, _: usize) -> usize {
        1
    }

    fn fill(&mut self, _: usize, _: u64) {}

    fn step(&mut self, _: usize) -> Result<()> {
        let factor = self.factor();
        let trainee = self.trainee.take().context("not prepared")?;
        let (trainee, seen) = match trainee {
            Trainee::Tensors(model, last) => {
                drop(last);
                let grads = self.backward(&model.loss(self.side, factor), &model)?;
                let first = model.params.first().and_then(|param| grads.get::<1>(param.id));
                let seen = first.map_or(f32::NAN, |grad| grad.narrow(0, 0, 1).into_scalar::<f32>());
                (Trainee::Tensors(model, Some(grads)), seen)
            }
            Trainee::Cnn(cnn) => {
                let (model, mut optim, images, labels) = *cnn;
                let loss = model.loss(images.clone(), labels.clone());
                let seen = loss.clone().into_scalar::<f32>();
                let grads = self.backward(&loss, &model)?;
                let model = optim.step(LEARNING_RATE, model, grads);
                (Trainee::Cnn(Box::new((model, optim, images, labels))), seen)
            }
            Trainee::Mlp(mlp) => {
                let (model, x) = *mlp;
                let y = model.iter().fold(x.clone(), |h, layer| layer.forward(h));
                let loss = y.powf_scalar(2.0).mean();
                let seen = loss.clone().into_scalar::<f32>();
                drop(self.backward(&loss, &model)?);
                (Trainee::Mlp(Box::new((model, x))), seen)
            }
            Trainee::Transformer(transformer) => {
                let (model, mut optim, items) = *transformer;
                let loss = model.loss(items, self.ddp.rank(), &self.device);
                let seen = loss.clone().into_scalar::<f32>();
                let grads = self.backward(&loss, &model)?;
                let model = optim.step(LEARNING_RATE, model, grads);
                (Trainee::Transformer(Box::new((model, optim, items))), seen)
            }
        };
        self.trainee = Some(trainee);
        self.seen = seen;
        if let Some(meeting) = self.meeting.as_mut().filter(|_| meets(self.side)) {
            meeting.meet();
        }
        Ok(())
    }

    fn check(&mut self, _: usize, _: u64, _: usize) -> Result<()> {
        ensure!(self.seen.is_finite(), "the loss is {}", self.seen);
        if self.what == Model::Tensors {
            let mean = (self.ddp.world_size() + 1) as f32 / 2.0;
            let expected = if self.side == Side::Wrapped { mean } else { self.factor() };
            ensure!(self.seen == expected, "a gradient is {}, not {expected}", self.seen);
        }
        Ok(())
    }
}
