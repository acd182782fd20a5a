"""Lower tiers of a replica's cache: evicted blocks sink into them, and come back at the price of a copy."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from router.lab.errors import OptionError


@dataclass(frozen=True)
class TierConfig:
    """A tier of `blocks` blocks, read at `bytes_per_s`: host memory over PCIe, a local disk, ..."""

    blocks: int
    bytes_per_s: float

    @classmethod
    def parse(cls, text: str) -> "TierConfig":
        """From "BLOCKS:GB/s", such as "8000:50". Raises `OptionError`."""
        blocks, _, rate = text.partition(":")
        try:
            tier = cls(int(blocks), float(rate) * 1e9)
        except ValueError:
            raise OptionError(f"a tier is BLOCKS:GB/s, such as 8000:50, not {text!r}") from None
        if tier.blocks < 1 or not 0 < tier.bytes_per_s < float("inf"):
            raise OptionError(f"a tier has blocks and a rate above 0, not {text!r}")
        return tier


class Tiers:
    """What one replica's lower tiers hold: each an LRU; what leaves one sinks into the next.

    A block that comes back into the cache stays below as well (inclusive tiers).
    """

    def __init__(self, configs: Sequence[TierConfig], block_bytes: float) -> None:
        self._configs, self._block_bytes = configs, block_bytes
        self._held: list[OrderedDict[int, None]] = [OrderedDict() for _ in configs]

    def __len__(self) -> int:
        return sum(len(held) for held in self._held)

    def sink(self, hashes: Sequence[int]) -> None:
        """Blocks were evicted from the cache above."""
        falling = list(hashes)
        for config, held in zip(self._configs, self._held, strict=True):
            for value in falling:
                held[value] = None
                held.move_to_end(value)
            falling = [held.popitem(last=False)[0] for _ in range(len(held) - config.blocks)]

    def load(self, hashes: Sequence[int]) -> tuple[int, float]:
        """How many blocks of a prompt's rest, from its beginning, can be loaded, and in how many seconds."""
        count, seconds = 0, 0.0
        for value in hashes:
            place = next((i for i, held in enumerate(self._held) if value in held), None)
            if place is None:
                break
            self._held[place].move_to_end(value)
            seconds += self._block_bytes / self._configs[place].bytes_per_s
            count += 1
        return count, seconds

    def clear(self) -> None:
        """The replica died."""
        for held in self._held:
            held.clear()
