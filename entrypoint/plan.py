"""Decides every environment variable and argument of `vllm serve`, from machine, checkpoint, wishes, and what lies where a prepared
table file would be.

`make_plan` is a pure function: no file, no clock, no hardware. Order of its rules
1. device: wished, else CUDA where there are cards, else a refusal (the CPU is for the demo model only)
2. model: qwen4_exp on cards, anything small on the CPU
3. where the rows of the n-gram table come from (`table_place`)
4. what the box can never do (`rules`), then the numbers: cards, partition, place of K/V, context, streams, chunk (`choice`, which has
   the objective in words); where nothing fits, why and what would (`refuse`)
5. blocks: the wish, the measured value on its own partition, else what the streams need
6. the fixed flags that this engine needs, each with its reason
7. the user's own arguments, refused by name where they would break one of the above

Every value is a `Setting` with its provenance: measured (on this box), checkpoint, wished, derived, or rule (a rule of thumb
from `rules.yaml`, with where it was measured). Unknown facts stay None and are never guessed: a plan that needs one is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import budget, choice, host_ram, refuse, rules, table_place
from . import pool as pool_
from . import settings as settings_
from .budget import Line
from .card import Cards
from .choice import Asked, capture_sizes
from .errors import Exit, Refusal
from .extra_args import merge, split
from .machine import Machine
from .model import Model, is_target, model_of, published, published_sampling, shapes
from .pool import Stage
from .settings import SOURCES, Setting
from .table_place import Place, Prepared
from .thumb import rule, thumb
from .units import GIB, MIB, format_gib
from .wishes import Wishes

__all__ = [
    "SOURCES",
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
    "published_sampling",
    "shapes",
    "thumb",
]

NOT_YET = "nothing of this plan has run on a 24 GB card yet (README, What works today)"


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
    table: Place | None = None
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
            "table": None if self.table is None else self.table.as_dict(),
            "notes": list(self.notes),
        }


def make_plan(machine: Machine, model: Model, wishes: Wishes, prepared: Prepared | None = None) -> Plan:
    """The plan for this box, checkpoint and user; `prepared` is what table.look found. Raises Refusal (code 2, 3, 4 or 5)."""
    rules.check_wishes(wishes)
    device = _device(machine, model, wishes)
    return _cpu_plan(machine, model, wishes) if device == "cpu" else _cuda_plan(machine, model, wishes, prepared)


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
    if wishes["table"].value != "auto":
        raise Refusal(
            f"table: {wishes['table'].source} is set, and {model.path} has no N-gram table",
            "leave it out",
            Exit.TABLE,
        )
    name = settings_.name_of(model, wishes)
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
    settings = settings_.cpu(wishes, name, kv_bytes, (str(context), source, why))
    return _finish(
        "cpu", model, name, wishes, settings, capacity={"context": context, "streams": wishes.value("streams")}
    )


# --- cards -----------------------------------------------------------------------------------------------------------


def _cuda_plan(machine: Machine, model: Model, wishes: Wishes, prepared: Prepared | None) -> Plan:
    place = table_place.choose(machine.mounts, model.table_bytes or 0, wishes, prepared, machine.wsl)
    pinned = (place.pinned_bytes, "derived: the next power of two") if place else (0, "")
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
    chosen, kv = pool_.with_pool(cards, machine, wishes, asked, chosen, search)
    ram, engine, cache_ram = machine.ram_available_bytes, rule("engine_ram_bytes"), rule("page_cache_bytes")[0]
    host = host_ram.lines(chosen.layout, kv.blocks, ram, engine, pinned)
    notes += pool_.notes(machine, s, wishes, chosen, kv)
    if place is not None:
        table_place.check_ram(place, ram, engine[0], cache_ram, kv.host_bytes)
        notes += [*place.notes, *table_place.check_disk(place, machine.mounts, host[-1].bytes)]
    rules.check_memlock(machine, kv.host_bytes, pinned[0])
    rules.check_extra(
        split(wishes.value("extra_args") or ""),
        s,
        chosen.layout.block_size,
        chosen.step.rows,
        machine,
        place is not None and place.on_disk,
    )
    stages = tuple(pool_.stage(cards, chosen, kv.blocks, i) for i in range(len(chosen.gpus)))
    layout, streams = chosen.layout, chosen.streams
    name = settings_.name_of(model, wishes)
    settings = settings_.cuda(machine, model, wishes, chosen, kv, name, place)
    usable = kv.blocks - 1  # one is vLLM's null block
    return _finish(
        "cuda",
        model,
        name,
        wishes,
        settings,
        stages=stages,
        host=host,
        table=place,
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
    ram, engine, cache_ram = machine.ram_available_bytes, rule("engine_ram_bytes")[0], rule("page_cache_bytes")[0]
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
        chunks=(wishes.value("chunk"),) if wishes["chunk"].wished else tuple(rule("chunks")[0]),
        pools=pools,
        host_room_bytes=room,
        arena_bytes=wishes.value("arena"),
        logits_limit_bytes=rule("indexer_logits_mib")[0] * MIB,
        partition=partition,
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


# --- both ------------------------------------------------------------------------------------------------------------


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
    table: Place | None = None,
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
        table=table,
        notes=tuple(notes),
    )
