//! The directory of checkpoints: which paths are refused, which files are removed, and how several jobs and handles
//! share it.

use std::fs;

use burn::nn::LinearConfig;
use burn_ddp::checkpoint::Checkpoint;
use burn_ddp::prelude::*;

use super::{fifo, latest, names, save};

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
        // A misspelt step, if accepted, would create a folder that looks like a damaged checkpoint.
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
        // Returns once the reader has opened the fifo.
        let open = fs::File::options().write(true).open(older.join("manifest.json")).unwrap();
        fs::rename(&hidden, &newer).unwrap();
        fs::remove_dir_all(&older).unwrap();
        drop(open);
        assert_eq!(reader.join().unwrap().unwrap(), [Some(20); 2]);
    });
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
fn a_directory_that_cannot_be_is_an_error_on_every_rank() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("file");
    fs::write(&file, "").unwrap();
    let errors = Ddp::spawn(2, |ddp| Ok(ddp.checkpoints(file.join("in")).unwrap_err().to_string())).unwrap();
    assert!(errors.iter().all(|e| e.contains("rank 0 cannot make") && e.contains("Not a directory")), "{errors:?}");
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
        // No handle of the directory exists any more.
        let again = ddp.checkpoints(&path)?.keep_last(1);
        again.save(4, |c| c.value("by", &0))?;
        let steps: Vec<u64> = again.list()?.iter().map(Checkpoint::step).collect();
        assert_eq!(steps, [4]);
        Ok(ddp.finish()?)
    })
    .unwrap();
}
