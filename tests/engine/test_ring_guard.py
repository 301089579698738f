"""Patch 0001: the QSA raw-key ring has no slot in the null block.

Both implementations are run: the torch path, and the Triton kernel in Triton's interpreter (integers only, so nothing is
lost in it). On the pristine tree the same requests get slots of block 0, which is not theirs.
"""

import json

import pytest

# Block tables as the model runner makes them: dummy batches (warm-up, graph capture) have zeroed rows but real lengths.
_PROGRAM = """
import json, sys
import torch
from types import SimpleNamespace
from vllm.models.qwen4_exp.common import qsa_cache

RING, RATIO, PAD = 4, 4, -1
use_triton = sys.argv[2] == "triton"

def metadata(block_table, query_lens, seq_lens, padded_tokens=0):
    starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    tokens = int(starts[-1]) + padded_tokens
    owner = torch.zeros(tokens, dtype=torch.int32)
    owner[: int(starts[-1])] = torch.repeat_interleave(
        torch.arange(len(query_lens), dtype=torch.int32), torch.tensor(query_lens)
    )
    return SimpleNamespace(
        num_actual_tokens=tokens,
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        slot_mapping=torch.arange(tokens, dtype=torch.int64),
        block_table_tensor=torch.tensor(block_table, dtype=torch.int32),
        token_to_req_indices=lambda out: owner,
    )

def slots(circular, **batch):
    common = metadata(**batch)
    tokens = common.num_actual_tokens
    buffers = [torch.full((tokens,), -7, dtype=kind) for kind in (torch.int32, torch.int64, torch.int32, torch.int64)]
    build = qsa_cache.build_qsa_metadata_triton if use_triton else qsa_cache._build_qsa_metadata_torch
    *_, mapping = build(
        common, *buffers, storage_block_size=4 if circular else 16, compress_ratio=1 if circular else RATIO,
        circular_buffer_size=RING if circular else 0,
    )
    return mapping.tolist()

assert qsa_cache.HAS_TRITON == use_triton
print(json.dumps({name: slots(**batch) for name, batch in json.loads(sys.argv[1]).items()}))
"""

_BATCHES = {
    # ring block of each request in column 0
    "dummy, decode": {"circular": True, "block_table": [[0], [0]], "query_lens": [1, 1], "seq_lens": [1, 1]},
    "dummy, prefill": {"circular": True, "block_table": [[0]], "query_lens": [6], "seq_lens": [6]},
    "real beside dummy": {"circular": True, "block_table": [[5], [0]], "query_lens": [2, 2], "seq_lens": [7, 2]},
    "real, decode": {"circular": True, "block_table": [[5], [1]], "query_lens": [1, 1], "seq_lens": [7, 1]},
    "real, padded": {
        "circular": True,
        "block_table": [[5], [0]],
        "query_lens": [1, 0],
        "seq_lens": [7, 0],
        "padded_tokens": 1,
    },
    "real, long prefill": {"circular": True, "block_table": [[3]], "query_lens": [6], "seq_lens": [6]},
    # the pooled keys take their slots from the runner's slot mapping and are none of this patch's business
    "pooled": {"circular": False, "block_table": [[0, 2]], "query_lens": [8], "seq_lens": [8]},
}


@pytest.fixture(scope="module", params=["torch", "triton"])
def slots(request, run_pristine, run_patched, needs_triton):
    """{tree: {batch: slots}} from one of the two implementations."""
    if request.param == "triton":
        needs_triton()
    # The interpreter needs Triton switched on, which vLLM does for a CUDA platform only.
    triton = {"card86": True, "env": {"TRITON_INTERPRET": "1"}} if request.param == "triton" else {}
    return {
        tree: run(_PROGRAM, json.dumps(_BATCHES), request.param, **triton).value
        for tree, run in (("pristine", run_pristine), ("patched", run_patched))
    }


@pytest.mark.parametrize(
    ("batch", "in_null_block"),
    [("dummy, decode", [0, 0]), ("dummy, prefill", [-1, -1, 2, 3, 0, 1]), ("real beside dummy", [21, 22, 0, 1])],
)
def test_without_the_patch_dummy_rows_get_slots_of_the_null_block(slots, batch, in_null_block):
    assert slots["pristine"][batch] == in_null_block


@pytest.mark.parametrize(
    ("batch", "expected"),
    [("dummy, decode", [-1, -1]), ("dummy, prefill", [-1] * 6), ("real beside dummy", [21, 22, -1, -1])],
)
def test_with_the_patch_they_get_none(slots, batch, expected):
    assert slots["patched"][batch] == expected


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ("real, decode", [22, 4]),  # position 6 of block 5, position 0 of block 1, in rings of 4
        ("real, padded", [22, -1]),
        ("real, long prefill", [-1, -1, 14, 15, 12, 13]),  # only the last four of six rows fit the ring
        ("pooled", [-1, -1, -1, 0, -1, -1, -1, 1]),
    ],
)
def test_rows_of_real_requests_are_where_they_were(slots, batch, expected):
    assert slots["patched"][batch] == slots["pristine"][batch] == expected
