//! Models, optimizers, schedules and values come back as they were saved, under any number of ranks.

use std::fs;
use std::process::Command;

use burn::lr_scheduler::linear::LinearLrSchedulerConfig;
use burn::nn::{Initializer, Linear, LinearConfig};
use burn::optim::{AdamConfig, GradientsParams, SgdConfig};
use burn::prelude::*;
use burn::tensor::DType;
use burn_ddp::prelude::*;
use burn_ddp_tests::{Normed, device, rows};

use super::step;

#[test]
fn training_goes_on_with_the_same_bits_at_any_world_size_loaded_before_or_after_wrap() {
    let directory = tempfile::tempdir().unwrap();
    let saved = Ddp::spawn(2, |ddp| {
        let (mut optim, mut model) = (AdamConfig::new().init(), ddp.wrap(Normed::new(&ddp.device()?.autodiff()))?);
        for i in 0..3 {
            model = step(&ddp, &mut optim, model, i)?;
        }
        let checkpoints = ddp.checkpoints(directory.path())?;
        checkpoints.save(3, |c| {
            c.model(&model)?;
            c.optimizer(&optim, &model)
        })?;
        let hash = param_hash(&model)?;
        for i in 3..6 {
            model = step(&ddp, &mut optim, model, i)?;
        }
        Ok((hash, param_hash(&model)?))
    })
    .unwrap();
    for world in [1, 2, 3] {
        for wrap_first in [false, true] {
            let loaded = Ddp::spawn(world, |ddp| {
                let mut model = Normed::new(&ddp.device()?.autodiff());
                let ids = (model.a.weight.id, model.b.bias.as_ref().map(|b| b.id));
                if wrap_first {
                    model = ddp.wrap(model)?;
                }
                let found = ddp.checkpoints(directory.path())?.latest()?.expect("it was saved");
                assert_eq!((found.step(), found.world_size()), (3, 2));
                model = found.model(model)?;
                let mut optim = found.optimizer(AdamConfig::new().init(), &model)?;
                assert_eq!(ids, (model.a.weight.id, model.b.bias.as_ref().map(|b| b.id)), "ids stay");
                if !wrap_first {
                    model = ddp.wrap(model)?;
                }
                let hash = param_hash(&model)?;
                for i in 3..6 {
                    model = step(&ddp, &mut optim, model, i)?;
                }
                Ok((hash, param_hash(&model)?))
            })
            .unwrap();
            for rank in &loaded {
                assert_eq!(rank.0, saved[0].0, "world {world}, wrapped first {wrap_first}");
                assert_eq!(rank.1, loaded[0].1);
            }
            if world == 2 {
                assert_eq!(loaded, saved, "goes on as if it had not stopped");
            }
        }
    }
}

#[test]
fn plain_burn_reads_model_and_optimizer() {
    let directory = tempfile::tempdir().unwrap();
    let device = device().autodiff();
    let gradients = |model: &Linear| {
        GradientsParams::from_grads(model.forward(rows(0, 4, 3, 1, DType::F32, &device)).mean().backward(), model)
    };
    let hashes = Ddp::spawn(1, |ddp| {
        let (mut optim, mut model) = (AdamConfig::new().init(), LinearConfig::new(3, 2).init(&device));
        model = optim.step(0.1, model.clone(), gradients(&model));
        ddp.checkpoints(directory.path())?.save(1, |c| {
            c.model(&model)?;
            c.optimizer(&optim, &model)
        })?;
        Ok(param_hash(&optim.step(0.1, model.clone(), gradients(&model)))?)
    })
    .unwrap();
    let checkpoint = directory.path().join("step-00000001");
    let model = LinearConfig::new(3, 2).init(&device).load_file(checkpoint.join("model.bpk"));
    let mut optim = AdamConfig::new().init().load(checkpoint.join("optimizer.bpk")).unwrap();
    assert_eq!(param_hash(&optim.step(0.1, model.clone(), gradients(&model))).unwrap(), hashes[0]);
    let check = Command::new("sha256sum").args(["--check", "manifest.json.sha256"]).current_dir(&checkpoint).output();
    assert!(check.unwrap().status.success());
}

#[test]
fn several_models_schedules_and_values_have_names() {
    let directory = tempfile::tempdir().unwrap();
    Ddp::spawn(2, |ddp| {
        let device = ddp.device()?.autodiff();
        let (g, d) = (LinearConfig::new(3, 2).init(&device), LinearConfig::new(2, 1).init(&device));
        let (g, d) = (ddp.broadcast_parameters(g, 0)?, ddp.broadcast_parameters(d, 0)?);
        let mut module = LinearLrSchedulerConfig::new(1.0, 0.1, 10).init().unwrap();
        let _ = module.step();
        let checkpoints = ddp.checkpoints(directory.path())?;
        checkpoints.save(1, |c| {
            c.named("g").model(&g)?;
            c.named("d").model(&d)?;
            c.named("d").scheduler(module.to_record())?;
            c.named("d").value("best", &0.1f64)?;
            c.value("best", &(0.3f32, Some("text".to_string()), [u64::MAX]))
        })?;
        let found = checkpoints.latest()?.unwrap();
        let fresh = LinearConfig::new(2, 1).init(&device);
        assert_eq!(param_hash(&found.named("d").model(fresh)?)?, param_hash(&d)?);
        let fresh = LinearConfig::new(3, 2).init(&device);
        assert_eq!(param_hash(&found.named("g").model(fresh)?)?, param_hash(&g)?);
        let again = LinearLrSchedulerConfig::new(1.0, 0.1, 10).init().unwrap();
        let mut again = again.load_record(found.named("d").scheduler()?);
        assert_eq!(again.step().base(), module.step().base());
        assert_eq!(found.named("d").value::<f64>("best")?.to_bits(), 0.1f64.to_bits());
        let best: (f32, Option<String>, [u64; 1]) = found.value("best")?;
        assert_eq!(best, (0.3, Some("text".into()), [u64::MAX]));

        let twice = checkpoints.save(2, |c| {
            c.model(&g)?;
            c.model(&d)
        });
        assert!(twice.unwrap_err().to_string().contains("model.bpk is in the checkpoint already"));
        let path = checkpoints.save(2, |c| c.named("../g").model(&g));
        assert!(path.unwrap_err().to_string().contains("part of a file's name"));
        let nan = checkpoints.save(2, |c| c.value("loss", &f64::NAN));
        assert!(nan.unwrap_err().to_string().contains("the value \"loss\" cannot be saved"));
        let e = found.value::<u64>("loss").unwrap_err().to_string();
        assert!(e.contains("has no value \"loss\"; it holds d-model.bpk, d-scheduler.bpk, g-model.bpk"), "{e}");
        assert!(found.value::<u64>("best").unwrap_err().to_string().contains("the value \"best\" of the checkpoint"));
        assert!(found.model(d).unwrap_err().to_string().contains("has no model.bpk"));
        Ok(())
    })
    .unwrap();
}

#[test]
fn another_model_or_optimizer_is_an_error_on_every_rank() {
    let directory = tempfile::tempdir().unwrap();
    let errors = Ddp::spawn(2, |ddp| {
        let device = ddp.device()?.autodiff();
        let (mut optim, mut model) = (AdamConfig::new().init(), ddp.wrap(Normed::new(&device))?);
        model = step(&ddp, &mut optim, model, 0)?;
        let checkpoints = ddp.checkpoints(directory.path())?;
        checkpoints.save(1, |c| {
            c.model(&model)?;
            c.optimizer(&optim, &model)
        })?;
        let found = checkpoints.latest()?.unwrap();
        let wide = Normed { a: LinearConfig::new(6, 5).init(&device), ..Normed::new(&device) };
        let part = Linear { bias: None, ..LinearConfig::new(6, 4).init(&device) };
        let errors = vec![
            found.model(wide).unwrap_err().to_string(),
            found.model(part.clone()).unwrap_err().to_string(),
            found.optimizer(SgdConfig::new().init(), &model).err().unwrap().to_string(),
            found.optimizer(AdamConfig::new().init(), &part).err().unwrap().to_string(),
        ];
        found.model(model)?;
        Ok(errors)
    })
    .unwrap();
    for rank in errors {
        assert!(rank[0].contains("a.weight is [6, 4] f32 in the checkpoint, but [6, 5] f32 in the model"), "{rank:?}");
        assert!(rank[1].contains("a.weight [6, 4] f32 is not in the model"), "{rank:?}");
        assert!(rank[2].contains("another optimizer?"), "{rank:?}");
        assert!(rank[3].contains("which the model does not have"), "{rank:?}");
    }
}

#[test]
fn local_parameters_may_have_other_shapes_on_each_rank() {
    #[derive(Module, Debug)]
    struct Experts {
        shared: Linear,
        own: Linear,
    }
    let directory = tempfile::tempdir().unwrap();
    Ddp::spawn(2, |ddp| {
        let device = ddp.device()?.autodiff();
        let config = WrapConfig::new().with_local_parameters(["own"]);
        let init = |outputs| LinearConfig::new(3, outputs).init(&device);
        let model = || ddp.wrap_with(Experts { shared: init(2), own: init(2 + ddp.rank()) }, &config);
        let (saved, other) = (model()?, model()?);
        let checkpoints = ddp.checkpoints(directory.path())?;
        checkpoints.save(1, |c| c.model(&saved))?;
        let own = param_hash(&other.own)?;
        let loaded = checkpoints.latest()?.expect("it was saved").model(other)?;
        assert_eq!(param_hash(&loaded.shared)?, param_hash(&saved.shared)?);
        let expected = if ddp.is_main() { param_hash(&saved.own)? } else { own };
        assert_eq!(param_hash(&loaded.own)?, expected, "the file holds rank 0's");
        Ok(())
    })
    .unwrap();
}

/// Adam's moments alone are 400 MiB, more than a collective of objects can carry.
#[test]
#[ignore = "needs 5 GB of memory: cargo test --test checkpoint large -- --ignored"]
fn a_large_state_is_saved_and_resumed() {
    const ROWS: usize = 52_100;
    let directory = tempfile::tempdir().unwrap();
    let train = |ddp: &Ddp, steps: std::ops::Range<usize>| {
        let device = ddp.device()?.autodiff();
        let layer = LinearConfig::new(ROWS, 1_008).with_initializer(Initializer::Constant { value: 0.1 });
        let (mut optim, mut model) = (AdamConfig::new().init(), ddp.wrap(layer.init(&device))?);
        let checkpoints = ddp.checkpoints(directory.path())?;
        if let Some(saved) = checkpoints.latest()? {
            model = saved.model(model)?;
            optim = saved.optimizer(optim, &model)?;
        }
        for step in steps {
            let x = rows(2 * step + ddp.rank(), 1, ROWS, 1, DType::F32, &device);
            let grads = ddp.backward(&model.forward(x).mean(), &model)?.expect("averages");
            model = optim.step(1e-3, model, grads);
            checkpoints.save(step as u64, |c| {
                c.model(&model)?;
                c.optimizer(&optim, &model)
            })?;
        }
        Ok(param_hash(&model)?)
    };
    let resumed = [0..1, 1..2].map(|steps| Ddp::spawn(2, |ddp| train(&ddp, steps.clone())).unwrap());
    let optimizer = fs::metadata(directory.path().join("step-00000001/optimizer.bpk")).unwrap();
    assert!(optimizer.len() > 400 << 20, "{optimizer:?}");
    fs::remove_dir_all(directory.path()).unwrap();
    let at_one_go = Ddp::spawn(2, |ddp| train(&ddp, 0..2)).unwrap();
    assert_eq!(resumed[1], at_one_go);
}
