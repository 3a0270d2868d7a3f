//! Training of a network for pictures: the options of `resnet` and `alexnet`, the data as loaders, the loss.

use std::marker::PhantomData;

use anyhow::{Result, ensure};
use burn::module::Module;
use burn::nn::loss::{CrossEntropyLoss, CrossEntropyLossConfig};
use burn::optim::SgdConfig;
use burn::optim::decay::WeightDecayConfig;
use burn::optim::momentum::MomentumConfig;
use burn::prelude::*;
use burn_ddp::{Ddp, Sharding};
use clap::Args;

use super::augment::Augment;
use super::picture::{Batch, Channels, PictureBatcher};
use super::picture_source::{self, PictureOptions, Source};
use crate::trainer::loss_and_accuracy::{recognised, widened};
use crate::trainer::training_loop::{Task, Training, loaders};
use crate::trainer::{LoopOptions, Options};

/// Options of the trainers for pictures.
#[derive(Args, Debug, Clone)]
#[command(mut_arg("lr", |lr| lr.help("Highest learning rate [default: proportional to the pictures of a step]")))]
pub struct PictureArgs {
    /// Options of all trainers.
    #[command(flatten)]
    pub options: Options,

    /// Options of the loop.
    #[command(flatten)]
    pub steps: LoopOptions,

    /// Options that choose the pictures.
    #[command(flatten)]
    pub pictures: PictureOptions,

    /// Do not crop and mirror at random
    #[arg(long)]
    pub no_augment: bool,

    /// Share of each weight that is added to its gradient
    #[arg(long, default_value_t = 1e-4, value_name = "RATE")]
    pub weight_decay: f32,

    /// Share of the target that is spread over all classes, 0–1
    #[arg(long, default_value_t = 0.0, value_name = "SHARE")]
    pub label_smoothing: f32,
}

impl PictureArgs {
    /// Refuses values that cannot work, before any rank is started.
    pub fn check(&self) -> Result<()> {
        self.options.check()?;
        self.steps.check()?;
        let decay = self.weight_decay;
        ensure!(decay.is_finite() && decay >= 0.0, "--weight-decay {decay}: zero or a positive number");
        let smoothing = self.label_smoothing;
        ensure!((0.0..1.0).contains(&smoothing), "--label-smoothing {smoothing}: a share from 0 to less than 1");
        self.pictures.check()
    }
}

/// A network that classifies pictures.
pub trait Classifier: Module + 'static {
    /// `[items, 3, side, side]` → `[items, classes]`, unnormalised log-probabilities of the classes.
    fn forward(&self, images: Tensor<4>) -> Tensor<2>;
}

/// Items of a step for which the default of `--lr` is `lr_of_256`; it is proportional to them (Goyal et al. 2017).
const ITEMS: f64 = 256.0;

/// Trains the network that `init` makes for a number of classes, evaluates after each epoch and reports. *Collective*:
/// every rank calls it with the same arguments.
///
/// SGD with momentum 0.9, as in the papers. `lr_of_256` is the highest learning rate for steps of 256 items; `--lr`
/// overrides it.
///
/// # Errors
///
/// If data cannot be read, a peer fails, a file cannot be written, or an epoch is shorter than a step.
pub fn run<M: Classifier>(
    ddp: &Ddp,
    args: &PictureArgs,
    lr_of_256: f64,
    init: impl FnOnce(usize, &Device) -> M,
) -> Result<()> {
    let PictureArgs { options, steps, pictures, .. } = args;
    let Source { data, classes, channels } = picture_source::load(ddp, pictures)?;
    let device = ddp.device()?;
    steps.fix_step(ddp)?;
    let (train, test) = loaders(ddp, options, PictureBatcher, &device, data)?;
    let items = train.items_per_step() as f64;

    let autodiff = device.clone().autodiff();
    ddp.seed(&autodiff, options.seed);
    let model = init(classes, &autodiff);
    let optimizer = SgdConfig::new()
        .with_momentum(Some(MomentumConfig::new().with_momentum(0.9).with_dampening(0.0)))
        .with_weight_decay(Some(WeightDecayConfig::new(args.weight_decay)))
        .init();
    let criterion = CrossEntropyLossConfig::new().with_smoothing(Some(args.label_smoothing)).init(&autodiff);
    let task = Pictures { args, channels, criterion, device, autodiff, model: PhantomData };
    let peak_lr = options.lr.unwrap_or(lr_of_256 * items / ITEMS);
    Training { ddp, options, steps, task, model, optimizer, sharding: Sharding::Off, train, test, peak_lr }
        .run()
        .map(drop)
}

struct Pictures<'a, M> {
    args: &'a PictureArgs,
    channels: Channels,
    criterion: CrossEntropyLoss,
    /// Device of the evaluation.
    device: Device,
    /// Device of the training.
    autodiff: Device,
    model: PhantomData<fn() -> M>,
}

impl<M> Pictures<'_, M> {
    fn cast(&self, images: Tensor<4>) -> Tensor<4> {
        images.cast(self.args.steps.precision.dtype())
    }
}

impl<M: Classifier> Task for Pictures<'_, M> {
    type Model = M;
    type Batch = Batch;

    /// Batch normalisations, whose running statistics are f32.
    fn in_full_precision(path: &str) -> bool {
        path.split('.').any(|module| module == "norm")
    }

    fn loss(&self, model: &M, batch: Batch, epoch: usize) -> (Tensor<1>, usize) {
        let augment = (!self.args.no_augment).then_some(Augment { seed: self.args.options.seed, epoch });
        let images = batch.images(self.args.pictures.side(), &self.channels, augment.as_ref(), &self.autodiff);
        let logits = widened(model.forward(self.cast(images)));
        (self.criterion.forward(logits, batch.labels(&self.autodiff)), batch.items())
    }

    fn correct(&self, model: &M, batch: Batch) -> (Tensor<1, Int>, usize) {
        let images = batch.images(self.args.pictures.side(), &self.channels, None, &self.device);
        let logits = model.forward(self.cast(images));
        (recognised(logits, batch.labels(&self.device)), batch.items())
    }
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory, Parser};

    use super::*;
    #[cfg(feature = "images")]
    use crate::vision::picture_source::Data;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: PictureArgs,
    }

    fn parse(line: &str) -> Result<PictureArgs> {
        let args = Line::try_parse_from(std::iter::once("resnet").chain(line.split_whitespace()))?.args;
        args.check()?;
        Ok(args)
    }

    #[test]
    fn clap_accepts_the_definition() {
        Line::command().debug_assert();
    }

    #[test]
    fn where_pictures_come_from_decides_their_size() {
        assert_eq!(parse("").unwrap().pictures.side(), 32);
        #[cfg(feature = "images")]
        {
            let folder = parse("--data folder:/").unwrap().pictures;
            assert_eq!((folder.side(), folder.data), (224, Data::Folder("/".into())));
            assert_eq!(parse("--data folder:/ --image-size 64").unwrap().pictures.side(), 64);
        }
    }

    #[test]
    fn nonsense_is_refused_by_the_name_of_its_option() {
        for line in [
            "--nproc 0",
            "--epochs 0",
            "--batch-size 0",
            "--accumulate 0",
            "--limit 0",
            "--classes 1",
            "--image-size 8",
            "--image-size 64 --data cifar10",
            "--lr -1",
            "--lr nan",
            "--weight-decay -1",
            "--label-smoothing 1",
            "--label-smoothing -0.1",
            "--schedule linear",
            "--data folder",
            "--data imagenet",
            "--data folder:/no/such/folder",
            "--summary /no/such/folder/s.json",
            "--save /",
        ] {
            let error = parse(line).unwrap_err().to_string();
            let option = line.split_whitespace().next().unwrap();
            assert!(error.contains(option), "{line}: {error}");
        }
    }

    #[test]
    fn what_is_not_built_in_is_refused_by_the_name_of_its_feature() {
        for (line, built, feature) in [
            ("--data cifar10", cfg!(feature = "download"), "--features download"),
            ("--data folder:/", cfg!(feature = "images"), "--features images"),
        ] {
            let parsed = parse(line);
            assert_eq!(parsed.is_ok(), built);
            if let Err(error) = parsed {
                assert!(error.to_string().contains(feature), "{error}");
            }
        }
    }
}
