"""Decides how a choice is said to `vllm serve`: every environment variable and argument, its source and its reason.

Order: what the engine's process needs to see, its memory settings, our volume and the API, then the flags in the order in which a person
reads them. Numbers come from the choice and its pool (`choice`, `pool`); nothing is computed here but the share of a card's memory.
A source is measured (on this box), checkpoint, wished, derived, rule (rules.yaml) or fixed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .choice import Choice, capture_sizes
from .machine import Gpu, Machine
from .model import Model, is_target, published_sampling
from .pool import Pool
from .table_place import Place
from .thumb import rule
from .units import GIB, format_gib
from .wishes import Wishes

SOURCES = ("measured", "checkpoint", "wished", "derived", "rule", "fixed")


@dataclass(frozen=True)
class Setting:
    """One environment variable (`kind` env) or argument (`kind` arg, `value` None for a bare flag), and why it is so."""

    kind: str
    name: str
    value: str | None
    source: str
    reason: str


def name_of(model: Model, wishes: Wishes) -> str:
    """The name in the API."""
    if wishes.value("model_name"):
        return wishes.value("model_name")
    return "qwen3.8-flash-next" if is_target(model) else Path(model.path).name or "model"


def cpu(wishes: Wishes, name: str, kv_bytes: int, context: tuple[str, str, str]) -> list[Setting]:
    """Of the demo; `context` is the value of --max-model-len, its source and its reason."""
    return [
        Setting(
            "env", "VLLM_CPU_KVCACHE_SPACE", str(max(1, round(kv_bytes / GIB))), "derived", "GiB of K/V for the demo"
        ),
        Setting(
            "env", "TORCH_COMPILE_DISABLE", "1", "fixed", "the image holds no C++ compiler, and the demo needs no speed"
        ),
        *_common_env(wishes),
        *_listen(wishes, name),
        Setting("arg", "--max-model-len", *context),
        Setting("arg", "--max-num-seqs", str(wishes.value("streams")), *_asked(wishes, "streams")),
    ]


def cuda(
    machine: Machine, model: Model, wishes: Wishes, c: Choice, pool: Pool, name: str, table: Place | None
) -> list[Setting]:
    """Of a choice on cards."""
    layout, n, streams, longest = c.layout, len(c.gpus), c.streams, model.text.need("max_position_embeddings")
    flashnext: dict[str, Any] = {}
    if c.host_pool:
        flashnext["host_kv"] = {
            "max_bytes": wishes.value("host_kv_max") or pool.host_bytes,
            "arena_bytes": c.step.arena_bytes,
        }
    if table is not None and table.on_disk:
        flashnext["table"] = table.setting
    utilization = _utilization(c.gpus)
    context_wish, partition_wish = wishes.value("context"), wishes.value("layer_partition")
    settings = [
        Setting(
            "env",
            "CUDA_DEVICE_ORDER",
            "PCI_BUS_ID",
            "fixed",
            "CUDA's own order puts the fastest card first; the plan counts as NVML does",
        ),
        *_visible(machine, c),
        Setting(
            "env",
            "VLLM_PP_LAYER_PARTITION",
            ",".join(map(str, c.partition)),
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
            str(rule("indexer_logits_mib")[0]),
            "rule",
            rule("indexer_logits_mib")[1],
        ),
        *_pinned_table(table),
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
            str(c.context),
            "wished" if context_wish else ("checkpoint" if c.context == longest else "derived"),
            "max_position_embeddings" if c.context == longest else "what the memory holds",
        ),
        Setting(
            "arg",
            "--max-num-seqs",
            str(streams),
            *(
                _asked(wishes, "streams")
                if streams == wishes.value("streams")
                else ("derived", f"what the {c.limit} holds")
            ),
        ),
        Setting(
            "arg",
            "--max-num-batched-tokens",
            str(c.step.rows),
            *_asked(wishes, "chunk", rule("chunks")[1]),
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
            "rule" if utilization == rule("gpu_memory_utilization")[0] else "measured",
            "no effect on the KV size beside the next line; it must only be below what is free now",
        ),
        Setting("arg", "--kv-cache-memory-bytes", str(pool.bytes), pool.source, pool.reason),
        *_loading(machine, table),
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
            "settings of the engine-side package" + (f"; n-gram table {table.reason}" if table is not None else ""),
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
    return settings


def _visible(machine: Machine, c: Choice) -> list[Setting]:
    """Cards that are left out must not be seen by the engine, which takes the first ones."""
    if len(c.gpus) == len(machine.gpus):
        return []
    names = [g.uuid or str(g.index if g.nvml_index is None else g.nvml_index) for g in c.gpus]
    left = [g for g in machine.gpus if g not in c.gpus]
    words = ", ".join(f"{g.index} ({format_gib(g.free_bytes)} free)" for g in left)
    return [Setting("env", "CUDA_VISIBLE_DEVICES", ",".join(names), "derived", f"card {words} stays idle")]


def _utilization(gpus: Sequence[Gpu]) -> float:
    """The rule's value, or less where a card has less free now: vLLM refuses to start above the free share."""
    wanted, _ = rule("gpu_memory_utilization")
    context, _ = rule("context_bytes")
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


def _pinned_table(table: Place | None) -> list[Setting]:
    if table is None or table.on_disk:
        return []
    return [
        Setting("env", "VLLM_PLE_CPU_OFFLOAD", "1", "wished", "upstream's table in page-locked RAM, not on the card")
    ]


def _loading(machine: Machine, table: Place | None) -> list[Setting]:
    """On NFS and Lustre vLLM reads a whole checkpoint ahead that fits into RAM, the table on disk too (weight_utils.py)."""
    mount = machine.mounts.get("model")
    if table is None or not table.on_disk or mount is None or mount.kind != "network":
        return []
    reason = f"without it vLLM may read the whole checkpoint ahead on a network file system, {format_gib(table.table_bytes)} of table included"
    return [Setting("arg", "--safetensors-load-strategy", "lazy", "derived", reason)]


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
