//! Epochs whose items a sampler chooses.

use burn::data::dataloader::DataLoader;

use super::*;
use crate::data::{Sampler, WeightedSampler};

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
fn samplers_that_differ_between_ranks_are_an_error_and_the_last_order_counts() {
    spawn(2, |ddp| {
        let weighted = |weight| WeightedSampler::new(&[1.0, weight, 1.0], 20, 3);
        let sampler = weighted(1.0 + ddp.rank() as f64)?;
        let error = ddp.loader(Keep).sampler(sampler).build(numbers(3)).unwrap_err().to_string();
        assert!(error.contains("the order of the items is a sampler's, 20 item(s) with digest"), "{error}");

        let train = ddp.loader(Keep).sampler(weighted(0.0)?).shuffle(1).build(numbers(3))?;
        assert_eq!(train.num_items(), 3, "the last call counts");
        Ok(())
    });
}

/// A sampler that says one thing and draws another.
struct Says {
    len: usize,
    dataset_len: Option<usize>,
    draws: fn(usize) -> Vec<usize>,
}

impl Sampler for Says {
    fn len(&self) -> usize {
        self.len
    }

    fn dataset_len(&self) -> Option<usize> {
        self.dataset_len
    }

    fn order(&self, epoch: usize) -> Vec<usize> {
        (self.draws)(epoch)
    }
}

#[test]
fn samplers_that_do_not_fit_the_dataset_are_errors_on_all_ranks() {
    let says = |len, dataset_len, draws| Says { len, dataset_len, draws };
    spawn(2, |ddp| {
        let build = |sampler: Says| ddp.loader(Keep).sampler(sampler).build(numbers(3));
        let weighted = |weights: usize| {
            let sampler = WeightedSampler::new(&vec![1.0; weights], 4, 0).unwrap();
            ddp.loader(Keep).sampler(sampler).build(numbers(3))
        };
        let made_for = |items| format!("made for {items} item(s) but the dataset has 3");
        for (built, expected) in [
            (weighted(2), made_for(2)),
            (weighted(4), made_for(4)),
            (build(says(2, Some(2), |_| vec![0, 1])), made_for(2)),
            (build(says(2, None, |_| vec![0, 3])), "epoch 1 has item 3 of a dataset of 3".to_string()),
            (build(says(2, None, |_| vec![0])), "its `len` is 2, and epoch 1 has 1 item(s)".to_string()),
            (build(says(0, None, |_| vec![])), "its `len` is 0".to_string()),
        ] {
            let error = built.unwrap_err().to_string();
            assert!(error.contains(&expected), "{error}");
        }
        weighted(3)?;
        // An epoch that differs from the first is noticed when it begins.
        let train = build(says(2, None, |epoch| vec![0, 2 + epoch]))?;
        assert_eq!(train.iter().count(), 1);
        let mut second = train.iter();
        let error = second.next().unwrap().unwrap_err().to_string();
        assert!(error.contains("epoch 2 has item 3 of a dataset of 3") && second.next().is_none(), "{error}");
        Ok(())
    });
}

#[test]
fn samplers_that_differ_in_a_later_epoch_are_an_error_on_every_rank() {
    let errors = spawn(2, |ddp| {
        // The first epochs are alike.
        let draws: fn(usize) -> Vec<usize> = if ddp.rank() == 0 { |epoch| vec![0, epoch % 2] } else { |_| vec![0, 0] };
        let sampler = Says { len: 2, dataset_len: None, draws };
        let train = ddp.loader(Keep).sampler(sampler).build(numbers(2))?;
        assert_eq!(train.iter().count(), 1);
        let error = train.iter().next().expect("an error").unwrap_err().to_string();
        // The group is still of use: the third epochs are alike again.
        assert_eq!(train.iter().filter(Result::is_ok).count(), 1);
        Ok(error)
    });
    assert_eq!(errors[0], errors[1]);
    assert!(errors[0].contains("the order of the items") && errors[0].contains("in epoch 2"), "{errors:?}");
}
