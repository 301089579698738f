"""Rows that stay on the card between decoding steps: what is there is what was selected, and nothing is fetched twice.

The kernels run in Triton's interpreter, over steps of requests that come, go, change their row and take another's number.
"""

import pytest

_PROGRAM = """
import json, random
import torch
from flashnext import hot_rows
from flashnext.hot_rows import HotRows

hot_rows.PROGRAMS = 3
GROUPS, RATIO, HEADS, DIM, PAGE, REQUESTS, CONTEXT, LAYERS = 8, 4, 2, 16, 16, 4, 256, 2
WIDTH = GROUPS * RATIO + RATIO
torch.manual_seed(1)
chance = random.Random(1)
out = {"wrong": [], "fetched": [], "steps": 0}
made = HotRows(layers=LAYERS, requests=REQUESTS, context=CONTEXT, kv_heads=HEADS, head_dim=DIM, groups=GROUPS, ratio=RATIO, device="cpu")
tensors = [t for t in vars(made).values() if isinstance(t, torch.Tensor)]
sizes = dict(layers=LAYERS, requests=REQUESTS, context=CONTEXT, kv_heads=HEADS, head_dim=DIM, groups=GROUPS, ratio=RATIO)
out["bytes"] = [sum(t.nbytes for t in tensors), sum(hot_rows.buffer_bytes(**sizes).values())]
addresses = [t.data_ptr() for t in tensors]

BLOCKS = 60
pools = [torch.randn(BLOCKS, HEADS, PAGE, 2 * DIM).bfloat16().transpose(1, 2) for _ in range(LAYERS)]
free = chance.sample(range(BLOCKS), BLOCKS)

class Request:
    def __init__(self, slot, tokens):
        self.slot, self.tokens, self.rows, self.blocks, self.kept = slot, tokens, tokens, [], [set(), set()]
        self.grow()

    def grow(self):
        while len(self.blocks) * PAGE < self.tokens:
            self.blocks.append(free.pop())
        for layer in range(LAYERS):  # the rows of this step are written now
            for token in range(self.tokens - self.rows, self.tokens):
                pools[layer][self.blocks[token // PAGE], token % PAGE] = torch.randn(HEADS, 2 * DIM).bfloat16()

def select(request, layer):
    visible = request.tokens // RATIO
    count = min(visible, GROUPS)
    old = [g for g in request.kept[layer] if g < visible]
    stay = chance.sample(old, min(len(old), chance.randrange(GROUPS + 1), count))
    rest = [g for g in range(visible) if g not in stay]
    groups = stay + chance.sample(rest, count - len(stay))
    chance.shuffle(groups)
    tokens = [g * RATIO + n for g in groups for n in range(RATIO)] + list(range(visible * RATIO, request.tokens))
    return groups, tokens

def step(requests, padded=0, known=True):
    # Prefill is somebody else's; here it only makes a request known.
    starts, lengths = [0], []
    for r in requests:
        starts.append(starts[-1] + r.rows)
        lengths.append(r.tokens)
    made.begin_step([r.slot for r in requests] + [-1] * padded, starts + [starts[-1]] * padded, lengths + [0] * padded if known else None)
    if not known:
        for r in requests:
            r.kept = [set(), set()]
    rows = [r for r in requests if r.rows == 1]
    if not rows:
        return
    assert rows == requests
    table = torch.zeros(len(rows) + padded, CONTEXT // PAGE, dtype=torch.int32)
    for n, r in enumerate(rows):
        table[n, : len(r.blocks)] = torch.tensor(r.blocks)
    for layer in range(LAYERS):
        selection = torch.full((len(rows) + padded, WIDTH), -1, dtype=torch.int32)
        chosen = []
        for n, r in enumerate(rows):
            groups, tokens = select(r, layer)
            selection[n, : len(tokens)] = torch.tensor(tokens)
            selection[n, -1] = len(tokens)
            chosen.append(groups)
        selection[len(rows) :, -1] = chance.choice([0, 5])  # rows of padding hold anything
        made.bring(layer, pools[layer], table, selection)
        kept = made.kept(layer)
        for n, r in enumerate(rows):
            count = int(selection[n, -1])
            translated = made._translated[n]
            place = translated[:count].long()
            token = selection[n, :count].long()
            want = pools[layer][torch.tensor(r.blocks)[token // PAGE], token % PAGE]
            if int(translated[-1]) != count or not torch.equal(kept[r.slot, place], want):
                out["wrong"].append([out["steps"], layer, n])
            out["fetched"].append(int(made._count[n]) - len(set(chosen[n]) - r.kept[layer]))
            r.kept[layer] = set(chosen[n])
        for n in range(len(rows), len(rows) + padded):
            if int(made._translated[n, -1]) != 0:
                out["wrong"].append([out["steps"], layer, "padding"])
    out["steps"] += 1

def decode(requests, times, **more):
    for _ in range(times):
        for r in requests:
            r.tokens, r.rows = r.tokens + 1, 1
            r.grow()
        step(requests, **more)

a = Request(2, 50)
step([a])
decode([a], 6)
decode([a], 3, padded=1)
b = Request(0, 3)  # fewer tokens than a group
step([b])
decode([b, a], 12)
decode([a, b], 4, padded=2)  # other rows of the batch
c = Request(2, 90)  # a has ended; its number, its groups, other tokens
free.extend(a.blocks)
step([c])
decode([c, b], 8)
d = Request(3, 1)  # a prompt of one token is a decoding row from the start
step([d])
decode([d, c, b], 14)
decode([d, c, b], 2, known=False)
decode([b], 5, padded=3)
out["same addresses"] = addresses == [t.data_ptr() for t in tensors]
out["finite"] = all(bool(made.kept(layer).isfinite().all()) for layer in range(LAYERS))

def says(call):
    try:
        call()
    except ValueError as error:
        return str(error)

table = torch.zeros(5, 16, dtype=torch.int32)
out["many"] = says(lambda: made.bring(0, pools[0], table, torch.zeros(5, WIDTH, dtype=torch.int32)))
out["odd"] = says(lambda: HotRows(**sizes | {"groups": 12}, device="cpu"))
published = dict(layers=4, requests=4, context=262_144, kv_heads=2, head_dim=256)
out["published"] = hot_rows.buffer_bytes(**published)
print(json.dumps(out))
"""


@pytest.fixture(scope="module")
def seen(run_patched, needs_triton):
    needs_triton()
    return run_patched(_PROGRAM, env={"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}).value


def test_what_is_kept_is_what_was_selected(seen):
    """Over 50 steps: other rows of the batch, rows of padding, a request's number that goes to another, a first step that decodes."""
    assert seen["wrong"] == [] and seen["steps"] > 50
    assert seen["same addresses"] and seen["finite"]


def test_only_what_the_step_before_did_not_select_is_fetched(seen):
    assert len(seen["fetched"]) > 150 and set(seen["fetched"]) == {0}


def test_memory_is_what_it_says(seen):
    held, said = seen["bytes"]
    assert held == said
    sizes = seen["published"]
    assert (
        sizes["rows"] == 16 * 2_052 * 2_048
    )  # 16 layers and requests, 513 groups of 4 tokens, K and V of 2 heads of 256
    assert sum(sizes.values()) - sizes["rows"] == 4_292_704


def test_what_does_not_fit_is_told(seen):
    assert "by 4 requests" in seen["many"]
    assert seen["odd"] == "a selection of 12 groups is no power of two"
