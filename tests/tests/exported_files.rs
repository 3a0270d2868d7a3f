//! Files for other programs: safetensors and TensorBoard events. This test reads them by the definitions of the
//! formats. They stay below the target directory, where `tests/exported_files.py` reads them with the formats' Python
//! packages.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use burn::module::{Param, ParamId};
use burn::nn::{Linear, LinearConfig};
use burn::prelude::*;
use burn_ddp::prelude::*;
use serde_json::Value;

/// Parameters and buffers of several kinds.
#[derive(Module, Debug)]
struct Mixed {
    flags: Param<Tensor<1, Bool>>,
    linear: Linear,
    counts: Param<Tensor<1, Int>>,
}

impl Mixed {
    fn new(device: &Device) -> Self {
        let ramp = |n: usize| Tensor::<1, Int>::arange(0..n as i64, device).float() / 2.0;
        let mut linear = LinearConfig::new(4, 3).init(device);
        linear.weight = Param::from_tensor(ramp(12).reshape([4, 3]));
        linear.bias = Some(Param::from_tensor(ramp(3)));
        let flags = Param::initialized(ParamId::new(), Tensor::from_data([true, false, true], device));
        let counts = Tensor::from_data(TensorData::from([0_i64, 1, 2, 3, 4]), (device, burn::tensor::DType::I64));
        Mixed { flags, linear, counts: Param::initialized(ParamId::new(), counts) }
    }
}

/// A new directory, which the test does not remove.
fn directory(name: &str) -> PathBuf {
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("exported_files").join(name);
    let _ = fs::remove_dir_all(&directory);
    fs::create_dir_all(&directory).unwrap();
    directory
}

/// Tensors of a safetensors file by name: dtype, shape and bytes.
fn read(path: &Path) -> BTreeMap<String, (String, Value, Vec<u8>)> {
    let bytes = fs::read(path).unwrap();
    let (length, rest) = bytes.split_at(8);
    let (header, data) = rest.split_at(u64::from_le_bytes(length.try_into().unwrap()) as usize);
    let header: BTreeMap<String, Value> = serde_json::from_slice(header).unwrap();
    let mut ends = vec![0];
    let tensors = header.into_iter().filter(|(name, _)| name != "__metadata__").map(|(name, about)| {
        let [begin, end] = [0, 1].map(|nth| about["data_offsets"][nth].as_u64().unwrap() as usize);
        ends.push(end);
        (name, (about["dtype"].as_str().unwrap().to_owned(), about["shape"].clone(), data[begin..end].to_vec()))
    });
    let tensors: BTreeMap<_, _> = tensors.collect();
    assert_eq!((bytes.len() - data.len()) % 8, 0, "values begin aligned");
    assert_eq!(ends.iter().max(), Some(&data.len()), "no bytes are left over");
    tensors
}

#[test]
fn a_wrapped_model_becomes_a_safetensors_file() {
    for (name, config) in [
        ("plain", WrapConfig::default()),
        ("sharded", WrapConfig::default().with_sharding(Sharding::Parameters).with_sharding_above(2)),
    ] {
        let to = directory(name).join(name);
        let paths = Ddp::spawn(2, |ddp| {
            let model = ddp.wrap_with(Mixed::new(&ddp.device()?.autodiff()), &config)?;
            // A save removes the temporary file of a killed save.
            fs::write(to.with_file_name(format!("{name}.safetensors.1-0.tmp")), "").unwrap();
            ddp.barrier()?;
            Ok(ddp.save_safetensors(&model, &to)?)
        });
        let path = to.with_extension("safetensors");
        assert_eq!(paths.unwrap(), [path.clone(), path.clone()]);
        assert_eq!(fs::read_dir(to.parent().unwrap()).unwrap().count(), 1);
        let ramp = |n: u8| (0..n).flat_map(|i| (f32::from(i) / 2.0).to_le_bytes()).collect::<Vec<_>>();
        let counts = (0..5_i64).flat_map(i64::to_le_bytes).collect();
        let expected = [
            ("counts", "I64", vec![5], counts),
            ("flags", "BOOL", vec![3], vec![1, 0, 1]),
            ("linear.bias", "F32", vec![3], ramp(3)),
            ("linear.weight", "F32", vec![4, 3], ramp(12)),
        ];
        let expected = expected.map(|(name, dtype, shape, data)| (name.into(), (dtype.into(), shape.into(), data)));
        assert_eq!(read(&path), BTreeMap::from(expected), "{name}");
        fs::rename(&path, to.parent().unwrap().with_extension("safetensors")).unwrap();
    }
}

#[test]
fn a_directory_that_does_not_exist_is_an_error_on_every_rank() {
    let errors = Ddp::spawn(2, |ddp| {
        let model = ddp.wrap(Mixed::new(&ddp.device()?.autodiff()))?;
        let saved = ddp.save_safetensors(&model, "/no/such/directory/model").unwrap_err().to_string();
        let board = ddp.telemetry().tensorboard("/dev/null/board").unwrap_err().to_string();
        Ok((saved, board))
    });
    for (saved, board) in errors.unwrap() {
        assert!(saved.contains("/no/such/directory/model.safetensors"), "{saved}");
        assert!(board.contains("/dev/null/board"), "{board}");
    }
}

#[test]
fn curves_of_rank_0_become_an_event_file() {
    let directory = directory("board");
    Ddp::spawn(2, |ddp| {
        let device = ddp.device()?.autodiff();
        let model = ddp.wrap(LinearConfig::new(4, 1).init(&device))?;
        let board = ddp.telemetry().tensorboard(&directory)?;
        board.telemetry(0)?;
        for (step, loss) in [(0, 1.0), (1, 0.5), (300, 0.25)] {
            board.scalar("loss", loss, step)?;
            ddp.backward(&model.forward(Tensor::<2>::ones([1, 4], &device)).sum(), &model)?;
        }
        board.telemetry(300)?;
        Ok(())
    })
    .unwrap();
    let files: Vec<_> = fs::read_dir(&directory).unwrap().map(|file| file.unwrap().path()).collect();
    assert_eq!(files.len(), 1, "one file, of rank 0: {files:?}");
    let bytes = fs::read(&files[0]).unwrap();
    let (mut at, mut records) = (0, Vec::new());
    while at < bytes.len() {
        let length = u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap()) as usize;
        records.push(String::from_utf8_lossy(&bytes[at + 12..at + 12 + length]).into_owned());
        at += 16 + length;
    }
    assert_eq!(at, bytes.len(), "whole records");
    let tags = ["brain.Event:2", "loss", "loss", "loss", "time", "backward", "wait", "data", "calls", "per_second"];
    assert_eq!(records.len(), tags.len());
    assert!(records.iter().zip(tags).all(|(record, tag)| record.contains(tag)), "{records:?}");
}
