#!/usr/bin/env python3
"""Computes batch normalisation over the batches of several ranks with torch, and writes `torch_sync_bn.json` beside this script.

    python3 -m venv /tmp/torchvenv
    /tmp/torchvenv/bin/pip install torch==2.9.0 numpy
    /tmp/torchvenv/bin/python make_torch_sync_bn.py

`torch.nn.SyncBatchNorm` runs on GPUs only. By its definition it is `BatchNorm` on the batches of all ranks put together, and that is
what this computes, in one process: items 0 .. n of a table are cut into parts, one for each rank.

Torch keeps a running average of the unbiased variance, Burn of the biased one.

Weights and inputs come from integer arithmetic, so that another program makes the same ones.
"""

import json
import pathlib
import platform

import numpy
import torch
import torch.nn.functional as F

HERE = pathlib.Path(__file__).resolve().parent
MOMENTUM = float(numpy.float32(0.9))  # Burn keeps the optimizer's momentum in f32


def table(shape, salt):
    """Multiples of 1/32; each channel has its own mean and spread"""
    values = numpy.arange(int(numpy.prod(shape)))
    values = ((values * 37 + salt * 11) % 101 - 50).reshape(shape) / 32.0
    channel = numpy.arange(shape[1]).reshape([1, -1] + [1] * (len(shape) - 2))
    return values * (channel + 1) / 2 + channel * 3


def initial(shape, salt):
    """As in make_torch_models.py"""
    count = int(numpy.prod(shape))
    fan_in = count // shape[0] if len(shape) > 1 else 1
    scale = 2.0 ** -((fan_in.bit_length()) // 2)
    values = [(i * 53 + salt * 29 + 7) % 97 - 48 for i in range(count)]
    return torch.tensor(values, dtype=torch.float64).reshape(shape) / 128 * scale


def flat(tensor):
    assert tensor.dtype == torch.float64
    return tensor.detach().flatten().tolist()


def layer(norm, shape):
    """Two forwards; the backward is that of Σ y³·weights for the second"""
    channels = shape[1]
    norm = norm(channels, eps=1e-5, momentum=0.1).to(torch.float64)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([0.5 + c / 4 for c in range(channels)]))
        norm.bias.copy_(torch.tensor([c / 8 - 0.25 for c in range(channels)]))
    norm(torch.tensor(table(shape, 1), dtype=torch.float64))
    x = torch.tensor(table(shape, 2), dtype=torch.float64, requires_grad=True)
    y = norm(x)
    (y**3 * torch.tensor(table(shape, 3) / 16, dtype=torch.float64)).sum().backward()
    return {
        "shape": list(shape),
        "output": flat(y),
        "running_mean": flat(norm.running_mean),
        "running_var": flat(norm.running_var),
        "input_gradient": flat(x.grad),
        "weight_gradient": flat(norm.weight.grad),
        "bias_gradient": flat(norm.bias.grad),
    }


class Net(torch.nn.Module):
    """conv, norm, relu, conv, norm, pool, linear; without the biases that a norm would cancel"""

    def __init__(self):
        super().__init__()
        self.conv1 = torch.nn.Conv2d(2, 4, 3, padding=1, bias=False)
        self.norm1 = torch.nn.BatchNorm2d(4)
        self.conv2 = torch.nn.Conv2d(4, 6, 3, padding=1, bias=False)
        self.norm2 = torch.nn.BatchNorm2d(6)
        self.fc = torch.nn.Linear(6, 3)

    def forward(self, x):
        x = F.relu(self.norm1(self.conv1(x)))
        return self.fc(self.norm2(self.conv2(x)).mean(dim=(2, 3)))


def train(steps=6, batch=6, lr=0.05):
    net = Net().to(torch.float64)
    with torch.no_grad():
        for salt, (name, parameter) in enumerate(net.named_parameters()):
            if "norm" not in name:
                parameter.copy_(initial(list(parameter.shape), salt))
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=MOMENTUM)
    losses, first = [], None
    for step in range(steps):
        x = torch.tensor(table([batch, 2, 5, 5], step), dtype=torch.float64)
        labels = torch.arange(step * batch, (step + 1) * batch) * 7 % 3
        loss = F.cross_entropy(net(x), labels)
        optimizer.zero_grad()
        loss.backward()
        if first is None:
            first = {name: flat(p.grad) for name, p in net.named_parameters()}
        optimizer.step()
        losses.append(loss.item())
    print(f"loss {losses[0]:.6f} -> {losses[-1]:.6f}")
    return {
        "steps": steps,
        "batch": batch,
        "lr": lr,
        "momentum": MOMENTUM,
        "losses": losses,
        "first_gradients": first,
        "final": {name: flat(p) for name, p in net.named_parameters()},
        "running_means": {name: flat(b) for name, b in net.named_buffers() if name.endswith("running_mean")},
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    content = {
        "made_with": {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine()},
        "layers": {
            "1d": layer(torch.nn.BatchNorm1d, [7, 3]),
            "1d_length": layer(torch.nn.BatchNorm1d, [7, 3, 4]),
            "2d": layer(torch.nn.BatchNorm2d, [6, 4, 3, 5]),
        },
        "training": train(),
    }
    path = HERE / "torch_sync_bn.json"
    path.write_text(json.dumps(content, separators=(",", ":")).replace("},", "},\n") + "\n")
    print(f"{path.name}: {path.stat().st_size} bytes")
