//! What is particular to ranks that talk over TCP.

mod common;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use burn_ddp_comm::{Element, ProcessGroup, ReduceOp, on_threads};
use common::on_tcp;

/// Numbers whose sum depends on the order of the additions.
fn ragged(rank: usize, len: usize) -> Vec<f32> {
    let mut state = (rank as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 40) as f32 / 1e4 - 800.0
    };
    (0..len).map(|_| next().powi(3)).collect()
}

/// The bytes that collectives leave on a rank.
fn results(group: &ProcessGroup, len: usize) -> Vec<u8> {
    fn bytes<T: Element + bytemuck::NoUninit>(values: &[T]) -> Vec<u8> {
        bytemuck::cast_slice(values).to_vec()
    }
    let rank = group.rank();
    let input = ragged(rank, len);
    let mut all = Vec::new();
    for op in [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Product, ReduceOp::Min] {
        let mut x = input.clone();
        group.all_reduce(&mut x, op).unwrap();
        all.extend(bytes(&x));
    }
    let mut halves: Vec<half::bf16> = input.iter().map(|x| half::bf16::from_f32(*x)).collect();
    group.all_reduce(&mut halves, ReduceOp::Mean).unwrap();
    all.extend(bytes(&halves));
    let mut weighted = input.clone();
    group.all_reduce_weighted(&mut weighted, rank as f64 + 0.1).unwrap();
    all.extend(bytes(&weighted));
    let wide: Vec<f32> = (0..group.world_size()).flat_map(|_| input.iter().copied()).collect();
    let mut row = vec![0.0_f32; len];
    group.reduce_scatter(&wide, &mut row, ReduceOp::Sum).unwrap();
    all.extend(bytes(&row));
    all.extend(bytes(&group.all_gather(&input).unwrap()));
    all
}

#[test]
fn the_bits_are_those_of_ranks_in_one_process() {
    for n in [2, 3, 5] {
        for len in [1, 1000, 100_003] {
            let over_tcp = on_tcp(n, |world| results(&world.group().unwrap(), len));
            let in_process = on_threads(n, |world| results(&world.group().unwrap(), len));
            assert!(over_tcp == in_process, "{n} ranks, {len} elements");
        }
    }
}

/// The addresses this process listens on, all tests' together.
#[cfg(target_os = "linux")]
fn listening() -> Vec<SocketAddr> {
    let mine: Vec<String> = std::fs::read_dir("/proc/self/fd")
        .unwrap()
        .filter_map(|fd| Some(std::fs::read_link(fd.ok()?.path()).ok()?.to_string_lossy().into_owned()))
        .collect();
    let table = std::fs::read_to_string("/proc/self/net/tcp").unwrap();
    let listeners = table.lines().skip(1).map(|line| line.split_whitespace().collect::<Vec<_>>()).filter(|columns| {
        const LISTEN: &str = "0A";
        columns[3] == LISTEN && mine.contains(&format!("socket:[{}]", columns[9]))
    });
    listeners
        .map(|columns| {
            let (_, port) = columns[1].split_once(':').unwrap();
            SocketAddr::from(([127, 0, 0, 1], u16::from_str_radix(port, 16).unwrap()))
        })
        .collect()
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
            let listening = listening();
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
            // What is wrong is turned away at once, what is not complete is waited for, for a while.
            stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
            let end = stream.read(&mut [0; 1]);
            assert!(
                matches!(&end, Ok(0)) || end.as_ref().is_err_and(|e| e.kind() == std::io::ErrorKind::ConnectionReset),
                "{end:?}"
            );
        }
        world.check().unwrap();
        group.barrier().unwrap();
    });
    assert_eq!(done.len(), 3);
}

#[test]
#[cfg(target_os = "linux")]
fn waiting_costs_no_processor_time() {
    /// Hundredths of a second that this thread has used.
    fn ticks() -> u64 {
        let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
        let (_, after_name) = stat.rsplit_once(')').unwrap();
        let fields: Vec<&str> = after_name.split_whitespace().collect();
        fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
    }
    on_tcp(2, |world| {
        let group = world.group().unwrap();
        if world.rank() == 1 {
            std::thread::sleep(Duration::from_millis(500));
            return group.barrier().unwrap();
        }
        let (begin, used) = (Instant::now(), ticks());
        group.barrier().unwrap();
        assert!(begin.elapsed() > Duration::from_millis(300), "{:?}", begin.elapsed());
        let used = ticks() - used;
        assert!(used <= 5, "{used} hundredths of a second of processor time to wait half a second");
    });
}

#[test]
fn groups_made_while_others_are_busy_do_not_wait() {
    on_tcp(2, |world| {
        let first = world.group().unwrap();
        std::thread::scope(|s| {
            // A collective that waits for the end of what follows.
            let pending = (world.rank() == 0).then(|| s.spawn(|| first.barrier()));
            for _ in 0..20 {
                world.group().unwrap().barrier().unwrap();
            }
            match pending {
                Some(pending) => pending.join().unwrap().unwrap(),
                None => first.barrier().unwrap(),
            }
        });
    });
}
