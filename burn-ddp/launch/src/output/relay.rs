//! Relay of the ranks' output: line by line to this process's stdout and stderr, unchanged to files, by one thread.
//!
//! One thread writes, so lines of different ranks never mix. A rank that prints faster than this process's output is
//! read has to wait, as if it wrote to that output itself. If the reader of the output is gone, the ranks' pipes to it
//! are closed too.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::mpsc::Sender;
use std::thread;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::event::{Event, Relayed};
use crate::output::lines::Lines;
use crate::report::stderr_tail::StderrTail;

const READ_BYTES: usize = 64 * 1024;
/// Largest number of bytes that are still read from each pipe at the end: the largest size that a pipe can have by
/// default, so the whole content of the pipe is passed on.
const LAST_READ_BYTES: usize = 1024 * 1024;

/// Kind of an output, of a rank or of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Output {
    Stdout,
    Stderr,
}

/// The reading end of one output of one rank, and its destinations.
pub(crate) struct Source {
    pub(crate) local_rank: usize,
    pub(crate) output: Output,
    pub(crate) pipe: OwnedFd,
    /// Prefix of each line on the console; `None` if the stream is not shown there.
    pub(crate) prefix: Option<String>,
    pub(crate) log: Option<File>,
}

/// Handle of the relay's thread. When it is dropped, the thread passes on the content of the pipes and ends, even if a
/// process that a rank left behind keeps the pipes open.
pub(crate) struct Relay {
    _wake: io::PipeWriter,
}

impl Relay {
    /// Starts passing on. [`Event::Relayed`] comes when every source has ended, or after the relay was dropped.
    pub(crate) fn start(nproc: usize, sources: Vec<Source>, events: Sender<Event>) -> io::Result<Self> {
        let (wake, _wake) = io::pipe()?;
        let streams = sources.into_iter().map(Stream::new).collect();
        let tails = (0..nproc).map(|_| StderrTail::default()).collect();
        let mut pump = Pump { streams, tails, unread: Vec::new(), lost: None };
        thread::Builder::new().name("burn-ddp-output".into()).spawn(move || {
            pump.run(&wake);
            // Sending fails if the main thread no longer waits for the output, after a signal.
            let _ = events.send(Event::Relayed(pump.end()));
        })?;
        Ok(Self { _wake })
    }
}

struct Stream {
    local_rank: usize,
    output: Output,
    pipe: File,
    lines: Lines,
    shown: bool,
    log: Option<File>,
}

impl Stream {
    fn new(Source { local_rank, output, pipe, prefix, log }: Source) -> Self {
        let shown = prefix.is_some();
        Self { local_rank, output, pipe: pipe.into(), lines: Lines::new(prefix.unwrap_or_default()), shown, log }
    }

    /// Writes to the log file, if there is one; returns the text of a failure. After a failure nothing more is written,
    /// since a log with holes misleads.
    fn log(&mut self, bytes: &[u8]) -> Option<String> {
        let error = self.log.as_mut()?.write_all(bytes).err()?;
        self.log = None;
        Some(format!("the logs of local rank {} are incomplete, since writing failed: {error}", self.local_rank))
    }
}

struct Pump {
    streams: Vec<Stream>,
    tails: Vec<StderrTail>,
    /// Outputs of this process whose reader is gone.
    unread: Vec<Output>,
    lost: Option<String>,
}

impl Pump {
    fn run(&mut self, wake: &io::PipeReader) {
        let mut buffer = vec![0; READ_BYTES];
        while !self.streams.is_empty() {
            let (ready, woken) = match self.wait(wake) {
                Ok(found) => found,
                Err(error) => {
                    self.lost = Some(format!("cannot wait for the ranks' output: {error}"));
                    return;
                }
            };
            // From the back, so that removing one keeps the other positions.
            for position in ready.into_iter().rev() {
                self.pass_on(position, &mut buffer);
            }
            self.close_unread();
            if woken {
                return self.last_pass(&mut buffer);
            }
        }
    }

    /// The positions of the streams that have something to read or have ended, and whether it is time to stop.
    fn wait(&self, wake: &io::PipeReader) -> io::Result<(Vec<usize>, bool)> {
        let mut polled: Vec<_> = self.streams.iter().map(|stream| PollFd::new(&stream.pipe, PollFlags::IN)).collect();
        polled.push(PollFd::new(wake, PollFlags::IN));
        rustix::io::retry_on_intr(|| poll(&mut polled, None))?;
        let woken = polled.pop().is_some_and(|wake| !wake.revents().is_empty());
        let ready = (0..polled.len()).filter(|&position| !polled[position].revents().is_empty()).collect();
        Ok((ready, woken))
    }

    /// Reads once from a ready stream and removes it at its end. Returns how many bytes came.
    fn pass_on(&mut self, position: usize, buffer: &mut [u8]) -> usize {
        let stream = &mut self.streams[position];
        let count = match stream.pipe.read(buffer) {
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return 0,
            Err(error) => {
                self.lost = Some(format!("cannot read the output of local rank {}: {error}", stream.local_rank));
                0
            }
        };
        let failure = stream.log(&buffer[..count]);
        let tail = (stream.output == Output::Stderr).then(|| &mut self.tails[stream.local_rank]);
        let mut out = Vec::with_capacity(count + count / 4);
        if count == 0 {
            stream.lines.flush(&mut out, tail);
        } else {
            stream.lines.push(&buffer[..count], &mut out, tail);
        }
        let (output, shown) = (stream.output, stream.shown);
        if count == 0 {
            self.streams.swap_remove(position);
        }
        self.lost = self.lost.take().or(failure);
        if shown {
            self.write(output, &out);
        }
        count
    }

    /// Closes the pipes whose output has no reader any more, so that the ranks get the broken pipe that they would get
    /// if they wrote to it themselves. Streams that go to a log stay open.
    fn close_unread(&mut self) {
        let unread = &self.unread;
        self.streams.retain(|stream| stream.log.is_some() || !stream.shown || !unread.contains(&stream.output));
    }

    fn last_pass(&mut self, buffer: &mut [u8]) {
        for position in (0..self.streams.len()).rev() {
            let mut read = 0;
            // At its end a stream is removed, and a stream of a higher position, already read, takes its place.
            while read < LAST_READ_BYTES
                && self.streams.get(position).is_some_and(|stream| is_readable(stream.pipe.as_fd()))
            {
                match self.pass_on(position, buffer) {
                    0 => break,
                    count => read += count,
                }
            }
        }
        for position in 0..self.streams.len() {
            let stream = &mut self.streams[position];
            let (output, shown, tail) = (stream.output, stream.shown, &mut self.tails[stream.local_rank]);
            let mut out = Vec::new();
            stream.lines.flush(&mut out, (output == Output::Stderr).then_some(tail));
            if shown {
                self.write(output, &out);
            }
        }
        self.streams.clear();
    }

    fn write(&mut self, output: Output, bytes: &[u8]) {
        if self.unread.contains(&output) {
            return;
        }
        let Err(error) = write_to(output, bytes) else { return };
        if error.kind() == io::ErrorKind::BrokenPipe {
            self.unread.push(output);
        }
        let name = if output == Output::Stdout { "stdout" } else { "stderr" };
        self.lost.get_or_insert_with(|| format!("some output was lost, since writing to {name} failed: {error}"));
    }

    fn end(&mut self) -> Relayed {
        let tails = self.tails.drain(..).map(StderrTail::summary).collect();
        Relayed { tails, lost: self.lost.take() }
    }
}

fn is_readable(pipe: BorrowedFd<'_>) -> bool {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    let mut polled = [PollFd::new(&pipe, PollFlags::IN)];
    rustix::io::retry_on_intr(|| poll(&mut polled, Some(&now))).is_ok_and(|ready| ready > 0)
}

pub(crate) fn write_to(output: Output, bytes: &[u8]) -> io::Result<()> {
    match output {
        Output::Stdout => write_all(&mut io::stdout().lock(), bytes),
        Output::Stderr => write_all(&mut io::stderr().lock(), bytes),
    }
}

/// `write_all` and `flush` that also work on a non-blocking output: another program may have made a shared terminal
/// non-blocking.
fn write_all(output: &mut (impl Write + AsFd), mut bytes: &[u8]) -> io::Result<()> {
    loop {
        let result = if bytes.is_empty() { output.flush().map(|()| 0) } else { output.write(bytes) };
        match result {
            Ok(0) if bytes.is_empty() => return Ok(()),
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => bytes = &bytes[count..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                let mut polled = [PollFd::new(output, PollFlags::OUT)];
                rustix::io::retry_on_intr(|| poll(&mut polled, None))?;
            }
            Err(error) => return Err(error),
        }
    }
}
