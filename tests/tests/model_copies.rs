//! Copies of a wrapped model that are not trained: exponential moving averages, the best model so far. Records,
//! visitors and mappers treat them like a model of plain Burn.

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::SgdConfig;
use burn::prelude::*;
use burn_ddp::prelude::*;
use burn_ddp_tests::rows;

/// Each rank uses one branch, a different one in each step.
#[derive(Module, Debug)]
struct Branches {
    trunk: Linear,
    branches: Vec<Linear>,
}

impl Branches {
    fn new(device: &Device) -> Self {
        let init = || LinearConfig::new(6, 6).init(device);
        Branches { trunk: init(), branches: (0..3).map(|_| init()).collect() }
    }

    fn loss(&self, ddp: &Ddp, step: usize, device: &Device) -> Tensor<1> {
        let x = rows(step * 2 + ddp.rank(), 2, 6, 1, burn::tensor::DType::F32, device);
        self.branches[(step + ddp.rank()) % 3].forward(self.trunk.forward(x).tanh()).sum()
    }
}

/// Paths of all parameters that visitors and mappers get.
#[derive(Default)]
struct Paths {
    path: Vec<String>,
    seen: Vec<String>,
}

impl Paths {
    fn note(&mut self) {
        self.seen.push(self.path.join("."));
    }
}

impl ModuleVisitor for Paths {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, _: &Param<Tensor<D>>) {
        self.note();
    }
}

impl ModuleMapper for Paths {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        self.note();
        param
    }
}

/// Checks that visitors of `model` get the parameters of a plain model, and that its record is a plain model's.
fn check(model: &Branches, when: &str) -> anyhow::Result<()> {
    let plain = Branches::new(&model.trunk.weight.base().device());
    let visited = |model: &Branches| {
        let mut paths = Paths::default();
        model.visit(&mut paths);
        paths.seen
    };
    anyhow::ensure!(visited(model) == visited(&plain), "{when}: a visitor saw {:?}", visited(model));
    let mut mapped = Paths::default();
    let _ = model.clone().map(&mut mapped);
    anyhow::ensure!(mapped.seen == visited(&plain), "{when}: a mapper saw {:?}", mapped.seen);
    let loaded = plain.load_record(model.clone().into_record());
    let same = |a: &Linear, b: &Linear| a.weight.base().into_data() == b.weight.base().into_data();
    anyhow::ensure!(model.branches.iter().zip(&loaded.branches).all(|(a, b)| same(a, b)), "{when}: other values");
    Ok(())
}

/// Trains on two ranks, with copies of the model from several steps.
#[test]
fn copies_show_parameters_alone() {
    let hashes = Ddp::spawn(2, |ddp| {
        let device = ddp.device()?.autodiff();
        let mut model = ddp.wrap(Branches::new(&device))?;
        let mut optim = SgdConfig::new().init();
        let first = model.clone();
        for step in 0..4 {
            let before = model.clone();
            let grads = ddp.backward(&model.loss(&ddp, step, &device), &model)?.expect("averages");
            let between = model.clone();
            for (copy, when) in [(&first, "first"), (&before, "before"), (&between, "between"), (&model, "itself")] {
                check(copy, when)?;
                check(&copy.valid(), when)?;
            }
            model = optim.step(0.1, model, grads);
            for (copy, when) in [(&first, "first"), (&before, "before"), (&between, "between"), (&model, "itself")] {
                check(copy, &format!("{when}, after the step"))?;
                check(&copy.clone().fork(&device), &format!("{when}, forked"))?;
            }
        }
        Ok(param_hash(&model)?)
    })
    .unwrap();
    assert_eq!(hashes[0], hashes[1]);
}

/// Gradients that no optimizer takes leave nothing behind.
#[test]
fn dropped_gradients_leave_nothing_behind() {
    Ddp::spawn(2, |ddp| {
        let device = ddp.device()?.autodiff();
        let model = ddp.wrap(Branches::new(&device))?;
        for step in 0..3 {
            drop(ddp.backward(&model.loss(&ddp, step, &device), &model)?);
            check(&model, "after the gradients were dropped")?;
        }
        Ok(())
    })
    .unwrap();
}

/// A mapper changes each parameter of a copy by a different number, between the backward and the step.
#[test]
fn a_mapper_with_a_state_of_its_own_ends_no_job() {
    struct Count(f64);
    impl ModuleMapper for Count {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            self.0 += 1e-3;
            let by = self.0;
            param.map(|value| Tensor::from_inner(value.inner().add_scalar(by)).require_grad())
        }
    }
    let hashes = Ddp::spawn(2, |ddp| {
        let device = ddp.device()?.autodiff();
        let mut model = ddp.wrap(Branches::new(&device))?;
        let mut optim = SgdConfig::new().init();
        for step in 0..4 {
            let grads = ddp.backward(&model.loss(&ddp, step, &device), &model)?.expect("averages");
            let copy = model.clone().map(&mut Count(0.0));
            model = optim.step(0.1, model, grads);
            drop(copy);
        }
        Ok(param_hash(&model)?)
    })
    .unwrap();
    assert_eq!(hashes[0], hashes[1]);
}
