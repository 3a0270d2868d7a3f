//! The last resort: a small helper process that kills the ranks' process groups when this process vanishes without a
//! word.
//!
//! On Linux a rank dies with its launcher, but what the rank started does not (`sh train.sh` leaves the training
//! behind), and elsewhere not even the rank does. The helper is a shell that waits on a pipe whose other end only this
//! process holds. It knows the groups because each rank's pid is written to it; the pids stay valid as the ranks are
//! not reaped before the end.

use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// Ignores what a terminal sends; kills all groups when the pipe ends, and removes the directory it was given, if any.
const SCRIPT: &str = r#"trap '' HUP INT QUIT TERM TSTP
groups=
while read -r pid; do groups="$groups -$pid"; done
for group in $groups; do kill -s KILL -- "$group"; done
[ -z "$1" ] || rm -rf -- "$1"
"#;

/// Dropping it without [`dismiss`](Self::dismiss) has the ranks killed.
pub(crate) struct Guardian {
    /// `None` where no shell could be started.
    helper: Option<Child>,
}

impl Guardian {
    /// `temporary` goes when this process vanishes.
    pub(crate) fn start(temporary: Option<&Path>) -> Self {
        let helper = Command::new("/bin/sh")
            .args(["-c", SCRIPT, "burnrun-guardian"])
            .arg(temporary.unwrap_or(Path::new("")))
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // Not in our group: a signal to the group should not take the helper along.
            .process_group(0)
            .spawn();
        if let Err(error) = &helper {
            tracing::warn!(%error, "no /bin/sh: processes started by the ranks may survive a killed launcher");
        }
        Self { helper: helper.ok() }
    }

    pub(crate) fn watch(&mut self, pid: u32) {
        let Some(pipe) = self.helper.as_mut().and_then(|helper| helper.stdin.as_mut()) else { return };
        if let Err(error) = writeln!(pipe, "{pid}") {
            tracing::warn!(pid, %error, "the guardian is gone: this rank may survive a killed launcher");
        }
    }

    /// The job is over and its groups are gone.
    pub(crate) fn dismiss(mut self) {
        let Some(mut helper) = self.helper.take() else { return };
        // Killed before its pipe closes, so it never acts; `wait` is short, since nothing survives SIGKILL.
        if let Err(error) = helper.kill().and_then(|()| helper.wait()) {
            tracing::warn!(%error, "cannot end the guardian");
        }
    }
}
