//! The line of a call, in a cell that one thread writes and others may read at any time.
#![allow(unsafe_code)]

use std::panic::Location;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

use crate::call::CallSite;

/// A line of this program, or none.
#[derive(Debug, Default)]
pub(super) struct SiteCell {
    /// Null, or a pointer made from a `&'static Location<'static>`.
    line: AtomicPtr<Location<'static>>,
    /// True if a model was wrapped at `line`. A reader may see it with the line of another call, which changes only the
    /// words of a report.
    wrapped: AtomicBool,
}

impl SiteCell {
    /// Keeps a line of this program; any other line becomes an unknown one.
    pub(super) fn set(&self, site: &CallSite) {
        let line = match site {
            CallSite::Here(line) | CallSite::Wrapped(line) => ptr::from_ref(*line).cast_mut(),
            CallSite::Unknown | CallSite::There(_) => ptr::null_mut(),
        };
        self.line.store(line, Ordering::Relaxed);
        self.wrapped.store(matches!(site, CallSite::Wrapped(_)), Ordering::Relaxed);
    }

    pub(super) fn get(&self) -> CallSite {
        // SAFETY: the pointer is null or comes from a `&'static Location<'static>`, since `set` alone writes it: what
        // it points to lives for ever, never changes, and was there before the program began, so any thread may read
        // it.
        let line: Option<&'static Location<'static>> = unsafe { self.line.load(Ordering::Relaxed).as_ref() };
        let known = if self.wrapped.load(Ordering::Relaxed) { CallSite::Wrapped } else { CallSite::Here };
        line.map_or(CallSite::Unknown, known)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_this_program_is_kept() {
        let cell = SiteCell::default();
        assert_eq!(cell.get(), CallSite::Unknown);
        cell.set(&Location::caller().into());
        assert!(cell.get().to_string().starts_with(file!()));
        cell.set(&CallSite::Wrapped(Location::caller()));
        assert!(cell.get().to_string().ends_with(" (wrap)"));
        cell.set(&"a.rs:1:1".into());
        assert_eq!(cell.get(), CallSite::Unknown);
    }
}
