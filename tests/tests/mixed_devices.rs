//! Ranks on different kinds of devices in one job train like ranks on one kind.
#![allow(deprecated)]

use burn::prelude::*;
use burn::tensor::DType;
use burn_ddp::Ddp;
use burn_ddp_tests::awkward::{Run, sgd};
use burn_ddp_tests::{Mlp, distance};

type Kind = fn() -> Device;

/// Trains with rank `r` on `kinds[r]`; returns for each rank the loss of each step over all ranks, the final parameters
/// and their hash.
fn train(kinds: &[Kind]) -> Vec<(Vec<f64>, Vec<Vec<f64>>, String)> {
    Ddp::spawn(kinds.len(), |ddp| {
        let mut run = Run::new(&ddp)?.with_dtype(DType::F32);
        run.device = kinds[ddp.rank()]().autodiff();
        let mut model = run.wrap(run.fill(Mlp::new(&run.device)))?;
        let mut optim = sgd();
        let mut losses = Vec::new();
        for step in 0..60 {
            let loss = model.forward(run.batch(step)).powf_scalar(2.0).mean();
            losses.push(ddp.mean(loss.clone().into_scalar::<f64>())?);
            model = run.step(&mut optim, model, loss)?;
        }
        let outcome = run.outcome(&model)?;
        Ok((losses, outcome.values, outcome.hash))
    })
    .unwrap()
}

fn follows_equal_devices(kinds: &[Kind]) {
    let equal = train(&vec![Device::flex as Kind; kinds.len()]);
    let mixed = train(kinds);
    assert!(mixed.iter().all(|(_, _, hash)| *hash == mixed[0].2), "the ranks' parameters differ");
    assert!(equal[0].0[59] < equal[0].0[0] / 10.0, "nothing was learnt: {:?}", equal[0].0);
    for (step, (a, b)) in mixed[0].0.iter().zip(&equal[0].0).enumerate() {
        assert!((a - b).abs() <= 1e-4 * b.abs().max(1e-3), "step {step}: {a} and {b}");
    }
    let d = distance(&mixed[0].1, &equal[0].1);
    assert!(d <= 1e-4, "{d:e}");
}

/// The reference of the tests below learns, and its ranks hold equal parameters.
#[test]
fn equal_devices() {
    follows_equal_devices(&[Device::flex, Device::flex]);
}

#[test]
#[cfg_attr(not(feature = "ndarray"), ignore = "built without `--features ndarray`")]
fn two_processors() {
    #[cfg(feature = "ndarray")]
    {
        follows_equal_devices(&[Device::flex, Device::ndarray, Device::flex]);
        follows_equal_devices(&[Device::ndarray, Device::flex]);
    }
}

#[test]
#[cfg_attr(not(feature = "wgpu"), ignore = "built without `--features wgpu`")]
fn processors_and_a_gpu() {
    #[cfg(feature = "wgpu")]
    {
        let gpu = || Device::wgpu(DeviceKind::DefaultDevice);
        #[cfg(feature = "ndarray")]
        follows_equal_devices(&[Device::flex, Device::ndarray, gpu]);
        follows_equal_devices(&[gpu, Device::flex]);
    }
}

#[test]
#[cfg_attr(not(feature = "tch"), ignore = "built without `--features tch`")]
fn processors_and_libtorch() {
    #[cfg(feature = "tch")]
    {
        #[cfg(feature = "ndarray")]
        follows_equal_devices(&[Device::libtorch, Device::flex, Device::ndarray]);
        follows_equal_devices(&[Device::libtorch, Device::flex]);
    }
}
