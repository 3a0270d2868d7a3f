//! Optimizers and mappers that step sharded parameters without having been checked for them.

use burn::optim::{LearningRate, MuonConfig, Optimizer};

use super::*;

/// Trains for four steps; `step` gets the gradients of `a`, and those of `b`, in each.
fn train(
    world: usize,
    step: impl Fn(&Ddp, &mut DdpOptimizer, Two, GradientsParams, GradientsParams) -> Two + Sync,
) -> burn_ddp::Result<Vec<()>> {
    Ddp::spawn(world, |ddp| {
        let device = ddp.device()?.autodiff();
        let mut model = ddp.wrap_with(Two::new(&device), &sharded())?;
        let mut optim = ddp.optimizer(AdamWConfig::new().init(), &model)?;
        for number in 0..4 {
            let loss = model.loss(&ddp, number, true);
            let (of_a, of_b) = ddp.backward(&loss, (&model.a, &model.b))?.expect("averages");
            model = step(&ddp, &mut optim, model, of_a, of_b);
        }
        ddp.check_replicas(&model)?;
        Ok(())
    })
}

fn refused(world: usize, step: impl Fn(&Ddp, &mut DdpOptimizer, Two, GradientsParams, GradientsParams) -> Two + Sync) {
    let error = train(world, step).unwrap_err().to_string();
    assert!(
        error.contains(".weight was changed since its last backward") && error.contains("ddp.element_wise"),
        "{world} ranks: {error}"
    );
}

/// A step of gradient descent by hand.
struct Descent<'a>(&'a GradientsParams);

impl ModuleMapper for Descent<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(gradient) = self.0.get::<D>(param.id) else { return param };
        param.map(|value| Tensor::from_inner(value.inner() - gradient.mul_scalar(0.1)).require_grad())
    }
}

#[test]
fn a_second_optimizer_that_was_not_checked_is_an_error_in_the_next_step() {
    for world in [1, 2, 3] {
        for first in [true, false] {
            refused(world, |_, optim, model, of_a, of_b| {
                let muon = |model| MuonConfig::new().init().step(0.1, model, of_a);
                match first {
                    true => optim.step(0.1, muon(model), of_b),
                    false => muon(optim.step(0.1, model, of_b)),
                }
            });
        }
        // Only a `ModuleOptimizer` of the checked one.
        refused(world, |_, optim, model, of_a, of_b| {
            let model = optim.step(0.1, model, of_b);
            burn::optim::ModuleOptimizer::clone(optim).step(0.1, model, of_a)
        });
        refused(world, |_, optim, model, of_a, of_b| optim.step(0.1, model, of_b).map(&mut Descent(&of_a)));
    }
}

#[test]
fn checked_optimizers_divide_the_parameters_and_mappers_by_element_are_allowed() {
    for world in [1, 2, 3] {
        train(world, |ddp, optim, model, of_a, of_b| {
            let model = optim.step(0.1, model, of_b);
            let model = optim.step(0.1, model, of_a);
            ddp.element_wise(|| model.map(&mut Fill(0.3)))
        })
        .unwrap();
        train(world, |ddp, optim, model, of_a, of_b| {
            let model = ddp.element_wise(|| model.map(&mut Descent(&of_a)));
            // Freezing maps the parameters, too.
            optim.step(0.1, model, of_b).freeze().unfreeze()
        })
        .unwrap();
        // An average of weights is no model that trains.
        train(world, |_, optim, model, of_a, of_b| {
            let _average = model.clone().map(&mut Fill(0.5));
            let model = optim.step(0.1, model, of_a);
            optim.step(0.1, model, of_b)
        })
        .unwrap();
    }
}

/// Steps matrices of a fixed width; a width that it does not know is a bug of the program, which says so.
#[derive(Clone)]
struct OfWidth(usize);

impl Optimizer for OfWidth {
    type State<const D: usize> = burn::optim::momentum::MomentumState<D>;

    fn step<const D: usize>(
        &self,
        lr: LearningRate,
        tensor: Tensor<D>,
        grad: Tensor<D>,
        _: Option<Self::State<D>>,
    ) -> (Tensor<D>, Option<Self::State<D>>) {
        assert_eq!(tensor.dims()[D - 1], self.0, "a matrix of another width");
        (tensor - grad * lr, None)
    }

    fn to_device<const D: usize>(state: Self::State<D>, _: &Device) -> Self::State<D> {
        state
    }
}

#[test]
fn optimizers_are_checked_with_the_shapes_of_the_parameters() {
    for world in 1..=4 {
        Ddp::spawn(world, |ddp| {
            let device = ddp.device()?.autodiff();
            let model = LinearConfig::new(5, 7).with_bias(false).init(&device);
            let mut model: Linear = ddp.wrap_with(model, &sharded())?;
            let mut optim = ddp.optimizer(burn::optim::ModuleOptimizer::from(OfWidth(7)), &model)?;
            let loss = model.forward(Tensor::<2>::ones([1, 5], &device)).sum();
            let grads = ddp.backward(&loss, &model)?.expect("averages");
            model = optim.step(0.1, model, grads);
            Ok(ddp.check_replicas(&model)?)
        })
        .unwrap();
    }
}

/// The largest gradients of the check end in NaN in such an optimizer, together and apart.
#[test]
fn optimizers_that_mix_elements_are_refused_in_large_parameters_too() {
    Ddp::spawn(2, |ddp| {
        let model = LinearConfig::new(128, 256).with_bias(false).init(&ddp.device()?.autodiff());
        let model: Linear = ddp.wrap_with(model, &sharded())?;
        for optim in [burn::optim::AdafactorConfig::new().init(), MuonConfig::new().init()] {
            let error = ddp.optimizer(optim, &model).map(drop).expect_err("it mixes elements").to_string();
            anyhow::ensure!(error.contains("(weight)"), "{error}");
        }
        ddp.optimizer(AdamWConfig::new().init(), &model)?;
        Ok(())
    })
    .unwrap();
}
