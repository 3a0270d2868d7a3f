//! The user API in worlds of 1, 2 and 3: the same calls have the same results.

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{GradientsParams, SgdConfig};
use burn::prelude::*;
use burn::tensor::DType;
use burn_ddp::prelude::*;
use burn_ddp::{Result, clip_grad_norm, grad_norm};
use burn_ddp_tests::split_training::numbered;
use burn_ddp_tests::{Mlp, distance, rows, to_f64, values};

mod every_call;

/// Rows of each step, over all ranks and micro-batches.
const ROWS: usize = 12;
const STEPS: usize = 4;

fn mlp(ddp: &Ddp, device: &Device) -> Mlp {
    to_f64(numbered(Mlp::new(device), 1 + 100 * ddp.rank() as u64))
}

/// Loss of micro-batch `nth` of `of`, which all ranks together have in a step.
fn loss(model: &Mlp, step: usize, nth: usize, of: usize, device: &Device) -> Tensor<1> {
    let batch = ROWS / of;
    let data = |columns, salt| rows(step * ROWS + nth * batch, batch, columns, salt, DType::F64, device);
    model.loss(data(6, 1), data(3, 2))
}

/// The values after training with `step`, which returns the averages of a step.
fn train(
    ddp: &Ddp,
    config: &WrapConfig,
    mut step: impl FnMut(&Mlp, usize, &Device) -> Result<Option<GradientsParams>>,
) -> anyhow::Result<Vec<Vec<f64>>> {
    let device = ddp.device()?.autodiff();
    let mut model = ddp.wrap_with(mlp(ddp, &device), config)?;
    let mut optim = SgdConfig::new().init();
    for nth in 0..STEPS {
        let grads = step(&model, nth, &device)?.expect("averages");
        model = optim.step(0.1, model, grads);
    }
    ddp.check_replicas(&model)?;
    Ok(values(&model))
}

/// Plain Burn with the whole batch of each step.
fn oracle() -> Vec<Vec<f64>> {
    Ddp::spawn(1, |ddp| {
        let device = ddp.device()?.autodiff();
        let mut model = mlp(&ddp, &device);
        let mut optim = SgdConfig::new().init();
        for step in 0..STEPS {
            let grads = GradientsParams::from_grads(loss(&model, step, 0, 1, &device).backward(), &model);
            model = optim.step(0.1, model, grads);
        }
        Ok(values(&model))
    })
    .unwrap()
    .remove(0)
}

/// Each way to accumulate 6 micro-batches, in worlds of 1, 2 and 3, trains like one large batch.
#[test]
fn micro_batches_are_one_big_batch() {
    let whole = oracle();
    for world in [1, 2, 3] {
        let own = |ddp: &Ddp| (0..6 / world).map(|nth| ddp.rank() * 6 / world + nth).collect::<Vec<_>>();
        let ways = Ddp::spawn(world, |ddp| {
            let micros = own(&ddp);
            let (last, first) = micros.split_last().unwrap();
            let plain = WrapConfig::new();
            let accumulated = train(&ddp, &plain, |model, step, device| {
                first.iter().try_for_each(|micro| ddp.accumulate(&loss(model, step, *micro, 6, device), model))?;
                ddp.backward(&loss(model, step, *last, 6, device), model)
            })?;
            // All forwards before the first backward.
            let scoped = train(&ddp, &plain, |model, step, device| {
                let losses: Vec<_> = micros.iter().map(|micro| loss(model, step, *micro, 6, device)).collect();
                let (last, first) = losses.split_last().unwrap();
                first.iter().try_for_each(|loss| ddp.accumulate(loss, model))?;
                Ok(ddp.scope(model, || drop(last.backward()))?.1)
            })?;
            let flushed = train(&ddp, &plain, |model, step, device| {
                micros.iter().try_for_each(|micro| ddp.accumulate(&loss(model, step, *micro, 6, device), model))?;
                ddp.flush(model)
            })?;
            let counted = WrapConfig::new().with_accumulation(micros.len());
            let counted = train(&ddp, &counted, |model, step, device| {
                for micro in first {
                    assert!(ddp.backward(&loss(model, step, *micro, 6, device), model)?.is_none());
                }
                ddp.backward(&loss(model, step, *last, 6, device), model)
            })?;
            // Micro-batches of unequal sizes, which are their weights.
            let weighted = train(&ddp, &plain, |model, step, device| {
                let mut start = ddp.rank() * ROWS / world;
                let end = start + ROWS / world;
                while start < end {
                    let items = if start.is_multiple_of(4) { 1 } else { 3 }.min(end - start);
                    let data = |columns, salt| rows(step * ROWS + start, items, columns, salt, DType::F64, device);
                    ddp.weighted(items as f64).accumulate(&model.loss(data(6, 1), data(3, 2)), model)?;
                    start += items;
                }
                ddp.flush(model)
            })?;
            Ok([accumulated, scoped, flushed, counted, weighted])
        });
        for (rank, ways) in ways.unwrap().into_iter().enumerate() {
            for (way, values) in ["accumulated", "scoped", "flushed", "counted", "weighted"].iter().zip(ways) {
                let d = distance(&values, &whole);
                assert!(d <= 1e-12, "{way} on rank {rank} of {world}: {d:e}");
            }
        }
    }
}

struct Rows;

impl Batcher<usize, (Tensor<2>, Tensor<2>)> for Rows {
    fn batch(&self, items: Vec<usize>, device: &Device) -> (Tensor<2>, Tensor<2>) {
        let of = |columns, salt| {
            Tensor::cat(items.iter().map(|i| rows(*i, 1, columns, salt, DType::F64, device)).collect(), 0)
        };
        (of(6, 1), of(3, 2))
    }
}

/// Results of the calls that a training makes; `every_call` has the other calls.
#[derive(Debug, PartialEq)]
struct Outcome {
    steps: u64,
    batches: usize,
    evaluated: f64,
    errors: Vec<String>,
    saved_step: u64,
    missed: usize,
    collected: Vec<f64>,
    positions: (u64, bool),
}

/// Calls the API of `Ddp`, the loaders and checkpoints as a training program does. Returns the results, which must
/// be the same in every world, and the values of the model.
fn program(ddp: Ddp, directory: &std::path::Path) -> anyhow::Result<(Outcome, Vec<Vec<f64>>)> {
    let device = burn_ddp_tests::device().autodiff();
    ddp.seed(&device, 3);
    let config = WrapConfig::new().with_bucket_cap_bytes(400).with_replica_check(2);
    let plain = mlp(&ddp, &device);
    let mut model = ddp.wrap_with(plain.clone(), &config)?;
    let mut optim = SgdConfig::new().init();
    let mut errors = Vec::new();
    let mut note = |error: Option<burn_ddp::Error>| errors.push(error.map_or("none".into(), |e| e.to_string()));

    // Mistakes have the same errors in a world of 1.
    note(ddp.wrap(model.clone()).err());
    note(ddp.save(&plain, "s3://bucket/model").err());
    note(ddp.save_safetensors(&plain, "s3://bucket/model").err());
    note(ddp.telemetry().tensorboard("s3://bucket/curves").err());
    assert!(!std::path::Path::new("s3:").exists());
    note(ddp.wrap_with(plain.clone(), &WrapConfig::new().with_accumulation(0)).err());
    let mut not_wrapped = plain.clone();
    note(ddp.join(&mut not_wrapped, &mut optim).err());

    let data = || InMemDataset::new((0..ROWS * STEPS).collect());
    let train = ddp.loader(Rows).global_batch_size(ROWS).shuffle(9).set_device(device.clone()).build(data())?;
    let checkpoints = ddp.checkpoints(directory)?.keep_last(2);
    let mut batches = 0;
    for epoch in train.epochs(0..2) {
        for batch in epoch {
            let (x, y) = batch?;
            let grads = ddp.backward(&model.loss(x, y), &model)?.expect("averages");
            assert!(grad_norm(&grads, &model)?.is_finite());
            let (grads, _) = clip_grad_norm(grads, &model, 0.5)?;
            model = optim.step(0.01, model, grads);
            batches += 1;
        }
        checkpoints.save(batches as u64, |c| {
            c.model(&model)?;
            c.optimizer(&optim, &model)?;
            c.value("position", &train.position())
        })?;
    }
    let mut evaluated = 0.0;
    for batch in ddp.eval_loader(Rows).batch_size(5).build(data())?.iter() {
        evaluated += batch?.1.dims()[0] as f64;
    }
    let evaluated = ddp.sum(evaluated)?;
    let missed = ddp.join(&mut model, &mut optim)?;
    ddp.sync_buffers(&model)?;
    ddp.check_replicas(&model)?;
    let path = ddp.save(&model, directory.join("model"))?;
    assert_eq!(param_hash(&plain.clone().load_file(&path))?, param_hash(&model)?);
    let found = checkpoints.latest()?.unwrap();
    assert_eq!(param_hash(&found.model(plain.clone())?)?, param_hash(&model)?);
    optim = found.optimizer(optim, &model)?;
    let position = found.value("position")?;
    let resumed = ddp.loader(Rows).global_batch_size(ROWS).shuffle(9).set_device(device.clone()).build(data())?;
    resumed.resume(&position)?;
    model = ddp.broadcast_parameters(model, 0)?;
    ddp.broadcast_optimizer_state(&mut optim, &model, 0)?;

    let own = Tensor::<1>::from_floats([1.0 + ddp.rank() as f32], &device.clone().inner());
    let collected = vec![
        ddp.mean(4.0)?,
        f64::from(ddp.all_reduce(own.clone(), ReduceOp::Min)?.into_scalar::<f32>()),
        f64::from(ddp.broadcast(own.clone(), 0)?.into_scalar::<f32>()),
        f64::from(ddp.all_gather(own)?.narrow(0, 0, 1).into_scalar::<f32>()),
    ];
    assert_eq!(ddp.main_first(|| Ok(5))?, 5);
    ddp.barrier()?;
    let part = ddp.split(Some(0), 0)?.unwrap();
    assert_eq!((part.rank(), part.world_size()), (ddp.rank(), ddp.world_size()));
    assert!(ddp.split(None, 0)?.is_none());
    let trained = values(&model);
    let unwrapped = ddp.unwrap(model)?;
    assert_eq!(values(&unwrapped), trained);
    let outcome = Outcome {
        steps: ddp.telemetry().stats().steps,
        batches,
        evaluated,
        errors,
        saved_step: found.step(),
        missed,
        collected,
        positions: (resumed.position().epoch() as u64, ddp.is_main() == (ddp.rank() == 0)),
    };
    ddp.finish()?;
    Ok((outcome, trained))
}

#[test]
fn a_program_that_calls_what_trainings_call_has_the_same_outcome() {
    let run = |world| {
        let directory = tempfile::tempdir().unwrap();
        Ddp::spawn(world, |ddp| program(ddp, directory.path())).unwrap()
    };
    let (expected, whole) = run(1).remove(0);
    assert_eq!((expected.steps, expected.batches, expected.missed), (8, 8, 0));
    assert!(expected.errors.iter().all(|error| error != "none"), "{expected:?}");
    for world in [2, 3] {
        for (rank, (outcome, values)) in run(world).into_iter().enumerate() {
            assert_eq!(outcome, expected, "rank {rank} of {world}");
            let d = distance(&values, &whole);
            assert!(d <= 1e-10, "rank {rank} of {world}: {d:e}");
        }
    }
}

/// A mistake in a call, given a model that is not wrapped and a wrapped one. Returns what it is told.
type Mistake = fn(&Ddp, &Linear, &Linear) -> Option<String>;

/// A mistake in a backward ends the job, so each has a job of its own.
#[test]
fn mistakes_in_a_backward_are_errors_alone_too() {
    fn said<T>(result: Result<T>) -> Option<String> {
        result.err().map(|error| error.to_string())
    }
    fn x() -> Tensor<2> {
        Tensor::ones([1, 2], &burn_ddp_tests::device().autodiff())
    }
    fn loss(model: &Linear) -> Tensor<1> {
        model.forward(x()).sum()
    }
    let not_wrapped = "not wrapped";
    let mistakes: [(&str, Mistake); 8] = [
        (not_wrapped, |ddp, plain, _| said(ddp.backward(&loss(plain), plain))),
        (not_wrapped, |ddp, plain, _| said(ddp.accumulate(&loss(plain), plain))),
        (not_wrapped, |ddp, plain, _| said(ddp.scope(plain, || drop(loss(plain).backward())))),
        (not_wrapped, |ddp, plain, _| said(ddp.flush(plain))),
        ("got -1", |ddp, _, model| said(ddp.weighted(-1.0).backward(&loss(model), model))),
        ("depends on no parameter", |ddp, plain, model| said(ddp.backward(&loss(plain), model))),
        ("weight was read past its tap", |ddp, _, model| {
            said(ddp.backward(&(x().matmul(model.weight.base()).sum() + loss(model)), model))
        }),
        ("call `ddp.backward(&loss, &model)?`", |_, _, model| {
            let burns_own = std::panic::AssertUnwindSafe(|| drop(loss(model).backward()));
            let panic = std::panic::catch_unwind(burns_own).err()?;
            let text = panic.downcast_ref::<&str>().map(|text| (*text).to_string());
            text.or_else(|| panic.downcast_ref::<String>().cloned())
        }),
    ];
    for world in [1, 2] {
        for (text, mistake) in mistakes {
            let errors = Ddp::spawn(world, |ddp| {
                let device = ddp.device()?.autodiff();
                let linear = || -> Linear { LinearConfig::new(2, 2).init(&device) };
                // If the other rank makes the mistake first, this rank may get the error from `wrap`.
                Ok(match ddp.wrap(linear()) {
                    Ok(model) => mistake(&ddp, &linear(), &model).unwrap_or_default(),
                    Err(error) => error.to_string(),
                })
            });
            for error in errors.unwrap() {
                assert!(error.contains(text), "{text:?} in a world of {world}: {error}");
            }
        }
    }
}
