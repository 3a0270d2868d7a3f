//! `ddp.split`: parts of a job that train independently, each like a job of its own.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamConfig, SgdConfig};
use burn::prelude::*;
use burn::tensor::DType;
use burn_ddp::prelude::*;
use burn_ddp::{Error, Result, WorldOptions};
use burn_ddp_tests::job::{job, line, stderr, stdout};
use burn_ddp_tests::split_training::{self, numbered};
use burn_ddp_tests::{Mlp, awkward, distance, rows, values};

/// The outcome of each color, trained in a job of its own.
fn of_own_jobs(world: usize) -> Vec<(String, u64)> {
    let train = |color| Ddp::spawn(world, |ddp| split_training::train(&ddp, color)).unwrap().remove(0);
    vec![train(0), train(1)]
}

fn same_as_own_jobs(ranks: &[Option<(u64, String, u64)>]) {
    let own = of_own_jobs((ranks.len() - 1) / 2);
    for (rank, result) in ranks.iter().enumerate() {
        assert_eq!(result.is_some(), rank + 1 < ranks.len(), "rank {rank}");
        if let Some((color, hash, steps)) = result {
            assert_eq!(*color, rank as u64 % 2);
            assert_eq!((hash, steps), (&own[*color as usize].0, &own[*color as usize].1), "rank {rank}");
        }
    }
    assert_ne!(own[0].0, own[1].0);
}

#[test]
fn parts_train_as_jobs_of_their_own() {
    same_as_own_jobs(&Ddp::spawn(5, |job| split_training::train_in_parts(&job)).unwrap());
}

#[test]
fn processes_do_over_every_engine() {
    for engine in ["shm", "tcp"] {
        let outputs = job(env!("CARGO_BIN_EXE_rank"), 5, &["parts", engine]);
        assert!(outputs.iter().all(|o| o.status.success()), "{engine}: {}", stderr(&outputs[0]));
        let ranks: Vec<_> = outputs.iter().map(|o| serde_json::from_str(line(&stdout(o), "part ")).unwrap()).collect();
        same_as_own_jobs(&ranks);
    }
}

/// Cases of `awkward`, two at a time in two parts of a job.
#[test]
fn awkward_models_train_in_parts() {
    const CASES: [[&str; 2]; 4] = [
        ["unused::on_changing_ranks", "two_models::with_accumulation"],
        ["gan::detached_and_attached", "statistics::batch_norm"],
        ["experts::routed_by_data", "records::unwrap_and_wrap"],
        ["two_models::both_in_one_loss", "frozen::thawing_layer_by_layer"],
    ];
    for cases in CASES {
        let run = |ddp: &Ddp, case: usize| awkward::run(cases[case], ddp).unwrap().map(|outcome| outcome.hash);
        let own = [0, 1].map(|case| Ddp::spawn(2, |ddp| run(&ddp, case)).unwrap().remove(0));
        let parts = Ddp::spawn(4, |job| {
            let color = job.rank() / 2;
            run(&job.split(Some(color as u64), 0)?.unwrap(), color)
        });
        assert_eq!(parts.unwrap(), [0, 0, 1, 1].map(|case| own[case].clone()), "{cases:?}");
    }
}

#[test]
fn a_part_is_split_again_and_ordered_by_its_keys() {
    let ranks = Ddp::spawn(6, |job| {
        let half = job.split(Some(job.rank() as u64 / 3), -(job.rank() as i64))?.unwrap();
        let pair = half.split((half.rank() < 2).then_some(9), 0)?;
        let sums = match &pair {
            Some(pair) => {
                let again = pair.split(Some(0), -(pair.rank() as i64))?.unwrap();
                assert_eq!((again.rank(), again.is_main()), (1 - pair.rank(), pair.rank() == 1));
                pair.sum(job.rank() as f64)?
            }
            None => -1.0,
        };
        assert_eq!(format!("{half:?}").contains("of the job"), !format!("{job:?}").contains("of the job"));
        // The job goes on after a part of it has ended.
        half.clone().finish()?;
        Ok((half.rank(), half.sum(job.rank() as f64)?, sums, job.sum(1.0)?))
    });
    let expected = [(2, 3.0, -1.0), (1, 3.0, 3.0), (0, 3.0, 3.0), (2, 12.0, -1.0), (1, 12.0, 9.0), (0, 12.0, 9.0)];
    assert_eq!(ranks.unwrap(), expected.map(|(rank, half, pair)| (rank, half, pair, 6.0)));
}

#[derive(Module, Debug)]
struct Net {
    first: Linear,
    second: Linear,
}

impl Net {
    fn new(outputs: usize, salt: u64, device: &Device) -> Self {
        let init = |i, o| LinearConfig::new(i, o).init(device);
        numbered(Net { first: init(6, 8), second: init(8, outputs) }, salt)
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.second.forward(self.first.forward(x).tanh())
    }
}

/// Squared distance of the discriminator's output from `target`.
fn opinion(d: &Net, x: Tensor<2>, target: f64) -> Tensor<1> {
    (d.forward(x) - target).powf_scalar(2.0).mean()
}

/// The two models of a GAN train in different parts: the generators send pictures, the discriminators send back the
/// gradients of the pictures.
#[test]
fn the_halves_of_a_gan_train_in_different_parts() {
    const STEPS: usize = 4;
    const ROWS: usize = 3;
    let noise = |step: usize, rank: usize, device: &Device| rows((2 * step + rank) * ROWS, ROWS, 6, 1, wide(), device);
    let real = |step: usize, rank: usize, device: &Device| rows((2 * step + rank) * ROWS, ROWS, 6, 2, wide(), device);
    let together = Ddp::spawn(2, |ddp| {
        let device = ddp.device()?.autodiff();
        let (mut g, mut d) = (ddp.wrap(Net::new(6, 10, &device))?, ddp.wrap(Net::new(1, 20, &device))?);
        let (mut g_optim, mut d_optim) = (AdamConfig::new().init(), SgdConfig::new().init());
        for step in 0..STEPS {
            let fake = g.forward(noise(step, ddp.rank(), &device));
            let loss = opinion(&d, real(step, ddp.rank(), &device), 1.0) + opinion(&d, fake.clone().detach(), 0.0);
            let grads = ddp.backward(&loss, &d)?.expect("averages");
            let loss = opinion(&d.clone().no_grad(), fake, 1.0);
            d = d_optim.step(0.1, d, grads);
            let grads = ddp.backward(&loss, &g)?.expect("averages");
            g = g_optim.step(0.01, g, grads);
        }
        Ok([values(&g), values(&d)])
    });
    let apart = Ddp::spawn(4, |job| {
        let (generates, pair) = (job.rank() < 2, job.rank() % 2);
        let ddp = job.split(Some(u64::from(generates)), 0)?.unwrap();
        let device = ddp.device()?.autodiff();
        let empty = || Tensor::<2>::zeros([ROWS, 6], (&device, wide()));
        let mut optim = if generates { AdamConfig::new().init() } else { SgdConfig::new().init() };
        let model = if generates { Net::new(6, 10, &device) } else { Net::new(1, 20, &device) };
        let mut model = ddp.wrap(model)?;
        for step in 0..STEPS {
            let (loss, rate) = if generates {
                let fake = model.forward(noise(step, pair, &device));
                job.send(fake.clone().detach(), pair + 2)?;
                let judged = job.recv(empty(), pair + 2)?;
                ((fake * judged).sum(), 0.01)
            } else {
                let fake = job.recv(empty(), pair)?.require_grad();
                let judged = opinion(&model.clone().no_grad(), fake.clone(), 1.0).backward();
                job.send(fake.grad(&judged).unwrap(), pair)?;
                let loss = opinion(&model, real(step, pair, &device), 1.0) + opinion(&model, fake.detach(), 0.0);
                (loss, 0.1)
            };
            let grads = ddp.backward(&loss, &model)?.expect("averages");
            model = optim.step(rate, model, grads);
        }
        Ok((values(&model), param_hash(&model)?))
    });
    let (together, apart) = (together.unwrap(), apart.unwrap());
    for rank in 0..4 {
        let d = distance(&apart[rank].0, &together[0][rank / 2]);
        assert!(d <= 1e-12 && apart[rank].1 == apart[rank / 2 * 2].1, "rank {rank}: {d:e}");
    }
}

fn wide() -> DType {
    DType::F64
}

#[test]
fn parts_save_load_and_keep_checkpoints_for_themselves() {
    let directory = tempfile::tempdir().unwrap();
    let hashes = Ddp::spawn(4, |job| {
        let color = job.rank() as u64 / 2;
        let ddp = job.split(Some(color), 0)?.unwrap();
        let device = ddp.device()?.autodiff();
        let new = |salt| Net::new(1, salt, &device);
        let model = ddp.wrap(new(color + 50 * ddp.rank() as u64))?;
        let path = ddp.save(&model, directory.path().join(format!("model{color}")))?;
        let checkpoints = ddp.checkpoints(directory.path().join(format!("steps{color}")))?.asynchronous(true);
        checkpoints.save(3 + color, |c| c.model(&model))?;
        let found = checkpoints.latest()?.unwrap();
        assert_eq!(found.step(), 3 + color);
        let hash = param_hash(&model)?;
        assert_eq!(param_hash(&found.model(new(99))?)?, hash);
        assert_eq!(param_hash(&new(98).load_file(&path))?, hash);
        // This checkpoint is still being written when the job ends.
        checkpoints.save(10, |c| c.model(&model))?;
        job.finish()?;
        Ok(hash)
    });
    let hashes = hashes.unwrap();
    assert!(hashes[0] == hashes[1] && hashes[2] == hashes[3] && hashes[0] != hashes[2]);
    for color in 0..2 {
        let entries = std::fs::read_dir(directory.path().join(format!("steps{color}"))).unwrap();
        assert_eq!(entries.filter(|entry| entry.as_ref().unwrap().path().is_dir()).count(), 2);
    }
}

#[test]
fn ranks_of_a_part_join_at_different_steps() {
    let train = |ddp: &Ddp, color: u64| {
        let device = ddp.device()?.autodiff();
        let mut model = ddp.wrap(Net::new(2, color, &device))?;
        let mut optim = SgdConfig::new().init();
        for step in 0..2 + ddp.rank() + color as usize {
            let loss = model.forward(rows(step, 4, 6, color, wide(), &device)).powf_scalar(2.0).mean();
            let grads = ddp.backward(&loss, &model)?.expect("averages");
            model = optim.step(0.1, model, grads);
        }
        let missed = ddp.join(&mut model, &mut optim)?;
        anyhow::Ok((missed, param_hash(&model)?))
    };
    let own = [0, 1].map(|color| Ddp::spawn(2, |ddp| train(&ddp, color)).unwrap());
    let parts = Ddp::spawn(4, |job| {
        let color = job.rank() as u64 % 2;
        train(&job.split(Some(color), 0)?.unwrap(), color)
    });
    assert_eq!(parts.unwrap(), [&own[0][0], &own[1][0], &own[0][1], &own[1][1]].map(Clone::clone));
}

/// One batch of the job's loader goes through a model of all ranks and one of a part; ranks have unequal batches.
#[test]
fn one_batch_trains_models_of_the_job_and_of_a_part() {
    struct Keep;
    impl burn::data::dataloader::batcher::Batcher<f32, Vec<f32>> for Keep {
        fn batch(&self, items: Vec<f32>, _: &Device) -> Vec<f32> {
            items
        }
    }
    let gradients = Ddp::spawn(4, |job| {
        let pair = job.split(Some(job.rank() as u64 / 2), 0)?.unwrap();
        let device = job.device()?.autodiff();
        let linear = || LinearConfig::new(1, 1).with_bias(false).init(&device);
        let (dense, expert): (Linear, Linear) = (job.wrap(linear())?, pair.wrap(linear())?);
        let data = burn::data::dataset::InMemDataset::new((0..10).map(|x| x as f32).collect());
        let loader = job.loader(Keep).global_batch_size(10).build(data)?;
        let mut seen = Vec::new();
        for batch in loader.iter() {
            let batch = batch?;
            let x = Tensor::<1>::from_floats(batch.as_slice(), &device).reshape([batch.len(), 1]);
            // Each handle reduces the gradients of its own model; the batch weighs both.
            let gradient = |ddp: &Ddp, model: &Linear| -> anyhow::Result<f32> {
                let grads = ddp.backward(&model.forward(x.clone()).mean(), model)?.expect("averages");
                Ok(grads.get::<2>(model.weight.id).expect("the weight has a gradient").into_scalar())
            };
            seen.push((batch, gradient(&job, &dense)?, gradient(&pair, &expert)?));
        }
        Ok(seen)
    });
    let gradients = gradients.unwrap();
    let mean = |ranks: &[usize]| {
        let items: Vec<f32> = ranks.iter().flat_map(|rank| gradients[*rank][0].0.clone()).collect();
        items.iter().sum::<f32>() / items.len() as f32
    };
    assert!(gradients.iter().any(|rank| rank[0].0.len() == 3) && gradients.iter().any(|rank| rank[0].0.len() == 2));
    for (rank, steps) in gradients.iter().enumerate() {
        let (_, dense, expert) = steps[0];
        assert!((dense - mean(&[0, 1, 2, 3])).abs() < 1e-6, "rank {rank}: {dense}");
        assert!((expert - mean(&[rank / 2 * 2, rank / 2 * 2 + 1])).abs() < 1e-6, "rank {rank}: {expert}");
    }
}

#[test]
fn a_model_belongs_to_the_handle_that_wrapped_it() {
    let directory = tempfile::tempdir().unwrap();
    let errors = Ddp::spawn(4, |job| {
        let part = job.split(Some(job.rank() as u64 / 2), 0)?.unwrap();
        let other = job.split(Some(job.rank() as u64 / 2), 0)?.unwrap();
        let device = job.device()?.autodiff();
        let mut model: Linear = part.wrap(LinearConfig::new(1, 1).init(&device))?;
        let mut optim = SgdConfig::new().init();
        let checkpoints = job.checkpoints(directory.path())?;
        let mut errors: Vec<Option<Error>> = vec![
            job.sync_buffers(&model).err(),
            job.check_replicas(&model).err(),
            job.save(&model, directory.path().join("model")).err(),
            checkpoints.save(1, |c| c.model(&model)).err(),
        ];
        errors.push(job.join(&mut model, &mut optim).err());
        errors.push(other.check_replicas(&model).err());
        // The calls before have sent nothing, so the groups can still be used.
        part.check_replicas(&model)?;
        job.barrier()?;
        Ok(errors.into_iter().map(|error| error.map_or("none".into(), |e| e.to_string())).collect::<Vec<_>>())
    });
    for (rank, errors) in errors.unwrap().iter().enumerate() {
        for error in errors {
            assert!(error.contains("the model was wrapped by the handle of"), "{error}");
        }
        says_which_handles(rank, &errors[0]);
        assert!(errors.last().unwrap().contains("another handle"), "{errors:?}");
    }
    assert!(!directory.path().join("model.bpk").exists());
}

/// Asserts that `error` names two handles of a job of 4 ranks: that of the half of `rank`, which wrapped the model, and
/// that of the job.
fn says_which_handles(rank: usize, error: &str) {
    let ranks = if rank < 2 { "ranks 0, 1 of the job" } else { "ranks 2, 3 of the job" };
    assert!(error.contains("the model was wrapped by the handle of"), "{error}");
    assert!(error.contains(ranks) && error.contains("ranks 0, 1, 2, 3"), "{error}");
}

/// A rank may make such a mistake alone, so an error of a backward is that of all ranks: the job is over.
#[test]
fn a_backward_belongs_to_the_handle_that_wrapped_the_model() {
    type Call = fn(&Ddp, &Tensor<1>, &Linear) -> Option<Error>;
    let calls: [(&str, Call); 4] = [
        ("backward", |job, loss, model| job.backward(loss, model).err()),
        ("accumulate", |job, loss, model| job.accumulate(loss, model).err()),
        ("scope", |job, loss, model| job.scope(model, || drop(loss.backward())).err()),
        ("flush", |job, _, model| job.flush(model).err()),
    ];
    for (name, call) in calls {
        let wrapped = std::sync::Barrier::new(4);
        let errors = Ddp::spawn(4, |job| {
            let part = job.split(Some(job.rank() as u64 / 2), 0)?.unwrap();
            let device = job.device()?.autodiff();
            let model: Linear = part.wrap(LinearConfig::new(1, 1).init(&device))?;
            let loss = model.forward(Tensor::<2>::ones([1, 1], &device)).sum();
            // Not a collective, which the error of the first rank might end on the others.
            wrapped.wait();
            Ok(call(&job, &loss, &model).map_or("none".into(), |error| error.to_string()))
        });
        for (rank, error) in errors.unwrap().iter().enumerate() {
            println!("{name} on rank {rank}: {error}");
            says_which_handles(rank, error);
        }
    }
}

#[test]
fn a_checkpoint_is_loaded_by_the_handle_that_wrapped_the_model() {
    let directory = tempfile::tempdir().unwrap();
    let errors = Ddp::spawn(4, |job| {
        let part = job.split(Some(job.rank() as u64 / 2), 0)?.unwrap();
        let line = |device: &Device| -> Linear { LinearConfig::new(4, 4).init(device) };
        let device = job.device()?.autodiff();
        let optim = || SgdConfig::new().init();
        let checkpoints = job.checkpoints(directory.path())?;
        checkpoints.save(1, |c| {
            let whole = job.wrap(line(&device))?;
            c.model(&whole)?;
            c.optimizer(&optim(), &whole)
        })?;
        let saved = checkpoints.latest()?.unwrap();
        let mut errors = Vec::new();
        for sharding in [Sharding::Off, Sharding::Parameters] {
            let config = WrapConfig::new().with_sharding(sharding).with_sharding_above(1);
            let model = part.wrap_with(line(&device), &config)?;
            errors.push(saved.optimizer(optim(), &model).err());
            errors.push(checkpoints.save(2, |c| c.optimizer(&optim(), &model)).err());
            errors.push(saved.model(model).err());
        }
        job.barrier()?;
        Ok(errors.into_iter().map(|error| error.map_or("none".into(), |e| e.to_string())).collect::<Vec<_>>())
    });
    for (rank, errors) in errors.unwrap().iter().enumerate() {
        let part = if rank < 2 { "the handle of ranks 0, 1 of the job" } else { "the handle of ranks 2, 3 of the job" };
        for error in errors {
            assert!(error.contains(part) && error.contains("the handle of ranks 0, 1, 2, 3"), "{error}");
        }
    }
}

#[test]
fn errors_name_ranks_of_the_job() {
    struct Keep;
    impl burn::data::dataloader::batcher::Batcher<u32, Vec<u32>> for Keep {
        fn batch(&self, items: Vec<u32>, _: &Device) -> Vec<u32> {
            items
        }
    }
    let errors = Ddp::spawn(4, |job| {
        let ddp = job.split(Some(job.rank() as u64 / 2), 0)?.unwrap();
        let device = ddp.device()?.autodiff();
        let linear = |features| -> Linear { LinearConfig::new(features, 1).init(&device) };
        let differ = 2 + ddp.rank();
        let data = burn::data::dataset::InMemDataset::new(vec![0; 10 * differ]);
        let settings = WrapConfig::new().with_accumulation(differ);
        let mut model = linear(1);
        model.weight = model.weight.map(|w| (w.ones_like() * differ as f32).detach().require_grad());
        let mut texts = vec![
            ddp.wrap(linear(differ)).unwrap_err().to_string(),
            ddp.wrap_with(linear(1), &settings).unwrap_err().to_string(),
            ddp.loader(Keep).build(data).unwrap_err().to_string(),
            ddp.check_replicas(&model).unwrap_err().to_string(),
            ddp.save(&model, "/proc/no/such/place").unwrap_err().to_string(),
        ];
        let first: anyhow::Result<()> = ddp.main_first(|| anyhow::bail!("no network"));
        texts.push(first.unwrap_err().to_string());
        Ok(texts)
    });
    let errors = errors.unwrap();
    for rank in [2, 3] {
        let last = if rank == 2 { "no network" } else { "rank 2 failed: no network" };
        let expected = [
            "weight is [2, 1] f32 on rank 2, but [3, 1] f32 on rank 3",
            "accumulation is 2 on rank 2 and 3 on rank 3",
            "the dataset length is 20 on rank 2 and 30 on rank 3",
            "differs between ranks 2, 3",
            "rank 2 could not write",
            last,
        ];
        for (error, expected) in errors[rank].iter().zip(expected) {
            assert!(error.contains(expected), "{expected:?} is not in {error}");
        }
    }
}

/// A rank that fails in one part ends the other parts, too; their errors name its rank in the job.
#[test]
fn a_failure_in_one_part_ends_the_job() {
    let options = WorldOptions { timeout: std::time::Duration::from_secs(60), ..WorldOptions::default() };
    let seen = std::sync::Mutex::new(Vec::new());
    let result = Ddp::spawn_with(4, options, |job| {
        let ddp = job.split(Some(job.rank() as u64 / 2), 0)?.unwrap();
        let device = ddp.device()?.autodiff();
        let model = ddp.wrap(Mlp::new(&device))?;
        for step in 0.. {
            anyhow::ensure!(job.rank() != 3 || step < 3, "out of memory");
            let x = rows(step, 2, 6, 1, DType::F32, &device);
            if let Err(error) = ddp.backward(&model.forward(x).sum(), &model) {
                seen.lock().unwrap().push((job.rank(), error.to_string()));
                return Err(error.into());
            }
        }
        Ok(())
    });
    assert_eq!(result.unwrap_err().to_string(), "rank 3 failed: out of memory");
    let seen = seen.into_inner().unwrap();
    assert_eq!(seen.len(), 3);
    assert!(seen.iter().all(|(_, error)| error.contains("rank 3") && error.contains("out of memory")), "{seen:?}");
}

/// A rank that leaves its epoch is named to its own part only where the others go on.
#[test]
fn loaders_of_parts_stop_where_each_part_wants() -> Result<()> {
    struct Keep;
    impl burn::data::dataloader::batcher::Batcher<u32, Vec<u32>> for Keep {
        fn batch(&self, items: Vec<u32>, _: &Device) -> Vec<u32> {
            items
        }
    }
    let steps = Ddp::spawn(4, |job| {
        let color = job.rank() / 2;
        let ddp = job.split(Some(color as u64), 0)?.unwrap();
        let data = || burn::data::dataset::InMemDataset::new((0..20).collect());
        let loader = ddp.loader(Keep).build(data())?;
        let mut steps = 0;
        for epoch in loader.epochs(0..2) {
            for batch in epoch.take(2 + 4 * color) {
                batch?;
                steps += 1;
                ddp.barrier()?;
            }
            job.barrier()?;
        }
        Ok(steps)
    })?;
    assert_eq!(steps, [4, 4, 12, 12]);
    let error = Ddp::spawn(4, |job| {
        let ddp = job.split(Some(job.rank() as u64 / 2), 0)?.unwrap();
        let data = burn::data::dataset::InMemDataset::new((0..20).collect());
        let loader = ddp.loader(Keep).build(data)?;
        for epoch in loader.epochs(0..1) {
            for batch in epoch.take(if job.rank() == 3 { 2 } else { 6 }) {
                batch?;
                ddp.barrier()?;
            }
            job.barrier()?;
        }
        Ok(())
    });
    let error = error.unwrap_err().to_string();
    assert!(error.contains("rank 3") && error.contains("rank 2 went on to epoch 1, step 3"), "{error}");
    Ok(())
}
