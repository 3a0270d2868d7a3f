//! Sources of the pictures: computed, Burn's download of CIFAR-10, a folder.

use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;

use anyhow::{Result, ensure};
use burn::data::dataset::Dataset;
use burn_ddp::Ddp;
use clap::Args;

use super::picture::{CIFAR10_SIDE, Channels, Picture};
use super::synthetic::Synthetic;
use crate::trainer::options::not_built;

/// Synthetic training pictures.
const TRAIN: usize = 512;
/// Synthetic test pictures.
const TEST: usize = 128;
/// Default number of synthetic classes.
const CLASSES: usize = 10;

/// Options that choose the pictures.
#[derive(Args, Debug, Clone)]
pub struct PictureOptions {
    /// `synthetic`: computed pictures. `cifar10`: CIFAR-10, downloaded by Burn once (needs a build with `--features
    /// download`). `folder:DIR`: pictures (.png, .jpg) in DIR/train/CLASS and DIR/test/CLASS, or in DIR/CLASS, where
    /// every fifth is for the test (needs a build with `--features images`)
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
}

/// Source of the pictures.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Data {
    /// Computed pictures.
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
            _ => Err("expected synthetic, cifar10 or folder:DIR".into()),
        }
    }
}

impl PictureOptions {
    /// Rows and columns of a picture.
    pub fn side(&self) -> usize {
        self.image_size.unwrap_or(match self.data {
            Data::Folder(_) => 224,
            _ => CIFAR10_SIDE,
        })
    }

    /// Refuses values that cannot work.
    pub fn check(&self) -> Result<()> {
        let side = self.side();
        ensure!(self.limit != Some(0), "--limit 0: there is nothing to train with");
        ensure!(self.classes.is_none_or(|classes| classes >= 2), "--classes: two or more");
        ensure!(side >= 16, "--image-size {side}: 16 pixels or more");
        match &self.data {
            Data::Cifar10 => {
                ensure!(
                    side == CIFAR10_SIDE,
                    "--image-size {side}: the pictures of CIFAR-10 have {CIFAR10_SIDE} pixels"
                );
                ensure!(cfg!(feature = "download"), not_built("--data cifar10", "download"));
            }
            Data::Folder(dir) => {
                ensure!(dir.is_dir(), "--data folder:{}: there is no such folder", dir.display());
                ensure!(cfg!(feature = "images"), not_built("--data folder", "images"));
            }
            Data::Synthetic => {}
        }
        Ok(())
    }
}

/// Training pictures and test pictures, the same on every rank.
#[derive(Clone)]
pub(super) struct Source {
    /// Training pictures and test pictures.
    pub(super) data: [Arc<dyn Dataset<Picture>>; 2],
    /// Number of classes.
    pub(super) classes: usize,
    /// Mean and deviation by which pixels are normalised.
    pub(super) channels: Channels,
}

/// The pictures of `options`. *Collective*: a download happens on rank 0 first.
pub(super) fn load(ddp: &Ddp, options: &PictureOptions) -> Result<Source> {
    let limit = options.limit.unwrap_or(usize::MAX);
    let source = match &options.data {
        Data::Synthetic => {
            let (classes, side) = (options.classes.unwrap_or(CLASSES), options.side());
            let half = |len: usize, seed| Synthetic { len: len.min(limit), classes, side, seed };
            Source::new([half(TRAIN, 0), half(TEST, 1)], classes, Channels::IMAGENET)
        }
        Data::Cifar10 => ddp.main_first(|| cifar10(limit))?,
        #[cfg(feature = "images")]
        Data::Folder(dir) => {
            use super::folder::Halves;

            let Halves { train, test, classes } = Halves::open(dir, options.side())?;
            let halves = [train, test].map(|half| half.limited(limit));
            Source::new(halves, classes.len(), Channels::IMAGENET)
        }
        #[cfg(not(feature = "images"))]
        Data::Folder(_) => return Err(not_built("--data folder", "images")),
    };
    if let Some(classes) = options.classes {
        ensure!(classes == source.classes, "--classes {classes}, but the pictures have {} classes", source.classes);
    }
    Ok(source)
}

#[cfg(feature = "download")]
fn cifar10(limit: usize) -> Result<Source> {
    use super::cifar10;

    Ok(Source::new(cifar10::load(limit)?, cifar10::CLASSES, Channels::CIFAR10))
}

#[cfg(not(feature = "download"))]
fn cifar10(_: usize) -> Result<Source> {
    Err(not_built("--data cifar10", "download"))
}

impl Source {
    fn new<D: Dataset<Picture> + 'static>(halves: [D; 2], classes: usize, channels: Channels) -> Self {
        Self { data: halves.map(|half| Arc::new(half) as Arc<dyn Dataset<Picture>>), classes, channels }
    }
}
