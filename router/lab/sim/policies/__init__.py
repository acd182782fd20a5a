"""How simulated requests find their replica.

`placed` is the product; `simple` is what every fleet can do; the others follow what people run today, each
with its source, formula and defaults in its own file. A policy sees what its original would see: its own
decisions, or what replicas tell it (`informed`), as late as everybody hears it. Only the product's are run by
several routers; the others by one, whatever their number.
"""

import random
from collections.abc import Callable, Iterable

from router.lab.errors import OptionError
from router.lab.sim.policies.base import Blind, News, SimPolicy
from router.lab.sim.policies.dynamo import Dynamo
from router.lab.sim.policies.llmd import LlmD
from router.lab.sim.policies.lmetric import LMetric
from router.lab.sim.policies.placed import PlacedByRouters
from router.lab.sim.policies.preble import Preble
from router.lab.sim.policies.ray_prefix import RayPrefix
from router.lab.sim.policies.sglang import SglangCacheAware
from router.lab.sim.policies.simple import BoundedLoads, PowerOfTwo, Random, Session

__all__ = ["OTHERS", "PLACED", "News", "SimPolicy", "check_policies", "make_policy"]

PLACED = ("cache_aware", "least_load", "round_robin")
OTHERS: dict[str, type[Blind]] = {
    "random": Random,
    "power_of_two": PowerOfTwo,
    "session": Session,
    "chwbl": BoundedLoads,
    "sglang": SglangCacheAware,
    "ray_prefix": RayPrefix,
    "dynamo": Dynamo,
    "preble": Preble,
    "llmd": LlmD,
    "lmetric": LMetric,
}


def make_policy(
    name: str, block_size: int, routers: int, clock: Callable[[], float], rng: random.Random
) -> SimPolicy:
    """A policy by name. Raises `OptionError` for an unknown one."""
    check_policies([name])
    if name in PLACED:
        return PlacedByRouters(name, block_size, routers, clock, rng)
    return OTHERS[name](rng, clock, block_size)


def check_policies(names: Iterable[str]) -> None:
    """Raises `OptionError` for an unknown name."""
    for name in names:
        if name not in PLACED and name not in OTHERS:
            raise OptionError(f"unknown policy {name!r}; known: {', '.join((*PLACED, *OTHERS))}")
