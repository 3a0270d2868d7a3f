//! Bytes that machines send each other in collectives, as the kernel counts them.
#![cfg(target_os = "linux")]

mod common;

use std::process::Command;
use std::sync::Barrier;

use burn_ddp_comm::{DType, LaunchEnv, ProcessGroup, ReduceOp, WorldOptions};
use common::{Process, ROLE, join_all, launcher_store, on_world, options, rank_at, say};

const TEST: &str = "machines_send_what_the_schedule_says";
const BYTES: usize = 4 << 20;
const CALLS: usize = 3;

/// Bytes that the connections of this network namespace have delivered, without headers of packets and without what was
/// sent again. Ranks of one machine use shared memory.
fn delivered() -> u64 {
    let sockets = Command::new("ss").args(["-tinH", "state", "established"]).output().expect("ss, of iproute2");
    assert!(sockets.status.success(), "ss: {}", String::from_utf8_lossy(&sockets.stderr));
    let text = String::from_utf8(sockets.stdout).unwrap();
    let counts = text.split_whitespace().filter_map(|word| word.strip_prefix("bytes_received:"));
    counts.map(|count| count.parse::<u64>().unwrap()).sum()
}

/// Bytes that all machines together send per call ÷ [`BYTES`], for ranks on the machines `ranks`.
fn sent(ranks: &[usize], call: impl Fn(&ProcessGroup, &mut [u8]) + Sync) -> f64 {
    let store = launcher_store();
    let at = |(rank, machine): (usize, &usize)| LaunchEnv {
        machine: Some(machine.to_string()),
        ..rank_at(&store, rank, ranks.len())
    };
    let options = WorldOptions { engine: None, ..options() };
    let worlds = join_all(ranks.iter().enumerate().map(at).collect(), &options);
    let (worlds, all_here) = (worlds.into_iter().map(|world| world.unwrap()).collect(), Barrier::new(ranks.len()));
    let counts = on_world(worlds, |world| {
        let group = world.group().unwrap();
        assert_eq!(group.engine(), "shm+tcp");
        let mut buf = vec![0; BYTES];
        // The first call opens the connections.
        call(&group, &mut buf);
        let count = || {
            all_here.wait();
            let count = (group.rank() == 0).then(delivered);
            all_here.wait();
            count
        };
        let before = count();
        (0..CALLS).for_each(|_| call(&group, &mut buf));
        Some(count()? - before?)
    });
    counts[0].expect("rank 0 counts") as f64 / (CALLS * BYTES) as f64
}

#[test]
#[ignore = "needs `unshare`, `ip`, `ss`, and the right to make network namespaces"]
fn machines_send_what_the_schedule_says() {
    if std::env::var_os(ROLE).is_none() {
        let mut command = Command::new("unshare");
        command.args(["--user", "--map-root-user", "--net", "sh", "-c", "ip link set lo up && exec \"$@\"", "sh"]);
        command.arg(std::env::current_exe().unwrap()).env(ROLE, "alone");
        let mut alone = Process::start_plain(command, TEST);
        assert_eq!(alone.hear(), "done");
        assert!(alone.end().success());
        return;
    }
    let blocks = |ranks: &[usize]| -> Vec<usize> {
        ranks.iter().enumerate().flat_map(|(machine, ranks)| vec![machine; *ranks]).collect()
    };
    let all_reduced = [
        ("2 x 4", blocks(&[4, 4]), DType::F32, 2.0),
        ("2 x 4, f16", blocks(&[4, 4]), DType::F16, 3.0),
        ("2 x 4, bf16", blocks(&[4, 4]), DType::BF16, 3.0),
        ("2 x 4 in turn", vec![0, 1, 0, 1, 0, 1, 0, 1], DType::F32, 5.0),
        ("4 x 4", blocks(&[4; 4]), DType::F32, 6.0),
        ("3 x 3", blocks(&[3; 3]), DType::F32, 6.0),
        ("2 x 3", blocks(&[3, 3]), DType::F32, 3.0),
        ("1 + 5", blocks(&[1, 5]), DType::F32, 2.0),
    ];
    // Beside the elements there are headers of frames, and heartbeats.
    let check = |what: &str, sent: f64, expected: f64| {
        println!("{what}: {sent:.4} times the buffer, by the schedule {expected}");
        let right = (expected..1.02 * expected).contains(&sent);
        assert!(right, "{what}: the machines sent {sent} times the buffer, by the schedule {expected}");
    };
    for (name, ranks, dtype, expected) in all_reduced {
        let sent = sent(&ranks, |group, buf| group.all_reduce_bytes(dtype, buf, ReduceOp::Sum, 0).unwrap());
        check(&format!("all_reduce, {name}"), sent, expected);
    }
    for machines in [2, 4] {
        let ranks = blocks(&vec![4; machines]);
        let sent = sent(&ranks, |group, buf| group.broadcast_bytes(DType::F32, buf, 1).unwrap());
        check(&format!("broadcast, {machines} x 4"), sent, (machines - 1) as f64);
    }
    say("done");
}
