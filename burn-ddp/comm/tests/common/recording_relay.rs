//! A relay of TCP connections, which does not know the secret: it records the bytes of both sides and can flip one bit
//! of one side. Also for other crates' tests.
#![allow(dead_code, unreachable_pub, missing_docs, reason = "one module for several crates' tests")]

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

/// Side of a connection that sends bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Side {
    Client,
    Store,
}

/// Relays each connection to `port` for as long as the process lives.
pub struct Relay {
    pub port: u16,
    shared: Arc<Shared>,
}

struct Shared {
    /// The side and the place, in bytes from the start of its stream, of a bit that is flipped in every connection.
    flip: Option<(Side, usize)>,
    flipped: AtomicUsize,
    /// Bytes of both sides of all connections.
    seen: Mutex<Vec<u8>>,
}

impl Relay {
    /// Relays connections to a port of its own.
    pub fn start(flip: Option<(Side, usize)>, to: impl Fn() -> Option<u16> + Send + 'static) -> Relay {
        Relay::listen(TcpListener::bind("127.0.0.1:0").unwrap(), flip, to)
    }

    /// Relays connections to `listener` to the port of this machine that `to` returns; while that is `None`, closes
    /// them.
    pub fn listen(
        listener: TcpListener,
        flip: Option<(Side, usize)>,
        to: impl Fn() -> Option<u16> + Send + 'static,
    ) -> Relay {
        let port = listener.local_addr().unwrap().port();
        let shared = Arc::new(Shared { flip, flipped: AtomicUsize::new(0), seen: Mutex::default() });
        let relay = Relay { port, shared: shared.clone() };
        thread::spawn(move || {
            while let Ok((client, _)) = listener.accept() {
                let Some(store) = to().and_then(|port| TcpStream::connect(("127.0.0.1", port)).ok()) else { continue };
                for (side, from, to) in [(Side::Client, &client, &store), (Side::Store, &store, &client)] {
                    let (from, to, shared) = (from.try_clone().unwrap(), to.try_clone().unwrap(), shared.clone());
                    thread::spawn(move || shared.pass_on(side, &from, &to));
                }
            }
        });
        relay
    }

    /// Checks that a handshake went through the relay, and that none of `texts` can be read in the bytes. The texts
    /// must be long enough not to occur in ciphertext by chance.
    pub fn assert_illegible(&self, texts: &[&str]) {
        let seen = self.shared.seen.lock().unwrap();
        let legible = |text: &str| seen.windows(text.len()).any(|bytes| bytes == text.as_bytes());
        // The start of the handshake is not encrypted: the relay sees what is sent in the clear.
        assert!(seen.len() > 1000 && legible("burn-ddp"), "{} bytes went through the relay", seen.len());
        for text in texts {
            assert!(!legible(text), "the relay read {text:?}");
        }
    }

    /// Number of bits that were flipped.
    pub fn flipped(&self) -> usize {
        self.shared.flipped.load(Ordering::Relaxed)
    }
}

impl Shared {
    fn pass_on(&self, side: Side, mut from: &TcpStream, mut to: &TcpStream) {
        let (mut sent, mut some) = (0, [0; 4096]);
        while let Ok(n @ 1..) = from.read(&mut some) {
            self.seen.lock().unwrap().extend_from_slice(&some[..n]);
            if let Some((_, at)) = self.flip.filter(|(tampered, at)| *tampered == side && (sent..sent + n).contains(at))
            {
                some[at - sent] ^= 1 << (at % 8);
                self.flipped.fetch_add(1, Ordering::Relaxed);
            }
            sent += n;
            if to.write_all(&some[..n]).is_err() {
                break;
            }
        }
        let _ = to.shutdown(Shutdown::Write);
    }
}
