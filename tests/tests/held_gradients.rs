//! Checkpoints that are saved between the micro-batches of a step: a run that resumes from one ends with the bits of an
//! uninterrupted run.

use std::path::Path;

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::module::Module;
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::optim::{GradientsParams, SgdConfig, momentum::MomentumConfig};
use burn::prelude::*;
use burn::tensor::DType;
use burn_ddp::prelude::*;
use burn_ddp::{GradientReduction, Sharding, param_hash};
use burn_ddp_tests::rows;

/// Items of an epoch, in five micro-batches.
const ITEMS: usize = 27;
const EPOCHS: usize = 2;

struct Together;

impl Batcher<usize, Vec<usize>> for Together {
    fn batch(&self, items: Vec<usize>, _: &Device) -> Vec<usize> {
        items
    }
}

/// A model of which each micro-batch uses only a part.
#[derive(Module, Debug)]
struct Net {
    trunk: Linear,
    norm: Option<BatchNorm>,
    branches: Vec<Linear>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Plain,
    /// With running statistics.
    Norm(BufferPolicy),
    Two,
    /// By `ddp.accumulate`, without a number in the config.
    Accumulate,
    Sharded,
    /// In a dtype other than f32. Without momentum, whose state Burn cannot load in this dtype.
    Other(DType),
}

impl Kind {
    fn config(self) -> WrapConfig {
        let config = WrapConfig::new().with_accumulation(if self == Kind::Accumulate { 1 } else { 3 });
        if let Kind::Norm(policy) = self {
            return config.with_buffers(policy);
        }
        if self == Kind::Sharded { config.with_sharding(Sharding::Parameters).with_sharding_above(1) } else { config }
    }
}

fn net(kind: Kind, device: &Device) -> Net {
    let dtype = if let Kind::Other(dtype) = kind { dtype } else { DType::F32 };
    let linear = |salt| {
        let mut layer: Linear = LinearConfig::new(6, 6).with_bias(false).init(device);
        layer.weight = layer.weight.map(|_| rows(0, 6, 6, salt, dtype, device).require_grad());
        layer
    };
    let norm = matches!(kind, Kind::Norm(_)).then(|| BatchNormConfig::new(6).init(device));
    Net { trunk: linear(1), norm, branches: (2..5).map(linear).collect() }
}

impl Net {
    fn loss(&self, items: &[usize], branch: usize, device: &Device) -> Tensor<1> {
        let x = items.iter().map(|item| rows(10 * item, 1, 6, 9, self.trunk.weight.base().dtype(), device)).collect();
        let mut h = self.trunk.forward(Tensor::cat(x, 0));
        if let Some(norm) = &self.norm {
            h = norm.forward(h);
        }
        self.branches[branch % 3].forward(h.tanh()).powf_scalar(2.0).mean()
    }
}

/// Trains, resuming from the newest checkpoint of `directory` if there is one. Returns the hashes of the models; or
/// saves a checkpoint after backward number `save`, stops and returns `None`.
fn train(
    ddp: &Ddp,
    kind: Kind,
    directory: Option<&Path>,
    save: Option<usize>,
    stop: bool,
) -> anyhow::Result<Option<String>> {
    let device = ddp.device()?.autodiff();
    let loader = ddp.loader(Together).global_batch_size(6).shuffle(1).build(InMemDataset::new((0..ITEMS).collect()))?;
    let momentum = (!matches!(kind, Kind::Other(_))).then(MomentumConfig::new);
    let optimizer = || SgdConfig::new().with_momentum(momentum.clone()).init();
    let mut units: Vec<(Net, DdpOptimizer)> = Vec::new();
    for _ in 0..if kind == Kind::Two { 2 } else { 1 } {
        let net = ddp.wrap_with(net(kind, &device), &kind.config())?;
        let optim = ddp.optimizer(optimizer(), &net)?;
        units.push((net, optim));
    }
    let checkpoints = directory.map(|directory| ddp.checkpoints(directory)).transpose()?;
    let (mut backwards, mut steps) = (0, 0);
    if let Some(saved) = checkpoints.as_ref().map(|c| c.latest()).transpose()?.flatten() {
        (backwards, steps) = (saved.value("backwards")?, saved.step());
        for (nth, (net, optim)) in units.iter_mut().enumerate() {
            let saved = saved.named(&nth.to_string());
            let loaded = saved.model(net.clone())?;
            (*net, *optim) = (loaded, saved.optimizer(optim.clone(), net)?);
        }
        loader.resume(&saved.value("position")?)?;
    }
    for mut epoch in loader.epochs(0..EPOCHS) {
        while let Some(batch) = epoch.next() {
            let batch = batch?;
            let reduces = kind != Kind::Accumulate || epoch.step() % 3 == 0 || epoch.step() == epoch.len();
            for (nth, (net, optim)) in units.iter_mut().enumerate() {
                // A sharded parameter must be read by all ranks or by none.
                let branch = backwards + nth + if kind == Kind::Sharded { 0 } else { ddp.rank() };
                let loss = net.loss(&batch, branch, &device);
                let grads = match reduces {
                    true => ddp.backward(&loss, &*net)?,
                    false => ddp.accumulate(&loss, &*net).map(|()| None)?,
                };
                if let Some(grads) = grads {
                    *net = optim.step(0.1, net.clone(), grads);
                    steps += u64::from(nth == 0);
                }
            }
            backwards += 1;
            if save == Some(backwards)
                && let Some(checkpoints) = &checkpoints
            {
                checkpoints.save(steps, |c| {
                    for (nth, (net, optim)) in units.iter().enumerate() {
                        c.named(&nth.to_string()).model(net)?;
                        c.named(&nth.to_string()).optimizer(optim, net)?;
                    }
                    c.value("backwards", &backwards)?;
                    c.value("position", &loader.position())
                })?;
                if stop {
                    return Ok(None);
                }
            }
        }
    }
    let hashes: Vec<String> = units.iter().map(|(net, _)| param_hash(net)).collect::<Result<_, _>>()?;
    Ok(Some(hashes.join(" ")))
}

/// Trains without interruption, and with an interruption after each of `backwards`: every rank ends with the same bits.
fn interrupt(kind: Kind, worlds: &[usize], backwards: &[usize]) {
    for &world in worlds {
        let never = Ddp::spawn(world, |ddp| train(&ddp, kind, None, None, false)).unwrap();
        for &save in backwards {
            let directory = tempfile::tempdir().unwrap();
            Ddp::spawn(world, |ddp| train(&ddp, kind, Some(directory.path()), Some(save), true)).unwrap();
            let rest = Ddp::spawn(world, |ddp| train(&ddp, kind, Some(directory.path()), None, false)).unwrap();
            assert_eq!(rest, never, "{kind:?} on {world} rank(s), interrupted after backward {save}");
        }
    }
}

#[test]
fn an_interrupted_accumulation_ends_with_the_bits_of_a_whole_one() {
    // After one and two micro-batches of a step, after a step, and in a short last step, in both epochs.
    interrupt(Kind::Plain, &[1, 2, 3], &[1, 2, 3, 4, 5, 6, 9]);
}

#[test]
fn so_do_running_statistics() {
    for policy in [BufferPolicy::Average, BufferPolicy::Broadcast, BufferPolicy::Local] {
        interrupt(Kind::Norm(policy), &[1, 2, 3], &[1, 4, 6]);
    }
}

#[test]
fn so_do_two_models() {
    interrupt(Kind::Two, &[2], &[1, 5, 8]);
}

#[test]
fn so_does_accumulate() {
    interrupt(Kind::Accumulate, &[1, 3], &[1, 5, 8]);
}

#[test]
fn so_do_sharded_parameters() {
    interrupt(Kind::Sharded, &[1, 2], &[1, 4]);
}

#[test]
fn so_do_gradients_of_any_type() {
    interrupt(Kind::Other(DType::BF16), &[1, 2], &[2]);
    interrupt(Kind::Other(DType::F64), &[1, 2], &[2]);
}

/// One number, and its gradient for an input of 1.
fn line(ddp: &Ddp) -> anyhow::Result<Linear> {
    let device = ddp.device()?.autodiff();
    let mut line: Linear = LinearConfig::new(1, 1).with_bias(false).init(&device);
    line.weight = line.weight.map(|weight| weight.ones_like().detach().require_grad());
    Ok(line)
}

fn loss(ddp: &Ddp, line: &Linear, x: f32) -> anyhow::Result<Tensor<1>> {
    Ok(line.forward(Tensor::<2>::from_floats([[x]], &ddp.device()?.autodiff())).sum())
}

/// Gradient of the weight, if there are averages.
fn slope_of(line: &Linear, grads: Option<GradientsParams>) -> Option<f32> {
    grads.map(|grads| grads.get::<2>(line.weight.id).expect("the weight has a gradient").into_scalar())
}

/// Gradient of the weight after a backward for the input `x`, if it reduced.
fn slope(ddp: &Ddp, line: &Linear, x: f32) -> anyhow::Result<Option<f32>> {
    Ok(slope_of(line, ddp.backward(&loss(ddp, line, x)?, line)?))
}

#[test]
fn ranks_that_hold_different_numbers_of_micro_batches_go_on_in_any_world() {
    // Rank 0 holds a micro-batch of 3 items with input 6, rank 1 two micro-batches of 1 item, rank 2 none.
    let directory = tempfile::tempdir().unwrap();
    let config = WrapConfig::new().with_accumulation(3);
    Ddp::spawn(3, |ddp| {
        let model = ddp.wrap_with(line(&ddp)?, &config)?;
        let held: [&[(f32, f64)]; 3] = [&[(6.0, 3.0)], &[(1.0, 1.0), (2.0, 1.0)], &[]];
        for &(x, items) in held[ddp.rank()] {
            assert!(ddp.weighted(items).backward(&loss(&ddp, &model, x)?, &model)?.is_none());
        }
        let checkpoints = ddp.checkpoints(directory.path())?.asynchronous(true);
        checkpoints.save(0, |c| c.model(&model))?;
        Ok(checkpoints.wait()?)
    })
    .unwrap();
    for world in 1..=4 {
        let slopes = Ddp::spawn(world, |ddp| {
            let model = ddp.wrap_with(line(&ddp)?, &config)?;
            let model = ddp.checkpoints(directory.path())?.latest()?.unwrap().model(model)?;
            Ok(slope_of(&model, ddp.flush(&model)?))
        });
        assert_eq!(slopes.unwrap(), vec![Some(21.0 / 5.0); world]);
    }
}

#[test]
fn sums_of_sharded_parameters_are_those_of_whole_ones() {
    let device = |ddp: &Ddp| anyhow::Ok(ddp.device()?.autodiff());
    let model = |ddp: &Ddp, kind: Kind| anyhow::Ok(ddp.wrap_with(net(kind, &device(ddp)?), &kind.config())?);
    let loss = |ddp: &Ddp, net: &Net, part: usize| {
        anyhow::Ok(net.loss(&[3 * part, 3 * part + 1, 3 * part + 2], 0, &device(ddp)?))
    };
    let held = |ddp: &Ddp, net: &Net| {
        let grads = ddp.flush(net)?.expect("micro-batches are held");
        let sums = grads.get::<2>(net.trunk.weight.id).expect("the trunk has a gradient");
        anyhow::Ok(sums.into_data().try_to_vec::<f32>()?)
    };
    // One rank that holds all micro-batches.
    let expected = Ddp::spawn(1, |ddp| {
        let net = model(&ddp, Kind::Accumulate)?;
        for part in 0..4 {
            ddp.accumulate(&loss(&ddp, &net, part)?, &net)?;
        }
        held(&ddp, &net)
    });
    let expected = expected.unwrap().remove(0);
    for (saved_as, loaded_as) in [(Kind::Sharded, Kind::Plain), (Kind::Plain, Kind::Sharded)] {
        let directory = tempfile::tempdir().unwrap();
        Ddp::spawn(2, |ddp| {
            let net = model(&ddp, saved_as)?;
            ddp.optimizer(SgdConfig::new().init(), &net)?;
            for micro_batch in 0..2 {
                let loss = loss(&ddp, &net, 2 * micro_batch + ddp.rank())?;
                assert!(ddp.backward(&loss, &net)?.is_none());
            }
            Ok(ddp.checkpoints(directory.path())?.save(0, |c| c.model(&net))?)
        })
        .unwrap();
        for world in 1..=3 {
            let parts = Ddp::spawn(world, |ddp| {
                let net = ddp.checkpoints(directory.path())?.latest()?.unwrap().model(model(&ddp, loaded_as)?)?;
                ddp.optimizer(SgdConfig::new().init(), &net)?;
                held(&ddp, &net)
            });
            let parts = parts.unwrap();
            let whole = if loaded_as == Kind::Sharded { parts.concat() } else { parts[world - 1].clone() };
            let distance = whole.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(whole.len() == expected.len() && distance < 1e-6, "{distance:e} as {loaded_as:?} on {world}");
        }
    }
}

#[test]
fn a_model_that_cannot_take_them_is_refused_on_every_rank_and_inference_is_not() {
    let directory = tempfile::tempdir().unwrap();
    let errors = Ddp::spawn(2, |ddp| {
        let config = WrapConfig::new().with_accumulation(2);
        let model = ddp.wrap_with(line(&ddp)?, &config)?;
        slope(&ddp, &model, 3.0)?;
        let checkpoints = ddp.checkpoints(directory.path())?;
        checkpoints.save(0, |c| c.model(&model))?;
        let saved = checkpoints.latest()?.unwrap();
        let not_wrapped = saved.model(line(&ddp)?).unwrap_err().to_string();
        let sum = ddp.wrap_with(line(&ddp)?, &config.clone().with_reduction(GradientReduction::Sum))?;
        let other_reduction = saved.model(sum).unwrap_err().to_string();
        let inference = saved.model(line(&ddp)?.valid())?;
        assert_eq!(inference.weight.val().into_scalar::<f32>(), 1.0);
        Ok([not_wrapped, other_reduction])
    });
    for [not_wrapped, other_reduction] in errors.unwrap() {
        assert!(not_wrapped.contains("1 micro-batch(es)") && not_wrapped.contains("load it after `ddp.wrap`"));
        assert!(other_reduction.contains("by `Mean`, and the model was wrapped with `Sum`"), "{other_reduction}");
    }
}

#[test]
fn loading_drops_what_the_model_holds() {
    let directory = tempfile::tempdir().unwrap();
    let slopes = Ddp::spawn(2, |ddp| {
        let model = ddp.wrap_with(line(&ddp)?, &WrapConfig::new().with_accumulation(2))?;
        let checkpoints = ddp.checkpoints(directory.path())?;
        checkpoints.save(0, |c| c.model(&model))?;
        slope(&ddp, &model, 100.0)?;
        checkpoints.save(1, |c| c.model(&model))?;
        let [newer, older] = [0, 1].map(|nth| checkpoints.list().map(|mut list| list.remove(nth)));
        let mut slopes = Vec::new();
        for saved in [older?, newer?] {
            let model = saved.model(model.clone())?;
            let held = slope(&ddp, &model, 2.0)?;
            slopes.push((held.is_some(), slope(&ddp, &model, 4.0)?.or(held)));
        }
        Ok(slopes)
    });
    for slopes in slopes.unwrap() {
        assert_eq!(slopes, [(false, Some(3.0)), (true, Some(51.0))]);
    }
}

#[test]
fn copies_that_are_not_trained_leave_what_is_held() {
    let directory = tempfile::tempdir().unwrap();
    let slopes = Ddp::spawn(2, |ddp| {
        let model = ddp.wrap_with(line(&ddp)?, &WrapConfig::new().with_accumulation(2))?;
        let checkpoints = ddp.checkpoints(directory.path())?;
        checkpoints.save(0, |c| c.model(&model))?;
        slope(&ddp, &model, 2.0)?;
        checkpoints.save(1, |c| {
            c.model(&model)?;
            c.named("average").model(&model.clone().no_grad())
        })?;
        for (nth, copy) in [model.valid(), model.clone().no_grad(), model.valid()].into_iter().enumerate() {
            let saved = checkpoints.at(nth as u64 % 2)?.unwrap();
            saved.model(copy)?;
        }
        if ddp.is_main() {
            let newest = checkpoints.latest()?.unwrap();
            let file = |name: &str| newest.path().join(name).exists();
            assert!(file("held.bpk") && !file("average-held.bpk"));
        } else {
            checkpoints.latest()?;
        }
        slope(&ddp, &model, 4.0)
    });
    assert_eq!(slopes.unwrap(), [Some(3.0), Some(3.0)]);
}

#[test]
fn a_copy_that_is_loaded_too_leaves_what_the_model_holds() {
    let directory = tempfile::tempdir().unwrap();
    let slopes = Ddp::spawn(2, |ddp| {
        let config = WrapConfig::new().with_accumulation(2);
        let line = || anyhow::Ok(LinearConfig::new(1, 1).with_bias(false).init(&ddp.device()?.autodiff()));
        let model: Linear = ddp.wrap_with(line()?, &config)?;
        let checkpoints = ddp.checkpoints(directory.path())?;
        slope(&ddp, &model, 2.0)?;
        checkpoints.save(1, |c| {
            c.named("average").model(&model.valid())?;
            c.model(&model)
        })?;
        let model = ddp.wrap_with(line()?, &config)?;
        let saved = checkpoints.latest()?.expect("was saved");
        let model = saved.model(model)?;
        let _average = saved.named("average").model(model.clone())?;
        slope(&ddp, &model, 4.0)
    });
    assert_eq!(slopes.unwrap(), [Some(3.0), Some(3.0)]);
}
