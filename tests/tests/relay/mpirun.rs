//! Two ranks of MPICH's mpirun on two machines, which learn the store's address from the process manager. Here the
//! process manager gives rank 1 the relay's address instead.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::Output;
use std::sync::{Arc, Barrier, Mutex};
use std::thread;

use burn_ddp_tests::job::{self, line, rank_program, stderr, stdout};

use super::recording_relay::{Relay, Side};
use super::{FLIPS, RANK, SOON, hash_without_relay};

/// Key under which rank 0 publishes the store's address.
const ADDRESS: &str = "burn-ddp";

/// Hydra, MPICH's process manager, as far as ranks talk to it: PMI version 1.
struct Hydra {
    values: Mutex<HashMap<String, String>>,
    barrier: Barrier,
}

impl Hydra {
    /// Port of the store that rank 0 hosts, once it is published.
    fn store_port(&self) -> Option<u16> {
        let values = self.values.lock().unwrap();
        values.get(ADDRESS)?.rsplit(':').next()?.parse().ok()
    }

    /// Serves a rank until it closes the connection. The rank gets the address of `relay`, if any, as the store's.
    fn serve(&self, socket: UnixStream, relay: Option<u16>) {
        let lines = BufReader::new(socket.try_clone().unwrap()).lines();
        for line in lines.map_while(Result::ok) {
            let words: HashMap<&str, &str> = line.split(' ').filter_map(|word| word.split_once('=')).collect();
            let answer = match words["cmd"] {
                "init" => "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0".to_owned(),
                "get_my_kvsname" => "cmd=my_kvsname kvsname=kvs_1_0".to_owned(),
                "put" => {
                    self.values.lock().unwrap().insert(words["key"].to_owned(), words["value"].to_owned());
                    "cmd=put_result rc=0 msg=success".to_owned()
                }
                "get" => {
                    let value = self.values.lock().unwrap()[words["key"]].clone();
                    let value = match (relay, value.rsplit_once(':')) {
                        (Some(relay), Some((host, _))) if words["key"] == ADDRESS => format!("{host}:{relay}"),
                        _ => value,
                    };
                    format!("cmd=get_result rc=0 msg=success value={value}")
                }
                "barrier_in" => {
                    self.barrier.wait();
                    "cmd=barrier_out".to_owned()
                }
                "finalize" => "cmd=finalize_ack".to_owned(),
                other => panic!("unknown command {other}"),
            };
            if (&socket).write_all(format!("{answer}\n").as_bytes()).is_err() {
                return;
            }
        }
    }
}

/// Runs `rank ARGS` as two ranks with a relay between rank 1 and the store of rank 0.
fn run(flip: Option<(Side, usize)>, join_timeout: &str, args: &[&str]) -> (Relay, Vec<Output>) {
    let hydra = Arc::new(Hydra { values: Mutex::default(), barrier: Barrier::new(2) });
    let store = hydra.clone();
    let relay = Relay::start(flip, move || store.store_port());
    let ranks = (0..2).map(|rank| {
        let (socket, theirs) = UnixStream::pair().unwrap();
        let (hydra, to) = (hydra.clone(), (rank == 1).then_some(relay.port));
        thread::spawn(move || hydra.serve(socket, to));
        let mut command = job::rank(&rank_program(RANK), rank, 2, 0, args);
        for name in ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"] {
            command.env_remove(name);
        }
        command
            .stdin(OwnedFd::from(theirs))
            .env("PMI_FD", "0")
            .env("PMI_RANK", rank.to_string())
            .env("PMI_SIZE", "2")
            .env("MPI_LOCALRANKID", "0")
            .env("MPI_LOCALNRANKS", "1")
            // Loopback itself is refused: ranks of other machines would not reach it.
            .env("MPIR_CVAR_CH3_INTERFACE_HOSTNAME", "0.0.0.0")
            .env("BURN_DDP_MACHINE", rank.to_string())
            .env("BURN_DDP_JOIN_TIMEOUT", join_timeout);
        command
    });
    let ranks = job::finish(ranks.collect());
    (relay, ranks)
}

#[test]
fn a_relay_under_mpirun_reads_nothing_and_the_job_trains() {
    let (relay, ranks) = run(None, "60", &["train", "sgd"]);
    let expected = hash_without_relay();
    for rank in &ranks {
        assert!(rank.status.success(), "{}", stderr(rank));
        assert_eq!(line(&stdout(rank), "hash "), expected);
    }
    relay.assert_illegible(&["rank/1", "/verdict", "/arrived", "0.0.0.0", "127.0.0.1"]);
}

#[test]
fn a_flipped_bit_under_mpirun_ends_the_job_with_its_reason() {
    thread::scope(|s| {
        for flip in FLIPS {
            s.spawn(move || {
                let (side, at, reason) = flip;
                let (relay, ranks) = run(Some((side, at)), SOON, &["hello"]);
                assert!(relay.flipped() > 0, "{flip:?}: the connection ended before this byte");
                let errors: Vec<_> = ranks.iter().map(stderr).collect();
                assert!(ranks.iter().all(|rank| !rank.status.success()), "{flip:?}: {errors:?}");
                assert!(errors[0].contains("for all 2 ranks to come"), "{flip:?}: {errors:?}");
                assert!(errors[1].contains(reason), "{flip:?}: {errors:?}");
            });
        }
    });
}
