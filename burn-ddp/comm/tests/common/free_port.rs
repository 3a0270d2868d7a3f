//! Ports for jobs, also those of other crates' tests.
#![allow(unreachable_pub, reason = "one module for several crates' tests")]

use std::net::SocketAddr;

use socket2::{Domain, Socket, Type};

/// A free port that no other program gets while this lives: bound, but not listened on.
///
/// Ranks of one machine meet by the number alone, so a port that was only free a moment ago may be another job's, too.
pub struct FreePort {
    /// Number of the port.
    pub port: u16,
    _held: Socket,
}

impl FreePort {
    /// One that is free now.
    pub fn reserve() -> Self {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        // With this on both, a listener may share the port with a socket that does not listen.
        socket.set_reuse_address(true).unwrap();
        socket.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
        Self { port: socket.local_addr().unwrap().as_socket().unwrap().port(), _held: socket }
    }
}
