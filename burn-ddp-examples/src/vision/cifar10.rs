//! CIFAR-10 through Burn's dataset, which downloads it once.

use std::io;

use anyhow::{Context, Result, ensure};
use burn::data::dataset::{Dataset, DatasetError};
use burn_dataset::vision::{Annotation, CifarDataset, CifarType, ImageFolderDataset, PixelData};

use super::picture::{CIFAR10_SIDE as SIDE, Picture};

/// Number of classes.
pub(super) const CLASSES: usize = 10;
/// Training pictures.
const TRAIN: usize = 50_000;
/// Test pictures.
const TEST: usize = 10_000;

/// Training or test half of the database, in Burn's cache.
pub(super) struct Cifar10 {
    files: ImageFolderDataset,
    len: usize,
}

/// At most `limit` training pictures and as many test pictures, spread evenly over the classes.
///
/// # Errors
///
/// If the download fails, or an earlier one was cut off.
pub(super) fn load(limit: usize) -> Result<[Cifar10; 2]> {
    let halves = crate::guarded_download::guarded(|| {
        let cifar10 = CifarDataset::new(CifarType::Cifar10);
        [cifar10.train(), cifar10.test()]
    })
    .context(
        "CIFAR-10 could not be downloaded by Burn; a folder with its pictures can be given as \
         `--data folder:DIR`",
    )?;
    for (half, expected) in halves.iter().zip([TRAIN, TEST]) {
        ensure!(
            half.len() == expected,
            "CIFAR-10 has {} pictures instead of {expected} in a half: an earlier download was cut off; delete \
             burn-dataset/cifar10 in the cache folder (~/.cache)",
            half.len()
        );
    }
    Ok(halves.map(|files| Cifar10 { len: files.len().min(limit), files }))
}

impl Dataset<Picture> for Cifar10 {
    fn get(&self, index: usize) -> Result<Picture, DatasetError> {
        let item = self.files.get(index * self.files.len() / self.len)?;
        match (item.image, item.annotation) {
            (PixelData::U8(pixels), Annotation::Label(label)) if pixels.len() == 3 * SIDE * SIDE => {
                Ok(Picture::interleaved(index, &pixels, label))
            }
            _ => Err(DatasetError::new(io::Error::other(format!("{} is no picture of CIFAR-10", item.image_path)))),
        }
    }

    fn len(&self) -> usize {
        self.len
    }
}
