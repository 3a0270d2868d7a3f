//! `rendezvous`: time from the last rank's arrival until all ranks have joined.

use std::net::TcpListener;
use std::path::PathBuf;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use burn_ddp_comm::{LaunchEnv, StoreServer, World, WorldOptions};
use clap::Args;
use serde_json::json;

use crate::contender::{Engine, Script, envs};
use crate::contender_ranks::{Scratch, Team};
use crate::driver_protocol::Lines;
use crate::machine::describe;
use crate::peer_options::PeerOptions;
use crate::stats::{median, percentile, ratio};
use crate::table::{self, Table, time_us};

/// Time from the moment at which the last rank begins to join until all ranks have joined and have a group. Compares
/// with torch's `init_process_group` and its TCPStore.
#[derive(Args, Debug)]
pub(crate) struct Rendezvous {
    /// Engine of the group.
    #[arg(long, default_value = "shm")]
    engine: Engine,
    /// Numbers of ranks.
    #[arg(long, value_delimiter = ',', default_value = "2,8,32")]
    worlds: Vec<usize>,
    /// Number of times that each world meets.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Delay of the last rank, in milliseconds; long enough that all others wait for it.
    #[arg(long, default_value_t = 700)]
    settle_ms: u64,
    /// Leaves torch out.
    #[arg(long)]
    alone: bool,
    #[command(flatten)]
    common: PeerOptions,
}

/// A rank that joins and leaves at the driver's command.
#[derive(Args, Debug)]
pub(crate) struct MeetArgs {
    #[arg(long)]
    control: PathBuf,
}

impl Rendezvous {
    pub(crate) fn run(&self) -> Result<()> {
        let mut table = Table::new(["ranks", "contender", "median", "longest", "ours is"]);
        for &world in &self.worlds {
            let (mut ours, store) = self.ours(world)?;
            drop(store);
            let mut torch = if self.alone { None } else { self.torch(world) };
            let (mut own_ns, mut torch_ns) = (Vec::new(), Vec::new());
            for _ in 0..self.rounds {
                let (_, store) = envs(world)?;
                own_ns.push(self.meet(&mut ours, store.local_addr().port())?);
                if let Some(torch) = &mut torch {
                    torch_ns.push(self.meet(torch, free_port()?)?);
                }
            }
            let faster = ratio(&torch_ns, &own_ns);
            if self.common.json {
                let row = json!({"bench": "rendezvous", "engine": self.engine.to_string(), "world": world,
                    "median_us": median(&own_ns) / 1e3, "p95_us": percentile(&own_ns, 0.95) / 1e3,
                    "torch_median_us": median(&torch_ns) / 1e3, "times_faster_than": {"torch": faster}});
                println!("{row}");
            }
            let both = [(self.engine.to_string(), &own_ns), ("torch".to_owned(), &torch_ns)];
            for (contender, ns) in both.into_iter().filter(|(_, ns)| !ns.is_empty()) {
                let against =
                    if contender == "torch" { format!("{} faster", table::ratio(faster)) } else { String::new() };
                let (median, longest) = (time_us(median(ns) / 1e3), time_us(percentile(ns, 1.0) / 1e3));
                table.add(vec![world.to_string(), contender, median, longest, against]);
            }
        }
        if !self.common.json {
            println!("meeting, from the last rank's join on, {} rounds, on {}\n\n{table}", self.rounds, describe());
        }
        Ok(())
    }

    fn ours(&self, world: usize) -> Result<(Team, StoreServer)> {
        let scratch = Scratch::new()?;
        let (envs, store) = envs(world)?;
        let command = |env: &LaunchEnv| {
            let mut command = Command::new(std::env::current_exe()?);
            command.arg("meet").arg("--control").arg(scratch.socket()).envs(env.variables());
            command.env("BURN_DDP_ENGINE", self.engine.to_string());
            anyhow::Ok(command)
        };
        let commands = envs.iter().map(command).collect::<Result<_>>()?;
        Ok((Team::start("ours", world, scratch, commands, Vec::new())?, store))
    }

    fn torch(&self, world: usize) -> Option<Team> {
        let start = || {
            let scratch = Scratch::new()?;
            let script = Script::new("meet.py", include_str!("../peers/meet.py"), &self.common.programs, &scratch)?;
            let command = |rank: usize| {
                let mut command = script.command("lo");
                command.args([rank.to_string(), world.to_string()]);
                command
            };
            let commands = (0..world).map(command).collect();
            Team::start("torch", world, scratch, commands, Vec::new())
        };
        start().inspect_err(|error: &anyhow::Error| eprintln!("torch is left out: {error:#}")).ok()
    }

    /// Nanoseconds from the last rank's order to join until all ranks have joined.
    fn meet(&self, team: &mut Team, port: u16) -> Result<f64> {
        let line = format!("join {port}");
        team.order(0..team.world() - 1, &line)?;
        thread::sleep(Duration::from_millis(self.settle_ms));
        let start = Instant::now();
        team.order(team.world() - 1..team.world(), &line)?;
        team.answers()?;
        let elapsed = start.elapsed();
        team.tell("leave")?;
        Ok(elapsed.as_nanos() as f64)
    }
}

fn free_port() -> Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

/// A rank of this project: executes the driver's commands until `quit`.
pub(crate) fn meet(args: &MeetArgs) -> Result<()> {
    let env = LaunchEnv::detect()?.context("no launcher's environment variables are set")?;
    let options = WorldOptions::from_env()?;
    let mut lines = Lines::connect(&args.control)?;
    lines.say(&format!("hello {}", env.rank))?;
    let mut inside = None;
    while let Some(line) = lines.hear()? {
        let answer = match line.split_whitespace().collect::<Vec<_>>()[..] {
            ["join", port] => {
                let meeting = burn_ddp_comm::Meeting::Launcher { host: "127.0.0.1".to_owned(), port: port.parse()? };
                let joined = World::join(&LaunchEnv { meeting, ..env.clone() }, options.clone())
                    .and_then(|world| Ok((world.group()?, world)));
                joined.map(|joined| inside = Some(joined))
            }
            ["leave"] => {
                inside = None;
                Ok(())
            }
            ["quit"] => break,
            _ => bail!("unknown command {line:?} from the driver"),
        };
        let answer = answer.map_or_else(|error| format!("error {error}").replace('\n', " "), |()| "ok".to_owned());
        lines.say(&answer)?;
    }
    drop(inside);
    Ok(())
}
