//! Models that train sharded and not, to be compared.

use anyhow::{Result, bail};
use burn::module::Module;
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig, Lstm, LstmConfig};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamConfig, AdamWConfig, ModuleOptimizer, SgdConfig};
use burn::prelude::*;
use burn::tensor::DType;
use burn_ddp::Stats;
use burn_ddp::prelude::*;
use burn_ddp_examples::text::gpt::{Gpt, GptConfig};

use crate::{Fill, Mlp, rows, values};

/// Names of the models that train with the same bits sharded and not, for [`train`]; `deep-gpt` does so, too.
/// `long-lstm` does not.
pub const MODELS: [&str; 4] = ["mlp", "lstm", "tied", "gpt"];

/// Names of the optimizers, for [`train`].
pub const OPTIMIZERS: [&str; 4] = ["sgd", "momentum", "adam", "adamw"];

/// A trained model.
#[derive(Debug)]
pub struct Trained {
    /// Its hash.
    pub hash: String,
    /// Its whole parameters.
    pub values: Vec<Vec<f64>>,
    /// Counters of the last step's communication.
    pub last_step: Stats,
}

/// Trains a new model. *Collective*.
///
/// # Errors
///
/// An unknown name, or an error of burn-ddp.
pub fn train(ddp: &Ddp, model: &str, optim: &str, steps: usize, config: &WrapConfig) -> Result<Trained> {
    let device = ddp.device()?.autodiff();
    let optim = match optim {
        "sgd" => SgdConfig::new().init(),
        "momentum" => SgdConfig::new().with_momentum(Some(MomentumConfig::new())).init(),
        "adam" => AdamConfig::new().init(),
        "adamw" => AdamWConfig::new().init(),
        other => bail!("no optimizer {other:?}"),
    };
    // Matrices whose numbers of rows do not all divide evenly by two, three and four ranks.
    let gpt = GptConfig::new(1, 12, 2, 7);
    match model {
        "mlp" => run(ddp, Mlp::new(&device), optim, steps, config),
        "lstm" => run(ddp, Recurrent::new(5, &device), optim, steps, config),
        "long-lstm" => run(ddp, Recurrent::new(40, &device), optim, steps, config),
        "deep-gpt" => run(ddp, GptConfig::new(6, 12, 2, 7).init(&device), optim, steps, config),
        "tied" => run(ddp, Tied::new(&device), optim, steps, config),
        "gpt" => run(ddp, gpt.init(&device), optim, steps, config),
        other => bail!("no model {other:?}"),
    }
}

fn run<M: Model>(ddp: &Ddp, model: M, optim: ModuleOptimizer, steps: usize, config: &WrapConfig) -> Result<Trained> {
    let device = ddp.device()?.autodiff();
    let mut model = ddp.wrap_with(model.map(&mut Fill(ddp.rank() as f32)), config)?;
    let mut optim = ddp.optimizer(optim, &model)?;
    for step in 0..steps {
        let loss = model.loss_of(ddp.rank(), step, &device);
        let grads = ddp.backward(&loss, &model)?.expect("averages");
        model = optim.step(0.01, model, grads);
    }
    let last_step = ddp.telemetry().last_step();
    Ok(Trained { hash: param_hash(&model)?, values: values(&ddp.unwrap(model)?), last_step })
}

trait Model: Module + 'static {
    /// Loss of this rank's batch of a step.
    fn loss_of(&self, rank: usize, step: usize, device: &Device) -> Tensor<1>;
}

fn inputs(rank: usize, step: usize, columns: usize, device: &Device) -> Tensor<2> {
    rows(4 * (step * 8 + rank), 4, columns, 1, DType::F32, device)
}

/// Numbers below `below`, `[4, len]`.
fn symbols(rank: usize, step: usize, len: usize, below: usize, device: &Device) -> Tensor<2, Int> {
    let symbol = |i: usize| ((7 * i + 3 * rank + 5 * step + i * i * (rank + 1)) % below) as i32;
    Tensor::<1, Int>::from_ints((0..4 * len).map(symbol).collect::<Vec<_>>().as_slice(), device).reshape([4, len])
}

impl Model for Mlp {
    fn loss_of(&self, rank: usize, step: usize, device: &Device) -> Tensor<1> {
        self.forward(inputs(rank, step, 6, device)).powf_scalar(2.0).mean()
    }
}

/// An LSTM over sequences of so many steps, which reads its eight matrices in each step.
#[derive(Module, Debug)]
struct Recurrent {
    steps: usize,
    lstm: Lstm,
    head: Linear,
}

impl Recurrent {
    fn new(steps: usize, device: &Device) -> Self {
        let (lstm, head) = (LstmConfig::new(6, 7, false).init(device), LinearConfig::new(7, 3).init(device));
        Recurrent { steps, lstm, head }
    }
}

impl Model for Recurrent {
    fn loss_of(&self, rank: usize, step: usize, device: &Device) -> Tensor<1> {
        let sequence = inputs(rank, step, self.steps * 6, device).reshape([4, self.steps, 6]);
        let (_, last) = self.lstm.forward(sequence, None);
        self.head.forward(last.hidden).powf_scalar(2.0).mean()
    }
}

/// A model whose output layer reads the embedding again (weight tying).
#[derive(Module, Debug)]
struct Tied {
    symbols: Embedding,
    inner: Linear,
}

impl Tied {
    fn new(device: &Device) -> Self {
        let inner = LinearConfig::new(6, 6).with_bias(false).init(device);
        Tied { symbols: EmbeddingConfig::new(11, 6).init(device), inner }
    }
}

impl Model for Tied {
    fn loss_of(&self, rank: usize, step: usize, device: &Device) -> Tensor<1> {
        let x = self.inner.forward(self.symbols.forward(symbols(rank, step, 5, 11, device))).tanh();
        x.matmul(self.symbols.weight.val().transpose().unsqueeze()).powf_scalar(2.0).mean()
    }
}

impl Model for Gpt {
    fn loss_of(&self, rank: usize, step: usize, device: &Device) -> Tensor<1> {
        self.loss(symbols(rank, step, 7, 256, device), symbols(rank, step + 1, 7, 256, device))
    }
}
