//! Checkpoints of models with sharded parameters: the files are those of whole models, so that any number of ranks can
//! resume from them, sharded or not.

use std::fs;
use std::path::Path;

use burn::module::Module;
use burn::nn::{BatchNorm, BatchNormConfig, Embedding, EmbeddingConfig, Linear, LinearConfig, LinearLayout};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamConfig, AdamWConfig, ModuleOptimizer, SgdConfig};
use burn::prelude::*;
use burn_ddp::prelude::*;
use burn_ddp_tests::{Fill, job};

/// Layers whose rows divide evenly between ranks and others, a transposed one, a frozen one, and running statistics.
#[derive(Module, Debug)]
struct Net {
    tokens: Embedding,
    norm: BatchNorm,
    turned: Linear,
    up: Linear,
    frozen: Linear,
    down: Linear,
}

impl Net {
    /// Values depend on `salt`.
    fn new(device: &Device, salt: usize) -> Self {
        let linear = |i, o| LinearConfig::new(i, o).init(device);
        let model = Net {
            tokens: EmbeddingConfig::new(11, 6).init(device),
            norm: BatchNormConfig::new(6).init(device),
            turned: LinearConfig::new(6, 6).with_layout(LinearLayout::Col).init(device),
            up: linear(6, 9),
            frozen: linear(9, 9),
            down: linear(9, 5),
        };
        let model = model.map(&mut Fill(salt as f32));
        Net { frozen: model.frozen.no_grad(), ..model }
    }

    fn loss(&self, tokens: Tensor<2, Int>) -> Tensor<1> {
        let x = self.tokens.forward(tokens);
        let x = self.norm.forward(x.swap_dims(1, 2)).swap_dims(1, 2);
        let x = self.up.forward(self.turned.forward(x).tanh());
        self.down.forward(self.frozen.forward(x).tanh()).powf_scalar(2.0).mean()
    }
}

/// A step on 12 sequences, divided between the ranks.
fn step(ddp: &Ddp, model: Net, optim: &mut DdpOptimizer, step: usize) -> anyhow::Result<Net> {
    let device = ddp.device()?.autodiff();
    let own = 12 / ddp.world_size();
    let token = |i: usize| ((7 * i + 5 * step + i * i) % 11) as i32;
    let tokens: Vec<i32> = (ddp.rank() * own * 3..(ddp.rank() + 1) * own * 3).map(token).collect();
    let tokens = Tensor::<1, Int>::from_ints(tokens.as_slice(), &device).reshape([own, 3]);
    let grads = ddp.backward(&model.loss(tokens), &model)?.expect("averages");
    Ok(optim.step(0.01, model, grads))
}

fn optimizers() -> [(&'static str, ModuleOptimizer); 3] {
    [
        ("momentum", SgdConfig::new().with_momentum(Some(MomentumConfig::new())).init()),
        ("adam", AdamConfig::new().init()),
        ("adamw", AdamWConfig::new().init()),
    ]
}

fn sharded() -> WrapConfig {
    WrapConfig::new().with_sharding(Sharding::Parameters).with_sharding_above(1)
}

/// Trains from step 0 to 6 and saves after step 3; returns the hashes after step 3 and at the end.
fn train(directory: &Path, world: usize, config: &WrapConfig, optim: &ModuleOptimizer, later: bool) -> [String; 2] {
    let hashes = Ddp::spawn(world, |ddp| {
        let mut model = ddp.wrap_with(Net::new(&ddp.device()?.autodiff(), ddp.rank()), config)?;
        let mut optim = ddp.optimizer(optim.clone(), &model)?;
        for i in 0..3 {
            model = step(&ddp, model, &mut optim, i)?;
        }
        let checkpoints = ddp.checkpoints(directory)?.asynchronous(later);
        checkpoints.save(3, |c| {
            c.model(&model)?;
            c.optimizer(&optim, &model)
        })?;
        let saved = param_hash(&model)?;
        for i in 3..6 {
            model = step(&ddp, model, &mut optim, i)?;
        }
        checkpoints.wait()?;
        Ok([saved, param_hash(&model)?])
    });
    one_of(hashes.unwrap())
}

/// Resumes from the checkpoint and trains to step 6. Returns the hashes after loading and at the end.
fn resume(
    directory: &Path,
    world: usize,
    config: &WrapConfig,
    optim: &ModuleOptimizer,
    wrap_first: bool,
) -> [String; 2] {
    let hashes = Ddp::spawn(world, |ddp| {
        let mut model = Net::new(&ddp.device()?.autodiff(), 9);
        let ids = (model.tokens.weight.id, model.down.weight.id);
        let checkpoint = ddp.checkpoints(directory)?.latest()?.expect("it was saved");
        if wrap_first {
            model = ddp.wrap_with(model, config)?;
            let before = param_hash(&model)?;
            model = checkpoint.model(model)?;
            assert_ne!(before, param_hash(&model)?);
        } else {
            model = ddp.wrap_with(checkpoint.model(model)?, config)?;
        }
        assert_eq!(ids, (model.tokens.weight.id, model.down.weight.id), "ids stay");
        let optim = ddp.optimizer(optim.clone(), &model)?;
        let mut optim = checkpoint.optimizer(optim, &model)?;
        let loaded = param_hash(&model)?;
        for i in 3..6 {
            model = step(&ddp, model, &mut optim, i)?;
        }
        Ok([loaded, param_hash(&model)?])
    });
    one_of(hashes.unwrap())
}

/// Checks that all ranks have the same hashes, and returns them.
fn one_of(hashes: Vec<[String; 2]>) -> [String; 2] {
    assert!(hashes.iter().all(|rank| *rank == hashes[0]), "{hashes:?}");
    hashes[0].clone()
}

#[test]
fn saved_in_parts_or_whole_any_number_of_ranks_goes_on_alike() {
    for (name, optim) in optimizers() {
        let [in_parts, whole] = [sharded(), WrapConfig::new()].map(|config| {
            let directory = tempfile::tempdir().unwrap();
            (train(directory.path(), 4, &config, &optim, false), directory)
        });
        assert_eq!(in_parts.0, whole.0, "{name}");
        for (world, config) in [
            (1, sharded()),
            (2, sharded()),
            (3, sharded()),
            (4, sharded()),
            (2, WrapConfig::new()),
            (3, WrapConfig::new()),
        ] {
            let from_parts = resume(in_parts.1.path(), world, &config, &optim, true);
            assert_eq!(from_parts[0], in_parts.0[0], "{name} on {world} ranks");
            let from_whole = resume(whole.1.path(), world, &config, &optim, world != 2);
            assert_eq!(from_parts, from_whole, "{name} on {world} ranks");
            if world == 4 {
                assert_eq!(from_parts, in_parts.0, "{name}: goes on as if it had not stopped");
            }
        }
    }
}

#[test]
fn a_thread_writes_the_same_files_and_plain_burn_reads_them() {
    let (now, later) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let optim = AdamConfig::new().init();
    let [saved, end] = train(now.path(), 3, &sharded(), &optim, false);
    assert_eq!([saved.clone(), end], train(later.path(), 3, &sharded(), &optim, true));
    let alone = |directory: &Path| {
        let hashes = Ddp::spawn(1, |ddp| {
            let step_of = directory.join("step-00000003");
            let model = Net::new(&ddp.device()?.autodiff(), 9).load_file(step_of.join("model.bpk"));
            let loaded = param_hash(&model)?;
            let optim = AdamConfig::new().init().load(step_of.join("optimizer.bpk"))?;
            let model = step(&ddp, ddp.wrap(model)?, &mut optim.into(), 3)?;
            Ok((loaded, param_hash(&model)?))
        });
        hashes.unwrap().remove(0)
    };
    let read = alone(now.path());
    assert_eq!(read.0, saved);
    assert_eq!(read, alone(later.path()));
}

#[test]
fn a_damaged_file_gives_way_to_the_older_checkpoint() {
    let directory = tempfile::tempdir().unwrap();
    let steps = Ddp::spawn(3, |ddp| {
        let mut model = ddp.wrap_with(Net::new(&ddp.device()?.autodiff(), 0), &sharded())?;
        let mut optim = ddp.optimizer(AdamConfig::new().init(), &model)?;
        let checkpoints = ddp.checkpoints(directory.path())?;
        let mut hashes = Vec::new();
        for i in 1..=2 {
            model = step(&ddp, model, &mut optim, i)?;
            checkpoints.save(i as u64, |c| {
                c.model(&model)?;
                c.optimizer(&optim, &model)
            })?;
            hashes.push(param_hash(&model)?);
        }
        let newest = checkpoints.latest()?.expect("it was saved");
        ddp.barrier()?;
        if ddp.is_main() {
            for file in ["model.bpk", "optimizer.bpk"] {
                let path = newest.path().join(file);
                let mut bytes = fs::read(&path)?;
                let last = bytes.len() - 1;
                bytes[last] ^= 1;
                fs::write(path, bytes)?;
            }
        }
        ddp.barrier()?;
        let state = newest.optimizer(AdamConfig::new().init(), &model).err().unwrap().to_string();
        let changed = newest.model(model.clone()).unwrap_err().to_string();
        for error in [state, changed] {
            assert!(error.starts_with("rank 0") && error.contains("has changed"), "{error}");
        }
        let older = checkpoints.latest()?.expect("the older one is complete");
        assert_eq!(param_hash(&older.model(model)?)?, hashes[0]);
        Ok(older.step())
    });
    assert_eq!(steps.unwrap(), [1; 3]);
}

#[test]
fn what_does_not_fit_is_an_error_on_every_rank() {
    let directory = tempfile::tempdir().unwrap();
    let errors = Ddp::spawn(3, |ddp| {
        let device = ddp.device()?.autodiff();
        let model = ddp.wrap_with(Net::new(&device, 0), &sharded())?;
        let mut optim = ddp.optimizer(AdamConfig::new().init(), &model)?;
        let model = step(&ddp, model, &mut optim, 0)?;
        let checkpoints = ddp.checkpoints(directory.path())?;
        checkpoints.save(1, |c| {
            c.model(&model)?;
            c.optimizer(&optim, &model)
        })?;
        // One rank's optimizer has made no step.
        let fresh = AdamConfig::new().init();
        let other = if ddp.rank() == 2 { &fresh } else { &optim };
        let differ = checkpoints.save(2, |c| c.optimizer(other, &model)).unwrap_err().to_string();
        let ways = checkpoints.save(2, |c| if ddp.rank() == 1 { Ok(()) } else { c.model(&model) });
        let found = checkpoints.latest()?.expect("the first one");
        let sgd = SgdConfig::new().with_momentum(Some(MomentumConfig::new())).init();
        let kind = found.optimizer(sgd, &model).err().unwrap().to_string();
        let wide = Net { down: LinearConfig::new(9, 7).init(&device), ..Net::new(&device, 0) };
        let wide = found.model(ddp.wrap_with(wide, &sharded())?).unwrap_err().to_string();
        Ok([differ, ways.unwrap_err().to_string(), kind, wide])
    });
    for [differ, ways, kind, wide] in errors.unwrap() {
        assert!(differ.contains("is on rank 0, but not on rank 2"), "{differ}");
        assert!(ways.contains("rank 0 saves model.bpk, rank 1 nothing more"), "{ways}");
        assert!(kind.contains("another optimizer?"), "{kind}");
        assert!(wide.contains("down.weight is [9, 5] f32 in the checkpoint, but [9, 7] f32 in the model"), "{wide}");
    }
}

/// Real processes: a job of 4 ranks is killed; jobs of 4 and of 3 ranks resume.
#[test]
fn a_job_that_was_killed_goes_on() {
    let rank = env!("CARGO_BIN_EXE_rank");
    let args = |directory: &Path, rest: &[&str]| -> Vec<String> {
        let rest = rest.iter().map(ToString::to_string);
        ["checkpoint".into(), directory.to_str().unwrap().into(), "8".into(), "3".into()]
            .into_iter()
            .chain(rest)
            .collect()
    };
    let run = |world: usize, args: &[String]| {
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let ranks = job::job(rank, world, &args);
        let failed = ranks.iter().find(|rank| !rank.status.success());
        assert!(failed.is_none(), "{}", failed.map_or_else(String::new, job::stderr));
        let out: Vec<String> = ranks.iter().map(job::stdout).collect();
        assert!(out.iter().all(|text| job::line(text, "hash ") == job::line(&out[0], "hash ")));
        (job::line(&out[0], "resumed ").to_owned(), job::line(&out[0], "hash ").to_owned())
    };
    let (killed, fewer, whole) =
        (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    for directory in [&killed, &fewer] {
        let args = args(directory.path(), &["sharded", "kill", "5"]);
        let ranks = job::job(rank, 4, &args.iter().map(String::as_str).collect::<Vec<_>>());
        assert!(ranks.iter().all(|rank| !rank.status.success()), "rank 1 was killed, and the others notice it");
    }
    let (_, uninterrupted) = run(4, &args(whole.path(), &["now"]));
    assert_eq!(run(4, &args(killed.path(), &["sharded"])), ("3".to_owned(), uninterrupted));
    assert_eq!(run(3, &args(fewer.path(), &["sharded"])).0, "3");
}
