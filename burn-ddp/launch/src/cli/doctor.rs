//! `burnrun doctor`: checks of this machine.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::io::{Read, Write};
use std::net::{IpAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use clap::Parser;
use rustix::process::{Resource, getrlimit};
use serde::Serialize;

use super::devices;

/// Checks whether this machine can run jobs, and prints a fix for each problem
///
/// `warn` marks a problem for some jobs, FAIL one for every job. The exit code is 1 if a check fails, else 0.
#[derive(Debug, Parser)]
#[command(name = "burnrun doctor", bin_name = "burnrun doctor")]
struct Args {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
enum State {
    Ok,
    /// Some jobs will be slower or fail.
    Warn,
    /// No job will run.
    Fail,
}

#[derive(Debug, Serialize)]
struct Check {
    what: &'static str,
    state: State,
    found: String,
    fix: Option<String>,
}

pub(super) fn main(words: &[OsString]) -> i32 {
    let args: Args = super::parse(words);
    let checks = examine();
    let text = if args.json {
        serde_json::to_string_pretty(&checks).map(|json| format!("{json}\n")).unwrap_or_default()
    } else {
        checks.iter().map(Check::line).collect()
    };
    // Fails if a pager was closed early, which is no error.
    let _ = std::io::stdout().write_all(text.as_bytes());
    i32::from(checks.iter().any(|check| check.state == State::Fail))
}

impl Check {
    fn ok(what: &'static str, found: impl Into<String>) -> Self {
        Self { what, state: State::Ok, found: found.into(), fix: None }
    }

    fn bad(what: &'static str, state: State, found: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { what, state, found: found.into(), fix: Some(fix.into()) }
    }

    fn line(&self) -> String {
        let state = match self.state {
            State::Ok => "ok  ",
            State::Warn => "warn",
            State::Fail => "FAIL",
        };
        let fix = self.fix.as_ref().map(|fix| format!("\n       fix: {fix}")).unwrap_or_default();
        format!("{state}   {}: {}{fix}\n", self.what, self.found)
    }
}

fn examine() -> Vec<Check> {
    let gpus = devices::list();
    let has_gpus = !gpus.devices.is_empty();
    vec![
        cores(),
        open_files(getrlimit(Resource::Nofile).maximum),
        processes(getrlimit(Resource::Nproc).current),
        loopback(),
        host_name(),
        interfaces(),
        nccl_memory(has_gpus),
        temporary_files(),
        file(
            "processes in /proc",
            "/proc/self/fd",
            "mount -t proc proc /proc: ranks open files of burnrun there, and burnrun finds the ranks' processes there",
        ),
        file("shell", "/bin/sh", "install a shell: without it, the ranks' processes may outlive a killed burnrun"),
        gpu(&gpus),
        nccl(has_gpus),
        mpi(),
    ]
}

fn cores() -> Check {
    let cores = burn_ddp_launch::available_cores();
    Check::ok("processor cores", format!("{cores} for this process; `-n cpu` starts a rank on each"))
}

/// Judges the hard limit, since ranks raise their soft limit to it.
fn open_files(limit: Option<u64>) -> Check {
    let what = "open files";
    let fix = "raise the limit: ulimit -Hn 65536; in containers --ulimit nofile=65536";
    let Some(limit) = limit else { return Check::ok(what, "no limit") };
    let ranks = burn_ddp_comm::largest_world(limit);
    let found = format!("at most {limit} per process, enough for {ranks} ranks");
    match ranks {
        ..8 => Check::bad(what, State::Fail, found, fix),
        8..128 => Check::bad(what, State::Warn, found, fix),
        _ => Check::ok(what, found),
    }
}

fn processes(limit: Option<u64>) -> Check {
    let what = "processes";
    let fix = "raise the limit: ulimit -u 4096; in containers --pids-limit";
    match limit {
        Some(limit) if limit < 64 => Check::bad(what, State::Fail, format!("at most {limit}"), fix),
        Some(limit) if limit < 512 => Check::bad(what, State::Warn, format!("at most {limit}"), fix),
        Some(limit) => Check::ok(what, format!("at most {limit}")),
        None => Check::ok(what, "no limit"),
    }
}

fn loopback() -> Check {
    let what = "ports on 127.0.0.1";
    let tried = (|| {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let mut client = TcpStream::connect_timeout(&listener.local_addr()?, Duration::from_secs(5))?;
        client.write_all(b"x")?;
        let mut server = listener.accept()?.0;
        server.set_read_timeout(Some(Duration::from_secs(5)))?;
        server.read_exact(&mut [0])
    })();
    match tried {
        Ok(()) => Check::ok(what, "ranks of this machine can connect to each other"),
        Err(error) => {
            Check::bad(what, State::Fail, error.to_string(), "ip link set lo up; allow local traffic in the firewall")
        }
    }
}

fn host_name() -> Check {
    let what = "host name";
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let fix = "matters for several machines only: give an address as --master-addr, or enter the name in DNS or \
               /etc/hosts";
    let found: Vec<IpAddr> = match (name.as_str(), 0).to_socket_addrs() {
        Ok(found) => found.map(|address| address.ip()).collect(),
        Err(error) => return Check::bad(what, State::Warn, format!("{name} has no address: {error}"), fix),
    };
    let list = found.iter().map(IpAddr::to_string).collect::<Vec<_>>().join(", ");
    if found.iter().all(IpAddr::is_loopback) {
        return Check::bad(what, State::Warn, format!("{name} means {list}, which no other machine can reach"), fix);
    }
    Check::ok(what, format!("{name} means {list}"))
}

fn interfaces() -> Check {
    let what = "network interfaces";
    let names = fs::read_dir("/sys/class/net").into_iter().flatten().flatten();
    let mut names: Vec<_> = names
        .map(|entry| {
            let state = fs::read_to_string(entry.path().join("operstate")).unwrap_or_default();
            format!("{} ({})", entry.file_name().to_string_lossy(), state.trim())
        })
        .collect();
    names.sort();
    Check::ok(what, format!("{}; --interface NAME chooses one", names.join(", ")))
}

/// NCCL creates files in `/dev/shm`; burn-ddp's own shared memory needs none there.
fn nccl_memory(has_gpus: bool) -> Check {
    let what = "/dev/shm, which NCCL uses";
    let fix = "enlarge it: mount -o remount,size=50% /dev/shm; in containers --shm-size=8g or --ipc=host";
    if !has_gpus {
        return Check::ok(what, "not needed without a GPU");
    }
    let Ok(about) = rustix::fs::statvfs("/dev/shm") else {
        return Check::bad(what, State::Warn, "there is no /dev/shm", fix);
    };
    let (free, total) = (about.f_bavail * about.f_frsize, about.f_blocks * about.f_frsize);
    let mib = |bytes: u64| bytes / (1 << 20);
    let found = format!("{} of {} MiB are free", mib(free), mib(total));
    if free < 1 << 30 { Check::bad(what, State::Warn, found, fix) } else { Check::ok(what, found) }
}

fn temporary_files() -> Check {
    let what = "temporary files";
    let dir = env::temp_dir();
    let path = dir.join(format!("burnrun-doctor-{}", std::process::id()));
    let tried = fs::write(&path, b"x").and_then(|()| fs::remove_file(&path));
    match tried {
        Ok(()) => Check::ok(what, format!("{} can be written", dir.display())),
        Err(error) => {
            let found = format!("{}: {error}", dir.display());
            Check::bad(what, State::Fail, found, "set TMPDIR to a directory that you can write, with room in it")
        }
    }
}

fn file(what: &'static str, path: &str, fix: &str) -> Check {
    if Path::new(path).exists() {
        Check::ok(what, format!("{path} is there"))
    } else {
        Check::bad(what, State::Warn, format!("there is no {path}"), fix)
    }
}

fn gpu(found: &devices::Devices) -> Check {
    let what = "GPUs";
    match (&found.note, found.devices.len()) {
        (None, n) => {
            let (driver, cuda) = (found.driver.as_deref().unwrap_or("?"), found.cuda.as_deref().unwrap_or("?"));
            Check::ok(what, format!("{n}; driver {driver}, CUDA up to {cuda}"))
        }
        (Some(note), _) if found.driver.is_none() && note.starts_with("there is no ") => Check::ok(what, note),
        (Some(note), _) => Check::bad(
            what,
            State::Warn,
            note,
            "see `nvidia-smi`; in containers --gpus all, with the NVIDIA container toolkit",
        ),
    }
}

fn nccl(has_gpus: bool) -> Check {
    let what = "NCCL";
    match find_library("libnccl.so.2") {
        Some(path) => Check::ok(what, path.display().to_string()),
        None if has_gpus => Check::bad(
            what,
            State::Warn,
            "there is no libnccl.so.2: GPUs exchange gradients through host memory",
            "install libnccl2, or pip install nvidia-nccl-cu12 and add its lib directory to LD_LIBRARY_PATH",
        ),
        None => Check::ok(what, "there is no libnccl.so.2; it is not needed without a GPU"),
    }
}

/// Path at which the dynamic loader would find a library.
fn find_library(name: &str) -> Option<PathBuf> {
    let set = env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let in_path = env::split_paths(&set).map(|dir| dir.join(name)).find(|path| path.exists());
    in_path.or_else(|| {
        let cache = ["ldconfig", "/sbin/ldconfig"]
            .iter()
            .find_map(|ldconfig| Command::new(ldconfig).arg("-p").output().ok())?;
        let text = String::from_utf8_lossy(&cache.stdout).into_owned();
        let line = text.lines().find(|line| line.trim_start().starts_with(&format!("{name} ")))?;
        line.split_once("=> ").map(|(_, path)| PathBuf::from(path.trim()))
    })
}

fn mpi() -> Check {
    let what = "MPI";
    let Ok(output) = Command::new("mpirun").arg("--version").output() else {
        return Check::ok(what, "there is no mpirun; only jobs that mpirun starts need it");
    };
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    Check::ok(what, text.lines().find(|line| !line.trim().is_empty()).unwrap_or("mpirun").trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_well_comes_with_a_fix() {
        for check in examine() {
            assert_eq!(check.state == State::Ok, check.fix.is_none(), "{check:?}");
            assert!(!check.found.is_empty());
        }
    }

    #[test]
    fn limits_are_judged_by_what_a_job_needs() {
        for (limit, state) in
            [(None, State::Ok), (Some(1 << 20), State::Ok), (Some(256), State::Warn), (Some(80), State::Fail)]
        {
            assert_eq!(open_files(limit).state, state, "{limit:?}");
        }
        assert!(open_files(Some(1024)).found.ends_with("enough for 189 ranks"), "{}", open_files(Some(1024)).found);
        for (limit, state) in
            [(None, State::Ok), (Some(512), State::Ok), (Some(64), State::Warn), (Some(8), State::Fail)]
        {
            assert_eq!(processes(limit).state, state, "{limit:?}");
        }
    }
}
