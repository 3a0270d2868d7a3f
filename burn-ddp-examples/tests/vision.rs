//! The trainers for pictures, run as a user runs them, on a few small pictures.

mod common;

use std::fs;

use burn_ddp_examples::trainer::summary::Summary;
use common::{fails, run};

const RESNET: &str = env!("CARGO_BIN_EXE_resnet");
const ALEXNET: &str = env!("CARGO_BIN_EXE_alexnet");

/// Small enough for any machine.
const TINY: &str = "--image-size 16 --width 4 --classes 4";

#[track_caller]
fn train(program: &str, arguments: &str) -> (Summary, String) {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("summary.json");
    let output = run(program, &format!("{arguments} --summary {}", file.display()));
    let shown = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{shown}\n{}", String::from_utf8_lossy(&output.stderr));
    let summary: Summary = serde_json::from_str(&fs::read_to_string(file).unwrap()).unwrap();
    assert!(summary.param_hash.iter().all(|hash| *hash == summary.param_hash[0]), "{summary:?}");
    (summary, shown)
}

/// Red pictures and blue ones, of several sizes.
#[cfg(feature = "images")]
fn pictures(root: &std::path::Path, each: u32) {
    use image::{Rgb, RgbImage};

    for (class, colour) in [("blue", [10, 20, 200]), ("red", [200, 20, 10])] {
        fs::create_dir_all(root.join(class)).unwrap();
        for number in 0..each {
            let noise = |x: u32, y: u32| ((x * 7 + y * 13 + number * 29) % 40) as u8;
            let image = RgbImage::from_fn(16 + number % 5, 20, |x, y| Rgb(colour.map(|value| value + noise(x, y))));
            let extension = if number % 2 == 0 { "png" } else { "jpg" };
            image.save(root.join(class).join(format!("{number:02}.{extension}"))).unwrap();
        }
    }
}

#[test]
fn a_resnet_learns_reports_and_repeats() {
    let arguments = format!("{TINY} --nproc 2 --limit 96 --batch-size 8 --epochs 6 --lr 0.1");
    let (first, shown) = train(RESNET, &arguments);
    assert_eq!((first.world_size, first.epochs, first.global_batch), (2, 6, 16));
    assert!(first.train_loss[5] < 0.5 * first.train_loss[0], "{first:?}");
    assert!(first.test_accuracy > 0.5, "a guess is right in a quarter of the cases: {first:?}");
    assert_eq!(shown.lines().filter(|line| line.contains(" %  ")).count(), 6, "{shown}");
    assert!(shown.contains("samples/s on 2 rank(s)"), "{shown}");

    let (second, _) = train(RESNET, &format!("{arguments} --num-workers 3"));
    assert_eq!((&second.param_hash, &second.train_loss), (&first.param_hash, &first.train_loss));
    let (other, _) = train(RESNET, &format!("{arguments} --no-augment"));
    assert_ne!(other.param_hash, first.param_hash);
}

#[test]
fn one_rank_and_two_follow_the_same_curve() {
    // No normalisation over the batch in AlexNet, no dropout here: the ranks' number must not matter. Crops and
    // mirroring are the same for every number of ranks.
    let arguments = format!("{TINY} --no-dropout --epochs 2 --lr 0.05");
    let (one, _) = train(ALEXNET, &format!("{arguments} --nproc 1 --batch-size 16 --limit 40"));
    let (two, _) = train(ALEXNET, &format!("{arguments} --nproc 2 --batch-size 8 --limit 40"));
    let (accumulated, _) = train(ALEXNET, &format!("{arguments} --nproc 2 --batch-size 4 --accumulate 2 --limit 32"));
    let (whole, _) = train(ALEXNET, &format!("{arguments} --nproc 1 --batch-size 16 --limit 32"));
    assert_eq!((two.global_batch, accumulated.global_batch), (16, 16));
    for (a, b) in [(&one, &two), (&whole, &accumulated)] {
        assert_eq!(a.global_batch, b.global_batch);
        for (a, b) in a.train_loss.iter().zip(&b.train_loss) {
            assert!((a - b).abs() < 1e-4 * a, "{a} and {b}");
        }
        assert_eq!(a.test_accuracy, b.test_accuracy);
    }
}

#[test]
fn synchronised_normalisation_follows_the_curve_of_one_rank() {
    let arguments = format!("{TINY} --limit 40 --epochs 2 --lr 0.05");
    let (one, _) = train(RESNET, &format!("{arguments} --nproc 1 --batch-size 16"));
    let (two, _) = train(RESNET, &format!("{arguments} --nproc 2 --batch-size 8 --sync-bn"));
    let (apart, _) = train(RESNET, &format!("{arguments} --nproc 2 --batch-size 8"));
    let difference = |other: &Summary| {
        let pairs = one.train_loss.iter().zip(&other.train_loss);
        pairs.map(|(a, b)| (a - b).abs() / a).fold(0.0, f64::max)
    };
    assert!(difference(&two) < 1e-3, "{:?} and {:?}", one.train_loss, two.train_loss);
    assert!(difference(&apart) > 1e-2, "{:?} and {:?}", one.train_loss, apart.train_loss);
}

#[cfg(feature = "images")]
#[test]
fn a_folder_of_pictures_is_learned() {
    let dir = tempfile::tempdir().unwrap();
    pictures(dir.path(), 20);
    let model = dir.path().with_extension("bpk");
    let data = format!("--data folder:{} --image-size 16 --width 4", dir.path().display());
    let (summary, _) = train(
        RESNET,
        &format!(
            "{data} --nproc 2 --batch-size 4 --epochs 8 --lr 0.05 --schedule step --label-smoothing 0.1 \
             --num-workers 2 --save {}",
            model.display()
        ),
    );
    assert_eq!((summary.test_accuracy * 8.0).fract(), 0.0, "every fifth of 2 × 20 was tested");
    assert!(summary.test_accuracy > 0.8, "{summary:?}");
    assert!(fs::metadata(&model).unwrap().len() > 10_000);
    fs::remove_file(model).unwrap();
    let (summary, _) = train(ALEXNET, &format!("{data} --nproc 2 --batch-size 4 --epochs 1 --limit 16"));
    assert_eq!(summary.train_loss.len(), 1);

    // A picture that cannot be read ends the job, with its name, on whatever rank it is.
    fs::write(dir.path().join("red/03.jpg"), b"not a picture").unwrap();
    fails(
        RESNET,
        &format!("{data} --nproc 2 --batch-size 4 --epochs 1"),
        "red/03.jpg is not a picture that can be read",
    );
    fails(RESNET, &format!("{data} --classes 3"), "--classes 3, but the pictures have 2 classes");
    fs::create_dir(dir.path().join("green")).unwrap();
    fails(RESNET, &data, "green holds no pictures");
}

#[test]
fn what_cannot_work_ends_at_once_with_its_reason() {
    fails(RESNET, "--width 0", "--width 0");
    fails(RESNET, "--depth 19", "--depth");
    fails(ALEXNET, "--width 0", "--width 0");
    fails(ALEXNET, "--data folder:/no/such/folder", "there is no such folder");
    fails(RESNET, "--data photos", "folder:DIR");
    fails(
        RESNET,
        &format!("{TINY} --limit 3 --batch-size 4 --accumulate 2 --nproc 2"),
        "3 item(s) for 4 ranks (or logical ranks)",
    );
    fails(RESNET, &format!("{TINY} --limit 2 --nproc 3"), "3 ranks");
    #[cfg(not(feature = "download"))]
    fails(RESNET, "--data cifar10", "--features download");
    #[cfg(not(feature = "images"))]
    fails(RESNET, "--data folder:/", "--features images");
}

#[test]
fn a_resnet_goes_on_from_the_middle_of_an_epoch_as_if_nothing_had_happened() {
    let dir = tempfile::tempdir().unwrap();
    let saved = dir.path().join("checkpoints");
    let arguments = format!(
        "{TINY} --limit 48 --batch-size 4 --accumulate 2 --epochs 2 --checkpoints {} --checkpoint-every 2",
        saved.display()
    );
    let (whole, _) = train(RESNET, &format!("{arguments} --nproc 2"));
    // Six backwards of 8 pictures in three steps an epoch: saved after steps 2, 3, 4 and 6, of which two are kept.
    fs::remove_dir_all(saved.join("step-00000006")).unwrap();
    let (resumed, _) = train(RESNET, &format!("{arguments} --nproc 2"));
    assert_eq!((&resumed.param_hash, &resumed.train_loss), (&whole.param_hash, &whole.train_loss));
    assert_eq!(resumed.test_accuracy, whole.test_accuracy);

    // Another number of ranks goes on, too, and reads every picture that is left.
    fs::remove_dir_all(saved.join("step-00000006")).unwrap();
    let (one, _) = train(RESNET, &format!("{arguments} --nproc 1"));
    assert_eq!((one.world_size, one.train_loss.len(), one.train_loss[0]), (1, 2, whole.train_loss[0]));

    fails(RESNET, &format!("{arguments} --nproc 2"), "was saved at the end of a training: ask for more --epochs");
}
