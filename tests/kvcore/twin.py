"""A naive prefix cache, the oracle of the tests: whole prefixes in a dictionary, one rule a line.

It does what `PrefixCache` promises, in the same order of events and on the same clock, so everything that can
be seen must be equal: hits, refusals, the order of eviction, every counter. It knows no block ids and no
arrays; nothing of it is shared with the cache but the hash function and the size of the ghost table.
"""

import math

import numpy as np

from kvcore.errors import OutOfBlocks

HALF_LIFE_S = 300.0


class Node:
    """A block: private to its holders at first, visible under its `key`, dead after a clear."""

    def __init__(self):
        self.key, self.refs, self.visible, self.dead = None, 1, False, False
        self.used_at = 0.0
        self.uses, self.level, self.deadline = 1, 35, None


class Sequence:
    def __init__(self, space, tokens, read=True, publish=True, ranges=()):
        self.space, self.tokens, self.reading, self.publishing = space, list(tokens), read, publish
        self.ranges = ranges  # of (start, end or None, level, duration or None)
        self.table, self.source = [], None
        self.computed = self.published = self.cached = self.common = 0


class Habits:
    """How often blocks of a class (used once, twice, more often) are used again; ghosts of evicted ones."""

    def __init__(self, num_blocks, buckets):
        self.num_blocks, self.buckets = num_blocks, buckets
        self.uses, self.again, self.bonus = [0.0] * 3, [0.0] * 3, [0.0] * 3
        self.gaps = self.squares = self.age = 0.0
        self.ghosts = [[None] * 4 for _ in range(buckets)]  # of [tag, uses, float32 at, counted]

    @staticmethod
    def class_of(uses):
        return min(uses, 3) - 1

    def use(self, node, gap):
        self.again[self.class_of(node.uses)] += 1
        node.uses = min(node.uses + 1, 65_535)
        self.uses[self.class_of(node.uses)] += 1
        self.see(gap)

    def see(self, gap):
        self.gaps += gap
        self.squares += gap * gap

    def begin(self, node, key, now, started):
        node.uses = 1
        ghost = self.find(key)
        if ghost is not None:
            self.again[self.class_of(ghost[1])] += 1
            self.see(now - (started + ghost[2]) + self.age)
            node.uses = ghost[1] + 1
            bucket = self.ghosts[key % self.buckets]
            bucket[bucket.index(ghost)] = None
        self.uses[self.class_of(node.uses)] += 1

    def end(self, node, key, now, started):
        self.age += (now - node.used_at - self.age) * min(8 / self.num_blocks, 1.0)
        bucket = self.ghosts[key % self.buckets]
        way = bucket.index(None) if None in bucket else min(range(4), key=lambda way: bucket[way][2])
        bucket[way] = [key >> 34, min(node.uses, 3), float(np.float32(now - started)), False]

    def find(self, key):
        same = [ghost for ghost in self.ghosts[key % self.buckets] if ghost and ghost[0] == key >> 34]
        return same[0] if same else None

    def learn(self):
        uses, again = sum(self.uses), sum(self.again)
        if self.gaps > 0:
            tau = self.squares / self.gaps
            scale = min(1.0, tau / self.age) if self.age > 0 else 1.0
            prior, best = self.num_blocks / 16, -math.inf
            for c in range(3):
                share = (self.again[c] + prior * again / uses) / (self.uses[c] + prior)
                best = max(best, scale * tau * math.log(min(share, 1.0)))
                self.bonus[c] = best
        if uses > 16 * self.num_blocks:
            self.gaps, self.squares = self.gaps / 2, self.squares / 2
            self.uses, self.again = [u / 2 for u in self.uses], [a / 2 for a in self.again]


class Twin:
    """`hash_of(space, tokens)` is the hash of the last full block; `ghosts` counts buckets of ghosts."""

    def __init__(self, num_blocks, size, policy, clock, hash_of, ghosts):
        self.free, self.size, self.policy, self.clock = num_blocks, size, policy, clock
        self.hash_of, self.habits = hash_of, Habits(num_blocks, ghosts)
        self.now = self.started = clock()
        self.nodes = {}  # key (space, all tokens up to the block's end): visible Node
        self.sequences = []
        tokens = ["hit_tokens", "partial_hit_tokens", "missed_tokens"]
        blocks = ["stored", "cleared", "deduplicated", "evictions", "regrets"]
        self.counts = dict.fromkeys(["claims", "forks", "collisions", *tokens, *blocks], 0)
        self.sums = dict.fromkeys(["idle_s", "regret_s"], 0.0)

    # --- Looking ---

    def hash(self, key):
        return self.hash_of(key[0], key[1])

    def parent(self, node):
        return node.key[0], node.key[1][: -self.size]

    def idle(self):
        return [node for node in self.nodes.values() if node.refs == 0]

    def rank(self, node):
        if self.policy == "reuse":
            return node.used_at + self.habits.bonus[self.habits.class_of(node.uses)]
        if self.policy == "lfu":
            return node.used_at + HALF_LIFE_S * math.log2(node.uses)
        return node.used_at  # with fifo, when it was stored

    def order(self):
        """Idle nodes as they would go: again and again the leaf of the lowest level and rank."""
        left, order = dict(self.nodes), []
        for _ in self.idle():
            parents = {self.parent(node) for node in left.values()}
            leaves = [node for node in left.values() if node.refs == 0 and node.key not in parents]
            order.append(min(leaves, key=lambda node: (node.level, self.rank(node))))
            del left[order[-1].key]
        return order

    def closest(self, space, prefix, wanted):
        """The sibling that shares most with `wanted`: down a search tree with larger hashes higher up."""
        keys = [key for key in self.nodes if key[0] == space and key[1][: -self.size] == prefix]
        ends = sorted((key[1][-self.size :], self.hash(key), key) for key in keys)
        most = max((common_length(end, wanted) for end, _, _ in ends), default=0)
        best, common = None, 0
        while ends and common < len(wanted):
            at = max(range(len(ends)), key=lambda i: ends[i][1])
            end, _, key = ends[at]
            same = common_length(end, wanted)
            if same > common:
                best, common = self.nodes[key], same
            if same == len(wanted):
                break
            ends = ends[:at] if wanted[same] < end[same] else ends[at + 1 :]
        assert common == most
        return best, common

    def find(self, space, tokens):
        """Nodes of the hit, the node to copy from, the number of its tokens."""
        size, most, hit = self.size, len(tokens) - 1, []
        while (len(hit) + 1) * size <= most:
            node = self.nodes.get((space, tuple(tokens[: (len(hit) + 1) * size])))
            if node is None:
                break
            hit.append(node)
        start = len(hit) * size
        wanted = tuple(tokens[start : min(start + size, most)])
        return hit, *self.closest(space, tuple(tokens[:start]), wanted)

    def ghost(self, key):
        """When a block with this key was evicted, if that is remembered."""
        ghost = self.habits.find(self.hash(key))
        return None if ghost is None else self.started + ghost[2]

    def explain(self, space, tokens):
        """The hit, why it ends, and how long ago the next block was evicted."""
        hit, _, common = self.find(space, tokens)
        end, length = (len(hit) + 1) * self.size, len(hit) * self.size + common
        key = (space, tuple(tokens[:end]))
        if length >= len(tokens) - 1:
            return length, "complete", None
        if end > len(tokens):
            return length, "differs" if common else "short", None
        for sequence in self.sequences:
            same = sequence.space == space and tuple(sequence.tokens[:end]) == key[1]
            if same and sequence.publishing and sequence.computed < end:
                return length, "uncommitted", None
        if (at := self.ghost(key)) is not None:
            return length, "evicted", max(round(self.tick() - at, 3), 0.0)
        if any(tokens_ == key[1] and other != space for other, tokens_ in self.nodes):
            return length, "namespace", None
        return length, "differs" if common else "unseen", None

    # --- Doing ---

    def tick(self):
        self.now = max(self.clock(), self.now + 1e-9)
        return self.now

    def unpin(self, node, now=None):
        """One holder less, who has used it until `now`, or has not used it at all (None)."""
        node.refs -= 1
        if node.refs == 0 and not node.visible:
            self.free += 1
        elif node.refs == 0 and now is not None and self.policy != "fifo":
            node.used_at = now

    def drop(self, nodes):
        if nodes:
            now = self.tick()
            for node in reversed(nodes):
                self.unpin(node, now)

    def expire(self, now):
        for node in self.nodes.values():
            if node.deadline is not None and node.deadline <= now:
                node.level, node.deadline = 35, None

    def take(self, count):
        now = self.tick()
        self.expire(now)
        if count > self.free:
            self.habits.learn()
        for _ in range(count):
            if self.free:
                self.free -= 1
            else:
                self.evict(now)
        return [Node() for _ in range(count)]

    def evict(self, now):
        victim = self.order()[0]
        del self.nodes[victim.key]
        self.counts["evictions"] += 1
        self.sums["idle_s"] += now - victim.used_at
        self.habits.end(victim, self.hash(victim.key), now, self.started)

    def retain(self, sequence, start, end):
        for first, last, level, duration in sequence.ranges:
            for place in range(start, end):
                if first <= place * self.size and (last is None or place * self.size < last):
                    node = sequence.table[place]
                    node.level, node.deadline = level, duration and self.now + duration

    def pin(self, sequence):
        """First phase of a claim: the hit is safe."""
        if sequence.reading:
            sequence.table, sequence.source, sequence.common = self.find(sequence.space, sequence.tokens)
            for node in sequence.table + [sequence.source] * (sequence.source is not None):
                node.refs += 1

    def admit(self, sequence):
        """Second phase: take the rest, or let go of the hit."""
        hit, tokens = sequence.table, sequence.tokens
        need = -(-len(tokens) // self.size) - len(hit)
        if sequence.source is not None and need > self.free + len(self.idle()):
            self.unpin(sequence.source)
            sequence.source, sequence.common = None, 0
        if need > (available := self.free + len(self.idle())):
            for node in hit:
                self.unpin(node)
            raise OutOfBlocks(need, available)
        self.sequences.append(sequence)
        if sequence.reading:
            self.use_hit(sequence, hit)
        sequence.table = hit + self.take(need)
        sequence.published = len(hit)
        sequence.cached = sequence.computed = len(hit) * self.size + sequence.common
        self.retain(sequence, 0, len(hit))
        self.counts["claims"] += 1
        self.counts["hit_tokens"] += sequence.cached
        self.counts["partial_hit_tokens"] += sequence.common
        self.counts["missed_tokens"] += len(tokens) - sequence.cached

    def use_hit(self, sequence, hit):
        now = self.tick()
        for node in hit:
            self.habits.use(node, now - node.used_at if node.refs == 1 else 0.0)
        for end in range((len(hit) + 1) * self.size, len(sequence.tokens) + 1, self.size):
            ghost = self.habits.find(self.hash((sequence.space, tuple(sequence.tokens[:end]))))
            if ghost is not None and not ghost[3]:
                self.counts["regrets"] += 1
                self.sums["regret_s"] += now - (self.started + ghost[2])
                ghost[3] = True

    def append(self, sequence, tokens):
        place, inside = divmod(sequence.computed, self.size)
        shared = False
        if inside and tokens:
            node = sequence.table[place]
            shared = node.refs > 1 or node.visible or node.dead
        need = -(-(len(sequence.tokens) + len(tokens)) // self.size) - len(sequence.table) + shared
        if need > (available := self.free + len(self.idle())):
            raise OutOfBlocks(need, available)
        new = self.take(need) if need else []
        if shared:
            sequence.source, sequence.table[place] = sequence.table[place], new.pop()
        sequence.table += new
        sequence.tokens += tokens

    def end_copy(self, sequence):
        if sequence.source is not None:
            self.drop([sequence.source])
            sequence.source = None

    def commit(self, sequence, computed):
        sequence.computed = computed
        self.end_copy(sequence)
        start, full = sequence.published, computed // self.size
        if full <= start or not sequence.publishing:
            return
        now, taken = self.tick(), {self.hash(key) for key in self.nodes}
        for place in range(start, full):
            key = (sequence.space, tuple(sequence.tokens[: (place + 1) * self.size]))
            own = sequence.table[place]
            if key in self.nodes:
                self.counts["deduplicated"] += 1
                if self.nodes[key] is not own:
                    self.share(sequence, place, self.nodes[key])
            elif self.hash(key) in taken:
                sequence.publishing = False
                self.counts["collisions"] += 1
                break
            else:
                own.key, own.visible, self.nodes[key] = key, True, own
                own.used_at = now
                self.habits.begin(own, self.hash(key), now, self.started)
                taken.add(self.hash(key))
                self.counts["stored"] += 1
            sequence.published += 1
        self.retain(sequence, start, sequence.published)

    def share(self, sequence, place, visible):
        visible.refs += 1
        self.habits.use(visible, 0.0)
        self.unpin(sequence.table[place])
        sequence.table[place] = visible

    def fork(self, sequence):
        copy = Sequence(sequence.space, sequence.tokens[: sequence.computed], ranges=sequence.ranges)
        copy.table = sequence.table[: -(-sequence.computed // self.size)]
        for name in ("computed", "published", "cached", "publishing"):
            setattr(copy, name, getattr(sequence, name))
        for node in copy.table:
            node.refs += 1
        self.sequences.append(copy)
        self.counts["forks"] += 1
        return copy

    def truncate(self, sequence, length):
        self.end_copy(sequence)
        keep = -(-length // self.size)
        gone, sequence.table = sequence.table[keep:], sequence.table[:keep]
        sequence.tokens = sequence.tokens[:length]
        sequence.computed = min(sequence.computed, length)
        sequence.published = min(sequence.published, length // self.size)
        self.drop(gone)

    def release(self, sequence):
        self.sequences.remove(sequence)
        self.end_copy(sequence)
        self.drop(sequence.table)

    def clear(self, space):
        for sequence in self.sequences:
            sequence.publishing &= space not in (None, sequence.space)
        for node in [n for key, n in self.nodes.items() if space in (None, key[0])]:
            del self.nodes[node.key]
            node.visible, node.dead = False, True
            self.free += node.refs == 0
            self.counts["cleared"] += 1
        held = {id(n): n for s in self.sequences for n in s.table + [s.source] * (s.source is not None)}
        return sum(node.dead and space in (None, node.key[0]) for node in held.values())


def common_length(one, other):
    """How many leading elements are equal."""
    shorter = min(len(one), len(other))
    return next((i for i in range(shorter) if one[i] != other[i]), shorter)
