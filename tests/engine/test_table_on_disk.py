"""Patches 0009 and 0010: the table stays on disk, and the rows of a step are on the card before its forward pass.

One program builds vLLM's whole model, small, deciding as on an 8.6 card with its parameters on the CPU, three times over one
checkpoint of the maker: with upstream's own in-memory table, and with the table in place and in a prepared file. The real
loader loads each. Then steps are run through vLLM's own Qwen4ExpModelState: requests cut into chunks at every kind of place,
tokens that end a segment, several requests a step, padding. What the layer gets must be upstream's rows, bit for bit.
"""

import pytest

from entrypoint import table as kit

MAKE = """
import dataclasses, pathlib, sys
import checkpoints
small = checkpoints.shape_of
checkpoints.shape_of = lambda variant: dataclasses.replace(small(variant), ngram_base=int(sys.argv[2]))
checkpoints.SHARD_BYTES = 1 << 30  # one file: what a disk reads ahead (8 MiB were seen) is then little of it
checkpoints.write("bf16", pathlib.Path(sys.argv[1]))
print()
"""

PROGRAM = r"""
import ctypes, gc, json, mmap, os, sys, types
import numpy as np
import torch
import engine_modules as em
from safetensors import safe_open
from flashnext import mapped_table, table_store
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model_loader

FOLDER, FLAT = sys.argv[1], sys.argv[2]
TOKENS, REQUESTS, DEVICE = 512, 4, torch.device("cpu")


def resident(parts, row_bytes):
    # Share of the table's pages in the page cache, of those that hold nothing but the table.
    inside = there = 0
    for part in parts:
        with open(part.file, "rb") as f:
            m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ)
        view = np.frombuffer(m, np.uint8)
        pages = np.zeros(-(-len(view) // 4096), np.uint8)
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(len(view)),
                                         ctypes.c_void_p(pages.ctypes.data)) == 0
        first, last = -(-part.start // 4096), (part.start + part.rows * row_bytes) // 4096
        inside += max(0, last - first)
        there += int((pages[first:last] & 1).sum())
        del view
        m.close()
    return there / inside


def bytes_read():
    # By read calls, from disk or cache. safetensors 0.8 loads so; the page cache speaks for versions that map.
    with open("/proc/self/io") as f:
        return int(next(line for line in f if line.startswith("rchar")).split()[1])


def built(table):
    more = {} if table is None else {"additional_config": {"flashnext": {"table": table}}}
    # Without a setting the table is in memory, as in upstream's `cpu_offload: false`; with one, that must not matter.
    config = EngineArgs(model=FOLDER, skip_tokenizer_init=True, enforce_eager=True, max_num_batched_tokens=TOKENS,
                        max_num_seqs=REQUESTS, engram_config={"cpu_offload": table is not None},
                        **more).create_engine_config()
    model = em.build_on_cpu(config)
    files = {os.path.join(FOLDER, name) for name in os.listdir(FOLDER) if name.endswith(".safetensors")}
    for file in files:
        with open(file, "rb") as f:
            os.fsync(f.fileno())
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    before = bytes_read()
    with set_current_vllm_config(config):
        get_model_loader(config.load_config).load_weights(model, config.model_config)
    return config, model, bytes_read() - before


def embedding_of(model):
    return model.model.layers[1].ple.ple_embedding


def state_of(config, model):
    from vllm.models.qwen4_exp.nvidia.model_state import Qwen4ExpModelState
    with set_current_vllm_config(config):
        return Qwen4ExpModelState(config, model, None, DEVICE)


def batch(requests, chunks, padded):
    # requests: [(token ids, done)], chunks: tokens of each in this step.
    ids = torch.cat([tokens[done : done + n] for (tokens, done), n in zip(requests, chunks)])
    starts = torch.tensor([0, *np.cumsum(chunks)], dtype=torch.int32)
    all_ids = torch.zeros(REQUESTS, 4096, dtype=torch.int32)
    for r, (tokens, done) in enumerate(requests):
        all_ids[r, : len(tokens)] = tokens
    gpu = lambda values: types.SimpleNamespace(gpu=values)
    states = types.SimpleNamespace(num_computed_tokens=gpu(torch.tensor([d for _, d in requests], dtype=torch.int32)),
                                   all_token_ids=gpu(all_ids))
    padded_ids = torch.zeros(padded, dtype=torch.int32)
    padded_ids[: len(ids)] = ids
    # As a full graph pads: requests of no token at the end.
    inputs = types.SimpleNamespace(num_reqs=len(requests), num_reqs_after_padding=len(requests),
                                   num_tokens=len(ids), num_tokens_after_padding=padded, input_ids=padded_ids,
                                   idx_mapping=torch.arange(len(requests)), query_start_loc=starts)
    return inputs, states


def step(state, ple, requests, chunks, padded):
    inputs, states = batch(requests, chunks, padded)
    got = state.prepare_inputs(inputs, states)
    hidden = torch.zeros(padded, 1)
    args = (hidden, inputs.input_ids, got["query_start_loc"], got["ngram_context"])
    ple.start_prefetch(*args)
    return ple(*args), inputs.num_tokens, args


torch.manual_seed(1)
reference_config, reference, read = built(None)
reference_ple = embedding_of(reference)
reference_state = state_of(reference_config, reference)
rows, columns = reference_ple.ngram_embedding.weight.shape
in_place = table_store.open_checkpoint(FOLDER, "layers.1.", rows, columns)
table_bytes = rows * in_place.row_bytes
out = {"rows": rows, "table_bytes": table_bytes, "reference": {"read": read, "resident": resident(in_place.parts, in_place.row_bytes),
                                   "class": type(reference_ple.ngram_embedding).__name__}}
eos = reference_ple.eos_token_id
TEXTS = []
for length in (300, 57, 1, 130):
    tokens = torch.randint(0, 700, (length,), dtype=torch.int32)
    tokens[torch.rand(length) < 0.1] = eos  # segments of a few tokens
    TEXTS.append(tokens)
WHOLE = []  # the rows of each request, looked up in one piece
for tokens in TEXTS:
    context = torch.full((1, 2), eos, dtype=torch.int32)
    ids = reference_ple.compute_ngram_ids(tokens, torch.tensor([0, len(tokens)]), context)
    WHOLE.append(reference_ple.ngram_embedding.weight[ids].flatten(-2))
assert WHOLE[0].float().std() > 0.01

for name, table in {"checkpoint": {"backing": "checkpoint"}, "flat": {"path": FLAT}}.items():
    config, model, read = built(table)
    ple, said = embedding_of(model), {"read": read}
    embedding = ple.ngram_embedding
    said["class"] = type(embedding).__name__
    said["weight"] = [list(embedding.weight.shape), str(embedding.weight.dtype)]
    said["resident"] = resident(in_place.parts, in_place.row_bytes)
    # (some modules keep a parameter on `meta` until their kernel is chosen)
    pairs = zip(reference.named_parameters(), model.named_parameters(), strict=True)
    equal = [torch.equal(a, b) for (n, a), (_, b) in pairs if "ngram_embedding" not in n and not a.is_meta]
    said["others equal"] = [len(equal), all(equal)]
    said["hashes equal"] = all(torch.equal(a, b) for a, b in zip(reference_ple.buffers(), ple.buffers(), strict=True))
    state = state_of(config, model)
    assert state.tables == [ple]
    assert not embedding.rows_ahead.any(), "zeros before the first step"
    address = embedding.rows_ahead.data_ptr()
    steps = 0
    calls = []
    embedding.bring, bring = (lambda *a: calls.append(a[0]) or bring(*a)), embedding.bring
    for cut in (1, 2, 3, 7, 64, 128):
        done = [0] * len(TEXTS)
        while any(d < len(t) for d, t in zip(done, TEXTS)):
            live = [r for r in range(len(TEXTS)) if done[r] < len(TEXTS[r])]
            chunks = [min(cut + r, len(TEXTS[r]) - done[r]) for r in live]
            padded = min(TOKENS, -(-sum(chunks) // 8) * 8)
            requests = [(TEXTS[r], done[r]) for r in live]
            got, count, args = step(state, ple, requests, chunks, padded)
            upstream, _, _ = step(reference_state, reference_ple, requests, chunks, padded)
            assert got.data_ptr() == address and got.shape == (padded, columns * 16)
            assert torch.equal(got[:count], upstream[:count]), (name, cut, steps)
            assert torch.equal(calls[-1], reference_ple.compute_ngram_ids(args[1][:count], args[2], args[3]))
            assert not got[count:].any(), "rows of padding"
            at = 0
            for r, n in zip(live, chunks):
                assert torch.equal(got[at : at + n], WHOLE[r][done[r] : done[r] + n]), (name, cut, r, done)
                at += n
                done[r] += n
            steps += 1
    said["steps"] = steps
    assert len(calls) == steps, "one gather a step"
    state.prepare_dummy_inputs(2, 16)
    assert not embedding.rows_ahead[:16].any()
    # The largest step there can be.
    tokens = torch.randint(0, 700, (TOKENS,), dtype=torch.int32)
    got, count, args = step(state, ple, [(tokens, 0)], [TOKENS], TOKENS)
    assert torch.equal(got, step(reference_state, reference_ple, [(tokens, 0)], [TOKENS], TOKENS)[0])
    # A disk that fails: an error, and no zeros for rows.
    broken = os.open("/", os.O_RDONLY)
    for descriptor in set(embedding.table.descriptors):
        os.dup2(broken, descriptor)
    try:
        step(state, ple, [(tokens, 0)], [8], 8)
    except OSError as error:
        said["broken"] = error.strerror
    # Nothing may move the buffer under a captured graph.
    embedding.rows_ahead = embedding.rows_ahead.clone()
    try:
        ple(*args)
    except AssertionError as error:
        said["moved"] = str(error)
    out[name] = said

# The second of two stages: no table, nothing to read ahead, and no shard read either.
import kv_specs
kv_specs.set_stages(config, 2)
later = kv_specs.build_model(config, 1)
with set_current_vllm_config(config), safe_open(in_place.parts[0].file, "pt") as file:
    shard = mapped_table.tensor_of(file, next(name for name in file.keys() if ".ngram_embedding.shard_" in name))
    norm = mapped_table.tensor_of(file, next(name for name in file.keys() if name.endswith("norm_key.weight")))
out["second stage"] = {"tables": len(mapped_table.tables_of(later)), "shard": str(shard.device),
                       "shard shape": list(shard.shape), "other": str(norm.device)}
kv_specs.set_stages(config, 1)

out["refused"] = {}
for name, table in {"typo": {"backing": "flat"}, "text": "checkpoint", "no file": {"path": FLAT + "-"}}.items():
    try:
        built(table)
    except ValueError as error:
        out["refused"][name] = str(error)
print(json.dumps(out))
"""


@pytest.fixture(scope="module")
def seen(run_patched, run_pristine, tmp_path_factory):
    base = tmp_path_factory.mktemp("on-disk")
    run_pristine(MAKE, str(base / "model"), "125000")  # 2 million rows of 32 bytes: 61 MiB
    kit.prepare(base / "model", base / "table")
    return run_patched(PROGRAM, str(base / "model"), str(base / "table"), card86=True).value


@pytest.mark.parametrize("backing", ["checkpoint", "flat"])
def test_rows_are_upstreams(seen, backing):
    """All comparisons are in the program; this says that they were made."""
    assert seen["reference"]["class"] == "Qwen4ExpPLEDeviceEmbedding"
    assert seen[backing]["class"] == "MappedTableEmbedding"
    assert seen[backing]["steps"] > 400
    assert seen[backing]["hashes equal"]


@pytest.mark.parametrize("backing", ["checkpoint", "flat"])
def test_loader_leaves_the_table_where_it_is(seen, backing):
    """It reads the rest, and reports the table as loaded: it would refuse a parameter that was not. Of the table's pages
    only those come along that the kernel reads ahead of other tensors."""
    assert seen[backing]["weight"] == [[0, 16], "torch.bfloat16"]
    count, equal = seen[backing]["others equal"]
    assert count > 100 and equal
    assert seen["reference"]["resident"] == 1.0
    assert seen[backing]["resident"] < 0.75
    if seen["reference"]["read"] > seen["table_bytes"]:
        assert seen[backing]["read"] <= seen["reference"]["read"] - seen["table_bytes"] + (1 << 20)


def test_stage_without_the_table(seen):
    assert seen["second stage"] == {
        "tables": 0, "shard": "meta", "shard shape": [-(-seen["rows"] // 128), 16], "other": "cpu",
    }  # fmt: skip


@pytest.mark.parametrize("backing", ["checkpoint", "flat"])
def test_failures(seen, backing):
    assert seen[backing]["broken"].startswith("reading row ")
    assert seen[backing]["moved"] == "captured graphs read the old buffer"


def test_settings_that_are_refused(seen):
    assert seen["refused"]["typo"] == (
        "flashnext: additional_config.flashnext.table is {'backing': 'flat'}. "
        'Fix: {"backing": "checkpoint"} or {"path": FILE}'
    )
    assert "is 'checkpoint'" in seen["refused"]["text"]
    assert "there is no table at" in seen["refused"]["no file"]


SHARED = """
import json, types
from flashnext import mapped_table
said = {}
plain = dict(use_ubatching=False, prefill_context_parallel_size=1)
for name, etp, more in (("plain", 1, {}), ("etp", 2, {}), ("ubatch", 1, {"use_ubatching": True}),
                        ("pcp", 1, {"prefill_context_parallel_size": 2})):
    config = types.SimpleNamespace(parallel_config=types.SimpleNamespace(**(plain | more)))
    try:
        mapped_table._refuse_what_shares_rows(config, etp)
    except ValueError as error:
        said[name] = str(error)
print(json.dumps(said))
"""


def test_ways_of_sharing_a_step_are_refused(run_patched):
    """The buffer is indexed by the step's own tokens, so nothing may split a step or gather ids of several ranks."""
    said = run_patched(SHARED).value
    assert sorted(said) == ["etp", "pcp", "ubatch"]
    for name, what in (("etp", "ETP group"), ("ubatch", "--enable-dbo"), ("pcp", "prefill context parallelism")):
        assert what in said[name] and ". Fix: " in said[name] and "\n" not in said[name]
