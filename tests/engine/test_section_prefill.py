"""Section prefill: the attention of prefill rows over K/V taken section by section, against dense softmax in float64.

Cases, their answers and the simulated streams are in tests/support/section_cases.py. The steps in plain PyTorch run
many of them; the Triton kernels run fewer in Triton's interpreter (fp32: its bf16 products are wrong), beside the stock
kernel on the same data.
"""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from entrypoint import activation, model

_PLAIN = """
import json, random, sys
from dataclasses import replace
import torch
import section_cases as cases
from section_cases import Case, SimulatedStreams
from flashnext import section_prefill as sp
from flashnext.section_reference import TorchSteps

found = {"worst": {}, "schedules": {}}

def run(case, dtype):
    call = cases.make(case, dtype)
    cases.section_prefill(case, dtype)(*call.arguments())
    return cases.worst(call.out, cases.answer(case, call))

for name, case in cases.mutants(1, 250).items():
    found["worst"][name] = run(case, torch.float32)
# A whole model's row: 2,048 tokens and three more, of 6,000, in 24 heads of 256; sections of half of 2 blocks of 1,024.
big = Case(((3, 6000), (2, 2049), (1, 700)), block_size=1024, arena_blocks=2, head_dim=256, width=2051, heads_first=True)
found["worst"]["model"] = run(big, torch.float32)
found["bf16"] = {name: run(case, torch.bfloat16) for name, case in cases.mutants(3, 40).items()}

# Streams: whichever of the two runs ahead, within what the events allow, the answer is the same.
streamed = Case(((5, 200), (3, 96), (0, 16), (2, 33)), arena_blocks=2, seed=7)
wanted = cases.answer(streamed, cases.make(streamed, torch.float32))

def scheduled(first, seed, lanes):
    # This chunk's K/V are still being written when the first call comes, and that call is under way when the second comes.
    call = cases.make(streamed, torch.float32)
    kv = call.pool.clone()
    call.pool.fill_(float("nan"))
    made = cases.section_prefill(streamed, torch.float32, lanes.wrap(TorchSteps()))
    made._lanes = lanes
    lanes.enqueue(lambda: call.pool.copy_(kv))
    outs = [call.out.clone(), call.out.clone()]
    for out in outs:
        made(*call.arguments()[:-1], out)
    lanes.run(random.Random(seed), first)
    return max(cases.worst(out, wanted) for out in outs)

def ahead_of_time(first, seed, lanes):
    # A layer's call, and the next layer's sections on their way while that one's own K/V of this chunk are not there yet.
    calls = [cases.make(replace(streamed, seed=n), torch.float32) for n in (7, 8)]
    answers = [cases.answer(replace(streamed, seed=n), call) for n, call in zip((7, 8), calls)]
    made = cases.section_prefill(streamed, torch.float32, lanes.wrap(TorchSteps()))
    made._lanes, step = lanes, object()
    kv = calls[1].pool.clone()
    cases.unwrite(calls[1])
    made(*calls[0].arguments())
    made.fetch_ahead(calls[1].pool, calls[1].block_table, calls[1].spans, step)
    lanes.enqueue(lambda: calls[1].pool.copy_(kv))
    made(*calls[1].arguments(), step=step)
    lanes.run(random.Random(seed), first)
    return max(cases.worst(call.out, answer) for call, answer in zip(calls, answers))

sp.AHEAD_MARGIN = 2
for first in (SimulatedStreams.MAIN, SimulatedStreams.SIDE, None):
    for seed in range(20 if first is None else 1):
        found["schedules"][f"{first} {seed}"] = scheduled(first, seed, SimulatedStreams())
        found["schedules"][f"ahead {first} {seed}"] = ahead_of_time(first, seed, SimulatedStreams())

# What was fetched ahead is used by the call that it was meant for, and by no other.
def fetched_ahead(case, other=lambda call: {}):
    call, step, copies = cases.make(case, torch.float32), object(), []
    wanted, kv = cases.answer(case, call), call.pool.clone()
    cases.unwrite(call)
    made = cases.section_prefill(case, torch.float32)
    copy = made._steps.copy
    made._steps.copy = lambda *a, **k: copies.append((k["start"], k["stop"])) or copy(*a, **k)
    made.fetch_ahead(call.pool, call.block_table, call.spans, step)
    early = len(copies)
    changes = {"step": step} | other(call)
    if changes["step"] is not step:
        call.pool.fill_(float("nan"))
        made.fetch_ahead(call.pool, call.block_table, call.spans, step)  # stale by the time of the call
    call.pool.copy_(kv)
    made(*call.arguments(), **changes)
    return cases.worst(call.out, wanted), early, len(copies) - early

ahead = {name: fetched_ahead(case) for name, case in cases.mutants(5, 80).items()}
found["ahead"] = {name: worst for name, (worst, *_) in ahead.items()}
found["ahead, how often"] = sorted({early for _, early, _ in ahead.values()})
long = Case(((5, 200), (3, 96)), arena_blocks=4, seed=17)
found["ahead, copies"] = fetched_ahead(long)[1:], fetched_ahead(long, lambda call: {"step": None})[1:]
found["ahead of another step"] = [fetched_ahead(long, lambda call: {"step": other})[0] for other in (None, object())]

def broken(**without):
    lanes = SimulatedStreams()
    for name, call in without.items():
        setattr(lanes, name, call)
    return max(scheduled(first, 0, lanes) for first in (SimulatedStreams.MAIN, SimulatedStreams.SIDE))

nothing = lambda *a: None
found["without an event"] = {name: broken(**{name: nothing}) for name in ("await_copy", "await_half", "begin")}

# What is held, and what of it depends on anything.
def held(made):
    tensors = [t for t in vars(made).values() if isinstance(t, torch.Tensor)] + [*made._state, *made._halves]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())

made = cases.section_prefill(Case(((9, 200),), arena_blocks=3), torch.float32)
before = held(made)
for context in (1, 17, 200):
    made(*cases.make(Case(((min(9, context), context),)), torch.float32).arguments())
found["held"] = [before, held(made), made.fixed_bytes]
sizes = dict(block_size=12160, kv_heads=2, head_dim=256, query_heads=24, max_rows=512, selection_width=2051)
found["sizes"] = sp.buffer_bytes(arena_bytes=100_000_000, **sizes)

# The plan.
half = 2 * 12160
def plan(context, half=half):
    steps = sp.plan_steps([sp.Span(0, 0, 1, context)], half, 10**9)
    assert [s.start for s in steps] == [0, *[s.stop for s in steps[:-1]]] and steps[0].first
    assert not any(s.first for s in steps[1:])
    return [len(steps), max(s.stop - s.start for s in steps), steps[-1].stop, steps[0].granule]
found["plans"] = {c: plan(c) for c in (0, 1, 4096, 4097, 32768, 131072, 262144, 1048576)}
found["clamped"] = sp.plan_steps([sp.Span(0, 0, 1, 99), sp.Span(1, 1, 1, 50)], 16, 32)[-1][1:5]
sp.AHEAD_MARGIN = 64
def plan_ahead(rows, context, table_tokens=10**9):
    steps = sp.plan_steps([sp.Span(0, 0, rows, context), sp.Span(1, rows, rows + 2, 5000)], half, table_tokens, True)
    mine = [s for s in steps if s.span.request == 0]
    assert [s.start for s in mine] == [0, *[s.stop for s in mine[:-1]]] and mine[-1].stop == min(context, table_tokens)
    assert [s.start for s in steps[len(mine):]] == ([0, 4096] if table_tokens > 5000 else [0]) and [s.first for s in steps].count(True) == 2
    assert all(0 < s.stop - s.start <= half for s in mine)
    return sum(s.early for s in steps), [s.stop for s in mine[:4]]
found["plans ahead"] = {c: plan_ahead(512, c) for c in (512, 576, 577, 578, 5000, 32768, 131072, 262144)}
found["ahead of a short table"] = plan_ahead(512, 40_000, 1000)

# Refusals.
def refused(call):
    try:
        call()
    except ValueError as error:
        return str(error)

case = Case(((2, 20),))
call = cases.make(case, torch.float32)
made = cases.section_prefill(case, torch.float32)
def changed(**more):
    names = ("query", "pool", "block_table", "selection", "spans", "output_gate", "out")
    return list((dict(zip(names, call.arguments())) | more).values())
found["refused"] = {
    "arena": refused(lambda: sp.SectionPrefill(arena_bytes=49_807_359, device="cpu", **sizes)),
    "heads": refused(lambda: sp.SectionPrefill(arena_bytes=10**8, device="cpu", **sizes | {"kv_heads": 5})),
    "dim": refused(lambda: sp.SectionPrefill(arena_bytes=10**8, device="cpu", **sizes | {"head_dim": 192})),
    "pool": refused(lambda: made(*changed(pool=call.pool.bfloat16()))),
    "selection": refused(lambda: made(*changed(selection=call.selection[:, :-1]))),
    "strided": refused(lambda: made(*changed(out=call.out.transpose(0, 2).contiguous().transpose(0, 2)))),
    "span": refused(lambda: made(*changed(spans=[sp.Span(0, 0, 6, 20)]))),
    "request": refused(lambda: made(*changed(spans=[sp.Span(1, 0, 2, 20)]))),
}
print(json.dumps(found))
"""

_KERNELS = """
import json, math
import torch
import section_cases as cases
from section_cases import Case
from flashnext.section_kernel import TritonSteps, Tuning
from flashnext.section_reference import TorchSteps
import vllm.models.qwen4_exp.nvidia.model
from vllm.models.qwen4_exp.nvidia.ops.qsa import _qsa_sparse_paged_gqa_splitk_kernel

BLOCK_N = 16
small = Tuning(block_n=BLOCK_N, copy_programs=2, list_columns=64, sort_rows=4)

def stock(case, call, out, selection=None):
    selection = call.selection if selection is None else selection
    owner = torch.full((call.query.shape[0],), -1, dtype=torch.int32)
    for span in call.spans:
        owner[span.start : span.stop] = span.request
    keys, values = call.pool.split(case.head_dim, -1)
    gate = call.output_gate.view(call.query.shape)
    strides = [s for t, n in ((call.query, 2), (keys, 3), (values, 3)) for s in t.stride()[:n]]
    _qsa_sparse_paged_gqa_splitk_kernel[(len(owner), case.kv_heads, 1)](
        call.query, keys, values, selection, call.block_table, owner, out, out, out, gate, *strides,
        selection.stride(0), call.block_table.stride(0), *out.stride()[:2], *gate.stride()[:2], len(owner),
        call.pool.shape[0], len(call.block_table), TOPK=case.width, PAGE_SIZE=case.block_size,
        PAGE_TABLE_WIDTH=call.block_table.shape[1], GROUP_SIZE=case.group, HEAD_DIM=case.head_dim,
        NUM_QUERY_HEADS=call.query.shape[1], NUM_SPLITS=1, NUM_TILES=math.ceil(case.width / BLOCK_N), BLOCK_M=16,
        BLOCK_N=BLOCK_N,
    )
    return out

CASES = {
    "one section": Case(((4, 31),), arena_blocks=4, seed=1),
    "several sections and requests": Case(((3, 70), (0, 40), (2, 33)), arena_blocks=2, seed=2),
    "borders, heads first, half a block": Case(((2, 97),), "borders", arena_blocks=3, heads_first=True, seed=3),
    "a section ends with the context": Case(((3, 48),), arena_blocks=2, width=67, seed=4),
    "most sections unselected": Case(((3, 128),), "sparse", arena_blocks=2, kv_heads=1, seed=5),
    "holes and empty rows": Case(((6, 40),), "holes", arena_blocks=2, seed=6),
    "nothing selected": Case(((2, 40),), "nothing", arena_blocks=2, seed=7),
    "a lost block": Case(((3, 60),), arena_blocks=2, lost_block=True, kv_heads=1, seed=8),
    "a chunk of the first tokens": Case(((5, 5),), group=4, head_dim=16, seed=9),
}
found = {}
for name, case in CASES.items():
    call = cases.make(case, torch.float32)
    cases.section_prefill(case, torch.float32, TritonSteps(small))(*call.arguments())
    wanted = cases.answer(case, call)
    rows = ~wanted.isnan().flatten(1).any(1)
    found[name] = {"dense": cases.worst(call.out, wanted)}
    if case.pattern != "holes":  # there, tokens stand behind the count; upstream's tiles read past it
        theirs = stock(case, call, torch.full_like(call.out, float("nan")))
        found[name]["stock"] = cases.worst(call.out[rows], theirs[rows].double())

# One section, tokens in the same order, output in bf16: the same bits as the stock kernel, rounding and gate included.
case = Case(((4, 60),), arena_blocks=8, width=40, seed=11)
call = cases.make(case, torch.float32)
call.selection[:, :-1] = call.selection[:, :-1].sort(1, descending=False).values
ordered = call.selection.clone()
ordered[:4, :-1] = call.selection[:4, :-1]
call.output_gate = call.output_gate.bfloat16()
theirs = stock(case, call, torch.zeros(call.out.shape, dtype=torch.bfloat16), ordered)
steps, prefill = TritonSteps(small), cases.section_prefill(case, torch.float32)
flags = torch.ones(16, dtype=torch.int8)
steps.copy(call.pool, call.block_table, flags, prefill._halves[0], request=0, start=0, stop=60, granule=4)
mine = torch.zeros(call.out.shape, dtype=torch.bfloat16)
tokens = call.selection[:, :-1].contiguous()
steps.attend(call.query, prefill._halves[0], tokens, prefill._state, call.output_gate, mine, rows=range(4), start=0, stop=60)
found["bits"] = [torch.equal(mine[:4], theirs[:4]), float(mine[:4].float().abs().sum())]

# Which tokens a copy moves: the granules that a row selected, within the section, and nothing else.
moved = {}
for heads_first in (False, True):
    case = Case(((2, 90),), "sparse", block_size=16, arena_blocks=6, heads_first=heads_first, seed=12)
    call = cases.make(case, torch.float32)
    call.pool.copy_(torch.randn(call.pool.shape))
    call.selection[0, :5] = torch.tensor([0, 3, 17, 44, 89], dtype=torch.int32)
    call.selection[0, -1] = 5
    for steps in (TritonSteps(small), TorchSteps()):
        flags = torch.full((64,), 1, dtype=torch.int8)
        prefill = cases.section_prefill(case, torch.float32)
        half = prefill._halves[0]
        common = dict(request=0, granule=4)
        steps.mark(call.selection, call.block_table, call.pool, flags, rows=range(1), context=90, **common)
        steps.copy(call.pool, call.block_table, flags, half, start=10, stop=48, **common)
        there = (~half.isnan().flatten(1).any(1)).nonzero().flatten()
        token = there + 10
        blocks = call.block_table[0].long()[token // 16]
        right = torch.equal(half[there], call.pool[blocks, token % 16])
        moved[f"{type(steps).__name__} {heads_first}"] = [token.tolist(), right]
found["moved"] = moved
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def plain(run_patched):
    return run_patched(_PLAIN, env={"OMP_NUM_THREADS": "1"}).value


@pytest.fixture(scope="module")
def kernels(run_patched, needs_triton):
    needs_triton()
    return run_patched(_KERNELS, card86=True, env={"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}).value


# Plain PyTorch


def test_the_algorithm_agrees_with_dense_attention(plain):
    wrong = {name: worst for name, worst in plain["worst"].items() if not worst < 3e-6}
    assert not wrong and len(plain["worst"]) > 200


def test_bf16_stays_within_its_rounding(plain):
    # Values are about 1: 2^-9 for the probabilities, 2^-9 for the output before the gate, 2^-9 behind it.
    wrong = {name: worst for name, worst in plain["bf16"].items() if not worst < 0.03}
    assert not wrong


def test_neither_stream_can_run_into_the_other(plain):
    wrong = {name: worst for name, worst in plain["schedules"].items() if not worst < 3e-6}
    assert not wrong and len(plain["schedules"]) == 44


def test_what_is_fetched_ahead_gives_the_same_answers(plain):
    """K/V of the chunk itself are not there yet when its earlier K/V are fetched."""
    wrong = {name: worst for name, worst in plain["ahead"].items() if not worst < 3e-6}
    assert not wrong and len(plain["ahead"]) == 80
    assert plain["ahead, how often"] == [0, 1, 2]


def test_what_is_fetched_ahead_is_not_fetched_again(plain):
    # 200 tokens: 64 ahead and 136 in sections of half of an arena of 64 tokens, or 200 in such sections; then 96 of another request.
    assert plain["ahead, copies"] == [[2, 5 + 3], [2, 2 + 7 + 3]]


def test_what_was_fetched_for_another_step_is_not_used(plain):
    assert all(worst < 3e-6 for worst in plain["ahead of another step"])


def test_sections_that_are_fetched_ahead(plain):
    """Two at most, of half of the arena at most, up to 64 tokens before the rows themselves."""
    assert plain["plans ahead"] == {
        "512": [0, [512]],
        "576": [0, [576]],
        "577": [1, [1, 577]],
        "578": [2, [1, 2, 578]],
        "5000": [2, [2212, 4424, 5000]],
        "32768": [2, [16_096, 32_192, 32_768]],
        "131072": [2, [24_320, 48_640, 56_832, 65_024]],
        "262144": [2, [24_320, 48_640, 65_024, 81_408]],
    }
    assert plain["ahead of a short table"] == [2, [500, 1000]]


@pytest.mark.parametrize("event", ["await_copy", "await_half", "begin"])
def test_without_this_event_one_does(plain, event):
    assert not plain["without an event"][event] < 1e-3


def test_memory_is_what_it_says_and_stays_so(plain):
    before, after, said = plain["held"]
    assert before == after == said


def test_memory_at_the_sizes_of_the_model(plain):
    sizes = plain["sizes"]
    assert sizes["arena"] == 4 * 24_903_680  # 100,000,000 B are four blocks and a rest
    assert sizes["accumulator"] == 12_582_912
    assert sum(sizes.values()) - sizes["arena"] == 20_097_536
    # ... and the plan counts the same.
    shapes = model.shapes(model.published().text)
    step = activation.Step(rows=512, context=262_144, logits_limit_bytes=64 << 20)
    cards, host = (
        sum(activation.lines(shapes, replace(step, arena_bytes=arena), 0).values()) for arena in (0, sizes["arena"])
    )
    assert host - cards == sum(sizes.values())


@pytest.mark.parametrize(
    ("context", "sections", "longest"),
    [
        (0, 1, 0),  # rows without any context are still written
        (1, 1, 1),
        (4096, 1, 4096),
        (4097, 2, 4096),
        (32_768, 8, 4096),
        (131_072, 16, 8192),
        (262_144, 16, 16_384),
        (1_048_576, 44, 24_320),  # half of an arena of four blocks
    ],
)
def test_sections_cover_the_context(plain, context, sections, longest):
    assert plain["plans"][str(context)][:3] == [sections, longest, context]


def test_flags_cover_any_context(plain):
    assert plain["plans"]["262144"][3] == 4 and plain["plans"]["1048576"][3] == 16


def test_a_context_beyond_the_block_table_is_cut_and_an_empty_span_has_no_section(plain):
    assert plain["clamped"] == [16, 32, 4, False]


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("arena", "at least 49807360 bytes"),
        ("heads", "24 query heads cannot share 5"),
        ("dim", "192"),
        ("pool", "pool must be torch.float32"),
        ("selection", "selection must be"),
        ("strided", "last stride of 1"),
        ("span", "does not fit"),
        ("request", "does not fit"),
    ],
)
def test_refused_with_the_reason(plain, what, words):
    assert words in plain["refused"][what]


def test_the_program_for_a_card_runs(engine_python, tmp_path):
    """tests/gpu/sections.py on the CPU: tiny, in plain PyTorch, without the stock kernel."""
    repository = Path(__file__).resolve().parents[2]
    program, out = repository / "tests" / "gpu" / "sections.py", tmp_path / "out.json"
    command = [engine_python, str(program), "--site", str(repository / "patches"), "--rehearse", "--out", str(out)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = json.loads(out.read_text())
    assert len(found["rows"]) == 6 and len(found["sweeps"]["parts"]) == 4 and found["faults"] == []


# The kernels, in Triton's interpreter

_NAMES = [
    "one section",
    "several sections and requests",
    "borders, heads first, half a block",
    "a section ends with the context",
    "most sections unselected",
    "holes and empty rows",
    "nothing selected",
    "a lost block",
    "a chunk of the first tokens",
]


@pytest.mark.parametrize("name", _NAMES)
def test_kernels_agree_with_dense_attention_and_the_stock_kernel(kernels, name):
    assert kernels[name]["dense"] < 3e-6
    assert kernels[name].get("stock", 0.0) < 3e-6


def test_one_section_in_the_same_order_gives_the_stock_kernels_bits(kernels):
    same, size = kernels["bits"]
    assert same and size > 0


def test_only_selected_granules_are_copied(kernels):
    # tokens 0 and 3: before the section; 17 -> 16..19; 44 -> 44..47; 89: behind it
    expected = [[16, 17, 18, 19, 44, 45, 46, 47], True]
    assert len(kernels["moved"]) == 4
    assert all(moved == expected for moved in kernels["moved"].values()), json.dumps(kernels["moved"])
