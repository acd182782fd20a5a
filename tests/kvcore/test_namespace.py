"""Namespaces: which parts tell two of them apart, and that no salt gets out."""

import dataclasses

import pytest

from kvcore.errors import InvalidRequest
from kvcore.namespace import Namespace


def test_digest_is_sixteen_bytes_and_depends_on_values_only():
    digest = Namespace("m", salt="s").digest()
    assert digest == Namespace("m", salt="s").digest()
    assert len(digest) == 16


def test_digest_is_the_same_in_every_process_and_version():
    assert Namespace("m", "l", "a", "t", "s").digest().hex() == "955c3be5fa0f6b6fa1690266d8f8ffc7"


def test_none_zero_and_empty_are_three_salts():
    digests = {Namespace("m", salt=salt).digest() for salt in (None, 0, "", "0", "None", "n")}
    assert len(digests) == 6


@pytest.mark.parametrize("part", ["adapter", "tenant", "salt"])
def test_none_and_empty_differ_in_every_part(part):
    assert Namespace("m", **{part: ""}).digest() != Namespace("m").digest()


def test_equal_texts_in_different_parts_do_not_meet():
    parts = ("layout", "adapter", "tenant", "salt")
    assert len({Namespace("m", **{part: "x"}).digest() for part in parts}) == 4


def test_parts_cannot_be_shifted_into_each_other():
    assert Namespace("m", "ab", "c").digest() != Namespace("m", "a", "bc").digest()
    assert Namespace("m", adapter="a=s").digest() != Namespace("m", adapter="a", tenant="s").digest()


def test_new_weights_are_a_new_namespace():
    assert Namespace("digest-1").digest() != Namespace("digest-2").digest()


def test_lone_surrogates_have_a_digest():
    assert Namespace("m", salt="\ud800").digest() != Namespace("m", salt="\ud801").digest()


def test_large_and_negative_integers_have_distinct_digests():
    assert len({Namespace("m", salt=salt).digest() for salt in (-1, 1, 10**40, -(10**40))}) == 4


def test_the_salt_is_not_in_the_repr():
    assert "hunter2" not in repr(Namespace("m", tenant="t", salt="hunter2"))


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Namespace("m").model = "n"


@pytest.mark.parametrize(
    "parts", [{"model": 1}, {"layout": None}, {"adapter": 1}, {"tenant": b"t"}, {"salt": True}, {"salt": 1.0}]
)
def test_wrong_types_are_refused(parts):
    with pytest.raises(InvalidRequest):
        Namespace(**{"model": "m", **parts})
