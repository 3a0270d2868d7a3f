//! Ranks that build, leave or read a training loader differently.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use burn::nn::LinearConfig;
use burn::tensor::Tensor;

use super::*;
use crate::Result;
use crate::data::{DataError, ShardedLoader};

/// One epoch with a collective per step, like a training; true if it ran to its end.
fn train(
    ddp: &Ddp,
    train: &ShardedLoader<Vec<usize>>,
    epoch: usize,
    leave: impl Fn(usize) -> bool,
) -> anyhow::Result<bool> {
    for epoch in train.epochs([epoch]) {
        for (step, batch) in epoch.enumerate() {
            batch?;
            ddp.barrier()?;
            if leave(step + 1) {
                return Ok(false);
            }
        }
    }
    Ok(true)
}

#[test]
fn a_break_on_one_rank_is_an_error_everywhere() {
    for workers in [0, 2] {
        let begin = Instant::now();
        let errors = spawn(3, |ddp| {
            let loader = ddp.loader(Keep).batch_size(1).num_workers(workers).build(numbers(30))?;
            assert!(train(&ddp, &loader, 0, |_| false)?);
            let left = train(&ddp, &loader, 1, |step| ddp.rank() == 1 && step == 4);
            Ok(left.and_then(|_| Ok(ddp.barrier()?)).unwrap_err().to_string())
        });
        for error in errors {
            assert!(
                error.contains("rank 1") && error.contains("stopped loader 0 (10 steps) at epoch 2, step 4"),
                "{error}"
            );
        }
        assert!(begin.elapsed() < Duration::from_secs(60));
    }
}

#[test]
fn all_ranks_may_leave_at_the_same_step_and_read_on() {
    spawn(3, |ddp| {
        let loader = ddp.loader(Keep).batch_size(1).shuffle(3).num_workers(1).build(numbers(30))?;
        assert!(!train(&ddp, &loader, 0, |step| step == 4)?);
        assert!(!train(&ddp, &loader, 1, |step| step == 10)?); // a break after the last batch
        assert!(train(&ddp, &loader, 2, |_| false)?);
        // The epoch that was left at step 4 is read again, to its end.
        assert!(train(&ddp, &loader, 0, |_| false)?);
        assert!(!train(&ddp, &loader, 0, |step| step == 1)?);
        assert!(train(&ddp, &loader, 0, |_| false)?);
        // An epoch that no rank reads.
        drop(loader.iter());
        Ok(ddp.barrier()?)
    });
}

#[test]
fn leaving_after_the_last_batch_is_as_good_as_reading_to_the_end() {
    spawn(2, |ddp| {
        let loader = ddp.loader(Keep).batch_size(1).build(numbers(6))?;
        train(&ddp, &loader, 0, |step| ddp.rank() == 1 && step == 3)?;
        assert!(train(&ddp, &loader, 1, |_| false)?);
        Ok(ddp.barrier()?)
    });
}

#[test]
fn an_epoch_that_one_rank_drops_unread_is_an_error() {
    let errors = spawn(2, |ddp| {
        let loader = ddp.loader(Keep).batch_size(1).build(numbers(6))?;
        let read = match ddp.rank() {
            0 => train(&ddp, &loader, 0, |_| false).map(|_| ()),
            _ => {
                drop(loader.iter());
                Ok(())
            }
        };
        Ok(read.and_then(|()| Ok(ddp.barrier()?)).unwrap_err().to_string())
    });
    for error in errors {
        assert!(error.contains("stopped loader 0 (3 steps) at epoch 1, step 0"), "{error}");
    }
}

#[test]
fn a_batch_that_one_rank_cannot_load_is_every_ranks_cause() {
    for workers in [0, 2] {
        let begin = Instant::now();
        let errors = spawn(3, |ddp| {
            // Items 12..15 are step 4 of 1 item per rank; item 13 is rank 1's.
            let bad = (ddp.rank() == 1).then_some(13);
            let loader = ddp.loader(Keep).batch_size(1).num_workers(workers).build(Flaky { len: 30, bad })?;
            Ok(train(&ddp, &loader, 0, |_| false).unwrap_err().to_string())
        });
        let cause = "step 5 of 10 in epoch 1 of loader 0 on rank 1 could not be loaded: disk on fire";
        assert_eq!(errors[1], cause);
        for error in [&errors[0], &errors[2]] {
            assert!(error.contains("rank 1") && error.contains(cause), "{error}");
        }
        assert!(begin.elapsed() < Duration::from_secs(60));
    }
}

/// Between the batch and its backward, where the other rank is ahead at once.
#[test]
fn an_error_in_the_loop_of_one_rank_is_every_ranks_cause() {
    for culprit in [0, 1] {
        let heard = Mutex::new(String::new());
        let error = Ddp::spawn(2, |ddp| {
            let device = ddp.device()?.autodiff();
            let model = ddp.wrap(LinearConfig::new(1, 1).init(&device))?;
            let train = ddp.loader(Keep).batch_size(1).build(numbers(20))?;
            let run = || -> anyhow::Result<()> {
                for (step, batch) in train.iter().enumerate() {
                    let x = Tensor::<2>::full([1, 1], batch?[0] as f32, &device);
                    anyhow::ensure!(ddp.rank() != culprit || step != 4, "the loss is not finite");
                    ddp.backward(&model.forward(x).sum(), &model)?;
                }
                Ok(())
            };
            let outcome = run();
            if ddp.rank() == culprit {
                // A program may do this before it returns the error.
                std::thread::sleep(Duration::from_millis(50));
                return outcome;
            }
            *heard.lock().unwrap() = outcome.unwrap_err().to_string();
            Ok(())
        });
        let cause = "the loss is not finite";
        assert_eq!(error.unwrap_err().to_string(), format!("rank {culprit} failed: {cause}"));
        let heard = heard.into_inner().unwrap();
        assert!(heard.contains(&format!("rank {culprit}")) && heard.contains(cause), "{heard}");
    }
}

#[test]
fn ranks_may_agree_to_skip_a_step() {
    let counts = spawn(2, |ddp| {
        // Items 9 and 19 are rank 1's in steps 5 and 10, the last.
        let mut used = 0;
        for bad in [9, 19] {
            let bad = (ddp.rank() == 1).then_some(bad);
            let loader = ddp.loader(Keep).batch_size(1).build(Flaky { len: 20, bad })?;
            for batch in loader.iter() {
                let failed = ddp.sum(if batch.is_err() { 1.0 } else { 0.0 })?;
                used += usize::from(failed == 0.0);
            }
            ddp.barrier()?;
        }
        Ok(used)
    });
    assert_eq!(counts, [18, 18]);
}

#[test]
fn a_panic_in_the_loop_is_told_as_such() {
    let loops = AtomicUsize::new(0);
    let error = Ddp::spawn(2, |ddp| {
        let loader = ddp.loader(Keep).batch_size(1).num_workers(1).build(numbers(20))?;
        train(&ddp, &loader, 0, |step| {
            loops.fetch_add(1, Ordering::SeqCst);
            assert!(ddp.rank() == 0 || step < 3, "no such step");
            false
        })
    });
    let error = error.unwrap_err().to_string();
    assert!(error.contains("rank 1") && error.contains("panicked") && !error.contains("stopped"), "{error}");
    assert!(loops.load(Ordering::SeqCst) <= 6);
}

#[test]
fn a_worker_that_panics_or_hangs_is_named() {
    struct Bad(&'static str);
    impl Batcher<usize, Vec<usize>> for Bad {
        fn batch(&self, items: Vec<usize>, _: &Device) -> Vec<usize> {
            match (self.0, items[0]) {
                ("panics", 4 | 5) => panic!("odd one out"),
                ("hangs", 4 | 5) => std::thread::sleep(Duration::from_secs(6)),
                _ => {}
            }
            items
        }
    }
    let options = WorldOptions { timeout: Duration::from_secs(2), ..WorldOptions::default() };
    let ranks = Ddp::spawn_with(2, options, |ddp| {
        let read = |kind| -> Vec<String> {
            let loader = ddp.loader(Bad(kind)).batch_size(1).num_workers(2).build(numbers(8)).unwrap();
            let epoch = loader.iter();
            epoch.map(|batch| batch.map_or_else(|error| error.to_string(), |batch| format!("{batch:?}"))).collect()
        };
        Ok([read("panics"), read("hangs")])
    });
    for (rank, [panics, hangs]) in ranks.unwrap().into_iter().enumerate() {
        let batch = |step: usize| format!("[{}]", 2 * step + rank);
        let failed =
            |loader: usize, how: &str| format!("step 3 of 4 in epoch 1 of loader {loader} on rank {rank} {how}");
        let panicked = failed(0, "could not be loaded: worker 0 panicked: odd one out");
        assert_eq!(panics, [batch(0), batch(1), panicked, batch(3)]);
        let hung = failed(1, "did not arrive: worker 0 has been loading it for 2 s; is its storage reachable?");
        assert_eq!(hangs, [batch(0), batch(1), hung]);
    }
}

#[test]
fn ranks_that_build_differently_all_hear_what_differs() {
    type Build = fn(&Ddp) -> Result<ShardedLoader<Vec<usize>>>;
    let cases: [(Build, &str); 4] = [
        (
            |ddp| ddp.loader(Keep).build(numbers(10 + ddp.rank() % 2)),
            "the dataset length is 10 on ranks 0, 2 and 11 on rank 1",
        ),
        (
            |ddp| ddp.loader(Keep).batch_size(1 + ddp.rank() / 2).build(numbers(10)),
            "the batch size is 1 per rank on ranks 0, 1 and 2 per rank on rank 2",
        ),
        (
            |ddp| ddp.loader(Keep).shuffle(ddp.rank() as u64 / 2).build(numbers(10)),
            "the order of the items is shuffled with seed 0 on ranks 0, 1 and shuffled with seed 1 on rank 2",
        ),
        (
            |ddp| match ddp.rank() {
                0 => ddp.loader(Keep).build(numbers(10)),
                _ => Err(ddp.eval_loader(Keep).build(numbers(10)).unwrap_err()),
            },
            "the kind of loader is training on rank 0 and evaluation on ranks 1, 2",
        ),
    ];
    for (build, expected) in cases {
        spawn(3, |ddp| {
            let error = build(&ddp).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
            // The job goes on.
            ddp.loader(Keep).build(numbers(10))?;
            Ok(ddp.barrier()?)
        });
    }
}

#[test]
fn what_no_rank_can_read_is_an_error_on_all() {
    spawn(4, |ddp| {
        let error = |batch, items| match ddp.loader(Keep).batch_size(batch).build(numbers(items)) {
            Err(crate::Error::Data(error)) => error,
            other => panic!("{other:?}"),
        };
        assert!(matches!(*error(1, 0), DataError::EmptyDataset));
        assert!(matches!(*error(1, 3), DataError::DatasetTooSmall { items: 3, world: 4 }));
        assert!(matches!(*error(0, 10), DataError::BatchTooSmall { global_batch: 0, world: 4 }));
        let small = ddp.loader(Keep).global_batch_size(3).build(numbers(10)).unwrap_err().to_string();
        assert!(small.contains("use at least 4"), "{small}");
        Ok(ddp.barrier()?)
    });
}

#[test]
fn an_epoch_beyond_counting_is_an_error() {
    spawn(1, |ddp| {
        let loader = ddp.loader(Keep).build(numbers(1))?;
        let last = u32::MAX as usize - 1;
        assert_eq!(loader.epochs([last]).next().unwrap().next().unwrap()?, [0]);
        let mut beyond = loader.epochs([last + 1]).next().unwrap();
        assert!(matches!(beyond.next(), Some(Err(DataError::EpochTooLarge { .. }))));
        assert!(beyond.next().is_none());
        Ok(())
    });
}
