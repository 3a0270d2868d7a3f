//! Several simulated machines on this one: network namespaces, each with a cable of limited speed to a switch, or each
//! with a network device whose packets a relay delays.

use std::cell::Cell;
use std::fmt::Display;
use std::fs::{self, Permissions};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use burn_ddp_comm::{LaunchEnv, Meeting};

/// Name of the cable on each machine.
pub(crate) const CABLE: &str = "cable";
/// Bytes that may pass at once: as many as pass between two timer ticks at a few Gbit/s.
const BURST: &str = "512kb";
/// Bytes of one flow that may pass at once.
const FLOW_BURST: &str = "64kb";
/// Number of traffic classes for flows, large enough that flows between the same machines get different classes.
const FLOW_CLASSES: u32 = 1024;
/// Number of the first of these classes.
const FIRST_CLASS: u32 = 0x10;
/// A congestion control that every kernel has. Like the usual `cubic`, it fills a cable that loses no packets; `bbr`,
/// the default of some systems, paces each connection by its own estimate and leaves a part of the cable unused.
const CONGESTION_CONTROL: &str = "reno";
/// Program that delays packets between machines; needs Python.
const RELAY: &str = include_str!("../peers/delay_relay.py");
/// First port of the rendezvous; the ports above it are free, since the namespaces are new.
const FIRST_PORT: u16 = 29_400;

/// Limits of a machine's cable in each direction; 0 for no limit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cable {
    pub(crate) gbit: f64,
    /// Limit of each flow, in Mbit/s.
    pub(crate) flow_mbit: f64,
}

/// Machines and their cables, removed on drop.
pub(crate) struct Machines {
    /// Names of the namespaces: one for each machine, and last the switch's.
    namespaces: Vec<String>,
    /// Process that delays packets.
    relay: Option<Child>,
    /// Machine of each rank.
    machine_of: Vec<usize>,
    /// Port of the next rendezvous: ranks of several contenders run at the same time, and need a port each.
    port: Cell<u16>,
}

impl Machines {
    /// Machines connected by `cable`s; `machine_of` is the machine of each rank.
    ///
    /// # Errors
    /// If this process lacks root's rights, or `ip` or `tc` is missing.
    pub(crate) fn new(machine_of: Vec<usize>, cable: Cable) -> Result<Machines> {
        let machines = Machines::unconnected(machine_of)?;
        machines.connect(cable)?;
        Ok(machines)
    }

    /// Machines between which each packet takes `delay`, without a limit of speed; `machine_of` is the machine of each
    /// rank.
    ///
    /// # Errors
    /// If this process lacks root's rights, or `ip` or Python is missing.
    pub(crate) fn with_delay(machine_of: Vec<usize>, delay: Duration) -> Result<Machines> {
        let mut machines = Machines::unconnected(machine_of)?;
        let relay = Command::new("python3")
            .args(["-c", RELAY, &(delay.as_secs_f64() * 1e3).to_string(), CABLE])
            .args(&machines.namespaces[..machines.count()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot run python3, which is needed to delay packets")?;
        let ready = machines.relay.insert(relay).stdout.take().map(|out| BufReader::new(out).lines().next());
        if !matches!(ready, Some(Some(Ok(_)))) {
            bail!("the relay that delays packets does not start");
        }
        for (nth, machine) in machines.namespaces[..machines.count()].iter().enumerate() {
            run("ip", &["-n", machine, "addr", "add", &format!("{}/24", host(nth)), "dev", CABLE])?;
            run("ip", &["-n", machine, "link", "set", CABLE, "up"])?;
        }
        Ok(machines)
    }

    /// Machines and a switch without cables between them; `machine_of` is the machine of each rank.
    fn unconnected(machine_of: Vec<usize>) -> Result<Machines> {
        let count = machine_of.iter().max().map_or(0, |last| last + 1);
        // If a command below fails, the drop of `machines` removes the namespaces that were made.
        let port = Cell::new(FIRST_PORT);
        let mut machines = Machines { namespaces: Vec::new(), relay: None, machine_of, port };
        for nth in 0..=count {
            run("ip", &["netns", "add", &namespace(nth)])?;
            machines.namespaces.push(namespace(nth));
            run("ip", &["-n", &namespace(nth), "link", "set", "lo", "up"])?;
            let control = format!("echo {CONGESTION_CONTROL} >/proc/sys/net/ipv4/tcp_congestion_control");
            run("ip", &["netns", "exec", &namespace(nth), "sh", "-c", &control])?;
        }
        Ok(machines)
    }

    /// Connects each machine to the switch.
    fn connect(&self, Cable { gbit, flow_mbit }: Cable) -> Result<()> {
        let (machines, switch) = self.namespaces.split_at(self.count());
        let switch = &switch[0];
        run("ip", &["-n", switch, "link", "add", "bridge", "type", "bridge"])?;
        run("ip", &["-n", switch, "link", "set", "bridge", "up"])?;
        for (nth, machine) in machines.iter().enumerate() {
            let port = &format!("port{nth}");
            run("ip", &["-n", machine, "link", "add", CABLE, "type", "veth", "peer", "name", port, "netns", switch])?;
            run("ip", &["-n", machine, "addr", "add", &format!("{}/24", host(nth)), "dev", CABLE])?;
            run("ip", &["-n", machine, "link", "set", CABLE, "up"])?;
            run("ip", &["-n", switch, "link", "set", port, "master", "bridge", "up"])?;
            match flow_mbit > 0.0 {
                true => limit_flows(machine, CABLE, gbit, flow_mbit)?,
                false if gbit > 0.0 => pace(machine, CABLE, gbit)?,
                false => {}
            }
            if gbit > 0.0 {
                pace(switch, port, gbit)?;
            }
        }
        Ok(())
    }

    /// Number of ranks.
    pub(crate) fn world(&self) -> usize {
        self.machine_of.len()
    }

    /// Number of machines.
    pub(crate) fn count(&self) -> usize {
        self.namespaces.len() - 1
    }

    /// `command`, run on the machine of `rank`.
    pub(crate) fn place(&self, rank: usize, command: &Command) -> Command {
        let mut placed = Command::new("ip");
        let machine = &self.namespaces[self.machine_of[rank]];
        placed.args(["netns", "exec", machine]).arg(command.get_program()).args(command.get_args());
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => placed.env(name, value),
                None => placed.env_remove(name),
            };
        }
        placed
    }

    /// Options for `mpirun`, which itself must run on rank 0's machine. Writes the program `agent`, which `mpirun` uses
    /// in the place of `ssh`.
    ///
    /// # Errors
    /// If `agent` cannot be written.
    pub(crate) fn mpirun(&self, agent: &Path) -> Result<Vec<String>> {
        // Open MPI keeps files in each machine's /tmp, named after the machine: here all share it, so each gets a name.
        let text = format!(
            "#!/bin/sh\n\
             while :; do case $1 in -*) shift ;; *) break ;; esac; done\n\
             nth=$((${{1##*.}} - 1)); shift\n\
             exec ip netns exec {} unshare --uts sh -c \"hostname machine$nth; $*\"\n",
            namespace("$nth")
        );
        fs::write(agent, text)?;
        fs::set_permissions(agent, Permissions::from_mode(0o700))?;
        let slots = |nth: usize| self.machine_of.iter().filter(|machine| **machine == nth).count();
        let hosts: Vec<String> = (0..self.count()).map(|nth| format!("{}:{}", host(nth), slots(nth))).collect();
        let map = if self.machine_of.is_sorted() { "slot" } else { "node" };
        let hosts = hosts.join(",");
        let mut words = vec!["--host", &hosts, "--map-by", map, "--bind-to", "none"];
        let agent = agent.to_str().context("the path of the temporary directory is not UTF-8")?;
        // The ranks of all machines share the cores of this one, so they must yield while they wait.
        let settings = [
            ("plm_rsh_agent", agent),
            ("pml", "ob1"),
            ("btl", "self,vader,tcp"),
            ("btl_tcp_if_include", CABLE),
            ("oob_tcp_if_include", CABLE),
            ("mpi_yield_when_idle", "1"),
        ];
        settings.iter().for_each(|(name, value)| words.extend(["--mca", *name, *value]));
        Ok(words.into_iter().map(str::to_owned).collect())
    }

    /// Variables of each rank; the ranks meet on rank 0's machine.
    pub(crate) fn envs(&self, job: &str) -> Vec<LaunchEnv> {
        let port = self.port.replace(self.port.get() + 1);
        let meeting = Meeting::Rank0 { host: host(self.machine_of[0]), port };
        let env = |rank: usize| {
            let on_mine = |ranks: &[usize]| ranks.iter().filter(|machine| **machine == self.machine_of[rank]).count();
            LaunchEnv {
                local_rank: on_mine(&self.machine_of[..rank]),
                local_world_size: on_mine(&self.machine_of),
                node_rank: self.machine_of[rank],
                trust_network: true,
                interface: Some(CABLE.to_owned()),
                ..LaunchEnv::new(rank, self.machine_of.len(), meeting.clone(), job)
            }
        };
        (0..self.machine_of.len()).map(env).collect()
    }

    /// Bytes that each machine has sent so far, as its interface counts them.
    ///
    /// # Errors
    /// If the counters cannot be read.
    pub(crate) fn sent_bytes(&self) -> Result<Vec<u64>> {
        let counter = format!("/sys/class/net/{CABLE}/statistics/tx_bytes");
        let sent = |machine: &String| Ok(run("ip", &["netns", "exec", machine, "cat", &counter])?.trim().parse()?);
        self.namespaces[..self.count()].iter().map(sent).collect()
    }
}

/// Name of a machine's namespace.
fn namespace(nth: impl Display) -> String {
    format!("bdb{}-{nth}", std::process::id())
}

/// Address of a machine.
fn host(nth: usize) -> String {
    format!("10.78.0.{}", nth + 1)
}

fn pace(namespace: &str, interface: &str, gbit: f64) -> Result<()> {
    let rate = format!("{}mbit", (gbit * 1000.0).round());
    let shape = ["qdisc", "add", "dev", interface, "root", "tbf", "rate", &rate, "burst", BURST, "latency", "50ms"];
    run("ip", &[&["netns", "exec", namespace, "tc"], &shape[..]].concat()).map(drop)
}

/// Gives each flow that leaves a machine a traffic class with a limit of its own, within the limit of the cable. The
/// class follows from the sum of both ports, since one end of several flows may have the same port.
fn limit_flows(machine: &str, interface: &str, gbit: f64, flow_mbit: f64) -> Result<()> {
    let cable = if gbit > 0.0 { gbit * 1000.0 } else { 1e5 };
    let mut script = format!(
        "qdisc add dev {interface} root handle 1: htb\n\
         class add dev {interface} parent 1: classid 1:1 htb rate {cable}mbit burst {BURST} quantum 60000\n"
    );
    for class in FIRST_CLASS..FIRST_CLASS + FLOW_CLASSES {
        script += &format!(
            "class add dev {interface} parent 1:1 classid 1:{class:x} htb rate {flow_mbit}mbit ceil {flow_mbit}mbit \
             burst {FLOW_BURST} quantum 60000\n"
        );
    }
    // Loads both ports behind the headers of Ethernet and IPv4, adds them, and computes the class from the sum.
    let program = [
        "40 0 0 34".to_owned(),
        "7 0 0 0".to_owned(),
        "40 0 0 36".to_owned(),
        "12 0 0 0".to_owned(),
        format!("84 0 0 {}", FLOW_CLASSES - 1),
        format!("4 0 0 {}", (1 << 16) + FIRST_CLASS),
        "22 0 0 0".to_owned(),
    ];
    let program = format!("{},{}", program.len(), program.join(","));
    script += &format!("filter add dev {interface} parent 1: protocol all bpf bytecode \"{program}\"\n");
    let mut tc = Command::new("ip")
        .args(["netns", "exec", machine, "tc", "-batch", "-"])
        .stdin(Stdio::piped())
        .spawn()
        .context("cannot run tc")?;
    tc.stdin.take().context("tc has no input")?.write_all(script.as_bytes())?;
    if !tc.wait()?.success() {
        bail!("tc cannot limit flows");
    }
    Ok(())
}

fn run(program: &str, words: &[&str]) -> Result<String> {
    let output = Command::new(program).args(words).output().with_context(|| format!("cannot run {program}"))?;
    if !output.status.success() {
        bail!("{program} {}: {}", words.join(" "), String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

impl Drop for Machines {
    fn drop(&mut self) {
        if let Some(relay) = &mut self.relay {
            let _ = relay.kill().and_then(|()| relay.wait());
        }
        for name in &self.namespaces {
            let _ = run("ip", &["netns", "del", name]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_placed_command_keeps_the_changes_of_its_environment() {
        // Names that no namespace has, so that the drop removes none.
        let namespaces = vec!["burn-ddp-no-machine".to_owned(), "burn-ddp-no-switch".to_owned()];
        let machines = Machines { namespaces, relay: None, machine_of: vec![0], port: Cell::new(FIRST_PORT) };
        let placed = machines.place(0, Command::new("rank").arg("--fast").env("SET", "1").env_remove("REMOVED"));
        let changes: Vec<_> = placed.get_envs().collect();
        assert_eq!(changes, [("REMOVED".as_ref(), None), ("SET".as_ref(), Some("1".as_ref()))]);
        let words: Vec<_> = placed.get_args().collect();
        assert_eq!(words, ["netns", "exec", "burn-ddp-no-machine", "rank", "--fast"]);
    }
}
