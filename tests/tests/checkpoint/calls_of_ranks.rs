//! An error of one rank, in its call or in its background thread, is an error on every rank.

use std::fs;

use burn::optim::AdamConfig;
use burn_ddp::prelude::*;
use burn_ddp_tests::Normed;

use super::step;

#[test]
fn calls_that_differ_between_ranks_are_errors_and_no_hang() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let alone = Ddp::spawn(2, |ddp| {
        let checkpoints = ddp.checkpoints(path)?;
        let result = if ddp.is_main() { checkpoints.save(1, |_| Ok(())) } else { ddp.barrier() };
        Ok(result.unwrap_err().to_string())
    })
    .unwrap();
    assert!(alone.iter().all(|e| e.contains("tests/checkpoint/calls_of_ranks.rs")), "{alone:?}");
    let errors = Ddp::spawn(2, |ddp| {
        let checkpoints = ddp.checkpoints(path)?;
        let rank = ddp.rank() as u64;
        let steps = checkpoints.save(5 + rank, |_| Ok(())).unwrap_err().to_string();
        let refused = |_: &mut burn_ddp::checkpoint::CheckpointWriter<'_>| match rank {
            1 => Err(burn_ddp::Error::Invalid { rank: None, reason: "no config".into() }),
            _ => Ok(()),
        };
        let filled = checkpoints.save(5, refused).unwrap_err().to_string();
        assert_eq!(checkpoints.latest()?.map(|found| found.step()), None);
        Ok((steps, filled))
    })
    .unwrap();
    for (steps, filled) in errors {
        assert!(steps.contains("rank 0 step 5, rank 1 step 6"), "{steps}");
        assert!(filled.contains("no config"), "{filled}");
    }
}

#[test]
fn a_rank_that_fails_before_the_running_statistics_are_brought_together_is_an_error_on_every_rank() {
    let directory = tempfile::tempdir().unwrap();
    for failing in [0, 1] {
        let errors = Ddp::spawn(2, |ddp| {
            let model = ddp.wrap(Normed::new(&ddp.device()?.autodiff()))?;
            let checkpoints = ddp.checkpoints(directory.path())?;
            let refused = checkpoints.save(1 + failing as u64, |c| {
                c.named("first").model(&model)?;
                if ddp.rank() == failing {
                    return Err(burn_ddp::Error::Invalid { rank: None, reason: "no config".into() });
                }
                // Later calls fail too, if the program ignores the error.
                assert!(c.named("second").model(&model).unwrap_err().to_string().contains("no config"));
                assert!(c.named("third").model(&model).is_err());
                Ok(())
            });
            checkpoints.save(2 + failing as u64, |c| c.model(&model))?;
            Ok(refused.unwrap_err().to_string())
        });
        let errors = errors.unwrap();
        assert!(errors.iter().all(|error| error.contains("no config")), "{errors:?}");
    }
}

#[test]
fn an_asynchronous_checkpoint_holds_what_was_there_at_the_call_and_its_errors_reach_every_rank() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("checkpoints");
    let errors = Ddp::spawn(2, |ddp| {
        let device = ddp.device()?.autodiff();
        let (mut optim, mut model) = (AdamConfig::new().init(), ddp.wrap(Normed::new(&device))?);
        let checkpoints = ddp.checkpoints(&path)?.asynchronous(true);
        model = step(&ddp, &mut optim, model, 0)?;
        checkpoints.save(1, |c| c.model(&model))?;
        let hash = param_hash(&model)?;
        model = step(&ddp, &mut optim, model, 1)?;
        let found = checkpoints.latest()?.unwrap();
        assert_eq!(param_hash(&found.model(Normed::new(&device))?)?, hash);
        checkpoints.save(2, |c| c.model(&model))?;
        checkpoints.wait()?;
        assert_eq!(checkpoints.latest()?.unwrap().step(), 2);
        ddp.barrier()?;
        if ddp.is_main() {
            fs::remove_dir_all(&path)?;
        }
        ddp.barrier()?;
        checkpoints.save(3, |c| c.model(&model))?;
        let next = checkpoints.save(4, |c| c.model(&model)).unwrap_err().to_string();
        checkpoints.save(5, |c| c.model(&model))?;
        drop(checkpoints);
        Ok((next, ddp.finish().unwrap_err().to_string()))
    })
    .unwrap();
    for (next, finish) in errors {
        assert!(next.contains("rank 0 cannot write the checkpoint of step 3"), "{next}");
        assert!(finish.contains("rank 0 cannot write the checkpoint of step 5"), "{finish}");
    }
}
