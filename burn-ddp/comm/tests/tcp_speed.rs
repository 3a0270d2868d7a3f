//! The tcp engine next to what sockets can do: two ranks that send each other what an all-reduce sends, and add once. Run it alone:
//! `cargo test -p burn-ddp-comm --test tcp_speed -- --ignored --nocapture`

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use burn_ddp_comm::{
    EngineChoice, JobKey, LaunchEnv, Meeting, ProcessGroup, ReduceOp, StoreServer, World, WorldOptions,
};
use rustix::event::{PollFd, PollFlags, poll};

const ROUNDS: usize = 15;
const CHUNK: usize = 1 << 20;

fn exchange(mut stream: &TcpStream, out: &[u8], into: &mut [u8]) {
    let ready = |result: std::io::Result<usize>| match result {
        Err(error) if error.kind() == ErrorKind::WouldBlock => 0,
        other => other.expect("a peer that is there"),
    };
    let (mut sent, mut got) = (0, 0);
    while sent < out.len() || got < into.len() {
        let mut moved = 0;
        if sent < out.len() {
            moved += ready(stream.write(&out[sent..out.len().min(sent + CHUNK)]));
            sent += moved;
        }
        if got < into.len() {
            let end = into.len().min(got + CHUNK);
            let read = ready(stream.read(&mut into[got..end]));
            (got, moved) = (got + read, moved + read);
        }
        if moved == 0 {
            let mut want = PollFlags::empty();
            want.set(PollFlags::OUT, sent < out.len());
            want.set(PollFlags::IN, got < into.len());
            poll(&mut [PollFd::new(&stream, want)], None).expect("a poll");
        }
    }
}

fn pump(stream: &TcpStream, out: &[f32], into: &mut [f32]) {
    let half = out.len() / 2;
    exchange(stream, bytemuck::cast_slice(&out[..half]), bytemuck::cast_slice_mut(&mut into[..half]));
    into[..half].iter_mut().zip(&out[half..]).for_each(|(sum, x)| *sum += x);
    exchange(stream, bytemuck::cast_slice(&out[half..]), bytemuck::cast_slice_mut(&mut into[half..]));
}

fn worlds() -> Vec<World> {
    let store = StoreServer::bind("127.0.0.1:0", &JobKey::trusting_network("speed", 0)).unwrap();
    let meeting = Meeting::Launcher { host: "127.0.0.1".into(), port: store.local_addr().port() };
    let join = |rank| {
        let env = LaunchEnv { trust_network: true, ..LaunchEnv::new(rank, 2, meeting.clone(), "speed") };
        thread::spawn(move || {
            World::join(&env, WorldOptions { engine: Some(EngineChoice::Tcp), ..WorldOptions::default() }).unwrap()
        })
    };
    let joining: Vec<_> = (0..2).map(join).collect();
    joining.into_iter().map(|rank| rank.join().unwrap()).collect()
}

/// Median microseconds of the pump and of the engine, in turns.
fn rank(group: &ProcessGroup, stream: &TcpStream, together: &Barrier, len: usize) -> [f64; 2] {
    let mut buf = vec![1.0_f32; len];
    let mut into = vec![0.0_f32; len];
    let repeat = (4 << 20) / (len * 4) + 1;
    let timed = |f: &mut dyn FnMut()| {
        together.wait();
        let start = Instant::now();
        (0..repeat).for_each(|_| f());
        together.wait();
        start.elapsed() / repeat as u32
    };
    let mut times: [Vec<Duration>; 2] = Default::default();
    for _ in 0..ROUNDS {
        times[0].push(timed(&mut || pump(stream, &buf, &mut into)));
        times[1].push(timed(&mut || group.all_reduce(&mut buf, ReduceOp::Mean).unwrap()));
    }
    times.map(|mut times| {
        times.sort();
        times[ROUNDS / 2].as_secs_f64() * 1e6
    })
}

#[test]
#[ignore = "a measurement"]
fn next_to_a_pump() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let streams = [TcpStream::connect(listener.local_addr().unwrap()).unwrap(), listener.accept().unwrap().0];
    let together = &Barrier::new(2);
    thread::scope(|scope| {
        for (world, stream) in worlds().into_iter().zip(streams) {
            scope.spawn(move || {
                stream.set_nodelay(true).unwrap();
                stream.set_nonblocking(true).unwrap();
                let group = world.group().unwrap();
                for bytes in [8, 4 << 10, 64 << 10, 1 << 20, 4 << 20, 25 << 20, 64 << 20] {
                    let [pump, engine] = rank(&group, &stream, together, bytes / 4);
                    if world.rank() == 0 {
                        let gbps = bytes as f64 / engine / 1e3;
                        let engine_name = world.engine();
                        println!("{bytes:>9} bytes: pump {pump:9.1} µs, {engine_name} {engine:9.1} µs ({gbps:.2} GB/s), {:.2} of its speed", pump / engine);
                    }
                }
            });
        }
    });
}
