//! What comparing calls and remembering them costs, next to a small all-reduce. Run it alone, on a machine with nothing else to do:
//! `cargo test -p burn-ddp-comm --lib -- --ignored --nocapture cost`

use std::hint::black_box;
use std::panic::Location;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use crate::call::{Call, CallInfo, Collective, Members};
use crate::clock::Ticks;
use crate::engine::{Engine, Incoming, Outgoing};
use crate::frame::{PREFIX_BYTES, Prefix};
use crate::history::History;
use crate::{DType, JobKey, LaunchEnv, Meeting, ReduceOp, Result, StoreServer, World, WorldOptions};

const LEN: usize = 1024;

/// Seconds per round of `f`: the best of several runs, since everything else only adds.
fn best(rounds: u32, mut f: impl FnMut()) -> f64 {
    let run = |_| {
        let begin = Instant::now();
        (0..rounds).for_each(|_| f());
        begin.elapsed().as_secs_f64() / f64::from(rounds)
    };
    (0..15).map(run).fold(f64::INFINITY, f64::min)
}

/// Seconds per all-reduce of 4 KiB between the two ranks of `worlds`.
fn all_reduce(worlds: Vec<World>) -> f64 {
    let ranks: Vec<_> = worlds
        .into_iter()
        .map(|world| {
            thread::spawn(move || {
                let group = world.group().unwrap();
                let mut buf = vec![0.0_f32; LEN];
                best(2000, || group.all_reduce(&mut buf, ReduceOp::Sum).unwrap())
            })
        })
        .collect();
    ranks.into_iter().map(|rank| rank.join().unwrap()).fold(0.0, f64::max)
}

fn over_tcp() -> Vec<World> {
    let store = StoreServer::bind("127.0.0.1:0", &JobKey::trusting_network("cost", 0)).unwrap();
    let meeting = Meeting::Launcher { host: "127.0.0.1".into(), port: store.local_addr().port() };
    let join = |rank| {
        let env = LaunchEnv { trust_network: true, ..LaunchEnv::new(rank, 2, meeting.clone(), "cost") };
        thread::spawn(move || World::join(&env, WorldOptions::default()).unwrap())
    };
    let joining: Vec<_> = (0..2).map(join).collect();
    joining.into_iter().map(|rank| rank.join().unwrap()).collect()
}

#[inline]
fn call_info(sequence: u64) -> CallInfo {
    CallInfo {
        reduce: Some(ReduceOp::Sum),
        dtype: Some(DType::F32),
        len_elems: LEN as u64,
        step: Some(28),
        ..CallInfo::bare(Collective::AllReduce, 1, sequence, Location::caller())
    }
}

/// Seconds for all that a rank of two does per call to have it compared, shown and remembered. `on_wire` is what only the
/// header's form on the wire costs.
fn diagnosis(on_wire: bool) -> f64 {
    let history = History::new(WorldOptions::default().history);
    let members = Arc::new(Members::all(2));
    let log = history.open(1, members.clone());
    let mut bytes = Vec::new();
    let mut sequence = 0;
    let mut call = Call::new(call_info(0), members, 0, Duration::from_secs(600));
    best(100_000, || {
        sequence += 1;
        call.info = call_info(sequence);
        call.renew(1.0);
        log.begin(&call);
        call.expect(1);
        let mut header = black_box(call.header(1, 4 * LEN));
        header.from = 1;
        if on_wire {
            bytes.clear();
            header.encode(&mut bytes);
            let (prefix, _site) = black_box(&bytes).split_first_chunk::<PREFIX_BYTES>().unwrap();
            let prefix = Prefix::decode(prefix).unwrap();
            call.check_header(1, prefix.header(), 4 * LEN).unwrap();
        } else {
            call.check_header(1, &header, 4 * LEN).unwrap();
        }
        call.arrived(1);
        log.end(&call, true);
    })
}

/// An engine that does nothing: what remains of a call is the path to it.
struct Nothing;

impl Engine for Nothing {
    fn name(&self) -> &'static str {
        "nothing"
    }

    fn barrier(&mut self, _: &Call) -> Result<()> {
        Ok(())
    }

    fn all_reduce(&mut self, call: &Call, _: DType, buf: &mut [u8], _: ReduceOp) -> Result<()> {
        black_box((call, buf));
        Ok(())
    }

    fn all_reduce_weighted(&mut self, _: &Call, _: DType, _: &mut [u8]) -> Result<()> {
        Ok(())
    }

    fn broadcast(&mut self, _: &Call, _: &mut [u8], _: usize) -> Result<()> {
        Ok(())
    }

    fn all_gather(&mut self, _: &Call, _: &[u8], _: &mut [&mut [u8]]) -> Result<()> {
        Ok(())
    }

    fn reduce_scatter(&mut self, _: &Call, _: DType, _: &[u8], _: &mut [u8], _: ReduceOp) -> Result<()> {
        Ok(())
    }

    fn reduce(&mut self, _: &Call, _: DType, _: &mut [u8], _: ReduceOp, _: usize) -> Result<()> {
        Ok(())
    }

    fn gather(&mut self, _: &Call, _: &[u8], _: Option<&mut [&mut [u8]]>, _: usize) -> Result<()> {
        Ok(())
    }

    fn scatter(&mut self, _: &Call, _: Option<&[&[u8]]>, _: &mut [u8], _: usize) -> Result<()> {
        Ok(())
    }

    fn all_to_all(&mut self, _: &Call, _: &[u8], _: &mut [u8]) -> Result<()> {
        Ok(())
    }

    fn send_recv(&mut self, _: &Call, _: Option<Outgoing<'_>>, _: Option<&mut Incoming<'_>>) -> Result<()> {
        Ok(())
    }
}

/// Seconds per all-reduce of 8 bytes outside of the engine.
fn outside_the_engine() -> f64 {
    let world = World::solo(WorldOptions::default());
    world.set_step(28);
    let group = world.group_with(Box::new(Nothing));
    let mut buf = [0.0_f32; 2];
    best(100_000, || group.all_reduce(black_box(&mut buf), ReduceOp::Sum).unwrap())
}

#[test]
#[ignore = "a measurement, for a machine with nothing else to do"]
fn what_diagnosis_costs() {
    for (name, whole, part) in [
        ("threads", all_reduce(World::threads(2, WorldOptions::default())), diagnosis(false)),
        ("tcp", all_reduce(over_tcp()), diagnosis(true)),
    ] {
        let percent = 100.0 * part / whole;
        println!("{name}: {:.0} ns of {:.1} µs per all_reduce of 4 KiB: {percent:.1} %", part * 1e9, whole * 1e6);
    }
}

#[test]
#[ignore = "a measurement, for a machine with nothing else to do"]
fn what_a_call_costs_outside_of_the_engine() {
    let instant = best(100_000, || _ = black_box(Instant::now()));
    let ticks = best(100_000, || _ = black_box(Ticks::now()));
    println!(
        "{:.1} ns per call; the clocks: {:.1} and {:.1} ns",
        outside_the_engine() * 1e9,
        instant * 1e9,
        ticks * 1e9
    );
}
