//! Two "machines" on this one: network namespaces with a cable between them that carries no more than it should.

use std::cell::Cell;
use std::process::Command;

use anyhow::{Context, Result, bail};
use burn_ddp_comm::{LaunchEnv, Meeting};

/// Name of the cable on either machine.
pub(crate) const CABLE: &str = "cable";
/// Bytes that may pass at once: what a timer tick lets through at a few Gbit/s.
const BURST: &str = "512kb";
/// First port of the meetings; all ports above are free in namespaces of our own.
const FIRST_PORT: u16 = 29_400;

/// Two machines, of rank 0 and of rank 1, and the cable between them. Dropping it removes them.
pub(crate) struct Link {
    /// The namespaces.
    machines: [String; 2],
    /// Port of the next meeting: ranks of several contenders live side by side.
    port: Cell<u16>,
}

impl Link {
    /// Two machines with a cable of `gbit` Gbit/s each way.
    ///
    /// # Errors
    /// If this process has not root's rights, or `ip` or `tc` is missing.
    pub(crate) fn new(gbit: f64) -> Result<Link> {
        let names = [1, 2].map(|nth| format!("bdb{}-{nth}", std::process::id()));
        for name in &names {
            run("ip", &["netns", "add", name])?;
        }
        // From here on, dropping the link cleans up.
        let link = Link { machines: names, port: Cell::new(FIRST_PORT) };
        let [one, other] = &link.machines;
        run("ip", &["-n", one, "link", "add", CABLE, "type", "veth", "peer", "name", CABLE, "netns", other])?;
        for (nth, name) in link.machines.iter().enumerate() {
            run("ip", &["-n", name, "addr", "add", &format!("{}/24", host(nth)), "dev", CABLE])?;
            run("ip", &["-n", name, "link", "set", "lo", "up"])?;
            run("ip", &["-n", name, "link", "set", CABLE, "up"])?;
            let rate = format!("{}mbit", (gbit * 1000.0).round());
            let shape = ["qdisc", "add", "dev", CABLE, "root", "tbf", "rate", &rate, "burst", BURST, "latency", "50ms"];
            run("ip", &[&["netns", "exec", name, "tc"], &shape[..]].concat())?;
        }
        Ok(link)
    }

    /// `command`, run on the machine of `rank`.
    pub(crate) fn place(&self, rank: usize, command: &Command) -> Command {
        let mut placed = Command::new("ip");
        placed.args(["netns", "exec", &self.machines[rank % 2]]).arg(command.get_program()).args(command.get_args());
        for (name, value) in command.get_envs() {
            value.map(|value| placed.env(name, value));
        }
        placed
    }

    /// Variables of two ranks that meet each other alone.
    pub(crate) fn envs(&self, job: &str) -> Vec<LaunchEnv> {
        let port = self.port.replace(self.port.get() + 1);
        let meeting = Meeting::Rank0 { host: host(0), port };
        let env = |rank| LaunchEnv {
            local_rank: 0,
            local_world_size: 1,
            node_rank: rank,
            trust_network: true,
            interface: Some(CABLE.to_owned()),
            ..LaunchEnv::new(rank, 2, meeting.clone(), job)
        };
        (0..2).map(env).collect()
    }
}

fn host(nth: usize) -> String {
    format!("10.78.0.{}", nth + 1)
}

fn run(program: &str, words: &[&str]) -> Result<()> {
    let output = Command::new(program).args(words).output().with_context(|| format!("cannot run {program}"))?;
    if !output.status.success() {
        bail!("{program} {}: {}", words.join(" "), String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
}

impl Drop for Link {
    fn drop(&mut self) {
        for name in &self.machines {
            let _ = run("ip", &["netns", "del", name]);
        }
    }
}
