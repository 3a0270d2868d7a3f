"""All-reduce with torch's gloo, told round by round what to do. See src/protocol.rs for the lines.

usage: gloo.py CONTROL_SOCKET STORE_FILE RANK WORLD DTYPE
"""

import resource
import socket
import sys
import time

import torch
import torch.distributed as dist

PERIOD = 1021  # elements until the input pattern repeats

control, store, rank, world, dtype_name = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
dtype = {"f32": torch.float32, "f64": torch.float64, "f16": torch.float16, "bf16": torch.bfloat16}[dtype_name]
torch.set_num_threads(1)


def cpu_ns():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return int((usage.ru_utime + usage.ru_stime) * 1e9)


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


def one_round(buffers, seed, samples, per_sample, warmup, late_rank, late_us):
    count = len(buffers.tensors)
    for nth in range(count):
        buffers.fill(nth, seed + nth)
    step = 0
    for _ in range(warmup):
        buffers.step(step)
        step += 1
    times = []
    before = cpu_ns()
    for _ in range(samples):
        if rank == late_rank:
            time.sleep(late_us * 1e-6)
        start = time.perf_counter_ns()
        for _ in range(per_sample):
            buffers.step(step)
            step += 1
        times.append((time.perf_counter_ns() - start) / per_sample)
    cpu = cpu_ns() - before
    for nth in range(count):
        buffers.check(nth, seed + nth)
    buffers.fill(0, seed + count)
    buffers.step(0)
    buffers.check(0, seed + count)
    return f"ok {cpu} " + " ".join(f"{t:.1f}" for t in times)


dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
connection.connect(control)
lines = connection.makefile("rw")
lines.write(f"hello {rank}\n")
lines.flush()
buffers = None
for line in lines:
    command, *numbers = line.split()
    numbers = [int(n) for n in numbers]
    if command == "quit":
        break
    try:
        if command == "prepare":
            buffers = None
            buffers = Buffers(numbers[0] // torch.empty(0, dtype=dtype).element_size(), numbers[1])
            answer = "ok"
        else:
            answer = one_round(buffers, *numbers)
    except Exception as error:
        answer = "error " + str(error).replace("\n", " ")
    lines.write(answer + "\n")
    lines.flush()
