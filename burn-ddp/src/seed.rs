//! Seeds of the random numbers that a rank draws, as a pure function of the seed of [`Ddp::seed`].

use std::collections::BTreeSet;

use burn::tensor::{Device, Distribution, Tensor};
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use crate::{Ddp, Result};

/// Seed that was set by [`Ddp::seed`].
#[derive(Debug)]
pub(crate) struct Seed {
    device: Device,
    seed: u64,
    /// Number of models wrapped since the seed was set.
    wraps: u64,
}

impl Seed {
    pub(crate) fn new(device: &Device, seed: u64) -> Self {
        Seed { device: device.clone(), seed, wraps: 0 }
    }

    /// Seed after the next `wrap`: a new one each time, so that no stream of random numbers is repeated.
    pub(crate) fn of_next_wrap(&mut self, rank: usize) -> u64 {
        self.wraps += 1;
        derive(self.seed, "wrap", [rank as u64, self.wraps])
    }

    /// Seeds the device for a batch of a training loader, of a rank or a leaf.
    pub(crate) fn seed_batch(&self, rank: usize, loader: u32, epoch: usize, first: usize) {
        self.device.seed(of_batch(self.seed, rank, loader, epoch, first));
    }

    /// Seeds the device for a leaf of a step that no loader has begun.
    pub(crate) fn seed_leaf(&self, leaf: usize, step: u64) {
        self.device.seed(derive(self.seed, "leaf", [leaf as u64, step]));
    }
}

/// Gives each rank random numbers of its own after a `wrap`. *Collective*.
#[track_caller]
pub(crate) fn separate_ranks(ddp: &Ddp, device: &Device) -> Result<()> {
    if let Some(seed) = seed_after_wrap(ddp, device)? {
        device.seed(seed);
    }
    Ok(())
}

/// Seed of this rank after a `wrap`; `None` if the ranks draw different random numbers already. *Collective*.
///
/// Ranks that would draw the same numbers were seeded alike, by the program or as ranks of different parts. The new
/// seeds of all ranks are then derived from the first rank's number.
#[track_caller]
fn seed_after_wrap(ddp: &Ddp, device: &Device) -> Result<Option<u64>> {
    let own = ddp.state().next_seed_of_rank();
    if ddp.world_size() == 1 {
        return Ok(own);
    }
    let of_ranks = ddp.group().all_gather_object(&own.or_else(|| draw(device)))?;
    let Some(seed) = seed_of_equals(&of_ranks) else { return Ok(own) };
    if ddp.is_main() {
        tracing::info!(
            target: "burn_ddp::seed",
            "ranks were seeded alike (`device.seed`): each draws its own random numbers from here on, as after \
            `ddp.seed`"
        );
    }
    ddp.state().continue_from_seed(device, seed);
    Ok(ddp.state().next_seed_of_rank())
}

/// The first rank's number, if any two ranks have the same number.
fn seed_of_equals(of_ranks: &[Option<u64>]) -> Option<u64> {
    let numbers: Vec<u64> = of_ranks.iter().flatten().copied().collect();
    let different: BTreeSet<u64> = numbers.iter().copied().collect();
    numbers.first().filter(|_| different.len() < numbers.len()).copied()
}

/// Logs a warning if the ranks are threads: backends have one random generator per process, so the numbers of a rank
/// depend on when the other ranks draw, and do not repeat between runs.
pub(crate) fn warn_of_threads(ddp: &Ddp) {
    if ddp.is_main() && ddp.world().peers().len() > 1 && ddp.world().engine() == "threads" {
        tracing::warn!(
            target: "burn_ddp::seed",
            "the ranks are threads, which share one generator of random numbers: weights and dropout do not repeat \
            between runs, in spite of `ddp.seed`. Ranks that are processes (`burnrun`, `Ddp::launch`) repeat them"
        );
    }
}

/// A random number from the generator of `device`; `None` if the device cannot be read.
fn draw(device: &Device) -> Option<u64> {
    // A float has 24 random bits at most, in half precision fewer, so one float would not tell the ranks apart.
    let drawn = Tensor::<1>::random([16], Distribution::Default, device).try_into_data();
    drawn.ok().map(|drawn| xxh3_64(drawn.as_bytes()))
}

/// Seed for the random numbers that follow the batch of a step: `first` is the item of the epoch's order at which the
/// step of all ranks begins, which is the same whether or not the epoch was interrupted before.
fn of_batch(seed: u64, rank: usize, loader: u32, epoch: usize, first: usize) -> u64 {
    derive(seed, "batch", [rank as u64, loader.into(), epoch as u64, first as u64])
}

/// XXH3 of the numbers and of their purpose; the same in every process and release.
fn derive<const N: usize>(seed: u64, purpose: &str, numbers: [u64; N]) -> u64 {
    let mut bytes = purpose.as_bytes().to_vec();
    numbers.iter().for_each(|number| bytes.extend(number.to_le_bytes()));
    xxh3_64_with_seed(&bytes, seed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::test_event_capture::Listener;

    #[test]
    fn every_rank_loader_epoch_and_step_has_its_own() {
        let mut seen = BTreeSet::new();
        for seed in 0..2 {
            let mut wraps = Seed::new(&Device::default(), seed);
            for rank in 0..4 {
                assert!(seen.insert(wraps.of_next_wrap(rank)));
                for loader in 0..2 {
                    for epoch in 0..3 {
                        for first in [0, 8, 16] {
                            assert!(seen.insert(of_batch(seed, rank, loader, epoch, first)));
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn ranks_that_share_a_generator_hear_that_a_seed_repeats_nothing() {
        for (world, warnings) in [(1, vec![0]), (3, vec![1, 0, 0])] {
            let counted = Ddp::spawn(world, |ddp| {
                let listener = Listener::default();
                tracing::subscriber::with_default(listener.clone(), || ddp.seed(&Device::default(), 1));
                Ok(listener.events("burn_ddp::seed").len())
            });
            assert_eq!(counted.unwrap(), warnings);
        }
    }

    /// A checkpoint of today must resume in every later release.
    #[test]
    fn never_changes() {
        assert_eq!(
            [of_batch(42, 1, 0, 3, 64), of_batch(0, 0, 0, 0, 0)],
            [4_310_158_011_346_186_588, 3_367_763_453_451_138_828]
        );
    }

    #[test]
    fn ranks_of_a_group_have_different_seeds_after_its_wrap() {
        let seeds = Ddp::spawn(4, |job| {
            let part = job.split(Some(job.rank() as u64 / 2), 0)?.expect("two parts of two ranks");
            let device = Device::default();
            part.seed(&device, 5);
            Ok([&part, &job, &part].map(|ddp| seed_after_wrap(ddp, &device).unwrap().unwrap()))
        });
        let seeds = seeds.unwrap();
        let of_wrap = |nth: usize| seeds.iter().map(|seeds| seeds[nth]).collect::<Vec<_>>();
        assert_eq!(of_wrap(0)[..2], of_wrap(0)[2..], "parts that train models of their own");
        for nth in [1, 2] {
            assert_eq!(of_wrap(nth).into_iter().collect::<BTreeSet<_>>().len(), 4, "{seeds:?}");
        }
    }

    #[test]
    fn two_ranks_with_the_same_number_are_enough() {
        assert_eq!(seed_of_equals(&[Some(7), Some(8), Some(8)]), Some(7));
        assert_eq!(seed_of_equals(&[Some(7), None, None]), None, "devices that cannot be read");
        assert_eq!(seed_of_equals(&[Some(7), Some(8)]), None);
    }
}
