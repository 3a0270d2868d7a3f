//! Errors and panics show the line of the program that has made the call.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::nn::{BatchNormConfig, Linear, LinearConfig};
use burn::optim::{GradientsParams, SgdConfig};
use burn::prelude::*;
use burn_ddp::nn::SyncBatchNorm;
use burn_ddp::prelude::*;
use burn_ddp::{DistributedOptimizer, Error};

struct Keep;

impl Batcher<u32, Vec<u32>> for Keep {
    fn batch(&self, items: Vec<u32>, _: &Device) -> Vec<u32> {
        items
    }
}

/// After rank 1 has failed, the error of each call of rank 0 shows the line of the call.
#[test]
fn every_call_says_where_it_was_made() {
    let directory = tempfile::tempdir().unwrap();
    let said = Mutex::new(Vec::new());
    let result = Ddp::spawn(2, |ddp| {
        let device = ddp.device()?.autodiff();
        let new = || -> Linear { LinearConfig::new(2, 1).init(&device) };
        let mut model = ddp.wrap(new())?;
        let mut optim = SgdConfig::new().init();
        let checkpoints = ddp.checkpoints(directory.path())?;
        let data = || InMemDataset::new(vec![1, 2, 3, 4]);
        let train = ddp.loader(Keep).build(data())?;
        let mut horovod = DistributedOptimizer::new(&ddp, SgdConfig::new().init());
        if ddp.rank() == 1 {
            anyhow::bail!("out of memory");
        }
        while ddp.world().check().is_ok() {
            std::thread::yield_now();
        }
        let x = Tensor::<2>::ones([2, 2], &device.clone().inner());
        let text = |error: Option<Error>| error.map_or("none".into(), |error| error.to_string());
        let grads = GradientsParams::new();
        let position = train.position();
        let mut texts = vec![
            ("wrap", text(ddp.wrap(new()).err())),
            ("loader", text(ddp.loader(Keep).build(data()).err())),
            ("eval_loader", text(ddp.eval_loader(Keep).build(data()).err())),
            ("resume", text(train.resume(&position).err())),
            ("save", text(ddp.save(&model, directory.path().join("model")).err())),
            ("check_replicas", text(ddp.check_replicas(&model).err())),
            ("broadcast_parameters", text(ddp.broadcast_parameters(new(), 0).err())),
            ("broadcast_optimizer_state", text(ddp.broadcast_optimizer_state(&mut optim, &model, 0).err())),
            ("flush", text(ddp.flush(&model).err())),
            ("mean", text(ddp.mean(1.0).err())),
            ("barrier", text(ddp.barrier().err())),
            ("split", text(ddp.split(Some(0), 0).err())),
            ("main_first", ddp.main_first(|| Ok(())).unwrap_err().to_string()),
            ("checkpoints", text(ddp.checkpoints(directory.path()).err())),
            ("checkpoint", text(checkpoints.save(1, |c| c.model(&model)).err())),
            ("latest", text(checkpoints.latest().err())),
            ("all_reduce", text(ddp.all_reduce(x.clone(), ReduceOp::Sum).err())),
            ("all_gather", text(ddp.all_gather(x.clone()).err())),
            ("broadcast", text(ddp.broadcast(x.clone(), 0).err())),
            ("gather", text(ddp.gather(x.clone(), 0).err())),
            ("reduce", text(ddp.reduce(x.clone(), ReduceOp::Sum, 0).err())),
            ("reduce_scatter", text(ddp.reduce_scatter(x.clone(), ReduceOp::Sum).err())),
            ("all_to_all", text(ddp.all_to_all(x.clone()).err())),
            ("send", text(ddp.send(x.clone(), 1).err())),
            ("recv", text(ddp.recv(x.clone(), 1).err())),
            ("differentiable", text(ddp.differentiable().all_gather(x.clone()).err())),
            ("try_step", text(horovod.try_step(0.1, new(), grads).err())),
        ];
        texts.push(("join", text(ddp.join(&mut model, &mut optim).err())));
        texts.push(("finish", text(ddp.clone().finish().err())));
        said.lock().unwrap().extend(texts);
        Ok(())
    });
    assert!(result.is_err());
    let said = said.into_inner().unwrap();
    assert!(said.len() > 25);
    let elsewhere: Vec<_> = said.iter().filter(|(_, text)| !text.contains("user_lines.rs:")).collect();
    assert!(elsewhere.is_empty(), "{elsewhere:#?}");
    assert!(said.iter().all(|(_, text)| text.contains("out of memory")), "{said:#?}");
}

/// Hooks make the calls of a backward and do not know its line, so the errors name the model instead.
#[test]
fn errors_of_a_backward_say_which_model_it_is_of() {
    let said = Mutex::new(None);
    let result = Ddp::spawn(2, |ddp| {
        let device = ddp.device()?.autodiff();
        let (line, model) = (line!(), ddp.wrap(LinearConfig::new(2, 1).init(&device))?);
        let model: Linear = model;
        if ddp.rank() == 1 {
            anyhow::bail!("out of memory");
        }
        while ddp.world().check().is_ok() {
            std::thread::yield_now();
        }
        let loss = model.forward(Tensor::<2>::ones([2, 2], &device)).sum();
        let error = ddp.backward(&loss, &model).map(drop).expect_err("rank 1 has failed").to_string();
        *said.lock().unwrap() = Some((error, line));
        Ok(())
    });
    assert!(result.is_err());
    let (error, line) = said.into_inner().unwrap().unwrap();
    assert!(error.contains(&format!("of the model wrapped at {}:{line}:", file!())), "{error}");
    assert!(!error.contains("called at"), "{error}");
}

/// The panics of calls that return no error.
#[test]
fn panics_show_the_line_of_the_caller() {
    static LINES: Mutex<Vec<String>> = Mutex::new(Vec::new());
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|info| LINES.lock().unwrap().push(info.location().unwrap().to_string())));
    let result = Ddp::spawn(2, |ddp| {
        let device = ddp.device()?.autodiff();
        let norm: SyncBatchNorm = ddp.wrap(BatchNormConfig::new(2).init(&device).into())?;
        let mut horovod = DistributedOptimizer::new(&ddp, SgdConfig::new().init());
        let linear: Linear = LinearConfig::new(2, 1).init(&device);
        if ddp.rank() == 1 {
            anyhow::bail!("out of memory");
        }
        while ddp.world().check().is_ok() {
            std::thread::yield_now();
        }
        let forward = catch_unwind(AssertUnwindSafe(|| norm.forward(Tensor::<2>::ones([2, 2], &device))));
        let step = catch_unwind(AssertUnwindSafe(|| horovod.step(0.1, linear, GradientsParams::new())));
        assert!(forward.is_err() && step.is_err());
        Ok(())
    });
    std::panic::set_hook(hook);
    assert!(result.is_err());
    let lines = LINES.lock().unwrap();
    assert_eq!(lines.len(), 2);
    assert!(lines.iter().all(|line| line.contains("user_lines.rs:")), "{lines:?}");
}
