"""A hub on this machine: the endpoints that huggingface_hub and datasets ask, over folders; notes what was fetched."""

import hashlib
import json
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

from helpers.sharded import sharded

API = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree|paths-info)/([^/]+)(?:/(.+?))?)?/?$")
RESOLVE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)$")
LFS = (".safetensors", ".bin", ".model", ".gguf")


@dataclass
class Hub:
    """models/OWNER/NAME -> revision -> its folder. fetched: model files that were sent whole or in part, in order."""

    repos: dict[str, dict[str, Path]]
    gated: frozenset[str] = frozenset()
    url: str = ""
    fetched: list[str] = field(default_factory=list)

    def environment(self, home: Path) -> dict[str, str]:
        """Return the environment in which a process takes this server for the hub, with its cache under home."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_OFFLINE": "0",
        }

    def weights(self) -> list[str]:
        return [name for name in self.fetched if name.endswith((".safetensors", ".bin"))]

    def folder(self, repo: str, revision: str) -> tuple[Path, str] | None:
        """Return the folder of a revision, by its name or its commit, and its commit."""
        named = self.repos[repo]
        shas = {name: hashlib.sha1(str(place).encode()).hexdigest() for name, place in named.items()}
        return next(((named[n], sha) for n, sha in shas.items() if revision in (n, sha)), None)


def entry(root: Path, file: Path) -> dict[str, Any]:
    content = file.read_bytes()
    oid = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    told = {"type": "file", "path": str(file.relative_to(root)), "size": len(content), "oid": oid}
    if file.suffix in LFS:
        told["lfs"] = {"oid": etag(file), "size": len(content), "pointerSize": 134}
    return told


def etag(file: Path) -> str:
    content = file.read_bytes()
    if file.suffix in LFS:
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@contextmanager
def running_hub(repos: dict[str, dict[str, Path]], gated: frozenset[str] = frozenset()) -> Iterator[Hub]:
    hub = Hub(repos, gated)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            if match := API.match(path):
                self.api(*match.groups(), body=body)
            elif match := RESOLVE.match(path):
                self.file(*match.groups())
            else:
                self.answer(200 if path == "/" else 404, b"{}")

        do_HEAD = do_POST = do_GET

        def api(self, kind, name, what, revision, below, *, body) -> None:
            place = self.place(f"{kind}/{name}", revision or "main")
            if place is None:
                return
            folder, sha = place
            files = sorted(f for f in folder.rglob("*") if f.is_file())
            if what == "tree":
                inside = [f for f in files if below is None or f.is_relative_to(folder / below)]
                if below and not inside:
                    self.answer(404, b"{}", {"X-Error-Code": "EntryNotFound"})
                else:
                    self.json([entry(folder, f) for f in inside])
            elif what == "paths-info":
                wanted = (
                    json.loads(body)["paths"]
                    if body.startswith(b"{")
                    else re.findall(r"paths=([^&]*)", unquote(body.decode()))
                )
                self.json([entry(folder, f) for f in files if str(f.relative_to(folder)) in wanted])
            else:
                siblings = [{"rfilename": str(f.relative_to(folder))} for f in files]
                flags = dict.fromkeys(("private", "gated", "disabled"), False)
                counts = {"downloads": 0, "likes": 0, "tags": []}
                self.json({"_id": name, "id": name, "sha": sha, "siblings": siblings} | flags | counts)

        def file(self, datasets: str | None, name: str, revision: str, path: str) -> None:
            kind = "datasets" if datasets else "models"
            place = self.place(f"{kind}/{name}", revision)
            if place is None:
                return
            folder, sha = place
            file = folder / path
            head = {"X-Repo-Commit": sha}
            if not file.is_file():
                self.answer(404, b"", head | {"X-Error-Code": "EntryNotFound"})
                return
            content, status = file.read_bytes(), 200
            head |= {"ETag": f'"{etag(file)}"', "Accept-Ranges": "bytes"}
            if asked := re.match(r"bytes=(\d+)-(\d*)", self.headers.get("range", "")):
                first, last = int(asked[1]), int(asked[2] or len(content) - 1)
                head["Content-Range"] = f"bytes {first}-{min(last, len(content) - 1)}/{len(content)}"
                content, status = content[first : last + 1], 206
            if self.command == "GET":
                hub.fetched.append(f"{name}/{path}")
            self.answer(status, content, head)

        def place(self, repo: str, revision: str) -> tuple[Path, str] | None:
            """Return what Hub.folder returns, or None if the server answered with an error."""
            status, code, said = 404, "RevisionNotFound", f"Invalid rev id: {revision}"
            if repo not in hub.repos:  # as the hub says it to those who did not log in
                status, code, said = 401, "RepoNotFound", "Repository not found"
            elif repo.split("/", 1)[1] in hub.gated:
                status, code, said = 403, "GatedRepo", "Access is restricted"
            elif place := hub.folder(repo, revision):
                return place
            self.answer(status, b"{}", {"X-Error-Code": code, "X-Error-Message": said})
            return None

        def json(self, value: object) -> None:
            self.answer(200, json.dumps(value).encode(), {"content-type": "application/json"})

        def answer(self, status: int, content: bytes, head: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in (head or {}).items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module", name="served")
def served_fixture(family_dirs, tmp_path_factory) -> Hub:
    """lab/sharded as Mistral lays its repositories out, and others that are no plain checkpoint."""
    root = tmp_path_factory.mktemp("repos")
    newer, older = sharded(family_dirs["llama"], root / "sharded"), root / "older"
    (newer / "consolidated.safetensors").write_bytes(b"another layout")
    (newer / "original").mkdir()
    (newer / "original/params.json").write_text("{}")
    (newer / "pytorch_model.bin").write_bytes(b"a pickle")
    shutil.copytree(family_dirs["llama"], older)
    (root / "gguf").mkdir()
    (root / "gguf/m-Q4_K_M.gguf").write_text("{}")
    repos = {
        "models/lab/gguf": {"main": root / "gguf"},
        "models/lab/sharded": {"main": newer, "v0.1": older},
        "models/lab/gated": {"main": older},
    }
    with running_hub(repos, gated=frozenset({"lab/gated"})) as running:
        yield running


@pytest.fixture(name="cache")
def cache_fixture(served, tmp_path, monkeypatch) -> Path:
    """Return an empty cache of the hub's, for this test."""
    served.fetched.clear()
    point_at(served.url, tmp_path, monkeypatch)
    return tmp_path


def point_at(url, cache, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
