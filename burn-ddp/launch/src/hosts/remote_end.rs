//! The end on a host: `burnrun remote`.

use std::io::{self, BufRead, Write};
use std::thread;

use burn_ddp_comm::Secret;
use rustix::process::{Signal, getpid, kill_process};

use super::remote_messages::{Answer, ORDER_CAP, Order, Signalled};
use crate::error::LaunchError;
use crate::handed_over_files::HandedOver;
use crate::launcher::Launcher;

/// The end on a host, after it has received its order.
pub struct Remote {
    order: Order,
}

impl Remote {
    /// Reports to the local burnrun that this process is ready, and waits for the order; `None` if stdin ends before.
    /// Blocks.
    ///
    /// # Errors
    ///
    /// [`LaunchError::Nodes`] if the line on stdin is not an order.
    pub fn report_for_duty() -> Result<Option<Self>, LaunchError> {
        answer(&Answer::Ready { version: env!("CARGO_PKG_VERSION").into() });
        let mut line = Vec::new();
        let read = io::Read::take(io::stdin().lock(), 2 * ORDER_CAP as u64).read_until(b'\n', &mut line);
        if !read.is_ok_and(|count| count > 0) {
            return Ok(None);
        }
        let order = serde_json::from_slice(&line)
            .map_err(|error| LaunchError::Nodes(format!("the line on stdin is not an order of burnrun: {error}")))?;
        Ok(Some(Self { order }))
    }

    /// Command line of the launcher, beginning with the name of the command.
    #[must_use]
    pub fn words(&self) -> &[String] {
        &self.order.words
    }

    /// Enters the working directory, passes on the signals that come on stdin from now on, and adds the order's
    /// variables and secret to `launcher`, which was built from [`words`](Self::words).
    ///
    /// # Errors
    ///
    /// If the directory cannot be entered, or the system refuses a thread or a file in memory.
    pub fn complete(self, launcher: Launcher) -> Result<Launcher, LaunchError> {
        let Order { secret, directory, env, .. } = self.order;
        std::env::set_current_dir(&directory).map_err(|error| {
            let directory = directory.display();
            LaunchError::Usage(format!(
                "the working directory {directory} cannot be entered: {error}; --working-dir names another one for all \
                 hosts, and dir= in the hostfile for one"
            ))
        })?;
        let secret = parse_secret(&secret)?;
        thread::Builder::new()
            .name("burn-ddp-orders".into())
            .spawn(follow_stdin)
            .map_err(|source| LaunchError::System { doing: "start a thread", source })?;
        Ok(env.into_iter().fold(launcher, |launcher, (name, value)| launcher.env(name, value)).secret(secret))
    }
}

/// Writes a line for the local burnrun. Errors are ignored: if the local burnrun is gone, stdin ends too.
pub(super) fn answer(answer: &Answer) {
    let mut stdout = io::stdout().lock();
    let _ = stdout.write_all(answer.line().as_bytes()).and_then(|()| stdout.flush());
}

impl Answer {
    /// Sends the lines of the report and then this answer, the last one.
    pub fn say_with(self, report: &str) {
        report.lines().for_each(|line| answer(&Self::Report(line.to_owned())));
        answer(&self);
    }
}

/// Sends this process the signals that come on stdin, and SIGTERM when stdin ends.
fn follow_stdin() {
    let mut line = String::new();
    loop {
        line.clear();
        let signal = match io::stdin().lock().read_line(&mut line) {
            Ok(1..) => serde_json::from_str(&line).ok().and_then(|Signalled { signal }| Signal::from_named_raw(signal)),
            _ => Some(Signal::TERM),
        };
        if let Some(signal) = signal {
            let _ = kill_process(getpid(), signal);
        }
        if line.is_empty() {
            return;
        }
    }
}

/// Parses the line of a secret file. The line goes through a file in memory, since [`Secret::read`] is the only parser.
fn parse_secret(line: &str) -> Result<Secret, LaunchError> {
    let file = HandedOver::create("secret").and_then(|file| {
        let mut content = file.file();
        content.write_all(line.as_bytes())?;
        Ok(file)
    });
    let file = file.map_err(|source| LaunchError::System { doing: "take the job's secret", source })?;
    Secret::read(&file.path()).map_err(|error| LaunchError::Store(error.into()))
}
