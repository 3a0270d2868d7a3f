//! Server of the store: one thread, non-blocking sockets.
//!
//! A client cannot hold up the others: its handshake has a deadline, and so have its pauses while it sends a request or
//! reads an answer; the length of its messages is capped; its next request is not read before it has read the last
//! answer; and its errors close its own connection only.

use std::io::{self, ErrorKind};
use std::net::{SocketAddr, ToSocketAddrs};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use socket2::Socket;

use super::key_value_table::{Table, check};
use super::protocol::{MESSAGE_CAP, Request, Response};
use super::refusals::Refusals;
use crate::auth::handshake::{Purpose, Role};
use crate::auth::job_key::JobTag;
use crate::auth::unauthenticated_connections::{Introduced, Strangers};
use crate::net::encrypted_messages::Wire;
use crate::net::wait::{Waker, deadline_in, wait};
use crate::net::{bind_and_connect, unix_socket};
use crate::poison_free_locks::lock;
use crate::{Error, JobKey, Result};

/// Most clients at a time.
const CLIENTS_CAP: usize = 4096;
/// Most connections accepted before the existing ones are served.
const ACCEPTS_PER_TURN: usize = 64;
/// Pause in sending a request, or in reading an answer, after which a client's connection is closed.
const MESSAGE_DEADLINE: Duration = Duration::from_secs(10);
/// Pause after a failed accept, typically for lack of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Hosts a [`Store`](crate::Store) for [`StoreClient`](crate::StoreClient)s that have the key of a job, until it is
/// dropped.
#[derive(Debug)]
pub struct StoreServer {
    address: SocketAddr,
    serving: Serving,
}

/// A store that is served until this is dropped.
#[derive(Debug)]
pub(crate) struct Serving {
    shared: Arc<Shared>,
}

/// Shared by the handle and the server's thread.
#[derive(Debug)]
struct Shared {
    /// Keys of the jobs whose clients are accepted. Written by the handle, read by the server for each stranger and
    /// after a wake.
    jobs: Mutex<Vec<JobKey>>,
    /// Prefixes of keys to remove. Written by the handle, emptied by the server after a wake.
    forgotten: Mutex<Vec<String>>,
    /// Written by the server, read by the handle.
    refusals: Mutex<Refusals>,
    /// Set by the handle, ends the thread.
    stopped: AtomicBool,
    waker: Waker,
}

impl StoreServer {
    /// Listens at `address` for the processes of `job`; port 0 takes a free one, see [`local_addr`](Self::local_addr).
    ///
    /// # Errors
    /// [`Error::Environment`] if the address is not free or not of this machine.
    pub fn bind(address: impl ToSocketAddrs + std::fmt::Debug, job: &JobKey) -> Result<StoreServer> {
        let addresses = address.to_socket_addrs().map(Iterator::collect::<Vec<_>>);
        addresses
            .and_then(|addresses| Self::serve(&addresses, job))
            .map_err(|e| Error::Environment { message: format!("cannot host a store at {address:?}: {e}") })
    }

    /// Like [`bind`](Self::bind), at those of `addresses` that this machine has. Returns the error of the system, for a
    /// caller that must know why it failed.
    ///
    /// # Errors
    /// If none of them can be bound, or the system refuses a thread.
    pub fn serve(addresses: &[SocketAddr], job: &JobKey) -> io::Result<StoreServer> {
        let listeners = bind_and_connect::bind_all(addresses)?;
        let address = listeners[0].local_addr()?;
        Ok(StoreServer { address, serving: Serving::start(listeners, job)? })
    }

    /// The first address on which this server listens.
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// Accepts the processes of another job, or of another generation, as well.
    pub fn admit(&self, job: &JobKey) {
        lock(&self.serving.shared.jobs).push(job.clone());
    }

    /// Has the server's thread remove the keys that begin with `prefix`. Clients that wait for one go on waiting.
    pub fn forget(&self, prefix: &str) {
        lock(&self.serving.shared.forgotten).push(prefix.to_owned());
        self.serving.shared.waker.wake();
    }

    /// Number and latest source of the connections that were refused since they lacked the job's key, as a part of a
    /// sentence; `None` if there were none.
    pub fn refused(&self) -> Option<String> {
        self.serving.refused()
    }

    /// Closes the connections of a job's processes and accepts no more of them. Their values stay.
    pub fn expel(&self, job: &JobKey) {
        lock(&self.serving.shared.jobs).retain(|other| other.tag() != job.tag());
        self.serving.shared.waker.wake();
    }
}

impl Serving {
    /// Serves on bound sockets.
    pub(crate) fn start<L: Into<Socket>>(listeners: Vec<L>, job: &JobKey) -> io::Result<Serving> {
        Self::start_with(listeners, job, MESSAGE_DEADLINE)
    }

    /// [`start`](Self::start), with another [deadline](MESSAGE_DEADLINE) of messages.
    pub(crate) fn start_with<L: Into<Socket>>(
        listeners: Vec<L>,
        job: &JobKey,
        message_deadline: Duration,
    ) -> io::Result<Serving> {
        let listeners: Vec<Socket> = listeners.into_iter().map(Into::into).collect();
        let mut is_local = false;
        for listener in &listeners {
            bind_and_connect::listener(listener)?;
            is_local |= listener.local_addr()?.is_unix();
        }
        let shared = Arc::new(Shared {
            jobs: Mutex::new(vec![job.clone()]),
            forgotten: Mutex::default(),
            refusals: Mutex::default(),
            stopped: AtomicBool::new(false),
            waker: Waker::new()?,
        });
        let server = Server {
            listeners,
            is_local,
            shared: shared.clone(),
            table: Table::default(),
            strangers: Strangers::new(Role::Store),
            clients: Vec::new(),
            accept_after: None,
            message_deadline,
        };
        thread::Builder::new().name("burn-ddp store".into()).spawn(move || server.run())?;
        Ok(Serving { shared })
    }

    /// See [`StoreServer::refused`].
    pub(crate) fn refused(&self) -> Option<String> {
        let refusals = lock(&self.shared.refusals);
        (!refusals.is_empty()).then(|| refusals.to_string())
    }
}

impl Drop for Serving {
    /// Closes the port and all connections soon, without waiting for it.
    fn drop(&mut self) {
        self.shared.stopped.store(true, Ordering::Release);
        self.shared.waker.wake();
    }
}

struct Server {
    listeners: Vec<Socket>,
    /// True if a listener is a unix socket, for processes of this user only.
    is_local: bool,
    shared: Arc<Shared>,
    table: Table,
    strangers: Strangers,
    clients: Vec<Client>,
    /// Set after a failed accept.
    accept_after: Option<Instant>,
    /// See [`MESSAGE_DEADLINE`].
    message_deadline: Duration,
}

struct Client {
    wire: Wire,
    job: JobTag,
    state: State,
    /// See [`Request::LastWill`].
    last_will: Vec<(String, Vec<u8>)>,
}

enum State {
    /// No request is open.
    Idle,
    /// Its request waits for a key to be set.
    Waiting { key: String, until: Instant },
    /// The connection is to be closed.
    Closed,
}

impl Server {
    fn run(mut self) {
        while !self.shared.stopped.load(Ordering::Acquire) {
            if let Err(e) = self.turn() {
                tracing::error!("the store at {:?} ended: {e}", self.listeners.first().map(Socket::local_addr));
                return;
            }
        }
    }

    /// Waits for something to do, and does it.
    fn turn(&mut self) -> io::Result<()> {
        let ready = self.wait()?;
        let (listeners, ready) = ready[1..].split_at(self.listeners.len());
        let (clients, strangers) = ready.split_at(self.clients.len());

        self.shared.waker.clear();
        for prefix in std::mem::take(&mut *lock(&self.shared.forgotten)) {
            self.table.remove(&prefix);
        }
        for (i, _) in clients.iter().enumerate().filter(|(_, ready)| **ready) {
            self.serve_client(i);
        }
        let now = Instant::now();
        let mut wills = Vec::new();
        {
            let jobs = lock(&self.shared.jobs);
            for client in &mut self.clients {
                client.expire(now, self.message_deadline);
            }
            self.clients.retain_mut(|client| {
                // The last wills of an expelled job are dropped with its connections.
                let admitted = jobs.iter().any(|job| job.tag() == client.job);
                let closed = matches!(client.state, State::Closed);
                if admitted && closed {
                    wills.append(&mut client.last_will);
                }
                admitted && !closed
            });
        }
        for (key, value) in wills {
            if let Ok(None) = self.table.set_new(&key, &value) {
                self.tell_waiting(&key);
            }
        }
        for stranger in self.strangers.hear(strangers) {
            self.meet(stranger);
        }
        if self.accept_after.is_some_and(|at| at <= now) {
            self.accept_after = None;
        }
        for (nth, _) in listeners.iter().enumerate().filter(|(_, ready)| **ready) {
            self.accept(nth);
        }
        Ok(())
    }

    /// Waits; true for the waker, each listener, each client and each stranger that is ready, in this order.
    fn wait(&self) -> io::Result<Vec<bool>> {
        let accepting = self.accept_after.is_none();
        let mut fds = Vec::with_capacity(1 + self.listeners.len() + self.clients.len());
        fds.push(PollFd::new(&self.shared.waker, PollFlags::IN));
        let wanted = if accepting { PollFlags::IN } else { PollFlags::empty() };
        fds.extend(self.listeners.iter().map(|listener| PollFd::new(listener, wanted)));
        fds.extend(self.clients.iter().map(|client| {
            // No request is read of a client that has not read its last answer: it costs the memory of one answer.
            let awaited = if client.wire.wants_write() { PollFlags::OUT } else { PollFlags::IN };
            PollFd::from_borrowed_fd(client.wire.as_fd(), awaited)
        }));
        fds.extend(self.strangers.poll_fds());
        let deadlines = self.clients.iter().filter_map(|client| client.deadline(self.message_deadline));
        wait(&mut fds, deadlines.chain(self.strangers.deadline()).chain(self.accept_after).min())?;
        Ok(fds.iter().map(|fd| !fd.revents().is_empty()).collect())
    }

    fn accept(&mut self, nth: usize) {
        for _ in 0..ACCEPTS_PER_TURN {
            match self.accept_one(nth) {
                Ok(()) => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock => return,
                Err(e) => {
                    tracing::warn!("the store could not accept a connection: {e}");
                    self.accept_after = Some(Instant::now() + ACCEPT_PAUSE);
                    return;
                }
            }
        }
    }

    fn accept_one(&mut self, nth: usize) -> io::Result<()> {
        let (socket, from) = self.listeners[nth].accept()?;
        let prepared = if self.is_local {
            unix_socket::check_peer(&socket).and_then(|()| socket.set_nonblocking(true)).map(|()| socket)
        } else {
            bind_and_connect::ready(socket)
        };
        match prepared {
            Ok(socket) => self.strangers.receive(socket, from.as_socket().map(|from| from.ip())),
            Err(e) => tracing::debug!("the store closes a fresh connection: {e}"),
        }
        Ok(())
    }

    /// Accepts a stranger that knows the key of a job.
    fn meet(&mut self, stranger: Introduced) {
        let tag = stranger.tag();
        let (proved, same_job) = {
            let jobs = lock(&self.shared.jobs);
            let mut named = jobs.iter().filter(|job| job.tag() == tag).peekable();
            let same_job = named.peek().is_some();
            (named.find_map(|job| stranger.prove(job.store())), same_job)
        };
        let Some(proved) = proved else {
            lock(&self.shared.refusals).note(same_job, stranger.source());
            return stranger.turn_away(same_job);
        };
        if proved.purpose != Purpose::Store {
            return stranger.refuse(proved, "this is the store, not a rank");
        }
        if self.clients.len() >= CLIENTS_CAP {
            return stranger.refuse(proved, "the store has too many clients");
        }
        let wire = stranger.welcome(proved).map(|stream| Wire::new(stream, MESSAGE_CAP));
        if let Some(Ok(wire)) = wire {
            self.clients.push(Client { wire, job: tag, state: State::Idle, last_will: Vec::new() });
        }
    }

    /// Reads a client's request and answers it.
    fn serve_client(&mut self, i: usize) {
        let client = &mut self.clients[i];
        client.flush();
        match client.state {
            _ if client.wire.wants_write() => {}
            State::Idle => match client.wire.next::<Request>() {
                Ok(None) => {}
                Ok(Some(request)) => self.answer(i, request),
                Err(e) => client.close(&e),
            },
            // While a request is open, no other may come, but the connection may end.
            State::Waiting { .. } => match client.wire.next::<Request>() {
                Ok(None) => {}
                Ok(Some(_)) => client.close(&io::Error::other("a second request while the first is open")),
                Err(e) => client.close(&e),
            },
            State::Closed => {}
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
            Request::LastWill { entries } => {
                let checked = entries.iter().try_for_each(|(key, value)| check(key, value));
                if checked.is_ok() {
                    self.clients[i].last_will = entries;
                }
                (checked.map(|()| Response::Done), None)
            }
            Request::Get { key, wait_ms } => match table.get(&key) {
                Ok(None) => {
                    let wait = Duration::from_millis(wait_ms);
                    self.clients[i].state = State::Waiting { key, until: deadline_in(wait) };
                    return;
                }
                found => (found.map(|value| Response::Value(value.unwrap_or_default().to_vec())), None),
            },
        };
        // Clients that wait for the key are answered before the writer: when its call returns, all of them are served,
        // even if the writer hosts the store and ends at once.
        if let Some(key) = written.filter(|_| response.is_ok()) {
            self.tell_waiting(&key);
        }
        self.clients[i].respond(&response.unwrap_or_else(Response::Refused));
    }

    /// Answers the clients that wait for the key `written`.
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
    fn respond(&mut self, response: &Response) {
        match self.wire.queue(response) {
            Ok(()) => self.flush(),
            Err(e) => self.close(&e),
        }
    }

    fn flush(&mut self) {
        if let Err(e) = self.wire.flush() {
            self.close(&e);
        }
    }

    fn deadline(&self, of_message: Duration) -> Option<Instant> {
        let own = match self.state {
            State::Waiting { until, .. } => Some(until),
            _ => None,
        };
        let stalled = self.wire.stalled_since().map(|since| since + of_message);
        [own, stalled].into_iter().flatten().min()
    }

    fn expire(&mut self, now: Instant, of_message: Duration) {
        if self.wire.stalled_since().is_some_and(|since| since + of_message <= now) {
            return self.close(&ErrorKind::TimedOut.into());
        }
        match self.state {
            State::Waiting { until, .. } if until <= now => {
                self.state = State::Idle;
                self.respond(&Response::Absent);
            }
            _ => {}
        }
    }

    fn close(&mut self, cause: &io::Error) {
        if cause.kind() != ErrorKind::UnexpectedEof {
            tracing::debug!("the store closes the connection from {:?}: {cause}", self.wire.socket().peer_addr());
        }
        self.state = State::Closed;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::interface::Interface;
    use crate::net::name_lookup::NameLookup;
    use crate::store::client::open;
    use crate::store::{Place, Store, StoreClient, VALUE_CAP};

    const PATIENCE: Duration = Duration::from_secs(60);

    #[test]
    fn a_client_that_does_not_read_costs_one_answer() {
        // Their values are more than sockets buffer.
        const ANSWERS: usize = 20;
        let job = JobKey::trusting_network("job", 0);
        let server = StoreServer::bind("127.0.0.1:0", &job).unwrap();
        let address = server.local_addr();
        let honest = StoreClient::connect(&address.to_string(), &job, PATIENCE).unwrap();
        honest.set("large", &vec![0; VALUE_CAP]).unwrap();

        let place = Place::Tcp { host: address.ip().to_string(), port: address.port(), via: Interface::default() };
        let deadline = Instant::now() + PATIENCE;
        let mut names = NameLookup::new(place.host());
        let mut wire = open(&place, &mut names, &job, deadline, PATIENCE).unwrap_or_else(|_| panic!("no connection"));
        wire.socket().set_recv_buffer_size(64 * 1024).unwrap();
        for _ in 0..ANSWERS {
            wire.send(&Request::Get { key: "large".into(), wait_ms: 0 }, deadline).unwrap();
        }
        wire.send(&Request::Set { key: "heard".into(), value: Vec::new() }, deadline).unwrap();
        let heard = honest.get("heard", Duration::from_millis(700));
        assert!(matches!(heard, Err(Error::StoreTimeout { .. })), "{heard:?}");
        for _ in 0..ANSWERS {
            assert!(matches!(wire.recv(deadline).unwrap(), Response::Value(value) if value.len() == VALUE_CAP));
        }
        assert!(matches!(wire.recv(deadline).unwrap(), Response::Done));
        honest.get("heard", Duration::ZERO).unwrap();
    }
}
