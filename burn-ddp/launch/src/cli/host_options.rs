//! Options of a job that this burnrun starts on several hosts by ssh.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use super::seconds::parse_positive_seconds;

#[derive(Debug, Args)]
#[command(next_help_heading = "Several machines from here, by ssh")]
pub(super) struct HostOptions {
    /// Start the job on the hosts in FILE: a line for each, such as `node1 slots=4`
    ///
    /// slots= is the number of ranks on that host (default: the number of -n); dir=DIRECTORY and env=NAME=VALUE apply
    /// to that host only. ssh must log in without a password, and burnrun must be installed on each host. The first
    /// host is node 0, which listens on --master-port. Unless --secret-file names a secret, a new one is made and
    /// passed on by ssh. Ctrl-C, and any other end of this burnrun, ends the job on all hosts.
    #[arg(long, value_name = "FILE", env = "BURNRUN_HOSTFILE", conflicts_with = "host")]
    pub(super) hostfile: Option<PathBuf>,

    /// Start the job on these hosts, a list instead of a file: a:4,b:4 are 4 ranks on each of a and b
    #[arg(short = 'H', long, value_name = "HOST[:SLOTS],…", env = "BURNRUN_HOST", value_delimiter = ',')]
    pub(super) host: Vec<String>,

    /// Pass an environment variable to the ranks on all hosts, with its value here or the given one; repeatable
    #[arg(short = 'x', long, value_name = "NAME[=VALUE]", env = "BURNRUN_EXPORT")]
    pub(super) export: Vec<String>,

    /// Working directory on the hosts [default: the current directory here]
    #[arg(long, value_name = "DIR", env = "BURNRUN_WORKING_DIR")]
    pub(super) working_dir: Option<PathBuf>,

    /// Command that connects to a host, ssh or a program with the same arguments, such as "ssh -p 2222"
    #[arg(long, value_name = "COMMAND", env = "BURNRUN_SSH", default_value = "ssh")]
    pub(super) ssh: String,

    /// Path or name of the burnrun to start on the hosts
    #[arg(long, value_name = "PATH", env = "BURNRUN_REMOTE_BURNRUN", default_value = "burnrun")]
    pub(super) remote_burnrun: String,

    /// Longest time until burnrun has started on each host
    #[arg(long, value_name = "SECONDS", env = "BURNRUN_HOST_TIMEOUT", default_value = "30")]
    #[arg(value_parser = parse_positive_seconds, allow_negative_numbers = true)]
    pub(super) host_timeout: Duration,
}

impl HostOptions {
    pub(super) fn are_given(&self) -> bool {
        self.hostfile.is_some() || !self.host.is_empty()
    }
}
