//! `ddp.join`: loaders of the program that end at different steps, compared with one rank that has all data.

use std::time::Duration;

use burn::nn::{BatchNormConfig, Linear, LinearConfig};
use burn::optim::{AdamConfig, GradientsParams, ModuleOptimizer, SgdConfig};
use burn::prelude::*;
use burn::tensor::{DType, TensorData};
use burn_ddp::nn::SyncBatchNorm;
use burn_ddp::prelude::*;
use burn_ddp::{Result, WorldOptions};
use burn_ddp_tests::{Normed, device, distance, number, rows, to_f64, values};

/// Two heads, of which a micro-batch uses one.
#[derive(Module, Debug)]
struct Heads {
    body: Linear,
    heads: Vec<Linear>,
}

impl Heads {
    fn new(device: &Device) -> Self {
        let init = |i, o| LinearConfig::new(i, o).init(device);
        Heads { body: init(4, 5), heads: vec![init(5, 2), init(5, 2)] }
    }

    /// Mean over the items.
    fn loss(&self, batch: &Batch, device: &Device) -> Tensor<1> {
        let x = rows(batch.start, batch.items, 4, 1, DType::F64, device);
        self.heads[batch.head].forward(self.body.forward(x).tanh()).powf_scalar(2.0).sum_dim(1).mean()
    }
}

#[derive(Clone, Debug)]
struct Batch {
    start: usize,
    items: usize,
    head: usize,
}

/// The data and settings of all ranks.
#[derive(Debug)]
struct Case {
    /// `[epoch][rank][micro-batch]`
    epochs: Vec<Vec<Vec<Batch>>>,
    accumulation: usize,
    reduction: GradientReduction,
    /// True if each rank weighs each micro-batch by its number of items.
    weighted: bool,
    bucket_cap_bytes: usize,
    overlap: bool,
    replica_check: usize,
}

/// Random numbers for a case.
struct Dice {
    seed: u64,
    drawn: usize,
}

impl Dice {
    fn below(&mut self, n: usize) -> usize {
        self.drawn += 1;
        (((number(self.drawn, self.seed) + 1.0) / 2.0) * n as f64) as usize % n
    }
}

impl Case {
    fn new(seed: u64) -> Self {
        let mut dice = Dice { seed: seed.wrapping_add(0x101), drawn: 0 };
        let (world, accumulation, epochs) = (1 + dice.below(4), 1 + dice.below(3), 1 + dice.below(2));
        let mut start = 0;
        let mut batch = |dice: &mut Dice| {
            let items = 1 + dice.below(4);
            start += items;
            Batch { start: start - items, items, head: usize::from(dice.below(4) == 0) }
        };
        let mut of_rank = |dice: &mut Dice| -> Vec<Batch> { (0..dice.below(8)).map(|_| batch(dice)).collect() };
        let mut of_epoch = |dice: &mut Dice| -> Vec<Vec<Batch>> { (0..world).map(|_| of_rank(dice)).collect() };
        Case {
            epochs: (0..epochs).map(|_| of_epoch(&mut dice)).collect(),
            accumulation,
            reduction: [GradientReduction::Mean, GradientReduction::Sum][dice.below(2)],
            weighted: dice.below(2) == 0,
            bucket_cap_bytes: [1, 100, 1 << 20][dice.below(3)],
            overlap: dice.below(2) == 0,
            replica_check: dice.below(2),
        }
    }

    fn weight(&self, batch: &Batch) -> f64 {
        if self.weighted { batch.items as f64 } else { 1.0 }
    }
}

fn f64_of(value: f64, device: &Device) -> Tensor<1> {
    Tensor::from_data(TensorData::new(vec![value], [1]), (device, DType::F64))
}

/// Trains on one device without burn-ddp: a step takes the micro-batches of all ranks that still have data for it.
fn alone(case: &Case, model: Heads) -> Vec<Vec<f64>> {
    let device = device().autodiff();
    let (mut model, mut optim) = (model, SgdConfig::new().init());
    for ranks in &case.epochs {
        let steps = ranks.iter().map(|batches| batches.len() / case.accumulation).max().unwrap();
        for step in 0..steps {
            let of_step = |batches: &Vec<Batch>| -> Vec<Batch> {
                batches.iter().skip(step * case.accumulation).take(case.accumulation).cloned().collect()
            };
            let batches: Vec<Batch> = ranks.iter().flat_map(of_step).collect();
            let total: f64 = batches.iter().map(|batch| case.weight(batch)).sum();
            let part = |batch: &Batch| {
                let factor = if case.reduction == GradientReduction::Sum { 1.0 } else { case.weight(batch) / total };
                model.loss(batch, &device) * f64_of(factor, &device)
            };
            let loss = batches.iter().map(part).reduce(|a, b| a + b).unwrap();
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            model = optim.step(0.05, model, grads);
        }
    }
    values(&model)
}

/// Trains this rank; returns values and hash after the last epoch, and the result of `join` after each epoch.
fn together(case: &Case, ddp: &Ddp, model: Heads) -> anyhow::Result<(Vec<Vec<f64>>, String, Vec<usize>)> {
    let device = ddp.device()?.autodiff();
    let config = WrapConfig::new()
        .with_accumulation(case.accumulation)
        .with_reduction(case.reduction)
        .with_bucket_cap_bytes(case.bucket_cap_bytes)
        .with_first_bucket_cap_bytes(case.bucket_cap_bytes)
        .with_overlap(case.overlap)
        .with_replica_check(case.replica_check);
    let (mut model, mut optim) = (ddp.wrap_with(model, &config)?, SgdConfig::new().init());
    let mut missed = Vec::new();
    for ranks in &case.epochs {
        for (nth, batch) in ranks[ddp.rank()].iter().enumerate() {
            let loss = model.loss(batch, &device);
            let grads = match case.weighted {
                true => ddp.weighted(batch.items as f64).backward(&loss, &model)?,
                false => ddp.backward(&loss, &model)?,
            };
            assert_eq!(grads.is_some(), (nth + 1) % case.accumulation == 0);
            if let Some(grads) = grads {
                model = optim.step(0.05, model, grads);
            }
        }
        missed.push(ddp.join(&mut model, &mut optim)?);
    }
    Ok((values(&model), param_hash(&model)?, missed))
}

fn spawn<T: Send>(world: usize, f: impl Fn(Ddp) -> anyhow::Result<T> + Sync) -> Result<Vec<T>> {
    let options = WorldOptions { timeout: Duration::from_secs(120), ..WorldOptions::default() };
    Ddp::spawn_with(world, options, f)
}

#[test]
fn uneven_loaders_follow_one_rank() {
    let mut uneven = 0;
    for seed in 0..120 {
        let case = Case::new(seed);
        let plain = to_f64(Heads::new(&device().autodiff()));
        let oracle = alone(&case, plain.clone());
        let ranks = spawn(case.epochs[0].len(), |ddp| together(&case, &ddp, plain.clone()))
            .unwrap_or_else(|e| panic!("case {seed}: {e}\n{case:#?}"));
        for (rank, (values, hash, missed)) in ranks.iter().enumerate() {
            assert_eq!(*hash, ranks[0].1, "case {seed}: rank {rank} differs from rank 0\n{case:#?}");
            let d = distance(values, &oracle);
            assert!(d <= 1e-10, "case {seed}: {d:e} away from one rank\n{case:#?}");
            for (missed, of_epoch) in missed.iter().zip(&case.epochs) {
                let steps = |batches: &Vec<Batch>| batches.len() / case.accumulation;
                assert_eq!(*missed, of_epoch.iter().map(steps).max().unwrap() - steps(&of_epoch[rank]), "case {seed}");
                uneven += usize::from(*missed > 0);
            }
        }
    }
    assert!(uneven > 50, "most cases are even: {uneven}");
}

/// Trains for `batches[epoch][rank]` steps of Adam; returns this rank's model, its hash, and the running statistics
/// after its last forward.
fn train_normed(
    ddp: &Ddp,
    policy: BufferPolicy,
    batches: &[Vec<usize>],
) -> anyhow::Result<(Normed, String, [Vec<f64>; 2])> {
    let device = ddp.device()?.autodiff();
    let config = WrapConfig::new().with_buffers(policy);
    let mut model = ddp.wrap_with(Normed::new(&device), &config)?;
    let mut optim: ModuleOptimizer = AdamConfig::new().init();
    let mut last = model.statistics();
    for of_ranks in batches {
        for batch in 0..of_ranks[ddp.rank()] {
            let start = 100 * batch + 10 * ddp.rank();
            let loss = model.loss(rows(start, 4, 6, 1, DType::F32, &device));
            last = model.statistics();
            let grads = ddp.backward(&loss, &model)?.expect("averages");
            model = optim.step(1e-2, model, grads);
        }
        ddp.join(&mut model, &mut optim)?;
    }
    let hash = param_hash(&model)?;
    Ok((model, hash, last))
}

#[test]
fn statistics_and_moments_come_from_a_rank_that_trained_to_the_end() {
    for policy in [BufferPolicy::Average, BufferPolicy::Broadcast, BufferPolicy::Local] {
        let ranks = spawn(3, |ddp| {
            // Rank 0 is the first to join, in the next epoch the last; in the first epoch rank 2 trains last and alone.
            // If the optimizers' moments differed, the ranks would diverge.
            let (model, hash, last) = train_normed(&ddp, policy, &[vec![1, 2, 5]])?;
            assert_eq!(model.statistics(), ddp.group().broadcast_object(Some(last), 2)?, "{policy:?} on {ddp:?}");
            let (_, again, _) = train_normed(&ddp, policy, &[vec![1, 2, 5], vec![4, 4, 0], vec![3, 3, 3]])?;
            Ok((hash, again))
        })
        .unwrap();
        assert!(
            ranks.iter().all(|hashes| policy == BufferPolicy::Local || *hashes == ranks[0]),
            "{policy:?} {ranks:?}"
        );
        assert!(ranks.iter().all(|(hash, _)| *hash == ranks[0].0), "{policy:?} {ranks:?}");
    }
}

#[test]
fn ranks_that_disagree_hear_of_it() {
    let begin = std::time::Instant::now();
    // Rank 1 ends before the others, and leaves.
    let error = spawn(3, |ddp| {
        let device = ddp.device()?.autodiff();
        let (mut model, mut optim) = (ddp.wrap(Heads::new(&device))?, SgdConfig::new().init());
        if ddp.rank() != 1 {
            ddp.join(&mut model, &mut optim)?;
        }
        Ok(())
    });
    let error = error.unwrap_err().to_string();
    assert!(error.contains("rank 1") && error.contains("left"), "{error}");

    // A rank that leaves its loop without `join` is an error for the ranks that train.
    let error = spawn(2, |ddp| {
        let device = ddp.device()?.autodiff();
        let model = ddp.wrap(to_f64(Heads::new(&device)))?;
        for start in 0..3 + ddp.rank() {
            ddp.backward(&model.loss(&Batch { start, items: 1, head: 0 }, &device), &model)?;
        }
        Ok(())
    });
    let error = error.unwrap_err().to_string();
    assert!(error.contains("rank 0") && error.contains("left"), "{error}");
    assert!(begin.elapsed() < Duration::from_secs(60), "nobody waits for the deadline");

    let error = spawn(2, |ddp| {
        let mut model = Heads::new(&ddp.device()?.autodiff());
        Ok(ddp.join(&mut model, &mut SgdConfig::new().init()).unwrap_err().to_string())
    });
    assert!(error.unwrap().iter().all(|error| error.contains("not wrapped")));
}

#[test]
fn a_layer_whose_passes_all_ranks_make_together_is_refused_at_once() {
    let begin = std::time::Instant::now();
    for batches in [[1, 3], [0, 2], [2, 2]] {
        let error = spawn(2, |ddp| {
            let device = ddp.device()?.autodiff();
            let norm: SyncBatchNorm = BatchNormConfig::new(4).init(&device).into();
            let (mut norm, mut optim) = (ddp.wrap(norm)?, SgdConfig::new().init());
            for step in 0..batches[ddp.rank()] {
                let loss = norm.forward(rows(step * 4, 4, 4, 1, DType::F32, &device)).powf_scalar(3.0).mean();
                let grads = ddp.backward(&loss, &norm)?.expect("averages");
                norm = optim.step(0.1, norm, grads);
            }
            ddp.join(&mut norm, &mut optim)?;
            Ok(())
        });
        let error = error.unwrap_err().to_string();
        assert!(error.contains("`join` with a `SyncBatchNorm`"), "{error}");
    }
    assert!(begin.elapsed() < Duration::from_secs(60), "no rank waits for the deadline");
}

/// A rank without a single batch joins with an optimizer that has no state.
#[test]
fn a_rank_may_have_no_data() {
    let hashes = spawn(2, |ddp| {
        let (_, hash, _) = train_normed(&ddp, BufferPolicy::Average, &[vec![0, 3], vec![2, 2]])?;
        // No rank has a batch.
        let (_, nothing, _) = train_normed(&ddp, BufferPolicy::Average, &[vec![0, 0], vec![0, 0]])?;
        Ok((hash, nothing))
    })
    .unwrap();
    assert_eq!(hashes[0], hashes[1]);
    assert_ne!(hashes[0].0, hashes[0].1);
}
