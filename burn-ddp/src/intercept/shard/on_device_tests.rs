//! Sharded parameters that are gathered, and whose gradients are reduced, on their device: the same values as in host
//! memory, and the same failures.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use burn::module::{Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::AdamConfig;
use burn::tensor::{DType, Device, Tensor};
use burn_ddp_nccl::fake::Machine;

use crate::intercept::fake_device::{self, FAULTS, Fault};
use crate::{Ddp, LossScaling, Precision, Sharding, WrapConfig, param_hash};

const STEPS: usize = 3;

/// Weights whose rows divide evenly or not, and one of them read twice.
#[derive(Module, Debug)]
struct Net {
    first: Linear,
    tied: Linear,
    last: Linear,
}

impl Net {
    fn new(device: &Device) -> Net {
        let layer = |inputs: usize, outputs: usize| {
            let values: Vec<f32> = (0..inputs * outputs).map(|i| ((i * 37) % 101) as f32 / 101.0 - 0.4).collect();
            let mut layer = LinearConfig::new(inputs, outputs).with_bias(false).init(device);
            layer.weight = Param::from_tensor(Tensor::<1>::from_floats(&values[..], device).reshape([inputs, outputs]));
            layer.bias = Some(Param::from_tensor(Tensor::zeros([outputs], device)));
            layer
        };
        Net { first: layer(5, 6), tied: layer(6, 6), last: layer(6, 3) }
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let hidden = self.tied.forward(self.first.forward(x).tanh()).tanh();
        self.last.forward(self.tied.forward(hidden).tanh())
    }
}

fn inputs(rank: usize, step: usize, device: &Device) -> Tensor<2> {
    let values: Vec<f32> = (0..10).map(|i| ((i * 7 + rank * 3 + step * 5) % 11) as f32 / 11.0).collect();
    Tensor::<1>::from_floats(&values[..], device).reshape([2, 5])
}

fn config(micro_batches: usize) -> WrapConfig {
    WrapConfig::new().with_sharding(Sharding::Parameters).with_sharding_above(1).with_accumulation(micro_batches)
}

/// Weights after some steps, and outputs of an evaluation. A rank's batches have as many items as `items` says.
fn train(ddp: &Ddp, items: [f64; 3], micro_batches: usize) -> anyhow::Result<(Vec<f32>, String)> {
    let device = Device::flex().autodiff();
    let mut model = ddp.wrap_with(Net::new(&device), &config(micro_batches))?;
    let mut optim = ddp.optimizer(AdamConfig::new().init(), &model)?;
    for step in 0..STEPS {
        for micro in 0..micro_batches {
            let loss = model.forward(inputs(ddp.rank(), step * micro_batches + micro, &device)).powi_scalar(2).sum();
            if let Some(grads) = ddp.weighted(items[ddp.rank()]).backward(&loss, &model)? {
                model = optim.step(0.01, model, grads);
            }
        }
    }
    let outputs = model.valid().forward(inputs(0, 0, &device.inner())).into_data().iter::<f32>().collect();
    Ok((outputs, param_hash(&model)?))
}

#[test]
fn the_device_gives_the_bits_of_host_memory() {
    for (world, items, micro_batches) in
        [(2, [1.0, 1.0, 1.0], 1), (3, [1.0, 1.0, 1.0], 2), (2, [3.0, 1.0, 1.0], 1), (3, [2.0, 0.0, 5.0], 2)]
    {
        let host = Ddp::spawn(world, |ddp| train(&ddp, items, micro_batches)).unwrap();
        let device = Ddp::spawn(world, |ddp| {
            let count = fake_device::install(&ddp);
            let result = train(&ddp, items, micro_batches)?;
            // Per step a scatter of three weights and a reduction of the biases; per micro-batch a gather of three
            // weights, and again of the last.
            let least = STEPS * (4 + 4 * micro_batches);
            let counted = count.load(Ordering::Relaxed);
            assert!(counted >= least, "{counted} collectives on the device, and not {least}");
            Ok(result)
        });
        assert_eq!(device.unwrap(), host, "{world} ranks, {items:?}, {micro_batches} micro-batches");
    }
}

/// Hash after five steps in f16, of which the second overflows in a sharded weight of rank 1, and the steps made.
fn train_in_halves(ddp: &Ddp, sharding: Sharding, reduce: Precision) -> anyhow::Result<(String, Vec<usize>)> {
    let device = Device::flex().autodiff();
    let config = config(1).with_sharding(sharding).with_compute_dtype(Precision::F16).with_reduce_dtype(reduce);
    let scaling = LossScaling { initial_scale_power: 4, ..LossScaling::default() };
    let mut model = ddp.wrap_with(Net::new(&device), &config.with_loss_scaling(scaling))?;
    let mut optim = ddp.optimizer(AdamConfig::new().init(), &model)?;
    let mut steps = Vec::new();
    for step in 0..5 {
        let wide = |x: Tensor<2>| x.cast(DType::F32);
        let x = inputs(ddp.rank(), step, &device).cast(DType::F16);
        let poison = if step == 1 && ddp.rank() == 1 { f32::INFINITY } else { 0.0 };
        let poisoned = wide(model.first.weight.val()).slice([4..5, 0..6]).sum() * poison;
        let loss = wide(model.forward(x)).powi_scalar(2).sum();
        if let Some(grads) = ddp.backward(&(loss + poisoned), &model)? {
            model = optim.step(0.01, model, grads);
            steps.push(step);
        }
    }
    Ok((param_hash(&model)?, steps))
}

/// Gathers in f16, gradients that travel in another type, and verdicts that a device tells only when it is read.
#[test]
fn halves_on_devices_have_the_bits_of_host_memory_and_skip_the_same_steps() {
    for sharding in [Sharding::Off, Sharding::Parameters] {
        for reduce in [Precision::F32, Precision::Bf16] {
            let host = Ddp::spawn(2, |ddp| train_in_halves(&ddp, sharding, reduce)).unwrap();
            assert_eq!(host[0], host[1]);
            assert_eq!(host[0].1, [0, 2, 3, 4]);
            let late = Ddp::spawn(2, |ddp| {
                fake_device::install(&ddp);
                train_in_halves(&ddp, sharding, reduce)
            });
            assert_eq!(late.unwrap(), host, "{sharding:?} {reduce}");
            let machine = Machine::new(2);
            machine.set_jitter(Duration::from_millis(1), 7);
            let gpus = Ddp::spawn(2, |ddp| {
                fake_device::install_gpu(&ddp, &machine);
                train_in_halves(&ddp, sharding, reduce)
            });
            let gpus = gpus.unwrap();
            assert_eq!(machine.misuse(), [] as [String; 0]);
            assert_eq!(gpus[0], gpus[1]);
            assert_eq!(gpus[0].1, host[0].1, "{sharding:?} {reduce}");
        }
    }
}

/// Through NCCL's engine on GPUs that are late: what does not wait for them has other values. It multiplies by shares
/// where weights differ.
#[test]
fn nccls_engine_gathers_and_scatters() {
    for (world, items, micro_batches) in
        [(1, [1.0, 1.0, 1.0], 1), (2, [1.0, 1.0, 1.0], 1), (3, [1.0, 1.0, 1.0], 2), (3, [2.0, 0.0, 5.0], 1)]
    {
        let host = Ddp::spawn(world, |ddp| train(&ddp, items, micro_batches)).unwrap();
        let machine = Machine::new(world);
        machine.set_jitter(Duration::from_millis(1), 7);
        let gpus = Ddp::spawn(world, |ddp| {
            fake_device::install_gpu(&ddp, &machine);
            train(&ddp, items, micro_batches)
        });
        let gpus = gpus.unwrap();
        assert_eq!(machine.misuse(), [] as [String; 0]);
        // The three biases, the scatters of three weights, and at least four gathers per micro-batch.
        let least = if world == 1 { 0 } else { STEPS * (3 + 3 + 4 * micro_batches) };
        assert!((0..world).all(|ordinal| machine.launched(ordinal) >= least), "{}, not {least}", machine.launched(0));
        if items[..world].iter().all(|count| *count == items[0]) {
            assert_eq!(gpus, host);
        }
        assert!(gpus.iter().all(|rank| *rank == gpus[0]));
        let close = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-5;
        assert!(gpus[0].0.iter().zip(&host[0].0).all(close), "{:?} {:?}", gpus[0].0, host[0].0);
    }
}

#[test]
fn a_failure_of_one_device_is_an_error_that_names_the_parameter() {
    for in_backward in [false, true] {
        for (fault, says) in FAULTS {
            let error = Ddp::spawn(2, |ddp| {
                fake_device::install(&ddp);
                let device = Device::flex().autodiff();
                let model = ddp.wrap_with(Net::new(&device), &config(1))?;
                let _optim = ddp.optimizer(AdamConfig::new().init(), &model)?;
                let set = |now| (now && ddp.rank() == 1).then(|| fake_device::FAULT.set(Some(fault)));
                set(!in_backward);
                let loss = model.forward(inputs(ddp.rank(), 0, &device)).sum();
                set(in_backward);
                ddp.backward(&loss, &model)?;
                Ok(())
            });
            let text = error.unwrap_err().to_string();
            assert!(text.contains(says) && text.contains("rank 1"), "{fault:?}: {text}");
            // The engine knows no parameters.
            assert!(fault == Fault::Reduce || text.contains(".weight"), "{fault:?}: {text}");
        }
    }
}

/// Communicators hold memory of the device, and what is left of a graph may live long.
#[test]
fn communicators_end_with_the_model_and_with_the_rank() {
    let machine = Machine::new(2);
    let soon = |most: usize| {
        let start = Instant::now();
        while machine.communicators() > most {
            assert!(start.elapsed() < Duration::from_secs(20), "{} communicators are left", machine.communicators());
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    let ranks = Ddp::spawn(2, |ddp| {
        fake_device::install_gpu(&ddp, &machine);
        let device = Device::flex().autodiff();
        for step in 0..3 {
            let model = ddp.wrap_with(Net::new(&device), &config(1))?;
            let _optim = ddp.optimizer(AdamConfig::new().init(), &model)?;
            let loss = model.forward(inputs(ddp.rank(), step, &device)).sum();
            ddp.backward(&loss, &model)?;
            std::mem::forget(model.forward(inputs(ddp.rank(), step, &device)));
            ddp.barrier()?;
            assert!(machine.communicators() >= 4, "of gradients and parts on two ranks");
            ddp.barrier()?;
            if step < 2 {
                drop(model);
                soon(0);
            } else {
                std::mem::forget(model);
            }
            ddp.barrier()?;
        }
        Ok(ddp.finish()?)
    });
    ranks.unwrap();
    soon(0);
    assert_eq!(machine.misuse(), [] as [String; 0]);
}

/// At no time of a step, an evaluation or a copy is the last holder of the model gone.
#[test]
fn a_model_of_one_parameter_keeps_its_group() {
    let ranks = Ddp::spawn(2, |ddp| {
        fake_device::install(&ddp);
        let device = Device::flex().autodiff();
        let mut model = LinearConfig::new(5, 4).with_bias(false).init(&device);
        model = ddp.wrap_with(model, &config(1))?;
        let mut optim = ddp.optimizer(AdamConfig::new().init(), &model)?;
        for step in 0..3 {
            let loss = model.forward(inputs(ddp.rank(), step, &device)).powi_scalar(2).sum();
            let grads = ddp.backward(&loss, &model)?.expect("a step");
            model = optim.step(0.01, model, grads);
        }
        let hash = param_hash(&model)?;
        let inner = model.valid();
        drop(model);
        let outputs: Vec<f32> = inner.forward(inputs(0, 0, &device.inner())).into_data().iter::<f32>().collect();
        drop(inner);
        anyhow::Ok((outputs, hash))
    });
    let ranks = ranks.unwrap();
    assert_eq!(ranks[0], ranks[1]);
}
