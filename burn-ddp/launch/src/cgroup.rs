//! A control group (version 2) for the ranks of one generation and all processes that they start, if the system lets
//! this user make one: as root, in a container that may write its groups, or below `user@.service` of systemd.
//!
//! A process does not leave the group by a new session, a new parent or an empty environment. The group enables no
//! controller, so only the limits of its parent apply, which is the launcher's own group.

use std::collections::HashSet;
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::fd::{AsRawFd, RawFd};
use std::path::{Path, PathBuf};

/// The control group of one generation. Removed on drop, if all processes in it have ended.
pub(crate) struct ControlGroup {
    path: PathBuf,
    procs: File,
}

impl ControlGroup {
    /// A new, empty group; `None` if the system does not allow one.
    pub(crate) fn create(mark: &str) -> Option<Self> {
        let read = |file| fs::read_to_string(file).unwrap_or_default();
        let path = own_directory(&read("/proc/self/cgroup"), &read("/proc/self/mountinfo"))?;
        let path = path.join(format!("burnrun-{mark}"));
        let made = fs::create_dir(&path).and_then(|()| OpenOptions::new().write(true).open(path.join("cgroup.procs")));
        match made {
            Ok(procs) => Some(Self { path, procs }),
            Err(error) => {
                tracing::debug!(path = %path.display(), %error, "no control group for the ranks");
                let _ = fs::remove_dir(&path);
                None
            }
        }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// File into which a process writes `0` to enter the group.
    pub(crate) fn entrance(&self) -> RawFd {
        self.procs.as_raw_fd()
    }

    /// Processes in the group and in the groups below it, which its processes may have made.
    pub(crate) fn pids(&self) -> HashSet<i32> {
        let mut pids = HashSet::new();
        for directory in self.directories() {
            let listed = fs::read_to_string(directory.join("cgroup.procs")).unwrap_or_default();
            pids.extend(listed.lines().filter_map(|line| line.parse::<i32>().ok()));
        }
        pids
    }

    /// Sends SIGKILL to all processes in the group at once, also to processes of other users. Needs Linux 5.14.
    pub(crate) fn kill(&self) {
        let file = OpenOptions::new().write(true).open(self.path.join("cgroup.kill"));
        if let Err(error) = file.and_then(|mut file| file.write_all(b"1")) {
            tracing::debug!(%error, "processes of the control group are killed one by one");
        }
    }

    /// Directories of the group and of all groups below it, parents before children.
    fn directories(&self) -> Vec<PathBuf> {
        let mut directories = vec![self.path.clone()];
        let mut next = 0;
        while let Some(directory) = directories.get(next) {
            let entries = fs::read_dir(directory).into_iter().flatten().flatten();
            let below = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
            let below: Vec<_> = below.map(|entry| entry.path()).collect();
            directories.extend(below);
            next += 1;
        }
        directories
    }
}

impl Drop for ControlGroup {
    fn drop(&mut self) {
        for directory in self.directories().iter().rev() {
            if let Err(error) = fs::remove_dir(directory) {
                tracing::debug!(path = %directory.display(), %error, "a control group cannot be removed");
            }
        }
    }
}

/// Directory of this process's control group; `cgroup` and `mountinfo` are the files of these names in `/proc/self`.
fn own_directory(cgroup: &str, mountinfo: &str) -> Option<PathBuf> {
    let own = Path::new(cgroup.lines().find_map(|line| line.strip_prefix("0::"))?);
    mountinfo.lines().find_map(|line| {
        let (place, kind) = line.split_once(" - ")?;
        kind.starts_with("cgroup2 ").then_some(())?;
        let mut place = place.split(' ').skip(3);
        let (root, point) = (place.next()?, place.next()?);
        // In a container the mount's root may be another group; a path with `..` lies outside of the mount.
        let below = own.strip_prefix(root).ok().filter(|below| !below.starts_with(".."))?;
        Some(Path::new(point).join(below))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_directory_is_below_the_mount_of_version_2() {
        let v1 = "31 24 0:27 / /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory\n";
        let v2 = |root: &str, point: &str| format!("{v1}30 24 0:26 {root} {point} rw shared:4 - cgroup2 cgroup2 rw\n");
        let own = |cgroup: &str, mountinfo: &str| own_directory(cgroup, mountinfo);
        let whole = v2("/", "/sys/fs/cgroup");
        assert_eq!(own("4:memory:/x\n0::/a/b\n", &whole), Some("/sys/fs/cgroup/a/b".into()));
        assert_eq!(own("0::/\n", &v2("/", "/sys/fs/cgroup/unified")), Some("/sys/fs/cgroup/unified".into()));
        assert_eq!(own("0::/pod/c/d\n", &v2("/pod/c", "/sys/fs/cgroup")), Some("/sys/fs/cgroup/d".into()));
        assert_eq!(own("0::/other\n", &v2("/pod/c", "/sys/fs/cgroup")), None);
        assert_eq!(own("0::/../other\n", &whole), None);
        assert_eq!(own("4:memory:/x\n", &whole), None);
        assert_eq!(own("0::/a\n", v1), None);
    }
}
