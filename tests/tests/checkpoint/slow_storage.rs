//! Storage that is slower than the deadline of collectives ends no job.

use std::fs;
use std::time::Duration;

use burn_ddp::prelude::*;

use super::{fifo, latest, save};

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

/// Rank 0 first opens the lock file, which here takes longer than the deadline of a collective.
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
