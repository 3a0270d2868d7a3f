//! The store's host: one thread, non-blocking sockets.
//!
//! A client costs the others nothing: its hello, the rest of a begun message and its reading of answers have deadlines, everything it
//! sends is capped, and what it breaks is its own connection.

use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use super::protocol::{MESSAGE_CAP, Request, Response};
use super::table::Table;
use crate::net::hello::{Admits, Answer, HELLO_CAP, HELLO_DEADLINE, Hello, Purpose};
use crate::net::wait::{Waker, deadline_in, wait};
use crate::net::wire::Wire;
use crate::{Error, Result};

/// Most connections at a time.
const CLIENTS_CAP: usize = 4096;
/// Most of them that have not said hello; the oldest makes room.
const STRANGERS_CAP: usize = 256;
/// Most connections accepted before those that are there are heard.
const ACCEPTS_PER_TURN: usize = 64;
/// Pause after a failed accept, typically for want of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Hosts a [`Store`](crate::Store) for [`TcpStore`](crate::TcpStore) clients, until it is dropped.
#[derive(Debug)]
pub struct StoreServer {
    address: SocketAddr,
    stop: Arc<Stop>,
}

/// Shared by the handle, which sets it, and the server's thread, which ends by it.
#[derive(Debug)]
struct Stop {
    stopped: AtomicBool,
    waker: Waker,
}

impl StoreServer {
    /// Listens at `address`, for clients of any job; port 0 takes a free one, see [`local_addr`](Self::local_addr).
    ///
    /// # Errors
    /// [`Error::Environment`] if the address is not free or not of this machine.
    pub fn bind(address: impl ToSocketAddrs + std::fmt::Debug) -> Result<StoreServer> {
        Self::listen(&address, None)
    }

    /// Like [`bind`](Self::bind), but refuses clients of other jobs.
    ///
    /// # Errors
    /// As for [`bind`](Self::bind).
    pub fn bind_for_job(address: impl ToSocketAddrs + std::fmt::Debug, job: &str) -> Result<StoreServer> {
        Self::listen(&address, Some(job))
    }

    fn listen(address: &(impl ToSocketAddrs + std::fmt::Debug), job: Option<&str>) -> Result<StoreServer> {
        TcpListener::bind(address)
            .and_then(|listener| Self::serve(listener, job))
            .map_err(|e| Error::Environment { message: format!("cannot host a store at {address:?}: {e}") })
    }

    /// Serves on a bound socket.
    pub(crate) fn serve(listener: TcpListener, job: Option<&str>) -> io::Result<StoreServer> {
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let stop = Arc::new(Stop { stopped: AtomicBool::new(false), waker: Waker::new()? });
        let server = Server {
            listener,
            job: job.map(str::to_owned),
            stop: stop.clone(),
            table: Table::default(),
            clients: Vec::new(),
            accept_after: None,
        };
        thread::Builder::new().name("burn-ddp store".into()).spawn(move || server.run())?;
        Ok(StoreServer { address, stop })
    }

    /// Where it listens.
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for StoreServer {
    /// Closes the port and all connections, soon; does not wait for it.
    fn drop(&mut self) {
        self.stop.stopped.store(true, Ordering::Release);
        self.stop.waker.wake();
    }
}

struct Server {
    listener: TcpListener,
    /// The job whose clients are admitted; any if `None`.
    job: Option<String>,
    stop: Arc<Stop>,
    table: Table,
    clients: Vec<Client>,
    /// Set after a failed accept.
    accept_after: Option<Instant>,
}

struct Client {
    wire: Wire,
    state: State,
}

enum State {
    /// Has not said hello.
    Stranger { until: Instant },
    /// Has no request open.
    Idle,
    /// Waits for a key to be set.
    Waiting { key: String, until: Instant },
    /// Is to be closed when it read its last answer.
    Closing,
    /// Is to be closed.
    Closed,
}

impl Server {
    fn run(mut self) {
        while !self.stop.stopped.load(Ordering::Acquire) {
            if let Err(e) = self.turn() {
                tracing::error!("the store at {:?} ended: {e}", self.listener.local_addr());
                return;
            }
        }
    }

    /// Waits for something to do, and does it.
    fn turn(&mut self) -> io::Result<()> {
        let accepting = self.accept_after.is_none();
        let mut fds = Vec::with_capacity(2 + self.clients.len());
        fds.push(PollFd::new(&self.stop.waker, PollFlags::IN));
        fds.push(PollFd::new(&self.listener, if accepting { PollFlags::IN } else { PollFlags::empty() }));
        fds.extend(self.clients.iter().map(|client| {
            let write = if client.wire.wants_write() { PollFlags::OUT } else { PollFlags::empty() };
            PollFd::from_borrowed_fd(client.wire.as_fd(), PollFlags::IN | write)
        }));
        wait(&mut fds, self.next_deadline())?;
        let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();

        self.stop.waker.clear();
        for (i, _) in ready[2..].iter().enumerate().filter(|(_, ready)| **ready) {
            self.serve_client(i);
        }
        let now = Instant::now();
        for client in &mut self.clients {
            client.expire(now);
        }
        self.clients.retain(|client| !matches!(client.state, State::Closed));
        if self.accept_after.is_some_and(|at| at <= now) {
            self.accept_after = None;
        }
        if ready[1] {
            self.accept();
        }
        Ok(())
    }

    fn next_deadline(&self) -> Option<Instant> {
        self.clients.iter().filter_map(Client::deadline).chain(self.accept_after).min()
    }

    fn accept(&mut self) {
        // A few at a time, so that those who say hello at once are not crowded out by those who come after them.
        for _ in 0..ACCEPTS_PER_TURN {
            let wire = self.listener.accept().and_then(|(stream, _)| Wire::new(stream, HELLO_CAP));
            match wire {
                Ok(wire) => self
                    .clients
                    .push(Client { wire, state: State::Stranger { until: Instant::now() + HELLO_DEADLINE } }),
                Err(e) if e.kind() == ErrorKind::WouldBlock => return,
                Err(e) => {
                    tracing::warn!("the store could not accept a connection: {e}");
                    self.accept_after = Some(Instant::now() + ACCEPT_PAUSE);
                }
            }
            let strangers = self.clients.iter().filter(|client| matches!(client.state, State::Stranger { .. })).count();
            if strangers > STRANGERS_CAP || self.clients.len() > CLIENTS_CAP || self.accept_after.is_some() {
                // Clients stand in the order they came, so this is the oldest stranger, if need be the newcomer.
                if let Some(i) = self.clients.iter().position(|client| matches!(client.state, State::Stranger { .. })) {
                    self.clients.remove(i);
                }
            }
            if self.accept_after.is_some() {
                return;
            }
        }
    }

    /// Reads what a client has to say, and answers.
    fn serve_client(&mut self, i: usize) {
        let client = &mut self.clients[i];
        client.flush();
        match client.state {
            State::Stranger { .. } => client.greet(self.job.as_deref()),
            State::Idle => match client.wire.next::<Request>() {
                Ok(None) => {}
                Ok(Some(request)) => self.answer(i, request),
                Err(e) => client.close(&e),
            },
            // Nothing is to be said while a request is open, but the end may come.
            State::Waiting { .. } => match client.wire.next::<Request>() {
                Ok(None) => {}
                Ok(Some(_)) => client.close(&io::Error::other("a second request while the first is open")),
                Err(e) => client.close(&e),
            },
            State::Closing | State::Closed => {}
        }
    }

    fn answer(&mut self, i: usize, request: Request) {
        let table = &mut self.table;
        let (response, written) = match request {
            Request::Set { key, value } => (table.set(&key, &value).map(|()| Response::Done), Some(key)),
            Request::SetNew { key, value } => {
                (table.set_new(&key, &value).map(|old| old.map_or(Response::Absent, Response::Value)), Some(key))
            }
            Request::Add { key, delta } => (table.add(&key, delta).map(Response::Number), Some(key)),
            Request::Keys { prefix } => (table.keys(&prefix).map(Response::Keys), None),
            Request::Get { key, wait_ms } => match table.get(&key) {
                Ok(None) => {
                    let wait = Duration::from_millis(wait_ms);
                    self.clients[i].state = State::Waiting { key, until: deadline_in(wait) };
                    return;
                }
                found => (found.map(|value| Response::Value(value.unwrap_or_default().to_vec())), None),
            },
        };
        // Who waits for the key hears of it before the writer does: a writer that ends right after its call leaves nobody waiting.
        if let Some(key) = written.filter(|_| response.is_ok()) {
            self.tell_waiting(&key);
        }
        self.clients[i].respond(&response.unwrap_or_else(Response::Refused));
    }

    fn tell_waiting(&mut self, written: &str) {
        let Ok(Some(value)) = self.table.get(written) else { return };
        for client in &mut self.clients {
            if matches!(&client.state, State::Waiting { key, .. } if key == written) {
                client.state = State::Idle;
                client.respond(&Response::Value(value.to_vec()));
            }
        }
    }
}

impl Client {
    fn greet(&mut self, job: Option<&str>) {
        let hello: Hello = match self.wire.next() {
            Ok(None) => return,
            Ok(Some(hello)) => hello,
            Err(e) => return self.close(&e),
        };
        let verdict = hello.admit(&job.map_or(Admits::AnyJob, Admits::Job)).and_then(|()| match hello.purpose {
            Purpose::Store => Ok(()),
            _ => Err("this is the store, not a rank".to_owned()),
        });
        self.state = if verdict.is_ok() { State::Idle } else { State::Closing };
        self.wire.set_cap(MESSAGE_CAP);
        match self.wire.queue(&Answer::new(verdict)) {
            Ok(()) => self.flush(),
            Err(e) => self.close(&e),
        }
    }

    fn respond(&mut self, response: &Response) {
        match self.wire.queue(response) {
            Ok(()) => self.flush(),
            Err(e) => self.close(&e),
        }
    }

    fn flush(&mut self) {
        match self.wire.flush() {
            Ok(true) if matches!(self.state, State::Closing) => self.state = State::Closed,
            Ok(_) => {}
            Err(e) => self.close(&e),
        }
    }

    fn deadline(&self) -> Option<Instant> {
        let own = match self.state {
            State::Stranger { until } | State::Waiting { until, .. } => Some(until),
            _ => None,
        };
        [own, self.wire.stalled_at()].into_iter().flatten().min()
    }

    fn expire(&mut self, now: Instant) {
        if self.wire.stalled_at().is_some_and(|at| at <= now) {
            return self.close(&ErrorKind::TimedOut.into());
        }
        match self.state {
            State::Stranger { until } if until <= now => self.close(&ErrorKind::TimedOut.into()),
            State::Waiting { until, .. } if until <= now => {
                self.state = State::Idle;
                self.respond(&Response::Absent);
            }
            _ => {}
        }
    }

    fn close(&mut self, cause: &io::Error) {
        if cause.kind() != ErrorKind::UnexpectedEof {
            tracing::debug!("the store closes the connection from {:?}: {cause}", self.wire.stream().peer_addr());
        }
        self.state = State::Closed;
    }
}
