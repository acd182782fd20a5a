"""The page about runs: whole, escaped, loads nothing, and shows every run."""

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from types import SimpleNamespace

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from router.lab.client import Outcome
from router.lab.commands import replay
from router.lab.page.page import Page, html
from router.lab.page.runs import LIVE_FATES, SIMULATED_FATES, PageRun, Requests, live
from router.lab.page.style import FATES, line_styles
from router.lab.page.timeline import last_s, timeline
from router.lab.report import summarize
from router.lab.sim.losses import CLASSES
from router.lab.simulate import simulate

VOID = {"meta", "br", "link", "img", "input", "hr"}
EVIL = '<script>alert("$x^2$")</script>'


class Reader(HTMLParser):
    """Checks that tags are balanced; collects tags, attributes, figures and text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes, self.texts = [], set(), [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.attributes += attributes
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.add(tag)
        self.attributes += attributes

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data.strip())

    @property
    def figures(self):
        return [value for name, value in self.attributes if name == "data-figure"]


def read(text):
    """The page, after a check that nothing in it runs, and nothing is loaded."""
    page = Reader(text)
    assert not page.tags & {"script", "link", "iframe", "object", "embed", "img", "foreignobject"}
    for name, value in page.attributes:
        assert not name.startswith("on")
        if name in ("src", "href", "xlink:href", "action", "srcset"):
            assert value.startswith(("#", "data:image/png;base64,")), value
    assert "@import" not in text
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)", text))
    names = [value for name, value in page.attributes if name == "id"]
    assert len(names) == len(set(names)), "two elements have one id"
    used = re.findall(r'(?:url\(#|href="#)([^)"]*)', text)
    assert set(used) <= set(names)
    return page


def trace(folder, name="chats.jsonl", count=40):
    """Chats of growing prompts; Mooncake's format, blocks of 512 tokens."""
    rows = [
        {"timestamp": 400 * n, "input_length": 512 * (n // 5 + 1), "output_length": 8, "hash_ids": ids}
        for n in range(count)
        for ids in [[n % 5 * 100 + depth for depth in range(n // 5 + 1)]]
    ]
    file = folder / name
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


@pytest.fixture
def invoke():
    app = typer.Typer()
    app.command()(simulate)
    app.command()(replay)
    return lambda *arguments: CliRunner().invoke(app, [str(a) for a in arguments])


def test_a_comparison(invoke, tmp_path):
    file, out = trace(tmp_path), tmp_path / "out.html"
    policies = "cache_aware,least_load,random"
    options = ("--replicas", 3, "--blocks", 30, "--policy", policies, "--speed", "1,2.5", "--report", out)
    result = invoke("simulate", file, *options, "--json", tmp_path / "j")
    assert result.exit_code == 0, result.output
    page = read(out.read_text())
    figures = ["hits", "hits_over_time", "fates", "ttft", "e2e", *["map"] * 6, "reasons"]
    assert page.figures == figures
    runs = json.loads((tmp_path / "j").read_text())["runs"]
    for run in runs:
        assert f"{run['policy']} ×{run['speed']:g}" in page.texts
        assert f"{100 * run['hit_rate']:.1f}" in page.texts
        fates = run["prompt_tokens_by_fate"]
        assert tuple(fates) == CLASSES
        assert sum(fates.values()) == 512 * sum(n // 5 + 1 for n in range(40))
        assert fates["hit"] == round(run["hit_rate"] * sum(fates.values()))
        assert {f"{tokens:,}" for tokens in fates.values()} <= set(" ".join(page.texts).split())
    assert runs[0]["reasons"] and not runs[2]["reasons"]
    for fact in ("chats.jsonl", "40", "30 of 512 tokens", "h100-8b", "10 ms", "reuse"):
        assert fact in page.texts


def test_one_run_marks_nothing_as_best(invoke, tmp_path):
    out = tmp_path / "out.html"
    result = invoke("simulate", trace(tmp_path), "--policy", "least_load", "--report", out)
    assert result.exit_code == 0
    page = read(out.read_text())
    assert "The run" in page.texts and 'class="best"' not in out.read_text()


def test_names_are_escaped(invoke, tmp_path):
    file, out = trace(tmp_path, EVIL.replace("/", "")), tmp_path / "out.html"
    assert invoke("simulate", file, "--policy", "random", "--report", out).exit_code == 0
    page = read(out.read_text())
    assert EVIL.replace("/", "") in page.texts


def test_a_policy_named_by_the_user_is_escaped_in_charts_too():
    outcome = Outcome(1.0, 3.0, 2.0, 3.0, 5, True, 10, 5, 4, EVIL, EVIL)
    page = read(html(Page(EVIL, [(EVIL, EVIL)], [live(summarize([outcome], 0.5, policy=EVIL))], {}, True)))
    assert page.texts.count(EVIL) >= 6


@pytest.mark.parametrize("command", ["simulate", "replay"])
def test_a_page_that_cannot_be_written_is_said_first(invoke, tmp_path, command):
    url = ("--url", "http://127.0.0.1:9") if command == "replay" else ()
    for target, why in ((tmp_path, "a folder"), (tmp_path / "no" / "x", "no such folder"), ("-", "a file")):
        result = invoke(command, "no such trace", *url, "--report", target)
        assert result.exit_code == 1 and why in str(result.exception)


def test_no_page_about_one_pool(invoke, tmp_path):
    result = invoke("simulate", "no such trace", "--pooled", "--report", tmp_path / "x")
    assert result.exit_code == 1 and "--pooled" in str(result.exception)


def test_a_replay(endpoint, invoke, tmp_path):
    out = tmp_path / "out.html"
    result = invoke("replay", "builtin:tiny", "--url", endpoint.url, "--policy", "mine", "--report", out)
    assert result.exit_code == 0, result.output
    page = read(out.read_text())
    assert page.figures == ["hits", "hits_over_time", "fates", "ttft", "e2e", "map", "reasons"]
    assert {"Replay: builtin:tiny", "closed, 8 in flight", "mine", "age 5, prefix 5"} <= set(page.texts)
    assert endpoint.url.removeprefix("http://") in page.texts


def test_a_replay_of_an_endpoint_that_tells_nothing():
    outcomes = [Outcome(1.0, 2.0, 1.5, 2.0, 3, True), Outcome(1.0, 4.0, error="timeout")]
    page = read(html(Page("t", [], [live(summarize(outcomes, None))], {}, True)))
    assert page.figures == ["ttft", "e2e"]


def test_a_replay_in_which_all_failed():
    page = read(html(Page("t", [], [live(summarize([Outcome(1.0, 4.0, error="timeout")], None))], {}, True)))
    assert page.figures == ["ttft", "e2e"]


def test_what_a_client_can_tell_adds_up():
    outcomes = [Outcome(0.0, 2.0, 1.0, 2.0, 3, True, 100, 3, cached) for cached in (0, 30)]
    assert live(summarize(outcomes, 0.4)).fates == {"hit": 30, "missed": 50, "workload": 120}
    # More than the ideal was cached: the endpoint knew these prompts before.
    assert live(summarize(outcomes, 0.1)).fates == {"hit": 30, "missed": 0, "workload": 170}


def test_every_fate_has_a_colour():
    assert set(SIMULATED_FATES) == set(CLASSES)
    assert set(FATES) == set(SIMULATED_FATES) | set(LIVE_FATES)


def run(*rows, replicas=2):
    """A run of (arrived, first, ended, replica, prompt, cached)."""
    columns = [np.array(column, float) for column in zip(*rows, strict=True)]
    whole = [column.astype(int) for column in columns[3:]]
    return PageRun("p", 1.0, {}, Requests(*columns[:3], *whole), [str(n) for n in range(replicas)])


def test_the_best_is_marked_where_one_is_better():
    outcomes = [
        Outcome(0.0, 2.0, 1.0, 2.0, 3, True, 100, 3, 30),
        Outcome(0.0, 4.0, 1.0, 4.0, 3, True, 100, 3, 0),
    ]
    runs = [
        live(summarize([outcome], None, policy=name)) for outcome, name in zip(outcomes, "ab", strict=True)
    ]
    text = html(Page("t", [], runs, {}, True))
    assert re.findall(r'<td class="best">([^<]*)<', text) == ["30.0", *["500"] * 4, *["2.0"] * 4]


def test_load_over_time():
    one = run((0, 1, 3, 0, 10, 0), (1, 2, 2, 0, 10, 5), (5, 6, 8, 1, 20, 20), (8, 8, 8, -1, 5, 1))
    line = timeline(one, 8.0, bins=4)
    assert line.edges_s.tolist() == [0, 2, 4, 6, 8]
    assert line.there.tolist() == [[1.5, 0.5, 0, 0], [0, 0, 0.5, 1]]
    assert line.busy.tolist() == [[1, 0.5, 0, 0], [0, 0, 0.5, 1]]
    np.testing.assert_array_equal(line.hit_rate, [[0.25, *[np.nan] * 3], [np.nan, np.nan, 1, np.nan]])
    np.testing.assert_array_equal(line.all_hit_rate, [0.25, np.nan, 1, 0.2])


def test_busy_is_the_union_of_requests():
    rows = [(0, 0, 9, 0, 1, 0), (1, 1, 2, 0, 1, 0), (12, 12, 14, 0, 1, 0), (13, 13, 16, 0, 1, 0)]
    assert timeline(run(*rows, replicas=1), 20.0, bins=2).busy.tolist() == [[0.9, 0.4]]


def test_a_timeline_has_a_length():
    assert last_s(np.array([1.0, 3.0]), np.array([2.0])) == 3.0
    assert last_s(np.zeros(2)) == last_s() == last_s(np.zeros(0)) == 1.0


def test_many_runs_are_told_apart_by_seven_lines():
    names = [f"p{n}" for n in range(12)]
    runs = [SimpleNamespace(policy=n, figures={"ttft_ms": {"mean": 20 - k}}) for k, n in enumerate(names)]
    styles = line_styles([*runs, SimpleNamespace(policy="cache_aware", figures={"ttft_ms": {"mean": None}})])
    assert [n for n, style in styles.items() if style.shown] == ["cache_aware", *reversed(names[6:])]
    looks = {(s.color, str(s.dashes)) for s in styles.values() if s.shown}
    assert len(looks) == 7


def test_commands_do_not_import_the_plotting_library_until_a_page_is_wanted():
    code = "import router.lab.simulate, router.lab.commands, sys; print('matplotlib' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
