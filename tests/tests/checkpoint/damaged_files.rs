//! Damaged checkpoints are passed over; where all are damaged, or the storage fails, loading is an error.

use std::fs;

use burn::nn::LinearConfig;
use burn::optim::{AdamConfig, GradientsParams};
use burn::prelude::*;
use burn_ddp::checkpoint::Best;
use burn_ddp::prelude::*;
use burn_ddp_tests::device;

use super::{latest, names, save};

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
        // The save fails: a checkpoint that cannot be read must not be removed.
        checkpoints.keep_last(1).save(3, |_| Ok(())).unwrap_err();
        Ok(latest)
    })
    .unwrap();
    for e in errors {
        assert!(e.starts_with("rank 0 cannot read") && e.contains("Too many levels of symbolic links"), "{e}");
    }
    assert_eq!(names(path), [".lock", "step-00000001", "step-00000002"]);
}
