//! Calls that only look (save, hash, compare, measure, report, evaluate, print) change no bit of what follows, at any
//! point of a step.

use std::path::Path;

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::optim::AdamConfig;
use burn::tensor::TensorData;
use burn_ddp::checkpoint::Checkpoints;
use burn_ddp::{DdpOptimizer, Sharding};

use super::*;

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

/// What a look may look at.
struct Seen<'a> {
    ddp: &'a Ddp,
    net: &'a Net,
    optim: &'a DdpOptimizer,
    /// Steps so far.
    steps: u64,
    dir: &'a Path,
}

impl Seen<'_> {
    fn checkpoints(&self) -> burn_ddp::Result<Checkpoints> {
        self.ddp.checkpoints(self.dir.join("checkpoints"))
    }
}

type Look = fn(&Seen<'_>) -> anyhow::Result<()>;

/// Ends a look, whatever it has seen.
fn done<T>(_: T) -> anyhow::Result<()> {
    Ok(())
}

const NOTHING: Look = |_| Ok(());

const LOOKS: [(&str, Look); 13] = [
    ("save", |seen| done(seen.ddp.save(seen.net, seen.dir.join("model"))?)),
    ("save_safetensors", |seen| done(seen.ddp.save_safetensors(seen.net, seen.dir.join("model"))?)),
    ("a checkpoint", |seen| {
        Ok(seen.checkpoints()?.save(seen.steps, |c| {
            c.model(seen.net)?;
            c.optimizer(seen.optim, seen.net)
        })?)
    }),
    ("a checkpoint in the background", |seen| {
        let checkpoints = seen.checkpoints()?.asynchronous(true);
        checkpoints.save(seen.steps, |c| c.model(seen.net))?;
        Ok(checkpoints.wait()?)
    }),
    ("save of a copy", |seen| done(seen.ddp.save(&seen.net.valid(), seen.dir.join("copy"))?)),
    ("check_replicas", |seen| Ok(seen.ddp.check_replicas(seen.net)?)),
    ("param_hash", |seen| done(param_hash(seen.net)?)),
    ("an evaluation", |seen| {
        let rows = rows_of(seen.ddp.rank(), 99, 5, &seen.ddp.device()?);
        done(seen.net.valid().forward(rows).into_data())
    }),
    ("a visit", |seen| done(visited(seen.net))),
    ("a print", |seen| {
        let net = seen.net;
        done((format!("{net} {net:?}"), net.num_params()))
    }),
    ("telemetry", |seen| {
        let telemetry = seen.ddp.telemetry();
        done((telemetry.stats(), telemetry.last_step(), telemetry.memory(), telemetry.report()?))
    }),
    ("a mean", |seen| done(seen.ddp.mean(seen.ddp.rank() as f32)?)),
    ("an evaluation loader", |seen| {
        let items = InMemDataset::new((0..7).collect());
        let batches = seen.ddp.eval_loader(Count).batch_size(2).build(items)?;
        for batch in batches.iter() {
            done((batch?, seen.ddp.batch_items()))?;
        }
        Ok(())
    }),
];

#[derive(Clone, Copy, Debug)]
struct Case {
    norm: Norm,
    sharded: bool,
    accumulation: usize,
}

/// Trains three steps with batches of 9 rows on rank 0 and of 2 on the others. Looks at every step.
fn train(ddp: &Ddp, case: Case, look: Look, at: Point, dir: &Path) -> anyhow::Result<Vec<TensorData>> {
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
            true => look(&Seen { ddp, net, optim, steps, dir }),
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
        let run = |look, at| {
            let dir = tempfile::tempdir().unwrap();
            Ddp::spawn(world, |ddp| train(&ddp, case, look, at, dir.path())).unwrap()
        };
        let expected = run(NOTHING, BeforeForward);
        for at in [BeforeForward, AfterForward, AfterBackward, AfterStep] {
            for (name, look) in LOOKS {
                assert!(run(look, at) == expected, "{name} {at:?} changes a training of {world}: {case:?}");
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
