"""A stand-in for the Hugging Face hub: a real HTTP server on loopback with the part of its API that downloads use.

    with StandInHub.running() as hub:
        hub.add("maker/tiny", directory)             # HF_ENDPOINT=hub.url
        hub.add("datasets/maker/texts", directory)   # a data set

As on the hub, large files are named after their SHA-256 and lie elsewhere, where a redirection leads to.
"""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_letmein"


@dataclass
class Repository:
    files: dict[str, bytes]
    revisions: dict[str, str]  # branch or tag -> commit
    private: bool = False
    gated: bool = False


@dataclass
class StandInHub:
    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    sent: list[str] = field(default_factory=list)  # files, in the order in which they were asked for
    ranges: list[str] = field(default_factory=list)  # as they were asked for
    num_requests: int = 0
    cut_after: int | None = None  # bytes of a large file, after which the connection breaks
    cuts: int = 0  # how many more are broken
    hold: str | None = None  # the rest of this file waits for `release`
    held: threading.Event = field(default_factory=threading.Event)
    release: threading.Event = field(default_factory=threading.Event)

    @property
    def large_url(self) -> str:
        """Another host, as on the hub: the library follows redirections to the same one as if there were none."""
        return f"{self.url.replace('127.0.0.1', 'localhost')}/large"

    @classmethod
    @contextmanager
    def running(cls) -> Iterator["StandInHub"]:
        hub = cls()
        server = ThreadingHTTPServer(("127.0.0.1", 0), lambda *arguments: _Handler(hub, *arguments))
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, name="stand-in-hub")
        thread.start()
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield hub
        finally:
            hub.release.set()
            server.shutdown()
            server.server_close()
            thread.join()

    def add(self, name: str, directory: Path, **properties: bool) -> Repository:
        """Publish the files of a directory, subdirectories included, as the branch `main`."""
        files = {str(file.relative_to(directory)): file.read_bytes() for file in directory.rglob("*") if file.is_file()}
        commit = hashlib.sha1(name.encode() + b"".join(files[file] for file in sorted(files))).hexdigest()
        self.repositories[name] = Repository(files, {"main": commit}, **properties)
        return self.repositories[name]


def is_large(file: str) -> bool:
    return file.endswith((".safetensors", ".bin", ".pth"))


def etag(file: str, content: bytes) -> str:
    if is_large(file):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, hub: StandInHub, *arguments: Any) -> None:
        self.hub = hub
        super().__init__(*arguments)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name there
        """Keep quiet: `requests` has it."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        """Describe some files of a data set: `paths` of a form."""
        wanted = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())["paths"]
        name, _, revision = urlsplit(self.path).path.removeprefix("/api/").partition("/paths-info/")
        found = self._repository(name, unquote(revision), describing=True)
        if found is not None:
            files = found[0].files
            self._json(200, [_tree_entry(file, files[file]) for file in wanted if file in files])

    def _answer(self) -> None:
        path = urlsplit(self.path).path  # quoted still: revisions may hold slashes
        self.hub.num_requests += 1
        if path.startswith("/api/"):
            self._describe(path.removeprefix("/api/").removeprefix("models/"))
        elif path.startswith("/large/"):
            self._send_large(path.removeprefix("/large/"))
        elif "/resolve/" not in path:
            self._refuse(404, None, "Not found")
        else:
            name, _, rest = path.strip("/").partition("/resolve/")
            revision, _, file = rest.partition("/")
            self._resolve(name, unquote(revision), unquote(file))

    def _describe(self, rest: str) -> None:
        tree = "/tree/" in rest
        name, _, revision = rest.partition("/tree/" if tree else "/revision/")
        revision, _, directory = revision.partition("/")
        found = self._repository(name, unquote(revision) or "main", describing=True)
        if found is None:
            return
        repository, commit = found
        if tree:
            self._list(repository.files, unquote(directory))
        else:
            siblings = [_sibling(file, content) for file, content in repository.files.items()]
            self._json(200, {"id": name, "sha": commit, "private": repository.private, "siblings": siblings})

    def _list(self, files: Mapping[str, bytes], directory: str) -> None:
        """List a directory: what is in it, or all that is below it if `recursive` is asked for."""
        inside = f"{directory}/" if directory else ""
        below = {file.removeprefix(inside): content for file, content in files.items() if file.startswith(inside)}
        if directory and not below:
            self._refuse(404, "EntryNotFound", f"{directory} does not exist")
            return
        entries = [_tree_entry(f"{inside}{file}", content) for file, content in below.items()]
        if parse_qs(urlsplit(self.path).query).get("recursive") == ["false"]:
            entries = [each for each in entries if "/" not in each["path"].removeprefix(inside)]
            folders = sorted({file.partition("/")[0] for file in below if "/" in file})
            entries += [
                {"type": "directory", "path": f"{inside}{name}", "oid": "0" * 40, "size": 0} for name in folders
            ]
        self._json(200, entries)

    def _repository(self, name: str, revision: str, *, describing: bool) -> tuple[Repository, str] | None:
        repository = self.hub.repositories.get(name)
        authorization = self.headers.get("Authorization")
        if authorization not in (None, f"Bearer {TOKEN}"):
            self._refuse(401, None, "Invalid credentials in Authorization header")
        elif repository is None or (repository.private and authorization is None):
            self._refuse(401 if authorization is None else 404, "RepoNotFound", "Repository not found")
        elif repository.gated and authorization is None and not describing:
            self._refuse(401, "GatedRepo", f"Access to model {name} is restricted. You must be authenticated.")
        elif revision not in repository.revisions and revision not in repository.revisions.values():
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        else:
            return repository, repository.revisions.get(revision, revision)
        return None

    def _resolve(self, name: str, revision: str, file: str) -> None:
        found = self._repository(name, revision, describing=False)
        if found is None:
            return
        repository, commit = found
        content = repository.files.get(file)
        if content is None:
            self._refuse(404, "EntryNotFound", "Entry not found")
            return
        if is_large(file):
            size, location = str(len(content)), f"{self.hub.large_url}/{etag(file, content)}"
            linked = {"X-Linked-Etag": f'"{etag(file, content)}"', "X-Linked-Size": size, "Location": location}
            self._begin(302, {"X-Repo-Commit": commit, **linked, "Content-Length": "0"})
            return
        self._begin(
            200, {"X-Repo-Commit": commit, "ETag": f'"{etag(file, content)}"', "Content-Length": str(len(content))}
        )
        if self.command == "GET":
            self.hub.sent.append(file)
            self.wfile.write(content)

    def _send_large(self, wanted: str) -> None:
        every = [each for repository in self.hub.repositories.values() for each in repository.files.items()]
        [(file, content), *_] = [(file, content) for file, content in every if etag(file, content) == wanted]
        start = self._range_start()
        headers = {"ETag": f'"{wanted}"', "Accept-Ranges": "bytes", "Content-Length": str(len(content) - start)}
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self._begin(206 if start else 200, headers)
        if self.command == "GET":
            self.hub.sent.append(file)
            self._send(file, content[start:])

    def _begin(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()

    def _range_start(self) -> int:
        asked = self.headers.get("Range")
        if asked is None:
            return 0
        self.hub.ranges.append(asked)
        return int(asked.removeprefix("bytes=").partition("-")[0])

    def _send(self, file: str, content: bytes) -> None:
        hub = self.hub
        if hub.cuts > 0 and hub.cut_after is not None:
            hub.cuts -= 1
            self.wfile.write(content[: hub.cut_after])
            self.wfile.flush()
            self.connection.close()
            self.close_connection = True
            return
        half = len(content) // 2
        self.wfile.write(content[:half])
        if file == hub.hold:
            self.wfile.flush()
            hub.held.set()
            hub.release.wait()
        self.wfile.write(content[half:])

    def _refuse(self, status: int, code: str | None, message: str) -> None:
        errors = {"X-Error-Message": message, **({} if code is None else {"X-Error-Code": code})}
        self._json(status, {"error": message}, errors)

    def _json(self, status: int, content: object, headers: dict[str, str] | None = None) -> None:
        body = json.dumps(content).encode()
        self._begin(status, {**(headers or {}), "Content-Type": "application/json", "Content-Length": str(len(body))})
        if self.command != "HEAD":
            self.wfile.write(body)


def _lfs(content: bytes) -> dict[str, Any]:
    return {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}


def _sibling(file: str, content: bytes) -> dict[str, Any]:
    blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    known = {"rfilename": file, "size": len(content), "blobId": blob}
    return {**known, "lfs": _lfs(content)} if is_large(file) else known


def _tree_entry(file: str, content: bytes) -> dict[str, Any]:
    blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    entry: dict[str, Any] = {"type": "file", "path": file, "size": len(content), "oid": blob}
    if is_large(file):
        entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
    return entry
