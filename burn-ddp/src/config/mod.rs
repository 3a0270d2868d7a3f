//! One configuration file, TOML or JSON, for all settings.

use std::path::Path;

use burn::data::dataloader::batcher::Batcher;
use burn_ddp_comm::WorldOptions;
use serde::{Deserialize, Serialize};

use crate::data::LoaderBuilder;
use crate::file_failure::FileFailure;
use crate::{Ddp, Error, Result, WrapConfig};

mod batch_sizes;
mod sections;
#[cfg(test)]
mod tests;

pub use batch_sizes::BatchSizes;
pub use sections::{CheckpointSettings, DataSettings, JobSettings};

/// All settings of a job, from a TOML or JSON file. A setting that is not in the file has the same default as in code;
/// an unknown name is an error.
///
/// An environment variable (`BURN_DDP_TIMEOUT`, …) overrides the file, and the file the default.
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
///     micro_batch = 4               # items per backward: a step has 4 of them, on any number of ranks
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
///         ddp.backward(&model.forward(batch?).sum(), &model)?;
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
    /// Items per backward.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub micro_batch: Option<usize>,
    /// Seed for [`Ddp::seed`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seed: Option<u64>,
    /// Communication between ranks.
    pub job: JobSettings,
    /// Averaging of gradients. Its accumulation is the number of backwards per optimizer step.
    pub wrap: WrapConfig,
    /// Loading of training data.
    pub data: DataSettings,
    /// Checkpoints; `None` to write none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub checkpoint: Option<CheckpointSettings>,
}

impl DdpConfig {
    /// Loads a `.toml` or `.json` file. Not collective: each rank loads its own file, and the ranks compare the
    /// settings when they join with its [`options`](Self::options).
    ///
    /// # Errors
    ///
    /// [`Error::File`] if the file cannot be read; [`Error::Invalid`] with the file, the line and, for an unknown name,
    /// the known names.
    pub fn load(path: impl AsRef<Path>) -> Result<DdpConfig> {
        let path = path.as_ref();
        let file = path.display();
        let text = std::fs::read_to_string(path).map_err(|e| {
            Error::file(FileFailure::from(e).within(format_args!("the config file {file} cannot be read")).at(path))
        })?;
        let at = |line: usize, message: &str| Error::invalid(format!("{file}:{line}: {message}"));
        let config: DdpConfig = match path.extension().and_then(|extension| extension.to_str()) {
            Some("toml") => toml::from_str(&text).map_err(|e| {
                let begin = e.span().map_or(0, |span| span.start.min(text.len()));
                at(1 + text[..begin].matches('\n').count(), e.message())
            })?,
            Some("json") => serde_json::from_str(&text).map_err(|e| {
                let message = e.to_string();
                // The line is in the message already.
                at(e.line(), message.split(" at line ").next().unwrap_or(&message))
            })?,
            _ => return Err(Error::invalid(format!("{file}: a config file is named .toml or .json"))),
        };
        config.check().map_err(|e| Error::invalid(format!("{file}: {e}")))?;
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

    /// Options for [`Ddp::init_with`]: `[job]`, overridden by the environment, and the number of [logical
    /// ranks](Self::logical_ranks). With them the ranks compare their batch
    /// sizes, seeds, `[wrap]` and `data.shuffle` when they join; a difference is an error that names the ranks and both
    /// values.
    ///
    /// # Errors
    ///
    /// [`Error::Comm`] if a variable or a setting is invalid; [`Error::Invalid`] if `train_batch` does not divide by
    /// `micro_batch`, or a variable sets another number of logical ranks.
    pub fn options(&self) -> Result<WorldOptions> {
        self.options_over(&|name| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned()))
    }

    fn options_over(&self, environment: &dyn Fn(&str) -> Option<String>) -> Result<WorldOptions> {
        let options = WorldOptions::from_lookup(&|name| environment(name).or_else(|| self.job.variable(name)))?;
        let logical_ranks = match (options.logical_ranks, self.logical_ranks()?) {
            (Some(given), Some(count)) if given != count => {
                return Err(Error::invalid(format!(
                    "{given} logical ranks (BURN_DDP_LOGICAL_RANKS), but train_batch ÷ micro_batch = {count}"
                )));
            }
            (given, of_file) => given.or(of_file),
        };
        Ok(WorldOptions { config: self.shared(), logical_ranks, ..options })
    }

    /// Settings for [`Ddp::wrap_with`]: `[wrap]`, with the accumulation that follows from the [batch
    /// sizes](Self::batch). With both batch sizes `wrap` needs a job that was joined with the file's
    /// [`options`](Self::options), and so has its logical ranks.
    ///
    /// # Errors
    ///
    /// Those of [`DdpConfig::batch`], if the file sets a batch size.
    ///
    /// # Example
    ///
    /// ```
    /// use burn_ddp::{DdpConfig, WrapConfig};
    ///
    /// let config = DdpConfig { micro_batch: Some(4), wrap: WrapConfig::new().with_accumulation(2),
    /// ..DdpConfig::default() }; assert_eq!(config.wrap_config(3)?, WrapConfig::new().with_accumulation(2));
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    pub fn wrap_config(&self, world_size: usize) -> Result<WrapConfig> {
        if self.train_batch.is_none() && self.micro_batch.is_none() {
            return Ok(self.wrap.clone());
        }
        let accumulation = self.batch(world_size)?.accumulation;
        let mut wrap = self.wrap.clone().with_accumulation(accumulation);
        wrap.logical_ranks = self.logical_ranks()?;
        Ok(wrap)
    }

    /// [`Ddp::loader`] with the micro-batch, the shuffling and the workers of the file.
    ///
    /// # Errors
    ///
    /// Those of [`DdpConfig::batch`]; [`Error::Invalid`] if the job has not the logical ranks of the file, because it
    /// was not joined with its [`options`](Self::options).
    pub fn loader<I, O, B>(&self, ddp: &Ddp, batcher: B) -> Result<LoaderBuilder<I, O>>
    where
        I: 'static,
        O: Send + 'static,
        B: Batcher<I, O> + 'static,
    {
        let micro = self.batch(ddp.world_size())?.micro;
        if let Some(count) = self.logical_ranks()?.filter(|count| *count != ddp.logical_ranks()) {
            return Err(Error::invalid(format!(
                "the config asks for {count} logical ranks (train_batch ÷ micro_batch), and the job has {}: join with \
                `Ddp::init_with(config.options()?)`",
                ddp.logical_ranks()
            )));
        }
        let loader = ddp.loader(batcher).batch_size(micro).num_workers(self.data.workers);
        Ok(self.data.shuffle.into_iter().fold(loader, LoaderBuilder::shuffle))
    }

    /// Refuses values that are invalid in every job.
    fn check(&self) -> Result<()> {
        let zero = |name: &str| Err(Error::invalid(format!("{name} is 0: it counts from 1")));
        for (name, value) in [("train_batch", self.train_batch), ("micro_batch", self.micro_batch)] {
            if value == Some(0) {
                return zero(name);
            }
        }
        if self.checkpoint.as_ref().is_some_and(|checkpoint| checkpoint.every == 0) {
            return zero("checkpoint.every");
        }
        self.wrap.check()?;
        self.logical_ranks()?;
        self.options_over(&|_| None).map(drop).map_err(|e| Error::invalid(format!("[job] cannot be: {e}")))
    }

    /// Settings that must be the same on all ranks: names and values.
    fn shared(&self) -> Vec<(String, String)> {
        let value = serde_json::to_value(self).unwrap_or_default();
        let mut shared = Vec::new();
        for name in ["train_batch", "micro_batch", "seed"] {
            shared.extend(value.get(name).map(|value| (name.to_string(), value.to_string())));
        }
        let sections = [("wrap", value.get("wrap")), ("data", value.get("data"))];
        for (section, fields) in sections {
            let fields = fields.and_then(serde_json::Value::as_object).into_iter().flatten();
            // Ranks may have different numbers of workers.
            let fields = fields.filter(|(field, value)| *field != "workers" && !value.is_null());
            shared.extend(fields.map(|(field, value)| (format!("{section}.{field}"), value.to_string())));
        }
        shared
    }
}
