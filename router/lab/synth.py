"""Traces made of a few parameters, in Mooncake's format, deterministic by seed.

Five kinds of sessions, as the field knows them:

    chat       turns that grow a conversation, behind the system prompt of one of some tenants
    agents     loops of tool calls: tool schemas that all agents share, a task, then results that pile up
    documents  a question behind one of some documents (retrieval), each a session of one request
    shared     a question behind one long system prompt for all
    random     prompts that share nothing

Sessions start as a Poisson process. Lengths are log-normal around their mean, numbers of turns geometric, and
tenants and documents are asked for by Zipf's law.
"""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from itertools import count
from typing import Any

from router.lab.errors import OptionError

_SPREAD = 0.5
"""Standard deviation of the logarithm of lengths: the longest tenth is about twice the mean."""
_PREFILL_TOKENS_PER_S, _DECODE_TOKENS_PER_S = 20_000.0, 50.0
"""Speed of the endpoint that the timestamps of later turns assume; closed loops measure their own."""


@dataclass(frozen=True)
class SynthConfig:
    """How much of what; lengths are means in tokens, times means in seconds.

    `chat`, `agents`, `documents`, `shared` and `random` are shares of the requests, in any unit. `rate` is of
    requests per second, all sessions together. `skew` is the exponent of Zipf's law, 0 for equal popularity.
    """

    requests: int = 2000
    rate: float = 4.0
    seed: int = 0
    block_size: int = 64
    chat: float = 1.0
    agents: float = 1.0
    documents: float = 1.0
    shared: float = 1.0
    random: float = 1.0
    skew: float = 1.0
    tenants: int = 16
    system_tokens: int = 2000
    turns: float = 6.0
    question_tokens: int = 150
    answer_tokens: int = 250
    think_s: float = 20.0
    tool_tokens: int = 8000
    steps: float = 15.0
    result_tokens: int = 800
    call_tokens: int = 120
    tool_s: float = 2.0
    document_count: int = 100
    document_tokens: int = 10_000
    random_tokens: int = 2000

    def __post_init__(self) -> None:
        for field in fields(self):
            value, minimum = getattr(self, field.name), _MINIMA.get(field.name, 0)
            if not minimum <= value < math.inf:
                raise OptionError(f"{field.name.replace('_', ' ')} must be at least {minimum}, not {value}")
        if not self.rate:
            raise OptionError("the rate must be positive")
        if not any(getattr(self, kind) for kind in KINDS):
            raise OptionError("no kind of session has a share")


_COUNTS = ("requests", "block_size", "turns", "steps", "tenants", "document_count")
_MINIMA = dict.fromkeys(_COUNTS, 1)
KINDS = ("chat", "agents", "documents", "shared", "random")


def preset(kind: str, **changes: Any) -> SynthConfig:
    """A workload of one kind, or of all for "mixed", with any field changed. Raises OptionError."""
    if kind != "mixed" and kind not in KINDS:
        raise OptionError(f"no workload {kind!r}; there are: {', '.join(KINDS)}, mixed")
    shares = {name: float(kind in (name, "mixed")) for name in KINDS}
    return SynthConfig(**(shares | changes))


@dataclass(frozen=True)
class _Turn:
    """A prompt as pieces [name, tokens], its answer's length, and the pause before it in seconds."""

    pieces: tuple[tuple[int, int], ...]
    answer: int
    think_s: float


def synthesize_trace(config: SynthConfig) -> list[dict[str, Any]]:
    """Rows of a Mooncake trace in the order of time: `config.requests`, and the rest of the last session."""
    maker, ids = _Maker(config), _BlockIds(config.block_size)
    rows, now = [], 0.0
    for number in count():
        turns = maker.session()
        for row in _timed(turns, now):
            row["hash_ids"] = ids.of(row.pop("pieces"))
            rows.append(row if len(turns) == 1 else {"session_id": str(number)} | row)
        if len(rows) >= config.requests:
            break
        now += maker.rng.expovariate(config.rate / len(turns))
    return sorted(rows, key=lambda row: row["timestamp"])


def _timed(turns: list[_Turn], start_s: float) -> Iterator[dict[str, Any]]:
    now = start_s
    for number, turn in enumerate(turns):
        now += turn.think_s
        length = sum(tokens for _, tokens in turn.pieces)
        row = {"timestamp": round(1000 * now, 3), "input_length": length, "output_length": turn.answer}
        if number:
            row["delay"] = round(1000 * turn.think_s, 3)
        yield row | {"pieces": turn.pieces}
        now += length / _PREFILL_TOKENS_PER_S + turn.answer / _DECODE_TOKENS_PER_S


class _Maker:
    """Draws sessions; `rng` drives everything."""

    def __init__(self, config: SynthConfig) -> None:
        self.rng = random.Random(f"warmroute synth {config.seed}")
        self._config = config
        self._names = count()
        self._systems = [self._piece(config.system_tokens) for _ in range(config.tenants)]
        self._documents = [self._piece(config.document_tokens) for _ in range(config.document_count)]
        self._tools, self._shared = self._piece(config.tool_tokens), self._piece(config.system_tokens)
        made: dict[str, tuple[Callable[[], list[_Turn]], float]] = {
            "chat": (self._chat, config.turns),
            "agents": (self._agent, config.steps),
            "documents": (self._question_on_document, 1.0),
            "shared": (lambda: self._single(self._shared), 1.0),
            "random": (lambda: [_Turn((self._piece(config.random_tokens),), self._answer(), 0.0)], 1.0),
        }
        self._kinds = [make for make, _ in made.values()]
        self._weights = [getattr(config, kind) / turns for kind, (_, turns) in made.items()]

    def session(self) -> list[_Turn]:
        """The turns of a new session of any kind."""
        return self.rng.choices(self._kinds, self._weights)[0]()

    def _chat(self) -> list[_Turn]:
        config = self._config
        begin, turns = (self._popular(self._systems),), self._count(config.turns)
        return self._growing(begin, turns, config.question_tokens, config.answer_tokens, config.think_s)

    def _agent(self) -> list[_Turn]:
        config = self._config
        begin, steps = (self._tools, self._piece(config.question_tokens)), self._count(config.steps)
        return self._growing(begin, steps, config.result_tokens, config.call_tokens, config.tool_s)

    def _growing(
        self, begin: tuple[tuple[int, int], ...], turns: int, said: int, answered: int, pause_s: float
    ) -> list[_Turn]:
        """Turns that each carry all before them; what was answered is part of the next prompt."""
        pieces, session = begin, []
        for number in range(turns):
            pieces = (*pieces, self._piece(said))
            answer = self._piece(answered)
            session.append(_Turn(pieces, answer[1], self._pause(pause_s) if number else 0.0))
            pieces = (*pieces, answer)
        return session

    def _question_on_document(self) -> list[_Turn]:
        return self._single(self._popular(self._documents))

    def _single(self, begin: tuple[int, int]) -> list[_Turn]:
        return [_Turn((begin, self._piece(self._config.question_tokens)), self._answer(), 0.0)]

    def _piece(self, mean: int) -> tuple[int, int]:
        """New content of about `mean` tokens."""
        factor = self.rng.lognormvariate(-_SPREAD * _SPREAD / 2, _SPREAD)
        return next(self._names), max(1, round(mean * factor))

    def _answer(self) -> int:
        return self._piece(self._config.answer_tokens)[1]

    def _pause(self, mean_s: float) -> float:
        return self.rng.expovariate(1 / mean_s) if mean_s else 0.0

    def _count(self, mean: float) -> int:
        """Geometric, from 1 to the number of requests."""
        if mean == 1:
            return 1
        more = math.log(1 - self.rng.random()) / math.log1p(-1 / mean)
        return min(1 + int(more), self._config.requests)

    def _popular(self, items: list[tuple[int, int]]) -> tuple[int, int]:
        weights = [(rank + 1) ** -self._config.skew for rank in range(len(items))]
        return self.rng.choices(items, weights)[0]


class _BlockIds:
    """Ids of blocks by all that is before and in them, as prefix hashes are; a partial block has its own."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._known: dict[tuple[int, tuple[tuple[int, int, int], ...]], int] = {}

    def of(self, pieces: tuple[tuple[int, int], ...]) -> list[int]:
        """The ids of a prompt's blocks, the last one partial: list[ceil(tokens / size)]."""
        ids: list[int] = []
        parent, content, room = -1, [], self._size
        for name, tokens in pieces:
            at = 0
            while at < tokens:
                taken = min(room, tokens - at)
                content.append((name, at, taken))
                at, room = at + taken, room - taken
                if not room:
                    parent = self._id(parent, content)
                    ids.append(parent)
                    content, room = [], self._size
        return [*ids, self._id(parent, content)] if content else ids

    def _id(self, parent: int, content: list[tuple[int, int, int]]) -> int:
        return self._known.setdefault((parent, tuple(content)), len(self._known))
