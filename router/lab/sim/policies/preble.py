"""E2 of Preble (Srivatsa et al., "Efficient Distributed Prompt Scheduling for LLM Serving", 2024;
WukLab/preble, multi_node/global_scheduler_with_time.py).

A prompt ends at a leaf of a radix tree. If the tokens above the leaf outnumber the leaf's own, *exploit*: the
GPUs that the nearest prefix is allocated to are the candidates. Else *explore*: all GPUs. The candidate with
the least load gets the request, and the path is allocated to it. Every request counts for its lowest node
that outweighs all above it, for 3 minutes; the load of a GPU is a sum over the nodes allocated to it,

    share of tokens that missed * requests * prefill time of the node / GPUs of the node
    + requests active below the node * tokens of its answers * time per token of the GPU (median of 200),

and a node that nobody used for 3 minutes loses its allocation. Once there were 50 requests a GPU, after each:
while the heaviest GPU has 1.5 times the load of the lightest, it hands over nodes used twice that the other
lacks, the lightest first, with what it holds below them, up to equality; if it has but one, it shares it once
the node's TTFT has doubled from the first half of the window to the second.

That is the paper's intention. The prototype compares the loads by nodes used twice alone and hands over what
is below a node from all GPUs, wherever the node is: where all prompts begin alike and little comes again
within 3 minutes, the whole tree moves on and on, and simulated like that it hits half as much.

Prefill times come from the rate that replicas report, for the original's fit to one GPU. Not here: the cost
of evictions (off by default there) and evictions that workers report, local scheduling in the engines, and
matches finer than 16 tokens (see `prefix_tree`). Costs are kept up to date instead of summed up each time.
"""

import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import median

from router.lab.sim.policies.base import Blind, News
from router.lab.sim.policies.prefix_tree import TOKENS_PER_CHARACTER, Node, PrefixTree, as_text
from router.lab.sim.request import SimRequest

WINDOW_S = 180.0
REBALANCE_RATIO = 1.5
REQUESTS_BEFORE_REBALANCING = 50
FIRST_TPOT_S = 0.15
TPOTS = 200


@dataclass(eq=False)
class Use:
    """What the window knows of one node: requests, their tokens, those above their leaves, and TTFTs."""

    node: "Prefix"
    count: int = 0
    tokens: int = 0
    hits: int = 0
    answer: int = 0
    ttfts: dict[int, deque[tuple[float, float]]] = field(default_factory=dict)


class Prefix(Node):
    """A node that its holders are allocated to."""

    def __init__(self, text: str, parent: Node | None) -> None:
        super().__init__(text, parent)
        self.running: dict[int, int] = {}
        self.use: Use | None = None

    @property
    def above(self) -> int:
        """Characters of the nodes above."""
        return sum(len(node.text) for node in self.path()) - len(self.text)

    @property
    def outweighs(self) -> bool:
        """Whether this node is longer than all above it."""
        return len(self.text) > self.above

    def split_off(self, upper: Node) -> None:
        """See `Node`: the use moves up if only the upper part outweighs what is above it."""
        super().split_off(upper)
        assert isinstance(upper, Prefix)
        upper.running = dict(self.running)
        if self.use is not None and upper.outweighs and not self.outweighs:
            upper.use, self.use = self.use, None
            upper.use.node = upper


class Tree(PrefixTree):
    """A tree of `Prefix`."""

    node_type = Prefix

    def __init__(
        self, before_split: Callable[["Prefix"], None], after_split: Callable[["Prefix"], None]
    ) -> None:
        super().__init__()
        self._before, self._after = before_split, after_split

    def _split(self, lower: Node, length: int) -> Node:
        assert isinstance(lower, Prefix)
        self._before(lower)
        upper = super()._split(lower, length)
        assert isinstance(upper, Prefix)
        self._after(upper if upper.use is not None else lower)
        return upper


class Ledger:
    """Loads of GPUs, node by node: seconds of prefill and tokens of answers."""

    def __init__(self, prefill_s: Callable[[int], float]) -> None:
        self._prefill_s = prefill_s
        self.prefill: dict[int, float] = {}
        self.answers: dict[int, float] = {}

    def costs(self, use: Use, gpu: int) -> tuple[float, float]:
        """What a node costs a GPU: seconds of prefill, tokens of answers."""
        node = use.node
        missed = use.count * (1 - use.hits / use.tokens) / len(node.holders)
        prefill = missed * self._prefill_s(len(node.text) * TOKENS_PER_CHARACTER)
        return prefill, node.running.get(gpu, 0) * use.answer

    def add(self, use: Use, sign: int) -> None:
        """Count a node for the GPUs it is allocated to, or take it out before it changes."""
        if use.tokens:
            for gpu in use.node.holders:
                prefill, answers = self.costs(use, gpu)
                self.prefill[gpu] = self.prefill.get(gpu, 0.0) + sign * prefill
                self.answers[gpu] = self.answers.get(gpu, 0.0) + sign * answers

    def load(self, gpu: int, tpot_s: float) -> float:
        """Load of a GPU, seconds."""
        return self.prefill.get(gpu, 0.0) + self.answers.get(gpu, 0.0) * tpot_s


class Preble(Blind):
    """See the module docstring."""

    def __init__(self, rng: random.Random, clock: Callable[[], float], block_size: int) -> None:
        super().__init__(rng, clock, block_size)
        self._rate = 1.0
        self._ledger = Ledger(self._prefill_s)
        self._tree = Tree(lambda node: self._charge([node], -1), lambda node: self._charge([node], 1))
        self._window: deque[tuple[float, Use, int, int]] = deque()
        self._uses: dict[Use, None] = {}
        self._tpots: dict[int, deque[float]] = {}
        self._tpot: dict[int, float] = {}
        self._placed = 0

    def choose(self, request: SimRequest) -> int:
        """See `Blind`."""
        leaf = self._tree.extend(as_text(request.tokens))
        assert isinstance(leaf, Prefix)
        gpu = min(self._candidates(leaf), key=self._load)
        self._count(leaf, gpu, request)
        request.placed = leaf
        self._placed += 1
        if self._placed >= REQUESTS_BEFORE_REBALANCING * len(self.alive):
            self._rebalance()
        return gpu

    def started(self, request: SimRequest, epoch: int, seq: int) -> None:
        """See `SimPolicy`."""
        use = _important(request.placed).use
        if use is not None:
            points = use.ttfts.setdefault(request.replica, deque())
            points.append((self.clock(), request.first_at - request.arrived_at))

    def finished(self, request: SimRequest) -> None:
        """See `SimPolicy`."""
        super().finished(request)
        assert isinstance(request.placed, Prefix)
        path, gpu = list(request.placed.path()), request.replica
        self._charge(path, -1)
        for node in path:
            assert isinstance(node, Prefix)
            node.running[gpu] -= 1
        self._charge(path, 1)
        if request.first_at >= 0 and request.answer_tokens > 1:
            tpots = self._tpots[gpu]
            tpots.append((self.clock() - request.first_at) / (request.answer_tokens - 1))
            self._tpot[gpu] = median(tpots)

    def heard(self, replica: int, news: News) -> None:
        """See `SimPolicy`."""
        if not self._uses:  # an offline profile in the original: the same for everybody, and for ever
            self._rate = news.load["prefill_tokens_per_s"]

    def joined(self, replica: int) -> None:
        """See `SimPolicy`."""
        super().joined(replica)
        self._tpots[replica] = deque([FIRST_TPOT_S], maxlen=TPOTS)
        self._tpot[replica] = FIRST_TPOT_S

    def left(self, replica: int) -> None:
        """See `SimPolicy`."""
        super().left(replica)
        for node in self._tree.nodes():
            if replica in node.holders:
                self._allocate(node, [holder for holder in node.holders if holder != replica])

    def _prefill_s(self, tokens: int) -> float:
        return tokens / self._rate

    def _load(self, gpu: int) -> float:
        return self._ledger.load(gpu, self._tpot[gpu])

    def _charge(self, nodes: Iterable[Node], sign: int) -> None:
        for node in nodes:
            assert isinstance(node, Prefix)
            if node.use is not None:
                self._ledger.add(node.use, sign)

    def _candidates(self, leaf: Prefix) -> list[int]:
        if len(leaf.text) < leaf.above:
            for node in leaf.path():
                if node.holders:
                    return list(node.holders)
        return self.alive

    def _count(self, leaf: Prefix, gpu: int, request: SimRequest) -> None:
        """Allocate the path to a GPU and count the request for the node that matters."""
        path, important = list(leaf.path()), _important(leaf)
        self._charge(path, -1)
        for node in path:
            assert isinstance(node, Prefix)
            node.holders[gpu] = 1
            node.running[gpu] = node.running.get(gpu, 0) + 1
        use = important.use = important.use or Use(important)
        self._uses[use] = None
        tokens = len(request.tokens)
        hits = min(tokens, leaf.above * TOKENS_PER_CHARACTER)
        use.count, use.tokens, use.hits = use.count + 1, use.tokens + tokens, use.hits + hits
        use.answer = request.answer_tokens
        self._charge(path, 1)
        self._window.append((self.clock(), use, tokens, hits))
        self._expire()

    def _expire(self) -> None:
        while self._window[0][0] < self.clock() - WINDOW_S:
            _, use, tokens, hits = self._window.popleft()
            node = use.node
            self._charge([node], -1)
            use.count, use.tokens, use.hits = use.count - 1, use.tokens - tokens, use.hits - hits
            if use.count:
                self._charge([node], 1)
            else:
                node.use = None
                node.holders.clear()
                del self._uses[use]

    def _allocate(self, node: Node, gpus: Iterable[int]) -> None:
        self._charge([node], -1)
        node.holders = dict.fromkeys(gpus, 1)
        self._charge([node], 1)

    def _rebalance(self) -> None:
        loads = {gpu: self._load(gpu) for gpu in self.alive}
        ordered = sorted(self.alive, key=loads.__getitem__, reverse=True)
        lightest = ordered[-1]
        for heaviest in ordered[:-1]:
            if loads[heaviest] < REBALANCE_RATIO * loads[lightest] or loads[heaviest] <= 0:
                return
            movable = self._movable(heaviest)
            if len(movable) == 1:
                self._share(movable[0], heaviest, lightest, loads)
            else:
                self._hand_over(movable, heaviest, lightest, loads)

    def _movable(self, gpu: int) -> list[tuple[float, Use]]:
        """Nodes used twice that are allocated to a GPU, with their costs there, lightest first."""
        found = []
        for use in self._uses:
            if use.count > 1 and gpu in use.node.holders and use.node.outweighs:
                prefill, answers = self._ledger.costs(use, gpu)
                found.append((prefill + answers * self._tpot[gpu], use))
        return sorted(found, key=lambda item: item[0])

    def _hand_over(
        self, movable: list[tuple[float, Use]], heaviest: int, lightest: int, loads: dict[int, float]
    ) -> None:
        for cost, use in movable:
            if lightest in use.node.holders:
                continue
            if loads[heaviest] - cost < loads[lightest] + cost:
                return
            loads[heaviest] -= cost
            loads[lightest] += cost
            for node in (use.node, *self._tree.nodes(use.node)):
                if heaviest in node.holders:
                    self._allocate(node, [lightest if gpu == heaviest else gpu for gpu in node.holders])
            if loads[heaviest] < REBALANCE_RATIO * loads[lightest]:
                return

    def _share(self, only: tuple[float, Use], heaviest: int, lightest: int, loads: dict[int, float]) -> None:
        cost, use = only
        if lightest not in use.node.holders and self._slowed_down(use, heaviest):
            loads[heaviest] -= cost / 2
            loads[lightest] += cost / 2
            self._allocate(use.node, [*use.node.holders, lightest])
            del use.ttfts[heaviest]

    def _slowed_down(self, use: Use, gpu: int) -> bool:
        """Whether the mean TTFT of the window's second half is at least twice that of its first half."""
        points, now = use.ttfts.get(gpu, deque()), self.clock()
        while points and points[0][0] < now - WINDOW_S:
            points.popleft()
        first = [value for at, value in points if at < now - WINDOW_S / 2]
        second = [value for at, value in points if at >= now - WINDOW_S / 2]
        return bool(first and second) and sum(second) / len(second) >= 2 * sum(first) / len(first)


def _important(leaf: object) -> Prefix:
    """The lowest node of a path that outweighs all above it; the first one always does."""
    assert isinstance(leaf, Prefix)
    return next(node for node in leaf.path() if isinstance(node, Prefix) and node.outweighs)
