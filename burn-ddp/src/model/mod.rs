//! Description of models, and exchange of their values between ranks.
//!
//! | | |
//! |---|---|
//! | `schema` | paths, shapes and dtypes of its parameters and buffers; the first difference between ranks |
//! | `digest` | hashes of values; parameters that differ between ranks |
//! | `parameter_movement` | how far ranks that differ are apart, beside how far their parameters moved |
//! | `broadcast` | one rank's values on every rank |
//! | `running_stats` | BatchNorm's running statistics |
//! | `sync_buffers`, `check_replicas` | bringing them together, and comparing parameters, outside of a backward |
//! | `param_hash` | the values of this moment, and their hash |
//! | `values` | parameters and buffers, each read when it is asked for |
//! | `save`, `safetensors` | one durable file, Burn's or for other programs |
//! | `burnpack_header`, `burnpack_tensors` | Burn's file format: its header, and the tensors that it describes |
//! | `burnpack_writer`, `burnpack_reader` | such files written and read one tensor at a time |

pub(crate) mod broadcast;
pub(crate) mod burnpack_header;
pub(crate) mod burnpack_reader;
pub(crate) mod burnpack_tensors;
pub(crate) mod burnpack_writer;
mod check_replicas;
pub(crate) mod digest;
pub(crate) mod param_hash;
pub(crate) mod parameter_movement;
pub(crate) mod running_stats;
pub(crate) mod safetensors;
mod save;
pub(crate) mod schema;
pub(crate) mod sync_buffers;
pub(crate) mod values;
