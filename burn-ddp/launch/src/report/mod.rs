//! Reports of a job: notices while it runs, and its outcome, for a terminal and as files.

pub(crate) mod event_file;
mod markdown;
pub(crate) mod outcome;
pub(crate) mod outcome_text;
pub(crate) mod report_files;
pub(crate) mod stderr_tail;
pub(crate) mod user_notices;
