//! The batches of the evaluation loader.

use std::sync::Arc;

use burn::data::dataloader::DataLoader;

use super::*;
use crate::data::permutation;

#[test]
fn every_item_once_in_the_order_of_the_dataset() {
    for (n, batch, world, workers) in
        [(0, 3, 3, 1), (1, 3, 4, 0), (3, 1, 4, 1), (10, 3, 1, 0), (10, 3, 2, 2), (10, 3, 3, 0), (101, 8, 4, 2)]
    {
        let read: Vec<Vec<Vec<usize>>> = spawn(world, |ddp| {
            let test = ddp.eval_loader(Keep).batch_size(batch).num_workers(workers).build(numbers(n))?;
            let read: Vec<Vec<usize>> = test.iter().collect::<Result<_, _>>()?;
            assert_eq!(read.len(), test.len());
            assert_eq!(test.is_empty(), read.is_empty());
            assert_eq!(read.concat(), test.share().collect::<Vec<_>>());
            // Again, and with the same threads.
            assert_eq!(test.iter().collect::<Result<Vec<_>, _>>()?, read);
            Ok(read)
        });
        let what = format!("{n} items in batches of {batch} on {world} ranks with {workers} workers: {read:?}");
        for rank in &read {
            assert!(rank.iter().rev().skip(1).all(|full| full.len() == batch), "{what}");
            assert!(rank.iter().all(|batch| !batch.is_empty()), "{what}");
        }
        assert_eq!(read.concat().concat(), (0..n).collect::<Vec<_>>(), "{what}");
    }
}

#[test]
fn it_leaves_weights_and_peers_alone() {
    spawn(2, |ddp| {
        let train = ddp.loader(Keep).batch_size(3).build(numbers(12))?;
        let test = ddp.eval_loader(Keep).batch_size(2).num_workers(1).build(numbers(50))?;
        for batch in train.iter() {
            let batch = batch?;
            // One rank reads fewer batches than the other.
            assert_eq!(test.iter().take(1 + ddp.rank()).count(), 1 + ddp.rank());
            assert_eq!(batch_of_call(&ddp)?.items, batch.len() as f64);
            ddp.barrier()?;
        }
        Ok(ddp.barrier()?)
    });
}

#[test]
fn it_is_burns_data_loader_too() {
    let read = spawn(3, |ddp| {
        let test = ddp.eval_loader(Keep).batch_size(2).build(numbers(10))?;
        let loader: Arc<dyn DataLoader<Vec<usize>>> = Arc::new(test.clone());
        assert_eq!(loader.num_items(), 10);
        let mut iter = loader.iter();
        let mut progress = vec![iter.progress().items_processed];
        while iter.next().transpose()?.is_some() {
            progress.push(iter.progress().items_processed);
            assert_eq!(iter.progress().items_total, 10);
        }
        assert_eq!(progress, if ddp.rank() == 0 { vec![0, 5, 10] } else { vec![0, 6, 10] });

        let moved = loader.to_device(&ddp.device()?).iter().collect::<Result<Vec<_>, _>>()?;
        assert_eq!(moved, test.iter().collect::<Result<Vec<_>, _>>()?);

        let slice = loader.slice(3, 9).slice(1, 3);
        assert_eq!(slice.num_items(), 2);
        let error = loader.slice(5, 11).iter().next().unwrap().unwrap_err().to_string();
        assert!(error.contains("5..11 is not within the 10 item(s)"), "{error}");
        let of_slice = slice.iter().collect::<Result<Vec<_>, _>>()?.concat();
        // A rank without items has no progress to make.
        assert_eq!(slice.iter().progress().items_processed, if ddp.rank() == 2 { 2 } else { 0 });
        Ok(of_slice)
    });
    assert_eq!(read.concat(), [4, 5]);
}

#[test]
fn a_shuffled_pass_has_every_item_once_in_the_order_of_one_rank() {
    let read = |world| {
        let read = spawn(world, |ddp| {
            let test = ddp.eval_loader(Keep).batch_size(2).shuffle(7).num_workers(1).build(numbers(11))?;
            let first = test.iter().collect::<Result<Vec<_>, _>>()?;
            assert_eq!(test.iter().collect::<Result<Vec<_>, _>>()?, first, "each pass has the same order");
            assert_eq!(first.len(), test.len());
            let slice = DataLoader::slice(&test, 3, 8).iter().collect::<Result<Vec<_>, _>>()?.concat();
            Ok((first.concat(), slice))
        });
        let (whole, slices): (Vec<_>, Vec<_>) = read.into_iter().unzip();
        (whole.concat(), slices.concat())
    };
    let (whole, slice) = read(3);
    assert_eq!((whole.clone(), slice.clone()), read(1));
    assert_eq!(whole, permutation(11, 7, 0));
    let mut sorted = slice.clone();
    sorted.sort();
    assert!(sorted == [3, 4, 5, 6, 7] && slice != sorted, "{slice:?}");
}

#[test]
fn what_cannot_be_loaded_is_an_error_in_its_place() {
    spawn(2, |ddp| {
        let test = ddp.eval_loader(Keep).batch_size(2).build(Flaky { len: 12, bad: Some(8) })?;
        let read: Vec<Result<Vec<usize>, String>> =
            test.iter().map(|batch| batch.map_err(|error| error.to_string())).collect();
        let expected = match ddp.rank() {
            0 => [Ok(vec![0, 1]), Ok(vec![2, 3]), Ok(vec![4, 5])],
            _ => {
                let error = "batch 2 of 3 of evaluation loader 0 on rank 1 could not be loaded: disk on fire";
                [Ok(vec![6, 7]), Err(error.to_string()), Ok(vec![10, 11])]
            }
        };
        assert_eq!(read, expected);
        Ok(())
    });
}

#[test]
fn ranks_that_build_differently_all_hear_what_differs() {
    spawn(2, |ddp| {
        let error = ddp.eval_loader(Keep).build(numbers(5 + ddp.rank())).unwrap_err().to_string();
        assert!(error.contains("evaluation loader 0") && error.contains("5 on rank 0 and 6 on rank 1"), "{error}");
        let error = ddp.eval_loader(Keep).batch_size(0).build(numbers(5)).unwrap_err().to_string();
        assert!(error.contains("the batch size is 0"), "{error}");
        Ok(ddp.barrier()?)
    });
}

/// Seeds of a training loader's batches depend on its number.
#[test]
fn evaluation_loaders_do_not_change_the_number_of_a_training_loader() {
    let error = Ddp::spawn(1, |ddp| {
        for _ in 0..2 {
            ddp.eval_loader(Keep).build(numbers(3))?;
        }
        let train = ddp.loader(Keep).batch_size(1).build(numbers(3))?;
        Ok(format!("{train:?}"))
    });
    assert!(error.unwrap()[0].contains("id: 0"));
}
