//! `SyncBatchNorm` equals Burn's `BatchNorm` over the batches of all ranks. `parity/` compares it with torch.

use std::time::Duration;

use burn::module::Module;
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::optim::{AdamConfig, GradientsParams, SgdConfig};
use burn::prelude::*;
use burn::tensor::DType;
use burn_ddp::nn::SyncBatchNorm;
use burn_ddp::prelude::*;
use burn_ddp::{Error, WorldOptions};
use burn_ddp_tests::{device, distance, number, rows, values};

/// Linear, norm, linear; the norm is `BatchNorm` or `SyncBatchNorm`.
#[derive(Module, Debug)]
struct Net<N: Module> {
    a: Linear,
    norm: N,
    b: Linear,
}

type Sync = Net<SyncBatchNorm>;
type Plain = Net<BatchNorm>;

impl Plain {
    /// 6 → 5 → 3 in f64, the same for each salt.
    fn new(salt: u64, device: &Device) -> Self {
        struct Fill(u64);
        impl burn::module::ModuleMapper for Fill {
            fn map_float<const D: usize>(
                &mut self,
                param: burn::module::Param<Tensor<D>>,
            ) -> burn::module::Param<Tensor<D>> {
                self.0 += 1;
                let salt = self.0;
                param.map(|old| {
                    let shape = old.shape();
                    // Positive, since some are variances.
                    let values: Vec<f64> = (0..shape.num_elements()).map(|i| 1.1 + number(i, salt)).collect();
                    let new = Tensor::from_data(TensorData::new(values, shape), (&old.device(), DType::F64));
                    if old.is_require_grad() { new.require_grad() } else { new }
                })
            }
        }
        let linear = |i, o| LinearConfig::new(i, o).init(device);
        let norm = BatchNormConfig::new(5).init(device);
        Net { a: linear(6, 5), norm, b: linear(5, 3) }.map(&mut Fill(salt * 100))
    }

    fn synced(self) -> Sync {
        Net { a: self.a, norm: self.norm.into(), b: self.b }
    }

    /// Sum of the losses of the items, several terms for each.
    fn loss(&self, x: Tensor<2>) -> Tensor<1> {
        self.b.forward(self.norm.forward(self.a.forward(x.tanh()))).powi_scalar(2).sum()
    }
}

impl Sync {
    fn loss(&self, x: Tensor<2>) -> Tensor<1> {
        self.b.forward(self.norm.forward(self.a.forward(x.tanh()))).powi_scalar(2).sum()
    }
}

/// Values of a model, after its running statistics have been brought up to date.
fn flushed<M: Module>(model: &M) -> Vec<Vec<f64>> {
    drop(model.valid());
    values(model)
}

fn input(items: std::ops::Range<usize>, salt: u64, device: &Device) -> Tensor<2> {
    rows(items.start, items.len(), 6, salt, DType::F64, device)
}

/// Random worlds, parts (some without any item) and models, trained for three steps; the weights, the running
/// statistics and the gradient of the input follow one rank that sees all items.
#[test]
fn any_split_follows_one_rank() {
    for case in 0..40_u64 {
        let draw = |i: usize, below: usize| ((number(i, 1000 + case) + 1.0) / 2.0 * below as f64) as usize;
        let world_size = 1 + draw(0, 4);
        let counts: Vec<usize> = (0..world_size).map(|rank| draw(1 + rank, 5) + usize::from(rank == 0)).collect();
        let start = |rank: usize| counts[..rank].iter().sum::<usize>();
        let items = start(world_size);

        let device = device().autodiff();
        let mut model = Plain::new(case, &device);
        let mut optim = SgdConfig::new().init();
        let mut input_gradients = Vec::new();
        for step in 0..3 {
            let x = input(0..items, step, &device).require_grad();
            let gradients = (model.loss(x.clone()) * (1.0 / items as f64)).backward();
            input_gradients.extend(x.grad(&gradients).unwrap().into_data().iter::<f64>());
            let grads = GradientsParams::from_grads(gradients, &model);
            model = optim.step(0.05, model, grads);
        }
        let expected = flushed(&model);

        let results = Ddp::spawn(world_size, |ddp| {
            let device = ddp.device()?.autodiff();
            let config = WrapConfig::new().with_buffers(BufferPolicy::Local);
            let mut model = ddp.wrap_with(Plain::new(case, &device).synced(), &config)?;
            let mut optim = SgdConfig::new().init();
            let mine = start(ddp.rank())..start(ddp.rank() + 1);
            let mut input_gradients = Vec::new();
            for step in 0..3 {
                // A mean over this rank's items, with their number as the weight.
                let n = mine.len() as f64;
                let x = input(mine.clone(), step, &device).require_grad();
                // A product instead of a division: the backward of Burn's division by a number computes 1/n in f32.
                let loss = model.loss(x.clone()) * (1.0 / n.max(1.0));
                let (gradients, grads) = ddp.weighted(n).scope(&model, || loss.backward())?;
                if !mine.is_empty() {
                    let gradient = x.grad(&gradients).unwrap().into_data();
                    // Scaled, since a rank's loss is the mean over its own items, but one rank's the mean over all.
                    input_gradients.push(gradient.iter::<f64>().map(|g| g * n / items as f64).collect::<Vec<f64>>());
                }
                model = optim.step(0.05, model, grads.expect("averages"));
            }
            Ok((flushed(&model), input_gradients, param_hash(&model)?))
        })
        .unwrap_or_else(|e| panic!("case {case}, {counts:?}: {e}"));
        for (rank, (weights, _, hash)) in results.iter().enumerate() {
            let error = distance(weights, &expected);
            assert!(error <= 1e-12, "case {case}, {counts:?}, rank {rank}: {error:e}");
            assert_eq!(*hash, results[0].2, "case {case}, {counts:?}: other bits on rank {rank}");
        }
        // Ordered by step, then by rank.
        let of_step = |step: usize| results.iter().filter_map(move |r| r.1.get(step)).flatten().copied();
        let got: Vec<f64> = (0..3).flat_map(of_step).collect();
        let error = distance(&[got], &[input_gradients]);
        assert!(error <= 1e-12, "case {case}, {counts:?}: gradients of the input differ by {error:e}");
    }
}

#[test]
fn micro_batches_follow_one_rank() {
    let results = Ddp::spawn(2, |ddp| {
        let device = ddp.device()?.autodiff();
        let gradients = |k: usize, own: bool| -> anyhow::Result<Vec<f64>> {
            let config = WrapConfig::new().with_accumulation(k).with_buffers(BufferPolicy::Local);
            let model = ddp.wrap_with(Plain::new(3, &device).synced(), &config)?;
            let mut last = None;
            for micro in 0..k {
                // Rank 0 has 3 items, rank 1 has 2; each micro-batch is normalised by itself.
                let mine = if ddp.rank() == 0 { 0..3 } else { 3..5 };
                let n = mine.len() as f64;
                let salt = if own { micro as u64 } else { 0 };
                let loss = model.loss(input(mine, salt, &device)) * (1.0 / n);
                last = ddp.weighted(n).backward(&loss, &model)?;
            }
            let grads = last.expect("averages");
            Ok(grads.get::<2>(model.a.weight.id).unwrap().into_data().iter::<f64>().collect())
        };
        Ok((gradients(1, false)?, gradients(2, false)?, gradients(2, true)?))
    })
    .unwrap();
    let device = device().autodiff();
    let model = Plain::new(3, &device);
    let loss = |salt| model.loss(input(0..5, salt, &device)) * 0.1;
    let gradients = (loss(0) + loss(1)).backward();
    let expected: Vec<f64> = model.a.weight.grad(&gradients).unwrap().into_data().iter::<f64>().collect();
    for (once, twice, both) in results {
        assert!(distance(&[twice], &[once]) <= 1e-14, "the mean of two equal micro-batches is one of them");
        assert!(distance(&[both], std::slice::from_ref(&expected)) <= 1e-12);
    }
}

#[test]
fn alone_it_is_burns_layer_bit_for_bit() {
    let device = device().autodiff();
    let plain = Plain::new(7, &device);
    let expected = plain.a.weight.grad(&plain.loss(input(0..5, 1, &device)).backward()).unwrap().into_data();
    let expected = (expected, flushed(&plain));

    let unwrapped = Plain::new(7, &device).synced();
    let got = unwrapped.a.weight.grad(&unwrapped.loss(input(0..5, 1, &device)).backward()).unwrap().into_data();
    assert_eq!((got, flushed(&unwrapped)), expected);

    let of_one = Ddp::spawn(1, |ddp| {
        let device = ddp.device()?.autodiff();
        let config = WrapConfig::new().with_single_rank_reduction(true);
        let model = ddp.wrap_with(Plain::new(7, &device).synced(), &config)?;
        let grads = ddp.backward(&model.loss(input(0..5, 1, &device)), &model)?.expect("averages");
        Ok((grads.get::<2>(model.a.weight.id).unwrap().into_data(), flushed(&model)))
    })
    .unwrap();
    assert_eq!(of_one[0], expected);
}

#[test]
fn records_are_those_of_burns_layer() {
    let dir = tempfile::tempdir().unwrap();
    let device = device().autodiff();
    let plain = Plain::new(11, &device);
    let expected = values(&plain);
    let record = plain.clone().into_record();
    let synced = Plain::new(12, &device).synced().load_record(record);
    assert_eq!(values(&synced), expected);
    let back = Plain::new(13, &device).load_record(synced.into_record());
    assert_eq!(values(&back), expected);

    // Plain Burn loads the file of a model that two ranks have trained.
    let trained = Ddp::spawn(2, |ddp| {
        let device = ddp.device()?.autodiff();
        let mut model = ddp.wrap(Plain::new(11, &device).synced())?;
        let mut optim = AdamConfig::new().init();
        for step in 0..3 {
            let mine = ddp.rank() * 4..ddp.rank() * 4 + 4;
            let loss = model.loss(input(mine, step, &device));
            let grads = ddp.backward(&loss, &model)?.expect("averages");
            model = optim.step(1e-2, model, grads);
        }
        ddp.save(&model, dir.path().join("model"))?;
        Ok((flushed(&ddp.unwrap(model.clone())?), param_hash(&model)?))
    })
    .unwrap();
    assert_eq!(trained[0], trained[1]);
    let loaded = Plain::new(14, &device).load_file(dir.path().join("model.bpk"));
    assert_eq!(values(&loaded), trained[0].0);
    assert_eq!(param_hash(&loaded).unwrap(), trained[0].1);
}

#[test]
fn it_shows_itself_as_burns_layer_does() {
    let device = device();
    let norm: SyncBatchNorm = BatchNormConfig::new(3).init(&device).into();
    assert_eq!(norm.to_string(), "SyncBatchNorm {num_features: 3, momentum: 0.1, epsilon: 0.00001, params: 12}");
    assert!(norm.clone().freeze().to_string().contains("training: disabled"));
    assert!(format!("{norm:?}").starts_with("SyncBatchNorm { norm: BatchNorm {"));
    let model = Plain::new(1, &device).synced();
    assert!(model.to_string().contains("norm: SyncBatchNorm {num_features: 5"), "{model}");
    assert_eq!(Module::num_params(&model), Module::num_params(&Plain::new(1, &device)));
    assert_eq!(BatchNorm::from(norm).momentum, 0.1);
}

/// Evaluation, frozen layers and other threads do not communicate: rank 0 runs all of them alone.
#[test]
fn only_training_is_collective() {
    let values = Ddp::spawn(2, |ddp| {
        let device = ddp.device()?.autodiff();
        let model = ddp.wrap(Plain::new(5, &device).synced())?;
        let x = input(0..4, 2, &device);
        drop(model.loss(x.clone()));
        if ddp.is_main() {
            let valid = model.valid();
            let plain = Net { a: valid.a.clone(), norm: valid.norm.clone().into(), b: valid.b.clone() };
            let plain: Plain = plain;
            let y = valid.loss(x.clone().inner()).into_scalar::<f64>();
            assert_eq!(y, plain.loss(x.clone().inner()).into_scalar::<f64>());
            let frozen = model.clone().freeze();
            let again = frozen.loss(x.clone()).inner().into_scalar::<f64>();
            assert!((again - y).abs() <= 1e-12 * y.abs(), "{again} {y}");
        }
        ddp.barrier()?;
        // A fork, a clone and an unfrozen copy still communicate in training.
        let forked = model.clone().fork(&device).freeze().unfreeze();
        Ok(forked.loss(input(ddp.rank()..ddp.rank() + 1, 2, &device)).inner().into_scalar::<f64>())
    })
    .unwrap();
    let alone = Plain::new(5, &device().autodiff());
    let both = alone.loss(input(0..2, 2, &device().autodiff())).inner().into_scalar::<f64>();
    let sum: f64 = values.iter().sum();
    assert!((sum - both).abs() <= 1e-12 * both, "{values:?} {both}");
}

#[test]
fn averaged_and_broadcast_buffers_change_nothing() {
    let of = |policy| {
        let results = Ddp::spawn(2, move |ddp| {
            let device = ddp.device()?.autodiff();
            let config = WrapConfig::new().with_buffers(policy);
            let mut model = ddp.wrap_with(Plain::new(9, &device).synced(), &config)?;
            let mut optim = SgdConfig::new().init();
            for step in 0..4 {
                let loss = model.loss(input(ddp.rank() * 3..ddp.rank() * 3 + 3, step, &device)) / 3.0;
                let grads = ddp.backward(&loss, &model)?.expect("averages");
                model = optim.step(0.01, model, grads);
            }
            Ok(flushed(&model))
        })
        .unwrap();
        assert_eq!(results[0], results[1]);
        results.into_iter().next().unwrap()
    };
    let local = of(BufferPolicy::Local);
    assert_eq!(of(BufferPolicy::Average), local);
    assert_eq!(of(BufferPolicy::Broadcast), local);
}

#[test]
fn half_precision_is_computed_in_single() {
    for dtype in [DType::F16, DType::BF16] {
        let results = Ddp::spawn(2, move |ddp| {
            let device = ddp.device()?.autodiff();
            let norm = BatchNormConfig::new(2).init(&device);
            let to = |t: Tensor<1>| t.cast(dtype).detach();
            let norm = BatchNorm {
                gamma: norm.gamma.map(|t| to(t).require_grad()),
                beta: norm.beta.map(|t| to(t).require_grad()),
                running_mean: burn::module::RunningState::new(to(norm.running_mean.value())),
                running_var: burn::module::RunningState::new(to(norm.running_var.value())),
                ..norm
            };
            let norm = ddp.wrap(SyncBatchNorm::from(norm))?;
            // Σ x² would be beyond f16.
            let x =
                Tensor::<2>::from_data([[300.0, 1.0], [500.0, 3.0]], &device).cast(dtype) + 100.0 * ddp.rank() as f32;
            let x = x.detach().require_grad();
            let y = norm.forward(x.clone());
            assert_eq!(y.dtype(), dtype);
            let loss = (y.clone() * y.clone() * y.clone()).sum();
            let (gradients, _) = ddp.scope(&norm, || loss.backward())?;
            assert_eq!(x.grad(&gradients).unwrap().dtype(), dtype);
            assert_eq!(norm.norm.running_mean.value_sync().dtype(), dtype);
            Ok(y.inner().into_data().iter::<f64>().collect::<Vec<_>>())
        })
        .unwrap();
        // 300, 500, 400, 600: mean 450, variance 12500.
        let got = [results[0][0], results[0][2], results[1][0], results[1][2]];
        for (got, x) in got.into_iter().zip([300.0, 500.0, 400.0, 600.0]) {
            let expected = (x - 450.0) / 12500.0_f64.sqrt();
            assert!((got - expected).abs() < 1e-2, "{got} instead of {expected}");
        }
    }
}

#[test]
fn a_rank_that_makes_another_pass_is_named() {
    let options = WorldOptions { timeout: Duration::from_secs(1), ..WorldOptions::default() };
    for in_backward in [false, true] {
        let worlds = burn_ddp::comm::World::threads(2, options.clone());
        let errors: Vec<String> = std::thread::scope(|scope| {
            let rank = |world| {
                move || -> Result<String, Error> {
                    let ddp = Ddp::from_world(world)?;
                    let device = ddp.device()?.autodiff();
                    let model = ddp.wrap(Plain::new(2, &device).synced())?;
                    let x = input(0..3, 1, &device);
                    let loss = (in_backward || ddp.rank() == 0).then(|| model.loss(x));
                    if ddp.rank() == 1 {
                        std::thread::sleep(Duration::from_secs(3));
                        return Ok(String::new());
                    }
                    Ok(ddp.backward(&loss.unwrap(), &model).map(drop).unwrap_err().to_string())
                }
            };
            let ranks: Vec<_> = worlds.into_iter().map(|world| scope.spawn(rank(world))).collect();
            ranks.into_iter().map(|rank| rank.join().map_or_else(said, |result| result.unwrap())).collect()
        });
        assert!(errors[0].contains("rank 1"), "{}", errors[0]);
        let op = if in_backward { "all_reduce" } else { "group" };
        assert!(errors[0].contains(op), "{}", errors[0]);
    }
}

fn said(panic: Box<dyn std::any::Any + Send>) -> String {
    panic.downcast_ref::<String>().cloned().unwrap_or_default()
}

#[test]
fn a_batch_of_nobody_is_an_error() {
    let error = Ddp::spawn(2, |ddp| {
        let device = ddp.device()?.autodiff();
        let model = ddp.wrap(Plain::new(2, &device).synced())?;
        drop(model.loss(input(0..0, 1, &device)));
        Ok(())
    })
    .unwrap_err()
    .to_string();
    assert!(error.contains("no rank has an item"), "{error}");
}
