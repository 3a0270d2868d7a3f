//! Where the digits come from.

use anyhow::{Context, Result};
use burn_ddp::Ddp;

use super::args::Data;
use super::dataset::{MnistDataset, Split};

/// Both halves of the data, the same on every rank. *Collective*: a download happens on rank 0 first.
///
/// # Errors
///
/// Files that are missing or damaged, named; a download that fails.
pub fn load(ddp: &Ddp, data: &Data) -> Result<(MnistDataset, MnistDataset)> {
    match data {
        Data::Sample => both(MnistDataset::sample),
        Data::Dir(dir) => both(|split| MnistDataset::from_dir(dir, split)),
        Data::Full => ddp
            .rank_zero_first(|| both(download::split))
            .context("--data full: MNIST could not be had through Burn's download"),
    }
}

fn both(read: impl Fn(Split) -> Result<MnistDataset>) -> Result<(MnistDataset, MnistDataset)> {
    Ok((read(Split::Train)?, read(Split::Test)?))
}

#[cfg(not(feature = "download"))]
mod download {
    use anyhow::{Result, bail};

    use super::{MnistDataset, Split};

    pub(super) fn split(_: Split) -> Result<MnistDataset> {
        bail!(
            "this program was built without it: build with `--features download`, or give a folder with MNIST's files to --data"
        )
    }
}

#[cfg(feature = "download")]
mod download {
    use std::any::Any;
    use std::sync::mpsc;
    use std::time::Duration;

    use anyhow::{Context, Result, anyhow};
    use burn_dataset::Dataset;
    use burn_dataset::vision;

    use super::{MnistDataset, Split};
    use crate::mnist::MnistItem;

    /// Burn's downloader has no deadline of its own.
    const DEADLINE: Duration = Duration::from_secs(300);

    /// Burn panics when the network or the cache fails, so it runs on a thread of its own, whose end is awaited.
    pub(super) fn split(split: Split) -> Result<MnistDataset> {
        let (sender, done) = mpsc::channel();
        let quiet = QuietPanics::start();
        std::thread::Builder::new().name("download".into()).spawn(move || {
            let result = std::panic::catch_unwind(move || match split {
                Split::Train => vision::MnistDataset::train(),
                Split::Test => vision::MnistDataset::test(),
            });
            // Nobody listens any more once the deadline has passed.
            let _ = sender.send(result);
        })?;
        let result = done.recv_timeout(DEADLINE);
        drop(quiet);
        let data = result
            .map_err(|_| anyhow!("no answer within {} s; is the network reachable?", DEADLINE.as_secs()))?
            .map_err(|panic| {
                anyhow!(
                    "{}; is the network reachable? If an earlier download was cut off, delete burn-dataset/mnist in the cache \
                     folder (~/.cache). A folder with MNIST's files can be given to --data instead",
                    message(panic.as_ref())
                )
            })?;
        convert(&data)
    }

    fn convert(data: &vision::MnistDataset) -> Result<MnistDataset> {
        let mut items = Vec::with_capacity(data.len());
        for index in 0..data.len() {
            let item = data.get(index).with_context(|| format!("digit {index}"))?;
            let mut image = [0; 28 * 28];
            for (to, from) in image.iter_mut().zip(item.image.as_flattened()) {
                // Burn's pixels are whole numbers 0–255.
                *to = *from as u8;
            }
            items.push(MnistItem { image, label: item.label });
        }
        Ok(MnistDataset::from_items(items))
    }

    fn message(panic: &(dyn Any + Send)) -> &str {
        panic
            .downcast_ref::<String>()
            .map(String::as_str)
            .or_else(|| panic.downcast_ref::<&str>().copied())
            .unwrap_or("Burn's download panicked")
    }

    /// While it lives, panics print nothing: the one that is expected here becomes an error.
    struct QuietPanics(Option<Box<dyn Fn(&std::panic::PanicHookInfo<'_>) + Sync + Send + 'static>>);

    impl QuietPanics {
        fn start() -> Self {
            let before = std::panic::take_hook();
            std::panic::set_hook(Box::new(|_| {}));
            Self(Some(before))
        }
    }

    impl Drop for QuietPanics {
        fn drop(&mut self) {
            if let Some(before) = self.0.take()
                && !std::thread::panicking()
            {
                std::panic::set_hook(before);
            }
        }
    }
}
