//! A rank that says who it is: to try a launcher without anything to train.
//!
//! ```text
//! cargo build --example hello
//! burnrun -n 4 target/debug/examples/hello
//! mpirun -n 4 target/debug/examples/hello --steps 100
//! ```
//!
//! `--steps N` sums over all ranks N times, `--pause MS` waits between two; `--die RANK:STEP:HOW` ends that rank then,
//! by `kill`, `panic`, `exit`. The last line of a rank is `rank R of N: done after N steps, sum S`.

use std::io::{self, Write};
use std::process::exit;
use std::time::Duration;

use burn_ddp_comm::{LaunchEnv, ReduceOp, World, WorldOptions};

struct Args {
    steps: u64,
    pause: Duration,
    die: Option<(usize, u64, String)>,
}

fn main() {
    if let Err(error) = args().and_then(|args| run(&args)) {
        // In one write: other ranks may be writing theirs to the same place.
        let _ = io::stderr().write_all(format!("hello: {error}\n").as_bytes());
        exit(1);
    }
}

fn run(args: &Args) -> Result<(), String> {
    let said = |error: burn_ddp_comm::Error| error.to_string();
    let options = WorldOptions::from_env().map_err(said)?;
    let env = LaunchEnv::detect().map_err(said)?;
    let (world, launcher) = match &env {
        Some(env) => (World::join(env, options).map_err(said)?, env.launcher),
        None => (World::solo(options), "nobody"),
    };
    let (rank, size) = (world.rank(), world.world_size());
    println!(
        "rank {rank} of {size}: local rank {} of {}, machine {}, process {}, started by {launcher}",
        world.local_rank(),
        world.local_world_size(),
        world.node_rank(),
        std::process::id()
    );
    let group = world.group().map_err(said)?;
    let mut sum = [0.0];
    for step in 0..args.steps {
        world.set_step(step);
        if let Some((_, _, how)) = args.die.as_ref().filter(|(who, when, _)| (*who, *when) == (rank, step)) {
            die(how);
        }
        sum = [(rank + 1) as f64];
        group.all_reduce(&mut sum, ReduceOp::Sum).map_err(|e| format!("rank {rank}: {e}"))?;
        std::thread::sleep(args.pause);
    }
    group.barrier().map_err(|e| format!("rank {rank}: {e}"))?;
    println!("rank {rank} of {size}: done after {} steps, sum {}", args.steps, sum[0]);
    Ok(())
}

fn die(how: &str) {
    match how {
        "kill" => {
            let me = std::process::id().to_string();
            let _ = std::process::Command::new("kill").args(["-9", &me]).status();
        }
        "exit" => exit(0),
        _ => panic!("told to die"),
    }
}

fn args() -> Result<Args, String> {
    let mut args = Args { steps: 1, pause: Duration::ZERO, die: None };
    let mut words = std::env::args().skip(1);
    while let Some(flag) = words.next() {
        let value = words.next().ok_or(format!("{flag} needs a value"))?;
        let number = |text: &str| text.parse().map_err(|_| format!("{flag} {value}: expected numbers"));
        match flag.as_str() {
            "--steps" => args.steps = number(&value)?,
            "--pause" => args.pause = Duration::from_millis(number(&value)?),
            "--die" => {
                let [rank, step, how] = value.split(':').collect::<Vec<_>>()[..] else {
                    return Err(format!("{flag} {value}: expected RANK:STEP:HOW"));
                };
                args.die = Some((number(rank)? as usize, number(step)?, how.to_owned()));
            }
            _ => return Err(format!("unknown flag {flag}")),
        }
    }
    Ok(args)
}
