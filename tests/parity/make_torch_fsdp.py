#!/usr/bin/env python3
"""Trains the MLP of make_torch_numbers.py with torch's FSDP2 (`fully_shard`) on three gloo ranks, in f64, and
writes torch_fsdp.json.

    python3 -m venv /tmp/torchvenv
    /tmp/torchvenv/bin/pip install torch==2.9.0 numpy
    /tmp/torchvenv/bin/python make_torch_fsdp.py

Three ranks, so that the rows of both layers do not divide evenly; model, data and optimizer are those of that script.
"""

import json
import pathlib
import platform

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import make_torch_numbers as numbers

numbers.WORLD = 3


def whole(tensor):
    return tensor.full_tensor().detach()


def train(rank, port, queue):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=numbers.WORLD)
    net = numbers.model(torch.float64)
    before = numbers.parameters(net)
    mesh = init_device_mesh("cpu", (numbers.WORLD,))
    for layer in (net[0], net[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.SGD(net.parameters(), lr=numbers.LR, momentum=numbers.MOMENTUM)
    losses, first_gradients = [], None
    for step in range(numbers.STEPS):
        optimizer.zero_grad()
        logits = net(numbers.inputs(step, rank, torch.float64))
        loss = torch.nn.functional.cross_entropy(logits, numbers.labels(step, rank))
        loss.backward()
        if first_gradients is None:
            first_gradients = {name: whole(p.grad).flatten().tolist() for name, p in net.named_parameters()}
        optimizer.step()
        losses.append(loss.item())
    parts = {name: list(p.to_local().shape) for name, p in net.named_parameters()}
    after = {name: {"shape": list(p.shape), "values": whole(p).flatten().tolist()} for name, p in net.named_parameters()}
    queue.put((rank, before, losses, first_gradients, after, parts))
    dist.barrier()
    dist.destroy_process_group()


def make():
    context = mp.get_context("spawn")
    queue, port = context.Queue(), numbers.free_port()
    ranks = [context.Process(target=train, args=(rank, port, queue)) for rank in range(numbers.WORLD)]
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
    path = pathlib.Path(__file__).resolve().parent / "torch_fsdp.json"
    content = {
        "made_with": {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": platform.machine(),
        },
        "world_size": numbers.WORLD,
        "steps": numbers.STEPS,
        "batch_per_rank": numbers.BATCH,
        "lr": numbers.LR,
        "momentum": numbers.MOMENTUM,
        "initial": before,
        "first_gradients": gradients,
        "losses": [result[2] for result in results],
        "final": after,
    }
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in content.items()]
    path.write_text("{" + ",\n ".join(lines) + "}\n")
    print(f"{path.name}: loss {results[0][2][0]:.6f} -> {results[0][2][-1]:.6f}, {path.stat().st_size} bytes")


if __name__ == "__main__":
    make()
