//! The wish of one rank to stop, where it meets other features: all ranks learn of it in the same call.

use burn::nn::{Linear, LinearConfig};
use burn::optim::{GradientsParams, SgdConfig};
use burn::prelude::*;
use burn_ddp::DistributedOptimizer;
use burn_ddp::prelude::*;

fn linear(device: &Device) -> Linear {
    LinearConfig::new(4, 4).init(device)
}

fn loss(model: &Linear, device: &Device) -> Tensor<1> {
    model.forward(Tensor::<2>::ones([2, 4], device)).powf_scalar(2.0).mean()
}

/// Runs `program` on `world` ranks; it returns, call by call, whether the ranks have agreed to stop. Rank 1 wishes it
/// from the start.
#[track_caller]
fn calls(world: usize, expected: &[bool], program: impl Fn(&Ddp, &Device) -> anyhow::Result<Vec<bool>> + Sync) {
    let ranks = Ddp::spawn(world, |ddp| {
        let device = ddp.device()?.autodiff();
        if ddp.rank() + 1 == ddp.world_size() {
            ddp.request_stop();
            assert!(ddp.stop_wished());
        }
        assert!(!ddp.stop_requested(), "a wish alone changes nothing");
        program(&ddp, &device)
    });
    for (rank, agreed) in ranks.unwrap().iter().enumerate() {
        assert_eq!(agreed, expected, "rank {rank}");
    }
}

#[test]
fn each_kind_of_step_carries_the_wish() {
    let backward = |ddp: &Ddp, config: WrapConfig, device: &Device| {
        let model = ddp.wrap_with(linear(device), &config)?;
        ddp.backward(&loss(&model, device), &model)?;
        anyhow::Ok(vec![ddp.stop_requested()])
    };
    for world in [1, 2, 3] {
        calls(world, &[true], |ddp, device| backward(ddp, WrapConfig::new(), device));
    }
    let sharded = WrapConfig::new().with_sharding(Sharding::Parameters).with_sharding_above(1);
    calls(2, &[true], |ddp, device| {
        let model = ddp.wrap_with(linear(device), &sharded)?;
        let _optim = ddp.optimizer(SgdConfig::new().init(), &model)?;
        ddp.backward(&loss(&model, device), &model)?;
        Ok(vec![ddp.stop_requested()])
    });
    calls(2, &[true], |ddp, device| backward(ddp, WrapConfig::new().with_reduction(GradientReduction::Sum), device));
    calls(2, &[true], |ddp, device| backward(ddp, WrapConfig::new().with_single_rank_reduction(true), device));
    // Nothing to train: an empty bucket carries the flags.
    calls(2, &[true], |ddp, device| {
        let model = ddp.wrap((linear(device).no_grad(), linear(device)))?;
        ddp.backward(&loss(&model.1, device), &model)?;
        Ok(vec![ddp.stop_requested()])
    });
    calls(2, &[true], |ddp, device| {
        let model = ddp.broadcast_parameters(linear(device), 0)?;
        let mut optim = DistributedOptimizer::new(ddp, SgdConfig::new().init());
        let grads = GradientsParams::from_grads(loss(&model, device).backward(), &model);
        let _model = optim.step(0.1, model, grads);
        Ok(vec![ddp.stop_requested()])
    });
}

#[test]
fn what_reduces_nothing_agrees_on_nothing() {
    calls(2, &[false, false, true], |ddp, device| {
        let model = ddp.wrap(linear(device))?;
        let mut agreed = Vec::new();
        ddp.accumulate(&loss(&model, device), &model)?;
        agreed.push(ddp.stop_requested());
        ddp.barrier()?;
        drop(ddp.group().all_gather(&[1.0_f32])?);
        agreed.push(ddp.stop_requested());
        ddp.flush(&model)?;
        agreed.push(ddp.stop_requested());
        Ok(agreed)
    });
}

#[test]
fn numbers_over_all_ranks_carry_it() {
    calls(2, &[true], |ddp, _| {
        assert_eq!(ddp.sum(1.5_f32)?, 3.0);
        Ok(vec![ddp.stop_requested()])
    });
    calls(3, &[true], |ddp, _| {
        assert_eq!(ddp.mean(ddp.rank() as f64)?, 1.0);
        Ok(vec![ddp.stop_requested()])
    });
    calls(2, &[true], |ddp, _| {
        assert_eq!(ddp.sum(-7_i64)?, -14);
        Ok(vec![ddp.stop_requested()])
    });
    calls(2, &[true, true], |ddp, _| Ok(vec![ddp.agree_to_stop()?, ddp.stop_requested()]));
}

/// The flags of a rank without weight are absent like its gradients; the wish stays.
#[test]
fn the_wish_of_a_rank_without_weight_comes_with_its_next_batch() {
    calls(2, &[false, true], |ddp, device| {
        let model = ddp.wrap(linear(device))?;
        let mut agreed = Vec::new();
        for step in 0..2 {
            let weight = if ddp.rank() == 1 && step == 0 { 0.0 } else { 2.0 };
            ddp.weighted(weight).backward(&loss(&model, device), &model)?;
            agreed.push(ddp.stop_requested());
        }
        Ok(agreed)
    });
}

#[test]
fn a_part_of_the_ranks_agrees_for_itself_and_all_agree_for_the_parts() {
    calls(4, &[false, true, false, true, true], |ddp, device| {
        let color = (ddp.rank() + 1) as u64 / 2; // 0 | 1 2 | 3
        let part = ddp.split(Some(color), 0)?.expect("each rank has a part");
        let mut agreed = vec![part.stop_requested()];
        let model = part.wrap(linear(device))?;
        part.backward(&loss(&model, device), &model)?;
        // The wish of rank 3 reaches its own part alone.
        agreed.push(part.stop_requested() == (ddp.rank() == 3));
        agreed.push(ddp.stop_requested());
        ddp.sum(1)?;
        agreed.extend([ddp.stop_requested(), part.stop_requested()]);
        Ok(agreed)
    });
}

#[test]
fn a_step_that_fails_agrees_on_nothing() {
    calls(2, &[false, true], |ddp, device| {
        let model = ddp.wrap(linear(device))?;
        let failed = ddp.weighted(0.0).backward(&loss(&model, device), &model);
        assert!(failed.is_err(), "all weights are 0");
        let mut agreed = vec![ddp.stop_requested()];
        ddp.backward(&loss(&model, device), &model)?;
        agreed.push(ddp.stop_requested());
        Ok(agreed)
    });
}

/// A rank that has joined takes part in the steps of the others until they join; then all save together.
#[test]
fn with_join_ranks_leave_the_loop_join_and_then_save() {
    let directory = tempfile::tempdir().unwrap();
    let steps = Ddp::spawn(2, |ddp| {
        let device = ddp.device()?.autodiff();
        let mut model = ddp.wrap(linear(&device))?;
        let mut optim = ddp.optimizer(SgdConfig::new().init(), &model)?;
        let checkpoints = ddp.checkpoints(directory.path())?;
        let mut steps = 0;
        for step in 0..if ddp.rank() == 0 { 9 } else { 2 } {
            if step == 3 {
                ddp.request_stop();
            }
            let Some(grads) = ddp.backward(&loss(&model, &device), &model)? else { continue };
            model = optim.step(0.1, model, grads);
            steps += 1;
            if ddp.stop_requested() {
                break;
            }
        }
        ddp.join(&mut model, &mut optim)?;
        assert!(ddp.stop_requested(), "the joined rank hears it, too");
        checkpoints.save(steps.max(4), |c| c.model(&model))?;
        Ok((steps, ddp.exit_code() == std::process::ExitCode::SUCCESS))
    });
    assert_eq!(steps.unwrap(), [(4, false), (2, false)]);
}

/// The program has done its work: that the ranks agree afterwards is no reason to start it again.
#[test]
fn a_wish_after_the_last_look_changes_no_exit_code() {
    let codes = Ddp::spawn(2, |ddp| {
        assert!(!ddp.stop_requested());
        ddp.request_stop();
        let _ = ddp.mean(1.0)?;
        Ok(ddp.exit_code() == std::process::ExitCode::SUCCESS)
    });
    assert_eq!(codes.unwrap(), [true, true]);
}
