//! A relay, which does not know the secret, between a rank and the store: it can pass bytes on, but not read them.

mod common;

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use burn_ddp_comm::{JobKey, LaunchEnv, Meeting, ReduceOp, StoreServer, World};
use common::{FreePort, JOB, PATIENCE, SecretFile, options, rank_of};

/// Relays connections from `listener` to `port`. Returns all bytes that both sides send, as they come.
fn relay(listener: TcpListener, port: u16) -> Arc<Mutex<Vec<u8>>> {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let all = seen.clone();
    thread::spawn(move || {
        while let Ok((client, _)) = listener.accept() {
            let Ok(server) = TcpStream::connect(("127.0.0.1", port)) else { continue };
            for (from, to) in [(&client, &server), (&server, &client)] {
                let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                let all = all.clone();
                thread::spawn(move || {
                    let mut some = [0; 4096];
                    while let Ok(n @ 1..) = from.read(&mut some) {
                        all.lock().unwrap().extend_from_slice(&some[..n]);
                        if to.write_all(&some[..n]).is_err() {
                            break;
                        }
                    }
                    let _ = to.shutdown(Shutdown::Write);
                });
            }
        }
    });
    seen
}

/// Two ranks meet at the store at `port`, the second through the relay, and run a collective.
fn relayed([first, second]: [LaunchEnv; 2], port: u16, seen: &Mutex<Vec<u8>>) {
    let [first, second] = &thread::scope(|s| {
        let first = s.spawn(|| World::join(&first, options()));
        // If the relay could not reach the store yet, the second rank would try the next port.
        let begin = Instant::now();
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            assert!(begin.elapsed() < PATIENCE, "no store at port {port}");
            thread::sleep(Duration::from_millis(1));
        }
        let second = World::join(&second, options());
        [first.join().unwrap(), second]
    });
    thread::scope(|s| {
        for world in [first, second] {
            s.spawn(move || {
                let mut x = [1.0_f32];
                world.as_ref().unwrap().group().unwrap().all_reduce(&mut x, ReduceOp::Sum).unwrap();
                assert_eq!(x, [2.0]);
            });
        }
    });
    let seen = seen.lock().unwrap();
    assert!(seen.len() > 1000, "{} bytes came past the relay", seen.len());
    // Texts long enough not to occur in ciphertext by chance.
    for text in ["rank/1", "/verdict", "/arrived", "127.0.0.1"] {
        let legible = seen.windows(text.len()).any(|bytes| bytes == text.as_bytes());
        assert!(!legible, "the relay read {text:?}");
    }
}

#[test]
fn a_relay_reads_nothing() {
    let file = SecretFile::new();
    let rank = |rank, meeting: &Meeting| file.told(rank_of(meeting.clone(), rank, 2));
    let host = "127.0.0.1".to_owned();
    let fresh = || TcpListener::bind("127.0.0.1:0").unwrap();

    // The launcher's store, reached through the relay.
    let store = StoreServer::bind("127.0.0.1:0", &JobKey::new(&file.secret, JOB, 0)).unwrap();
    let direct = Meeting::Launcher { host: host.clone(), port: store.local_addr().port() };
    let listener = fresh();
    let relayed_to = Meeting::Launcher { host: host.clone(), port: listener.local_addr().unwrap().port() };
    let seen = relay(listener, store.local_addr().port());
    relayed([rank(0, &direct), rank(1, &relayed_to)], store.local_addr().port(), &seen);

    // Rank 0's store, as plain variables say.
    let port = FreePort::reserve();
    let direct = Meeting::Rank0 { host: host.clone(), port: port.port };
    let listener = fresh();
    let relayed_to = Meeting::Rank0 { host: host.clone(), port: listener.local_addr().unwrap().port() };
    let seen = relay(listener, port.port);
    relayed([rank(0, &direct), rank(1, &relayed_to)], port.port, &seen);

    // Rank 0's store on the first free port of many, as torchrun and Slurm say; the relay took one before it.
    let (port, listener) = loop {
        let port = FreePort::reserve();
        if let Ok(listener) = TcpListener::bind(("127.0.0.1", port.port - 1)) {
            break (port, listener);
        }
    };
    let above = Meeting::Rank0Above { host, port: port.port - 2 };
    let seen = relay(listener, port.port);
    relayed([rank(0, &above), rank(1, &above)], port.port, &seen);
}
