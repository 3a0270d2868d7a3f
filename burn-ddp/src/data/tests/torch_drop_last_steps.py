#!/usr/bin/env python3
"""Writes torch_drop_last_steps.txt: steps of torch's DataLoader over a DistributedSampler, both with drop_last=True.

    python3 torch_drop_last_steps.py > torch_drop_last_steps.txt

torch's arithmetic without torch: `DistributedSampler` of torch_sampler.py, and `BatchSampler.__len__`. Lines are
`items world batch_per_rank steps`; each step has `batch_per_rank` items on every rank.
"""

from torch_sampler import DistributedSampler


def batches(sampler, batch_size):
    """torch.utils.data.BatchSampler.__iter__ with drop_last=True."""
    batch = []
    for index in sampler:
        batch.append(index)
        if len(batch) == batch_size:
            yield batch
            batch = []


if __name__ == "__main__":
    print("# Written by torch_drop_last_steps.py: items world batch_per_rank steps")
    for items in (1, 2, 7, 8, 9, 31, 32, 33, 100):
        for world in (1, 2, 3, 4, 7):
            for batch_size in (1, 2, 3, 8):
                if items < world:
                    continue
                steps = {len(list(batches(DistributedSampler(range(items), world, rank, True), batch_size)))
                         for rank in range(world)}
                assert len(steps) == 1
                print(items, world, batch_size, steps.pop())
