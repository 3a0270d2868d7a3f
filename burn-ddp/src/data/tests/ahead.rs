//! Loading ahead while the loop uses a batch: the default of all loaders except streams.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Instant;

use super::*;
use crate::data::{DataError, Stream, StreamShard, StreamSource};
use crate::telemetry::test_event_capture::Listener;

const DEADLINE: Duration = Duration::from_secs(60);

/// Items that count their reads, as a dataset and as a stream.
#[derive(Clone, Default)]
struct Counted(Arc<AtomicUsize>);

impl Counted {
    fn reads(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }

    fn read(&self, item: usize) -> usize {
        self.0.fetch_add(1, Ordering::SeqCst);
        item
    }

    /// Waits until `reached` is true; false if that takes too long.
    fn comes(&self, reached: impl Fn(&Self) -> bool) -> bool {
        let begin = Instant::now();
        while !reached(self) && begin.elapsed() < DEADLINE {
            thread::yield_now();
        }
        reached(self)
    }
}

impl Dataset<usize> for Counted {
    fn get(&self, index: usize) -> Result<usize, DatasetError> {
        Ok(self.read(index))
    }

    fn len(&self) -> usize {
        100
    }
}

impl StreamSource<usize> for Counted {
    fn open(&self, _: StreamShard) -> Result<Stream<usize>, DatasetError> {
        let items = self.clone();
        Ok(Box::new((0..100).map(move |item| Ok(items.read(item)))))
    }
}

/// A pass of each loader, with `workers` or as many as it has by default: takes one batch of one item, calls `then`
/// with the items, and leaves pass and loader.
fn one_batch_of_each_loader(
    ddp: &Ddp,
    workers: Option<usize>,
    then: impl Fn(&Counted),
) -> anyhow::Result<[Counted; 3]> {
    fn take<O>(mut pass: impl Iterator<Item = Result<O, DataError>>) -> anyhow::Result<impl Iterator> {
        pass.next().transpose()?;
        Ok(pass)
    }
    let all: [Counted; 3] = Default::default();
    let [training, evaluation, stream] = &all;
    let loader = ddp.loader(Keep);
    let loader = workers.into_iter().fold(loader, |loader, workers| loader.num_workers(workers));
    let loader = loader.build(training.clone())?;
    let pass = take(loader.iter())?;
    then(training);
    drop((pass, loader));
    let loader = ddp.eval_loader(Keep);
    let loader = workers.into_iter().fold(loader, |loader, workers| loader.num_workers(workers));
    let loader = loader.build(evaluation.clone())?;
    let pass = take(loader.iter())?;
    then(evaluation);
    drop((pass, loader));
    let loader = ddp.stream(stream.clone(), Keep);
    let loader = workers.into_iter().fold(loader, |loader, workers| loader.num_workers(workers)).build()?;
    let pass = take(loader.epochs(0..1).flatten())?;
    then(stream);
    drop(pass);
    drop(loader);
    Ok(all)
}

#[test]
fn loaders_read_ahead_of_the_loop_within_a_bound() {
    spawn(1, |ddp| {
        // Taken: one. Ahead: two in the worker's channel, one in its hands. A stream looks one step ahead.
        let ahead = |items: &Counted| assert!(items.comes(|items| items.reads() >= 4), "{} reads", items.reads());
        let all = one_batch_of_each_loader(&ddp, Some(1), ahead)?;
        let reads = all.each_ref().map(Counted::reads);
        assert!(reads[0] <= 5 && reads[1] <= 5 && reads[2] <= 6, "{reads:?}");
        // By default all loaders except streams do so.
        let nth = Cell::new(0);
        let of_datasets = |items: &Counted| {
            if nth.replace(nth.get() + 1) < 2 {
                ahead(items);
            }
        };
        let [.., stream] = one_batch_of_each_loader(&ddp, None, of_datasets)?;
        assert_eq!(stream.reads(), 2);
        Ok(())
    });
}

#[test]
fn without_a_worker_a_batch_is_read_when_it_is_asked_for() {
    spawn(1, |ddp| {
        let all = one_batch_of_each_loader(&ddp, Some(0), |_| ())?;
        assert_eq!(all.each_ref().map(Counted::reads), [1, 1, 2]);
        Ok(())
    });
}

#[test]
fn a_pass_and_a_loader_that_are_dropped_early_leave_no_thread() {
    spawn(1, |ddp| {
        for items in one_batch_of_each_loader(&ddp, None, |_| ())? {
            // Workers own the source, so its last clone is dropped when all workers have ended.
            assert!(items.comes(|items| Arc::strong_count(&items.0) == 1), "a worker is still there");
        }
        Ok(())
    });
}

/// A dataset that panics at an item.
struct Panics;

impl Dataset<usize> for Panics {
    fn get(&self, index: usize) -> Result<usize, DatasetError> {
        assert!(index != 1, "the file of item {index} is damaged");
        Ok(index)
    }

    fn len(&self) -> usize {
        3
    }
}

#[test]
fn a_panic_of_the_thread_that_reads_ahead_is_the_error_of_its_batch() {
    spawn(1, |ddp| {
        let train = ddp.loader(Keep).build(Panics)?;
        let read: Vec<_> = train.iter().map(|batch| batch.map_err(|error| error.to_string())).collect();
        let error = "step 2 of 3 in epoch 1 of loader 0 on rank 0 could not be loaded: worker 0 panicked: the file of \
                     item 1 is damaged";
        assert_eq!(read, [Ok(vec![0]), Err(error.to_string()), Ok(vec![2])]);
        Ok(())
    });
}

/// Items that take some time to load.
struct Slow(Duration);

impl Dataset<usize> for Slow {
    fn get(&self, index: usize) -> Result<usize, DatasetError> {
        thread::sleep(self.0);
        Ok(index)
    }

    fn len(&self) -> usize {
        2
    }
}

#[test]
fn a_rank_alone_waits_for_slow_storage_as_long_as_it_takes() {
    let options = WorldOptions { timeout: Duration::from_millis(100), ..WorldOptions::default() };
    let read = Ddp::spawn_with(1, options, |ddp| {
        let listener = Listener::default();
        let slow = || Slow(Duration::from_millis(500));
        let read = tracing::subscriber::with_default(listener.clone(), || {
            let read = ddp.loader(Keep).batch_size(2).build(slow())?.iter().collect::<Result<Vec<_>, _>>()?;
            let again = ddp.eval_loader(Keep).batch_size(2).build(slow())?.iter().collect::<Result<Vec<_>, _>>()?;
            anyhow::Ok((read.concat(), again.concat()))
        })?;
        Ok((read, listener.events("burn_ddp::data").len()))
    });
    assert_eq!(read.unwrap(), [((vec![0, 1], vec![0, 1]), 2)], "a warning for each");
}
