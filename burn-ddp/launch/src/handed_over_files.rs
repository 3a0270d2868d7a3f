//! Files without a name that ranks inherit as open descriptors. A rank can read them in another PID namespace or as
//! another user, and they vanish with the last process that has them open.
//!
//! Ranks get the path of this process's descriptor, `/proc/PID/fd/NUMBER`. In a rank,
//! [`LaunchEnv::detect`](burn_ddp_comm::LaunchEnv::detect) first looks for the inherited descriptor, which has the same
//! number. If a program between the launcher and the rank has closed it, a rank of the same user can still open the
//! path.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::path::PathBuf;

/// Smallest number of the descriptors: above those that shell scripts use.
#[cfg(target_os = "linux")]
const FIRST_FD: RawFd = 100;

/// A file in memory, for the ranks.
pub(crate) struct HandedOver {
    file: File,
}

impl HandedOver {
    /// A new, empty file; `content` becomes part of its name in `/proc/PID/fd`.
    #[cfg(target_os = "linux")]
    pub(crate) fn create(content: &str) -> io::Result<Self> {
        use rustix::fs::{MemfdFlags, OFlags, fcntl_setfl, memfd_create};
        let name = std::ffi::CString::new(format!("{}{content}", burn_ddp_comm::HANDED_OVER))?;
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = match memfd_create(&*name, flags | MemfdFlags::NOEXEC_SEAL) {
            // Older kernels do not know `NOEXEC_SEAL`.
            Err(rustix::io::Errno::INVAL) => memfd_create(&*name, flags),
            other => other,
        }?;
        // Ranks append, since all writers share one file position.
        fcntl_setfl(&fd, OFlags::APPEND)?;
        // A low number is taken if the limit on open files is below `FIRST_FD`.
        let high = rustix::io::fcntl_dupfd_cloexec(&fd, FIRST_FD);
        Ok(Self { file: high.unwrap_or(fd).into() })
    }

    /// Not available on this system.
    #[cfg(not(target_os = "linux"))]
    pub(crate) fn create(_content: &str) -> io::Result<Self> {
        Err(io::Error::new(io::ErrorKind::Unsupported, "only Linux has files in memory; use --secret-file"))
    }

    /// Makes the file immutable, also through other descriptors.
    #[cfg(target_os = "linux")]
    pub(crate) fn seal(&self) -> io::Result<()> {
        use rustix::fs::{SealFlags, fcntl_add_seals};
        let all = SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL;
        Ok(fcntl_add_seals(&self.file, all)?)
    }

    /// Does nothing: this system has no such files.
    #[cfg(not(target_os = "linux"))]
    pub(crate) fn seal(&self) -> io::Result<()> {
        Ok(())
    }

    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// Path that the ranks get.
    pub(crate) fn path(&self) -> PathBuf {
        format!("/proc/{}/fd/{}", std::process::id(), self.fd()).into()
    }

    /// Descriptor that ranks inherit.
    pub(crate) fn fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }
}
