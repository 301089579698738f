"""Decides every environment variable and argument of `vllm serve`, from three things only: machine, checkpoint, wishes.

`make_plan` is a pure function: no file, no clock, no hardware. Order of its rules
1. device: wished, else CUDA where there are cards, else a refusal (the CPU is for the demo model only)
2. model: qwen4_exp on cards, anything small on the CPU
3. stages and layers: one stage per card, whole groups, table layers on the first stage, least full worst stage
4. context and blocks: one full request first, then the other streams, bounded by the fullest card and by host RAM
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

from . import budget, rules
from .budget import KvLayout, Shapes, bounds
from .checkpoint import Checkpoint, TextConfig, read_text_config
from .errors import Exit, Refusal
from .extra_args import merge
from .machine import Gpu, Machine
from .units import GIB, MIB, format_gib
from .wishes import Wishes

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


@dataclass(frozen=True, kw_only=True)
class Model:
    """What the plan reads of a checkpoint.

    `weights` are bytes on the cards by place: one entry per decoder layer, then the vocabulary tables; None where the checkpoint
    was not read (a model on the CPU). `origin` says in words where the numbers come from.
    """

    path: str
    origin: str
    architecture: str | None
    model_type: str | None
    text: TextConfig
    layer_bytes: tuple[int, ...] | None = None
    embed_bytes: int | None = None
    head_bytes: int | None = None
    table_bytes: int | None = None
    sampling: Mapping[str, float] | None = None  # what generation_config.json sets of it; None: not known


@dataclass(frozen=True)
class Line:
    """One line of a stage's budget, in bytes, with where the number comes from."""

    what: str
    bytes: int
    source: str


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


@cache
def published() -> Model:
    """The published checkpoint as a `Model`, for plans without one at hand (`published.yaml`)."""
    doc = yaml.safe_load(Path(__file__).with_name("published.yaml").read_text(encoding="utf-8"))
    config = doc["text_config"]
    config["layer_types"] = config["layer_types"]["repeat"] * config["layer_types"]["times"]
    text = read_text_config(config, "published.yaml")
    w = doc["weights"]
    body = w["total_bytes"] - w["embed_bytes"] - w["head_bytes"]
    layers = text.need("num_hidden_layers")
    shares = [body // layers] * layers
    shares[0] += body - sum(shares)
    return Model(
        path="/model",
        origin="the published checkpoint's account (no checkpoint was read)",
        architecture=doc["architectures"][0],
        model_type=doc["model_type"],
        text=text,
        layer_bytes=tuple(shares),
        embed_bytes=w["embed_bytes"],
        head_bytes=w["head_bytes"],
        table_bytes=w["table_bytes"],
        sampling=None,
    )


@cache
def published_sampling() -> Mapping[str, float]:
    """Sampling defaults that the model's publisher recommends for thinking mode."""
    return yaml.safe_load(Path(__file__).with_name("published.yaml").read_text(encoding="utf-8"))["sampling"]


def shapes(text: TextConfig) -> Shapes:
    """The numbers of a text config that the arithmetic needs. Raises Refusal (code 4) naming a missing key."""
    layers = text.need("num_hidden_layers")
    full = text.attention_layers
    if not full:
        raise Refusal(
            "config.json names no full-attention layer (layer_types)",
            "use the config.json of the published checkpoint",
            Exit.CHECKPOINT,
        )
    return Shapes(
        layer_types=tuple("full_attention" if i in set(full) else "linear_attention" for i in range(layers)),
        max_position=text.need("max_position_embeddings"),
        num_key_value_heads=text.need("num_key_value_heads"),
        head_dim=text.need("head_dim"),
        linear_num_key_heads=text.need("linear_num_key_heads"),
        linear_num_value_heads=text.need("linear_num_value_heads"),
        linear_key_head_dim=text.need("linear_key_head_dim"),
        linear_value_head_dim=text.need("linear_value_head_dim"),
        linear_conv_kernel=text.need("linear_conv_kernel_dim"),
        ssm_bytes=budget.FP32_BYTES if "32" in (text.mamba_ssm_dtype or "float32") else budget.BF16_BYTES,
        indexer_head_dim=text.need("indexer_head_dim"),
        indexer_compress_ratio=text.need("indexer_compress_ratio"),
        table_layer_ids=text.ple_layer_ids or (),
    )


def model_of(checkpoint: Checkpoint) -> Model:
    """A checkpoint's facts in the plan's terms: bytes on the cards by place. Vision, drafts and the table stay off the cards."""
    layer_bytes = embed = head = table = None
    if checkpoint.tensors:
        w = checkpoint.weights
        layer_bytes = tuple(sum(n for category, n in layer.items() if category != "table") for layer in w.layers)
        embed, table = w.outside.get("embed", 0), w.of("table")
        head = w.outside.get("head", 0) or embed
        rest = sum(
            n for category, n in w.outside.items() if category not in {"embed", "head", "table", "vision", "mtp"}
        )
        head += rest  # the final norm and mixer sit with the head
    return Model(
        path=checkpoint.path,
        origin="the checkpoint's headers",
        architecture=checkpoint.architectures[0] if checkpoint.architectures else None,
        model_type=checkpoint.model_type,
        text=checkpoint.text,
        layer_bytes=layer_bytes,
        embed_bytes=embed,
        head_bytes=head,
        table_bytes=table,
        sampling={k: v for k, v in (checkpoint.generation or {}).items() if k in published_sampling()},
    )


def capture_sizes(streams: int) -> list[int]:
    """Graph sizes for every batch one stage can see: powers of two below `streams`, and `streams`."""
    sizes = {streams}
    n = 1
    while n < streams:
        sizes.add(n)
        n *= 2
    return sorted(sizes)


def make_plan(machine: Machine, model: Model, wishes: Wishes) -> Plan:
    """The plan for this box, checkpoint and user. Raises Refusal (code 2, 3 or 4)."""
    rules.check_wishes(wishes)
    device = _device(machine, model, wishes)
    return _cpu_plan(machine, model, wishes) if device == "cpu" else _cuda_plan(machine, model, wishes)


def is_target(model: Model) -> bool:
    return (model.model_type or "").startswith("qwen4_exp") or "Qwen4Exp" in (model.architecture or "")


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
    if model.layer_bytes is None or model.embed_bytes is None or model.head_bytes is None:
        raise Refusal(
            "the sizes of the weights are not known", "use a checkpoint with safetensors files", Exit.CHECKPOINT
        )
    notes = [NOT_YET]
    host_pool = _host_pool(machine, wishes, notes)
    gpus = list(machine.gpus)
    if len(gpus) > len(budget.groups(s)):
        notes.append(
            f"{len(gpus) - len(budget.groups(s))} of {len(gpus)} cards stay idle: the model has {len(budget.groups(s))} groups of layers"
        )
        gpus = gpus[: len(budget.groups(s))]
    context_wish = wishes.value("context")
    if context_wish and context_wish > s.max_position:
        raise Refusal(
            f"context {context_wish} is longer than the {s.max_position} tokens that the model was made for",
            f"ask for at most {s.max_position}",
            Exit.PLAN,
        )
    context = context_wish or s.max_position
    streams, chunk = wishes.value("streams"), wishes.value("chunk")
    arena = wishes.value("arena") if host_pool else 0

    wished_partition = wishes.value("layer_partition")
    if wished_partition:
        rules.check_partition(wished_partition, s, len(gpus))
    best = _place(s, model, gpus, wished_partition, arena)
    partition, stages = best
    kv = _blocks(machine, s, wishes, host_pool, partition, stages, context, streams, notes)
    stages = tuple(
        Stage(
            st.gpu,
            st.name,
            st.layers,
            st.available_bytes,
            (*st.lines, Line("KV state and index keys", kv.card_bytes, kv.source)),
        )
        for st in stages
    )

    name = _name(model, wishes)
    n = len(gpus)
    utilization = _utilization(gpus)
    memory_source = "wished" if wishes["kv_cache_memory"].wished else kv.source
    partition_text = ",".join(map(str, partition))
    flashnext: dict[str, Any] = {}
    if host_pool:
        flashnext["host_kv"] = {
            "max_bytes": wishes.value("host_kv_max") or kv.host_bytes,
            "arena_bytes": arena
            // (kv.layout.block_size * kv.layout.host_row_bytes)
            * kv.layout.block_size
            * kv.layout.host_row_bytes,
        }
    settings = [
        Setting(
            "env",
            "CUDA_DEVICE_ORDER",
            "PCI_BUS_ID",
            "fixed",
            "CUDA's own order puts the fastest card first; the plan counts as NVML does",
        ),
        Setting(
            "env",
            "VLLM_PP_LAYER_PARTITION",
            partition_text,
            "wished" if wished_partition else "derived",
            f"{n} stages of whole groups, table layer on the first; the fullest stage is the least full that way",
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
            str(kv.context),
            "wished" if context_wish else ("checkpoint" if kv.context == s.max_position else "derived"),
            "max_position_embeddings" if kv.context == s.max_position else "what the memory holds",
        ),
        Setting("arg", "--max-num-seqs", str(streams), *_asked(wishes, "streams")),
        Setting(
            "arg",
            "--max-num-batched-tokens",
            str(chunk),
            *_asked(wishes, "chunk", "256 costs a third of prefill, 1,568 costs 470 MiB (article 5.4)"),
        ),
        Setting(
            "arg",
            "--no-enable-prefix-caching",
            None,
            "fixed",
            "with it, prefill is cut at blocks larger than a step and is never scheduled",
        ),
        Setting(
            "arg",
            "--gpu-memory-utilization",
            f"{utilization:g}",
            "rule" if utilization == _rule("gpu_memory_utilization")[0] else "measured",
            "no effect on the KV size beside the next line; it must only be below what is free now",
        ),
        Setting("arg", "--kv-cache-memory-bytes", str(kv.card_bytes), memory_source, kv.reason),
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
    return _finish(
        "cuda",
        model,
        name,
        wishes,
        settings,
        stages=stages,
        host=kv.host_lines,
        notes=notes,
        capacity={
            "context": kv.context,
            "streams": streams,
            "block_size": kv.layout.block_size,
            "page_bytes": kv.layout.page_bytes,
            "blocks": kv.blocks,
            "full_requests": round((kv.blocks - 1) / kv.layout.per_request(kv.context), 2),
            "host_pool_bytes": kv.host_bytes,
            "partition": list(partition),
        },
    )


def _refuse_unproven(wishes: Wishes) -> None:
    """The mapped table gave wrong tokens while decoding on two cards (docs/gpu.md): no plan turns it on before that is mended."""
    if wishes.value("table"):
        raise Refusal(
            f"{wishes['table'].source} asks for the table on disk, which decodes wrong tokens in this release (docs/gpu.md)",
            "leave it out",
            Exit.PLAN,
        )


def _host_pool(machine: Machine, wishes: Wishes, notes: list[str]) -> bool:
    wished = wishes.value("host_kv")
    if machine.wsl:
        if wished == "on":
            raise Refusal(
                "K/V in host RAM was asked for, and WSL2 page-locks about 1 GiB at most",
                "run on Linux itself, or set FLASHNEXT_HOST_KV=off and a context that fits on the cards",
                Exit.PLAN,
            )
        notes.append("K/V stays on the cards: WSL2 page-locks about 1 GiB at most")
        return False
    return wished != "off"


def _fixed_lines(s: Shapes, model: Model, part: Sequence[int], stage: int, arena: int) -> tuple[Line, ...]:
    """Everything on a stage's card but the KV pool."""
    start, stop = bounds(part)[stage]
    lines = [Line(f"weights of layers {start}-{stop - 1}", sum(model.layer_bytes[start:stop]), model.origin)]
    if stage == 0:
        lines.append(Line("embedding", model.embed_bytes, model.origin))
    if stage == len(part) - 1:
        lines.append(Line("output head", model.head_bytes, model.origin))
    names = ["workspace_bytes", "activation_peak_bytes", "graph_bytes", "context_bytes"]
    if 0 < stage < len(part) - 1:
        names.append("middle_stage_bytes")
    lines += [Line(n.removesuffix("_bytes").replace("_", " "), *_rule(n)) for n in names]
    # The article's activation peak already holds its 96 MiB arena; only a larger wish costs more.
    if arena > 96 * MIB:
        lines.append(Line("arena above 96 MiB", arena - 96 * MIB, "wished"))
    return tuple(lines)


def _place(
    s: Shapes, model: Model, gpus: Sequence[Gpu], wished: tuple[int, ...] | None, arena: int
) -> tuple[tuple[int, ...], tuple[Stage, ...]]:
    """The partition whose fullest stage is least full, and its stages without the KV pool."""
    best: tuple[tuple, tuple[int, ...], tuple[Stage, ...]] | None = None
    for part in [wished] if wished else budget.partitions(s, len(gpus)):
        if s.table_layer_ids and part[0] < max(s.table_layer_ids):
            continue
        stages = tuple(
            Stage(g.index, g.name, (a, b - 1), g.free_bytes, _fixed_lines(s, model, part, i, arena))
            for i, (g, (a, b)) in enumerate(zip(gpus, bounds(part), strict=True))
        )
        left = sorted(st.available_bytes - st.used_bytes for st in stages)
        if best is None or left > best[0]:
            best = (left, part, stages)
    if best is None:
        raise Refusal(
            f"no split of {s.layers} layers over {len(gpus)} cards keeps table layer {max(s.table_layer_ids)} on the first",
            f"use fewer cards, or FLASHNEXT_LAYER_PARTITION with a first stage of at least {max(s.table_layer_ids)} layers",
            Exit.PLAN,
        )
    _, part, stages = best
    over = [st for st in stages if st.used_bytes >= st.available_bytes]
    if over:
        worst = max(over, key=lambda st: st.used_bytes - st.available_bytes)
        raise Refusal(
            f"card {worst.gpu} ({worst.name}) has {format_gib(worst.available_bytes)} free, and layers {worst.layers[0]}-{worst.layers[1]} "
            f"need {format_gib(worst.used_bytes)} before any K/V",
            _what_would_fit(s, model, gpus, arena),
            Exit.PLAN,
        )
    return part, stages


def _what_would_fit(s: Shapes, model: Model, gpus: Sequence[Gpu], arena: int) -> str:
    """The fewest cards like the largest of these that would hold the model, in words."""
    largest = max(gpus, key=lambda g: g.free_bytes)
    for n in range(len(gpus) + 1, len(budget.groups(s)) + 1):
        for part in budget.partitions(s, n):
            need = max(sum(line.bytes for line in _fixed_lines(s, model, part, i, arena)) for i in range(n))
            if need < largest.free_bytes:
                return f"{n} cards like {largest.name} hold it ({format_gib(need)} on the fullest)"
    return f"no number of cards like {largest.name} holds it: use cards of 24 GB or more"


@dataclass(frozen=True, kw_only=True)
class _Kv:
    layout: KvLayout
    blocks: int
    card_bytes: int
    host_bytes: int
    context: int
    source: str
    reason: str
    host_lines: tuple[Line, ...]


def _blocks(
    machine: Machine,
    s: Shapes,
    wishes: Wishes,
    host_pool: bool,
    partition: Sequence[int],
    stages: Sequence[Stage],
    context: int,
    streams: int,
    notes: list[str],
) -> _Kv:
    """Blocks of the pool: one full request and a start for every other stream at least, the measured rule at most."""
    layout = budget.kv_layout(s, partition, host_pool)
    room = min(st.available_bytes - st.used_bytes for st in stages)
    card_cap = layout.blocks(room)
    engine_ram, engine_source = _rule("engine_ram_bytes")
    cache_ram, _cache_source = _rule("page_cache_bytes")
    ram = machine.ram_available_bytes
    if ram is None:
        raise Refusal("how much RAM is available cannot be read", "run where /proc/meminfo is readable", Exit.PLAN)
    if ram < engine_ram + cache_ram:
        raise Refusal(
            f"{format_gib(ram)} of RAM are available, and the engine alone needs {format_gib(engine_ram + cache_ram)}",
            f"free {format_gib(engine_ram + cache_ram - ram)} or raise the container's limit",
            Exit.PLAN,
        )
    host_cap_bytes = ram - engine_ram - cache_ram
    if wishes.value("host_kv_max"):
        host_cap_bytes = min(host_cap_bytes, wishes.value("host_kv_max"))
    per_block = layout.host_bytes(1)
    cap = min(card_cap, host_cap_bytes // per_block) if host_pool else card_cap

    def least(tokens: int) -> int:
        # one request of `tokens`, a first block for each other stream, the null block, and one spare so that none waits for ever
        return layout.needed(tokens, 1) + layout.per_request(1) * (streams - 1) + 1

    limit = "card" if card_cap == cap else "host RAM"
    if least(context) > cap:
        fits = max((t for t in range(4096, context, 4096) if least(t) <= cap), default=0)
        short = (least(context) - cap) * (layout.page_bytes if limit == "card" else per_block)
        if wishes["context"].wished or fits == 0:
            fix = f"ask for a context of at most {fits}" if fits else f"fewer streams than {streams}, or more memory"
            raise Refusal(
                f"a request of {context} tokens needs {least(context)} blocks and the {limit} holds {cap}: {format_gib(short)} are missing",
                fix,
                Exit.PLAN,
            )
        notes.append(f"context lowered from {context} to {fits}: the {limit} is {format_gib(short)} short of the whole")
        context = fits
    wished = wishes.value("kv_cache_memory")
    if wished is not None:
        blocks, card_bytes, source, reason = layout.blocks(wished), wished, "wished", wishes["kv_cache_memory"].source
        if blocks < least(context):
            raise Refusal(
                f"a KV memory of {wished} bytes gives {blocks} blocks, and {context} tokens with {streams} streams need {least(context)}",
                f"ask for at least {least(context) * layout.page_bytes} bytes, or a shorter context",
                Exit.PLAN,
            )
        if blocks > cap:
            raise Refusal(
                f"a KV memory of {wished} bytes needs {format_gib(blocks * layout.page_bytes)} on every card and {format_gib(layout.host_bytes(blocks))} of host RAM; "
                f"the {limit} holds {cap} of {blocks} blocks",
                f"ask for at most {(cap + 1) * layout.page_bytes - 1} bytes",
                Exit.PLAN,
            )
    else:
        measured, where = _rule("kv_cache_memory_bytes")
        want = layout.needed(context, streams) + streams
        if list(partition) == thumb()["kv_cache_memory_bytes"]["partition"] and want <= layout.blocks(measured) <= cap:
            blocks, card_bytes, source, reason = layout.blocks(measured), measured, "rule", where
        else:
            blocks = max(least(context), min(want, cap))
            card_bytes = blocks * layout.page_bytes
            bound = (
                f"{streams} full requests and a spare block each" if blocks == want else f"as many as the {limit} holds"
            )
            source, reason = "derived", f"{blocks} blocks of {layout.page_bytes} bytes: {bound}"
    host_bytes = layout.host_bytes(blocks)
    host_lines = [Line("engine processes", engine_ram, engine_source)]
    if host_pool:
        layer = layout.host_layer_bytes(blocks)
        rounded = budget.power_of_two(layer) * layout.qsa_layers
        host_lines.insert(0, Line(f"K/V of {layout.qsa_layers} layers, page-locked exactly", host_bytes, "derived"))
        notes.append(
            f"a pinned allocator that rounds to powers of two would take {format_gib(rounded)} for the same K/V"
        )
    else:
        host_bytes = 0
    used = sum(line.bytes for line in host_lines)
    host_lines.append(Line("left as page cache for the table", ram - used, "measured"))
    return _Kv(
        layout=layout,
        blocks=blocks,
        card_bytes=card_bytes,
        host_bytes=host_bytes,
        context=context,
        source=source,
        reason=reason,
        host_lines=tuple(host_lines),
    )


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
