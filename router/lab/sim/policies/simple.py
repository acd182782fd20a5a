"""The policies of textbooks and of most fleets."""

import hashlib

from router.lab.sim.policies.base import Blind
from router.lab.sim.request import SimRequest


class Random(Blind):
    """Any replica, each as likely."""

    def choose(self, request: SimRequest) -> int:
        """See `Blind`."""
        return self.rng.choice(self.alive)


class PowerOfTwo(Blind):
    """Of two drawn at random the one with fewer requests (Mitzenmacher, 2001), as Ray Serve does."""

    def choose(self, request: SimRequest) -> int:
        """See `Blind`."""
        pair = self.rng.sample(self.alive, min(2, len(self.alive)))
        return min(pair, key=self.inflight.__getitem__)


class Session(Blind):
    """Every turn of a session to the same replica, by rendezvous hashing; requests without one anywhere."""

    def choose(self, request: SimRequest) -> int:
        """See `Blind`."""
        if request.session is None:
            return self.rng.choice(self.alive)
        key = request.session.encode()
        return max(self.alive, key=lambda replica: _weight(key, replica))


class BoundedLoads(Blind):
    """Consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam, 2018) by 2 blocks of prefix:
    the first replica in the key's order whose requests in flight stay below 1.25 times the mean."""

    bound = 1.25

    def choose(self, request: SimRequest) -> int:
        """See `Blind`."""
        key = request.hashes[:2][-1:].tobytes()
        limit = self.bound * (sum(self.inflight[replica] for replica in self.alive) + 1) / len(self.alive)
        ordered = sorted(self.alive, key=lambda replica: _weight(key, replica), reverse=True)
        return next((replica for replica in ordered if self.inflight[replica] + 1 <= limit), ordered[0])


def _weight(key: bytes, replica: int) -> bytes:
    return hashlib.blake2b(key, digest_size=8, salt=replica.to_bytes(8, "little")).digest()
