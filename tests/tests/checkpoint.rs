//! Checkpoints: a job restores what it saved, after any rank is killed and any file is damaged.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::Duration;

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::lr_scheduler::linear::LinearLrSchedulerConfig;
use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::nn::{Initializer, Linear, LinearConfig};
use burn::optim::{AdamConfig, GradientsParams, ModuleOptimizer, SgdConfig};
use burn::prelude::*;
use burn::tensor::DType;
use burn_ddp::checkpoint::{Best, Checkpoint, Checkpoints};
use burn_ddp::data::ShardedLoader;
use burn_ddp::prelude::*;
use burn_ddp_tests::{Normed, device, distance, job, number, rows, values};

const RANK: &str = env!("CARGO_BIN_EXE_rank");

/// A step on this rank's part of 12 rows.
fn step(ddp: &Ddp, optim: &mut ModuleOptimizer, model: Normed, step: usize) -> anyhow::Result<Normed> {
    let batch = 12 / ddp.world_size();
    let x = rows(step * 12 + ddp.rank() * batch, batch, 6, 1, DType::F32, &ddp.device()?.autodiff());
    let grads = model.loss(x).backward();
    let grads = GradientsParams::from_grads(grads, &model);
    Ok(optim.step(0.01, model, grads))
}

fn names(directory: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Saves a value alone.
fn save(ddp: &Ddp, directory: &Path, keep: usize, step: u64) -> burn_ddp::Result<()> {
    ddp.checkpoints(directory)?.keep_last(keep).save(step, |c| c.value("step", &step))
}

fn latest(ddp: &Ddp, directory: &Path) -> Option<u64> {
    ddp.checkpoints(directory).unwrap().latest().unwrap().map(|found| found.step())
}

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
fn wherever_a_file_is_damaged_the_older_checkpoint_is_chosen() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    Ddp::spawn(1, |ddp| {
        let mut optim = AdamConfig::new().init();
        let model = LinearConfig::new(2, 1).init(&device().autodiff());
        let grads = model.forward(Tensor::<2>::ones([1, 2], &device().autodiff())).mean().backward();
        let grads = GradientsParams::from_grads(grads, &model);
        let model = optim.step(0.1, model, grads);
        let checkpoints = ddp.checkpoints(path)?;
        for step in [1, 2] {
            checkpoints.save(step, |c| {
                c.model(&model)?;
                c.optimizer(&optim, &model)?;
                c.value("seen", &vec![1, 2, 3])
            })?;
        }
        let newest = path.join("step-00000002");
        assert_eq!(names(&newest), ["manifest.json", "manifest.json.sha256", "model.bpk", "optimizer.bpk"]);
        for name in names(&newest) {
            let file = newest.join(&name);
            let whole = fs::read(&file)?;
            for at in (0..whole.len()).step_by(7) {
                let mut flipped = whole.clone();
                flipped[at] ^= 1 << (at % 8);
                fs::write(&file, &flipped)?;
                anyhow::ensure!(latest(&ddp, path) == Some(1), "byte {at} of {name}");
            }
            for at in (0..whole.len()).step_by(31) {
                fs::write(&file, &whole[..at])?;
                anyhow::ensure!(latest(&ddp, path) == Some(1), "{name} cut at {at}");
            }
            fs::remove_file(&file)?;
            assert_eq!(latest(&ddp, path), Some(1), "without {name}");
            fs::write(&file, [&whole[..], b" "].concat())?;
            assert_eq!(latest(&ddp, path), Some(1), "more of {name}");
            fs::write(&file, &whole)?;
            assert_eq!(latest(&ddp, path), Some(2));
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_damaged_one_is_passed_over_by_all_and_its_step_can_be_saved_again() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    Ddp::spawn(2, |ddp| {
        for step in 1..=2 {
            save(&ddp, path, 5, step)?;
        }
        if ddp.is_main() {
            fs::remove_file(path.join("step-00000002/manifest.json"))?;
        }
        assert_eq!(latest(&ddp, path), Some(1));
        save(&ddp, path, 5, 2)?;
        assert_eq!(latest(&ddp, path), Some(2));
        let found = ddp.checkpoints(path)?.latest()?.unwrap();
        assert!(found.path().ends_with("step-00000002.1"), "{:?}", found.path());
        Ok(())
    })
    .unwrap();
}

#[test]
fn the_newest_stay_and_what_a_crash_left_goes() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    fs::create_dir(path.join(".burn-ddp-left")).unwrap();
    fs::write(path.join(".burn-ddp-left/model.bpk"), "half").unwrap();
    fs::write(path.join("notes.txt"), "not ours").unwrap();
    Ddp::spawn(2, |ddp| {
        assert_eq!(latest(&ddp, path), None);
        for step in [5, 10, 15, 15, 20] {
            save(&ddp, path, 2, step)?;
        }
        let zero = save(&ddp, path, 0, 30).unwrap_err().to_string();
        assert!(zero.contains("`keep_last(1)`"), "{zero}");
        let older = save(&ddp, path, 2, 7).unwrap_err().to_string();
        assert!(older.contains("holds a checkpoint of step 20; go on from that"), "{older}");
        Ok(())
    })
    .unwrap();
    assert_eq!(names(path), [".lock", "notes.txt", "step-00000015.1", "step-00000020"]);
}

#[test]
fn damaged_checkpoints_do_not_count_and_the_newest_complete_one_stays() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    Ddp::spawn(2, |ddp| {
        save(&ddp, path, 3, 80)?;
        save(&ddp, path, 3, 90)?;
        Ok(())
    })
    .unwrap();
    // Half a checkpoint, as a full disk of another machine leaves it.
    fs::create_dir(path.join("step-00000100")).unwrap();
    fs::write(path.join("step-00000100/model.bpk"), "half").unwrap();
    Ddp::spawn(2, |ddp| {
        save(&ddp, path, 2, 95)?;
        if ddp.is_main() {
            assert_eq!(names(path), [".lock", "step-00000090", "step-00000095", "step-00000100"]);
        }
        save(&ddp, path, 1, 96)?;
        assert_eq!(latest(&ddp, path), Some(96));
        save(&ddp, path, 1, 101)?;
        Ok(())
    })
    .unwrap();
    assert_eq!(names(path), [".lock", "step-00000101"]);
}

#[test]
fn checkpoints_that_are_all_damaged_are_an_error_and_no_new_beginning() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let errors = Ddp::spawn(2, |ddp| {
        for step in [80, 90] {
            ddp.checkpoints(path)?.save(step, |c| c.value("loss", &0.5))?;
        }
        if ddp.is_main() {
            fs::remove_file(path.join("step-00000080/manifest.json.sha256"))?;
            fs::write(path.join("step-00000090/manifest.json"), "half")?;
        }
        let checkpoints = ddp.checkpoints(path)?;
        let text = |found: burn_ddp::Result<_>| found.map(|_: Option<_>| ()).unwrap_err().to_string();
        let (latest, at) = (text(checkpoints.latest()), text(checkpoints.at(80)));
        let best = text(checkpoints.best("loss", Best::Lowest));
        let list = checkpoints.list().unwrap_err().to_string();
        assert!(checkpoints.at(85)?.is_none(), "no such step");
        checkpoints.save(95, |_| Ok(()))?;
        assert_eq!(checkpoints.latest()?.map(|found| found.step()), Some(95));
        Ok((latest, at, best, list))
    });
    for (latest, at, best, list) in errors.unwrap() {
        for part in [
            "rank 0 cannot load a checkpoint from",
            "damaged: step-00000090: manifest.json: checksum mismatch; step-00000080: manifest.json.sha256:",
            "move what is damaged away",
        ] {
            for error in [&latest, &best, &list] {
                assert!(error.contains(part), "{error}");
            }
        }
        assert!(at.contains("step-00000080: ") && !at.contains("step-00000090"), "{at}");
    }
}

#[test]
fn a_checkpoint_or_a_file_given_as_the_directory_is_an_error_that_says_what_to_give() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let renamed = path.join("renamed");
    let errors = Ddp::spawn(2, |ddp| {
        save(&ddp, path, 1, 7)?;
        if ddp.is_main() {
            fs::create_dir(&renamed)?;
            fs::copy(path.join("step-00000007/manifest.json"), renamed.join("manifest.json"))?;
        }
        // A misspelt step would become a damaged checkpoint of the directory.
        ["step-00000007", "step-00000008", "renamed", "step-00000007/manifest.json"]
            .into_iter()
            .map(|wrong| Ok(ddp.checkpoints(path.join(wrong)).unwrap_err().to_string()))
            .collect::<anyhow::Result<Vec<String>>>()
    });
    let holds = format!("give the directory that holds it, {}", path.display());
    for texts in errors.unwrap() {
        assert!(texts[..3].iter().all(|text| text.ends_with(&holds)), "{texts:?}");
        assert!(texts[3].contains("manifest.json: that is a file; give a directory"), "{texts:?}");
    }
    assert_eq!(names(path), [".lock", "renamed", "step-00000007"]);
}

#[test]
fn whatever_a_killed_job_has_left_the_next_saves_work_and_remove_it() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let left = [".burn-ddp-aB3xYz", ".burn-ddp-pruned/removed", "model.bpk.4711-0.tmp", ".burn-ddp-oWq1.bpk"];
    for name in &left[..2] {
        fs::create_dir_all(path.join(name)).unwrap();
        fs::write(path.join(name).join("optimizer.bpk"), "half").unwrap();
    }
    for name in &left[2..] {
        fs::write(path.join(name), "half").unwrap();
    }
    fs::write(path.join(".lock"), "").unwrap();
    fs::write(path.join("model.bpk.notes.tmp"), "not ours").unwrap();
    Ddp::spawn(2, |ddp| {
        let model = ddp.wrap(LinearConfig::new(2, 1).init(&ddp.device()?.autodiff()))?;
        save(&ddp, path, 2, 1)?;
        ddp.save(&model, path.join("model"))?;
        Ok(save(&ddp, path, 2, 2)?)
    })
    .unwrap();
    assert_eq!(names(path), [".lock", "model.bpk", "model.bpk.notes.tmp", "step-00000001", "step-00000002"]);
}

/// A fifo: opening it to read waits until it is opened to write, and the other way round.
fn fifo(path: &Path) {
    assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
}

#[test]
fn a_checkpoint_that_another_job_removes_while_it_is_read_gives_way_to_the_newer_one() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    Ddp::spawn(1, |ddp| Ok(save(&ddp, path, 5, 20)?)).unwrap();
    let (older, newer, hidden) = (path.join("step-00000010"), path.join("step-00000020"), path.join("hidden"));
    fs::rename(&newer, &hidden).unwrap();
    fs::create_dir(&older).unwrap();
    fifo(&older.join("manifest.json"));
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| Ddp::spawn(2, |ddp| Ok(latest(&ddp, path))));
        // Opens when the reader does.
        let open = fs::File::options().write(true).open(older.join("manifest.json")).unwrap();
        fs::rename(&hidden, &newer).unwrap();
        fs::remove_dir_all(&older).unwrap();
        drop(open);
        assert_eq!(reader.join().unwrap().unwrap(), [Some(20); 2]);
    });
}

#[test]
fn storage_that_fails_is_an_error_and_no_damage() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let errors = Ddp::spawn(2, |ddp| {
        save(&ddp, path, 5, 1)?;
        save(&ddp, path, 5, 2)?;
        if ddp.is_main() {
            let file = path.join("step-00000002/manifest.json.sha256");
            fs::remove_file(&file)?;
            std::os::unix::fs::symlink(&file, &file)?;
        }
        let checkpoints = ddp.checkpoints(path)?;
        let latest = checkpoints.latest().unwrap_err().to_string();
        // Not counted, and not removed either.
        checkpoints.keep_last(1).save(3, |_| Ok(())).unwrap_err();
        Ok(latest)
    })
    .unwrap();
    for e in errors {
        assert!(e.starts_with("rank 0 cannot read") && e.contains("Too many levels of symbolic links"), "{e}");
    }
    assert_eq!(names(path), [".lock", "step-00000001", "step-00000002"]);
}

#[test]
fn storage_that_is_slower_than_the_deadline_of_collectives_ends_no_job() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let timeout = Duration::from_millis(500);
    let slow = path.join("step-00000001");
    fs::create_dir(&slow).unwrap();
    fifo(&slow.join("manifest.json"));
    let options = burn_ddp::WorldOptions { timeout, ..burn_ddp::WorldOptions::default() };
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            Ddp::spawn_with(2, options, |ddp| {
                let found = ddp.checkpoints(path)?.latest().map(|found| found.is_none());
                Ok(found.unwrap_err().to_string())
            })
        });
        let open = fs::File::options().write(true).open(slow.join("manifest.json")).unwrap();
        std::thread::sleep(2 * timeout);
        fs::remove_file(slow.join("manifest.json")).unwrap();
        drop(open);
        let errors = reader.join().unwrap().unwrap();
        assert!(errors.iter().all(|e| e.contains("damaged: step-00000001: ")), "{errors:?}");
    });
}

/// Rank 0 opens the lock first, which here takes longer than any collective may.
#[test]
fn a_save_that_is_slower_than_the_deadline_of_collectives_ends_no_job() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let timeout = Duration::from_millis(500);
    fifo(&path.join(".lock"));
    let options = burn_ddp::WorldOptions { timeout, ..burn_ddp::WorldOptions::default() };
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            Ddp::spawn_with(2, options, |ddp| {
                save(&ddp, path, 5, 1)?;
                Ok(latest(&ddp, path))
            })
        });
        std::thread::sleep(3 * timeout);
        let _lock = fs::File::options().read(true).open(path.join(".lock")).unwrap();
        assert_eq!(writer.join().unwrap().unwrap(), [Some(1); 2]);
    });
}

/// Adam's moments alone are 400 MiB, more than an object can carry.
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
            let grads = GradientsParams::from_grads(ddp.backward(&model.forward(x).mean(), &model)?, &model);
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

#[test]
fn two_jobs_do_not_write_to_one_directory() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let (started, tried) = (std::sync::Barrier::new(3), std::sync::Barrier::new(3));
    std::thread::scope(|scope| {
        let first = scope.spawn(|| {
            Ddp::spawn(2, |ddp| {
                let checkpoints = ddp.checkpoints(path)?;
                checkpoints.save(1, |_| Ok(()))?;
                started.wait();
                tried.wait();
                checkpoints.save(2, |_| Ok(()))?;
                Ok(())
            })
        });
        started.wait();
        let second = Ddp::spawn(2, |ddp| Ok(save(&ddp, path, 1, 9).unwrap_err().to_string())).unwrap();
        assert!(second.iter().all(|e| e.contains("another job saves there")), "{second:?}");
        assert_eq!(Ddp::spawn(1, |ddp| Ok(latest(&ddp, path))).unwrap(), [Some(1)], "reading is no writing");
        tried.wait();
        first.join().unwrap().unwrap();
    });
}

#[test]
fn calls_that_differ_between_ranks_are_errors_and_no_hang() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let alone = Ddp::spawn(2, |ddp| {
        let checkpoints = ddp.checkpoints(path)?;
        let result = if ddp.is_main() { checkpoints.save(1, |_| Ok(())) } else { ddp.barrier() };
        Ok(result.unwrap_err().to_string())
    })
    .unwrap();
    assert!(alone.iter().all(|e| e.contains("tests/checkpoint.rs")), "{alone:?}");
    let errors = Ddp::spawn(2, |ddp| {
        let checkpoints = ddp.checkpoints(path)?;
        let rank = ddp.rank() as u64;
        let steps = checkpoints.save(5 + rank, |_| Ok(())).unwrap_err().to_string();
        let refused = |_: &mut burn_ddp::checkpoint::CheckpointWriter<'_>| match rank {
            1 => Err(burn_ddp::Error::Invalid { rank: None, reason: "no config".into() }),
            _ => Ok(()),
        };
        let filled = checkpoints.save(5, refused).unwrap_err().to_string();
        assert_eq!(checkpoints.latest()?.map(|found| found.step()), None);
        Ok((steps, filled))
    })
    .unwrap();
    for (steps, filled) in errors {
        assert!(steps.contains("rank 0 step 5, rank 1 step 6"), "{steps}");
        assert!(filled.contains("no config"), "{filled}");
    }
}

#[test]
fn a_rank_that_fails_before_the_running_statistics_are_brought_together_is_an_error_on_every_rank() {
    let directory = tempfile::tempdir().unwrap();
    for failing in [0, 1] {
        let errors = Ddp::spawn(2, |ddp| {
            let model = ddp.wrap(Normed::new(&ddp.device()?.autodiff()))?;
            let checkpoints = ddp.checkpoints(directory.path())?;
            let refused = checkpoints.save(1 + failing as u64, |c| {
                c.named("first").model(&model)?;
                if ddp.rank() == failing {
                    return Err(burn_ddp::Error::Invalid { rank: None, reason: "no config".into() });
                }
                // Also if the program goes on after the error.
                assert!(c.named("second").model(&model).unwrap_err().to_string().contains("no config"));
                assert!(c.named("third").model(&model).is_err());
                Ok(())
            });
            checkpoints.save(2 + failing as u64, |c| c.model(&model))?;
            Ok(refused.unwrap_err().to_string())
        });
        let errors = errors.unwrap();
        assert!(errors.iter().all(|error| error.contains("no config")), "{errors:?}");
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

#[test]
fn a_directory_that_cannot_be_is_an_error_on_every_rank() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("file");
    fs::write(&file, "").unwrap();
    let errors = Ddp::spawn(2, |ddp| Ok(ddp.checkpoints(file.join("in")).unwrap_err().to_string())).unwrap();
    assert!(errors.iter().all(|e| e.contains("rank 0 cannot make") && e.contains("Not a directory")), "{errors:?}");
}

#[test]
fn an_asynchronous_checkpoint_holds_what_was_there_at_the_call_and_its_errors_reach_every_rank() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("checkpoints");
    let errors = Ddp::spawn(2, |ddp| {
        let device = ddp.device()?.autodiff();
        let (mut optim, mut model) = (AdamConfig::new().init(), ddp.wrap(Normed::new(&device))?);
        let checkpoints = ddp.checkpoints(&path)?.asynchronous(true);
        model = step(&ddp, &mut optim, model, 0)?;
        checkpoints.save(1, |c| c.model(&model))?;
        let hash = param_hash(&model)?;
        model = step(&ddp, &mut optim, model, 1)?;
        let found = checkpoints.latest()?.unwrap();
        assert_eq!(param_hash(&found.model(Normed::new(&device))?)?, hash);
        checkpoints.save(2, |c| c.model(&model))?;
        checkpoints.wait()?;
        assert_eq!(checkpoints.latest()?.unwrap().step(), 2);
        ddp.barrier()?;
        if ddp.is_main() {
            fs::remove_dir_all(&path)?;
        }
        ddp.barrier()?;
        checkpoints.save(3, |c| c.model(&model))?;
        let next = checkpoints.save(4, |c| c.model(&model)).unwrap_err().to_string();
        checkpoints.save(5, |c| c.model(&model))?;
        drop(checkpoints);
        Ok((next, ddp.finish().unwrap_err().to_string()))
    })
    .unwrap();
    for (next, finish) in errors {
        assert!(next.contains("rank 0 cannot write the checkpoint of step 3"), "{next}");
        assert!(finish.contains("rank 0 cannot write the checkpoint of step 5"), "{finish}");
    }
}

/// The arguments of a rank that trains and saves in `directory`.
fn args<'a>(directory: &'a Path, steps: &'a str, every: &'a str, rest: &[&'a str]) -> Vec<&'a str> {
    [&["checkpoint", directory.to_str().unwrap(), steps, every], rest].concat()
}

/// Runs a job to its end: what rank 0 printed.
fn run(directory: &Path, steps: &str, every: &str) -> String {
    let ranks = job::job(RANK, 2, &args(directory, steps, every, &[]));
    let hashes: Vec<_> = ranks.iter().map(|rank| job::line(&job::stdout(rank), "hash ").to_string()).collect();
    assert_eq!(hashes[0], hashes[1]);
    job::stdout(&ranks[0])
}

#[test]
fn a_full_disk_is_an_error_on_every_rank_and_costs_nothing() {
    let directory = tempfile::tempdir().unwrap();
    run(directory.path(), "2", "1");
    let limited = "trap '' XFSZ; ulimit -f 1; exec \"$0\" \"$@\"";
    let args = args(directory.path(), "4", "1", &[]);
    let ranks = job::job("/bin/sh", 2, &[&["-c", limited, RANK][..], &args].concat());
    for rank in &ranks {
        let e = job::stderr(rank);
        assert!(!rank.status.success());
        assert!(e.contains("rank 0 cannot write the checkpoint of step 3") && e.contains("File too large"), "{e}");
    }
    assert_eq!(names(directory.path()), [".lock", "model.bpk", "step-00000001", "step-00000002"]);
    assert_eq!(job::line(&run(directory.path(), "4", "1"), "resumed "), "2");
}

/// A job of two ranks; dropped, it is killed.
struct Victim {
    ranks: Vec<Child>,
    out: BufReader<std::process::ChildStdout>,
    _port: job::FreePort,
}

impl Victim {
    fn start(directory: &Path, rest: &[&str]) -> Self {
        let port = job::FreePort::reserve();
        let args = args(directory, "1000000", "1", rest);
        let mut ranks: Vec<Child> = (0..2)
            .map(|rank| job::rank(RANK, rank, 2, port.port, &args).stderr(std::process::Stdio::null()).spawn().unwrap())
            .collect();
        let out = BufReader::new(ranks[0].stdout.take().unwrap());
        Victim { ranks, out, _port: port }
    }

    /// The step from which it goes on.
    fn resumed(&mut self) -> u64 {
        let mut line = String::new();
        self.out.read_line(&mut line).unwrap();
        line.trim().strip_prefix("resumed ").unwrap_or_else(|| panic!("{line:?}")).parse().unwrap()
    }

    /// Kills every rank, and returns the last step whose `save` had returned.
    fn kill(mut self) -> Option<u64> {
        self.end();
        self.out
            .by_ref()
            .lines()
            .map_while(Result::ok)
            .filter_map(|line| line.strip_prefix("saved ")?.parse().ok())
            .last()
    }

    fn end(&mut self) {
        self.ranks.iter_mut().for_each(|rank| drop(rank.kill()));
        self.ranks.iter_mut().for_each(|rank| drop(rank.wait()));
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        self.end();
    }
}

/// Kills a job `times` times at random moments; each start goes on from what was saved. Nothing that was saved is lost,
/// and in the end the parameters are those of a run that nobody killed.
fn kill_and_go_on(times: usize, mode: &str) {
    let directory = tempfile::tempdir().unwrap();
    let mut saved = 0;
    for round in 0..times {
        let mut victim = Victim::start(directory.path(), &[mode]);
        let resumed = victim.resumed();
        assert!(resumed >= saved, "round {round}: {saved} was saved, and {resumed} came back");
        let pause = (number(round, 9) + 1.0) * 30.0;
        std::thread::sleep(Duration::from_micros((pause * 1000.0) as u64));
        let last = victim.kill().unwrap_or(resumed);
        // What is still being written when `save` returns is what the wait before the next one vouches for.
        saved = if mode == "later" { last.saturating_sub(1) } else { last };
    }
    let steps = (saved + 5).to_string();
    let end = run(directory.path(), &steps, "1");
    assert!(job::line(&end, "resumed ").parse::<u64>().unwrap() >= saved);
    let left =
        names(directory.path()).into_iter().find(|name| name.starts_with(".burn-ddp-") || name.ends_with(".tmp"));
    assert_eq!(left, None, "nothing is left over");
    let uninterrupted = tempfile::tempdir().unwrap();
    assert_eq!(job::line(&end, "hash "), job::line(&run(uninterrupted.path(), &steps, "1000"), "hash "));
}

#[test]
fn killed_at_random_moments_nothing_that_was_saved_is_lost() {
    kill_and_go_on(30, "now");
}

#[test]
fn killed_at_random_moments_while_a_thread_writes() {
    kill_and_go_on(8, "later");
}

/// The end, of whole parameters, loads what sharded ones have left.
#[test]
fn killed_at_random_moments_while_parts_are_gathered() {
    kill_and_go_on(6, "sharded");
}

#[test]
#[ignore = "takes minutes: 1,000 kills"]
fn killed_a_thousand_times() {
    kill_and_go_on(1000, "now");
}

#[test]
fn burnrun_restarts_a_job_that_goes_on_where_it_was() {
    let burnrun = PathBuf::from(RANK).with_file_name("burnrun");
    assert!(burnrun.exists(), "build it with `cargo build --bins`");
    let (killed, whole) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let mut command = Command::new(burnrun);
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("BURN")) {
        command.env_remove(name);
    }
    let output = command
        .args(["-n", "2", "--max-restarts", "2", RANK])
        .args(args(killed.path(), "20", "3", &["now", "kill", "11"]))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", job::stderr(&output));
    assert!(killed.path().join("was killed").exists());
    let said = job::stdout(&output);
    assert!(said.contains("resumed 0") && said.contains("resumed 9"), "{said}");
    let hash = said.lines().find_map(|line| line.split("hash ").nth(1)).unwrap();
    assert_eq!(hash, job::line(&run(whole.path(), "20", "1000"), "hash "));
}

/// Directory of files that an earlier version wrote; see its README.
fn formats() -> PathBuf {
    match std::env::var_os("BURN_DDP_FORMATS") {
        Some(directory) => directory.into(),
        None => Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/earlier_version"),
    }
}

struct Rows;

impl Batcher<usize, Tensor<2>> for Rows {
    fn batch(&self, items: Vec<usize>, device: &Device) -> Tensor<2> {
        let rows = items.iter().map(|item| rows(*item, 1, 6, 1, DType::F32, device)).collect();
        Tensor::cat(rows, 0)
    }
}

/// State of a training after a step.
#[derive(Debug, PartialEq, serde::Serialize, serde::Deserialize)]
struct TrainingState {
    step: u64,
    hash: String,
    values: Vec<Vec<f64>>,
    position: serde_json::Value,
    learning_rate: f64,
}

impl TrainingState {
    fn of(
        step: u64,
        model: &Normed,
        train: &ShardedLoader<Tensor<2>>,
        scheduler: &ModuleLrScheduler,
    ) -> anyhow::Result<Self> {
        let (hash, values) = (param_hash(model)?, values(model));
        let position = serde_json::to_value(train.position())?;
        Ok(TrainingState { step, hash, values, position, learning_rate: scheduler.clone().step().base() })
    }
}

/// Trains to step 7, in epochs of 3 steps, from the latest checkpoint in `directory` or from the start, and saves at
/// the step `save_at`. Returns the states in the beginning and at the end.
fn train_in(ddp: &Ddp, directory: &Path, save_at: Option<u64>) -> anyhow::Result<[TrainingState; 2]> {
    let device = ddp.device()?.autodiff();
    let mut model = ddp.wrap(Normed::new(&device))?;
    let mut optim = AdamConfig::new().init();
    let mut scheduler = LinearLrSchedulerConfig::new(0.02, 0.001, 20).init().map_err(anyhow::Error::msg)?;
    let train = ddp.loader(Rows).global_batch_size(4).shuffle(42).set_device(device.clone());
    let train = train.build(InMemDataset::new((0..12).collect()))?;
    let checkpoints = ddp.checkpoints(directory.join("checkpoints"))?;
    let mut step = 0;
    if let Some(found) = checkpoints.latest()? {
        model = found.model(model)?;
        optim = found.optimizer(optim, &model)?;
        scheduler = scheduler.load_record(found.scheduler()?);
        train.resume(&found.value("loader")?)?;
        step = found.step();
    }
    let begin = TrainingState::of(step, &model, &train, &scheduler)?;
    'steps: for epoch in train.epochs(0..3) {
        for batch in epoch {
            let grads = GradientsParams::from_grads(model.loss(batch?).backward(), &model);
            model = optim.step(scheduler.step(), model, grads);
            step += 1;
            if save_at == Some(step) {
                checkpoints.save(step, |c| {
                    c.model(&model)?;
                    c.optimizer(&optim, &model)?;
                    c.scheduler(scheduler.to_record())?;
                    c.value("loader", &train.position())
                })?;
                ddp.save(&model, directory.join("model"))?;
                write_json(ddp, &directory.join("saved.json"), &TrainingState::of(step, &model, &train, &scheduler)?)?;
            }
            if step == 7 {
                break 'steps;
            }
        }
    }
    Ok([begin, TrainingState::of(step, &model, &train, &scheduler)?])
}

/// Rank 0 writes `state`.
fn write_json(ddp: &Ddp, file: &Path, state: &TrainingState) -> anyhow::Result<()> {
    if ddp.is_main() {
        fs::write(file, serde_json::to_vec_pretty(state)?)?;
    }
    Ok(())
}

/// Writes the files of `tests/fixtures/earlier_version`; see its README.
#[test]
#[ignore = "writes the fixture: see tests/fixtures/earlier_version/README.md"]
fn write_formats() {
    let directory = formats();
    fs::create_dir_all(&directory).unwrap();
    let timeline = Some(directory.join("timeline.json"));
    let options = burn_ddp::WorldOptions { timeline, ..burn_ddp::WorldOptions::default() };
    Ddp::spawn_with(2, options, |ddp| {
        let [_, end] = train_in(&ddp, &directory, Some(4))?;
        write_json(&ddp, &directory.join("end.json"), &end)?;
        // Parts are written after some time only.
        std::thread::sleep(Duration::from_secs(3));
        ddp.barrier()?;
        ddp.barrier()?;
        if ddp.is_main() {
            // As a killed job leaves them: the last rank to end puts the parts together and removes them.
            for rank in 0..2 {
                let part = directory.join(format!("timeline.json.rank-{rank}"));
                fs::copy(part, directory.join(format!("killed.json.rank-{rank}")))?;
            }
        }
        Ok(ddp.finish()?)
    })
    .unwrap();
}

#[test]
fn files_of_an_earlier_version_load_and_training_goes_on() {
    let directory = formats();
    let state =
        |name: &str| -> TrainingState { serde_json::from_slice(&fs::read(directory.join(name)).unwrap()).unwrap() };
    let (saved, end) = (state("saved.json"), state("end.json"));
    for [loaded, ended] in Ddp::spawn(2, |ddp| train_in(&ddp, &directory, None)).unwrap() {
        assert_eq!(loaded, saved);
        assert_eq!((&ended.position, ended.learning_rate), (&end.position, end.learning_rate));
        // Kernels may round differently on another processor.
        assert!(distance(&ended.values, &end.values) < 1e-5, "{ended:?}, expected {end:?}");
        assert!(ended.hash == end.hash || std::env::var_os("BURN_DDP_FORMATS").is_none(), "written on this machine");
    }
    let model = Normed::new(&device().autodiff()).load_file(directory.join("model.bpk"));
    assert_eq!(param_hash(&model).unwrap(), saved.hash);
}

/// Saves steps with a loss, and returns those that stay.
fn kept(ddp: &Ddp, checkpoints: &Checkpoints, losses: &[(u64, Option<f64>)]) -> anyhow::Result<Vec<u64>> {
    for (step, loss) in losses {
        checkpoints.save(*step, |c| loss.iter().try_for_each(|loss| c.value("loss", loss)))?;
    }
    ddp.barrier()?;
    Ok(checkpoints.list()?.iter().map(Checkpoint::step).collect())
}

#[test]
fn the_best_stay_beside_the_newest_and_are_found() {
    let losses = [(1, Some(0.9)), (2, Some(0.3)), (3, None), (4, Some(0.3)), (5, Some(0.8)), (6, Some(0.7))];
    let run = |keep: fn(Checkpoints) -> Checkpoints| {
        let directory = tempfile::tempdir().unwrap();
        let ranks = Ddp::spawn(2, |ddp| {
            let checkpoints = keep(ddp.checkpoints(directory.path())?);
            let steps = kept(&ddp, &checkpoints, &losses)?;
            let best = |best| anyhow::Ok(checkpoints.best("loss", best)?.map(|found| found.step()));
            assert_eq!(checkpoints.best("accuracy", Best::Highest)?.map(|found| found.step()), None);
            Ok((steps, best(Best::Lowest)?, best(Best::Highest)?))
        });
        let ranks = ranks.unwrap();
        assert_eq!(ranks[0], ranks[1]);
        ranks[0].clone()
    };
    assert_eq!(run(|c| c), (vec![6, 5, 4, 3, 2, 1], Some(4), Some(1)), "of equal ones the newer");
    assert_eq!(run(|c| c.keep_best(1, "loss", Best::Lowest)), (vec![6, 4], Some(4), Some(6)));
    assert_eq!(run(|c| c.keep_last(2).keep_best(2, "loss", Best::Lowest)).0, [6, 5, 4, 2]);
    assert_eq!(run(|c| c.keep_last(1).keep_best(1, "loss", Best::Highest)), (vec![6, 1], Some(6), Some(1)));
    assert_eq!(run(|c| c.keep_last(1).keep_best(3, "accuracy", Best::Highest)).0, [6]);
}

#[test]
fn one_that_is_damaged_is_not_the_best_and_a_step_is_found_in_its_last_attempt() {
    let directory = tempfile::tempdir().unwrap();
    let file = |name: &str| directory.path().join(name);
    Ddp::spawn(2, |ddp| {
        let model = LinearConfig::new(2, 2).init(&ddp.device()?);
        let checkpoints = ddp.checkpoints(directory.path())?;
        for (step, loss) in [(1, 0.5), (2, 0.1), (2, 0.2), (3, 0.9)] {
            checkpoints.save(step, |c| {
                c.model(&model)?;
                c.value("loss", &loss)
            })?;
        }
        let loss = |found: Option<Checkpoint>| found.map(|found| found.value::<f64>("loss").unwrap());
        assert_eq!(loss(checkpoints.at(2)?), Some(0.2));
        assert_eq!(loss(checkpoints.at(7)?), None);
        if ddp.is_main() {
            fs::write(file("step-00000002/model.bpk"), "torn")?;
            fs::write(file("step-00000003/manifest.json"), "{}")?;
        }
        ddp.barrier()?;
        assert_eq!(loss(checkpoints.best("loss", Best::Lowest)?), Some(0.2), "0.1 is damaged");
        let damaged = checkpoints.at(3).unwrap_err().to_string();
        assert!(damaged.contains("damaged: step-00000003: manifest.json: checksum mismatch"), "{damaged}");
        let steps: Vec<u64> = checkpoints.list()?.iter().map(Checkpoint::step).collect();
        assert_eq!(steps, [2, 2, 1], "a damaged manifest is no checkpoint");
        let torn = checkpoints.list()?.remove(1).model(LinearConfig::new(2, 2).init(&ddp.device()?));
        assert!(torn.unwrap_err().to_string().contains("has changed"));

        let differ = checkpoints.at(ddp.rank() as u64).unwrap_err().to_string();
        assert!(differ.contains("the step of the checkpoint is 0 on rank 0 and 1 on rank 1"), "{differ}");
        Ok(())
    })
    .unwrap();
}

#[test]
fn handles_of_one_directory_save_in_turn() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("checkpoints");
    Ddp::spawn(2, |ddp| {
        let mid = ddp.checkpoints(&path)?.asynchronous(true);
        let end = ddp.checkpoints(path.join("../checkpoints"))?.keep_last(2);
        mid.save(1, |c| c.value("by", &0))?;
        end.save(2, |c| c.value("by", &0))?;
        mid.save(3, |c| c.value("by", &0))?;
        let latest = end.latest()?.map(|found| found.step());
        assert_eq!(latest, Some(3), "which waits for the other handle's save");
        drop((mid, end));
        // Nothing holds the directory any more.
        let again = ddp.checkpoints(&path)?.keep_last(1);
        again.save(4, |c| c.value("by", &0))?;
        let steps: Vec<u64> = again.list()?.iter().map(Checkpoint::step).collect();
        assert_eq!(steps, [4]);
        Ok(ddp.finish()?)
    })
    .unwrap();
}
