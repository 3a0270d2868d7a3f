//! The best checkpoints by a saved value: `keep_best` keeps them and `best` finds them.

use std::fs;

use burn::nn::LinearConfig;
use burn_ddp::checkpoint::{Best, Checkpoint, Checkpoints};
use burn_ddp::prelude::*;

/// Saves checkpoints with these losses, and returns the steps of those that remain, the newest first.
fn kept(ddp: &Ddp, checkpoints: &Checkpoints, losses: &[(u64, Option<f64>)]) -> anyhow::Result<Vec<u64>> {
    for (step, loss) in losses {
        checkpoints.save(*step, |c| loss.iter().try_for_each(|loss| c.value("loss", loss)))?;
    }
    ddp.barrier()?;
    Ok(checkpoints.list()?.iter().map(Checkpoint::step).collect())
}

#[test]
fn the_best_stay_beside_the_newest_and_are_found() {
    let losses = [(1, Some(0.9)), (2, Some(0.3)), (3, None), (4, Some(0.3)), (5, Some(0.8)), (6, Some(0.7))];
    let run = |keep: fn(Checkpoints) -> Checkpoints| {
        let directory = tempfile::tempdir().unwrap();
        let ranks = Ddp::spawn(2, |ddp| {
            let checkpoints = keep(ddp.checkpoints(directory.path())?);
            let steps = kept(&ddp, &checkpoints, &losses)?;
            let best = |best| anyhow::Ok(checkpoints.best("loss", best)?.map(|found| found.step()));
            assert_eq!(checkpoints.best("accuracy", Best::Highest)?.map(|found| found.step()), None);
            Ok((steps, best(Best::Lowest)?, best(Best::Highest)?))
        });
        let ranks = ranks.unwrap();
        assert_eq!(ranks[0], ranks[1]);
        ranks[0].clone()
    };
    assert_eq!(run(|c| c), (vec![6, 5, 4, 3, 2, 1], Some(4), Some(1)), "of equal ones the newer");
    assert_eq!(run(|c| c.keep_best(1, "loss", Best::Lowest)), (vec![6, 4], Some(4), Some(6)));
    assert_eq!(run(|c| c.keep_last(2).keep_best(2, "loss", Best::Lowest)).0, [6, 5, 4, 2]);
    assert_eq!(run(|c| c.keep_last(1).keep_best(1, "loss", Best::Highest)), (vec![6, 1], Some(6), Some(1)));
    assert_eq!(run(|c| c.keep_last(1).keep_best(3, "accuracy", Best::Highest)).0, [6]);
}

#[test]
fn one_that_is_damaged_is_not_the_best_and_a_step_is_found_in_its_last_attempt() {
    let directory = tempfile::tempdir().unwrap();
    let file = |name: &str| directory.path().join(name);
    Ddp::spawn(2, |ddp| {
        let model = LinearConfig::new(2, 2).init(&ddp.device()?);
        let checkpoints = ddp.checkpoints(directory.path())?;
        for (step, loss) in [(1, 0.5), (2, 0.1), (2, 0.2), (3, 0.9)] {
            checkpoints.save(step, |c| {
                c.model(&model)?;
                c.value("loss", &loss)
            })?;
        }
        let loss = |found: Option<Checkpoint>| found.map(|found| found.value::<f64>("loss").unwrap());
        assert_eq!(loss(checkpoints.at(2)?), Some(0.2));
        assert_eq!(loss(checkpoints.at(7)?), None);
        if ddp.is_main() {
            fs::write(file("step-00000002/model.bpk"), "torn")?;
            fs::write(file("step-00000003/manifest.json"), "{}")?;
        }
        ddp.barrier()?;
        assert_eq!(loss(checkpoints.best("loss", Best::Lowest)?), Some(0.2), "0.1 is damaged");
        let damaged = checkpoints.at(3).unwrap_err().to_string();
        assert!(damaged.contains("damaged: step-00000003: manifest.json: checksum mismatch"), "{damaged}");
        let steps: Vec<u64> = checkpoints.list()?.iter().map(Checkpoint::step).collect();
        assert_eq!(steps, [2, 2, 1], "a damaged manifest is no checkpoint");
        let torn = checkpoints.list()?.remove(1).model(LinearConfig::new(2, 2).init(&ddp.device()?));
        assert!(torn.unwrap_err().to_string().contains("has changed"));

        let differ = checkpoints.at(ddp.rank() as u64).unwrap_err().to_string();
        assert!(differ.contains("the step of the checkpoint is 0 on rank 0 and 1 on rank 1"), "{differ}");
        Ok(())
    })
    .unwrap();
}
