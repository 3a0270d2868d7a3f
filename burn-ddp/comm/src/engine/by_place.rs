//! The engine of a group by where its ranks are: shm on one machine, tcp between several.

use std::sync::atomic::{AtomicBool, Ordering};

use super::tcp::{self, TcpFabric};
use super::{Engine, Fabric};
use crate::call::Call;
use crate::{EngineChoice, Error, PeerInfo, Result};

/// Makes a rank's engines.
pub(crate) struct ByPlace {
    /// By rank; `None` where it is not known.
    machines: Vec<Option<String>>,
    choice: Option<EngineChoice>,
    #[cfg(target_os = "linux")]
    shm: super::shm::Shm,
    tcp: TcpFabric,
    /// Memory could not be shared.
    failed: AtomicBool,
}

impl ByPlace {
    pub(crate) fn new(
        machines: Vec<Option<String>>,
        choice: Option<EngineChoice>,
        #[cfg(target_os = "linux")] shm: super::shm::Shm,
        tcp: TcpFabric,
    ) -> ByPlace {
        ByPlace {
            machines,
            choice,
            #[cfg(target_os = "linux")]
            shm,
            tcp,
            failed: AtomicBool::new(false),
        }
    }

    fn may_share(&self, ranks: impl IntoIterator<Item = usize>) -> bool {
        let mut machines = ranks.into_iter().map(|rank| self.machines.get(rank).and_then(Option::as_ref));
        let first = machines.next().flatten();
        cfg!(target_os = "linux") && first.is_some() && machines.all(|machine| machine == first)
    }

    #[cfg(target_os = "linux")]
    fn share(&self, call: &Call) -> Result<Result<Box<dyn Engine>, String>> {
        self.shm.open(call)
    }

    #[cfg(not(target_os = "linux"))]
    fn share(&self, _call: &Call) -> Result<Result<Box<dyn Engine>, String>> {
        Ok(Err("this system has no shm engine".to_owned()))
    }
}

impl Fabric for ByPlace {
    fn name(&self) -> &'static str {
        let shares = self.may_share(0..self.machines.len()) && !self.failed.load(Ordering::Relaxed);
        match self.choice {
            Some(choice @ (EngineChoice::Shm | EngineChoice::Tcp)) => choice.name(),
            _ if shares => EngineChoice::Shm.name(),
            _ => tcp::NAME,
        }
    }

    fn open(&self, call: &Call) -> Result<Box<dyn Engine>> {
        if self.choice == Some(EngineChoice::Mpi) {
            let message = "BURN_DDP_ENGINE=mpi, but this program does not have that engine: build it with burn-ddp's feature `mpi`";
            return Err(Error::Environment { message: message.to_owned() });
        }
        let forced = self.choice == Some(EngineChoice::Shm);
        if self.choice == Some(EngineChoice::Tcp) || !self.may_share(call.members.ranks().iter().copied()) {
            return self.tcp.open(call);
        }
        match self.share(call)? {
            Ok(engine) => Ok(engine),
            Err(why) if forced => Err(Error::Environment {
                message: format!("BURN_DDP_ENGINE=shm, but the ranks cannot share memory: {why}"),
            }),
            Err(why) => {
                tracing::warn!(rank = call.rank, why, "the ranks cannot share memory; tcp takes its place");
                self.failed.store(true, Ordering::Relaxed);
                self.tcp.open(call)
            }
        }
    }
}

/// What ranks that can share memory have in common: the running kernel, the network namespace in which they hand it over, and
/// the user. `None` if it cannot be found out.
pub(crate) fn machine() -> Option<String> {
    use std::os::unix::fs::MetadataExt;
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let network = std::fs::metadata("/proc/self/ns/net").ok()?.ino();
    Some(format!("{} {network} {}", boot.trim(), rustix::process::geteuid().as_raw()))
}

/// Fails if shm is wanted and ranks are on different machines.
pub(crate) fn check(choice: Option<EngineChoice>, ranks: &[(&PeerInfo, Option<&str>)]) -> Result<()> {
    let Some(((first, machine), others)) = ranks.split_first() else { return Ok(()) };
    if choice != Some(EngineChoice::Shm) {
        return Ok(());
    }
    if !cfg!(target_os = "linux") || machine.is_none() {
        let message = "BURN_DDP_ENGINE=shm needs Linux with /proc".to_owned();
        return Err(Error::Environment { message });
    }
    match others.iter().find(|(_, other)| other != machine) {
        None => Ok(()),
        Some((other, _)) => Err(Error::Environment {
            message: format!(
                "BURN_DDP_ENGINE=shm, but {first} and {other} cannot share memory: they are on different machines, in different network namespaces or of different users; without it each group gets the fastest engine it can use"
            ),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shm_is_refused_where_memory_cannot_be_shared() {
        let peers: Vec<PeerInfo> = (0..3).map(|rank| PeerInfo::here(rank, rank, 0)).collect();
        let here = machine();
        let with = |machines: [Option<&str>; 3]| {
            let ranks: Vec<_> = peers.iter().zip(machines).collect();
            check(Some(EngineChoice::Shm), &ranks)
        };
        let here = here.as_deref();
        assert_eq!(with([here; 3]), Ok(()));
        let error = with([here, here, Some("elsewhere")]).unwrap_err().to_string();
        assert!(error.contains("rank 0 (") && error.contains("and rank 2 ("), "{error}");
        assert!(with([None; 3]).is_err());
        assert_eq!(check(None, &[(&peers[0], here), (&peers[1], None)]), Ok(()));
    }
}
