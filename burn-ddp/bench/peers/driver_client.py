"""The part that all scripts here share: executing the driver's commands. See src/driver_protocol.rs for the protocol."""

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
    """Executes the commands of the driver at the socket `path` until `quit`.

    `commands` maps names to functions. A function gets the numbers of its command's line. The answer is `ok` with the value that it
    returns, or `error` with the exception that it raises.
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
