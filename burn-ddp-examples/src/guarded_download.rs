//! Burn's downloads, with a deadline, and with errors instead of panics.

use std::any::Any;
use std::sync::mpsc;
use std::time::Duration;

use anyhow::{Result, anyhow};

/// Deadline of a download; Burn's downloader has none.
const DEADLINE: Duration = Duration::from_secs(300);

/// Runs `download` on a thread of its own and returns its result. Burn panics if the network or the cache fails; the
/// panic becomes an error.
pub(crate) fn guarded<T: Send + 'static>(download: impl FnOnce() -> T + Send + 'static) -> Result<T> {
    let (sender, done) = mpsc::channel();
    let quiet = QuietPanics::start();
    std::thread::Builder::new().name("download".into()).spawn(move || {
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(download));
        // The receiver is gone once the deadline has passed.
        let _ = sender.send(result);
    })?;
    let result = done.recv_timeout(DEADLINE);
    drop(quiet);
    result
        .map_err(|_| anyhow!("no answer within {} s; is the network reachable?", DEADLINE.as_secs()))?
        .map_err(|panic| anyhow!("{}; is the network reachable?", message(panic.as_ref())))
}

fn message(panic: &(dyn Any + Send)) -> &str {
    panic
        .downcast_ref::<String>()
        .map(String::as_str)
        .or_else(|| panic.downcast_ref::<&str>().copied())
        .unwrap_or("Burn's download panicked")
}

/// Guard under which panics print nothing: the panic expected here becomes an error.
struct QuietPanics(Option<Box<dyn Fn(&std::panic::PanicHookInfo<'_>) + Sync + Send + 'static>>);

impl QuietPanics {
    fn start() -> Self {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(|_| {}));
        Self(Some(before))
    }
}

impl Drop for QuietPanics {
    fn drop(&mut self) {
        if let Some(before) = self.0.take()
            && !std::thread::panicking()
        {
            std::panic::set_hook(before);
        }
    }
}
