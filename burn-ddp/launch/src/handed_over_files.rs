//! Files without a name that ranks inherit as open descriptors, so that user and PID namespace do not matter, and that
//! are gone with the last process that has them.
//!
//! Ranks get the path of this process's descriptor. [`LaunchEnv::detect`](burn_ddp_comm::LaunchEnv::detect) looks for
//! the inherited one first, which has the same number; where a program in between has closed it, the path still leads
//! to this process's, for the same user.

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
    /// A new, empty one; `content` is a word for people who look at a process's descriptors.
    #[cfg(target_os = "linux")]
    pub(crate) fn create(content: &str) -> io::Result<Self> {
        use rustix::fs::{MemfdFlags, OFlags, fcntl_setfl, memfd_create};
        let name = std::ffi::CString::new(format!("{}{content}", burn_ddp_comm::HANDED_OVER))?;
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = match memfd_create(&*name, flags | MemfdFlags::NOEXEC_SEAL) {
            // Older kernels do not know that data is not to be executed.
            Err(rustix::io::Errno::INVAL) => memfd_create(&*name, flags),
            other => other,
        }?;
        // All writers share one position.
        fcntl_setfl(&fd, OFlags::APPEND)?;
        // Where so few descriptors are allowed, a low number does too.
        let high = rustix::io::fcntl_dupfd_cloexec(&fd, FIRST_FD);
        Ok(Self { file: high.unwrap_or(fd).into() })
    }

    /// Not available on this system.
    #[cfg(not(target_os = "linux"))]
    pub(crate) fn create(_content: &str) -> io::Result<Self> {
        Err(io::Error::new(io::ErrorKind::Unsupported, "only Linux has files in memory; use --secret-file"))
    }

    /// Refuses all further changes, also through other descriptors.
    #[cfg(target_os = "linux")]
    pub(crate) fn seal(&self) -> io::Result<()> {
        use rustix::fs::{SealFlags, fcntl_add_seals};
        let all = SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL;
        Ok(fcntl_add_seals(&self.file, all)?)
    }

    /// Does nothing: there is none on this system.
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
