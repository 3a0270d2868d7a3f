//! A call of a deadlock, as its error shows it.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::peer_info::list_ranks;
use crate::call::CallInfo;

/// A call under way in which ranks wait for others that will never come.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StuckCall {
    /// The ranks that are in it.
    pub ranks: Vec<usize>,
    /// The call, as the first of them made it.
    pub call: CallInfo,
    /// Those of the ranks they wait for that are in the next call of the circle.
    pub missing: Vec<usize>,
}

impl fmt::Display for StuckCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let are = if self.ranks.len() == 1 { "is" } else { "are" };
        let (ranks, missing) = (list_ranks(&self.ranks), list_ranks(&self.missing));
        write!(f, "{ranks} {are} in {}, which waits for {missing}", self.call)
    }
}
