//! Unix sockets for processes of one user: abstract ones, on which both ends check the user of the other.
//!
//! An abstract name needs no file and is free again when its owner ends, so nothing is left behind. Any user of the
//! machine may bind such a name or connect to it, so both ends ask the kernel for the user of the other end.

use std::io;

use socket2::Socket;

/// Listens at `name`.
#[cfg(target_os = "linux")]
pub(crate) fn bind(name: &str) -> io::Result<Socket> {
    let socket = Socket::new(socket2::Domain::UNIX, socket2::Type::STREAM, None)?;
    socket.bind(&address(name)?)?;
    super::bind_and_connect::listener(&socket)?;
    Ok(socket)
}

/// Connects to `name`, if a process of this user listens there.
#[cfg(target_os = "linux")]
pub(crate) fn connect(name: &str) -> io::Result<Socket> {
    let socket = Socket::new(socket2::Domain::UNIX, socket2::Type::STREAM, None)?;
    // With a full backlog, a blocking connect would wait without a deadline; this one fails at once.
    socket.set_nonblocking(true)?;
    socket.connect(&address(name)?)?;
    check_peer(&socket)?;
    Ok(socket)
}

#[cfg(target_os = "linux")]
fn packets() -> io::Result<Socket> {
    let kind = rustix::net::SocketType::SEQPACKET.as_raw() as i32;
    Socket::new(socket2::Domain::UNIX, kind.into(), None)
}

/// Listens at `name` for connections that keep the boundaries of messages (`SOCK_SEQPACKET`).
#[cfg(target_os = "linux")]
pub(crate) fn bind_packets(name: &str) -> io::Result<Socket> {
    let socket = packets()?;
    socket.bind(&address(name)?)?;
    super::bind_and_connect::listener(&socket)?;
    Ok(socket)
}

/// Like [`connect`], to a listener of [`bind_packets`]. The socket is non-blocking.
#[cfg(target_os = "linux")]
pub(crate) fn connect_packets(name: &str) -> io::Result<Socket> {
    let socket = packets()?;
    socket.set_nonblocking(true)?;
    socket.connect(&address(name)?)?;
    check_peer(&socket)?;
    Ok(socket)
}

/// Checks that the other end is a process of this user.
///
/// # Errors
/// `PermissionDenied`, with the user, if it is not.
#[cfg(target_os = "linux")]
pub(crate) fn check_peer(socket: &Socket) -> io::Result<()> {
    let (pid, uid) = super::peer_user::peer_user(socket)?;
    let me = rustix::process::geteuid().as_raw();
    if uid == me {
        return Ok(());
    }
    let process = pid.map_or("a process of another PID namespace".to_owned(), |pid| format!("process {pid}"));
    let message = format!("{process} of user {uid} is at the other end, but this process is of user {me}");
    Err(io::Error::new(io::ErrorKind::PermissionDenied, message))
}

/// Address of `name`: under burn-ddp's prefix, so that no other program has it by chance; hashed, since a name may be
/// longer than an address.
#[cfg(target_os = "linux")]
fn address(name: &str) -> io::Result<socket2::SockAddr> {
    use sha2::{Digest, Sha256};
    let uid = rustix::process::geteuid().as_raw();
    let hash: String = Sha256::digest(name).iter().take(16).map(|byte| format!("{byte:02x}")).collect();
    socket2::SockAddr::unix(format!("\0burn-ddp/{uid}/{hash}"))
}

#[cfg(not(target_os = "linux"))]
mod elsewhere {
    use super::*;

    fn unsupported() -> io::Error {
        io::Error::new(
            io::ErrorKind::Unsupported,
            "this system has no abstract unix sockets; give the ranks a master address",
        )
    }

    pub(crate) fn bind(_name: &str) -> io::Result<Socket> {
        Err(unsupported())
    }

    pub(crate) fn connect(_name: &str) -> io::Result<Socket> {
        Err(unsupported())
    }

    pub(crate) fn check_peer(_socket: &Socket) -> io::Result<()> {
        Err(unsupported())
    }
}
#[cfg(not(target_os = "linux"))]
pub(crate) use elsewhere::{bind, check_peer, connect};

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn one_process_has_the_name_until_it_closes() {
        let name = format!("test {} {}", std::process::id(), "x".repeat(300));
        assert_eq!(connect(&name).unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
        let listener = bind(&name).unwrap();
        assert_eq!(bind(&name).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        let _client = connect(&name).unwrap();
        check_peer(&listener.accept().unwrap().0).unwrap();
        drop(listener);
        drop(bind(&name).unwrap());
    }

    /// Set for the other user's process: the name to take.
    const SQUAT: &str = "BURN_DDP_TEST_SQUAT";

    #[test]
    #[ignore = "needs root, to be another user as well"]
    fn another_users_process_is_turned_away() {
        use std::io::{BufRead, BufReader};
        use std::os::unix::process::CommandExt;
        use std::process::{Command, Stdio};

        if let Ok(name) = std::env::var(SQUAT) {
            // The address of the other user's name: nothing in it is secret.
            let socket = Socket::new(socket2::Domain::UNIX, socket2::Type::STREAM, None).unwrap();
            socket.bind(&socket2::SockAddr::unix(format!("\0{name}")).unwrap()).unwrap();
            socket.listen(1).unwrap();
            println!("\nready");
            drop(socket.accept().unwrap());
            // Now this process, of the other user, connects to a listener of the parent.
            let address = socket2::SockAddr::unix(format!("\0{name}, served")).unwrap();
            Socket::new(socket2::Domain::UNIX, socket2::Type::STREAM, None).unwrap().connect(&address).unwrap();
            return;
        }
        assert!(rustix::process::geteuid().is_root());
        let name = format!("test {} squatted", std::process::id());
        let taken = address(&name).unwrap().as_abstract_namespace().unwrap().to_vec();
        let taken = String::from_utf8(taken).unwrap();
        let served = Socket::new(socket2::Domain::UNIX, socket2::Type::STREAM, None).unwrap();
        served.bind(&socket2::SockAddr::unix(format!("\0{taken}, served")).unwrap()).unwrap();
        served.listen(1).unwrap();
        let mut squatter = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "net::unix_socket::tests::another_users_process_is_turned_away",
                "--ignored",
                "--nocapture",
            ])
            .env(SQUAT, &taken)
            .uid(65534)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(squatter.stdout.take().unwrap()).lines();
        assert!(lines.map_while(Result::ok).any(|line| line == "ready"));
        let error = connect(&name).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
        assert!(error.to_string().contains("user 65534"), "{error}");
        let error = check_peer(&served.accept().unwrap().0).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
        let _ = squatter.kill();
        let _ = squatter.wait();
    }
}
