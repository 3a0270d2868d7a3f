//! A call that is part of a deadlock, as shown in the error.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::peer_info::list_ranks;
use crate::call::CallInfo;

/// A pending call in which ranks wait for others that will never make it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StuckCall {
    /// The ranks that are in the call.
    pub ranks: Vec<usize>,
    /// The call, as the first of these ranks made it.
    pub call: CallInfo,
    /// Purpose of the call, such as `reads a.weight`, if this rank knows it; see
    /// [`ProcessGroup::explain_tags`](crate::ProcessGroup::explain_tags). Not sent to other ranks.
    #[serde(skip)]
    pub purpose: Option<String>,
    /// Awaited ranks that are blocked in the next call of the deadlock.
    pub missing: Vec<usize>,
}

impl fmt::Display for StuckCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (ranks, missing) = (list_ranks(&self.ranks), list_ranks(&self.missing));
        let (each, are) = if self.ranks.len() == 1 { ("", "is") } else { ("each of ", "are") };
        match &self.purpose {
            Some(purpose) => write!(f, "{each}{ranks} {purpose} and is")?,
            None => write!(f, "{ranks} {are}")?,
        }
        write!(f, " in {}, which waits for {missing}", self.call)
    }
}
