//! Description of models, and exchange of their values between ranks.
//!
//! | | |
//! |---|---|
//! | `schema` | paths, shapes and dtypes of parameters and buffers; the first difference between ranks |
//! | `digest` | hashes of values; parameters that differ between ranks |
//! | `parameter_movement` | size of the differences between ranks, relative to how far their parameters moved |
//! | `broadcast` | one rank's values on every rank |
//! | `running_stats` | BatchNorm's running statistics |
//! | `sync_buffers`, `check_replicas` | synchronising statistics, and comparing parameters, outside of a backward |
//! | `param_hash` | hash of the current values |
//! | `values` | parameters and buffers, each read from its device on demand |
//! | `save`, `safetensors` | one durable file, in Burn's format or for other programs |
//! | `burnpack_header`, `burnpack_tensors` | Burn's file format: its header, and the tensors that it describes |
//! | `burnpack_writer`, `burnpack_reader` | writing and reading files in Burn's format, one tensor at a time |

pub(crate) mod broadcast;
pub(crate) mod burnpack_header;
pub(crate) mod burnpack_reader;
pub(crate) mod burnpack_tensors;
pub(crate) mod burnpack_writer;
mod check_replicas;
pub(crate) mod digest;
pub(crate) mod param_hash;
pub(crate) mod parameter_movement;
#[cfg(test)]
mod replica_drift_tests;
pub(crate) mod running_stats;
pub(crate) mod safetensors;
mod save;
pub(crate) mod schema;
pub(crate) mod sync_buffers;
pub(crate) mod values;
