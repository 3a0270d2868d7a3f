//! Curves of losses: models that compute in a half learn as those in f32 do.

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::Dataset;
use burn::module::{Module, ModuleMapper, Param};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{BatchNorm, Embedding, EmbeddingConfig, Linear, LinearConfig, Lstm, LstmConfig};
use burn::optim::AdamConfig;
use burn::prelude::*;
use burn::tensor::DType;
use burn_ddp::prelude::*;
use burn_ddp::{LossScaling, Precision};
use burn_ddp_examples::mnist::{Cnn, CnnConfig, MnistBatch, MnistBatcher, MnistDataset, Split};
use burn_ddp_examples::text::gpt::{Gpt, GptConfig};
use burn_ddp_examples::text::windows::{TextBatch, TextBatcher, Windows};
use burn_ddp_examples::vision::resnet::Depth;
use burn_ddp_examples::vision::{Classifier, ResNet, ResNetConfig};

const CONTEXT: usize = 32;
const BYTES: usize = 256;

/// The type of everything: of forward and backward with parameters in f32, or of parameters, too.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Mixed(Precision),
    /// All of a plain model in bf16, as Burn trains it.
    AllBf16,
}

impl Kind {
    fn dtype(self) -> DType {
        match self {
            Kind::Mixed(precision) => precision.dtype().into(),
            Kind::AllBf16 => DType::BF16,
        }
    }
}

/// A model and its data.
trait Task: Module + 'static {
    fn init(device: &Device) -> Self;

    /// Mean loss of the `nth` batch.
    fn loss(&self, data: &Data, nth: usize, dtype: DType, device: &Device) -> Tensor<1>;

    /// True for the path of a parameter that is read in f32.
    fn is_full(_: &str) -> bool {
        false
    }

    /// True if Burn can train it in bf16 alone.
    const PLAIN: bool = true;
}

struct Data {
    digits: MnistDataset,
    text: Windows,
    seed: usize,
}

impl Data {
    fn new(seed: usize) -> Self {
        let [text, _] = Windows::of_text(None, CONTEXT).unwrap();
        Data { digits: MnistDataset::sample(Split::Train).unwrap(), text, seed }
    }

    fn items<I>(&self, data: &impl Dataset<I>, nth: usize, count: usize) -> Vec<I> {
        let at = |i: usize| (nth * count + i) * 7919 + self.seed * 104_729;
        (0..count).map(|i| data.get(at(i) % data.len()).unwrap()).collect()
    }

    fn digits(&self, nth: usize, device: &Device) -> MnistBatch {
        MnistBatcher.batch(self.items(&self.digits, nth, 16), device)
    }

    fn text(&self, nth: usize, device: &Device) -> TextBatch {
        TextBatcher.batch(self.items(&self.text, nth, 8), device)
    }
}

impl Task for Cnn {
    fn init(device: &Device) -> Self {
        CnnConfig::new().with_dropout(false).init(device)
    }

    fn loss(&self, data: &Data, nth: usize, dtype: DType, device: &Device) -> Tensor<1> {
        let MnistBatch { images, labels } = data.digits(nth, device);
        Cnn::loss(self, MnistBatch { images: images.cast(dtype), labels })
    }
}

impl Task for ResNet<BatchNorm> {
    fn init(device: &Device) -> Self {
        ResNetConfig { depth: Depth::D18, classes: 10, side: 28, width: 4, zero_init_residual: false }.init(device)
    }

    fn loss(&self, data: &Data, nth: usize, dtype: DType, device: &Device) -> Tensor<1> {
        let MnistBatch { images, labels } = data.digits(nth, device);
        let logits = self.forward(images.repeat_dim(1, 3).cast(dtype)).cast(DType::F32);
        CrossEntropyLossConfig::new().init(device).forward(logits, labels)
    }

    fn is_full(path: &str) -> bool {
        path.split('.').any(|module| module == "norm")
    }

    /// The example's layers cast to f32.
    const PLAIN: bool = false;
}

impl Task for Gpt {
    fn init(device: &Device) -> Self {
        GptConfig::new(2, 32, 4, CONTEXT).init(device)
    }

    fn loss(&self, data: &Data, nth: usize, _: DType, device: &Device) -> Tensor<1> {
        let TextBatch { bytes, next } = data.text(nth, device);
        Gpt::loss(self, bytes, next)
    }
}

/// Predicts a byte from the one before it; the embedding is the last layer, too.
#[derive(Module, Debug)]
struct Tied {
    embedding: Embedding,
    inner: Linear,
}

fn cross_entropy(logits: Tensor<3>, next: Tensor<2, Int>) -> Tensor<1> {
    let ([windows, len], device) = (next.dims(), next.device());
    let logits = logits.reshape([windows * len, BYTES]).cast(DType::F32);
    CrossEntropyLossConfig::new().init(&device).forward(logits, next.reshape([windows * len]))
}

impl Task for Tied {
    fn init(device: &Device) -> Self {
        Tied {
            embedding: EmbeddingConfig::new(BYTES, 32)
                .with_initializer(burn::nn::Initializer::Normal { mean: 0.0, std: 0.3 })
                .init(device),
            inner: LinearConfig::new(32, 32).init(device),
        }
    }

    fn loss(&self, data: &Data, nth: usize, _: DType, device: &Device) -> Tensor<1> {
        let TextBatch { bytes, next } = data.text(nth, device);
        let x = self.inner.forward(self.embedding.forward(bytes)).tanh();
        cross_entropy(x.matmul(self.embedding.weight.val().transpose().unsqueeze::<3>()), next)
    }
}

#[derive(Module, Debug)]
struct Recurrent {
    embedding: Embedding,
    lstm: Lstm,
    head: Linear,
}

impl Task for Recurrent {
    fn init(device: &Device) -> Self {
        Recurrent {
            embedding: EmbeddingConfig::new(BYTES, 32).init(device),
            lstm: LstmConfig::new(32, 32, true).init(device),
            head: LinearConfig::new(32, BYTES).init(device),
        }
    }

    fn loss(&self, data: &Data, nth: usize, dtype: DType, device: &Device) -> Tensor<1> {
        let TextBatch { bytes, next } = data.text(nth, device);
        let x = self.lstm.forward(self.embedding.forward(bytes).cast(DType::F32), None).0;
        cross_entropy(self.head.forward(x.cast(dtype)), next)
    }

    fn is_full(path: &str) -> bool {
        path.starts_with("lstm.")
    }

    const PLAIN: bool = false;
}

struct ToBf16;

impl ModuleMapper for ToBf16 {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|old| {
            let new = Tensor::from_inner(old.clone().inner().cast(DType::BF16));
            if old.is_require_grad() { new.require_grad() } else { new }
        })
    }
}

/// Mean losses over sixths of a training.
fn curve<T: Task>(kind: Kind, seed: usize, steps: usize) -> [f64; 6] {
    let curves = Ddp::spawn(1, |ddp| {
        let device = ddp.device()?.autodiff();
        device.seed(seed as u64);
        let model = T::init(&device);
        let config = match kind {
            Kind::Mixed(precision) => {
                // One that loses no early step, of which there are few here.
                let scaling = LossScaling { initial_scale_power: 10, loss_scale_window: 100, ..LossScaling::default() };
                let config = WrapConfig::new().with_compute_dtype(precision);
                let config = if precision == Precision::F16 { config.with_loss_scaling(scaling) } else { config };
                config.with_full_precision_where(&model, T::is_full)?
            }
            Kind::AllBf16 => WrapConfig::new(),
        };
        let model = if kind == Kind::AllBf16 { model.map(&mut ToBf16) } else { model };
        let mut model = ddp.wrap_with(model, &config)?;
        let mut optim = ddp.optimizer(AdamConfig::new().init(), &model)?;
        let data = Data::new(seed);
        let mut sums = [0.0; 6];
        for step in 0..steps {
            let loss = model.loss(&data, step, kind.dtype(), &device);
            sums[6 * step / steps] += loss.clone().into_scalar::<f64>();
            if let Some(grads) = ddp.backward(&loss, &model)? {
                model = optim.step(2e-3, model, grads);
            }
        }
        let skipped = ddp.telemetry().stats().skipped;
        if skipped > 0 {
            println!("  {skipped} steps skipped by {kind:?}");
        }
        Ok(sums.map(|sum| sum * 6.0 / steps as f64))
    });
    curves.unwrap()[0]
}

/// Compares the last three sixths of curves, as means over seeds.
fn compare<T: Task>(name: &str, seeds: usize, steps: usize) {
    let curves = |kind| (0..seeds).map(|seed| curve::<T>(kind, seed, steps)).collect::<Vec<_>>();
    let mean = |of: &[[f64; 6]], sixth: usize| of.iter().map(|curve| curve[sixth]).sum::<f64>() / of.len() as f64;
    let shown = |of: &[[f64; 6]]| (0..6).map(|sixth| format!("{:.3}", mean(of, sixth))).collect::<Vec<_>>().join(" ");
    let whole = curves(Kind::Mixed(Precision::F32));
    println!("{name:<16} f32        {}", shown(&whole));
    let mut kinds = vec![(Kind::Mixed(Precision::Bf16), Some(0.02)), (Kind::Mixed(Precision::F16), Some(0.05))];
    kinds.extend(T::PLAIN.then_some((Kind::AllBf16, None)));
    for (kind, bound) in kinds {
        let halves = curves(kind);
        println!("{name:<16} {:<10} {}", format!("{kind:?}").replace("Mixed", ""), shown(&halves));
        for sixth in 3..6 {
            let (f32, half) = (mean(&whole, sixth), mean(&halves, sixth));
            let of_seeds = whole.iter().map(|curve| curve[sixth]);
            let spread = of_seeds.clone().fold(f64::MIN, f64::max) - of_seeds.fold(f64::MAX, f64::min);
            if let Some(bound) = bound {
                let bound = (bound * f32).max(spread);
                assert!((half - f32).abs() <= bound, "{name} {kind:?} sixth {sixth}: {half}, f32 {f32}, bound {bound}");
            }
        }
    }
}

#[test]
fn a_transformer_learns_in_halves() {
    compare::<Gpt>("gpt", 1, 48);
}

/// `cargo test --test mixed_precision -- --ignored --nocapture curves`: 20 minutes.
#[test]
#[ignore = "minutes"]
fn curves_of_five_models() {
    compare::<Cnn>("cnn", 3, 300);
    compare::<ResNet<BatchNorm>>("resnet", 3, 300);
    compare::<Gpt>("gpt", 3, 300);
    compare::<Tied>("tied embedding", 3, 300);
    compare::<Recurrent>("lstm", 3, 300);
}
