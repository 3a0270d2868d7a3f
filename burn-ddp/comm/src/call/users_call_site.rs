//! Calls that a library makes for its user: errors show the user's line instead of the library's.

use std::cell::Cell;
use std::panic::Location;

use super::call_arguments::Site;

thread_local! {
    /// The line that errors show for calls of this thread, while [`attribute_calls`] runs.
    static ON_BEHALF_OF: Cell<Option<Site>> = const { Cell::new(None) };
}

/// Runs `f`. Errors and reports of the calls that `f` makes on this thread show `site` as the caller: for code that
/// runs in a callback, where `#[track_caller]` would show a line of that code instead of the user's.
///
/// ```
/// use burn_ddp_comm::{World, WorldOptions, attribute_calls};
/// use std::panic::Location;
///
/// let group = World::solo(WorldOptions::default()).group()?;
/// let site = Location::caller(); // in a library: the line of the user's call, kept for later
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

/// The line that [`attribute_calls`] has set for calls of this thread, if any.
#[inline]
pub(crate) fn on_behalf_of() -> Option<Site> {
    ON_BEHALF_OF.get()
}
