//! The limit `pump`: two ranks send each other the bytes of an all-reduce through a socket at the same time, and add
//! them once.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::Ordering;
use std::time::Duration;
use std::{io, thread};

use anyhow::{Context, Result, ensure};
use rustix::event::{PollFd, PollFlags, poll};

use super::Workload;
use crate::spin_barrier::SharedLines;

/// Bytes handed to the kernel at a time.
const CHUNK: usize = 1 << 20;

pub(super) struct Pump {
    stream: TcpStream,
    /// Pairs of a buffer to send from and a buffer to receive into.
    buffers: Vec<[Vec<f32>; 2]>,
}

impl Pump {
    /// Connects the two ranks: rank 0 listens and writes its port to line 0.
    pub(super) fn new(lines: &SharedLines, rank: usize, world: usize) -> Result<Pump> {
        ensure!(world == 2, "the pump has two ranks");
        let port = lines.line(0);
        let stream = if rank == 0 {
            let listener = TcpListener::bind("127.0.0.1:0")?;
            port.store(u64::from(listener.local_addr()?.port()), Ordering::Release);
            listener.accept()?.0
        } else {
            while port.load(Ordering::Acquire) == 0 {
                thread::sleep(Duration::from_millis(1));
            }
            TcpStream::connect(("127.0.0.1", port.load(Ordering::Acquire) as u16))?
        };
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
        Ok(Pump { stream, buffers: Vec::new() })
    }

    /// Sends all of `out` and fills `into`.
    fn exchange(mut stream: &TcpStream, out: &[u8], into: &mut [u8]) -> io::Result<()> {
        let (mut sent, mut got) = (0, 0);
        while sent < out.len() || got < into.len() {
            let mut moved = 0;
            if sent < out.len() {
                let n = ready(stream.write(&out[sent..out.len().min(sent + CHUNK)]))?;
                sent += n;
                moved += n;
            }
            if got < into.len() {
                let end = into.len().min(got + CHUNK);
                let n = ready(stream.read(&mut into[got..end]))?;
                got += n;
                moved += n;
            }
            if moved == 0 {
                let mut want = PollFlags::empty();
                want.set(PollFlags::OUT, sent < out.len());
                want.set(PollFlags::IN, got < into.len());
                poll(&mut [PollFd::new(&stream, want)], None)?;
            }
        }
        Ok(())
    }
}

/// Bytes moved by a read or write; 0 if it would block.
fn ready(result: io::Result<usize>) -> io::Result<usize> {
    match result {
        Ok(0) => Err(ErrorKind::UnexpectedEof.into()),
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(0),
        other => other,
    }
}

impl Workload for Pump {
    fn prepare(&mut self, bytes: usize, count: usize) -> Result<()> {
        self.buffers = Vec::new();
        let len = bytes.div_ceil(8) * 2;
        self.buffers = (0..count).map(|_| [vec![1.0; len], vec![0.0; len]]).collect();
        Ok(())
    }

    fn fill(&mut self, nth: usize, seed: u64) {
        self.buffers[nth][0].fill(seed as u8 as f32);
    }

    /// Exchanges half of the buffer, adds it, and exchanges the other half: the work of each of two ranks in an
    /// all-reduce.
    fn step(&mut self, nth: usize) -> Result<()> {
        let [out, into] = self.buffers.get_mut(nth).context("not prepared")?;
        let half = out.len() / 2;
        Pump::exchange(&self.stream, bytemuck::cast_slice(&out[..half]), bytemuck::cast_slice_mut(&mut into[..half]))?;
        into[..half].iter_mut().zip(&out[half..]).for_each(|(sum, x)| *sum += x);
        Pump::exchange(&self.stream, bytemuck::cast_slice(&out[half..]), bytemuck::cast_slice_mut(&mut into[half..]))?;
        Ok(())
    }

    fn check(&mut self, nth: usize, seed: u64, _: usize) -> Result<()> {
        let [_, into] = &self.buffers[nth];
        let (sums, copies) = into.split_at(into.len() / 2);
        let x = seed as u8 as f32;
        ensure!(sums.iter().all(|sum| *sum == 2.0 * x) && copies.iter().all(|copy| *copy == x), "wrong bytes");
        Ok(())
    }
}
