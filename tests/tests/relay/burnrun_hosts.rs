//! Two ranks of `burnrun --hostfile` on two hosts. A script stands in for ssh; on the second host it puts a relay
//! between burnrun and the burnrun of the first host, and the program puts one between the rank and its store.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Output};
use std::thread;

use burn_ddp_tests::job::{FreePort, rank_program, stderr, stdout};

use super::recording_relay::{Relay, Side};
use super::{FLIPS, RANK, SOON, hash_without_relay};

/// Called with ssh's arguments: options, the host, the command. On the host b, replaces the port of the launchers'
/// meeting in the order that comes from stdin.
const SSH: &str = r#"#!/bin/sh
while :; do case $1 in -o) shift 2 ;; -*) shift ;; *) break ;; esac; done
host=$1 command=$2
if [ "$host" = b ]; then
    exec 3<&0
    mkfifo "$0.order"
    sed -u 's/"--master-port","[0-9]*"/"--master-port","'"$LAUNCHERS_RELAY"'"/' <&3 >"$0.order" 2>/dev/null &
    exec <"$0.order" 3<&-
fi
BURN_DDP_MACHINE=$host exec sh -c "exec $command"
"#;

/// The program of each rank: on the host b, the rank meets the other one through the relay.
const PROGRAM: &str = r#"
if [ "$BURN_DDP_MACHINE" = b ]; then
    echo "${BURN_DDP_MASTER##*:}" >"$PLACE/port.new"
    mv "$PLACE/port.new" "$PLACE/port"
    export BURN_DDP_MASTER="127.0.0.1:$RANKS_RELAY" MASTER_PORT="$RANKS_RELAY"
fi
exec "$@"
"#;

/// Meeting with a relay in the middle.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Between {
    Launchers,
    Ranks,
}

/// Runs `rank ARGS` as two ranks with relays in both meetings, one of which flips a bit, if any. Returns the relays of
/// the launchers' meeting and of the ranks' meeting.
fn run(flip: Option<(Between, Side, usize)>, join_timeout: &str, args: &[&str]) -> ([Relay; 2], Output) {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    fs::write(path("ssh"), SSH).unwrap();
    fs::set_permissions(path("ssh"), PermissionsExt::from_mode(0o755)).unwrap();
    fs::write(path("hosts"), "a\nb\n").unwrap();
    let port = FreePort::reserve();
    let flip = |at| flip.filter(|(between, ..)| *between == at).map(|(_, side, place)| (side, place));
    let (launchers_port, ranks_port) = (port.port, path("port"));
    let relays = [
        Relay::start(flip(Between::Launchers), move || Some(launchers_port)),
        Relay::start(flip(Between::Ranks), move || fs::read_to_string(&ranks_port).ok()?.trim().parse().ok()),
    ];
    let burnrun = PathBuf::from(RANK).with_file_name("burnrun");
    assert!(burnrun.exists(), "build it with `cargo build --bins`");
    let mut command = Command::new(&burnrun);
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("BURN")) {
        command.env_remove(name);
    }
    command
        .arg("--hostfile")
        .arg(path("hosts"))
        .arg("--ssh")
        .arg(path("ssh"))
        .arg("--remote-burnrun")
        .arg(&burnrun)
        .args(["--master-addr", "127.0.0.1", "--master-port", &port.port.to_string()])
        .args(["--join-timeout", join_timeout, "--grace", "0.3"])
        .args(["-x", &format!("BURN_DDP_JOIN_TIMEOUT={join_timeout}")])
        .args(["-x", "RUST_BACKTRACE=0", "-x", &format!("PLACE={}", directory.path().display())])
        .args(["-x", &format!("RANKS_RELAY={}", relays[1].port)])
        .args(["sh", "-c", PROGRAM, "sh", &rank_program(RANK)])
        .args(args)
        .env("LAUNCHERS_RELAY", relays[0].port.to_string());
    (relays, command.output().unwrap())
}

#[test]
fn a_relay_under_burnrun_hostfile_reads_nothing_and_the_job_trains() {
    let ([launchers, ranks], output) = run(None, "60", &["train", "sgd"]);
    assert!(output.status.success(), "{}", stderr(&output));
    let (printed, expected) = (stdout(&output), hash_without_relay());
    assert_eq!(printed.matches(&format!("hash {expected}")).count(), 2, "{printed}");
    launchers.assert_illegible(&["/plan", "/verdict", "127.0.0.1"]);
    ranks.assert_illegible(&["rank/1", "/verdict", "/arrived", "127.0.0.1"]);
}

#[test]
fn a_flipped_bit_under_burnrun_hostfile_ends_the_job_with_its_reason() {
    for between in [Between::Launchers, Between::Ranks] {
        thread::scope(|s| {
            for (side, at, reason) in FLIPS {
                s.spawn(move || {
                    let (relays, output) = run(Some((between, side, at)), SOON, &["hello"]);
                    let case = format!("{between:?}, {side:?}, byte {at}");
                    assert!(relays[between as usize].flipped() > 0, "{case}: the connection ended before this byte");
                    let (printed, error) = (stdout(&output), stderr(&output));
                    assert!(!output.status.success() && !printed.contains("engine"), "{case}: {printed}");
                    assert!(error.contains(reason), "{case}: {error}");
                });
            }
        });
    }
}
