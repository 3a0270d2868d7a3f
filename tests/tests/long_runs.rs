//! A step late in a long run costs what an early one costs: time, memory, descriptors and threads stay as they are.

mod bytes_in_use;

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::SgdConfig;
use burn::prelude::*;
use burn_ddp::prelude::*;
use bytes_in_use::LIVE;

/// Steps after which memory is looked at: the other rank may be in the middle of one of its own.
const LOOKS: usize = 200;

/// Steps of each kind of loop.
const STEPS: usize = 100_000;

#[derive(Module, Debug)]
struct Net {
    a: Linear,
    b: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        let layer = || LinearConfig::new(2, 2).init(device);
        Net { a: layer(), b: layer() }
    }

    fn loss(&self, device: &Device) -> Tensor<1> {
        self.b.forward(self.a.forward(Tensor::<2>::ones([1, 2], device))).mean()
    }
}

/// What a process uses.
#[derive(Debug)]
struct Use {
    /// Time of a step on a processor, of all threads.
    step: Duration,
    bytes: usize,
    descriptors: usize,
    threads: usize,
}

impl Use {
    /// What is used now, and was used for so many steps since `before`. `bytes` were in use between two of them.
    fn since(before: Duration, steps: usize, bytes: usize) -> Self {
        let entries = |directory: &str| std::fs::read_dir(directory).map_or(0, Iterator::count);
        let step = (processor_time() - before) / steps as u32;
        let [descriptors, threads] = ["/proc/self/fd", "/proc/self/task"].map(entries);
        Use { step, bytes, descriptors, threads }
    }
}

/// Time of this process on processors, in steps of 10 ms.
fn processor_time() -> Duration {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let (_, after_name) = stat.rsplit_once(") ").unwrap();
    let ticks = after_name.split(' ').skip(11).take(2).map(|ticks| ticks.parse::<u64>().unwrap());
    Duration::from_millis(10 * ticks.sum::<u64>())
}

/// Runs `step` so many times. Returns what the first tenth and the last tenth of the steps used.
fn tenths(steps: usize, mut step: impl FnMut() -> anyhow::Result<()>) -> anyhow::Result<[Use; 2]> {
    let mut tenth = || {
        let before = processor_time();
        (LOOKS..steps / 10).try_for_each(|_| step())?;
        let mut bytes = usize::MAX;
        for _ in 0..LOOKS {
            step()?;
            bytes = bytes.min(LIVE.load(Relaxed));
        }
        anyhow::Ok(Use::since(before, steps / 10, bytes))
    };
    let first = tenth()?;
    (1..9).try_for_each(|_| tenth().map(drop))?;
    Ok([first, tenth()?])
}

/// A loop: makes its models, and runs the steps.
type Loop = fn(&Ddp, &Device, usize) -> anyhow::Result<[Use; 2]>;

fn run(name: &str, world: usize, steps: usize, of: Loop) {
    let ranks = Ddp::spawn(world, |ddp| of(&ddp, &ddp.device()?.autodiff(), steps)).unwrap();
    let [first, last] = &ranks[0];
    compare(name, world, steps, first, last);
}

fn compare(name: &str, world: usize, steps: usize, first: &Use, last: &Use) {
    println!("{name}, {world} ranks: {first:?} -> {last:?}");
    // Memory of a step is there or not, depending on what Burn has freed; a byte a step would be more.
    assert!(last.bytes < first.bytes + steps / 10, "{name}: {first:?} {last:?}");
    assert!(last.step < 3 * first.step, "{name}: {first:?} {last:?}");
    assert!(
        last.descriptors <= first.descriptors + 2 && last.threads <= first.threads + 2,
        "{name}: {first:?} {last:?}"
    );
}

/// Trains; `between` is called with the model before each step.
fn trains(
    ddp: &Ddp,
    device: &Device,
    steps: usize,
    config: &WrapConfig,
    mut between: impl FnMut(&Net),
) -> anyhow::Result<[Use; 2]> {
    let mut model = Some(ddp.wrap_with(Net::new(device), config)?);
    let mut optim = ddp.optimizer(SgdConfig::new().init(), model.as_ref().expect("it is there"))?;
    tenths(steps, || {
        let net = model.take().expect("it is there");
        between(&net);
        let grads = ddp.backward(&net.loss(device), &net)?;
        model = Some(match grads {
            Some(grads) => optim.step(1e-6, net, grads),
            None => net,
        });
        Ok(())
    })
}

fn plain(ddp: &Ddp, device: &Device, steps: usize) -> anyhow::Result<[Use; 2]> {
    trains(ddp, device, steps, &WrapConfig::new(), |_| ())
}

fn two_models(ddp: &Ddp, device: &Device, steps: usize) -> anyhow::Result<[Use; 2]> {
    let (a, b) = (ddp.wrap(Net::new(device))?, ddp.wrap(Net::new(device))?);
    let mut of_a = ddp.optimizer(SgdConfig::new().init(), &a)?;
    let mut of_b = ddp.optimizer(SgdConfig::new().init(), &b)?;
    let mut models = Some((a, b));
    tenths(steps, || {
        let (a, b) = models.take().expect("they are there");
        let loss = a.loss(device) + b.loss(device);
        let (grads_a, grads_b) = ddp.backward(&loss, (&a, &b))?.expect("averages");
        models = Some((of_a.step(1e-6, a, grads_a), of_b.step(1e-6, b, grads_b)));
        Ok(())
    })
}

/// Everything in one test: the memory of tests beside each other cannot be told apart.
#[test]
fn a_late_step_costs_what_an_early_one_costs() {
    run("plain", 1, STEPS, plain);
    run("plain", 2, STEPS / 5, plain);
    run("accumulation", 1, STEPS, |ddp, device, steps| {
        trains(ddp, device, steps, &WrapConfig::new().with_accumulation(3), |_| ())
    });
    run("sharded", 2, STEPS / 5, |ddp, device, steps| {
        let config = WrapConfig::new().with_sharding(Sharding::Parameters).with_sharding_above(1);
        trains(ddp, device, steps, &config, |_| ())
    });
    run("several models", 1, STEPS / 2, two_models);
    run("clones", 1, STEPS / 2, |ddp, device, steps| {
        let mut kept = None;
        trains(ddp, device, steps, &WrapConfig::new(), |net| drop(kept.replace(net.clone())))
    });
    run("evaluation between steps", 1, STEPS / 2, |ddp, device, steps| {
        let inner = device.clone().inner();
        trains(ddp, device, steps, &WrapConfig::new(), |net| drop(net.valid().loss(&inner)))
    });
}

/// `cargo test --release --test long_runs -- --ignored --nocapture`
#[test]
#[ignore = "minutes"]
fn a_million_steps() {
    run("plain", 1, 1_000_000, plain);
}

#[cfg(feature = "train")]
mod trainer {
    //! A loop of Burn's trainer.

    use std::sync::Mutex;

    use burn::data::dataloader::batcher::Batcher;
    use burn::data::dataset::InMemDataset;
    use burn::nn::loss::CrossEntropyLossConfig;
    use burn::train::logger::InMemoryMetricLogger;
    use burn::train::{ClassificationOutput, InferenceStep, Learner, TrainOutput, TrainStep};
    use burn_ddp::train::SilentRenderer;

    use super::*;

    /// Steps before the end of each tenth, and what it used; the time when it began.
    static TENTHS: Mutex<(usize, Vec<Use>, Duration)> = Mutex::new((0, Vec::new(), Duration::ZERO));

    const TENTH: usize = 2_000;

    impl Net {
        fn classified(&self, x: Tensor<2>) -> ClassificationOutput {
            let classes = Tensor::<1, Int>::zeros([x.dims()[0]], &x.device());
            let output = self.b.forward(self.a.forward(x));
            let loss = CrossEntropyLossConfig::new().init(&output.device()).forward(output.clone(), classes.clone());
            ClassificationOutput::new(loss, output, classes)
        }
    }

    impl TrainStep for Net {
        type Input = Tensor<2>;
        type Output = ClassificationOutput;

        fn step(&self, x: Tensor<2>) -> TrainOutput<ClassificationOutput> {
            let mut tenths = TENTHS.lock().unwrap();
            if tenths.0.is_multiple_of(TENTH) {
                if tenths.0 > 0 {
                    let of_tenth = Use::since(tenths.2, TENTH, LIVE.load(Relaxed));
                    tenths.1.push(of_tenth);
                }
                tenths.2 = processor_time();
            }
            tenths.0 += 1;
            drop(tenths);
            let output = self.classified(x);
            TrainOutput::new(self, output.loss.backward(), output)
        }
    }

    impl InferenceStep for Net {
        type Input = Tensor<2>;
        type Output = ClassificationOutput;

        fn step(&self, x: Tensor<2>) -> ClassificationOutput {
            self.classified(x)
        }
    }

    struct Rows;

    impl Batcher<f32, Tensor<2>> for Rows {
        fn batch(&self, items: Vec<f32>, device: &Device) -> Tensor<2> {
            Tensor::<1>::from_floats(items.as_slice(), device).reshape([items.len(), 1]).repeat_dim(1, 2)
        }
    }

    /// `cargo test --features burn-ddp-tests/train --test long_runs -- --ignored trainer`
    #[test]
    #[ignore = "by hand: needs Burn's trainer"]
    fn a_late_step_of_burns_trainer_costs_what_an_early_one_costs() {
        Ddp::spawn(1, |ddp| {
            let items = |len: usize| InMemDataset::new((0..len).map(|item| item as f32 * 1e-5).collect());
            let train = ddp.loader(Rows).batch_size(1).num_workers(0).build(items(TENTH * 10 + 1))?;
            let valid = ddp.eval_loader(Rows).build(items(1))?;
            let training = ddp
                .training("unused", train, valid)
                .num_epochs(1)
                .renderer(Box::new(SilentRenderer))
                .with_metric_logger(InMemoryMetricLogger::default())
                .with_application_logger(None);
            let model = Net::new(&ddp.device()?.autodiff());
            let result = training.launch(Learner::new(model, SgdConfig::new().init(), 1e-6));
            assert!(result.error.is_none(), "{:?}", result.error);
            Ok(())
        })
        .unwrap();
        let tenths = TENTHS.lock().unwrap();
        compare("Burn's trainer", 1, TENTH * 10, &tenths.1[0], &tenths.1[9]);
    }
}
