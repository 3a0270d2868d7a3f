//! The fabric that picks an engine for each group, the fastest that its ranks can use: shm on one machine, tcp between
//! machines, and both if one of several machines has several ranks of the group.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::{Engine, Fabric};
use crate::call::Call;
use crate::topology::Machines;
use crate::{EngineChoice, Error, PeerInfo, Result};

/// Opens a rank's groups with the engine that the user chose, or that fits the group.
pub(crate) struct AutoFabric {
    /// [Machine](machine) of each rank; `None` if it is unknown.
    machines: Vec<Option<String>>,
    choice: Option<EngineChoice>,
    /// `None` on systems without shm.
    shm: Option<Arc<dyn Fabric>>,
    tcp: Arc<dyn Fabric>,
    /// Shm inside machines and tcp between them. `None` on systems without shm.
    two_level: Option<Arc<dyn Fabric>>,
    /// True once the ranks of a group could not share memory.
    shm_failed: AtomicBool,
}

impl AutoFabric {
    pub(crate) fn new(
        machines: Vec<Option<String>>,
        choice: Option<EngineChoice>,
        shm: Option<Arc<dyn Fabric>>,
        tcp: Arc<dyn Fabric>,
        two_level: Option<Arc<dyn Fabric>>,
    ) -> AutoFabric {
        AutoFabric { machines, choice, shm, tcp, two_level, shm_failed: AtomicBool::new(false) }
    }

    /// The shm fabric, if `ranks` are all on one machine.
    fn shm_for(&self, ranks: impl IntoIterator<Item = usize>) -> Option<&dyn Fabric> {
        let mut machines = ranks.into_iter().map(|rank| self.machines.get(rank).and_then(Option::as_ref));
        let first = machines.next().flatten();
        let one_machine = first.is_some() && machines.all(|machine| machine == first);
        self.shm.as_deref().filter(|_| one_machine)
    }

    /// The fabric for `ranks` on several machines: two-level if some of the ranks share a machine.
    fn between_machines(&self, ranks: impl IntoIterator<Item = usize>) -> &dyn Fabric {
        let machines = ranks.into_iter().map(|rank| self.machines.get(rank).and_then(Option::as_ref));
        let machines: Option<Vec<&String>> = machines.collect();
        let shares = |machines: Vec<&String>| Machines::new(&machines).count() < machines.len();
        match &self.two_level {
            Some(two_level) if machines.is_some_and(shares) => &**two_level,
            _ => &*self.tcp,
        }
    }
}

impl Fabric for AutoFabric {
    fn name(&self) -> &'static str {
        let all = || 0..self.machines.len();
        match (self.choice, self.shm_for(all())) {
            (Some(choice @ (EngineChoice::Shm | EngineChoice::Tcp)), _) => choice.name(),
            (_, Some(_)) if self.shm_failed.load(Ordering::Relaxed) => self.tcp.name(),
            (_, Some(shm)) => shm.name(),
            (_, None) => self.between_machines(all()).name(),
        }
    }

    fn open(&self, call: &Call) -> Result<Box<dyn Engine>> {
        if let Some(choice @ EngineChoice::External(name)) = self.choice
            && choice.takes_host_memory()
        {
            let message = format!(
                "BURN_DDP_ENGINE={name}, but this program does not have that engine: \
                 build it with burn-ddp's feature `{name}`"
            );
            return Err(Error::Environment { message });
        }
        if self.choice == Some(EngineChoice::Tcp) {
            return self.tcp.open(call);
        }
        let ranks = || call.members.ranks().iter().copied();
        let Some(shm) = self.shm_for(ranks()) else { return self.between_machines(ranks()).open(call) };
        if self.choice == Some(EngineChoice::Shm) {
            return shm.open(call);
        }
        match shm.try_open(call)? {
            Ok(engine) => Ok(engine),
            Err(reason) => {
                tracing::warn!(rank = call.rank, why = %reason, "the ranks cannot share memory: collectives use tcp");
                self.shm_failed.store(true, Ordering::Relaxed);
                self.tcp.open(call)
            }
        }
    }
}

/// The identity of this rank's machine, equal for ranks that can share memory: the running kernel, the network
/// namespace, in which ranks hand memory over, and the user with its user namespace, since one user number means
/// different users in two namespaces. `name`, if given, cuts the host into several machines. `None` if the system does
/// not tell these, or does not let processes share memory.
pub(crate) fn machine(name: Option<&str>) -> Option<String> {
    use std::os::unix::fs::MetadataExt;
    #[cfg(target_os = "linux")]
    if let Err(error) = super::shm::try_handover() {
        tracing::warn!(%error, "this process cannot share memory with others: its collectives go through tcp");
        return None;
    }
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let namespace = |name| Some(std::fs::metadata(format!("/proc/self/ns/{name}")).ok()?.ino());
    let (network, users) = (namespace("net")?, namespace("user")?);
    let user = rustix::process::geteuid().as_raw();
    Some(format!("{} {network} {users} {user} {}", boot.trim(), name.unwrap_or_default()))
}

/// Fails if the user chose shm and ranks are on different machines.
pub(crate) fn check(choice: Option<EngineChoice>, ranks: &[(&PeerInfo, Option<&str>)]) -> Result<()> {
    let Some(((first, machine), others)) = ranks.split_first() else { return Ok(()) };
    if choice != Some(EngineChoice::Shm) {
        return Ok(());
    }
    if !cfg!(target_os = "linux") || machine.is_none() {
        let message = "BURN_DDP_ENGINE=shm needs Linux with /proc, and processes that may share memory".to_owned();
        return Err(Error::Environment { message });
    }
    match others.iter().find(|(_, other)| other != machine) {
        None => Ok(()),
        Some((other, _)) => Err(Error::Environment {
            message: format!(
                "BURN_DDP_ENGINE=shm, but {first} and {other} cannot share memory: they are on different \
                 machines, in different network or user namespaces, or of different users; without BURN_DDP_ENGINE \
                 each group gets the fastest engine it can use"
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
        let here = machine(None);
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
