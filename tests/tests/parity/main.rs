//! Ranks follow torch's `DistributedDataParallel` and FSDP2, by the numbers in `tests/parity/` (its README says how
//! they were made).

mod mlp;
mod models;
mod sync_bn;

use anyhow::{Result, ensure};
use burn_ddp_tests::tolerance_of_device;

/// ‖ours − theirs‖ / ‖theirs‖
fn difference(ours: &[f64], theirs: &[f64]) -> f64 {
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|value| value * value).sum::<f64>().sqrt();
    norm(&mut ours.iter().zip(theirs).map(|(a, b)| a - b)) / norm(&mut theirs.iter().copied())
}

/// Fails unless the [`difference`] is at most `tolerance`, or what a GPU allows instead.
fn close(ours: &[f64], theirs: &[f64], tolerance: f64) -> Result<()> {
    ensure!(ours.len() == theirs.len(), "{} values instead of {}", ours.len(), theirs.len());
    let (error, tolerance) = (difference(ours, theirs), tolerance_of_device(tolerance));
    // False also if the error is NaN.
    ensure!(error <= tolerance, "relative difference {error:e}, allowed are {tolerance:e}");
    Ok(())
}
