//! Datasets that draw at random: different items on each rank, or the same items on all ranks.

use std::sync::atomic::{AtomicUsize, Ordering};

use burn::nn::{Linear, LinearConfig};
use burn::tensor::Tensor;

use super::*;
use crate::telemetry::test_event_capture::Listener;

/// A dataset that draws each item from its own generator, whatever the index.
struct Drawn(AtomicUsize);

impl Dataset<usize> for Drawn {
    fn get(&self, _: usize) -> Result<usize, DatasetError> {
        Ok(self.0.fetch_add(1, Ordering::Relaxed) * 7 % 31)
    }

    fn len(&self) -> usize {
        40
    }
}

/// Warnings on rank 0 of a training on `dataset`.
fn warnings<D: Dataset<usize> + 'static>(dataset: impl Fn() -> D + Sync) -> Vec<String> {
    let of_ranks = spawn(2, |ddp| {
        let listener = Listener::default();
        tracing::subscriber::with_default(listener.clone(), || {
            let device = ddp.device()?.autodiff();
            let model: Linear = ddp.wrap(LinearConfig::new(1, 1).init(&device))?;
            for batch in ddp.loader(Keep).batch_size(1).build(dataset())?.iter().take(8) {
                let x = Tensor::<2>::from_floats([[batch?[0] as f32]], &device);
                ddp.backward(&model.forward(x).sum(), &model)?;
            }
            anyhow::Ok(())
        })?;
        let events = listener.events("burn_ddp::data").into_iter().flatten();
        Ok(events.filter(|(name, _)| name == "message").map(|(_, text)| text).collect::<Vec<_>>())
    });
    assert!(of_ranks[1].is_empty());
    of_ranks[0].clone()
}

#[test]
fn items_drawn_alike_on_all_ranks_are_a_warning() {
    let warned = warnings(|| Drawn(AtomicUsize::new(1)));
    assert_eq!(warned.len(), 1, "{warned:?}");
    assert!(warned[0].contains("equal gradients") && warned[0].contains("that has the same seed"), "{warned:?}");
    assert!(warnings(|| numbers(40)).is_empty());
}

#[test]
fn compared_items_that_differ_between_ranks_or_reads_are_an_error_on_all_ranks() {
    let errors = spawn(2, |ddp| {
        let check = || ddp.loader(Keep).check_items(|item| *item);
        check().build(numbers(40))?;
        let apart = InMemDataset::new((0..40).map(|item| item + ddp.rank() * item / 35).collect());
        let apart = check().build(apart).unwrap_err().to_string();
        let unstable = check().build(Drawn(AtomicUsize::new(0))).unwrap_err().to_string();
        let of_evaluation = ddp.eval_loader(Keep).check_items(|item| *item);
        let of_evaluation = of_evaluation.build(Drawn(AtomicUsize::new(0))).unwrap_err().to_string();
        // The job can go on.
        ddp.barrier()?;
        Ok([apart, unstable, of_evaluation])
    });
    assert_eq!(errors[0], errors[1]);
    let [apart, unstable, of_evaluation] = &errors[0];
    assert!(apart.contains("loader 1 differently: item 35 is 35 on rank 0 and 36 on rank 1;"), "{apart}");
    assert!(unstable.contains("item 0 of the dataset is 0 when it is read first, and 7"), "{unstable}");
    assert_eq!(unstable, of_evaluation);
}
