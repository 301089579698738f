"""The user's own arguments: merged, replaced, appended or refused by name."""

from __future__ import annotations

import json

import pytest

from entrypoint import plan as p
from entrypoint.errors import Exit, Refusal
from entrypoint.extra_args import OURS
from entrypoint.simulate import simulate
from entrypoint.wishes import gather


def make(text):
    return p.make_plan(
        simulate("3x3090", ram="125GiB"), p.published(), gather({}, {"FLASHNEXT_EXTRA_ARGS": text}, None)
    )


def flag(plan, name):
    assert plan.argv.count(name) == 1
    return plan.argv[plan.argv.index(name) + 1]


@pytest.mark.parametrize(
    "text",
    [
        """--compilation-config '{"pass_config": {"fuse_norm_quant": false}}'""",
        """--compilation-config.pass_config.fuse_norm_quant false""",
        """--compilation-config.pass_config '{"fuse_norm_quant": false}'""",
    ],
)
def test_every_form_of_compilation_config_ends_in_one_json(text):
    merged = json.loads(flag(make(text), "--compilation-config"))
    assert merged["cudagraph_capture_sizes"] == [1, 2, 4]
    assert merged["pass_config"] == {"fuse_norm_quant": False}


def test_two_forms_beside_each_other_are_both_kept():
    plan = make("""--compilation-config '{"a": 1}' --compilation-config.b 2""")
    merged = json.loads(flag(plan, "--compilation-config"))
    assert (merged["a"], merged["b"]) == (1, 2)


@pytest.mark.parametrize("name", sorted(OURS))
def test_flags_of_the_plan_are_refused_by_name(name):
    with pytest.raises(Refusal) as e:
        make(f"{name} x")
    assert e.value.code == Exit.PLAN and name in e.value.message


@pytest.mark.parametrize(
    "text", ["--compilation-config.cudagraph_capture_sizes [1]", """--compilation-config '{"mode": 3}'"""]
)
def test_keys_of_the_plan_are_refused_by_name(text):
    with pytest.raises(Refusal) as e:
        make(text)
    assert e.value.code == Exit.PLAN


@pytest.mark.parametrize(
    "text", ["--x 'open", "word", "--a 1 2", "--compilation-config nonsense", "--compilation-config '[1]'", "-x 1"]
)
def test_what_cannot_be_read_is_a_usage_error(text):
    with pytest.raises(Refusal) as e:
        make(text)
    assert e.value.code == Exit.USAGE


def test_other_flags_are_appended_and_replace_ours():
    plan = make("--max-log-len 200 --gpu-memory-utilization=0.9 --disable-log-stats")
    assert flag(plan, "--max-log-len") == "200"
    assert flag(plan, "--gpu-memory-utilization") == "0.9"
    assert plan.argv[-1] == "--disable-log-stats"
