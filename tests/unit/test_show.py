"""What `plan` prints: readable in a pipe, in a narrow and in a wide terminal, and in bytes that add up."""

from __future__ import annotations

import io
import json
import re

import pytest
from rich.console import Console

from entrypoint import plan, show, speed
from entrypoint.simulate import simulate
from entrypoint.wishes import gather
from tests.unit.test_cli import ROOT, run

BOX = ["plan", "--simulate", "3x3090", "--ram", "125GiB"]


def printed(cards="3x3090", explain=False, **console):
    box, model = simulate(cards, ram="125GiB"), plan.published()
    made = plan.make_plan(box, model, gather({}, {}, None))
    reads = speed.published_token_bytes(model.text, model.head_bytes)
    out = Console(file=io.StringIO(), highlight=False, **console)
    show.show(
        made, out, explain, speed.estimate(made, box, model.text, reads), speed.unknown(made, box, model.text, reads)
    )
    return made, out.file.getvalue()


def test_a_pipe_gets_no_colours_and_no_trailing_blanks():
    done = run(*BOX)
    assert done.returncode == 0 and "\x1b" not in done.stdout
    assert all(line == line.rstrip() for line in done.stdout.splitlines())
    for words in (
        "Budget in GiB",
        "left",
        "Host RAM",
        "Holds ",
        "an estimate, not a promise",
        "Command",
        "--async-scheduling",
    ):
        assert words in done.stdout, words


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
@pytest.mark.parametrize("cards", ["3x3090", "8x3090"])
def test_any_width_is_readable(cards, width):
    """Nothing is cut off: each number of each stage is there, and no line but the command's is wider than the terminal."""
    made, text = printed(cards, width=width, force_terminal=True, color_system=None)
    body = text[: text.index("Command")]
    assert max(len(re.sub(r"\x1b\[[0-9;]*m", "", line)) for line in body.splitlines()) <= width
    assert "…" not in text
    for st in made.stages:
        assert (
            f"{st.used_bytes / 2**30:,.2f}" in body and f"{(st.available_bytes - st.used_bytes) / 2**30:,.2f}" in body
        )


def test_explain_gives_bytes_that_add_up_for_each_rank_and_the_host():
    made, text = printed(explain=True, width=200)
    blocks = re.split(r"\n\n", text)
    for rank, st in enumerate(made.stages):
        block = next(b for b in blocks if b.startswith(f"Rank {rank}:"))
        sizes = [int(m.replace(",", "")) for m in re.findall(r"^ *([\d,]+)  ", block, re.MULTILINE)]
        *lines, total, free, left = sizes
        assert sum(lines) == total == st.used_bytes and free - total == left and len(lines) == len(st.lines)
    block = next(b for b in blocks if b.startswith("Host RAM"))
    *lines, total = [int(m.replace(",", "")) for m in re.findall(r"^ *([\d,]+)  ", block, re.MULTILINE)]
    assert sum(lines) == total and len(lines) == len(made.host)
    assert all(s.reason.split()[0] in text for s in made.settings)


def test_stages_share_rows_in_the_order_of_their_lines():
    assert show._in_order([["a", "b", "d"], ["a", "c", "d"], ["x", "a", "d", "e"]]) == ["x", "a", "c", "b", "d", "e"]
    _, text = printed(width=200)
    rows = [line.split("  ")[0] for line in text[text.index("Budget in GiB") :].splitlines()]
    assert rows.index("embedding") < rows.index("sum") < rows.index("free on the card") < rows.index("left")


def test_an_unknown_card_has_no_speed_and_says_why():
    _, text = printed("3x24GiB@8.6", width=200)
    assert "Speed: not estimated, the memory bandwidth of card of 24GiB@8.6 is not known" in text


def test_json_has_its_keys(tmp_path):
    made = json.loads(run(*BOX, "--json").stdout)
    assert made["schema"] == 1 and {
        "device", "model", "model_name", "origin", "port", "argv", "env", "settings", "stages", "host", "capacity", "notes", "speed"
    } <= set(made)  # fmt: skip
    assert int(made["speed"]["most_tokens_s"]) == 160 and made["speed"]["label"] == "an estimate, not a promise"
    assert [s["gpu"] for s in made["speed"]["stages"]] == [0, 1, 2]
    text = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
    for key in [*made, *made["speed"], *made["stages"][0], *made["settings"][0]]:
        assert f"`{key}`" in text, f"docs/plan.md does not name {key}"
    unknown = json.loads(run("plan", "--simulate", "3x24GiB@8.6", "--ram", "125GiB", "--json").stdout)
    assert unknown["speed"] is None
