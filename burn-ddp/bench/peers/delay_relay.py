"""A relay between simulated machines: a TUN device in each network namespace, whose packets it delivers after a delay.

Arguments: the delay in milliseconds, the name of the devices, the namespaces; machine n has the address 10.78.0.(n + 1).
Prints a line once it has made the devices, and ends when its standard input ends.
"""

import ctypes
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 1, 0x1000
CLONE_NEWNET = 0x40000000
LONGEST_PACKET = 65536


def device(namespace, name):
    """Makes a TUN device in the namespace and returns its file descriptor, which this process holds outside of the namespace."""
    handle = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(handle, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    os.close(handle)
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    return tun


def main(delay_ms, name, *namespaces):
    delay = float(delay_ms) / 1e3
    devices = [device(namespace, name) for namespace in namespaces]
    print("ready", flush=True)
    under_way = deque()
    while True:
        wait = max(under_way[0][0] - time.monotonic(), 0) if under_way else None
        ready, _, _ = select.select([0, *devices], [], [], wait)
        if 0 in ready and not os.read(0, 1):
            return
        for tun in devices:
            while tun in ready:
                try:
                    packet = os.read(tun, LONGEST_PACKET)
                except BlockingIOError:
                    break
                # The last byte of the IPv4 destination is the machine's number + 1.
                if packet[0] >> 4 == 4 and 1 <= packet[19] <= len(devices):
                    under_way.append((time.monotonic() + delay, devices[packet[19] - 1], packet))
        while under_way and under_way[0][0] <= time.monotonic():
            _, tun, packet = under_way.popleft()
            try:
                os.write(tun, packet)
            except BlockingIOError:
                pass  # A full queue drops packets, as switches do.


main(*sys.argv[1:])
