//! Reads, gradients and calls that differ between ranks are an error on all of them.

use super::*;

#[test]
fn a_rank_that_skips_a_layer_is_an_error_on_all() {
    let skips = errors(|ddp, model, device| {
        let x = Tensor::<3>::ones([1, 2, 6], device);
        // The layers have equal shapes, so that a gather could take one for the other.
        let layers = if ddp.rank() == 0 { [&model.query, &model.key] } else { [&model.key, &model.query] };
        layers[0].forward(layers[1].forward(x));
        Ok(())
    });
    for error in &skips {
        assert!(error.contains("rank 0 reads key.weight") && error.contains("rank 1 reads query.weight"), "{error}");
        assert!(error.contains("a forward of the program ends here") && !error.contains("backward()"), "{error}");
    }
    let evaluates = errors(|ddp, model, device| {
        let x = Tensor::<3>::ones([1, 2, 6], device);
        match ddp.rank() {
            0 => drop(model.valid().query.forward(x.inner())),
            _ => drop(model.query.forward(x)),
        }
        Ok(())
    });
    for error in &evaluates {
        assert!(error.contains("rank 0 reads query.weight without a gradient (evaluation)"), "{error}");
    }
    // One rank evaluates while the others wait for it in another call.
    let alone = errors_of(3, |ddp, model, device| {
        if ddp.rank() == 0 {
            model.valid().query.forward(Tensor::<3>::ones([1, 2, 6], device).inner());
        }
        Ok(ddp.barrier()?)
    });
    let reads = "rank 0 reads query.weight without a gradient (evaluation)";
    // A rank that waits late may be missing in the deadlock that is reported.
    let waits = ["ranks 1 and 2 are in barrier", "rank 1 is in barrier", "rank 2 is in barrier"];
    for error in &alone {
        assert!(error.contains(reads) && waits.iter().any(|waits| error.contains(waits)), "{error}");
        assert!(error.contains("and is in all_gather") && error.contains("of the model wrapped at"), "{error}");
    }
    let uses = errors(|ddp, model, device| {
        let x = Tensor::<3>::ones([1, 2, 6], device);
        let (a, b) = (model.query.forward(x.clone()).tanh(), model.key.forward(x).tanh());
        let loss = if ddp.rank() == 0 { (a * b).sum() } else { a.sum() };
        ddp.backward(&loss, model)?;
        Ok(())
    });
    for error in &uses {
        assert!(error.contains("key.weight") && error.contains("rank 0"), "{error}");
    }
}

/// The other ranks get the error in the calls that this rank does not make, before one of them is matched with a later
/// call of this rank.
#[test]
fn what_one_rank_forgets_is_an_error_on_all() {
    for forgetful in 0..2 {
        let heard = Ddp::spawn(2, |ddp| {
            let device = ddp.device()?.autodiff();
            let model = ddp.wrap_with(Gpt::new(&device, 0), &sharded())?;
            if ddp.rank() != forgetful {
                ddp.optimizer(AdamConfig::new().init(), &model)?;
            }
            let start = Instant::now();
            let error = ddp.backward(&model.loss(tokens(0, 0, &device)), &model).err().unwrap();
            assert!(start.elapsed() < FAULT_HEARD, "rank {} after {:?}: {error}", ddp.rank(), start.elapsed());
            Ok(error.to_string())
        });
        for error in heard.unwrap() {
            assert!(
                error.contains(&format!("rank {forgetful}")) && error.contains("no optimizer was checked"),
                "{error}"
            );
        }
    }
}

#[test]
fn ranks_that_read_a_parameter_in_different_numbers_hear_of_it_in_that_step() {
    for (reads_of_rank_1, micro_batches) in [(3, 1), (1, 1), (3, 2)] {
        let errors = Ddp::spawn(2, |ddp| {
            let device = ddp.device()?.autodiff();
            let linear = LinearConfig::new(4, 4).with_bias(false).init(&device);
            let config = sharded().with_accumulation(micro_batches);
            let mut model: Linear = ddp.wrap_with(linear, &config)?;
            let mut optim = ddp.optimizer(SgdConfig::new().init(), &model)?;
            for backward in 0..4 * micro_batches {
                let differs = ddp.rank() == 1 && backward == 2 * micro_batches;
                let mut x = Tensor::<2>::ones([2, 4], &device);
                for _ in 0..if differs { reads_of_rank_1 } else { 2 } {
                    x = model.forward(x);
                }
                let start = Instant::now();
                match ddp.backward(&x.sum(), &model) {
                    Err(error) => return Ok((backward / micro_batches, start.elapsed(), error.to_string())),
                    Ok(Some(grads)) => model = optim.step(0.01, model, grads),
                    Ok(None) => {}
                }
            }
            anyhow::bail!("nothing was said")
        });
        let (of_rank_0, of_rank_1) = (2 * micro_batches, 2 * micro_batches - 2 + reads_of_rank_1);
        let says = format!(
            "rank 0 has read weight {of_rank_0} times since the last reduction, but rank 1 {of_rank_1} times: every \
            rank must read the same parameters"
        );
        for (step, after, error) in errors.unwrap() {
            assert_eq!(step, 2, "{error}");
            assert!(error.contains(&says) && after < FAULT_HEARD, "after {after:?}: {error}, and not {says}");
        }
    }
}

/// The other ranks, which wait for the part of the mistaken rank, get its error.
#[test]
fn a_part_without_its_tap_on_one_rank_is_an_error_of_all() {
    type Use = fn(&Ddp, Gpt) -> burn_ddp::Result<()>;
    let uses: [(&str, Use); 2] =
        [("hash", |_, model| param_hash(&model).map(drop)), ("unwrap", |ddp, model| ddp.unwrap(model).map(drop))];
    for (what, uses) in uses {
        let refused = errors(|ddp, model, _| {
            let mut model = model.clone();
            if ddp.rank() == 1 {
                model.query.weight = model.query.weight.map(|value| value);
            }
            Ok(uses(ddp, model)?)
        });
        for error in &refused {
            assert!(error.contains("query.weight") && error.contains("Param::map"), "{what}: {error}");
        }
    }
}
