#!/usr/bin/env python3
"""Trains the MLP of make_torch_numbers.py with torch's FSDP2 (`fully_shard`) on three gloo ranks, in f64, and
writes torch_fsdp.json and, with Adam instead of momentum, torch_fsdp_adam.json.

    python3 -m venv /tmp/torchvenv
    /tmp/torchvenv/bin/pip install torch==2.9.0 numpy
    /tmp/torchvenv/bin/python make_torch_fsdp.py

Three ranks, so that the rows of both layers do not divide evenly; model, data and momentum are those of that script.
"""

import json
import pathlib
import platform

import numpy
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import make_torch_numbers as numbers

numbers.WORLD = 3
# Burn keeps Adam's factors in f32, also for f64 tensors; torch gets the same values.
BETAS, EPSILON, ADAM_LR = (float(numpy.float32(0.9)), float(numpy.float32(0.999))), float(numpy.float32(1e-8)), 0.02


def power(base, exponent):
    """`f32::powi`: by squaring, each product rounded to f32"""
    base, result = numpy.float32(base), numpy.float32(1)
    while True:
        if exponent % 2:
            result *= base
        exponent //= 2
        if exponent == 0:
            return result
        base *= base


def adam_lr(time):
    """The learning rate that makes up for Burn's corrections of the bias, which are in f32, and torch's in f64"""
    one = numpy.float32(1)
    burn = numpy.sqrt(one - power(BETAS[1], time)) / (one - power(BETAS[0], time))
    exact = (1 - BETAS[1] ** time) ** 0.5 / (1 - BETAS[0] ** time)
    return ADAM_LR * float(burn) / exact


def whole(tensor):
    return tensor.full_tensor().detach()


def train(rank, port, adam, queue):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=numbers.WORLD)
    net = numbers.model(torch.float64)
    before = numbers.parameters(net)
    mesh = init_device_mesh("cpu", (numbers.WORLD,))
    for layer in (net[0], net[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    if adam:
        optimizer = torch.optim.Adam(net.parameters(), lr=ADAM_LR, betas=BETAS, eps=EPSILON)
    else:
        optimizer = torch.optim.SGD(net.parameters(), lr=numbers.LR, momentum=numbers.MOMENTUM)
    losses, first_gradients = [], None
    for step in range(numbers.STEPS):
        optimizer.zero_grad()
        logits = net(numbers.inputs(step, rank, torch.float64))
        loss = torch.nn.functional.cross_entropy(logits, numbers.labels(step, rank))
        loss.backward()
        if first_gradients is None:
            first_gradients = {name: whole(p.grad).flatten().tolist() for name, p in net.named_parameters()}
        if adam:
            optimizer.param_groups[0]["lr"] = adam_lr(step + 1)
        optimizer.step()
        losses.append(loss.item())
    parts = {name: list(p.to_local().shape) for name, p in net.named_parameters()}
    after = {name: {"shape": list(p.shape), "values": whole(p).flatten().tolist()} for name, p in net.named_parameters()}
    queue.put((rank, before, losses, first_gradients, after, parts))
    dist.barrier()
    dist.destroy_process_group()


def make(name, adam, settings):
    context = mp.get_context("spawn")
    queue, port = context.Queue(), numbers.free_port()
    ranks = [context.Process(target=train, args=(rank, port, adam, queue)) for rank in range(numbers.WORLD)]
    for process in ranks:
        process.start()
    results = sorted(queue.get(timeout=120) for _ in ranks)
    for process in ranks:
        process.join()
        assert process.exitcode == 0, process.exitcode
    _, before, _, gradients, after, parts = results[0]
    for result in results[1:]:
        assert result[1] == before and result[3] == gradients and result[4] == after, "torch's ranks differ"
    assert parts["0.weight"] == [-(-numbers.HIDDEN // numbers.WORLD), numbers.FEATURES], parts
    path = pathlib.Path(__file__).resolve().parent / f"{name}.json"
    content = {
        "made_with": {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": platform.machine(),
        },
        "world_size": numbers.WORLD,
        "steps": numbers.STEPS,
        "batch_per_rank": numbers.BATCH,
        **settings,
        "initial": before,
        "first_gradients": gradients,
        "losses": [result[2] for result in results],
        "final": after,
    }
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in content.items()]
    path.write_text("{" + ",\n ".join(lines) + "}\n")
    print(f"{path.name}: loss {results[0][2][0]:.6f} -> {results[0][2][-1]:.6f}, {path.stat().st_size} bytes")


if __name__ == "__main__":
    make("torch_fsdp", False, {"lr": numbers.LR, "momentum": numbers.MOMENTUM})
    make("torch_fsdp_adam", True, {"lr": ADAM_LR, "betas": BETAS, "epsilon": EPSILON})
