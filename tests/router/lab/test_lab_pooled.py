"""One pool for a whole trace, in cases small enough to follow by hand."""

import json

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from router.lab.errors import OptionError
from router.lab.pooled import PooledOptions, Prompts, infinite, optimum, simulate_policy
from router.lab.record import Request
from router.lab.simulate import simulate


def prompts(options, *rows):
    """Prompts of blocks of two tokens, named by letters; a trailing lower-case letter is half a block."""
    requests = []
    for at, row in enumerate(rows):
        tokens = [token for letter in row for token in ([ord(letter)] * (2 if letter.isupper() else 1))]
        requests.append(Request(token_ids=np.array(tokens, np.int32), timestamp_s=float(at)))
    return Prompts(requests, options)


def test_a_small_pool_forgets_what_it_should_not():
    options = PooledOptions(blocks=3, block_size=2)
    trace = prompts(options, "AB", "CD", "AB", "EF", "AB")
    # CD takes the free block and B's; AB finds A and takes D's for B; EF takes C's and B's; AB finds A.
    assert simulate_policy(trace, options, "lru")["hit_rate"] == 4 / 20
    assert optimum(trace, options) == infinite(trace, options) == 8 / 20, "it keeps A and B all the time"


def test_halves_count_only_when_rounded_up():
    rows = ["ABc", "ABc"]
    plain, rounded = PooledOptions(8, 2), PooledOptions(8, 2, round_up=True)
    assert simulate_policy(prompts(plain, *rows), plain, "lru")["hit_rate"] == 4 / 10
    assert infinite(prompts(plain, *rows), plain) == 4 / 10
    assert simulate_policy(prompts(rounded, *rows), rounded, "lru")["hit_rate"] == 5 / 10
    assert infinite(prompts(rounded, *rows), rounded) == optimum(prompts(rounded, *rows), rounded) == 5 / 10


def test_a_prompt_larger_than_the_pool_hits_nothing():
    options = PooledOptions(2, 2)
    trace = prompts(options, "ABC", "ABC", "A", "A")
    assert simulate_policy(trace, options, "lru")["hit_rate"] == 2 / 16
    assert optimum(trace, options) == 2 / 16


def test_no_policy_beats_the_optimum_on_random_traces():
    random = np.random.default_rng(4)
    options = PooledOptions(6, 2)
    for _ in range(30):
        # Small letters are half a block: hits that end within a block are no part of any figure.
        rows = ["".join(random.choice(list("ABab"), random.integers(1, 7))) for _ in range(40)]
        trace = prompts(options, *rows)
        best = optimum(trace, options)
        assert best <= infinite(trace, options)
        for policy in ("lru", "reuse", "lfu", "fifo"):
            assert simulate_policy(trace, options, policy)["hit_rate"] <= best + 1e-12


@pytest.mark.parametrize("policy", ["lru", "reuse"])
def test_hits_on_a_part_of_a_block_are_not_counted(policy):
    options = PooledOptions(8, 2)
    trace = prompts(options, "Aba", "Abc", "Abc")
    assert simulate_policy(trace, options, policy)["hit_rate"] == (2 + 4) / 12
    assert optimum(trace, options) == infinite(trace, options) == (2 + 4) / 12


def test_refusals():
    with pytest.raises(OptionError, match="no requests"):
        Prompts([], PooledOptions(1, 1))
    assert Prompts([Request(text="x" * 9)], PooledOptions(1, 1)).lengths == [3], "four bytes are a token"
    with pytest.raises(OptionError, match="positive"):
        PooledOptions(0, 1)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--blocks", "0"], "replicas, blocks, block size and routers must be positive"),
        (["--blocks", "99999999999999999999"], "num_blocks must be 1..2^30-1"),
        (["--policy", "lru,bogus"], "unknown eviction policy 'bogus'"),
        (["--limit", "-1"], ""),
        (["--limit", "0"], ""),
    ],
)
def test_wrong_options_end_without_a_traceback(tmp_path, arguments, complaint):
    trace, app = tmp_path / "trace.jsonl", typer.Typer()
    trace.write_text(
        json.dumps({"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1]}) + "\n"
    )
    app.command()(simulate)
    result = CliRunner().invoke(app, [str(trace), "--pooled", *arguments])
    if complaint:
        assert isinstance(result.exception, OptionError) and complaint in str(result.exception)
    else:
        assert result.exit_code == 2 and "--limit" in result.stderr
