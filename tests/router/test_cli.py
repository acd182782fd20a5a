"""The command line: configuration, refusals, the lazily loaded commands, the end of processes."""

import hashlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import psutil
import pytest

from router.cli.cluster import check_endpoint, free_port, serve_switches, while_ray_lives
from router.cli.reaper import no_process_left
from router.cli.serve import load_config
from router.config import AppConfig
from router.errors import ConfigError

SCRIPT = Path(sys.executable).with_name("warmroute")
DIGEST = hashlib.sha256(b"key").hexdigest()


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([SCRIPT, *args], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("applications: []", "no Serve configuration"),
        ("applications: [{args: {policy: best}}]", "policy"),
        ("applications: [{args: {polcy: cache_aware}}]", "polcy"),
        ("applications: [{args: {replicas: 0}}]", "replicas"),
        ("applications: [{args: {api_keys: {plain-key: me}}}]", "SHA-256"),
        ("applications: [{args: {admin_key: plain-key}}]", "admin key as its SHA-256"),
        (
            f"applications: [{{args: {{admin_key: {DIGEST}, api_keys: {{{DIGEST}: me}}}}}}]",
            "one of the api_keys",
        ),
        ("applications: [{args: {cluster_secret: abc}}]", "cluster_secret"),
        ("applications: {", "is no YAML"),
        ("just text", "no Serve configuration"),
        ("applications: [{args: [model]}]", r"args must be names with values, not \['model'\]"),
        ("applications: [{}]\nhttp_options: [1]", "http_options must be names with values"),
    ],
)
def test_wrong_configurations_are_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config(path, {})


def test_a_missing_configuration_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        load_config(tmp_path / "nowhere.yaml", {})


def test_without_keys_only_loopback_may_listen() -> None:
    with pytest.raises(ConfigError, match="api_keys"):
        check_endpoint(AppConfig(), "0.0.0.0", free_port())
    check_endpoint(AppConfig(), "127.0.0.1", free_port())
    check_endpoint(AppConfig(api_keys={DIGEST: "me"}), "0.0.0.0", free_port())


def test_a_port_in_use_is_said_before_anything_starts() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            check_endpoint(AppConfig(), "127.0.0.1", port)
        ended = run("serve", "--model", "random:tiny", "--port", str(port))
    assert ended.returncode == 1
    assert ended.stderr.count("\n") == 1
    assert ended.stderr.startswith("warmroute: cannot listen")


def test_serves_switches_yield_to_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_SERVE_THROUGHPUT_OPTIMIZED", "0")
    assert serve_switches()["RAY_SERVE_THROUGHPUT_OPTIMIZED"] == "0"
    if sys.platform == "linux":
        assert os.access(serve_switches()["RAY_SERVE_HAPROXY_BINARY_PATH"], os.X_OK)


@pytest.mark.slow
def test_ctrl_c_while_starting_is_calm_and_leaves_nothing_behind() -> None:
    mark = f"warmroute-test-{uuid.uuid4().hex}"
    command = [SCRIPT, "serve", "--model", "random:tiny", "--replicas", "1", "--port", str(free_port())]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "MARK": mark}
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "starting 1 replicas of random:tiny ...\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "stopping ...\n")
    assert [p for p in psutil.process_iter() if mark in _environment(p).get("MARK", "")] == []


@pytest.mark.slow
def test_a_signal_to_the_whole_process_group_leaves_nothing_behind() -> None:
    """As systemd and `timeout` send it: Ray ends too, and can no longer be asked for anything."""
    mark, port = f"warmroute-test-{uuid.uuid4().hex}", free_port()
    command = [SCRIPT, "serve", "--model", "random:tiny", "--replicas", "1", "--port", str(port)]
    # The ports that this process may have chosen for a Ray of its own are taken.
    others = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**others, "MARK": mark},
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline(), process.stdout.readline()]
        assert f"http://127.0.0.1:{port}" in lines[1], process.communicate()
        os.killpg(process.pid, signal.SIGTERM)
        _, err = process.communicate(timeout=50)  # Ray itself would give up after 60 s, and abort the process
    assert process.returncode in (0, 130), err  # 0 if Ray happened to live long enough
    assert [p for p in psutil.process_iter() if mark in _environment(p).get("MARK", "")] == []
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", port))


def test_an_action_is_waited_for_while_ray_lives() -> None:
    done: list[int] = []
    while_ray_lives(lambda: (time.sleep(0.3), done.append(1)), lambda: True)
    assert done == [1]
    with pytest.raises(ConfigError, match="what it said"):
        while_ray_lives(_fail, lambda: True)
    with pytest.raises(SystemExit):
        while_ray_lives(sys.exit, lambda: True)


def test_an_action_is_given_up_when_ray_is_dead() -> None:
    never = threading.Event()
    while_ray_lives(never.wait, lambda: False)
    began = time.monotonic()
    while_ray_lives(never.wait, lambda: False, 0.3)
    assert time.monotonic() - began >= 0.3
    while_ray_lives(lambda: time.sleep(0.5), lambda: False, 60.0)
    assert time.monotonic() - began < 30.0
    never.set()


@pytest.mark.parametrize(
    ("before", "after", "body", "status", "last"),
    [
        (False, False, "pass", 7, ""),
        (False, True, "pass", 130, ""),
        (False, True, "raise SystemExit(130)", 130, ""),
        (False, True, "raise ConfigError('what it said')", 1, "warmroute: what it said"),
        (False, True, "1 / 0", 1, "ZeroDivisionError: division by zero"),
        (True, True, "pass", 7, ""),
    ],
)
def test_a_process_whose_ray_is_dead_ends_at_once_but_tells_its_error(
    before: bool, after: bool, body: str, status: int, last: str
) -> None:
    script = f"""if True:
        import sys
        from router.cli.cluster import not_waiting_for_the_dead
        from router.errors import ConfigError

        states = iter([{before}, {after}])
        with not_waiting_for_the_dead(lambda: next(states)):
            print("worked", end="")
            {body}
        sys.exit(7)
    """
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (status, "worked")
    assert ended.stderr.splitlines()[-1:] == ([last] if last else [])


def _fail() -> None:
    raise ConfigError("what it said")


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return {}


def test_ctrl_c_before_a_command_has_begun_is_calm() -> None:
    program = "import os; from router.cli.interrupt import *; leave_calmly(); os.kill(os.getpid(), 2)"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "stopping ...\n")


def test_errors_of_every_command_begin_alike() -> None:
    for command in (["models", "pull", "nosuch"], ["replay", "nowhere.jsonl", "--url", "http://127.0.0.1:9"]):
        ended = run(*command)
        assert (ended.returncode, ended.stdout) == (1, "")
        assert ended.stderr.startswith("warmroute: "), ended.stderr


@pytest.mark.model
def test_a_model_that_is_there_is_pulled_without_a_bar() -> None:
    import pty

    controller, terminal = pty.openpty()
    ended = subprocess.run([SCRIPT, "models", "pull"], stdout=subprocess.PIPE, stderr=terminal, timeout=60)
    os.close(terminal)
    with open(controller, "rb", buffering=0) as screen:
        shown = screen.read(10_000)
    assert ended.stdout.endswith(b".gguf\n")
    assert b"smollm2" not in shown and "━".encode() not in shown


@pytest.mark.parametrize("command", ["serve", "demo", "replay", "models", "bench engine", "bench route"])
def test_every_command_explains_itself(command: str) -> None:
    ended = run(*command.split(), "--help")
    assert ended.returncode == 0, ended.stderr
    assert f"warmroute {command}" in ended.stdout


def test_an_unknown_option_of_a_lazy_command_is_refused() -> None:
    ended = run("bench", "route", "--nonsense")
    assert ended.returncode == 2
    assert "--nonsense" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_orphans_of_orphans_are_ended_too() -> None:
    orphan = (
        "import subprocess as s; print(s.Popen(['sleep', '600'], stdout=s.DEVNULL, stderr=s.DEVNULL).pid)"
    )
    with no_process_left():
        ended = subprocess.run([sys.executable, "-c", orphan], capture_output=True, text=True, timeout=30)
        pid = int(ended.stdout)
        assert psutil.pid_exists(pid)
    assert not psutil.pid_exists(pid)


def test_a_process_that_ignores_sigterm_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.cli.reaper._GRACE_S", 0.2)
    stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
    with no_process_left():
        process = subprocess.Popen([sys.executable, "-c", stubborn], stdout=subprocess.PIPE)
        assert process.stdout is not None and process.stdout.readline() == b"1\n"
    process.stdout.close()
    assert not psutil.pid_exists(process.pid)
