//! A job under attack: its results do not depend on the bytes that strangers send to its ports.
//!
//! The attackers run in this process, so they get more of the machine than a stranger would. Step times are printed,
//! not asserted: `cargo test -p burn-ddp-comm --test attacks -- --nocapture`.
#![cfg(target_os = "linux")]

mod common;

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use burn_ddp_comm::{JobKey, ReduceOp, Secret, Store, StoreClient, StoreServer, World};
use common::{JOB, PATIENCE, SecretFile, join_all, listening, options, rank_at};

const RANKS: usize = 3;
const STEPS: usize = 600;
/// Connections that attackers must have made, at least, before a job under attack ends.
const ENOUGH: usize = 20;
/// Sizes of the handshake's messages.
const GREETING: usize = 48;
const OPENING: usize = 84;
const ANSWER: usize = 256;

/// One attack at a time: each measures times, needs many descriptors, and attacks every listener of this process.
static TURN: Mutex<()> = Mutex::new(());

/// How many connections the attackers made.
static CONNECTIONS: AtomicUsize = AtomicUsize::new(0);

/// Outcome of a job.
#[derive(Debug)]
struct Outcome {
    /// Hash of the results of all steps.
    hash: u64,
    join: Duration,
    /// Median time of a step.
    step: Duration,
}

/// One round of an attack on all ports of the job; the connections in the list stay open until the job ends.
type Attack = fn(&[SocketAddr], &mut Vec<TcpStream>);

/// A job from start to end, attacked all the time.
fn job(attack: Option<Attack>) -> Outcome {
    let file = SecretFile::new();
    let store = StoreServer::bind("127.0.0.1:0", &JobKey::new(&file.secret, JOB, 0)).unwrap();
    let over = AtomicBool::new(false);
    thread::scope(|s| {
        if let Some(attack) = attack {
            let over = &over;
            s.spawn(move || {
                let mut held = Vec::new();
                while !over.load(Ordering::Relaxed) {
                    attack(&listening(), &mut held);
                    thread::sleep(Duration::from_millis(1));
                }
            });
            // So the store is under attack before the first rank joins.
            thread::sleep(Duration::from_millis(300));
        }
        // Also ends the attack if a rank panics.
        let _end = Ends(&over);
        let begin = Instant::now();
        let envs = (0..RANKS).map(|rank| file.told(rank_at(&store, rank, RANKS))).collect();
        let worlds: Vec<World> = join_all(envs, &options()).into_iter().map(|world| world.unwrap()).collect();
        let join = begin.elapsed();
        let attacked = attack.is_some();
        let ranks: Vec<_> = worlds.into_iter().map(|world| s.spawn(move || train(&world, attacked))).collect();
        let ranks: Vec<(u64, Duration)> = ranks.into_iter().map(|rank| rank.join().unwrap()).collect();
        assert!(ranks.iter().all(|(hash, _)| *hash == ranks[0].0), "{ranks:?}");
        Outcome { hash: ranks[0].0, join, step: ranks[0].1 }
    })
}

struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// The hash of all results, and the median time of a step.
fn train(world: &World, attacked: bool) -> (u64, Duration) {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    let mut times = Vec::new();
    let mut group = world.group().unwrap();
    let mut weights: Vec<f32> = (0..4 * 1024).map(|i| i as f32).collect();
    for step in 0..STEPS {
        // A new group needs new connections.
        if step % 75 == 74 {
            group = world.group().unwrap();
        }
        let begin = Instant::now();
        for (i, w) in weights.iter_mut().enumerate() {
            *w = *w * 0.5 + ((i * 31 + step * 7 + world.rank() * 3) % 101) as f32;
        }
        group.all_reduce(&mut weights, ReduceOp::Mean).unwrap();
        times.push(begin.elapsed());
        for w in &weights {
            hash = (hash ^ u64::from(w.to_bits())).wrapping_mul(0x100_0000_01b3);
        }
    }
    let steps_end = Instant::now();
    while attacked && CONNECTIONS.load(Ordering::Relaxed) < ENOUGH && steps_end.elapsed() < PATIENCE / 2 {
        thread::sleep(Duration::from_millis(1));
    }
    world.check().unwrap();
    group.barrier().unwrap();
    times.sort_unstable();
    (hash, times[STEPS / 2])
}

/// Without an attack and under `attack`, the job ends with the same bits.
fn withstands(name: &str, attack: Attack) {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    raise_descriptor_limit();
    let peace = job(None);
    CONNECTIONS.store(0, Ordering::Relaxed);
    let attacked = job(Some(attack));
    let connections = CONNECTIONS.load(Ordering::Relaxed);
    println!(
        "{name}, {connections} connections: join {:.1} ms, attacked {:.1} ms; step {:.0} µs, attacked {:.0} µs",
        peace.join.as_secs_f64() * 1e3,
        attacked.join.as_secs_f64() * 1e3,
        peace.step.as_secs_f64() * 1e6,
        attacked.step.as_secs_f64() * 1e6,
    );
    assert!(connections >= ENOUGH, "{name} came to {connections} connections only");
    assert_eq!(peace.hash, attacked.hash, "{name}");
    assert!(attacked.join < PATIENCE / 2, "{name} kept ranks out for {:?}", attacked.join);
}

/// Needed since attackers and the attacked job share this process and its limit.
fn raise_descriptor_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    assert!(limit.maximum.is_none_or(|most| most >= 8192), "this test needs `ulimit -Hn` of 8192 at least: {limit:?}");
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).unwrap();
}

fn connect(to: SocketAddr) -> Option<TcpStream> {
    // A listener may be gone, or its backlog full.
    let stream = TcpStream::connect_timeout(&to, Duration::from_millis(500)).ok()?;
    stream.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
    CONNECTIONS.fetch_add(1, Ordering::Relaxed);
    Some(stream)
}

/// Random bytes.
fn noise(len: usize) -> Vec<u8> {
    use std::hash::{BuildHasher, Hasher, RandomState};
    let block = RandomState::new().build_hasher().finish().to_le_bytes();
    block.into_iter().cycle().take(len).collect()
}

/// Bytes that begin like a message of the handshake and go on at random.
fn message(len: usize, kind: u8, group: u64) -> Vec<u8> {
    let mut bytes = noise(len);
    bytes[..8].copy_from_slice(b"burn-ddp");
    bytes[8..10].copy_from_slice(&burn_ddp_comm::frame::PROTOCOL_VERSION.to_le_bytes());
    bytes[10..16].copy_from_slice(&[kind, 0, 0, 0, 0, 0]);
    bytes[16..24].copy_from_slice(&group.to_le_bytes());
    bytes
}

/// The other side must close the connection, and send nothing but a refusal.
fn must_be_refused(mut stream: TcpStream) {
    let mut said = Vec::new();
    match stream.read_to_end(&mut said) {
        Ok(_) => {}
        Err(e) if e.kind() == ErrorKind::ConnectionReset => {}
        // Too busy to answer in time.
        Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => return,
        Err(e) => panic!("{e}"),
    }
    let verdict = said.get(GREETING + 10);
    assert!(matches!(verdict, None | Some(2 | 3)), "a stranger got the verdict {verdict:?}: {said:?}");
}

#[test]
fn random_bytes() {
    withstands("random bytes", |ports, _| {
        for (nth, port) in ports.iter().enumerate() {
            if let Some(mut stream) = connect(*port) {
                let _ = stream.write_all(&noise(1 + nth * 997 % 5000));
                must_be_refused(stream);
            }
        }
    });
}

#[test]
fn a_wrong_secret_for_every_purpose() {
    withstands("wrong secret", |ports, _| {
        for port in ports {
            for (kind, group) in [(1, 0), (2, 0), (3, 1), (3, 2), (0, 0), (255, 9)] {
                if let Some(mut stream) = connect(*port) {
                    let _ = stream.write_all(&message(OPENING, kind, group));
                    must_be_refused(stream);
                }
            }
            let stranger = JobKey::new(&Secret::generate().unwrap(), JOB, 0);
            let refused = StoreClient::connect(&port.to_string(), &stranger, Duration::from_millis(100));
            assert!(refused.is_err());
        }
    });
}

#[test]
fn truncated_and_oversized_messages() {
    withstands("truncated and oversized", |ports, _| {
        for port in ports {
            for len in [1, 8, 10, 47, OPENING - 1] {
                if let Some(mut stream) = connect(*port) {
                    // The connection ends in the middle of its opening message.
                    let _ = stream.write_all(&message(OPENING, 2, 0)[..len]);
                }
            }
            if let Some(mut stream) = connect(*port) {
                let _ = stream.write_all(&message(1 << 16, 3, 1));
                must_be_refused(stream);
            }
        }
    });
}

#[test]
fn a_thousand_idle_connections() {
    withstands("1,000 idle connections", |ports, held| {
        held.retain(|stream| {
            stream.set_nonblocking(true).unwrap();
            // Not closed yet: the greeting can be read, and no end follows.
            !matches!(stream.peek(&mut [0; 1]), Ok(0)) && stream.take_error().is_ok_and(|error| error.is_none())
        });
        for port in ports.iter().cycle().take(1000_usize.saturating_sub(held.len())) {
            held.extend(connect(*port));
        }
    });
}

#[test]
fn slow_loris() {
    withstands("slow-loris", |ports, held| {
        while held.len() < 200 {
            let before = held.len();
            held.extend(ports.iter().filter_map(|port| connect(*port)));
            if held.len() == before {
                break;
            }
        }
        // One byte per round to each connection: the opening message is never complete.
        let bytes = message(OPENING, 2, 0);
        held.retain(|mut stream| {
            let nth = stream.local_addr().map_or(0, |address| usize::from(address.port())) % 8;
            stream.write(&bytes[nth..=nth]).is_ok()
        });
        thread::sleep(Duration::from_millis(20));
    });
}

#[test]
fn data_of_another_job() {
    withstands("data of another job", |ports, held| {
        for port in ports {
            if let Some(mut stream) = connect(*port) {
                // A frame without any handshake.
                let _ = stream.write_all(&[&b"bddp\x01\0"[..], &noise(66 + 4096)].concat());
                must_be_refused(stream);
            }
            if let Some(mut stream) = connect(*port) {
                let _ = stream.write_all(&message(OPENING, 3, 1));
                let _ = stream.write_all(&noise(4096));
                held.truncate(100);
                held.push(stream);
            }
        }
    });
}

/// The bytes of a connection, recorded by a proxy.
struct Recorded {
    by_client: Vec<u8>,
    by_server: Vec<u8>,
}

/// The bytes that an honest client and the store send each other.
fn record(job: &JobKey, server: SocketAddr) -> Recorded {
    let proxy = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = proxy.local_addr().unwrap().to_string();
    thread::scope(|s| {
        let recording = s.spawn(|| {
            let client = proxy.accept().unwrap().0;
            let server = TcpStream::connect(server).unwrap();
            let copy = |mut from: &TcpStream, mut to: &TcpStream| {
                let (mut all, mut some) = (Vec::new(), [0; 4096]);
                while let Ok(n @ 1..) = from.read(&mut some) {
                    all.extend_from_slice(&some[..n]);
                    to.write_all(&some[..n]).unwrap();
                }
                let _ = to.shutdown(std::net::Shutdown::Write);
                all
            };
            thread::scope(|s| {
                let by_client = s.spawn(|| copy(&client, &server));
                let by_server = copy(&server, &client);
                Recorded { by_client: by_client.join().unwrap(), by_server }
            })
        });
        let client = StoreClient::connect(&address, job, PATIENCE).unwrap();
        client.set("k", b"from the client").unwrap();
        drop(client);
        recording.join().unwrap()
    })
}

#[test]
fn a_replayed_handshake() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let job = JobKey::new(&Secret::generate().unwrap(), JOB, 0);
    let server = StoreServer::bind("127.0.0.1:0", &job).unwrap();
    let recorded = record(&job, server.local_addr());
    assert_eq!(&recorded.by_server[..8], b"burn-ddp");
    assert!(recorded.by_client.len() > OPENING, "the opening, and a request");
    assert_eq!(recorded.by_server[GREETING + 10], 0, "the honest client was welcome");
    let honest = StoreClient::connect(&server.local_addr().to_string(), &job, PATIENCE).unwrap();
    honest.set("k", b"since changed").unwrap();

    // Replayed to the store: the same bytes prove nothing on another connection.
    for _ in 0..3 {
        let mut stream = connect(server.local_addr()).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.write_all(&recorded.by_client).unwrap();
        must_be_refused(stream);
    }
    assert_eq!(honest.get("k", PATIENCE).unwrap(), b"since changed");

    // Replayed to a client, by an attacker at the store's address: the client notices that its own nonce is not
    // answered.
    let squatter = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = squatter.local_addr().unwrap().to_string();
    thread::scope(|s| {
        s.spawn(|| {
            let (mut stream, _) = squatter.accept().unwrap();
            stream.write_all(&recorded.by_server).unwrap();
            let _ = stream.read_to_end(&mut Vec::new());
        });
        let error = StoreClient::connect(&address, &job, PATIENCE).unwrap_err().to_string();
        assert!(error.contains("another secret"), "{error}");
    });
}

#[test]
fn a_reflected_handshake() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let job = JobKey::new(&Secret::generate().unwrap(), JOB, 0);
    let server = StoreServer::bind("127.0.0.1:0", &job).unwrap();
    // The store's own bytes, sent back to it: on the same connection, and on another one.
    for other in [false, true] {
        let mut stream = connect(server.local_addr()).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut greeting = vec![0; GREETING];
        stream.read_exact(&mut greeting).unwrap();
        let mut target = if other { connect(server.local_addr()).unwrap() } else { stream.try_clone().unwrap() };
        target.set_read_timeout(Some(PATIENCE)).unwrap();
        greeting.resize(OPENING, 0);
        target.write_all(&greeting).unwrap();
        let mut said = Vec::new();
        let _ = target.read_to_end(&mut said);
        let answer = if other { said.get(GREETING..) } else { Some(&said[..]) }.unwrap_or_default();
        assert!(answer.is_empty() || matches!(answer[10], 2 | 3), "{answer:?}");
    }
    // A client's own bytes, sent back to it as if by a store.
    let mirror = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = mirror.local_addr().unwrap().to_string();
    thread::scope(|s| {
        s.spawn(|| {
            let (mut stream, _) = mirror.accept().unwrap();
            stream.write_all(&message(GREETING, 1, 0)).unwrap();
            let mut opening = vec![0; OPENING];
            stream.read_exact(&mut opening).unwrap();
            // A welcome that contains the bytes that the client itself has sealed.
            let mut answer = message(ANSWER, 0, 0);
            answer[12..64].copy_from_slice(&opening[32..]);
            stream.write_all(&answer).unwrap();
            let _ = stream.read_to_end(&mut Vec::new());
        });
        let error = StoreClient::connect(&address, &job, PATIENCE).unwrap_err().to_string();
        assert!(error.contains("another secret"), "{error}");
    });
}

#[test]
fn a_crowd_does_not_keep_clients_out() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    raise_descriptor_limit();
    let job = JobKey::new(&Secret::generate().unwrap(), JOB, 0);
    let server = StoreServer::bind("127.0.0.1:0", &job).unwrap();
    let address = server.local_addr();
    let _crowd: Vec<TcpStream> = (0..1000).filter_map(|_| connect(address)).collect();
    let begin = Instant::now();
    StoreClient::connect(&address.to_string(), &job, PATIENCE).unwrap().set("k", b"v").unwrap();
    println!("in past 1,000 idle connections after {:?}", begin.elapsed());
    assert!(begin.elapsed() < Duration::from_secs(10), "{:?}", begin.elapsed());
}

#[test]
fn all_of_this_on_two_machines() {
    common::again_on_two_machines();
}
