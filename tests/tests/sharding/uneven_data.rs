//! Ranks whose data end at different steps: `join` refuses sharded models, which take batches of weight 0 instead.

use super::*;

/// Rank `r` has `2 + r` batches, of `r + 1` items each.
#[test]
fn batches_of_weight_0_are_the_join_of_whole_parameters() {
    for world in [2, 3] {
        let joined = Ddp::spawn(world, |ddp| {
            let device = ddp.device()?.autodiff();
            let mut model = ddp.wrap(Gpt::new(&device, 0))?;
            let mut optim = AdamConfig::new().init();
            for step in 0..2 + ddp.rank() {
                let weighted = ddp.weighted((ddp.rank() + 1) as f64);
                let loss = model.loss(tokens(ddp.rank(), step, &device));
                let grads = weighted.backward(&loss, &model)?.expect("averages");
                model = optim.step(0.01, model, grads);
            }
            ddp.join(&mut model, &mut optim)?;
            Ok(without_statistics(&model))
        });
        let by_weight = Ddp::spawn(world, |ddp| {
            let device = ddp.device()?.autodiff();
            let mut model = ddp.wrap_with(Gpt::new(&device, 0), &sharded())?;
            let mut optim = ddp.optimizer(AdamConfig::new().init(), &model)?;
            for step in 0.. {
                let has_data = step < 2 + ddp.rank();
                if ddp.sum(f64::from(u8::from(has_data)))? == 0.0 {
                    break;
                }
                let weighted = ddp.weighted(if has_data { (ddp.rank() + 1) as f64 } else { 0.0 });
                let loss = model.loss(tokens(ddp.rank(), step, &device));
                let grads = weighted.backward(&loss, &model)?.expect("averages");
                model = optim.step(0.01, model, grads);
            }
            Ok(without_statistics(&ddp.unwrap(model)?))
        });
        let (joined, by_weight) = (joined.unwrap(), by_weight.unwrap());
        assert!(by_weight.iter().all(|values| *values == joined[0]), "{world} ranks");
    }
}

#[test]
fn a_rank_that_leaves_when_its_data_end_is_an_error_on_the_others() {
    let errors = Ddp::spawn(3, |ddp| {
        let (model, _) = train(&ddp, &sharded(), AdamConfig::new().init(), 2)?;
        if ddp.rank() == 1 {
            return Ok(None);
        }
        let device = ddp.device()?.autodiff();
        let start = Instant::now();
        let forward = std::panic::AssertUnwindSafe(|| drop(model.loss(tokens(ddp.rank(), 2, &device))));
        let error = std::panic::catch_unwind(forward).map_err(|panic| panic.downcast_ref::<String>().cloned());
        Ok(Some((error.unwrap_err().unwrap_or_default(), start.elapsed())))
    });
    let errors: Vec<(String, Duration)> = errors.unwrap().into_iter().flatten().collect();
    assert_eq!(errors.len(), 2);
    for (error, after) in errors {
        assert!(error.contains("rank 1"), "{error}");
        assert!(after < FAULT_HEARD, "{error} after {after:?}");
    }
}

/// The bits of the parameters. Running statistics are left out: they also count the batches of weight 0.
fn without_statistics(model: &Gpt) -> Vec<Vec<u8>> {
    let Gpt { tokens, norm: _, query, key, value, rms: _, up, batch_norm: _, down } = model;
    let weights = [&tokens.weight, &query.weight, &key.weight, &value.weight, &up.weight, &down.weight];
    weights.map(|weight| weight.val().into_data().as_bytes().to_vec()).into()
}
