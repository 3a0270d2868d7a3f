#!/usr/bin/env python3
"""Writes permutation_golden.txt: `n seed epoch: order`, from an own ChaCha8 and Fisher-Yates.

    python3 permutation_golden.py > permutation_golden.txt

The file is a promise to every checkpoint ever written. If the Rust test fails, the Rust is wrong.
"""

import struct

MASK = 0xFFFFFFFF


def quarter(x, a, b, c, d):
    x[a] = (x[a] + x[b]) & MASK
    x[d] = ((x[d] ^ x[a]) << 16 | (x[d] ^ x[a]) >> 16) & MASK
    x[c] = (x[c] + x[d]) & MASK
    x[b] = ((x[b] ^ x[c]) << 12 | (x[b] ^ x[c]) >> 20) & MASK
    x[a] = (x[a] + x[b]) & MASK
    x[d] = ((x[d] ^ x[a]) << 8 | (x[d] ^ x[a]) >> 24) & MASK
    x[c] = (x[c] + x[d]) & MASK
    x[b] = ((x[b] ^ x[c]) << 7 | (x[b] ^ x[c]) >> 25) & MASK


def block(key, counter, rounds=8):
    """One block: constants, key, 64-bit counter, 64-bit nonce of zero."""
    state = list(struct.unpack("<4I", b"expand 32-byte k")) + list(struct.unpack("<8I", key))
    state += [counter & MASK, counter >> 32, 0, 0]
    x = state[:]
    for _ in range(rounds // 2):
        quarter(x, 0, 4, 8, 12)
        quarter(x, 1, 5, 9, 13)
        quarter(x, 2, 6, 10, 14)
        quarter(x, 3, 7, 11, 15)
        quarter(x, 0, 5, 10, 15)
        quarter(x, 1, 6, 11, 12)
        quarter(x, 2, 7, 8, 13)
        quarter(x, 3, 4, 9, 14)
    return struct.pack("<16I", *((a + b) & MASK for a, b in zip(x, state)))


def draws(key):
    counter = 0
    while True:
        yield from struct.unpack("<8Q", block(key, counter))
        counter += 1


def permutation(n, seed, epoch):
    stream = draws(struct.pack("<QQ", seed, epoch) + b"burn-ddp/shuffle")
    order = list(range(n))
    for last in range(n - 1, 0, -1):
        bound = last + 1
        while True:
            wide = next(stream) * bound
            if wide % 2**64 >= 2**64 % bound:
                break
        drawn = wide >> 64
        order[last], order[drawn] = order[drawn], order[last]
    return order


if __name__ == "__main__":
    # The first block of the all-zero key, from the ChaCha8 test vectors (draft-strombergson-chacha-test-vectors, TC1).
    assert block(bytes(32), 0)[:16].hex() == "3e00ef2f895f40d67f5bb8e81f09a5a1"
    print("# Written by permutation_golden.py: n seed epoch: order")
    for n, seed, epoch in [
        (0, 42, 0),
        (1, 42, 0),
        (2, 42, 0),
        (10, 0, 0),
        (10, 42, 0),
        (10, 42, 1),
        (100, 42, 7),
        (101, 2**64 - 1, 2**32 - 1),
        (1000, 1, 2),
    ]:
        order = " ".join(map(str, permutation(n, seed, epoch)))
        print(f"{n} {seed} {epoch}: {order}".rstrip())
