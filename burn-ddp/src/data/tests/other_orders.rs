//! Positions that are resumed by a loader of another order.

use super::*;
use crate::Result;
use crate::data::{LoaderBuilder, Position, Sampler, ShardedLoader, WeightedSampler, permutation};

type Build = fn(LoaderBuilder<usize, Vec<usize>>) -> Result<ShardedLoader<Vec<usize>>>;

/// In the first epoch the dataset's order, then shuffled.
struct Curriculum {
    seed: u64,
}

impl Sampler for Curriculum {
    fn len(&self) -> usize {
        20
    }

    fn order(&self, epoch: usize) -> Vec<usize> {
        if epoch == 0 { (0..20).collect() } else { permutation(20, self.seed, epoch as u64) }
    }
}

/// Draws 20 times of 20 weights, of which the last are `last`.
fn weighted(last: f64, samples: usize, seed: u64) -> WeightedSampler {
    let weights: Vec<f64> = (0..20).map(|item| if item < 18 { 1.0 } else { last }).collect();
    WeightedSampler::new(&weights, samples, seed).unwrap()
}

const ORDERS: [(&str, Build); 11] = [
    ("the dataset's", |loader| loader.build(numbers(20))),
    ("the dataset's, 21 items", |loader| loader.build(numbers(21))),
    ("shuffled", |loader| loader.shuffle(1).build(numbers(20))),
    ("shuffled, another seed", |loader| loader.shuffle(2).build(numbers(20))),
    ("shuffled, 21 items", |loader| loader.shuffle(1).build(numbers(21))),
    ("weighted", |loader| loader.sampler(weighted(1.0, 20, 1)).build(numbers(20))),
    ("weighted, another seed", |loader| loader.sampler(weighted(1.0, 20, 2)).build(numbers(20))),
    ("weighted, other weights", |loader| loader.sampler(weighted(9.0, 20, 1)).build(numbers(20))),
    ("weighted, 21 samples", |loader| loader.sampler(weighted(1.0, 21, 1)).build(numbers(20))),
    ("a program's sampler", |loader| loader.sampler(Curriculum { seed: 1 }).build(numbers(20))),
    ("a program's sampler, another dataset", |loader| loader.sampler(Curriculum { seed: 1 }).build(numbers(30))),
];

/// Positions at the beginning, within the first epoch, after it, and within the second.
fn positions(build: Build) -> Vec<Position> {
    let of_ranks = spawn(2, |ddp| {
        let train = build(ddp.loader(Keep).batch_size(2))?;
        let mut positions = vec![train.position()];
        for epoch in train.epochs(0..2) {
            for (step, batch) in epoch.enumerate() {
                batch?;
                if step == 1 {
                    positions.push(train.position());
                }
            }
            positions.push(train.position());
        }
        Ok(positions)
    });
    assert_eq!(of_ranks[0], of_ranks[1]);
    // In the form that a checkpoint holds.
    let text = serde_json::to_string(&of_ranks[0]).unwrap();
    assert_eq!(serde_json::from_str::<Vec<Position>>(&text).unwrap(), of_ranks[0]);
    of_ranks[0].clone()
}

/// The resuming run has another number of ranks, batch size and number of workers, as it may.
#[test]
fn a_position_resumes_in_its_own_order_only() {
    let saved = ORDERS.map(|(_, build)| positions(build));
    spawn(3, |ddp| {
        for (name, build) in ORDERS {
            let train = build(ddp.loader(Keep).batch_size(1).num_workers(2))?;
            for ((of, _), positions) in ORDERS.iter().zip(&saved) {
                for position in positions {
                    let resumed = train.resume(position).map_err(|error| error.to_string());
                    match resumed {
                        Ok(()) => assert_eq!((name, train.position()), (*of, position.clone())),
                        Err(error) => assert!(
                            name != *of
                                && ["its order was", "its order had", "its dataset had"]
                                    .iter()
                                    .any(|what| error.contains(what)),
                            "{position} of {of} in {name}: {error}"
                        ),
                    }
                }
            }
        }
        Ok(())
    });
}

#[test]
fn a_sampler_that_draws_only_later_epochs_otherwise_is_refused_from_there_on() {
    let saved = positions(|loader| loader.sampler(Curriculum { seed: 1 }).build(numbers(20)));
    spawn(2, |ddp| {
        let other = ddp.loader(Keep).sampler(Curriculum { seed: 2 }).build(numbers(20))?;
        let resumes: Vec<bool> = saved.iter().map(|position| other.resume(position).is_ok()).collect();
        assert_eq!(resumes, [true, true, true, false, false], "{saved:?}");
        // An order of this rank alone.
        let apart = ddp.loader(Keep).sampler(Curriculum { seed: 1 + ddp.rank() as u64 }).build(numbers(20))?;
        apart.resume(&saved[2])?;
        let error = apart.resume(&saved[3]).unwrap_err().to_string();
        assert!(error.contains("loader 1 (resumed) differently: the order of the items is a sampler's"), "{error}");
        Ok(ddp.barrier()?)
    });
}
