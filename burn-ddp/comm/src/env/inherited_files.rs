//! Files that a launcher hands to its ranks as open descriptors.

use std::path::{Path, PathBuf};

/// Prefix of the names of the in-memory files (memfd) that a launcher hands to its ranks.
///
/// The rank gets the path of the launcher's descriptor, `/proc/PID/fd/N`, and inherits the descriptor `N`.
pub const HANDED_OVER: &str = "burn-ddp-";

/// Path by which this process opens the file that a launcher handed over as `path`: the inherited descriptor if it is
/// still open, else `path` itself, which leads to the launcher's descriptor if both processes have the same user and
/// see the same `/proc`.
pub(super) fn inherited(path: PathBuf) -> PathBuf {
    let Some(own) = own_descriptor(&path) else { return path };
    let prefix = format!("/memfd:{HANDED_OVER}");
    let target = std::fs::read_link(&own).unwrap_or_default();
    if target.as_os_str().as_encoded_bytes().starts_with(prefix.as_bytes()) { own } else { path }
}

/// `/proc/self/fd/N` for `/proc/PID/fd/N`.
fn own_descriptor(path: &Path) -> Option<PathBuf> {
    let (pid, fd) = path.to_str()?.strip_prefix("/proc/")?.split_once("/fd/")?;
    let digits = |word: &str| !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_digit());
    (digits(pid) && digits(fd)).then(|| Path::new("/proc/self/fd").join(fd))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_of_a_launcher_have_a_twin_here() {
        assert_eq!(own_descriptor(Path::new("/proc/12/fd/100")), Some("/proc/self/fd/100".into()));
        for other in ["/proc/self/fd/100", "/proc/12/fd/", "/proc/12/fd/1/2", "/proc//fd/1", "/dev/fd/1", "secret"] {
            assert_eq!(own_descriptor(Path::new(other)), None, "{other}");
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_descriptor_counts_if_it_is_a_launchers_file() {
        use std::os::fd::AsRawFd;
        let create = |name| rustix::fs::memfd_create(name, rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let (ours, other) = (create("burn-ddp-test"), create("other"));
        let path = |fd: i32| PathBuf::from(format!("/proc/1/fd/{fd}"));
        let own = format!("/proc/self/fd/{}", ours.as_raw_fd());
        assert_eq!(inherited(path(ours.as_raw_fd())), PathBuf::from(own));
        for fd in [other.as_raw_fd(), 0, 1_000_000] {
            assert_eq!(inherited(path(fd)), path(fd));
        }
        assert_eq!(inherited("/run/secret".into()), PathBuf::from("/run/secret"));
    }
}
