//! Options of a job that is started on several hosts from here.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use super::seconds::parse_positive_seconds;

#[derive(Debug, Args)]
#[command(next_help_heading = "Several machines from here, by ssh")]
pub(super) struct HostOptions {
    /// Start the job on the hosts in FILE: a line for each, such as `node1 slots=4`
    ///
    /// slots= is the number of ranks (else that of -n); dir=DIRECTORY and env=NAME=VALUE hold for that host alone. ssh
    /// must log in without a password, and burnrun must be installed there. The first host is node 0, at
    /// --master-port. A secret is made and passed on unless --secret-file names one. Ctrl-C ends the job on all hosts,
    /// and so does the end of this burnrun.
    #[arg(long, value_name = "FILE", env = "BURNRUN_HOSTFILE", conflicts_with = "host")]
    pub(super) hostfile: Option<PathBuf>,

    /// The hosts themselves instead of a file, such as a:4,b:4
    #[arg(short = 'H', long, value_name = "HOST[:SLOTS],…", env = "BURNRUN_HOST", value_delimiter = ',')]
    pub(super) host: Vec<String>,

    /// A variable for the ranks on all hosts: its value here, or that one; may be given several times
    #[arg(short = 'x', long, value_name = "NAME[=VALUE]", env = "BURNRUN_EXPORT")]
    pub(super) export: Vec<String>,

    /// Working directory on the hosts [default: this one]
    #[arg(long, value_name = "DIR", env = "BURNRUN_WORKING_DIR")]
    pub(super) working_dir: Option<PathBuf>,

    /// ssh, or a program that takes its arguments, with arguments of its own: "ssh -p 2222"
    #[arg(long, value_name = "COMMAND", env = "BURNRUN_SSH", default_value = "ssh")]
    pub(super) ssh: String,

    /// burnrun on the hosts
    #[arg(long, value_name = "PATH", env = "BURNRUN_REMOTE_BURNRUN", default_value = "burnrun")]
    pub(super) remote_burnrun: String,

    /// Longest time until burnrun runs on a host
    #[arg(long, value_name = "SECONDS", env = "BURNRUN_HOST_TIMEOUT", default_value = "30")]
    #[arg(value_parser = parse_positive_seconds, allow_negative_numbers = true)]
    pub(super) host_timeout: Duration,
}

impl HostOptions {
    pub(super) fn are_given(&self) -> bool {
        self.hostfile.is_some() || !self.host.is_empty()
    }
}
