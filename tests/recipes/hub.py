"""A small stand-in for the Hugging Face hub: the requests that `snapshot_download` makes, answered from a folder."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def serving(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """The address of a hub whose data sets are `folder/<owner>/<name>`, and the files that were fetched."""
    fetched: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def answer(self, *, body: bool) -> None:
            path = self.path.partition("?")[0]
            api = re.fullmatch(r"/api/datasets/([^/]+/[^/]+)/(revision|tree)/([^/]+)", path)
            file = re.fullmatch(r"/datasets/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
            if api and (folder / api[1]).is_dir():
                found = [p for p in sorted((folder / api[1]).rglob("*")) if p.is_file()]
                names = [str(p.relative_to(folder / api[1])) for p in found]
                if api[2] == "tree":
                    listing = [
                        {"type": "file", "path": n, "size": p.stat().st_size, "oid": digest(p)}
                        for n, p in zip(names, found, strict=True)
                    ]
                    self.reply(json.dumps(listing).encode(), body, "application/json")
                else:
                    info = {"id": api[1], "sha": COMMIT, "siblings": [{"rfilename": name} for name in names]}
                    self.reply(json.dumps(info).encode(), body, "application/json")
            elif file and (folder / file[1] / file[3]).is_file():
                if body:
                    fetched.append(file[3])
                place = folder / file[1] / file[3]
                self.reply(place.read_bytes(), body, "application/octet-stream", ETag=f'"{digest(place)}"')
            else:
                self.send_response(404)
                self.send_header("X-Error-Code", "RepoNotFound")
                self.send_header("Content-Length", "0")
                self.end_headers()

        def reply(self, content: bytes, body: bool, kind: str, **headers: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("X-Repo-Commit", COMMIT)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            if body:
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", fetched
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def digest(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()
