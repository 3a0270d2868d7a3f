//! Tests of the store over a slow link: the store does not close the connection of a rank that sends or receives a long
//! message slowly, however long that takes, but does so if the rank stops in the middle of a message.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use socket2::{Domain, Socket, Type};

use crate::store::Serving;
use crate::{JobKey, LaunchEnv, Meeting, ReduceOp, Result, Store, StoreClient, World, WorldOptions};

const PATIENCE: Duration = Duration::from_secs(60);
/// Pause in a message after which the store of these tests closes a client's connection.
const DEADLINE: Duration = Duration::from_millis(500);
/// Bytes of the sockets' buffers, into which a long message does not fit.
const BUFFER_BYTES: usize = 8 * 1024;
/// A link of 400 KB/s passes on this much of each direction per [`TICK`].
const PIECE_BYTES: usize = 2048;
const TICK: Duration = Duration::from_millis(5);

/// A relay that passes on a piece of each direction per tick.
struct Link {
    address: SocketAddr,
}

fn listener() -> Socket {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    // Accepted connections inherit these.
    socket.set_send_buffer_size(BUFFER_BYTES).unwrap();
    socket.set_recv_buffer_size(BUFFER_BYTES).unwrap();
    socket.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
    socket.listen(16).unwrap();
    socket
}

fn address(listener: &Socket) -> SocketAddr {
    listener.local_addr().unwrap().as_socket().unwrap()
}

impl Link {
    /// To `to`, by pieces of `piece_bytes`; after `most_bytes` of a direction it passes on no more of it.
    fn start(to: SocketAddr, piece_bytes: usize, most_bytes: usize) -> Link {
        let from = listener();
        let link = Link { address: address(&from) };
        thread::spawn(move || {
            while let Ok((client, _)) = from.accept() {
                let server = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
                server.set_recv_buffer_size(BUFFER_BYTES).unwrap();
                if server.connect(&to.into()).is_err() {
                    return;
                }
                let (client, server) = (TcpStream::from(client), TcpStream::from(server));
                for (from, to) in [(&client, &server), (&server, &client)] {
                    let (from, to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                    thread::spawn(move || pass(from, to, piece_bytes, most_bytes));
                }
            }
        });
        link
    }
}

/// Passes on bytes in one direction until either end closes.
fn pass(mut from: TcpStream, mut to: TcpStream, piece_bytes: usize, most_bytes: usize) {
    let mut piece = vec![0; piece_bytes];
    let mut passed = 0;
    while passed < most_bytes {
        let Ok(n @ 1..) = from.read(&mut piece) else { return drop(to.shutdown(std::net::Shutdown::Write)) };
        if to.write_all(&piece[..n]).is_err() {
            return;
        }
        passed += n;
        thread::sleep(TICK);
    }
    // The sockets stay open, so that neither end notices it.
    thread::sleep(PATIENCE);
}

fn store(job: &JobKey, deadline: Duration) -> (Serving, SocketAddr) {
    let listener = listener();
    let address = address(&listener);
    (Serving::start_with(vec![listener], job, deadline).unwrap(), address)
}

/// Times of a set and of a get of this value by a client behind the link.
fn exchange(link: &Link, job: &JobKey, value: &[u8]) -> Result<[Duration; 2]> {
    let store = StoreClient::connect(&link.address.to_string(), job, PATIENCE)?.answer_within(PATIENCE);
    let begin = Instant::now();
    store.set("long", value)?;
    let half = Instant::now();
    assert_eq!(store.get("long", Duration::ZERO)?, value);
    Ok([half - begin, half.elapsed()])
}

#[test]
fn a_message_that_takes_longer_than_the_deadline_of_pauses_arrives() {
    let job = JobKey::trusting_network("job", 0);
    let (_serving, to) = store(&job, DEADLINE);
    let value = vec![7; 250 * 1024];
    let begin = Instant::now();
    loop {
        let link = Link::start(to, PIECE_BYTES, usize::MAX);
        match exchange(&link, &job, &value) {
            Ok(times) => return assert!(times.iter().all(|time| *time > DEADLINE), "no slow link: {times:?}"),
            // A busy machine may have stopped a thread for longer than the deadline.
            Err(error) => assert!(begin.elapsed() < PATIENCE, "{error}"),
        }
    }
}

#[test]
fn a_client_whose_message_stops_on_the_way_is_cut_off() {
    let job = JobKey::trusting_network("job", 0);
    let (_serving, to) = store(&job, DEADLINE);
    let link = Link::start(to, PIECE_BYTES, 50 * 1024);
    let begin = Instant::now();
    exchange(&link, &job, &vec![7; 100 * 1024]).unwrap_err();
    assert!(begin.elapsed() < PATIENCE / 2, "the store has closed the connection");
    let direct = StoreClient::connect(&to.to_string(), &job, PATIENCE).unwrap();
    assert!(direct.get("long", Duration::ZERO).is_err(), "half a message is none");
}

#[test]
fn ranks_behind_a_slow_link_join() {
    const RANKS: usize = 3;
    let job = JobKey::trusting_network("job", 0);
    let (_serving, to) = store(&job, PATIENCE);
    let link = Link::start(to, 31, usize::MAX);
    let options = WorldOptions { timeout: PATIENCE, join_timeout: PATIENCE, ..WorldOptions::default() };
    let join = |rank: usize| {
        let port = if rank == 0 { to.port() } else { link.address.port() };
        let meeting = Meeting::Launcher { host: "127.0.0.1".into(), port };
        let env = LaunchEnv { trust_network: true, ..LaunchEnv::new(rank, RANKS, meeting, "job") };
        let world = World::join(&env, options.clone()).unwrap();
        let mut x = [1.0_f32];
        world.group().unwrap().all_reduce(&mut x, ReduceOp::Sum).unwrap();
        assert_eq!(x, [RANKS as f32]);
    };
    thread::scope(|s| (0..RANKS).for_each(|rank| drop(s.spawn(move || join(rank)))));
}
