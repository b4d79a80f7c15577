"""A small Hugging Face hub: one gated repository, served from a folder, refused without the token.

Runs in a pod of its own (standard library only): `python3 hub.py FOLDER REPOSITORY TOKEN [PORT]`. It speaks the part
of the hub's protocol that a download uses: the repository's description, its tree, and files by revision.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

FOLDER, REPOSITORY, TOKEN = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
REVISION = f"(main|{COMMIT})"
FILES = {path.name: path for path in sorted(FOLDER.iterdir()) if path.is_file()}


def description() -> dict[str, object]:
    siblings = [{"rfilename": name} for name in FILES]
    return {"id": REPOSITORY, "modelId": REPOSITORY, "sha": COMMIT, "private": False, "gated": "manual", "tags": [],
            "siblings": siblings, "pipeline_tag": "text-generation", "library_name": "transformers"}  # fmt: skip


def tree() -> list[dict[str, object]]:
    return [{"type": "file", "path": n, "size": p.stat().st_size, "oid": etag(n)} for n, p in FILES.items()]


def etag(name: str) -> str:
    return hashlib.sha1(FILES[name].read_bytes()).hexdigest()


class Hub(BaseHTTPRequestHandler):
    """GET and HEAD; every answer is written to the log with the path and whether a token came along."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        if path == "/healthz":
            self.answer(200, b"ok")
        elif self.headers.get("authorization") != f"Bearer {TOKEN}":
            words = f"Access to model {REPOSITORY} is restricted. You must be authenticated to access it."
            self.answer(401, words.encode(), {"X-Error-Code": "GatedRepo", "X-Error-Message": words})
        elif re.fullmatch(f"/api/models/{REPOSITORY}(/revision/{REVISION})?", path):
            self.answer(200, json.dumps(description()).encode())
        elif re.fullmatch(f"/api/models/{REPOSITORY}/tree/{REVISION}/?", path):
            self.answer(200, json.dumps(tree()).encode())
        elif (found := re.fullmatch(f"/{REPOSITORY}/resolve/{REVISION}/(.+)", path)) and found[2] in FILES:
            self.answer(200, FILES[found[2]].read_bytes(), {"ETag": f'"{etag(found[2])}"', "X-Repo-Commit": COMMIT})
        else:
            self.answer(404, b"not found", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})

    do_HEAD = do_GET

    def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        start, end = self.span(len(body)) if status == 200 else (0, len(body))
        self.send_response(206 if (start, end) != (0, len(body)) else status)
        for name, value in {"Content-Type": "application/json", "Accept-Ranges": "bytes", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(end - start))
        if (start, end) != (0, len(body)):
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(body)}")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[start:end])

    def span(self, size: int) -> tuple[int, int]:
        """What a Range header asks for, or all."""
        requested = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("range") or "")
        return (int(requested[1]), int(requested[2] or size - 1) + 1) if requested else (0, size)

    def log_message(self, format: str, *args: object) -> None:
        known = "with" if self.headers.get("authorization") else "without"
        print(f"{known} token: {format % args}", flush=True)


if __name__ == "__main__":
    ThreadingHTTPServer(("", int(sys.argv[4]) if len(sys.argv) > 4 else 8080), Hub).serve_forever()
