import pytest

from router.lab.blocks import Blocks
from router.lab.errors import OptionError
from router.lab.modifiers import faster, in_time_order, scaled, with_arrivals, with_starts
from router.lab.record import Request


def ask(text, at=None, session=None, think_s=None):
    return Request(text=text, timestamp_s=at, session_id=session, think_s=think_s)


def clock(requests):
    return [(r.text, r.timestamp_s) for r in requests]


def test_faster_divides_arrivals_and_think_times():
    requests = list(faster([ask("a", 8.0, "s"), ask("b", 12.0, "s", think_s=2.0), ask("c")], 4))
    assert [(r.timestamp_s, r.think_s) for r in requests] == [(2.0, None), (3.0, 0.5), (None, None)]
    with pytest.raises(OptionError):
        list(faster([], 0))


def test_scaled_leaves_text_alone():
    prompt = Request(blocks=Blocks.of([1, 2], 64, 100, own=1), max_tokens=10)
    small, text = scaled([prompt, Request(text="t", max_tokens=10)], 0.25)
    assert (small.num_tokens, small.max_tokens, text.max_tokens) == (25, 2, 10)


def test_in_time_order_keeps_what_has_no_time_behind_what_was_before_it():
    requests = [ask("a", 5.0), ask("b"), ask("c", 1.0), ask("d", 1.0)]
    assert [r.text for r in in_time_order(requests)] == ["c", "d", "a", "b"]


class TestStarts:
    def test_sessions_start_one_after_the_other_and_turns_follow(self):
        requests = [ask("a1", None, "a"), ask("a2", None, "a"), ask("b", None, "b", think_s=3.0), ask("c")]
        timed = {r.text: r for r in with_starts(requests, 10.0)}
        assert timed["a1"].timestamp_s == timed["a2"].timestamp_s == 0.0
        assert (timed["a1"].think_s, timed["a2"].think_s) == (None, 0.0)
        assert 0.0 < timed["b"].timestamp_s < timed["c"].timestamp_s

    def test_by_seed(self):
        def starts(seed):
            return [r.timestamp_s for r in with_starts([ask(str(n)) for n in range(2000)], 10.0, seed)]

        assert starts(0) == starts(0) != starts(1)
        assert 9.0 < starts(0)[-1] / 1999 < 11.0

    def test_a_clock_is_left_alone(self):
        assert clock(with_starts([ask("a", 7.0), ask("b", 9.0)], 10.0)) == [("a", 7.0), ("b", 9.0)]


class TestArrivals:
    def test_requests_and_sessions_take_the_times_of_the_other_trace(self):
        requests = [ask("a1", 0.0, "a"), ask("b", 10.0), ask("a2", 30.0, "a"), ask("c", 40.0)]
        arrivals = [ask("", 100.0), ask("", 101.0), ask("", 105.0)]
        assert clock(with_arrivals(requests, arrivals)) == [("a1", 0.0), ("b", 1.0), ("c", 5.0), ("a2", 30.0)]

    def test_a_turn_without_a_time_stays_behind_the_one_before_it(self):
        requests = [ask("a1", 100.0, "a"), ask("a2", None, "a"), ask("a3", 130.0, "a"), ask("a4", None, "a")]
        moved = clock(with_arrivals(requests, [ask("", 0.0), ask("", 1.0)]))
        assert moved == [("a1", 0.0), ("a2", 0.0), ("a3", 30.0), ("a4", 30.0)]

    def test_too_few_begin_again(self):
        requests = [ask(str(n), float(n)) for n in range(5)]
        arrivals = [ask("", 0.0), ask("", 4.0)]
        assert [at for _, at in clock(with_arrivals(requests, arrivals))] == [0.0, 4.0, 8.0, 12.0, 16.0]

    def test_there_must_be_some(self):
        with pytest.raises(OptionError):
            with_arrivals([ask("a", 0.0)], [ask("b")])
