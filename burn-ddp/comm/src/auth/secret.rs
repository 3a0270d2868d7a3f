//! The job's secret, random bytes in a file: made, read and checked.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

use crate::auth::hmac_key::{KEY_BYTES, Key, random};
use crate::{Error, Result};

/// Most bytes of a secret file that are read: room for its line and for what editors add.
const FILE_CAP: u64 = 256;

/// The secret that only the ranks of a job know: 32 random bytes.
///
/// Every connection of the job begins with a proof of it, both ways. In a file it is one line of 64 hexadecimal digits.
///
/// ```
/// use burn_ddp_comm::Secret;
///
/// let directory = tempfile::tempdir()?;
/// let path = directory.path().join("job.secret");
/// Secret::generate()?.write_new(&path)?;
/// let secret = Secret::read(&path)?;
/// assert_eq!(format!("{secret:?}"), "Secret(..)");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct Secret {
    key: Key,
    /// File that it was read from.
    file: Option<PathBuf>,
}

impl Secret {
    /// A new secret, from the operating system's random numbers.
    ///
    /// # Errors
    /// [`Error::Environment`] if the system gives no random numbers.
    pub fn generate() -> Result<Secret> {
        let bytes = random().map_err(|e| Error::environment(format!("the system gives no random numbers: {e}")))?;
        Ok(Secret::from_bytes(bytes))
    }

    /// The secret in the file at `path`.
    ///
    /// # Errors
    /// [`Error::Environment`] if the file cannot be read, belongs to another user, is open to other users, or does not
    /// hold a secret. An unlinked file, which only processes that inherited its descriptor can open, may have any owner
    /// and mode.
    pub fn read(path: &Path) -> Result<Secret> {
        let shown = path.display();
        let mut text = String::new();
        // Without this flag, opening a FIFO would block until a process writes to it.
        let file = OpenOptions::new().read(true).custom_flags(OFlags::NONBLOCK.bits() as i32).open(path);
        let file = file.and_then(|file| Ok((file.metadata()?, file)));
        let (about, file) = file
            .map_err(|e| Error::environment(format!("cannot read the secret file {shown}: {e}{}", hint(path, &e))))?;
        if !about.is_file() {
            return Err(Error::environment(format!("the secret file {shown} is not a regular file")));
        }
        let has_name = about.nlink() > 0;
        if has_name && about.mode() & 0o077 != 0 {
            return Err(Error::environment(format!(
                "other users may open the secret file {shown}; run: chmod 600 {shown}"
            )));
        }
        let me = rustix::process::geteuid().as_raw();
        if has_name && about.uid() != me && about.uid() != 0 {
            let owner = about.uid();
            return Err(Error::environment(format!(
                "the secret file {shown} belongs to user {owner}, but this process is of user {me}: make one of your \
                 own with `burnrun secret FILE`"
            )));
        }
        let junk = || Error::environment(format!("{shown} does not hold a secret: one line of 64 hexadecimal digits"));
        file.take(FILE_CAP).read_to_string(&mut text).map_err(|_| junk())?;
        let secret = Secret::parse(&text).ok_or_else(junk)?;
        // An unlinked file is the launcher's: its path would tell the user nothing.
        Ok(Secret { file: has_name.then(|| path.to_owned()), ..secret })
    }

    /// Writes it to a new file that only this user can read.
    ///
    /// # Errors
    /// [`Error::Environment`] if there is a file of this name already, or it cannot be written.
    pub fn write_new(&self, path: &Path) -> Result<()> {
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
        let written = file.and_then(|file| self.write_to(file));
        written.map_err(|e| match e.kind() {
            io::ErrorKind::AlreadyExists => {
                Error::environment(format!("{} exists; it is not overwritten", path.display()))
            }
            _ => Error::environment(format!("cannot write the secret file {}: {e}", path.display())),
        })
    }

    /// Writes its line to `file`, which should be one that only this user can read.
    ///
    /// # Errors
    /// The errors of writing to `file`.
    pub fn write_to(&self, mut file: File) -> io::Result<()> {
        file.write_all(format!("{}\n", self.digits()).as_bytes())
    }

    /// The secret as 64 hexadecimal digits, as in its file.
    pub(crate) fn digits(&self) -> String {
        hex(self.key.bytes())
    }

    /// The secret in `text`, the content of a file.
    pub(crate) fn parse(text: &str) -> Option<Secret> {
        unhex(text.trim()).map(Secret::from_bytes)
    }

    pub(super) fn from_bytes(bytes: [u8; KEY_BYTES]) -> Secret {
        Secret { key: Key::new(bytes), file: None }
    }

    pub(crate) fn key(&self) -> &Key {
        &self.key
    }

    pub(super) fn file(&self) -> Option<&Path> {
        self.file.as_deref()
    }
}

pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Decodes `N` bytes from as many pairs of hexadecimal digits; `None` if `digits` are anything else.
pub(super) fn unhex<const N: usize>(digits: &str) -> Option<[u8; N]> {
    let mut bytes = [0; N];
    if digits.len() != 2 * N {
        return None;
    }
    let value = |digit: u8| char::from(digit).to_digit(16);
    for (byte, pair) in bytes.iter_mut().zip(digits.as_bytes().chunks_exact(2)) {
        *byte = u8::try_from(16 * value(pair[0])? + value(pair[1])?).ok()?;
    }
    Some(bytes)
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// Advice for a secret file that burnrun handed over as an open descriptor, and that this process cannot open.
fn hint(path: &Path, error: &io::Error) -> &'static str {
    let is_closed = matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied);
    if !(is_closed && path.starts_with("/proc")) {
        return "";
    }
    "; burnrun handed it over as an open descriptor, which a program between burnrun and this process has closed, and \
     this process cannot open burnrun's own descriptor, of another user or PID namespace: give burnrun --secret-file \
     FILE, and this process BURN_DDP_SECRET_FILE=COPY, a copy that its user owns"
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn says(path: &Path, part: &str) {
        let error = Secret::read(path).unwrap_err();
        assert!(matches!(error, Error::Environment { .. }) && error.to_string().contains(part), "{error}");
    }

    #[test]
    fn a_fifo_is_refused_at_once() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("fifo");
        let made = std::process::Command::new("mkfifo").args(["-m", "600"]).arg(&path).status().unwrap();
        assert!(made.success());
        let error = Secret::read(&path).unwrap_err();
        assert!(error.to_string().contains("is not a regular file"), "{error}");
    }

    #[test]
    fn what_is_written_is_read_by_this_user_only() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("secret");
        let secret = Secret::generate().unwrap();
        secret.write_new(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        assert_eq!(Secret::read(&path).unwrap().key.bytes(), secret.key.bytes());
        assert!(secret.write_new(&path).unwrap_err().to_string().contains("not overwritten"));
        fs::set_permissions(&path, Permissions::from_mode(0o640)).unwrap();
        says(&path, &format!("chmod 600 {}", path.display()));
    }

    #[test]
    fn two_secrets_differ_and_none_is_shown() {
        let (a, b) = (Secret::generate().unwrap(), Secret::generate().unwrap());
        assert_ne!(a.key.bytes(), b.key.bytes());
        assert_eq!(format!("{a:?}"), "Secret(..)");
    }

    #[test]
    fn other_files_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("junk");
        says(&path, "No such file");
        says(Path::new("/dev/null"), "not a regular file");
        for junk in ["", "abc", &"g".repeat(64), &"0".repeat(63), &"0".repeat(65), &"ü".repeat(32), &"0".repeat(4096)]
        {
            fs::write(&path, junk).unwrap();
            fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
            says(&path, "64 hexadecimal digits");
        }
        fs::write(&path, format!("  {}\r\n", "0aF1".repeat(16))).unwrap();
        Secret::read(&path).unwrap();
    }
}
