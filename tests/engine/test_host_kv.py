"""Patches 0012 and 0013: K/V rows in host memory, through vLLM's own layer, cache setup, zeroing, warm-up and shutdown.

One program builds a small model twice on the CPU, with K/V on the card and with K/V in host memory, and lets vLLM allocate and bind
both. Steps with prefill, decoding and both at once, over scattered blocks, then go through the layer's own `_run_qsa`. What only
a GPU can do has a stand-in in plain PyTorch: the three kernels (write, attention of decoding rows, selection), and a recorder for
the calls that lock memory. Everything between them is the real thing, section prefill included.
"""

import pytest

_PROGRAM = r"""
import gc, json, os, sys
from pathlib import Path
from types import SimpleNamespace
import numpy as np
import torch
import engine_modules as em
import kv_specs
from flashnext import host_kv, host_pool
from vllm import forward_context
from vllm.config import CUDAGraphMode, get_layers_from_vllm_config, set_current_vllm_config
from vllm.models.qwen4_exp.common import qsa_cache
from vllm.models.qwen4_exp.nvidia import model as _  # before its modules
from vllm.models.qwen4_exp.nvidia import indexer_qsa, qsa
from vllm.models.qwen4_exp.nvidia.ops import qsa as ops, qsa_indexer
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends import flash_attn
from vllm.utils import torch_utils
from vllm.v1.worker import gpu_worker
from vllm.v1.worker.gpu import attn_utils, cudagraph_utils, shutdown
from vllm.v1.worker.utils import AttentionGroup, KVBlockZeroer, clear_layer_kv_caches, prepare_kernel_block_sizes

CPU = torch.device("cpu")
torch.manual_seed(3)
MODEL = kv_specs.MODEL | {
    "hidden_size": 64, "num_hidden_layers": 8, "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "intermediate_size": 32, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32, "indexer_budget": 2048,
    "indexer_head_dim": 32, "indexer_n_heads": 2, "ple_embed_dim": 64, "ngram_vocab_size_base": 1000, "vocab_size": 128, "eos_token_id": 1,
    "max_position_embeddings": 4096, "hc_lowrank": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 32, "linear_value_head_dim": 32,
}
HEADS, KV_HEADS, DIM, REQUESTS, ROWS = 6, 2, 32, 4, 512
HOT = bool(os.environ.get("HOT_ROWS"))
torch_utils.PIN_MEMORY = False  # what believes in a card here has none
out = {}

# -- stand-ins

def write(key, value, key_cache, value_cache, slots, *_):
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            block, at = divmod(slot, key_cache.shape[1])
            key_cache[block, at], value_cache[block, at] = key[row], value[row]

def attention(q, k_cache, v_cache, indices, table, owner, use_prefill_config, out, *, output_gate):
    assert q.shape[0] == indices.shape[0] == owner.shape[0] == output_gate.shape[0]
    size = k_cache.shape[1]
    for row in range(q.shape[0]):
        token = indices[row, : int(indices[row, -1])].long()
        block = table[owner[row].long()][token // size].long()
        k, v = (cache[block, token % size].float().repeat_interleave(HEADS // KV_HEADS, 1) for cache in (k_cache, v_cache))
        weight = torch.softmax(torch.einsum("hd,nhd->hn", q[row].float(), k) * DIM**-0.5, -1)
        result = torch.einsum("hn,nhd->hd", weight, v).to(q.dtype).float()
        out[row] = (result * torch.sigmoid(output_gate[row].view(HEADS, DIM).float())).to(q.dtype)
    kinds.append(("decode", q.shape[0]))
    return out

def select(self, projected, positions, into):
    into.fill_(-1)
    into.copy_(SELECTION[: len(into)])
    return into

flash_attn.reshape_and_cache_flash = write
ops.qsa_sparse_paged_attention = attention
indexer_qsa.QSAIndexer.forward = select
qsa_cache.build_qsa_metadata = qsa_cache._build_qsa_metadata_torch
# (padding, if there is any, is nobody's)
CommonAttentionMetadata.token_to_req_indices = lambda self, into: torch.repeat_interleave(
    torch.arange(self.num_reqs, dtype=torch.int32), torch.diff(self.query_start_loc).long())
kinds = []


class Recorder(host_pool.Cuda):
    def __init__(self):
        self.held, self.log = {}, []

    def register(self, address, nbytes):
        self.held[address] = nbytes
        self.log.append(f"register {nbytes}")

    def unregister(self, address):
        self.log.append(f"unregister {self.held.pop(address)}")

    def view(self, tensor):
        assert tensor.data_ptr() in self.held, "not page-locked"
        return tensor

host_kv.cuda = Recorder()

# -- two engines, as a worker sets them up

def engine(host):
    more = {"flashnext": {"host_kv": {"max_bytes": 1 << 30, "arena_bytes": 1 << 19, "hot_rows": HOT}}} if host else {}
    config = kv_specs.engine_config(Path(os.getcwd()) / "model", model=MODEL, max_model_len=4096, max_num_seqs=REQUESTS,
                                    max_num_batched_tokens=ROWS, additional_config=more)
    specs = kv_specs.specs_of_stages(config)[0]  # on `meta`; also settles block size and layout
    config.compilation_config.static_forward_context.clear()
    model = em.build_on_cpu(config)
    plan = kv_specs.kv_cache_configs(config, [specs], 6_000_000)[0]
    return SimpleNamespace(config=config, model=model, plan=plan, specs=specs,
                           layers=config.compilation_config.static_forward_context)

def runner(e):
    # What a worker's cache setup needs of its runner.
    def initialize_kv_cache(plan, is_profiling=False, **_):
        groups = []
        for number, group in enumerate(plan.kv_cache_groups):
            backends = {e.layers[name].get_attn_backend(): name for name in group.layer_names}
            spec = group.kv_cache_spec
            spec_of = lambda name: spec.kv_cache_specs[name] if hasattr(spec, "kv_cache_specs") else spec
            groups.append([AttentionGroup(b, [n for n in group.layer_names if e.layers[n].get_attn_backend() is b],
                                          spec_of(name), number) for b, name in backends.items()])
        r.groups, r.sizes, r.kv_cache_config = groups, prepare_kernel_block_sizes(plan, groups), plan
        r.bound = attn_utils.init_kv_cache(e.layers, plan, CPU, r.sizes, e.config)
        r.during.append([is_profiling, host_kv.cuda.log[:], e.config.cache_config.num_gpu_blocks])

    r = SimpleNamespace(vllm_config=e.config, cache_config=e.config.cache_config, compilation_config=e.config.compilation_config,
                        max_num_reqs=REQUESTS, get_kv_cache_spec=lambda: dict(e.specs), initialize_kv_cache=initialize_kv_cache,
                        model=e.model, model_state=SimpleNamespace(supports_mm_inputs=False), lora_config=None, during=[],
                        maybe_remove_all_loras=lambda _: None)
    return r

def set_up(e, plan):
    worker = SimpleNamespace(cache_config=e.config.cache_config, vllm_config=e.config, model_runner=e.runner,
                             model_config=SimpleNamespace(enable_return_routed_experts=False),
                             _maybe_get_memory_pool_context=lambda tag: None)
    gpu_worker.Worker.initialize_from_config(worker, plan)

card, host = engine(False), engine(True)
card.config.compilation_config.max_cudagraph_capture_size = host.config.compilation_config.max_cudagraph_capture_size = 4
names = [name for name in host.layers if name.endswith(".attn")]
for e in (card, host):
    e.runner = runner(e)
kv = host.layers[names[0]].host_kv
out["block"] = [host.config.cache_config.block_size, kv.block_tokens, kv.row_bytes]

# Trap: graphs are measured with a small cache before the real one is there.
torch.accelerator.synchronize = torch.accelerator.empty_cache = lambda *_: None
for e in (card, host):
    with set_current_vllm_config(e.config):
        cudagraph_utils._init_minimal_kv_cache_for_profiling(e.runner)
small = [host_kv.rows(host.layers[name]) for name in names]
out["measured"] = {
    "log": host_kv.cuda.log[:], "shapes": [list(rows.shape) for rows in small], "one buffer": len({r.data_ptr() for r in small}),
    "bytes": kv.pool.reserved_bytes, "blocks": kv.blocks, "pool": kv.is_measuring,
}
del small
cudagraph_utils._teardown_profiling_state(host.runner)
cudagraph_utils._teardown_profiling_state(card.runner)
for e in (card, host):
    set_up(e, e.plan)
    e.runner.attn_groups, e.runner.kernel_block_sizes = e.runner.groups, e.runner.sizes
blocks = host.plan.num_blocks
out["pool"] = {
    "log": host_kv.cuda.log[:], "blocks": blocks, "bytes": [b.nbytes for b in kv.pool.buffers],
    "rows": [list(host_kv.rows(host.layers[name]).shape) for name in names],
    "placeholder": [list(host.layers[name].kv_cache.shape) for name in names],
    "stock rows are the cache": host_kv.rows(card.layers[names[0]]) is card.layers[names[0]].kv_cache,
    "during": host.runner.during,
}
before = {name: host_kv.rows(host.layers[name]).data_ptr() for name in names}

# Trap: new blocks are zeroed by the cache on the card. On this box both kinds of memory are on one device.
zeroer = KVBlockZeroer(CPU, (g for groups in host.runner.groups for g in groups), host.runner.sizes, host.layers, blocks)
addresses, strides, pages, *_ = zeroer._meta
ranges = [(b.address, b.address + b.nbytes) for b in kv.pool.buffers]
out["zeroed"] = {"host rows": any(a <= p < z for p in addresses.tolist() for a, z in ranges),
                 "most bytes": max(pages.tolist()) * 4, "block": host.config.cache_config.block_size}

# Trap: the warm-up of the kernels takes its shapes from the cache.
warmed = []
class Kernel:
    def __init__(self, name):
        self.name = name
    def warmup(self, *args, **meta):
        if "HEAD_DIM" in meta:
            warmed.append([self.name, meta["HEAD_DIM"], meta.get("PAGE_SIZE"), meta.get("GROUP_SIZE")])
ops._qsa_sparse_paged_gqa_splitk_kernel, ops._qsa_merge_splitk_kernel = Kernel("attention"), Kernel("merge")
qsa_indexer.warmup_qsa_mqa_paged_decode = lambda *args, **more: ()
from vllm.model_executor.warmup.qwen4_exp_qsa_warmup import qwen4_exp_qsa_triton_warmup
table = torch.zeros(REQUESTS, -(-4096 // kv.block_tokens), dtype=torch.int32)
sections = []
kv.sections.warm_up, real_warm_up = (lambda *a: sections.append([list(a[0].shape), a[1] is table]) or real_warm_up(*a)), kv.sections.warm_up
for e in (card, host):
    e.runner.block_tables = SimpleNamespace(input_block_tables=[table] * len(e.plan.kv_cache_groups))
    e.runner.decode_query_len, e.runner.max_num_tokens = 1, ROWS
    qwen4_exp_qsa_triton_warmup(SimpleNamespace(get_model=lambda: e.model, model_runner=e.runner, use_v2_model_runner=True))
    out["warmed " + ("host" if e is host else "card")] = [{tuple(w[1:]) == (DIM, e.config.cache_config.block_size, HEADS // KV_HEADS)
                                                          for w in warmed if w[0] == "attention"} == {True}, len(warmed)]
    warmed.clear()
out["warmed sections"] = sections

# -- steps

def builders(e, name):
    layer = e.layers[name]
    with set_current_vllm_config(e.config):
        main = layer.get_attn_backend().get_builder_cls()(e.specs[name], [name], e.config, CPU)
        side = layer.indexer.raw_key_cache
        return main, side.get_attn_backend().get_builder_cls()(e.specs[side.prefix], [side.prefix], e.config, CPU)

build = {id(e): {name: builders(e, name) for name in names} for e in (card, host)}
out["builders"] = [type(build[id(e)][names[0]][0]).__name__ for e in (card, host)]
free = {id(e): torch.randperm(e.plan.num_blocks - 1).add(1).tolist() for e in (card, host)}
WIDTH = kv.selection_width


class Request:
    def __init__(self, number, tokens):
        self.number = number
        self.keys = {n: torch.randn(tokens, KV_HEADS, DIM).bfloat16() for n in names}
        self.values = {n: torch.randn(tokens, KV_HEADS, DIM).bfloat16() for n in names}
        self.tokens, self.done, self.table = tokens, 0, {id(card): [], id(host): []}

def common(e, requests, chunks, extra):
    size = e.config.cache_config.block_size
    table = torch.zeros(len(requests), -(-4096 // size), dtype=torch.int32)
    slots = []
    for n, (r, chunk) in enumerate(zip(requests, chunks)):
        own = r.table[id(e)]
        while len(own) * size < r.done + chunk:
            own.append(free[id(e)].pop())
        table[n, : len(own)] = torch.tensor(own)
        slots += [own[p // size] * size + p % size for p in range(r.done, r.done + chunk)]
    starts = torch.tensor([0, *chunks]).cumsum(0).int()
    lengths = torch.tensor([r.done + c for r, c in zip(requests, chunks)]).int()
    return CommonAttentionMetadata(
        query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=lengths, num_reqs=len(requests),
        num_actual_tokens=sum(chunks), max_query_len=max(chunks), max_seq_len=int(lengths.max()) + 7, block_table_tensor=table,
        slot_mapping=torch.tensor(slots), seq_lens_cpu_upper_bound=None if extra is None else lengths + extra,
        req_idx=np.array([r.number for r in requests]))

def choose(requests, chunks):
    # As the indexer: whole groups of four in any order, then the tokens behind the last whole group.
    rows = []
    for r, chunk in zip(requests, chunks):
        for position in range(r.done, r.done + chunk):
            whole = (position + 1) // 4
            groups = torch.randperm(whole)[: WIDTH // 4]
            token = torch.cat([(groups[:, None] * 4 + torch.arange(4)).flatten(), torch.arange(whole * 4, position + 1)])
            rows.append(torch.cat([token, torch.full((WIDTH - len(token),), -1), torch.tensor([len(token)])]))
    return torch.stack(rows).int()

def truth(requests, chunks, query, gate, name):
    answer, row = [], 0
    for r, chunk in zip(requests, chunks):
        for _ in range(chunk):
            token = SELECTION[row, : int(SELECTION[row, -1])].long()
            k, v = (x[name][token].double().repeat_interleave(HEADS // KV_HEADS, 1) for x in (r.keys, r.values))
            weight = torch.softmax(torch.einsum("hd,nhd->hn", query[row].double(), k) * DIM**-0.5, -1)
            answer.append(torch.einsum("hn,nhd->hd", weight, v) * torch.sigmoid(gate[row].double()).view(HEADS, DIM))
            row += 1
    return torch.stack(answer)

worst = {"card": 0.0, "host": 0.0}
steps, spans_seen = [], []
real_sections, now = kv.sections, SimpleNamespace()
qsa.get_forward_context = lambda: now

class Seen:
    # The real sections; what they are called with is kept.

    def __call__(self, *a, step):
        spans_seen.append([list(s) for s in a[4]])
        used.append(real_sections._fetched(step, a[1], a[4]) is not None)
        return real_sections(*a, step=step)

    def fetch_ahead(self, *a):
        return real_sections.fetch_ahead(*a)

kv.sections, used, fetched = Seen(), [], []
if HOT:
    bring = kv.hot.bring
    kv.hot.bring = lambda layer, pool, table, chosen: (
        bring(layer, pool, table, chosen), fetched.append([kv.hot._count[: len(chosen)].tolist(), chosen[:, -1].tolist()]))
forward_context.get_forward_context = lambda: now

def step(requests, chunks, extra=0, padded=0):
    global SELECTION
    SELECTION = choose(requests, chunks)
    rows = sum(chunks)
    metadata = {}
    for label, e in (("card", card), ("host", host)):
        common_ = common(e, requests, chunks, extra)
        metadata[label] = {}
        for name in names:
            main, side = build[id(e)][name]
            metadata[label] |= {name: main.build(0, common_), e.layers[name].indexer.raw_key_cache.prefix: side.build(0, common_)}
    for name in names:
        query = torch.randn(rows + padded, HEADS, DIM).bfloat16()
        gate = torch.randn(rows + padded, HEADS * DIM).bfloat16()
        key, value = (torch.cat([of(r)[name][r.done : r.done + c] for r, c in zip(requests, chunks)])
                      for of in (lambda r: r.keys, lambda r: r.values))
        right = truth(requests, chunks, query, gate, name)
        for label, e in (("card", card), ("host", host)):
            layer = e.layers[name]
            now.attn_metadata = metadata[label]
            got = torch.full_like(query, float("nan"))
            kinds.clear()
            layer._run_qsa(None, None, query, key, value, got, gate)
            assert not got[rows:].any(), "rows of padding are zero"
            worst[label] = max(worst[label], float((got[:rows].double() - right).abs().max()))
        steps.append([list(chunks), list(kinds)])
    for r, chunk in zip(requests, chunks):
        r.done += chunk

size = kv.block_tokens
a, b, c, d = (Request(number, tokens) for number, tokens in enumerate((2000, 600, 40, 900)))
if HOT:
    step([a], [500])
    step([a, b], [1, 300])
    step([b, a], [1, 1])
    step([a, b, c], [1, 1, 30], padded=5)
    for _ in range(4):
        step([c, b, a], [1, 1, 1], padded=1)
    a.done, a.table = 0, {id(card): [], id(host): []}  # another request with the number of the first
    a.keys, a.values = Request(0, 2000).keys, Request(0, 2000).values
    step([b, a], [1, 70])
    step([a, b], [1, 1])
    print(json.dumps({"worst": worst, "fetched": fetched, "unchanged": before == {
        name: host_kv.rows(host.layers[name]).data_ptr() for name in names}}))
    raise SystemExit
step([a], [2])
step([a], [ROWS], extra=None)
step([a, b], [1, 300])  # decoding beside prefill
step([a, b, c], [1, 1, 30], padded=5)
step([a, b, c, d], [1, 1, 1, 509])
step([a, b, c, d], [1, 1, 1, 1])
step([c, a, b], [1, 200, 280], extra=3)  # two in prefill, bounds above the truth
while a.done + ROWS < a.tokens:
    step([d, a], [1, min(ROWS - 1, size - a.done % size or size)])  # chunks that end at block borders
step([a, d], [1, 100], padded=3)
out["steps"] = {"worst": worst, "count": len(steps), "decode rows": sorted({k[1] for s in steps for k in s[1]}), "spans": spans_seen, "ahead": used,
                "tokens": [r.done for r in (a, b, c, d)], "block": size,
                "blocks a": [len(a.table[id(e)]) for e in (card, host)]}
out["unchanged"] = before == {name: host_kv.rows(host.layers[name]).data_ptr() for name in names}
# Rows of blocks that nobody wrote are still zero, and the placeholder was never written.
used = {block for r in (a, b, c, d) for block in r.table[id(host)]}
rest = [block for block in range(blocks) if block not in used]
out["untouched"] = [len(rest) > 0, any(bool(kv.rows(name)[rest].any()) for name in names),
                    any(bool(host.layers[name].kv_cache.any()) for name in names)]

# Rows that do not add up, and a buffer that moved.
def says(run):
    try:
        run()
    except (AssertionError, RuntimeError, ValueError) as error:
        return str(error)
batch = host_kv.Batch([0, 1, 5, 5, 9], [10, 20, 0, 30], True)
out["spans"] = [[list(s) for s in batch.spans(1, 1, 8)], [list(s) for s in batch.spans(0, 0, 9)], says(lambda: batch.spans(1, 1, 7)),
                says(lambda: batch.spans(2, 1, 8))]
name = names[0]
placeholder = host.layers[name].kv_cache
kept, kv._rows[name] = kv._rows[name], kv._rows[name].clone()
out["moved"] = says(lambda: host_kv.rows(host.layers[name]))
kv._rows[name] = kept
out["other blocks"] = says(lambda: host.layers[name].bind_kv_cache(torch.zeros(blocks + 1, 1, size, 1, dtype=torch.bfloat16)))
host.config.cache_config.num_gpu_blocks = blocks + 1
out["more blocks"] = says(lambda: host.layers[name].bind_kv_cache(torch.zeros(blocks + 1, 1, size, 1, dtype=torch.bfloat16)))
host.config.cache_config.num_gpu_blocks = blocks
out["other shape"] = says(lambda: host.layers[name].bind_kv_cache(torch.zeros(blocks, 1, 16, 1, dtype=torch.bfloat16)))
host.layers[name].bind_kv_cache(placeholder)  # the same again: nothing moves
out["again"] = len(host_kv.cuda.held)

# Shutdown, in the order of the runner's own.
del kept
log = len(host_kv.cuda.log)
shutdown.free_before_shutdown(host.config)
out["shutdown"] = [host_kv.cuda.log[log:], len(host_kv.cuda.held), kv.pool is None, len(host.layers)]
shutdown.free_before_shutdown(card.config)

# Not enough: one line, and nothing stays locked.
poor = engine(True)
poor.runner = runner(poor)
poor.layers[names[0]].host_kv.setting = host_kv.Setting(max_bytes=1000, arena_bytes=1)
out["cap"] = [says(lambda: set_up(poor, poor.plan)), len(host_kv.cuda.held)]
out["arena"] = says(lambda: host_kv.HostKV(host_kv.Setting(1 << 30, 1000), poor.config, poor.layers[names[0]]))
host_kv.cuda.view = lambda tensor: (_ for _ in ()).throw(host_pool.NotLocked("CUDA does not know the memory as page-locked"))
poor.layers[names[0]].host_kv.setting = host_kv.Setting(max_bytes=1 << 30, arena_bytes=1)
out["view"] = [says(lambda: set_up(poor, poor.plan)), len(host_kv.cuda.held)]
print(json.dumps(out))
"""


@pytest.fixture(scope="module")
def seen(run_patched):
    return run_patched(_PROGRAM, card86=True).value


@pytest.fixture(scope="module")
def hot(run_patched, needs_triton):
    needs_triton()
    return run_patched(
        _PROGRAM, card86=True, env={"HOT_ROWS": "1", "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    ).value


def test_decoding_over_rows_that_stay_on_the_card_gives_the_same_answers(hot):
    """Alone, beside prefill, in other rows of the batch, and when a request's number goes to another."""
    assert 0 < hot["worst"]["card"] < 0.02 and hot["worst"]["host"] < 0.02 and hot["unchanged"]
    counts = hot["fetched"][::2]  # of the first layer
    assert counts == hot["fetched"][1::2]
    # Below 2,048 tokens all groups are selected: all of them are fetched at first, then the one that has become whole, if one has.
    assert counts == [
        [[125], [501]],
        [[75, 0], [301, 502]],
        [[0, 0], [503, 302]],
        [[7, 0, 1], [31, 303, 504]],
        [[1, 1, 0], [32, 304, 505]],
        [[0, 0, 0], [33, 305, 506]],
        [[0, 0, 0], [34, 306, 507]],
        [[0], [307]],
        [[17, 1], [71, 308]],
    ]


_WHOSE_ROWS = """
import dataclasses, json
from types import SimpleNamespace
import numpy as np
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers
from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState

state = object.__new__(MambaHybridModelState)
state.vllm_config, state.max_model_len = SimpleNamespace(num_speculative_tokens=0), 100
state._align_mode, state.recoverssm = False, None
batch = InputBatch.make_dummy(3, 5, InputBuffers(max_num_reqs=4, max_num_tokens=8, device=torch.device("cpu")))
batch = dataclasses.replace(batch, idx_mapping_np=np.array([2, 0, 3]))
said = []
builder = SimpleNamespace(build=lambda common_attn_metadata, **more: said.append(common_attn_metadata.req_idx.tolist()),
                          build_for_cudagraph_capture=lambda common: said.append(common.req_idx.tolist()))
group = SimpleNamespace(get_metadata_builder=lambda _: builder, layer_names=["layer"])
for mode, capture in ((CUDAGraphMode.NONE, False), (CUDAGraphMode.FULL, False), (CUDAGraphMode.FULL, True)):
    state.prepare_attn(batch, mode, (torch.zeros(4, 1),), torch.zeros(1, 8), [[group]],
                       SimpleNamespace(kv_cache_groups=[None]), for_capture=capture)
print(json.dumps(said))
"""


def test_the_runner_of_these_models_says_whose_the_rows_of_a_step_are(run_patched):
    """Without it every row is nobody's, and decoding over kept rows attends to nothing."""
    assert run_patched(_WHOSE_ROWS).value == [[2, 0, 3]] * 3


def test_block_size_is_what_the_engine_took(seen):
    settled, computed, row_bytes = seen["block"]
    assert settled == computed == 512
    assert row_bytes == 2 * 2 * 32 * 2


def test_graphs_are_measured_over_one_small_buffer(seen):
    """Trap: caches are bound for that too, with a few blocks; the pool comes later, once, and that buffer goes first."""
    small, pool = 4 * 512 * 256, 325 * 512 * 256
    assert seen["measured"] == {
        "log": [f"register {small}"], "shapes": [[4, 2, 512, 64]] * 2, "one buffer": 1, "bytes": small, "blocks": 4, "pool": True,
    }  # fmt: skip
    log = [f"register {small}", f"unregister {small}", f"register {pool}", f"register {pool}"]
    assert seen["pool"]["log"] == log
    assert seen["pool"]["during"] == [[True, log[:1], None], [False, log, 325]]


def test_one_buffer_a_layer_of_the_engines_own_blocks(seen):
    pool = seen["pool"]
    assert (pool["blocks"], pool["bytes"]) == (325, [325 * 512 * 256] * 2)
    assert pool["rows"] == [[325, 2, 512, 64]] * 2
    assert pool["placeholder"] == [[325, 1, 512, 1]] * 2
    assert pool["stock rows are the cache"]


def test_zeroing_of_new_blocks_stays_on_the_card(seen):
    """Trap: over host rows it would write 131,072 bytes a block and layer through PCIe. The largest page is the pooled keys'."""
    assert seen["zeroed"] == {"host rows": False, "most bytes": 512 // 4 * 32 * 2, "block": 512}


def test_warm_up_takes_the_shapes_of_the_host_rows(seen):
    """Trap: from the placeholder it would take a head size of 0. With K/V on the card nothing changes."""
    for where in ("card", "host"):
        as_wanted, profiles = seen[f"warmed {where}"]
        assert as_wanted and profiles > 4
    assert seen["warmed sections"] == [[[325, 512, 2, 64], True]]


def test_what_is_written_is_read(seen):
    """The right answers, from the K/V that went in, for both; 2 to 1,536 tokens, in prefill, decoding and both at once."""
    steps = seen["steps"]
    assert seen["builders"] == ["Qwen4ExpQSAMetadataBuilder", "HostRowsMetadataBuilder"]
    assert steps["count"] == 20 and steps["decode rows"] == [1, 2, 3, 4]
    assert steps["tokens"] == [1_536, 583, 33, 612]
    assert steps["blocks a"][1] == 3, "over more than one block"
    assert 0 < steps["worst"]["card"] < 0.02  # two roundings to BF16 of values up to 3
    assert steps["worst"]["host"] < 0.02


def test_spans_come_from_lengths_that_the_host_knows(seen):
    spans = seen["steps"]["spans"][::2]  # two layers a step
    assert seen["steps"]["spans"][1::2] == spans
    assert spans[0] == [[0, 0, 2, 2]]
    assert spans[1] == [[0, 0, 512, 514 + 7]], "no bound for the request: the bound of the batch"
    assert spans[2] == [[1, 0, 300, 300]], "rows count from the first in prefill, requests from the first of the batch"
    assert [[1, 0, 200, 718 + 3], [2, 200, 480, 583 + 3]] in spans, "bounds above the truth"
    good, whole, short, gap = seen["spans"]
    assert good == [[1, 0, 4, 20], [3, 4, 8, 30]]  # request 2 is padding
    assert whole == [[0, 0, 1, 10], [1, 1, 5, 20], [3, 5, 9, 30]]
    assert short == "requests have 8 of 7 prefill rows"
    assert gap == "request 2 has rows 4 to 4 where row 0 is next"


def test_the_second_layer_finds_what_was_fetched_ahead_for_it(seen):
    """Where its request had tokens before and the host knows its length; the first layer never does."""
    first, second = seen["steps"]["ahead"][::2], seen["steps"]["ahead"][1::2]
    assert not any(first)
    spans = seen["steps"]["spans"][::2]
    # Step 1 knows no bound for the request. More than 64 tokens before the rows are fetched ahead.
    wanted = [n != 1 and span[0][3] - (span[0][2] - span[0][1]) > 64 for n, span in enumerate(spans)]
    assert second == wanted and 4 <= sum(second) < len(second)


def test_nothing_else_is_written_and_no_address_changes(seen):
    assert seen["untouched"] == [True, False, False]
    assert seen["unchanged"] and seen["again"] == 2
    assert seen["moved"] == "captured graphs read the old rows"
    assert seen["other blocks"] == "model.layers.3.self_attn.attn has 326 blocks of the engine's 325"
    assert (
        "captured graphs read the pool of 325 blocks, and model.layers.3.self_attn.attn has 326" in seen["more blocks"]
    )
    assert (
        "is [325, 1, 16, 1], and with K/V in host memory it has 1 head of 512 tokens. Fix: no --block-size"
        in (seen["other shape"])
    )


def test_memory_is_given_back_at_shutdown(seen):
    log, held, gone, layers = seen["shutdown"]
    assert log == [f"unregister {325 * 512 * 256}"] * 2
    assert (held, gone, layers) == (0, True, 0)


def test_what_does_not_fit_is_one_line_and_leaves_nothing_locked(seen):
    said, held = seen["cap"]
    assert held == 0
    assert said == (
        "flashnext: K/V of 2 QSA layers in 325 blocks of 512 tokens reserves 85196800 bytes of host memory in all stages, and "
        "additional_config.flashnext.host_kv.max_bytes allows 1000. Fix: a smaller --kv-cache-memory-bytes, or a max_bytes of at "
        "least 85196800"
    )
    assert (
        "needs two: at least 262144 bytes. Fix: another additional_config.flashnext.host_kv.arena_bytes"
        in seen["arena"]
    )
    said, held = seen["view"]
    assert (
        "the card cannot read the K/V pool (CUDA does not know the memory as page-locked). Fix: " in said and held == 0
    )
