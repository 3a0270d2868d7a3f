//! File descriptors of this process: their limit, the number that a world needs, and errors for lack of them.

use std::io;
use std::os::unix::net::UnixStream;

use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde::{Deserialize, Serialize};

/// Descriptors that a program needs besides those of its world: standard streams, data files, a device.
const PROGRAM: u64 = 64;
/// Descriptors that a rank needs in a world of any size: listener, store, wakers.
const RANK: u64 = 8;
/// Descriptors of a control connection.
const CONTROL: u64 = 1;
/// Groups over tcp for which a rank should have room: scalars, gradients, metrics, and one of the user's.
const GROUPS: u64 = 4;

/// Most descriptors for which the table is enlarged beforehand: 8 MiB of it.
const TABLE_CAP: u64 = 1 << 20;

/// Number of ranks of the largest world in which `limit` descriptors are enough for a process, with a few groups over
/// tcp.
pub fn largest_world(limit: u64) -> u64 {
    let fixed = PROGRAM + RANK + 2 * GROUPS;
    1 + limit.saturating_sub(fixed) / (CONTROL + GROUPS)
}

/// Descriptors that are enough for a rank of a world of `world_size` ranks with a few groups over tcp.
fn comfortable(world_size: usize) -> u64 {
    PROGRAM + RANK + 2 * GROUPS + (world_size as u64 - 1) * (CONTROL + GROUPS)
}

/// Descriptors that this process may have; `None` if any number.
pub(crate) fn limit() -> Option<u64> {
    getrlimit(Resource::Nofile).current
}

/// Makes room for the descriptors of a rank of a world of `world_size` ranks: raises the limit of this process as far
/// as it may, and has the kernel enlarge the table of descriptors at once.
///
/// Linux doubles that table when it is full. Each time the threads that open descriptors wait until every core has
/// passed through the scheduler (`synchronize_rcu` in `expand_fdtable`), unless the process has only one thread: with
/// 32 ranks on two cores these waits took longer than all else in their meeting.
pub(crate) fn make_room(world_size: usize) {
    raise_limit();
    let last = comfortable(world_size).min(limit().unwrap_or(u64::MAX)).min(TABLE_CAP).saturating_sub(1);
    // The copy of any descriptor, at the last place.
    let copy = UnixStream::pair().and_then(|(end, _)| {
        let last = i32::try_from(last).unwrap_or(i32::MAX);
        Ok(rustix::io::fcntl_dupfd_cloexec(&end, last)?)
    });
    if let Err(error) = copy {
        tracing::debug!(last, %error, "the table of descriptors grows only when it is full");
    }
}

/// Raises the limit of this process as far as it may.
fn raise_limit() {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current != maximum
        && let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })
    {
        tracing::debug!(?current, ?maximum, %error, "the limit of open files stays");
    }
}

/// Limit and use of descriptors of a rank that joins. The rank posts them; they are checked once the machines of all
/// ranks are known.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Room {
    /// `None` if the process may have any number.
    limit: Option<u64>,
    /// Descriptors that are open, and those that the clients of its store will need.
    taken: u64,
}

impl Room {
    /// Room of this process, which serves the store to `served` other ranks.
    pub(crate) fn here(served: usize) -> Room {
        let limit = limit();
        let open = std::fs::read_dir("/proc/self/fd").map_or(0, |open| open.count() as u64);
        Room { limit, taken: open + served as u64 }
    }

    #[cfg(test)]
    pub(crate) fn limited(limit: u64, taken: u64) -> Room {
        Room { limit: Some(limit), taken }
    }

    /// Returns an error, with the fix, if there is no room for the control connections to `neighbours` ranks that a
    /// world of `world_size` ranks needs.
    pub(crate) fn check(&self, neighbours: usize, world_size: usize) -> Result<(), String> {
        let needed = self.taken + RANK + neighbours as u64 * CONTROL;
        let Some(limit) = self.limit.filter(|limit| needed > *limit) else { return Ok(()) };
        let comfortable = comfortable(world_size).max(needed);
        Err(format!(
            "its process may have {limit} open files, and needs at least {needed} in a world of {world_size} ranks: \
             raise the hard limit to {comfortable} (`ulimit -Hn {comfortable}`, LimitNOFILE= of systemd, --ulimit \
             nofile={comfortable} of containers)"
        ))
    }
}

/// The reason and the fix if `e` is due to a lack of descriptors or ports on this machine; else `None`.
pub(crate) fn shortage(e: &io::Error, world_size: usize) -> Option<String> {
    let comfortable = comfortable(world_size);
    match Errno::from_io_error(e)? {
        Errno::MFILE => {
            let limit = getrlimit(Resource::Nofile).current.map_or("all".to_owned(), |limit| format!("all {limit}"));
            Some(format!(
                "it has {limit} open files that it may have; a world of {world_size} ranks needs about \
                 {comfortable}: raise the hard limit (`ulimit -Hn {comfortable}`), or close files of the program"
            ))
        }
        Errno::NFILE => Some(format!(
            "its machine has as many open files as it may have; each rank of a world of {world_size} needs about \
             {comfortable}: raise `sysctl fs.file-max`"
        )),
        Errno::ADDRNOTAVAIL => Some(format!(
            "its machine has no free port from which to connect; each rank of a world of {world_size} needs about \
             {comfortable}: widen `sysctl net.ipv4.ip_local_port_range`, or end what holds so many connections"
        )),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_for_a_world_and_the_world_for_a_number_fit_together() {
        for world_size in [1, 2, 12, 1024] {
            assert_eq!(largest_world(comfortable(world_size)), world_size as u64);
        }
        assert_eq!(largest_world(0), 1);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn the_table_of_descriptors_has_room_for_the_world() {
        make_room(1000);
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let size = status.lines().find_map(|line| line.strip_prefix("FDSize:")).unwrap();
        let room = comfortable(1000).min(limit().unwrap_or(u64::MAX));
        assert!(size.trim().parse::<u64>().unwrap() >= room, "{size} for {room}");
    }

    #[test]
    fn a_world_that_is_too_large_is_refused_with_the_number() {
        raise_limit();
        assert_eq!(Room::here(1).check(1, 2), Ok(()));
        let room = Room::limited(30, 12);
        assert_eq!(room.check(10, 12), Ok(()));
        let text = room.check(11, 12).unwrap_err();
        assert!(text.contains("30 open files, and needs at least 31 in a world of 12 ranks"), "{text}");
        assert!(text.contains(&format!("ulimit -Hn {}", comfortable(12))), "{text}");
        assert_eq!(Room { limit: None, ..room }.check(1 << 20, 1 << 20), Ok(()));
    }

    #[test]
    fn only_a_want_of_descriptors_or_ports_is_a_shortage() {
        let of = |errno: Errno| shortage(&errno.into(), 12);
        assert!(of(Errno::MFILE).is_some_and(|text| text.contains("open files")));
        assert!(of(Errno::NFILE).is_some() && of(Errno::ADDRNOTAVAIL).is_some());
        assert_eq!(of(Errno::CONNREFUSED), None);
        assert_eq!(shortage(&io::Error::new(io::ErrorKind::AddrNotAvailable, "no such interface"), 12), None);
    }
}
