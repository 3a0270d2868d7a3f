//! Training of the MNIST network: the options of `mnist` and `mnist_learner`, the data as loaders, the loss.

use anyhow::{Result, ensure};
use burn::optim::AdamConfig;
use burn::prelude::*;
use burn_ddp::Precision;
use burn_ddp::data::{EvalLoader, ShardedLoader};
use burn_ddp::prelude::*;
use clap::Args;

use super::digit_source::{self, Data};
use super::{Cnn, CnnConfig, MnistBatch, MnistBatcher};
use crate::trainer::options::not_built;
use crate::trainer::training_loop::{Task, Training, loaders};
use crate::trainer::{LoopOptions, Options};

/// Options of both MNIST trainers.
#[derive(Args, Debug, Clone)]
#[command(mut_arg("epochs", |epochs| epochs.default_value("6")), mut_arg("lr", |lr| lr.default_value(LR)))]
pub struct DigitArgs {
    /// Options of all trainers.
    #[command(flatten)]
    pub options: Options,

    /// No dropout: runs with equal ranks × batch size, such as 1 × 32 and 2 × 16, then learn alike
    #[arg(long)]
    pub no_dropout: bool,

    /// `sample`: 5,000 digits that come with the program. `full`: MNIST, downloaded by Burn once (needs a build with
    /// `--features download`). Or a folder with MNIST's own four files, plain or .gz
    #[arg(long, default_value = "sample", value_name = "sample|full|DIR")]
    pub data: Data,
}

/// Default of `--lr`.
const LR: &str = "0.001";

impl DigitArgs {
    /// Refuses values that cannot work, before any rank is started.
    pub fn check(&self) -> Result<()> {
        self.options.check()?;
        ensure!(self.data != Data::Full || cfg!(feature = "download"), not_built("--data full", "download"));
        if let Data::Dir(dir) = &self.data {
            ensure!(
                dir.is_dir(),
                "--data {}: there is no such folder (`sample` is part of the program, `full` is downloaded)",
                dir.display()
            );
        }
        Ok(())
    }

    /// Highest learning rate.
    pub(super) fn lr(&self) -> f64 {
        self.options.lr.unwrap_or_default()
    }

    /// Loaders of the training data, whose batches are made on `device`, and of the test data. *Collective*.
    pub(super) fn loaders(
        &self,
        ddp: &Ddp,
        device: &Device,
    ) -> Result<(ShardedLoader<MnistBatch>, EvalLoader<MnistBatch>)> {
        loaders(ddp, &self.options, MnistBatcher, device, digit_source::load(ddp, &self.data)?)
    }

    /// Network with random weights.
    pub(super) fn model(&self, device: &Device) -> Cnn {
        CnnConfig::new().with_dropout(!self.no_dropout).init(device)
    }
}

/// Trains, evaluates after each epoch and reports. *Collective*: every rank calls it with the same arguments.
///
/// # Errors
///
/// If data cannot be read, a peer fails, or a file cannot be written.
pub fn run(ddp: &Ddp, args: &DigitArgs, steps: &LoopOptions) -> Result<()> {
    let device = ddp.device()?.autodiff();
    steps.fix_step(ddp)?;
    let (train, test) = args.loaders(ddp, &device)?;
    ddp.seed(&device, args.options.seed);
    let model = args.model(&device);
    let optimizer = AdamConfig::new().init();
    let peak_lr = args.lr();
    Training {
        ddp,
        options: &args.options,
        steps,
        task: Digits { precision: steps.precision },
        model,
        optimizer,
        sharding: Sharding::Off,
        train,
        test,
        peak_lr,
    }
    .run()
    .map(drop)
}

struct Digits {
    precision: Precision,
}

impl Digits {
    fn cast(&self, batch: MnistBatch) -> MnistBatch {
        MnistBatch { images: batch.images.cast(self.precision.dtype()), ..batch }
    }
}

impl Task for Digits {
    type Model = Cnn;
    type Batch = MnistBatch;

    fn loss(&self, model: &Cnn, batch: MnistBatch, _: usize) -> (Tensor<1>, usize) {
        let [items] = batch.labels.dims();
        (model.loss(self.cast(batch)), items)
    }

    fn correct(&self, model: &Cnn, batch: MnistBatch) -> (Tensor<1, Int>, usize) {
        let [items] = batch.labels.dims();
        (model.correct(self.cast(batch)), items)
    }
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory, Parser};

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: DigitArgs,
        #[command(flatten)]
        steps: LoopOptions,
    }

    fn parse(line: &str) -> Result<Line> {
        let line = Line::try_parse_from(std::iter::once("mnist").chain(line.split_whitespace()))?;
        line.args.check().and_then(|()| line.steps.check())?;
        Ok(line)
    }

    #[test]
    fn clap_accepts_the_definition() {
        Line::command().debug_assert();
    }

    #[test]
    fn the_defaults_are_valid() {
        let Line { args, steps } = parse("").unwrap();
        assert_eq!((args.options.epochs, args.options.batch_size, args.lr(), steps.accumulate), (6, 16, 1e-3, 1));
        parse("--data sample --nproc 3 --summary s.json").unwrap();
        assert_eq!(parse("--data full").is_ok(), cfg!(feature = "download"));
    }

    #[test]
    fn nonsense_is_refused_by_the_name_of_its_option() {
        for line in [
            "--nproc 0",
            "--epochs 0",
            "--batch-size 0",
            "--accumulate 0",
            "--lr 0",
            "--lr -1",
            "--lr nan",
            "--lr inf",
            "--data /no/such/folder",
            "--summary /no/such/folder/s.json",
            "--save /",
            "--seed -1",
            "--num-workers x",
            "--precision f64",
        ] {
            let error = parse(line).err().unwrap().to_string();
            let option = line.split_whitespace().next().unwrap();
            assert!(error.contains(option), "{line}: {error}");
        }
    }
}
