#!/usr/bin/env python3
"""Trains awkward models with torch's DistributedDataParallel on two gloo ranks, in f64, and writes the numbers beside this script.

    python3 -m venv /tmp/torchvenv
    /tmp/torchvenv/bin/pip install torch==2.9.0 numpy
    /tmp/torchvenv/bin/python make_torch_models.py

Weights, inputs and labels come from integer arithmetic, so that another program makes the same ones; the images of the CNN
are the digits in burn-ddp-examples/data/mnist. Of a tensor with more than 64 elements, 64 are written: see `sample`.
"""

import contextlib
import gzip
import json
import pathlib
import platform
import socket

import numpy
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from make_torch_fsdp import BETAS, EPSILON, power

WORLD = 2
HERE = pathlib.Path(__file__).resolve().parent
# Burn keeps the momentum factor in f32, also for f64 tensors; torch gets the same value.
MOMENTUM = float(numpy.float32(0.9))


def inputs(first, rows, columns):
    """[rows, columns], row `first` of an endless table: multiples of 1/64 in [-50/64, 50/64]"""
    values = [((first * columns + i) * 37 + 11) % 101 - 50 for i in range(rows * columns)]
    return torch.tensor(values, dtype=torch.float64).reshape(rows, columns) / 64


def initial(shape, salt):
    """Multiples of 1/128 in [-48/128, 48/128], by the power of two next to the root of the fan-in"""
    count = int(numpy.prod(shape))
    fan_in = count // shape[0] if len(shape) > 1 else 1
    scale = 2.0 ** -((fan_in.bit_length()) // 2)
    values = [(i * 53 + salt * 29 + 7) % 97 - 48 for i in range(count)]
    return torch.tensor(values, dtype=torch.float64).reshape(shape) / 128 * scale


def sample(tensor):
    """Norm and elements of a tensor: all of them, or 64 that are a prime apart"""
    flat = tensor.detach().flatten()
    n = flat.numel()
    at = range(n) if n <= 64 else [(i * 7919) % n for i in range(64)]
    return {"shape": list(tensor.shape), "norm": float(flat.norm()), "values": [float(flat[i]) for i in at]}


def digits():
    """Images [n, 1, 28, 28] in 0 … 1 and labels [n]"""
    folder = HERE.parent.parent / "burn-ddp-examples" / "data" / "mnist"
    images = numpy.frombuffer(gzip.open(folder / "train-images-idx3-ubyte.gz").read(), numpy.uint8, offset=16)
    labels = numpy.frombuffer(gzip.open(folder / "train-labels-idx1-ubyte.gz").read(), numpy.uint8, offset=8)
    images = torch.tensor(images.reshape(-1, 1, 28, 28).astype(numpy.float64)) / 255
    return images, torch.tensor(labels.astype(numpy.int64))


class Case(torch.nn.Module):
    """Trained with SGD and momentum, unless the case has settings for AdamW and for clipping by the norm of all gradients"""

    adamw = None


class Cnn(Case):
    """The network of PyTorch's basic MNIST example, without dropout"""

    steps, micro, lr, find_unused = 6, 1, 0.05, False

    def __init__(self):
        super().__init__()
        self.conv1 = torch.nn.Conv2d(1, 32, 3)
        self.conv2 = torch.nn.Conv2d(32, 64, 3)
        self.fc1 = torch.nn.Linear(64 * 12 * 12, 128)
        self.fc2 = torch.nn.Linear(128, 10)
        self.data = digits()

    def forward(self, step, rank, micro):
        first = (step * WORLD + rank) * 4
        images, labels = (t[first : first + 4] for t in self.data)
        x = F.relu(self.conv2(F.relu(self.conv1(images))))
        x = F.max_pool2d(x, 2).flatten(1)
        return F.cross_entropy(self.fc2(F.relu(self.fc1(x))), labels)


class Tied(Case):
    """Tied weights: the first and the last operation use one matrix, with a layer between"""

    steps, micro, lr, find_unused = 20, 1, 0.05, False

    def __init__(self):
        super().__init__()
        self.matrix = torch.nn.Parameter(torch.empty(8, 6))
        self.middle = torch.nn.Linear(6, 6)

    def forward(self, step, rank, micro):
        x = inputs((step * WORLD + rank) * 4, 4, 8)
        h = torch.tanh(self.middle(torch.tanh(x @ self.matrix)))
        return ((h @ self.matrix.t() - x) ** 2).mean()


class Unused(Case):
    """Three branches, of which each rank uses a different one in each step, and a fourth that no rank uses"""

    steps, micro, lr, find_unused = 20, 1, 0.1, True

    def __init__(self):
        super().__init__()
        self.trunk = torch.nn.Linear(8, 8)
        self.branches = torch.nn.ModuleList(torch.nn.Linear(8, 4) for _ in range(4))

    def forward(self, step, rank, micro):
        x = inputs((step * WORLD + rank) * 4, 4, 8)
        branch = (step * 2 + rank * (1 + step % 2)) % 3
        return (self.branches[branch](torch.tanh(self.trunk(x))) ** 2).mean()


class NoSync(Case):
    """Four micro-batches to a step, three of them in `no_sync`"""

    steps, micro, lr, find_unused = 10, 4, 0.1, False

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(8, 8)
        self.second = torch.nn.Linear(8, 4)

    def forward(self, step, rank, micro):
        x = inputs(((step * 4 + micro) * WORLD + rank) * 4, 4, 8)
        return (self.second(torch.tanh(self.first(x))) ** 2).mean()


class Lstm(Case):
    """A recurrent layer over sequences of 12, and a head on its last state"""

    steps, micro, lr, find_unused = 15, 1, 0.1, False

    def __init__(self):
        super().__init__()
        self.lstm = torch.nn.LSTM(8, 6, batch_first=True)
        self.head = torch.nn.Linear(6, 3)

    def forward(self, step, rank, micro):
        x = inputs((step * WORLD + rank) * 4 * 12, 4 * 12, 8).reshape(4, 12, 8)
        _, (hidden, _) = self.lstm(x)
        return ((self.head(hidden[0]) - 0.5) ** 2).mean()


class Attention(Case):
    """Causal self-attention with two heads over 6 tokens of 13, between an embedding and a head that predicts the next token"""

    steps, micro, lr, find_unused = 20, 1, 0.02, False
    adamw = {"betas": BETAS, "epsilon": EPSILON, "weight_decay": float(numpy.float32(0.1)), "max_norm": 0.25}

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(13, 8)
        # A bias of the keys would change no output: its gradient is rounding alone.
        self.query, self.key, self.value, self.out = (torch.nn.Linear(8, 8, bias=nth != 1) for nth in range(4))
        self.norm = torch.nn.LayerNorm(8)
        self.head = torch.nn.Linear(8, 13)

    def forward(self, step, rank, micro):
        first = (step * WORLD + rank) * 28
        tokens = torch.tensor([(i * i * 5 + i * 3 + 1) % 13 for i in range(first, first + 28)]).reshape(4, 7)
        x = self.embedding(tokens[:, :6])
        q, k, v = (layer(x).reshape(4, 6, 2, 4).transpose(1, 2) for layer in (self.query, self.key, self.value))
        later = torch.ones(6, 6, dtype=torch.bool).triu(1)
        weights = (q @ k.transpose(2, 3) / 2).masked_fill(later, -1e9).softmax(3)
        x = self.norm(x + self.out((weights @ v).transpose(1, 2).reshape(4, 6, 8)))
        return F.cross_entropy(self.head(x).reshape(24, 13), tokens[:, 1:].flatten())


CASES = {"cnn": Cnn, "tied": Tied, "unused": Unused, "no_sync": NoSync, "lstm": Lstm, "attention": Attention}


def optimizer_of(net, parameters):
    if net.adamw is None:
        return torch.optim.SGD(parameters, lr=net.lr, momentum=MOMENTUM)
    return torch.optim.AdamW(parameters, lr=net.lr, betas=BETAS, eps=EPSILON)


def optimizer_step(net, optimizer, step):
    if net.adamw is not None:
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), net.adamw["max_norm"])
        assert norm > net.adamw["max_norm"], f"step {step} clips nothing"
        # Makes up for Burn's corrections of the bias, which are in f32; the decay is by the unchanged learning rate.
        one, group = numpy.float32(1), optimizer.param_groups[0]
        first, second = ((1 - beta ** (step + 1)) / float(one - power(beta, step + 1)) for beta in BETAS)
        group["lr"], group["eps"] = net.lr * first / second**0.5, EPSILON / second**0.5
        group["weight_decay"] = net.adamw["weight_decay"] * net.lr / group["lr"]
    optimizer.step()


def train(rank, port, name, queue):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD)
    net = CASES[name]().to(torch.float64)
    with torch.no_grad():
        for salt, parameter in enumerate(net.parameters()):
            parameter.copy_(initial(list(parameter.shape), salt))
    ddp = DistributedDataParallel(net, find_unused_parameters=net.find_unused)
    optimizer = optimizer_of(net, ddp.parameters())
    losses, gradients = [], None
    for step in range(net.steps):
        optimizer.zero_grad()
        for micro in range(net.micro):
            last = micro + 1 == net.micro
            with contextlib.nullcontext() if last else ddp.no_sync():
                loss = ddp(step, rank, micro)
                (loss / net.micro).backward()
        if gradients is None:
            gradients = {n: sample(p.grad) for n, p in net.named_parameters() if p.grad is not None}
        optimizer_step(net, optimizer, step)
        losses.append(loss.item())
    queue.put((rank, losses, gradients, {n: sample(p) for n, p in net.named_parameters()}))
    dist.barrier()
    dist.destroy_process_group()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def make(name):
    context = mp.get_context("spawn")
    queue, port = context.Queue(), free_port()
    ranks = [context.Process(target=train, args=(rank, port, name, queue)) for rank in range(WORLD)]
    for process in ranks:
        process.start()
    results = sorted((queue.get(timeout=300) for _ in ranks), key=lambda r: r[0])
    for process in ranks:
        process.join()
        assert process.exitcode == 0, process.exitcode
    assert all(r[2:] == results[0][2:] for r in results), "torch's ranks differ"
    case = CASES[name]
    print(f"{name}: loss {results[0][1][0]:.6f} -> {results[0][1][-1]:.6f}")
    return {
        "steps": case.steps,
        "micro_batches": case.micro,
        "lr": case.lr,
        "adamw": case.adamw,
        "losses": [r[1] for r in results],
        "first_gradients": results[0][2],
        "final": results[0][3],
    }


if __name__ == "__main__":
    content = {
        "made_with": {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine()},
        "world_size": WORLD,
        "momentum": MOMENTUM,
        "cases": {name: make(name) for name in CASES},
    }
    path = HERE / "torch_models.json"
    path.write_text(json.dumps(content, separators=(",", ":")).replace('"cases":{', '"cases":{\n').replace("}}},", "}}},\n") + "\n")
    print(f"{path.name}: {path.stat().st_size} bytes")
