//! Random crops and flips that depend on the seed, the epoch and the picture, and on nothing else.
//!
//! Runs thus see the same pictures with any number of ranks, workers and interruptions: one rank with batches of 32,
//! for example, the same as two with 16.

use super::picture::Picture;

/// A picture's side divided by its padding: a picture of 32 pixels, as in CIFAR-10, is padded by 4.
const PADDING: usize = 8;

/// The augmentation of one epoch: each picture is padded with black, cropped to its size at a random place, and
/// mirrored in half of the cases (He et al. 2015, 4.2; torchvision's `RandomCrop(32, padding=4)` and
/// `RandomHorizontalFlip`).
#[derive(Clone, Copy, Debug)]
pub struct Augment {
    /// The training's seed.
    pub seed: u64,
    /// Counted from 0.
    pub epoch: usize,
}

impl Augment {
    /// The pixels of `picture` as this epoch sees them.
    pub fn apply(&self, picture: &Picture, side: usize) -> Vec<u8> {
        let mut random = Random::new(&[self.seed, self.epoch as u64, picture.index as u64]);
        let padding = side / PADDING;
        let [down, right] = [(); 2].map(|()| random.below(2 * padding + 1));
        let mirrored = random.below(2) == 1;
        let mut pixels = Vec::with_capacity(picture.pixels.len());
        for plane in picture.pixels.chunks_exact(side * side) {
            for row in 0..side {
                // Place of the crop in the picture; outside is black.
                let row = (row + down).checked_sub(padding).filter(|&row| row < side);
                pixels.extend((0..side).map(|column| {
                    let column = if mirrored { side - 1 - column } else { column };
                    let column = (column + right).checked_sub(padding).filter(|&column| column < side);
                    row.zip(column).map_or(0, |(row, column)| plane[row * side + column])
                }));
            }
        }
        pixels
    }
}

/// SplitMix64 (Steele, Lea and Flood 2014), from any number of seeds.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// A stream of its own for each list of seeds.
    pub fn new(seeds: &[u64]) -> Self {
        seeds.iter().fold(Self(0), |random, seed| Self(Self(random.0 ^ seed).bits()))
    }

    /// Any 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number in `0..bound`.
    pub fn below(&mut self, bound: usize) -> usize {
        // The high half of a product: no bias that could be seen.
        ((u128::from(self.bits()) * bound as u128) >> 64) as usize
    }

    /// A number in `[0, 1)`.
    pub fn unit(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1 << 24) as f32
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    /// Pixels that tell where they were: 16 × 16, none of them black.
    fn picture(index: usize) -> Picture {
        let pixels = (0..3).flat_map(|channel| (0..=255).map(move |at: u8| at.wrapping_add(channel).max(1))).collect();
        Picture { index, pixels, label: 0 }
    }

    #[test]
    fn is_a_pure_function_of_seed_epoch_and_index() {
        let see = |seed, epoch, index| Augment { seed, epoch }.apply(&picture(index), 16);
        assert_eq!(see(1, 2, 3), see(1, 2, 3));
        let changed = |vary: &dyn Fn(usize) -> Vec<u8>| (0..50).map(vary).collect::<HashSet<_>>().len();
        // 5 × 5 places, mirrored or not: 50 draws hit about 32 of the 50.
        assert!(changed(&|seed| see(seed as u64, 0, 0)) > 20);
        assert!(changed(&|epoch| see(0, epoch, 0)) > 20);
        assert!(changed(&|index| see(0, 0, index)) > 20);
    }

    #[test]
    fn every_result_is_a_crop_of_the_padded_picture_and_all_occur() {
        let (side, padding, picture) = (16, 2, picture(0));
        let crop = |down: usize, right: usize, mirrored: bool| -> Vec<u8> {
            let at = |channel: usize, row: usize, column: usize| {
                let column = if mirrored { side - 1 - column } else { column };
                let (row, column) = (row + down, column + right);
                let inside = |x: usize| (padding..side + padding).contains(&x);
                if inside(row) && inside(column) {
                    picture.pixels[(channel * side + row - padding) * side + column - padding]
                } else {
                    0
                }
            };
            let rows = (0..3).flat_map(|channel| (0..side).map(move |row| (channel, row)));
            rows.flat_map(|(channel, row)| (0..side).map(move |column| (channel, row, column)))
                .map(|(channel, row, column)| at(channel, row, column))
                .collect()
        };
        let places = (0..5).flat_map(|down| (0..5).map(move |right| (down, right)));
        let crops: HashSet<_> =
            places.flat_map(|(down, right)| [crop(down, right, false), crop(down, right, true)]).collect();
        let seen: HashSet<_> = (0..1000).map(|epoch| Augment { seed: 5, epoch }.apply(&picture, side)).collect();
        assert_eq!(crops.len(), 50);
        assert_eq!(seen, crops);
    }
}
