//! Errors of an MPI that cannot be used.

use burn_ddp_comm::Error;

use crate::ffi::{Failure, library};

/// Error of the machine's installation, or of how the job was started.
pub(crate) fn environment(message: String) -> Error {
    Error::Environment { message }
}

/// Error for a call of MPI that failed outside of any exchange.
pub(crate) fn call_failed(failure: Failure) -> Error {
    environment(format!("{}: {failure}", library()))
}
