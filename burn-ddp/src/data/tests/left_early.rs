//! Epochs that end early: by `max_batches`, or left by the program.

use super::*;
use crate::data::{
    DataError, Epoch, EpochPlan, Position, ShardedLoader, Stream, StreamLoader, StreamShard, StreamSource,
};
use crate::telemetry::test_event_capture::Listener;

/// Batches of one epoch, read by a loop that means to read five.
type Loop = fn(Epoch<Vec<usize>>) -> Vec<Result<Vec<usize>, DataError>>;

const LOOPS: [(&str, Loop); 9] = [
    ("to the end", |epoch| epoch.collect()),
    ("take", |epoch| epoch.take(5).collect()),
    ("enumerate and take", |epoch| epoch.enumerate().take(5).map(|(_, batch)| batch).collect()),
    ("zip with the range first", |epoch| (0..5).zip(epoch).map(|(_, batch)| batch).collect()),
    ("zip with the epoch first", |epoch| epoch.zip(0..5).map(|(batch, _)| batch).collect()),
    ("break after the fifth", |epoch| {
        let mut read = Vec::new();
        for batch in epoch {
            read.push(batch);
            if read.len() == 5 {
                break;
            }
        }
        read
    }),
    ("break at the sixth", |epoch| {
        let mut read = Vec::new();
        for (step, batch) in epoch.enumerate() {
            if step == 5 {
                break;
            }
            read.push(batch);
        }
        read
    }),
    ("five calls", |mut epoch| (0..5).filter_map(|_| epoch.next()).collect()),
    ("by_ref, then drop", |mut epoch| epoch.by_ref().take(5).collect()),
];

fn build(ddp: &Ddp) -> crate::Result<ShardedLoader<Vec<usize>>> {
    ddp.loader(Keep).global_batch_size(6).shuffle(4).max_batches(5).build(numbers(50))
}

/// Items of each step over all ranks.
fn of_steps(ranks: &[Vec<Vec<usize>>]) -> Vec<Vec<usize>> {
    (0..ranks[0].len()).map(|step| ranks.iter().flat_map(|rank| rank[step].clone()).collect()).collect()
}

#[test]
fn max_batches_gives_a_resumed_run_the_steps_of_one_without_interruption() {
    let whole = spawn(2, |ddp| {
        let train = build(&ddp)?;
        let mut read = Vec::new();
        for batch in train.epochs(0..3).flatten() {
            read.push(batch?);
            assert_eq!(batch_of_call(&ddp)?.last, read.len() % 5 == 0, "the fifth completes an accumulation");
        }
        assert_eq!((train.position().epoch(), train.position().consumed()), (3, 0));
        Ok(read)
    });
    let whole = of_steps(&whole);
    assert_eq!(whole.len(), 15);
    for (name, epoch_loop) in LOOPS {
        for stop in [1, 4, 5, 7, 14] {
            let begun = spawn(2, |ddp| {
                let train = build(&ddp)?;
                let read: Vec<_> = train.epochs(0..3).flat_map(epoch_loop).take(stop).collect::<Result<_, _>>()?;
                // `flat_map` holds the batches of an epoch, so read again as far as the position is to be.
                let train = build(&ddp)?;
                train.epochs(0..3).flatten().take(stop).try_for_each(|batch| batch.map(drop))?;
                Ok((read, train.position()))
            });
            let (begun, positions): (Vec<_>, Vec<_>) = begun.into_iter().unzip();
            let rest = spawn(3, |ddp| {
                let train = build(&ddp)?;
                train.resume(&positions[0])?;
                Ok(train.epochs(0..3).flat_map(epoch_loop).collect::<Result<Vec<_>, _>>()?)
            });
            let read = [of_steps(&begun), of_steps(&rest)].concat();
            assert_eq!(read, whole, "{name}, stopped after {stop} steps");
        }
    }
}

#[test]
fn an_interrupted_epoch_of_max_batches_has_its_items_and_later_ones_those_of_the_present_ranks() {
    let loader = |ddp: &Ddp, most| ddp.loader(Keep).batch_size(3).max_batches(most).build(numbers(60));
    let position = spawn(2, |ddp| {
        let train = loader(&ddp, 5)?;
        train.iter().take(2).try_for_each(|batch| batch.map(drop))?;
        Ok(train.position())
    })
    .swap_remove(0);
    let read = |world, most| -> Vec<usize> {
        let ranks = spawn(world, |ddp| {
            let train = loader(&ddp, most)?;
            train.resume(&position)?;
            Ok(train.epochs(0..2).map(|epoch| epoch.flatten().flatten().count()).collect::<Vec<_>>())
        });
        (0..2).map(|epoch| ranks.iter().map(|rank| rank[epoch]).sum()).collect()
    };
    // 5 batches of 3 items on 2 ranks are 30 items, of which 12 were read.
    for world in [1, 2, 3, 4] {
        assert_eq!(read(world, 5), [18, 15 * world], "{world} ranks");
    }
    assert_eq!(read(2, 4), [18, 24], "another setting counts from the next epoch on");
    assert_eq!(read(2, 100), [18, 60]);
    // A position of a loader without it, which has read more than this one would.
    spawn(2, |ddp| {
        let train = loader(&ddp, 2)?;
        train.resume(&Position::new(0, 24, 60, None))?;
        assert_eq!(train.epochs(0..2).map(|epoch| epoch.count()).collect::<Vec<_>>(), [0, 2]);
        // And the other way around.
        let all = ddp.loader(Keep).batch_size(3).build(numbers(60))?;
        all.resume(&position)?;
        assert_eq!(all.iter().flatten().flatten().count(), 24);
        Ok(())
    });
}

#[test]
fn max_batches_is_at_least_one_at_most_an_epoch_and_the_same_on_all_ranks() {
    spawn(2, |ddp| {
        let build = |most: usize| ddp.loader(Keep).batch_size(2).max_batches(most).build(numbers(11));
        for (most, items) in [(1, 4), (2, 8), (3, 11), (100, 11)] {
            assert_eq!((build(most)?.steps_per_epoch(), build(most)?.num_items()), (most.min(3), items));
        }
        assert!(build(0).unwrap_err().to_string().contains("max_batches is 0"));
        let error = build(2 + ddp.rank()).unwrap_err().to_string();
        assert!(error.contains("`max_batches` is 2 on rank 0 and 3 on rank 1"), "{error}");
        let dropping = ddp.loader(Keep).batch_size(2).drop_last().max_batches(3).build(numbers(11))?;
        assert_eq!((dropping.steps_per_epoch(), EpochPlan::new(11, 2, 4)?.steps()), (2, 3));
        Ok(())
    });
}

/// Numbers from the worker's own on, without end.
struct Endless;

impl StreamSource<usize> for Endless {
    fn open(&self, shard: StreamShard) -> Result<Stream<usize>, DatasetError> {
        Ok(Box::new((shard.index..).step_by(shard.of).map(Ok)))
    }
}

fn stream(ddp: &Ddp, max_batches: usize) -> crate::Result<StreamLoader<usize, Vec<usize>>> {
    ddp.stream(Endless, Keep).batch_size(2).num_workers(1).max_batches(max_batches).build()
}

#[test]
fn max_batches_ends_the_epochs_of_a_stream_too() {
    spawn(2, |ddp| {
        let train = stream(&ddp, 5)?;
        let mut whole = Vec::new();
        for batch in train.epochs(0..3).flatten() {
            whole.push(batch?);
            assert_eq!(batch_of_call(&ddp)?.last, whole.len() % 5 == 0);
        }
        assert_eq!(whole.len(), 15);
        for stop in [1, 4, 5, 7, 14] {
            let train = stream(&ddp, 5)?;
            let mut read = train.epochs(0..3).flatten().take(stop).collect::<Result<Vec<_>, _>>()?;
            let position = train.position()?;
            assert_eq!((position.epoch(), position.steps()), (stop / 5, stop % 5));
            let rest = stream(&ddp, 5)?;
            rest.resume(&position)?;
            read.extend(rest.epochs(0..3).flat_map(|epoch| epoch.take(5)).collect::<Result<Vec<_>, _>>()?);
            assert_eq!(read, whole, "stopped after {stop} steps");
        }
        assert!(stream(&ddp, 0).err().unwrap().to_string().contains("max_batches is 0"));
        let error = stream(&ddp, 2 + ddp.rank()).err().unwrap().to_string();
        assert!(error.contains("`max_batches` is 2 on rank 0 and 3 on rank 1"), "{error}");
        Ok(())
    });
}

/// What a run says when it resumes where `begin` has left the loader. `[rank][message]`
fn said(
    begin: impl Fn(&ShardedLoader<Vec<usize>>) -> anyhow::Result<()> + Sync,
    max_batches: Option<usize>,
) -> Vec<Vec<String>> {
    spawn(2, |ddp| {
        let loader = || ddp.loader(Keep).batch_size(2);
        let train = loader().build(numbers(40))?;
        begin(&train)?;
        let position = serde_json::from_str(&serde_json::to_string(&train.position())?)?;
        let resumed = max_batches.into_iter().fold(loader(), |loader, most| loader.max_batches(most));
        let resumed = resumed.build(numbers(40))?;
        let listener = Listener::default();
        tracing::subscriber::with_default(listener.clone(), || resumed.resume(&position))?;
        Ok(listener.events("burn_ddp::data").into_iter().flatten().map(|(_, text)| text).collect())
    })
}

fn read(train: &ShardedLoader<Vec<usize>>, epoch: usize, batches: usize) -> anyhow::Result<()> {
    Ok(train.epochs([epoch]).flatten().take(batches).try_for_each(|batch| batch.map(drop))?)
}

#[test]
fn a_resume_within_an_epoch_says_what_is_left_and_warns_if_the_epoch_before_was_left_early() {
    type Begin = fn(&ShardedLoader<Vec<usize>>) -> anyhow::Result<()>;
    let left: Begin = |train| read(train, 0, 5).and_then(|()| read(train, 1, 2));
    let cases: [(&str, Begin, bool); 6] = [
        ("left, then begun the next", left, true),
        (
            "left, then set the next",
            |train| {
                read(train, 0, 5)?;
                train.set_epoch(1);
                Ok(train.iter().take(2).try_for_each(|batch| batch.map(drop))?)
            },
            true,
        ),
        ("interrupted the first", |train| read(train, 1, 2), false),
        ("read the epoch before to its end", |train| read(train, 0, 10).and_then(|()| read(train, 1, 2)), false),
        (
            "left, but not the one before",
            |train| {
                read(train, 0, 5)?;
                read(train, 0, 10)?;
                read(train, 1, 2)
            },
            false,
        ),
        ("begun again", |train| read(train, 1, 5).and_then(|()| read(train, 1, 2)), false),
    ];
    for (name, begin, warns) in cases {
        let said = said(begin, None);
        assert!(said[1].is_empty(), "{name}: on rank 0 only");
        assert_eq!(said[0].len(), 1 + usize::from(warns), "{name}: {said:?}");
        assert!(said[0][0].ends_with("resumes within epoch 2: 8 of 10 batches are left"), "{name}: {said:?}");
        let warning = said[0].last().unwrap();
        assert_eq!(
            warns,
            warning.contains("after 5 batch(es) of epoch 1") && warning.contains(".max_batches(5)"),
            "{name}"
        );
    }
    let limited = said(left, Some(5));
    assert!(limited[0].len() == 1 && limited[0][0].ends_with("epoch 2: 3 of 5 batches are left"), "{limited:?}");
    assert!(said(|train| read(train, 0, 10), None)[0].is_empty(), "between two epochs");
}

#[test]
fn the_position_of_a_resumed_run_still_knows_that_the_epoch_before_was_left() {
    spawn(2, |ddp| {
        let loader = || ddp.loader(Keep).batch_size(2).build(numbers(40));
        let train = loader()?;
        read(&train, 0, 5)?;
        read(&train, 1, 2)?;
        let resumed = loader()?;
        resumed.resume(&train.position())?;
        assert_eq!(resumed.position(), train.position());
        read(&resumed, 1, 3)?;
        let listener = Listener::default();
        tracing::subscriber::with_default(listener.clone(), || loader()?.resume(&resumed.position()))?;
        assert_eq!(listener.events("burn_ddp::data").len(), if ddp.is_main() { 2 } else { 0 });
        Ok(())
    });
}

#[test]
fn a_stream_warns_too() {
    let said = spawn(2, |ddp| {
        let loader = || ddp.stream(Endless, Keep).build();
        let train = loader()?;
        for (epoch, batches) in [(0, 5), (1, 2)] {
            train.epochs([epoch]).flatten().take(batches).try_for_each(|batch| batch.map(drop))?;
        }
        let position = serde_json::from_str(&serde_json::to_string(&train.position()?)?)?;
        let (listener, resumed, limited) = (Listener::default(), loader()?, stream(&ddp, 5)?);
        tracing::subscriber::with_default(listener.clone(), || resumed.resume(&position))?;
        assert!(limited.resume(&position).is_err(), "another batch size");
        Ok(listener.events("burn_ddp::data").into_iter().flatten().map(|(_, text)| text).collect::<Vec<_>>())
    });
    assert!(said[0][0].ends_with("resumes within epoch 2: 2 batch(es) were read before"), "{said:?}");
    assert!(said[0][1].contains(".max_batches(5)") && said[1].is_empty(), "{said:?}");
}
