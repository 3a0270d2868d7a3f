//! Burn's trainer with sharded parameters: the bits of unsharded training, and checkpoints for any number of ranks.

use super::*;
use burn::optim::MuonConfig;

/// A job with every parameter sharded that can be. The ranks have different numbers of batches for validation.
fn job() -> Job {
    Job { sharding: Some(config()), valid: Points::new(2, 31), ..Job::new() }
}

fn config() -> WrapConfig {
    WrapConfig::new().with_sharding(Sharding::Parameters).with_sharding_above(1)
}

fn adam() -> ModuleOptimizer {
    AdamConfig::new().init()
}

#[test]
fn a_training_has_the_bits_of_whole_parameters() {
    // The model reads parameters after the backward, which holds gathered weights, and maps itself before the step.
    let device = device().autodiff().gradient_checkpointing();
    let model = Net { shrinks: true, looks_again: true, ..Net::new(false, &device) };
    for (accumulation, world) in [(None, 1), (None, 2), (Some(4), 3)] {
        let sharded = Job { train: Points::new(1, 52), accumulation, optim: adam, epochs: 2, ..job() };
        let whole = Job { sharding: None, ..sharded.clone() };
        let (sharded, whole) = (sharded.together(world, &model), whole.together(world, &model));
        assert_eq!(sharded.hash, whole.hash, "accumulation {accumulation:?}, world {world}");
        assert_eq!(sharded.finals, whole.finals, "accumulation {accumulation:?}, world {world}");
    }
}

#[test]
fn running_statistics_stay_whole() {
    let all = Ddp::spawn(2, |ddp| {
        let model = Net::new(true, &ddp.device()?.autodiff());
        Job { epochs: 1, ..job() }.on_rank(&ddp, model, Path::new("unused"), |t| t)
    });
    let all = all.unwrap();
    assert_eq!(all[0].error, None);
    assert_eq!(all[0].hash, all[1].hash, "hashes include running statistics");
}

/// Trains sharded for an epoch on two ranks, and resumes from the checkpoint.
#[test]
fn a_checkpoint_loads_on_any_number_of_ranks_sharded_or_not() {
    let model = model();
    let job = |epochs, sharded: bool| {
        let sharding = sharded.then(config);
        Job { train: Points::new(1, 48), epochs, shuffle: true, optim: adam, sharding, ..job() }
    };
    let straight = job(2, false).together(2, &model);
    for shared in [true, false] {
        let directory = tempfile::tempdir().unwrap();
        let run = |world: usize, job: Job, from: Option<usize>| {
            let all = Ddp::spawn(world, |ddp| {
                let path = match shared {
                    true => directory.path().to_path_buf(),
                    false => directory.path().join(ddp.rank().to_string()),
                };
                // Ids of parameters differ between ranks and runs.
                let model = if from.is_some() { super::model() } else { model.clone() };
                job.on_rank(&ddp, model, &path, |training| {
                    let files = |name| ddp.checkpointer(path.join("checkpoint"), name);
                    let training = match shared {
                        true => training.with_default_checkpointers(),
                        false => training.with_custom_checkpointers(files("model"), files("optim"), files("scheduler")),
                    };
                    match from {
                        Some(epoch) => training.checkpoint(epoch),
                        None => training.with_checkpointing_strategy(KeepLastNCheckpoints::new(2)),
                    }
                })
            });
            let all = all.unwrap();
            assert!(all.iter().all(|rank| rank.error.is_none() && rank.hash == all[0].hash), "{:?}", all[0].error);
            all.into_iter().next().unwrap()
        };
        run(2, job(1, true), None);
        let resumed: &[(usize, bool)] =
            if shared { &[(2, true), (2, false), (3, true), (1, false)] } else { &[(3, true)] };
        for &(world, sharded) in resumed {
            let resumed = run(world, job(2, sharded), Some(1));
            match world {
                2 => assert_eq!(resumed.hash, straight.hash, "sharded {sharded}"),
                _ => assert!(distance(&resumed.values, &straight.values) < 1e-5, "shared {shared}, world {world}"),
            }
        }
    }
}

#[test]
fn what_cannot_be_sharded_is_refused_by_name() {
    let all = Ddp::spawn(2, |ddp| {
        let muon = ddp.learner(model(), MuonConfig::new().init(), 0.1, &config()).err().unwrap().to_string();
        assert!(muon.contains("does not step each element by itself") && muon.contains("a.weight"), "{muon}");
        let wrapped = ddp.wrap(model())?;
        let wrapped = ddp.learner(wrapped, adam(), 0.1, &config()).err().unwrap().to_string();
        assert!(wrapped.contains("wrapped already"), "{wrapped}");

        let train = ddp.loader(Together).global_batch_size(BATCH).build(Points::new(1, 24))?;
        let valid = ddp.eval_loader(Together).batch_size(5).build(Points::new(2, 10))?;
        let training = ddp.training_with("unused", train, valid, &config());
        // Only rank 0 makes its learner by `ddp.learner`, which all ranks must call.
        let learner = match ddp.rank() {
            0 => ddp.learner(model(), adam(), 0.1, &config())?,
            _ => Learner::new(model(), adam(), 0.1),
        };
        let result = job().configure(training, &Recorder::default()).launch(learner);
        // The model of rank 0 is sharded already.
        let file = tempfile::tempdir()?;
        let unsaved = ddp.save(&result.model, file.path().join("model")).unwrap_err().to_string();
        assert!(unsaved.contains("ended with an error before its first step"), "{unsaved}");
        Ok(result.error.unwrap().to_string())
    });
    for error in all.unwrap() {
        assert!(error.contains("a.weight is to be sharded") && error.contains("make it by `ddp.learner"), "{error}");
    }
}

/// The result of a short training by `job` with the settings `config`.
fn launched(ddp: &Ddp, job: &Job, config: &WrapConfig) -> anyhow::Result<LearningResult<Net>> {
    let train = ddp.loader(Together).global_batch_size(BATCH).build(Points::new(1, 24))?;
    let valid = ddp.eval_loader(Together).batch_size(5).build(Points::new(2, 10))?;
    let training = ddp.training_with("unused", train, valid, config);
    let learner = ddp.learner(model(), adam(), 0.1, config)?;
    Ok(job.configure(training, &Recorder::default()).launch(learner))
}

#[test]
fn accumulation_with_local_parameters_is_refused_while_the_model_is_whole() {
    let all = Ddp::spawn(2, |ddp| {
        let job = Job { accumulation: Some(2), ..job() };
        let result = launched(&ddp, &job, &config().with_local_parameters(["b"]))?;
        let error = result.error.as_ref().unwrap().to_string();
        assert!(error.contains("`grads_accumulation(2)` with local parameters (b.weight, b.bias)"), "{error}");
        assert_eq!(result.model.a.weight.dims(), model().a.weight.dims());
        param_hash(&result.model)?;
        drop(result.model.into_record());
        Ok(())
    });
    all.unwrap();
}

/// The model that the trainer returns does not keep the trainer's mappers.
#[test]
fn a_trained_model_may_be_resized() {
    for world in [1, 2] {
        let all = Ddp::spawn(world, |ddp| {
            let job = Job { epochs: 1, ..job() };
            let result = launched(&ddp, &job, &config())?;
            anyhow::ensure!(result.error.is_none(), "{:?}", result.error);
            let mut model = ddp.unwrap(result.model)?;
            let half = model.a.weight.dims()[0] / 2;
            model.a.weight =
                model.a.weight.map(|rows| Tensor::from_inner(rows.inner().narrow(0, 0, half)).require_grad());
            param_hash(&model)?;
            let loaded = model.clone().load_record(model.into_record());
            anyhow::ensure!(loaded.a.weight.dims()[0] == half);
            Ok(())
        });
        all.unwrap();
    }
}

#[test]
fn a_rank_without_validation_data_ends_all_with_the_reason() {
    let all = Ddp::spawn(3, |ddp| {
        let job = Job { valid: Points::new(2, 2), ..job() };
        job.on_rank(&ddp, model(), Path::new("unused"), |t| t)
    });
    for outcome in all.unwrap() {
        let error = outcome.error.unwrap();
        assert!(error.contains("there are fewer items than ranks"), "{error}");
    }
}

#[test]
fn an_item_that_cannot_be_read_ends_all_ranks_with_the_reason() {
    for (in_training, rank, item) in [(true, 1, 31), (false, 0, 3), (false, 1, 30)] {
        let mut job = job();
        let split = if in_training { &mut job.train } else { &mut job.valid };
        split.broken = Some(item);
        let all = Ddp::spawn(2, |ddp| job.on_rank(&ddp, model(), Path::new("unused"), |t| t));
        for outcome in all.unwrap() {
            let error = outcome.error.unwrap();
            assert!(error.contains(&format!("item {item} is torn")), "{error}");
            assert!(error.contains(&format!("rank {rank}")), "{error}");
        }
    }
}

#[test]
fn a_panic_on_one_rank_is_an_error_on_the_others() {
    for split in ["training", "validation"] {
        let errors = Mutex::new(Vec::new());
        let ranks = Ddp::spawn(3, |ddp| {
            let panics_in = if ddp.rank() == 1 { split.to_string() } else { String::new() };
            let outcome = job().on_rank(&ddp, Net { panics_in, ..model() }, Path::new("unused"), |t| t)?;
            errors.lock().unwrap().push((ddp.rank(), outcome.error.unwrap_or_default()));
            Ok(())
        });
        assert!(ranks.is_err());
        let mut errors = errors.into_inner().unwrap();
        errors.sort();
        let ranks: Vec<usize> = errors.iter().map(|(rank, _)| *rank).collect();
        assert_eq!(ranks, [0, 2], "{split}");
        for (_, error) in errors {
            assert!(
                error.contains("rank 1") && error.contains("panicked") && error.contains(split),
                "{split}: {error}"
            );
        }
    }
}
