//! A client of MPICH's process manager: PMI version 1, as Hydra speaks it.
//!
//! Hydra's `mpirun` gives each rank a socket, whose descriptor is in `PMI_FD`, and stores keys and values for the job.
//! A value that a rank puts can be got by all ranks after the next barrier. Requests and answers are lines of text:
//! `cmd=get kvsname=K key=X` is answered by `cmd=get_result rc=0 value=V`.
//!
//! There is one session per process. Hydra counts a process that ends amid its session as failed, whatever its exit
//! code, and ends the other ranks.

use std::io::ErrorKind;
use std::os::fd::{OwnedFd, RawFd};
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::{Error, Result};

/// Longest answer, in bytes; Hydra's values have at most 1024.
const LINE_CAP: usize = 4096;
/// Longest value that every version of Hydra can store.
pub(crate) const VALUE_CAP: usize = 256;

/// A session with the process manager.
pub(crate) struct Pmi {
    socket: OwnedFd,
    /// Name of the job's collection of values, unique among the jobs of this process manager.
    job: String,
    deadline: Instant,
}

impl Pmi {
    /// Begins a session over the socket `fd` of this process.
    pub(crate) fn begin(fd: RawFd, deadline: Instant) -> Result<Pmi> {
        let socket = duplicate(fd).and_then(|socket| {
            // If the descriptor was closed, its number may have been reused since, for something that is no socket.
            rustix::net::sockopt::socket_type(&socket).map(|_| socket)
        });
        let socket = socket.map_err(|e| match e {
            Errno::BADF | Errno::NOTSOCK => failure(&format!(
                "PMI_FD={fd} is not open in this process: a program between mpirun and this one has closed it"
            )),
            Errno::PERM | Errno::NOSYS => failure(&format!(
                "the system does not let this process duplicate its socket PMI_FD={fd} ({e}); in a container, allow \
                 it with --cap-add SYS_PTRACE, or start the ranks by burnrun"
            )),
            e => failure(&format!("cannot use PMI_FD={fd}: {e}")),
        })?;
        let mut pmi = Pmi { socket, job: String::new(), deadline };
        pmi.ask("cmd=init pmi_version=1 pmi_subversion=1", "response_to_init")?;
        let answer = pmi.ask("cmd=get_my_kvsname", "my_kvsname")?;
        pmi.job = answer.value("kvsname")?.to_owned();
        Ok(pmi)
    }

    pub(crate) fn job(&self) -> &str {
        &self.job
    }

    /// Sets `key` for ranks that get it after the next barrier. Neither `key` nor `value` may contain spaces.
    pub(crate) fn put(&mut self, key: &str, value: &str) -> Result<()> {
        if value.len() > VALUE_CAP || value.contains(char::is_whitespace) {
            return Err(failure(&format!("cannot store {} bytes under {key}", value.len())));
        }
        self.ask(&format!("cmd=put kvsname={} key={key} value={value}", self.job), "put_result").map(drop)
    }

    pub(crate) fn get(&mut self, key: &str) -> Result<String> {
        let answer = self.ask(&format!("cmd=get kvsname={} key={key}", self.job), "get_result")?;
        answer.value("value").map(str::to_owned)
    }

    /// Waits until all ranks have called this.
    pub(crate) fn barrier(&mut self) -> Result<()> {
        self.ask("cmd=barrier_in", "barrier_out").map(drop)
    }

    /// Ends the session. The process cannot begin another.
    pub(crate) fn end(mut self) -> Result<()> {
        self.ask("cmd=finalize", "finalize_ack").map(drop)
    }

    fn ask(&mut self, question: &str, expected: &str) -> Result<Answer> {
        self.send(format!("{question}\n").as_bytes()).map_err(|e| self.lost(question, e))?;
        let line = self.line().map_err(|e| self.lost(question, e))?;
        let answer = Answer(line);
        if answer.value("cmd").ok() != Some(expected) || answer.value("rc").is_ok_and(|rc| rc != "0") {
            return Err(failure(&format!("{}: it answered {:?}", command(question), answer.0)));
        }
        Ok(answer)
    }

    fn send(&self, mut bytes: &[u8]) -> Result<(), Errno> {
        while !bytes.is_empty() {
            self.wait_for(PollFlags::OUT)?;
            match rustix::net::send(&self.socket, bytes, crate::net::SEND_FLAGS) {
                Ok(sent) => bytes = &bytes[sent..],
                Err(Errno::INTR | Errno::AGAIN) => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    /// Reads one line, byte by byte, so that nothing behind it is lost: the socket may be used again after this
    /// session.
    fn line(&self) -> Result<String, Errno> {
        let mut line = Vec::new();
        let mut byte = [0];
        while line.len() < LINE_CAP {
            self.wait_for(PollFlags::IN)?;
            match rustix::io::read(&self.socket, &mut byte) {
                Ok(0) => return Err(Errno::CONNRESET),
                Ok(_) if byte == *b"\n" => return String::from_utf8(line).map_err(|_| Errno::BADMSG),
                Ok(_) => line.push(byte[0]),
                Err(Errno::INTR | Errno::AGAIN) => {}
                Err(e) => return Err(e),
            }
        }
        Err(Errno::MSGSIZE)
    }

    fn wait_for(&self, what: PollFlags) -> Result<(), Errno> {
        loop {
            let left = self.deadline.saturating_duration_since(Instant::now());
            let left = Timespec::try_from(left).unwrap_or(Timespec { tv_sec: i32::MAX.into(), tv_nsec: 0 });
            match poll(&mut [PollFd::new(&self.socket, what)], Some(&left)) {
                Ok(0) => return Err(Errno::TIMEDOUT),
                Ok(_) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(e) => return Err(e),
            }
        }
    }

    fn lost(&self, question: &str, e: Errno) -> Error {
        let cause = match (std::io::Error::from(e).kind(), question) {
            (ErrorKind::TimedOut, "cmd=barrier_in") => "not all ranks came in time".to_owned(),
            (ErrorKind::TimedOut, _) => "no answer in time".to_owned(),
            (ErrorKind::ConnectionReset | ErrorKind::BrokenPipe, _) => "it closed the connection".to_owned(),
            _ => e.to_string(),
        };
        failure(&format!("{}: {cause}", command(question)))
    }
}

/// The command of a question, without its values, for messages.
fn command(question: &str) -> &str {
    question.split(' ').next().unwrap_or_default()
}

/// A line `cmd=… key=value …`.
struct Answer(String);

impl Answer {
    fn value(&self, name: &str) -> Result<&str> {
        let mut words = self.0.split(' ').filter_map(|word| word.split_once('='));
        words
            .find(|(known, _)| *known == name)
            .map(|(_, value)| value)
            .ok_or_else(|| failure(&format!("its answer {:?} has no {name}; is it PMI version 1?", self.0)))
    }
}

/// Duplicates the file descriptor `fd`, given as a number, into an owned one without `unsafe`.
#[cfg(target_os = "linux")]
fn duplicate(fd: RawFd) -> Result<OwnedFd, Errno> {
    use rustix::process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open};
    pidfd_getfd(pidfd_open(getpid(), PidfdFlags::empty())?, fd, PidfdGetfdFlags::empty())
}

#[cfg(not(target_os = "linux"))]
fn duplicate(_fd: RawFd) -> Result<OwnedFd, Errno> {
    Err(Errno::NOSYS)
}

/// A session with a process manager that sends `bytes` and closes the socket.
#[cfg(feature = "fuzzing")]
pub(crate) fn fuzz(bytes: &[u8]) {
    use std::io::{Read, Write};
    use std::os::fd::AsRawFd;
    let Ok((ours, mut theirs)) = std::os::unix::net::UnixStream::pair() else { return };
    // Few enough bytes for a socket's buffer, so that one thread suffices.
    theirs.write_all(&bytes[..bytes.len().min(16 * 1024)]).expect("the buffer takes it");
    theirs.shutdown(std::net::Shutdown::Write).expect("a socket");
    theirs.set_nonblocking(true).expect("a socket");
    let deadline = Instant::now() + std::time::Duration::from_secs(60);
    let Ok(mut pmi) = Pmi::begin(ours.as_raw_fd(), deadline) else { return };
    assert!(!pmi.job().contains(' '));
    let error = loop {
        if let Err(e) = pmi.put("key", "value").and_then(|()| pmi.barrier()).and_then(|()| pmi.get("key")) {
            break e.to_string();
        }
        // Makes room for more questions.
        while theirs.read(&mut [0; 16 * 1024]).is_ok_and(|read| read > 0) {}
    };
    // After a wrong answer, the acknowledgement of the end may still be among the bytes.
    let ended = pmi.end();
    assert!(ended.is_err() || !error.contains("it closed the connection"), "it says no more");
}

fn failure(what: &str) -> Error {
    Error::Environment { message: format!("MPICH's process manager: {what}") }
}

/// A process manager for tests.
#[cfg(all(test, target_os = "linux"))]
pub(crate) mod fake {
    use std::collections::HashMap;
    use std::io::{BufRead, BufReader, Write};
    use std::os::unix::net::UnixStream;
    use std::sync::{Barrier, Mutex};

    use crate::poison_free_locks::lock;

    /// Answers ranks as Hydra does.
    pub(crate) struct Hydra {
        values: Mutex<HashMap<String, String>>,
        barrier: Barrier,
        /// All questions and answers, as `mpiexec -verbose` shows them.
        log: Mutex<String>,
    }

    impl Hydra {
        pub(crate) fn new(ranks: usize) -> Hydra {
            Hydra { values: Mutex::default(), barrier: Barrier::new(ranks), log: Mutex::default() }
        }

        /// Serves one rank until it hangs up.
        pub(crate) fn serve(&self, socket: UnixStream) {
            let mut lines = BufReader::new(socket.try_clone().unwrap()).lines();
            while let Some(Ok(line)) = lines.next() {
                let answer = self.answer(&line);
                lock(&self.log).push_str(&format!("{line}\n{answer}\n"));
                (&socket).write_all(format!("{answer}\n").as_bytes()).unwrap();
            }
        }

        fn answer(&self, line: &str) -> String {
            let words: HashMap<&str, &str> = line.split(' ').filter_map(|word| word.split_once('=')).collect();
            match words["cmd"] {
                "init" => "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0".to_owned(),
                "get_my_kvsname" => "cmd=my_kvsname kvsname=kvs_1_0_2_vm".to_owned(),
                "put" => {
                    lock(&self.values).insert(words["key"].to_owned(), words["value"].to_owned());
                    "cmd=put_result rc=0 msg=success".to_owned()
                }
                "get" => match lock(&self.values).get(words["key"]) {
                    Some(value) => format!("cmd=get_result rc=0 msg=success value={value}"),
                    None => format!("cmd=get_result rc=-1 msg=key_{}_not_found value=unknown", words["key"]),
                },
                "barrier_in" => {
                    self.barrier.wait();
                    "cmd=barrier_out".to_owned()
                }
                "finalize" => "cmd=finalize_ack".to_owned(),
                other => panic!("{other}"),
            }
        }

        pub(crate) fn log(&self) -> String {
            lock(&self.log).clone()
        }
    }
}

#[cfg(test)]
#[cfg(target_os = "linux")]
mod tests {
    use std::io::Write;
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixStream;
    use std::thread;
    use std::time::Duration;

    use super::fake::Hydra;
    use super::*;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(20)
    }

    #[test]
    fn what_is_put_is_got_and_what_is_not_is_an_error() {
        let (mine, theirs) = UnixStream::pair().unwrap();
        let server = thread::spawn(|| Hydra::new(1).serve(theirs));
        let mut pmi = Pmi::begin(mine.as_raw_fd(), soon()).unwrap();
        assert_eq!(pmi.job(), "kvs_1_0_2_vm");
        pmi.put("where", "10.0.0.1:4000").unwrap();
        pmi.barrier().unwrap();
        assert_eq!(pmi.get("where").unwrap(), "10.0.0.1:4000");
        let text = pmi.get("else").unwrap_err().to_string();
        assert!(text.contains("key_else_not_found"), "{text}");
        assert!(pmi.put("where", "two words").is_err());
        pmi.end().unwrap();
        drop(mine);
        server.join().unwrap();
    }

    #[test]
    fn silence_junk_and_a_closed_socket_are_errors_that_say_so() {
        let (mine, theirs) = UnixStream::pair().unwrap();
        let begin = |fd, ms| Pmi::begin(fd, Instant::now() + Duration::from_millis(ms)).err().unwrap().to_string();
        let silent = begin(mine.as_raw_fd(), 50);
        assert!(silent.contains("no answer in time"), "{silent}");
        (&theirs).write_all(b"cmd=response_to_init rc=-1 pmi_version=2\n").unwrap();
        let refused = begin(mine.as_raw_fd(), 20_000);
        assert!(refused.contains("pmi_version=2"), "{refused}");
        (&theirs).write_all(&[b'x'; LINE_CAP]).unwrap();
        assert!(begin(mine.as_raw_fd(), 20_000).contains("init"));
        drop(theirs);
        assert!(begin(mine.as_raw_fd(), 20_000).contains("closed the connection"));
        let fd = mine.as_raw_fd();
        drop(mine);
        // Another test may have got this number meanwhile, perhaps for a socket.
        let closed = begin(fd, 50);
        assert!(closed.contains("is not open in this process") || closed.contains("cmd=init"), "{closed}");
        let file = std::fs::File::open("/dev/null").unwrap();
        assert!(begin(file.as_raw_fd(), 50).contains("is not open in this process"));
    }
}
