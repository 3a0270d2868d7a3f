//! The default device of batches, if the program sets none.

use burn::nn::{BatchNorm, BatchNormConfig};
use burn::tensor::Tensor;

use super::*;

struct Column;

impl Batcher<usize, Tensor<2>> for Column {
    fn batch(&self, items: Vec<usize>, device: &Device) -> Tensor<2> {
        let items: Vec<f32> = items.into_iter().map(|item| item as f32).collect();
        Tensor::<1>::from_floats(items.as_slice(), device).unsqueeze_dim(1)
    }
}

#[test]
fn a_batch_norm_as_the_first_layer_trains_in_training_and_not_in_evaluation() {
    for wrapped_first in [false, true] {
        spawn(2, |ddp| {
            let device = ddp.device()?.autodiff();
            let mut model: BatchNorm = BatchNormConfig::new(1).init(&device);
            if wrapped_first {
                model = ddp.wrap(model)?;
            }
            let train = ddp.loader(Column).batch_size(4).build(numbers(8))?;
            let test = ddp.eval_loader(Column).batch_size(4).build(numbers(8))?;
            if !wrapped_first {
                model = ddp.wrap(model)?;
            }
            let x = train.iter().next().unwrap()?;
            assert!(x.device().is_autodiff());
            let trained = model.forward(x).mean().into_scalar::<f32>();
            assert!(trained.abs() < 1e-5, "the batch is normalized by its own mean: {trained}");

            let x = test.iter().next().unwrap()?;
            assert!(!x.device().is_autodiff());
            Ok(())
        });
    }
}

#[test]
fn batches_follow_the_wrapped_model() {
    spawn(1, |ddp| {
        let device = ddp.device()?.autodiff().gradient_checkpointing();
        let _model: BatchNorm = ddp.wrap(BatchNormConfig::new(1).init(&device))?;
        let x = ddp.loader(Column).build(numbers(2))?.iter().next().unwrap()?;
        // Devices are equal with and without checkpointing, so compare their texts.
        assert_eq!(format!("{:?}", x.device()), format!("{device:?}"));
        Ok(())
    });
}
