//! The user of the process at the other end of a unix socket.
//!
//! rustix has this call, too, but its type of a pid cannot be 0, which the kernel gives for a process of another PID
//! namespace, such as a rank in another container.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};
use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// Level and name of the option `SO_PEERCRED`.
const OPTION: (c_int, c_int) = if cfg!(any(target_arch = "powerpc", target_arch = "powerpc64")) {
    (1, 21)
} else if cfg!(any(target_arch = "mips", target_arch = "mips64")) {
    (0xffff, 18)
} else if cfg!(any(target_arch = "sparc", target_arch = "sparc64")) {
    (0xffff, 64)
} else {
    (1, 17)
};

/// `struct ucred` of the kernel.
#[repr(C)]
#[derive(Default)]
struct Credentials {
    pid: c_int,
    uid: u32,
    gid: u32,
}

// SAFETY: the declaration of POSIX, in the C library that std is linked with; `socklen_t` has 32 bits on Linux.
unsafe extern "C" {
    fn getsockopt(socket: c_int, level: c_int, name: c_int, value: *mut c_void, len: *mut u32) -> c_int;
}

/// Id and user of the process at the other end of `socket`, as of the time when it was connected. The id is `None` for
/// a process of another PID namespace.
///
/// # Errors
/// The errors of the system call.
pub(super) fn peer_user(socket: &impl AsFd) -> io::Result<(Option<u32>, u32)> {
    let mut found = Credentials::default();
    let mut len = size_of::<Credentials>() as u32;
    // SAFETY: the descriptor is open for the time of the borrow; `found` has `len` bytes to write, all values valid.
    let result =
        unsafe { getsockopt(socket.as_fd().as_raw_fd(), OPTION.0, OPTION.1, (&raw mut found).cast(), &raw mut len) };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok((u32::try_from(found.pid).ok().filter(|pid| *pid > 0), found.uid))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    #[test]
    fn the_other_end_of_a_pair_is_this_process() {
        let (one, _other) = UnixStream::pair().unwrap();
        let expected = (Some(std::process::id()), rustix::process::geteuid().as_raw());
        assert_eq!(peer_user(&one).unwrap(), expected);
        assert!(peer_user(&std::fs::File::open("/dev/null").unwrap()).is_err());
    }
}
