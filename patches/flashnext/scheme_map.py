# SPDX-License-Identifier: Apache-2.0
"""Decide whether the engine may trust a compressed-tensors `config_groups`: one module, one scheme, and no surprise.

From `quantization_config` as it stands in config.json, and from vLLM's table of fused layers (packed_modules_mapping).
vLLM keeps one scheme per target string and gives a fused layer the scheme of its first shard, without a word in both
cases; the tensors of the checkpoint then mean something else than what reads them. Rules, in order:

1. Two groups with the same target string must have the same scheme (`refuse_conflicting_targets`).
2. All shards of a fused layer must resolve alike: all ignored or unmatched, or all to one scheme; and a target that
   matches the fused layer's own name, which vLLM tries first, must give that scheme too (`refuse_disagreeing_shards`).
   Shards that only exist in the engine (their names begin with `_`) do not count.
3. All gate, up and down projections of all experts of a layer must resolve alike (`refuse_disagreeing_experts`).

What a correct export of this architecture must carry
-----------------------------------------------------
Names are matched against vLLM's module names, after the prefixes of the Hugging Face names were renamed:

    model.language_model.X -> language_model.model.X      lm_head -> language_model.lm_head     (with the vision tower)
    model.X                -> model.X                     lm_head -> lm_head                    (text only)

Only a target that is a dotted layer path is renamed with them; `re:` targets and plain words are not. So a target is a
regular expression that begins with `.*` and ends with `$` (vLLM anchors the start only: `re:.*in_proj_qkv` without `$`
also takes the fused `in_proj_qkvz`). Each shard of a fused layer is looked up under its checkpoint name, so targets
name shards, never fused layers:

    experts        re:.*\\.mlp\\.experts\\.\\d+\\.(gate|up|down)_proj$
    linear_attn    re:.*\\.linear_attn\\.(in_proj_qkv|in_proj_z|out_proj)$   with in_proj_b and in_proj_a both or neither
    self_attn      re:.*\\.self_attn\\.(q|k|v|o)_proj$
    shared expert  re:.*\\.mlp\\.shared_expert\\.(gate|up|down)_proj$
    mixing, down   re:.*hyper_connection(_mixer)?\\.input_mix_weight_down$
    mixing, up     re:.*hyper_connection(_mixer)?\\.input_mix_weight_up$     in_features is hc_lowrank (320)
    embeddings     re:.*embed_tokens$                                       2, 4 or 8 bits (quantized_vocab.py)
    head           re:.*lm_head$                                            `lm_head` alone would match nothing

    ignore         re:.*block_inject_weight$  re:.*\\.mlp\\.gate$  re:.*\\.shared_expert_gate$  re:.*indexer\\..*
                   re:.*\\.ple\\..*  re:.*visual\\..*  re:^mtp\\..*  re:.*conv1d$

With targets like these, `ignore` is for other readers of the file; vLLM needs it only where a target is a class name.
A module that targets of two groups match gets the first in the file from vLLM and the first in alphabetical order from
the compressed-tensors library: keep targets disjoint.

Errors are ValueError, one line, beginning with `flashnext:`, with the fix at the end.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import regex as re
from compressed_tensors.quantization import QuantizationArgs
from torch import nn
from vllm.model_executor.layers.quantization.utils.config_utils import is_equal_or_regex_match

EXPERT_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_PARTS = ("weights", "input_activations", "output_activations")


def describe(scheme: Mapping[str, Any] | None) -> str:
    """A scheme in few characters: `INT8 g128`, `INT8 per channel`, `not quantized`."""
    weights = scheme.get("weights") if scheme else None
    if weights is None:
        return "not quantized"
    kind, strategy = (str(getattr(value, "value", value)) for value in (weights.type, weights.strategy))
    groups = f"g{weights.group_size}" if (weights.group_size or -1) > 0 else f"per {strategy}"
    text = f"{kind.upper()}{weights.num_bits} {groups}" + ("" if weights.symmetric else " asymmetric")
    inputs = scheme.get("input_activations")
    return text if inputs is None else f"{text}, {inputs.num_bits}-bit inputs"


def _scheme_of_group(group: Mapping[str, Any], default_format: str | None) -> dict[str, Any]:
    def args(name: str) -> QuantizationArgs | None:
        value = group.get(name)
        return None if not value else QuantizationArgs.model_validate(value)

    return {name: args(name) for name in _PARTS} | {"format": group.get("format") or default_format}


def _same(a: Mapping[str, Any] | None, b: Mapping[str, Any] | None, default_format: str | None) -> bool:
    """Whether two schemes are the same; None is "not quantized" and differs from every scheme."""
    if a is None or b is None:
        return a is b
    return a is b or (
        all(a.get(part) == b.get(part) for part in _PARTS)
        and (a.get("format") or default_format) == (b.get("format") or default_format)
    )


def refuse_conflicting_targets(config: Mapping[str, Any]) -> None:
    """Raise ValueError if one target string stands in two groups that do not have the same scheme.

    `config` is the quantization_config of config.json: {"config_groups": {"group_0": {"targets": [...], ...}}, ...}.
    """
    default_format = config.get("format")
    seen: dict[str, tuple[str, dict[str, Any]]] = {}
    for name, group in (config.get("config_groups") or {}).items():
        scheme = _scheme_of_group(group, default_format)
        for target in group.get("targets") or ():
            first, scheme_of_first = seen.setdefault(target, (name, scheme))
            if not _same(scheme_of_first, scheme, default_format):
                raise ValueError(
                    f"flashnext: quantization_config is ambiguous: {first} ({describe(scheme_of_first)}) and {name} "
                    f"({describe(scheme)}) both target `{target}`, and only the last would count. "
                    "Fix: give each group targets of its own"
                )


class Resolver:
    """What vLLM's `should_ignore_layer` and `find_matched_target` say about one unfused name, without a scan.

    Exports that list every expert by name have tens of thousands of targets; a lookup here costs one dictionary access
    and one match per regular expression.
    """

    def __init__(self, quant_config: Any) -> None:
        self.config = quant_config
        self.schemes: Mapping[str, dict[str, Any]] = quant_config.target_scheme_map
        self.ignore = quant_config.ignore
        self.count = len(self.schemes)
        self._order = {target: at for at, target in enumerate(self.schemes)}
        self._patterns = [(at, re.compile(t[3:])) for t, at in self._order.items() if t.startswith("re:")]
        self._targets = list(self.schemes)
        self._ignored = {name for name in self.ignore if not name.startswith("re:")}
        self._ignore_patterns = [re.compile(name[3:]) for name in self.ignore if name.startswith("re:")]
        self._of_class: dict[str, str | None] = {}

    def is_current(self) -> bool:
        config = self.config
        same = config.target_scheme_map is self.schemes and config.ignore is self.ignore
        return same and len(self.schemes) == self.count

    def is_ignored(self, name: str) -> bool:
        return name in self._ignored or any(pattern.match(name) for pattern in self._ignore_patterns)

    def target_of_name(self, name: str) -> str | None:
        """The first target in the file that matches the name as a path or a regular expression."""
        found = [at for at, pattern in self._patterns if pattern.match(name)]
        if name in self._order:
            found.append(self._order[name])
        return self._targets[min(found)] if found else None

    def target(self, name: str, class_name: str) -> str | None:
        """The first target that matches the name; only if there is none, the first that matches the class."""
        return self.target_of_name(name) or self._target_of_class(class_name)

    def _target_of_class(self, class_name: str) -> str | None:
        if class_name not in self._of_class:
            self._of_class[class_name] = next(
                (t for t in self._targets if is_equal_or_regex_match(class_name, t, check_contains=True)), None
            )
        return self._of_class[class_name]

    def target_unless_ignored(self, name: str, class_name: str) -> str | None:
        return None if self.is_ignored(name) else self.target(name, class_name)

    def scheme(self, name: str, class_name: str) -> dict[str, Any] | None:
        """The scheme dictionary, or None if the name is ignored or no target matches."""
        return self.scheme_of(self.target_unless_ignored(name, class_name))

    def scheme_of(self, target: str | None) -> dict[str, Any] | None:
        return None if target is None else self.schemes[target]

    def same(self, a: Mapping[str, Any] | None, b: Mapping[str, Any] | None) -> bool:
        return _same(a, b, self.config.quant_format)

    def named(self, name: str, target: str | None) -> str:
        """`k_proj is INT8 g128 (group_3)`, for a message."""
        group = self.group_of(target)
        return f"{name} is {describe(self.scheme_of(target))}" + (f" ({group})" if group else "")

    def group_of(self, target: str | None) -> str | None:
        """The config group that a target stands in; of a renamed path, the only group with its scheme, else None."""
        if target is None:
            return None
        groups = (self.config.config or {}).get("config_groups", {})
        holding = [name for name, group in groups.items() if target in (group.get("targets") or ())]
        if not holding:
            default_format = self.config.quant_format
            holding = [
                n for n, g in groups.items() if self.same(_scheme_of_group(g, default_format), self.schemes[target])
            ]
            return holding[0] if len(holding) == 1 else None
        return holding[0]


def resolver(quant_config: Any) -> Resolver:
    """The lookup for `quant_config` (a CompressedTensorsConfig), made again if its targets or ignores were replaced."""
    kept = quant_config.__dict__.get("_flashnext_resolver")
    if kept is None or kept.config is not quant_config or not kept.is_current():
        kept = quant_config._flashnext_resolver = Resolver(quant_config)
    return kept


def checkpoint_shards(layer_name: str, packed: Mapping[str, Iterable[str]]) -> list[str]:
    """The checkpoint's modules behind a fused layer; empty for a layer that is not fused."""
    parent, _, last = layer_name.rpartition(".")
    shards = [shard for shard in packed.get(last, ()) if not shard.startswith("_")]
    return [f"{parent}.{shard}" if parent else shard for shard in shards] if len(shards) > 1 else []


def refuse_disagreeing_shards(quant_config: Any, layer: nn.Module, layer_name: str | None) -> None:
    """Raise ValueError if `layer_name` is a fused layer whose shards do not all resolve to the same scheme."""
    shards = checkpoint_shards(layer_name or "", quant_config.packed_modules_mapping)
    if not shards:
        return
    lookup = resolver(quant_config)
    targets = {shard: lookup.target_unless_ignored(shard, type(layer).__name__) for shard in shards}
    of_first = lookup.scheme_of(targets[shards[0]])
    parent = layer_name.rpartition(".")[0]
    named = ", ".join(lookup.named(shard.removeprefix(parent + "."), target) for shard, target in targets.items())
    if not all(lookup.same(of_first, lookup.scheme_of(target)) for target in targets.values()):
        raise ValueError(
            f"flashnext: {layer_name} is one layer in vLLM, but its parts do not have one scheme: {named}. "
            "Fix: quantize these parts alike (or ignore them all), and let one group's targets name them all"
        )
    of_whole = lookup.target_of_name(layer_name)
    if of_first is not None and of_whole is not None and not lookup.same(of_first, lookup.scheme_of(of_whole)):
        raise ValueError(
            f"flashnext: vLLM would read {layer_name} as {describe(lookup.scheme_of(of_whole))}, since target "
            f"`{of_whole}` matches its name, but {named}. Fix: end that target with `$`, or name the parts in it"
        )


def refuse_disagreeing_experts(quant_config: Any, layer: nn.Module, layer_name: str) -> None:
    """Raise ValueError if the projections of the experts of one MoE layer do not all resolve to the same scheme.

    `layer` is vLLM's RoutedExperts, `layer_name` its prefix (`...mlp.experts`). vLLM looks at expert 0 only.
    """
    lookup = resolver(quant_config)
    count = int(layer.moe_config.num_logical_experts)
    reference: tuple[str, str | None] | None = None
    for expert in range(count):
        for projection in EXPERT_PROJECTIONS:
            name = f"{expert}.{projection}"
            target = lookup.target_unless_ignored(f"{layer_name}.{name}", type(layer).__name__)
            if reference is None:
                reference = (name, target)
            elif not lookup.same(lookup.scheme_of(reference[1]), lookup.scheme_of(target)):
                raise ValueError(
                    f"flashnext: the experts of {layer_name} are one layer in vLLM, but do not have one scheme: "
                    f"{lookup.named(*reference)}, {lookup.named(name, target)}. "
                    "Fix: quantize all experts of a layer alike, and let one group's targets name them all"
                )
