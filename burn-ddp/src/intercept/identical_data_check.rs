//! Evidence that all ranks train on the same data: their own gradients of a step are equal bit by bit.

use burn::backend::tensor::FloatTensor;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::Ddp;
use crate::gradients::{GradientMemory, Slot};

/// Bytes of gradients that the first comparisons look at: those of the smallest parameters, at least one.
const COMPARED_BYTES: usize = 1 << 20;
/// Comparisons in a row that must find equal gradients: one may be a step on a dummy batch. The last of them looks at
/// all gradients: some depend on no data, as that of the last bias under a mean.
const ENOUGH: u32 = 2;

/// Digest of this rank's gradients: ranks compare theirs until it is clear if they train on equal data.
pub(super) struct SameGradients {
    /// Slots whose gradients are compared until they are found equal; the same on all ranks.
    compared: Vec<bool>,
    /// Sum of the digests since the last comparison: the order of gradients may differ between ranks.
    digest: u64,
    /// Comparisons in a row that found equal gradients.
    equal: u32,
    /// True once the ranks are known to train on different data, or the warning is given.
    settled: bool,
}

impl SameGradients {
    pub(super) fn new(slots: &[Slot]) -> Self {
        let mut by_size: Vec<usize> = (0..slots.len()).filter(|slot| slots[*slot].trainable).collect();
        by_size.sort_by_key(|slot| slots[*slot].len_bytes());
        let (mut compared, mut bytes) = (vec![false; slots.len()], 0);
        for slot in by_size {
            compared[slot] = bytes == 0 || bytes + slots[slot].len_bytes() <= COMPARED_BYTES;
            bytes += slots[slot].len_bytes();
        }
        SameGradients { compared, digest: 0, equal: 0, settled: false }
    }

    /// Adds this rank's gradient of a slot in one backward. Reads it from its device.
    ///
    /// # Errors
    ///
    /// The backend's error when its device cannot be read.
    pub(super) fn add<B: GradientMemory>(&mut self, slot: usize, gradient: &FloatTensor<B>) -> Result<(), String> {
        let looks = self.compared[slot] || self.equal + 1 == ENOUGH;
        if self.settled || !looks {
            return Ok(());
        }
        let digest = B::with_bytes(gradient.clone(), |_, bytes| digest(slot, bytes))?;
        self.digest = self.digest.wrapping_add(digest);
        Ok(())
    }

    /// The digest since the last call; 0 for nothing to compare.
    pub(super) fn take(&mut self) -> i64 {
        std::mem::take(&mut self.digest) as i64
    }

    /// Compares the digests of all ranks, leaving out those that are 0. Logs once, on rank 0, that all ranks train on
    /// the same data.
    pub(super) fn compare(&mut self, digests: &[i64], ddp: &Ddp) {
        if self.finds_equal(digests) && ddp.is_main() {
            let advice = if ddp.state().batch_weight.reads_loaders() {
                "the dataset gives all ranks the same items, for example from a generator that has the same seed on \
                all ranks. An item must depend on its index alone"
            } else {
                "every rank reads the whole dataset. `ddp.loader(batcher)` or `ddp.shard(dataset)` gives each rank \
                its share"
            };
            tracing::warn!(
                target: "burn_ddp::data",
                "all ranks compute equal gradients, so {} ranks do the work of one: {advice}",
                ddp.world_size()
            );
        }
    }

    /// True once: in the comparison that settles that the ranks train on the same data.
    fn finds_equal(&mut self, digests: &[i64]) -> bool {
        let mut voting = digests.iter().filter(|digest| **digest != 0);
        let Some(first) = voting.next() else { return false };
        let others: Vec<&i64> = voting.collect();
        if self.settled || others.is_empty() {
            return false;
        }
        let all_equal = others.into_iter().all(|digest| digest == first);
        self.equal += u32::from(all_equal);
        self.settled = !all_equal || self.equal == ENOUGH;
        self.settled && all_equal
    }
}

/// Digest of the gradient of a slot; 0 if all of it is 0, which every data set may lead to.
fn digest(slot: usize, gradient: &[u8]) -> u64 {
    match gradient.iter().any(|byte| *byte != 0) {
        true => xxh3_64_with_seed(gradient, slot as u64),
        false => 0,
    }
}

#[cfg(test)]
mod tests {
    use burn::nn::{Linear, LinearConfig};
    use burn::tensor::{Device, Tensor};
    use burn_ddp_comm::DType;

    use super::*;
    use crate::WrapConfig;
    use crate::telemetry::test_event_capture::Listener;

    fn slot(len: usize, trainable: bool) -> Slot {
        Slot { path: "a".into(), dims: vec![len], dtype: DType::F32, trainable, sharded: false }
    }

    #[test]
    fn the_smallest_parameters_are_compared_and_at_least_one_that_is_trained() {
        let compared = |slots: &[Slot]| SameGradients::new(slots).compared;
        let (large, small) = (COMPARED_BYTES / 4, 100);
        assert_eq!(compared(&[slot(large, true), slot(small, true), slot(small, true)]), [false, true, true]);
        assert_eq!(compared(&[slot(2 * large, true), slot(4 * large, true)]), [true, false]);
        assert_eq!(compared(&[slot(small, false), slot(large, true)]), [false, true]);
    }

    #[test]
    fn two_comparisons_in_a_row_are_enough_and_one_that_differs_settles_it() {
        let found = |rounds: &[&[i64]]| {
            let mut same = SameGradients::new(&[slot(1, true)]);
            rounds.iter().map(|digests| same.finds_equal(digests)).collect::<Vec<_>>()
        };
        assert_eq!(found(&[&[5, 5], &[6, 6], &[7, 7]]), [false, true, false], "once");
        assert_eq!(found(&[&[5, 6], &[6, 6], &[7, 7]]), [false; 3]);
        assert_eq!(found(&[&[5, 5], &[6, 7], &[7, 7], &[8, 8]]), [false; 4]);
        // Ranks of weight 0 repeat an item of another one.
        assert_eq!(found(&[&[5, 0, 5], &[0, 6, 6]]), [false, true]);
        assert_eq!(found(&[&[5, 0], &[0, 6], &[0, 0]]), [false; 3]);
    }

    /// Warnings of each rank of a training.
    fn warnings_of(world: usize, train: impl Fn(&Ddp) -> anyhow::Result<()> + Sync) -> Vec<Vec<String>> {
        let warnings = Ddp::spawn(world, |ddp| {
            let listener = Listener::default();
            tracing::subscriber::with_default(listener.clone(), || train(&ddp))?;
            let message = |fields: Vec<(String, String)>| fields.into_iter().find(|(name, _)| name == "message");
            Ok(listener.events("burn_ddp::data").into_iter().filter_map(message).map(|(_, text)| text).collect())
        });
        warnings.unwrap()
    }

    /// Warnings of each rank of a training, in which `data` gives a rank its item of a step.
    fn warnings(world: usize, config: &WrapConfig, data: impl Fn(usize, usize) -> f64 + Sync) -> Vec<Vec<String>> {
        warnings_of(world, |ddp| {
            let device = ddp.device()?.autodiff();
            let model: Linear = ddp.wrap_with(LinearConfig::new(1, 2).init(&device), config)?;
            for step in 0..6 {
                let item = data(ddp.rank(), step);
                let loss = model.forward(input(item, &device)).powi_scalar(2).sum();
                ddp.weighted(if item == 0.0 { 0.0 } else { 1.0 }).backward(&loss, &model)?;
            }
            Ok(())
        })
    }

    fn input(item: f64, device: &Device) -> Tensor<2> {
        Tensor::full([1, 1], item, device)
    }

    #[test]
    fn a_forgotten_loader_is_a_warning() {
        for config in [WrapConfig::new(), WrapConfig::new().with_accumulation(2)] {
            let warned = warnings(3, &config, |_, step| 1.0 + step as f64);
            assert_eq!(warned.iter().map(Vec::len).collect::<Vec<_>>(), [1, 0, 0], "{warned:?}");
            assert!(warned[0][0].contains("3 ranks do the work of one: every rank reads the whole"), "{warned:?}");
        }
    }

    #[test]
    fn healthy_trainings_have_no_warning() {
        let none = |world, data: &(dyn Fn(usize, usize) -> f64 + Sync)| {
            let warned = warnings(world, &WrapConfig::new(), data);
            assert!(warned.iter().all(Vec::is_empty), "{warned:?}");
        };
        none(2, &|rank, step| 1.0 + (2 * step + rank) as f64);
        none(3, &|rank, _| 1.0 + (rank / 2) as f64); // two of three ranks
        none(2, &|rank, step| if step < 2 { 1.0 } else { 1.0 + rank as f64 }); // a dummy batch first
        none(2, &|rank, step| if rank == 1 { 0.0 } else { 1.0 + step as f64 }); // of weight 0
        none(1, &|_, step| 1.0 + step as f64);
    }

    #[test]
    fn gradients_that_depend_on_no_data_are_no_evidence() {
        let warned = warnings_of(2, |ddp| {
            let device = ddp.device()?.autodiff();
            let model: Linear = ddp.wrap(LinearConfig::new(COMPARED_BYTES / 4, 1).init(&device))?;
            for step in 0..4 {
                let x = Tensor::<2>::full([1, COMPARED_BYTES / 4], (2 * step + ddp.rank()) as f32, &device);
                ddp.backward(&model.forward(x).mean(), &model)?;
            }
            Ok(())
        });
        assert!(warned.iter().all(Vec::is_empty), "{warned:?}");
    }

    /// Warnings of trainings on the same data, or not, which read parameters for something else in each step.
    fn warnings_with_other_reads(same: bool) -> Vec<Vec<String>> {
        warnings_of(2, |ddp| {
            let device = ddp.device()?.autodiff();
            let model: Linear = ddp.wrap(LinearConfig::new(1, 2).init(&device))?;
            for step in 0..6 {
                let item = input(1.0 + (2 * step + if same { 0 } else { ddp.rank() }) as f64, &device);
                ddp.backward(&model.forward(item.clone()).sum(), &model)?;
                // Burn may keep this graph until the next backward.
                drop(model.weight.val().powi_scalar(2).sum());
                if same {
                    drop(model.forward(item).sum());
                }
            }
            Ok(())
        })
    }

    #[test]
    fn reads_without_a_backward_change_nothing() {
        let warned = warnings_with_other_reads(true);
        assert_eq!(warned.iter().map(Vec::len).collect::<Vec<_>>(), [1, 0], "{warned:?}");
        let warned = warnings_with_other_reads(false);
        assert!(warned.iter().all(Vec::is_empty), "{warned:?}");
    }
}
