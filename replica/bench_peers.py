"""The caches that `warmroute bench kvcore` times: ours, and those of SGLang and vLLM.

A subject takes a prompt through one cycle with the calls that its own scheduler makes for a request that ends
with its first token. The peers are imported when a subject is made, and by nothing else in the product.
"""

from __future__ import annotations

from array import array
from itertools import count
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvcore.cache import PrefixCache
from kvcore.hashing import PrefixHasher
from kvcore.namespace import Namespace

Tokens = npt.NDArray[np.int32]


class Subject(Protocol):
    """A cache under test."""

    name: str

    def prepare(self, tokens: Tokens) -> Any:
        """The prompt int32[n] as the cache's own server holds it; not timed."""

    def cycle(self, prompt: Any) -> int:
        """Match, pin, take blocks (evicting), publish, release; returns the tokens found. Timed."""

    def drain(self) -> int:
        """Take the events since the last call, as their consumer does; returns how many. Timed apart."""


class Warmroute:
    """`PrefixCache` as the engine's scheduler uses it; hashing and events are always on."""

    name = "cycle"

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.cache = PrefixCache(num_blocks, block_size, PrefixHasher(b"bench"))
        self._namespace = Namespace(model="bench")
        self._seen = 0

    def prepare(self, tokens: Tokens) -> Tokens:
        """int32[n], as the engine has it."""
        return tokens

    def cycle(self, prompt: Tokens) -> int:
        """claim, commit, release."""
        lease = self.cache.claim(prompt, self._namespace)
        self.cache.commit(lease, len(prompt))
        self.cache.release(lease)
        return lease.cached_tokens

    def drain(self) -> int:
        """`events_since`."""
        batch = self.cache.events_since(self.cache.epoch, self._seen)
        self._seen = self.cache.seq
        return 0 if batch is None else len(batch.events)


class SGLang:
    """SGLang's `RadixCache` (0.5.23) on the CPU, with the calls that a request's life needs and no others.

    Its scheduler does more: it writes a table of slots per request and matches again after the insert. Here
    `alloc` stands for `alloc_extend`, a GPU kernel there. Tokens are `array("q")`, as in its requests.
    """

    def __init__(self, num_blocks: int, block_size: int, *, events: bool) -> None:
        import torch
        from sglang.srt.mem_cache import base_prefix_cache as calls
        from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

        torch.set_num_threads(1)  # its tensors are small, and the time of one thread is measured
        self.name = "sglang_events" if events else "sglang"
        self._key, self._match, self._insert = RadixKey, calls.MatchPrefixParams, calls.InsertParams
        self._join, self._size = torch.cat, block_size
        size = num_blocks * block_size
        self.pool = PagedTokenToKVPoolAllocator(size, block_size, torch.float16, "cpu", None, need_sort=False)
        self.tree = RadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=None,
                token_to_kv_pool_allocator=self.pool,
                page_size=block_size,
                enable_kv_cache_events=events,
            )
        )

    def prepare(self, tokens: Tokens) -> array:
        """int64[n] in an array, as `Req.origin_input_ids`."""
        return array("q", tokens.astype(np.int64).tobytes())

    def cycle(self, prompt: array) -> int:
        """match_prefix, lock, evict, alloc, insert, free what was there already and the tail, unlock."""
        tree, length = self.tree, len(prompt)
        # All but the last token is looked up, as in `Req.init_next_round_input`.
        found = tree.match_prefix(self._match(key=self._key(prompt, limit=length - 1)))
        hit, lock = found.device_prefix_len, tree.lock(found.last_device_node)
        wanted = -(-(length - hit) // self._size) * self._size
        self.pool.evict_to_free_tokens(tree, wanted)
        new = self.pool.alloc(wanted)
        if new is None:
            raise MemoryError(f"the pool has no room for {length} tokens")
        slots = self._join((tree.path_device_indices(lock.node), new))
        there = tree.insert(self._insert(key=self._key(prompt), value=slots)).prefix_len
        self.pool.free_segment(slots[hit:there], start_pos=hit)
        full = length // self._size * self._size
        self.pool.free_segment(slots[full:], start_pos=full)
        tree.unlock(lock)
        return int(hit)

    def drain(self) -> int:
        """`kv_events.take`."""
        return len(self.tree.kv_events.take())


class VLLM:
    """`KVCacheManager` as vLLM's scheduler uses it (0.33): its default hash, sha256, and no events."""

    name = "vllm"

    def __init__(self, num_blocks: int, block_size: int, *, longest: int) -> None:
        import torch
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1 import kv_cache_interface as layout
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.request import Request

        init_none_hash(sha256)
        self._request, self._sampling = Request, SamplingParams(max_tokens=1)
        self._hasher = get_request_block_hasher(block_size, sha256)
        self._ids = count()
        spec = layout.FullAttentionSpec(
            block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float16
        )
        # Its pool keeps one block for padding.
        config = layout.KVCacheConfig(num_blocks + 1, [], [layout.KVCacheGroupSpec(["layer"], spec)])
        self.manager = KVCacheManager(config, longest, block_size, block_size)

    def prepare(self, tokens: Tokens) -> list[int]:
        """A list, as in its requests."""
        return list(tokens.tolist())

    def cycle(self, prompt: list[int]) -> int:
        """Request (hashes its blocks), get_computed_blocks, allocate_slots (publishes), free."""
        request = self._request(str(next(self._ids)), prompt, self._sampling, None, block_hasher=self._hasher)
        blocks, hit = self.manager.get_computed_blocks(request)[:2]
        if self.manager.allocate_slots(request, len(prompt) - hit, hit, blocks) is None:
            raise MemoryError(f"the pool has no room for {len(prompt)} tokens")
        self.manager.free(request)
        return int(hit)

    def drain(self) -> int:
        """Nothing: events are off."""
        return 0
