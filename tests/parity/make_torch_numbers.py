#!/usr/bin/env python3
"""Trains a small MLP with torch's DistributedDataParallel on two gloo ranks and writes the numbers beside this script.

    python3 -m venv /tmp/torchvenv
    /tmp/torchvenv/bin/pip install torch==2.9.0 numpy
    /tmp/torchvenv/bin/python make_torch_numbers.py

Inputs, labels and initial weights come from integer arithmetic and are exact in f32, so that another program makes the
same ones: see `inputs`, `labels` and `initial`. One JSON file for each dtype.
"""

import json
import pathlib
import platform
import socket

import numpy
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

WORLD, STEPS, BATCH = 2, 30, 6
FEATURES, HIDDEN, CLASSES = 8, 16, 4
LR = 0.05
# Burn keeps the momentum factor in f32, also for f64 tensors; torch gets the same value.
MOMENTUM = float(numpy.float32(0.9))


def inputs(step, rank, dtype):
    """[BATCH, FEATURES]: multiples of 1/64 in [-50/64, 50/64]"""
    first = (step * WORLD + rank) * BATCH * FEATURES
    values = [((first + i) * 37 + 11) % 101 - 50 for i in range(BATCH * FEATURES)]
    return torch.tensor(values, dtype=dtype).reshape(BATCH, FEATURES) / 64


def labels(step, rank):
    """[BATCH]: a class for each row"""
    first = (step * WORLD + rank) * BATCH
    return torch.tensor([((first + i) * 7 + 3) % 13 % CLASSES for i in range(BATCH)])


def initial(count, salt, dtype):
    """`count` weights: multiples of 1/128 in [-48/128, 48/128]"""
    values = [(i * 53 + salt * 29 + 7) % 97 - 48 for i in range(count)]
    return torch.tensor(values, dtype=dtype) / 128


def model(dtype):
    net = torch.nn.Sequential(
        torch.nn.Linear(FEATURES, HIDDEN), torch.nn.Tanh(), torch.nn.Linear(HIDDEN, CLASSES)
    ).to(dtype)
    with torch.no_grad():
        for salt, parameter in enumerate(net.parameters()):
            parameter.copy_(initial(parameter.numel(), salt, dtype).reshape(parameter.shape))
    return net


def parameters(net):
    """name -> shape and values, torch's layout: a Linear's weight is [out, in]"""
    return {
        name: {"shape": list(p.shape), "values": p.detach().flatten().tolist()}
        for name, p in net.named_parameters()
    }


def train(rank, port, dtype, queue):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD)
    net = model(dtype)
    before = parameters(net)
    ddp = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=LR, momentum=MOMENTUM)
    losses, first_gradients = [], None
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(ddp(inputs(step, rank, dtype)), labels(step, rank))
        loss.backward()
        if first_gradients is None:
            first_gradients = {name: p.grad.flatten().tolist() for name, p in net.named_parameters()}
        optimizer.step()
        losses.append(loss.item())
    queue.put((rank, before, losses, first_gradients, parameters(net)))
    dist.barrier()
    dist.destroy_process_group()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def make(name, dtype):
    context = mp.get_context("spawn")
    queue, port = context.Queue(), free_port()
    ranks = [context.Process(target=train, args=(rank, port, dtype, queue)) for rank in range(WORLD)]
    for process in ranks:
        process.start()
    results = sorted(queue.get(timeout=120) for _ in ranks)
    for process in ranks:
        process.join()
        assert process.exitcode == 0, process.exitcode
    _, before, _, gradients, after = results[0]
    for result in results[1:]:
        assert result[1] == before and result[3] == gradients and result[4] == after, "torch's ranks differ"
    path = pathlib.Path(__file__).resolve().parent / f"torch_{name}.json"
    content = {
        "made_with": {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": platform.machine(),
        },
        "dtype": name,
        "world_size": WORLD,
        "steps": STEPS,
        "batch_per_rank": BATCH,
        "lr": LR,
        "momentum": MOMENTUM,
        "initial": before,
        "first_gradients": gradients,
        "losses": [result[2] for result in results],
        "final": after,
    }
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in content.items()]
    path.write_text("{" + ",\n ".join(lines) + "}\n")
    print(f"{path.name}: loss {results[0][2][0]:.6f} -> {results[0][2][-1]:.6f}, {path.stat().st_size} bytes")


if __name__ == "__main__":
    make("f32", torch.float32)
    make("f64", torch.float64)
