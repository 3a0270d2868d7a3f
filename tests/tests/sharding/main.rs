//! `WrapConfig::with_sharding`: the bits of unsharded training, and errors if ranks read different parameters.

mod bits;
mod faults_of_a_rank;
mod frozen;
mod other_optimizers;
mod replaced_values;
mod traffic;
mod unequal_ranks;
mod uneven_data;

use std::time::{Duration, Instant};

use burn::module::{Module, ModuleMapper, Param};
use burn::nn::{
    BatchNorm, BatchNormConfig, Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig,
    LinearLayout, RmsNorm, RmsNormConfig,
};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamConfig, AdamWConfig, GradientsParams, ModuleOptimizer, SgdConfig};
use burn::prelude::*;
use burn::tensor::activation::softmax;
use burn_ddp::prelude::*;
use burn_ddp_tests::Fill;

/// A decoder block over an embedding that the output layer also reads. The rows of some layers divide evenly between
/// ranks, those of others do not.
#[derive(Module, Debug)]
struct Gpt {
    tokens: Embedding,
    norm: LayerNorm,
    query: Linear,
    key: Linear,
    value: Linear,
    rms: RmsNorm,
    up: Linear,
    batch_norm: BatchNorm,
    down: Linear,
}

impl Gpt {
    fn new(device: &Device, salt: u64) -> Self {
        let linear = |i, o| LinearConfig::new(i, o).init(device);
        let model = Gpt {
            tokens: EmbeddingConfig::new(11, 6).init(device),
            norm: LayerNormConfig::new(6).init(device),
            query: linear(6, 6),
            key: linear(6, 6),
            value: LinearConfig::new(6, 6).with_layout(LinearLayout::Col).init(device),
            rms: RmsNormConfig::new(6).init(device),
            up: linear(6, 9),
            batch_norm: BatchNormConfig::new(9).init(device),
            down: linear(9, 6),
        };
        model.map(&mut Fill(salt as f32))
    }

    /// `[n, t]` tokens → a loss.
    fn loss(&self, tokens: Tensor<2, Int>) -> Tensor<1> {
        let x = self.tokens.forward(tokens);
        let h = self.norm.forward(x.clone());
        let scores = self.query.forward(h.clone()).matmul(self.key.forward(h.clone()).swap_dims(1, 2));
        let x = x + softmax(scores, 2).matmul(self.value.forward(h));
        let h = self.up.forward(self.rms.forward(x.clone())).tanh();
        let h = self.batch_norm.forward(h.swap_dims(1, 2)).swap_dims(1, 2);
        let x = x + self.down.forward(h);
        // The output reads the embedding, as tied models do.
        x.matmul(self.tokens.weight.val().transpose().unsqueeze()).powf_scalar(2.0).mean()
    }
}

fn tokens(rank: usize, step: usize, device: &Device) -> Tensor<2, Int> {
    let token = |i: usize| ((7 * i + 3 * rank + 5 * step + i * i * (rank + 1)) % 11) as i32;
    Tensor::<1, Int>::from_ints((0..12).map(token).collect::<Vec<_>>().as_slice(), device).reshape([3, 4])
}

fn optimizers() -> [(&'static str, ModuleOptimizer); 4] {
    [
        ("sgd", SgdConfig::new().init()),
        ("momentum", SgdConfig::new().with_momentum(Some(MomentumConfig::new())).init()),
        ("adam", AdamConfig::new().init()),
        ("adamw", AdamWConfig::new().init()),
    ]
}

fn sharded() -> WrapConfig {
    WrapConfig::new().with_sharding(Sharding::Parameters).with_sharding_above(1)
}

fn train(ddp: &Ddp, config: &WrapConfig, optim: ModuleOptimizer, steps: usize) -> anyhow::Result<(Gpt, DdpOptimizer)> {
    let device = ddp.device()?.autodiff();
    let mut model = ddp.wrap_with(Gpt::new(&device, ddp.rank() as u64), config)?;
    let mut optim = ddp.optimizer(optim, &model)?;
    for step in 0..steps {
        let loss = model.loss(tokens(ddp.rank(), step, &device));
        let grads = ddp.backward(&loss, &model)?.expect("averages");
        model = optim.step(0.01, model, grads);
    }
    Ok((model, optim))
}

/// Hash of the model after training.
fn hash(world: usize, config: &WrapConfig, optim: usize) -> String {
    let hashes = Ddp::spawn(world, |ddp| {
        let (model, _) = train(&ddp, config, optimizers()[optim].1.clone(), 20)?;
        Ok(param_hash(&model)?)
    });
    let hashes = hashes.unwrap();
    assert!(hashes.iter().all(|hash| *hash == hashes[0]));
    hashes[0].clone()
}

#[test]
fn a_transformer_of_burn_s_trains_and_its_parts_are_compared_and_broadcast() {
    use burn::nn::transformer::{TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput};

    /// A model whose parts a program saves or compares by themselves.
    #[derive(Module, Debug)]
    struct Outer {
        encoder: TransformerEncoder,
    }

    let trained = |config: &WrapConfig, in_parts: bool| {
        let hashes = Ddp::spawn(2, |ddp| {
            let device = ddp.device()?.autodiff();
            let encoder = TransformerEncoderConfig::new(8, 16, 2, 1).with_dropout(0.0).init(&device);
            let mut model = ddp.wrap_with(Outer { encoder }.map(&mut Fill(ddp.rank() as f32)), config)?;
            let mut optim = ddp.optimizer(AdamConfig::new().init(), &model)?;
            for step in 0..3 {
                let x = Tensor::<1, Int>::arange(0..32, &device).float().add_scalar((ddp.rank() + step) as f32);
                let loss = model.encoder.forward(TransformerEncoderInput::new(x.sin().reshape([2, 2, 8])));
                let grads = ddp.backward(&loss.powf_scalar(2.0).mean(), &model)?.expect("averages");
                model = optim.step(0.01, model, grads);
            }
            // A part of the wrapped model: its parameters have shorter paths.
            ddp.check_replicas(&model.encoder)?;
            let hash = param_hash(&model)?;
            model.encoder = ddp.broadcast_parameters(model.encoder, 0)?;
            assert_eq!(param_hash(&model)?, hash, "each rank keeps its own rows");
            if in_parts {
                let used = ddp.optimizer(optim, &model).err().unwrap().to_string();
                assert!(used.contains("state of earlier steps"), "{used}");
            }
            Ok(hash)
        });
        hashes.unwrap()
    };
    assert_eq!(trained(&sharded(), true), trained(&WrapConfig::new(), false));
}

#[test]
fn twenty_steps_have_the_bits_of_unsharded_training() {
    for world in 1..=4 {
        for (optim, (name, _)) in optimizers().iter().enumerate() {
            let [whole, parts] = [WrapConfig::new(), sharded()].map(|config| hash(world, &config, optim));
            assert_eq!(whole, parts, "{name} on {world} ranks");
        }
    }
}

#[test]
fn weights_sums_and_micro_batches_have_the_bits_of_unsharded_training() {
    let settings: [fn(WrapConfig) -> WrapConfig; 2] =
        [|config| config.with_accumulation(2), |config| config.with_reduction(GradientReduction::Sum)];
    for (setting, settings) in settings.into_iter().enumerate() {
        let [whole, parts] = [WrapConfig::new(), sharded()].map(|config| {
            let hashes = Ddp::spawn(3, |ddp| {
                let device = ddp.device()?.autodiff();
                let mut model = ddp.wrap_with(Gpt::new(&device, 0), &settings(config.clone()))?;
                let mut optim = ddp.optimizer(AdamConfig::new().init(), &model)?;
                for step in 0..8 {
                    // Uneven weights, one of them 0.
                    let weighted = ddp.weighted([(1 + step % 3) as f64, 2.0, ((step + 1) % 2) as f64][ddp.rank()]);
                    let loss = model.loss(tokens(ddp.rank(), step, &device));
                    if step == 5 {
                        weighted.accumulate(&loss, &model)?;
                    } else if let Some(grads) = weighted.backward(&loss, &model)? {
                        model = optim.step(0.01, model, grads);
                    }
                }
                Ok(param_hash(&model)?)
            });
            hashes.unwrap()
        });
        assert_eq!(whole, parts, "setting {setting}");
    }
}

#[test]
fn each_rank_holds_its_rows_and_files_hold_all() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.bpk");
    let ranks = Ddp::spawn(4, |ddp| {
        let (model, optim) = train(&ddp, &sharded(), AdamConfig::new().init(), 3)?;
        let rows = [model.tokens.weight.base().dims()[0], model.up.weight.base().dims()[0]];
        let norm = model.norm.gamma.base().dims()[0];
        ddp.save(&model, &path)?;
        let device = ddp.device()?;
        let loss = model.valid().loss(tokens(0, 0, &device)).into_scalar::<f32>();
        let x = Tensor::<2>::ones([2, 6], &device);
        let copy = model.clone().no_grad().query.forward(x.clone()).into_data();
        assert_eq!(model.valid().query.forward(x).into_data(), copy);
        let hash = param_hash(&model)?;
        let whole = ddp.unwrap(model)?;
        assert_eq!(param_hash(&whole)?, hash);
        assert_eq!(whole.valid().loss(tokens(0, 0, &device)).into_scalar::<f32>(), loss);
        // Each moment of Adam is as large as this rank's part.
        Ok((rows, norm, hash, loss, optim.into_bytes()?.len()))
    });
    let ranks = ranks.unwrap();
    assert_eq!(ranks.iter().map(|rank| rank.0).collect::<Vec<_>>(), [[3, 2], [3, 2], [3, 1], [2, 1]]);
    assert!(ranks.iter().all(|rank| rank.1 == 6 && rank.2 == ranks[0].2 && rank.3 == ranks[0].3));
    let unsharded =
        Ddp::spawn(1, |ddp| Ok(train(&ddp, &WrapConfig::new(), AdamConfig::new().init(), 3)?.1.into_bytes()?.len()));
    assert!(ranks.iter().all(|rank| rank.4 < unsharded.as_ref().unwrap()[0]));
    for world in 1..4 {
        for config in [WrapConfig::new(), sharded()] {
            let hashes = Ddp::spawn(world, |ddp| {
                let model = Gpt::new(&ddp.device()?.autodiff(), 9).load_file(&path);
                Ok(param_hash(&ddp.wrap_with(model, &config)?)?)
            });
            assert!(hashes.unwrap().iter().all(|hash| *hash == ranks[0].2), "{world} ranks");
        }
    }
}

/// The errors of two ranks that run `what`, which panics or returns an error.
fn errors(what: impl Fn(&Ddp, &Gpt, &Device) -> anyhow::Result<()> + Sync) -> Vec<String> {
    errors_of(2, what)
}

/// Time from a fault of one rank until all ranks have an error: 5 s, and 20 s more for a busy machine. The deadline of
/// a call is 60 s.
const FAULT_HEARD: Duration = Duration::from_secs(5 + 20);

fn errors_of(world: usize, what: impl Fn(&Ddp, &Gpt, &Device) -> anyhow::Result<()> + Sync) -> Vec<String> {
    let errors = Ddp::spawn(world, |ddp| {
        let device = ddp.device()?.autodiff();
        let model = ddp.wrap_with(Gpt::new(&device, 0), &sharded())?;
        ddp.optimizer(AdamConfig::new().init(), &model)?;
        ddp.barrier()?;
        let start = Instant::now();
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| what(&ddp, &model, &device)));
        let took = start.elapsed();
        assert!(took < FAULT_HEARD, "rank {} after {took:?}: {done:?}", ddp.rank());
        Ok(match done {
            Ok(done) => done.err().map_or("no error".into(), |e| e.to_string()),
            Err(panic) => {
                let fixed = panic.downcast_ref::<&str>().map(ToString::to_string);
                panic.downcast_ref::<String>().cloned().or(fixed).unwrap_or_default()
            }
        })
    });
    errors.unwrap()
}

#[test]
fn what_sharding_does_not_allow_is_refused_by_name() {
    // A world of 1 is refused the same.
    for world in [1, 2] {
        let refused = errors_of(world, |ddp, model, _| {
            let limit = Some(burn::grad_clipping::GradientClippingConfig::Norm(1.0));
            let clips = AdamConfig::new().with_grad_clipping(limit);
            let Err(error) = ddp.optimizer(clips.init(), model) else { anyhow::bail!("clipping was not refused") };
            anyhow::ensure!(error.to_string().contains("(tokens.weight, query.weight"), "{error}");
            let mut optim = AdamConfig::new().init();
            let join = ddp.join(&mut model.clone(), &mut optim).unwrap_err().to_string();
            anyhow::ensure!(join.contains("`join` with sharded parameters"), "{join}");
            anyhow::ensure!(join.contains("ddp.weighted(0.0)"), "{join}");
            let broadcast = ddp.broadcast_optimizer_state(&mut optim, model, 0).unwrap_err().to_string();
            anyhow::ensure!(broadcast.contains("`checkpoint.optimizer`"), "{broadcast}");
            model.clone().into_record().into_bytes()?;
            Ok(())
        });
        assert!(refused.iter().all(|error| error.contains("ddp.save(&model, path)")), "{refused:?}");
        let forgotten = Ddp::spawn(world, |ddp| {
            let device = ddp.device()?.autodiff();
            let model = ddp.wrap_with(Gpt::new(&device, 0), &sharded())?;
            Ok(ddp.backward(&model.loss(tokens(0, 0, &device)), &model).err().unwrap().to_string())
        });
        assert!(forgotten.unwrap().iter().all(|error| error.contains("ddp.optimizer(optim, &model)")));
        let saved = Ddp::spawn(world, |ddp| {
            let dir = tempfile::tempdir()?;
            let model = ddp.wrap_with(Gpt::new(&ddp.device()?.autodiff(), 0), &sharded())?;
            ddp.save(&model, dir.path().join("model"))?;
            Ok(ddp.unwrap(model)?.into_record().into_bytes()?.len())
        });
        assert!(saved.unwrap().iter().all(|len| *len > 0));
    }
}

#[test]
fn a_record_of_a_copy_that_was_just_read_is_refused() {
    let error = Ddp::spawn(2, |ddp| {
        let device = ddp.device()?.autodiff();
        let model = ddp.wrap_with(LinearConfig::new(4, 4).with_bias(false).init(&device), &sharded())?;
        let copy = model.valid();
        copy.forward(Tensor::<2>::ones([1, 4], &copy.devices()[0]));
        Ok(copy.into_record().into_bytes()?.len())
    });
    let error = error.unwrap_err().to_string();
    assert!(error.contains("ddp.save(&model, path)"), "{error}");
}

/// Two layers; a step may use only one of them.
#[derive(Module, Debug)]
struct Two {
    a: Linear,
    b: Linear,
}

impl Two {
    fn new(device: &Device) -> Self {
        let linear = || LinearConfig::new(5, 5).with_bias(false).init(device);
        Two { a: linear(), b: linear() }.map(&mut Fill(1.0))
    }

    fn loss(&self, ddp: &Ddp, step: usize, uses_b: bool) -> Tensor<1> {
        let x = Tensor::<1, Int>::arange(0..10, &self.devices()[0]).float().add_scalar((3 * ddp.rank() + step) as f32);
        let y = self.a.forward(x.sin().reshape([2, 5])).tanh();
        let y = if uses_b { self.b.forward(y) } else { y };
        y.powf_scalar(2.0).mean()
    }
}

/// Trains [`Two`] sharded and not, on 1 to 3 ranks; `train` gets a model and an optimizer with momentum and weight
/// decay.
fn same_as_unsharded(config: &WrapConfig, train: impl Fn(&Ddp, Two, &mut DdpOptimizer) -> anyhow::Result<Two> + Sync) {
    for world in 1..4 {
        let [whole, parts] =
            [config.clone(), config.clone().with_sharding(Sharding::Parameters).with_sharding_above(1)].map(|config| {
                let hashes = Ddp::spawn(world, |ddp| {
                    let model = ddp.wrap_with(Two::new(&ddp.device()?.autodiff()), &config)?;
                    let mut optim = ddp.optimizer(AdamWConfig::new().with_weight_decay(0.1).init(), &model)?;
                    Ok(param_hash(&train(&ddp, model, &mut optim)?)?)
                });
                hashes.unwrap()
            });
        assert_eq!(whole, parts, "{world} ranks");
    }
}

fn stepped(optim: &mut DdpOptimizer, model: Two, grads: Option<GradientsParams>) -> Two {
    match grads {
        Some(grads) => optim.step(0.1, model, grads),
        None => model,
    }
}

#[test]
fn a_parameter_that_no_rank_used_is_not_stepped() {
    same_as_unsharded(&WrapConfig::new().with_accumulation(2), |ddp, mut model, optim| {
        // Micro-batches that use `b`: both of the first step, the first of the second, and none of the last.
        for (step, uses_b) in [true, true, true, false, false].into_iter().enumerate() {
            let grads = ddp.backward(&model.loss(ddp, step, uses_b), &model)?;
            model = stepped(optim, model, grads);
        }
        let grads = ddp.flush(&model)?.expect("a micro-batch is held");
        anyhow::ensure!(grads.get::<2>(model.a.weight.id).is_some() && grads.get::<2>(model.b.weight.id).is_none());
        Ok(stepped(optim, model, Some(grads)))
    });
}

#[test]
fn a_parameter_that_only_batches_of_weight_0_used_is_not_stepped() {
    same_as_unsharded(&WrapConfig::new().with_accumulation(2), |ddp, mut model, optim| {
        for step in 0..4 {
            // The last step has a micro-batch of weight 0, the only one that uses `b`.
            let (weight, uses_b) = [(1.0, true), (2.0, true), (0.0, true), (1.0, false)][step];
            let grads = ddp.weighted(weight).backward(&model.loss(ddp, step, uses_b), &model)?;
            model = stepped(optim, model, grads);
        }
        Ok(model)
    });
}

#[test]
fn forwards_without_a_backward_do_not_part_the_ranks() {
    same_as_unsharded(&WrapConfig::new(), |ddp, mut model, optim| {
        let mut kept = None;
        for step in 0..30 {
            let grads = ddp.backward(&model.loss(ddp, step, true), &model)?;
            // A forward without a backward, as for logging: on rank 0 its graph outlives the next backward.
            let logged = model.loss(ddp, step + 1, true);
            model = stepped(optim, model, grads);
            kept = (ddp.rank() == 0).then_some(logged);
            // On other ranks, later backwards of any thread make Burn remove the graph.
            for _ in 0..if ddp.rank() > 0 { 20 } else { 0 } {
                let unrelated = Tensor::<1>::ones([1], &ddp.device()?.autodiff()).require_grad();
                drop(unrelated.mul_scalar(2.0).backward());
            }
        }
        drop(kept);
        Ok(model)
    });
}

#[test]
fn a_generator_s_detached_forward_does_not_part_the_ranks() {
    same_as_unsharded(&WrapConfig::new(), |ddp, mut model, optim| {
        for step in 0..50 {
            let generated = model.loss(ddp, step, true).detach();
            let loss = model.loss(ddp, step + 1, true) + generated;
            let grads = ddp.backward(&loss, &model)?;
            model = stepped(optim, model, grads);
        }
        Ok(model)
    });
}

#[test]
fn every_optimizer_is_checked_for_the_parameters_that_it_steps() {
    use burn::grad_clipping::GradientClippingConfig;

    let backward = |ddp: &Ddp, checked: fn(&Ddp, &Two, &Two) -> burn_ddp::Result<()>| -> anyhow::Result<String> {
        let device = ddp.device()?.autodiff();
        let [model, other] =
            [ddp.wrap_with(Two::new(&device), &sharded())?, ddp.wrap_with(Two::new(&device), &sharded())?];
        checked(ddp, &model, &other)?;
        Ok(ddp.backward(&model.loss(ddp, 0, true), &model).err().map_or("no error".into(), |e| e.to_string()))
    };
    for (checked, expected) in [
        ((|_, _, _| Ok(())) as fn(&Ddp, &Two, &Two) -> burn_ddp::Result<()>, "the sharded parameter b.weight"),
        (|ddp, _, other| ddp.optimizer(AdamConfig::new().init(), other).map(drop), "the sharded parameter b.weight"),
        (|ddp, model, _| ddp.optimizer(AdamConfig::new().init(), &model.b).map(drop), "the sharded parameter a.weight"),
        (
            |ddp, model, _| {
                ddp.optimizer(AdamConfig::new().init(), &model.b)?;
                ddp.optimizer(SgdConfig::new().init(), &model.a).map(drop)
            },
            "no error",
        ),
    ] {
        let errors = Ddp::spawn(2, |ddp| backward(&ddp, checked)).unwrap();
        assert!(errors.iter().any(|error| error.contains(expected)), "{expected}: {errors:?}");
    }
    for limit in [1e-9, 1.0, 1e3, 1e5, 1e12, 1e17, f32::MAX.sqrt() / 20.0] {
        let refused = Ddp::spawn(1, |ddp| {
            let model = ddp.wrap_with(Two::new(&ddp.device()?.autodiff()), &sharded())?;
            let clips = Some(GradientClippingConfig::Norm(limit));
            let norm = [
                SgdConfig::new().with_gradient_clipping(clips.clone()).init(),
                SgdConfig::new()
                    .with_momentum(Some(MomentumConfig::new()))
                    .with_gradient_clipping(clips.clone())
                    .init(),
                AdamConfig::new().with_grad_clipping(clips.clone()).init(),
                AdamWConfig::new().with_grad_clipping(clips).init(),
            ];
            let value = AdamConfig::new().with_grad_clipping(Some(GradientClippingConfig::Value(limit))).init();
            ddp.optimizer(value, &model)?;
            Ok(norm.map(|optim| ddp.optimizer(optim, &model).is_err()))
        });
        assert_eq!(refused.unwrap(), [[true; 4]], "{limit}");
    }
}

#[test]
fn unwrapping_a_copy_leaves_the_micro_batches_of_the_model() {
    let trained = |config: &WrapConfig, unwraps: bool| {
        let hashes = Ddp::spawn(2, |ddp| {
            let mut model = ddp.wrap_with(Two::new(&ddp.device()?.autodiff()), &config.clone().with_accumulation(2))?;
            let mut optim = ddp.optimizer(AdamConfig::new().init(), &model)?;
            for step in 0..4 {
                let grads = ddp.backward(&model.loss(&ddp, step, true), &model)?;
                anyhow::ensure!(grads.is_none() == (step % 2 == 0), "two micro-batches to a step");
                model = stepped(&mut optim, model, grads);
                if unwraps {
                    drop(ddp.unwrap(model.clone())?);
                }
            }
            Ok(param_hash(&model)?)
        });
        hashes.unwrap()
    };
    for config in [WrapConfig::new(), sharded()] {
        assert_eq!(trained(&config, true), trained(&config, false));
    }
}

/// Adds a number to every parameter.
struct Add(f64);

impl ModuleMapper for Add {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|value| Tensor::from_inner(value.inner().add_scalar(self.0)).require_grad())
    }
}

#[test]
fn copies_evaluated_in_another_order_do_not_mix() {
    let forward =
        |model: &Two, device: &Device| model.valid().a.forward(Tensor::<2>::ones([1, 5], &device.clone().inner()));
    let evaluate = |in_turn: bool| {
        Ddp::spawn(2, |ddp| {
            let device = ddp.device()?.autodiff();
            let model = ddp.wrap_with(Two::new(&device), &sharded())?;
            // The copies have equal values, so it does not matter which of them is read.
            let (one, other) = (model.clone(), model.clone());
            let equal = if ddp.is_main() { [&one, &other] } else { [&other, &one] };
            assert_eq!(forward(equal[0], &device).into_data(), forward(equal[1], &device).into_data());
            let (one, other) = (one.map(&mut Add(1.0)), other.map(&mut Add(2.0)));
            let copies = if ddp.is_main() || in_turn { [&one, &other] } else { [&other, &one] };
            let values = copies.map(|copy| {
                let forward = std::panic::AssertUnwindSafe(|| forward(copy, &device).into_data().try_to_vec::<f32>());
                std::panic::catch_unwind(forward).map(|values| values.unwrap())
            });
            Ok(values.map(|values| match values {
                Ok(values) => format!("{values:?}"),
                Err(panic) => panic.downcast_ref::<String>().cloned().unwrap_or_default(),
            }))
        })
        .unwrap()
    };
    let in_turn = evaluate(true);
    assert!(in_turn[0] == in_turn[1] && in_turn[0][0] != in_turn[0][1], "{in_turn:?}");
    for [error, _] in evaluate(false) {
        assert!(error.contains("rank 0 reads a.weight of the copy made by change 1"), "{error}");
        assert!(error.contains("rank 1 reads a.weight of the copy made by change 2"), "{error}");
    }
}

#[test]
fn gradients_are_clipped_by_the_norm_over_all_parts() {
    for world in 1..4 {
        let [whole, parts] = [WrapConfig::new(), sharded()].map(|config| {
            let ranks = Ddp::spawn(world, |ddp| {
                let device = ddp.device()?.autodiff();
                let mut model = ddp.wrap_with(Gpt::new(&device, 0), &config)?;
                let mut optim = ddp.optimizer(SgdConfig::new().init(), &model)?;
                let mut norms = Vec::new();
                for step in 0..4 {
                    let loss = model.loss(tokens(ddp.rank(), step, &device));
                    let grads = ddp.backward(&loss, &model)?.expect("averages");
                    let (grads, norm) = burn_ddp::clip_grad_norm(grads, &model, 0.5)?;
                    let clipped = burn_ddp::grad_norm(&grads, &model)?;
                    anyhow::ensure!(norm > 0.5 && (clipped - 0.5).abs() < 1e-5, "{norm}, then {clipped}");
                    norms.push(norm);
                    model = optim.step(0.1, model, grads);
                }
                Ok(norms)
            });
            let ranks = ranks.unwrap();
            assert!(ranks.iter().all(|norms| norms == &ranks[0]), "the same bits on all ranks: {ranks:?}");
            ranks[0].clone()
        });
        for (whole, parts) in whole.iter().zip(&parts) {
            assert!((whole - parts).abs() <= 1e-6 * whole, "{whole} and {parts} on {world} ranks");
        }
    }
}

#[test]
fn what_stays_whole_is_compared_between_the_ranks() {
    let differs = |changed: &str| {
        let errors = Ddp::spawn(2, |ddp| {
            let device = ddp.device()?.autodiff();
            let model = Gpt::new(&device, 0);
            let model = Gpt { down: model.down.clone().no_grad(), ..model };
            let mut model = ddp.wrap_with(model, &sharded())?;
            ddp.check_replicas(&model)?;
            if ddp.rank() == 1 {
                match changed {
                    "norm.gamma" => model.norm = model.norm.map(&mut Add(1.0)),
                    "down.weight" => model.down = model.down.map(&mut Add(1.0)).no_grad(),
                    // Rows that no other rank has, so that nothing can be compared.
                    _ => model.query = model.query.map(&mut AddToMatrix),
                }
            }
            Ok(ddp.check_replicas(&model).err().map_or("no error".into(), |e| e.to_string()))
        });
        errors.unwrap()
    };
    for (changed, expected) in [("norm.gamma", "norm."), ("down.weight", "down."), ("query.weight", "no error")] {
        assert!(differs(changed).iter().all(|error| error.contains(expected)), "{changed}: {:?}", differs(changed));
    }
}

/// Adds 1 to matrices.
struct AddToMatrix;

impl ModuleMapper for AddToMatrix {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if D == 2 { Add(1.0).map_float(param) } else { param }
    }
}
