//! Settings of a job from its configuration file.

use std::path::Path;

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::prelude::*;
use burn::tensor::DType;
use burn_ddp::prelude::*;
use burn_ddp_tests::job::{FreePort, rank, stderr, stdout};
use burn_ddp_tests::{Mlp, rows};

const RANK: &str = env!("CARGO_BIN_EXE_rank");

struct Together;

impl Batcher<usize, Tensor<2>> for Together {
    fn batch(&self, items: Vec<usize>, device: &Device) -> Tensor<2> {
        rows(items[0], items.len(), 6, 1, DType::F32, device)
    }
}

fn write(dir: &Path, name: &str, text: &str) -> DdpConfig {
    let path = dir.join(name);
    std::fs::write(&path, text).unwrap();
    DdpConfig::load(path).unwrap()
}

/// One epoch of 96 items; steps, backwards and the items of this rank's first batch.
fn epoch(ddp: &Ddp, config: &DdpConfig) -> anyhow::Result<(u64, usize, usize)> {
    let device = ddp.device()?.autodiff();
    let model = ddp.wrap_with(Mlp::new(&device), &config.wrap_config(ddp.world_size())?)?;
    let train = config.loader(ddp, Together)?.set_device(device).build(InMemDataset::new((0..96).collect()))?;
    let mut items = Vec::new();
    for batch in train.iter() {
        let batch = batch?;
        items.push(batch.dims()[0]);
        ddp.backward(&model.forward(batch).mean(), &model)?;
    }
    Ok((ddp.telemetry().stats().steps, items.len(), items[0]))
}

#[test]
fn fewer_ranks_accumulate_more() {
    let dir = tempfile::tempdir().unwrap();
    let config = write(dir.path(), "a.toml", "train_batch = 48\nmicro_batch = 8\n[wrap]\nreplica_check = 0\n");
    for (world, backwards) in [(2, 6), (3, 4), (4, 4), (6, 2)] {
        let seen = Ddp::spawn_with(world, config.options().unwrap(), |ddp| epoch(&ddp, &config)).unwrap();
        assert_eq!(seen, vec![(2, backwards, 8); world], "two steps of 48 items, whatever the number of ranks");
    }
    let error = Ddp::spawn(4, |ddp| epoch(&ddp, &config)).unwrap_err().to_string();
    assert!(error.contains("asks for 6 logical ranks") && error.contains("config.options()"), "{error}");
    let many = Ddp::spawn_with(7, config.options().unwrap(), |_| Ok(())).unwrap_err().to_string();
    assert!(many.contains("6 logical ranks for 7 processes"), "{many}");
}

#[test]
fn ranks_that_read_different_files_are_told_what_differs() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), "0.toml", "micro_batch = 8\n[data]\nworkers = 1\n");
    write(dir.path(), "1.json", r#"{"micro_batch": 16, "data": {"workers": 2}}"#);
    let port = FreePort::reserve();
    let start = |(r, file)| {
        let mut command = rank(RANK, r, 2, port.port, &["config"]);
        command.env("BURN_DDP_CONFIG", dir.path().join(file)).spawn().unwrap()
    };
    let ranks = [(0, "0.toml"), (1, "1.json")].map(start);
    let outputs = ranks.map(|rank| rank.wait_with_output().unwrap());
    assert!(outputs.iter().all(|output| !output.status.success()));
    // If rank 0, which hosts the store, gets the error first, the other rank may only report that rank 0 has ended.
    let errors = outputs.iter().map(stderr).collect::<Vec<_>>().concat();
    assert!(
        errors.contains("disagree about micro_batch") && errors.contains("has 8") && errors.contains("has 16"),
        "{errors}"
    );
}

#[test]
fn the_environment_of_a_process_wins_over_its_file() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), "a.toml", "[job]\ntimeout = 60\nstall = 7\n");
    let mut command = rank(RANK, 0, 1, FreePort::reserve().port, &["config"]);
    let output =
        command.env("BURN_DDP_CONFIG", dir.path().join("a.toml")).env("BURN_DDP_TIMEOUT", "50").output().unwrap();
    assert_eq!(stdout(&output), "timeout 50s stall 7s\n", "{}", stderr(&output));
}
