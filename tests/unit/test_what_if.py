"""`plan --what-if`: two boxes or wishes side by side, one of which may be refused."""

from __future__ import annotations

import json
import os

import pytest

from entrypoint import cli, what_if
from entrypoint.errors import Exit, Refusal

BOX = ["plan", "--simulate", "3x3090", "--ram", "125GiB"]


@pytest.fixture
def ran(capsys, monkeypatch, tmp_path):
    """The command line in this process: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    for name in os.environ:
        if name.startswith("FLASHNEXT_"):
            monkeypatch.delenv(name)

    def call(*args: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as e:
            cli.main(list(args))
        told = capsys.readouterr()
        return e.value.code, told.out, told.err

    return call


@pytest.mark.parametrize(
    "text, asked",
    [
        ("ram=64GiB", {"ram": "64GiB"}),
        ("simulate=2x3090,1x4090", {"simulate": "2x3090,1x4090"}),
        ("max_num_seqs=8, ram=64GiB", {"streams": "8", "ram": "64GiB"}),
        ("--max-model-len=8192,layer-partition=12,20,16", {"context": "8192", "layer_partition": "12,20,16"}),
        ('extra_args=--additional-config {"a":1,"b":2}', {"extra_args": '--additional-config {"a":1,"b":2}'}),
        ("wsl=on", {"wsl": "on"}),
    ],
)
def test_assignments(text, asked):
    assert what_if.parse(text) == asked


@pytest.mark.parametrize("text", ["", "ram", "ram=", "foo=1", "ram=1,foo=2", "streams=4,max_num_seqs=8", "=3"])
def test_what_is_no_assignment_is_refused_with_the_known_keys(text):
    with pytest.raises(Refusal) as e:
        what_if.parse(text)
    assert e.value.code == 2 and ("foo" not in text or ("simulate" in e.value.fix and "max_num_seqs" in e.value.fix))


@pytest.fixture
def compared(ran):
    def call(text: str) -> dict:
        code, out, err = ran(*BOX, "--what-if", text, "--json")
        assert code == 0, err
        return json.loads(out)

    return call


def test_less_ram_gives_a_smaller_pool_and_only_rows_that_differ(compared):
    found = compared("ram=64GiB")
    assert found["schema"] == 1 and found["base"]["refusal"] is None is found["other"]["refusal"]
    rows = {(r["section"], r["what"]): (r["base"], r["other"]) for r in found["rows"]}
    base, other = rows["capacity", "host pool"]
    assert base > other == found["other"]["plan"]["capacity"]["host_pool_bytes"]
    assert all(a != b for (section, _), (a, b) in rows.items() if section not in ("capacity", "left"))
    assert ("settings", "--max-num-seqs") not in rows and ("left", "rank 2") in rows
    for side, at in (("base", 0), ("other", 1)):
        stages = found[side]["plan"]["stages"]
        assert [rows["left", f"rank {n}"][at] for n in range(3)] == [
            s["available_bytes"] - sum(line["bytes"] for line in s["lines"]) for s in stages
        ]


def test_one_more_card_is_one_more_rank(compared):
    found = compared("simulate=4x3090")
    rows = {(r["section"], r["what"]): (r["base"], r["other"]) for r in found["rows"]}
    assert rows["settings", "--pipeline-parallel-size"] == ("3", "4")
    base, other = rows["left", "rank 3"]
    assert base is None and other > 0 and rows["stages", "rank 3 card"] == (None, "NVIDIA GeForce RTX 3090")
    assert not any(what.startswith("rank 3 ") for section, what in rows if section == "budget")


def test_a_wish_by_the_name_of_its_argument(compared):
    rows = {r["what"]: (r["base"], r["other"]) for r in compared("max_num_seqs=2,context=8192")["rows"]}
    assert rows["--max-num-seqs"] == ("4", "2") and rows["--max-model-len"] == ("262144", "8192")
    assert rows["streams"] == (4, 2)


def test_the_table_in_another_place(compared):
    rows = {(r["section"], r["what"]): (r["base"], r["other"]) for r in compared("ram=251GiB,table=pinned")["rows"]}
    assert rows["table", "rows"] == ("in place, in the checkpoint's own shards", "page-locked in host RAM")
    assert rows["host RAM", "n-gram table, page-locked"] == (None, 128 << 30)
    assert rows["settings", "VLLM_PLE_CPU_OFFLOAD"] == (None, "1")
    refusal = compared("table=pinned")["other"]["refusal"]
    assert refusal["code"] == 3 and "71.59 GiB are missing" in refusal["error"]


def test_a_side_may_be_refused_and_both_end_with_3(ran, compared):
    found = compared("simulate=2x3090")
    assert found["other"]["plan"] is None and found["other"]["refusal"]["code"] == 3
    assert {r["section"] for r in found["rows"]} == {"refused", "capacity", "left", "speed"}
    _, text, _ = ran(*BOX, "--what-if", "simulate=2x3090")
    # a cell folds its text, so its words are looked for, not its lines
    assert "3 cards like" in text and "fix" in text and "--port" not in text
    code, out, _ = ran("plan", "--simulate", "1x3090", "--ram", "125GiB", "--what-if", "simulate=2x3090")
    assert code == 3 and "refused" in out
    code, out, _ = ran("plan", "--simulate", "1x3090", "--ram", "125GiB", "--what-if", "ram=64GiB")
    assert code == 3 and "refused" in out and "fix" in out, "the same refusal on both sides is told too"


def test_a_table_file_that_is_refused_is_a_side_too(ran, monkeypatch):
    """Only a real box looks at its files; here the planner of one side does as it would there."""
    planned = cli._planned

    def refusing(box, wishes):
        if wishes.value("table") == "/data/rows":
            raise Refusal("table: /data/rows: it ends at row 7", "remove it", Exit.TABLE)
        return planned(box, wishes)

    monkeypatch.setattr(cli, "_planned", refusing)
    code, out, _ = ran(*BOX, "--what-if", "table=/data/rows")
    assert code == 0 and "it ends at row 7" in " ".join(out.split())
    monkeypatch.setenv("FLASHNEXT_TABLE", "/data/rows")
    assert ran(*BOX, "--what-if", "streams=2")[0] == 5


@pytest.mark.parametrize(
    "text", ["ram=much", "simulate=3x9999", "streams=many", "wsl=perhaps", "foo=1", "model=/nowhere"]
)
def test_a_malformed_wish_is_a_mistake_and_not_a_side(ran, text):
    code, out, err = ran(*BOX, "--what-if", text)
    assert code == (4 if text.startswith("model") else 2) and not out
    assert [line.split(":")[0] for line in err.splitlines()] == ["ERROR", "Fix"]


def test_a_narrow_terminal_gets_one_column(ran, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    code, out, _ = ran(*BOX, "--what-if", "ram=64GiB")
    assert code == 0 and max(map(len, out.splitlines())) <= 60
    assert "A: 3x3090 --ram 125GiB" in out and "context: 262,144, both" in out


def test_words_beside_a_real_box_replace_what_it_has():
    from entrypoint.simulate import simulate

    real = simulate("1x4090", ram="64GiB", cgroup="32GiB")
    assert cli._Box(None, None, None, None, False).machine(lambda: real) is real
    more = cli._Box(None, "125GiB", None, None, False).machine(lambda: real)
    assert (more.gpus, more.ram_available_bytes) == (real.gpus, 32 << 30), "the container's limit stays"
    other = cli._Box("3x3090", None, "48GiB", None, True).machine(lambda: real)
    assert (len(other.gpus), other.ram_available_bytes, other.wsl) == (3, 48 << 30, True)
