//! Epochs whose items a sampler chooses.

use burn::data::dataloader::DataLoader;

use super::*;
use crate::data::{DataError, Sampler, WeightedSampler};

/// Items `epoch`, `epoch + 3`, … of a dataset, modulo its length.
struct Steps {
    len: usize,
    dataset: usize,
}

impl Sampler for Steps {
    fn len(&self) -> usize {
        self.len
    }

    fn order(&self, epoch: usize) -> Vec<usize> {
        (0..self.len).map(|nth| (epoch + 3 * nth) % self.dataset).collect()
    }
}

#[test]
fn ranks_share_the_order_of_the_sampler_and_go_on_within_it() {
    let read = |world, batch| {
        let read = spawn(world, |ddp| {
            let loader = || {
                let sampler = Steps { len: 14, dataset: 10 };
                ddp.loader(Keep).batch_size(batch).num_workers(1).sampler(sampler).build(numbers(10))
            };
            let train = loader()?;
            assert_eq!(train.num_items(), 14);
            let first = train.iter().collect::<Result<Vec<_>, _>>()?;
            let mut second = train.iter().take(1).collect::<Result<Vec<_>, _>>()?;
            let resumed = loader()?;
            resumed.resume(&train.position())?;
            second.extend(resumed.iter().collect::<Result<Vec<_>, _>>()?);
            let slice = DataLoader::slice(&train, 2, 6).iter().collect::<Result<Vec<_>, _>>()?;
            Ok([first, second, slice])
        });
        let of_all = |epoch: usize| {
            let steps = read[0][epoch].len();
            (0..steps)
                .flat_map(|step| read.iter().flat_map(|rank| rank[epoch][step].clone()).collect::<Vec<_>>())
                .collect()
        };
        [0, 1, 2].map(|epoch| -> Vec<usize> { of_all(epoch) })
    };
    let sampler = Steps { len: 14, dataset: 10 };
    let expected = [sampler.order(0), sampler.order(1), sampler.order(0)[2..6].to_vec()];
    for (world, batch) in [(1, 4), (2, 2), (3, 2)] {
        assert_eq!(read(world, batch), expected, "world {world}");
    }
}

#[test]
fn samplers_that_differ_or_leave_the_dataset_are_errors_on_all_ranks() {
    spawn(2, |ddp| {
        let weighted = |weight| WeightedSampler::new(&[1.0, weight, 1.0], 20, 3);
        let sampler = weighted(1.0 + ddp.rank() as f64)?;
        let error = ddp.loader(Keep).sampler(sampler).build(numbers(3)).unwrap_err().to_string();
        assert!(error.contains("the order of the items is a sampler's, 20 item(s) with digest"), "{error}");

        let train = ddp.loader(Keep).sampler(Steps { len: 8, dataset: 5 }).build(numbers(3))?;
        let mut epoch = train.iter();
        let error = epoch.next().unwrap().unwrap_err();
        assert!(
            matches!(error, DataError::Sampler { .. }) && error.to_string().contains("epoch 1 has item 3"),
            "{error}"
        );
        assert!(epoch.next().is_none());

        let train = ddp.loader(Keep).sampler(weighted(0.0)?).shuffle(1).build(numbers(3))?;
        assert_eq!(train.num_items(), 3, "the last call counts");
        Ok(())
    });
}
