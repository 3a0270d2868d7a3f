"""Trains with torch: plainly, plainly with a bare barrier in each step, with
DistributedDataParallel, or with fully_shard. See src/driver_protocol.rs.

usage: train.py CONTROL_SOCKET INIT_METHOD RANK WORLD MODEL SIDE LINES_FD BUCKET_MB   (LINES_FD -1: none; BUCKET_MB 0: torch's default)
"""

import mmap
import os
import resource
import struct
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import driver_client

LINE_BYTES = 128
WIDTH = 512  # a layer of the MLP: 1 MiB of weights
CNN_BATCH = 16
TOKENS, GPT_WIDTH, HEADS, CONTEXT = 256, 256, 4, 64

driver, init_method = sys.argv[1], sys.argv[2]
rank, world, what, side = int(sys.argv[3]), int(sys.argv[4]), sys.argv[5], sys.argv[6]
lines_fd, bucket_mb = int(sys.argv[7]), float(sys.argv[8])
torch.set_num_threads(1)
# The same choice of a device as in Burn's ranks. Ranks may share a GPU.
gpus = torch.cuda.device_count() if os.environ.get("BURN_DEVICE") == "cuda" else 0
device = torch.device("cuda", rank % gpus) if gpus else torch.device("cpu")
torch.set_default_device(device)


class Tensors(nn.Module):
    def __init__(self, bytes, count):
        super().__init__()
        each, more = divmod(bytes // 4, count)
        self.params = nn.ParameterList([nn.Parameter(torch.zeros(each + (i < more))) for i in range(count)])

    def forward(self, factor):
        return torch.stack([p.sum() for p in self.params]).sum() * factor


class Cnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 3), nn.Conv2d(32, 64, 3)
        self.fc1, self.fc2 = nn.Linear(64 * 12 * 12, 128), nn.Linear(128, 10)

    def forward(self, images, labels):
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(images)))), 2)
        return F.cross_entropy(self.fc2(F.relu(self.fc1(torch.flatten(x, 1)))), labels)


class Mlp(nn.Module):
    def __init__(self, bytes):
        super().__init__()
        layers = max(1, bytes // (4 * WIDTH * WIDTH))
        self.layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(layers)])

    def forward(self, x):
        return self.layers(x).pow(2).mean()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(GPT_WIDTH), nn.LayerNorm(GPT_WIDTH)
        self.query, self.key, self.value, self.output = (nn.Linear(GPT_WIDTH, GPT_WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(GPT_WIDTH, 4 * GPT_WIDTH), nn.Linear(4 * GPT_WIDTH, GPT_WIDTH)

    def forward(self, x):
        h = self.norm1(x)
        heads = [layer(h).unflatten(2, (HEADS, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)]
        context = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.output(context.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """The transformer of src/rank/transformer.rs."""

    def __init__(self, bytes):
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, GPT_WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(-(-bytes // (4 * 12 * GPT_WIDTH * GPT_WIDTH)))])
        self.head = nn.Linear(GPT_WIDTH, TOKENS, bias=False)

    def forward(self, tokens):
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


class Barrier:
    """Each rank writes its own line and reads the others', as in src/spin_barrier.rs."""

    def __init__(self):
        self.memory, self.times = mmap.mmap(lines_fd, world * LINE_BYTES), 0

    def meet(self):
        self.times += 1
        struct.pack_into("<Q", self.memory, rank * LINE_BYTES, self.times)
        for other in range(world):
            looks = 0
            while struct.unpack_from("<Q", self.memory, other * LINE_BYTES)[0] < self.times:
                looks += 1
                if looks > 1000:
                    os.sched_yield()


class Trainee:
    def __init__(self, bytes, count):
        self.optim, self.barrier = None, barrier
        if what == "tensors":
            model, self.inputs = Tensors(bytes, count), (float(rank + 1),)
        elif what == "cnn":
            torch.manual_seed(0)
            model = Cnn()
            self.inputs = (torch.rand(CNN_BATCH, 1, 28, 28), torch.arange(CNN_BATCH) % 10)
            self.optim = torch.optim.Adam(model.parameters(), lr=1e-4)
        elif what == "gpt":
            model = Gpt(bytes)
            self.inputs = (((torch.arange(count * CONTEXT) * 31 + rank) % TOKENS).reshape(count, CONTEXT),)
            if side == "sharded":
                from torch.distributed.device_mesh import init_device_mesh
                from torch.distributed.fsdp import fully_shard

                mesh = init_device_mesh(device.type, (world,))
                for part in (*model.blocks, model):
                    fully_shard(part, mesh=mesh)
            self.optim = torch.optim.Adam(model.parameters(), lr=1e-4)
        else:
            model, self.inputs = Mlp(bytes), (torch.rand(count, WIDTH),)
        self.first = next(model.parameters())
        self.params = list(model.parameters())
        if side == "wrapped":
            options = {"bucket_cap_mb": bucket_mb} if bucket_mb > 0 else {}
            model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, **options)
        self.model, self.seen = model, float("nan")

    def step(self):
        loss = self.model(*self.inputs)
        if what != "tensors":
            self.seen = loss.item()
        loss.backward()
        if what == "tensors":
            self.seen = self.first.grad[0].item()
        if self.optim:
            self.optim.step()
        for p in self.params:
            p.grad = None
        if side == "barrier":
            self.barrier.meet()

    def check(self):
        if what == "tensors":
            expected = (world + 1) / 2 if side == "wrapped" else rank + 1
            if self.seen != expected:
                raise ValueError(f"a gradient of {self.seen}, not {expected}")


def prepare(size_bytes, count):
    global trainee
    trainee = None
    trainee = Trainee(size_bytes, count)


def one_round(seed, samples, per_sample, warmup, late_rank, late_us):
    for _ in range(warmup):
        trainee.step()
    times = driver_client.timed(trainee.step, samples, per_sample)
    trainee.step()
    trainee.check()
    return times


def usage():
    sizes = {"Rss:": 0, "Pss:": 0}
    with open("/proc/self/smaps_rollup") as rollup:
        for line in rollup:
            name, *rest = line.split()
            if name in sizes:
                sizes[name] = int(rest[0]) * 1024
    return f"{sizes['Rss:']} {sizes['Pss:']} {resource.getrusage(resource.RUSAGE_SELF).ru_minflt}"


if side in ("wrapped", "sharded"):
    dist.init_process_group("nccl" if gpus else "gloo", init_method=init_method, rank=rank, world_size=world)
trainee = None
barrier = Barrier() if side == "barrier" else None
driver_client.serve(driver, rank, {"prepare": prepare, "round": one_round, "usage": usage})
