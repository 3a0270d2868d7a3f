//! Binding of ranks to processor cores.
//!
//! | | file |
//! |---|---|
//! | cores of this machine, by NUMA node, as `/sys` lists them | `machine_cores` |
//! | the share of each rank; pure functions | `core_shares` |
//! | locks that keep launchers of this machine off each other's cores | `core_locks` |

mod core_locks;
mod core_shares;
mod machine_cores;

use std::path::Path;

use self::core_locks::{CoreLocks, Turn};
use self::machine_cores::{Core, list_text};
use crate::error::LaunchError;
use crate::job_spec::JobSpec;
use crate::rank_command::available_cores;

/// Cores to which each rank is bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum BindTo {
    /// All cores of the launcher, the same for every rank.
    None,
    /// Cores of its own: each rank gets an equal share of the launcher's physical cores, within one NUMA node if all
    /// shares can be. If there are fewer physical cores than ranks, each rank gets an equal share of hardware threads.
    Core,
    /// The cores of one NUMA node, which several ranks may share.
    Numa,
}

/// Cores of the ranks of this machine. They stay locked for as long as this value lives.
pub(crate) struct Binding {
    /// Numbers of each local rank's processors, ascending; empty if ranks are not bound.
    shares: Vec<Vec<u16>>,
    nproc: usize,
    _held: Option<CoreLocks>,
}

impl Binding {
    /// Chooses and locks cores for the ranks of `spec`, and shows a notice with the cores of each rank.
    pub(crate) fn of(spec: &JobSpec) -> Result<Binding, LaunchError> {
        let sys = Path::new("/sys/devices/system");
        let taken = match spec.bind_to {
            BindTo::None => None,
            to => Some(take(sys, to, spec.nproc).map_err(LaunchError::Binding)?),
        };
        let (shares, held) = taken.unzip();
        let shares = shares.unwrap_or_default();
        if !shares.is_empty() {
            let of_rank = |(rank, share): (usize, &Vec<u16>)| format!("{rank}: {}", list_text(share));
            let all: Vec<String> = shares.iter().enumerate().map(of_rank).collect();
            spec.notices.show(&format!("local ranks are bound to cores: {}", all.join("; ")));
        }
        Ok(Binding { shares, nproc: spec.nproc, _held: held })
    }

    /// Processors of a local rank; `None` if ranks are not bound.
    pub(crate) fn processors(&self, local_rank: usize) -> Option<&[u16]> {
        self.shares.get(local_rank).map(Vec::as_slice)
    }

    /// Number of threads that a local rank's pools should have.
    pub(crate) fn threads(&self, local_rank: usize) -> usize {
        // A quota of CPU time may allow fewer threads than there are cores.
        let quota = available_cores() / self.nproc;
        let bound = self.shares.get(local_rank).map(|own| {
            let sharers = self.shares.iter().filter(|share| *share == own).count();
            own.len() / sharers
        });
        bound.map_or(quota, |bound| bound.min(quota)).max(1)
    }
}

/// Locks cores that no other launcher of this machine has locked; returns the processors of each of `ranks`, and the
/// locks. The error names the missing cores and the fix.
fn take(sys: &Path, to: BindTo, ranks: usize) -> Result<(Vec<Vec<u16>>, CoreLocks), String> {
    let allowed = machine_cores::of_this_process()?;
    let failed = |e| format!("cannot lock cores: {e}; --bind-to none needs no locks");
    let turn = Turn::take().map_err(failed)?;
    let (mut locks, held) = CoreLocks::take(&turn, &allowed).map_err(failed)?;
    let free: Vec<u16> = allowed.iter().copied().filter(|processor| !held.contains(processor)).collect();
    let cores: Vec<Core> = machine_cores::list(sys, &free);
    let shares = match to {
        BindTo::Numa => core_shares::by_node(&cores, ranks),
        _ => core_shares::by_core(&cores, ranks),
    };
    let Some(shares) = shares else {
        return Err(too_few(ranks, &allowed, &held));
    };
    locks.give_back(|processor| !shares.iter().any(|share| share.contains(&processor)));
    Ok((shares, locks))
}

/// Error text: why there are not enough cores for `ranks`, and the fix.
fn too_few(ranks: usize, allowed: &[u16], held: &[u16]) -> String {
    let (free, all) = (allowed.len() - held.len(), list_text(allowed));
    if held.is_empty() {
        return format!(
            "cannot bind {ranks} ranks to cores: this process may use {free} ({all}); start at most {free} ranks \
            (-n {free}), or let them share cores with --bind-to none"
        );
    }
    format!(
        "cannot bind {ranks} ranks to cores: of those that this process may use ({all}) other jobs of burnrun \
        on this machine hold {}; start each job on cores of its own (taskset -c LIST burnrun …), or let the ranks \
        share cores with --bind-to none",
        list_text(held)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_are_the_share_of_the_cores() {
        let available = available_cores();
        let of = |shares: &[&[u16]]| {
            let shares: Vec<Vec<u16>> = shares.iter().map(|share| share.to_vec()).collect();
            Binding { nproc: 1, shares, _held: None }
        };
        assert_eq!(of(&[]).threads(0), available);
        assert_eq!(of(&[&[3], &[4]]).threads(1), 1);
        assert_eq!(of(&[&[0, 1], &[0, 1]]).threads(1), 1);
        assert_eq!(Binding { nproc: 2 * available, ..of(&[]) }.threads(0), 1);
    }

    #[test]
    fn an_error_says_the_fix() {
        let text = too_few(5, &[0, 1, 2, 3], &[]);
        assert!(text.contains("5 ranks") && text.contains("(0-3)") && text.contains("-n 4"), "{text}");
        let text = too_few(3, &[0, 1, 2, 3], &[1, 2]);
        assert!(text.contains("hold 1-2;") && text.contains("taskset -c"), "{text}");
    }
}
