"""Jobs that save to a server of moto's, which kills ranks and fails at chosen requests.

Usage: s3.py PROGRAM, see tests/s3.sh.
"""

import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import boto3
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

program = os.path.abspath(sys.argv[1])
SECONDS = 400  # A deadline that no job here comes near.
ERROR_WITHIN = 150  # Seconds from the first request without an answer to the error of a save, with the default settings.


class Server:
    """An S3 server that gives requests which match a pattern the answers that a test plans."""

    def __init__(self):
        self.app = DomainDispatcherApplication(create_backend_app)
        self.pattern, self.act, self.lost, self.met = None, None, False, []
        self.port, self.lock = 0, threading.Lock()
        self.begin()
        self.url = f"http://127.0.0.1:{self.port}"

    def begin(self):
        quiet = type("Quiet", (WSGIRequestHandler,), {"log": lambda *_: None})
        self.server = make_server("127.0.0.1", self.port, self.serve, threaded=True, request_handler=quiet)
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def end(self):
        """Refuses connections from now on."""
        self.server.shutdown()
        self.server.server_close()

    def serve(self, environ, start_response):
        request = f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}?{environ['QUERY_STRING']}"
        if self.pattern and re.search(self.pattern, request):
            with self.lock:
                self.met.append(request)
                of_all, of_these = len(self.met), self.met.count(request)
            status = self.act(of_all, of_these)
            if status:
                if self.lost:
                    list(self.app(environ, lambda *_: None))
                else:
                    environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
                start_response(status, [("Content-Length", "0")])
                return [b""]
        try:
            return self.app(environ, start_response)
        except (KeyError, ValueError):  # moto raises these for a part whose upload has ended meanwhile.
            start_response("404 Not Found", [("Content-Length", "0")])
            return [b""]

    def plan(self, pattern, act, lost=False):
        """For a request that matches `pattern`, calls `act` with the number of matching requests and the number of equal ones so far.
        If `act` returns a status, that is the answer, and the request has no effect; with `lost` it has its effect all the same."""
        self.pattern, self.act, self.lost, self.met = pattern, act, lost, []


server = Server()
os.environ |= {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
s3 = boto3.client("s3", endpoint_url=server.url)
s3.create_bucket(Bucket="bucket")


class Job:
    """Ranks that train, and save a checkpoint to s3://BUCKET/PREFIX in every second step."""

    def __init__(self, prefix, world, steps, mode="large", temporary=None, bucket="bucket", settings=()):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.temporary = temporary or tempfile.TemporaryDirectory()
        plain = {k: v for k, v in os.environ.items() if not re.search("BURN_DDP_|RANK|WORLD_SIZE|MASTER_|AWS_", k)}
        self.ranks = []
        for rank in range(world):
            variables = {"RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RAYON_NUM_THREADS": 1}
            if rank == 0:  # The other ranks need neither settings nor credentials.
                variables |= {"AWS_ENDPOINT_URL": server.url, "AWS_REGION": "us-east-1"}
                variables |= {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "TMPDIR": self.temporary.name}
                variables |= dict(settings)
                variables = {k: v for k, v in variables.items() if v is not None}
            self.ranks.append(subprocess.Popen(
                [program, "checkpoint", f"s3://{bucket}/{prefix}", str(steps), "2", mode],
                env=plain | {k: str(v) for k, v in variables.items()},
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            ))

    def end(self, ok=True):
        """Waits until the ranks have ended; returns their output."""
        deadline = time.monotonic() + SECONDS
        printed = []
        for rank in self.ranks:
            try:
                printed.append(rank.communicate(timeout=max(1, deadline - time.monotonic()))[0])
            except subprocess.TimeoutExpired:
                [other.kill() for other in self.ranks]
                raise AssertionError(f"a rank did not end: {rank.communicate()[0]}") from None
        codes = [rank.returncode for rank in self.ranks]
        assert all((code == 0) == ok for code in codes), (codes, printed)
        return printed

    def leftovers(self):
        return os.listdir(self.temporary.name)


def objects(prefix):
    found = s3.list_objects_v2(Bucket="bucket", Prefix=f"{prefix}/").get("Contents", [])
    return [entry["Key"].removeprefix(f"{prefix}/") for entry in found]


def complete(prefix):
    return [key.split("/")[0] for key in objects(prefix) if key.endswith("/manifest.json")]


def uploads(prefix):
    return s3.list_multipart_uploads(Bucket="bucket", Prefix=f"{prefix}/").get("Uploads", [])


def hashes(printed):
    return {re.search("^hash (.*)$", text, re.M)[1] for text in printed}


def said(name):
    print(f"{name}: ok ({time.monotonic() - began:.0f} s)", flush=True)


began = time.monotonic()
CLOSED = "http://127.0.0.1:9"  # No server.

# Storage that goes away in the middle and does not come back, by refusing connections and by answering nothing, while the other tests
# run; storage that was never there.
background = ThreadPoolExecutor()


class LostStorage:
    """A job whose storage goes away while it uploads the second part of a file."""

    def __init__(self, prefix, lose, settings=()):
        self.server, self.lose = Server(), lose
        self.server.plan("PUT .*/step-00000004/model.bpk.*partNumber=2", self.first)
        job = Job(prefix, 2, 8, settings={"AWS_ENDPOINT_URL": self.server.url} | dict(settings))
        self.outcome = background.submit(lambda: (job.end(ok=False), time.monotonic()))

    def first(self, n, _):
        if n == 1:
            self.began = time.monotonic()
            return self.lose(self.server)

    def error(self):
        """Returns the output of the ranks, and the seconds until they had ended."""
        printed, ended = self.outcome.result()
        return printed, ended - self.began


def refuse(server):
    threading.Thread(target=server.end).start()


def answer_nothing(server):
    server.plan(".", lambda *_: time.sleep(SECONDS))
    time.sleep(SECONDS)


gone = LostStorage("gone", refuse)
silent = LostStorage("silent", answer_nothing, {"BURN_DDP_STORAGE_RETRY": 10, "AWS_TIMEOUT": "4s"})
never = Job("never", 2, 2, settings={"AWS_ENDPOINT_URL": CLOSED, "BURN_DDP_STORAGE_RETRY": 5})

# Training goes on with the same bits, and with other numbers of ranks. Three checkpoints stay.
server.plan("PUT .*/model.bpk.*partNumber", lambda *_: None)
job = Job("whole", 2, 8)
whole = hashes(job.end())
assert len(whole) == 1 and len(server.met) == 4 * 3, server.met
assert complete("whole") == ["step-00000004", "step-00000006", "step-00000008"], objects("whole")
assert not [key for key in objects("whole") if "step-00000002" in key] and not uploads("whole"), objects("whole")
assert not job.leftovers()
for world, steps in ((3, 10), (1, 12)):
    printed = Job("whole", world, steps).end()
    assert f"resumed {steps - 2}\n" in printed[0], printed
said("saved, resumed by other numbers of ranks, pruned")

# Each rank has a part of the parameters and of the optimizer's state.
for world, steps in ((2, 4), (3, 6)):
    printed = Job("sharded", world, steps, "sharded").end()
assert "resumed 4\n" in printed[0] and len(hashes(printed)) == 1, printed
said("sharded")

# Rank 0 killed between two parts, and between the last part and the manifest: nothing half is loaded.
for name, pattern, mode, parts in (
    ("parts", "PUT .*/step-00000004/model.bpk.*partNumber=2", "large", 1),
    ("manifest", "PUT .*/step-00000004/manifest.json[?]", "large", 0),
    ("later", "PUT .*/step-00000004/model.bpk.*partNumber=3", "large-later", 1),
):
    job = Job(name, 2, 8, mode)

    def kill(*_):
        job.ranks[0].kill()
        time.sleep(0.5)  # The answer comes to a process that is dead.
        return "500 Killed"

    server.plan(pattern, kill)
    printed = job.end(ok=False)
    assert len(server.met) == 1 and "rank 0" in printed[1], (server.met, printed)
    assert complete(name) == ["step-00000002"], objects(name)
    assert [key for key in objects(name) if key.startswith("step-00000004/")] or parts, objects(name)
    assert len(uploads(name)) == parts, uploads(name)
    assert len(job.leftovers()) == 1, job.leftovers()
    server.plan(None, None)
    job = Job(name, 2, 8, mode, job.temporary)
    printed = job.end()
    assert "resumed 2\n" in printed[0] and hashes(printed) == whole, printed
    assert not job.leftovers(), job.leftovers()
    assert not uploads(name) and not [key for key in objects(name) if key.startswith(".burn-ddp-uploads")], uploads(name)
    assert complete(name) == ["step-00000004", "step-00000006", "step-00000008"], objects(name)
    said(f"killed at {pattern}")

# Storage that refuses a part: an error of all ranks, and nothing of the checkpoint stays.
server.plan("PUT .*/step-00000004/model.bpk.*partNumber=2", lambda *_: "403 Forbidden")
job = Job("refused", 2, 8)
for printed in job.end(ok=False):
    assert "cannot write the checkpoint of step 4 to s3://bucket/refused: model.bpk: " in printed, printed
    assert "/bucket/refused/step-00000004/model.bpk" in printed and "check AWS_ACCESS_KEY_ID, " in printed, printed
assert not uploads("refused") and not job.leftovers(), (uploads("refused"), job.leftovers())
assert {key.split("/")[0] for key in objects("refused")} == {".burn-ddp-owner", "step-00000002"}, objects("refused")
said("refused")

# Storage that fails for a while, while it is written and read: requests are tried again.
server.plan("(.*/step-0000000.*/|POST /bucket/?[?]delete)", lambda _, n: "503 Slow Down" if n % 3 else None)
Job("fails", 2, 4).end()
printed = Job("fails", 2, 8).end()
assert "resumed 4\n" in printed[0] and hashes(printed) == whole and len(server.met) > 20, printed
said("failed for a while")

# Storage that is restarted, and storage that does not answer for longer than a request may take.
def restart(n, _):
    if n == 1:
        server.end()
        time.sleep(3)
        server.begin()
        return "500 Restarted"

server.plan("PUT .*/step-00000004/model.bpk.*partNumber=2", restart)
assert hashes(Job("restarted", 2, 8).end()) == whole and len(server.met) == 2, server.met
server.plan("PUT .*/step-00000004/model.bpk.*partNumber=2", lambda n, _: time.sleep(9) if n == 1 else None)
assert hashes(Job("slow", 2, 8, settings={"AWS_TIMEOUT": "5s"}).end()) == whole and len(server.met) > 1, server.met
# The conditional request, which the client does not make again by itself.
server.plan("PUT .*/step-00000004/manifest.json[?]", lambda n, _: time.sleep(9) if n == 1 else None)
assert hashes(Job("slow-manifest", 2, 8, settings={"AWS_TIMEOUT": "5s"}).end()) == whole and len(server.met) > 1, server.met
assert "step-00000004" in complete("slow-manifest"), objects("slow-manifest")
said("restarted, slow")

# Answers that are lost: what was done is not done again.
for name, pattern in (
    ("lost-upload", "POST .*/step-00000004/model.bpk.*uploadId"),
    ("lost-manifest", "PUT .*/step-00000004/manifest.json[?]"),
    ("lost-removal", "POST /bucket/?[?]delete"),
):
    server.plan(pattern, lambda n, _: "500 Lost" if n == 1 else None, lost=True)
    assert hashes(Job(name, 2, 8).end()) == whole and len(server.met) > 1, server.met
    assert complete(name) == ["step-00000004", "step-00000006", "step-00000008"], objects(name)
said("lost answers")

# A second job takes the prefix over: the first one saves nothing more.
server.plan("PUT .*/taken/step-00000004/model.bpk.*partNumber=1", lambda *_: s3.put_object(
    Bucket="bucket", Key="taken/.burn-ddp-owner", Body=b"another") and None)
for printed in Job("taken", 2, 8).end(ok=False):
    assert "another job has begun to save to s3://bucket/taken since this one did" in printed, printed
assert complete("taken") == ["step-00000002"], objects("taken")
# Files that it had uploaded before, in the order of a folder, may stay until the next job.
assert "step-00000004/model.bpk" not in objects("taken"), objects("taken")
server.plan(None, None)
printed = Job("taken", 2, 8).end()
assert "resumed 2\n" in printed[0] and hashes(printed) == whole and not uploads("taken"), (printed, uploads("taken"))
said("taken over")

# A file that was changed: the checkpoint before it.
server.plan(None, None)
s3.put_object(Bucket="bucket", Key="slow/step-00000008/optimizer.bpk", Body=b"changed")
printed = Job("slow", 2, 8).end()
assert "resumed 6\n" in printed[0] and hashes(printed) == whole, printed
said("changed")

# A bucket that is not there, and no credentials.
for printed in Job("run", 2, 2, bucket="missing").end(ok=False):
    assert "cannot read s3://missing/run: " in printed and "check the name of the bucket, " in printed, printed
no_keys = {"AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None, "AWS_METADATA_ENDPOINT": CLOSED}
for printed in Job("run", 2, 2, settings=no_keys).end(ok=False):
    assert "cannot read s3://bucket/run: " in printed and "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" in printed, printed
said("no bucket, no credentials")

# The storage that went away: an error of all ranks. When it is back the checkpoint before is there, and the next job goes on.
for name, lost in (("gone", gone), ("silent", silent)):
    printed, seconds = lost.error()
    for text in printed:
        assert f"cannot write the checkpoint of step 4 to s3://bucket/{name}: model.bpk: " in text, text
        assert "check AWS_ENDPOINT_URL and the network" in text, text
    assert seconds < ERROR_WITHIN, seconds
    assert complete(name) == ["step-00000002"] and len(uploads(name)) == 1, (objects(name), uploads(name))
    said(f"{name}: an error after {seconds:.0f} s")
printed = Job("gone", 2, 8).end()
assert "resumed 2\n" in printed[0] and hashes(printed) == whole and not uploads("gone"), (printed, uploads("gone"))
for printed in never.end(ok=False):
    assert "cannot read s3://bucket/never: " in printed and "check AWS_ENDPOINT_URL and the network" in printed, printed
said("gone and back")
