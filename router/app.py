"""The composition root: the Serve application of model replicas and the routers in front of them.

`build` is what serve.yaml names. Everything else here only joins parts that know nothing of each other.
"""

import asyncio
import logging
import secrets
from typing import Any

import numpy as np
from fastapi import FastAPI
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from kvcore.hashing import PrefixHasher
from replica.deployment import Replica, ReplicaError, check_ranks, engine_config, load_codec, log_to_stderr
from router.administration import Administration
from router.api.config import ApiConfig
from router.api.server import build_api
from router.config import LOOPBACK, AppConfig
from router.dispatch import Dispatcher, DispatchLimits, ModelInfo
from router.errors import ConfigError
from router.membership import membership
from router.placement import Placement, compile_decisions
from router.ray_router import ServeTransport, TargetRouter, deployment_key
from router.sync import FleetSync

logger = logging.getLogger(__name__)

_UNLIMITED = 1_000_000
"""Serve's own request limit: the engine's queue and the router's ledger are the real ones."""
_TARGET_ROUTER: Any = f"{TargetRouter.__module__}.{TargetRouter.__name__}"
_START_TIMEOUT_S = 120.0


class Router:
    """One HTTP router. Serve constructs it and serves the application it builds."""

    # Serve awaits it; the type checker knows only plain constructors.
    async def __init__(  # type: ignore[misc]
        self, config: AppConfig, secret: bytes, replica: DeploymentHandle
    ) -> None:
        log_to_stderr()
        _refuse_open_endpoint(config)
        self._config = config
        self._model: ModelInfo | None = None
        self._codec = await asyncio.to_thread(load_codec, config.model)
        placement = Placement(config.policy, max_inflight_per_replica=config.max_inflight_per_replica)
        transport = ServeTransport(replica)
        hasher = PrefixHasher(secret)
        # Compiled here, not when the first request waits, and beside the loop, which answers Serve meanwhile.
        await asyncio.to_thread(hasher.block_hashes, np.zeros(1, np.int32), 1, 0)
        await asyncio.to_thread(compile_decisions)
        self._dispatcher = Dispatcher(
            placement,
            hasher,
            transport,
            lambda: self._model,
            DispatchLimits(request_timeout_s=config.request_timeout_s),
        )
        members = membership(deployment_key(replica.app_name, replica.deployment_name))
        self._administration = Administration(transport, lambda: members.ids)
        self._sync = FleetSync(transport, placement, members, self._hear_model, self._dispatcher.lose)
        self._sync.start()
        try:
            await asyncio.wait_for(self._sync.ready.wait(), _START_TIMEOUT_S)
        except asyncio.TimeoutError:
            logger.warning(
                "no replica answered within %g s; /health says so until one does", _START_TIMEOUT_S
            )

    def __serve_build_asgi_app__(self) -> FastAPI:
        """The HTTP application; Serve asks for it after the constructor."""
        config = self._config
        api = ApiConfig(
            model_names=(config.public_name,),
            api_keys=config.api_keys,
            admin_key=config.admin_key,
            max_body_bytes=config.max_body_bytes,
            send_request_id=False,  # Serve adds it to every answer
        )
        return build_api(api, self._codec, self._dispatcher, self._administration)

    def _hear_model(self, told: dict[str, Any]) -> None:
        """What a replica says of its model. All replicas must run what this router tokenizes for."""
        info = ModelInfo(**told)
        if info.digest != self._codec.model_digest:
            raise ConfigError(
                f"a replica runs model {info.digest[:12]}, this router tokenizes for "
                f"{self._codec.model_digest[:12]}: same name, other files?"
            )
        if self._model is not None and info != self._model:
            raise ConfigError(f"replicas disagree about their model: {info} and {self._model}")
        self._model = info
        self._dispatcher.placement.block_size = info.block_size

    async def __del__(self) -> None:
        # Also called after a constructor that failed half-way.
        sync = getattr(self, "_sync", None)
        if sync is not None:
            await sync.stop()


def _refuse_open_endpoint(config: AppConfig) -> None:
    """Without API keys only loopback may be listened on.

    The application cannot tell strangers from neighbours behind a proxy on its own machine, so the address
    that Serve listens on decides.
    """
    host = serve_host()
    if not config.api_keys and host not in LOOPBACK:
        raise ConfigError(f"no api_keys, and Serve listens on {host}: configure keys, or listen on 127.0.0.1")


def serve_host() -> str:
    """The address Serve's proxies listen on; the widest one if Serve does not say."""
    from ray.serve.context import _get_global_client

    client = _get_global_client()
    host = getattr(getattr(client, "http_config", None), "host", None)
    return str(host) if host else "0.0.0.0"


def check(config: AppConfig) -> None:
    """Fail in one line for what would fail in every replica and router; fetches a named model.

    Raises:
        ConfigError: an engine option that cannot work, or a model that cannot be had or read, or that cannot
            be spread over the ranks and GPUs asked for.
    """
    try:
        check_ranks(engine_config(config.model, {**config.engine, "device": _device(config)}))
        load_codec(config.model)
    except ReplicaError as error:
        raise ConfigError(str(error)) from error
    ranks, gpus = _ranks(config), config.replica_gpus
    if ranks > 1 and gpus not in (0, ranks):
        raise ConfigError(
            f"replica_gpus {gpus:g} with tensor_parallel {ranks}: each rank takes one GPU, so "
            f"say replica_gpus: {ranks} (or 0 for ranks on CPUs)"
        )
    if ranks > 1 and not (config.replica_cpus or gpus):
        raise ConfigError(f"tensor_parallel {ranks} needs replica_cpus or replica_gpus above 0")
    if ranks == 1 and gpus > 1:
        raise ConfigError(f"replica_gpus {gpus:g} without tensor_parallel: a replica would use one of them")
    if 0 < gpus < 1 and config.engine.get("num_blocks") is None:
        raise ConfigError(
            f"replica_gpus {gpus:g}: replicas that share a GPU cannot each measure what fits; say num_blocks"
        )
    if not gpus and config.engine.get("cuda_graphs"):
        raise ConfigError("cuda_graphs need replica_gpus above 0")


def _device(config: AppConfig) -> str:
    """Of the replicas: a GPU if they have one reserved, which is then the only one that each process sees."""
    asked, reserved = config.engine.get("device", "auto"), "cuda" if config.replica_gpus else "cpu"
    if asked not in ("auto", reserved):
        raise ConfigError(
            f"device {asked!r} with replica_gpus {config.replica_gpus:g}, which means {reserved}: leave "
            "device out, or change replica_gpus"
        )
    return reserved


def resources(config: AppConfig) -> dict[str, Any]:
    """What Ray reserves for a replica, as options of its deployment.

    With several ranks, each has an equal share of `replica_cpus` and `replica_gpus`, all of them on one node.
    """
    ranks = _ranks(config)
    share = {"CPU": config.replica_cpus / ranks, "GPU": config.replica_gpus / ranks}
    options: dict[str, Any] = {"ray_actor_options": {"num_cpus": share["CPU"], "num_gpus": share["GPU"]}}
    if ranks > 1:
        bundle = {name: amount for name, amount in share.items() if amount}
        options |= {"placement_group_bundles": [bundle] * ranks, "placement_group_strategy": "STRICT_PACK"}
    return options


def _ranks(config: AppConfig) -> int:
    return int(config.engine.get("tensor_parallel", 1))


def build(args: AppConfig) -> serve.Application:
    """The application for `serve.run` and serve.yaml.

    Raises:
        ConfigError: a setting that cannot work; found here, not in a replica that Serve restarts for ever.
    """
    check(args)
    secret = bytes.fromhex(args.cluster_secret) if args.cluster_secret else secrets.token_bytes(32)
    threads = max(1, int(args.replica_cpus / _ranks(args)))
    engine = {"threads": threads, **args.engine, "device": _device(args)}
    replicas = serve.deployment(
        name="Replica",
        num_replicas=args.replicas,
        max_ongoing_requests=_UNLIMITED,
        **resources(args),
        request_router_config=RequestRouterConfig(request_router_class=_TARGET_ROUTER),
        health_check_period_s=2,
        health_check_timeout_s=30,
        graceful_shutdown_timeout_s=10,
    )(Replica)
    routers = serve.deployment(
        name="Router",
        num_replicas=args.routers,
        max_ongoing_requests=_UNLIMITED,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=10,
    )(serve.ingress()(Router))
    return routers.bind(args, secret, replicas.bind(args.model, engine, secret))
