"""Every Triton kernel between the K/V of a QSA layer and its output, ours and upstream's, compiled for an RTX 3090.

No card is needed: the real wrappers are called with tensors of the real shapes, and each launch is turned into a
compilation for sm_86 (tests/support/compile86). Bars: 101,376 B of shared memory for one block, which is all that sm_86
gives, and the spills named below. `pytest -s` prints the table.
"""

import pytest

SHARED_BYTES = 101_376
"""cudaDevAttrMaxSharedMemoryPerBlockOptin of compute capability 8.6."""

_OURS = """
import json
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from compile86 import recording, table
from flashnext.section_kernel import TritonSteps, Tuning
from flashnext.section_prefill import SectionPrefill, Span

# One QSA layer of the model: 24 query heads, 2 K/V heads of 256, 2,051 columns, blocks of 12,160 tokens, 262,144 tokens.
ROWS, HEADS, KV, DIM, COLUMNS, BLOCK, TABLE = 512, 24, 2, 256, 2051, 12160, 22
prefill = SectionPrefill(
    arena_bytes=2 * BLOCK * KV * 2 * DIM * 2, block_size=BLOCK, kv_heads=KV, head_dim=DIM, query_heads=HEADS,
    max_rows=ROWS, selection_width=COLUMNS, device="cpu", steps=TritonSteps(Tuning()),
)
pool = torch.empty(3, KV, BLOCK, 2 * DIM, dtype=torch.bfloat16).transpose(1, 2)
query = torch.empty(ROWS, HEADS, DIM, dtype=torch.bfloat16)
block_table = torch.zeros(4, TABLE, dtype=torch.int32)
selection = torch.zeros(ROWS, COLUMNS + 1, dtype=torch.int32)
class Allocations(TorchDispatchMode):
    # Bytes of storage that operators bring forth.
    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        storages = lambda tree: [t.untyped_storage() for t in tree_leaves(tree) if isinstance(t, torch.Tensor)]
        known = {storage.data_ptr() for storage in storages((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        self.bytes += sum(s.nbytes() for s in storages(result) if s.data_ptr() not in known)
        return result

out, allocated = torch.empty_like(query), []
with recording() as found:
    prefill.warm_up(pool, block_table)
    warm = len(found)
    for context in (512, 4_001, 130_000, 262_144):
        with Allocations() as during:
            spans = [Span(1, 0, 500, context), Span(3, 500, 512, 4_001)]
            prefill(query, pool, block_table, selection, spans, query.flatten(1), out)
        allocated.append(during.bytes)
with Allocations() as check:
    torch.empty(5, dtype=torch.int8)

from flashnext.hot_rows import HotRows

hot = HotRows(layers=1, requests=4, context=262_144, kv_heads=KV, head_dim=DIM, groups=512, ratio=4, device="cpu")
with recording() as kept:
    for rows in (1, 2, 4):
        hot.bring(0, pool, block_table, selection[:rows])
print(json.dumps({"warm": warm, "rows": table(found), "allocated": allocated, "check": check.bytes, "hot": table(kept)}))
"""

_UPSTREAM = """
import json
from types import SimpleNamespace
import torch
import vllm.models.qwen4_exp.nvidia.model
from compile86 import recording, table
from vllm.models.qwen4_exp.common import qsa_cache
from vllm.models.qwen4_exp.nvidia.ops import qsa, qsa_indexer, qsa_pre_indexer

HEADS, KV, DIM, COLUMNS, BLOCK, TABLE, INDEX_HEADS, INDEX_DIM, RATIO = 24, 2, 256, 2051, 12160, 22, 4, 128, 4
bf16, int32, int64 = torch.bfloat16, torch.int32, torch.int64
# Selection in C++; not a Triton kernel.
qsa_indexer._topk = lambda *a: None
kv = torch.empty(3, KV, BLOCK, 2 * DIM, dtype=bf16).transpose(1, 2)
pooled = torch.empty(3, BLOCK // RATIO, 1, INDEX_DIM, dtype=bf16)
ring = torch.empty(3, 4, 1, INDEX_DIM, dtype=bf16)

def one_step(rows, prefill):
    requests = 1
    ints = lambda n, kind=int32: torch.zeros(n, dtype=kind)
    tables = torch.zeros(requests, TABLE, dtype=int32)
    starts = torch.tensor([0, rows], dtype=int32)
    batch = SimpleNamespace(
        num_actual_tokens=rows, query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=ints(requests),
        slot_mapping=ints(rows, int64), block_table_tensor=tables,
    )
    for circular in (True, False):
        qsa_cache.build_qsa_metadata_triton(
            batch, ints(rows), ints(rows, int64), ints(rows), ints(rows, int64),
            storage_block_size=4 if circular else BLOCK // RATIO, compress_ratio=1 if circular else RATIO,
            circular_buffer_size=4 if circular else 0,
            k_work_metadata_buffer=None if circular else torch.zeros(rows, 2, dtype=int32), request_capacity=4,
        )
    index_q = torch.empty(rows, INDEX_HEADS, INDEX_DIM, dtype=bf16)
    projected = torch.empty(rows, (INDEX_HEADS + 1) * INDEX_DIM, dtype=bf16)
    weight = torch.empty(INDEX_DIM, dtype=bf16)
    qsa_pre_indexer.qsa_pre_indexer(
        projected[:, : INDEX_HEADS * INDEX_DIM], projected[:, INDEX_HEADS * INDEX_DIM :], ints(rows, int64),
        torch.empty(4096, INDEX_DIM // 2, dtype=bf16), weight, weight, 1e-6, index_q, ring[:, :, 0], ints(rows, int64),
        torch.zeros(requests, 1, dtype=int32), starts, ints(rows, int64), pooled[:, :, 0], ints(rows, int64),
        torch.zeros(rows, 2, dtype=int32), compress_ratio=RATIO, mrope_section=None, rope_pos_offset=None,
    )
    chosen = torch.zeros(rows, 512, dtype=int32)
    if prefill:
        qsa_indexer.qsa_select_paged_prefill(
            index_q, pooled, tables, starts, ints(rows), 2048, RATIO, rows, chosen, 262144
        )
    else:
        qsa_indexer.qsa_select_paged_decode(index_q, pooled, tables, ints(rows), 2048, RATIO, 1, chosen)
    selection = torch.zeros(rows, COLUMNS + 1, dtype=int32)
    qsa_indexer.expand_qsa_block_indices(chosen, ints(rows, int64), ints(rows), RATIO, 2048, selection)
    query = torch.empty(rows, HEADS, DIM, dtype=bf16)
    qsa.qsa_sparse_paged_attention(
        query, *kv.split(DIM, -1), selection, tables, ints(rows), prefill, output_gate=query.flatten(1)
    )

with recording() as found:
    one_step(1, False)
    one_step(512, True)
print(json.dumps({"rows": table(found)}))
"""


def show(rows: list[dict]) -> None:
    for row in rows:
        constants = " ".join(f"{name}={value}" for name, value in row["constants"].items())
        print(
            f"{row['kernel']:36} {row['registers']:4} registers, {row['spill_store']:4}/{row['spill_load']:4} B spilled, "
            f"{row['shared']:6} B shared, {row['warps']} warps  {constants}"
        )


@pytest.fixture(scope="module")
def ours(run_patched, needs_triton):
    needs_triton()
    value = run_patched(_OURS).value
    show(value["rows"] + value["hot"])
    return value


@pytest.fixture(scope="module")
def upstream(run_patched, needs_triton):
    needs_triton()
    rows = run_patched(_UPSTREAM, card86=True).value["rows"]
    show(rows)
    return rows


def test_our_kernels_fit_and_do_not_spill(ours):
    assert {row["kernel"] for row in ours["rows"]} == {"mark_kernel", "keys_kernel", "copy_kernel", "attend_kernel"}
    for row in ours["rows"]:
        assert row["shared"] <= SHARED_BYTES, row
        assert row["spill_store"] == row["spill_load"] == 0, row


def test_kernels_of_rows_that_stay_on_the_card_fit_and_do_not_spill(ours):
    assert {row["kernel"] for row in ours["hot"]} == {"place_kernel", "fetch_kernel"}
    for row in ours["hot"]:
        assert row["shared"] <= SHARED_BYTES, row
        assert row["spill_store"] == row["spill_load"] == 0, row
    [fetch] = [row for row in ours["hot"] if row["kernel"] == "fetch_kernel"]
    assert "ld.global.v4.b32" in fetch["loads"] and "st.global.v4.b32" in fetch["loads"], fetch


def test_two_blocks_of_attention_share_a_multiprocessor(ours):
    [attend] = [row for row in ours["rows"] if row["kernel"] == "attend_kernel"]
    assert 2 * (attend["shared"] + 1024) <= 102_400, attend  # each block takes 1 KiB of the SM's 100 KiB for itself
    assert 2 * 32 * attend["warps"] * attend["registers"] <= 65_536, attend


def test_the_first_request_finds_every_kernel_compiled(ours):
    assert ours["warm"] == len(ours["rows"]) == 4


def test_a_call_allocates_nothing_whatever_the_context(ours):
    assert ours["check"] == 5
    assert ours["allocated"] == [0, 0, 0, 0]


def test_the_copy_moves_16_bytes_at_a_time(ours):
    [copy] = [row for row in ours["rows"] if row["kernel"] == "copy_kernel"]
    assert copy["loads"].count("ld.global.v4.b32") == copy["loads"].count("st.global.v4.b32") == 8, copy


def test_attention_gathers_16_bytes_at_a_time_past_the_registers(ours):
    [attend] = [row for row in ours["rows"] if row["kernel"] == "attend_kernel"]
    assert "cp.async.cg.shared.global" in attend["loads"], attend


def test_upstream_kernels_fit(upstream):
    assert {row["kernel"] for row in upstream} == {
        "_build_qsa_metadata_kernel",
        "_qsa_pre_indexer_kernel",
        "_qsa_mqa_paged_uniform_kernel",
        "_qsa_mqa_paged_prefill_kernel",
        "_expand_qsa_indices_kernel",
        "_qsa_sparse_paged_gqa_splitk_kernel",
        "_qsa_merge_splitk_kernel",
    }
    for row in upstream:
        assert row["shared"] <= SHARED_BYTES, row
        # 48 B in the merge of 64 splits; all others none.
        assert row["spill_store"] <= (64 if row["kernel"] == "_qsa_merge_splitk_kernel" else 0), row
