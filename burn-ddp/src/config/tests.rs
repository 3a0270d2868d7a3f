use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::{BufferPolicy, GradientReduction, LossScaling, Precision, Sharding};

fn load(name: &str, text: &str) -> Result<DdpConfig> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(name);
    std::fs::write(&path, text).unwrap();
    DdpConfig::load(&path)
}

fn problem(name: &str, text: &str) -> String {
    let error = load(name, text).unwrap_err().to_string();
    error.rsplit('/').next().unwrap_or_default().to_string()
}

#[test]
fn everything_has_a_name() {
    let config = load(
        "a.toml",
        r#"
        train_batch = 128
        micro_batch = 16
        seed = 7
        [job]
        engine = "tcp"
        timeout = 60
        join_timeout = 20.5
        heartbeat = 0.5
        peer_timeout = 5
        stall = 3
        history = 10
        timeline = "trace.json"
        [wrap]
        accumulation = 2
        reduction = "sum"
        first_bucket_cap_bytes = 1000
        bucket_cap_bytes = 2000
        buffers = "broadcast"
        replica_check = 50
        overlap = true
        local_parameters = ["heads.0", "*.bias"]
        [data]
        workers = 2
        shuffle = 42
        [checkpoint]
        dir = "out"
        every = 1000
        keep = 3
        "#,
    );
    let config = config.unwrap();
    let wrap =
        WrapConfig::new().with_accumulation(2).with_reduction(GradientReduction::Sum).with_first_bucket_cap_bytes(1000);
    let wrap = wrap
        .with_bucket_cap_bytes(2000)
        .with_buffers(BufferPolicy::Broadcast)
        .with_replica_check(50)
        .with_overlap(true)
        .with_local_parameters(["heads.0", "*.bias"]);
    assert_eq!(config.wrap, wrap);
    assert_eq!(config.batch(4).unwrap(), BatchSizes { train: 128, micro: 16, accumulation: 2 });
    assert_eq!(config.data, DataSettings { workers: 2, shuffle: Some(42) });
    assert_eq!(config.checkpoint, Some(CheckpointSettings { dir: "out".into(), every: 1000, keep: Some(3) }));
    let options = config.options_over(&|_| None).unwrap();
    assert_eq!(options.timeout, Duration::from_secs(60));
    assert_eq!(options.join_timeout, Duration::from_millis(20500));
    assert_eq!(options.heartbeat, Duration::from_millis(500));
    assert_eq!(options.peer_timeout, Some(Duration::from_secs(5)));
    assert_eq!((options.stall, options.history), (Duration::from_secs(3), 10));
    assert_eq!(options.timeline, Some("trace.json".into()));
    assert_eq!(options.engine.map(|engine| engine.name()), Some("tcp"));
    let shared = |name: &str| options.config.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str());
    assert_eq!(
        (shared("wrap.accumulation"), shared("wrap.reduction"), shared("seed")),
        (Some("2"), Some("\"sum\""), Some("7"))
    );
    assert_eq!((shared("data.shuffle"), shared("data.workers"), shared("job.timeout")), (Some("42"), None, None));
}

/// Files written when the types had other names.
#[test]
fn files_with_every_key_load_as_ever() {
    let toml = load("a.toml", include_str!("fixtures/every_key.toml")).unwrap();
    let text = include_str!("fixtures/every_key.json");
    assert_eq!(load("a.json", text).unwrap(), toml);
    // The files have every key.
    let keys = |value: &serde_json::Value| -> BTreeSet<String> {
        let fields = value.as_object().into_iter().flatten();
        let names = |(name, value): (&String, &serde_json::Value)| match value.as_object() {
            Some(section) => section.keys().map(|field| format!("{name}.{field}")).collect(),
            None => vec![name.clone()],
        };
        fields.flat_map(names).collect()
    };
    assert_eq!(keys(&serde_json::to_value(&toml).unwrap()), keys(&serde_json::from_str(text).unwrap()));
    let job = JobSettings {
        engine: Some("shm".into()),
        timeout: Some(600.0),
        join_timeout: Some(300.0),
        heartbeat: Some(1.0),
        peer_timeout: Some(30.0),
        stall: Some(30.0),
        history: Some(128),
        timeline: Some("trace.json".into()),
    };
    let wrap = WrapConfig::new().with_accumulation(2).with_first_bucket_cap_bytes(262_144);
    let wrap = wrap.with_bucket_cap_bytes(1_048_576).with_replica_check(100).with_overlap(true);
    let wrap = wrap.with_local_parameters(["heads.0"]);
    let wrap = wrap.with_sharding(Sharding::Parameters).with_sharding_above(4096);
    let wrap = wrap.with_compute_dtype(Precision::F16).with_full_precision(["head"]);
    let wrap = wrap.with_reduce_dtype(Precision::Bf16).with_finite_gradients(true);
    let wrap = wrap.with_loss_scaling(LossScaling {
        initial_scale_power: 12,
        loss_scale_window: 1000,
        min_loss_scale: 2,
        ..LossScaling::default()
    });
    let data = DataSettings { workers: 2, shuffle: Some(42) };
    let checkpoint = Some(CheckpointSettings { dir: "checkpoints".into(), every: 1000, keep: Some(3) });
    let (train_batch, micro_batch, seed) = (Some(128), Some(16), Some(7));
    assert_eq!(toml, DdpConfig { train_batch, micro_batch, seed, job, wrap, data, checkpoint });
}

#[test]
fn an_empty_file_says_nothing() {
    assert_eq!(load("a.toml", "").unwrap(), DdpConfig::default());
    assert_eq!(load("a.json", "{}").unwrap(), DdpConfig::default());
    let options = DdpConfig::default().options_over(&|_| None).unwrap();
    assert_eq!(WorldOptions { config: Vec::new(), ..options }, WorldOptions::default());
    assert_eq!(DdpConfig::default().wrap_config(3).unwrap(), WrapConfig::default());
}

#[test]
fn the_environment_wins() {
    let config = load("a.json", r#"{"job": {"timeout": 60, "stall": 2}}"#).unwrap();
    let options = config.options_over(&|name| (name == "BURN_DDP_TIMEOUT").then(|| "5".to_string())).unwrap();
    assert_eq!((options.timeout, options.stall), (Duration::from_secs(5), Duration::from_secs(2)));
}

#[test]
fn what_is_wrong_is_named_with_its_line_and_what_would_be_right() {
    let toml = problem("a.toml", "seed = 1\n\n[wrap]\nbucket_cap = 3\n");
    assert!(toml.starts_with("a.toml:4: unknown field `bucket_cap`, expected one of"), "{toml}");
    assert!(toml.contains("`bucket_cap_bytes`") && toml.contains("`replica_check`"), "{toml}");
    let json = problem("a.json", "{\n  \"micro_batches\": 3\n}");
    assert!(json.starts_with("a.json:2: unknown field `micro_batches`, expected one of"), "{json}");
    assert!(json.contains("`micro_batch`") && !json.contains(" at line "), "{json}");
    for (text, reason) in [
        ("micro_batch = \"many\"", "a.toml:1: invalid type: string \"many\""),
        ("seed = 1\nseed = 2", "a.toml:2: duplicate key"),
        ("[wrap]\nreduction = \"median\"", "a.toml:2: unknown variant `median`, expected `mean` or `sum`"),
        ("[checkpoint]\ndir = \"out\"", "missing field `every`"),
        ("micro_batch = 0", "a.toml: micro_batch is 0"),
        ("[wrap]\naccumulation = 0", "a.toml: accumulation counts micro-batches"),
        ("[checkpoint]\ndir = \"out\"\nevery = 0", "a.toml: checkpoint.every is 0"),
        ("[job]\ntimeout = -1", "a.toml: [job] cannot be: BURN_DDP_TIMEOUT=\"-1\""),
        ("[job]\nengine = \"gloo\"", "\"gloo\" is not an engine"),
        ("[job]\npeer_timeout = 1", "more than two heartbeats"),
    ] {
        let found = problem("a.toml", text);
        assert!(found.contains(reason), "{text}: {found}");
    }
    assert!(problem("a.yaml", "").contains("named .toml or .json"));
    let missing = DdpConfig::load("no/such/file.toml");
    let Err(Error::File { path, kind, reason, .. }) = missing else { panic!("{missing:?}") };
    assert!(reason.contains("no/such/file.toml"), "{reason}");
    assert_eq!(kind, Some(std::io::ErrorKind::NotFound));
    assert_eq!(path.as_deref(), Some(std::path::Path::new("no/such/file.toml")));
}

#[test]
fn the_missing_size_follows_and_what_does_not_fit_is_refused() {
    let of = |train: usize, micro: usize, accumulation: usize, world: usize| {
        let some = |n: usize| Some(n).filter(|n| *n > 0);
        let wrap = some(accumulation).into_iter().fold(WrapConfig::new(), WrapConfig::with_accumulation);
        let sizes =
            DdpConfig { train_batch: some(train), micro_batch: some(micro), wrap, ..DdpConfig::default() }.batch(world);
        sizes.map(|s| (s.train, s.micro, s.accumulation)).map_err(|e| e.to_string())
    };
    for (train, micro, accumulation, world, expected) in [
        (96, 16, 2, 3, (96, 16, 2)),
        (96, 16, 0, 3, (96, 16, 2)),
        (128, 16, 3, 3, (128, 16, 3)),
        (128, 16, 0, 3, (128, 16, 3)),
        (128, 16, 0, 8, (128, 16, 1)),
        (96, 0, 2, 3, (96, 16, 2)),
        (0, 16, 2, 3, (96, 16, 2)),
        (96, 0, 0, 3, (96, 32, 1)),
        (0, 16, 0, 3, (48, 16, 1)),
    ] {
        assert_eq!(of(train, micro, accumulation, world), Ok(expected));
    }
    for (train, micro, accumulation, world, reason) in [
        (128, 16, 2, 3, "8 micro-batches are 3 on each of 3 ranks, and not the accumulation 2"),
        (128, 24, 0, 3, "train_batch 128 does not divide by micro_batch 24"),
        (128, 16, 0, 9, "8 micro-batches for 9 ranks: each needs one at least"),
        (128, 0, 2, 3, "train_batch 128 does not divide by accumulation 2 × world 3 = 6"),
        (128, 0, 0, 3, "train_batch 128 does not divide by accumulation 1 × world 3 = 3"),
        (0, 0, 2, 3, "the config says neither train_batch nor micro_batch"),
        (0, usize::MAX, 2, 3, "must each be at least 1"),
    ] {
        let error = of(train, micro, accumulation, world).unwrap_err();
        assert!(error.contains(reason), "{error}");
    }
}

/// The same as TOML. Its strings and lists are those of JSON, but for one character that may not stand there as it is.
fn toml_of(value: &serde_json::Value) -> String {
    use serde_json::Value::Object;
    let fields = value.as_object().expect("a section");
    let is_section = |value: &&serde_json::Value| matches!(value, Object(_));
    let mut lines = String::new();
    for (name, value) in fields.iter().filter(|(_, v)| !is_section(v) && !v.is_null()) {
        lines.push_str(&format!("{name} = {}\n", value.to_string().replace('\u{7f}', "\\u007f")));
    }
    for (name, section) in fields.iter().filter(|(_, v)| is_section(v)) {
        lines.push_str(&format!("[{name}]\n{}", toml_of(section)));
    }
    lines
}

/// Some that may be missing.
fn maybe<T: std::fmt::Debug + Clone + 'static>(some: impl Strategy<Value = T> + 'static) -> BoxedStrategy<Option<T>> {
    proptest::option::of(some).boxed()
}

fn any_config() -> impl Strategy<Value = DdpConfig> {
    let count = || maybe(1_usize..1_000_000);
    let seconds_of = |millis: std::ops::Range<u32>| maybe(millis.prop_map(|millis| f64::from(millis) / 1000.0));
    let seconds = move || seconds_of(1..10_000_000);
    let number = || 0..=i64::MAX as u64; // TOML has no larger ones
    let waits = (seconds(), seconds(), seconds_of(10..1000), seconds_of(2500..100_000), seconds());
    let job = (proptest::option::of(prop_oneof!["shm", "tcp"]), waits, maybe(0_usize..1000), maybe(".{1,20}"));
    let job = job.prop_map(|(engine, (timeout, join_timeout, heartbeat, peer_timeout, stall), history, timeline)| {
        JobSettings {
            engine,
            timeout,
            join_timeout,
            heartbeat,
            peer_timeout,
            stall,
            history,
            timeline: timeline.map(PathBuf::from),
        }
    });
    let buffers = prop_oneof![Just(BufferPolicy::Average), Just(BufferPolicy::Broadcast), Just(BufferPolicy::Local)];
    let wrap = (count(), any::<bool>(), 1_usize..1 << 40, 0_usize..1000, buffers, maybe(any::<bool>()));
    let names = proptest::collection::vec(".{1,20}", 0..3);
    let wrap = (wrap, names).prop_map(|((accumulation, sum, cap, check, buffers, overlap), names)| {
        let wrap = WrapConfig::new()
            .with_local_parameters(names)
            .with_bucket_cap_bytes(cap)
            .with_replica_check(check)
            .with_buffers(buffers);
        let wrap = if sum { wrap.with_reduction(GradientReduction::Sum) } else { wrap };
        let wrap = accumulation.into_iter().fold(wrap, WrapConfig::with_accumulation);
        overlap.into_iter().fold(wrap, WrapConfig::with_overlap)
    });
    let data = (0_usize..64, maybe(number())).prop_map(|(workers, shuffle)| DataSettings { workers, shuffle });
    let checkpoint = ("[a-z/ \"\\\\]{1,12}", 1_u64..1000, count());
    let checkpoint = checkpoint.prop_map(|(dir, every, keep)| CheckpointSettings { dir: dir.into(), every, keep });
    // A batch of whole micro-batches, if both are set.
    let batch = |(train, micro): (Option<usize>, Option<usize>)| (train.map(|train| train * micro.unwrap_or(1)), micro);
    let sizes = ((maybe(1_usize..1000), count()).prop_map(batch), maybe(number()));
    (sizes, job, wrap, data, maybe(checkpoint)).prop_map(
        |(((train_batch, micro_batch), seed), job, wrap, data, checkpoint)| DdpConfig {
            train_batch,
            micro_batch,
            seed,
            job,
            wrap,
            data,
            checkpoint,
        },
    )
}

proptest! {
    #[test]
    fn what_is_written_is_read_again_in_both_forms(config in any_config()) {
        let json = serde_json::to_string_pretty(&config).unwrap();
        prop_assert_eq!(&load("a.json", &json).unwrap(), &config);
        let toml = toml_of(&serde_json::to_value(&config).unwrap());
        let read = load("a.toml", &toml);
        prop_assert!(read.is_ok(), "{:?} in\n{}", read, toml);
        prop_assert_eq!(&read.unwrap(), &config);
    }
}
