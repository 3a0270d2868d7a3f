//! Where the pictures come from.

use std::sync::Arc;

use anyhow::Result;
use burn::data::dataset::Dataset;
use burn_ddp::Ddp;

use super::args::{Args, Data};
use super::cifar10::{self, Cifar10};
use super::folder::Halves;
use super::picture::{Channels, Picture};
use super::synthetic::Synthetic;

/// Synthetic pictures to learn from.
const TRAIN: usize = 512;
/// Synthetic pictures to be tested with.
const TEST: usize = 128;
/// Synthetic classes, unless said otherwise.
const CLASSES: usize = 10;

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
        Data::Cifar10(dir) => {
            let (train, test) = ddp.rank_zero_first(|| cifar10(dir))?;
            let [train, test] = [train, test].map(|half| Arc::new(half.limited(limit)));
            Source { train, test, classes: cifar10::CLASSES, channels: Channels::CIFAR10 }
        }
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

/// Reads the folder, after a download if there is nothing in it.
#[cfg(feature = "download")]
fn cifar10(dir: &std::path::Path) -> Result<(Cifar10, Cifar10)> {
    use anyhow::Context;

    const URL: &str = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz";
    let present = ["", "cifar-10-batches-bin"].iter().any(|folder| dir.join(folder).join("test_batch.bin").exists());
    let archive = dir.join(cifar10::ARCHIVE);
    if !present && !archive.exists() {
        let download = || burn_dataset::network::downloader::download_file_as_bytes(URL, cifar10::ARCHIVE);
        let bytes = crate::download::guarded(download)
            .with_context(|| format!("{URL} could not be had; it can be put into {} by other means", dir.display()))?;
        let part = archive.with_extension("part");
        let write = || -> std::io::Result<()> {
            std::fs::create_dir_all(dir)?;
            std::fs::write(&part, bytes)?;
            std::fs::rename(&part, &archive)
        };
        write().with_context(|| format!("cannot write {}", archive.display()))?;
    }
    Cifar10::from_dir(dir)
}

/// Reads the folder.
#[cfg(not(feature = "download"))]
fn cifar10(dir: &std::path::Path) -> Result<(Cifar10, Cifar10)> {
    Cifar10::from_dir(dir)
}
