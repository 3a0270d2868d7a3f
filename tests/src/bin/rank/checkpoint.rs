//! Trains and saves: `rank checkpoint DIRECTORY STEPS EVERY [now|later|sharded|large|large-later] [kill AT]`.

use std::io::Write;
use std::path::Path;

use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
use burn::module::Param;
use burn::nn::{BatchNorm, BatchNormConfig};
use burn::optim::AdamConfig;
use burn::prelude::*;
use burn::tensor::DType;
use burn_ddp::prelude::*;
use burn_ddp_tests::{Mlp, rows};

#[derive(Module, Debug)]
struct Normed {
    norm: BatchNorm,
    mlp: Mlp,
    /// 40 MB that make the model's file large.
    ballast: Option<Param<Tensor<1>>>,
}

pub(crate) fn run(ddp: &Ddp) -> anyhow::Result<()> {
    let args: Vec<String> = std::env::args().skip(2).collect();
    let arg = |n: usize| args.get(n).map_or("", String::as_str);
    let (directory, steps, every): (_, u64, u64) = (Path::new(arg(0)), arg(1).parse()?, arg(2).parse()?);
    let kill_at: Option<u64> = if arg(4) == "kill" { Some(arg(5).parse()?) } else { None };
    let device = ddp.device()?.autodiff();
    ddp.seed(&device, 7);
    let config = match arg(3) {
        "sharded" => WrapConfig::new().with_sharding(Sharding::Parameters).with_sharding_above(1),
        _ => WrapConfig::new(),
    };
    let ballast = arg(3).starts_with("large").then(|| {
        let zeros = Tensor::zeros([10_000_000], &device);
        Param::from_tensor(zeros).set_require_grad(false)
    });
    let model = Normed { norm: BatchNormConfig::new(6).init(&device), mlp: Mlp::new(&device), ballast };
    let mut model = ddp.wrap_with(model, &config)?;
    let mut optim = ddp.optimizer(AdamConfig::new().init(), &model)?;
    let schedule = CosineAnnealingLrSchedulerConfig::new(1e-2, 1000);
    let mut scheduler = schedule.init().map_err(anyhow::Error::msg)?;
    let mut start = 0;
    let checkpoints = ddp.checkpoints(directory)?.keep_last(3).asynchronous(arg(3).ends_with("later"));
    if let Some(found) = checkpoints.latest()? {
        model = found.model(model)?;
        optim = found.optimizer(optim, &model)?;
        scheduler = scheduler.load_record(found.scheduler()?);
        start = found.value("next step")?;
        anyhow::ensure!(start == found.step());
    }
    say(ddp, &format!("resumed {start}"))?;
    for step in start..steps {
        if kill_at == Some(step) && ddp.rank() == 1 && !directory.join("was killed").exists() {
            std::fs::write(directory.join("was killed"), "")?;
            rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL)?;
        }
        let place = (step as usize * ddp.world_size() + ddp.rank()) * 4;
        let x = model.norm.forward(rows(place, 4, 6, 1, DType::F32, &device));
        let loss = model.mlp.loss(x, rows(place, 4, 3, 2, DType::F32, &device));
        let grads = ddp.backward(&loss, &model)?.expect("averages");
        model = optim.step(scheduler.step(), model, grads);
        if (step + 1).is_multiple_of(every) {
            checkpoints.save(step + 1, |c| {
                c.model(&model)?;
                c.optimizer(&optim, &model)?;
                c.scheduler(scheduler.to_record())?;
                c.value("next step", &(step + 1))
            })?;
            if !directory.starts_with("s3:") {
                ddp.save(&model, directory.join("model"))?;
            }
            say(ddp, &format!("saved {}", step + 1))?;
        }
    }
    println!("hash {}", param_hash(&model)?);
    ddp.clone().finish()?;
    Ok(())
}

fn say(ddp: &Ddp, line: &str) -> anyhow::Result<()> {
    if ddp.is_main() {
        let mut out = std::io::stdout().lock();
        writeln!(out, "{line}")?;
        out.flush()?;
    }
    Ok(())
}
