//! One file for everything that can be set.

use std::path::{Path, PathBuf};

use burn::data::dataloader::batcher::Batcher;
use burn_ddp_comm::Options;
use serde::{Deserialize, Serialize};

use crate::data::LoaderBuilder;
use crate::{Ddp, Error, Result, WrapConfig};

mod batch_sizes;
#[cfg(test)]
mod tests;

pub use batch_sizes::BatchSizes;

/// What a job is to be like, from a TOML or JSON file: every setting of this crate by name. What a file does not say has the same default as
/// in code; a name that does not exist is an error.
///
/// A variable of the environment (`BURN_DDP_TIMEOUT`, …) wins over the file, and the file over the default.
///
/// ```
/// use burn::data::{dataloader::batcher::Batcher, dataset::InMemDataset};
/// use burn::nn::LinearConfig;
/// use burn::prelude::*;
/// use burn_ddp::prelude::*;
///
/// # let dir = tempfile::tempdir()?;
/// # let path = dir.path().join("train.toml");
/// std::fs::write(&path, r#"
///     train_batch = 16              # items of all ranks per optimizer step
///     micro_batch = 4               # items of one rank per backward; the accumulation follows
///
///     [job]
///     timeout = 60                  # seconds
///
///     [wrap]
///     bucket_cap_bytes = 4194304
///
///     [data]
///     shuffle = 42
/// "#)?;
///
/// # #[derive(Clone)]
/// # struct Rows;
/// # impl Batcher<f32, Tensor<2>> for Rows {
/// #     fn batch(&self, items: Vec<f32>, device: &Device) -> Tensor<2> {
/// #         let rows = items.len();
/// #         Tensor::<1>::from_floats(items.as_slice(), device).reshape([rows, 1])
/// #     }
/// # }
/// let config = DdpConfig::load(&path)?; // or `DdpConfig::from_env()?`
/// Ddp::spawn_with(2, config.options()?, |ddp| { // or `Ddp::init_with(config.options()?)?`
///     let device = ddp.device()?.autodiff();
///     let model = ddp.wrap_with(LinearConfig::new(1, 1).init(&device), &config.wrap_config(ddp.world_size())?)?;
///     let dataset = InMemDataset::new(vec![1.0; 32]);
///     let train = config.loader(&ddp, Rows)?.set_device(device).build(dataset)?;
///     for batch in train.iter() {
///         model.forward(batch?).sum().backward();
///     }
///     assert_eq!(ddp.telemetry().stats().steps, 2); // of 2 micro-batches of 4 items on each of 2 ranks
///     Ok(())
/// })?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DdpConfig {
    /// Items of all ranks per optimizer step. See [`DdpConfig::batch`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub train_batch: Option<usize>,
    /// Items of one rank per backward.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub micro_batch: Option<usize>,
    /// For [`Ddp::seed`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seed: Option<u64>,
    /// How ranks talk.
    pub job: Job,
    /// How gradients are averaged. Its accumulation is the number of backwards per optimizer step.
    pub wrap: WrapConfig,
    /// How training data are read.
    pub data: Data,
    /// Checkpoints, if there are to be any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub checkpoint: Option<Checkpoint>,
}

/// The section `[job]` of a [`DdpConfig`]: the [`Options`] of the same names, times in seconds. For each there is a variable that wins, such as
/// `BURN_DDP_TIMEOUT`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Job {
    /// `shm` or `tcp`; else what fits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub engine: Option<String>,
    /// How long one collective may take: [`Options::timeout`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timeout: Option<f64>,
    /// How long to wait for all ranks to come together: [`Options::join_timeout`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub join_timeout: Option<f64>,
    /// Between two signs of life: [`Options::heartbeat`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub heartbeat: Option<f64>,
    /// After how much silence a rank is lost: [`Options::peer_timeout`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peer_timeout: Option<f64>,
    /// After which time a collective that does not end is reported: [`Options::stall`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stall: Option<f64>,
    /// How many collectives are kept for a report: [`Options::history`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub history: Option<usize>,
    /// Where ranks record what they do: [`Options::timeline`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timeline: Option<PathBuf>,
}

/// The section `[data]` of a [`DdpConfig`].
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Data {
    /// Threads that load batches ahead on each rank; 0, the default, for none.
    pub workers: usize,
    /// The seed of each epoch's order; without it, it is the dataset's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shuffle: Option<u64>,
}

/// The section `[checkpoint]` of a [`DdpConfig`]: what a program that writes checkpoints is to do.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Checkpoint {
    /// The directory.
    pub dir: PathBuf,
    /// Every how many optimizer steps.
    pub every: u64,
    /// How many are kept; all of them if it does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep: Option<usize>,
}

impl DdpConfig {
    /// Reads a `.toml` or `.json` file. Not collective: each rank reads its own, and [`options`](Self::options) sees to it that they agree.
    ///
    /// # Errors
    ///
    /// [`Error::File`] if it cannot be read; [`Error::Use`] with the file, the line and, for a name that does not exist, those that do.
    pub fn load(path: impl AsRef<Path>) -> Result<DdpConfig> {
        let path = path.as_ref();
        let file = path.display();
        let text = std::fs::read_to_string(path)
            .map_err(|e| Error::file(format!("the config file {file} cannot be read: {e}")))?;
        let at = |line: usize, message: &str| Error::Use(format!("{file}:{line}: {message}"));
        let config: DdpConfig = match path.extension().and_then(|extension| extension.to_str()) {
            Some("toml") => toml::from_str(&text).map_err(|e| {
                let begin = e.span().map_or(0, |span| span.start.min(text.len()));
                at(1 + text[..begin].matches('\n').count(), e.message())
            })?,
            Some("json") => serde_json::from_str(&text).map_err(|e| {
                let message = e.to_string();
                // The place is said already.
                at(e.line(), message.split(" at line ").next().unwrap_or(&message))
            })?,
            _ => return Err(Error::Use(format!("{file}: a config file is named .toml or .json"))),
        };
        config.check().map_err(|e| Error::Use(format!("{file}: {e}")))?;
        Ok(config)
    }

    /// [Loads](Self::load) the file that `BURN_DDP_CONFIG` names; all defaults if it is not set.
    ///
    /// # Errors
    ///
    /// As [`DdpConfig::load`].
    pub fn from_env() -> Result<DdpConfig> {
        std::env::var_os("BURN_DDP_CONFIG").map_or_else(|| Ok(DdpConfig::default()), DdpConfig::load)
    }

    /// For [`Ddp::init_with`]: what `[job]` says where the environment does not say otherwise. The ranks that meet compare their batch
    /// sizes, seeds, `[wrap]` and `data.shuffle`, and whoever reads another file is told so.
    ///
    /// # Errors
    ///
    /// [`Error::Comm`] if a variable or a setting makes no sense.
    pub fn options(&self) -> Result<Options> {
        self.options_over(&|name| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned()))
    }

    fn options_over(&self, environment: &dyn Fn(&str) -> Option<String>) -> Result<Options> {
        let options = Options::from_lookup(&|name| environment(name).or_else(|| self.job.variable(name)))?;
        Ok(Options { config: self.shared(), ..options })
    }

    /// For [`Ddp::wrap_with`]: `[wrap]`, with the accumulation that the [batch sizes](Self::batch) lead to.
    ///
    /// # Errors
    ///
    /// Those of [`DdpConfig::batch`], if the file says anything about batch sizes.
    pub fn wrap_config(&self, world_size: usize) -> Result<WrapConfig> {
        if self.train_batch.is_none() && self.micro_batch.is_none() {
            return Ok(self.wrap.clone());
        }
        Ok(self.wrap.clone().with_accumulation(self.batch(world_size)?.accumulation))
    }

    /// [`Ddp::loader`] with the micro-batch, the shuffling and the workers that the file says.
    ///
    /// # Errors
    ///
    /// Those of [`DdpConfig::batch`].
    pub fn loader<I, O, B>(&self, ddp: &Ddp, batcher: B) -> Result<LoaderBuilder<I, O>>
    where
        I: 'static,
        O: Send + 'static,
        B: Batcher<I, O> + 'static,
    {
        let micro = self.batch(ddp.world_size())?.micro;
        let loader = ddp.loader(batcher).batch_size(micro).num_workers(self.data.workers);
        Ok(self.data.shuffle.into_iter().fold(loader, LoaderBuilder::shuffle))
    }

    /// What can be checked without knowing the job.
    fn check(&self) -> Result<()> {
        let zero = |name: &str| Err(Error::Use(format!("{name} is 0: it counts from 1")));
        for (name, value) in [("train_batch", self.train_batch), ("micro_batch", self.micro_batch)] {
            if value == Some(0) {
                return zero(name);
            }
        }
        if self.checkpoint.as_ref().is_some_and(|checkpoint| checkpoint.every == 0) {
            return zero("checkpoint.every");
        }
        self.wrap.check()?;
        self.options_over(&|_| None).map(drop).map_err(|e| Error::Use(format!("[job] cannot be: {e}")))
    }

    /// What must be the same on all ranks, by name.
    fn shared(&self) -> Vec<(String, String)> {
        let value = serde_json::to_value(self).unwrap_or_default();
        let mut shared = Vec::new();
        for name in ["train_batch", "micro_batch", "seed"] {
            shared.extend(value.get(name).map(|value| (name.to_string(), value.to_string())));
        }
        let sections = [("wrap", value.get("wrap")), ("data", value.get("data"))];
        for (section, fields) in sections {
            let fields = fields.and_then(serde_json::Value::as_object).into_iter().flatten();
            // How many workers it has is a rank's own business.
            let fields = fields.filter(|(field, value)| *field != "workers" && !value.is_null());
            shared.extend(fields.map(|(field, value)| (format!("{section}.{field}"), value.to_string())));
        }
        shared
    }
}

impl Job {
    /// What a variable would be set to.
    fn variable(&self, name: &str) -> Option<String> {
        let text = |number: Option<f64>| number.map(|number| number.to_string());
        match name {
            "BURN_DDP_ENGINE" => self.engine.clone(),
            "BURN_DDP_TIMEOUT" => text(self.timeout),
            "BURN_DDP_JOIN_TIMEOUT" => text(self.join_timeout),
            "BURN_DDP_HEARTBEAT" => text(self.heartbeat),
            "BURN_DDP_PEER_TIMEOUT" => text(self.peer_timeout),
            "BURN_DDP_STALL" => text(self.stall),
            "BURN_DDP_HISTORY" => self.history.map(|history| history.to_string()),
            "BURN_DDP_TIMELINE" => self.timeline.as_ref().map(|file| file.to_string_lossy().into_owned()),
            _ => None,
        }
    }
}
