//! Jobs of real processes, started as a launcher would.

#[path = "../../burn-ddp/comm/tests/common/free_port.rs"]
mod free_port;

use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

pub use free_port::FreePort;

/// Variables that ranks keep, as no launcher sets them: they choose engine and devices.
const KEPT: [&str; 4] = ["BURN_DDP_ENGINE", "BURN_DDP_NCCL", "BURN_DDP_SHARE_DEVICES", "NCCL_MULTI_RANK_GPU_ENABLE"];

/// The program `rank`: the one beside this program, as in the GPU kit, otherwise `built`, where cargo has put it.
pub fn rank_program(built: &str) -> String {
    let beside = std::env::current_exe().map(|this| this.with_file_name("rank"));
    match beside {
        Ok(beside) if beside.is_file() => beside.display().to_string(),
        _ => built.to_owned(),
    }
}

/// A rank of `program` with torchrun's plain variables and no other variables of a launcher.
pub fn rank(program: &str, rank: usize, world: usize, port: u16, args: &[&str]) -> Command {
    let mut command = Command::new(program);
    for (name, _) in std::env::vars() {
        let is_a_launchers = name.starts_with("BURN_DDP_")
            || name.contains("RANK")
            || name.contains("WORLD_SIZE")
            || name.starts_with("MASTER_");
        if is_a_launchers && !KEPT.contains(&name.as_str()) {
            command.env_remove(name);
        }
    }
    command
        .args(args)
        .env("RANK", rank.to_string())
        .env("WORLD_SIZE", world.to_string())
        .env("MASTER_ADDR", "127.0.0.1")
        .env("MASTER_PORT", port.to_string())
        .env("RAYON_NUM_THREADS", "1")
        .env("RUST_BACKTRACE", "0")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// Runs a job to its end; panics if that takes longer than a minute.
pub fn job(program: &str, world: usize, args: &[&str]) -> Vec<Output> {
    let port = FreePort::reserve();
    finish((0..world).map(|r| rank(program, r, world, port.port, args)).collect())
}

/// Runs these ranks, by [`rank`], to their ends; panics if that takes longer than a minute.
pub fn finish(ranks: Vec<Command>) -> Vec<Output> {
    let deadline = Instant::now() + Duration::from_secs(60);
    let threads: Vec<_> = ranks
        .into_iter()
        .enumerate()
        .map(|(r, mut rank)| {
            let mut child = rank.spawn().unwrap();
            // The pipes are read while the rank runs: it would block on a full one.
            let (out, err) = (read(child.stdout.take().unwrap()), read(child.stderr.take().unwrap()));
            std::thread::spawn(move || {
                let status = loop {
                    if let Some(status) = child.try_wait().unwrap() {
                        break status;
                    }
                    if Instant::now() > deadline {
                        child.kill().unwrap();
                        child.wait().unwrap();
                        panic!("rank {r} did not end: {}", String::from_utf8_lossy(&err.join().unwrap()));
                    }
                    std::thread::sleep(Duration::from_millis(5));
                };
                Output { status, stdout: out.join().unwrap(), stderr: err.join().unwrap() }
            })
        })
        .collect();
    threads.into_iter().map(|t| t.join().unwrap()).collect()
}

fn read(mut pipe: impl std::io::Read + Send + 'static) -> std::thread::JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        pipe.read_to_end(&mut bytes).unwrap();
        bytes
    })
}

/// Standard output of a rank.
pub fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Standard error of a rank.
pub fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// The rest of the first line that begins with `key`.
pub fn line<'a>(text: &'a str, key: &str) -> &'a str {
    text.lines().find_map(|l| l.strip_prefix(key)).unwrap_or_else(|| panic!("no {key:?} in {text:?}"))
}
