"""`tamis serve` as a process of its own."""

import json
import os
import re
import resource
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

CHAT = "/v1/chat/completions"


class ServeProcess:
    """A server in a process of its own."""

    def __init__(self, path, folder, *flags, n_file=None, env=None):
        def limit():
            if n_file is not None:
                resource.setrlimit(resource.RLIMIT_NOFILE, (n_file, n_file))

        self.log = folder / "log"
        command = [sys.executable, "-m", "tamis", "serve", "-c", "2048"]
        command += [] if path is None else ["-m", str(path)]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, "--port", "0", *flags],
                stderr=log,
                preexec_fn=limit,
                env=os.environ | (env or {}),
            )
        end = time.monotonic() + 60
        while not (found := re.search(r"127\.0\.0\.1:(\d+)[:/]", self.log.read_text())):
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < end
            time.sleep(0.05)
        self.port = int(found[1])

    def __enter__(self):
        return self

    def __exit__(self, *_error):
        self.process.kill()
        self.process.wait()

    def post(self, body, path=CHAT, timeout=30):
        headers = {"Content-Type": "application/json"}
        data = json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, headers)
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:
                return response.status, json.loads(response.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read() or b"{}")

    def connect(self, data):
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=30)
        connection.send(data)
        return connection

    def n_open(self):
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def open(self, path, body, timeout=60):
        headers = {"Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, headers)
        return urllib.request.urlopen(request, timeout=timeout)

    def get(self, path):
        try:
            with self.open(path, None) as response:
                return response.status, response.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def children(self):
        """Its processes, by what they run."""
        found = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                parent = int(stat.read_text().rpartition(")")[2].split()[1])
                command = (stat.parent / "cmdline").read_bytes().split(b"\0")
            except (OSError, IndexError):
                continue
            if parent == self.process.pid and len(command) > 3:
                found[command[3].decode()] = int(stat.parent.name)
        return found

    def model_pid(self):
        """The process that runs the model."""
        return self.children()["tamis.bindings.serve.process"]
