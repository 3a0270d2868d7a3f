//! Causes of failed connections, each a line with the remedy: pure functions of the lines that ssh printed.

/// Message for a connection that ended before burnrun on the host reported. `code` is ssh's exit code, `said` are the
/// lines that ssh and the host's shell wrote to stderr.
pub(super) fn before_ready(host: &str, burnrun: &str, code: Option<i32>, said: &[String]) -> String {
    let version = env!("CARGO_PKG_VERSION");
    let has = |part: &str| said.iter().any(|line| line.contains(part));
    let last = said.iter().rev().map(|line| line.trim()).find(|line| !line.is_empty());
    let quote = last.map(|line| format!(" ({line})")).unwrap_or_default();
    if has("REMOTE HOST IDENTIFICATION HAS CHANGED") {
        return format!(
            "host {host}: its host key is not the known one: if the machine was installed anew, forget the old key \
             with `ssh-keygen -R {host}`, else find out which machine answers there"
        );
    }
    if has("Host key verification failed") || has("host key is known") {
        return format!(
            "host {host}: its host key is not known: run `ssh {host} true` once, and accept the key{quote}"
        );
    }
    if has("Permission denied") || has("Too many authentication failures") {
        return format!(
            "host {host}: the login was refused; burnrun cannot ask for a password: `ssh -o BatchMode=yes {host} true` \
             must work (ssh-copy-id, ssh-agent){quote}"
        );
    }
    if has("Could not resolve hostname") {
        return format!("host {host}: no such host: correct the name in the hostfile or in ~/.ssh/config{quote}");
    }
    match code {
        Some(126 | 127) => format!(
            "host {host}: no burnrun {version} at `{burnrun}`: install it there, or name its path with \
             --remote-burnrun{quote}"
        ),
        Some(255) => format!("host {host}: not reached: does the machine run, and sshd on it?{quote}"),
        Some(code) => format!("host {host}: `{burnrun}` ended with code {code} before it was ready{quote}"),
        None => format!("host {host}: ssh was killed before burnrun was ready there{quote}"),
    }
}

/// Message for a connection that ended after burnrun on the host had its order, and before it sent an exit code.
pub(super) fn lost(host: &str, said: &[String]) -> String {
    let own = |line: &&str| !line.is_empty() && !line.starts_with("[rank ");
    let quote =
        said.iter().rev().map(|line| line.trim()).find(own).map(|line| format!(" ({line})")).unwrap_or_default();
    format!("host {host} is lost: its connection ended, or burnrun was killed there{quote}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn causes_are_told_apart() {
        for (code, said, part) in [
            (255, "Host key verification failed.", "run `ssh b true` once"),
            (
                255,
                "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.",
                "ssh-keygen -R b",
            ),
            (255, "me@b: Permission denied (publickey).", "BatchMode"),
            (255, "ssh: Could not resolve hostname b: Name or service not known", "no such host"),
            (255, "ssh: connect to host b port 22: Connection refused", "does the machine run"),
            (255, "ssh: connect to host b port 22: Connection timed out", "timed out)"),
            (127, "bash: line 1: burnrun: command not found", "--remote-burnrun (bash: "),
            (2, "", "code 2"),
        ] {
            let said: Vec<_> = said.lines().map(str::to_owned).collect();
            let text = before_ready("b", "burnrun", Some(code), &said);
            assert!(text.contains(part) && text.starts_with("host b: "), "{text}");
        }
    }
}
