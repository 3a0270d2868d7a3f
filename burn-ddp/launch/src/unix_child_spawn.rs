//! Starts one rank so that it can be stopped together with its descendants and never outlives the launcher.
//!
//! The only module that runs code between `fork` and `exec`.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{BorrowedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};

use rustix::io::{FdFlags, fcntl_setfd};
use rustix::process::{Pid, getpid, getppid, setsid};

/// Spawns `command` as the leader of a session of its own.
///
/// The child's pid is then also the id of its process group, so one `kill` reaches its descendants. It leads a session
/// and not only a group because of the terminal that it may inherit: a process without a controlling terminal may read
/// and configure it, while a background group of the launcher's session would be stopped by SIGTTIN or SIGTTOU.
///
/// The child inherits the descriptors `inherited`, and enters the control group whose file `cgroup.procs` is open as
/// `group`; all descriptors must be open in this process. The child runs on `processors`, if they are given.
///
/// On Linux the child is killed when the *thread* that called this ends, so that thread must live as long as the job.
pub(crate) fn spawn(
    command: &mut Command,
    inherited: [Option<RawFd>; 2],
    group: Option<RawFd>,
    processors: Option<&[u16]>,
) -> io::Result<Child> {
    let launcher = getpid();
    let affinity = processors.map(Affinity::of);
    // SAFETY: the closure runs in the forked child of a process that may have threads, so it may only do what is
    // async-signal-safe: `before_exec` makes a few system calls through rustix, which neither allocates nor locks
    // there, and builds its errors from codes, without allocating.
    unsafe { command.pre_exec(move || before_exec(launcher, inherited, group, affinity)) };
    command.spawn()
}

fn before_exec(
    launcher: Pid,
    inherited: [Option<RawFd>; 2],
    group: Option<RawFd>,
    affinity: Option<Affinity>,
) -> io::Result<()> {
    setsid()?;
    if let Some(affinity) = affinity {
        affinity.take()?;
    }
    if let Some(fd) = group {
        // An error is ignored: leftovers are then found by their sessions and marks.
        // SAFETY: the caller of `spawn` holds the descriptor open in the launcher, of which this process is a copy.
        let _ = rustix::io::write(unsafe { BorrowedFd::borrow_raw(fd) }, b"0");
    }
    for fd in inherited.into_iter().flatten() {
        // SAFETY: the caller of `spawn` holds the descriptor open in the launcher, of which this process is a copy.
        fcntl_setfd(unsafe { BorrowedFd::borrow_raw(fd) }, FdFlags::empty())?;
    }
    #[cfg(target_os = "linux")]
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
    // If the launcher died before the line above, no death signal comes. Then the parent is init or a subreaper.
    if getppid() != Some(launcher) {
        return Err(io::Error::from_raw_os_error(libc::ESRCH));
    }
    Ok(())
}

/// Processors on which a process runs.
#[derive(Clone, Copy)]
struct Affinity(#[cfg(target_os = "linux")] rustix::thread::CpuSet);

impl Affinity {
    #[cfg(target_os = "linux")]
    fn of(processors: &[u16]) -> Affinity {
        let mut set = rustix::thread::CpuSet::new();
        processors.iter().for_each(|processor| set.set(usize::from(*processor)));
        Affinity(set)
    }

    /// Never called: on other systems [`Binding`](crate::binding::Binding) gives no processors.
    #[cfg(not(target_os = "linux"))]
    fn of(_processors: &[u16]) -> Affinity {
        Affinity()
    }

    /// Binds the calling thread.
    fn take(self) -> io::Result<()> {
        #[cfg(target_os = "linux")]
        rustix::thread::sched_setaffinity(None, &self.0)?;
        Ok(())
    }
}
