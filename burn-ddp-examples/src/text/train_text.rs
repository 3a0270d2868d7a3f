//! Training of the transformer: the options of `gpt`, the text as loaders, the loss, a generated text.

use std::path::PathBuf;

use anyhow::{Result, ensure};
use burn::module::Module;
use burn::optim::AdamWConfig;
use burn::prelude::*;
use burn::tensor::Distribution;
use burn_ddp::prelude::*;
use clap::Args;

use super::gpt::{Gpt, GptConfig};
use super::windows::{TextBatch, TextBatcher, Windows};
use crate::trainer::training_loop::{Task, Training, loaders};
use crate::trainer::{LoopOptions, Options};

/// Options of `gpt`.
#[derive(Args, Debug, Clone)]
#[command(mut_arg("epochs", |epochs| epochs.default_value("10")), mut_arg("lr", |lr| lr.default_value(LR)))]
pub struct TextArgs {
    /// Options of all trainers.
    #[command(flatten)]
    pub options: Options,

    /// Options of the loop.
    #[command(flatten)]
    pub steps: LoopOptions,

    /// Any file; its last tenth is the test data [default: pages of documentation that come with the program]
    #[arg(long, value_name = "FILE")]
    pub text: Option<PathBuf>,

    /// Blocks of the transformer
    #[arg(long, default_value_t = 2, value_name = "N")]
    pub layers: usize,

    /// Size of an embedding, a multiple of the heads
    #[arg(long, default_value_t = 64, value_name = "N")]
    pub width: usize,

    /// Attention heads of a block
    #[arg(long, default_value_t = 4, value_name = "N")]
    pub heads: usize,

    /// Bytes of an item, and the longest sequence that the transformer reads
    #[arg(long, default_value_t = 64, value_name = "BYTES")]
    pub context: usize,

    /// Probability with which activations are dropped while training, 0–1
    #[arg(long, default_value_t = 0.0, value_name = "SHARE")]
    pub dropout: f64,

    /// Divide large parameters, their gradients and the optimizer's state between the ranks, as FSDP does
    #[arg(long)]
    pub shard: bool,

    /// Start of the text that is generated after the training
    #[arg(long, default_value = "The ", value_name = "TEXT")]
    pub prompt: String,

    /// Bytes that are generated after the training; 0 for none
    #[arg(long, default_value_t = 200, value_name = "BYTES")]
    pub sample: usize,
}

/// Default of `--lr`.
const LR: &str = "0.003";

impl TextArgs {
    /// Refuses values that cannot work, before any rank is started.
    pub fn check(&self) -> Result<()> {
        self.options.check()?;
        self.steps.check()?;
        for (option, value) in [("--layers", self.layers), ("--width", self.width), ("--heads", self.heads)] {
            ensure!(value > 0, "{option} 0: at least 1");
        }
        let &TextArgs { width, heads, context, dropout, .. } = self;
        ensure!(width.is_multiple_of(heads), "--width {width}: not a multiple of --heads {heads}");
        ensure!(context > 0, "--context 0: an item has at least one byte");
        ensure!((0.0..1.0).contains(&dropout), "--dropout {dropout}: a share from 0 to less than 1");
        ensure!(!self.prompt.is_empty() || self.sample == 0, "--prompt: at least one byte, or --sample 0");
        Windows::of_text(self.text.as_deref(), context).map(drop)
    }

    fn config(&self) -> GptConfig {
        GptConfig::new(self.layers, self.width, self.heads, self.context).with_dropout(self.dropout)
    }
}

/// Trains, evaluates after each epoch, reports, and prints a generated text on rank 0. *Collective*: every rank calls
/// it with the same arguments.
///
/// # Errors
///
/// If the text cannot be read, a peer fails, a file cannot be written, or an epoch is shorter than a step.
pub fn run(ddp: &Ddp, args: &TextArgs) -> Result<()> {
    let TextArgs { options, steps, context, .. } = args;
    let device = ddp.device()?.autodiff();
    // Burn's `Linear` may reshape its weight; by default the graph would then keep the whole weight until backward.
    let device = if args.shard { device.gradient_checkpointing() } else { device };
    let text = Windows::of_text(args.text.as_deref(), *context)?;
    steps.fix_step(ddp)?;
    let (train, test) = loaders(ddp, options, TextBatcher, &device, text)?;
    ddp.seed(&device, options.seed);
    let model = args.config().init(&device);
    if ddp.is_main() {
        println!("{} parameters", model.num_params());
    }
    let optimizer = AdamWConfig::new().init();
    let peak_lr = options.lr.unwrap_or_default();
    let sharding = if args.shard { Sharding::Parameters } else { Sharding::Off };
    let training = Training { ddp, options, steps, task: Text, model, optimizer, sharding, train, test, peak_lr };
    let Some(model) = training.run()? else { return Ok(()) };
    // The forward of a sharded model is collective: every rank generates the text.
    if (ddp.is_main() || args.shard) && args.sample > 0 {
        let device = ddp.device()?;
        device.seed(options.seed);
        let draw = || Some(Tensor::<1>::random([1], Distribution::Uniform(0.0, 1.0), &device).into_scalar::<f64>());
        let text = model.valid().generate(args.prompt.as_bytes(), args.sample, &device, draw);
        if ddp.is_main() {
            println!("\n{}{}", args.prompt, String::from_utf8_lossy(&text));
        }
    }
    Ok(())
}

/// Prediction of each byte of a window. Items are bytes here.
struct Text;

impl Task for Text {
    type Model = Gpt;
    type Batch = TextBatch;
    const ITEMS: &str = "bytes";

    fn loss(&self, model: &Gpt, batch: TextBatch, _: usize) -> (Tensor<1>, usize) {
        let [windows, context] = batch.next.dims();
        (model.loss(batch.bytes, batch.next), windows * context)
    }

    fn correct(&self, model: &Gpt, batch: TextBatch) -> (Tensor<1, Int>, usize) {
        let [windows, context] = batch.next.dims();
        let best = model.forward(batch.bytes).argmax(2).reshape([windows, context]);
        (best.equal(batch.next).int().sum(), windows * context)
    }
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory, Parser};

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: TextArgs,
    }

    fn parse(line: &str) -> Result<TextArgs> {
        let args = Line::try_parse_from(std::iter::once("gpt").chain(line.split_whitespace()))?.args;
        args.check()?;
        Ok(args)
    }

    #[test]
    fn clap_accepts_the_definition_and_the_defaults_are_valid() {
        Line::command().debug_assert();
        assert_eq!(parse("").unwrap().options.epochs, 10);
    }

    #[test]
    fn nonsense_is_refused_by_the_name_of_its_option() {
        for line in [
            "--batch-size 0",
            "--accumulate 0",
            "--layers 0",
            "--heads 0",
            "--width 0",
            "--width 65",
            "--context 0",
            "--context 100000000",
            "--dropout 1",
            "--text /no/such/file",
            "--prompt=",
            "--save /",
        ] {
            let error = format!("{:#}", parse(line).unwrap_err());
            let option = line.split([' ', '=']).next().unwrap();
            assert!(error.contains(option), "{line}: {error}");
        }
    }
}
