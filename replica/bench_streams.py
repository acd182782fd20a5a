"""Request streams for `warmroute bench kvcore`: the same tokens in the same order for every cache."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
SESSIONS, TURN, FULL = 200, 300, 12_000  # tokens a turn adds, and the length at which a session starts anew
_VOCABULARY = 128_000


class Ask(NamedTuple):
    """One request: its prompt int32[n], and the kind under which its time is filed."""

    tokens: Tokens
    kind: str


def mixed(length: int, residents: int, seed: int = 0) -> Iterator[Ask]:
    """Prompts of one length that begin like one of the `residents` latest ones, and go on with new tokens.

    The shared part is none, a quarter, a half, three quarters or all of the prompt, each as often.
    """
    random = np.random.default_rng(seed)
    latest = deque([_fresh(random, length)], maxlen=residents)
    while True:
        base, share = latest[random.integers(len(latest))], SHARES[random.integers(len(SHARES))]
        shared = int(share * length)
        tokens = np.concatenate((base[:shared], _fresh(random, length - shared)))
        if share < 1:
            latest.append(tokens)
        yield Ask(tokens, f"{share:.0%} shared")


def multi_turn(sessions: int = SESSIONS, turn: int = TURN, full: int = FULL, seed: int = 0) -> Iterator[Ask]:
    """Chats that take turns at random: each request is the whole chat so far and `turn` new tokens.

    They start at different lengths; one that would outgrow `full` tokens is replaced by a new one.
    """
    random = np.random.default_rng(seed)
    chats = [_fresh(random, full) for _ in range(sessions)]
    lengths = random.integers(0, full // turn, sessions) * turn
    while True:
        chat = random.integers(sessions)
        if lengths[chat] + turn > full:
            chats[chat], lengths[chat] = _fresh(random, full), 0
        lengths[chat] += turn
        yield Ask(chats[chat][: lengths[chat]].copy(), "turn")


def _fresh(random: np.random.Generator, length: int) -> Tokens:
    return random.integers(0, _VOCABULARY, length, dtype=np.int32)
