//! A relay in the middle of a connection, without the secret, that changes what passes: nothing changed is accepted.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use super::dial_rank::Dial;
use super::interface::Interface;
use crate::auth::handshake::Purpose;
use crate::auth::job_key::LinkKey;
use crate::auth::key::KEY_BYTES;
use crate::membership::control::{self, Control};
use crate::membership::{ControlMessage, Heartbeat, Membership, Outbox};
use crate::poison_free_locks::lock;
use crate::{JobKey, PeerInfo, Result, Secret, Store, StoreClient, StoreServer, WorldOptions};

const PATIENCE: Duration = Duration::from_secs(60);
/// Bytes of the handshake, by the side that sends them.
const HANDSHAKE: [usize; 2] = [84, 48 + 256];
const CLIENT: usize = 0;
const LISTENER: usize = 1;

/// What a relay does to the bytes of one side.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Tamper {
    Nothing,
    /// Changes one bit of the byte at this place.
    Flip(usize),
    /// Changes one bit of this record, at this place if it is that long.
    FlipIn(usize, usize),
    /// Leaves this record out.
    Drop(usize),
    /// Passes this record on twice.
    Repeat(usize),
    /// Passes this record on after the next one.
    Swap(usize),
    /// Closes the connection instead of this record.
    Cut(usize),
}

/// Relays connections to an address until it is dropped.
struct Relay {
    address: SocketAddr,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    /// For connections that come from now on: the side, and what happens to it.
    tamper: Mutex<Option<(usize, Tamper)>>,
    /// Bytes of each side that passed, of all connections.
    passed: [AtomicUsize; 2],
    /// Everything that both sides sent.
    seen: Mutex<Vec<u8>>,
    over: AtomicBool,
}

impl Relay {
    fn start(to: SocketAddr) -> Relay {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let relay = Relay { address: listener.local_addr().unwrap(), shared: Arc::default() };
        let shared = relay.shared.clone();
        thread::spawn(move || {
            for client in listener.incoming() {
                if shared.over.load(Ordering::Relaxed) {
                    return;
                }
                let (client, Ok(server)) = (client.unwrap(), TcpStream::connect(to)) else { return };
                let tamper = *lock(&shared.tamper);
                for (side, from, to) in [(CLIENT, &client, &server), (LISTENER, &server, &client)] {
                    let (from, to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                    let tamper =
                        tamper.filter(|(tampered, _)| *tampered == side).map_or(Tamper::Nothing, |(_, how)| how);
                    let shared = shared.clone();
                    thread::spawn(move || shared.pump(side, tamper, &from, &to));
                }
            }
        });
        relay
    }

    fn set(&self, side: usize, tamper: Tamper) {
        *lock(&self.shared.tamper) = Some((side, tamper));
    }

    fn passed(&self, side: usize) -> usize {
        self.shared.passed[side].load(Ordering::Relaxed)
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.shared.over.store(true, Ordering::Relaxed);
        let _ = TcpStream::connect(self.address);
    }
}

impl Shared {
    /// Passes one side's bytes on: those of the handshake as they come, then record by record.
    fn pump(&self, side: usize, tamper: Tamper, mut from: &TcpStream, mut to: &TcpStream) {
        let (mut sent, mut records, mut waiting, mut held) = (0, 0, Vec::new(), None);
        let mut some = [0; 4096];
        'ends: while let Ok(n @ 1..) = from.read(&mut some) {
            lock(&self.seen).extend_from_slice(&some[..n]);
            waiting.extend_from_slice(&some[..n]);
            loop {
                let ready = match waiting.first_chunk::<2>() {
                    _ if waiting.is_empty() => break,
                    _ if tamper == Tamper::Nothing => waiting.len(),
                    _ if sent < HANDSHAKE[side] => waiting.len().min(HANDSHAKE[side] - sent),
                    Some(length) if waiting.len() >= 2 + usize::from(u16::from_le_bytes(*length)) => {
                        2 + usize::from(u16::from_le_bytes(*length))
                    }
                    _ => break,
                };
                let mut bytes: Vec<u8> = waiting.drain(..ready).collect();
                if let Tamper::Flip(at) = tamper
                    && (sent..sent + ready).contains(&at)
                {
                    bytes[at - sent] ^= 1 << (at % 8);
                }
                let record = (sent >= HANDSHAKE[side]).then_some(records);
                records += usize::from(record.is_some());
                sent += ready;
                self.passed[side].fetch_add(ready, Ordering::Relaxed);
                match (tamper, record) {
                    (Tamper::FlipIn(n, at), Some(record)) if n == record => bytes[at % ready] ^= 1 << (at % 8),
                    _ => {}
                }
                match (tamper, record) {
                    (Tamper::Drop(n), Some(record)) if n == record => continue,
                    (Tamper::Cut(n), Some(record)) if n == record => break 'ends,
                    (Tamper::Swap(n), Some(record)) if n == record => {
                        held = Some(bytes);
                        continue;
                    }
                    (Tamper::Repeat(n), Some(record)) if n == record => bytes.extend_from_within(..),
                    _ => bytes.extend(held.take().unwrap_or_default()),
                }
                if to.write_all(&bytes).is_err() {
                    break 'ends;
                }
            }
        }
        let _ = to.shutdown(Shutdown::Write);
        if matches!(tamper, Tamper::Cut(_)) {
            let _ = from.shutdown(Shutdown::Both);
        }
    }
}

/// What an honest client does through the relay, and what it got.
fn use_store(relay: &Relay, job: &JobKey, key: &str, patience: Duration) -> Result<Vec<u8>> {
    let store = StoreClient::connect(&relay.address.to_string(), job, patience)?.answer_within(patience);
    store.set(key, b"the value")?;
    store.add(&format!("{key} count"), 1)?;
    store.get(key, Duration::ZERO)
}

#[test]
fn no_tampered_byte_is_accepted_by_the_store() {
    const THREADS: usize = 8;
    let job = JobKey::new(&Secret::generate().unwrap(), "job", 0);
    let server = StoreServer::bind("127.0.0.1:0", &job).unwrap();
    let honest = StoreClient::connect(&server.local_addr().to_string(), &job, PATIENCE).unwrap();
    let relay = Relay::start(server.local_addr());
    assert_eq!(use_store(&relay, &job, "honest", PATIENCE).unwrap(), b"the value", "a relay that changes nothing");
    let lengths = [relay.passed(CLIENT), relay.passed(LISTENER)];
    assert!(lengths[CLIENT] > HANDSHAKE[CLIENT] + 3 * 19 && lengths[LISTENER] > HANDSHAKE[LISTENER] + 3 * 19);

    let mut cases: Vec<(usize, Tamper)> = Vec::new();
    for side in [CLIENT, LISTENER] {
        cases.extend((0..lengths[side]).map(|at| (side, Tamper::Flip(at))));
        for nth in 0..3 {
            cases.extend([Tamper::Drop(nth), Tamper::Cut(nth)].map(|tamper| (side, tamper)));
        }
        // The last answer has no successor that would show that it came twice.
        cases.extend((0..2).flat_map(|nth| [Tamper::Repeat(nth), Tamper::Swap(nth)]).map(|tamper| (side, tamper)));
    }
    let soon = Duration::from_millis(200);
    thread::scope(|s| {
        for first in 0..THREADS {
            let (cases, job, honest) = (&cases, &job, &honest);
            let relay = Relay::start(server.local_addr());
            s.spawn(move || {
                for (side, tamper) in cases.iter().skip(first).step_by(THREADS) {
                    let key = format!("{side} {tamper:?}");
                    relay.set(*side, *tamper);
                    let got = use_store(&relay, job, &key, soon);
                    assert!(got.is_err(), "{key} was not noticed: {got:?}");
                    for (key, value) in [(key.clone(), &b"the value"[..]), (format!("{key} count"), b"1")] {
                        if let Ok(stored) = honest.get(&key, Duration::ZERO) {
                            assert_eq!(stored, value, "{key}");
                        }
                    }
                }
            });
        }
    });
    let keys = honest.keys("").unwrap();
    assert!(
        keys.iter().all(|key| key.starts_with("honest")
            || cases.iter().any(|(side, tamper)| { key.starts_with(&format!("{side} {tamper:?}")) })),
        "{keys:?}"
    );
}

/// Ranks 0 and 1 of a world, connected for control through a relay.
struct Ranks {
    relay: Relay,
    controls: [Arc<Control>; 2],
    memberships: [Arc<Membership>; 2],
}

fn link_key(token: u8) -> LinkKey {
    JobKey::trusting_network("job", 0).links(&[token; KEY_BYTES])
}

fn connected(side: usize, tamper: Tamper) -> Ranks {
    let start = |rank| {
        let (listener, address) = control::listen([127, 0, 0, 1].into()).unwrap();
        (Arc::new(Control::start(listener, rank, 2, link_key(1)).unwrap()), address)
    };
    let ((low, address), (high, _)) = (start(0), start(1));
    let relay = Relay::start(address);
    relay.set(side, tamper);
    let (deadline, purpose) = (Instant::now() + PATIENCE, Purpose::Control { rank: 1 });
    let to = ("127.0.0.1", relay.address.port());
    let dial = Dial { to, via: &Interface::default(), key: &link_key(1), peer: 0, purpose };
    let Ok(mine) = dial.connect(deadline, None) else { panic!("no connection") };
    let theirs = low.links().claim(purpose, deadline, || Ok(())).unwrap().unwrap();
    let membership = |rank, control: &Arc<Control>| {
        // One heartbeat at once, and no more.
        let options = WorldOptions { heartbeat: PATIENCE, ..WorldOptions::default() };
        let peers = (0..2).map(|rank| PeerInfo::here(rank, rank, 0)).collect();
        let membership = Membership::new(rank, peers, options);
        membership.set_outbox(Arc::downgrade(&(control.clone() as Arc<dyn Outbox>)));
        membership
    };
    let memberships = [membership(0, &low), membership(1, &high)];
    low.attach(vec![None, Some(theirs)], memberships[0].clone()).unwrap();
    high.attach(vec![Some(mine), None], memberships[1].clone()).unwrap();
    Ranks { relay, controls: [low, high], memberships }
}

/// What becomes of one rank's world while the other, which is `side` of the connection, sends three heartbeats and a
/// goodbye: `Ok` if that one has left in peace.
fn heard(side: usize, tamper: Tamper) -> (Result<()>, Ranks) {
    let ranks = connected(side, tamper);
    // The client is rank 1.
    let (sender, receiver) = (1 - side, side);
    let deadline = Instant::now() + PATIENCE;
    while ranks.relay.passed(side) == HANDSHAKE[side] {
        assert!(Instant::now() < deadline, "no heartbeat");
        thread::sleep(Duration::from_millis(1));
    }
    for step in 0..2 {
        let beat = Heartbeat { step: Some(step), ..Heartbeat::default() };
        ranks.controls[sender].send_all(&ControlMessage::Heartbeat(beat));
    }
    ranks.controls[sender].send_all(&ControlMessage::Goodbye);
    loop {
        let world = &ranks.memberships[receiver];
        if let Err(error) = world.check() {
            return (Err(error), ranks);
        }
        if world.has_left(sender) {
            return (Ok(()), ranks);
        }
        assert!(Instant::now() < deadline, "{tamper:?}: neither a goodbye nor an error");
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn no_tampered_byte_is_accepted_on_a_control_connection() {
    for side in [CLIENT, LISTENER] {
        heard(side, Tamper::Nothing).0.unwrap();
        let mut cases = Vec::new();
        for nth in 0..4 {
            cases.extend((0..30).map(|at| Tamper::FlipIn(nth, at)));
            cases.extend([Tamper::Drop(nth), Tamper::Repeat(nth), Tamper::Swap(nth)]);
        }
        // Once a rank has left, what seems to come from it concerns no one.
        cases.retain(|tamper| *tamper != Tamper::Repeat(3));
        for tamper in cases {
            let error = heard(side, tamper).0.expect_err(&format!("{tamper:?} was not noticed"));
            assert_eq!(error.rank(), Some(1 - side), "{tamper:?}: {error}");
        }
    }
}

#[test]
fn a_cut_control_connection_is_a_dead_rank() {
    for side in [CLIENT, LISTENER] {
        for tamper in [Tamper::Cut(1), Tamper::Cut(3), Tamper::Drop(3)] {
            let error = heard(side, tamper).0.unwrap_err();
            assert!(error.to_string().contains("without a goodbye"), "{error}");
            assert_eq!(error.rank(), Some(1 - side));
        }
    }
}

#[test]
fn a_data_connection_needs_the_secret_of_its_world() {
    let (listener, address) = control::listen([127, 0, 0, 1].into()).unwrap();
    let control = Control::start(listener, 0, 2, link_key(1)).unwrap();
    let relay = Relay::start(address);
    let purpose = Purpose::Data { rank: 1, group: 7 };
    let deadline = Instant::now() + PATIENCE;
    let dialled = |key: &LinkKey| {
        let to = ("127.0.0.1", relay.address.port());
        let dial = Dial { to, via: &Interface::default(), key, peer: 0, purpose };
        dial.connect(deadline, None).map_err(|cause| cause.to_string())
    };
    // The same job, the same secret, another world.
    assert!(dialled(&link_key(2)).unwrap_err().contains("another secret"));
    let mut mine = dialled(&link_key(1)).unwrap().into_plain();
    let mut theirs = control.links().claim(purpose, deadline, || Ok(())).unwrap().unwrap().into_plain();
    mine.write_all(b"gradients").unwrap();
    let mut got = [0; 9];
    while let Err(e) =
        theirs.peek(&mut got).and_then(|n| if n == 9 { Ok(()) } else { Err(ErrorKind::WouldBlock.into()) })
    {
        assert!(e.kind() == ErrorKind::WouldBlock && Instant::now() < deadline, "{e}");
    }
    theirs.read_exact(&mut got).unwrap();
    assert_eq!(&got, b"gradients");
    // What the first line of docs/security.md says.
    assert!(lock(&relay.shared.seen).windows(9).any(|bytes| bytes == b"gradients"));
}
