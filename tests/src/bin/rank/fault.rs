//! `rank fault WORLD VICTIM PHASE CAUSE`: launches itself as `WORLD` ranks. In the given phase the rank `VICTIM`
//! inflicts the fault `CAUSE` on itself; the other ranks print the time and the text of the error that they get.
//!
//! Each process prints `PID n` first, the victim `FAULT ms` and the others `ERROR ms text`; times are milliseconds
//! since 1970.

use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::{Duration, Instant, SystemTime};

use burn::tensor::DType;
use burn_ddp::prelude::*;
use burn_ddp_tests::{Mlp, rows};
use rustix::process::{Signal, getpid, kill_process};

pub(crate) fn main() -> anyhow::Result<()> {
    let args: Vec<String> = std::env::args().skip(2).collect();
    let [world, victim, phase, cause] = args.as_slice() else {
        anyhow::bail!("usage: rank fault WORLD VICTIM PHASE CAUSE");
    };
    let Ok(rank) = std::env::var("BURN_DDP_RANK").or_else(|_| std::env::var("RANK")) else {
        return Ddp::launch(world.parse()?, |_| Ok(()));
    };
    pretend_machine(&rank)?;
    println!("PID {}", std::process::id());
    let is_victim = rank == *victim;
    let result = run(phase, &|here: &str| {
        if is_victim && here == phase {
            suffer(cause);
        }
    });
    if let Err(error) = &result {
        print_error(&format!("{error:#}"));
    }
    result
}

/// Replaces this process by itself on one of `FAULT_MACHINES` machines, if that is set.
fn pretend_machine(rank: &str) -> anyhow::Result<()> {
    const MACHINE: &str = "BURN_DDP_MACHINE";
    let Some(machines) = std::env::var("FAULT_MACHINES").ok().filter(|_| std::env::var_os(MACHINE).is_none()) else {
        return Ok(());
    };
    let name = format!("machine {}", rank.parse::<usize>()? % machines.parse::<usize>()?);
    Err(Command::new(std::env::current_exe()?).args(std::env::args_os().skip(1)).env(MACHINE, name).exec())?
}

pub(crate) fn print_fault() {
    println!("FAULT {}", now_ms());
}

pub(crate) fn print_error(text: &str) {
    println!("ERROR {} {}", now_ms(), text.replace('\n', " "));
}

/// Milliseconds since 1970.
fn now_ms() -> u128 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_millis())
}

/// Goes through all phases up to the given one, and calls `at` at the beginning of each.
fn run(phase: &str, at: &dyn Fn(&str)) -> anyhow::Result<()> {
    at("rendezvous");
    let ddp = Ddp::init()?;
    let device = ddp.device()?.autodiff();
    at("wrap");
    let model = ddp.wrap(Mlp::new(&device))?;
    for step in 0..4 {
        if step == 3 {
            at("backward");
        }
        ddp.backward(&model.forward(rows(step * 8, 8, 6, 1, DType::F32, &device)).sum(), &model)?;
    }
    at("barrier");
    ddp.barrier()?;
    at("idle");
    // No rank communicates here; each looks for errors of the world by itself.
    let end = Instant::now() + Duration::from_secs(60);
    while phase == "idle" && Instant::now() < end {
        ddp.world().check()?;
        std::thread::sleep(Duration::from_millis(10));
    }
    anyhow::bail!("nothing happened in phase {phase}")
}

pub(crate) fn suffer(cause: &str) {
    print_fault();
    let raise = |signal| kill_process(getpid(), signal).expect("a process may signal itself");
    match cause {
        "kill" => raise(Signal::KILL),
        "stop" => raise(Signal::STOP),
        "abort" => std::process::abort(),
        "exit" => std::process::exit(0),
        "panic" => panic!("the fault is here"),
        // Meanwhile the test sends a signal to the launcher.
        "hang" => std::thread::sleep(Duration::from_secs(60)),
        other => panic!("no cause {other:?}"),
    }
}
