//! Description of models, and exchange of their values between ranks.
//!
//! | | |
//! |---|---|
//! | `schema` | paths, shapes and dtypes of its parameters and buffers; the first difference between ranks |
//! | `digest` | hashes of values; parameters that differ between ranks |
//! | `broadcast` | one rank's values on every rank |
//! | `running_stats` | BatchNorm's running statistics |
//! | `save` | one durable file |

pub(crate) mod broadcast;
pub(crate) mod digest;
pub(crate) mod running_stats;
pub(crate) mod save;
pub(crate) mod schema;
