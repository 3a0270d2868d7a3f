//! `WrapConfig::with_local_parameters`: parameters that each rank trains by itself, beside those that all ranks share.

use std::collections::BTreeMap;

use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::optim::{GradientsParams, SgdConfig};
use burn::prelude::*;
use burn::tensor::DType;
use burn_ddp::prelude::*;
use burn_ddp_tests::split_training::numbered;
use burn_ddp_tests::{rows, to_f64};

/// A shared body, and heads of which the first belongs to each rank.
#[derive(Module, Debug)]
struct Net {
    body: Linear,
    norm: BatchNorm,
    heads: Vec<Linear>,
}

impl Net {
    /// The first head has `outputs` outputs.
    fn new(outputs: usize, salt: u64, device: &Device) -> Self {
        let init = |i, o| LinearConfig::new(i, o).init(device);
        let heads = vec![init(4, outputs), init(4, 2)];
        to_f64(numbered(Net { body: init(6, 4), norm: BatchNormConfig::new(4).init(device), heads }, salt))
    }

    fn loss(&self, x: Tensor<2>) -> Tensor<1> {
        let h = self.norm.forward(self.body.forward(x).tanh());
        let squares = |head: &Linear| head.forward(h.clone()).powf_scalar(2.0).mean();
        squares(&self.heads[0]) + squares(&self.heads[1])
    }
}

fn is_local(path: &str) -> bool {
    path.starts_with("heads.0") || path.starts_with("norm.running")
}

fn batch(rank: usize, step: usize, device: &Device) -> Tensor<2> {
    rows((2 * step + rank) * 5, 5, 6, 3, DType::F64, device)
}

type ByPath = BTreeMap<String, Vec<f64>>;

/// Values of all parameters and buffers, or their gradients.
fn by_path<M: Module>(model: &M, grads: Option<&GradientsParams>) -> ByPath {
    struct Read<'a> {
        path: Vec<String>,
        grads: Option<&'a GradientsParams>,
        found: ByPath,
    }
    impl ModuleVisitor for Read<'_> {
        fn enter_module(&mut self, name: &str, _: &str) {
            self.path.push(name.to_string());
        }

        fn exit_module(&mut self, _: &str, _: &str) {
            self.path.pop();
        }

        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let data = match self.grads {
                Some(grads) => grads.get::<D>(param.id).map(Tensor::into_data),
                None => Some(param.base().into_data()),
            };
            if let Some(data) = data {
                self.found.insert(self.path.join("."), data.convert::<f64>().try_to_vec().unwrap());
            }
        }
    }
    let mut read = Read { path: Vec::new(), grads, found: ByPath::new() };
    model.visit(&mut read);
    read.found
}

fn close(a: &[f64], b: &[f64]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (a - b).abs() <= 1e-12 * a.abs().max(1.0))
}

#[test]
fn each_rank_trains_its_own_part_and_all_train_the_rest() {
    for by_predicate in [false, true] {
        let ranks = Ddp::spawn(2, |ddp| {
            let (rank, device) = (ddp.rank(), ddp.device()?.autodiff());
            // Each rank has different values, and a different shape of the first head.
            let mut model = Net::new(3 + 2 * rank, 1 + 100 * rank as u64, &device);
            let own = by_path(&model, None);
            let config = WrapConfig::new().with_replica_check(1);
            let config = match by_predicate {
                true => config.with_local_parameters_where(&model, is_local)?,
                false => config.with_local_parameters(["heads.0"]).with_local_parameters(["norm.running*"]),
            };
            model = ddp.wrap_with(model, &config)?;
            let begun = by_path(&model, None);
            assert!(
                begun
                    .iter()
                    .all(|(path, values)| (own[path] == *values) == (rank == 0 || is_local(path) || same(path)))
            );
            let mut optim = SgdConfig::new().init();
            let mut seen = Vec::new();
            for step in 0..6 {
                let plain = ddp.unwrap(model.clone())?;
                let alone = GradientsParams::from_grads(plain.loss(batch(rank, step, &device)).backward(), &plain);
                let loss = model.loss(batch(rank, step, &device));
                let grads = ddp.backward(&loss, &model)?.expect("averages");
                seen.push((by_path(&plain, Some(&alone)), by_path(&model, Some(&grads))));
                model = optim.step(0.1, model, grads);
            }
            ddp.sync_buffers(&model)?;
            ddp.check_replicas(&model)?;
            let trained = by_path(&model.valid(), None);
            let again = by_path(&ddp.broadcast_parameters(model, 1)?.valid(), None);
            assert_eq!(again, trained, "shared values are equal, local ones stay");
            Ok((seen, trained))
        });
        let ranks = ranks.unwrap();
        for step in 0..6 {
            for rank in 0..2 {
                let (alone, averaged) = &ranks[rank].0[step];
                let other = &ranks[1 - rank].0[step].0;
                assert_eq!(averaged.len(), 8, "{averaged:?}");
                for (path, gradient) in averaged {
                    let expected: Vec<f64> = match is_local(path) {
                        true => alone[path].clone(),
                        false => alone[path].iter().zip(&other[path]).map(|(a, b)| (a + b) / 2.0).collect(),
                    };
                    assert!(close(gradient, &expected), "step {step}, rank {rank}: {path}");
                }
            }
        }
        let [(_, one), (_, other)] = ranks.try_into().unwrap();
        for (path, values) in &one {
            assert_eq!(*values != other[path], is_local(path), "{path}");
        }
    }
}

/// True for the tensors that are equal in all new models: BatchNorm's statistics.
fn same(path: &str) -> bool {
    path.starts_with("norm.running")
}

#[test]
fn save_writes_rank_0s_and_compares_what_is_shared() {
    let directory = tempfile::tempdir().unwrap();
    let (own, path) = Ddp::spawn(2, |ddp| {
        let device = ddp.device()?.autodiff();
        let model = Net::new(3, 1 + 100 * ddp.rank() as u64, &device);
        let config = WrapConfig::new().with_local_parameters(["heads.0"]);
        let model = ddp.wrap_with(model, &config)?;
        Ok((by_path(&model, None), ddp.save(&model, directory.path().join("model"))?))
    })
    .unwrap()
    .remove(0);
    let device = burn_ddp_tests::device();
    assert_eq!(by_path(&Net::new(3, 77, &device).load_file(path), None), own);
}

/// Each rank saves its own part beside the checkpoint, which lacks it, as the documentation shows.
#[test]
fn local_parameters_saved_by_hand_go_on_after_a_checkpoint() {
    let directory = tempfile::tempdir().unwrap();
    Ddp::spawn(2, |ddp| {
        let (rank, device) = (ddp.rank(), ddp.device()?.autodiff());
        let config = WrapConfig::new().with_local_parameters(["heads.0"]);
        let net = |salt| Net::new(3, salt, &device);
        let model = ddp.wrap_with(net(1 + 100 * rank as u64), &config)?;
        let checkpoints = ddp.checkpoints(directory.path())?;
        checkpoints.save(1, |c| c.model(&model))?;
        let own = directory.path().join(format!("own-{rank}"));
        model.heads[0].valid().save_file(&own).unwrap();

        let mut resumed = checkpoints.latest()?.expect("one was saved").model(net(7))?;
        let of_rank_0 = by_path(&ddp.wrap_with(resumed.clone(), &config)?, None);
        assert_eq!(of_rank_0 == by_path(&model, None), rank == 0);
        resumed.heads[0] = resumed.heads[0].clone().load_file(&own);
        assert_eq!(by_path(&ddp.wrap_with(resumed, &config)?, None), by_path(&model, None));
        Ok(())
    })
    .unwrap();
}

#[test]
fn names_that_mean_nothing_or_half_a_parameter_are_refused_on_every_rank() {
    #[derive(Module, Debug)]
    struct Tied {
        a: Linear,
        b: Linear,
    }
    let errors = Ddp::spawn(2, |ddp| {
        let device = ddp.device()?.autodiff();
        let mut optim = SgdConfig::new().init();
        let names = |names: &[&str]| WrapConfig::new().with_local_parameters(names.iter().copied());
        let net = || Net::new(3, 1, &device);
        let a = LinearConfig::new(2, 2).init(&device);
        let tied = Tied { b: a.clone(), a };
        let own = if ddp.rank() == 0 { names(&["body"]) } else { names(&["heads"]) };
        let mut model = ddp.wrap_with(net(), &names(&["body"]))?;
        let errors = [
            ddp.wrap_with(net(), &names(&["head.0.weight"])).err(),
            ddp.wrap_with(net(), &names(&["*"])).err(),
            ddp.wrap_with(tied, &names(&["b"])).err(),
            ddp.wrap_with(net(), &own).err(),
            ddp.join(&mut model, &mut optim).err(),
        ];
        Ok(errors.map(|error| error.map_or("none".into(), |error| error.to_string())))
    });
    let errors = errors.unwrap();
    let expected: [&[&str]; 5] = [
        &["\"head.0.weight\"", "closest are heads.0.weight, "],
        &["all parameters are local"],
        &["a.weight and b.weight", "name both, or none"],
        &["different settings: body.weight is a local parameter on rank 0 and not on rank 1"],
        &["`join` with local parameters"],
    ];
    for errors in errors {
        for (error, expected) in errors.iter().zip(expected) {
            assert!(expected.iter().all(|text| error.contains(text)), "{expected:?} are not in {error}");
        }
    }
}

#[test]
fn calls_with_a_part_of_the_model_or_with_more_than_it_know_local_parameters() {
    let ranks = Ddp::spawn(2, |ddp| {
        let device = ddp.device()?.autodiff();
        let config = WrapConfig::new().with_local_parameters(["heads.0"]);
        // Each rank's head has values of its own, at the paths `0.weight` of a part and `1.heads.0.weight` of a pair.
        let net = Net::new(3, ddp.rank() as u64, &device);
        let model = ddp.wrap_with(net, &config)?;
        ddp.check_replicas(&model)?;
        ddp.check_replicas(&model.heads)?;
        let before = by_path(&model.heads, None);
        let pair = (LinearConfig::new(1, 1).with_bias(false).init(&device).no_grad(), model);
        ddp.backward(&pair.1.loss(batch(ddp.rank(), 0, &device)), &pair)?;
        let model = Net { heads: ddp.broadcast_parameters(pair.1.heads, 0)?, ..pair.1 };
        Ok(by_path(&model.heads, None) == before)
    });
    assert_eq!(ranks.unwrap(), [true, true]);
}

#[test]
fn ranks_may_hold_different_numbers_of_local_parameters() {
    for by_predicate in [false, true] {
        let ranks = Ddp::spawn(2, |ddp| {
            let device = ddp.device()?.autodiff();
            let mut model = Net::new(3, 1, &device);
            for _ in 0..1 + 2 * ddp.rank() {
                model.heads.push(LinearConfig::new(2, 2).init(&device));
            }
            let model = to_f64(model);
            let is_head = |path: &str| path.starts_with("heads");
            let config = match by_predicate {
                true => WrapConfig::new().with_local_parameters_where(&model, is_head)?,
                false => WrapConfig::new().with_local_parameters(["heads"]),
            };
            let model = ddp.wrap_with(model, &config)?;
            let loss = model.loss(batch(ddp.rank(), 0, &device));
            let gradients = by_path(&model, Some(&ddp.backward(&loss, &model)?.expect("averages")));
            ddp.check_replicas(&model)?;
            Ok((model.heads.len(), gradients["body.weight"].clone()))
        });
        let ranks = ranks.unwrap();
        assert_eq!((ranks[0].0, ranks[1].0), (3, 5));
        assert_eq!(ranks[0].1, ranks[1].1);
    }
}

#[test]
fn accumulation_is_refused_since_nothing_holds_local_gradients() {
    for ranks in [1, 2] {
        let errors = Ddp::spawn(ranks, |ddp| {
            let device = ddp.device()?.autodiff();
            let local = WrapConfig::new().with_local_parameters(["heads.0"]);
            let net = || Net::new(3, 1, &device);
            let model = ddp.wrap_with(net(), &local.clone().with_accumulation(1))?;
            // Running statistics have no gradients.
            ddp.wrap_with(net(), &WrapConfig::new().with_local_parameters(["norm.running*"]).with_accumulation(4))?;
            let errors = [
                ddp.wrap_with(net(), &local.with_accumulation(4)).err(),
                ddp.accumulate(&model.loss(batch(ddp.rank(), 0, &device)), &model).err(),
            ];
            Ok(errors.map(|error| error.map_or("none".into(), |error| error.to_string())))
        });
        for error in errors.unwrap().iter().flatten() {
            for part in ["local", "heads.0.bias", "heads.0.weight", "a model of their own that is not wrapped"] {
                assert!(error.contains(part), "{part} is not in {error}");
            }
        }
    }
}
