//! Values of sharded parameters that are replaced: by a load while gathered copies of the old values are held, and by
//! `Param::map`.

use super::*;

/// A model that reads its one parameter twice in a forward.
#[derive(Module, Debug)]
struct Tied {
    symbols: Embedding,
}

impl Tied {
    fn new(device: &Device) -> Self {
        Tied { symbols: EmbeddingConfig::new(8, 4).init(device) }.map(&mut Fill(0.0))
    }

    fn loss(&self, device: &Device) -> Tensor<1> {
        let x = self.symbols.forward(Tensor::<2, Int>::from_ints([[1, 2, 3]], device));
        x.matmul(self.symbols.weight.val().transpose().unsqueeze()).powf_scalar(2.0).mean()
    }
}

/// Losses before and after training, of the loaded model and of its unsharded copy, and the hash one step later.
fn losses_around_a_load(config: &WrapConfig) -> Vec<([f32; 4], String)> {
    let directory = tempfile::tempdir().unwrap();
    let ranks = Ddp::spawn(2, |ddp| {
        let (trains, evaluates) = (ddp.device()?.autodiff(), ddp.device()?);
        let mut model = ddp.wrap_with(Tied::new(&trains), config)?;
        let mut optim = ddp.optimizer(SgdConfig::new().init(), &model)?;
        let mut step = |model: Tied| -> anyhow::Result<Tied> {
            let grads = ddp.backward(&model.loss(&trains), &model)?.expect("averages");
            Ok(optim.step(0.5, model, grads))
        };
        let loss = |model: &Tied| model.valid().loss(&evaluates).into_scalar::<f32>();
        let best = loss(&model);
        let checkpoints = ddp.checkpoints(directory.path())?;
        checkpoints.save(0, |c| c.model(&model))?;
        for _ in 0..3 {
            model = step(model)?;
        }
        let last = loss(&model);
        // A forward, so that the gathered weight is held for a backward.
        drop(model.loss(&trains));
        model = checkpoints.latest()?.expect("was saved").model(model)?;
        let loaded = loss(&model);
        let whole = loss(&ddp.unwrap(model.clone())?);
        Ok(([best, last, loaded, whole], param_hash(&step(model)?)?))
    });
    ranks.unwrap()
}

#[test]
fn a_loaded_model_is_not_read_as_it_was() {
    let [whole, parts] = [WrapConfig::new(), sharded()].map(|config| losses_around_a_load(&config));
    let [best, last, loaded, unwrapped] = whole[0].0;
    assert!(best != last && best == loaded && best == unwrapped, "{whole:?}");
    assert_eq!(parts, whole);
}

#[test]
fn a_copy_that_another_checkpoint_is_loaded_into_is_read_by_itself() {
    let run = |config: &WrapConfig| {
        let directory = tempfile::tempdir().unwrap();
        let ranks = Ddp::spawn(2, |ddp| {
            let (trains, evaluates) = (ddp.device()?.autodiff(), ddp.device()?);
            let mut model = ddp.wrap_with(Tied::new(&trains), config)?;
            let mut optim = ddp.optimizer(SgdConfig::new().init(), &model)?;
            let checkpoints = ddp.checkpoints(directory.path())?;
            checkpoints.save(0, |c| c.model(&model))?;
            let mut losses = Vec::new();
            for step in 0..5 {
                if step == 3 {
                    let best = checkpoints.latest()?.expect("was saved").model(model.valid())?;
                    losses.push(best.loss(&evaluates).into_scalar::<f32>());
                    losses.push(model.valid().loss(&evaluates).into_scalar::<f32>());
                }
                let loss = model.loss(&trains);
                losses.push(loss.clone().into_scalar::<f32>());
                let grads = ddp.backward(&loss, &model)?.expect("averages");
                model = optim.step(0.1, model, grads);
            }
            Ok((losses, param_hash(&model)?))
        });
        ranks.unwrap()
    };
    assert_eq!(run(&sharded()), run(&WrapConfig::new()));
}

#[test]
fn evaluations_hold_nothing() {
    let gathered = Ddp::spawn(2, |ddp| {
        let device = ddp.device()?.autodiff();
        let mut model = ddp.wrap_with(Tied::new(&device), &sharded())?;
        let mut optim = ddp.optimizer(SgdConfig::new().init(), &model)?;
        for _ in 0..2 {
            let grads = ddp.backward(&model.loss(&device), &model)?.expect("averages");
            model = optim.step(0.5, model, grads);
        }
        let of_evaluation = || -> anyhow::Result<u64> {
            let before = ddp.telemetry().stats().gathered;
            model.valid().loss(&ddp.device()?);
            Ok(ddp.telemetry().stats().gathered - before)
        };
        Ok([of_evaluation()?, of_evaluation()?, of_evaluation()?])
    });
    // Two reads of eight rows of four numbers.
    assert_eq!(gathered.unwrap(), [[2 * 8 * 4 * 4; 3]; 2]);
}

/// `Param::map` on a field makes a plain parameter of this rank's rows.
#[test]
fn a_part_without_its_tap_is_not_taken_for_a_whole() {
    type Use = fn(&Ddp, Gpt) -> burn_ddp::Result<()>;
    let uses: [(&str, Use); 9] = [
        ("save", |ddp, model| ddp.save(&model, tempfile::tempdir().unwrap().path().join("model")).map(drop)),
        ("checkpoint", |ddp, model| {
            let directory = tempfile::tempdir().unwrap();
            ddp.checkpoints(directory.path())?.save(0, |c| c.model(&model))
        }),
        ("hash", |_, model| param_hash(&model).map(drop)),
        ("broadcast", |ddp, model| ddp.broadcast_parameters(model, 0).map(drop)),
        ("unwrap", |ddp, model| ddp.unwrap(model).map(drop)),
        ("optimizer", |ddp, model| ddp.optimizer(AdamConfig::new().init(), &model).map(drop)),
        ("hash of another shape", |_, mut model| {
            let longer = |part: Tensor<2>| Tensor::from_inner(Tensor::cat(vec![part.inner(); 3], 0)).require_grad();
            model.query.weight = model.query.weight.map(longer);
            param_hash(&model).map(drop)
        }),
        ("record", |_, model| {
            drop(model.query.into_record());
            Ok(())
        }),
        ("record of a copy", |_, model| {
            drop(model.query.valid().into_record());
            Ok(())
        }),
    ];
    for (what, uses) in uses {
        let refused = errors(|ddp, model, _| {
            let mut model = model.clone();
            model.query.weight = model.query.weight.map(|value| value);
            Ok(uses(ddp, model)?)
        });
        for error in &refused {
            assert!(error.contains("query.weight") && error.contains("Param::map"), "{what}: {error}");
        }
    }
}

/// A parameter derived from a sharded one after `unwrap` is an ordinary whole parameter.
#[test]
fn a_parameter_that_is_resized_after_unwrap_is_a_whole() {
    for world in [1, 2, 3] {
        let hashes = Ddp::spawn(world, |ddp| {
            let model = ddp.wrap_with(Gpt::new(&ddp.device()?.autodiff(), 1), &sharded())?;
            let mut model = ddp.unwrap(model)?;
            model.tokens.weight = model.tokens.weight.map(|rows| {
                let rows = rows.inner();
                Tensor::from_inner(Tensor::cat(vec![rows.clone(), rows], 0)).require_grad()
            });
            let grown = param_hash(&model)?;
            ddp.save(&model, tempfile::tempdir()?.path().join("model"))?;
            let model = model.clone().load_record(model.into_record());
            anyhow::ensure!(model.tokens.weight.dims() == [22, 6]);
            // As many rows as each of the two ranks held before.
            let mut halved = model.clone();
            halved.query.weight = halved.query.weight.map(|rows| {
                let half = rows.dims()[0] / 2;
                Tensor::from_inner(rows.inner().narrow(0, 0, half)).require_grad()
            });
            ddp.unwrap(halved.clone())?;
            anyhow::ensure!(param_hash(&halved)? != param_hash(&model)?);
            drop(halved.into_record());
            let model = ddp.wrap_with(model, &sharded())?;
            Ok((grown, param_hash(&model)?))
        });
        for (grown, wrapped_again) in hashes.unwrap() {
            assert_eq!(grown, wrapped_again);
        }
    }
}
