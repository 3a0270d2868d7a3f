//! Tests with a relay in the middle of a connection that does not know the secret and changes the bytes that pass: no
//! changed byte is accepted.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use super::dial_rank::Dial;
use super::interface::Interface;
use super::peer_addresses::{PeerAddress, PeerAddresses};
use crate::auth::handshake::{Purpose, by};
use crate::auth::hmac_key::KEY_BYTES;
use crate::auth::job_key::LinkKey;
use crate::auth::secure_stream::SecureStream;
use crate::engine::tcp::{Reach, TcpFabric};
use crate::membership::control::{self, Control, Directory};
use crate::membership::{ControlMessage, Heartbeat, Membership, Outbox};
use crate::poison_free_locks::lock;
use crate::topology::Machines;
use crate::world_member::Seat;
use crate::{JobKey, PeerInfo, ReduceOp, Result, Secret, Store, StoreClient, StoreServer, World, WorldOptions};

const PATIENCE: Duration = Duration::from_secs(60);
/// Bytes of the handshake, by the side that sends them.
const HANDSHAKE: [usize; 2] = [84, 48 + 256];
const CLIENT: usize = 0;
const LISTENER: usize = 1;

/// Change that a relay makes to the bytes of one side.
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
    /// The change of later connections, and the side whose bytes are changed.
    tamper: Mutex<Option<(usize, Tamper)>>,
    /// Number of bytes of each side that have passed, on all connections.
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

    /// Waits for the first heartbeat of a control connection.
    fn await_heartbeat(&self, side: usize) {
        let deadline = Instant::now() + PATIENCE;
        while self.passed(side) == HANDSHAKE[side] {
            assert!(Instant::now() < deadline, "no heartbeat");
            thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.shared.over.store(true, Ordering::Relaxed);
        let _ = TcpStream::connect(self.address);
    }
}

impl Shared {
    /// Passes one side's bytes on: in the handshake as they come, then record by record.
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

/// An honest client's calls through the relay, and their results.
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
        // Not the last answer: it could not be noticed that it came twice, since no other follows.
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

fn started<const RANKS: usize>() -> [(Arc<Control>, SocketAddr); RANKS] {
    std::array::from_fn(|rank| {
        let (listener, address) = control::listen([127, 0, 0, 1].into(), &Interface::default()).unwrap();
        (Arc::new(Control::start(listener, rank, RANKS, link_key(1)).unwrap()), address)
    })
}

/// Connects the rank `high` to rank 0, which listens at `address` or behind a relay there; both ends.
fn streams(controls: &[Arc<Control>], high: u32, address: SocketAddr) -> (SecureStream, SecureStream) {
    let (deadline, purpose) = (Instant::now() + PATIENCE, Purpose::Control { rank: high });
    let to = &PeerAddress::new("127.0.0.1", address.port());
    let dial = Dial { to, via: &Interface::default(), key: &link_key(1), peer: 0, purpose };
    let Ok(mine) = dial.connect(deadline, by(deadline), None) else { panic!("no connection") };
    (mine, controls[0].links().claim(purpose, deadline, || Ok(())).unwrap().unwrap())
}

/// Memberships of ranks on these machines.
fn memberships<const RANKS: usize>(
    controls: &[Arc<Control>; RANKS],
    machines: [usize; RANKS],
    options: &WorldOptions,
) -> [Arc<Membership>; RANKS] {
    std::array::from_fn(|rank| {
        let peers = (0..RANKS).map(|rank| PeerInfo::here(rank, rank, 0)).collect();
        let membership = Membership::new(rank, peers, Machines::new(&machines), options.clone());
        membership.set_outbox(Arc::downgrade(&(controls[rank].clone() as Arc<dyn Outbox>)));
        membership
    })
}

/// Connects rank 1 to rank 0, which listens at `address` or behind a relay there.
fn connected(controls: &[Arc<Control>; 2], address: SocketAddr, options: &WorldOptions) -> [Arc<Membership>; 2] {
    let (mine, theirs) = streams(controls, 1, address);
    let memberships = memberships(controls, [0; 2], options);
    controls[0].attach(vec![None, Some(theirs)], memberships[0].clone(), Directory::default()).unwrap();
    controls[1].attach(vec![Some(mine), None], memberships[1].clone(), Directory::default()).unwrap();
    memberships
}

fn controlled(side: usize, tamper: Tamper) -> Ranks {
    let [(low, address), (high, _)] = started();
    let relay = Relay::start(address);
    relay.set(side, tamper);
    let controls = [low, high];
    // One heartbeat at once, and no more.
    let options = WorldOptions { heartbeat: PATIENCE, ..WorldOptions::default() };
    let memberships = connected(&controls, relay.address, &options);
    Ranks { relay, controls, memberships }
}

/// Result of one rank, which hears three heartbeats and a goodbye of the other rank, `side` of the connection: `Ok` if
/// the goodbye arrived.
fn heard(side: usize, tamper: Tamper) -> (Result<()>, Ranks) {
    let ranks = controlled(side, tamper);
    // The client is rank 1.
    let (sender, receiver) = (1 - side, side);
    ranks.relay.await_heartbeat(side);
    for step in 0..2 {
        let beat = Heartbeat { step: Some(step), ..Heartbeat::default() };
        ranks.controls[sender].send_all(&ControlMessage::Heartbeat(beat));
    }
    ranks.controls[sender].send_all(&ControlMessage::Goodbye);
    (await_goodbye(&ranks.memberships[receiver], sender, tamper), ranks)
}

/// Waits until `world` has heard that `sender` has left, or has ended.
fn await_goodbye(world: &Membership, sender: usize, tamper: Tamper) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    while !world.has_left(sender) {
        world.check()?;
        assert!(Instant::now() < deadline, "{tamper:?}: neither a goodbye nor an error");
        thread::sleep(Duration::from_millis(1));
    }
    world.check()
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
        // Not the goodbye: once a rank has left, later messages that seem to come from it are ignored.
        cases.retain(|tamper| *tamper != Tamper::Repeat(3));
        for tamper in cases {
            let error = heard(side, tamper).0.expect_err(&format!("{tamper:?} was not noticed"));
            assert_eq!(error.rank(), Some(1 - side), "{tamper:?}: {error}");
        }
    }
}

#[test]
fn no_tampered_byte_is_passed_on_to_another_rank() {
    use Tamper::*;
    for tamper in [Nothing, FlipIn(1, 3), FlipIn(2, 20), Drop(0), Repeat(1), Swap(1), Cut(2)] {
        // Rank 2, the counterpart of rank 0, sends through a relay; rank 1 hears it through rank 0.
        let started = started::<4>();
        let relay = Relay::start(started[0].1);
        relay.set(CLIENT, tamper);
        let address = started[0].1;
        let controls = started.map(|(control, _)| control);
        let (far, from_far) = streams(&controls, 2, relay.address);
        let (near, from_near) = streams(&controls, 1, address);
        let options = WorldOptions { heartbeat: PATIENCE, ..WorldOptions::default() };
        let memberships = memberships(&controls, [0, 0, 1, 1], &options);
        let attach = |rank: usize, streams| {
            controls[rank].attach(streams, memberships[rank].clone(), Directory::default()).unwrap()
        };
        attach(0, vec![None, Some(from_near), Some(from_far), None]);
        attach(1, vec![Some(near), None, None, None]);
        attach(2, vec![Some(far), None, None, None]);
        relay.await_heartbeat(CLIENT);
        controls[2].send_all(&ControlMessage::Heartbeat(Heartbeat { step: Some(1), ..Heartbeat::default() }));
        controls[2].send_all(&ControlMessage::Goodbye);
        let heard = await_goodbye(&memberships[1], 2, tamper);
        let culprit = if tamper == Nothing { None } else { Some(2) };
        assert_eq!(heard.err().and_then(|error| error.rank()), culprit, "{tamper:?}");
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
    let (listener, address) = control::listen([127, 0, 0, 1].into(), &Interface::default()).unwrap();
    let control = Control::start(listener, 0, 2, link_key(1)).unwrap();
    let relay = Relay::start(address);
    let purpose = Purpose::Data { rank: 1, group: 7, flow: 0, opened: false };
    let deadline = Instant::now() + PATIENCE;
    let dialled = |key: &LinkKey| {
        let to = &PeerAddress::new("127.0.0.1", relay.address.port());
        let dial = Dial { to, via: &Interface::default(), key, peer: 0, purpose };
        dial.connect(deadline, by(deadline), None).map_err(|cause| cause.to_string())
    };
    // The same job, the same secret, another world.
    assert!(dialled(&link_key(2)).unwrap_err().contains("another secret"));
    let plain = |stream: SecureStream| TcpStream::from(stream.into_parts().0);
    let mut mine = plain(dialled(&link_key(1)).unwrap());
    let mut theirs = plain(control.links().claim(purpose, deadline, || Ok(())).unwrap().unwrap());
    mine.write_all(b"gradients").unwrap();
    let mut got = [0; 9];
    while let Err(e) =
        theirs.peek(&mut got).and_then(|n| if n == 9 { Ok(()) } else { Err(ErrorKind::WouldBlock.into()) })
    {
        assert!(e.kind() == ErrorKind::WouldBlock && Instant::now() < deadline, "{e}");
    }
    theirs.read_exact(&mut got).unwrap();
    assert_eq!(&got, b"gradients");
    // Unencrypted, as the first line of docs/security.md says.
    assert!(lock(&relay.shared.seen).windows(9).any(|bytes| bytes == b"gradients"));
}

/// Two ranks whose data connections go through the relay; their control connection does not.
fn with_data_relayed(encrypt_data: bool) -> (Relay, [World; 2]) {
    let [(low, address), (high, elsewhere)] = started();
    let relay = Relay::start(address);
    let options = WorldOptions { encrypt_data, timeout: PATIENCE, ..WorldOptions::default() };
    let controls = [low, high];
    let memberships = connected(&controls, address, &options);
    let addresses = [relay.address, elsewhere].map(|address| (address.ip().to_string(), address.port()));
    let addresses = PeerAddresses::new(addresses);
    let world = |rank: usize| {
        let (control, membership) = (controls[rank].clone(), memberships[rank].clone());
        let (via, links) = (Interface::default(), control.links().clone());
        let reach = Reach { rank, addresses: addresses.clone(), key: link_key(1), via, links };
        let seat = Seat {
            rank,
            local_world_size: 2,
            machines: Machines::new(&[(); 2]),
            peers: membership.peers().to_vec(),
            membership: membership.clone(),
            fabric: Arc::new(TcpFabric::new(reach, membership)),
            keep_alive: Some(Box::new(control)),
        };
        World::from_seat(seat, options.clone())
    };
    let worlds = [world(0), world(1)];
    (relay, worlds)
}

const DATA: [i64; 64] = [i64::from_le_bytes(*b"gradient"); 64];

/// Reduces small data, then large ones; the result of each rank.
fn sums(worlds: [World; 2]) -> [Result<()>; 2] {
    let rank_main = |world: World| {
        let group = world.group()?;
        for times in [1, 1000] {
            let mut x = DATA.repeat(times);
            group.all_reduce(&mut x, ReduceOp::Max)?;
            assert!(x == DATA.repeat(times), "rank {} took changed data", world.rank());
        }
        group.barrier()
    };
    thread::scope(|s| worlds.map(|world| s.spawn(move || rank_main(world))).map(|rank| rank.join().unwrap()))
}

#[test]
fn encrypted_data_cannot_be_read() {
    for encrypt_data in [false, true] {
        let (relay, worlds) = with_data_relayed(encrypt_data);
        assert_eq!(sums(worlds), [Ok(()), Ok(())]);
        let seen = lock(&relay.shared.seen);
        assert!(seen.len() > 100_000, "{} bytes came past the relay", seen.len());
        let legible = seen.windows(8).any(|bytes| bytes == b"gradient");
        assert_eq!(legible, !encrypt_data);
    }
}

#[test]
fn no_tampered_byte_is_accepted_on_an_encrypted_data_connection() {
    let mut cases = Vec::new();
    for side in [CLIENT, LISTENER] {
        // The records of the group's first barrier and of the small data, and one of the large data.
        for nth in [0, 1, 4] {
            cases.extend([0, 1, 2, 40, 300].map(|at| (side, Tamper::FlipIn(nth, at))));
            cases.extend([Tamper::Drop(nth), Tamper::Repeat(nth), Tamper::Swap(nth)].map(|how| (side, how)));
        }
    }
    thread::scope(|s| {
        for (side, tamper) in cases {
            s.spawn(move || {
                let (relay, worlds) = with_data_relayed(true);
                relay.set(side, tamper);
                let outcome = sums(worlds);
                assert!(outcome.iter().any(Result::is_err), "side {side}, {tamper:?} was not noticed");
            });
        }
    });
}
