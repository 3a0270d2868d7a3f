//! What the command lines of the trainers for pictures have in common.

use std::path::PathBuf;
use std::str::FromStr;

use anyhow::{Result, ensure};

use super::source::CIFAR10_SIDE;
use crate::cli::check_writable;
use crate::schedule::Schedule;

/// The options of both trainers.
#[derive(clap::Args, Debug, Clone)]
pub struct Args {
    /// Ranks to start on this machine; under a launcher the launcher decides [default: 2]
    #[arg(long, value_name = "N")]
    pub nproc: Option<usize>,

    /// `synthetic`: computed pictures. `cifar10`: CIFAR-10, downloaded by Burn once (needs `--features download`). `folder:DIR`:
    /// pictures (.png, .jpg) in DIR/train/CLASS and DIR/test/CLASS, or in DIR/CLASS, where every fifth is for the test
    #[arg(long, default_value = "synthetic", value_name = "synthetic|cifar10|folder:DIR")]
    pub data: Data,

    /// Rows and columns of a picture; those of a folder are resized and cropped [default: 32, of a folder 224]
    #[arg(long, value_name = "PIXELS")]
    pub image_size: Option<usize>,

    /// Classes of the synthetic pictures [default: 10]; other pictures must have as many
    #[arg(long, value_name = "N")]
    pub classes: Option<usize>,

    /// Use at most so many pictures to train, and at most so many to test
    #[arg(long, value_name = "N")]
    pub limit: Option<usize>,

    /// Do not crop and mirror at random
    #[arg(long)]
    pub no_augment: bool,

    /// Passes over the training data
    #[arg(long, default_value_t = 5, value_name = "N")]
    pub epochs: usize,

    /// Pictures per backward of each rank
    #[arg(long, default_value_t = 16, value_name = "ITEMS")]
    pub batch_size: usize,

    /// Backwards per step of the optimizer; those that make no whole step at the end of an epoch are left out
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub accumulate: usize,

    /// Highest learning rate; it rises during the first tenth of all steps [default: proportional to the pictures of a step]
    #[arg(long, value_name = "RATE", allow_negative_numbers = true)]
    pub lr: Option<f64>,

    /// What the learning rate does after that
    #[arg(long, value_enum, default_value = "cosine")]
    pub schedule: Schedule,

    /// Share of each weight that is added to its gradient
    #[arg(long, default_value_t = 1e-4, value_name = "RATE", allow_negative_numbers = true)]
    pub weight_decay: f32,

    /// Share of the target that is spread over all classes, 0–1
    #[arg(long, default_value_t = 0.0, value_name = "SHARE", allow_negative_numbers = true)]
    pub label_smoothing: f32,

    /// Seed of the weights, of the order of the data, of crops and of dropout; the same seed gives the same run
    #[arg(long, default_value_t = 1)]
    pub seed: u64,

    /// Threads per rank that read pictures
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub num_workers: usize,

    /// Save checkpoints in this directory after each epoch, and go on from the newest one there, on any number of ranks
    #[arg(long, value_name = "DIR")]
    pub checkpoints: Option<PathBuf>,

    /// Also after so many steps of an epoch [default: after epochs only]
    #[arg(long, default_value_t = 0, value_name = "STEPS", hide_default_value = true, requires = "checkpoints")]
    pub checkpoint_every: usize,

    /// Write the results as JSON
    #[arg(long, value_name = "FILE")]
    pub summary: Option<PathBuf>,

    /// Save the trained model; plain Burn reads the file
    #[arg(long, value_name = "FILE")]
    pub save: Option<PathBuf>,
}

/// Where the pictures come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Data {
    /// They are computed.
    Synthetic,
    /// CIFAR-10, downloaded by Burn.
    Cifar10,
    /// A folder of pictures.
    Folder(PathBuf),
}

impl FromStr for Data {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':').unwrap_or((text, "")) {
            ("synthetic", "") => Ok(Self::Synthetic),
            ("cifar10", "") => Ok(Self::Cifar10),
            ("folder", dir) if !dir.is_empty() => Ok(Self::Folder(dir.into())),
            _ => Err("say synthetic, cifar10 or folder:DIR".into()),
        }
    }
}

impl Args {
    /// Rows and columns of a picture.
    pub fn side(&self) -> usize {
        self.image_size.unwrap_or(match self.data {
            Data::Folder(_) => 224,
            _ => CIFAR10_SIDE,
        })
    }

    /// Refuses what cannot work, before any rank is started.
    ///
    /// # Errors
    ///
    /// The first value that makes no sense, by the name of its option.
    pub fn check(&self) -> Result<()> {
        ensure!(self.nproc != Some(0), "--nproc 0: a job has at least one rank");
        ensure!(self.epochs > 0, "--epochs 0: there is nothing to train");
        ensure!(self.batch_size > 0, "--batch-size 0: a step needs at least one item");
        ensure!(self.accumulate > 0, "--accumulate 0: a step needs at least one backward");
        ensure!(self.limit != Some(0), "--limit 0: there is nothing to train with");
        ensure!(self.classes.is_none_or(|classes| classes >= 2), "--classes: two or more");
        ensure!(self.side() >= 16, "--image-size {}: 16 pixels or more", self.side());
        if let Some(lr) = self.lr {
            ensure!(lr.is_finite() && lr > 0.0, "--lr {lr}: a learning rate is a positive number");
        }
        let decay = self.weight_decay;
        ensure!(decay.is_finite() && decay >= 0.0, "--weight-decay {decay}: zero or a positive number");
        let smoothing = self.label_smoothing;
        ensure!((0.0..1.0).contains(&smoothing), "--label-smoothing {smoothing}: a share from 0 to less than 1");
        match &self.data {
            Data::Cifar10 => {
                ensure!(
                    self.side() == CIFAR10_SIDE,
                    "--image-size {}: the pictures of CIFAR-10 have {CIFAR10_SIDE} pixels",
                    self.side()
                );
                ensure!(
                    cfg!(feature = "download"),
                    "--data cifar10: this program was built without the download; build it with `--features download`"
                );
            }
            Data::Folder(dir) => {
                ensure!(dir.is_dir(), "--data folder:{}: there is no such folder", dir.display());
            }
            Data::Synthetic => {}
        }
        for (option, file) in [("--summary", &self.summary), ("--save", &self.save)] {
            if let Some(file) = file {
                check_writable(option, file)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory, Parser};

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    fn parse(line: &str) -> Result<Args> {
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
        assert_eq!(parse("").unwrap().side(), 32);
        let folder = parse("--data folder:/").unwrap();
        assert_eq!((folder.side(), folder.data), (224, Data::Folder("/".into())));
        assert_eq!(parse("--data folder:/ --image-size 64").unwrap().side(), 64);
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
    fn cifar10_needs_the_download() {
        let parsed = parse("--data cifar10");
        assert_eq!(parsed.is_ok(), cfg!(feature = "download"));
        if let Err(error) = parsed {
            assert!(error.to_string().contains("--features download"), "{error}");
        }
    }
}
