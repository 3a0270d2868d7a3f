//! The timeline of a job: complete, in order, and without effect on the training.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::optim::SgdConfig;
use burn::prelude::*;
use burn::tensor::DType;
use burn_ddp::prelude::*;
use burn_ddp::{Stats, WorldOptions};
use burn_ddp_tests::job::{FreePort, rank, stderr};
use burn_ddp_tests::{Mlp, rows};
use serde_json::Value;

const RANK: &str = env!("CARGO_BIN_EXE_rank");
const STEPS: usize = 6;
const ACCUMULATION: usize = 2;

/// A complete event; times in nanoseconds.
#[derive(Clone, Debug)]
struct Span {
    rank: u64,
    row: String,
    name: String,
    begin: u64,
    end: u64,
    args: Value,
}

/// Parses a trace, and checks the rules that hold for every trace.
fn read(file: &Path) -> Vec<Span> {
    let trace: Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let mut rows = BTreeMap::new();
    for event in events.iter().filter(|e| e["name"] == "thread_name") {
        let name = event["args"]["name"].as_str().unwrap().to_string();
        assert_eq!(rows.insert((event["pid"].as_u64().unwrap(), event["tid"].as_u64().unwrap()), name), None);
    }
    let nanos = |value: &Value| (value.as_f64().unwrap() * 1e3).round() as u64;
    let spans = events.iter().filter(|e| e["ph"] == "X").map(|e| {
        let rank = e["pid"].as_u64().unwrap();
        let begin = nanos(&e["ts"]);
        let row = rows[&(rank, e["tid"].as_u64().unwrap())].clone();
        let name = e["name"].as_str().unwrap().to_string();
        Span { rank, row, name, begin, end: begin + nanos(&e["dur"]), args: e["args"].clone() }
    });
    let spans: Vec<Span> = spans.collect();
    check_nesting(&spans);
    spans
}

/// Checks that the spans of a row follow each other or lie inside each other.
fn check_nesting(spans: &[Span]) {
    let mut by_row: BTreeMap<(u64, &str), Vec<&Span>> = BTreeMap::new();
    spans.iter().for_each(|s| by_row.entry((s.rank, &s.row)).or_default().push(s));
    for row in by_row.values_mut() {
        row.sort_by_key(|s| (s.begin, std::cmp::Reverse(s.end)));
        let mut open: Vec<&Span> = Vec::new();
        for span in row {
            open.retain(|outer| outer.end > span.begin);
            assert!(open.last().is_none_or(|outer| span.end <= outer.end), "{span:?} sticks out of {:?}", open.last());
            open.push(span);
        }
    }
}

struct Together;

impl Batcher<usize, Tensor<2>> for Together {
    fn batch(&self, items: Vec<usize>, device: &Device) -> Tensor<2> {
        rows(items[0], items.len(), 6, 1, DType::F32, device)
    }
}

/// Trains for [`STEPS`] steps of [`ACCUMULATION`] micro-batches. Returns the parameters' hash, the counters of all
/// steps and those of the last step.
fn train(ddp: &Ddp, overlap: bool) -> anyhow::Result<(String, Stats, Stats)> {
    let device = ddp.device()?.autodiff();
    let config = WrapConfig::new().with_accumulation(ACCUMULATION).with_overlap(overlap);
    let config = config.with_bucket_cap_bytes(600).with_first_bucket_cap_bytes(200).with_replica_check(2);
    let mut model = ddp.wrap_with(constant(Mlp::new(&device)), &config)?;
    let mut optim = SgdConfig::new().init();
    let dataset = InMemDataset::new((0..STEPS * ACCUMULATION * 4 * ddp.world_size()).collect());
    let loader = ddp.loader(Together).batch_size(4).set_device(device).build(dataset)?;
    for (nth, batch) in loader.iter().enumerate() {
        let loss = model.forward(batch?).powf_scalar(2.0).mean();
        ddp.mean(nth as f64)?;
        let grads = ddp.backward(&loss, &model)?;
        anyhow::ensure!(grads.is_some() == ((nth + 1) % ACCUMULATION == 0), "a step per {ACCUMULATION} micro-batches");
        if let Some(grads) = grads {
            model = optim.step(0.05, model, grads);
        }
    }
    Ok((param_hash(&model)?, ddp.telemetry().stats(), ddp.telemetry().last_step()))
}

/// Gives the model the same values in every run.
fn constant(model: Mlp) -> Mlp {
    struct Fill(usize);
    impl burn::module::ModuleMapper for Fill {
        fn map_float<const D: usize>(
            &mut self,
            param: burn::module::Param<Tensor<D>>,
        ) -> burn::module::Param<Tensor<D>> {
            self.0 += 1;
            param.map(|t| {
                let values = rows(self.0, 1, t.shape().num_elements(), 5, DType::F32, &t.device());
                let values = values.reshape(t.shape()).detach();
                if t.is_require_grad() { values.require_grad() } else { values }
            })
        }
    }
    model.map(&mut Fill(0))
}

fn options(file: Option<&Path>) -> WorldOptions {
    WorldOptions { timeline: file.map(Into::into), ..WorldOptions::default() }
}

/// `tests/fixtures/earlier_version/README.md` says how the files were made.
#[test]
fn files_of_an_earlier_version_are_merged_and_read() {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/earlier_version");
    let dir = tempfile::tempdir().unwrap();
    for part in ["killed.json.rank-0", "killed.json.rank-1"] {
        std::fs::copy(fixture.join(part), dir.path().join(part)).unwrap();
    }
    let killed = dir.path().join("killed.json");
    burn_ddp::comm::timeline::conclude(&killed, 0..2, 2).unwrap();
    // The parts were copied shortly before the job ended.
    let (killed, whole) = (read(&killed), read(&fixture.join("timeline.json")));
    assert!(killed.len() < whole.len());
    for rank in 0..2 {
        let names = |spans: &[Span]| -> Vec<(String, String)> {
            let mut spans: Vec<&Span> = spans.iter().filter(|span| span.rank == rank).collect();
            spans.sort_by(|a, b| (&a.row, a.begin, b.end).cmp(&(&b.row, b.begin, a.end)));
            spans.iter().map(|span| (span.row.clone(), span.name.clone())).collect()
        };
        let (killed, whole) = (names(&killed), names(&whole));
        assert_eq!(killed.iter().filter(|(_, name)| name == "batch").count(), 7, "{killed:?}");
        assert!(killed.iter().all(|span| whole.contains(span)), "{killed:?} of {whole:?}");
    }
}

#[test]
fn everything_of_every_step_on_every_rank_is_there_and_nothing_changes() {
    let dir = tempfile::tempdir().unwrap();
    for (world, overlap) in [(1, true), (2, true), (3, false)] {
        let file = dir.path().join(format!("trace-{world}.json"));
        let plain = Ddp::spawn_with(world, options(None), |ddp| train(&ddp, overlap)).unwrap();
        let seen = Ddp::spawn_with(world, options(Some(&file)), |ddp| train(&ddp, overlap)).unwrap();
        for ((hash, stats, last), (hash_seen, stats_seen, _)) in plain.iter().zip(&seen) {
            assert_eq!(hash, hash_seen);
            assert_eq!((stats.collectives, stats.bytes), (stats_seen.collectives, stats_seen.bytes));
            assert_eq!((stats.steps, last.steps), (STEPS as u64, 1));
        }
        let spans = read(&file);
        let names: Vec<_> = std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert!(names.iter().all(|name| !name.to_string_lossy().contains("rank")), "no part is left: {names:?}");
        for (rank, (_, stats, _)) in seen.iter().enumerate() {
            let mine: Vec<&Span> = spans.iter().filter(|s| s.rank == rank as u64).collect();
            check_rank(&mine, stats);
        }
        assert_eq!(spans.iter().map(|s| s.rank).max(), Some(world as u64 - 1));
    }
}

fn check_rank(mine: &[&Span], stats: &Stats) {
    let of = |name: &str| mine.iter().filter(|s| s.name == name).copied().collect::<Vec<_>>();
    let steps: Vec<&Span> = mine.iter().filter(|s| s.name.starts_with("step ")).copied().collect();
    assert_eq!(
        steps.iter().map(|s| s.name.clone()).collect::<Vec<_>>(),
        (0..STEPS).map(|n| format!("step {n}")).collect::<Vec<_>>()
    );
    assert_eq!(of("backward").len(), STEPS * ACCUMULATION);
    assert_eq!(of("batch").len(), STEPS * ACCUMULATION);
    let buckets: Vec<&Span> = mine.iter().filter(|s| s.name.starts_with("bucket ")).copied().collect();
    assert_eq!(buckets.len() as u64, stats.collectives);
    assert_eq!(buckets.iter().map(|b| b.args["bytes"].as_u64().unwrap()).sum::<u64>(), stats.bytes);
    let mut waited = 0;
    for (nth, step) in steps.iter().enumerate() {
        let within = |s: &&&Span| step.begin <= s.begin && s.end <= step.end;
        let in_step: Vec<_> = buckets.iter().filter(|b| b.args["step"] == nth as u64).collect();
        assert!(!in_step.is_empty() && in_step.iter().all(&within), "step {nth}: {in_step:?} in {step:?}");
        let numbers: Vec<_> = in_step.iter().map(|b| b.name.clone()).collect();
        assert_eq!(numbers, (0..in_step.len()).map(|b| format!("bucket {b}")).collect::<Vec<_>>());
        let backwards = of("backward").iter().filter(within).count();
        assert_eq!(backwards, ACCUMULATION);
        waited += of("wait").iter().filter(within).map(|w| w.end - w.begin).sum::<u64>();
    }
    // Each time is shown in eighths of a microsecond.
    let shown = |nanos: u64, counted: Duration| nanos.abs_diff(counted.as_nanos() as u64) < 125 * mine.len() as u64;
    assert!(shown(waited, stats.wait), "{waited} {:?}", stats.wait);
    let calls = of("all_reduce");
    assert_eq!(calls.len(), STEPS * ACCUMULATION, "the program's own, not those of buckets");
    assert!(calls.iter().all(|c| c.args["site"].as_str().unwrap().contains("timeline.rs:") && c.args["bytes"] == 16));
    let outside: u64 = of("outside backward").iter().map(|s| s.end - s.begin).sum();
    assert!(shown(outside, stats.outside), "{outside} {:?}", stats.outside);
    assert!(stats.calls + stats.data <= stats.outside && stats.calls > Duration::ZERO && stats.data > Duration::ZERO);
}

#[test]
fn the_times_of_a_step_add_up() {
    let stats = Ddp::spawn(2, |ddp| {
        let began = Instant::now();
        let (_, stats, last) = train(&ddp, true)?;
        assert!(stats.time() <= began.elapsed() && last.time() <= stats.time());
        assert!((0.0..=1.0).contains(&stats.overlap()));
        Ok(stats)
    });
    assert!(stats.unwrap().iter().all(|s| s.backward > Duration::ZERO && s.wait > Duration::ZERO));
}

#[test]
fn the_rank_that_the_others_wait_for_is_named_on_all() {
    let found = Ddp::spawn(3, |ddp| {
        let device = ddp.device()?.autodiff();
        let model = ddp.wrap_with(Mlp::new(&device), &WrapConfig::new().with_replica_check(10))?;
        for step in 0..21 {
            let x = rows(step, 2, 6, 1, DType::F32, &device);
            if ddp.rank() == 1 {
                std::thread::sleep(Duration::from_millis(50));
            }
            ddp.mean(0.0)?; // the other ranks wait here and not in backward
            ddp.backward(&model.forward(x).sum(), &model)?;
        }
        Ok(ddp.telemetry().straggler())
    });
    let found = found.unwrap();
    let straggler = found[0].clone().expect("rank 1 sleeps");
    assert_eq!((straggler.rank, straggler.steps), (1, 10));
    assert!(straggler.work >= Duration::from_millis(50) && straggler.others < straggler.work, "{straggler}");
    assert!(found.iter().all(|other| *other == found[0]));
}

#[test]
fn the_timeline_of_a_job_that_fails_tells_of_all_ranks() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("trace.json");
    let port = FreePort::reserve();
    // There is no launcher, so the survivors join the parts of the timeline. Rank 1 dies in its fourth step.
    let start = |r| rank(RANK, r, 3, port.port, &["kill"]).env("BURN_DDP_TIMELINE", &file).spawn().unwrap();
    let outputs: Vec<_> = [0, 1, 2].map(start).into_iter().map(|child| child.wait_with_output().unwrap()).collect();
    assert!(outputs.iter().all(|o| !o.status.success()));
    let spans = read(&file);
    for rank in [0, 2] {
        let steps = spans.iter().filter(|s| s.rank == rank && s.name.starts_with("step ")).count();
        assert_eq!(steps, 3, "{}", stderr(&outputs[0]));
    }
    let failed = spans.iter().find(|s| s.args["error"].is_string());
    assert!(failed.is_some_and(|s| s.args["error"].as_str().unwrap().contains("rank 1")), "the barrier after it");
}

#[test]
fn a_launcher_puts_together_what_killed_ranks_left() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("trace.json");
    let mut command = std::process::Command::new(RANK);
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("BURN_DDP_") || name.contains("RANK")) {
        command.env_remove(name);
    }
    let output = command.args(["fault", "2", "1", "barrier", "kill"]).env("BURN_DDP_TIMELINE", &file).output().unwrap();
    assert!(!output.status.success());
    let names: Vec<_> = std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(names, ["trace.json"], "parts are removed");
    let spans = read(&file);
    assert_eq!(spans.iter().filter(|s| s.rank == 0 && s.name.starts_with("step ")).count(), 4);
}
