//! The variables that each launcher sets (the columns of the table in `env`), and which launcher started this process.

use super::names::*;
use super::parse::{Lookup, listed, needed, number};
use super::slurm_lists;
use crate::{Error, Result};

/// Launchers, in the order in which they are looked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Launcher {
    /// burnrun, or `BURN_DDP_*` set by hand.
    Ours,
    /// torchrun, or its variables set by hand.
    Plain,
    OpenMpi,
    /// Hydra, the `mpirun` of MPICH and its relatives.
    Mpich,
    /// `srun`, with any `--mpi`.
    Slurm,
}

/// Variables of one launcher, by meaning.
pub(super) struct Row {
    pub(super) rank: &'static str,
    pub(super) world_size: &'static str,
    pub(super) local_rank: &'static str,
    pub(super) local_world_size: &'static str,
    pub(super) node_rank: Option<&'static str>,
    /// Variables that must be set besides rank and world size.
    needed: &'static [&'static str],
    /// Further variables that show that this launcher has started the process.
    hints: &'static [&'static str],
}

static OURS: Row = Row {
    rank: "BURN_DDP_RANK",
    world_size: "BURN_DDP_WORLD_SIZE",
    local_rank: "BURN_DDP_LOCAL_RANK",
    local_world_size: "BURN_DDP_LOCAL_WORLD_SIZE",
    node_rank: Some("BURN_DDP_NODE_RANK"),
    needed: &[MASTER],
    hints: &[STORE, JOB_ID],
};

static PLAIN: Row = Row {
    rank: "RANK",
    world_size: "WORLD_SIZE",
    local_rank: "LOCAL_RANK",
    local_world_size: "LOCAL_WORLD_SIZE",
    node_rank: Some("GROUP_RANK"),
    needed: &[MASTER_ADDR, MASTER_PORT],
    hints: &[AGENT_STORE, RUN_ID, TORCH_RESTARTS],
};

static OPEN_MPI: Row = Row {
    rank: "OMPI_COMM_WORLD_RANK",
    world_size: "OMPI_COMM_WORLD_SIZE",
    local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
    local_world_size: "OMPI_COMM_WORLD_LOCAL_SIZE",
    node_rank: None,
    needed: &["OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", PMIX_NAMESPACE],
    hints: &["PMIX_RANK"],
};

static MPICH: Row = Row {
    rank: "PMI_RANK",
    world_size: "PMI_SIZE",
    local_rank: "MPI_LOCALRANKID",
    local_world_size: "MPI_LOCALNRANKS",
    node_rank: None,
    needed: &["MPI_LOCALRANKID", "MPI_LOCALNRANKS", PMI_FD],
    hints: &[],
};

/// `SLURM_STEP_*` describes the `srun` step of this process. The variables without `STEP` describe the whole job, and
/// are set in a batch script, too.
static SLURM: Row = Row {
    rank: "SLURM_PROCID",
    world_size: "SLURM_STEP_NUM_TASKS",
    local_rank: "SLURM_LOCALID",
    local_world_size: "SLURM_STEP_TASKS_PER_NODE",
    node_rank: Some(SLURM_NODE),
    needed: &["SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE", SLURM_NODE, SLURM_JOB, SLURM_STEP, SLURM_NODES],
    hints: &[],
};

/// Rank of a process, in the world and on its machine.
pub(super) struct Identity {
    pub(super) rank: usize,
    pub(super) world_size: usize,
    /// Its rank on its machine, and the number of ranks there.
    pub(super) local: Option<(usize, usize)>,
    pub(super) node_rank: Option<usize>,
}

impl Launcher {
    const ALL: [Launcher; 5] = [Self::Ours, Self::Plain, Self::OpenMpi, Self::Mpich, Self::Slurm];

    /// The launcher that started this process; `None` if it was started alone.
    pub(super) fn choose(lookup: Lookup<'_>) -> Result<Option<Launcher>> {
        let Some(winner) = Self::ALL.into_iter().find(|launcher| launcher.is_complete(lookup)) else {
            return match Self::ALL.into_iter().find(|launcher| !launcher.traces(lookup).is_empty()) {
                Some(partly) => Err(partly.incomplete(lookup)),
                None => slurm_without_srun(lookup).map(|()| None),
            };
        };
        // Some `BURN_DDP_*` variables are set, but not all: an error, even if another launcher's are complete.
        let ours = Launcher::Ours;
        if winner != ours && OURS.rank_names().iter().chain(&[STORE]).any(|name| lookup(name).is_some()) {
            return Err(ours.incomplete(lookup));
        }
        winner.must_agree(lookup)?;
        Ok(Some(winner))
    }

    pub(super) fn row(self) -> &'static Row {
        match self {
            Self::Ours => &OURS,
            Self::Plain => &PLAIN,
            Self::OpenMpi => &OPEN_MPI,
            Self::Mpich => &MPICH,
            Self::Slurm => &SLURM,
        }
    }

    /// Rank of this process, from this launcher's variables, which are complete.
    pub(super) fn identity(self, lookup: Lookup<'_>) -> Result<Identity> {
        let row = self.row();
        let rank = needed(number(row.rank, lookup)?, row.rank)?;
        let world_size = needed(number(row.world_size, lookup)?, row.world_size)?;
        if world_size == 0 {
            return Err(Error::environment(format!("{}=0: a world has at least one rank", row.world_size)));
        }
        if rank >= world_size {
            return Err(Error::environment(format!(
                "{}={rank} but {}={world_size}: ranks go from 0 to {}",
                row.rank,
                row.world_size,
                world_size - 1
            )));
        }
        let node_rank = row.node_rank.map_or(Ok(None), |name| number(name, lookup))?;
        let local_size = match (self, node_rank) {
            (Self::Slurm, Some(node)) => slurm_lists::tasks_on(node, row.local_world_size, lookup)?,
            _ => number(row.local_world_size, lookup)?,
        };
        let local = match (number(row.local_rank, lookup)?, local_size) {
            (Some(local_rank), Some(size)) if local_rank >= size || size > world_size => {
                return Err(Error::environment(format!(
                    "{}={local_rank}, {}={size} and {}={world_size} contradict each other: local rank < local world \
                     size <= world size",
                    row.local_rank, row.local_world_size, row.world_size
                )));
            }
            (Some(local_rank), Some(size)) => Some((local_rank, size)),
            (None, None) => None,
            (Some(_), None) => return Err(half_local(row.local_rank, row.local_world_size)),
            (None, Some(_)) => return Err(half_local(row.local_world_size, row.local_rank)),
        };
        Ok(Identity { rank, world_size, local, node_rank })
    }

    /// True if this launcher's variable for the rank is set.
    pub(super) fn traces_rank(self, lookup: Lookup<'_>) -> bool {
        lookup(self.row().rank).is_some()
    }

    fn required(self) -> Vec<&'static str> {
        let row = self.row();
        [&[row.rank, row.world_size], row.needed].concat()
    }

    /// Variables of this launcher that are set.
    fn traces(self, lookup: Lookup<'_>) -> Vec<&'static str> {
        if self == Self::Slurm && !slurm_lists::in_step(lookup) {
            return Vec::new();
        }
        let row = self.row();
        let mut all = self.required();
        all.extend(
            row.rank_names().into_iter().chain(row.hints.iter().copied()).filter(|name| !row.needed.contains(name)),
        );
        all.dedup();
        let mut seen = Vec::new();
        for name in all {
            if lookup(name).is_some() && !seen.contains(&name) {
                seen.push(name);
            }
        }
        seen
    }

    fn missing(self, lookup: Lookup<'_>) -> Vec<&'static str> {
        self.required().into_iter().filter(|name| lookup(name).is_none()).collect()
    }

    fn is_complete(self, lookup: Lookup<'_>) -> bool {
        self.missing(lookup).is_empty() && (self != Self::Slurm || slurm_lists::in_step(lookup))
    }

    fn incomplete(self, lookup: Lookup<'_>) -> Error {
        let advice = match self {
            Self::Ours | Self::Plain => "set all of them to run as a rank of a job, or none to run alone",
            Self::OpenMpi => {
                "Open MPI's mpirun (4 or later) sets all of them; other PMIx launchers need BURN_DDP_RANK, \
                 BURN_DDP_WORLD_SIZE and BURN_DDP_MASTER"
            }
            Self::Mpich => {
                "MPICH's mpirun (Hydra, without -pmi-port) sets all of them; other PMI launchers need BURN_DDP_RANK, \
                 BURN_DDP_WORLD_SIZE and BURN_DDP_MASTER"
            }
            Self::Slurm => "srun sets all of them",
        };
        Error::environment(format!(
            "{} set, but {} not: {advice}",
            listed(&self.traces(lookup)),
            listed(&self.missing(lookup))
        ))
    }

    /// Checks that the variables of other launchers have the same values, unless they describe an outer process, in
    /// which this launcher runs.
    fn must_agree(self, lookup: Lookup<'_>) -> Result<()> {
        let row = self.row();
        let mut differing = Vec::new();
        for other in Self::ALL.into_iter().filter(|other| *other != self && !self.runs_inside(*other, lookup)) {
            let theirs = other.row();
            for (mine, their) in [
                (row.rank, theirs.rank),
                (row.world_size, theirs.world_size),
                (row.local_rank, theirs.local_rank),
                (row.local_world_size, theirs.local_world_size),
            ] {
                if [mine, their].contains(&SLURM.local_world_size) {
                    continue; // Slurm's value is a list, not a number
                }
                let (Some(my_value), Some(their_value)) = (lookup(mine), lookup(their)) else { continue };
                if my_value.trim() != their_value.trim() {
                    differing.push(format!("{mine}={my_value} but {their}={their_value}"));
                }
            }
        }
        if differing.is_empty() {
            return Ok(());
        }
        Err(Error::environment(format!(
            "the variables of two launchers disagree: {}; unset those that do not belong to this job",
            differing.join(", ")
        )))
    }

    /// True if the variables of `outer`, if any, describe an outer process, in which this launcher runs: the launcher's
    /// own process, or its shell.
    fn runs_inside(self, outer: Launcher, lookup: Lookup<'_>) -> bool {
        use Launcher::{Mpich, OpenMpi, Ours, Plain, Slurm};
        let slurm = slurm_lists::in_step(lookup);
        match (self, outer) {
            // burnrun removes the variables of the others from its ranks: what is set was set within a rank.
            (Ours, Slurm) if lookup(STORE).is_some_and(|store| store.trim() == "launcher") => true,
            (Plain, OpenMpi | Mpich | Slurm) if lookup(RUN_ID).is_some() => true,
            // Under `srun --mpi=pmi2 mpirun` the `PMI_*` variables describe mpirun itself.
            (OpenMpi, Mpich) => slurm,
            (OpenMpi | Mpich, Slurm) => true,
            (_, Slurm) => !slurm || lookup(SLURM.world_size).is_some_and(|size| size.trim() == "1"),
            _ => false,
        }
    }
}

impl Row {
    fn rank_names(&self) -> Vec<&'static str> {
        let mut names = vec![self.rank, self.world_size, self.local_rank, self.local_world_size];
        names.extend(self.node_rank);
        names
    }
}

/// Refuses to run alone inside a Slurm allocation of several tasks: its shell and batch script have the job's
/// variables, but not those of `srun`, so the program was probably started without `srun` by mistake.
fn slurm_without_srun(lookup: Lookup<'_>) -> Result<()> {
    match (lookup(SLURM_JOB), number::<usize>(SLURM_TASKS, lookup)?) {
        (Some(job), Some(tasks)) if tasks > 1 => Err(Error::environment(format!(
            "Slurm job {job} has {SLURM_TASKS}={tasks} tasks, but this process is none of them: start it by srun, by \
             mpirun or by burnrun (burnrun -n 1 runs it alone)"
        ))),
        _ => Ok(()),
    }
}

/// Names of all variables of the table.
#[cfg(feature = "fuzzing")]
pub(super) fn all_names() -> Vec<&'static str> {
    let rows = Launcher::ALL.into_iter().flat_map(|launcher| {
        let row = launcher.row();
        row.rank_names().into_iter().chain(row.needed.iter().copied()).chain(row.hints.iter().copied())
    });
    let more = [
        RESTART_COUNT,
        SECRET_FILE,
        TRUST_NETWORK,
        INTERFACE,
        BIND,
        ADVERTISE,
        EVENTS,
        REPORT_DIR,
        SLURM_TASKS,
        SLURM_RESTARTS,
    ];
    let mut names: Vec<_> = rows.chain(more).collect();
    names.sort_unstable();
    names.dedup();
    names
}

fn half_local(set: &str, missing: &str) -> Error {
    Error::environment(format!("{set} is set, but {missing} is not: set both or none"))
}
