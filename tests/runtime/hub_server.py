"""A stand-in for the Hugging Face hub: the routes that its client asks, over repositories that a test declares."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit


@dataclass
class Repository:
    """A repository: its files, by revision where they differ, and who may read it.

    Attributes:
        revisions: name of a branch or tag -> files; ``main`` is the default.
        gated, private: only TOKEN reads it.
        cut: files whose next answer breaks off in the middle.
        large: files that lie elsewhere: the hub answers with a redirect.
    """

    revisions: dict[str, dict[str, bytes | Path]]
    gated: bool = False
    private: bool = False
    cut: set[str] = field(default_factory=set)
    large: set[str] = field(default_factory=set)

    def commit(self, revision: str) -> str | None:
        """The commit of a branch, tag or commit."""
        for name, files in self.revisions.items():
            commit = hashlib.sha1(json.dumps([name, *sorted(files)]).encode()).hexdigest()
            if revision in (name, commit):
                return commit
        return None

    def files(self, commit: str) -> dict[str, bytes | Path]:
        """The files of a commit."""
        return next(files for name, files in self.revisions.items() if self.commit(name) == commit)


TOKEN = "hf_readable"


class Hub(ThreadingHTTPServer):
    """The server. `asked` has every request as (method, path, range); `status` is what every answer has instead, if set."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, Repository] = {}
        self.asked: list[tuple[str, str, str]] = []
        self.status: int | None = None

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.server_port}"

    def fetched(self) -> list[str]:
        """The files whose contents were asked for."""
        places = [
            re.match(r"/elsewhere/[^/]+/[^/]+/[^/]+/(.+)|.*/resolve/[^/]+/(.+)", path)
            for method, path, _ in self.asked
            if method == "GET"
        ]
        return [place[1] or place[2] for place in places if place is not None]


def content(file: bytes | Path) -> bytes:
    """The bytes of a file."""
    return file.read_bytes() if isinstance(file, Path) else file


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *_: object) -> None:
        """Nothing."""

    def do_HEAD(self) -> None:
        """As GET, without the body."""
        self._answer(body=False)

    def do_GET(self) -> None:
        """Any route."""
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.asked.append((self.command, path, self.headers.get("Range", "")))
        if self.server.status is not None:
            self._refuse(self.server.status)
            return
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/(.+))?", path):
            self._api(match[1], match[2], match[3] or "main")
        elif match := re.fullmatch(r"/elsewhere/([^/]+/[^/]+)/([0-9a-f]{40})/(.+)", path):
            self._file(self.server.repositories[match[1]], match[2], match[3], body)
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+|refs/[^/]+/[^/]+)/(.+)", path):
            if (repository := self._open(match[1])) is None:
                return
            commit = repository.commit(match[2])
            if commit is None:
                self._refuse(404, "RevisionNotFound")
            elif match[3] not in repository.files(commit):
                self._refuse(404, "EntryNotFound", commit)
            elif match[3] in repository.large:
                self._redirect(match[1], repository, commit, match[3])
            else:
                self._file(repository, commit, match[3], body)
        else:
            self._refuse(404)

    def _open(self, name: str) -> Repository | None:
        given = self.headers.get("Authorization", "")
        if given and given != f"Bearer {TOKEN}":
            self._refuse(401, message="Invalid credentials in Authorization header")
            return None
        repository = self.server.repositories.get(name)
        if repository is None or (repository.private and not given):
            self._refuse(404 if given else 401, "RepoNotFound")
            return None
        return repository

    def _api(self, name: str, what: str | None, revision: str) -> None:
        if (repository := self._open(name)) is None:
            return
        commit = repository.commit(revision)
        if commit is None:
            self._refuse(404, "RevisionNotFound")
            return
        sizes = {file: len(content(data)) for file, data in repository.files(commit).items()}
        if what == "tree":
            self._json(
                [{"type": "file", "path": file, "size": size, "oid": commit} for file, size in sizes.items()]
            )
            return
        siblings = [{"rfilename": file, "size": size, "blobId": commit} for file, size in sizes.items()]
        self._json({"id": name, "modelId": name, "sha": commit, "siblings": siblings})

    def _redirect(self, name: str, repository: Repository, commit: str, file: str) -> None:
        if repository.gated and not self.headers.get("Authorization"):
            self._refuse(401, "GatedRepo")
            return
        data = content(repository.files(commit)[file])
        self.send_response(302)
        self.send_header("Location", f"{self.server.url}/elsewhere/{name}/{commit}/{file}")
        self.send_header("X-Repo-Commit", commit)
        self.send_header("X-Linked-Size", str(len(data)))
        self.send_header("X-Linked-ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _file(self, repository: Repository, commit: str, file: str, body: bool) -> None:
        if repository.gated and not self.headers.get("Authorization"):
            self._refuse(401, "GatedRepo")
            return
        data = content(repository.files(commit)[file])
        begin = 0
        if match := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")):
            begin = int(match[1])
        self.send_response(206 if begin else 200)
        self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Content-Length", str(len(data) - begin))
        if begin:
            self.send_header("Content-Range", f"bytes {begin}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if not body:
            return
        if file in repository.cut:
            repository.cut.remove(file)
            self.wfile.write(data[begin : begin + (len(data) - begin) // 2])
            self.close_connection = True
            return
        self.wfile.write(data[begin:])

    def _json(self, value: object) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _refuse(self, status: int, code: str = "", commit: str = "", message: str = "") -> None:
        self.send_response(status)
        for name, value in (
            ("X-Error-Code", code),
            ("X-Error-Message", message or code),
            ("X-Repo-Commit", commit),
        ):
            if value:
                self.send_header(name, value)
        self.send_header("Content-Length", "0")
        self.end_headers()


@contextmanager
def serving() -> Iterator[Hub]:
    """A hub in a thread."""
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()
