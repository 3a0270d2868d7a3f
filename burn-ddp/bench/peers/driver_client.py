"""What all scripts here have in common: they do what the driver says. See src/driver_protocol.rs for the lines."""

import resource
import socket
import time


def cpu_ns():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return int((usage.ru_utime + usage.ru_stime) * 1e9)


def timed(step, samples, per_sample, before_sample=lambda: None):
    """The answer to a round: CPU time, and per sample the mean nanoseconds of `per_sample` steps."""
    times = []
    before = cpu_ns()
    for _ in range(samples):
        before_sample()
        start = time.perf_counter_ns()
        for _ in range(per_sample):
            step()
        times.append((time.perf_counter_ns() - start) / per_sample)
    return f"{cpu_ns() - before} " + " ".join(f"{t:.1f}" for t in times)


def serve(path, rank, commands):
    """Does what the driver at the socket `path` says until it says quit.

    `commands` are functions by name. Each gets the numbers of its line; what it returns stands behind `ok`, what it raises behind `error`.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(path)
    lines = connection.makefile("rw")

    def say(line):
        lines.write(line + "\n")
        lines.flush()

    say(f"hello {rank}")
    for line in lines:
        command, *numbers = line.split()
        if command == "quit":
            break
        try:
            said = commands[command](*map(int, numbers))
            answer = f"ok {said}" if said else "ok"
        except Exception as error:
            answer = "error " + repr(error).replace("\n", " ")
        say(answer)
