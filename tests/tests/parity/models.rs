//! Models that are hard for data parallelism, in f64: the MNIST CNN, tied weights, `find_unused_parameters`,
//! `no_sync`, an LSTM, attention with AdamW and `clip_grad_norm`.

use std::collections::BTreeMap;
use std::marker::PhantomData;

use anyhow::{Context, Result, ensure};
use burn::data::dataset::Dataset;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::nn::GateController;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig, Lstm, LstmConfig};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer, SgdConfig};
use burn::prelude::*;
use burn::tensor::DType;
use burn::tensor::activation::softmax;
use burn_ddp::prelude::*;
use burn_ddp_examples::mnist::{Cnn, CnnConfig, MnistBatch, MnistDataset, Split};
use serde::Deserialize;

use super::{close, difference};

#[derive(Deserialize)]
struct Torch {
    world_size: usize,
    momentum: f64,
    cases: BTreeMap<String, Case>,
}

#[derive(Deserialize)]
struct Case {
    steps: usize,
    micro_batches: usize,
    lr: f64,
    adamw: Option<AdamW>,
    losses: Vec<Vec<f64>>,
    first_gradients: BTreeMap<String, Sample>,
    r#final: BTreeMap<String, Sample>,
}

/// Settings of AdamW, and the norm to which gradients are clipped.
#[derive(Deserialize)]
struct AdamW {
    betas: (f32, f32),
    epsilon: f32,
    weight_decay: f32,
    max_norm: f64,
}

impl Case {
    fn optimizer(&self, momentum: f64) -> ModuleOptimizer {
        match &self.adamw {
            None => {
                let momentum = MomentumConfig { momentum, dampening: 0.0, nesterov: false };
                SgdConfig::new().with_momentum(Some(momentum)).init()
            }
            Some(settings) => AdamWConfig::new()
                .with_beta_1(settings.betas.0)
                .with_beta_2(settings.betas.1)
                .with_epsilon(settings.epsilon)
                .with_weight_decay(settings.weight_decay)
                .init(),
        }
    }
}

/// Norm and some elements of a tensor in torch's layout.
#[derive(Deserialize)]
struct Sample {
    shape: Vec<usize>,
    norm: f64,
    values: Vec<f64>,
}

/// A model of the script.
trait Model: Module + 'static {
    fn new(device: &Device) -> Self;
    /// The loss of one micro-batch.
    fn loss(&self, at: At<'_>) -> Tensor<1>;
    /// Place in torch of the model's parameter number `n`.
    fn place(path: &str, n: usize, rows: usize) -> Place {
        Place { name: path.into(), salt: n, first_row: 0, rows }
    }
}

/// Rows of a torch parameter that hold one parameter of Burn.
struct Place {
    name: String,
    /// Its number among torch's parameters.
    salt: usize,
    first_row: usize,
    /// Number of rows of the whole torch parameter.
    rows: usize,
}

/// Rows of the data from which a loss is computed.
#[derive(Clone, Copy)]
struct At<'a> {
    step: usize,
    rank: usize,
    micro: usize,
    world: usize,
    device: &'a Device,
}

impl At<'_> {
    /// As `inputs` in the script: `rows` rows from row `first` on.
    fn inputs(&self, first: usize, rows: usize, columns: usize) -> Tensor<2> {
        let value = |i: usize| (((first * columns + i) * 37 + 11) % 101) as f64 - 50.0;
        let values: Vec<f64> = (0..rows * columns).map(|i| value(i) / 64.0).collect();
        Tensor::from_data(TensorData::new(values, [rows, columns]), (self.device, DType::F64))
    }

    fn part(&self) -> usize {
        self.step * self.world + self.rank
    }
}

#[test]
fn mnist_cnn() -> Result<()> {
    follow::<Cnn>("cnn")
}

#[test]
fn tied_weights() -> Result<()> {
    follow::<Tied>("tied")
}

#[test]
fn unused_parameters() -> Result<()> {
    follow::<Unused>("unused")
}

#[test]
fn no_sync_accumulation() -> Result<()> {
    follow::<NoSync>("no_sync")
}

#[test]
fn lstm() -> Result<()> {
    follow::<Recurrent>("lstm")
}

#[test]
fn attention_with_adamw_and_clipping() -> Result<()> {
    follow::<Attention>("attention")
}

const TOLERANCE: f64 = 1e-10;

fn follow<M: Model>(name: &str) -> Result<()> {
    let torch: Torch = serde_json::from_str(include_str!("../../parity/torch_models.json"))?;
    let case = &torch.cases[name];
    let results = Ddp::spawn(torch.world_size, |ddp| {
        let device = ddp.device()?.autodiff();
        let model = M::new(&device).map(&mut Initial { path: vec![], count: 0, model: PhantomData::<M> });
        let started = as_torch(&model, None);
        let mut model = ddp.wrap(model)?;
        let mut optim = case.optimizer(torch.momentum);
        let (mut losses, mut first_gradients) = (Vec::new(), None);
        for step in 0..case.steps {
            let loss =
                |micro| model.loss(At { step, rank: ddp.rank(), micro, world: ddp.world_size(), device: &device });
            let last = case.micro_batches - 1;
            for micro in 0..last {
                ddp.accumulate(&loss(micro), &model)?;
            }
            let loss = loss(last);
            losses.push(loss.clone().into_scalar::<f64>());
            let mut grads = ddp.backward(&loss, &model)?.context("the last micro-batch completes the step")?;
            first_gradients.get_or_insert_with(|| as_torch(&model, Some(&grads)));
            if let Some(settings) = &case.adamw {
                let norm;
                (grads, norm) = burn_ddp::clip_grad_norm(grads, &model, settings.max_norm)?;
                ensure!(norm > settings.max_norm, "step {step} clips nothing");
            }
            model = optim.step(case.lr, model, grads);
        }
        let weights = as_torch(&model, None);
        let moved = weights.iter().filter(|(name, (_, w))| difference(w, &started[*name].1) > 1e-3).count();
        ensure!(moved * 2 > weights.len(), "the weights hardly moved, so this test would prove nothing");
        Ok((losses, first_gradients.context("no step was made")?, weights, param_hash(&model)?))
    })?;
    for (rank, (losses, gradients, weights, hash)) in results.iter().enumerate() {
        close(losses, &case.losses[rank], TOLERANCE).with_context(|| format!("losses of rank {rank}"))?;
        compare(gradients, &case.first_gradients).with_context(|| format!("first gradients on rank {rank}"))?;
        compare(weights, &case.r#final).with_context(|| format!("final weights on rank {rank}"))?;
        ensure!(*hash == results[0].3, "rank {rank} holds other weights than rank 0");
    }
    Ok(())
}

type Named = BTreeMap<String, (Vec<usize>, Vec<f64>)>;

fn compare(ours: &Named, torch: &BTreeMap<String, Sample>) -> Result<()> {
    ensure!(ours.keys().eq(torch.keys()), "{:?}, torch has {:?}", ours.keys(), torch.keys());
    for (name, (shape, values)) in ours {
        let theirs = &torch[name];
        ensure!(*shape == theirs.shape, "{name} is {shape:?}, torch's {:?}", theirs.shape);
        let n = values.len();
        let at = |i: usize| if n <= 64 { values[i] } else { values[i * 7919 % n] };
        let sample: Vec<f64> = (0..n.min(64)).map(at).collect();
        close(&sample, &theirs.values, TOLERANCE).with_context(|| format!("elements of {name}"))?;
        let norm = values.iter().map(|v| v * v).sum::<f64>().sqrt();
        close(&[norm], &[theirs.norm], TOLERANCE).with_context(|| format!("norm of {name}"))?;
    }
    Ok(())
}

/// Burn keeps a linear layer's weight as `[in, out]`, torch as `[out, in]`.
fn is_linear<const D: usize>(path: &[String]) -> bool {
    D == 2 && path.ends_with(&["weight".into()]) && path[0] != "embedding"
}

/// Gives a model the weights of the script's `initial`.
struct Initial<M> {
    path: Vec<String>,
    count: usize,
    model: PhantomData<M>,
}

impl<M: Model> ModuleMapper for Initial<M> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let linear = is_linear::<D>(&self.path);
        let mut dims = param.dims();
        if linear {
            dims.swap(0, 1);
        }
        let place = M::place(&self.path.join("."), self.count, dims[0]);
        self.count += 1;
        let columns: usize = dims[1..].iter().product();
        let fan_in = if D > 1 { columns } else { 1 };
        let scale = 0.5f64.powi(((usize::BITS - fan_in.leading_zeros()) / 2) as i32);
        let value = |i: usize| (((i + place.first_row * columns) * 53 + place.salt * 29 + 7) % 97) as f64 - 48.0;
        let values: Vec<f64> = (0..dims[0] * columns).map(|i| value(i) / 128.0 * scale).collect();
        param.map(|old| {
            let new = Tensor::<D>::from_data(TensorData::new(values, dims), (&old.device(), DType::F64));
            if linear { new.swap_dims(0, 1).require_grad() } else { new.require_grad() }
        })
    }
}

/// Collects values, or gradients if there are some, as torch has them.
struct AsTorch<'a, M> {
    path: Vec<String>,
    count: usize,
    grads: Option<&'a GradientsParams>,
    all: Named,
    model: PhantomData<M>,
}

fn as_torch<M: Model>(model: &M, grads: Option<&GradientsParams>) -> Named {
    let mut visitor = AsTorch { path: vec![], count: 0, grads, all: Named::new(), model: PhantomData::<M> };
    model.visit(&mut visitor);
    visitor.all
}

impl<M: Model> ModuleVisitor for AsTorch<'_, M> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let count = self.count;
        self.count += 1;
        let value = match self.grads {
            Some(grads) => grads.get::<D>(param.id),
            None => Some(param.base().inner()),
        };
        let Some(value) = value else { return };
        let value = if is_linear::<D>(&self.path) { value.swap_dims(0, 1) } else { value };
        let mut shape = value.dims().to_vec();
        let values: Vec<f64> = value.into_data().iter::<f64>().collect();
        let place = M::place(&self.path.join("."), count, shape[0]);
        let columns = values.len() / shape[0];
        shape[0] = place.rows;
        let (_, all) = self.all.entry(place.name).or_insert_with(|| (shape, vec![0.0; place.rows * columns]));
        all[place.first_row * columns..][..values.len()].copy_from_slice(&values);
    }
}

impl Model for Cnn {
    fn new(device: &Device) -> Self {
        CnnConfig::new().with_dropout(false).init(device)
    }

    fn loss(&self, at: At<'_>) -> Tensor<1> {
        let digits = MnistDataset::sample(Split::Train).expect("the digits are in the program");
        let items: Vec<_> = (at.part() * 4..at.part() * 4 + 4).filter_map(|i| digits.get(i).ok()).collect();
        let pixels: Vec<f64> = items.iter().flat_map(|item| item.image).map(|p| f64::from(p) / 255.0).collect();
        let labels: Vec<i64> = items.iter().map(|item| i64::from(item.label)).collect();
        Cnn::loss(
            self,
            MnistBatch {
                images: Tensor::from_data(TensorData::new(pixels, [4, 1, 28, 28]), (at.device, DType::F64)),
                labels: Tensor::from_data(TensorData::new(labels, [4]), at.device),
            },
        )
    }
}

#[derive(Module, Debug)]
struct Tied {
    matrix: Param<Tensor<2>>,
    middle: Linear,
}

impl Model for Tied {
    fn new(device: &Device) -> Self {
        let matrix = Param::from_tensor(Tensor::zeros([8, 6], device));
        Tied { matrix, middle: LinearConfig::new(6, 6).init(device) }
    }

    fn loss(&self, at: At<'_>) -> Tensor<1> {
        let x = at.inputs(at.part() * 4, 4, 8);
        let h = self.middle.forward(x.clone().matmul(self.matrix.val()).tanh()).tanh();
        (h.matmul(self.matrix.val().transpose()) - x).powf_scalar(2.0).mean()
    }
}

#[derive(Module, Debug)]
struct Unused {
    trunk: Linear,
    branches: Vec<Linear>,
}

impl Model for Unused {
    fn new(device: &Device) -> Self {
        let branches = (0..4).map(|_| LinearConfig::new(8, 4).init(device)).collect();
        Unused { trunk: LinearConfig::new(8, 8).init(device), branches }
    }

    fn loss(&self, at: At<'_>) -> Tensor<1> {
        let branch = (at.step * 2 + at.rank * (1 + at.step % 2)) % 3;
        let h = self.trunk.forward(at.inputs(at.part() * 4, 4, 8)).tanh();
        self.branches[branch].forward(h).powf_scalar(2.0).mean()
    }
}

#[derive(Module, Debug)]
struct NoSync {
    first: Linear,
    second: Linear,
}

impl Model for NoSync {
    fn new(device: &Device) -> Self {
        NoSync { first: LinearConfig::new(8, 8).init(device), second: LinearConfig::new(8, 4).init(device) }
    }

    fn loss(&self, at: At<'_>) -> Tensor<1> {
        let x = at.inputs(((at.step * 4 + at.micro) * at.world + at.rank) * 4, 4, 8);
        self.second.forward(self.first.forward(x).tanh()).powf_scalar(2.0).mean()
    }
}

#[derive(Module, Debug)]
struct Recurrent {
    lstm: Lstm,
    head: Linear,
}

impl Model for Recurrent {
    fn new(device: &Device) -> Self {
        Recurrent { lstm: LstmConfig::new(8, 6, true).init(device), head: LinearConfig::new(6, 3).init(device) }
    }

    fn loss(&self, at: At<'_>) -> Tensor<1> {
        let x = at.inputs(at.part() * 4 * 12, 4 * 12, 8).reshape([4, 12, 8]);
        let zeros = || Tensor::<2>::zeros([4, 6], (at.device, DType::F64));
        let (mut hidden, mut cell) = (zeros(), zeros());
        // Burn's own sigmoid computes in f32 on GPUs.
        let sigmoid = |x: Tensor<2>| x.neg().exp().add_scalar(1.0).recip();
        // Burn's own forward collects states in the default dtype, f32.
        for t in 0..12 {
            let x = x.clone().narrow(1, t, 1).squeeze_dim::<2>(1);
            let gate =
                |g: &GateController| g.input_transform.forward(x.clone()) + g.hidden_transform.forward(hidden.clone());
            let forget = sigmoid(gate(self.lstm.forget_gate.as_ref().expect("its gates are not coupled")));
            let input = sigmoid(gate(&self.lstm.input_gate));
            let output = sigmoid(gate(&self.lstm.output_gate));
            cell = forget * cell + input * gate(&self.lstm.cell_gate).tanh();
            hidden = output * cell.clone().tanh();
        }
        (self.head.forward(hidden) - 0.5).powf_scalar(2.0).mean()
    }

    /// Torch stacks the four gates in the rows of one matrix, in the order input, forget, cell, output.
    fn place(path: &str, _: usize, rows: usize) -> Place {
        const TORCH: [&str; 6] = [
            "lstm.weight_ih_l0",
            "lstm.weight_hh_l0",
            "lstm.bias_ih_l0",
            "lstm.bias_hh_l0",
            "head.weight",
            "head.bias",
        ];
        let gate = ["input_gate", "forget_gate", "cell_gate", "output_gate"].iter().position(|g| path.contains(g));
        let salt = match gate {
            None => 4 + usize::from(path.ends_with("bias")),
            Some(_) => 2 * usize::from(path.ends_with("bias")) + usize::from(path.contains("hidden_transform")),
        };
        let (first_row, rows) = gate.map_or((0, rows), |gate| (gate * rows, 4 * rows));
        Place { name: TORCH[salt].into(), salt, first_row, rows }
    }
}

#[derive(Module, Debug)]
struct Attention {
    embedding: Embedding,
    query: Linear,
    key: Linear,
    value: Linear,
    out: Linear,
    norm: LayerNorm,
    head: Linear,
}

impl Model for Attention {
    fn new(device: &Device) -> Self {
        let linear = |outputs| LinearConfig::new(8, outputs).init(device);
        // A bias of the keys would change no output: its gradient is rounding alone.
        let key = LinearConfig::new(8, 8).with_bias(false).init(device);
        Attention {
            embedding: EmbeddingConfig::new(13, 8).init(device),
            query: linear(8),
            key,
            value: linear(8),
            out: linear(8),
            norm: LayerNormConfig::new(8).init(device),
            head: linear(13),
        }
    }

    fn loss(&self, at: At<'_>) -> Tensor<1> {
        let first = at.part() * 28;
        let tokens: Vec<i64> = (first..first + 28).map(|i| ((i * i * 5 + i * 3 + 1) % 13) as i64).collect();
        let tokens = Tensor::<2, Int>::from_data(TensorData::new(tokens, [4, 7]), at.device);
        let x = self.embedding.forward(tokens.clone().narrow(1, 0, 6));
        let heads = |layer: &Linear| layer.forward(x.clone()).reshape([4, 6, 2, 4]).swap_dims(1, 2);
        let scores = heads(&self.query).matmul(heads(&self.key).swap_dims(2, 3)) / 2.0;
        let later = Tensor::<2, Bool>::tril_mask([6, 6], 0, at.device).reshape([1, 1, 6, 6]);
        let weights = softmax(scores.mask_fill(later.expand([4, 2, 6, 6]), -1e9), 3);
        let mixed = weights.matmul(heads(&self.value)).swap_dims(1, 2).reshape([4, 6, 8]);
        let x = self.norm.forward(x.clone() + self.out.forward(mixed));
        let logits = self.head.forward(x).reshape([24, 13]);
        let next = tokens.narrow(1, 1, 6).reshape([24]);
        CrossEntropyLossConfig::new().init(at.device).forward(logits, next)
    }

    fn place(path: &str, n: usize, rows: usize) -> Place {
        let name = path.replace("gamma", "weight").replace("beta", "bias");
        Place { name, salt: n, first_row: 0, rows }
    }
}
