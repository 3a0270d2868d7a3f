//! Loading of a library at run time, and tables of its functions: how this crate reaches NCCL.
//!
//! cudarc is used for the driver only. For NCCL it does not fit: it panics if the library or a symbol of a newer NCCL
//! is missing, never tries `libnccl.so.2`, which pip and Debian install, and has Rust enums for results and operators,
//! while NCCL makes operators at run time.
#![allow(unsafe_code)]

use std::error::Error as _;

use libloading::Library;

/// Declares functions of a library: a trait of the functions, and its implementation by the symbols of a loaded
/// library. Tests implement the trait themselves. All types are plain C types, since an enum could not hold the results
/// of newer versions.
macro_rules! foreign {
    (
        $(#[$meta:meta])*
        $calls:ident, $table:ident {
            $( $(#[$doc:meta])* fn $name:ident($($arg:ident: $ty:ty),* $(,)?) -> $ret:ty = $symbol:literal; )*
        }
    ) => {
        $(#[$meta])*
        ///
        /// # Safety
        /// The arguments are what the documentation of the C function asks for.
        #[allow(missing_docs, clippy::missing_safety_doc, clippy::too_many_arguments, reason = "C's functions")]
        pub trait $calls: Send + Sync {
            $( $(#[$doc])* unsafe fn $name(&self, $($arg: $ty),*) -> $ret; )*
        }

        pub(crate) struct $table {
            $( $name: unsafe extern "C" fn($($ty),*) -> $ret, )*
        }

        impl $table {
            /// Functions of `library`, or the name of the first function that it lacks.
            ///
            /// # Safety
            /// The library has functions of these types, and is never unloaded.
            pub(crate) unsafe fn of(library: &libloading::Library) -> Result<$table, &'static str> {
                // SAFETY: the types are those of the library's header, by the contract of this function.
                unsafe {
                    Ok($table { $( $name: *library.get($symbol).map_err(|_| $symbol)?, )* })
                }
            }
        }

        impl $calls for $table {
            $(
                unsafe fn $name(&self, $($arg: $ty),*) -> $ret {
                    // SAFETY: the caller promises what the function asks for.
                    unsafe { (self.$name)($($arg),*) }
                }
            )*
        }
    };
}
pub(crate) use foreign;

/// Loads the first library of `names` that can be loaded, and returns it with its name. Otherwise returns the reason
/// for each. A library is never unloaded: it has threads of its own.
pub(crate) fn load(names: &[String]) -> Result<(&'static Library, String), String> {
    let mut tried = Vec::new();
    for name in names {
        // SAFETY: names of NVIDIA's libraries, or a path that the user chose; their initialisers have no conditions.
        match unsafe { Library::new(name) } {
            Ok(library) => return Ok((Box::leak(Box::new(library)), name.clone())),
            // The loader's own message is general; its source is the system's message.
            Err(error) => tried.push(match error.source() {
                Some(why) => format!("{name}: {why}"),
                None => format!("{name}: {error}"),
            }),
        }
    }
    Err(tried.join("; "))
}
