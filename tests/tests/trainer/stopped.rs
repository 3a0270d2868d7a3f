//! Burn's trainer asked to stop: it saves in the middle of an epoch, and goes on with the bits of an undisturbed run.

use std::cell::RefCell;

use super::*;

/// A call of the model's steps after which this rank wishes to stop.
#[derive(Clone, Copy, Debug, PartialEq)]
enum At {
    Training(usize),
    Validation(usize),
}

thread_local! {
    /// The rank of this thread, and its calls that are still to come before the wish.
    static WISH: RefCell<Option<(Ddp, At)>> = const { RefCell::new(None) };
}

/// Counts a call of this rank's model.
pub(super) fn count(trains: bool) {
    WISH.with_borrow_mut(|wish| {
        let Some((ddp, at)) = wish else { return };
        match (at, trains) {
            (At::Training(0), true) | (At::Validation(0), false) => ddp.request_stop(),
            (At::Training(left), true) | (At::Validation(left), false) => *left -= 1,
            _ => return,
        }
        if ddp.stop_wished() {
            *wish = None;
        }
    });
}

/// Four epochs of eight steps.
fn training() -> Job {
    Job { epochs: 4, shuffle: true, optim: || AdamConfig::new().init(), ..Job::new() }
}

/// Goes on in `directory`, until `rank` wishes to stop at `at`. Returns each rank's outcome, and whether it stopped.
fn go_on(job: &Job, world: usize, model: &Net, directory: &Path, stop: Option<(usize, At)>) -> Vec<(Outcome, bool)> {
    let ranks = Ddp::spawn(world, |ddp| {
        if let Some((_, at)) = stop.filter(|(rank, _)| *rank == ddp.rank()) {
            WISH.set(Some((ddp.clone(), at)));
        }
        let last = ddp.last_epoch(directory)?;
        let outcome = job.on_rank(&ddp, model.clone(), directory, |training| {
            let training = training.with_default_checkpointers();
            last.into_iter().fold(training, SupervisedTraining::checkpoint)
        });
        WISH.set(None);
        Ok((outcome?, ddp.stop_requested()))
    });
    ranks.unwrap()
}

#[test]
fn a_training_that_is_stopped_anywhere_goes_on_with_the_same_bits() {
    let sharding = WrapConfig::new().with_sharding(Sharding::Parameters).with_sharding_above(1);
    let (sharded, added_up) =
        (Job { sharding: Some(sharding), ..training() }, Job { accumulation: Some(2), ..training() });
    let model = model();
    for (what, job, world, stops) in [
        ("alone", training(), 1, vec![At::Training(3), At::Validation(0)]),
        (
            "first and last step",
            training(),
            2,
            vec![At::Training(0), At::Training(6), At::Training(7), At::Training(8)],
        ),
        ("validation", training(), 2, vec![At::Validation(0), At::Validation(2), At::Validation(9)]),
        ("sharded", sharded, 2, vec![At::Training(4), At::Validation(1), At::Training(7)]),
        ("accumulated", added_up, 2, vec![At::Training(2), At::Training(5), At::Training(7)]),
    ] {
        let straight = job.together(world, &model);
        let directory = tempfile::tempdir().unwrap();
        for (nth, at) in stops.into_iter().enumerate() {
            let ranks = go_on(&job, world, &model, directory.path(), Some((nth % world, at)));
            for (outcome, stopped) in &ranks {
                assert_eq!((outcome.error.as_ref(), stopped), (None, &true), "{what}, {at:?}");
                let reason = outcome.interrupted.clone().flatten().unwrap_or_default();
                assert!(reason.contains("asked to stop"), "{what}, {at:?}: {reason}");
            }
        }
        for (outcome, stopped) in go_on(&job, world, &model, directory.path(), None) {
            assert_eq!((outcome.error, outcome.interrupted.is_some(), stopped), (None, false, false), "{what}");
            assert_eq!(outcome.hash, straight.hash, "{what}");
            let valid = |finals: &Finals| {
                let last = finals.iter().filter(|((split, _, epoch), _)| (&split[..], *epoch) == ("valid", 4));
                last.map(|(_, value)| *value).collect::<Vec<_>>()
            };
            assert_eq!((valid(&outcome.finals), valid(&straight.finals).len()), (valid(&straight.finals), 2), "{what}");
        }
    }
}

#[test]
fn without_checkpoints_the_wish_to_stop_changes_nothing() {
    let model = model();
    let ranks = Ddp::spawn(2, |ddp| {
        WISH.set(Some((ddp.clone(), At::Training(3))));
        let outcome = training().on_rank(&ddp, model.clone(), Path::new("unused"), |t| t);
        WISH.set(None);
        outcome
    });
    let straight = training().together(2, &model);
    assert!(ranks.unwrap().iter().all(|rank| rank.hash == straight.hash && rank.interrupted.is_none()));
}

#[test]
fn the_position_of_an_earlier_run_does_not_count() {
    let (job, model, directory) = (training(), model(), tempfile::tempdir().unwrap());
    go_on(&job, 2, &model, directory.path(), Some((1, At::Training(3))));
    let file = |name: &str| directory.path().join("checkpoint").join(name);
    let position = std::fs::read(file("position-1.json")).unwrap();
    go_on(&job, 2, &model, directory.path(), Some((0, At::Training(9))));
    // The second run has ended the first epoch, whose checkpoint is that of its end now.
    assert!(!file("position-1.json").exists() && file("position-2.json").exists());
    std::fs::write(file("position-1.json"), position).unwrap();
    for name in ["model", "optim", "scheduler"] {
        std::fs::remove_file(file(&format!("{name}-2.bpk"))).unwrap();
    }
    let hash = go_on(&job, 2, &model, directory.path(), None).remove(0).0.hash;
    assert_eq!(hash, job.together(2, &model).hash);
}

#[test]
fn a_checkpoint_that_was_not_written_to_its_end_is_refused() {
    let (job, model, directory) = (training(), model(), tempfile::tempdir().unwrap());
    go_on(&job, 2, &model, directory.path(), Some((1, At::Training(11))));
    let position = directory.path().join("checkpoint/position-2.json");
    let text = std::fs::read_to_string(&position).unwrap();
    std::fs::write(&position, text.replace("\"is_complete\":true", "\"is_complete\":false")).unwrap();
    let ranks = Ddp::spawn(2, |ddp| {
        assert_eq!(ddp.last_epoch(directory.path())?, Some(1), "the one before is whole");
        job.on_rank(&ddp, model.clone(), directory.path(), |t| t.with_default_checkpointers().checkpoint(2))
    });
    for rank in ranks.unwrap() {
        let error = rank.error.unwrap();
        assert!(error.contains("epoch 2 is not complete") && error.contains("earlier epoch"), "{error}");
    }
    let hash = go_on(&job, 2, &model, directory.path(), None).remove(0).0.hash;
    assert_eq!(hash, job.together(2, &model).hash);
}

/// The other ranks need no checkpointer, for example with `ddp.checkpointer`.
#[test]
fn rank_0_alone_may_have_a_checkpointer() {
    let (job, model, directory) = (training(), model(), tempfile::tempdir().unwrap());
    let ranks = Ddp::spawn(2, |ddp| {
        WISH.set((ddp.rank() == 1).then(|| (ddp.clone(), At::Training(3))));
        let outcome = job.on_rank(&ddp, model.clone(), directory.path(), |training| match ddp.is_main() {
            true => training.with_default_checkpointers(),
            false => training,
        });
        WISH.set(None);
        Ok((outcome?.error, ddp.stop_requested()))
    });
    assert_eq!(ranks.unwrap(), [(None, true), (None, true)]);
    assert_eq!(go_on(&job, 2, &model, directory.path(), None)[0].0.hash, job.together(2, &model).hash);
}

/// The wish comes in the last validation: nothing is left to do but its rest; or after it, and changes nothing.
#[test]
fn a_wish_after_the_last_step_ends_as_ever() {
    let (job, model, directory) = (Job { epochs: 1, ..training() }, model(), tempfile::tempdir().unwrap());
    let ranks = Ddp::spawn(2, |ddp| {
        let outcome = job.on_rank(&ddp, model.clone(), directory.path(), |t| t.with_default_checkpointers())?;
        ddp.request_stop();
        ddp.barrier()?;
        Ok((outcome.error, outcome.interrupted.is_some(), ddp.stop_requested()))
    });
    assert_eq!(ranks.unwrap(), [(None, false, false), (None, false, false)]);
}
