//! Sources that are read from front to back, over ranks and workers.

use burn::nn::{Linear, LinearConfig};
use burn::tensor::Tensor;

use super::*;
use crate::data::{Stream, StreamLoader, StreamShard, StreamSource};

/// Files of consecutive numbers, of these lengths, dealt out in turn; reads of `bad` fail.
struct Files {
    lengths: Vec<usize>,
    bad: Option<usize>,
}

impl Files {
    fn items(&self) -> usize {
        self.lengths.iter().sum()
    }
}

impl StreamSource<usize> for Files {
    fn open(&self, shard: StreamShard) -> Result<Stream<usize>, DatasetError> {
        let mut begin = 0;
        let mut files = Vec::new();
        for (nth, len) in self.lengths.iter().enumerate() {
            if shard.has(nth + shard.epoch) {
                files.extend(begin..begin + len);
            }
            begin += len;
        }
        let bad = self.bad;
        Ok(Box::new(files.into_iter().map(move |item| match bad == Some(item) {
            true => Err(DatasetError::new(std::io::Error::other("disk on fire"))),
            false => Ok(item),
        })))
    }
}

const LENGTHS: [usize; 7] = [9, 1, 5, 2, 12, 3, 4];

fn build(ddp: &Ddp, workers: usize) -> crate::Result<StreamLoader<usize, Vec<usize>>> {
    let files = Files { lengths: LENGTHS.to_vec(), bad: None };
    ddp.stream(files, Keep).batch_size(2).num_workers(workers).build()
}

/// Batches of a rank with their weights.
type Read = Vec<(Vec<usize>, f64)>;

fn read(ddp: &Ddp, loader: &StreamLoader<usize, Vec<usize>>, epoch: usize, steps: usize) -> anyhow::Result<Read> {
    let mut read = Vec::new();
    let mut epoch = loader.epochs([epoch]).next().unwrap();
    while read.len() < steps {
        let Some(batch) = epoch.next().transpose()? else { break };
        // The item that a rank repeats with weight 0 need not be the same.
        let weight = ddp.batch_items();
        read.push((if weight > 0.0 { batch } else { Vec::new() }, weight));
        assert_eq!(batch_of_call(ddp)?.last, epoch.ahead_is_none(), "the last step is known");
    }
    Ok(read)
}

#[test]
fn every_item_counts_once_in_equally_many_steps_and_a_resumed_run_goes_on_with_the_same() {
    for (world, workers) in [(1, 0), (1, 2), (2, 0), (2, 3), (3, 1), (3, 2)] {
        let ranks = spawn(world, |ddp| {
            let mut epochs = Vec::new();
            let whole = build(&ddp, workers)?;
            for epoch in 0..2 {
                epochs.push(read(&ddp, &whole, epoch, usize::MAX)?);
            }
            let steps = epochs[1].len();
            for stop in [1, 2, steps / 2, steps - 1] {
                let first = build(&ddp, workers)?;
                let mut taken = read(&ddp, &first, 1, stop)?;
                let position = serde_json::to_string(&first.position()?)?;
                let rest = build(&ddp, workers)?;
                rest.resume(&serde_json::from_str(&position)?)?;
                assert_eq!(rest.epochs(0..3).next().unwrap().number(), 1);
                rest.resume(&serde_json::from_str(&position)?)?;
                taken.extend(read(&ddp, &rest, 1, usize::MAX)?);
                assert_eq!(taken, epochs[1], "stopped after step {stop}");
            }
            Ok(epochs)
        });
        for epoch in 0..2 {
            let mut items: Vec<usize> = Vec::new();
            for rank in &ranks {
                assert_eq!(rank[epoch].len(), ranks[0][epoch].len(), "equally many steps");
                for (batch, weight) in &rank[epoch] {
                    assert_eq!(*weight, batch.len() as f64);
                    items.extend(batch);
                }
            }
            items.sort();
            let all = Files { lengths: LENGTHS.to_vec(), bad: None }.items();
            assert_eq!(items, (0..all).collect::<Vec<_>>(), "world {world}, workers {workers}");
        }
    }
}

#[test]
fn the_gradient_of_a_step_is_that_of_its_items() {
    let gradients = spawn(2, |ddp| {
        let device = ddp.device()?.autodiff();
        let model: Linear = ddp.wrap(LinearConfig::new(1, 1).with_bias(false).init(&device))?;
        let files = Files { lengths: vec![3, 1], bad: None };
        let mut gradients = Vec::new();
        for batch in ddp.stream(files, Keep).batch_size(2).build()?.epochs(0..1).flatten() {
            let items: Vec<f32> = batch?.into_iter().map(|item| item as f32).collect();
            let x = Tensor::<1>::from_floats(items.as_slice(), &device).unsqueeze_dim::<2>(1);
            let grads = ddp.backward(&model.forward(x).mean(), &model)?.expect("averages");
            gradients.push(grads.get::<2>(model.weight.id).unwrap().into_scalar::<f32>());
        }
        Ok(gradients)
    });
    assert_eq!(gradients, [[(0.0 + 1.0 + 3.0) / 3.0, 2.0]; 2]);
}

#[test]
fn a_batch_that_is_repeated_weighs_nothing_whatever_its_weight_is() {
    let weights = spawn(2, |ddp| {
        let files = Files { lengths: vec![3, 1], bad: None };
        let train = ddp.stream(files, Keep).batch_size(2).weigh(|batch| 10.0 * batch.len() as f64).build()?;
        let weights = |batch: Result<Vec<usize>, _>| batch.map(|_| ddp.batch_items());
        let weights = train.epochs(0..1).flatten().map(weights).collect::<Result<Vec<_>, _>>()?;
        assert_eq!((train.position()?.epoch(), train.position()?.steps()), (1, 0));
        Ok(weights)
    });
    assert_eq!(weights, [[20.0, 10.0], [10.0, 0.0]]);
}

#[test]
fn what_one_rank_cannot_read_ends_the_epoch_on_all_at_the_same_step() {
    let errors = spawn(2, |ddp| {
        let files = Files { lengths: vec![6, 6], bad: Some(9) };
        let train = ddp.stream(files, Keep).batch_size(2).num_workers(1).build()?;
        let mut epoch = train.epochs(0..1).next().unwrap();
        assert!(epoch.next().unwrap().is_ok());
        let error = epoch.next().unwrap().unwrap_err().to_string();
        assert!(epoch.next().is_none());
        Ok((error, ddp.barrier().is_ok()))
    });
    let step = "step 2 of epoch 1 of streaming loader 0";
    assert!(errors[0].0.contains(&format!("{step} on rank 0 does not come: rank 1")), "{errors:?}");
    assert!(errors[1].0.contains(&format!("{step} on rank 1 could not be loaded: disk on fire")), "{errors:?}");
    assert!(errors.iter().all(|(_, usable)| *usable), "the job can go on");
}

#[test]
fn a_rank_without_any_item_or_with_other_settings_is_an_error() {
    let error = Ddp::spawn(2, |ddp| {
        let train = ddp.stream(Files { lengths: vec![6], bad: None }, Keep).build()?;
        for batch in train.epochs(0..1).flatten() {
            batch?;
            ddp.barrier()?;
        }
        Ok(())
    });
    let error = error.unwrap_err().to_string();
    assert!(error.contains("rank 1") && error.contains("fewer parts than ranks and workers"), "{error}");
    spawn(2, |ddp| {
        let error = build(&ddp, 1 + ddp.rank()).err().unwrap().to_string();
        assert!(error.contains("the number of parts of a rank is 1 on rank 0 and 2 on rank 1"), "{error}");
        build(&ddp, ddp.rank())?; // one part each
        let two = build(&ddp, 2)?;
        read(&ddp, &two, 0, 1)?;
        let position = two.position()?;
        let error = build(&ddp, 1)?.resume(&position).unwrap_err().to_string();
        assert!(error.contains("2 rank(s), 2 worker(s), batches of 2, this one has 2 rank(s), 1 worker(s)"), "{error}");
        Ok(())
    });
}

#[test]
fn a_rank_that_leaves_an_epoch_alone_is_an_error_everywhere() {
    let errors = spawn(2, |ddp| {
        let train = build(&ddp, 1)?;
        let leave = || {
            for batch in train.epochs(0..1).flatten() {
                batch?;
                ddp.barrier()?;
                if ddp.is_main() {
                    break;
                }
            }
            anyhow::Ok(ddp.barrier()?)
        };
        Ok(leave().unwrap_err().to_string())
    });
    assert!(
        errors.iter().all(|e| e.contains("stopped streaming loader") && e.contains("epoch 1, step 1")),
        "{errors:?}"
    );
}
