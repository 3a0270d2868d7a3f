"""Joins a world of torch's gloo and leaves it, as often as told. See src/rendezvous.rs.

usage: meet.py CONTROL_SOCKET RANK WORLD
"""

import socket
import sys
from datetime import timedelta

import torch.distributed as dist

control, rank, world = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
connection.connect(control)
lines = connection.makefile("rw")
lines.write(f"hello {rank}\n")
lines.flush()
for line in lines:
    command, *words = line.split()
    if command == "quit":
        break
    try:
        if command == "join":
            where = f"tcp://127.0.0.1:{words[0]}"
            dist.init_process_group("gloo", init_method=where, rank=rank, world_size=world, timeout=timedelta(seconds=60))
        else:
            dist.destroy_process_group()
        answer = "ok"
    except Exception as error:
        answer = "error " + str(error).replace("\n", " ")
    lines.write(answer + "\n")
    lines.flush()
