//! Reports of a job: notices while it runs, and how it ended, for a terminal and as files.

pub(crate) mod archive;
pub(crate) mod event_file;
mod markdown;
pub(crate) mod notices;
pub(crate) mod outcome;
pub(crate) mod stderr_tail;
pub(crate) mod text;
