//! Arguments that communicators and buffers refuse before they call NCCL or the driver.

use burn_ddp_comm::{DType, ReduceOp};
use burn_ddp_nccl::fake::Machine;
use burn_ddp_nccl::{Communicator, Device, DeviceError, NcclOp};

use crate::common::assert_clean;

#[test]
fn a_stream_of_another_device_is_refused() {
    let machine = Machine::new(2);
    {
        let (driver, nccl, alive) = (machine.driver(), machine.nccl(), || Ok(()));
        let [device, other] = [0, 1].map(|ordinal| Device::new(&driver, ordinal).unwrap());
        let (own, foreign) = (device.stream().unwrap(), other.stream().unwrap());
        let id = nccl.unique_id().unwrap();
        let mut communicator = Communicator::init((&nccl, &device), id, (0, 1), true, &alive).unwrap();
        let buffer = device.alloc(16).unwrap();
        // SAFETY: the buffer outlives the only collective that is launched, which is waited for below.
        let region = unsafe { buffer.region() };
        let (pair, sum) = ((region, region), (DType::F32, NcclOp::Builtin(ReduceOp::Sum)));
        for result in [
            communicator.all_reduce(&foreign, &[pair], sum, &alive),
            communicator.reduce(&foreign, &[(0, region, region)], sum, &alive),
            communicator.broadcast(&foreign, &[(0, region, region)], &alive),
            communicator.all_gather(&foreign, region, region, &alive),
            communicator.reduce_scatter(&foreign, pair, sum, &alive),
            communicator.exchange(&foreign, &[(0, region)], &[(0, region)], &alive),
            buffer.write(&foreign, &[1; 16], &alive),
            buffer.read(&foreign, 16, &alive).map(drop),
        ] {
            let error = result.unwrap_err();
            assert_eq!(error, DeviceError::WrongStream { stream: 1, expected: 0 });
            assert_eq!(error.to_string(), "a stream of CUDA device 1, but the work is on CUDA device 0");
        }
        assert_eq!(machine.launched(0) + machine.launched(1), 0);
        // The communicator is still usable.
        communicator.all_reduce(&own, &[pair], sum, &alive).unwrap();
        buffer.read(&own, 16, &alive).unwrap();
        assert_eq!(machine.launched(0), 1);
    }
    assert_clean(&machine);
}

#[test]
fn refused_arguments_have_an_error_of_their_own() {
    let machine = Machine::new(2);
    {
        let (driver, nccl, alive) = (machine.driver(), machine.nccl(), || Ok(()));
        let [device, other] = [0, 1].map(|ordinal| Device::new(&driver, ordinal).unwrap());
        let stream = device.stream().unwrap();
        let id = nccl.unique_id().unwrap();
        let mut communicator = Communicator::init((&nccl, &device), id, (0, 1), true, &alive).unwrap();
        let [buffer, shorter] = [16, 8].map(|len_bytes| device.alloc(len_bytes).unwrap());
        let elsewhere = other.alloc(16).unwrap();
        // SAFETY: nothing is launched with these regions.
        let (region, short, foreign) = unsafe { (buffer.region(), shorter.region(), elsewhere.region()) };
        let all_reduce = |communicator: &mut Communicator, pair, dtype, op| {
            communicator.all_reduce(&stream, &[pair], (dtype, op), &alive)
        };
        let (sum, mean) = (NcclOp::Builtin(ReduceOp::Sum), NcclOp::Builtin(ReduceOp::Mean));
        for (result, message) in [
            (
                all_reduce(&mut communicator, (region, short), DType::F32, sum),
                "an input of 16 bytes for an output of 8",
            ),
            (
                all_reduce(&mut communicator, (region, foreign), DType::F32, sum),
                "memory of device 1 for a communicator on device 0",
            ),
            (all_reduce(&mut communicator, (region, region), DType::I32, mean), "mean of i32"),
            (all_reduce(&mut communicator, (region, region), DType::I32, NcclOp::PreMulSum(0.5)), "a factor for i32"),
            (communicator.broadcast(&stream, &[(3, region, region)], &alive), "rank 3 of a communicator of 1"),
            (Communicator::init((&nccl, &device), id, (2, 2), true, &alive).map(drop), "rank 2 of a communicator of 2"),
            (
                buffer.write(&stream, &[1; 17], &alive),
                "17 bytes from byte 0 on are not within a device memory of 16 bytes",
            ),
            (
                shorter.read(&stream, 9, &alive).map(drop),
                "9 bytes from byte 0 on are not within a device memory of 8 bytes",
            ),
        ] {
            let error = result.unwrap_err();
            assert_eq!(error, DeviceError::InvalidArgument { message: message.to_owned() });
            assert_eq!(error.to_string(), message);
        }
        assert_eq!(machine.launched(0) + machine.launched(1), 0);
        buffer.write(&stream, &[7; 16], &alive).unwrap();
        assert_eq!(buffer.read(&stream, 16, &alive).unwrap(), [7; 16]);
    }
    assert_clean(&machine);
}
