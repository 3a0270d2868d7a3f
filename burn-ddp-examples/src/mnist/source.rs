//! Where the digits come from.

use anyhow::{Context, Result};
use burn_ddp::Ddp;

use super::args::Data;
use super::dataset::{MnistDataset, Split};

/// Both halves of the data, the same on every rank. *Collective*: a download happens on rank 0 first.
///
/// # Errors
///
/// Files that are missing or damaged, named; a download that fails.
pub fn load(ddp: &Ddp, data: &Data) -> Result<(MnistDataset, MnistDataset)> {
    match data {
        Data::Sample => both(MnistDataset::sample),
        Data::Dir(dir) => both(|split| MnistDataset::from_dir(dir, split)),
        Data::Full => ddp
            .main_first(|| both(download::split))
            .context("--data full: MNIST could not be had through Burn's download"),
    }
}

fn both(read: impl Fn(Split) -> Result<MnistDataset>) -> Result<(MnistDataset, MnistDataset)> {
    Ok((read(Split::Train)?, read(Split::Test)?))
}

#[cfg(not(feature = "download"))]
mod download {
    use anyhow::{Result, bail};

    use super::{MnistDataset, Split};

    pub(super) fn split(_: Split) -> Result<MnistDataset> {
        bail!(
            "this program was built without it: build with `--features download`, or give a folder with MNIST's files to --data"
        )
    }
}

#[cfg(feature = "download")]
mod download {
    use anyhow::{Context, Result};
    use burn_dataset::Dataset;
    use burn_dataset::vision;

    use super::{MnistDataset, Split};
    use crate::mnist::MnistItem;

    pub(super) fn split(split: Split) -> Result<MnistDataset> {
        let download = move || match split {
            Split::Train => vision::MnistDataset::train(),
            Split::Test => vision::MnistDataset::test(),
        };
        let data = crate::download::guarded(download).context(
            "if an earlier download was cut off, delete burn-dataset/mnist in the cache folder (~/.cache); a folder with MNIST's \
             files can be given to --data instead",
        )?;
        convert(&data)
    }

    fn convert(data: &vision::MnistDataset) -> Result<MnistDataset> {
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
}
