//! Names of the variables that are read one by one. The names of the rank and world size variables of each launcher are
//! in `launchers`.

pub(super) const RESTART_COUNT: &str = "BURN_DDP_RESTART_COUNT";
pub(super) const SECRET_FILE: &str = "BURN_DDP_SECRET_FILE";
pub(super) const TRUST_NETWORK: &str = "BURN_DDP_TRUST_NETWORK";
pub(super) const INTERFACE: &str = "BURN_DDP_INTERFACE";
pub(super) const BIND: &str = "BURN_DDP_BIND";
pub(super) const ADVERTISE: &str = "BURN_DDP_ADVERTISE";
pub(super) const MACHINE: &str = "BURN_DDP_MACHINE";
pub(super) const EVENTS: &str = "BURN_DDP_EVENTS";
pub(super) const REPORT_DIR: &str = "BURN_DDP_REPORT_DIR";
pub(super) const MASTER: &str = "BURN_DDP_MASTER";
pub(super) const STORE: &str = "BURN_DDP_STORE";
pub(super) const JOB_ID: &str = "BURN_DDP_JOB_ID";
pub(super) const MASTER_ADDR: &str = "MASTER_ADDR";
pub(super) const MASTER_PORT: &str = "MASTER_PORT";
pub(super) const AGENT_STORE: &str = "TORCHELASTIC_USE_AGENT_STORE";
pub(super) const RUN_ID: &str = "TORCHELASTIC_RUN_ID";
pub(super) const TORCH_RESTARTS: &str = "TORCHELASTIC_RESTART_COUNT";
pub(super) const PMIX_NAMESPACE: &str = "PMIX_NAMESPACE";
pub(super) const PMIX_DIR: &str = "PMIX_SERVER_TMPDIR";
pub(super) const PMI_FD: &str = "PMI_FD";
/// Hydra's name of this machine.
pub(super) const MPICH_HOST: &str = "MPIR_CVAR_CH3_INTERFACE_HOSTNAME";
pub(super) const SLURM_JOB: &str = "SLURM_JOB_ID";
pub(super) const SLURM_STEP: &str = "SLURM_STEP_ID";
pub(super) const SLURM_NODES: &str = "SLURM_STEP_NODELIST";
pub(super) const SLURM_RESTARTS: &str = "SLURM_RESTART_COUNT";
pub(super) const SLURM_NODE: &str = "SLURM_NODEID";
pub(super) const SLURM_TASKS: &str = "SLURM_NTASKS";
