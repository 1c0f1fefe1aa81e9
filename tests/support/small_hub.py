"""A small Hugging Face Hub on the loopback address: what huggingface_hub requests, and faults on demand."""

import contextlib
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = ".safetensors"


def found_commit(path):
    """Returns the commit that a path names, if it names one."""
    match = re.search(r"/resolve/([0-9a-f]{40})/", path)
    return match and match[1]


class Handler(BaseHTTPRequestHandler):
    """Answers requests for the server's `hub`, a SmallHub."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # otherwise a body waits 40 ms until the head is acknowledged

    @property
    def hub(self):
        return self.server.hub

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self._answer(with_body=False)

    def do_GET(self):
        self._answer(with_body=True)

    def _answer(self, with_body):
        path = self.path.split("?")[0]
        if path.startswith(f"/api/models/{self.hub.repo}"):
            rest = path.removeprefix(f"/api/models/{self.hub.repo}")
            names = self.hub.names()
            if rest.startswith("/tree/"):
                return self._json([self.hub.tree(name) for name in names], with_body)
            siblings = [self.hub.sibling(name) for name in names]
            pinned = re.fullmatch(r"/revision/([0-9a-f]{40})", rest)
            sha = pinned[1] if pinned else self.hub.commit
            return self._json({"id": self.hub.repo, "sha": sha, "siblings": siblings}, with_body)
        match = re.fullmatch(rf"/{self.hub.repo}/resolve/[^/]+/(.+)", path)
        if not match or not (self.hub.folder / match[1]).is_file():
            return self._missing(with_body)
        self.hub.requests.append((self.command, match[1], self.headers.get("Range")))
        return self._file(match[1], with_body)

    def _json(self, value, with_body):
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if with_body:
            self.wfile.write(data)

    def _missing(self, with_body):
        self.send_response(404)
        self.send_header("X-Error-Code", "EntryNotFound" if self.hub.repo in self.path else "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _file(self, name, with_body):
        data = bytearray((self.hub.folder / name).read_bytes())
        start, end = 0, len(data)
        part = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if part:
            start, end = int(part[1]), min(end, int(part[2] or end) + 1)
        if with_body and not part and self.hub.wrong.get(name):
            self.hub.wrong[name] -= 1
            data[-1] ^= 1
        self.send_response(206 if part else 200)
        if part:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(data)}")
        self.send_header("ETag", f'"{self.hub.digest(name)}"')
        self.send_header("X-Repo-Commit", found_commit(self.path) or self.hub.commit)
        self.send_header("Content-Length", str(end - start))
        self.end_headers()
        if with_body:
            self._send(name, data[start:end])

    def _send(self, name, data):
        if self.hub.cut.get(name) and len(data) > self.hub.cut[name][0]:
            self.wfile.write(data[: self.hub.cut[name].pop(0)])
            self.close_connection = True
            return
        with contextlib.suppress(ConnectionError):
            self.wfile.write(data)


class SmallHub:
    """Serves one repository, the files of a folder.

    Attributes:
        requests: (method, file, Range header) of each request for a file.
        cut: {file: bytes after which the connection is cut, once for each entry}.
        commit: the commit of a branch.
        wrong: files of which one byte is sent wrong, and how often.
    """

    def __init__(self, folder, repo="org/model"):
        self.folder, self.repo = folder, repo
        self.requests, self.cut, self.wrong, self.commit = [], {}, {}, COMMIT
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.hub = self
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def names(self):
        return sorted(str(file.relative_to(self.folder)) for file in self.folder.rglob("*") if file.is_file())

    def sibling(self, name):
        data = (self.folder / name).read_bytes()
        blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        entry = {"rfilename": name, "size": len(data), "blobId": blob}
        if name.endswith(LARGE):
            entry["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
        return entry

    def digest(self, name):
        entry = self.sibling(name)
        return entry["lfs"]["sha256"] if "lfs" in entry else entry["blobId"]

    def tree(self, name):
        entry = self.sibling(name)
        more = {"lfs": {**entry["lfs"], "oid": entry["lfs"]["sha256"]}} if "lfs" in entry else {}
        return {"type": "file", "path": name, "size": entry["size"], "oid": entry["blobId"], **more}

    def fetched(self, method="GET"):
        """Returns the large files that were requested as a whole."""
        return [name for how, name, part in self.requests if how == method and name.endswith(LARGE) and not part]

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()


@contextlib.contextmanager
def connected(hub, cache):
    """Makes this process use `hub` as the Hugging Face Hub, with the cache `cache`.

    Yields the environment for a child to do the same.
    """
    from huggingface_hub import constants

    values = {
        "ENDPOINT": hub.url,
        "HUGGINGFACE_CO_URL_TEMPLATE": hub.url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_OFFLINE": False,
        "HF_HUB_CACHE": str(cache),
        "DOWNLOAD_CHUNK_SIZE": 1 << 16,  # a larger piece that has partly arrived is lost when the connection is cut
    }
    before = {name: getattr(constants, name) for name in values if hasattr(constants, name)}
    for name in before:
        setattr(constants, name, values[name])
    try:
        yield {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HUB_CACHE": str(cache), "HF_HOME": str(cache)}
    finally:
        for name, value in before.items():
            setattr(constants, name, value)
