//! The sections of a configuration file.

use std::path::PathBuf;

#[cfg(doc)]
use super::DdpConfig;
#[cfg(doc)]
use burn_ddp_comm::WorldOptions;
use serde::{Deserialize, Serialize};

use crate::data::DEFAULT_WORKERS;

/// The section `[job]` of a [`DdpConfig`]: the [`WorldOptions`] of the same names, times in seconds. An environment
/// variable such as `BURN_DDP_TIMEOUT` overrides each.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct JobSettings {
    /// The engine on host memory: [`WorldOptions::engine`]. By default it is chosen by the ranks' machines.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub engine: Option<String>,
    /// Limit of one collective: [`WorldOptions::timeout`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timeout: Option<f64>,
    /// Limit of the wait for all ranks at the start: [`WorldOptions::join_timeout`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub join_timeout: Option<f64>,
    /// Interval of heartbeats: [`WorldOptions::heartbeat`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub heartbeat: Option<f64>,
    /// Silence after which a rank counts as lost: [`WorldOptions::peer_timeout`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peer_timeout: Option<f64>,
    /// Time after which a collective that has not ended is reported: [`WorldOptions::stall`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stall: Option<f64>,
    /// Number of past collectives in a failure report: [`WorldOptions::history`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub history: Option<usize>,
    /// File of the timeline: [`WorldOptions::timeline`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timeline: Option<PathBuf>,
}

/// The section `[data]` of a [`DdpConfig`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DataSettings {
    /// Threads that load batches ahead on each rank; 1 by default, 0 for none.
    pub workers: usize,
    /// The seed of each epoch's order; without it, every epoch has the dataset's order.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shuffle: Option<u64>,
}

impl Default for DataSettings {
    fn default() -> Self {
        DataSettings { workers: DEFAULT_WORKERS, shuffle: None }
    }
}

/// The section `[checkpoint]` of a [`DdpConfig`], for programs that write checkpoints.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CheckpointSettings {
    /// The directory.
    pub dir: PathBuf,
    /// Optimizer steps between two checkpoints.
    pub every: u64,
    /// Number of newest checkpoints to keep; all if not set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep: Option<usize>,
}

impl JobSettings {
    /// The value of the environment variable `name` that is equivalent to this section.
    pub(super) fn variable(&self, name: &str) -> Option<String> {
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
