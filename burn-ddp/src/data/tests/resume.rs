//! Runs that are interrupted and resumed, in worlds of other sizes and with other batch sizes.

use std::collections::BTreeMap;

use burn::data::dataloader::DataLoader;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::Tensor;
use proptest::prelude::*;

use super::*;
use crate::data::{EpochPlan, Position, ShardedLoader, permutation};
use crate::{GradientReduction, WrapConfig};

/// A run of a job, the same on all ranks, until it stops.
#[derive(Debug, Clone)]
struct Run {
    world: usize,
    /// Items of a step beyond one per rank.
    extra: usize,
    steps: usize,
    workers: usize,
    max_batches: Option<usize>,
}

/// A step of one rank: the epoch, the items that it read, and their weight.
type Read = (usize, Vec<usize>, f64);

const ALL: Run = Run { world: 1, extra: 0, steps: usize::MAX, workers: 0, max_batches: None };

fn loader(ddp: &Ddp, run: &Run, items: usize, seed: Option<u64>) -> crate::Result<ShardedLoader<Vec<usize>>> {
    let loader = ddp.loader(Keep).global_batch_size(run.world + run.extra).num_workers(run.workers);
    let loader = run.max_batches.into_iter().fold(loader, |loader, batches| loader.max_batches(batches));
    seed.into_iter().fold(loader, |loader, seed| loader.shuffle(seed)).build(numbers(items))
}

/// Reads as far as `run` says, from `position` on but no further than `epochs`; then where it is. `[rank][step]`
fn run(
    run: &Run,
    items: usize,
    seed: Option<u64>,
    epochs: usize,
    from: Option<Position>,
) -> (Vec<Vec<Read>>, Position) {
    let ranks = spawn(run.world, |ddp| {
        let train = loader(&ddp, run, items, seed)?;
        if let Some(position) = &from {
            train.resume(position)?;
            assert_eq!(train.position(), *position, "nothing was read yet");
        }
        let mut read = Vec::new();
        'steps: for epoch in train.epochs(0..epochs) {
            let number = epoch.number();
            for batch in epoch {
                let batch = batch?;
                read.push((number, batch, batch_of_call(&ddp)?.items));
                ddp.barrier()?;
                if read.len() == run.steps {
                    break 'steps;
                }
            }
        }
        Ok((read, train.position()))
    });
    let (read, positions): (Vec<_>, Vec<_>) = ranks.into_iter().unzip();
    assert!(positions.iter().all(|position| *position == positions[0]), "{positions:?}");
    (read, positions[0].clone())
}

/// The items that all ranks of a run read with a weight, in order. Checks the invariants of every step.
fn counted(run: &Run, read: &[Vec<Read>]) -> Vec<(usize, usize)> {
    let mut counted = Vec::new();
    for step in 0..read[0].len() {
        let of_step: Vec<&Read> = read.iter().map(|rank| &rank[step]).collect();
        let items: Vec<usize> =
            of_step.iter().filter(|(_, _, weight)| *weight > 0.0).flat_map(|r| r.1.clone()).collect();
        for (epoch, batch, weight) in &of_step {
            assert_eq!(*epoch, of_step[0].0);
            if *weight == 0.0 {
                assert!(items.len() < run.world && batch.len() == 1 && items.contains(&batch[0]), "{of_step:?}");
            } else {
                assert_eq!(*weight, batch.len() as f64);
            }
        }
        counted.extend(items.into_iter().map(|item| (of_step[0].0, item)));
    }
    counted
}

fn any_run() -> impl Strategy<Value = Run> {
    (1usize..6, 0usize..9, 1usize..7, 0usize..3).prop_map(|(world, extra, steps, workers)| Run {
        world,
        extra,
        steps,
        workers,
        max_batches: None,
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    /// With `max_batches` an epoch ends where the run in which it began would have ended it.
    #[test]
    fn every_item_of_every_epoch_is_read_once(
        items in 5usize..40,
        seed in prop::option::of(0u64..1000),
        max_batches in prop::option::of(1usize..8),
        runs in prop::collection::vec(any_run(), 0..8),
    ) {
        const EPOCHS: usize = 3;
        let (mut read, mut ends, mut position) = (Vec::new(), BTreeMap::new(), None);
        for this in runs.iter().chain([&ALL]) {
            let this = &Run { max_batches, ..this.clone() };
            let (of_run, at) = run(this, items, seed, EPOCHS, position);
            let global_batch = this.world + this.extra;
            let steps = EpochPlan::new(items, this.world, global_batch).unwrap().steps();
            let end = max_batches.filter(|most| *most < steps).map_or(items, |most| most * global_batch);
            for (epoch, item) in counted(this, &of_run) {
                ends.entry(epoch).or_insert(end);
                read.push((epoch, item));
            }
            // In the form that a checkpoint holds.
            position = serde_json::from_str(&serde_json::to_string(&at).unwrap()).unwrap();
            let ended: usize = (0..at.epoch()).map(|epoch| ends[&epoch]).sum();
            prop_assert_eq!(ended + at.consumed(), read.len());
        }
        let order = |epoch| match seed {
            Some(seed) => permutation(items, seed, epoch as u64),
            None => (0..items).collect(),
        };
        let items_of = |epoch| order(epoch).into_iter().take(ends[&epoch]).map(move |item| (epoch, item));
        let expected: Vec<_> = (0..EPOCHS).flat_map(items_of).collect();
        prop_assert_eq!(read, expected);
    }
}

#[test]
fn in_the_same_world_the_steps_are_those_of_a_run_without_interruption() {
    let whole = Run { world: 3, extra: 4, ..ALL };
    let (uninterrupted, _) = run(&whole, 40, Some(5), 2, None);
    let steps = uninterrupted[0].len();
    for taken in 1..steps {
        let (first, position) = run(&Run { steps: taken, workers: 2, ..whole }, 40, Some(5), 2, None);
        let (rest, _) = run(&whole, 40, Some(5), 2, Some(position));
        for rank in 0..whole.world {
            assert_eq!([&first[rank][..], &rest[rank]].concat(), uninterrupted[rank], "after {taken} steps");
        }
    }
}

#[test]
fn progress_goes_on_where_it_was() {
    let at = |items_per_step: usize, position: Position| {
        spawn(2, |ddp| {
            let train = loader(&ddp, &Run { world: 2, extra: items_per_step - 2, ..ALL }, 100, None)?;
            train.resume(&position)?;
            let mut epoch = train.iter();
            let begin = (epoch.step(), epoch.len());
            epoch.next().unwrap()?;
            let then = (epoch.step(), epoch.len());
            epoch.by_ref().try_for_each(|batch| batch.map(drop))?;
            assert_eq!(epoch.step(), epoch.len());
            let again = train.iter();
            assert_eq!((again.number(), again.step(), again.len()), (5, 0, train.steps_per_epoch()));
            Ok((begin, then))
        })[0]
    };
    let position = Position::new(4, 40, 100, None);
    assert_eq!(at(4, position.clone()), ((10, 25), (11, 25)), "as if nothing had happened");
    assert_eq!(at(20, position.clone()), ((2, 5), (3, 5)));
    assert_eq!(at(7, position.clone()), ((5, 14), (6, 14)), "9 steps for the 60 that are left");
    spawn(2, |ddp| {
        let train = loader(&ddp, &Run { world: 2, extra: 2, ..ALL }, 100, None)?;
        train.resume(&position)?;
        let loader: &dyn DataLoader<Vec<usize>> = &train;
        let mut batches = loader.iter();
        assert_eq!(batches.progress().items_processed, 40);
        batches.next().unwrap()?;
        assert_eq!((batches.progress().items_processed, batches.progress().items_total), (44, 100));
        Ok(())
    });
}

#[test]
fn a_position_counts_what_was_handed_out() {
    spawn(2, |ddp| {
        let train = loader(&ddp, &Run { world: 2, extra: 2, workers: 2, ..ALL }, 10, None)?;
        let at = || (train.position().epoch(), train.position().consumed());
        assert_eq!(at(), (0, 0));
        let mut epoch = train.iter();
        assert_eq!(at(), (0, 0));
        for expected in [(0, 4), (0, 8), (1, 0)] {
            epoch.next().unwrap()?;
            assert_eq!(at(), expected, "workers are ahead");
        }
        assert!(epoch.next().is_none());
        assert_eq!(at(), (1, 0));
        drop(epoch);

        // An epoch that all ranks leave.
        train.iter().next().unwrap()?;
        assert_eq!((at(), train.epoch()), ((1, 4), 2));
        // On another device it is the same loader.
        let moved = train.to_device(&ddp.device()?);
        let mut epoch = moved.iter();
        assert_eq!(at(), (2, 0));
        epoch.next().unwrap()?;
        assert_eq!(at(), (2, 4));
        train.set_epoch(7);
        assert_eq!(at(), (7, 0));

        // Back to the earlier position, in the same process.
        let back = Position::new(1, 4, 10, None);
        train.resume(&back)?;
        epoch.next().unwrap()?;
        assert_eq!(train.position(), back, "an epoch that was begun before does not count any more");
        assert_eq!(
            train.epochs(0..3).map(|epoch| (epoch.number(), epoch.step())).collect::<Vec<_>>(),
            [(1, 1), (2, 0)]
        );
        Ok(())
    });
}

#[test]
fn what_cannot_go_on_is_an_error_on_every_rank() {
    spawn(2, |ddp| {
        let train = loader(&ddp, &Run { world: 2, ..ALL }, 10, Some(1))?;
        let error = |position: &Position| train.resume(position).unwrap_err().to_string();
        let text = error(&Position::new(0, 4, 11, Some(2)));
        assert!(text.contains("had 11 item(s), this one has 10") && text.contains("seed 2, this one"), "{text}");
        let text = error(&Position::new(0, 2 * ddp.rank(), 10, Some(1)));
        assert!(text.contains("0 of 10 item(s) consumed") && text.contains("on rank 1"), "{text}");
        assert_eq!(train.position(), Position::new(0, 0, 10, Some(1)));
        Ok(ddp.barrier()?)
    });
}

#[test]
fn a_rank_that_leaves_a_resumed_epoch_alone_is_an_error_everywhere() {
    let errors = spawn(3, |ddp| {
        let train = loader(&ddp, &Run { world: 3, ..ALL }, 30, None)?;
        train.resume(&Position::new(2, 12, 30, None))?;
        let read = || -> anyhow::Result<()> {
            for batch in train.iter() {
                batch?;
                ddp.barrier()?;
                if ddp.rank() == 1 {
                    break;
                }
            }
            Ok(ddp.barrier()?)
        };
        Ok(read().unwrap_err().to_string())
    });
    for error in errors {
        assert!(
            error.contains("rank 1") && error.contains("stopped loader 0 (10 steps) at epoch 3, step 5"),
            "{error}"
        );
    }
}

/// 2 items are left for 4 ranks: gradients are those of the two, alone and within an accumulation.
#[test]
fn ranks_without_an_item_count_nothing() {
    for (reduction, accumulation) in [
        (GradientReduction::Mean, 1),
        (GradientReduction::Mean, 2),
        (GradientReduction::Sum, 1),
        (GradientReduction::Sum, 2),
    ] {
        let gradients = spawn(4, |ddp| {
            let device = ddp.device()?.autodiff();
            let config = WrapConfig::new().with_reduction(reduction).with_accumulation(accumulation);
            let model: Linear = LinearConfig::new(1, 1).with_bias(false).init(&device);
            let model = ddp.wrap_with(model, &config)?;
            let train = loader(&ddp, &Run { world: 4, ..ALL }, 10, None)?;
            train.resume(&Position::new(0, 8, 10, None))?;
            let batch = train.iter().next().unwrap()?;
            let x: Vec<f32> = batch.iter().map(|item| *item as f32).collect();
            let x = Tensor::<1>::from_floats(x.as_slice(), &device).unsqueeze_dim::<2>(1);
            let items = train.plan().after(8).share(0, ddp.rank()).len() as f64;
            let mut grads = None;
            for _ in 0..accumulation {
                let y = model.forward(x.clone());
                let loss = if reduction == GradientReduction::Mean { y.mean() } else { y.sum() };
                grads = match accumulation {
                    1 => ddp.backward(&loss, &model)?,
                    // Without the weight, the last batch of an epoch would be a step of its own.
                    _ => ddp.weighted(items).backward(&loss, &model)?,
                };
            }
            Ok(grads.unwrap().get::<2>(model.weight.id).unwrap().into_scalar::<f32>())
        });
        let expected = match reduction {
            GradientReduction::Mean => 8.5,
            GradientReduction::Sum => 17.0 * accumulation as f32,
        };
        assert_eq!(gradients, [expected; 4], "{reduction:?}, accumulation {accumulation}");
    }
}
