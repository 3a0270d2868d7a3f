"""Reads what tests/tests/exported_files.rs wrote, with the packages `safetensors` and `tensorboard`.

Usage: exported_files.py DIRECTORY, see tests/exported_files.sh.
"""

import pathlib
import sys

import numpy
from safetensors import safe_open
from safetensors.numpy import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

directory = pathlib.Path(sys.argv[1])

for name in "plain", "sharded":
    path = directory / f"{name}.safetensors"
    found = load_file(path)
    # The values that the Rust test writes.
    expected = {
        "linear.weight": numpy.arange(12, dtype=numpy.float32).reshape(4, 3) / 2,
        "linear.bias": numpy.arange(3, dtype=numpy.float32) / 2,
        "counts": numpy.arange(5, dtype=numpy.int64),
        "flags": numpy.array([True, False, True]),
    }
    assert found.keys() == expected.keys(), (path, found.keys())
    for key, value in expected.items():
        assert found[key].dtype == value.dtype and (found[key] == value).all(), (path, key, found[key])
    with safe_open(path, "np") as file:
        assert file.metadata() == {"producer": "burn-ddp", "layout": "burn"}, file.metadata()

board = EventAccumulator(str(directory / "board")).Reload()
loss = [(event.step, event.value) for event in board.Scalars("loss")]
assert loss == [(0, 1.0), (1, 0.5), (300, 0.25)], loss
assert {"loss", "step/time", "step/per_second"} <= set(board.Tags()["scalars"]), board.Tags()
(time,) = board.Scalars("step/time")
assert time.step == 300 and time.value > 0, time
print("safetensors and event files are read as they were written")
