"""The order of block copies and passes on two streams."""

from contextlib import contextmanager

import numpy as np
import pytest

from replica.batch import ForwardBatch
from replica.block_copier import BlockCopier, HostStreams


class Log:
    """Two streams on paper: what is done in which order, and what waits for what."""

    def __init__(self):
        self.lines, self.done, self.marks = [], set(), 0

    def mark(self):
        self.marks += 1
        return self.marks

    def passed(self, mark):
        return mark in self.done

    @contextmanager
    def copying(self, after):
        self.lines.append(f"copy after {after}")
        yield

    def join(self):
        self.lines.append("join")


@pytest.fixture
def log():
    return Log()


@pytest.fixture
def copier(log):
    return BlockCopier(lambda copies: log.lines.append(copies), log, 4)


def batch(*tables, start=0):
    """One token a sequence, the one at `start`."""
    return ForwardBatch.build([([1], start, np.array(table), 1) for table in tables], 4)


def compute(copier, log, given):
    with copier.computing(given):
        log.lines.append("pass")


def test_a_pass_waits_for_the_copies_before_it_once(copier, log):
    copier.copy([(1, 2, 3)])
    compute(copier, log, batch([2]))
    compute(copier, log, batch([2]))
    assert log.lines == ["copy after []", [(1, 2, 3)], "join", "pass", "pass"]


def test_copies_run_beside_passes_that_do_not_mind(copier, log):
    compute(copier, log, batch([1, 5], [3, 6], start=4))
    copier.copy([(1, 2, 4), (3, 4, 4)])  # 1 and 3 are read by the pass, not written
    assert log.lines[1] == "copy after []"


def test_a_target_that_a_pass_reads_or_writes_waits_for_it(copier, log):
    compute(copier, log, batch([1, 5], start=4))
    compute(copier, log, batch([3, 6], start=4))
    for target, after in ((1, [1]), (5, [1]), (3, [2]), (6, [2])):
        copier.copy([(8, 9, 1), (8, target, 1)])
        assert log.lines[-2] == f"copy after {after}"


def test_a_source_that_a_pass_writes_waits_for_it(copier, log):
    compute(copier, log, batch([1, 5], start=4))
    copier.copy([(5, 9, 1)])
    assert log.lines[-2] == "copy after [1]"


def test_passes_that_are_done_hold_up_nobody(copier, log):
    compute(copier, log, batch([1]))
    log.done.add(1)
    copier.copy([(9, 1, 4)])
    assert log.lines[-2] == "copy after []"
    compute(copier, log, batch([2]))
    assert len(copier._running) == 1


def test_a_pass_waits_for_what_a_failed_copy_has_launched(log):
    def fail(copies):
        raise RuntimeError("no")

    copier = BlockCopier(fail, log, 4)
    with pytest.raises(RuntimeError, match="no"):
        copier.copy([(1, 2, 3)])
    compute(copier, log, batch([2]))
    assert log.lines == ["copy after []", "join", "pass"]


def test_nothing_to_copy(copier, log):
    copier.copy([])
    compute(copier, log, batch([2]))
    assert log.lines == ["pass"]


def test_a_host_does_everything_in_turn():
    lines = []
    copier = BlockCopier(lines.append, HostStreams(), 4)
    copier.copy([(1, 2, 3)])
    with copier.computing(batch([2])):
        lines.append("pass")
    copier.copy([(2, 0, 1)])
    assert lines == [[(1, 2, 3)], "pass", [(2, 0, 1)]]
