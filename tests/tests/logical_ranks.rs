//! Logical ranks: the same bits on any number of processes.

use std::path::Path;

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::module::{Module, Param};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{BatchNorm, BatchNormConfig, Embedding, EmbeddingConfig, Linear, LinearConfig, Lstm, LstmConfig};
use burn::optim::{AdamConfig, AdamWConfig, GradientsParams, ModuleOptimizer, MuonConfig, SgdConfig};
use burn::prelude::*;
use burn::tensor::DType;
use burn_ddp::prelude::*;
use burn_ddp::{GradientReduction, Sharding, param_hash};
use burn_ddp_tests::job::{FreePort, finish, line, rank, stderr, stdout};
use burn_ddp_tests::rows;

struct Together;

impl Batcher<usize, Vec<usize>> for Together {
    fn batch(&self, items: Vec<usize>, _: &Device) -> Vec<usize> {
        items
    }
}

const WIDTH: usize = 6;

/// What the tests train.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    /// Layers of which each leaf uses some, and running statistics.
    Mlp,
    Conv,
    Lstm,
    /// An embedding that is the last layer, too.
    Tied,
    /// Layers without bias.
    Matrices,
}

#[derive(Module, Debug)]
struct Net {
    trunk: Linear,
    norm: Option<BatchNorm>,
    branches: Vec<Linear>,
    conv: Option<Conv2d>,
    lstm: Option<Lstm>,
    words: Option<Embedding>,
}

/// The parameters of `module`, replaced by fixed numbers of this type.
struct Fixed(DType, u64);

impl burn::module::ModuleMapper for Fixed {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        self.1 += 1;
        let (dtype, salt) = (self.0, self.1);
        param.map(|value| {
            let (shape, device, required) = (value.shape(), value.device(), value.is_require_grad());
            let fixed = rows(0, 1, shape.num_elements(), salt, dtype, &device).mul_scalar(0.4);
            // Not running statistics, which are 0 and 1.
            if required { fixed.reshape(shape).detach().require_grad() } else { value.cast(dtype) }
        })
    }
}

impl Net {
    fn new(kind: Kind, dtype: DType, device: &Device) -> Self {
        // Muon steps matrices only.
        let linear = || LinearConfig::new(WIDTH, WIDTH).with_bias(kind != Kind::Matrices).init(device);
        let is = |of: Kind| kind == of;
        let net = Net {
            trunk: linear(),
            norm: (is(Kind::Mlp) || is(Kind::Conv)).then(|| BatchNormConfig::new(WIDTH).init(device)),
            branches: (0..if is(Kind::Mlp) { 3 } else { 1 }).map(|_| linear()).collect(),
            conv: is(Kind::Conv).then(|| Conv2dConfig::new([1, WIDTH], [3, 3]).init(device)),
            lstm: is(Kind::Lstm).then(|| LstmConfig::new(WIDTH, WIDTH, true).init(device)),
            words: is(Kind::Tied).then(|| EmbeddingConfig::new(9, WIDTH).init(device)),
        };
        net.map(&mut Fixed(dtype, 0))
    }

    /// The loss of a batch; `branch` is what its leaf uses.
    fn loss(&self, items: &[usize], branch: usize, device: &Device) -> Tensor<1> {
        let dtype = self.trunk.weight.base().dtype();
        let x = |columns| Tensor::cat(items.iter().map(|item| rows(*item, 1, columns, 9, dtype, device)).collect(), 0);
        let n = items.len();
        let mut h: Tensor<2> = match (&self.conv, &self.lstm, &self.words) {
            (Some(conv), ..) => {
                let pixels: Tensor<4> = x(25).reshape([n, 1, 5, 5]);
                conv.forward(pixels).mean_dim(3).mean_dim(2).reshape([n, WIDTH])
            }
            (_, Some(lstm), _) => {
                let (_, state) = lstm.forward(x(3 * WIDTH).reshape([n, 3, WIDTH]), None);
                state.hidden
            }
            (.., Some(words)) => {
                let ids: Vec<i64> = items.iter().map(|item| (item % 9) as i64).collect();
                words.forward(Tensor::<2, Int>::from_data(TensorData::new(ids, [n, 1]), device)).reshape([n, WIDTH])
            }
            _ => x(WIDTH),
        };
        h = self.trunk.forward(h);
        if let Some(norm) = &self.norm {
            h = norm.forward(h);
        }
        h = self.branches[branch % self.branches.len()].forward(h.tanh());
        match &self.words {
            Some(words) => h.matmul(words.weight.val().transpose()).powf_scalar(2.0).mean(),
            None => h.powf_scalar(2.0).mean(),
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum Optim {
    Sgd,
    Adam,
    AdamW,
    Muon,
}

impl Optim {
    fn init(self) -> ModuleOptimizer {
        match self {
            Optim::Sgd => SgdConfig::new().init(),
            Optim::Adam => AdamConfig::new().init(),
            Optim::AdamW => AdamWConfig::new().init(),
            Optim::Muon => MuonConfig::new().init(),
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Case {
    kind: Kind,
    optim: Optim,
    dtype: DType,
    /// Leaves of a step.
    leaves: usize,
    /// Items of a leaf, and of the epoch.
    batch: usize,
    items: usize,
    epochs: usize,
    /// True if batches have weights of their own, some 0.
    weighs: bool,
    sharded: bool,
    reduction: GradientReduction,
}

impl Case {
    const PLAIN: Case = Case {
        kind: Kind::Mlp,
        optim: Optim::Adam,
        dtype: DType::F32,
        leaves: 8,
        batch: 3,
        // Leaves of 3 items, and a last step with leaves of one or two.
        items: 84,
        epochs: 2,
        weighs: false,
        sharded: false,
        reduction: GradientReduction::Mean,
    };

    fn config(&self) -> WrapConfig {
        let config = WrapConfig::new().with_reduction(self.reduction);
        if self.sharded { config.with_sharding(Sharding::Parameters).with_sharding_above(1) } else { config }
    }
}

/// Where a run is saved and left: in a step, after a number of its micro-batches on each process.
type Stop = (u64, usize);

/// Trains; resumes from `directory` if a checkpoint is there, and leaves at `stop`. Returns the hash of the model and
/// the mean loss of each step, in bits.
fn train(
    ddp: &Ddp,
    case: Case,
    directory: Option<&Path>,
    stop: Option<Stop>,
) -> anyhow::Result<Option<(String, Vec<u64>)>> {
    ddp.set_logical_ranks(case.leaves)?;
    let device = ddp.device()?.autodiff();
    let loader = ddp.loader(Together).batch_size(case.batch).shuffle(3);
    let loader = match case.weighs {
        true => loader.weigh(|items: &Vec<usize>| [2.5, 0.0, 0.3, 1.0, 7.0][items[0] % 5]),
        false => loader,
    };
    let loader = loader.build(InMemDataset::new((0..case.items).collect()))?;
    let mut net = ddp.wrap_with(Net::new(case.kind, case.dtype, &device), &case.config())?;
    let mut optim = ddp.optimizer(case.optim.init(), &net)?;
    let checkpoints = directory.map(|directory| ddp.checkpoints(directory)).transpose()?;
    let mut steps = 0;
    if let Some(saved) = checkpoints.as_ref().map(|c| c.latest()).transpose()?.flatten() {
        steps = saved.step();
        net = saved.model(net)?;
        optim = saved.optimizer(optim, &net)?;
        loader.resume(&saved.value("position")?)?;
    }
    let (mut losses, mut in_step, mut loss) = (Vec::new(), 0, ddp.exact_sums());
    for epoch in loader.epochs(0..case.epochs) {
        for batch in epoch {
            let batch = batch?;
            let own = net.loss(&batch, ddp.logical_rank(), &device);
            loss.add(own.clone().into_scalar::<f64>(), ddp.batch_items());
            in_step += 1;
            if let Some(grads) = ddp.backward(&own, &net)? {
                net = optim.step(0.05, net, grads);
                steps += 1;
                in_step = 0;
                losses.push(std::mem::replace(&mut loss, ddp.exact_sums()).mean()?.to_bits());
            }
            if stop == Some((steps, in_step))
                && let Some(checkpoints) = &checkpoints
            {
                checkpoints.save(steps, |c| {
                    c.model(&net)?;
                    c.optimizer(&optim, &net)?;
                    c.value("position", &loader.position())
                })?;
                return Ok(None);
            }
        }
    }
    Ok(Some((param_hash(&net)?, losses)))
}

/// Trains on each number of processes: all end with the same bits.
fn equal_on(case: Case, processes: &[usize]) -> String {
    let run = |processes| {
        let ends = Ddp::spawn(processes, |ddp| train(&ddp, case, None, None)).unwrap();
        let end = ends[0].clone().unwrap();
        assert!(ends.iter().all(|other| other.as_ref() == Some(&end)), "{case:?} on {processes}: {ends:?}");
        end
    };
    let one = run(processes[0]);
    for &other in &processes[1..] {
        assert_eq!(run(other), one, "{case:?} on {other} and {} process(es)", processes[0]);
    }
    one.0
}

#[test]
fn every_number_of_processes_trains_the_same_bits() {
    let even = equal_on(Case::PLAIN, &[1, 2, 3, 4, 5, 8]);
    let other = equal_on(Case { leaves: 6, ..Case::PLAIN }, &[1, 2, 3, 4, 6]);
    assert_ne!(even, other, "another number of leaves is another training");
}

#[test]
fn so_do_leaves_of_different_weights() {
    let weighs = Case { weighs: true, ..Case::PLAIN };
    equal_on(weighs, &[1, 2, 3, 4, 8]);
    equal_on(Case { leaves: 7, kind: Kind::Conv, ..weighs }, &[1, 2, 3, 7]);
}

#[test]
fn so_do_sums_of_gradients() {
    let sum = Case { reduction: GradientReduction::Sum, optim: Optim::Sgd, ..Case::PLAIN };
    equal_on(sum, &[1, 2, 3, 8]);
}

#[test]
fn so_do_other_models_and_optimizers() {
    let case = |kind, optim| Case { kind, optim, epochs: 1, ..Case::PLAIN };
    equal_on(case(Kind::Conv, Optim::Sgd), &[1, 3, 4]);
    equal_on(case(Kind::Lstm, Optim::AdamW), &[1, 3, 4]);
    equal_on(case(Kind::Tied, Optim::Adam), &[1, 2, 5]);
    equal_on(case(Kind::Matrices, Optim::Muon), &[1, 2, 3]);
}

#[test]
fn so_do_other_types_of_floats() {
    for dtype in [DType::F64, DType::BF16] {
        equal_on(Case { dtype, kind: Kind::Tied, optim: Optim::Sgd, ..Case::PLAIN }, &[1, 2, 3, 8]);
    }
}

#[test]
fn so_do_sharded_parameters() {
    let whole = equal_on(Case { kind: Kind::Tied, ..Case::PLAIN }, &[1, 2]);
    let sharded = equal_on(Case { kind: Kind::Tied, sharded: true, ..Case::PLAIN }, &[1, 2, 3, 4, 8]);
    assert_eq!(sharded, whole);
    let weighs = Case { kind: Kind::Tied, sharded: true, weighs: true, ..Case::PLAIN };
    equal_on(weighs, &[1, 3, 4]);
    equal_on(Case { dtype: DType::BF16, optim: Optim::Sgd, ..weighs }, &[1, 3, 4]);
}

#[test]
fn parts_of_the_ranks_have_leaves_of_their_own() {
    let case = Case { leaves: 4, epochs: 1, ..Case::PLAIN };
    let alone = equal_on(case, &[1, 2]);
    let ends = Ddp::spawn(4, |ddp| {
        let part = ddp.split(Some(ddp.rank() as u64 / 2), 0)?.expect("two parts of two ranks");
        let end = train(&part, case, None, None)?;
        assert_eq!((ddp.logical_ranks(), part.logical_ranks()), (4, 4));
        Ok(end.expect("the end").0)
    });
    assert_eq!(ends.unwrap(), [0; 4].map(|_| alone.clone()));
}

/// Leaves a run in the middle of a step, and goes on with it on another number of processes.
fn interrupt(case: Case, from: usize, to: usize, stop: Stop) {
    let whole = Ddp::spawn(1, |ddp| train(&ddp, case, None, None)).unwrap().remove(0).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let left = Ddp::spawn(from, |ddp| train(&ddp, case, Some(directory.path()), Some(stop))).unwrap();
    assert!(left.iter().all(Option::is_none), "{case:?}: {stop:?} was not reached");
    for end in Ddp::spawn(to, |ddp| train(&ddp, case, Some(directory.path()), None)).unwrap() {
        assert_eq!(end.unwrap().0, whole.0, "{case:?}, from {from} to {to} processes at {stop:?}");
    }
}

#[test]
fn a_step_that_is_left_half_way_ends_on_another_number_of_processes() {
    for (from, to) in [(1, 1), (2, 2), (1, 8), (2, 1), (2, 8), (2, 3), (3, 2), (4, 1)] {
        interrupt(Case::PLAIN, from, to, (1, 1));
    }
    interrupt(Case::PLAIN, 1, 4, (4, 5));
    interrupt(Case { weighs: true, ..Case::PLAIN }, 2, 4, (2, 3));
    interrupt(Case { kind: Kind::Tied, sharded: true, ..Case::PLAIN }, 2, 3, (1, 2));
    interrupt(Case { kind: Kind::Tied, sharded: true, ..Case::PLAIN }, 3, 1, (2, 0));
    interrupt(Case { dtype: DType::BF16, kind: Kind::Tied, optim: Optim::Sgd, ..Case::PLAIN }, 2, 8, (1, 3));
}

/// Sums of the tree, made by hand.
fn fold(leaves: &[Vec<f32>]) -> Vec<f32> {
    let add = |left: &Vec<f32>, right: &Vec<f32>| left.iter().zip(right).map(|(l, r)| l + r).collect();
    let mut level = leaves.to_vec();
    while level.len() > 1 {
        level = level.chunks(2).map(|pair| if let [l, r] = pair { add(l, r) } else { pair[0].clone() }).collect();
    }
    level.remove(0)
}

/// One layer, trained by plain Burn with gradients that are put together by hand.
fn by_hand(leaves: usize, batch: usize, steps: usize) -> Vec<f32> {
    let device = burn_ddp_tests::device().autodiff();
    let layer = || -> Linear { LinearConfig::new(WIDTH, WIDTH).with_bias(false).init(&device) };
    let mut model = layer().map(&mut Fixed(DType::F32, 0));
    let mut optim: ModuleOptimizer = SgdConfig::new().init();
    for step in 0..steps {
        let (mut sums, mut total) = (Vec::new(), 0.0_f32);
        for leaf in 0..leaves {
            let items = items_of(step, leaf, batch);
            let weight = items.len() as f32 / batch as f32;
            let grads = GradientsParams::from_grads(loss(&model, &items, &device).backward(), &model);
            let gradient = grads.get::<2>(model.weight.id).unwrap().into_data();
            sums.push(gradient.iter::<f32>().map(|x| weight * x).collect());
            total += weight;
        }
        let mean: Vec<f32> = fold(&sums).into_iter().map(|x| x / total).collect();
        let mean = Tensor::<2>::from_data(TensorData::new(mean, [WIDTH, WIDTH]), &device.clone().inner());
        let mut grads = GradientsParams::new();
        grads.register(model.weight.id, mean);
        model = optim.step(0.1, model, grads);
    }
    model.weight.val().into_data().iter().collect()
}

fn items_of(step: usize, leaf: usize, batch: usize) -> Vec<usize> {
    let len = if (step + leaf).is_multiple_of(3) { batch - 1 } else { batch };
    (0..len).map(|n| 100 * step + 10 * leaf + n).collect()
}

fn loss(model: &Linear, items: &[usize], device: &Device) -> Tensor<1> {
    let x = items.iter().map(|item| rows(*item, 1, WIDTH, 9, DType::F32, device)).collect();
    model.forward(Tensor::cat(x, 0)).powf_scalar(2.0).mean()
}

#[test]
fn averages_are_those_of_a_tree_made_by_hand() {
    let (leaves, batch, steps) = (7, 3, 3);
    let expected = by_hand(leaves, batch, steps);
    for processes in [1, 2, 3, 7] {
        let got = Ddp::spawn(processes, |ddp| {
            ddp.set_logical_ranks(leaves)?;
            let device = ddp.device()?.autodiff();
            let layer: Linear = LinearConfig::new(WIDTH, WIDTH).with_bias(false).init(&device);
            let mut model = ddp.wrap(layer.map(&mut Fixed(DType::F32, 0)))?;
            let mut optim = ddp.optimizer(SgdConfig::new().init(), &model)?;
            // Weights count relative to 1 without a loader, so they are given as parts of a full leaf.
            for step in 0..steps {
                loop {
                    let leaf = ddp.next_leaf()?;
                    let items = items_of(step, leaf, batch);
                    let part = items.len() as f64 / batch as f64;
                    let loss = loss(&model, &items, &device);
                    if let Some(grads) = ddp.weighted(part).backward(&loss, &model)? {
                        model = optim.step(0.1, model, grads);
                        break;
                    }
                }
            }
            Ok(model.weight.val().into_data().iter::<f32>().collect::<Vec<_>>())
        });
        for got in got.unwrap() {
            assert_eq!(got, expected, "{processes} process(es)");
        }
    }
}

#[test]
fn one_leaf_per_process_has_the_bits_without_logical_ranks() {
    for processes in [2, 3, 4] {
        let run = |logical: bool| {
            let ends = Ddp::spawn(processes, |ddp| {
                if logical {
                    ddp.set_logical_ranks(processes)?;
                }
                let device = ddp.device()?.autodiff();
                // Full batches: others count by other factors.
                let loader = ddp.loader(Together).batch_size(3).shuffle(1);
                let loader = loader.build(InMemDataset::new((0..9 * processes).collect()))?;
                let mut net = ddp.wrap(Net::new(Kind::Conv, DType::F32, &device))?;
                let mut optim = ddp.optimizer(AdamConfig::new().init(), &net)?;
                for batch in loader.epochs(0..2).flatten() {
                    let loss = net.loss(&batch?, 0, &device);
                    let grads = ddp.backward(&loss, &net)?.expect("each batch ends a step");
                    net = optim.step(0.05, net, grads);
                }
                Ok(param_hash(&net)?)
            });
            ends.unwrap()
        };
        assert_eq!(run(true), run(false), "{processes} processes");
    }
}

/// Errors of backwards of a model whose steps have two leaves on a process, of batches that `take` chooses.
fn error_of(take: impl Fn(&Ddp, &Net, &mut dyn Iterator<Item = Vec<usize>>) -> burn_ddp::Result<()> + Sync) -> String {
    let errors = Ddp::spawn(1, |ddp| {
        ddp.set_logical_ranks(2)?;
        let device = ddp.device()?.autodiff();
        let loader = ddp.loader(Together).batch_size(2).build(InMemDataset::new((0..16).collect()))?;
        let net = ddp.wrap(Net::new(Kind::Tied, DType::F32, &device))?;
        let mut batches = loader.iter().map(|batch| batch.expect("a batch"));
        Ok(take(&ddp, &net, &mut batches).unwrap_err().to_string())
    });
    errors.unwrap().remove(0)
}

fn backward(ddp: &Ddp, net: &Net, batch: &[usize]) -> burn_ddp::Result<bool> {
    let device = ddp.device()?.autodiff();
    Ok(ddp.backward(&net.loss(batch, 0, &device), net)?.is_some())
}

#[test]
fn leaves_that_have_no_place_in_the_step_are_errors() {
    // A model that is trained by every third batch would mix the leaves of several steps.
    let text = error_of(|ddp, net, batches| {
        let device = ddp.device()?.autodiff();
        let other = ddp.wrap(Net::new(Kind::Tied, DType::F32, &device))?;
        for (nth, batch) in batches.enumerate() {
            backward(ddp, if nth % 3 == 0 { net } else { &other }, &batch)?;
        }
        Ok(())
    });
    assert!(text.contains("the logical ranks {0} of a step are held, and the next backward is of another"), "{text}");
    let text = error_of(|ddp, net, batches| {
        let batch = batches.next().expect("a batch");
        backward(ddp, net, &batch)?;
        backward(ddp, net, &batch).map(drop)
    });
    assert!(text.contains("a second backward for one batch"), "{text}");
    let text = error_of(|ddp, net, batches| {
        let _ahead = (batches.next(), batches.next());
        let device = ddp.device()?.autodiff();
        ddp.weighted(2.0).backward(&net.loss(&[0, 1], 0, &device), net).map(drop)
    });
    assert!(text.contains("its own place in the step"), "{text}");
    let text = error_of(|ddp, net, batches| {
        backward(ddp, net, &batches.next().expect("a batch"))?;
        ddp.skip_batch()
    });
    assert!(text.contains("`skip_batch` with 2 logical ranks on 1 processes"), "{text}");
}

#[test]
fn contradictions_are_refused() {
    let texts = Ddp::spawn(2, |ddp| {
        ddp.set_logical_ranks(6)?;
        let device = ddp.device()?.autodiff();
        let config = WrapConfig::new().with_accumulation(2);
        let wrap = ddp.wrap_with(Net::new(Kind::Tied, DType::F32, &device), &config).unwrap_err().to_string();
        ddp.wrap_with(Net::new(Kind::Tied, DType::F32, &device), &WrapConfig::new().with_accumulation(3))?;
        Ok(wrap)
    });
    let text = texts.unwrap().remove(0);
    assert!(text.contains("`with_accumulation(2)`, but 6 logical ranks on 2 processes make 3"), "{text}");
    let texts = Ddp::spawn(1, |ddp| {
        let device = ddp.device()?.autodiff();
        ddp.wrap(Net::new(Kind::Tied, DType::F32, &device))?;
        Ok(ddp.set_logical_ranks(6).unwrap_err().to_string())
    });
    let text = texts.unwrap().remove(0);
    assert!(text.contains("before `wrap` depends on it"), "{text}");
}

/// Results of a job of processes over `engine`; `machines` names each rank's machine.
fn processes(count: usize, engine: &str, machines: &[&str]) -> Vec<String> {
    let (world, port) = (machines.len(), FreePort::reserve());
    let start = |(nth, machine): (usize, &&str)| {
        let mut rank = rank(env!("CARGO_BIN_EXE_rank"), nth, world, port.port, &["logical", &count.to_string()]);
        if engine != "auto" {
            rank.env("BURN_DDP_ENGINE", engine);
        }
        rank.env("BURN_DDP_MACHINE", machine).env("BURN_DDP_TRUST_NETWORK", "1");
        rank
    };
    let of_rank = |output: &std::process::Output| {
        assert!(output.status.success(), "{}", stderr(output));
        line(&stdout(output), "result ").to_string()
    };
    finish(machines.iter().enumerate().map(start).collect()).iter().map(of_rank).collect()
}

#[test]
fn processes_with_dropout_train_the_same_bits_over_every_engine() {
    let one = processes(6, "shm", &["a"]);
    for (engine, machines) in [
        ("shm", &["a", "a"][..]),
        ("shm", &["a"; 4]),
        ("tcp", &["a"; 3]),
        ("tcp", &["a"; 6]),
        ("auto", &["a", "a", "b", "b"]),
        ("auto", &["a", "b", "b"]),
    ] {
        for result in processes(6, engine, machines) {
            assert_eq!(result, one[0], "{} processes over {engine}", machines.len());
        }
    }
}

#[test]
fn exact_refuses_by_name_what_it_sees() {
    let config = WrapConfig::new().with_exact(true);
    let refused = |kind, config: &WrapConfig, seeds: bool| {
        let errors = Ddp::spawn(2, |ddp| {
            ddp.set_logical_ranks(4)?;
            let device = ddp.device()?.autodiff();
            if seeds {
                ddp.seed(&device, 1);
            }
            Ok(ddp.wrap_with(Net::new(kind, DType::F32, &device), config).err().map(|error| error.to_string()))
        });
        errors.unwrap().remove(0)
    };
    let text = refused(Kind::Conv, &config.clone().with_buffers(BufferPolicy::Broadcast), false).unwrap();
    assert!(text.contains("running statistics by Broadcast"), "{text}");
    // By the number of cores, or by the ranks that are threads.
    let text = refused(Kind::Tied, &config, true).unwrap();
    assert!(text.contains("RAYON_NUM_THREADS=1") || text.contains("ranks that are threads"), "{text}");
}

/// Every combination, in about half an hour: `cargo test --release --test logical_ranks -- --ignored --nocapture`.
#[test]
#[ignore = "takes half an hour"]
fn every_combination() {
    let steps = 100;
    let mut runs = 0;
    for leaves in [6, 7, 8, 12] {
        for kind in [Kind::Mlp, Kind::Conv, Kind::Lstm, Kind::Tied, Kind::Matrices] {
            for optim in [Optim::Sgd, Optim::Adam, Optim::AdamW, Optim::Muon] {
                if matches!(optim, Optim::Muon) && kind != Kind::Matrices {
                    continue;
                }
                for weighs in [false, true] {
                    for dtype in [DType::F32, DType::F64] {
                        for sharded in [false, true] {
                            // Rows of matrices alone are no Muon; running statistics and branches are read by all.
                            if sharded && (matches!(optim, Optim::Muon) || matches!(kind, Kind::Mlp | Kind::Lstm)) {
                                continue;
                            }
                            // Burn's recurrent layers and Muon compute in f32.
                            if dtype == DType::F64 && (kind == Kind::Lstm || matches!(optim, Optim::Muon)) {
                                continue;
                            }
                            let (batch, epochs) = (2, 5);
                            let items = leaves * batch * steps / epochs + leaves + 1;
                            let case = Case {
                                kind,
                                optim,
                                dtype,
                                leaves,
                                batch,
                                items,
                                epochs,
                                weighs,
                                sharded,
                                ..Case::PLAIN
                            };
                            let on: Vec<usize> = [1, 2, 3, 4, 5, 8].into_iter().filter(|n| *n <= leaves).collect();
                            equal_on(case, &on);
                            // Burn cannot load optimizer state of f64.
                            if dtype == DType::F32 || matches!(optim, Optim::Sgd) {
                                interrupt(case, 2, 3, (7, 1));
                                interrupt(case, 1, 4, (11, 2));
                            }
                            runs += on.len();
                            eprintln!("{runs} runs: {case:?}");
                        }
                    }
                }
            }
        }
    }
}
