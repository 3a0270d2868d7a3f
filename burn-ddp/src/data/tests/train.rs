//! The batches of the training loader.

use std::sync::Arc;

use burn::data::dataloader::DataLoader;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::Tensor;

use super::*;
use crate::data::{EpochPlan, permutation};
use crate::telemetry::test_event_capture::Listener;

/// Batches of an epoch: `[rank][step][item]`.
type Read = Vec<Vec<Vec<usize>>>;

fn steps(read: &Read) -> Vec<Vec<usize>> {
    (0..read[0].len()).map(|step| read.iter().flat_map(|rank| rank[step].clone()).collect()).collect()
}

#[test]
fn every_item_once_in_equally_many_steps_on_every_rank() {
    for (n, batch, world, workers) in
        [(4, 3, 4, 0), (25, 3, 1, 0), (25, 3, 2, 2), (25, 3, 3, 0), (25, 3, 4, 1), (24, 3, 4, 3), (100, 7, 3, 0)]
    {
        let read: Read = spawn(world, |ddp| {
            let train = ddp.loader(Keep).batch_size(batch).shuffle(42).num_workers(workers).build(numbers(n))?;
            let epoch = train.epochs(3..4).next().unwrap();
            assert_eq!((epoch.number(), epoch.len()), (3, train.steps_per_epoch()));
            Ok(epoch.collect::<Result<_, _>>()?)
        });
        let what = format!("{n} items in batches of {batch} on {world} ranks with {workers} workers: {read:?}");
        assert!(read.iter().all(|rank| rank.len() == read[0].len()), "{what}");
        for step in 0..read[0].len() {
            let sizes = read.iter().map(|rank| rank[step].len());
            assert!(sizes.clone().min().unwrap() >= 1, "{what}");
            assert!(sizes.clone().max().unwrap() - sizes.min().unwrap() <= 1, "{what}");
        }
        assert_eq!(steps(&read).concat(), permutation(n, 42, 3), "{what}");
    }
}

#[test]
fn steps_hold_the_same_items_at_any_world_size() {
    let at = |world| -> Vec<Vec<usize>> {
        let read = spawn(world, |ddp| {
            let train = ddp.loader(Keep).global_batch_size(10).shuffle(7).build(numbers(47))?;
            assert_eq!(train.items_per_step(), 10);
            Ok(train.iter().collect::<Result<_, _>>()?)
        });
        steps(&read)
    };
    let alone = at(1);
    assert_eq!(alone.len(), 5);
    for world in 2..=4 {
        assert_eq!(at(world), alone, "world of {world}");
    }
}

/// Steps and items per rank as torch's `DataLoader(dataset, batch, sampler=DistributedSampler(…, drop_last=True),
/// drop_last=True)` has them.
#[test]
fn without_the_last_step_batches_are_those_of_torch() {
    for line in include_str!("torch_drop_last_steps.txt").lines().filter(|line| !line.starts_with('#')) {
        let numbers: Vec<usize> = line.split(' ').map(|number| number.parse().unwrap()).collect();
        let [items, world, batch, steps] = numbers[..] else { panic!("{line}") };
        match EpochPlan::new(items, world, world * batch).and_then(EpochPlan::drop_last) {
            Ok(plan) => {
                let shares = |rank| (0..plan.steps()).map(|step| plan.share(step, rank).len()).collect::<Vec<_>>();
                (0..world).for_each(|rank| assert_eq!(shares(rank), vec![batch; steps], "{line}"));
            }
            Err(_) => assert_eq!(steps, 0, "{line}"),
        }
    }
}

#[test]
fn without_the_last_step_each_epoch_leaves_out_other_items_and_goes_on_with_the_next() {
    let read: Vec<Vec<Vec<usize>>> = spawn(2, |ddp| {
        let train = ddp.loader(Keep).batch_size(2).shuffle(3).drop_last().build(numbers(11))?;
        assert_eq!(train.steps_per_epoch(), 2);
        let mut epochs = Vec::new();
        for epoch in train.epochs(0..3) {
            let number = epoch.number();
            let batches = epoch.collect::<Result<Vec<_>, _>>()?;
            assert!(batches.iter().all(|batch| batch.len() == 2), "{batches:?}");
            assert_eq!((train.position().epoch(), train.position().consumed()), (number + 1, 0));
            epochs.push(batches.concat());
        }
        let slice = DataLoader::slice(&train, 0, 6).iter().collect::<Result<Vec<_>, _>>()?.concat();
        assert_eq!(slice.len(), 2);
        let error = ddp.loader(Keep).batch_size(2).drop_last().build(numbers(3)).unwrap_err().to_string();
        assert!(error.contains("3 item(s), but a step takes 4 over all ranks"), "{error}");
        Ok(epochs)
    });
    for (epoch, (zero, one)) in read[0].iter().zip(&read[1]).enumerate() {
        assert_eq!([&zero[..2], &one[..2]].concat(), permutation(11, 3, epoch as u64)[..4]);
    }
}

/// After the last full step in a run with a larger batch, a smaller one has no step left either.
#[test]
fn a_resumed_epoch_has_no_items_that_were_dropped() {
    spawn(2, |ddp| {
        let train = |batch| ddp.loader(Keep).batch_size(batch).drop_last().build(numbers(11));
        let before = train(4)?;
        for batch in before.iter() {
            batch?;
        }
        let after = train(1)?;
        after.resume(&before.position())?;
        let numbers: Vec<_> = after.epochs(0..2).map(|epoch| (epoch.number(), epoch.len(), epoch.count())).collect();
        assert_eq!(numbers, [(1, 5, 5)]);
        Ok(())
    });
}

#[test]
fn every_epoch_has_an_order_of_its_own() {
    spawn(2, |ddp| {
        let train = ddp.loader(Keep).batch_size(5).shuffle(1).build(numbers(40))?;
        let mut orders = Vec::new();
        for (expected, epoch) in train.epochs(0..3).enumerate() {
            assert_eq!(epoch.number(), expected);
            orders.push(epoch.collect::<Result<Vec<_>, _>>()?.concat());
        }
        assert!(orders[0] != orders[1] && orders[1] != orders[2] && orders[0] != orders[2]);

        // Resume: another process that says the epoch reads the same.
        let resumed = ddp.loader(Keep).batch_size(5).shuffle(1).build(numbers(40))?;
        assert_eq!(resumed.epoch(), 0);
        resumed.set_epoch(1);
        assert_eq!(resumed.epoch(), 1);
        for order in &orders[1..] {
            assert_eq!(&resumed.iter().collect::<Result<Vec<_>, _>>()?.concat(), order);
        }
        assert_eq!(resumed.epoch(), 3);

        // Clones are the same loader.
        assert_eq!(train.clone().iter().number(), 3);
        assert_eq!(train.epoch(), 4);
        Ok(())
    });
}

#[test]
fn without_shuffling_the_order_is_the_datasets() {
    let read: Read = spawn(3, |ddp| {
        let train = ddp.loader(Keep).batch_size(2).build(numbers(10))?;
        let first = train.iter().collect::<Result<Vec<_>, _>>()?;
        assert_eq!(train.iter().collect::<Result<Vec<_>, _>>()?, first);
        Ok(first)
    });
    assert_eq!(read, [[vec![0, 1], vec![6, 7]], [vec![2, 3], vec![8]], [vec![4, 5], vec![9]]]);
}

#[test]
fn each_batch_sets_the_weight() {
    spawn(2, |ddp| {
        let weight = || batch_of_call(&ddp).map(|batch| batch.items);
        let train = ddp.loader(Keep).batch_size(4).build(numbers(11))?;
        let other = ddp.loader(Keep).batch_size(1).build(numbers(2))?;
        let mut epoch = train.iter();
        assert_eq!((ddp.batch_items(), epoch.batch_items()), (1.0, 0));
        while let Some(batch) = epoch.next().transpose()? {
            assert_eq!((ddp.batch_items(), epoch.batch_items()), (batch.len() as f64, batch.len()));
            assert_eq!(weight()?, batch.len() as f64);
        }
        drop(epoch);
        let last = train.plan().share(1, ddp.rank()).len() as f64;
        assert_eq!([ddp.batch_items(), weight()?], [last; 2], "the last batch, until there is another");
        // An epoch that was left or has ended does not compete with the next loader's.
        for loader in [&train, &other] {
            let batch = loader.iter().next().unwrap()?;
            assert_eq!(weight()?, batch.len() as f64);
        }
        let (mut first, mut second) = (train.iter(), other.iter());
        let _ = (first.next().unwrap()?, second.next().unwrap()?);
        assert!(weight().unwrap_err().to_string().contains("since the last backward"));
        Ok(())
    });
}

/// Warnings of the loader on the ranks of a world that trains for two epochs, with and without `wrap`.
fn warnings(world: usize, wrap: bool) -> Vec<usize> {
    spawn(world, |ddp| {
        let listener = Listener::default();
        tracing::subscriber::with_default(listener.clone(), || {
            let device = ddp.device()?.autodiff();
            let mut model: Linear = LinearConfig::new(1, 1).init(&device);
            if wrap {
                model = ddp.wrap(model)?;
            }
            let train = ddp.loader(Keep).batch_size(1).build(numbers(5 * world))?;
            for batch in train.epochs(0..2).flatten() {
                let x = Tensor::<2>::from_floats([[batch?[0] as f32]], &device);
                let loss = model.forward(x).sum();
                if wrap {
                    ddp.backward(&loss, &model)?;
                } else {
                    loss.backward();
                }
            }
            anyhow::Ok(())
        })?;
        Ok(listener.events("burn_ddp::data").len())
    })
}

#[test]
fn a_forgotten_wrap_is_a_warning() {
    assert_eq!(warnings(2, false), [1, 0], "once, on rank 0");
    assert_eq!(warnings(2, true), [0, 0]);
    assert_eq!(warnings(1, false), [0], "alone there is nothing to average");
}

/// Steps of 5 items over 3 or 4 ranks are uneven, and the last step (17 = 3 · 5 + 2) has 7.
#[test]
fn gradients_are_those_of_all_items_of_the_step() {
    let train = |world| {
        let gradients = spawn(world, |ddp| {
            let device = ddp.device()?.autodiff();
            let model: Linear = ddp.wrap(LinearConfig::new(1, 1).with_bias(false).init(&device))?;
            let train = ddp.loader(Keep).global_batch_size(5).shuffle(11).build(numbers(17))?;
            let mut gradients = Vec::new();
            for batch in train.iter() {
                let items: Vec<f32> = batch?.into_iter().map(|item| item as f32).collect();
                let x = Tensor::<1>::from_floats(items.as_slice(), &device).unsqueeze_dim::<2>(1);
                // The gradient of the mean is the mean of the items.
                let grads = ddp.backward(&model.forward(x).mean(), &model)?.expect("averages");
                gradients.push(grads.get::<2>(model.weight.id).unwrap().into_scalar::<f32>());
            }
            Ok(gradients)
        });
        assert!(gradients.iter().all(|rank| *rank == gradients[0]), "{gradients:?}");
        gradients[0].clone()
    };
    let order = permutation(17, 11, 0);
    let mean = |items: &[usize]| items.iter().sum::<usize>() as f32 / items.len() as f32;
    let expected = [mean(&order[..5]), mean(&order[5..10]), mean(&order[10..])];
    for world in [3, 4] {
        let gradients = train(world);
        assert_eq!(gradients.len(), 3);
        for (gradient, expected) in gradients.iter().zip(expected) {
            assert!((gradient - expected).abs() < 1e-5, "{gradient} is not {expected} on {world} ranks");
        }
    }
}

#[test]
fn it_is_burns_data_loader_too() {
    spawn(2, |ddp| {
        let train = ddp.loader(Keep).batch_size(2).shuffle(5).num_workers(1).build(numbers(10))?;
        let loader: Arc<dyn DataLoader<Vec<usize>>> = Arc::new(train.clone());
        assert_eq!(loader.num_items(), 10);
        let mut iter = loader.iter();
        let mut progress = vec![iter.progress().items_processed];
        let mut first = Vec::new();
        while let Some(batch) = iter.next() {
            first.extend(batch?);
            progress.push(iter.progress().items_processed);
            assert_eq!(iter.progress().items_total, 10);
        }
        assert_eq!(progress, [0, 4, 8, 10]);
        drop(iter);
        let again = loader.iter().collect::<Result<Vec<_>, _>>()?.concat();
        assert_ne!(again, first);

        // On another device it counts the same epochs.
        let moved = loader.to_device(&ddp.device()?);
        let third = moved.iter().collect::<Result<Vec<_>, _>>()?.concat();
        assert_eq!(train.epoch(), 3);
        let order = permutation(10, 5, 2);
        let rank = ddp.rank();
        let plan = *train.plan();
        let own: Vec<usize> = (0..plan.steps()).flat_map(|step| plan.share(step, rank)).map(|at| order[at]).collect();
        assert_eq!(third, own);
        Ok(())
    });
}

#[test]
fn slices_are_loaders_of_their_own() {
    let read = spawn(2, |ddp| {
        let train = ddp.loader(Keep).batch_size(1).shuffle(5).build(numbers(20))?;
        let slice = train.slice(5, 15);
        assert_eq!(slice.num_items(), 10);
        let part = slice.slice(2, 6);
        assert_eq!(part.num_items(), 4);
        let of_slice = slice.iter().collect::<Result<Vec<_>, _>>()?.concat();
        let of_part = part.iter().collect::<Result<Vec<_>, _>>()?.concat();
        assert_eq!(train.epoch(), 0);

        for (start, end, expected) in [(15, 21, "15..21"), (7, 3, "7..3"), (3, 3, "empty"), (3, 4, "1 item(s)")] {
            let bad = train.slice(start, end);
            let mut batches = bad.iter();
            let error = batches.next().unwrap().unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
            assert!(batches.next().is_none());
        }
        Ok((of_slice, of_part))
    });
    let (slices, parts): (Vec<_>, Vec<_>) = read.into_iter().unzip();
    for (read, expected) in [(slices, 5..15), (parts, 7..11)] {
        let mut union = read.concat();
        union.sort_unstable();
        assert_eq!(union, expected.collect::<Vec<_>>());
    }
}

#[test]
fn batches_are_made_on_the_device_that_was_set() {
    /// Devices are equal with and without autodiff, so compare their texts.
    struct Where;
    impl Batcher<usize, String> for Where {
        fn batch(&self, _: Vec<usize>, device: &Device) -> String {
            format!("{device:?}")
        }
    }
    spawn(1, |ddp| {
        let device = ddp.device()?;
        let autodiff = device.clone().autodiff();
        let (plain, tracked) = (format!("{device:?}"), format!("{autodiff:?}"));
        assert_ne!(plain, tracked);
        for workers in [0, 1] {
            let default = ddp.loader(Where).num_workers(workers).build(numbers(1))?;
            assert_eq!(default.iter().next().unwrap()?, tracked);
            let moved = default.to_device(&device);
            assert_eq!(moved.iter().next().unwrap()?, plain);
            let set = ddp.loader(Where).num_workers(workers).set_device(device.clone()).build(numbers(1))?;
            assert_eq!(set.iter().next().unwrap()?, plain);
            let test = ddp.eval_loader(Where).num_workers(workers).set_device(autodiff.clone()).build(numbers(1))?;
            assert_eq!(test.iter().next().unwrap()?, tracked);
        }
        Ok(())
    });
}
