//! Description of models, and exchange of their values between ranks.
//!
//! | | |
//! |---|---|
//! | `schema` | paths, shapes and dtypes of its parameters and buffers; the first difference between ranks |
//! | `digest` | hashes of values; parameters that differ between ranks |
//! | `movement` | how far ranks that differ are apart, beside how far their parameters moved |
//! | `broadcast` | one rank's values on every rank |
//! | `running_stats` | BatchNorm's running statistics |
//! | `sync_buffers`, `check_replicas` | bringing them together, and comparing parameters, outside of a backward |
//! | `param_hash` | the values of this moment, and their hash |
//! | `save`, `safetensors` | one durable file, Burn's or for other programs |

pub(crate) mod broadcast;
mod check_replicas;
pub(crate) mod digest;
pub(crate) mod movement;
pub(crate) mod param_hash;
pub(crate) mod running_stats;
pub(crate) mod safetensors;
mod save;
pub(crate) mod schema;
pub(crate) mod sync_buffers;
