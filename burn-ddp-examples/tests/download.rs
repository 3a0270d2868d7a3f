//! Datasets that Burn downloads, from a cache as Burn leaves it, and without one:
//! `cargo test --features burn-ddp-examples/download --test download`.
#![cfg(all(feature = "download", feature = "images"))]

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use burn_ddp_examples::trainer::summary::Summary;
use image::{Rgb, RgbImage};

const RESNET: &str = env!("CARGO_BIN_EXE_resnet");
const MNIST: &str = env!("CARGO_BIN_EXE_mnist");

/// Runs `program` with `cache` as the user's cache folder, and a proxy that does not answer.
fn run(cache: &Path, program: &str, arguments: &str) -> Output {
    let mut command = Command::new(program);
    command.args(arguments.split_whitespace()).env("XDG_CACHE_HOME", cache).env("HTTPS_PROXY", "http://127.0.0.1:9");
    command.output().unwrap()
}

#[track_caller]
fn fails(cache: &Path, program: &str, arguments: &str, reason: &str) {
    let output = run(cache, program, arguments);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{arguments}");
    assert!(error.contains(reason) && !error.contains("panicked"), "{arguments}: {error}");
}

/// As many files as CIFAR-10 has, most of them links: each class has one picture.
fn cifar10(root: &Path) {
    for class in 0..10u8 {
        let picture = root.join(format!("{class}.png"));
        RgbImage::from_pixel(32, 32, Rgb([25 * class, 255 - 25 * class, 0])).save(&picture).unwrap();
        for (half, len) in [("train", 5000), ("test", 1000)] {
            let folder = root.join(half).join(format!("class {class}"));
            fs::create_dir_all(&folder).unwrap();
            (0..len).for_each(|number| fs::hard_link(&picture, folder.join(format!("{number:04}.png"))).unwrap());
        }
        fs::remove_file(picture).unwrap();
    }
}

#[test]
fn cifar10_is_learned_from_burns_cache() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("burn-dataset/cifar10");
    fs::create_dir_all(&root).unwrap();
    cifar10(&root);
    let summary = dir.path().join("summary.json");
    let arguments = format!(
        "--data cifar10 --width 4 --limit 80 --batch-size 8 --epochs 8 --lr 0.1 --nproc 2 --summary {}",
        summary.display()
    );
    let output = run(dir.path(), RESNET, &arguments);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let summary: Summary = serde_json::from_str(&fs::read_to_string(summary).unwrap()).unwrap();
    assert!(summary.test_accuracy > 0.3, "a guess is right in a tenth of the cases: {summary:?}");

    fs::remove_file(root.join("test/class 3/0999.png")).unwrap();
    fails(dir.path(), RESNET, "--data cifar10 --width 4", "9999 pictures instead of 10000");
}

#[test]
fn without_a_network_the_reason_is_said() {
    let dir = tempfile::tempdir().unwrap();
    fails(dir.path(), RESNET, "--data cifar10 --width 4", "CIFAR-10 could not be downloaded");
    fails(dir.path(), MNIST, "--data full", "MNIST could not be downloaded");
}
