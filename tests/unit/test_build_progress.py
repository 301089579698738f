"""BuildKit's and the engine's event streams, recorded from real runs (buildx 0.29, engine 28.5), turned into state."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from build.image import BuildFailed, _failure
from build.progress import KEPT_LINES, BuildLog, LayerSum, Mode, human_bytes, show_build, show_transfer, timestamp_s

DATA = Path(__file__).parent / "test_build_data"


def read(name: str) -> BuildLog:
    log = BuildLog()
    for line in (DATA / name).read_text().splitlines(keepends=True):
        log.feed(line)
    return log


@pytest.mark.parametrize(
    ("text", "expected_s"),
    [
        ("2026-11-30T13:55:52.947815712Z", 1796046952.947815712),  # nine digits: fromisoformat refuses them on 3.10
        ("2026-11-30T13:55:51.80228838Z", 1796046951.80228838),
        ("2026-11-30T13:55:51Z", 1796046951.0),
    ],
)
def test_timestamps_have_any_number_of_digits(text, expected_s):
    assert timestamp_s(text) == pytest.approx(expected_s, abs=1e-6)


def test_a_failing_build_names_its_step_and_its_last_lines():
    log = read("failing.jsonl")
    assert [s.name.split()[0] for s in log.visible] == ["[second", "[first", "[first"]
    assert log.failed is not None
    assert log.failed.name.startswith("[second 1/1] RUN for i in 1 2 3")
    assert log.failed.last_lines() == ["line 1", "line 2", "line 3", "no such thing"]
    assert log.failed.seconds() == pytest.approx(0.445, abs=0.001)
    assert log.complaint.endswith("did not complete successfully: exit code: 3")
    assert log.complaint.startswith('process "/bin/sh -c for i')  # without "ERROR: failed to build: failed to solve:"
    first = next(s for s in log.visible if s.name.startswith("[first 2/2]"))
    assert sorted(first.last_lines()) == ["one", "two"]
    assert not first.cached


def test_a_failure_is_told_by_the_step_that_failed_not_by_one_cancelled_for_it():
    log = read("parallel-failure.jsonl")
    assert sum(s.error is not None for s in log.steps.values()) == 2
    assert log.failed is not None
    assert "exit code: 7" in log.failed.error
    lines = log.failed.last_lines()
    assert len(lines) == KEPT_LINES == 20
    assert lines[-1] == "last words"
    assert lines[0] == "line 182"  # 200 lines and the last words, the newest 20 kept
    refusal = _failure(log, 1)
    assert isinstance(refusal, BuildFailed)
    assert "exit code: 7, saying 'last words'" in refusal.message
    assert refusal.lines == lines
    assert refusal.code == 8


def test_a_real_long_build_adds_up():
    log = read("cpu-base.jsonl")
    assert log.failed is None
    assert all(s.completed_s is not None for s in log.visible)
    install = next(s for s in log.visible if s.name.startswith("[build 3/4]"))
    assert install.seconds() == pytest.approx(100.1, abs=0.1)
    wheels = [s for s in log.visible if s.name == "[context wheels] load from client"]
    assert sum(s.transferred_bytes for s in wheels) > 100_000_000  # the torch wheel


@pytest.mark.parametrize(
    ("said", "complaint", "fix"),
    [
        ("ERROR: failed to build: failed to solve: dockerfile parse error on line 2: unknown instruction: FROBNICATE",
         "dockerfile parse error on line 2: unknown instruction: FROBNICATE", "correct the Dockerfile"),
        ('ERROR: failed to build: failed to solve: target stage "nope" could not be found',
         'target stage "nope" could not be found', "name a stage with --target"),
        ("ERROR: Cannot connect to the Docker daemon at unix:///nope. Is the docker daemon running?",
         "Cannot connect to the Docker daemon at unix:///nope. Is the docker daemon running?", "see the lines above"),
        ("unknown flag: --frobnicate", "unknown flag: --frobnicate", "see the lines above"),
    ],
)  # fmt: skip
def test_what_buildx_says_itself_becomes_the_reason(said, complaint, fix):
    log = BuildLog()
    for line in ("D2:2", "--------------------", said, ""):
        log.feed(line)
    assert log.complaint == complaint
    refusal = _failure(log, 1)
    assert complaint in refusal.message
    assert refusal.fix.startswith(fix)


def chunk(text: str, stream: int = 1) -> str:
    return json.dumps({"logs": [{"vertex": "v", "stream": stream, "data": base64.b64encode(text.encode()).decode()}]})


def test_output_in_pieces_is_put_together_and_redrawn_lines_count_once():
    log = BuildLog()
    for text in ("Coll", "ecting torch\nDown", "loading\r 10%\r 100%", "\nlast without end"):
        log.feed(chunk(text))
    assert log.steps["v"].last_lines() == ["Collecting torch", " 100%", "last without end"]


def test_the_two_streams_do_not_run_into_each_other_and_the_cause_is_the_last_line_of_the_second():
    log = BuildLog()
    for text, stream in (("out beg", 1), ("the cause\n \n", 2), ("ins\nmore\n", 1)):
        log.feed(chunk(text, stream))
    assert log.steps["v"].last_lines() == ["the cause", " ", "out begins", "more"]
    assert log.steps["v"].last_error_line == "the cause"


def test_two_thousand_lines_leave_the_last_twenty():
    log = BuildLog()
    log.feed(chunk("".join(f"line {n}\n" for n in range(2000))))
    assert log.steps["v"].last_lines() == [f"line {n}" for n in range(1980, 2000)]


@given(st.text())
def test_a_line_that_is_no_event_is_kept_as_text_and_never_raises(text):
    log = BuildLog()
    line = text.replace("\n", " ").replace("{", "(")
    assert log.feed(line) == []
    assert list(log.plain) == ([line] if line.strip() else [])


def test_plain_lines_tell_each_ending_once(capsys):
    log = BuildLog()
    with show_build(log, Mode.PLAIN) as shown:
        for line in (DATA / "failing.jsonl").read_text().splitlines():
            shown(log.feed(line))
    said = capsys.readouterr()
    assert said.out == ""
    lines = said.err.splitlines()
    assert sum("FAILED" in line for line in lines) == 1
    assert sum("[first 2/2]" in line for line in lines) == 2  # start and done
    assert not any("[internal]" in line for line in lines)


def test_no_progress_means_no_output(capsys):
    log = BuildLog()
    with show_build(log, Mode.NONE) as shown:
        for line in (DATA / "failing.jsonl").read_text().splitlines():
            shown(log.feed(line))
    with show_transfer("push x", Mode.NONE) as moved:
        moved(1, 2, "pushing 1")
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "")


def test_a_terminal_gets_the_running_step_and_leaves_nothing_behind(capsys):
    log = BuildLog()
    with show_build(log, Mode.TTY) as shown:
        for line in (DATA / "failing.jsonl").read_text().splitlines():
            shown(log.feed(line))
    assert "building 3/3 steps" in capsys.readouterr().err


def test_bytes_of_a_push_and_a_pull():
    push = LayerSum()
    for line in (DATA / "push.jsonl").read_text().splitlines():
        push.feed(json.loads(line))
    # two layers, 30.0 and 194.7 MB; a push may send a little more than the total it announced
    assert len(push.layers) == 2
    assert push.done_bytes == push.total_bytes
    assert 224_000_000 < push.total_bytes < 240_000_000
    assert push.summary() == "pushed 2"

    pull, seen = LayerSum(), []
    for line in (DATA / "pull.jsonl").read_text().splitlines():
        pull.feed(json.loads(line))
        seen.append(pull.done_bytes)
    assert 13_598_720 in seen
    assert (pull.done_bytes, pull.total_bytes) == (20_002_254, 20_002_254)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (2_586_364_889, "2.6 GB"), (3 * 10**12, "3.0 TB")],
)
def test_human_bytes(count, text):
    assert human_bytes(count) == text
