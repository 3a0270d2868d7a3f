//! Frozen parameters that are sharded.

use burn::module::Lora;
use burn_ddp::MemoryUse;

use super::*;

/// The decoder block with a frozen embedding, which is read twice, and a frozen layer above trained ones.
fn frozen(ddp: &Ddp, device: &Device) -> Gpt {
    let model = Gpt::new(device, ddp.rank() as u64);
    Gpt { tokens: model.tokens.freeze(), up: model.up.freeze(), ..model }
}

fn stepped(ddp: &Ddp, model: Gpt, optim: &mut DdpOptimizer, step: usize) -> anyhow::Result<Gpt> {
    let loss = model.loss(tokens(ddp.rank(), step, &ddp.device()?.autodiff()));
    let grads = ddp.backward(&loss, &model)?.expect("averages");
    Ok(optim.step(0.01, model, grads))
}

#[test]
fn frozen_parameters_are_in_parts_and_train_when_they_wake() {
    for world in 1..=4 {
        let [whole, parts] = [WrapConfig::new(), sharded()].map(|config| {
            let ranks = Ddp::spawn(world, |ddp| {
                let device = ddp.device()?.autodiff();
                let model = frozen(&ddp, &device);
                let mut model = ddp.wrap_with(model, &config)?;
                let mut optim = ddp.optimizer(AdamConfig::new().init(), &model)?;
                let rows = [model.tokens.weight.base().dims()[0], model.up.weight.base().dims()[0]];
                let asleep = param_hash(&model.up)?;
                for step in 0..3 {
                    model = stepped(&ddp, model, &mut optim, step)?;
                }
                anyhow::ensure!(param_hash(&model.up)? == asleep, "a frozen layer was stepped");
                model.up = model.up.unfreeze();
                for step in 3..6 {
                    model = stepped(&ddp, model, &mut optim, step)?;
                }
                let awake = param_hash(&model.up)?;
                anyhow::ensure!(awake != asleep, "an unfrozen layer was not stepped");
                let loss = model.valid().loss(tokens(0, 9, &ddp.device()?)).into_scalar::<f32>();
                let hash = param_hash(&model)?;
                let whole = ddp.unwrap(model)?;
                anyhow::ensure!(!whole.tokens.weight.is_require_grad() && param_hash(&whole)? == hash);
                Ok((hash, loss, rows))
            });
            ranks.unwrap()
        });
        for (rank, (whole, part)) in whole.iter().zip(&parts).enumerate() {
            assert_eq!((&whole.0, whole.1), (&part.0, part.1), "rank {rank} of {world}");
            let rows = |all: usize| all / world + usize::from(rank < all % world);
            assert_eq!(part.2, [rows(11), rows(6)], "rank {rank} of {world}");
        }
    }
}

#[test]
fn an_optimizer_that_does_not_fit_frozen_parameters_may_step_others() {
    let ranks = Ddp::spawn(2, |ddp| {
        let device = ddp.device()?.autodiff();
        let muon = || burn::optim::MuonConfig::new().init();
        let model = ddp.wrap_with(frozen(&ddp, &device).freeze(), &sharded())?;
        ddp.optimizer(muon(), &model)?;
        // `ddp.optimizer` has not checked an optimizer for this parameter, which was frozen.
        let model = Gpt { query: model.query.unfreeze(), ..model };
        let loss = model.loss(tokens(ddp.rank(), 0, &device));
        let error = ddp.backward(&loss, &model).err().map(|e| e.to_string()).unwrap_or_default();
        Ok((error, ddp.optimizer(muon(), &model).err().map(|e| e.to_string()).unwrap_or_default()))
    });
    for (backward, check) in ranks.unwrap() {
        assert!(backward.contains("no optimizer was checked for the sharded parameter query.weight"), "{backward}");
        assert!(check.contains("(query.weight)"), "{check}");
    }
}

#[test]
fn what_an_estimate_says_of_frozen_parameters() {
    Ddp::spawn(1, |ddp| {
        let layer = LinearConfig::new(64, 64).with_bias(false).init(&ddp.device()?.autodiff());
        let estimate = |layer: Linear| MemoryUse::estimate(&layer, &sharded(), 4);
        let (trained, frozen) = (estimate(layer.clone())?, estimate(layer.freeze())?);
        assert_eq!((frozen.parameters, frozen.whole_parameters, frozen.gradients), (64 * 64, 4 * 64 * 64, 0));
        assert_eq!((trained.parameters, trained.gradients), (64 * 64, 64 * 64));
        assert_eq!((frozen.gathered, trained.gathered), (4 * 64 * 64, 8 * 64 * 64), "no gradient of the whole");
        Ok(())
    })
    .unwrap();
}

#[test]
fn lora_trains_over_a_base_that_stays_whole_with_factors_in_parts() {
    for world in 1..=3 {
        let [whole, parts] = [WrapConfig::new(), sharded()].map(|config| {
            let ranks = Ddp::spawn(world, |ddp| {
                let device = ddp.device()?.autodiff();
                let model = Gpt::new(&device, 0);
                let query = model.query.freeze().apply_lora(Lora::new(4, 8.0)).map(&mut Fill(0.5));
                let mut model = ddp.wrap_with(Gpt { query, ..model }, &config)?;
                let mut optim = ddp.optimizer(AdamConfig::new().init(), &model)?;
                for step in 0..5 {
                    model = stepped(&ddp, model, &mut optim, step)?;
                }
                let factor = model.query.weight.adapter().map(|lora| lora.a.base().dims()[0]);
                Ok((param_hash(&model)?, model.query.weight.base().dims()[0], factor))
            });
            ranks.unwrap()
        });
        assert!(whole.iter().zip(&parts).all(|(whole, part)| whole.0 == part.0), "{world} ranks");
        assert!(parts.iter().all(|part| part.1 == 6 && part.2 == Some(6 / world)), "{world} ranks: {parts:?}");
    }
}
