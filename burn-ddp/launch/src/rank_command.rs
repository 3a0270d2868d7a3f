//! The command of one rank, and the errors of its start.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use crate::error::LaunchError;
use crate::malloc_variables::keep_freed_memory;

/// Program that every rank runs, with its arguments and additional environment variables.
#[derive(Clone, Debug)]
pub(crate) struct Program {
    pub(crate) program: OsString,
    pub(crate) args: Vec<OsString>,
    pub(crate) env: Vec<(OsString, OsString)>,
}

impl Program {
    /// Hash of the list of arguments, the same on all machines (FNV-1a).
    pub(crate) fn fingerprint_of_arguments(&self) -> u64 {
        let bytes = self.args.iter().flat_map(|arg| arg.as_encoded_bytes().iter().chain(&[0]));
        bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3))
    }

    /// The command of a rank whose thread pools have `threads` threads. `job` are the variables that describe the job.
    pub(crate) fn command(&self, threads: usize, job: Vec<(String, String)>, keeps_terminal: bool) -> Command {
        let mut command = Command::new(&self.program);
        command.args(&self.args);
        let threads = threads.to_string();
        for name in ["RAYON_NUM_THREADS", "OMP_NUM_THREADS"] {
            if std::env::var_os(name).is_none() {
                command.env(name, &threads);
            }
        }
        // If torchrun or mpirun has started this launcher, their variables describe the launcher, not the rank. And
        // options of this burnrun must not become defaults of a burnrun that a rank starts.
        for (name, _) in std::env::vars_os() {
            let outer = ["TORCHELASTIC_", "OMPI_COMM_WORLD_", "PMIX_", "PMI_", "MPI_LOCAL", "BURNRUN_"];
            if outer.iter().any(|prefix| name.as_encoded_bytes().starts_with(prefix.as_bytes())) {
                command.env_remove(name);
            }
        }
        command.envs(self.env.iter().map(|(name, value)| (name, value))).envs(job);
        keep_freed_memory(&mut command, |name| self.variable(name));
        if !keeps_terminal {
            command
                .stdin(std::process::Stdio::null())
                .stdout(std::process::Stdio::piped())
                .stderr(std::process::Stdio::piped());
        }
        command
    }

    /// Value of a variable that the ranks get from `env` or from this process's environment.
    fn variable(&self, name: &str) -> Option<OsString> {
        let own = self.env.iter().rev().find(|(own, _)| own == name).map(|(_, value)| value.clone());
        own.or_else(|| std::env::var_os(name))
    }

    pub(crate) fn spawn_error(&self, rank: usize, source: io::Error) -> LaunchError {
        let program = self.program.clone();
        match source.raw_os_error() {
            Some(libc::ENOENT | libc::ENOTDIR) => {
                LaunchError::ProgramNotFound { reason: why_not_found(&program), program }
            }
            Some(libc::EACCES | libc::ENOEXEC) => {
                LaunchError::ProgramNotExecutable { reason: why_not_executable(&program, &source), program }
            }
            _ => LaunchError::Spawn { rank, source },
        }
    }
}

/// Number of processors that this process may use, within its affinity and the limits of its container.
///
/// # Example
///
/// ```
/// assert!(burn_ddp_launch::available_cores() >= 1);
/// ```
#[must_use]
pub fn available_cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

fn why_not_found(program: &OsStr) -> String {
    let path = Path::new(program);
    let has_slash = program.as_encoded_bytes().contains(&b'/');
    if has_slash && path.exists() {
        return "the file exists, but not the interpreter in its first line (`#!…`), or its dynamic loader".into();
    }
    if has_slash {
        return "there is no such file".into();
    }
    if path.is_file() {
        return format!("no program of this name in PATH; for the file in this directory write ./{}", path.display());
    }
    "no program of this name in PATH".into()
}

fn why_not_executable(program: &OsStr, source: &io::Error) -> String {
    let path = Path::new(program);
    match fs::metadata(path) {
        Ok(file) if file.is_dir() => "it is a directory".into(),
        Ok(file) if file.permissions().mode() & 0o111 == 0 => match path.extension().and_then(OsStr::to_str) {
            Some("py") => format!("it is a script without execute permission; write `python {}`", path.display()),
            Some("sh") => format!("it is a script without execute permission; write `sh {}`", path.display()),
            _ => "it has no execute permission (see `chmod +x`)".into(),
        },
        _ if source.raw_os_error() == Some(libc::ENOEXEC) => "it is not a program for this machine".into(),
        _ => source.to_string(),
    }
}
