//! A picture, and how pictures become a batch.

use burn::data::dataloader::batcher::Batcher;
use burn::prelude::*;

use super::augment::Augment;

/// Rows and columns of CIFAR-10's pictures.
pub const CIFAR10_SIDE: usize = 32;

/// A picture with its class.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Picture {
    /// Its number in the dataset.
    pub index: usize,
    /// `[3, side, side]`: red, green, blue.
    pub pixels: Vec<u8>,
    /// Its class, counted from 0.
    pub label: usize,
}

impl Picture {
    /// A picture from the pixels of an image file, `[side, side, 3]`.
    pub fn interleaved(index: usize, pixels: &[u8], label: usize) -> Self {
        let channel = |channel: usize| pixels.iter().skip(channel).step_by(3).copied();
        Self { index, pixels: (0..3).flat_map(channel).collect(), label }
    }
}

/// Mean and standard deviation of the pixels of a dataset, scaled to 0–1, of each channel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Channels {
    /// Red, green, blue.
    pub mean: [f32; 3],
    /// Red, green, blue.
    pub deviation: [f32; 3],
}

impl Channels {
    /// Values of ImageNet, which torchvision takes for all photographs.
    pub const IMAGENET: Self = Self { mean: [0.485, 0.456, 0.406], deviation: [0.229, 0.224, 0.225] };
    /// Values of CIFAR-10's training set.
    pub const CIFAR10: Self = Self { mean: [0.4914, 0.4822, 0.4465], deviation: [0.2470, 0.2435, 0.2616] };

    /// The normalised values of a channel's 256 intensities.
    fn table(&self, channel: usize) -> [f32; 256] {
        std::array::from_fn(|value| (value as f32 / 255.0 - self.mean[channel]) / self.deviation[channel])
    }
}

/// Pictures of a step on this rank, as bytes: their augmentation depends on the epoch, which a batcher does not know.
#[derive(Clone, Debug)]
pub struct Batch {
    /// All of the same size.
    pub pictures: Vec<Picture>,
}

impl Batch {
    /// Number of pictures.
    pub fn items(&self) -> usize {
        self.pictures.len()
    }

    /// Labels, `[items]`.
    pub fn labels(&self, device: &Device) -> Tensor<1, Int> {
        let labels: Vec<i64> = self.pictures.iter().map(|picture| picture.label as i64).collect();
        Tensor::from_data(TensorData::new(labels, [self.items()]), device)
    }

    /// Pixels, `[items, 3, side, side]`: augmented, then normalised by `channels`.
    pub fn images(&self, side: usize, channels: &Channels, augment: Option<&Augment>, device: &Device) -> Tensor<4> {
        let tables = [0, 1, 2].map(|channel| channels.table(channel));
        let mut values = Vec::with_capacity(self.items() * 3 * side * side);
        for picture in &self.pictures {
            let changed = augment.map(|augment| augment.apply(picture, side));
            let pixels = changed.as_ref().unwrap_or(&picture.pixels);
            for (plane, table) in pixels.chunks_exact(side * side).zip(&tables) {
                values.extend(plane.iter().map(|&pixel| table[usize::from(pixel)]));
            }
        }
        Tensor::from_data(TensorData::new(values, [self.items(), 3, side, side]), device)
    }
}

/// Makes batches of pictures.
#[derive(Clone, Copy, Debug, Default)]
pub struct PictureBatcher;

impl Batcher<Picture, Batch> for PictureBatcher {
    fn batch(&self, pictures: Vec<Picture>, _: &Device) -> Batch {
        Batch { pictures }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_is_normalised_by_channel() {
        let picture = Picture::interleaved(0, &[255, 0, 51, 0, 0, 51, 0, 0, 51, 0, 255, 51], 7);
        assert_eq!(picture.pixels, [255, 0, 0, 0, 0, 0, 0, 255, 51, 51, 51, 51]);
        let batch = PictureBatcher.batch(vec![picture], &Device::flex());
        let channels = Channels { mean: [0.0, 0.5, 0.1], deviation: [1.0, 0.5, 0.1] };
        let images = batch.images(2, &channels, None, &Device::flex());
        assert_eq!(images.dims(), [1, 3, 2, 2]);
        let values: Vec<f32> = images.into_data().iter::<f32>().collect();
        assert_eq!(values[..8], [1.0, 0.0, 0.0, 0.0, -1.0, -1.0, -1.0, 1.0]);
        assert!(values[8..].iter().all(|value| (value - 1.0).abs() < 1e-6), "{values:?}");
        assert_eq!(batch.labels(&Device::flex()).into_data().iter::<i64>().collect::<Vec<_>>(), [7]);
    }
}
