//! The calls that the other programs of this test leave out: on tensors, data, files and checkpoints.
//!
//! Results that differ between ranks are gathered first, so that the results of all worlds can be compared. Left out
//! are the calls that begin a job (`Ddp::init`, `init_with`, `from_world`, `launch`; `Ddp::spawn` begins the jobs
//! here), and the value that `send` and `recv` transfer, since a world of 1 has no peer.

use std::path::Path;

use burn::data::dataset::{Dataset, DatasetError};
use burn_ddp::checkpoint::Best;
use burn_ddp::clip_grad_value;
use burn_ddp::data::{Stream, StreamShard, StreamSource};

use super::*;

/// Number of elements; divisible by each number of ranks.
const TABLE: usize = 6;

/// Results of calls by their names.
type Outcomes = Vec<(&'static str, Vec<f64>)>;

fn numbers<const D: usize>(tensor: Tensor<D>) -> anyhow::Result<Vec<f64>> {
    Ok(tensor.into_data().convert::<f64>().try_to_vec()?)
}

/// A tensor of different numbers, and this rank's part of it.
fn table(ddp: &Ddp, device: &Device) -> (Tensor<1>, Tensor<1>) {
    let all = Tensor::<1, Int>::arange(1..TABLE as i64 + 1, device).float();
    let own = TABLE / ddp.world_size();
    (all.clone(), all.narrow(0, ddp.rank() * own, own))
}

fn tensors(ddp: &Ddp) -> anyhow::Result<Outcomes> {
    let device = burn_ddp_tests::device();
    let (all, own) = table(ddp, &device);
    let root = ddp.world_size() - 1;
    let whole = if ddp.rank() == root { all.clone() } else { all.zeros_like() };
    let gathered = ddp.all_gather(own.clone())?;
    let scattered = ddp.reduce_scatter(whole.clone(), ReduceOp::Sum)?;
    let reduced = ddp.reduce(whole.clone(), ReduceOp::Sum, root)?;
    let on_root = ddp.gather(own.clone(), root)?;
    assert_eq!(on_root.is_some(), ddp.rank() == root);
    let handed = ddp.scatter((ddp.rank() == root).then(|| all.clone()), own.zeros_like(), root)?;
    let exchanged = ddp.all_to_all(all.clone())?;
    let back = ddp.all_to_all(exchanged)?;
    let no_peer = [ddp.send(all.clone(), ddp.rank()).err(), ddp.recv(all.clone(), ddp.rank()).err()];
    let outcomes = vec![
        ("all_reduce", numbers(ddp.all_reduce(whole.clone(), ReduceOp::Sum)?)?),
        ("broadcast", numbers(ddp.broadcast(whole.clone(), root)?)?),
        ("all_gather", numbers(gathered)?),
        ("reduce_scatter", numbers(ddp.all_gather(scattered)?)?),
        ("reduce", numbers(ddp.broadcast(reduced, root)?)?),
        ("gather", numbers(ddp.broadcast(on_root.unwrap_or(whole), root)?)?),
        ("scatter", numbers(ddp.all_gather(handed)?)?),
        ("all_to_all", numbers(back)?),
    ];
    let expected = numbers(all.clone())?;
    for (call, values) in &outcomes {
        assert_eq!(*values, expected, "{call}");
    }
    assert!(no_peer.iter().all(Option::is_some), "a rank is no peer of its own");
    if let (0 | 1, true) = (ddp.rank(), root > 0) {
        let received = match ddp.rank() {
            0 => ddp.send(all.clone(), 1).map(|()| all)?,
            _ => ddp.recv(all.zeros_like(), 0)?,
        };
        assert_eq!(numbers(received)?, expected, "recv");
    }
    Ok(outcomes)
}

/// The ranks' shares of a loss add up to the loss of one rank alone.
fn graphs(ddp: &Ddp) -> anyhow::Result<Outcomes> {
    let device = burn_ddp_tests::device().autodiff();
    let ranks = ddp.world_size() as f32;
    let gradient = |of: &dyn Fn(Tensor<1>) -> burn_ddp::Result<Tensor<1>>| -> anyhow::Result<Tensor<1>> {
        let x = table(ddp, &device).0.require_grad();
        let loss = of(x.clone())?.powf_scalar(2.0).sum();
        x.grad(&loss.backward()).ok_or_else(|| anyhow::anyhow!("no gradient"))
    };
    let calls = ddp.differentiable();
    let mean = gradient(&|x| calls.all_reduce(x, ReduceOp::Mean))?;
    let scattered = gradient(&|x| calls.reduce_scatter(x, ReduceOp::Mean))?;
    let own = table(ddp, &device).1.require_grad();
    let loss = calls.all_gather(own.clone())?.powf_scalar(2.0).sum() / ranks;
    let gathered = own.grad(&loss.backward()).ok_or_else(|| anyhow::anyhow!("no gradient"))?;
    Ok(vec![
        ("differentiable all_reduce", numbers(mean)?),
        ("differentiable reduce_scatter", numbers(scattered * ranks)?),
        ("differentiable all_gather", numbers(ddp.all_gather(gathered)?)?),
    ])
}

/// A stream of the numbers from 0, which the ranks read in turn.
struct Dealt(usize);

impl StreamSource<usize> for Dealt {
    fn open(&self, shard: StreamShard) -> Result<Stream<usize>, DatasetError> {
        Ok(Box::new((0..self.0).filter(move |nth| shard.has(*nth)).map(Ok)))
    }
}

fn data(ddp: &Ddp) -> anyhow::Result<Outcomes> {
    let share = ddp.shard(InMemDataset::new((0..TABLE + 1).collect::<Vec<_>>()));
    let items = share.iter().collect::<Result<Vec<_>, _>>()?;
    let stream = ddp.stream(Dealt(TABLE + 1), Rows).batch_size(2).set_device(burn_ddp_tests::device()).build()?;
    let (mut read, mut inputs) = (0.0, 0.0);
    for epoch in stream.epochs(0..2) {
        for batch in epoch {
            let weight = ddp.batch_items();
            read += weight;
            // A rank without further items gets an earlier one again, with weight 0.
            inputs += batch?.0.mean().into_scalar::<f64>() * weight;
            ddp.skip_batch()?;
        }
    }
    let position = stream.position()?;
    let again = ddp.stream(Dealt(TABLE + 1), Rows).batch_size(2).build()?;
    again.resume(&position)?;
    assert_eq!(again.position()?.epoch(), position.epoch());
    Ok(vec![
        ("shard", vec![ddp.sum(items.iter().sum::<usize>() as f64)?, ddp.sum(items.len() as f64)?]),
        ("stream", vec![ddp.sum(read)?]),
        ("stream inputs", vec![ddp.sum(inputs)?]),
    ])
}

/// A model trained by a few calls, its files and checkpoints.
fn files(ddp: &Ddp, directory: &Path) -> anyhow::Result<Outcomes> {
    let device = burn_ddp_tests::device().autodiff();
    let model = ddp.wrap(mlp(ddp, &device))?;
    let mut optim = ddp.optimizer(SgdConfig::new().init(), &model)?;
    let (world, rank) = (ddp.world_size(), ddp.rank());
    let loss = loss(&model, 0, rank, world, &device);
    let grads = ddp.weighted((ROWS / world) as f64).backward(&loss, &model)?.expect("averages");
    let weight = grads.get::<2>(model.a.weight.id).ok_or_else(|| anyhow::anyhow!("no gradient"))?;
    let grads = clip_grad_value(grads, &model, 0.01)?;
    let clipped = grad_norm(&grads, &model)?;
    let checkpoints = ddp.checkpoints(directory)?.keep_last(1).keep_best(1, "loss", Best::Lowest).asynchronous(true);
    let mut model = model;
    checkpoints.save(1, |c| c.model(&model).and_then(|()| c.value("loss", &0.5)))?;
    model = optim.step(0.1, model, grads);
    for (step, loss) in [(2, 0.7), (3, 0.6)] {
        checkpoints.save(step, |c| c.model(&model).and_then(|()| c.value("loss", &loss)))?;
    }
    checkpoints.wait()?;
    let step = |found: burn_ddp::Result<Option<_>>| -> anyhow::Result<f64> {
        Ok(found?.map_or(-1.0, |found: burn_ddp::checkpoint::Checkpoint| found.step() as f64))
    };
    let list = checkpoints.list()?.iter().map(|found| found.step() as f64).collect();
    let steps = vec![
        step(checkpoints.latest())?,
        step(checkpoints.at(1))?,
        step(checkpoints.at(2))?,
        step(checkpoints.best("loss", Best::Lowest))?,
    ];
    let tensors = ddp.save_safetensors(&model, directory.join("model"))?;
    let burnpack = ddp.save(&model, directory.join("model"))?;
    let lengths = [&tensors, &burnpack].map(|path| std::fs::metadata(path).map(|file| file.len() as f64));
    let whole = ddp.unwrap(model)?;
    assert_eq!(param_hash(&whole)?, param_hash(&whole.valid())?);
    Ok(vec![
        ("weighted", numbers(weight)?),
        ("clip_grad_value", vec![clipped]),
        ("list", list),
        ("checkpoints", steps),
        ("files", lengths.into_iter().collect::<Result<_, _>>()?),
    ])
}

/// The properties of a rank and of the job that `Ddp` returns.
fn roles(ddp: &Ddp) -> anyhow::Result<Outcomes> {
    assert_eq!((ddp.local_rank(), ddp.local_world_size()), (ddp.rank(), ddp.world_size()));
    assert_eq!((ddp.world().rank(), ddp.group().rank()), (ddp.rank(), ddp.rank()));
    assert_eq!(ddp.local_main_first(|| Ok(ddp.rank()))?, ddp.rank());
    assert_eq!(ddp.main_first(|| Ok(ddp.rank()))?, ddp.rank());
    assert!(!ddp.engine().is_empty());
    ddp.barrier()?;
    let of_first = ddp.local_main_first(|| match ddp.rank() {
        0 => Err(anyhow::anyhow!("no room")),
        _ => Ok(()),
    });
    let error = of_first.unwrap_err().to_string();
    assert!(error.contains("no room"), "{error}");
    let kind = ddp.device()? == burn_ddp_tests::device();
    let stats = ddp.telemetry().stats();
    Ok(vec![("device", vec![f64::from(kind)]), ("steps", vec![stats.steps as f64])])
}

#[test]
fn each_other_call_has_the_same_outcome() {
    let run = |world| {
        let directory = tempfile::tempdir().unwrap();
        let outcomes = Ddp::spawn(world, |ddp| {
            let outcomes =
                [tensors(&ddp)?, graphs(&ddp)?, data(&ddp)?, files(&ddp, directory.path())?, roles(&ddp)?].concat();
            ddp.finish()?;
            Ok(outcomes)
        });
        outcomes.unwrap()
    };
    let expected = run(1).remove(0);
    for world in [2, 3] {
        for (rank, outcomes) in run(world).into_iter().enumerate() {
            for ((call, values), (_, alone)) in outcomes.iter().zip(&expected) {
                assert_eq!(values.len(), alone.len(), "{call} on rank {rank} of {world}: {values:?}, alone {alone:?}");
                let off = values.iter().zip(alone).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
                assert!(off <= 1e-10, "{call} on rank {rank} of {world}: {values:?}, alone {alone:?}");
            }
        }
    }
}
