//! One connection: an `ssh` process, and the threads that read its output.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

use super::remote_messages::Answer;
use crate::output::lines::Lines;
use crate::output::relay::{Output, write_to};

const READ_BYTES: usize = 64 * 1024;
/// Number of stderr lines that are stored to explain a failure.
const SAID: usize = 20;

/// News of a host, by its node rank.
pub(super) enum News {
    Answer(usize, Answer),
    /// One of the host's two outputs has ended.
    Closed(usize, Output),
}

pub(super) struct Connection {
    pub(super) child: Child,
    stdin: Option<ChildStdin>,
    console: Arc<Mutex<Console>>,
}

/// Destination of a host's output, shared by the two reader threads of a connection.
struct Console {
    host: String,
    /// Set by the reader of stdout at the first answer. Before it, ssh and the shell write the lines.
    ready: bool,
    /// The first lines of both outputs before the first answer; shown once the host is ready.
    held: Vec<String>,
    /// The last lines of stderr.
    said: VecDeque<String>,
}

impl Connection {
    /// Starts `command`, the ssh to the host with node rank `node`.
    pub(super) fn start(mut command: Command, host: &str, node: usize, news: &Sender<News>) -> io::Result<Self> {
        // ssh gets a process group of its own, so that Ctrl-C in the terminal reaches only burnrun, which passes it on.
        let piped = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
        let mut child = piped.spawn()?;
        let console = Console { host: host.to_owned(), ready: false, held: Vec::new(), said: VecDeque::new() };
        let console = Arc::new(Mutex::new(console));
        let outputs: [(Output, Option<Box<dyn Read + Send>>); 2] = [
            (Output::Stdout, child.stdout.take().map(|pipe| Box::new(pipe) as _)),
            (Output::Stderr, child.stderr.take().map(|pipe| Box::new(pipe) as _)),
        ];
        for (output, pipe) in outputs {
            let (console, news) = (console.clone(), news.clone());
            let reader = thread::Builder::new().name("burn-ddp-host".into()).spawn(move || {
                if let Some(pipe) = pipe {
                    read(pipe, output, &console, node, &news);
                }
                let _ = news.send(News::Closed(node, output));
            });
            if let Err(error) = reader {
                let _ = child.kill().and_then(|()| child.wait());
                return Err(error);
            }
        }
        let stdin = child.stdin.take();
        Ok(Self { child, stdin, console })
    }

    /// Sends a line. Errors are ignored: if the connection is gone, its outputs end too.
    pub(super) fn send(&mut self, line: &str) {
        if let Some(stdin) = &mut self.stdin {
            let _ = stdin.write_all(line.as_bytes());
        }
    }

    /// Closes ssh's stdin, which ends the launcher on the host.
    pub(super) fn close(&mut self) {
        self.stdin = None;
    }

    /// Kills ssh and closes its stdin, which ends the launcher on the host.
    pub(super) fn cut(&mut self) {
        self.close();
        let _ = self.child.kill();
    }

    /// The last lines that ssh and the host wrote to stderr.
    pub(super) fn said(&self) -> Vec<String> {
        lock(&self.console).said.iter().cloned().collect()
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.cut();
        let _ = self.child.wait();
    }
}

fn lock(console: &Mutex<Console>) -> MutexGuard<'_, Console> {
    console.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Reads the pipe to its end and writes its lines to this process's output. Errors of that output are ignored: a reader
/// of burnrun's output that has gone must not break the connection to the host.
fn read(mut pipe: impl Read, output: Output, console: &Mutex<Console>, node: usize, news: &Sender<News>) {
    let (mut lines, mut buffer) = (Lines::new(String::new()), vec![0; READ_BYTES]);
    loop {
        let mut complete = Vec::new();
        let count = match pipe.read(&mut buffer) {
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(_) => 0,
        };
        match count {
            0 => lines.flush(&mut complete, None),
            _ => lines.push(&buffer[..count], &mut complete, None),
        }
        let mut shown = Vec::new();
        for line in complete.split_inclusive(|&byte| byte == b'\n') {
            let answer = (output == Output::Stdout).then(|| Answer::read(line.trim_ascii_end())).flatten();
            match answer {
                Some((before, answer)) => {
                    if !before.is_empty() {
                        shown.extend(lock(console).pass(before, output));
                    }
                    lock(console).is_answered();
                    let _ = news.send(News::Answer(node, answer));
                }
                None => shown.extend(lock(console).pass(line, output)),
            }
        }
        let _ = write_to(output, &shown);
        if count == 0 {
            return;
        }
    }
}

impl Console {
    /// Records a line, and returns the bytes to write to this process's output now.
    fn pass(&mut self, line: &[u8], output: Output) -> Vec<u8> {
        if output == Output::Stderr {
            if self.said.len() == SAID {
                self.said.pop_front();
            }
            self.said.push_back(String::from_utf8_lossy(line.trim_ascii_end()).into_owned());
        }
        if self.ready {
            return line.to_vec();
        }
        // The start-up files of a shell may print.
        self.held.push(String::from_utf8_lossy(line).into_owned());
        self.held.truncate(SAID);
        Vec::new()
    }

    fn is_answered(&mut self) {
        self.ready = true;
        let held: String = self.held.drain(..).map(|line| format!("[{}] {line}", self.host)).collect();
        let _ = write_to(Output::Stderr, held.as_bytes());
    }
}
