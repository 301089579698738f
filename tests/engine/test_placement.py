"""Patch 0002: both pipeline guards ask where the table's layers are.

The rule is compared with vLLM's own partition for every first-stage size of 48 layers on 2 to 8 stages, then the two
guards themselves are called, on the patched tree and on the pristine one, which refuses every pipeline.
"""

import itertools
import json

import pytest

_RULE = """
import itertools, json, os, sys
from types import SimpleNamespace
from flashnext.placement import why_table_cannot_be_split
from vllm.distributed.utils import get_pp_indices

LAYERS = 48

def spread(total, stages):
    '''A few ways to give `total` layers to `stages` stages, each at least one: even, and all the rest on one of them.'''
    even = [total // stages + (k < total % stages) for k in range(stages)]
    yield even
    yield even[::-1]
    for k in range(stages):
        yield [1 + (total - stages) * (k == j) for j in range(stages)]

rows = 0
for stages in range(2, 9):
    parallel = SimpleNamespace(pipeline_parallel_size=stages)
    for first in range(1, LAYERS - stages + 2):
        for rest in {tuple(rest) for rest in spread(LAYERS - first, stages - 1)}:
            os.environ["VLLM_PP_LAYER_PARTITION"] = ",".join(map(str, (first, *rest)))
            ranges = [get_pp_indices(LAYERS, stage, stages) for stage in range(stages)]
            assert ranges[0] == (0, first) and ranges[-1][1] == LAYERS, ranges
            for ids in ([2], [1], [first], [first + 1], [LAYERS], [1, 2, first], [first, first + 1], [1, LAYERS]):
                reason = why_table_cannot_be_split(
                    SimpleNamespace(ple_layer_ids=ids, num_hidden_layers=LAYERS), parallel
                )
                # the definition: the decoder layer with index id - 1 is built by the first stage's worker
                built_by = {next(s for s, (b, e) in enumerate(ranges) if b <= i - 1 < e) for i in ids}
                assert (reason is None) == (built_by == {0}), (ranges, ids, reason)
                rows += 1
                if reason is not None and "VLLM_PP_LAYER_PARTITION=" in reason:
                    # what the refusal suggests is a partition that vLLM takes and the rule allows
                    os.environ["VLLM_PP_LAYER_PARTITION"] = reason.split("VLLM_PP_LAYER_PARTITION=")[1].split()[0]
                    again = why_table_cannot_be_split(
                        SimpleNamespace(ple_layer_ids=ids, num_hidden_layers=LAYERS), parallel
                    )
                    assert again is None, (reason, again)
                    os.environ["VLLM_PP_LAYER_PARTITION"] = ",".join(map(str, (first, *rest)))

del os.environ["VLLM_PP_LAYER_PARTITION"]
default = {}
for stages in range(1, 9):
    default[stages] = [
        why_table_cannot_be_split(
            SimpleNamespace(ple_layer_ids=[layer], num_hidden_layers=LAYERS),
            SimpleNamespace(pipeline_parallel_size=stages),
        ) is None
        for layer in range(1, LAYERS + 1)
    ]
os.environ["VLLM_PP_LAYER_PARTITION"] = "16,16"
try:
    why_table_cannot_be_split(
        SimpleNamespace(ple_layer_ids=[2], num_hidden_layers=LAYERS), SimpleNamespace(pipeline_parallel_size=3)
    )
    misfit = None
except ValueError as err:
    misfit = str(err)
print(json.dumps({"rows": rows, "default": default, "misfit": misfit}))
"""


@pytest.fixture(scope="module")
def rule(run_patched):
    return run_patched(_RULE).value


def test_rule_is_vllms_partition_for_every_first_stage_size(rule):
    # 47 + 46 + ... + 41 first-stage sizes, with at least one way to spread the rest and eight sets of table layers
    assert rule["rows"] > 8 * sum(range(41, 48))


# Without a partition of one's own: vLLM gives layers that do not divide to all but the last stage, the first one last
@pytest.mark.parametrize(
    ("stages", "first"), [(1, 48), (2, 24), (3, 16), (4, 12), (5, 9), (6, 8), (7, 7), (8, 6)], ids=str
)
def test_default_partition_allows_a_table_layer_up_to_the_first_stages_last(rule, stages, first):
    assert rule["default"][str(stages)] == [layer <= first for layer in range(1, 49)]


def test_a_partition_that_does_not_fit_the_stages_is_vllms_error(rule):
    assert rule["misfit"] == "len(partitions)=2 does not match pp_size=3."


@pytest.fixture(scope="module")
def placement():
    """The pure part, which needs no vLLM."""
    import importlib.util

    from patches import apply as series_tool

    path = series_tool.HERE / series_tool.PACKAGE / "placement.py"
    spec = importlib.util.spec_from_file_location("placement", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("ids", "sizes", "reason"),
    [
        ([2], (16, 16, 16), None),
        ([16], (16, 16, 16), None),
        (
            [17],
            (16, 16, 16),
            "The table is read by layer 17 (counted from 1), which is on stage 2 of 3; the first stage has layers 1-16 "
            "only. VLLM_PP_LAYER_PARTITION=17,16,15 would do.",
        ),
        (
            [40, 2],
            (16, 16, 16),
            "The table is read by layer 40 (counted from 1), which is on stage 3 of 3; the first stage has layers 1-16 "
            "only. VLLM_PP_LAYER_PARTITION=40,4,4 would do.",
        ),
        (
            [48],
            (24, 24),
            "The table is read by layer 48 (counted from 1), which is on stage 2 of 2; the first stage has layers 1-24 "
            "only. No partition into 2 stages holds layer 48 on the first.",
        ),
        (
            [1],
            (0, 48),
            "The table is read by layer 1 (counted from 1), and the first stage has no layers. "
            "VLLM_PP_LAYER_PARTITION=1,47 would do.",
        ),
    ],
)
def test_the_reason_names_layer_stage_and_a_partition_that_would_do(placement, ids, sizes, reason):
    ends = list(itertools.accumulate(sizes))
    assert placement.why_not(ids, list(zip([0, *ends[:-1]], ends, strict=True))) == reason


# Both guards as vLLM calls them; the model state is made for real, of a module that has no layers.
_GUARDS = """
import json, os, sys
from pathlib import Path
import kv_specs
import torch
from vllm.model_executor.models.config import MODELS_CONFIG_MAP
from vllm.models.qwen4_exp.nvidia.model_state import Qwen4ExpModelState

config = kv_specs.engine_config(Path(os.getcwd()) / "model")
check = MODELS_CONFIG_MAP["Qwen4ExpForCausalLM"].verify_and_update_config

def outcome(call):
    try:
        call()
        return None
    except (NotImplementedError, RuntimeError) as err:
        return [type(err).__name__, str(err)]

answer = {}
for name, (ids, stages, partition) in json.loads(sys.argv[1]).items():
    os.environ.pop("VLLM_PP_LAYER_PARTITION", None)
    if partition:
        os.environ["VLLM_PP_LAYER_PARTITION"] = partition
    config.model_config.hf_text_config.ple_layer_ids = ids
    kv_specs.set_stages(config, stages)
    answer[name] = [
        outcome(lambda: check(config)),
        outcome(lambda: Qwen4ExpModelState(config, torch.nn.Module(), None, torch.device("cpu"))),
    ]
print(json.dumps(answer))
"""

_CASES = {  # table layers, stages, VLLM_PP_LAYER_PARTITION
    "one stage": ([2], 1, None),
    "no table": ([], 3, None),
    "first of 3": ([2], 3, None),
    "first of 2, uneven": ([2], 2, "2,46"),
    "second of 3": ([20], 3, None),
    "second of 3, moved": ([20], 3, "20,14,14"),
    "second of 2, uneven": ([2], 2, "1,47"),
}


@pytest.fixture(scope="module")
def guards(run_pristine, run_patched):
    return {
        tree: run(_GUARDS, json.dumps(_CASES), card86=True).value
        for tree, run in (("pristine", run_pristine), ("patched", run_patched))
    }


@pytest.mark.parametrize("case", [case for case, (ids, stages, _) in _CASES.items() if ids and stages > 1])
def test_without_the_patch_both_guards_refuse_every_pipeline(guards, case):
    config_guard, state_guard = guards["pristine"][case]
    assert (config_guard[0], state_guard[0]) == ("NotImplementedError", "RuntimeError")


@pytest.mark.parametrize("case", ["one stage", "no table", "first of 3", "first of 2, uneven", "second of 3, moved"])
def test_with_the_patch_both_guards_allow_the_table_on_the_first_stage(guards, case):
    assert guards["patched"][case] == [None, None]


@pytest.mark.parametrize("case", ["one stage", "no table"])
def test_what_was_allowed_still_is(guards, case):
    assert guards["patched"][case] == guards["pristine"][case] == [None, None]


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("second of 3", "layer 20 (counted from 1), which is on stage 2 of 3; the first stage has layers 1-16 only."),
        ("second of 2, uneven", "layer 2 (counted from 1), which is on stage 2 of 2; the first stage has layers 1-1"),
    ],
)
def test_elsewhere_the_old_refusal_stands_and_says_why(guards, case, reason):
    for (old_type, old_text), (new_type, new_text) in zip(
        guards["pristine"][case], guards["patched"][case], strict=True
    ):
        assert new_type == old_type
        assert new_text.startswith(old_text)
        assert reason in new_text
        assert "VLLM_PP_LAYER_PARTITION=" in new_text
