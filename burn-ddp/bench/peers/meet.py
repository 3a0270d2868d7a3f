"""Joins a world of torch's gloo and leaves it, as often as the driver commands. See src/rendezvous.rs.

usage: meet.py CONTROL_SOCKET RANK WORLD
"""

import sys
from datetime import timedelta

import torch.distributed as dist

import driver_client

driver, rank, world = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])


def join(port):
    where = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=world, timeout=timedelta(seconds=60))


driver_client.serve(driver, rank, {"join": join, "leave": dist.destroy_process_group})
