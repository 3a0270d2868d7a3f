//! Arguments that a communicator refuses before it calls NCCL.

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
        let (pair, op) = ((region, region), (DType::F32, ReduceOp::Sum));
        let all_reduced = (DType::F32, NcclOp::Builtin(ReduceOp::Sum));
        for result in [
            communicator.all_reduce(&foreign, &[pair], all_reduced, &alive),
            communicator.reduce(&foreign, pair, op, 0, &alive),
            communicator.broadcast(&foreign, &[(0, region, region)], &alive),
            communicator.all_gather(&foreign, region, region, &alive),
            communicator.reduce_scatter(&foreign, pair, op, &alive),
            communicator.exchange(&foreign, &[(0, region)], &[(0, region)], &alive),
        ] {
            let error = result.unwrap_err();
            assert_eq!(error, DeviceError::WrongStream { stream: 1, communicator: 0 });
            assert_eq!(error.to_string(), "a stream of CUDA device 1 for a communicator on CUDA device 0");
        }
        assert_eq!(machine.launched(0) + machine.launched(1), 0);
        // The communicator is still usable.
        communicator.all_reduce(&own, &[pair], all_reduced, &alive).unwrap();
        buffer.read(&own, 16, &alive).unwrap();
        assert_eq!(machine.launched(0), 1);
    }
    assert_clean(&machine);
}
