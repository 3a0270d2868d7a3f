//! `ddp.backward`, `ddp.scope` and their like: one call begins and ends a step, and every misuse is an error of the
//! call on every rank.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::module::{Module, Param};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::optim::{GradientsParams, SgdConfig};
use burn::prelude::*;
use burn_ddp::WorldOptions;
use burn_ddp::prelude::*;
use burn_ddp_tests::Fill;

#[derive(Module, Debug)]
struct Net {
    a: Linear,
    norm: BatchNorm,
    b: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        let layer = || LinearConfig::new(3, 3).init(device);
        Net { a: layer(), norm: BatchNormConfig::new(3).init(device), b: layer() }.map(&mut Fill(1.0))
    }

    fn loss(&self, x: Tensor<2>) -> Tensor<1> {
        self.b.forward(self.norm.forward(self.a.forward(x)).tanh()).powf_scalar(2.0).mean()
    }
}

fn x(seed: usize, device: &Device) -> Tensor<2> {
    let values = (0..12).map(|i| ((7 * i + 5 * seed) % 13) as f32 / 6.0 - 1.0).collect::<Vec<_>>();
    Tensor::<1>::from_floats(&values[..], device).reshape([4, 3])
}

/// Runs ranks that wait for each other for five seconds at most.
fn ranks<T: Send>(world: usize, f: impl Fn(&Ddp, &Device) -> anyhow::Result<T> + Sync) -> burn_ddp::Result<Vec<T>> {
    let options = WorldOptions { timeout: Duration::from_secs(5), ..WorldOptions::default() };
    Ddp::spawn_with(world, options, |ddp| f(&ddp, &ddp.device()?.autodiff()))
}

/// Values of `grads` for the two layers and the norm.
fn values(model: &Net, grads: &GradientsParams) -> Vec<Vec<f32>> {
    let list = |data: TensorData| data.iter::<f32>().collect();
    let weight = |layer: &Linear| list(grads.get::<2>(layer.weight.id).expect("a gradient").into_data());
    vec![weight(&model.a), weight(&model.b), list(grads.get::<1>(model.norm.gamma.id).expect("a gradient").into_data())]
}

/// Each misuse, made by every rank or by the last one alone, is an error of all ranks that says what to do.
#[test]
fn every_misuse_is_an_error_on_every_rank() {
    type Misuse = fn(&Ddp, &Net, &Device) -> anyhow::Result<()>;
    let misuses: [(&str, &str, Misuse); 11] = [
        ("not wrapped", "the model is not wrapped", |ddp, _, device| {
            let plain = Net::new(device);
            ddp.backward(&plain.loss(x(0, device)), &plain)?;
            Ok(())
        }),
        ("detached", "the loss depends on no parameter", |ddp, model, device| {
            ddp.backward(&model.loss(x(0, device)).detach(), model)?;
            Ok(())
        }),
        ("another graph", "depends on no parameter of the wrapped model", |ddp, model, device| {
            ddp.backward(&Tensor::<1>::ones([1], device).require_grad().mul_scalar(2.0), model)?;
            Ok(())
        }),
        ("past the tap", "a.weight was read past its tap", |ddp, model, device| {
            let loss = model.loss(x(0, device)) + model.a.weight.base().sum();
            ddp.backward(&loss, model)?;
            Ok(())
        }),
        ("a new layer", "b.weight is no longer tapped", |ddp, model, device| {
            // A copy lives on.
            let model = Net { b: LinearConfig::new(3, 3).init(device), ..model.clone() };
            ddp.backward(&model.loss(x(0, device)), &model)?;
            Ok(())
        }),
        ("two copies", "two copies of the wrapped model met", |ddp, model, device| {
            struct Same;
            impl burn::module::ModuleMapper for Same {
                fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
                    param.map(|value| Tensor::from_inner(value.inner()).require_grad())
                }
            }
            let copy = model.clone().map(&mut Same);
            ddp.backward(&(model.loss(x(0, device)) + copy.loss(x(1, device))), model)?;
            Ok(())
        }),
        ("no backward", "there was no backward", |ddp, model, device| {
            ddp.scope(model, || model.loss(x(0, device)))?;
            Ok(())
        }),
        ("two backwards", "two backwards in one `ddp.scope`", |ddp, model, device| {
            let losses = [0, 1].map(|seed| model.loss(x(seed, device)));
            ddp.scope(model, || losses.map(|loss| loss.backward()))?;
            Ok(())
        }),
        ("two backwards over parts", "two backwards in one `ddp.scope`", |ddp, model, device| {
            let losses = [&model.a, &model.b].map(|layer| layer.forward(x(0, device)).sum());
            ddp.scope(model, || losses.map(|loss| loss.backward()))?;
            Ok(())
        }),
        ("a backward in a scope", "is open already", |ddp, model, device| {
            let (inner, _) = ddp.scope(model, || {
                let loss = model.loss(x(0, device));
                ddp.backward(&loss, model).map(drop)
            })?;
            Ok(inner?)
        }),
        ("a negative weight", "the items of a batch", |ddp, model, device| {
            ddp.weighted(-1.0).backward(&model.loss(x(0, device)), model)?;
            Ok(())
        }),
    ];
    for (name, says, misuse) in misuses {
        for (world, alone) in [(1, false), (2, false), (3, true)] {
            let results = ranks(world, |ddp, device| {
                let model = ddp.wrap(Net::new(device))?;
                ddp.backward(&model.loss(x(ddp.rank(), device)), &model)?;
                let result = match alone && ddp.rank() < 2 {
                    true => ddp.backward(&model.loss(x(ddp.rank(), device)), &model).map(drop).map_err(Into::into),
                    false => misuse(ddp, &model, device),
                };
                let error = result.err().map(|error| error.to_string());
                Ok(error.unwrap_or_else(|| "no error".into()))
            });
            for (rank, error) in results.unwrap().iter().enumerate() {
                assert!(error.contains(says), "{name} in a world of {world}, rank {rank}: {error}");
                assert!(!alone || error.contains("rank 2"), "{name} in a world of {world}, rank {rank}: {error}");
            }
        }
    }
}

#[test]
fn a_bare_backward_panics_and_those_of_copies_without_taps_do_not() {
    for world in [1, 2] {
        ranks(world, |ddp, device| {
            let model = ddp.wrap(Net::new(device))?;
            let panic = catch_unwind(AssertUnwindSafe(|| model.loss(x(0, device)).backward())).err().expect("a panic");
            let text =
                panic.downcast_ref::<String>().cloned().or(panic.downcast_ref::<&str>().map(ToString::to_string));
            let text = text.unwrap_or_default();
            assert!(text.contains("call `ddp.backward(&loss, &model)?`"), "{text}");

            let input = x(0, device).require_grad();
            let frozen = model.clone().no_grad().loss(input.clone()).backward();
            assert!(input.grad(&frozen).is_some());
            let own = ddp.unwrap(model.clone())?;
            let own = GradientsParams::from_grads(own.loss(x(ddp.rank(), device)).backward(), &own);
            assert_eq!(own.len(), 6);
            ddp.backward(&model.loss(x(0, device)), &model)?.expect("the model trains");
            Ok(())
        })
        .unwrap();
    }
}

/// A call that fails alike on all ranks leaves nothing behind: neither sums nor statistics. The next call may follow.
#[test]
fn after_an_error_of_all_ranks_training_goes_on_as_if_the_call_had_not_been() {
    let train = |world: usize, fails: bool| {
        ranks(world, |ddp, device| {
            let mut model = ddp.wrap_with(Net::new(device), &WrapConfig::new().with_accumulation(2))?;
            let mut optim = SgdConfig::new().init();
            let mut steps = 0;
            for step in 0..3 {
                if fails && step == 1 {
                    // All weights of the step are 0, so there is no mean. The first micro-batch goes with the second.
                    for micro in 0..2 {
                        let loss = model.loss(x(90 + micro, device));
                        let result = ddp.weighted(0.0).backward(&loss, &model);
                        if micro == 1 {
                            let error = result.map(drop).expect_err("an error");
                            anyhow::ensure!(error.job_usable(), "{error}");
                        }
                    }
                }
                for micro in 0..2 {
                    let loss = model.loss(x(10 * step + 2 * ddp.rank() + micro, device));
                    if let Some(grads) = ddp.backward(&loss, &model)? {
                        model = optim.step(0.1, model, grads);
                        steps += 1;
                    }
                }
            }
            assert_eq!(steps, 3);
            Ok(param_hash(&model)?)
        })
        .unwrap()
    };
    for world in [2, 3] {
        assert_eq!(train(world, true), train(world, false), "{world} ranks");
    }
}

#[test]
fn a_panic_in_a_scope_comes_out_and_leaves_nothing_behind() {
    let train = |panics: bool| {
        ranks(2, |ddp, device| {
            let mut model = ddp.wrap(Net::new(device))?;
            let mut optim = SgdConfig::new().init();
            for step in 0..3 {
                let loss = |model: &Net| model.loss(x(10 * step + ddp.rank(), device));
                if panics && step == 1 {
                    let scope =
                        || ddp.scope(&model, || panic!("of the program, after {:?}", loss(&model).dims())).map(drop);
                    let panic = catch_unwind(AssertUnwindSafe(scope)).map(drop).expect_err("a panic");
                    assert!(panic.downcast_ref::<String>().is_some_and(|text| text.contains("of the program")));
                }
                let grads = ddp.backward(&loss(&model), &model)?.expect("a step");
                model = optim.step(0.1, model, grads);
            }
            Ok(param_hash(&model)?)
        })
        .unwrap()
    };
    assert_eq!(train(true), train(false));
}

#[test]
fn models_that_a_call_does_not_name_get_nothing_and_cost_nothing() {
    let result = ranks(2, |ddp, device| {
        let (g, d) = (ddp.wrap(Net::new(device))?, ddp.wrap(Net::new(device))?);
        let loss = || d.loss(g.b.forward(g.a.forward(x(ddp.rank(), device))));
        let bytes = |f: &dyn Fn() -> anyhow::Result<Vec<Vec<f32>>>| {
            let before = ddp.telemetry().stats().bytes;
            anyhow::Ok((f()?, ddp.telemetry().stats().bytes - before))
        };
        let of_a = |grads: &GradientsParams| vec![grads.get::<2>(g.a.weight.id).unwrap().into_data().iter().collect()];
        let (both, both_bytes) = bytes(&|| {
            let (of_g, of_d) = ddp.backward(&loss(), (&g, &d))?.expect("a step");
            assert_eq!((of_g.len(), of_d.len()), (4, 6));
            Ok(of_a(&of_g))
        })?;
        let (one, one_bytes) = bytes(&|| Ok(of_a(&ddp.backward(&loss(), &g)?.expect("a step"))))?;
        assert_eq!(both, one);
        assert!(one_bytes < both_bytes, "{one_bytes} {both_bytes}");
        // The parts of a model are reduced once.
        let (parts, parts_bytes) = bytes(&|| {
            let (of_a_alone, of_b) = ddp.backward(&loss(), (&g.a, &g.b))?.expect("a step");
            assert_eq!((of_a_alone.len(), of_b.len()), (2, 2));
            Ok(of_a(&of_a_alone))
        })?;
        assert_eq!((parts, parts_bytes), (one, one_bytes));
        Ok(())
    });
    result.unwrap();
}

#[test]
fn models_with_another_accumulation_do_not_meet_in_one_call() {
    let error = ranks(2, |ddp, device| {
        let (a, b) =
            (ddp.wrap(Net::new(device))?, ddp.wrap_with(Net::new(device), &WrapConfig::new().with_accumulation(2))?);
        ddp.backward(&(a.loss(x(0, device)) + b.loss(x(1, device))), (&a, &b))?;
        Ok(())
    });
    let error = error.unwrap_err().to_string();
    assert!(error.contains("give them the same accumulation"), "{error}");
}

struct Rows;

impl Batcher<usize, Vec<usize>> for Rows {
    fn batch(&self, items: Vec<usize>, _: &Device) -> Vec<usize> {
        items
    }
}

/// Trains for an epoch of eight batches; `at` says what a rank does with a batch instead of a backward.
fn epoch(
    world: usize,
    config: &WrapConfig,
    at: impl Fn(&Ddp, usize) -> anyhow::Result<bool> + Sync,
) -> burn_ddp::Result<Vec<(Vec<usize>, u64)>> {
    ranks(world, |ddp, device| {
        let mut model = ddp.wrap_with(Net::new(device), config)?;
        let mut optim = SgdConfig::new().init();
        let train = ddp.loader(Rows).batch_size(1).build(InMemDataset::new((0..8 * world).collect()))?;
        let mut steps = Vec::new();
        for (number, batch) in train.iter().enumerate() {
            let loss = model.loss(x(batch?[0], device));
            if at(ddp, number)? {
                continue;
            }
            if let Some(grads) = ddp.backward(&loss, &model)? {
                steps.push(number);
                model = optim.step(0.1, model, grads);
            }
        }
        Ok((steps, ddp.telemetry().stats().added_up))
    })
}

#[test]
fn a_batch_is_skipped_by_all_ranks_or_by_none() {
    let skips = |who: fn(&Ddp) -> bool, says: bool| {
        epoch(2, &WrapConfig::new(), move |ddp, number| {
            let skipped = number == 3 && who(ddp);
            if skipped && says {
                ddp.skip_batch()?;
            }
            Ok(skipped)
        })
    };
    assert_eq!(skips(|_| true, true).unwrap(), vec![(vec![0, 1, 2, 4, 5, 6, 7], 0); 2]);
    let error = skips(|_| true, false).unwrap_err().to_string();
    assert!(error.contains("2 batches") && error.contains("ddp.skip_batch()?`, on every rank"), "{error}");
    let error = skips(|ddp| ddp.rank() == 1, false).unwrap_err().to_string();
    assert!(error.contains("rank 1") && error.contains("since the last backward"), "{error}");
    // The tags of the reductions differ.
    let error = skips(|ddp| ddp.rank() == 1, true).unwrap_err().to_string();
    assert!(error.contains("called different collectives"), "{error}");
}

#[test]
fn the_last_batch_of_an_epoch_completes_its_step_and_telemetry_counts_the_others() {
    let config = WrapConfig::new().with_accumulation(3);
    assert_eq!(epoch(2, &config, |_, _| Ok(false)).unwrap(), vec![(vec![2, 5, 7], 5); 2]);
}

#[test]
fn gradients_of_a_scope_are_those_of_backward() {
    for world in [1, 2] {
        ranks(world, |ddp, device| {
            let model = ddp.wrap(Net::new(device))?;
            let input = x(ddp.rank(), device).require_grad();
            let (own, scoped) = ddp.scope(&model, || model.loss(input.clone()).backward())?;
            assert!(input.grad(&own).is_some());
            assert!(model.a.weight.base().grad(&own).is_none(), "only the averages");
            let backward = ddp.backward(&model.loss(x(ddp.rank(), device)), &model)?;
            let [scoped, backward] = [scoped, backward].map(|grads| values(&model, &grads.expect("a step")));
            // The statistics of the norm do not matter in training.
            assert_eq!(scoped, backward);
            Ok(())
        })
        .unwrap();
    }
}

/// A call on two models that fails alike on all ranks leaves both of them usable, sharded or not.
#[test]
fn two_models_go_on_after_an_error_of_all_ranks() {
    for sharding in [Sharding::Off, Sharding::Parameters] {
        let train = |fails: bool| {
            ranks(2, |ddp, device| {
                let config = WrapConfig::new().with_sharding(sharding).with_sharding_above(1).with_overlap(true);
                let config = config.with_first_bucket_cap_bytes(20).with_bucket_cap_bytes(20);
                let (mut a, mut b) =
                    (ddp.wrap_with(Net::new(device), &config)?, ddp.wrap_with(Net::new(device), &config)?);
                let mut optim = ddp.optimizer(ddp.optimizer(SgdConfig::new().init(), &a)?, &b)?;
                for step in 0..3 {
                    let loss = |a: &Net, b: &Net| {
                        let x = x(2 * step + ddp.rank(), device);
                        a.loss(x.clone()) + b.loss(x)
                    };
                    if fails && step > 0 {
                        let error =
                            ddp.weighted(0.0).backward(&loss(&a, &b), (&a, &b)).map(drop).expect_err("an error");
                        anyhow::ensure!(error.job_usable(), "{error}");
                    }
                    let (of_a, of_b) = ddp.backward(&loss(&a, &b), (&a, &b))?.expect("a step");
                    (a, b) = (optim.step(0.1, a, of_a), optim.step(0.1, b, of_b));
                }
                Ok([param_hash(&a)?, param_hash(&b)?])
            })
            .unwrap()
        };
        assert_eq!(train(true), train(false), "{sharding:?}");
    }
}

#[test]
fn a_flush_reduces_the_models_that_some_rank_holds_gradients_of() {
    ranks(2, |ddp, device| {
        let (a, b) = (ddp.wrap(Net::new(device))?, ddp.wrap(Net::new(device))?);
        if ddp.rank() == 1 {
            ddp.accumulate(&a.loss(x(0, device)), &a)?;
        }
        let (of_b, of_a) = ddp.flush((&b, &a))?.expect("averages");
        assert_eq!((of_a.len(), of_b.len()), (6, 0));
        assert!(ddp.flush((&a, &b))?.is_none());
        Ok(())
    })
    .unwrap();
}

#[test]
fn two_backwards_over_different_models_are_two() {
    let error = ranks(2, |ddp, device| {
        let (a, b) = (ddp.wrap(Net::new(device))?, ddp.wrap(Net::new(device))?);
        let losses = [a.loss(x(0, device)), b.loss(x(0, device))];
        ddp.scope((&a, &b), || losses.map(|loss| loss.backward()))?;
        Ok(())
    });
    let error = error.unwrap_err().to_string();
    assert!(error.contains("two backwards in one `ddp.scope`"), "{error}");
}

/// The first call after a load fails; then the statistics are those of the load.
#[test]
fn statistics_of_a_load_survive_a_step_that_fails() {
    let directory = tempfile::tempdir().unwrap();
    let means = ranks(2, |ddp, device| {
        let mut model = ddp.wrap(Net::new(device))?;
        let checkpoints = ddp.checkpoints(directory.path())?;
        for step in 0..3 {
            ddp.backward(&model.loss(x(step, device) + 1.0), &model)?;
        }
        checkpoints.save(1, |c| c.model(&model))?;
        ddp.backward(&model.loss(x(9, device) - 5.0), &model)?;
        model = checkpoints.latest()?.expect("was saved").model(model)?;
        let mean = |model: &Net| model.norm.running_mean.value_sync().into_data().iter::<f32>().collect::<Vec<_>>();
        let loaded = mean(&model);
        for _ in 0..2 {
            let loss = model.loss(x(5, device) + 7.0);
            ddp.weighted(0.0).backward(&loss, &model).map(drop).expect_err("all weights are 0");
        }
        let restored = mean(&model);
        ddp.backward(&model.loss(x(ddp.rank(), device)), &model)?;
        Ok((loaded, restored, mean(&model)))
    });
    let means = means.unwrap();
    assert_eq!(means[0], means[1]);
    assert_eq!(means[0].0, means[0].1);
    assert_ne!(means[0].1, means[0].2, "the step moves them");
}

/// A rank that gives up a batch alone and goes on with the next one would average different batches.
#[test]
fn a_rank_that_loses_a_batch_in_a_panic_hears_of_it() {
    let error = ranks(2, |ddp, device| {
        let model = ddp.wrap(Net::new(device))?;
        let train = ddp.loader(Rows).batch_size(1).build(InMemDataset::new((0..12).collect()))?;
        for (number, batch) in train.iter().enumerate() {
            let row = batch?[0];
            if number == 2 && ddp.rank() == 1 {
                let scope = || ddp.scope(&model, || panic!("of the program")).map(drop);
                catch_unwind(AssertUnwindSafe(scope)).map(drop).expect_err("a panic");
                continue;
            }
            ddp.backward(&model.loss(x(row, device)), &model)?;
        }
        Ok(())
    });
    let error = error.unwrap_err().to_string();
    assert!(error.contains("called different collectives"), "{error}");
}
