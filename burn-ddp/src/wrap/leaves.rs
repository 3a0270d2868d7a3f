//! Logical ranks of a wrapped model.

use std::sync::atomic::{AtomicBool, Ordering};

use burn::tensor::Device;

use super::WrapConfig;
use crate::agreement::Settings;
use crate::gradients::OwnRun;
use crate::intercept::THREADS;
use crate::job_leaves::inexact;
use crate::model::running_stats::BufferPolicy;
use crate::precision::Precision;
use crate::{Ddp, Error, Result, device};

/// This rank's leaves in each step of the model, if the job has logical ranks.
///
/// # Errors
///
/// [`Error::Invalid`] if `config` has another number of micro-batches, or wants exact bits without logical ranks.
pub(super) fn of_model(ddp: &Ddp, config: &WrapConfig) -> Result<Option<OwnRun>> {
    let leaves = &ddp.state().leaves;
    let count = leaves.division().map(|division| division.count());
    if let Some(of_file) = config.logical_ranks.filter(|of_file| Some(*of_file) != count) {
        return Err(Error::invalid(format!(
            "the config asks for {of_file} logical ranks (train_batch ÷ micro_batch), and the job has {}: join with \
            `Ddp::init_with(config.options()?)`",
            count.map_or("none".to_owned(), |count| count.to_string())
        )));
    }
    let Some(division) = leaves.division() else {
        return match config.exact {
            true => Err(Error::invalid(
                "`exact` is a promise of logical ranks: call `ddp.set_logical_ranks(count)?` before, or start with \
                `burnrun --logical-ranks COUNT`",
            )),
            false => {
                leaves.used_by("`wrap`");
                Ok(None)
            }
        };
    };
    leaves.used_by("`wrap`");
    if config.reduce_dtype != Precision::F32 {
        return Err(Error::invalid(format!(
            "a reduce dtype of {} rounds the sums of logical ranks, whose bits then depend on the number of processes: \
            leave one of the two out",
            config.reduce_dtype
        )));
    }
    let run = OwnRun { division, rank: ddp.rank() };
    let (count, processes, each) = (division.count(), ddp.world_size(), division.of_rank(0).len());
    match config.accumulation() {
        Some(k) if k != each => Err(Error::invalid(format!(
            "`with_accumulation({k})`, but {count} logical ranks on {processes} processes make {each} micro-batches in \
            a step: leave `with_accumulation` out"
        ))),
        _ => {
            advise(ddp, run);
            Ok(Some(run).filter(|_| count > 1))
        }
    }
}

/// Says on rank 0, once in a process, that the leaves of processes are no whole subtrees.
fn advise(ddp: &Ddp, run: OwnRun) {
    static SAID: AtomicBool = AtomicBool::new(false);
    let (rows, count, processes) = (run.division.rows(), run.division.count(), ddp.world_size());
    if ddp.is_main() && rows > 1 && !SAID.swap(true, Ordering::Relaxed) {
        tracing::info!(
            target: "burn_ddp::logical_ranks",
            "{count} logical ranks on {processes} processes send {} times the bytes of a plain reduction, since a \
            process has up to {rows} sums to pass; with 1, 2, 4, … leaves for each process it has one",
            (rows + 1) as f64 / 2.0
        );
    }
}

/// Refuses what keeps logical ranks from training the same bits on any number of processes, as far as `wrap` can see
/// it; what later calls add is refused by them. `buffers` is the policy for running statistics,
/// if the model has some.
pub(super) fn refuse_inexact(ddp: &Ddp, device: &Device, on_device: bool, buffers: Option<BufferPolicy>) -> Result<()> {
    let refuse = |what: &str, help: &str| Err(inexact(what, help));
    if on_device {
        return refuse("NCCL, which adds in an order of its own", "BURN_DDP_ENGINE=shm or tcp reduces on the host");
    }
    if device::is_asynchronous(device) {
        return refuse("a GPU, where a process that is alone adds in another way", "exact bits need a CPU");
    }
    if let Some(policy) = buffers.filter(|policy| *policy != BufferPolicy::Average) {
        return refuse(
            &format!("running statistics by {policy:?}"),
            "`BufferPolicy::Average` averages those of leaves",
        );
    }
    if device::kind(device) == "flex" && flex_threads() > 1 {
        return refuse("Flex with several threads, which add up large tensors as they finish", "RAYON_NUM_THREADS=1");
    }
    if ddp.draws_alike() {
        return refuse(THREADS.0, THREADS.1);
    }
    ddp.state().leaves.make_exact();
    Ok(())
}

/// Threads of Flex, which are rayon's.
fn flex_threads() -> usize {
    let set = std::env::var("RAYON_NUM_THREADS").ok().and_then(|text| text.trim().parse().ok());
    set.filter(|threads| *threads > 0).unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from))
}

/// The settings that ranks compare, with the number of logical ranks.
pub(super) fn with_number(ddp: &Ddp, mut settings: Settings) -> Settings {
    settings.push(("the number of logical ranks".to_owned(), ddp.logical_ranks().to_string()));
    settings
}
