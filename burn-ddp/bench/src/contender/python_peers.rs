//! Peers in Python: the scripts of `peers/` as commands.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::Programs;
use crate::contender_ranks::Scratch;
use crate::machine::find_program;

/// Module that all scripts import.
const DRIVER_CLIENT: &str = include_str!("../../peers/driver_client.py");

/// A script of `peers/` on disk, and the Python that runs it.
pub(crate) struct Script {
    python: PathBuf,
    path: PathBuf,
    socket: PathBuf,
}

impl Script {
    /// Writes `text` into `scratch` as `name`, and beside it the module that it imports.
    ///
    /// # Errors
    /// If the Python that `programs` names is missing or cannot import torch.
    pub(crate) fn new(name: &str, text: &str, programs: &Programs, scratch: &Scratch) -> Result<Script> {
        let python = find_program(&programs.python).with_context(|| format!("there is no {}", programs.python))?;
        let knows = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)";
        let knows = Command::new(&python).args(["-c", knows]).status()?.success();
        ensure!(knows, "{} cannot import torch; name another Python with --python", python.display());
        Script::write(python, name, text, scratch)
    }

    fn write(python: PathBuf, name: &str, text: &str, scratch: &Scratch) -> Result<Script> {
        std::fs::write(scratch.path().join("driver_client.py"), DRIVER_CLIENT)?;
        let path = scratch.path().join(name);
        std::fs::write(&path, text)?;
        Ok(Script { python, path, socket: scratch.socket() })
    }

    /// Command that runs the script, with gloo on `interface`. Its first argument is the driver's socket; the caller
    /// adds the others.
    pub(crate) fn command(&self, interface: &str) -> Command {
        let mut command = Command::new(&self.python);
        command.arg(&self.path).arg(&self.socket);
        command.env("GLOO_SOCKET_IFNAME", interface).env("OMP_NUM_THREADS", "1");
        command
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contender_ranks::Team;
    use crate::driver_protocol::RoundPlan;

    /// A script such as those of `peers/`, without torch.
    const TEXT: &str = "
import sys
import driver_client

steps = 0

def step():
    global steps
    steps += 1

def prepare(size_bytes, count):
    if count == 0:
        raise ValueError('no\\nbuffers')

def one_round(seed, samples, per_sample, warmup, late_rank, late_us):
    return driver_client.timed(step, samples, per_sample)

def usage():
    return f'{steps} {sys.argv[2]} 0'

driver_client.serve(sys.argv[1], int(sys.argv[2]), {'prepare': prepare, 'round': one_round, 'usage': usage})
";

    #[test]
    fn scripts_do_what_the_driver_says() {
        let scratch = Scratch::new().unwrap();
        let python = find_program("python3").expect("python3 is needed to test what peers in Python do");
        let script = Script::write(python, "peer.py", TEXT, &scratch).unwrap();
        let command = |rank: usize| {
            let mut command = script.command("lo");
            command.arg(rank.to_string());
            command
        };
        let mut team = Team::start("peer", 2, scratch, (0..2).map(command).collect(), Vec::new()).unwrap();
        team.prepare(8, 1).unwrap();
        let plan = RoundPlan { seed: 0, samples: 3, per_sample: 5, warmup: 0, late: None };
        let round = team.round(&plan).unwrap();
        assert!(round.ns.len() == 3 && round.cpu_ns.len() == 2, "{round:?}");
        assert_eq!(team.tell("usage").unwrap(), ["ok 15 0 0", "ok 15 1 0"]);
        let error = format!("{:#}", team.prepare(8, 0).unwrap_err());
        assert!(error.contains("rank 0: ValueError('no\\nbuffers')"), "{error}");
    }
}
