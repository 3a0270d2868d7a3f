//! The user's choice of an engine.

use std::str::FromStr;

use crate::{Error, Result};

/// An engine between processes, as chosen by the user.
///
/// ```
/// use burn_ddp_comm::EngineChoice;
///
/// assert_eq!("tcp".parse(), Ok(EngineChoice::Tcp));
/// assert_eq!("nccl".parse(), Ok(EngineChoice::External("nccl")));
/// assert!("gloo".parse::<EngineChoice>().is_err());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum EngineChoice {
    /// Shared memory, for ranks of one machine and user.
    Shm,
    /// Sockets.
    Tcp,
    /// The engine of this name from another crate, put in place by [`World::set_fabric`](crate::World::set_fabric).
    External(&'static str),
}

/// Names of engines in other crates, each with true if it also takes host memory. An engine with false takes device
/// memory only; for host memory the engine is picked as without a choice.
const EXTERNAL: [(&str, bool); 2] = [("mpi", true), ("nccl", false)];

impl EngineChoice {
    /// The name in `BURN_DDP_ENGINE` and in [`World::engine`](crate::World::engine).
    pub fn name(self) -> &'static str {
        match self {
            EngineChoice::Shm => "shm",
            EngineChoice::Tcp => "tcp",
            EngineChoice::External(name) => name,
        }
    }

    /// True if host memory goes through this engine as well.
    pub(crate) fn takes_host_memory(self) -> bool {
        match self {
            EngineChoice::Shm | EngineChoice::Tcp => true,
            EngineChoice::External(name) => EXTERNAL.iter().any(|(known, all)| *known == name && *all),
        }
    }
}

impl FromStr for EngineChoice {
    type Err = Error;

    fn from_str(text: &str) -> Result<EngineChoice> {
        let external = EXTERNAL.map(|(name, _)| EngineChoice::External(name));
        let mut known = [EngineChoice::Shm, EngineChoice::Tcp].into_iter().chain(external);
        known.find(|choice| choice.name() == text.trim()).ok_or_else(|| Error::Environment {
            message: format!("{text:?} is not an engine; the engines are shm, tcp, mpi and nccl (BURN_DDP_ENGINE)"),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_in_the_message_is_an_engine() {
        let message = "gloo".parse::<EngineChoice>().unwrap_err().to_string();
        for name in ["shm", "tcp", "mpi", "nccl"] {
            assert_eq!(name.parse::<EngineChoice>().unwrap().name(), name);
            assert!(message.contains(name), "{message}");
        }
        assert!(EngineChoice::External("mpi").takes_host_memory());
        assert!(!EngineChoice::External("nccl").takes_host_memory());
    }
}
