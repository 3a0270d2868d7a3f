//! The NCCL library: its functions, and their results as errors.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt;
use std::sync::Arc;

use burn_ddp_comm::{DType, ReduceOp, Result};

use crate::dlopen::{foreign, load};
use crate::error::environment;

/// `ncclComm_t`.
pub type RawComm = *mut c_void;

/// `ncclUniqueId`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct UniqueId(pub [u8; UNIQUE_ID_BYTES]);

/// The size of a [`UniqueId`].
pub const UNIQUE_ID_BYTES: usize = 128;

impl fmt::Debug for UniqueId {
    /// Shows no bytes: a process that knows the id may join.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("UniqueId(..)")
    }
}

/// `ncclConfig_t` of NCCL 2.18. Later versions take it as well: its size tells them which fields it has.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Config {
    size: usize,
    magic: u32,
    version: u32,
    /// 0 if calls may return before they are done, with [`IN_PROGRESS`].
    pub blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
    /// End of the layout; a later version has a field here.
    reserved: c_int,
}

impl Config {
    /// NCCL's defaults, with blocking or non-blocking calls.
    pub fn new(blocking: bool) -> Config {
        const UNSET: c_int = c_int::MIN;
        Config {
            size: size_of::<Config>(),
            magic: 0xcafe_beef,
            // The version of this layout, not of the library.
            version: MIN_VERSION as u32,
            blocking: c_int::from(blocking),
            cga_cluster_size: UNSET,
            min_ctas: UNSET,
            max_ctas: UNSET,
            net_name: std::ptr::null(),
            split_share: UNSET,
            reserved: UNSET,
        }
    }
}

/// Oldest version with all functions used here: 2.18.
pub const MIN_VERSION: c_int = 21800;

/// `ncclSuccess`.
pub const SUCCESS: c_int = 0;
/// `ncclRemoteError`: a peer is gone.
pub const REMOTE_ERROR: c_int = 6;
/// `ncclInProgress`: the call goes on in the background.
pub const IN_PROGRESS: c_int = 7;
/// `ncclScalarHostImmediate`: a scalar is read from host memory before the call returns.
pub const SCALAR_HOST_IMMEDIATE: c_int = 1;

foreign! {
    /// Functions of NCCL that this crate uses.
    NcclCalls, Symbols {
        fn get_version(version: *mut c_int) -> c_int = "ncclGetVersion";
        fn get_unique_id(id: *mut UniqueId) -> c_int = "ncclGetUniqueId";
        fn comm_init_rank_config(
            comm: *mut RawComm, size: c_int, id: UniqueId, rank: c_int, config: *mut Config,
        ) -> c_int = "ncclCommInitRankConfig";
        fn comm_get_async_error(comm: RawComm, error: *mut c_int) -> c_int = "ncclCommGetAsyncError";
        fn comm_finalize(comm: RawComm) -> c_int = "ncclCommFinalize";
        fn comm_destroy(comm: RawComm) -> c_int = "ncclCommDestroy";
        fn comm_abort(comm: RawComm) -> c_int = "ncclCommAbort";
        fn get_error_string(error: c_int) -> *const c_char = "ncclGetErrorString";
        fn get_last_error(comm: RawComm) -> *const c_char = "ncclGetLastError";
        fn group_start() -> c_int = "ncclGroupStart";
        fn group_end() -> c_int = "ncclGroupEnd";
        fn all_reduce(
            input: *const c_void, output: *mut c_void, count: usize, dtype: c_int, op: c_int, comm: RawComm,
            stream: *mut c_void,
        ) -> c_int = "ncclAllReduce";
        fn reduce(
            input: *const c_void, output: *mut c_void, count: usize, dtype: c_int, op: c_int, root: c_int,
            comm: RawComm, stream: *mut c_void,
        ) -> c_int = "ncclReduce";
        fn broadcast(
            input: *const c_void, output: *mut c_void, count: usize, dtype: c_int, root: c_int, comm: RawComm,
            stream: *mut c_void,
        ) -> c_int = "ncclBroadcast";
        fn all_gather(
            input: *const c_void, output: *mut c_void, count: usize, dtype: c_int, comm: RawComm, stream: *mut c_void,
        ) -> c_int = "ncclAllGather";
        fn reduce_scatter(
            input: *const c_void, output: *mut c_void, count: usize, dtype: c_int, op: c_int, comm: RawComm,
            stream: *mut c_void,
        ) -> c_int = "ncclReduceScatter";
        fn send(
            input: *const c_void, count: usize, dtype: c_int, peer: c_int, comm: RawComm, stream: *mut c_void,
        ) -> c_int = "ncclSend";
        fn recv(
            output: *mut c_void, count: usize, dtype: c_int, peer: c_int, comm: RawComm, stream: *mut c_void,
        ) -> c_int = "ncclRecv";
        fn red_op_create_pre_mul_sum(
            op: *mut c_int, scalar: *mut c_void, dtype: c_int, residence: c_int, comm: RawComm,
        ) -> c_int = "ncclRedOpCreatePreMulSum";
        fn red_op_destroy(op: c_int, comm: RawComm) -> c_int = "ncclRedOpDestroy";
    }
}

/// A loaded NCCL.
#[derive(Clone)]
pub struct Nccl {
    calls: Arc<dyn NcclCalls>,
    version: c_int,
}

impl Nccl {
    /// Loads the library at `$BURN_DDP_NCCL`, or `libnccl.so.2` or `libnccl.so` from the system's library folders.
    ///
    /// # Errors
    /// [`Error::Environment`](burn_ddp_comm::Error::Environment) that names the package or variable, if there is none
    /// or it is older than 2.18.
    pub fn load() -> Result<Nccl> {
        Nccl::load_from(std::env::var("BURN_DDP_NCCL").ok().filter(|path| !path.is_empty()).as_deref())
    }

    /// [`load`](Self::load), but only from `path` if there is one.
    ///
    /// # Errors
    /// Those of `load`.
    pub fn load_from(path: Option<&str>) -> Result<Nccl> {
        let names = match path {
            // No fallback: loading a version other than the chosen one would be a surprise.
            Some(path) => vec![path.to_owned()],
            None => vec!["libnccl.so.2".to_owned(), "libnccl.so".to_owned()],
        };
        let (library, name) = load(&names).map_err(|tried| {
            environment(match path {
                Some(_) => {
                    format!("NCCL cannot be loaded from BURN_DDP_NCCL ({tried}): set it to the path of libnccl.so.2")
                }
                None => format!("NCCL was not found ({tried}). {INSTALL}"),
            })
        })?;
        // SAFETY: a library of NCCL's name or of the user's choice; it stays loaded.
        let symbols = unsafe { Symbols::of(library) }.map_err(|symbol| {
            environment(format!("{name} has no {symbol}: it is not NCCL, or is older than 2.18. {INSTALL}"))
        })?;
        Nccl::of(Arc::new(symbols)).map_err(|error| environment(format!("{name}: {error}")))
    }

    /// An NCCL that consists of the functions `calls`.
    ///
    /// # Errors
    /// [`Error::Environment`](burn_ddp_comm::Error::Environment) if its version is older than 2.18 or cannot be read.
    pub fn of(calls: Arc<dyn NcclCalls>) -> Result<Nccl> {
        let mut version = 0;
        // SAFETY: a valid out-pointer.
        let code = unsafe { calls.get_version(&mut version) };
        let nccl = Nccl { calls, version };
        nccl.check("ncclGetVersion", std::ptr::null_mut(), code).map_err(environment)?;
        if version < MIN_VERSION {
            return Err(environment(format!(
                "NCCL {} is too old: burn-ddp needs 2.18 or later. {INSTALL}",
                nccl.version_text()
            )));
        }
        Ok(nccl)
    }

    /// Version in NCCL's encoding: 2.18.3 is 21803.
    pub fn version(&self) -> i32 {
        self.version
    }

    /// Version as text, like `2.18.3`.
    pub fn version_text(&self) -> String {
        version_text(self.version)
    }

    pub(crate) fn calls(&self) -> &dyn NcclCalls {
        &*self.calls
    }

    /// Id of a new communicator.
    ///
    /// # Errors
    /// NCCL's message.
    pub fn unique_id(&self) -> Result<UniqueId, String> {
        let mut id = UniqueId([0; UNIQUE_ID_BYTES]);
        // SAFETY: a valid out-pointer.
        let code = unsafe { self.calls.get_unique_id(&mut id) };
        self.check("ncclGetUniqueId", std::ptr::null_mut(), code)?;
        Ok(id)
    }

    /// Fails with NCCL's message if `code`, the result of `call`, is an error. `comm` is null or a communicator.
    pub(crate) fn check(&self, call: &str, comm: RawComm, code: c_int) -> Result<(), String> {
        if code == SUCCESS || code == IN_PROGRESS {
            return Ok(());
        }
        let text = |pointer: *const c_char| match pointer.is_null() {
            true => String::new(),
            // SAFETY: NCCL's texts end with a zero and stay.
            false => unsafe { CStr::from_ptr(pointer) }.to_string_lossy().trim().to_owned(),
        };
        // SAFETY: both take any code, and null for no communicator.
        let (what, last) = unsafe { (text(self.calls.get_error_string(code)), text(self.calls.get_last_error(comm))) };
        let last = if last.is_empty() { last } else { format!("; {last}") };
        Err(format!("{call}: {what} (code {code}){last}"))
    }
}

impl fmt::Debug for Nccl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Nccl({})", self.version_text())
    }
}

const INSTALL: &str = "Install it (pip: nvidia-nccl-cu12 or nvidia-nccl-cu13, whichever fits the driver; Debian and \
                       Ubuntu: libnccl2) where libraries are found, or set BURN_DDP_NCCL=/path/to/libnccl.so.2";

/// `2.18.3` for 21803.
pub(crate) fn version_text(version: i32) -> String {
    format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
}

/// `ncclDataType_t`.
pub(crate) fn dtype_code(dtype: DType) -> c_int {
    match dtype {
        DType::I8 => 0,
        // Bools have only min and max, which are `and` and `or` of 0 and 1.
        DType::U8 | DType::Bool => 1,
        DType::I32 => 2,
        DType::I64 => 4,
        DType::F16 => 6,
        DType::F32 => 7,
        DType::F64 => 8,
        DType::BF16 => 9,
    }
}

/// `ncclRedOp_t`.
pub(crate) fn op_code(op: ReduceOp) -> c_int {
    match op {
        ReduceOp::Sum => 0,
        ReduceOp::Product => 1,
        ReduceOp::Max => 2,
        ReduceOp::Min => 3,
        ReduceOp::Mean => 4,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_there_is_an_error_that_says_what_to_do() {
        let error = Nccl::load_from(Some("/nowhere/libnccl.so.2")).unwrap_err().to_string();
        assert!(error.contains("BURN_DDP_NCCL") && error.contains("/nowhere/libnccl.so.2"), "{error}");
    }

    #[test]
    fn a_library_that_is_another_is_refused() {
        let error = Nccl::load_from(Some("libc.so.6")).unwrap_err().to_string();
        assert!(error.contains("libc.so.6 has no ncclGetVersion") && error.contains("nvidia-nccl-cu12"), "{error}");
    }

    /// Without a GPU NCCL loads, makes ids, takes our structures by value and by address, and has texts for errors.
    #[test]
    #[ignore = "needs NCCL: set BURN_DDP_NCCL"]
    fn the_real_one_loads() {
        let nccl = Nccl::load().unwrap();
        assert!(nccl.version() >= MIN_VERSION && nccl.version() < 100_000, "{nccl:?}");
        let ids = [nccl.unique_id().unwrap().0, nccl.unique_id().unwrap().0];
        assert!(ids[0] != ids[1] && ids[0] != [0; UNIQUE_ID_BYTES]);
        let (mut comm, mut config): (RawComm, Config) = (std::ptr::null_mut(), Config::new(false));
        // SAFETY: valid pointers to a handle and a configuration, and a rank below the size.
        let code = unsafe { nccl.calls().comm_init_rank_config(&mut comm, 1, UniqueId(ids[0]), 0, &mut config) };
        println!(
            "{nccl:?}: init returns {code}, {:?}",
            nccl.check("ncclCommInitRankConfig", std::ptr::null_mut(), code)
        );
        let error = nccl.check("ncclGroupEnd", std::ptr::null_mut(), 2).unwrap_err();
        assert!(error.starts_with("ncclGroupEnd: unhandled system error") && error.contains("(code 2)"), "{error}");
    }

    #[test]
    fn the_configuration_has_the_layout_of_2_18() {
        assert_eq!((size_of::<Config>(), std::mem::offset_of!(Config, blocking)), (48, 16));
        assert_eq!((std::mem::offset_of!(Config, net_name), std::mem::offset_of!(Config, split_share)), (32, 40));
        assert_eq!(version_text(MIN_VERSION), "2.18.0");
        assert_eq!(version_text(22907), "2.29.7");
    }

    #[test]
    fn codes_are_those_of_the_header() {
        let dtypes: Vec<c_int> = DType::ALL.map(dtype_code).to_vec();
        assert_eq!(dtypes, [8, 7, 6, 9, 4, 2, 0, 1, 1]);
        assert_eq!(ReduceOp::ALL.map(op_code), [0, 4, 3, 2, 1]);
    }
}
