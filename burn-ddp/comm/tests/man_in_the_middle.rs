//! A relay, which does not know the secret, between a rank and the store: it can pass bytes on, but not read them.

mod common;

use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use burn_ddp_comm::{JobKey, LaunchEnv, Meeting, ReduceOp, StoreServer, World};
use common::recording_relay::Relay;
use common::{FreePort, JOB, PATIENCE, SecretFile, options, rank_of};

/// Two ranks meet at the store at `port`, the second through the relay, and run a collective.
fn relayed([first, second]: [LaunchEnv; 2], port: u16, relay: &Relay) {
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
    relay.assert_illegible(&["rank/1", "/verdict", "/arrived", "127.0.0.1"]);
}

#[test]
fn a_relay_reads_nothing() {
    let file = SecretFile::new();
    let rank = |rank, meeting: &Meeting| file.told(rank_of(meeting.clone(), rank, 2));
    let host = "127.0.0.1".to_owned();

    // The launcher's store, reached through the relay.
    let store = StoreServer::bind("127.0.0.1:0", &JobKey::new(&file.secret, JOB, 0)).unwrap();
    let direct = Meeting::Launcher { host: host.clone(), port: store.local_addr().port() };
    let port = store.local_addr().port();
    let relay = Relay::start(None, move || Some(port));
    let relayed_to = Meeting::Launcher { host: host.clone(), port: relay.port };
    relayed([rank(0, &direct), rank(1, &relayed_to)], port, &relay);

    // Rank 0's store, as plain variables say.
    let port = FreePort::reserve();
    let direct = Meeting::Rank0 { host: host.clone(), port: port.port };
    let number = port.port;
    let relay = Relay::start(None, move || Some(number));
    let relayed_to = Meeting::Rank0 { host: host.clone(), port: relay.port };
    relayed([rank(0, &direct), rank(1, &relayed_to)], number, &relay);

    // Rank 0's store on the first free port of many, as torchrun and Slurm say; the relay took one before it.
    let (port, listener) = loop {
        let port = FreePort::reserve();
        if let Ok(listener) = TcpListener::bind(("127.0.0.1", port.port - 1)) {
            break (port, listener);
        }
    };
    let above = Meeting::Rank0Above { host, port: port.port - 2 };
    let number = port.port;
    let relay = Relay::listen(listener, None, move || Some(number));
    relayed([rank(0, &above), rank(1, &above)], number, &relay);
}
