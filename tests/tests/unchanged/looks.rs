//! Calls that only look (save, hash, compare, measure, report, evaluate, print) change no bit of what follows, at any
//! point of a step.

use std::path::Path;

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::module::{ModuleVisitor, Param};
use burn::optim::AdamConfig;
use burn::tensor::TensorData;
use burn_ddp::{DdpOptimizer, Sharding};

use super::*;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Look {
    Nothing,
    Save,
    SaveSafetensors,
    Checkpoint,
    CheckpointInBackground,
    SaveCopy,
    CheckReplicas,
    Hash,
    Evaluate,
    Visit,
    Print,
    Telemetry,
    Mean,
    EvaluateByLoader,
}

use Look::*;

const LOOKS: [Look; 13] = [
    Save,
    SaveSafetensors,
    Checkpoint,
    CheckpointInBackground,
    SaveCopy,
    CheckReplicas,
    Hash,
    Evaluate,
    Visit,
    Print,
    Telemetry,
    Mean,
    EvaluateByLoader,
];

#[derive(Clone, Copy, Debug, PartialEq)]
enum Point {
    BeforeForward,
    AfterForward,
    /// Also between micro-batches.
    AfterBackward,
    AfterStep,
}

use Point::*;

#[derive(Clone)]
struct Count;

impl Batcher<u32, usize> for Count {
    fn batch(&self, items: Vec<u32>, _: &Device) -> usize {
        items.len()
    }
}

struct Values(Vec<TensorData>);

impl ModuleVisitor for Values {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.0.push(param.base().into_data());
    }
}

fn visited(net: &Net) -> Vec<TensorData> {
    let mut values = Values(Vec::new());
    net.visit(&mut values);
    values.0
}

fn look(what: Look, ddp: &Ddp, net: &Net, optim: &DdpOptimizer, step: u64, dir: &Path) -> anyhow::Result<()> {
    let checkpoints = || ddp.checkpoints(dir.join("checkpoints"));
    match what {
        Nothing => {}
        Save => drop(ddp.save(net, dir.join("model"))?),
        SaveSafetensors => drop(ddp.save_safetensors(net, dir.join("model"))?),
        Checkpoint => checkpoints()?.save(step, |c| {
            c.model(net)?;
            c.optimizer(optim, net)
        })?,
        CheckpointInBackground => {
            let checkpoints = checkpoints()?.asynchronous(true);
            checkpoints.save(step, |c| c.model(net))?;
            checkpoints.wait()?;
        }
        SaveCopy => drop(ddp.save(&net.valid(), dir.join("copy"))?),
        CheckReplicas => ddp.check_replicas(net)?,
        Hash => drop(param_hash(net)?),
        Evaluate => drop(net.valid().forward(rows_of(ddp.rank(), 99, 5, &ddp.device()?)).into_data()),
        Visit => drop(visited(net)),
        Print => drop((format!("{net} {net:?}"), net.num_params())),
        Telemetry => {
            let telemetry = ddp.telemetry();
            drop((telemetry.stats(), telemetry.last_step(), telemetry.memory(), telemetry.report()?));
        }
        Mean => drop(ddp.mean(ddp.rank() as f32)?),
        EvaluateByLoader => {
            let items = InMemDataset::new((0..7).collect());
            let batches = ddp.eval_loader(Count).batch_size(2).build(items)?;
            for batch in batches.iter() {
                let _ = (batch?, ddp.batch_items());
            }
        }
    }
    Ok(())
}

#[derive(Clone, Copy, Debug)]
struct Case {
    norm: Norm,
    sharded: bool,
    accumulation: usize,
}

/// Trains three steps with batches of 9 rows on rank 0 and of 1 on the others. Looks at every step.
fn train(ddp: &Ddp, case: Case, what: Look, at: Point, dir: &Path) -> anyhow::Result<Vec<TensorData>> {
    let Case { norm, sharded, accumulation } = case;
    let device = ddp.device()?.autodiff();
    let mut config = WrapConfig::new().with_accumulation(accumulation).with_replica_check(2);
    if let Norm::Own(policy) = norm {
        config = config.with_buffers(policy);
    }
    if sharded {
        config = config.with_sharding(Sharding::Parameters).with_sharding_above(1);
    }
    let mut net = ddp.wrap_with(Net::new(norm, &device), &config)?;
    let mut optim = ddp.optimizer(AdamConfig::new().init(), &net)?;
    let rows = if ddp.rank() == 0 { 9 } else { 2 };
    let mut steps = 0;
    for nth in 0..3 * accumulation {
        let look = |now: Point, net: &Net, optim: &DdpOptimizer, steps: u64| match now == at {
            true => look(what, ddp, net, optim, steps, dir),
            false => Ok(()),
        };
        look(BeforeForward, &net, &optim, steps)?;
        let loss = net.loss(rows_of(ddp.rank(), nth, rows, &device));
        look(AfterForward, &net, &optim, steps)?;
        let grads = ddp.weighted(rows as f64).backward(&loss, &net)?;
        look(AfterBackward, &net, &optim, steps)?;
        if let Some(grads) = grads {
            net = optim.step(0.1, net, grads);
            steps += 1;
        }
        look(AfterStep, &net, &optim, steps)?;
    }
    drop(net.valid());
    // This rank's own running statistics, too.
    Ok(visited(&net))
}

fn unchanged(case: Case) {
    for world in [1, 2] {
        let run = |what, at| {
            let dir = tempfile::tempdir().unwrap();
            Ddp::spawn(world, |ddp| train(&ddp, case, what, at, dir.path())).unwrap()
        };
        let expected = run(Nothing, BeforeForward);
        for at in [BeforeForward, AfterForward, AfterBackward, AfterStep] {
            for what in LOOKS {
                assert!(run(what, at) == expected, "{what:?} {at:?} changes a training of {world}: {case:?}");
            }
        }
    }
}

#[test]
fn looks_change_nothing_with_averaged_statistics() {
    unchanged(Case { norm: Norm::Own(BufferPolicy::Average), sharded: false, accumulation: 2 });
}

#[test]
fn looks_change_nothing_with_broadcast_statistics() {
    unchanged(Case { norm: Norm::Own(BufferPolicy::Broadcast), sharded: false, accumulation: 2 });
}

#[test]
fn looks_change_nothing_with_statistics_of_each_rank() {
    unchanged(Case { norm: Norm::Own(BufferPolicy::Local), sharded: false, accumulation: 1 });
}

#[test]
fn looks_change_nothing_with_a_synced_norm() {
    unchanged(Case { norm: Norm::Synced, sharded: false, accumulation: 2 });
}

#[test]
fn looks_change_nothing_with_sharded_parameters() {
    unchanged(Case { norm: Norm::Own(BufferPolicy::Average), sharded: true, accumulation: 2 });
}

/// What a visitor, such as a moving average, sees after a call is what the model would evaluate with.
#[test]
fn a_visitor_sees_the_statistics_of_the_last_call_on_any_number_of_ranks() {
    for (world, accumulation) in [(1, 1), (2, 1), (1, 2), (2, 2)] {
        Ddp::spawn(world, |ddp| {
            let device = ddp.device()?.autodiff();
            let config = WrapConfig::new().with_accumulation(accumulation);
            let net = ddp.wrap_with(Net::new(Norm::Own(BufferPolicy::Average), &device), &config)?;
            for nth in 0..4 {
                ddp.backward(&net.loss(rows_of(ddp.rank(), nth, 3, &device)), &net)?;
                let (seen, fresh) = (visited(&net), visited(&net.valid()));
                assert!(seen == fresh, "micro-batch {nth} on {world} rank(s), accumulation {accumulation}");
            }
            Ok(())
        })
        .unwrap();
    }
}
