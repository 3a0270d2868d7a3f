//! `ddp.telemetry().report()` on runs with an artificial bottleneck.

use std::thread::sleep;
use std::time::Duration;

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::nn::{Linear, LinearConfig};
use burn::prelude::*;
use burn_ddp::prelude::*;
use burn_ddp::{Cause, Report};

const WORLD: usize = 3;
const STEPS: usize = 12;
/// Duration of a bottleneck: long compared with the rest of a step, even on a busy machine.
const LONG: Duration = Duration::from_millis(60);

/// The work of a rank in every step.
#[derive(Clone, Copy)]
struct Plan {
    /// Numbers of equal layers, and their width.
    layers: usize,
    width: usize,
    /// Gradients without arithmetic: the loss is the sum of all weights.
    sum: bool,
    /// Sleep in the loader: on the last rank, and on the others.
    loader: [Duration; 2],
    /// Sleep outside of the loader: on the last rank, and on the others.
    compute: [Duration; 2],
    /// Sleep in a save.
    save: Duration,
}

const NOTHING: [Duration; 2] = [Duration::ZERO; 2];
const PLAN: Plan = Plan { layers: 2, width: 4, sum: false, loader: NOTHING, compute: NOTHING, save: Duration::ZERO };

#[derive(Module, Debug)]
struct Chain {
    layers: Vec<Linear>,
}

struct SleepingBatcher(Duration);

impl Batcher<usize, usize> for SleepingBatcher {
    fn batch(&self, items: Vec<usize>, _: &Device) -> usize {
        sleep(self.0);
        items.len()
    }
}

/// The report of a run, which is the same on all ranks.
fn run(plan: Plan) -> Report {
    let directory = tempfile::tempdir().unwrap();
    let reports = Ddp::spawn(WORLD, |ddp| {
        let of_rank = |[last, other]: [Duration; 2]| if ddp.rank() == WORLD - 1 { last } else { other };
        let device = ddp.device()?.autodiff();
        let linear = || LinearConfig::new(plan.width, plan.width).with_bias(false).init(&device);
        let model = ddp.wrap(Chain { layers: (0..plan.layers).map(|_| linear()).collect() })?;
        let checkpoints = ddp.checkpoints(directory.path())?.keep_last(1);
        let items = InMemDataset::new((0..STEPS * WORLD).collect());
        let loader = ddp.loader(SleepingBatcher(of_rank(plan.loader))).batch_size(1).build(items)?;
        for (step, batch) in loader.epochs(0..1).flatten().enumerate() {
            let x = Tensor::<2>::ones([batch?, plan.width], &device);
            let apply = |x: Tensor<2>, layer: &Linear| match plan.sum {
                true => x + layer.weight.val().sum().unsqueeze(),
                false => layer.forward(x),
            };
            ddp.backward(&model.layers.iter().fold(x, apply).sum(), &model)?;
            sleep(of_rank(plan.compute));
            if !plan.save.is_zero() {
                checkpoints.save(step as u64, |c| {
                    sleep(plan.save);
                    c.value("step", &step)
                })?;
            }
        }
        let report = ddp.telemetry().report()?.expect("enough steps");
        if ddp.is_main() {
            println!("{report}");
        }
        ddp.finish()?;
        Ok(report)
    });
    let reports = reports.unwrap();
    assert!(reports.iter().all(|report| *report == reports[0]));
    reports[0].clone()
}

fn slow_loader() -> Report {
    run(Plan { loader: [LONG; 2], ..PLAN })
}

fn slow_loader_of_one_rank() -> Report {
    run(Plan { loader: [LONG, Duration::ZERO], ..PLAN })
}

fn slow_rank() -> Report {
    run(Plan { compute: [LONG, Duration::ZERO], ..PLAN })
}

/// The cause with the largest share of the time.
fn first(report: &Report) -> Option<&Cause> {
    report.bottlenecks.first().map(|bottleneck| &bottleneck.cause)
}

#[test]
fn slow_loaders_are_told_from_one_slow_loader() {
    let report = slow_loader();
    assert_eq!(first(&report), Some(&Cause::Data), "{report}");
    // The loader reads ahead, so a part of its time is hidden.
    assert!(report.data >= LONG / 2 && report.steps == STEPS as u64 - 1, "{report}");
    let report = slow_loader_of_one_rank();
    assert!(matches!(first(&report), Some(Cause::DataOfSomeRanks { ranks, .. }) if *ranks == [WORLD - 1]), "{report}");
}

#[test]
fn time_in_saves_is_no_work_of_rank_0() {
    let report = run(Plan { save: LONG, ..PLAN });
    assert_eq!(first(&report), Some(&Cause::Saving), "{report}");
    assert!(report.saving >= LONG && report.compute < report.saving, "{report}");
}

/// Six bottlenecks and a healthy run, five times each.
#[test]
#[ignore = "needs an idle machine with a core per rank: cargo test --test report -- --ignored --nocapture"]
fn bottlenecks_are_found_five_times_of_five() {
    for _ in 0..5 {
        let report = slow_loader();
        assert_eq!(first(&report), Some(&Cause::Data), "{report}");
        let report = slow_loader_of_one_rank();
        assert!(matches!(first(&report), Some(Cause::DataOfSomeRanks { ranks, .. }) if *ranks == [2]), "{report}");
        let report = slow_rank();
        assert!(matches!(first(&report), Some(Cause::SlowRanks { ranks, .. }) if *ranks == [2]), "{report}");
        // 64 MiB of gradients without arithmetic. The ranks communicate through memory, so they also compute unevenly.
        let report = run(Plan { layers: 4, width: 2048, sum: true, ..PLAN });
        let is_link = |cause: &Cause| matches!(cause, Cause::Gradients { .. });
        assert!(report.bottlenecks.iter().any(|found| is_link(&found.cause)), "{report}");
        let report = run(Plan { layers: 600, width: 2, ..PLAN });
        assert!(matches!(first(&report), Some(Cause::SmallTensors { tensors: 600, .. })), "{report}");
        let report = run(Plan { save: LONG, ..PLAN });
        assert_eq!(first(&report), Some(&Cause::Saving), "{report}");
        let report = run(Plan { compute: [LONG; 2], ..PLAN });
        assert_eq!(first(&report), None, "{report}");
    }
}
