"""Patch 0015: the indexer's scores come from one buffer that is there from the start, and are what they were.

Upstream's own prefill selection runs in Triton's interpreter in pieces, with and without the buffer; its top-k, which is
C++, has a stand-in that keeps the scores.
"""

import pytest

from entrypoint import activation, model

_PROGRAM = """
import json, os
from types import SimpleNamespace
import torch
import vllm.models.qwen4_exp.nvidia.model
from vllm.models.qwen4_exp.nvidia.ops import qsa_indexer
from flashnext import indexer_logits as il

torch.manual_seed(1)
ROWS, PAGE, PAGES, HEADS, DIM = 300, 256, 4, 2, 32   # 1,024 columns of 4 bytes: 256 rows to a piece of 1 MiB
visible = torch.randint(600, 1025, (ROWS,), dtype=torch.int32)
query, keys = torch.randn(ROWS, HEADS, DIM), torch.randn(PAGES + 1, PAGE, 1, DIM)
table, starts = torch.tensor([[3, 1, 4, 2]], dtype=torch.int32), torch.tensor([0, ROWS], dtype=torch.int32)

def select():
    kept, places = [], []
    def topk(logits, seen, *_):
        kept.append(torch.where(torch.arange(logits.shape[1]) < seen[:, None], logits, 0.0))
        places.append([logits.data_ptr(), *logits.shape, logits.is_contiguous()])
    qsa_indexer._topk = topk
    chosen = torch.zeros(ROWS, 512, dtype=torch.int32)
    qsa_indexer.qsa_select_paged_prefill(query, keys, table, starts, visible, 2048, 4, ROWS, chosen, 4096)
    return torch.cat(kept), places

def config(rows, context):
    return SimpleNamespace(scheduler_config=SimpleNamespace(max_num_batched_tokens=rows),
                           model_config=SimpleNamespace(max_model_len=context))

out = {}
plain, places = select()
out["without"] = [place[1:] for place in places]
buffer = il.reserve(config(ROWS, 4096), 4)
out["bytes"] = [buffer.nbytes, il.reserve(config(ROWS, 4096), 4) is buffer]
again, places = select()
out["with"] = [place[1:] for place in places]
out["in the buffer"] = [place[0] == buffer.data_ptr() for place in places]
out["same"] = [torch.equal(plain, again), float(plain.abs().max())]
out["too large"] = il.take(1000, 1000, torch.device("cpu")).data_ptr() != buffer.data_ptr()
del buffer
out["gone"] = len(il._buffers)
out["most"] = [il.most_bytes(512, context, 4, 64 << 20) for context in (4096, 4097, 131_072, 262_144)]
out["least"] = il.most_bytes(512, 262_144, 4, 1000)
print(json.dumps(out))
"""


@pytest.fixture(scope="module")
def seen(run_patched, needs_triton):
    needs_triton()
    env = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "VLLM_SPARSE_INDEXER_MAX_LOGITS_MB": "1"}
    return run_patched(_PROGRAM, card86=True, env=env).value


def test_scores_are_what_they_were_piece_by_piece(seen):
    assert seen["without"] == seen["with"] == [[256, 1024, True], [44, 1024, True]]
    same, largest = seen["same"]
    assert same and largest > 1
    assert seen["in the buffer"] == [True, True]


def test_one_buffer_of_the_largest_piece_for_as_long_as_a_layer_keeps_it(seen):
    assert seen["bytes"] == [1 << 20, True]
    assert seen["too large"] and seen["gone"] == 0


def test_the_plan_counts_the_same_bytes(seen):
    """64 MiB at most: 2 MiB for 4,096 tokens, all of it from 131,072 on; a row is whatever it is."""
    assert seen["most"] == [2_097_152, 512 * 1088 * 4, 64 << 20, 64 << 20]
    assert seen["least"] == 65_536 * 4
    shapes = model.shapes(model.published().text)
    for context, most in ((4096, seen["most"][0]), (131_072, seen["most"][2]), (262_144, seen["most"][3])):
        step = activation.Step(rows=512, context=context, logits_limit_bytes=64 << 20)
        assert activation.logits_bytes(shapes, step) == most
