"""A stand-in for the Hugging Face hub on the loopback interface: listing, redirects, ranges.

Large files are redirected to another path, as the hub does to its content network. A connection
can be made to break after so many bytes.
"""

import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class HubStandIn:
    """Serves `files` of the repository `repo`; use as a context manager."""

    repo: str
    files: dict[str, bytes]
    breaks: list[int] = field(default_factory=list)  # each breaks one download after n bytes
    down: bool = False  # close every connection without an answer
    status: int = 200  # of the listing
    ranges: bool = True  # honour Range
    wrong_sha256: bool = False
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)  # method, path, Range

    def __enter__(self) -> "HubStandIn":
        hub = self

        class Handler(_Handler):
            stand_in = hub

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.server.shutdown()
        self.server.server_close()

    @property
    def url(self) -> str:
        """For HF_ENDPOINT."""
        return f"http://127.0.0.1:{self.server.server_port}"

    def downloads(self) -> list[str | None]:
        """The Range header of each download of contents so far."""
        return [r for method, path, r in self.requests if method == "GET" and "/cdn/" in path]

    def listing(self) -> dict[str, Any]:
        """The hub's answer to /api/models/<repo>?blobs=true."""
        siblings = []
        for name, data in self.files.items():
            sha256 = hashlib.sha256(data + (b"!" if self.wrong_sha256 else b"")).hexdigest()
            lfs = {"size": len(data), "sha256": sha256, "pointerSize": 134}
            siblings.append({"rfilename": name, "size": len(data), "blobId": "0", "lfs": lfs})
        return {"id": self.repo, "modelId": self.repo, "sha": COMMIT, "siblings": siblings}


class _Handler(BaseHTTPRequestHandler):
    stand_in: HubStandIn
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def log_message(self, *_: Any) -> None:
        return

    def _answer(self, *, body: bool) -> None:
        hub = self.stand_in
        hub.requests.append((self.command, self.path, self.headers.get("Range")))
        path = self.path.split("?")[0]
        resolve = f"/{hub.repo}/resolve/{COMMIT}/"
        if hub.down:
            self.close_connection = True
        elif path == f"/api/models/{hub.repo}":
            self._send(hub.status, json.dumps(hub.listing()).encode(), body=body)
        elif path.startswith(resolve) and path.removeprefix(resolve) in hub.files:
            name = path.removeprefix(resolve)
            where = {
                "Location": f"{hub.url}/cdn/{name}",
                "X-Linked-Size": str(len(hub.files[name])),
            }
            self._send(302, b"", body=body, extra=where)
        elif path.startswith("/cdn/"):
            self._send_file(hub.files[path.removeprefix("/cdn/")], body=body)
        else:
            self._send(404, b"{}", body=body, extra={"X-Error-Code": "RepoNotFound"})

    def _send_file(self, data: bytes, *, body: bool) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        if asked is None or not self.stand_in.ranges:
            self._send(200, data, body=body, extra={"Accept-Ranges": "bytes"})
            return
        start = int(asked[1])
        extra = {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"}
        self._send(206, data[start:], body=body, extra=extra)

    def _send(
        self, status: int, data: bytes, *, body: bool, extra: dict[str, str] | None = None
    ) -> None:
        headers = {
            "Content-Length": str(len(data)),
            "ETag": f'"{hashlib.sha256(data).hexdigest()}"',
            "X-Repo-Commit": COMMIT,
        }
        self.send_response(status)
        for key, value in (headers | (extra or {})).items():
            self.send_header(key, value)
        self.end_headers()
        if body:
            if status in (200, 206) and "/cdn/" in self.path and self.stand_in.breaks:
                data = data[: self.stand_in.breaks.pop(0)]
                self.close_connection = True
            self.wfile.write(data)
