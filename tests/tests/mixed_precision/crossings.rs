//! Mixed precision beside other features: ranks train the bits of one, which has all rows.

use burn::module::{Lora, Module};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamConfig, GradientsAccumulator, SgdConfig};
use burn::prelude::*;
use burn::tensor::DType;
use burn_ddp::prelude::*;
use burn_ddp::{Precision, clip_grad_norm, param_hash};
use burn_ddp_tests::{Fill, Mlp};

use super::{HALVES, all_equal, in_half, loss, small_scale};

fn init(device: &Device) -> Mlp {
    Mlp::new(device).map(&mut Fill(0.0))
}

fn config(precision: Precision) -> WrapConfig {
    in_half(precision).with_loss_scaling(small_scale())
}

/// Overlap, sums, and gradient checkpointing change no bit.
#[test]
fn overlap_and_gradient_checkpointing_change_no_bit() {
    for precision in HALVES {
        let of = |checkpointing: bool, overlap: bool, sharding| {
            let hashes = Ddp::spawn(2, |ddp| {
                let device = ddp.device()?.autodiff();
                let device = if checkpointing { device.gradient_checkpointing() } else { device };
                let config = config(precision).with_overlap(overlap).with_sharding(sharding).with_sharding_above(1);
                let mut model = ddp.wrap_with(init(&device), &config)?;
                let mut optim = ddp.optimizer(AdamConfig::new().init(), &model)?;
                for step in 0..4 {
                    let loss = loss(&model, precision, 4 * step + 2 * ddp.rank(), 2, &device);
                    let grads = ddp.backward(&loss, &model)?.expect("a step");
                    model = optim.step(1e-2, model, grads);
                }
                Ok(param_hash(&model)?)
            })
            .unwrap();
            all_equal(&hashes);
            hashes[0].clone()
        };
        let plain = of(false, false, Sharding::Off);
        for (checkpointing, overlap, sharding) in
            [(true, false, Sharding::Off), (false, true, Sharding::Off), (true, true, Sharding::Parameters)]
        {
            assert_eq!(
                of(checkpointing, overlap, sharding),
                plain,
                "{precision} {checkpointing} {overlap} {sharding:?}"
            );
        }
    }
}

/// Burn's accumulator adds averages, which are f32 and unscaled; norms are those of unscaled averages.
#[test]
fn accumulators_and_clipping_see_f32_without_a_scale() {
    for sharding in [Sharding::Off, Sharding::Parameters] {
        let norms = Ddp::spawn(2, |ddp| {
            let device = ddp.device()?.autodiff();
            let mut norms = Vec::new();
            for (config, precision) in [
                (WrapConfig::new(), Precision::F32),
                (config(Precision::Bf16), Precision::Bf16),
                (config(Precision::F16), Precision::F16),
            ] {
                let config = config.with_sharding(sharding).with_sharding_above(1);
                let model = ddp.wrap_with(init(&device), &config)?;
                ddp.optimizer(SgdConfig::new().init(), &model)?;
                let mut sum = GradientsAccumulator::new();
                for nth in 0..2 {
                    let loss = loss(&model, precision, 4 * nth + 2 * ddp.rank(), 2, &device);
                    sum.accumulate(&model, ddp.backward(&loss, &model)?.expect("a step"));
                }
                let (grads, norm) = clip_grad_norm(sum.grads(), &model, 0.5)?;
                norms.push(norm);
                let (_, clipped) = clip_grad_norm(grads, &model, 0.5)?;
                assert!((clipped - 0.5).abs() < 1e-3, "{clipped}");
            }
            Ok(norms)
        })
        .unwrap();
        all_equal(&norms);
        let [whole, bf16, f16] = norms[0][..] else { panic!("three norms") };
        assert!((bf16 / whole - 1.0).abs() < 0.02 && (f16 / whole - 1.0).abs() < 0.002, "{norms:?}");
    }
}

/// Clones of a `Param` are one: their gradients are added in f32.
#[test]
fn clones_and_several_reads_add_up_in_f32() {
    #[derive(Module, Debug)]
    struct Tied {
        a: Linear,
        b: Linear,
    }
    for precision in HALVES {
        let gradients = Ddp::spawn(2, |ddp| {
            let device = ddp.device()?.autodiff();
            let a = LinearConfig::new(4, 4).with_bias(false).init(&device);
            let model = Tied { b: a.clone(), a };
            let model = ddp.wrap_with(model, &config(precision))?;
            // 1 and 2⁻⁹ by two reads of each clone: in bf16 the sum would be 1.
            let x = |value: f32| Tensor::<2>::full([1, 4], value, &device).cast(precision.dtype());
            let small = 1.0 / 512.0;
            let sum = model.a.forward(x(1.0)) + model.b.forward(x(small)) + model.b.forward(x(small));
            let grads = ddp.backward(&sum.cast(DType::F32).sum(), &model)?.expect("a step");
            Ok(grads.get::<2>(model.a.weight.id).unwrap().into_data().try_to_vec::<f32>().unwrap())
        })
        .unwrap();
        for gradient in gradients {
            assert_eq!(gradient, vec![1.0 + 2.0 / 512.0; 16], "{precision}");
        }
    }
}

/// The generator's step reads a discriminator that computes in a half, and drops its gradients.
#[test]
fn a_gan_trains_each_model_by_its_own_call() {
    let hashes = Ddp::spawn(2, |ddp| {
        let device = ddp.device()?.autodiff();
        let linear = |fill: f32| LinearConfig::new(4, 4).init(&device).map(&mut Fill(fill));
        let config = config(Precision::F16);
        let (mut generator, mut critic): (Linear, Linear) =
            (ddp.wrap_with(linear(0.0), &config)?, ddp.wrap_with(linear(9.0), &config)?);
        let mut of_generator = ddp.optimizer(AdamConfig::new().init(), &generator)?;
        let mut of_critic = ddp.optimizer(AdamConfig::new().init(), &critic)?;
        for step in 0..4 {
            let x = burn_ddp_tests::rows(4 * step + 2 * ddp.rank(), 2, 4, 1, DType::F32, &device).cast(DType::F16);
            let made = generator.forward(x.clone());
            let real = (critic.forward(x.clone()) - critic.forward(made.detach())).cast(DType::F32).mean();
            let grads = ddp.backward(&real, &critic)?.expect("a step");
            critic = of_critic.step(1e-2, critic, grads);
            let fooled = critic.forward(generator.forward(x)).cast(DType::F32).mean();
            let grads = ddp.backward(&fooled, &generator)?.expect("a step");
            generator = of_generator.step(1e-2, generator, grads);
        }
        Ok((param_hash(&generator)?, param_hash(&critic)?))
    })
    .unwrap();
    all_equal(&hashes);
}

/// Evaluation and a target network compute in the half, without a gradient.
#[test]
fn evaluation_computes_in_the_half() {
    let outputs = Ddp::spawn(2, |ddp| {
        let device = ddp.device()?.autodiff();
        let model = ddp.wrap_with(init(&device), &config(Precision::Bf16))?;
        let x = burn_ddp_tests::rows(0, 2, 6, 1, DType::F32, &device).cast(DType::BF16);
        let trained = model.forward(x.clone()).inner().into_data();
        assert_eq!(trained.dtype(), DType::BF16);
        assert_eq!(model.valid().forward(x.clone().inner()).into_data(), trained);
        assert_eq!(model.clone().no_grad().forward(x).inner().into_data(), trained);
        Ok(trained)
    })
    .unwrap();
    all_equal(&outputs);
}

/// The factors are read in the half, and Burn casts the frozen base, which has no tap, to their type.
#[test]
fn lora_computes_in_the_half() {
    for precision in HALVES {
        let outcomes = Ddp::spawn(2, |ddp| {
            let device = ddp.device()?.autodiff();
            let layers = || (0..2).map(|_| LinearConfig::new(6, 6).init(&device)).collect::<Vec<Linear>>();
            let model = layers().map(&mut Fill(0.0)).apply_lora(Lora::new(2, 4.0));
            let mut model = ddp.wrap_with(model, &config(precision))?;
            let mut optim = ddp.optimizer(AdamConfig::new().init(), &model)?;
            for step in 0..3 {
                let x = burn_ddp_tests::rows(4 * step + 2 * ddp.rank(), 2, 6, 1, DType::F32, &device);
                let out = model.iter().fold(x.cast(precision.dtype()), |x, layer| layer.forward(x));
                assert_eq!(out.dtype(), DType::from(precision.dtype()));
                let grads = ddp.backward(&out.cast(DType::F32).powf_scalar(2.0).mean(), &model)?.expect("a step");
                model = optim.step(1e-2, model, grads);
            }
            Ok(param_hash(&model)?)
        })
        .unwrap();
        all_equal(&outcomes);
    }
}
