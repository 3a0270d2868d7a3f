//! Signals of this process, turned into events for as long as a launcher runs: those that end a job or ask it to stop,
//! those for its ranks, SIGTSTP and SIGWINCH.
//!
//! The program's former handlers are restored when the last launcher of the process is done, so that a program which
//! launches itself keeps its own Ctrl-C. (`signal-hook` cannot do that: it never restores a signal's former action.)
#![allow(unsafe_code)]

use std::io::{self, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, IntoRawFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;

use burn_ddp_comm::StopSignal;
use libc::c_int;

use crate::event::Event;

/// Signals that end a job.
const ENDS: [c_int; 6] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT, libc::SIGALRM, libc::SIGXCPU];
/// Signals for the ranks.
const PASSED_ON: [c_int; 2] = [libc::SIGUSR1, libc::SIGUSR2];
/// Of these signals a program's own handler or setting stays.
const YIELDS: [c_int; 5] = [libc::SIGQUIT, libc::SIGALRM, libc::SIGXCPU, libc::SIGUSR1, libc::SIGUSR2];

/// File descriptor to which the handler writes signal numbers. Written once, before the first handler is installed, and
/// never closed: a handler may still be running on another thread when the handlers are removed.
static PIPE: AtomicI32 = AtomicI32::new(-1);
/// Pid of the process whose signals count. A forked child that has not called `exec` yet shares the pipe; if its
/// handler wrote there too, one Ctrl-C would count twice.
static OWNER: AtomicI32 = AtomicI32::new(0);
static SHARED: Mutex<Shared> = Mutex::new(Shared { next: 0, listeners: Vec::new(), saved: Vec::new() });

struct Shared {
    next: u64,
    /// Used by the reader thread for each signal.
    listeners: Vec<Listener>,
    /// Former action of each changed signal.
    saved: Vec<(c_int, libc::sigaction)>,
}

/// A running launcher of this process, or the watch over the start of its ranks.
struct Listener {
    id: u64,
    events: Sender<Event>,
    /// The signal that asks to stop.
    stop: c_int,
    /// The signals to end that it has got.
    ends: Vec<c_int>,
}

/// Handle of a listener: signals reach its sender until the handle is dropped.
pub(crate) struct Listening(u64);

/// Sends [`Event::Signal`] to `events` for each caught signal, also for the signal that asks to `stop`.
pub(crate) fn listen(events: Sender<Event>, stop: StopSignal) -> io::Result<Listening> {
    let mut shared = lock();
    start_reader()?;
    if shared.listeners.is_empty() {
        install(&mut shared, stop.number())?;
    }
    Ok(shared.add(events, stop.number()))
}

impl Listening {
    /// Sends signals to `events` as well, and first the signals to end that have come to this listener already.
    pub(crate) fn repeat_to(&self, events: Sender<Event>) -> Listening {
        lock().repeat(self.0, events)
    }

    /// Forgets the signals to end that have come: they have ended a generation, and not the next one.
    pub(crate) fn forget(&self) {
        let mut shared = lock();
        shared.listeners.iter_mut().filter(|listener| listener.id == self.0).for_each(|listener| listener.ends.clear());
    }
}

impl Shared {
    fn add(&mut self, events: Sender<Event>, stop: c_int) -> Listening {
        let id = self.next;
        self.next += 1;
        self.listeners.push(Listener { id, events, stop, ends: Vec::new() });
        Listening(id)
    }

    fn repeat(&mut self, of: u64, events: Sender<Event>) -> Listening {
        let of = self.listeners.iter().find(|listener| listener.id == of);
        for signal in of.iter().flat_map(|listener| &listener.ends) {
            let _ = events.send(Event::Signal(*signal));
        }
        let stop = of.map_or(libc::SIGTERM, |listener| listener.stop);
        self.add(events, stop)
    }

    fn deliver(&mut self, signal: c_int) {
        for listener in &mut self.listeners {
            let stops = signal == listener.stop;
            if ENDS.contains(&signal) || stops {
                listener.ends.push(signal);
            }
            let passed_on = PASSED_ON.contains(&signal) && !stops;
            let event = if passed_on { Event::PassOn(signal) } else { Event::Signal(signal) };
            // A launcher whose receiver is gone is about to drop its `Listening`.
            let _ = listener.events.send(event);
        }
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        let mut shared = lock();
        shared.listeners.retain(|listener| listener.id != self.0);
        if shared.listeners.is_empty() {
            restore(&mut shared);
        }
    }
}

fn lock() -> MutexGuard<'static, Shared> {
    SHARED.lock().unwrap_or_else(PoisonError::into_inner)
}

fn start_reader() -> io::Result<()> {
    if PIPE.load(Ordering::Acquire) >= 0 {
        return Ok(());
    }
    let (mut read, write) = UnixStream::pair()?;
    write.set_nonblocking(true)?;
    thread::Builder::new().name("burn-ddp-signals".into()).spawn(move || {
        let mut byte = [0];
        while read.read_exact(&mut byte).is_ok() {
            lock().deliver(c_int::from(byte[0]));
        }
    })?;
    debug_assert!(write.as_raw_fd() >= 0);
    PIPE.store(write.into_raw_fd(), Ordering::Release);
    Ok(())
}

fn install(shared: &mut Shared, stop: c_int) -> io::Result<()> {
    OWNER.store(rustix::process::getpid().as_raw_nonzero().get(), Ordering::Release);
    for signal in ENDS.into_iter().chain(PASSED_ON).chain([libc::SIGTSTP, libc::SIGWINCH]) {
        let old = current(signal)?;
        // The signal that asks to stop is the launcher's, even if whoever started this process ignored it.
        let wanted = signal == stop;
        if YIELDS.contains(&signal) && old.sa_sigaction != libc::SIG_DFL && !wanted {
            continue;
        }
        // `nohup` makes its descendants ignore SIGHUP, and shells without job control SIGTSTP: they stay ignored.
        if [libc::SIGHUP, libc::SIGTSTP].contains(&signal) && old.sa_sigaction == libc::SIG_IGN && !wanted {
            continue;
        }
        set(signal, &action(on_signal as *const () as libc::sighandler_t))?;
        shared.saved.push((signal, old));
    }
    // An ignored SIGCHLD survives `exec` and would make the kernel drop the ranks' exit codes.
    let old = current(libc::SIGCHLD)?;
    if old.sa_sigaction == libc::SIG_IGN {
        set(libc::SIGCHLD, &action(libc::SIG_DFL))?;
        shared.saved.push((libc::SIGCHLD, old));
    }
    Ok(())
}

/// Stops this process, as Ctrl-Z does where SIGTSTP is not caught; returns when the process is continued.
pub(crate) fn stop_here() -> io::Result<()> {
    let caught = current(libc::SIGTSTP)?;
    set(libc::SIGTSTP, &action(libc::SIG_DFL))?;
    // SAFETY: `raise` takes a signal number and sends it to this thread, so it takes effect before the call returns.
    let raised = unsafe { libc::raise(libc::SIGTSTP) };
    let error = io::Error::last_os_error();
    set(libc::SIGTSTP, &caught)?;
    if raised == 0 { Ok(()) } else { Err(error) }
}

fn restore(shared: &mut Shared) {
    for (signal, old) in shared.saved.drain(..) {
        let ours = if signal == libc::SIGCHLD { libc::SIG_DFL } else { on_signal as *const () as libc::sighandler_t };
        // A handler that other code has installed in the meantime is left in place.
        if current(signal).is_ok_and(|now| now.sa_sigaction == ours)
            && let Err(error) = set(signal, &old)
        {
            tracing::warn!(signal, %error, "cannot give a signal back to its former handler");
        }
    }
}

fn action(handler: libc::sighandler_t) -> libc::sigaction {
    // SAFETY: `sigaction` is a C struct of integers, for which all-zero bytes are a valid value (an empty mask, no
    // flags).
    let mut action: libc::sigaction = unsafe { MaybeUninit::zeroed().assume_init() };
    action.sa_sigaction = handler;
    // System calls that the signal interrupts are restarted, so that other threads do not see EINTR.
    action.sa_flags = libc::SA_RESTART;
    action
}

fn current(signal: c_int) -> io::Result<libc::sigaction> {
    let mut old = action(libc::SIG_DFL);
    // SAFETY: a null new action only queries; `old` is a live, writable sigaction.
    match unsafe { libc::sigaction(signal, std::ptr::null(), &raw mut old) } {
        0 => Ok(old),
        _ => Err(io::Error::last_os_error()),
    }
}

fn set(signal: c_int, new: &libc::sigaction) -> io::Result<()> {
    // SAFETY: `new` is a live sigaction whose handler is SIG_DFL, `on_signal` (async-signal-safe, takes one int, as the
    // flags say), or an action that `sigaction` itself returned; a null old action is allowed.
    match unsafe { libc::sigaction(signal, new, std::ptr::null_mut()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

extern "C" fn on_signal(signal: c_int) {
    // SAFETY: only async-signal-safe calls (getpid, write) and atomics; `PIPE` is open for the rest of the process's
    // life and non-blocking, the buffer is one byte on this stack, and errno, which `write` may change, is put back.
    unsafe {
        if libc::getpid() != OWNER.load(Ordering::Acquire) {
            return;
        }
        let errno = errno();
        let saved = *errno;
        let byte = signal as u8;
        libc::write(PIPE.load(Ordering::Acquire), (&raw const byte).cast(), 1);
        *errno = saved;
    }
}

/// Address of this thread's `errno`.
fn errno() -> *mut c_int {
    #[cfg(any(target_os = "illumos", target_os = "solaris"))]
    use libc::___errno as address;
    #[cfg(any(target_os = "android", target_os = "netbsd", target_os = "openbsd"))]
    use libc::__errno as address;
    #[cfg(any(target_os = "linux", target_os = "l4re", target_os = "hurd"))]
    use libc::__errno_location as address;
    #[cfg(any(target_vendor = "apple", target_os = "freebsd", target_os = "dragonfly"))]
    use libc::__error as address;
    // SAFETY: takes no argument and returns a pointer that is valid for this thread.
    unsafe { address() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::{Signal, getpid, kill_process};
    use std::sync::mpsc::channel;
    use std::time::Duration;

    /// One test, since signals belong to the whole process.
    #[test]
    fn all_listeners_hear_and_the_former_handler_comes_back() {
        let before = current(libc::SIGWINCH).unwrap().sa_sigaction;
        let (one, heard_by_one) = channel();
        let (two, heard_by_two) = channel();
        for _ in 0..2 {
            let first = listen(one.clone(), StopSignal::default()).unwrap();
            let second = listen(two.clone(), StopSignal::default()).unwrap();
            kill_process(getpid(), Signal::WINCH).unwrap();
            for heard in [&heard_by_one, &heard_by_two] {
                let event = heard.recv_timeout(Duration::from_secs(5)).unwrap();
                assert!(matches!(event, Event::Signal(libc::SIGWINCH)));
            }
            drop(first);
            assert_ne!(current(libc::SIGWINCH).unwrap().sa_sigaction, before, "the second launcher still runs");
            drop(second);
            assert_eq!(current(libc::SIGWINCH).unwrap().sa_sigaction, before);
        }
    }

    #[test]
    fn a_later_listener_gets_the_signals_to_end_that_came_before() {
        let mut shared = Shared { next: 0, listeners: Vec::new(), saved: Vec::new() };
        let ((launcher, _heard), (watch, heard)) = (channel(), channel());
        // A handle that is dropped would look for its listener in the process's list.
        let launching = std::mem::ManuallyDrop::new(shared.add(launcher, libc::SIGUSR2));
        for signal in [libc::SIGWINCH, libc::SIGINT, libc::SIGUSR1, libc::SIGTERM] {
            shared.deliver(signal);
        }
        let _watching = std::mem::ManuallyDrop::new(shared.repeat(launching.0, watch));
        shared.deliver(libc::SIGHUP);
        shared.deliver(libc::SIGUSR2);
        let signals = heard.try_iter().map(|event| match event {
            Event::Signal(signal) | Event::PassOn(signal) => signal,
            other => panic!("{other:?}"),
        });
        assert_eq!(signals.collect::<Vec<_>>(), [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGUSR2]);
    }

    #[test]
    fn the_signal_to_stop_ends_a_job_whichever_it_is() {
        let mut shared = Shared { next: 0, listeners: Vec::new(), saved: Vec::new() };
        let (events, heard) = channel();
        let _listening = std::mem::ManuallyDrop::new(shared.add(events, libc::SIGUSR1));
        for signal in [libc::SIGUSR1, libc::SIGUSR2, libc::SIGTERM] {
            shared.deliver(signal);
        }
        let events: Vec<String> = heard.try_iter().map(|event| format!("{event:?}")).collect();
        let (usr1, usr2, term) = (libc::SIGUSR1, libc::SIGUSR2, libc::SIGTERM);
        let expected = [format!("Signal({usr1})"), format!("PassOn({usr2})"), format!("Signal({term})")];
        assert_eq!(events, expected);
        assert_eq!(shared.listeners[0].ends, [usr1, term]);
    }
}
