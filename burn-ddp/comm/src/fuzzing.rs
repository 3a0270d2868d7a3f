//! Parsers of bytes from the network and from disk, for the fuzz targets in `fuzz/`. Each function takes any bytes; a
//! panic is a bug.
#![allow(missing_docs)]

use crate::Secret;
use crate::frame::{PREFIX_BYTES, Prefix};
use crate::membership::{ControlMessage, Envelope};
use crate::post_mortem::{Event, PostMortem};
use crate::store::key_value_table::{Table, check};
use crate::store::protocol::{MESSAGE_CAP, Request, Response};

pub fn handshake(bytes: &[u8]) {
    crate::auth::handshake::fuzz(bytes);
}

pub fn frame(bytes: &[u8]) {
    let Some((prefix, rest)) = bytes.split_first_chunk::<PREFIX_BYTES>() else { return };
    let Ok(prefix) = Prefix::decode(prefix) else { return };
    let Some(site) = rest.get(..prefix.site_bytes()) else { return };
    let (mut once, mut twice) = (Vec::new(), Vec::new());
    prefix.finish(site).encode(&mut once);
    let (prefix, site) = once.split_first_chunk().expect("a whole header");
    Prefix::decode(prefix).expect("what we encode, we decode").finish(site).encode(&mut twice);
    assert_eq!(once, twice);
}

pub fn wire(bytes: &[u8]) {
    crate::net::encrypted_messages::fuzz(bytes);
}

pub fn data_stream(bytes: &[u8]) {
    crate::engine::tcp::fuzz_data_stream(bytes);
}

pub fn store(mut bytes: &[u8]) {
    let mut table = Table::default();
    while let Ok((request, rest)) = postcard::take_from_bytes::<Request>(bytes) {
        assert!(postcard::to_stdvec(&request).is_ok_and(|again| again.len() <= MESSAGE_CAP.max(bytes.len())));
        let _ = match request {
            Request::Set { key, value } => table.set(&key, &value),
            Request::SetNew { key, value } => table.set_new(&key, &value).map(drop),
            Request::Add { key, delta } => table.add(&key, delta).map(drop),
            Request::Keys { prefix } => table.keys(&prefix).map(drop),
            Request::Get { key, .. } => table.get(&key).map(drop),
            Request::LastWill { entries } => entries.iter().try_for_each(|(key, value)| check(key, value)),
        };
        bytes = rest;
    }
    let _ = postcard::from_bytes::<Response>(bytes);
}

pub fn control(bytes: &[u8]) {
    if let Ok(Envelope { origin, message }) = postcard::from_bytes::<Envelope<ControlMessage>>(bytes) {
        crate::membership::routes::fuzz(origin);
        if let ControlMessage::PassedOn(beats) = &message {
            beats.iter().for_each(|(origin, _)| crate::membership::routes::fuzz(*origin));
        }
        let again = postcard::to_stdvec(&Envelope { origin, message: &message }).expect("what we decode, we encode");
        assert!(postcard::from_bytes::<Envelope<ControlMessage>>(&again).is_ok());
    }
}

pub fn rendezvous(bytes: &[u8]) {
    crate::rendezvous::meeting_round::fuzz(bytes);
}

pub fn reports(bytes: &[u8]) {
    if let Ok(text) = str::from_utf8(bytes)
        && let Some(event) = Event::parse(text)
    {
        assert_eq!(Event::parse(&event.to_line()), Some(event));
    }
    if let Ok(report) = serde_json::from_slice::<PostMortem>(bytes) {
        assert!(serde_json::to_vec(&report).is_ok());
    }
}

pub fn timeline(bytes: &[u8]) {
    crate::timeline::fuzz(bytes);
}

pub fn pmi(bytes: &[u8]) {
    crate::pmi::fuzz(bytes);
}

pub fn slurm(bytes: &[u8]) {
    crate::env::fuzz_slurm_lists(bytes);
}

pub fn variables(bytes: &[u8]) {
    crate::env::fuzz_variables(bytes);
}

pub fn secret(bytes: &[u8]) {
    if let Ok(text) = str::from_utf8(bytes) {
        assert_eq!(Secret::parse(text).is_some(), {
            let digits = text.trim();
            digits.len() == 64 && digits.bytes().all(|byte| byte.is_ascii_hexdigit())
        });
    }
}

pub fn object(bytes: &[u8]) {
    type Object = (Vec<String>, Option<Vec<f32>>, std::collections::BTreeMap<u64, (bool, String)>);
    if let Ok(object) = crate::group::decode::<Object>(bytes) {
        assert!(postcard::to_stdvec(&object).is_ok());
    }
}
