//! The contract of stores, in memory and over TCP.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use burn_ddp_comm::{Error, JobKey, MemoryStore, Secret, Store, StoreClient, StoreServer};

const SOON: Duration = Duration::from_secs(20);

fn job(name: &str) -> JobKey {
    JobKey::trusting_network(name, 0)
}

fn server() -> StoreServer {
    StoreServer::bind("127.0.0.1:0", &job("job")).unwrap()
}

fn client(server: &StoreServer) -> StoreClient {
    StoreClient::connect(&server.local_addr().to_string(), &job("job"), SOON).unwrap()
}

/// Runs `test` on each kind of store.
fn on_each(test: impl Fn(&dyn Store)) {
    test(&MemoryStore::new());
    test(&client(&server()));
}

#[test]
fn what_was_set_is_got() {
    on_each(|store| {
        store.set("k", b"one").unwrap();
        store.set("k", b"two").unwrap();
        store.set("", b"").unwrap();
        assert_eq!(store.get("k", Duration::ZERO).unwrap(), b"two");
        assert_eq!(store.get("", SOON).unwrap(), b"");
        assert_eq!(store.keys("").unwrap(), ["", "k"]);
        assert_eq!(store.keys("k").unwrap(), ["k"]);
    });
}

#[test]
fn any_timeout_will_do() {
    on_each(|store| {
        store.set("k", b"v").unwrap();
        assert_eq!(store.get("k", Duration::MAX).unwrap(), b"v");
        thread::scope(|s| {
            let getter = s.spawn(|| store.get("late", Duration::MAX));
            store.set("late", b"here").unwrap();
            assert_eq!(getter.join().unwrap().unwrap(), b"here");
        });
    });
}

#[test]
fn get_waits_for_the_key_and_not_for_another() {
    on_each(|store| {
        thread::scope(|s| {
            let getter = s.spawn(|| store.get("late", SOON));
            store.set("other", b"x").unwrap();
            store.set("late", b"here").unwrap();
            assert_eq!(getter.join().unwrap().unwrap(), b"here");
        });
    });
}

#[test]
fn get_gives_up_at_its_deadline_and_the_store_stays_usable() {
    on_each(|store| {
        let begin = Instant::now();
        let error = store.get("never", Duration::from_millis(80)).unwrap_err();
        assert!(begin.elapsed() >= Duration::from_millis(80), "{:?}", begin.elapsed());
        assert!(matches!(&error, Error::StoreTimeout { key, .. } if key == "never"), "{error:?}");
        store.set("k", b"v").unwrap();
        assert_eq!(store.get("k", SOON).unwrap(), b"v");
    });
}

#[test]
fn one_of_many_is_first() {
    on_each(|store| {
        let first = AtomicUsize::new(0);
        thread::scope(|s| {
            for i in 0..8_u8 {
                let first = &first;
                s.spawn(move || match store.set_new("leader", &[i]).unwrap() {
                    None => drop(first.fetch_add(1, Ordering::Relaxed)),
                    Some(leader) => assert_eq!(leader, store.get("leader", SOON).unwrap()),
                });
            }
        });
        assert_eq!(first.into_inner(), 1);
    });
}

#[test]
fn additions_are_not_lost() {
    on_each(|store| {
        thread::scope(|s| {
            for _ in 0..8 {
                s.spawn(|| {
                    for _ in 0..50 {
                        store.add("n", 2).unwrap();
                    }
                });
            }
        });
        assert_eq!(store.add("n", -1).unwrap(), 799);
        assert_eq!(store.get("n", SOON).unwrap(), b"799");
    });
}

#[test]
fn limits_are_told_and_harm_nothing() {
    on_each(|store| {
        let refused = |error: Error, part: &str| {
            assert!(matches!(error, Error::Store { .. }) && error.to_string().contains(part), "{error}");
        };
        let long_key = "k".repeat(1025);
        refused(store.set(&long_key, b"").unwrap_err(), "1025");
        refused(store.get(&long_key, SOON).unwrap_err(), "1025");
        refused(store.keys(&long_key).unwrap_err(), "1025");
        refused(store.set("k", &vec![0; (1 << 20) + 1]).unwrap_err(), "1048577");
        let largest = vec![7; 1 << 20];
        store.set(&"k".repeat(1024), &largest).unwrap();
        assert_eq!(store.get(&"k".repeat(1024), SOON).unwrap(), largest);
        store.set("text", b"x").unwrap();
        refused(store.add("text", 1).unwrap_err(), "number");
    });
}

#[test]
fn clients_share_one_store() {
    let server = server();
    let (a, b) = (client(&server), client(&server));
    a.set("k", b"from a").unwrap();
    assert_eq!(b.get("k", SOON).unwrap(), b"from a");
}

#[test]
fn a_server_that_is_gone_is_named() {
    let server = server();
    let store = client(&server);
    let address = server.local_addr().to_string();
    thread::scope(|s| {
        let getter = s.spawn(|| store.get("never", SOON));
        let begin = Instant::now();
        drop(server);
        let error = getter.join().unwrap().unwrap_err();
        assert!(matches!(error, Error::Store { .. }), "{error:?}");
        assert!(error.to_string().contains(&address), "{error}");
        assert!(begin.elapsed() < Duration::from_secs(5));
    });
}

#[test]
fn nobody_there_is_told_with_address_time_and_cause() {
    // Bound, but not listened on: nobody else is given the port.
    let held = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    held.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
    let address = held.local_addr().unwrap().as_socket().unwrap().to_string();
    let error = StoreClient::connect(&address, &job("job"), Duration::from_millis(300)).unwrap_err().to_string();
    assert!(error.contains("0.3 s") && error.contains(&address) && error.contains("refused"), "{error}");
    assert!(StoreClient::connect("no port", &job("job"), SOON).is_err());
}

#[test]
fn clients_of_another_job_secret_or_generation_are_refused() {
    let secret = Secret::generate().unwrap();
    let server = StoreServer::bind("127.0.0.1:0", &JobKey::new(&secret, "mine", 1)).unwrap();
    let address = server.local_addr().to_string();
    StoreClient::connect(&address, &JobKey::new(&secret, "mine", 1), SOON).unwrap();
    for (stranger, cause) in [
        (JobKey::new(&secret, "theirs", 1), "another job"),
        (JobKey::new(&secret, "mine", 0), "another job"),
        (JobKey::new(&Secret::generate().unwrap(), "mine", 1), "another secret"),
        (JobKey::trusting_network("mine", 1), "another secret"),
    ] {
        let begin = Instant::now();
        let error = StoreClient::connect(&address, &stranger, SOON).unwrap_err().to_string();
        assert!(error.contains(cause) && error.contains(&format!("{:?}", stranger.name())), "{error}");
        assert!(begin.elapsed() < Duration::from_secs(5), "a refusal is final, no use trying again");
    }
}

#[test]
fn a_wrong_secret_is_named_by_its_file() {
    let server = StoreServer::bind("127.0.0.1:0", &JobKey::new(&Secret::generate().unwrap(), "mine", 0)).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("wrong.secret");
    Secret::generate().unwrap().write_new(&file).unwrap();
    let wrong = Secret::read(&file);
    let key = JobKey::new(&wrong.unwrap(), "mine", 0);
    let error = StoreClient::connect(&server.local_addr().to_string(), &key, SOON).unwrap_err().to_string();
    assert!(error.ends_with(&format!("this process has the secret of {}", file.display())), "{error}");
}

#[test]
fn one_server_can_serve_generation_after_generation() {
    let secret = Secret::generate().unwrap();
    let [old, new] = [0, 1].map(|restart| JobKey::new(&secret, "job", restart));
    let server = StoreServer::bind("127.0.0.1:0", &old).unwrap();
    let address = server.local_addr().to_string();
    let before = StoreClient::connect(&address, &old, SOON).unwrap();
    before.set("k", b"old").unwrap();
    assert!(StoreClient::connect(&address, &new, SOON).is_err());
    thread::scope(|s| {
        let waiting = s.spawn(|| before.get("never", SOON));
        server.admit(&new);
        let after = StoreClient::connect(&address, &new, SOON).unwrap();
        server.expel(&old);
        let begin = Instant::now();
        assert!(matches!(waiting.join().unwrap(), Err(Error::Store { .. })), "who waits is told");
        assert!(begin.elapsed() < Duration::from_secs(5));
        assert!(before.set("k", b"late").is_err());
        assert_eq!(after.get("k", SOON).unwrap(), b"old");
    });
}

#[test]
fn a_host_forgets_what_is_old() {
    let server = server();
    let store = client(&server);
    for key in ["0/plan", "0/verdict", "1/plan"] {
        store.set(key, b"").unwrap();
    }
    server.forget("0/");
    let begin = Instant::now();
    while store.keys("").unwrap() != ["1/plan"] {
        assert!(begin.elapsed() < Duration::from_secs(60), "{:?}", store.keys(""));
    }
}

#[test]
fn a_thousand_ranks_meet_in_one_store() {
    const RANKS: usize = 1000;
    let server = server();
    let begin = Instant::now();
    thread::scope(|s| {
        let rank = |rank: usize| {
            let server = &server;
            thread::Builder::new().stack_size(128 * 1024).spawn_scoped(s, move || {
                let store = client(server);
                store.set_new(&format!("rank/{rank}"), &[0; 200]).unwrap();
                if store.add("arrived", 1).unwrap() == RANKS as i64 {
                    assert_eq!(store.keys("rank/").unwrap().len(), RANKS);
                    store.set("verdict", &vec![7; 200 * RANKS]).unwrap();
                }
                assert_eq!(store.get("verdict", 3 * SOON).unwrap().len(), 200 * RANKS);
            })
        };
        let ranks: Vec<_> = (0..RANKS).map(|nth| rank(nth).unwrap()).collect();
        for rank in ranks {
            rank.join().unwrap();
        }
    });
    println!("{RANKS} ranks met within {:.2} s", begin.elapsed().as_secs_f64());
    assert!(begin.elapsed() < 2 * SOON, "{:?}", begin.elapsed());
}

#[test]
fn a_port_in_use_is_named() {
    let server = server();
    let error = StoreServer::bind(server.local_addr(), &job("job")).unwrap_err();
    assert!(matches!(error, Error::Environment { .. }), "{error:?}");
    assert!(error.to_string().contains(&server.local_addr().port().to_string()), "{error}");
}
