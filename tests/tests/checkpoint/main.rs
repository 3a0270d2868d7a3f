//! Checkpoints: a job restores what it saved, after any rank is killed and any file is damaged.

mod best;
mod calls_of_ranks;
mod damaged_files;
mod directory;
mod earlier_version;
mod killed_jobs;
mod save_and_load;
mod slow_storage;

use std::fs;
use std::path::Path;
use std::process::Command;

use burn::optim::ModuleOptimizer;
use burn::tensor::DType;
use burn_ddp::prelude::*;
use burn_ddp_tests::{Normed, rows};

/// An optimizer step on this rank's part of 12 rows.
fn step(ddp: &Ddp, optim: &mut ModuleOptimizer, model: Normed, step: usize) -> anyhow::Result<Normed> {
    let batch = 12 / ddp.world_size();
    let x = rows(step * 12 + ddp.rank() * batch, batch, 6, 1, DType::F32, &ddp.device()?.autodiff());
    let grads = ddp.backward(&model.loss(x), &model)?.expect("averages");
    Ok(optim.step(0.01, model, grads))
}

fn names(directory: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Saves a checkpoint that holds one value and no model.
fn save(ddp: &Ddp, directory: &Path, keep: usize, step: u64) -> burn_ddp::Result<()> {
    ddp.checkpoints(directory)?.keep_last(keep).save(step, |c| c.value("step", &step))
}

fn latest(ddp: &Ddp, directory: &Path) -> Option<u64> {
    ddp.checkpoints(directory).unwrap().latest().unwrap().map(|found| found.step())
}

/// Makes a fifo at `path`: a process that opens it for reading blocks until another one opens it for writing, and the
/// other way round.
fn fifo(path: &Path) {
    assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
}
