//! Pages with one or two blocks: quickstart, migrating, configuration, devices-and-engines, errors, checkpoints,
//! performance.
#![allow(unused)]

use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn_ddp::DistributedOptimizer;

use super::*;

fn log() -> anyhow::Result<()> {
    use tracing_subscriber::{filter::Targets, prelude::*};
    let filter: Targets = std::env::var("RUST_LOG").as_deref().unwrap_or("warn").parse()?;
    let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    tracing_subscriber::registry().with(filter).with(lines).init();
    Ok(())
}

fn from_horovod(ddp: Ddp, device: Device, batches: Vec<Tensor<2>>) -> anyhow::Result<()> {
    let mut model = ddp.broadcast_parameters(ModelConfig::new().init(&device), 0)?;
    let mut optim = DistributedOptimizer::new(&ddp, AdamConfig::new().init());
    for batch in batches {
        let grads = GradientsParams::from_grads(model.loss(batch).backward(), &model);
        model = optim.try_step(1e-3, model, grads)?;
    }
    Ok(())
}

fn configuration(batcher: MyBatcher, dataset: Data) -> anyhow::Result<()> {
    let config = DdpConfig::from_env()?;
    let ddp = Ddp::init_with(config.options()?)?;
    let device = ddp.device()?.autodiff();
    if let Some(seed) = config.seed {
        ddp.seed(&device, seed);
    }
    let mut model = ddp.wrap_with(ModelConfig::new().init(&device), &config.wrap_config(ddp.world_size())?)?;
    let train = config.loader(&ddp, batcher)?.build(dataset)?;
    Ok(())
}

fn device() -> anyhow::Result<()> {
    let ddp = Ddp::init()?;
    let device = ddp.device()?.autodiff();
    println!("rank {} computes on {device:?}, collectives go through {}", ddp.rank(), ddp.engine());
    Ok(())
}

fn errors(ddp: &Ddp, mut model: Model, mut optim: ModuleOptimizer, loss: Tensor<1>, lr: f64) -> anyhow::Result<()> {
    match ddp.backward(&loss, &model) {
        Ok(Some(grads)) => model = optim.step(lr, model, grads),
        Ok(None) => {}
        Err(error) => {
            eprintln!("look at rank {:?}", error.rank());
            return Err(error.into());
        }
    }
    Ok(())
}

fn usable_job(ddp: &Ddp, model: Model) -> anyhow::Result<()> {
    match ddp.save(&model, "model") {
        Ok(path) => println!("wrote {}", path.display()),
        Err(error) if error.job_usable() => eprintln!("training goes on without this file: {error}"),
        Err(error) => return Err(error.into()),
    }
    Ok(())
}

struct State {
    model: Model,
    optim: ModuleOptimizer,
    scheduler: ModuleLrScheduler,
}

fn checkpoints(ddp: &Ddp, state: State, train: ShardedLoader<Tensor<2>>) -> anyhow::Result<()> {
    let State { mut model, mut optim, mut scheduler } = state;
    let mut step = 0;
    let checkpoints = ddp.checkpoints("out/checkpoints")?.keep_last(3);
    if let Some(checkpoint) = checkpoints.latest()? {
        model = checkpoint.model(model)?;
        optim = checkpoint.optimizer(optim, &model)?;
        scheduler = scheduler.load_record(checkpoint.scheduler()?);
        train.resume(&checkpoint.value("position")?)?;
        step = checkpoint.step();
    }
    step += 1;
    checkpoints.save(step, |c| {
        c.model(&model)?;
        c.optimizer(&optim, &model)?;
        c.scheduler(scheduler.to_record())?;
        c.value("position", &train.position())
    })?;
    Ok(())
}

fn object_storage(ddp: &Ddp) -> anyhow::Result<()> {
    let checkpoints = ddp.checkpoints("s3://bucket/runs/7")?.keep_last(3);
    Ok(())
}

fn last_step(ddp: &Ddp) {
    let s = ddp.telemetry().last_step();
    println!(
        "step {:?}: {:?} waiting for gradients, {:?} for data; {:.0} % of communication hidden",
        s.time(),
        s.wait,
        s.data,
        100.0 * s.overlap()
    );
}

fn curves(ddp: &Ddp, loss: f32, step: u64) -> anyhow::Result<()> {
    let board = ddp.telemetry().tensorboard("runs/1")?;
    board.scalar("loss", ddp.mean(loss)?, step)?;
    board.telemetry(step)?;
    Ok(())
}

fn when_the_job_has_to_stop(
    ddp: &Ddp,
    epoch: Vec<Tensor<1>>,
    mut step: u64,
    save: impl Fn(u64) -> anyhow::Result<()>,
) -> anyhow::Result<std::process::ExitCode> {
    for batch in epoch {
        step += 1;
        let stops = ddp.stop_requested();
        if stops || step.is_multiple_of(500) {
            save(step)?;
        }
        if stops {
            return Ok(ddp.exit_code());
        }
    }
    Ok(ddp.exit_code())
}
