//! Gradients that stay on their device give the same averages as in host memory, bit by bit, and the same failures.

use std::fmt::Debug;
use std::sync::atomic::Ordering;

use burn::module::{Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamConfig, GradientsParams, SgdConfig};
use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_ddp_nccl::fake::Machine;

use super::fake_device::{self, FAULTS, Fault};
use crate::{Ddp, Error, GradientReduction, WrapConfig, param_hash};

/// Parameters of several types, each of which a step may use or not.
#[derive(Module, Debug)]
struct Model {
    a: Param<Tensor<2>>,
    b: Param<Tensor<1>>,
    c: Param<Tensor<1>>,
    d: Param<Tensor<1>>,
}

fn values(n: usize, seed: usize) -> TensorData {
    let value = |i: usize| ((i * 37 + seed * 11) % 101) as f64 / 50.0 - 1.0;
    TensorData::new((0..n).map(value).collect::<Vec<_>>(), [n])
}

impl Model {
    fn new(device: &Device, [b, c, d]: [DType; 3]) -> Self {
        let one = |n, seed, dtype| Tensor::<1>::from_data(values(n, seed).convert_dtype(dtype), (device, dtype));
        Model {
            a: Param::from_tensor(one(12, 1, DType::F32).reshape([3, 4])),
            b: Param::from_tensor(one(5, 2, b)),
            c: Param::from_tensor(one(7, 3, c)),
            d: Param::from_tensor(one(2, 4, d)),
        }
    }

    /// `x` times a nonlinear function of the parameters that are `used`.
    fn loss(&self, used: [bool; 4], x: f32) -> Tensor<1> {
        let [a, b, c, d] = used;
        let mut loss = Tensor::zeros([1], &self.a.base().device());
        if a {
            loss = loss + self.a.val().powi_scalar(2).mul_scalar(x).mean();
        }
        for (param, used) in [(&self.b, b), (&self.c, c), (&self.d, d)] {
            if used {
                loss = loss + param.val().powi_scalar(3).mul_scalar(x).sum().cast(DType::F32);
            }
        }
        loss
    }

    fn gradients(&self, grads: &GradientsParams) -> Vec<Option<Vec<f64>>> {
        let one = |p: &Param<Tensor<1>>| grads.get::<1>(p.id).map(|g| g.into_data().iter::<f64>().collect());
        let a = grads.get::<2>(self.a.id).map(|g| g.into_data().iter::<f64>().collect());
        vec![a, one(&self.b), one(&self.c), one(&self.d)]
    }
}

const F32: [DType; 3] = [DType::F32; 3];
const MIXED: [DType; 3] = [DType::F64, DType::F16, DType::BF16];
const ALL: [bool; 4] = [true; 4];

fn small() -> WrapConfig {
    WrapConfig::new().with_bucket_cap_bytes(40).with_first_bucket_cap_bytes(20)
}

/// Results of `f` on all ranks, in host memory and on the fake device.
fn both<T: Send + PartialEq + Debug>(world: usize, f: impl Fn(&Ddp) -> anyhow::Result<T> + Sync) -> T {
    let run = |on_device: bool| {
        Ddp::spawn(world, |ddp| {
            let count = on_device.then(|| fake_device::install(&ddp));
            let result = f(&ddp)?;
            assert!(count.is_none_or(|count| count.load(Ordering::Relaxed) > 0), "nothing was reduced on the device");
            Ok(result)
        })
        .unwrap()
    };
    let (host, mut device) = (run(false), run(true));
    assert_eq!(host, device);
    assert!(device.iter().all(|other| *other == device[0]));
    device.remove(0)
}

#[test]
fn fixture_f_mean_is_14_and_sum_is_28() {
    for (reduction, gradient) in [(GradientReduction::Mean, 14.0), (GradientReduction::Sum, 28.0)] {
        let grads = both(2, |ddp| {
            let device = Device::flex().autodiff();
            let mut model = LinearConfig::new(1, 1).with_bias(false).init(&device);
            model.weight = model.weight.map(|w| w.ones_like().detach().require_grad());
            let model = ddp.wrap_with(model, &WrapConfig::new().with_reduction(reduction))?;
            let r = ddp.rank() as f32;
            let x = Tensor::<2>::from_floats([[2.0 * r], [2.0 * r + 1.0]], &device);
            let mut grads = ddp.backward(&model.forward(x).powf_scalar(2.0).sum(), &model)?.expect("a step");
            Ok(grads.remove::<2>(model.weight.id).unwrap().into_scalar::<f32>())
        });
        assert_eq!(grads, gradient);
    }
}

#[test]
fn many_buckets_of_many_types_for_many_steps() {
    for dtypes in [F32, MIXED] {
        for world in [1, 2, 3] {
            both(world, |ddp| {
                let device = Device::flex().autodiff();
                let config = small().with_single_rank_reduction(true).with_replica_check(2);
                let mut model = ddp.wrap_with(Model::new(&device, dtypes), &config)?;
                let mut optim = SgdConfig::new().init();
                for step in 0..5 {
                    let loss = model.loss(ALL, (1 + step + ddp.rank()) as f32);
                    let grads = ddp.backward(&loss, &model)?.expect("a step");
                    model = optim.step(0.01, model, grads);
                }
                Ok(param_hash(&model)?)
            });
        }
    }
}

#[test]
fn what_ranks_use_changes() {
    let steps = both(2, |ddp| {
        let device = Device::flex().autodiff();
        let mut model = ddp.wrap_with(Model::new(&device, F32), &small())?;
        let mut optim = AdamConfig::new().init();
        let mut steps = Vec::new();
        for step in 0..6 {
            // No rank uses `d`, the ranks take turns with `c`, and all use `b` now and then.
            let used = [true, step % 3 == 0, step % 2 == ddp.rank(), false];
            let grads = ddp.backward(&model.loss(used, 1.0 + step as f32), &model)?.expect("a step");
            steps.push(model.gradients(&grads));
            model = optim.step(0.01, model, grads);
        }
        Ok((steps, param_hash(&model)?))
    });
    let present: Vec<_> = steps.0.iter().map(|s| s.iter().map(Option::is_some).collect::<Vec<_>>()).collect();
    assert!(present.iter().enumerate().all(|(step, p)| *p == [true, step % 3 == 0, true, false]), "{present:?}");
}

#[test]
fn micro_batches_are_weighed_and_summed_wide() {
    for reduction in [GradientReduction::Mean, GradientReduction::Sum] {
        let steps = both(2, |ddp| {
            let device = Device::flex().autodiff();
            let config = small().with_accumulation(3).with_reduction(reduction);
            let model = ddp.wrap_with(Model::new(&device, MIXED), &config)?;
            let mut steps = Vec::new();
            for step in 0..3 {
                // One micro-batch of rank 1 has weight 0, and NaN gradients that must not reach the sum.
                let weights = [[3.0, 1.0, 2.0], [0.5, 0.0, 7.0]][ddp.rank()];
                for (micro, weight) in weights.into_iter().enumerate() {
                    let x = if weight == 0.0 { f32::NAN } else { (micro + step + ddp.rank()) as f32 };
                    let used = [true, true, micro == 1, ddp.rank() == 1];
                    let grads = ddp.weighted(weight).backward(&model.loss(used, x), &model)?;
                    assert_eq!(grads.as_ref().map(GradientsParams::len), (micro == 2).then_some(4));
                    steps.extend(grads.map(|grads| model.gradients(&grads)));
                }
            }
            Ok(steps)
        });
        assert!(steps.iter().flatten().flatten().flatten().all(|g| g.is_finite()));
    }
}

#[test]
fn a_rank_of_no_weight_is_absent() {
    let gradient = both(2, |ddp| {
        let device = Device::flex().autodiff();
        let model = ddp.wrap(Model::new(&device, F32))?;
        let (items, x) = if ddp.rank() == 0 { (2.0, 1.0) } else { (0.0, f32::NAN) };
        let grads = ddp.weighted(items).backward(&model.loss(ALL, x), &model)?.expect("a step");
        Ok(model.gradients(&grads))
    });
    let b: Vec<f64> = values(5, 2).iter::<f64>().map(|v| f64::from(3.0 * (v as f32) * (v as f32))).collect();
    let got = gradient[1].as_ref().unwrap();
    assert!(got.iter().zip(&b).all(|(got, b)| (got - b).abs() < 1e-5), "{got:?} {b:?}");
}

#[test]
fn what_is_accumulated_is_in_the_next_step() {
    both(2, |ddp| {
        let device = Device::flex().autodiff();
        let model = ddp.wrap_with(Model::new(&device, F32), &small())?;
        let grads = |x: f32| anyhow::Ok(model.gradients(&ddp.backward(&model.loss(ALL, x), &model)?.expect("a step")));
        let clean = grads(1.0)?;
        ddp.accumulate(&model.loss(ALL, 5.0), &model)?;
        let held = grads(1.0)?;
        assert_ne!(held, clean);
        assert_eq!(grads(1.0)?, clean);
        ddp.accumulate(&model.loss(ALL, 1.0), &model)?;
        assert_eq!(ddp.flush(&model)?.map(|grads| model.gradients(&grads)), Some(clean));
        assert!(ddp.flush(&model)?.is_none());
        Ok(held)
    });
}

#[test]
fn what_was_frozen_wakes() {
    let steps = both(2, |ddp| {
        let device = Device::flex().autodiff();
        let mut model = Model::new(&device, F32);
        model.d = model.d.no_grad();
        let mut model = ddp.wrap_with(model, &small())?;
        let mut steps = Vec::new();
        for step in 0..4 {
            if step == 2 {
                model = model.unfreeze();
            }
            // Only rank 1 uses `d`, from step 1 on.
            let used = [true, true, true, step >= 1 && ddp.rank() == 1];
            let grads = ddp.backward(&model.loss(used, 1.0 + step as f32), &model)?.expect("a step");
            steps.push(model.gradients(&grads));
        }
        Ok(steps)
    });
    assert_eq!(steps.iter().map(|s| s[3].is_some()).collect::<Vec<_>>(), [false, false, true, true]);
}

#[test]
fn two_models_in_one_backward_and_one_that_is_gone() {
    both(2, |ddp| {
        let device = Device::flex().autodiff();
        let first = ddp.wrap_with(Model::new(&device, F32), &small())?;
        let second = ddp.wrap_with(Model::new(&device, MIXED), &small())?;
        let mut all = Vec::new();
        for step in 0..3 {
            let x = (1 + ddp.rank() + step) as f32;
            let loss = match ddp.rank() {
                0 => first.loss(ALL, x) + second.loss(ALL, x),
                _ => second.loss(ALL, x) + first.loss(ALL, x),
            };
            // The order of the models in the call may differ, too.
            let (of_first, of_second) = match ddp.rank() {
                0 => ddp.backward(&loss, (&first, &second))?.expect("a step"),
                _ => ddp.backward(&loss, (&second, &first))?.map(|(second, first)| (first, second)).expect("a step"),
            };
            all.push(first.gradients(&of_first));
            all.push(second.gradients(&of_second));
        }
        drop(first);
        let grads = ddp.backward(&second.loss(ALL, 1.0), &second)?.expect("a step");
        all.push(second.gradients(&grads));
        Ok(all)
    });
}

#[test]
fn ranks_that_are_through_stand_in_with_zeros() {
    both(2, |ddp| {
        let device = Device::flex().autodiff();
        let mut model = ddp.wrap_with(Model::new(&device, MIXED), &small())?;
        let mut optim = SgdConfig::new().init();
        for step in 0..1 + 2 * ddp.rank() {
            let grads = ddp.backward(&model.loss(ALL, 1.0 + step as f32), &model)?.expect("a step");
            model = optim.step(0.01, model, grads);
        }
        ddp.join(&mut model, &mut optim)?;
        Ok(param_hash(&model)?)
    });
}

#[test]
fn whatever_fails_on_one_rank_is_every_ranks_error_and_stays() {
    for (fault, says) in FAULTS {
        let errors = Ddp::spawn(2, |ddp| {
            fake_device::install(&ddp);
            let device = Device::flex().autodiff();
            let model = ddp.wrap_with(Model::new(&device, F32), &small())?;
            ddp.backward(&model.loss(ALL, 1.0), &model)?;
            if ddp.rank() == 1 {
                fake_device::FAULT.set(Some(fault));
            }
            let first = ddp.backward(&model.loss(ALL, 1.0), &model).map(drop);
            let again: Error = ddp.backward(&model.loss(ALL, 1.0), &model).map(drop).unwrap_err();
            // A fault after all reductions comes too late to fail the other rank's step.
            let late = fault == Fault::TakeBack && ddp.rank() == 0;
            let first = if late { first.err().unwrap_or_else(|| again.clone()) } else { first.unwrap_err() };
            Ok((first.to_string(), again.to_string()))
        })
        .unwrap();
        for (rank, (first, again)) in errors.iter().enumerate() {
            assert!(first.contains(says), "{fault:?} on rank {rank}: {first}");
            assert!(first.contains("rank 1"), "{fault:?} on rank {rank}: {first}");
            assert!(again.contains(says) || again.contains("half-way"), "{fault:?} on rank {rank}: {again}");
        }
    }
}

/// Through NCCL's engine, whose order of additions is here that of the others; but it multiplies by shares where
/// weights differ.
#[test]
fn nccls_engine_reduces_what_was_lent() {
    let train = |ddp: &Ddp, weights: [f64; 2]| -> anyhow::Result<_> {
        let device = Device::flex().autodiff();
        let config = small().with_accumulation(2).with_replica_check(2).with_single_rank_reduction(true);
        let mut model = ddp.wrap_with(Model::new(&device, MIXED), &config)?;
        let mut optim = SgdConfig::new().init();
        let mut steps = Vec::new();
        for step in 0..4 {
            for micro in 0..2 {
                let used = [true, step != 1, step % 2 == ddp.rank(), false];
                let loss = model.loss(used, (1 + step + 2 * micro + ddp.rank()) as f32);
                if let Some(grads) = ddp.weighted(weights[ddp.rank() % 2]).backward(&loss, &model)? {
                    assert_eq!(micro, 1);
                    steps.push(model.gradients(&grads));
                    model = optim.step(0.01, model, grads);
                }
            }
        }
        Ok(steps)
    };
    for world in [1, 2, 3] {
        for weights in [[1.0, 1.0], [3.0, 0.5], [2.0, 0.0]] {
            let host = Ddp::spawn(world, |ddp| train(&ddp, weights)).unwrap();
            let machine = Machine::new(world);
            machine.set_jitter(std::time::Duration::from_millis(1), 7);
            let gpus = Ddp::spawn(world, |ddp| {
                fake_device::install_gpu(&ddp, &machine);
                train(&ddp, weights)
            });
            let gpus = gpus.unwrap();
            assert_eq!(machine.misuse(), [] as [String; 0]);
            assert!((0..world).all(|ordinal| machine.launched(ordinal) > 0), "nothing was launched");
            assert!(gpus.iter().all(|other| *other == gpus[0]));
            if weights[0] == weights[1] {
                assert_eq!(gpus, host);
            }
            let flat = |steps: &[Vec<Option<Vec<f64>>>]| -> Vec<f64> {
                steps.iter().flatten().flat_map(|g| g.clone().unwrap_or(vec![f64::MAX])).collect()
            };
            let (gpus, host) = (flat(&gpus[0]), flat(&host[0]));
            assert_eq!(gpus.len(), host.len());
            let close = |(a, b): (&f64, &f64)| (a - b).abs() <= 1e-2 * b.abs().max(1e-3);
            assert!(gpus.iter().zip(&host).all(close), "{gpus:?} {host:?}");
        }
    }
}

#[test]
fn gradients_that_are_lost_with_the_model_are_a_warning() {
    let warnings = |end: fn(&Ddp, &Linear)| {
        let of_ranks = Ddp::spawn(2, |ddp| {
            let listener = crate::telemetry::test_event_capture::Listener::default();
            tracing::subscriber::with_default(listener.clone(), || {
                let device = ddp.device()?.autodiff();
                let config = crate::WrapConfig::new().with_accumulation(2);
                let model: Linear = ddp.wrap_with(LinearConfig::new(1, 1).init(&device), &config)?;
                for _ in 0..3 {
                    ddp.backward(&model.forward(Tensor::<2>::ones([1, 1], &device)).sum(), &model)?;
                }
                end(&ddp, &model);
                anyhow::Ok(())
            })?;
            Ok(listener.events("burn_ddp::accumulation").len())
        });
        of_ranks.unwrap()
    };
    assert_eq!(warnings(|_, _| ()), [1, 0]);
    assert_eq!(warnings(|ddp, model| drop(ddp.flush(model).unwrap())), [0, 0]);
}

/// Two parameters of one element.
#[derive(Module, Debug)]
pub(super) struct Pair {
    pub(super) a: Param<Tensor<1>>,
    pub(super) b: Param<Tensor<1>>,
}

impl Pair {
    /// Both are 1, on Flex with autodiff.
    pub(super) fn ones() -> Self {
        let device = Device::flex().autodiff();
        let one = || Param::from_tensor(Tensor::<1>::ones([1], &device));
        Pair { a: one(), b: one() }
    }
}
