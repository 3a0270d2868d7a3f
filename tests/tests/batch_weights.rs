//! Weights of backwards, and accumulation that ends early: N ranks make the same step as one rank with all items, or
//! all tokens, of the step.

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::{DatasetError, InMemDataset};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{GradientsParams, SgdConfig};
use burn::prelude::*;
use burn::tensor::DType;
use burn_ddp::data::{Stream, StreamShard, StreamSource};
use burn_ddp::prelude::*;
use burn_ddp_tests::*;

/// Items of one epoch.
const ITEMS: usize = 27;

/// Number of tokens of a text, 0 for a text that is all padding.
fn tokens(text: usize) -> usize {
    (text * 7 + 3) % 5
}

/// A batch: the numbers of its texts, and how many tokens they have together.
struct Texts {
    texts: Vec<usize>,
    tokens: usize,
}

#[derive(Clone)]
struct Together;

impl Batcher<usize, Texts> for Together {
    fn batch(&self, texts: Vec<usize>, _: &Device) -> Texts {
        Texts { tokens: texts.iter().copied().map(tokens).sum(), texts }
    }
}

fn texts(n: usize) -> InMemDataset<usize> {
    InMemDataset::new((0..n).collect())
}

impl Texts {
    /// Mean over the tokens; NaN if there are none.
    fn loss_of_tokens(&self, model: &Mlp, device: &Device) -> Tensor<1> {
        let sums = self.texts.iter().filter(|text| tokens(**text) > 0).map(|text| {
            let x = rows(10 * text, tokens(*text), 6, 1, DType::F64, device);
            model.forward(x).powf_scalar(2.0).sum()
        });
        // Without a text with tokens the loss still depends on the model, so that there is a backward.
        let nothing = model.a.weight.val().sum() * 0.0;
        // Burn's backward of a division by a number rounds to f32.
        sums.fold(nothing, |a, b| a + b) * (1.0 / self.tokens as f64)
    }

    /// Mean over the texts, of one row each.
    fn loss_of_texts(&self, model: &Mlp, device: &Device) -> Tensor<1> {
        let x = self.texts.iter().map(|text| rows(10 * text, 1, 6, 1, DType::F64, device)).collect();
        model.forward(Tensor::cat(x, 0)).powf_scalar(2.0).mean()
    }
}

fn model(device: &Device) -> Mlp {
    let mut model = to_f64(Mlp::new(device));
    for (salt, layer) in (10..).zip([&mut model.a, &mut model.b, &mut model.c]) {
        let fill = |t: Tensor<2>| rows(0, t.dims()[0], t.dims()[1], salt, DType::F64, device).require_grad();
        layer.weight = layer.weight.clone().map(fill);
        layer.bias = layer.bias.clone().map(|bias| bias.map(|t| t.zeros_like().detach().require_grad()));
    }
    model
}

/// A way to train.
#[derive(Clone, Copy, Debug)]
struct Case {
    /// Texts of a micro-batch over all ranks.
    micro_batch: usize,
    /// Micro-batches per step.
    accumulation: usize,
    /// True if the loss is a mean over tokens, false if over texts.
    tokens: bool,
    /// True if burn-ddp's loader weighs backwards and ends accumulation; otherwise the loop does both itself.
    ours: bool,
}

/// Trains for three epochs; returns the model's values and hash, and the number of optimizer steps.
fn train(ddp: &Ddp, case: Case) -> anyhow::Result<(Vec<Vec<f64>>, String, usize)> {
    let device = ddp.device()?.autodiff();
    let config = WrapConfig::new().with_accumulation(case.accumulation).with_bucket_cap_bytes(500);
    let mut model = ddp.wrap_with(model(&device), &config)?;
    let mut optim = SgdConfig::new().init();
    let mut steps = 0;
    let loader = ddp.loader(Together).global_batch_size(case.micro_batch).shuffle(3);
    let loader = if case.tokens { loader.weigh(|batch: &Texts| batch.tokens as f64) } else { loader };
    let train = loader.build(texts(ITEMS))?;
    for epoch in train.epochs(0..3) {
        for batch in epoch {
            let batch = batch?;
            let loss = match case.tokens {
                true => batch.loss_of_tokens(&model, &device),
                false => batch.loss_of_texts(&model, &device),
            };
            let grads = if case.ours {
                ddp.backward(&loss, &model)?
            } else {
                let weight = if case.tokens { batch.tokens } else { batch.texts.len() };
                ddp.weighted(weight as f64).backward(&loss, &model)?
            };
            if let Some(grads) = grads {
                model = optim.step(0.05, model, grads);
                steps += 1;
            }
        }
        if !case.ours {
            if let Some(grads) = ddp.flush(&model)? {
                model = optim.step(0.05, model, grads);
                steps += 1;
            }
            assert!(ddp.flush(&model)?.is_none(), "nothing is held any more");
        }
    }
    Ok((values(&model), param_hash(&model)?, steps))
}

#[test]
fn every_step_is_that_of_one_rank_with_all_its_items_or_tokens() {
    for (accumulation, steps) in [(1, 3), (2, 3), (4, 2)] {
        // The oracle has all texts of a step in one batch on one rank. The last step has fewer micro-batches.
        let micro_batch = if accumulation == 1 { 10 } else { 6 };
        for tokens in [false, true] {
            let case = Case { micro_batch: micro_batch * accumulation, accumulation: 1, tokens, ours: true };
            let (oracle, _, _) = Ddp::spawn(1, |ddp| train(&ddp, case)).unwrap().remove(0);
            assert!(oracle.iter().flatten().all(|v| v.is_finite()));
            for (world, ours) in [(1, true), (2, true), (3, true), (1, false), (2, false), (3, false)] {
                let case = Case { micro_batch, accumulation, tokens, ours };
                let ranks = Ddp::spawn(world, |ddp| train(&ddp, case)).unwrap();
                for (values, hash, made) in &ranks {
                    assert_eq!(*made, 3 * steps, "{case:?} on {world} ranks");
                    assert_eq!(*hash, ranks[0].1, "{case:?} on {world} ranks");
                    let d = distance(values, &oracle);
                    assert!(d <= 1e-10, "{case:?} on {world} ranks: {d:e} away from one rank");
                }
            }
        }
    }
}

/// The mean of the outputs for `x`, the items of a batch.
fn mean(ddp: &Ddp, model: &Linear, x: &[f64]) -> anyhow::Result<Tensor<1>> {
    let device = ddp.device()?.autodiff();
    let x = Tensor::<2>::from_data(TensorData::new(x.to_vec(), [x.len(), 1]), (&device, DType::F64));
    Ok(model.forward(x).mean())
}

/// The gradient of the weight; NaN if the call only added up.
fn slope_of(model: &Linear, grads: Option<GradientsParams>) -> f64 {
    let slope = grads.and_then(|grads| grads.get::<2>(model.weight.id));
    slope.map_or(f64::NAN, |slope| slope.into_scalar::<f64>())
}

/// Gradient of a weight 1 whose loss is the mean of `x` over the items of a batch.
fn slope(ddp: &Ddp, model: &Linear, x: &[f64]) -> anyhow::Result<f64> {
    Ok(slope_of(model, ddp.backward(&mean(ddp, model, x)?, model)?))
}

fn line(ddp: &Ddp, config: &WrapConfig) -> anyhow::Result<Linear> {
    let device = ddp.device()?.autodiff();
    Ok(ddp.wrap_with(to_f64(LinearConfig::new(1, 1).with_bias(false).init(&device)), config)?)
}

#[test]
fn the_last_batch_weighs_calls_after_its_loop_unless_the_program_weighs_them() {
    let slopes = Ddp::spawn(2, |ddp| {
        let model = line(&ddp, &WrapConfig::new())?;
        let train = ddp.loader(Together).batch_size(4).build(texts(7))?; // 4 and 3 items in one step
        for leave in [false, true] {
            for batch in train.iter() {
                slope(&ddp, &model, &vec![1.0; batch?.texts.len()])?;
                if leave {
                    break;
                }
            }
        }
        let x = [ddp.rank() as f64];
        let after = slope(&ddp, &model, &x)?;
        let weighted = slope_of(&model, ddp.weighted(1.0).backward(&mean(&ddp, &model, &x)?, &model)?);
        // Evaluation through a training loader has no backward.
        assert_eq!(train.iter().count(), 1);
        ddp.skip_batch()?;
        let skipped = slope_of(&model, ddp.weighted(1.0).backward(&mean(&ddp, &model, &x)?, &model)?);
        Ok((after, weighted, skipped))
    });
    for (after, weighted, skipped) in slopes.unwrap() {
        assert!((after - 3.0 / 7.0).abs() < 1e-12, "{after}");
        assert_eq!((weighted, skipped), (0.5, 0.5));
    }
}

#[test]
fn a_batch_without_a_backward_is_an_error_unless_the_program_says_what_it_means() {
    for way in ["nothing", "skip_batch", "weighted"] {
        let slopes = Ddp::spawn(2, |ddp| {
            let model = line(&ddp, &WrapConfig::new())?;
            let train = ddp.loader(Together).batch_size(1).build(texts(6))?;
            let slope = || {
                let mut epoch = train.iter();
                epoch.next().expect("an epoch has batches")?;
                if way == "skip_batch" {
                    ddp.skip_batch()?;
                }
                epoch.next().expect("an epoch has several batches")?;
                let loss = mean(&ddp, &model, &[ddp.rank() as f64])?;
                let grads = match way {
                    "weighted" => ddp.weighted(1.0).backward(&loss, &model)?,
                    _ => ddp.backward(&loss, &model)?,
                };
                anyhow::Ok(slope_of(&model, grads))
            };
            // If the other rank finds the mistake first, this rank gets the error from its loader.
            Ok(slope().map_err(|error| error.to_string()))
        });
        for slope in slopes.unwrap() {
            match slope {
                Ok(slope) => assert!(way != "nothing" && slope == 0.5, "{way}: {slope}"),
                Err(error) => {
                    let says = ["since the last backward", "ddp.weighted(items)", "ddp.skip_batch()"];
                    assert!(way == "nothing" && says.iter().all(|part| error.contains(part)), "{way}: {error}");
                }
            }
        }
    }
}

#[test]
fn an_epoch_that_is_left_with_micro_batches_held_is_an_error_that_says_so() {
    let config = WrapConfig::new().with_accumulation(2);
    let errors = Ddp::spawn(2, |ddp| {
        let model = line(&ddp, &config)?;
        let train = ddp.loader(Together).batch_size(1).build(texts(10))?; // five steps
        let mut step = 0;
        for number in 0..3 {
            for batch in train.epochs([number]).next().unwrap() {
                step += 1;
                // If the other rank finds the mistake first, this rank gets the error from its loader.
                let gradient = batch.map_err(anyhow::Error::from).and_then(|_| slope(&ddp, &model, &[1.0]));
                if let Err(error) = gradient {
                    return Ok((step, error.to_string()));
                }
                if number < 2 && step % 3 == 0 {
                    break; // with one micro-batch held
                }
            }
            if number == 0 {
                assert!(ddp.flush(&model)?.is_some(), "a micro-batch was held");
            }
        }
        Ok((step, String::new()))
    });
    for (step, error) in errors.unwrap() {
        assert!(step > 3 && error.contains("ddp.flush(&model)"), "step {step}: {error}");
    }
}

/// A loop that counts micro-batches across epochs would step at other places.
#[test]
fn every_epoch_ends_its_last_step_and_the_next_begins_with_a_whole_one() {
    let config = WrapConfig::new().with_accumulation(2);
    let ends = Ddp::spawn(2, |ddp| {
        let (mut model, mut optim) = (line(&ddp, &config)?, SgdConfig::new().init());
        let train = ddp.loader(Together).batch_size(1).build(texts(10))?; // five batches: two steps, and one of one
        let mut ends = Vec::new();
        for take in [4, 5, 5] {
            let mut of_epoch = String::new();
            for batch in train.iter().take(take) {
                batch?;
                let grads = ddp.backward(&mean(&ddp, &model, &[1.0])?, &model)?;
                of_epoch.push(if grads.is_some() { '|' } else { '.' });
                if let Some(grads) = grads {
                    model = optim.step(0.1, model, grads);
                }
            }
            ends.push(of_epoch);
        }
        Ok(ends)
    });
    for ends in ends.unwrap() {
        assert_eq!(ends, [".|.|", ".|.||", ".|.||"]);
    }
}

#[test]
fn ranks_may_hold_different_numbers_of_micro_batches_when_gradients_are_synchronised() {
    for world in [1, 2, 3] {
        let slopes = Ddp::spawn(world, |ddp| {
            let model = line(&ddp, &WrapConfig::new().with_accumulation(10))?;
            assert!(ddp.flush(&model)?.is_none());
            // In a world of several ranks the last one holds no micro-batch.
            let mine = if world == 1 { 0..6 } else { 6 * ddp.rank() / (world - 1)..6 * (ddp.rank() + 1) / (world - 1) };
            for x in mine.filter(|x| *x < 6) {
                let grads = ddp.weighted((1 + x) as f64).backward(&mean(&ddp, &model, &[x as f64])?, &model);
                let grads = grads.map_err(|e| anyhow::anyhow!("slope {x} world {world}: {e}"))?;
                assert!(grads.is_none());
            }
            let slope = slope_of(&model, ddp.flush(&model)?);
            assert_eq!(ddp.telemetry().stats().steps, 1);
            Ok(slope)
        });
        let (sum, items) = (0..6).fold((0.0, 0.0), |(s, n), x| (s + f64::from(x * (1 + x)), n + f64::from(1 + x)));
        for slope in slopes.unwrap() {
            assert!((slope - sum / items).abs() < 1e-12, "{slope} on {world} ranks, not {}", sum / items);
        }
    }
}

#[test]
fn a_batch_without_a_sensible_weight_is_an_error_that_names_it() {
    let errors = Ddp::spawn(1, |ddp| {
        let train = ddp.loader(Together).weigh(|batch: &Texts| batch.tokens as f64 - 1.0).build(texts(2))?;
        Ok(train.iter().map(|batch| batch.err().map(|e| e.to_string())).collect::<Vec<_>>())
    });
    let [errors] = &errors.unwrap()[..] else { unreachable!() };
    let said = errors.iter().flatten().next().unwrap();
    assert!(said.contains("of loader 0 on rank 0 has no weight") && said.contains("got -1"), "{said}");
}

#[test]
fn a_parameter_that_only_a_rank_of_little_weight_uses_is_used() {
    for dtype in [DType::F16, DType::BF16, DType::F32] {
        let used = Ddp::spawn(2, |ddp| {
            let device = ddp.device()?.autodiff();
            let one = || burn::module::Param::from_tensor(Tensor::<1>::ones([4], (&device, dtype)));
            let model = ddp.wrap(vec![one(), one()])?;
            // One rank has 2^26 items, the other has one.
            let (own, items) = if ddp.rank() == 0 { (0, 2f64.powi(26)) } else { (1, 1.0) };
            let loss = model[own].val().sum().cast(DType::F32);
            let grads = ddp.weighted(items).backward(&loss, &model)?.expect("averages");
            Ok(grads.len())
        });
        assert_eq!(used.unwrap(), [2, 2], "{dtype:?}");
    }
}

/// A stream of the texts in order.
#[derive(Clone)]
struct Front;

impl StreamSource<usize> for Front {
    fn open(&self, shard: StreamShard) -> Result<Stream<usize>, DatasetError> {
        Ok(Box::new((0..6).filter(move |text| shard.has(*text)).map(Ok)))
    }
}

#[test]
fn batches_that_are_taken_out_of_their_epochs_train() {
    let slopes = Ddp::spawn(2, |ddp| {
        let model = line(&ddp, &WrapConfig::new())?;
        let train = ddp.loader(Together).global_batch_size(3).build(texts(6))?;
        let stream = ddp.stream(Front, Together).build()?;
        let step = |batch: Texts| slope(&ddp, &model, &batch.texts.iter().map(|x| *x as f64).collect::<Vec<_>>());
        let mut slopes = Vec::new();
        for epoch in 0..3 {
            // The iterators are dropped before the backward.
            let batch = train.iter().next().expect("an epoch has batches")?;
            slopes.push(step(batch)?);
            let batch = stream.epochs(epoch..epoch + 1).flatten().next().expect("a stream has batches")?;
            slopes.push(step(batch)?);
        }
        Ok(slopes)
    });
    // In each epoch texts 0 and 1 on rank 0 and 2 on rank 1; then 0 on rank 0 and 1 on rank 1.
    assert_eq!(slopes.unwrap(), [[1.0, 0.5].repeat(3), [1.0, 0.5].repeat(3)]);
}

/// Equal weights change nothing, also if a step has several micro-batches.
#[test]
fn equal_weights_of_all_micro_batches_change_nothing() {
    let train = |ddp: Ddp| {
        let device = ddp.device()?.autodiff();
        let mut model = ddp.wrap_with(model(&device), &WrapConfig::new().with_accumulation(2))?;
        let mut optim = SgdConfig::new().init();
        let mut steps = 0;
        for backward in 0..4 {
            let loss = model.forward(rows(3 * backward, 3, 6, 1, DType::F64, &device)).powf_scalar(2.0).mean();
            if let Some(grads) = ddp.weighted(3.0).backward(&loss, &model)? {
                model = optim.step(0.1, model, grads);
                steps += 1;
            }
        }
        Ok((steps, param_hash(&model)?))
    };
    let alone = Ddp::spawn(1, train).unwrap().remove(0);
    assert_eq!(alone.0, 2);
    // All ranks read the same rows, so the mean over ranks is the gradient of one.
    assert_eq!(Ddp::spawn(2, train).unwrap(), [alone.clone(), alone]);
}
