//! Steps of several backwards, on copies of the model or on other threads: meta-learning, sharpness-aware minimisation,
//! gradients that are combined by hand, divided between optimizers or applied late, slow and fast weights. In every
//! world they train as in plain Burn, although ranks use different parameters, and with sharded parameters.

use std::time::Duration;

use burn::module::{ModuleMapper, ModuleVisitor, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{GradientsParams, SgdConfig};
use burn::prelude::*;
use burn::tensor::DType;
use burn_ddp::WorldOptions;
use burn_ddp::prelude::*;
use burn_ddp_tests::split_training::numbered;
use burn_ddp_tests::{distance, rows, to_f64, values};

/// Rows of a batch, over all ranks.
const ROWS: usize = 12;

/// A trunk, and experts that have a third of the rows each: each of three ranks uses one, a different one in each
/// batch.
#[derive(Module, Debug)]
struct Routed {
    trunk: Linear,
    experts: Vec<Linear>,
}

impl Routed {
    fn new(device: &Device) -> Self {
        let init = |outputs| LinearConfig::new(6, outputs).init(device);
        Routed { trunk: init(6), experts: (0..3).map(|_| init(2)).collect() }
    }
}

/// The share of one rank in the training.
#[derive(Clone, Copy)]
struct Share<'a> {
    /// The rank of a wrapped model; none in plain Burn.
    ddp: Option<&'a Ddp>,
    device: &'a Device,
    rank: usize,
    world: usize,
    /// True if every rank reads all experts, as ranks with sharded parameters must.
    reads_all: bool,
}

impl Share<'_> {
    /// Mean loss of this rank's rows of the batch.
    fn loss(&self, model: &Routed, batch: usize) -> Tensor<1> {
        let n = ROWS / self.world;
        let own = self.rank * n..(self.rank + 1) * n;
        let losses = own.step_by(2).map(|row| {
            let x = rows(batch * ROWS + row, 2, 6, 1, DType::F64, self.device);
            let hidden = model.trunk.forward(x).tanh();
            let own = (row * 3 / ROWS + batch) % 3;
            let read = if self.reads_all { 0..3 } else { own..own + 1 };
            let weight = |expert| if expert == own { 1.0 } else { 0.0 };
            let losses = read.map(|i| model.experts[i].forward(hidden.clone()).powf_scalar(2.0).mean() * weight(i));
            Tensor::cat(losses.collect(), 0).sum()
        });
        Tensor::cat(losses.collect(), 0).mean()
    }

    fn grads(&self, model: &Routed, batch: usize) -> GradientsParams {
        self.grads_of(&self.loss(model, batch), model)
    }

    fn grads_of(&self, loss: &Tensor<1>, model: &Routed) -> GradientsParams {
        match self.ddp {
            Some(ddp) => ddp.backward(loss, model).unwrap().expect("averages"),
            None => GradientsParams::from_grads(loss.backward(), model),
        }
    }

    /// Gradients of the trunk, and of the experts.
    fn grads_of_parts(&self, model: &Routed, batch: usize) -> (GradientsParams, GradientsParams) {
        let loss = self.loss(model, batch);
        if let Some(ddp) = self.ddp {
            return ddp.backward(&loss, (&model.trunk, &model.experts)).unwrap().expect("averages");
        }
        let mut grads = loss.backward();
        let trunk = GradientsParams::from_module(&mut grads, &model.trunk);
        (trunk, GradientsParams::from_grads(grads, &model.experts))
    }

    /// Runs `f`, whose optimizer and mappers treat each element by itself.
    fn element_wise<T>(&self, f: impl FnOnce() -> T) -> T {
        match self.ddp {
            Some(ddp) => ddp.element_wise(f),
            None => f(),
        }
    }
}

/// A mapper that combines each parameter with the tensor of its id, if there is one: the first number times the
/// parameter, plus the second times the tensor.
struct Mix<'a>(&'a GradientsParams, [f64; 2]);

impl ModuleMapper for Mix<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let id = param.id;
        let Some(other) = self.0.get::<D>(id) else { return param };
        param.map(|value| Tensor::from_inner(value.inner() * self.1[0] + other * self.1[1]).require_grad())
    }
}

/// Values of all parameters by their ids.
fn by_id(model: &Routed) -> GradientsParams {
    struct Read(GradientsParams);
    impl ModuleVisitor for Read {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.0.register(param.id, param.base().inner());
        }
    }
    let mut read = Read(GradientsParams::new());
    model.visit(&mut read);
    read.0
}

/// The sum of the gradients of two losses; elements of the second count only where both have the same sign.
fn surgery(model: &Routed, mut a: GradientsParams, b: &GradientsParams) -> GradientsParams {
    struct Agree<'a>(&'a mut GradientsParams, &'a GradientsParams);
    impl ModuleVisitor for Agree<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let (Some(a), Some(b)) = (self.0.remove::<D>(param.id), self.1.get::<D>(param.id)) else { return };
            let agree = (a.clone() * b.clone()).greater_elem(0.0);
            let b = b.zeros_like().mask_where(agree, b);
            self.0.register(param.id, a + b);
        }
    }
    model.visit(&mut Agree(&mut a, b));
    a
}

/// A training of some steps.
type Training = fn(Routed, Share<'_>) -> Routed;

/// First-order meta-learning: a copy takes two steps, and the model one by the gradients of the copy.
fn meta_learning(mut model: Routed, share: Share<'_>) -> Routed {
    let mut optim = SgdConfig::new().with_momentum(Some(MomentumConfig::new())).init();
    for step in 0..3 {
        let (mut adapted, mut inner) = (model.clone(), SgdConfig::new().init());
        for batch in 0..2 {
            let grads = share.grads(&adapted, 10 * step + batch);
            adapted = inner.step(0.1, adapted, grads);
        }
        let grads = share.grads(&adapted, 10 * step + 2);
        model = optim.step(0.1, model, grads);
    }
    model
}

/// The model is stepped by the gradients of a copy that has been moved up its gradient.
fn sharpness_aware(mut model: Routed, share: Share<'_>) -> Routed {
    let mut optim = SgdConfig::new().init();
    for step in 0..3 {
        let up = share.grads(&model, step);
        let grads = {
            let above = model.clone().map(&mut Mix(&up, [1.0, 0.2]));
            share.grads(&above, step)
        };
        model = optim.step(0.1, model, grads);
    }
    model
}

/// The same with the model itself instead of a copy.
fn there_and_back(mut model: Routed, share: Share<'_>) -> Routed {
    let mut optim = SgdConfig::new().init();
    for step in 0..3 {
        let up = share.grads(&model, step);
        let before = by_id(&model);
        model = model.map(&mut Mix(&up, [1.0, 0.2]));
        let grads = share.grads(&model, step);
        model = model.map(&mut Mix(&before, [0.0, 1.0]));
        model = optim.step(0.1, model, grads);
    }
    model
}

fn combined_by_hand(mut model: Routed, share: Share<'_>) -> Routed {
    let mut optim = SgdConfig::new().init();
    for step in 0..3 {
        let (a, b) = (share.loss(&model, 2 * step), share.loss(&model, 2 * step + 1));
        let b = share.grads_of(&b, &model);
        let a = share.grads_of(&a, &model);
        let grads = surgery(&model, a, &b);
        model = optim.step(0.1, model, grads);
    }
    model
}

/// Lookahead: slow weights follow a copy that takes three steps.
fn slow_and_fast(mut model: Routed, share: Share<'_>) -> Routed {
    for round in 0..2 {
        let (mut fast, mut optim) = (model.clone(), SgdConfig::new().init());
        for step in 0..3 {
            let grads = share.grads(&fast, 3 * round + step);
            fast = optim.step(0.1, fast, grads);
        }
        model = model.map(&mut Mix(&by_id(&fast), [0.5, 0.5]));
    }
    model
}

/// Forward, backward and step on three threads.
fn on_other_threads(mut model: Routed, share: Share<'_>) -> Routed {
    let mut optim = SgdConfig::new().init();
    for step in 0..3 {
        let loss = std::thread::scope(|scope| scope.spawn(|| share.loss(&model, step)).join().unwrap());
        let grads = std::thread::scope(|scope| scope.spawn(|| share.grads_of(&loss, &model)).join().unwrap());
        let stepped = || share.element_wise(|| optim.step(0.1, model, grads));
        model = std::thread::scope(|scope| scope.spawn(stepped).join().unwrap());
    }
    model
}

/// The gradients of three copies are combined; all forwards come before the first backward.
fn over_copies(mut model: Routed, share: Share<'_>) -> Routed {
    let mut optim = SgdConfig::new().init();
    for step in 0..3 {
        let direction = by_id(&model);
        let copies = [0.9, 1.0, 1.1].map(|by| model.clone().map(&mut Mix(&direction, [0.0, by])));
        let losses = copies.each_ref().map(|copy| share.loss(copy, step));
        let grads = |i: usize| share.grads_of(&losses[i], &copies[i]);
        let grads = surgery(&model, surgery(&model, grads(0), &grads(1)), &grads(2));
        model = optim.step(0.1, model, grads);
    }
    model
}

/// Three optimizers share the gradients of one backward.
fn in_parts(mut model: Routed, share: Share<'_>) -> Routed {
    let momentum = || SgdConfig::new().with_momentum(Some(MomentumConfig::new())).init();
    let mut optims = [momentum(), momentum(), momentum()];
    for step in 0..4 {
        let (trunk, mut weights) = share.grads_of_parts(&model, step);
        let mut biases = GradientsParams::new();
        for bias in model.experts.iter().filter_map(|expert| expert.bias.as_ref()) {
            biases.register(bias.id, weights.remove::<1>(bias.id).expect("every expert is used"));
        }
        assert_eq!([biases.len(), trunk.len(), weights.len()], [3, 2, 3]);
        for ((optim, grads), lr) in optims.iter_mut().zip([biases, trunk, weights]).zip([0.2, 0.1, 0.05]) {
            model = optim.step(lr, model, grads);
        }
    }
    model
}

/// The model is stepped by the gradients of the backward before the last.
fn one_step_late(mut model: Routed, share: Share<'_>) -> Routed {
    let (mut optim, mut late) = (SgdConfig::new().init(), None);
    for step in 0..4 {
        if let Some(grads) = late.replace(share.grads(&model, step)) {
            model = optim.step(0.1, model, grads);
        }
    }
    model
}

#[test]
fn they_train_as_plain_burn() {
    let trainings: [(&str, Training); 9] = [
        ("meta_learning", meta_learning),
        ("sharpness_aware", sharpness_aware),
        ("there_and_back", there_and_back),
        ("combined_by_hand", combined_by_hand),
        ("slow_and_fast", slow_and_fast),
        ("on_other_threads", on_other_threads),
        ("over_copies", over_copies),
        ("in_parts", in_parts),
        ("one_step_late", one_step_late),
    ];
    let new = |rank: usize, device: &Device| to_f64(numbered(Routed::new(device), 1 + 100 * rank as u64));
    for (name, train) in trainings {
        let device = burn_ddp_tests::device().autodiff();
        let alone = Share { ddp: None, device: &device, rank: 0, world: 1, reads_all: false };
        let plain = values(&train(new(0, &device), alone));
        assert!(distance(&plain, &values(&new(0, &device))) > 1e-3, "{name}: nothing was trained");
        for (world, sharding) in [1, 2, 3].into_iter().flat_map(|n| [(n, Sharding::Off), (n, Sharding::Parameters)]) {
            let ranks = Ddp::spawn(world, |ddp| {
                let device = ddp.device()?.autodiff();
                let config = WrapConfig::new().with_replica_check(1).with_sharding(sharding).with_sharding_above(1);
                let model = ddp.wrap_with(new(ddp.rank(), &device), &config)?;
                ddp.optimizer(SgdConfig::new().init(), &model)?;
                let reads_all = sharding == Sharding::Parameters;
                let share = Share { ddp: Some(&ddp), device: &device, rank: ddp.rank(), world, reads_all };
                // The optimizers and mappers are by element, and were not checked.
                let model = ddp.element_wise(|| train(model, share));
                ddp.check_replicas(&model)?;
                Ok(values(&ddp.unwrap(model)?))
            });
            for (rank, values) in ranks.unwrap().iter().enumerate() {
                let d = distance(values, &plain);
                assert!(d <= 1e-12, "{name}, rank {rank} of {world}, {sharding:?}: {d:e}");
            }
        }
    }
}

/// Each wrapped model has its own group, so ranks need not agree on the order of the models' backwards.
#[test]
fn two_models_train_on_two_threads_of_each_rank() {
    let timeout = Duration::from_secs(60);
    let options = WorldOptions { timeout, ..WorldOptions::default() };
    let device = burn_ddp_tests::device().autodiff();
    let new = |nth: u64, device: &Device| to_f64(numbered(Routed::new(device), nth));
    let train = |mut model: Routed, share: Share<'_>| {
        let mut optim = SgdConfig::new().init();
        for step in 0..10 {
            let grads = share.grads(&model, step);
            model = optim.step(0.1, model, grads);
        }
        values(&model)
    };
    let alone = Share { ddp: None, device: &device, rank: 0, world: 1, reads_all: false };
    let plain = [1, 2].map(|nth| train(new(nth, &device), alone));
    let ranks = Ddp::spawn_with(2, options, |ddp| {
        let device = ddp.device()?.autodiff();
        let models = [ddp.wrap(new(1, &device))?, ddp.wrap(new(2, &device))?];
        let share = Share { ddp: Some(&ddp), device: &device, rank: ddp.rank(), world: 2, reads_all: false };
        Ok(std::thread::scope(|scope| {
            models.map(|model| scope.spawn(|| train(model, share))).map(|thread| thread.join().unwrap())
        }))
    });
    for (rank, models) in ranks.unwrap().iter().enumerate() {
        for (values, plain) in models.iter().zip(&plain) {
            let d = distance(values, plain);
            assert!(d <= 1e-12, "rank {rank}: {d:e}");
        }
    }
}
