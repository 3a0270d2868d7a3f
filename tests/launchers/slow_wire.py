#!/usr/bin/env python3
"""A wire between two TUN devices that delays every packet: slow_wire.py DEVICE DEVICE MILLISECONDS

Makes both devices and says so; they may then be moved to other network namespaces. Runs until it is killed.
"""

import fcntl
import heapq
import os
import select
import struct
import sys
import time

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x1, 0x1000


def device(name):
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    return fd


ends = [device(name) for name in sys.argv[1:3]]
delay = float(sys.argv[3]) / 1000
print("ready", flush=True)
# (time of delivery, number, index of the end, packet)
on_the_way, number = [], 0
while True:
    wait = max(0, on_the_way[0][0] - time.monotonic()) if on_the_way else None
    for fd in select.select(ends, [], [], wait)[0]:
        try:
            packet = os.read(fd, 65536)
        except OSError:  # the device is down
            time.sleep(0.01)
            continue
        number += 1
        heapq.heappush(on_the_way, (time.monotonic() + delay, number, 1 - ends.index(fd), packet))
    while on_the_way and on_the_way[0][0] <= time.monotonic():
        _, _, end, packet = heapq.heappop(on_the_way)
        try:
            os.write(ends[end], packet)
        except OSError:  # full or down: a wire may lose packets
            pass
