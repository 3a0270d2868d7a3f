//! Connections of strangers to a job's ports: the strangers lose their connection, and the job loses nothing.

mod common;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use burn_ddp_comm::{JobKey, ReduceOp, Store, StoreClient, StoreServer};
use common::{JOB, launcher_store as server, on_tcp};

const SOON: Duration = Duration::from_secs(20);

fn client(server: &StoreServer) -> StoreClient {
    StoreClient::connect(&server.local_addr().to_string(), &JobKey::trusting_network(JOB, 0), SOON).unwrap()
}

/// Sends `bytes` to the server and waits until it closes the connection. Returns the time that this took.
fn closed_after(address: SocketAddr, bytes: &[u8]) -> Duration {
    let begin = Instant::now();
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(SOON)).unwrap();
    let _ = stream.write_all(bytes);
    let mut sink = Vec::new();
    if let Err(e) = stream.read_to_end(&mut sink) {
        assert_eq!(e.kind(), std::io::ErrorKind::ConnectionReset, "the server must close the connection: {e}");
    }
    begin.elapsed()
}

#[test]
fn strangers_lose_their_connection_and_nobody_else_notices() {
    let server = server();
    let address = server.local_addr();
    let store = client(&server);
    let at_once = Duration::from_secs(4);
    thread::scope(|s| {
        s.spawn(|| assert!(closed_after(address, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n") < at_once));
        s.spawn(|| assert!(closed_after(address, &[0xff; 100]) < at_once, "a huge length"));
        s.spawn(|| {
            assert!(closed_after(address, &[8, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8]) < at_once, "a message of junk")
        });
        s.spawn(|| assert!(closed_after(address, &[0; 4000]) < at_once, "empty messages"));
        // The server waits for the rest of an incomplete proof, but not for ever.
        s.spawn(|| assert!(closed_after(address, b"burn-ddp") > Duration::from_secs(4)));
        s.spawn(|| assert!(closed_after(address, &[]) > Duration::from_secs(4)));
        let until = Instant::now() + Duration::from_secs(1);
        let mut served = 0;
        while Instant::now() < until {
            store.set("k", b"v").unwrap();
            served += 1;
        }
        assert!(served > 100, "{served} requests in a second beside the strangers");
    });
}

#[test]
fn more_strangers_than_places_do_not_keep_a_client_out() {
    let server = server();
    let strangers: Vec<_> = (0..300).map(|_| TcpStream::connect(server.local_addr()).unwrap()).collect();
    let begin = Instant::now();
    client(&server).set("k", b"v").unwrap();
    assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
    drop(strangers);
}

#[test]
#[cfg(target_os = "linux")]
fn strangers_cost_the_job_nothing() {
    const JUNK: [&[u8]; 5] =
        [b"", &[7, 0], b"GET / HTTP/1.1\r\n\r\n", &[0xff; 64], b"\x20\x00\x00\x00burn-ddp and then some more bytes!!!"];
    let done = on_tcp(3, |world| {
        let group = world.group().unwrap();
        let mut open = Vec::new();
        if world.rank() == 0 {
            let listening = common::listening();
            assert!(listening.len() >= 3, "each rank listens: {listening:?}");
            for (address, junk) in listening.iter().flat_map(|address| JUNK.iter().map(move |junk| (address, junk))) {
                // Another test's listener may be gone by now.
                if let Ok(mut stream) = TcpStream::connect(address) {
                    let _ = stream.write_all(junk);
                    open.push(stream);
                }
            }
        }
        for step in 0..200 {
            let mut x = [step + world.rank() as i64];
            group.all_reduce(&mut x, ReduceOp::Sum).unwrap();
            assert_eq!(x, [3 * step + 3]);
        }
        // Making a group needs the listener.
        world.group().unwrap().barrier().unwrap();
        for mut stream in open {
            // Wrong bytes are refused at once; for incomplete ones the rank waits for a while.
            stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
            let end = stream.read_to_end(&mut Vec::new());
            assert!(
                end.is_ok() || end.as_ref().is_err_and(|e| e.kind() == std::io::ErrorKind::ConnectionReset),
                "{end:?}"
            );
        }
        world.check().unwrap();
        group.barrier().unwrap();
    });
    assert_eq!(done.len(), 3);
}
