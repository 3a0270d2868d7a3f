//! The programs, by the name under which the kit is started.
#![allow(unsafe_code)]

use std::panic::catch_unwind;
use std::path::Path;
use std::process::{ExitCode, exit};

use anyhow::Result;
use burn_ddp_examples::{log_to_stderr, trainer};
use clap::Parser;

#[path = "../../../burn-ddp/launch/src/main.rs"]
mod burnrun;
#[allow(dead_code)] // its `main`
#[path = "../../../burn-ddp-examples/src/bin/gpt.rs"]
mod gpt;
#[allow(dead_code)]
#[path = "../../../burn-ddp-examples/src/bin/mnist.rs"]
mod mnist;
#[path = "../../../burn-ddp/nccl/examples/nccl_check.rs"]
mod nccl_check;
#[path = "../../src/bin/rank/main.rs"]
mod rank;
#[allow(dead_code)]
#[path = "../../../burn-ddp-examples/src/bin/resnet.rs"]
mod resnet;

type Program = fn() -> Result<()>;

const PROGRAMS: [(&str, Program); 7] = [
    ("burn-ddp-bench", burn_ddp_bench::main),
    ("burnrun", || {
        burnrun::main();
        Ok(())
    }),
    ("gpt", || {
        log_to_stderr();
        gpt::run(&gpt::Cli::parse()).map(drop)
    }),
    ("mnist", || {
        log_to_stderr();
        mnist::run(&mnist::Cli::parse()).map(drop)
    }),
    ("nccl_check", || {
        nccl_check::main();
        Ok(())
    }),
    ("rank", rank::main),
    ("resnet", || {
        log_to_stderr();
        resnet::run(&resnet::Cli::parse()).map(drop)
    }),
];

/// Run by the C library before `main`, which is libtest's, generated, and knows no other arguments.
#[used]
// SAFETY: a function pointer, as the section consists of. It comes behind the one by which Rust learns the arguments.
#[unsafe(link_section = ".init_array")]
static BEFORE_MAIN: extern "C" fn() = run_program;

/// Runs the program that this process is started as, and ends the process; returns if it is none.
extern "C" fn run_program() {
    let started_as = std::env::args_os().next().unwrap_or_default();
    let name = Path::new(&started_as).file_name();
    let Some((_, program)) = PROGRAMS.into_iter().find(|(program, _)| name == Some(program.as_ref())) else { return };
    // As Rust does before `main`: a closed pipe is an error and no signal.
    // SAFETY: no handler is installed, and there is one thread.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
    exit(match catch_unwind(program) {
        Ok(Ok(())) => 0,
        Ok(failed) => {
            trainer::exit_code(failed.map(|()| ExitCode::FAILURE));
            1
        }
        Err(_) => 101,
    })
}
