//! The last resort: a small helper process that kills the ranks' process groups when this process is killed.
//!
//! On Linux a rank dies with its launcher, but the processes that the rank started do not (`sh train.sh` leaves the
//! training behind); on other systems the rank does not die either. The helper is a shell that waits on a pipe whose
//! other end only this process holds. This process writes each rank's pid to the pipe; the pid is also the id of the
//! rank's group and session, and the kernel gives it to no other process while one of them exists. The helper finds
//! other processes of the job by their mark, and by their control group if there is one.

use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::leftover_processes::MARK;

/// Ignores the signals of a terminal. When the pipe ends, it kills all groups and removes the directory, if any. Then
/// it kills the processes in the ranks' sessions, in the control group and with the mark, until a scan finds none: a
/// process may start others before it is killed. It makes at most twenty scans, since a scan takes long on a busy
/// machine. Last, it removes the control group.
const SCRIPT: &str = r#"trap '' HUP INT QUIT TERM TSTP
directory=$1 mark=$2 group=$3 leaders=' ' looks=0
while read -r pid; do leaders="$leaders$pid "; done
for leader in $leaders; do kill -s KILL -- "-$leader"; done
[ -z "$directory" ] || rm -rf -- "$directory"
[ -z "$group" ] || echo 1 >"$group/cgroup.kill"
# In a PID namespace of its own without a /proc of its own, the numbers below mean other processes.
read -r shown rest </proc/self/stat && [ "$shown" != $$ ] && looks=20
while [ $looks -lt 20 ]; do
    looks=$((looks + 1)) found=
    for stat in /proc/[0-9]*/stat; do
        read -r line <"$stat" || continue
        set -- ${line##*) }
        case $1:$leaders in [ZX]:*) ;; *" $4 "*) found="$found ${line%% *}" ;; esac
    done
    for environ in $(grep -l -s -F "$mark" /proc/[0-9]*/environ); do
        environ=${environ#/proc/}
        found="$found ${environ%/environ}"
    done
    for procs in "$group"/cgroup.procs "$group"/*/cgroup.procs; do
        [ -n "$group" ] && [ -r "$procs" ] || continue
        # 0 is a process of another PID namespace.
        while read -r pid; do [ "$pid" = 0 ] || found="$found $pid"; done <"$procs"
    done
    [ -n "$found" ] || break
    kill -s KILL $found
done
# Again: the processes killed above may have written there.
[ -z "$directory" ] || rm -rf -- "$directory"
# The kernel holds the group for a moment after its last process.
looks=0
while [ -d "$group" ] && [ $looks -lt 5 ]; do
    looks=$((looks + 1))
    rmdir "$group"/*/
    rmdir "$group" || sleep 1
done
"#;

/// Handle of the helper process. If it is dropped without [`dismiss`](Self::dismiss), the helper kills the ranks.
pub(crate) struct Guardian {
    /// `None` if no shell could be started.
    helper: Option<Child>,
}

impl Guardian {
    /// Starts the helper. When this process is killed, the helper removes the directory `temporary`, and kills the
    /// processes in `group` and those that were started with `mark`.
    pub(crate) fn start(temporary: Option<&Path>, mark: &str, group: Option<&Path>) -> Self {
        let helper = Command::new("/bin/sh")
            .args(["-c", SCRIPT, "burnrun-guardian"])
            .arg(temporary.unwrap_or(Path::new("")))
            .arg(format!("{MARK}={mark}"))
            .arg(group.unwrap_or(Path::new("")))
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // A group of its own, so that a signal to this process's group does not end the helper.
            .process_group(0)
            .spawn();
        if let Err(error) = &helper {
            tracing::warn!(%error, "no /bin/sh: processes started by the ranks may survive a killed launcher");
        }
        Self { helper: helper.ok() }
    }

    pub(crate) fn pid(&self) -> Option<u32> {
        self.helper.as_ref().map(Child::id)
    }

    pub(crate) fn watch(&mut self, pid: u32) {
        let Some(pipe) = self.helper.as_mut().and_then(|helper| helper.stdin.as_mut()) else { return };
        if let Err(error) = writeln!(pipe, "{pid}") {
            tracing::warn!(pid, %error, "the guardian is gone: this rank may survive a killed launcher");
        }
    }

    /// Ends the helper, once the job is over and its groups are gone.
    pub(crate) fn dismiss(mut self) {
        let Some(mut helper) = self.helper.take() else { return };
        // Killed before its pipe closes, so that it kills nothing. `wait` is short, since SIGKILL ends it at once.
        if let Err(error) = helper.kill().and_then(|()| helper.wait()) {
            tracing::warn!(%error, "cannot end the guardian");
        }
    }
}
