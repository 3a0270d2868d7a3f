//! Sources of the digits: the sample in this crate, a folder, Burn's download.

use std::convert::Infallible;
use std::path::PathBuf;
use std::str::FromStr;

use anyhow::{Context, Result};
use burn_ddp::Ddp;

use super::dataset::{MnistDataset, Split};

/// Source of the digits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Data {
    /// The sample in this crate.
    Sample,
    /// The whole database, downloaded by Burn.
    Full,
    /// The database's files in a folder.
    Dir(PathBuf),
}

impl FromStr for Data {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(match text {
            "sample" => Data::Sample,
            "full" => Data::Full,
            dir => Data::Dir(dir.into()),
        })
    }
}

/// Training data and test data, the same on every rank. *Collective*: a download happens on rank 0 first.
pub(super) fn load(ddp: &Ddp, data: &Data) -> Result<[MnistDataset; 2]> {
    match data {
        Data::Sample => both(MnistDataset::sample),
        Data::Dir(dir) => both(|split| MnistDataset::from_dir(dir, split)),
        Data::Full => ddp.main_first(|| both(download)).context("--data full: MNIST could not be downloaded by Burn"),
    }
}

fn both(read: impl Fn(Split) -> Result<MnistDataset>) -> Result<[MnistDataset; 2]> {
    Ok([read(Split::Train)?, read(Split::Test)?])
}

#[cfg(not(feature = "download"))]
fn download(_: Split) -> Result<MnistDataset> {
    Err(crate::trainer::options::not_built("it", "download"))
}

#[cfg(feature = "download")]
fn download(split: Split) -> Result<MnistDataset> {
    use burn_dataset::Dataset;
    use burn_dataset::vision;

    use super::dataset::MnistItem;

    let download = move || match split {
        Split::Train => vision::MnistDataset::train(),
        Split::Test => vision::MnistDataset::test(),
    };
    let data = crate::guarded_download::guarded(download).context(
        "if an earlier download was cut off, delete burn-dataset/mnist in the cache folder (~/.cache); a folder with \
         MNIST's files can be given to --data instead",
    )?;
    let mut items = Vec::with_capacity(data.len());
    for index in 0..data.len() {
        let item = data.get(index).with_context(|| format!("digit {index}"))?;
        let mut image = [0; 28 * 28];
        for (to, from) in image.iter_mut().zip(item.image.as_flattened()) {
            // Burn's pixels are whole numbers 0–255.
            *to = *from as u8;
        }
        items.push(MnistItem { image, label: item.label });
    }
    Ok(MnistDataset::from_items(items))
}
