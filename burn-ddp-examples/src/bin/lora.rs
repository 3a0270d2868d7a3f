//! Fine-tuning with LoRA: only the small factors are trained, and only their gradients are reduced.
//!
//! ```sh
//! cargo run --bin lora   # two ranks
//! ```
//!
//! In torch: `DDP(get_peft_model(model, LoraConfig(r=4, lora_alpha=8)))`.
#![forbid(unsafe_code)]

use burn::module::Lora;
use burn::nn::{Linear, LinearConfig, Relu, loss::CrossEntropyLossConfig};
use burn::optim::AdamConfig;
use burn::prelude::*;
use burn_ddp::prelude::*;
use burn_ddp_examples::mnist::{MnistBatcher, MnistDataset, Split};

#[derive(Module, Debug)]
struct Mlp {
    hidden: Linear,
    output: Linear,
    activation: Relu,
}

impl Mlp {
    fn forward(&self, images: Tensor<4>) -> Tensor<2> {
        self.output.forward(self.activation.forward(self.hidden.forward(images.flatten(1, 3))))
    }
}

fn main() -> anyhow::Result<()> {
    burn_ddp_examples::help(include_str!("lora.rs"));
    burn_ddp_examples::log_to_stderr();
    Ddp::launch(2, |ddp| {
        train(&ddp)?;
        Ok(ddp.finish()?)
    })
}

fn train(ddp: &Ddp) -> anyhow::Result<()> {
    let device = ddp.device()?.autodiff();
    ddp.seed(&device, 42);
    // A trained model would be loaded here: before `apply_lora`, which comes before `wrap`.
    let model = Mlp {
        hidden: LinearConfig::new(28 * 28, 128).init(&device),
        output: LinearConfig::new(128, 10).init(&device),
        activation: Relu::new(),
    };
    let whole = model.num_params();
    let model = model.apply_lora(Lora::new(4, 8.0)); // freezes what was there and adds factors of rank 4
    let factors = model.num_params() - whole;
    let mut model = ddp.wrap(model)?;
    let mut optim = AdamConfig::new().init();
    let train = ddp
        .loader(MnistBatcher)
        .batch_size(32)
        .shuffle(42)
        .set_device(device.clone())
        .build(MnistDataset::sample(Split::Train)?)?;

    for epoch in train.epochs(0..2) {
        let (number, steps, mut sum) = (epoch.number(), epoch.len(), 0.0);
        for batch in epoch {
            let batch = batch?;
            let loss = CrossEntropyLossConfig::new().init(&device).forward(model.forward(batch.images), batch.labels);
            sum += loss.clone().into_scalar::<f64>();
            let Some(grads) = ddp.backward(&loss, &model)? else { continue };
            model = optim.step(1e-2, model, grads);
        }
        let loss = ddp.mean(sum / steps as f64)?;
        if ddp.is_main() {
            println!("epoch {number}: loss {loss:.4}");
        }
    }

    let stats = ddp.telemetry().stats();
    let per_step = stats.bytes / stats.steps;
    if ddp.is_main() {
        println!("{whole} parameters are frozen, {factors} are trained: {per_step} bytes of gradients per step");
    }
    println!("rank {}: parameters {}", ddp.rank(), &param_hash(&model)?[..16]);
    Ok(())
}
