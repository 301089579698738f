"""Decides every environment variable and argument of `vllm serve`, from three things only: machine, checkpoint, wishes.

`make_plan` is a pure function: no file, no clock, no hardware. Order of its rules
1. device: wished, else CUDA where there are cards, else a refusal (the CPU is for the demo model only)
2. model: qwen4_exp on cards, anything small on the CPU
3. what the box can never do (`rules`), then the numbers: cards, partition, place of K/V, context, streams, chunk (`choice`, which has
   the objective in words); where nothing fits, why and what would (`refuse`)
4. blocks: the wish, the measured value on its own partition, else what the streams need
5. the fixed flags that this engine needs, each with its reason
6. the user's own arguments, refused by name where they would break one of the above

Every value is a `Setting` with its provenance: measured (on this box), checkpoint, wished, derived, or rule (a rule of thumb
from `rules.yaml`, with where it was measured). Unknown facts stay None and are never guessed: a plan that needs one is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from . import budget, choice, host_ram, refuse, rules
from .budget import Line, bounds
from .card import Cards
from .choice import Asked, Choice, capture_sizes
from .errors import Exit, Refusal
from .extra_args import merge, split
from .machine import Gpu, Machine
from .model import Model, is_target, model_of, published, published_sampling, shapes
from .units import GIB, MIB, format_gib
from .wishes import Wishes

__all__ = [
    "Line",
    "Model",
    "Plan",
    "Setting",
    "Stage",
    "capture_sizes",
    "is_target",
    "make_plan",
    "model_of",
    "published",
    "shapes",
]

NOT_YET = (
    "this release's engine does not read host_kv yet, and the table sits in page-locked RAM: the published checkpoint does not start with "
    "this plan on 24 GB cards (README, What works today)"
)
SOURCES = ("measured", "checkpoint", "wished", "derived", "rule", "fixed")


@dataclass(frozen=True)
class Setting:
    """One environment variable (`kind` env) or argument (`kind` arg, `value` None for a bare flag), and why it is so."""

    kind: str
    name: str
    value: str | None
    source: str
    reason: str


@dataclass(frozen=True)
class Stage:
    """A pipeline rank: its card, its layers [first, last] and its budget; `lines` add up to `used_bytes`."""

    gpu: int
    name: str
    layers: tuple[int, int]
    available_bytes: int
    lines: tuple[Line, ...]

    @property
    def used_bytes(self) -> int:
        return sum(line.bytes for line in self.lines)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The result: settings in the order of the command line, the budget they rest on, and notes for the reader."""

    device: str
    model: str
    model_name: str
    origin: str
    port: int
    settings: tuple[Setting, ...]
    stages: tuple[Stage, ...] = ()
    host: tuple[Line, ...] = ()
    capacity: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def env(self) -> dict[str, str]:
        return {s.name: s.value or "" for s in self.settings if s.kind == "env"}

    @property
    def argv(self) -> list[str]:
        """Arguments after `vllm`: serve, the model, then flags."""
        out = ["serve", self.model]
        for s in self.settings:
            if s.kind == "arg":
                out += [s.name] if s.value is None else [s.name, s.value]
        return out

    def as_dict(self) -> dict[str, Any]:
        """The plan for `--json`: everything `plan` prints, sizes in bytes."""
        return {
            "schema": 1,
            "device": self.device,
            "model": self.model,
            "model_name": self.model_name,
            "origin": self.origin,
            "port": self.port,
            "argv": self.argv,
            "env": self.env,
            "settings": [vars(s) for s in self.settings],
            "stages": [
                {
                    "gpu": s.gpu,
                    "name": s.name,
                    "layers": list(s.layers),
                    "available_bytes": s.available_bytes,
                    "used_bytes": s.used_bytes,
                    "lines": [vars(line) for line in s.lines],
                }
                for s in self.stages
            ],
            "host": [vars(line) for line in self.host],
            "capacity": dict(self.capacity),
            "notes": list(self.notes),
        }


@cache
def thumb() -> Mapping[str, Mapping[str, Any]]:
    """`rules.yaml`."""
    return yaml.safe_load(Path(__file__).with_name("rules.yaml").read_text(encoding="utf-8"))


def _rule(name: str) -> tuple[Any, str]:
    row = thumb()[name]
    return row["value"], row["source"]


def make_plan(machine: Machine, model: Model, wishes: Wishes) -> Plan:
    """The plan for this box, checkpoint and user. Raises Refusal (code 2, 3 or 4)."""
    rules.check_wishes(wishes)
    device = _device(machine, model, wishes)
    return _cpu_plan(machine, model, wishes) if device == "cpu" else _cuda_plan(machine, model, wishes)


def _device(machine: Machine, model: Model, wishes: Wishes) -> str:
    wished = wishes.value("device")
    if wished == "cpu":
        if is_target(model):
            raise Refusal(
                "this model needs NVIDIA cards: its attention, experts and table have CUDA kernels only",
                "use the demo model on the CPU, or a machine with cards (3 x 24 GB)",
                Exit.PLAN,
            )
        return "cpu"
    if machine.gpus:
        if not is_target(model):
            raise Refusal(
                f"{model.architecture or 'this model'} is not the model this kit plans for (qwen4_exp)",
                "point FLASHNEXT_MODEL at a Qwen3.8-Flash-Next checkpoint, or set FLASHNEXT_DEVICE=cpu for the demo",
                Exit.PLAN,
            )
        return "cuda"
    reason = machine.gpu_error or "the driver lists none"
    fix = machine.gpu_fix or "give the container the cards (compose: the service `server`), or run the demo"
    raise Refusal(f"no NVIDIA card can be used: {reason}", fix, Exit.PLAN)


# --- the CPU demo ----------------------------------------------------------------------------------------------------


def _cpu_plan(machine: Machine, model: Model, wishes: Wishes) -> Plan:
    name = _name(model, wishes)
    longest = model.text.need("max_position_embeddings")
    context, source, why = min(longest, 2048), "derived", "the demo needs no more"
    if wishes["context"].wished:
        context, source, why = wishes.value("context"), "wished", wishes["context"].source
        if context > longest:
            raise Refusal(
                f"context {context} is longer than the model's {longest} tokens",
                f"ask for at most {longest}",
                Exit.PLAN,
            )
    ram = machine.ram_available_bytes
    kv_bytes = wishes.value("kv_cache_memory") or GIB
    if ram is not None and ram < kv_bytes + 2 * GIB:
        raise Refusal(
            f"the demo needs {format_gib(kv_bytes + 2 * GIB)} of RAM and {format_gib(ram)} are available",
            "free memory, or raise the container's limit",
            Exit.PLAN,
        )
    settings = [
        Setting(
            "env", "VLLM_CPU_KVCACHE_SPACE", str(max(1, round(kv_bytes / GIB))), "derived", "GiB of K/V for the demo"
        ),
        Setting(
            "env", "TORCH_COMPILE_DISABLE", "1", "fixed", "the image holds no C++ compiler, and the demo needs no speed"
        ),
        *_common_env(wishes),
        *_listen(wishes, name),
        Setting("arg", "--max-model-len", str(context), source, why),
        Setting("arg", "--max-num-seqs", str(wishes.value("streams")), *_asked(wishes, "streams")),
    ]
    return _finish(
        "cpu", model, name, wishes, settings, capacity={"context": context, "streams": wishes.value("streams")}
    )


# --- cards -----------------------------------------------------------------------------------------------------------


def _cuda_plan(machine: Machine, model: Model, wishes: Wishes) -> Plan:
    _refuse_unproven(wishes)
    rules.check_machine(machine, thumb())
    s = shapes(model.text)
    if model.layers is None or model.embed_bytes is None or model.last is None:
        raise Refusal(
            "the sizes of the weights are not known", "use a checkpoint with safetensors files", Exit.CHECKPOINT
        )
    notes = [NOT_YET]
    asked = _asked_of(machine, s, wishes, notes)
    cards = Cards(shapes=s, model=model, thumb=thumb(), expandable=wishes.value("expandable_segments") != "off")
    chosen, search = choice.choose(cards, machine.gpus, asked)
    if chosen is None:
        raise refuse.why(search, machine, asked)
    chosen, kv = _with_pool(cards, machine, wishes, asked, chosen, search)
    rules.check_memlock(machine, kv.host_bytes)
    rules.check_extra(split(wishes.value("extra_args") or ""), s, chosen.layout.block_size, chosen.step.rows, machine)
    notes += _notes(machine, model, s, wishes, chosen, kv)
    stages = tuple(_stage(cards, chosen, kv.blocks, i) for i in range(len(chosen.gpus)))
    flashnext: dict[str, Any] = {}
    if chosen.host_pool:
        flashnext["host_kv"] = {
            "max_bytes": wishes.value("host_kv_max") or kv.host_bytes,
            "arena_bytes": chosen.step.arena_bytes,
        }
    layout, n, streams = chosen.layout, len(chosen.gpus), chosen.streams
    name = _name(model, wishes)
    utilization = _utilization(chosen.gpus)
    context_wish, partition_wish = wishes.value("context"), wishes.value("layer_partition")
    settings = [
        Setting(
            "env",
            "CUDA_DEVICE_ORDER",
            "PCI_BUS_ID",
            "fixed",
            "CUDA's own order puts the fastest card first; the plan counts as NVML does",
        ),
        *_visible(machine, chosen),
        Setting(
            "env",
            "VLLM_PP_LAYER_PARTITION",
            ",".join(map(str, chosen.partition)),
            "wished" if partition_wish else "derived",
            f"{n} stages, table layer on the first; of all splits the one that holds most, then the one whose fullest card is least full",
        ),
        Setting(
            "env", "PYTORCH_CUDA_ALLOC_CONF", f"expandable_segments:{_expandable(wishes)}", *_expandable_why(wishes)
        ),
        Setting(
            "env",
            "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS",
            "0",
            "fixed",
            "the estimate is counted twice (article 5.4)",
        ),
        Setting(
            "env",
            "VLLM_SPARSE_INDEXER_MAX_LOGITS_MB",
            str(_rule("indexer_logits_mib")[0]),
            "rule",
            _rule("indexer_logits_mib")[1],
        ),
        *_p2p(wishes, n),
        *_common_env(wishes),
        *_listen(wishes, name),
        Setting(
            "arg",
            "--pipeline-parallel-size",
            str(n),
            "measured",
            f"{n} cards; 3 divides none of the model's widths, so layers are split",
        ),
        Setting(
            "arg", "--tensor-parallel-size", "1", "fixed", "the host pool and the table belong to one card per stage"
        ),
        Setting(
            "arg",
            "--max-model-len",
            str(chosen.context),
            "wished" if context_wish else ("checkpoint" if chosen.context == s.max_position else "derived"),
            "max_position_embeddings" if chosen.context == s.max_position else "what the memory holds",
        ),
        Setting(
            "arg",
            "--max-num-seqs",
            str(streams),
            *(
                _asked(wishes, "streams")
                if streams == wishes.value("streams")
                else ("derived", f"what the {chosen.limit} holds")
            ),
        ),
        Setting(
            "arg",
            "--max-num-batched-tokens",
            str(chosen.step.rows),
            *_asked(wishes, "chunk", _rule("chunks")[1]),
        ),
        Setting(
            "arg",
            "--no-enable-prefix-caching",
            None,
            "fixed",
            f"with it, prefill is cut at blocks of {layout.block_size}, larger than a step, and is never scheduled",
        ),
        Setting(
            "arg",
            "--gpu-memory-utilization",
            f"{utilization:g}",
            "rule" if utilization == _rule("gpu_memory_utilization")[0] else "measured",
            "no effect on the KV size beside the next line; it must only be below what is free now",
        ),
        Setting("arg", "--kv-cache-memory-bytes", str(kv.bytes), kv.source, kv.reason),
        Setting("arg", "--language-model-only", None, "fixed", "the vision tower would be built on every stage"),
        Setting("arg", "--async-scheduling", None, "fixed", "without it decoding is 15 % slower (article 5.6)"),
        Setting("arg", "--reasoning-parser", "qwen3", "fixed", "thinking arrives as reasoning, not inside the answer"),
        Setting("arg", "--enable-auto-tool-choice", None, "fixed", "tool calls arrive as tool calls"),
        Setting("arg", "--tool-call-parser", "qwen3_coder", "fixed", "the format of this model's template"),
        Setting(
            "arg",
            "--compilation-config",
            json.dumps(
                {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": capture_sizes(streams)},
                separators=(",", ":"),
            ),
            "derived",
            "one graph per batch a stage can see; one JSON, because a second form beside it is dropped silently",
        ),
        Setting(
            "arg",
            "--additional-config",
            json.dumps({"flashnext": flashnext}, separators=(",", ":")),
            "derived",
            "settings of the engine-side package",
        ),
    ]
    if (sampling := _sampling(model)) is not None:
        settings.append(
            Setting(
                "arg",
                "--override-generation-config",
                json.dumps(sampling, separators=(",", ":")),
                "checkpoint" if model.sampling is not None else "rule",
                "the export lost the sampling defaults: without them the whole vocabulary is sampled (article 5.7)",
            )
        )
    usable = kv.blocks - 1  # one is vLLM's null block
    return _finish(
        "cuda",
        model,
        name,
        wishes,
        settings,
        stages=stages,
        host=host_ram.lines(layout, kv.blocks, machine.ram_available_bytes, _rule("engine_ram_bytes")),
        notes=notes,
        capacity={
            "context": chosen.context,
            "streams": streams,
            "block_size": layout.block_size,
            "page_bytes": layout.page_bytes,
            "blocks": kv.blocks,
            "groups": layout.groups,
            # what vLLM prints at start-up, and what can really run
            "tokens": layout.tokens(kv.blocks, chosen.context),
            "concurrency": round(layout.concurrency(kv.blocks, chosen.context), 2),
            "full_requests": round(usable / layout.per_request(chosen.context), 2),
            "whole_requests_at_once": min(streams, usable // layout.per_request(chosen.context)),
            "short_requests_at_once": min(streams, usable // layout.per_request(1)),
            "host_pool_bytes": kv.host_bytes,
            "host_pool_rounded_bytes": host_ram.rounded_bytes(layout, kv.blocks) if chosen.host_pool else 0,
            "partition": list(chosen.partition),
        },
    )


def _asked_of(machine: Machine, s: budget.Shapes, wishes: Wishes, notes: list[str]) -> Asked:
    """What may be chosen from. Raises Refusal (code 3) for what no choice can mend."""
    pools = _pools(machine, wishes, notes)
    context = wishes.value("context")
    if context and context > s.max_position:
        raise Refusal(
            f"context {context} is longer than the {s.max_position} tokens that the model was made for",
            f"ask for at most {s.max_position}",
            Exit.PLAN,
        )
    if (partition := wishes.value("layer_partition")) is not None:
        rules.check_partition(partition, s, len(machine.gpus))
    ram, engine, cache_ram = machine.ram_available_bytes, _rule("engine_ram_bytes")[0], _rule("page_cache_bytes")[0]
    if ram is None:
        raise Refusal(
            "how much RAM is available cannot be read, and the engine needs 15 GiB of it",
            "run where /proc/meminfo is readable",
            Exit.PLAN,
        )
    room = host_ram.room_bytes(ram, engine, cache_ram)
    if room < 0:
        raise Refusal(
            f"{format_gib(ram)} of RAM are available, and the engine alone needs {format_gib(engine + cache_ram)}",
            f"free {format_gib(-room)} or raise the container's limit",
            Exit.PLAN,
        )
    if (most := wishes.value("host_kv_max")) is not None:
        room = min(room, most)
    streams = wishes.value("streams")
    longest = context or s.max_position
    return Asked(
        contexts=(context or min(choice.LEAST_CONTEXT, longest), longest),
        streams=(streams,) if wishes["streams"].wished else tuple(range(streams, 0, -1)),
        chunks=(wishes.value("chunk"),) if wishes["chunk"].wished else tuple(_rule("chunks")[0]),
        pools=pools,
        host_room_bytes=room,
        arena_bytes=wishes.value("arena"),
        logits_limit_bytes=_rule("indexer_logits_mib")[0] * MIB,
        partition=partition,
    )


@dataclass(frozen=True, kw_only=True)
class _Kv:
    """The pool: `bytes` is the flag's value, of which `blocks` whole blocks are used."""

    blocks: int
    bytes: int
    host_bytes: int
    source: str
    reason: str


def _with_pool(
    cards: Cards, machine: Machine, wishes: Wishes, asked: Asked, c: Choice, search: choice.Search
) -> tuple[Choice, _Kv]:
    """The pool of a choice. A wished size that suits host K/V only, or K/V on the cards only, decides where both do the same."""
    try:
        return c, _kv(wishes, c)
    except Refusal:
        others = tuple(pool for pool in asked.pools if pool != c.host_pool)
        other, other_search = (
            choice.choose(cards, machine.gpus, choice.without(asked, pools=others)) if others else (None, None)
        )
        if other is None or other_search.objective(other) < search.objective(c):
            raise
        return other, _kv(wishes, other)


def _kv(wishes: Wishes, c: Choice) -> _Kv:
    """Blocks: the wish where it fits; the measured rule on its partition; else what the streams need and the memory holds."""
    layout, least = c.layout, choice.least_blocks(c.layout, c.context, c.streams)
    wished = wishes.value("kv_cache_memory")
    measured, where = _rule("kv_cache_memory_bytes")
    if wished is not None:
        blocks, size, source, reason = layout.blocks(wished), wished, "wished", wishes["kv_cache_memory"].source
        if blocks < least:
            raise Refusal(
                f"a KV memory of {wished} bytes gives {blocks} blocks, and {c.context} tokens with {c.streams} streams need {least}",
                f"ask for at least {least * layout.page_bytes} bytes, or a shorter context",
                Exit.PLAN,
            )
        if blocks > c.cap:
            raise Refusal(
                f"a KV memory of {wished} bytes needs {format_gib(blocks * layout.page_bytes)} on every card and {format_gib(layout.host_bytes(blocks))} of host RAM; "
                f"the {c.limit} holds {c.cap} of {blocks} blocks",
                f"ask for at most {(c.cap + 1) * layout.page_bytes - 1} bytes",
                Exit.PLAN,
            )
    elif (
        c.host_pool
        and list(c.partition) == thumb()["kv_cache_memory_bytes"]["partition"]
        and c.wanted <= layout.blocks(measured) <= c.cap
    ):
        blocks, size, source, reason = layout.blocks(measured), measured, "rule", where
    else:
        blocks, size, source = c.blocks, c.blocks * layout.page_bytes, "derived"
        bound = (
            f"{c.streams} full requests and a spare block each"
            if blocks == c.wanted
            else f"as many as the {c.limit} holds"
        )
        reason = f"{blocks} blocks of {layout.page_bytes} bytes: {bound}"
    host = layout.host_bytes(blocks) if c.host_pool else 0
    return _Kv(blocks=blocks, bytes=size, host_bytes=host, source=source, reason=reason)


def _stage(cards: Cards, c: Choice, blocks: int, at: int) -> Stage:
    """A stage's budget: the card's lines, then the pool's blocks by what they hold."""
    (a, b), page, gpu = bounds(c.partition)[at], c.layout.stage_pages[at], c.gpus[at]
    whole = min(c.streams, (blocks - 1) // c.layout.per_request(c.context))
    states = max(1, whole) * c.layout.states_per_request
    lines = (
        *cards.lines(c.partition, at, c.step, len(capture_sizes(c.streams))),
        Line(f"KV state of {max(1, whole)} whole requests", states * page, f"derived: {states} blocks of {page} bytes"),
        Line(
            "QSA rows, first blocks of further requests, spare and null block",
            (blocks - states) * page,
            f"derived: {blocks - states} blocks of {page} bytes",
        ),
    )
    return Stage(gpu.index, gpu.name, (a, b - 1), gpu.free_bytes, lines)


def _visible(machine: Machine, c: Choice) -> list[Setting]:
    """Cards that are left out must not be seen by the engine, which takes the first ones."""
    if len(c.gpus) == len(machine.gpus):
        return []
    names = [g.uuid or str(g.index if g.nvml_index is None else g.nvml_index) for g in c.gpus]
    left = [g for g in machine.gpus if g not in c.gpus]
    words = ", ".join(f"{g.index} ({format_gib(g.free_bytes)} free)" for g in left)
    return [Setting("env", "CUDA_VISIBLE_DEVICES", ",".join(names), "derived", f"card {words} stays idle")]


def _notes(machine: Machine, model: Model, s: budget.Shapes, wishes: Wishes, c: Choice, kv: _Kv) -> list[str]:
    """What a reader should know of the choice beside its numbers."""
    out = []
    if len(c.gpus) < len(machine.gpus):
        idle = len(machine.gpus) - len(c.gpus)
        groups = len(budget.groups(s))
        why = (
            f"the model has {groups} groups of layers"
            if len(machine.gpus) > groups
            else "the others hold more without it"
        )
        out.append(f"{idle} of {len(machine.gpus)} cards stay idle: {why}")
    if c.context < s.max_position and not wishes["context"].wished:
        need = choice.least_blocks(c.layout, s.max_position, c.streams)
        each = c.layout.page_bytes if c.limit == "card" else c.layout.host_bytes(1)
        out.append(
            f"context lowered from {s.max_position} to {c.context}: the {c.limit} holds {c.cap} blocks, the whole needs {need}, "
            f"{format_gib(max(0, need - c.cap) * each)} more"
        )
    if c.streams < wishes.value("streams"):
        out.append(f"streams lowered from {wishes.value('streams')} to {c.streams}: the {c.limit} holds {c.cap} blocks")
    if not wishes["chunk"].wished and c.step.rows < _rule("chunks")[0][0]:
        out.append(
            f"steps of {c.step.rows} tokens leave room for the rest: prefill is slower than with {_rule('chunks')[0][0]}"
        )
    whole = min(c.streams, (kv.blocks - 1) // c.layout.per_request(c.context))
    if whole < c.streams:
        out.append(
            f"{whole} of {c.streams} streams run at once where all are {c.context} tokens long; the others wait for blocks"
        )
    if c.host_pool:
        out.append(host_ram.note(c.layout, kv.blocks))
    elif wishes.value("host_kv") == "auto" and not machine.wsl:
        out.append(
            f"K/V stay on the cards, which hold them: {format_gib(kv.blocks * c.layout.page_bytes)} on the fullest"
        )
    out += rules.check_table_disk(machine, model.table_bytes, _left_bytes(machine, c, kv), thumb(), s)
    return out


def _left_bytes(machine: Machine, c: Choice, kv: _Kv) -> int:
    """RAM that is left as page cache."""
    return host_ram.lines(c.layout, kv.blocks, machine.ram_available_bytes, _rule("engine_ram_bytes"))[-1].bytes


def _refuse_unproven(wishes: Wishes) -> None:
    """The mapped table gave wrong tokens while decoding on two cards (docs/gpu.md): no plan turns it on before that is mended."""
    if wishes.value("table"):
        raise Refusal(
            f"{wishes['table'].source} asks for the table on disk, which decodes wrong tokens in this release (docs/gpu.md)",
            "leave it out",
            Exit.PLAN,
        )


def _pools(machine: Machine, wishes: Wishes, notes: list[str]) -> tuple[bool, ...]:
    """Where K/V may live: host pool (True) or cards (False)."""
    wished = wishes.value("host_kv")
    if machine.wsl:  # C16
        if wished == "on":
            raise Refusal(
                "K/V in host RAM was asked for, and WSL2 page-locks about 1 GiB at most",
                "run on Linux itself, or set FLASHNEXT_HOST_KV=off and a context that fits on the cards",
                Exit.PLAN,
            )
        notes.append("K/V stays on the cards: WSL2 page-locks about 1 GiB at most")
        return (False,)
    return {"on": (True,), "off": (False,)}.get(wished, (False, True))


def _utilization(gpus: Sequence[Gpu]) -> float:
    """The rule's value, or less where a card has less free now: vLLM refuses to start above the free share."""
    wanted, _ = _rule("gpu_memory_utilization")
    context, _ = _rule("context_bytes")
    share = min((g.free_bytes - context) / (g.total_bytes - (g.reserved_bytes or 0)) for g in gpus)
    return min(wanted, int(share * 100) / 100)


def _expandable(wishes: Wishes) -> str:
    return "False" if wishes.value("expandable_segments") == "off" else "True"


def _expandable_why(wishes: Wishes) -> tuple[str, str]:
    asked = wishes["expandable_segments"]
    if asked.value != "auto":
        return "wished", asked.source
    return (
        "rule",
        "about 100 MiB are lost to fragmentation in long prefill without it (article 5.4); some boxes report slower streams with it: measure",
    )


def _p2p(wishes: Wishes, cards: int) -> list[Setting]:
    if cards < 2 or wishes.value("p2p") == "on":
        return []
    source = "wished" if wishes["p2p"].wished else "fixed"
    return [
        Setting(
            "env",
            "NCCL_P2P_DISABLE",
            "1",
            source,
            "a box can report P2P and block it (BAR1, IOMMU): pipelines hang at set-up; FLASHNEXT_P2P=on to try",
        )
    ]


def _sampling(model: Model) -> dict[str, float] | None:
    """Defaults to put back: those of the publisher that the checkpoint does not set itself; None where it sets all."""
    have = dict(model.sampling or {})
    missing = {k: v for k, v in published_sampling().items() if k not in have}
    return {**missing} if missing else None


# --- both ------------------------------------------------------------------------------------------------------------


def _name(model: Model, wishes: Wishes) -> str:
    if wishes.value("model_name"):
        return wishes.value("model_name")
    return "qwen3.8-flash-next" if is_target(model) else Path(model.path).name or "model"


def _asked(wishes: Wishes, name: str, reason: str = "") -> tuple[str, str]:
    asked = wishes[name]
    return ("wished", asked.source) if asked.wished else ("rule", reason or "default")


def _common_env(wishes: Wishes) -> list[Setting]:
    data = wishes.value("data")
    kept = "compiled kernels are kept on our volume, so that a second start does not compile again"
    return [
        Setting("env", "VLLM_CACHE_ROOT", f"{data}/cache/vllm", "derived", kept),
        Setting("env", "TRITON_CACHE_DIR", f"{data}/cache/triton", "derived", kept),
        Setting("env", "XDG_CACHE_HOME", f"{data}/cache/xdg", "derived", kept),
        Setting(
            "env", "HF_HUB_OFFLINE", "1", "fixed", "the checkpoint is local; nothing is looked up in a hub at start"
        ),
        Setting("env", "VLLM_NO_USAGE_STATS", "1", "fixed", "nothing is reported to anyone unless you turn it on"),
    ]


def _listen(wishes: Wishes, name: str) -> list[Setting]:
    return [
        Setting(
            "arg",
            "--served-model-name",
            name,
            "wished" if wishes["model_name"].wished else "derived",
            "the name in the API",
        ),
        Setting("arg", "--host", wishes.value("host"), *_asked(wishes, "host")),
        Setting("arg", "--port", str(wishes.value("port")), *_asked(wishes, "port")),
        Setting(
            "arg",
            "--shutdown-timeout",
            str(int(wishes.value("drain"))),
            *_asked(wishes, "drain", "running requests may finish; docker stop stays under 15 s"),
        ),
    ]


def _finish(
    device: str,
    model: Model,
    name: str,
    wishes: Wishes,
    settings: list[Setting],
    *,
    stages: tuple[Stage, ...] = (),
    host: tuple[Line, ...] = (),
    capacity: Mapping[str, Any] | None = None,
    notes: Sequence[str] = (),
) -> Plan:
    settings = merge(settings, wishes.value("extra_args") or "", wishes["extra_args"].source)
    return Plan(
        device=device,
        model=model.path,
        model_name=name,
        origin=model.origin,
        port=wishes.value("port"),
        settings=tuple(settings),
        stages=stages,
        host=host,
        capacity=capacity or {},
        notes=tuple(notes),
    )
