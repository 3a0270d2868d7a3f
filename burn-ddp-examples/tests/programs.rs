//! The programs, run as a user runs them, on a few digits.

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use burn::data::dataset::Dataset;
use burn_ddp_examples::mnist::{MnistDataset, Split};
use burn_ddp_examples::trainer::summary::Summary;
use common::{fails, run, shown, two_ranks};

const MNIST: &str = env!("CARGO_BIN_EXE_mnist");
const GPT: &str = env!("CARGO_BIN_EXE_gpt");
#[cfg(feature = "train")]
const LEARNER: &str = env!("CARGO_BIN_EXE_mnist_learner");

/// MNIST's four files with the first digits of the sample.
fn few_digits(dir: &Path, train: usize, test: usize) {
    for (split, prefix, count) in [(Split::Train, "train", train), (Split::Test, "t10k", test)] {
        let data = MnistDataset::sample(split).unwrap();
        let items: Vec<_> = (0..count).map(|index| data.get(index).unwrap()).collect();
        let count = (count as u32).to_be_bytes();
        let mut images = [&[0, 0, 8, 3], &count[..], &[0, 0, 0, 28], &[0, 0, 0, 28]].concat();
        images.extend(items.iter().flat_map(|item| item.image));
        let mut labels = [&[0, 0, 8, 1], &count[..]].concat();
        labels.extend(items.iter().map(|item| item.label));
        fs::write(dir.join(format!("{prefix}-images-idx3-ubyte")), images).unwrap();
        fs::write(dir.join(format!("{prefix}-labels-idx1-ubyte")), labels).unwrap();
    }
}

#[track_caller]
fn train(data: &Path, arguments: &str) -> (Summary, String) {
    let summary: PathBuf = data.join("summary.json");
    let arguments = format!("--data {} --summary {} --epochs 2 {arguments}", data.display(), summary.display());
    let output = run(MNIST, &arguments);
    let shown = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{shown}\n{}", String::from_utf8_lossy(&output.stderr));
    (serde_json::from_str(&fs::read_to_string(summary).unwrap()).unwrap(), shown)
}

#[test]
fn each_program_says_how_it_is_run() {
    macro_rules! programs {
        ($($name:literal),*) => { [$(($name, env!(concat!("CARGO_BIN_EXE_", $name)))),*] };
    }
    let small = programs![
        "accumulation",
        "checkpoint_resume",
        "custom_loop",
        "early_stopping",
        "existing_loop",
        "hand_checked_gradient",
        "lora",
        "mixed_devices",
        "uneven_data"
    ];
    for (name, program) in small {
        let help = shown(program, "--help");
        assert!(help.contains(&format!("--bin {name}")) && !help.contains("//!"), "{name}: {help}");
    }
    for program in [MNIST, GPT] {
        assert!(shown(program, "--help").contains("--nproc"));
    }
}

#[test]
fn two_ranks_train_report_and_repeat() {
    let dir = tempfile::tempdir().unwrap();
    few_digits(dir.path(), 50, 15);
    let model = dir.path().join("model.bpk");
    let (first, shown) = train(dir.path(), &format!("--nproc 2 --batch-size 8 --save {}", model.display()));
    assert_eq!((first.world_size, first.engine.as_str(), first.epochs, first.global_batch), (2, "shm", 2, 16));
    assert_eq!(first.train_loss.len(), 2);
    assert!(first.train_loss[1] < first.train_loss[0], "{first:?}");
    assert!(first.samples_per_second > 0.0);
    assert_eq!((first.test_accuracy * 15.0).fract(), 0.0, "15 digits were tested");
    assert_eq!(first.param_hash.len(), 2);
    assert_eq!(first.param_hash[0], first.param_hash[1]);
    assert!(fs::metadata(model).unwrap().len() > 4 * 1_199_882);

    // Not a terminal: a table, no bar, nothing of rank 1.
    assert_eq!(shown.lines().filter(|line| line.contains(" %  ")).count(), 2, "{shown}");
    assert!(shown.contains("samples/s on 2 rank(s), engine shm"), "{shown}");
    assert!(!shown.contains('\u{1b}') && !shown.contains("[rank 1]"), "{shown}");

    let (second, _) = train(dir.path(), "--nproc 2 --batch-size 8 --num-workers 3");
    assert_eq!(second.param_hash, first.param_hash, "the same seed gives the same bits");
    assert_eq!(second.train_loss, first.train_loss);
    let (other, _) = train(dir.path(), "--nproc 2 --batch-size 8 --seed 2");
    assert_ne!(other.param_hash, first.param_hash);
}

#[test]
fn one_rank_with_the_same_global_batch_follows_the_same_curve() {
    let dir = tempfile::tempdir().unwrap();
    few_digits(dir.path(), 53, 16); // the last step has 5 items: 2, 2 and 1 for three ranks
    let (one, _) = train(dir.path(), "--no-dropout --nproc 1 --batch-size 12");
    let (three, _) = train(dir.path(), "--no-dropout --nproc 3 --batch-size 4");
    assert_eq!((one.world_size, three.world_size), (1, 3));
    for (a, b) in one.train_loss.iter().zip(&three.train_loss) {
        assert!((a - b).abs() < 1e-4 * a, "{:?} and {:?}", one.train_loss, three.train_loss);
    }
    assert_eq!(one.test_accuracy, three.test_accuracy);
}

/// Two epochs of a small transformer on a text of its own.
#[track_caller]
fn train_on_text(dir: &Path, width: usize, arguments: &str) -> (Summary, String) {
    let (text, summary) = (dir.join("text"), dir.join("summary.json"));
    fs::write(&text, "the cat sat on the mat, and the rat ran. ".repeat(40)).unwrap();
    let arguments = format!(
        "--text {} --summary {} --layers 1 --width {width} --heads 2 --context 16 --prompt th --sample 8 {arguments}",
        text.display(),
        summary.display()
    );
    let shown = shown(GPT, &arguments);
    (serde_json::from_str(&fs::read_to_string(summary).unwrap()).unwrap(), shown)
}

#[test]
fn a_transformer_follows_one_rank_saves_and_writes() {
    let dir = tempfile::tempdir().unwrap();
    let (one, _) = train_on_text(dir.path(), 16, "--nproc 1 --epochs 2 --batch-size 8");
    let checkpoints = dir.path().join("checkpoints");
    let (two, shown) = train_on_text(
        dir.path(),
        16,
        &format!("--nproc 2 --epochs 2 --batch-size 4 --checkpoints {}", checkpoints.display()),
    );
    for (a, b) in one.train_loss.iter().zip(&two.train_loss) {
        assert!((a - b).abs() < 1e-4 * a, "{:?} and {:?}", one.train_loss, two.train_loss);
    }
    assert_eq!(two.param_hash[0], two.param_hash[1]);
    assert!(two.train_loss[1] < two.train_loss[0] && two.train_loss[0] < 6.0, "{two:?}");
    assert!(shown.contains("bytes/s on 2 rank(s)") && shown.trim_end().lines().last().unwrap().starts_with("th"));

    // Goes on from the checkpoint, on another number of ranks.
    let (three, _) =
        train_on_text(dir.path(), 16, &format!("--nproc 3 --epochs 3 --checkpoints {}", checkpoints.display()));
    assert_eq!((three.train_loss.len(), &three.train_loss[..2]), (3, &two.train_loss[..]));
}

#[test]
fn a_sharded_transformer_trains_evaluates_and_writes_as_a_whole_one() {
    let dir = tempfile::tempdir().unwrap();
    // 10 test items: 4, 3 and 3 on three ranks, in 2, 1 and 1 batches. The largest parameters are sharded.
    let line = "--nproc 3 --epochs 2 --batch-size 3";
    let results = ["", "--shard"].map(|shard| train_on_text(dir.path(), 64, &format!("{line} {shard}")));
    let [(whole, written), (sharded, sharded_written)] = results;
    assert_eq!(sharded.train_loss, whole.train_loss);
    assert_eq!(sharded.test_accuracy, whole.test_accuracy);
    assert_eq!(sharded.param_hash, whole.param_hash);
    let text = |shown: &str| shown.lines().last().unwrap().to_owned();
    assert!(text(&written).starts_with("th"), "{written}");
    assert_eq!(text(&sharded_written), text(&written));

    // Goes on from a checkpoint of parts, on another number of ranks, with whole parameters.
    let checkpoints = dir.path().join("checkpoints");
    let saved = format!("--checkpoints {}", checkpoints.display());
    let (parts, _) = train_on_text(dir.path(), 64, &format!("--nproc 2 --epochs 1 --shard {saved}"));
    let (resumed, _) = train_on_text(dir.path(), 64, &format!("--nproc 3 --epochs 2 {saved}"));
    assert_eq!(resumed.train_loss[..1], parts.train_loss);
    fails(GPT, "--nproc 2 --shard --context 8000 --sample 0", "1 test items for 2 ranks");
}

#[cfg(feature = "train")]
/// Burn's trainer, with `artifacts` in the folder of the data.
#[track_caller]
fn learn(data: &Path, artifacts: &str, arguments: &str) -> (Summary, String) {
    let (summary, artifacts) = (data.join("summary.json"), data.join(artifacts));
    let arguments = format!(
        "--data {} --summary {} --artifacts {} --no-dropout {arguments}",
        data.display(),
        summary.display(),
        artifacts.display()
    );
    let output = run(LEARNER, &arguments);
    let shown = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{shown}\n{}", String::from_utf8_lossy(&output.stderr));
    (serde_json::from_str(&fs::read_to_string(summary).unwrap()).unwrap(), shown)
}

#[cfg(feature = "train")]
#[test]
fn burns_trainer_on_two_ranks_follows_one_and_resumes() {
    let dir = tempfile::tempdir().unwrap();
    few_digits(dir.path(), 48, 15);
    let (one, _) = learn(dir.path(), "one", "--nproc 1 --batch-size 12 --epochs 2");
    let (two, shown) = learn(dir.path(), "two", "--nproc 2 --batch-size 6 --epochs 2");
    assert_eq!((two.world_size, two.global_batch, two.train_loss.len()), (2, 12, 2));
    assert_eq!(two.param_hash[0], two.param_hash[1]);
    for (a, b) in one.train_loss.iter().zip(&two.train_loss) {
        assert!((a - b).abs() < 1e-4 * a, "{:?} and {:?}", one.train_loss, two.train_loss);
    }
    assert_eq!(one.test_accuracy, two.test_accuracy);
    // Rank 0 shows Burn's table, rank 1 nothing.
    assert!(shown.contains("Accuracy") && !shown.contains("[rank 1]"), "{shown}");
    assert!(dir.path().join("two/checkpoint/model-2.bpk").exists());
    assert!(dir.path().join("two/valid/epoch-2/Accuracy.log").exists());

    let (resumed, _) = learn(dir.path(), "two", "--nproc 2 --batch-size 6 --epochs 3 --resume 2");
    assert_eq!(resumed.train_loss[..2], two.train_loss);
    assert_eq!(resumed.train_loss.len(), 3);
    assert!(resumed.train_loss[2] < two.train_loss[1]);
}

#[test]
fn what_cannot_work_ends_at_once_with_its_reason() {
    let dir = tempfile::tempdir().unwrap();
    few_digits(dir.path(), 4, 2);
    let data = format!("--data {}", dir.path().display());
    let start = Instant::now();
    fails(MNIST, "--epochs 0", "--epochs 0: there is nothing to train");
    fails(MNIST, "--batch-size 0", "--batch-size 0");
    fails(MNIST, "--nproc 0", "--nproc 0");
    fails(MNIST, "--data /no/such/folder", "there is no such folder");
    fails(MNIST, &format!("{data} --nproc 5"), "5 ranks");
    fs::write(dir.path().join("train-labels-idx1-ubyte"), [0, 0, 8, 1, 0, 0, 0, 4, 1, 2]).unwrap();
    fails(MNIST, &data, "train-labels-idx1-ubyte is truncated");
    fs::remove_file(dir.path().join("train-images-idx3-ubyte")).unwrap();
    fails(MNIST, &data, "train-images-idx3-ubyte.gz exists");
    assert!(start.elapsed() < Duration::from_secs(60));
}

#[cfg(not(feature = "download"))]
#[test]
fn a_download_that_was_not_built_in_is_an_error_on_every_rank() {
    fails(MNIST, "--data full", "--features download");
}

#[test]
fn two_processes_see_the_mean_and_the_sum_of_their_gradients() {
    let program = env!("CARGO_BIN_EXE_hand_checked_gradient");
    let alone = String::from_utf8(run(program, "").stdout).unwrap();
    assert_eq!(
        alone,
        "rank 0: weight 0.0 before wrap, 0.0 after\nrank 0: gradient 2.0\nrank 0: gradient in sum mode 2.0\n"
    );
    for (rank, shown) in two_ranks(program).into_iter().enumerate() {
        assert_eq!(
            shown,
            format!(
                "rank {rank}: weight {rank}.0 before wrap, 0.0 after\nrank {rank}: gradient 14.0\n\
                 rank {rank}: gradient in sum mode 28.0\n"
            )
        );
    }
}

#[test]
fn the_loop_to_copy_learns_and_its_ranks_agree() {
    let [main, other] = two_ranks(env!("CARGO_BIN_EXE_custom_loop"));
    let losses: Vec<f64> = main.lines().filter_map(|line| line.split_once("loss ")?.1.parse().ok()).collect();
    assert_eq!(losses.len(), 3, "{main}");
    assert!(losses[2] < 0.5 && losses.is_sorted_by(|a, b| a > b), "{losses:?}");
    let hash = |shown: &str| shown.lines().last().unwrap().rsplit_once(' ').unwrap().1.to_string();
    assert_eq!(hash(&main), hash(&other));
}
