//! Handwritten digits as a Burn [`Dataset`], and how they become a batch.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Result, bail, ensure};
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::{Dataset, DatasetError};
use burn::prelude::*;

use super::idx::{self, Idx};

/// Rows and columns of a digit.
pub const SIDE: usize = 28;
/// Digits 0–9.
pub const CLASSES: usize = 10;

const PIXELS: usize = SIDE * SIDE;

/// Mean and standard deviation of all pixels of MNIST's training set, scaled to 0–1.
const MEAN: f32 = 0.1307;
const DEVIATION: f32 = 0.3081;

/// The two halves of the database, named as its files are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Split {
    /// Training digits: the files `train-…`.
    Train,
    /// Test digits: the files `t10k-…`.
    Test,
}

/// A digit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MnistItem {
    /// `[SIDE, SIDE]`, 0 is background.
    pub image: [u8; PIXELS],
    /// 0–9.
    pub label: u8,
}

/// Digits in memory. Clones share them.
#[derive(Clone, Debug)]
pub struct MnistDataset {
    items: Arc<Vec<MnistItem>>,
}

impl MnistDataset {
    /// The digits that are part of this crate: 4,000 to train, 1,000 to test, equally many of each class.
    ///
    /// # Errors
    ///
    /// If the crate's files were damaged when the program was built.
    pub fn sample(split: Split) -> Result<Self> {
        macro_rules! carried {
            ($file:literal) => {
                ($file, include_bytes!(concat!("../../data/mnist/", $file)).as_slice())
            };
        }
        let (images, labels) = match split {
            Split::Train => (carried!("train-images-idx3-ubyte.gz"), carried!("train-labels-idx1-ubyte.gz")),
            Split::Test => (carried!("t10k-images-idx3-ubyte.gz"), carried!("t10k-labels-idx1-ubyte.gz")),
        };
        Self::from_idx(images.0, idx::parse(images.0, images.1, 3)?, labels.0, idx::parse(labels.0, labels.1, 1)?)
    }

    /// Reads the database's own files from a folder: `train-images-idx3-ubyte` and so on, plain or with `.gz`.
    ///
    /// # Errors
    ///
    /// If a file is missing or malformed; the error names it.
    pub fn from_dir(dir: &Path, split: Split) -> Result<Self> {
        let prefix = match split {
            Split::Train => "train",
            Split::Test => "t10k",
        };
        let images = find(dir, &format!("{prefix}-images-idx3-ubyte"))?;
        let labels = find(dir, &format!("{prefix}-labels-idx1-ubyte"))?;
        Self::from_idx(
            &images.display().to_string(),
            idx::read(&images, 3)?,
            &labels.display().to_string(),
            idx::read(&labels, 1)?,
        )
    }

    /// A dataset of `items`.
    pub fn from_items(items: Vec<MnistItem>) -> Self {
        Self { items: Arc::new(items) }
    }

    fn from_idx(image_file: &str, images: Idx, label_file: &str, labels: Idx) -> Result<Self> {
        ensure!(
            images.dims[1..] == [SIDE, SIDE],
            "{image_file} holds images of {:?} pixels, not [{SIDE}, {SIDE}]",
            &images.dims[1..]
        );
        ensure!(
            images.dims[0] == labels.dims[0],
            "{image_file} holds {} images, but {label_file} {} labels",
            images.dims[0],
            labels.dims[0]
        );
        ensure!(images.dims[0] > 0, "{image_file} holds no images");
        if let Some(at) = labels.data.iter().position(|&label| usize::from(label) >= CLASSES) {
            bail!("{label_file}: label {at} is {}, not a digit", labels.data[at]);
        }
        let (images, _) = images.data.as_chunks::<PIXELS>();
        Ok(Self::from_items(images.iter().zip(labels.data).map(|(&image, label)| MnistItem { image, label }).collect()))
    }
}

/// `dir/name`, else `dir/name.gz`.
fn find(dir: &Path, name: &str) -> Result<PathBuf> {
    let plain = dir.join(name);
    let gzipped = dir.join(format!("{name}.gz"));
    [&plain, &gzipped]
        .into_iter()
        .find(|path| path.exists())
        .cloned()
        .ok_or_else(|| anyhow::anyhow!("neither {} nor {} exists", plain.display(), gzipped.display()))
}

impl Dataset<MnistItem> for MnistDataset {
    fn get(&self, index: usize) -> Result<MnistItem, DatasetError> {
        Ok(self.items[index])
    }

    fn len(&self) -> usize {
        self.items.len()
    }
}

/// A batch of digits, as the model takes it.
#[derive(Clone, Debug)]
pub struct MnistBatch {
    /// `[items, 1, SIDE, SIDE]`, mean 0 and deviation 1 over the whole database.
    pub images: Tensor<4>,
    /// `[items]`.
    pub labels: Tensor<1, Int>,
}

/// Makes batches of digits.
#[derive(Clone, Copy, Debug, Default)]
pub struct MnistBatcher;

impl Batcher<MnistItem, MnistBatch> for MnistBatcher {
    fn batch(&self, items: Vec<MnistItem>, device: &Device) -> MnistBatch {
        let shape = [items.len(), 1, SIDE, SIDE];
        let pixels: Vec<f32> = items
            .iter()
            .flat_map(|item| item.image)
            .map(|pixel| (f32::from(pixel) / 255.0 - MEAN) / DEVIATION)
            .collect();
        let labels: Vec<i64> = items.iter().map(|item| item.label.into()).collect();
        MnistBatch {
            images: Tensor::from_data(TensorData::new(pixels, shape), device),
            labels: Tensor::from_data(TensorData::new(labels, [items.len()]), device),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(dir: &Path, name: &str, dims: &[u32], payload: &[u8]) {
        let mut bytes = vec![0, 0, 8, dims.len() as u8];
        bytes.extend(dims.iter().flat_map(|dim| dim.to_be_bytes()));
        bytes.extend(payload);
        std::fs::write(dir.join(name), bytes).unwrap();
    }

    #[test]
    fn the_sample_is_balanced() {
        for (split, each) in [(Split::Train, 400), (Split::Test, 100)] {
            let data = MnistDataset::sample(split).unwrap();
            assert_eq!(data.len(), each * CLASSES);
            for class in 0..CLASSES {
                let count =
                    (0..data.len()).filter(|&index| usize::from(data.get(index).unwrap().label) == class).count();
                assert_eq!(count, each, "{split:?}, class {class}");
            }
        }
    }

    #[test]
    fn no_digit_is_in_both_halves_of_the_sample() {
        let train = MnistDataset::sample(Split::Train).unwrap();
        let test = MnistDataset::sample(Split::Test).unwrap();
        let known: std::collections::HashSet<_> = train.items.iter().map(|item| item.image).collect();
        assert!(test.items.iter().all(|item| !known.contains(&item.image)));
    }

    #[test]
    fn a_folder_of_files_is_read_and_checked() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        let fails = |expected: &str| {
            let error = format!("{:#}", MnistDataset::from_dir(dir, Split::Test).unwrap_err());
            assert!(error.contains(expected), "{error}");
        };
        fails("neither");
        let (images, labels) = ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte");
        write(dir, images, &[2, 28, 28], &[7; 2 * PIXELS]);
        write(dir, labels, &[3], &[0, 1, 2]);
        fails("holds 2 images, but");
        write(dir, labels, &[2], &[0, 10]);
        fails("label 1 is 10, not a digit");
        write(dir, images, &[2, 27, 28], &[7; 2 * 27 * 28]);
        fails("images of [27, 28] pixels");
        write(dir, images, &[0, 28, 28], &[]);
        write(dir, labels, &[0], &[]);
        fails("holds no images");
        write(dir, images, &[1, 28, 28], &[7; PIXELS]);
        write(dir, labels, &[1], &[3]);
        let data = MnistDataset::from_dir(dir, Split::Test).unwrap();
        assert_eq!(data.len(), 1);
        assert_eq!(data.get(0).unwrap(), MnistItem { image: [7; PIXELS], label: 3 });
    }

    #[test]
    fn a_batch_is_normalised() {
        let mut image = [0; PIXELS];
        image[SIDE] = 255;
        let items = vec![MnistItem { image: [0; PIXELS], label: 4 }, MnistItem { image, label: 9 }];
        let batch = MnistBatcher.batch(items, &Device::flex());
        assert_eq!(batch.images.dims(), [2, 1, SIDE, SIDE]);
        let row_1: Vec<f32> = batch.images.slice([1..2, 0..1, 1..2, 0..2]).into_data().iter::<f32>().collect();
        assert_eq!(row_1, [(1.0 - MEAN) / DEVIATION, (0.0 - MEAN) / DEVIATION]);
        assert_eq!(batch.labels.into_data().iter::<i64>().collect::<Vec<_>>(), [4, 9]);
    }
}
