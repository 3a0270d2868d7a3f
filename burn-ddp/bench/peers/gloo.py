"""All-reduce with torch's gloo, in rounds that the driver commands. See src/driver_protocol.rs for the protocol.

usage: gloo.py CONTROL_SOCKET STORE_FILE RANK WORLD DTYPE
"""

import itertools
import sys
import time

import torch
import torch.distributed as dist

import driver_client

PERIOD = 1021  # elements until the input pattern repeats

driver, store, rank, world, dtype_name = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
dtype = {"f32": torch.float32, "f64": torch.float64, "f16": torch.float16, "bf16": torch.bfloat16}[dtype_name]
torch.set_num_threads(1)


def pattern(of_ranks, seed, factor=1.0):
    i = torch.arange(PERIOD, dtype=torch.int64)
    total = sum(1 + (5 * i + 3 * r + seed) % 8 for r in of_ranks)
    return (total.to(torch.float64) * factor).to(dtype)


def spread(one_period, length):
    return one_period.repeat(length // PERIOD + 1)[:length]


class Buffers:
    def __init__(self, length, count):
        self.tensors = [torch.zeros(length, dtype=dtype) for _ in range(count)]
        self.uses = [0] * count

    def fill(self, nth, seed):
        self.tensors[nth].copy_(spread(pattern([rank], seed), len(self.tensors[nth])))
        self.uses[nth] = 0

    def step(self, nth):
        nth %= len(self.tensors)
        if len(self.tensors[nth]) == 0:
            dist.barrier()
            return
        dist.all_reduce(self.tensors[nth])
        self.uses[nth] += 1

    def check(self, nth, seed):
        uses = self.uses[nth]
        if uses == 0 or (world & (world - 1) and uses > 1):
            return
        expected = pattern(range(world), seed, float(world) ** (uses - 1))
        tensor = self.tensors[nth]
        if not torch.equal(tensor, spread(expected, len(tensor))):
            raise ValueError(f"wrong sum in buffer {nth} after {uses} uses")


buffers = None


def prepare(size_bytes, count):
    global buffers
    buffers = None
    buffers = Buffers(size_bytes // torch.empty(0, dtype=dtype).element_size(), count)


def one_round(seed, samples, per_sample, warmup, late_rank, late_us):
    count = len(buffers.tensors)
    for nth in range(count):
        buffers.fill(nth, seed + nth)
    steps = itertools.count()

    def step():
        buffers.step(next(steps))

    def come_late():
        if rank == late_rank:
            time.sleep(late_us * 1e-6)

    for _ in range(warmup):
        step()
    times = driver_client.timed(step, samples, per_sample, come_late)
    for nth in range(count):
        buffers.check(nth, seed + nth)
    buffers.fill(0, seed + count)
    buffers.step(0)
    buffers.check(0, seed + count)
    return times


dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
driver_client.serve(driver, rank, {"prepare": prepare, "round": one_round})
