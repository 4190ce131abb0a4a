"""A small hub on this machine: what huggingface_hub asks for when it downloads files of a repository, and faults on demand."""
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class SmallHub:
    "Serves a data set repository from a dict of bytes: what it is, its tree, its files; use it in a `with`."

    def __init__(self, repo: str, files: dict[str, bytes]):
        self.repo, self.files = repo, files
        self.log = []  # (method, path, first byte asked for, bytes sent)
        self.cuts = {}  # path -> list of byte counts after which the line breaks, one for each GET
        self.sizes = {}  # path -> size the hub states, if it lies
        self.hashes = {}  # path -> SHA-256 the hub states, if it lies
        self.gated = False  # whether access must be asked for
        self.down_after = {}  # path -> every GET from this byte on is answered by 500

    def __enter__(self):
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args):
                pass

            def do_HEAD(self):
                hub.answer(self, body=False)

            def do_GET(self):
                hub.answer(self, body=True)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.server.handle_error = lambda *request: None  # the client hung up
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self.thread.start()
        self.endpoint = f"http://127.0.0.1:{self.server.server_address[1]}"
        return self

    def __exit__(self, *exc):
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def sha256(self, path: str) -> str:
        return self.hashes.get(path, hashlib.sha256(self.files[path]).hexdigest())

    def answer_api(self, request, repo: str, what: str) -> None:
        "What the repository is (revision/...), or its files (tree/...)."
        sizes = {path: self.sizes.get(path, len(data)) for path, data in self.files.items()}
        tree = [{"type": "file", "path": path, "size": size, "oid": "0" * 40, "lfs": {"oid": self.sha256(path), "size": size, "pointerSize": 134}} for path, size in sizes.items()]
        found = json.dumps(tree if what == "tree" else {"id": self.repo, "sha": COMMIT, "siblings": []}).encode()
        known = repo == self.repo and not self.gated
        request.send_response(200 if known else 403 if self.gated else 404)
        if not known:
            request.send_header("X-Error-Code", "GatedRepo" if self.gated else "RepoNotFound")
            found = b""
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(found)))
        request.end_headers()
        request.wfile.write(found)

    def answer(self, request, body: bool) -> None:
        if api := re.fullmatch(r"/api/datasets/(.+?)/(tree|revision)/[^/]+", request.path.partition("?")[0]):
            return self.answer_api(request, api[1], api[2])
        found = re.fullmatch(r"/datasets/(.+?)/resolve/([^/]+)/(.+?)(\?.*)?", request.path)
        method, path = "GET" if body else "HEAD", found[3] if found else request.path
        if not found or found[1] != self.repo or path not in self.files:
            self.log.append((method, path, 0, 0))
            request.send_response(404)
            request.send_header("X-Error-Code", "RepoNotFound" if found and found[1] != self.repo else "EntryNotFound")
            request.send_header("Content-Length", "0")
            request.end_headers()
            return
        data = self.files[path]
        start = int(m[1]) if (m := re.match(r"bytes=(\d+)-", request.headers.get("Range", ""))) else 0
        if body and start >= self.down_after.get(path, 1 << 60):
            self.log.append((method, path, start, 0))
            request.send_response(500)
            request.send_header("Content-Length", "0")
            request.end_headers()
            return
        request.send_response(206 if start else 200)
        request.send_header("X-Repo-Commit", COMMIT)
        request.send_header("ETag", f'"{self.sha256(path)}"')
        request.send_header("X-Linked-Size", str(self.sizes.get(path, len(data))))
        request.send_header("Accept-Ranges", "bytes")
        if start:
            request.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        request.send_header("Content-Length", str(len(data) - start))
        request.end_headers()
        sent = data[start:]
        if body and self.cuts.get(path):
            sent = sent[: self.cuts[path].pop(0)]
        self.log.append((method, path, start, len(sent) if body else 0))  # before the client can have it all
        if body:
            request.wfile.write(sent)
            if len(sent) < len(data) - start:  # the line breaks
                request.wfile.flush()
                request.close_connection = True

    def gets(self, path: str) -> list[tuple[int, int]]:  # (first byte, bytes sent) of every GET
        return [(start, sent) for method, p, start, sent in self.log if method == "GET" and p == path]
