//! Calls that code makes on behalf of another.

use std::cell::Cell;
use std::panic::Location;

use super::call_arguments::Site;

thread_local! {
    /// The line that errors show for calls of this thread, while [`attribute_calls`] runs.
    static ON_BEHALF_OF: Cell<Option<Site>> = const { Cell::new(None) };
}

/// Runs `f`. Errors and reports of the calls that it makes on this thread show `site` as the caller: for code that is
/// called back, so that `#[track_caller]` ends at a line of its own.
///
/// ```
/// use burn_ddp_comm::{World, WorldOptions, attribute_calls};
/// use std::panic::Location;
///
/// let group = World::solo(WorldOptions::default()).group()?;
/// let site = Location::caller(); // of an earlier call, which the user made
/// let error = attribute_calls(site, || group.broadcast(&mut [0.0_f32], 7)).unwrap_err();
/// assert!(error.to_string().contains(&site.to_string()), "{error}");
/// # Ok::<(), burn_ddp_comm::Error>(())
/// ```
pub fn attribute_calls<T>(site: &'static Location<'static>, f: impl FnOnce() -> T) -> T {
    struct Restore(Option<Site>);
    impl Drop for Restore {
        fn drop(&mut self) {
            ON_BEHALF_OF.set(self.0);
        }
    }
    let _restore = Restore(ON_BEHALF_OF.replace(Some(site)));
    f()
}

/// The line for a call of this thread, unless it is the caller's.
#[inline]
pub(crate) fn on_behalf_of() -> Option<Site> {
    ON_BEHALF_OF.get()
}
