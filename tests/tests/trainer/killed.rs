//! Burn's trainer with sharded parameters in processes: a rank is killed, and the job goes on from its checkpoint.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;
use burn_ddp_tests::Fill;
use burn_ddp_tests::job::{self, FreePort};

/// Variables of a rank: the directory of its training, the epoch from which it resumes (0: none), and the training step
/// in which rank 1 is killed.
const DIRECTORY: &str = "TRAINER_DIRECTORY";
const FROM: &str = "TRAINER_FROM";
const KILLED_AT: &str = "TRAINER_KILLED_AT";

/// Four epochs of eight steps, with every parameter sharded that can be.
fn training() -> Job {
    let sharding = WrapConfig::new().with_sharding(Sharding::Parameters).with_sharding_above(1);
    let optim = || AdamConfig::new().init();
    Job { epochs: 4, shuffle: true, optim, sharding: Some(sharding), ..Job::new() }
}

fn filled() -> Net {
    model().map(&mut Fill(0.5))
}

/// Kills this process if its variables say so for this training step.
pub(super) fn killed_in_this_step() {
    static STEPS: AtomicUsize = AtomicUsize::new(0);
    let step = STEPS.fetch_add(1, Ordering::Relaxed);
    if std::env::var(KILLED_AT).is_ok_and(|at| at == step.to_string()) {
        rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL).unwrap();
    }
}

#[test]
#[ignore = "a rank of the job of `a_training_whose_rank_was_killed_goes_on`, which starts it"]
fn rank() {
    let variable = |name| std::env::var(name).expect("started by the test");
    let directory = variable(DIRECTORY);
    let ddp = Ddp::init().unwrap();
    let outcome = training().on_rank(&ddp, filled(), Path::new(&directory), |training| {
        let training = training.with_default_checkpointers().with_checkpointing_strategy(KeepLastNCheckpoints::new(4));
        match variable(FROM).parse() {
            Ok(0) => training,
            from => training.checkpoint(from.unwrap()),
        }
    });
    let Outcome { hash, error, .. } = outcome.unwrap();
    println!("\nhash {hash}\nerror {}", error.unwrap_or_default().replace('\n', " "));
}

/// Runs a job; returns hash and error of each rank that was not killed.
fn run(world: usize, directory: &Path, from: usize, killed_at: Option<usize>) -> Vec<(String, String)> {
    let (this, port) = (std::env::current_exe().unwrap(), FreePort::reserve());
    let ranks = (0..world).map(|rank| {
        let args = ["--exact", "killed::rank", "--ignored", "--nocapture"];
        let mut command = job::rank(this.to_str().unwrap(), rank, world, port.port, &args);
        command.env(DIRECTORY, directory).env(FROM, from.to_string());
        if let Some(step) = killed_at.filter(|_| rank == 1) {
            command.env(KILLED_AT, step.to_string());
        }
        command
    });
    let ended = job::finish(ranks.collect());
    let (killed, others): (Vec<_>, Vec<_>) = ended.iter().partition(|rank| !rank.status.success());
    let unexpected = killed.get(usize::from(killed_at.is_some())).map(|rank| job::stderr(rank));
    assert!(unexpected.is_none(), "{}", unexpected.unwrap_or_default());
    let line = |text: &str, key| job::line(text, key).to_owned();
    others.iter().map(|rank| job::stdout(rank)).map(|text| (line(&text, "hash "), line(&text, "error "))).collect()
}

#[test]
fn a_training_whose_rank_was_killed_goes_on() {
    let straight = Job { sharding: None, ..training() }.together(2, &filled()).hash;
    let directory = tempfile::tempdir().unwrap();
    // In the third epoch.
    let survivors = run(2, directory.path(), 0, Some(19));
    assert_eq!(survivors.len(), 1);
    assert!(survivors[0].1.contains("rank 1"), "{}", survivors[0].1);
    // Sharded over three ranks, whose sums round differently than those of two: all three have the same bits.
    let three = run(3, directory.path(), 2, None);
    assert!(three.iter().all(|rank| *rank == three[0] && rank.1.is_empty()), "{three:?}");
    assert_eq!(run(2, directory.path(), 2, None), vec![(straight, String::new()); 2]);
}
