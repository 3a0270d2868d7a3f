//! Pictures that are computed: each class has its colour and pattern, each picture its own shift, light and noise.

use std::f32::consts::TAU;

use burn::data::dataset::{Dataset, DatasetError};

use super::augment::Random;
use super::picture::Picture;

/// Computed pictures. A picture depends on its index and on all fields but `len`.
#[derive(Clone, Copy, Debug)]
pub struct Synthetic {
    /// Number of pictures.
    pub len: usize,
    /// Number of classes; picture `i` is of class `i % classes`.
    pub classes: usize,
    /// Rows and columns.
    pub side: usize,
    /// Another seed gives other pictures of the same classes.
    pub seed: u64,
}

impl Dataset<Picture> for Synthetic {
    fn get(&self, index: usize) -> Result<Picture, DatasetError> {
        let label = index % self.classes;
        let mut random = Random::new(&[self.seed, index as u64]);
        let hue = label as f32 / self.classes as f32;
        let waves = (1 + label % 4) as f32;
        let [phase_x, phase_y, light] = [(); 3].map(|()| random.unit());
        let mut pixels = Vec::with_capacity(3 * self.side * self.side);
        for channel in 0..3 {
            let colour = 50.0 * (TAU * (hue - channel as f32 / 3.0)).cos();
            for at in 0..self.side * self.side {
                let [x, y] = [at % self.side, at / self.side].map(|at| at as f32 / self.side as f32);
                let pattern = 30.0 * (TAU * (waves * x + phase_x)).sin() * (TAU * (waves * y + phase_y)).sin();
                let noise = 60.0 * (random.unit() - 0.5);
                pixels.push((128.0 + colour + pattern + noise + 30.0 * (light - 0.5)).clamp(0.0, 255.0) as u8);
            }
        }
        Ok(Picture { index, pixels, label })
    }

    fn len(&self) -> usize {
        self.len
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_picture_depends_on_seed_and_index_alone_and_its_class_can_be_told() {
        let data = |seed| Synthetic { len: 40, classes: 10, side: 16, seed };
        assert_eq!(data(1).get(7).unwrap(), data(1).get(7).unwrap());
        assert_ne!(data(1).get(7).unwrap().pixels, data(2).get(7).unwrap().pixels);
        assert_ne!(data(1).get(7).unwrap().pixels, data(1).get(17).unwrap().pixels);

        // The nearest mean colour of other pictures names the class.
        let colour = |picture: &Picture| -> Vec<f32> {
            let mean = |plane: &[u8]| plane.iter().map(|&pixel| f32::from(pixel)).sum::<f32>() / plane.len() as f32;
            let means: Vec<f32> = picture.pixels.chunks_exact(16 * 16).map(mean).collect();
            let light = means.iter().sum::<f32>() / 3.0;
            means.iter().map(|mean| mean - light).collect()
        };
        let known: Vec<_> = (0..10).map(|class| colour(&data(1).get(class).unwrap())).collect();
        for index in 0..40 {
            let picture = data(2).get(index).unwrap();
            let own = colour(&picture);
            let distance = |class: &usize| known[*class].iter().zip(&own).map(|(a, b)| (a - b).powi(2)).sum::<f32>();
            let nearest = (0..10).min_by(|a, b| distance(a).total_cmp(&distance(b))).unwrap();
            assert_eq!((picture.label, nearest), (index % 10, index % 10));
        }
    }
}
