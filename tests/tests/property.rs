//! Random small models, trained by random programs on random worlds, against one rank with the whole batch.
//!
//! A case is a number. `cargo test --test property` runs some hundred of them;
//! `cargo test --test property -- --ignored ten_thousand` runs 10,000, and
//! `BURN_DDP_CASE=123 cargo test --test property one` a single one again.

use std::collections::BTreeSet;
use std::process::Command;
use std::time::Duration;

use anyhow::{Result, ensure};
use burn::module::{Module, ModuleMapper, Param};
use burn::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamConfig, GradientsParams, ModuleOptimizer, SgdConfig};
use burn::prelude::*;
use burn::tensor::DType;
use burn_ddp::WorldOptions;
use burn_ddp::prelude::*;
use burn_ddp_tests::{device, distance, number, rows, to_f64, values};

const WIDTH: usize = 4;

#[test]
fn random_models_follow_one_rank() {
    check(0..300);
}

#[test]
#[ignore = "minutes: the full count, by name"]
fn ten_thousand() {
    // Burn keeps graphs without a backward and scans all of them in each backward, so a process runs some hundred
    // cases.
    for first in (0..10_000).step_by(250) {
        let mut these = Command::new(std::env::current_exe().unwrap());
        these.args(["--exact", "one", "--ignored"]).env("BURN_DDP_CASE", format!("{first}..{}", first + 250));
        let output = these.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    }
}

#[test]
#[ignore = "needs BURN_DDP_CASE"]
fn one() {
    let cases = std::env::var("BURN_DDP_CASE").unwrap();
    match cases.split_once("..") {
        Some((first, end)) => check(first.parse().unwrap()..end.parse().unwrap()),
        None => {
            let seed = cases.parse().unwrap();
            println!("{:#?}", Plan::new(seed));
            check(seed..seed + 1);
        }
    }
}

fn check(seeds: std::ops::Range<u64>) {
    for seed in seeds {
        if let Err(e) = follow(&Plan::new(seed)) {
            panic!("case {seed}: {e:#}\nagain: BURN_DDP_CASE={seed} cargo test --test property -- --ignored one");
        }
    }
}

/// A model and its training on every rank.
#[derive(Debug)]
struct Plan {
    seed: u64,
    nodes: Vec<Kind>,
    /// Nodes that begin frozen.
    frozen: BTreeSet<usize>,
    optim: Optim,
    reduction: GradientReduction,
    /// Micro-batches per step; `None`: each rank has its own number, by `ddp.accumulate`.
    accumulation: Option<usize>,
    bucket_cap_bytes: usize,
    steps: Vec<Step>,
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Dense { bias: bool },
    Matrix,
    Norm,
    Scale,
    Pair,
}

#[derive(Clone, Copy, Debug)]
enum Optim {
    Sgd,
    Momentum,
    Adam,
}

#[derive(Debug)]
struct Step {
    /// Nodes that change between frozen and trained before this step.
    toggled: Vec<usize>,
    /// `[rank][micro-batch][part]`
    ranks: Vec<Vec<Vec<Part>>>,
    /// The change to the model of each rank between backward and step.
    between: Vec<Between>,
    /// True for `ddp.scope`, false for `ddp.backward`.
    scoped: bool,
}

/// Two rows and the nodes they go through.
#[derive(Debug)]
struct Part {
    row: usize,
    path: Vec<usize>,
    /// Nodes of another forward before, whose graph is dropped (`false`) or kept until after the backward (`true`).
    aside: Option<(Vec<usize>, bool)>,
}

#[derive(Clone, Copy, Debug)]
enum Between {
    Nothing,
    Hash,
    Forward,
    Copy,
    Valid,
}

/// Random numbers for a plan.
struct Dice(u64, usize);

impl Dice {
    fn below(&mut self, n: usize) -> usize {
        self.1 += 1;
        (((number(self.1, self.0) + 1.0) / 2.0) * n as f64) as usize % n
    }

    fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }
}

impl Plan {
    fn new(seed: u64) -> Self {
        let mut dice = Dice(seed.wrapping_add(0xD1CE), 0);
        let world = 2 + dice.below(3);
        let nodes: Vec<Kind> = (0..1 + dice.below(6))
            .map(|i| match dice.below(if i == 0 { 2 } else { 6 }) {
                0 => Kind::Dense { bias: true },
                1 => Kind::Matrix,
                2 => Kind::Dense { bias: false },
                3 => Kind::Norm,
                4 => Kind::Scale,
                _ => Kind::Pair,
            })
            .collect();
        // The first node always trains, and every micro-batch goes through it: a backward has to reach the model.
        let frozen = (1..nodes.len()).filter(|_| dice.one_in(4)).collect();
        let accumulation = match dice.below(6) {
            0 => Some(2),
            1 => Some(3),
            2 => None,
            _ => Some(1),
        };
        let mut row = 0;
        let way = |dice: &mut Dice, first: bool| {
            let mut path: Vec<usize> = (0..dice.below(5)).map(|_| dice.below(nodes.len())).collect();
            if first {
                path.insert(dice.below(path.len() + 1), 0);
            }
            path
        };
        let steps = (0..1 + dice.below(4))
            .map(|_| Step {
                toggled: (1..nodes.len()).filter(|_| dice.one_in(8)).collect(),
                ranks: (0..world)
                    .map(|_| {
                        (0..accumulation.unwrap_or(1 + dice.below(3)))
                            .map(|_| {
                                (0..1 + dice.below(3))
                                    .map(|i| {
                                        row += 2;
                                        Part {
                                            row,
                                            path: way(&mut dice, i == 0),
                                            aside: dice.one_in(4).then(|| (way(&mut dice, true), dice.one_in(2))),
                                        }
                                    })
                                    .collect()
                            })
                            .collect()
                    })
                    .collect(),
                between: (0..world)
                    .map(|_| {
                        [
                            Between::Nothing,
                            Between::Nothing,
                            Between::Nothing,
                            Between::Hash,
                            Between::Forward,
                            Between::Copy,
                            Between::Valid,
                        ][dice.below(7)]
                    })
                    .collect(),
                scoped: dice.one_in(2),
            })
            .collect();
        Plan {
            seed,
            frozen,
            optim: [Optim::Sgd, Optim::Momentum, Optim::Adam][dice.below(3)],
            reduction: if dice.one_in(4) { GradientReduction::Sum } else { GradientReduction::Mean },
            accumulation,
            bucket_cap_bytes: [1, 40, 200, 1 << 20][dice.below(4)],
            steps,
            nodes,
        }
    }

    fn world(&self) -> usize {
        self.steps[0].ranks.len()
    }
}

#[derive(Module, Debug)]
#[allow(clippy::large_enum_variant)]
enum Node {
    Dense(Linear),
    Matrix(Param<Tensor<2>>),
    Norm(LayerNorm),
    Scale(Param<Tensor<1>>),
    /// The first layer is used if the sum of the input is positive, otherwise the second.
    Pair(Vec<Option<Linear>>),
}

impl Node {
    fn new(kind: Kind, device: &Device) -> Self {
        let dense = |bias| LinearConfig::new(WIDTH, WIDTH).with_bias(bias).init(device);
        match kind {
            Kind::Dense { bias } => Node::Dense(dense(bias)),
            Kind::Matrix => Node::Matrix(Param::from_tensor(Tensor::ones([WIDTH, WIDTH], device))),
            Kind::Norm => Node::Norm(LayerNormConfig::new(WIDTH).init(device)),
            Kind::Scale => Node::Scale(Param::from_tensor(Tensor::ones([1], device))),
            Kind::Pair => Node::Pair(vec![Some(dense(true)), None, Some(dense(false))]),
        }
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        match self {
            Node::Dense(layer) => layer.forward(x),
            Node::Matrix(matrix) => {
                let w = matrix.val();
                x.matmul(w.clone()) + w.narrow(0, 0, 1)
            }
            Node::Norm(layer) => layer.forward(x),
            Node::Scale(scale) => x * scale.val().unsqueeze_dim::<2>(0),
            Node::Pair(layers) => {
                let side = if x.clone().sum().into_scalar::<f64>() > 0.0 { 0 } else { 2 };
                layers[side].as_ref().expect("both ends are there").forward(x)
            }
        }
    }
}

type Net = Vec<Node>;

/// Deterministic values in f64. Ranks other than 0 get different ones, which `wrap` has to replace.
fn fill(model: Net, rank: usize) -> Net {
    struct Fill(u64);
    impl ModuleMapper for Fill {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            self.0 += 1;
            param.map(|t| {
                let dims = t.dims();
                let values: Vec<f64> = (0..dims.iter().product()).map(|i| number(i, self.0)).collect();
                Tensor::from_data(TensorData::new(values, dims), (&t.device(), DType::F64)).require_grad()
            })
        }
    }
    to_f64(model).map(&mut Fill(7 + 1000 * rank as u64))
}

fn toggle(model: &mut Net, node: usize, frozen: &mut BTreeSet<usize>) {
    let n = model[node].clone();
    model[node] = if frozen.remove(&node) {
        n.unfreeze()
    } else {
        frozen.insert(node);
        n.freeze()
    };
}

fn walk(model: &Net, row: usize, path: &[usize], device: &Device) -> Tensor<1> {
    let x = rows(row, 2, WIDTH, 3, DType::F64, device);
    path.iter().fold(x, |h, &node| model[node].forward(h).tanh()).powf_scalar(2.0).sum()
}

/// `sum` · `factor`, in f64: Burn's scalars may be narrower.
fn times(sum: Tensor<1>, factor: f64, device: &Device) -> Tensor<1> {
    sum * Tensor::from_data(TensorData::new(vec![factor], [1]), (device, DType::F64))
}

fn optimizer(optim: Optim) -> ModuleOptimizer {
    match optim {
        Optim::Sgd => SgdConfig::new().init(),
        Optim::Momentum => SgdConfig::new().with_momentum(Some(MomentumConfig::new())).init(),
        Optim::Adam => AdamConfig::new().init(),
    }
}

/// Trains on one device without burn-ddp, with the data of all ranks.
fn alone(plan: &Plan) -> Vec<Vec<f64>> {
    let device = device().autodiff();
    let mut model = fill(plan.nodes.iter().map(|&k| Node::new(k, &device)).collect(), 0);
    let mut frozen = BTreeSet::new();
    plan.frozen.iter().for_each(|&n| toggle(&mut model, n, &mut frozen));
    let mut optim = optimizer(plan.optim);
    for step in &plan.steps {
        step.toggled.iter().for_each(|&n| toggle(&mut model, n, &mut frozen));
        let parts: Vec<&Part> = step.ranks.iter().flatten().flatten().collect();
        let sum = parts.iter().map(|p| walk(&model, p.row, &p.path, &device)).reduce(|a, b| a + b).unwrap();
        let loss = times(sum, 1.0 / parts.len() as f64, &device);
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        model = optim.step(0.05, model, grads);
    }
    values(&model)
}

/// Trains on all ranks.
fn together(plan: &Plan, ddp: &Ddp) -> Result<(Vec<Vec<f64>>, String)> {
    let device = ddp.device()?.autodiff();
    let mut model = fill(plan.nodes.iter().map(|&k| Node::new(k, &device)).collect(), ddp.rank());
    let mut frozen = BTreeSet::new();
    plan.frozen.iter().for_each(|&n| toggle(&mut model, n, &mut frozen));
    let config = WrapConfig::new()
        .with_accumulation(plan.accumulation.unwrap_or(1))
        .with_reduction(plan.reduction)
        .with_first_bucket_cap_bytes(plan.bucket_cap_bytes)
        .with_bucket_cap_bytes(plan.bucket_cap_bytes)
        .with_overlap(plan.bucket_cap_bytes.is_multiple_of(2));
    let mut model = ddp.wrap_with(model, &config)?;
    let mut optim = optimizer(plan.optim);
    for step in &plan.steps {
        step.toggled.iter().for_each(|&n| toggle(&mut model, n, &mut frozen));
        let all: usize = step.ranks.iter().flatten().map(Vec::len).sum();
        let mine = &step.ranks[ddp.rank()];
        let mut grads = None;
        let mut alive = Vec::new();
        for (i, micro) in mine.iter().enumerate() {
            let parts = micro.iter().map(|p| {
                if let Some((path, kept)) = &p.aside {
                    let aside = walk(&model, p.row, path, &device);
                    if *kept {
                        alive.push(aside);
                    }
                }
                walk(&model, p.row, &p.path, &device)
            });
            let sum = parts.reduce(|a, b| a + b).expect("a micro-batch has parts");
            let divisor = if plan.reduction == GradientReduction::Sum { all } else { micro.len() };
            let loss = times(sum, 1.0 / divisor as f64, &device);
            let weighted = ddp.weighted(micro.len() as f64);
            let last = i + 1 == mine.len();
            let of_this = if plan.accumulation.is_none() && !last {
                weighted.accumulate(&loss, &model)?;
                None
            } else if step.scoped {
                weighted.scope(&model, || drop(loss.backward()))?.1
            } else {
                weighted.backward(&loss, &model)?
            };
            match step.between[ddp.rank()] {
                Between::Nothing => (),
                Between::Hash => drop(param_hash(&model)?),
                Between::Forward => drop(walk(&model, 0, &[0], &device)),
                Between::Copy => drop(model.clone().fork(&device).no_grad()),
                Between::Valid => drop(walk(&model.valid(), 0, &[0], &device.clone().inner())),
            }
            ensure!(last || of_this.is_none(), "gradients before the last micro-batch");
            grads = of_this;
        }
        drop(alive);
        model = optim.step(0.05, model, grads.expect("averages of the last micro-batch"));
    }
    Ok((values(&model), param_hash(&model)?))
}

fn follow(plan: &Plan) -> Result<()> {
    let oracle = alone(plan);
    let wait = Duration::from_secs(20);
    let options = WorldOptions { timeout: wait, join_timeout: wait, ..WorldOptions::default() };
    let ranks = Ddp::spawn_with(plan.world(), options, |ddp| together(plan, &ddp))?;
    for (rank, (_, hash)) in ranks.iter().enumerate() {
        ensure!(*hash == ranks[0].1, "rank {rank} differs from rank 0");
    }
    ensure!(ranks[0].0.len() == oracle.len(), "{} values, not {}", ranks[0].0.len(), oracle.len());
    let d = distance(&ranks[0].0, &oracle);
    ensure!(d <= 1e-9, "{d:e} away from one rank");
    ensure!(plan.seed < u64::MAX && oracle.iter().flatten().all(|v| v.is_finite()), "diverged");
    Ok(())
}
