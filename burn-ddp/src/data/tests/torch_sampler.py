#!/usr/bin/env python3
"""Writes torch_sampler.txt: what torch.utils.data.DistributedSampler(shuffle=False) yields.

    python3 torch_sampler.py > torch_sampler.txt

The class below is torch's arithmetic without torch, so that the table does not depend on our Rust.
Lines are `n world drop_last rank: indices`.
"""

import math


class DistributedSampler:
    def __init__(self, dataset, num_replicas, rank, drop_last=False):
        self.dataset = dataset
        self.num_replicas = num_replicas
        self.rank = rank
        self.drop_last = drop_last
        if self.drop_last and len(self.dataset) % self.num_replicas != 0:
            self.num_samples = math.ceil((len(self.dataset) - self.num_replicas) / self.num_replicas)
        else:
            self.num_samples = math.ceil(len(self.dataset) / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self):
        indices = list(range(len(self.dataset)))
        if not self.drop_last:
            padding_size = self.total_size - len(indices)
            if padding_size <= len(indices):
                indices += indices[:padding_size]
            else:
                indices += (indices * math.ceil(padding_size / len(indices)))[:padding_size]
        else:
            indices = indices[: self.total_size]
        assert len(indices) == self.total_size
        indices = indices[self.rank : self.total_size : self.num_replicas]
        assert len(indices) == self.num_samples
        return iter(indices)


if __name__ == "__main__":
    print("# Written by torch_sampler.py: n world drop_last rank: indices")
    for n in (0, 1, 5, 10, 100, 101):
        for world in range(1, 9):
            for drop_last in (False, True):
                for rank in range(world):
                    indices = " ".join(map(str, DistributedSampler(range(n), world, rank, drop_last)))
                    print(f"{n} {world} {str(drop_last).lower()} {rank}: {indices}".rstrip())
