"""Text as it comes: whole characters, nothing of a stop string, and in the end exactly the whole decode."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from replica.detokenizer import Detokenizer


def pieces(data, cuts):
    """The bytes, cut into tokens."""
    bounds = [0, *sorted({c % (len(data) + 1) for c in cuts}), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(bounds)]


def run(tokens, stop=(), stops=True):
    """(texts pushed, text flushed, stopped)"""
    detokenizer = Detokenizer(lambda i: tokens[i], stop)
    pushed = []
    for token in range(len(tokens)):
        pushed.append(detokenizer.push(token, stops))
        if detokenizer.stopped:
            break
    return pushed, detokenizer.flush(), detokenizer.stopped


def plain_stop(text, stops):
    """Reference: character by character, until one stop string is complete."""
    for end in range(1, len(text) + 1):
        found = [end - len(s) for s in stops if text[:end].endswith(s)]
        if found:
            return text[: min(found)]
    return text


@given(text=st.text(max_size=60), cuts=st.lists(st.integers(0, 400), max_size=30))
def test_no_text_ever_splits_a_character_and_all_of_it_is_the_whole_decode(text, cuts):
    pushed, flushed, _ = run(pieces(text.encode(), cuts))
    assert "".join(pushed) == text
    assert flushed == ""
    assert all("\ufffd" not in p or "\ufffd" in text for p in pushed)


@given(data=st.binary(max_size=60), cuts=st.lists(st.integers(0, 100), max_size=30))
def test_bytes_that_are_no_utf8_give_what_decoding_them_at_once_gives(data, cuts):
    pushed, flushed, _ = run(pieces(data, cuts))
    assert "".join(pushed) + flushed == data.decode("utf-8", "replace")


def test_a_character_appears_with_its_last_byte():
    emoji = "🦥".encode()
    assert run([emoji[:1], emoji[1:3], emoji[3:], b"!"])[0] == ["", "", "🦥", "!"]


def test_an_unfinished_character_is_replaced_at_the_end():
    assert run(["é".encode()[:1]]) == ([""], "\ufffd", False)


def test_a_stop_string_over_three_tokens_is_held_back_and_never_shown():
    assert run([b"one EN", b"D", b"!", b"more"], stop=["END!"]) == (["one ", "", ""], "", True)


def test_what_only_looked_like_a_stop_string_is_given_after_all():
    assert run([b"a EN", b"DE", b"R"], stop=["END!"]) == (["a ", "END", "ER"], "", False)
    assert run([b"a EN"], stop=["END!"]) == (["a "], "EN", False)


def test_text_before_the_stop_string_in_the_same_token_is_given():
    assert run([b"yes.STOP no"], stop=["STOP"]) == (["yes."], "", True)


def test_overlapping_stop_strings_end_at_the_first_that_is_complete():
    assert run([b"xabcd"], stop=["abcd", "bc"]) == (["xa"], "", True)
    assert run([b"xabc"], stop=["bc", "abc"]) == (["x"], "", True)


def test_a_repeating_beginning_of_a_stop_string():
    assert run([b"aa", b"a", b"b"], stop=["aab"]) == (["", "a", ""], "", True)


def test_stop_strings_are_ignored_while_they_do_not_count():
    detokenizer = Detokenizer([b"END", b" EN", b"D"].__getitem__, ["END"])
    assert detokenizer.push(0, stops=False) == "END"
    assert detokenizer.push(1) == " "
    assert detokenizer.push(2) == ""
    assert detokenizer.stopped


@given(
    text=st.text(alphabet="abé🦥", max_size=40),
    cuts=st.lists(st.integers(0, 100), max_size=20),
    stops=st.lists(st.text(alphabet="abé🦥", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_the_text_is_the_same_wherever_tokens_begin_and_end(text, cuts, stops):
    pushed, flushed, stopped = run(pieces(text.encode(), cuts), stops)
    expected = plain_stop(text, stops)
    assert "".join(pushed) + flushed == expected
    assert stopped == any(stop in text for stop in stops)
