#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| burn_ddp_launch::fuzzing::hosts(bytes));
