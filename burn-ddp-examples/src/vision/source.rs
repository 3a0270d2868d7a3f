//! Where the pictures come from.

use std::sync::Arc;

use anyhow::Result;
use burn::data::dataset::Dataset;
use burn_ddp::Ddp;

use super::args::{Args, Data};
use super::folder::Halves;
use super::picture::{Channels, Picture};
use super::synthetic::Synthetic;

/// Synthetic pictures to learn from.
const TRAIN: usize = 512;
/// Synthetic pictures to be tested with.
const TEST: usize = 128;
/// Synthetic classes, unless said otherwise.
const CLASSES: usize = 10;

/// Rows and columns of CIFAR-10's pictures.
pub const CIFAR10_SIDE: usize = 32;

/// Pictures in two halves, the same on every rank.
#[derive(Clone)]
pub struct Source {
    /// To learn from.
    pub train: Arc<dyn Dataset<Picture>>,
    /// To be tested with.
    pub test: Arc<dyn Dataset<Picture>>,
    /// Number of classes.
    pub classes: usize,
    /// What the pixels are normalised by.
    pub channels: Channels,
}

/// The pictures that `args` name. *Collective*: a download happens on rank 0 first.
///
/// # Errors
///
/// Files that are missing or damaged, named; a number of classes that is not theirs; a download that fails.
pub fn load(ddp: &Ddp, args: &Args) -> Result<Source> {
    let limit = args.limit.unwrap_or(usize::MAX);
    let source = match &args.data {
        Data::Synthetic => {
            let classes = args.classes.unwrap_or(CLASSES);
            let half = |len: usize, seed| Arc::new(Synthetic { len: len.min(limit), classes, side: args.side(), seed });
            let (train, test) = (half(TRAIN, 0), half(TEST, 1));
            Source { train, test, classes, channels: Channels::IMAGENET }
        }
        Data::Cifar10 => ddp.main_first(|| cifar10(limit))?,
        Data::Folder(dir) => {
            let Halves { train, test, classes } = Halves::open(dir, args.side())?;
            let [train, test] = [train, test].map(|half| Arc::new(half.limited(limit)));
            Source { train, test, classes: classes.len(), channels: Channels::IMAGENET }
        }
    };
    if let Some(classes) = args.classes {
        anyhow::ensure!(
            classes == source.classes,
            "--classes {classes}, but the pictures have {} classes",
            source.classes
        );
    }
    Ok(source)
}

#[cfg(feature = "download")]
fn cifar10(limit: usize) -> Result<Source> {
    use super::cifar10;

    let [train, test] = cifar10::load(limit)?.map(Arc::new);
    Ok(Source { train, test, classes: cifar10::CLASSES, channels: Channels::CIFAR10 })
}

#[cfg(not(feature = "download"))]
fn cifar10(_: usize) -> Result<Source> {
    anyhow::bail!("--data cifar10: this program was built without the download; build it with `--features download`")
}
