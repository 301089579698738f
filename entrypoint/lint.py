"""Decides whether a checkpoint is the model that it says it is, and whether the engine would read it as it was written.

From the headers, config.json and the small files, as `checkpoint.read_checkpoint` gives them; with `deep` also from every
byte. Rule order of `examine`:
1. Small files: tokenizer, chat template, EOS ids, sampling defaults.
2. The list of weights that the architecture has (architecture.py): present, of its shape, of a dtype that is read; nothing
   more.
   Of the vision tower and the draft head the same, as warnings: text serving loads neither.
3. What each weight is stored as: bits and packing from the width of `weight_packed`, groups from `weight_scale`; the
   experts of a layer one by one, or all in one 3-D tensor as transformers may save them unquantized.
4. quantization_config: what the engine would take each weight for (`Groups`, vLLM's own rules), against 3.
5. Shards that the engine merges, and all experts of a layer, are stored alike.
Another architecture than Qwen4Exp gets 1 only.

A finding that `checkpoint_fix` can mend carries `repair`. The same mistake in many weights is one finding.
"""

from __future__ import annotations

import hashlib
import re
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from .architecture import FUSED, QUANTIZABLE, Part, draft_parts, is_target, parts, vision_parts
from .checkpoint import Checkpoint, Tensors, category_of, without_gc
from .data import data
from .documents import parse_object, quick, read_json, read_text
from .errors import Exit, Refusal
from .units import format_gib

if TYPE_CHECKING:
    from rich.console import Console

BITS = (2, 3, 4, 5, 6, 8)
_FLOATS = frozenset({"BF16", "F16", "F32"})
FETCH_NOTE = ".flashnext-fetch.json"
"""What fetch.py leaves: {"commit": ..., "files": {name: [size, mtime_ns, hash]}}."""

_SHOWN = 3
_TAKE_AGAIN = "download the checkpoint again, all files of one revision"
_EXPORT_AGAIN = "export again from the quantizer's own output; the weights are not what can be read"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One mistake. `repair`: 'config' or 'generation' where the corrected copy of that file mends it."""

    verdict: str
    check: str
    message: str
    fix: str
    repair: str | None = None


class Form(NamedTuple):
    """How one weight is stored. Plain: `bits` is None and `dtype` says it. Packed: `bits` an element, `groups` scales a
    row, `padded` where each 32-bit word holds whole values only (compressed-tensors up to 0.17), None where both
    layouts are one."""

    bits: int | None
    groups: int
    padded: bool | None
    dtype: str
    symmetric: bool = True

    def words(self, inputs: int) -> str:
        """For a person: `INT4 g128`, `INT8 per channel`, `BF16`."""
        if self.bits is None:
            return self.dtype
        size = "per channel" if self.groups == 1 else f"g{inputs // self.groups}"
        return (
            f"INT{self.bits} {size}"
            + (", padded words" if self.padded else "")
            + ("" if self.symmetric else ", zero points")
        )


@dataclass(frozen=True, kw_only=True)
class Stored:
    """Weights of one part that are stored alike: their names and their form."""

    part: Part
    form: Form
    names: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Row:
    """Weights that differ in their numbers only: a line of the printed table."""

    name: str
    count: int
    shape: tuple[int, ...]
    form: str
    config: str


@dataclass(frozen=True, kw_only=True)
class Report:
    path: str
    findings: tuple[Finding, ...]
    rows: tuple[Row, ...] = ()
    total_bytes: int = 0
    files: int = 0
    revision: str | None = None
    took_s: float = 0.0
    hashes: Mapping[str, str] = field(default_factory=dict)

    @property
    def errors(self) -> tuple[Finding, ...]:
        return tuple(f for f in self.findings if f.verdict == "ERROR")

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "findings": [vars(f) for f in self.findings], "rows": [vars(r) for r in self.rows]}


class Findings:
    """Collects mistakes; those of one kind become one finding with a count and the first names."""

    def __init__(self) -> None:
        self._many: dict[tuple[str, str, str, str, str | None], list[str]] = {}
        self.single: list[Finding] = []

    def add(self, verdict: str, check: str, message: str, fix: str, repair: str | None = None) -> None:
        self.single.append(Finding(verdict=verdict, check=check, message=message, fix=fix, repair=repair))

    def weight(self, check: str, what: str, name: str, fix: str, repair: str | None = None, verdict="ERROR") -> None:
        self._many.setdefault((verdict, check, what, fix, repair), []).append(name)

    def weights(self, check: str, what: str, names: Sequence[str], fix: str, repair: str | None = None) -> None:
        for name in names:
            self.weight(check, what, name, fix, repair)

    def all(self) -> tuple[Finding, ...]:
        out = list(self.single)
        for (verdict, check, what, fix, repair), names in self._many.items():
            some = ", ".join(name[:120] for name in names[:_SHOWN])
            more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
            out.append(Finding(verdict=verdict, check=check, message=f"{what}: {some}{more}", fix=fix, repair=repair))
        return tuple(sorted(out, key=lambda f: f.verdict != "ERROR"))


# --- stored forms -----------------------------------------------------------------------------------------------------


def prefix_of(tensors: Tensors) -> str:
    """What stands before `layers.N` and `embed_tokens` in the checkpoint's names."""
    for prefix in ("model.language_model.", "model."):
        if any(f"{prefix}embed_tokens.{end}" in tensors for end in ("weight", "weight_packed")):
            return prefix
    found = next((name for name in tensors if ".layers.0." in name and category_of(name) not in ("mtp", "vision")), "")
    return found.partition("layers.0.")[0] or "model."


def packing(words: int, inputs: int) -> tuple[int, bool | None] | None:
    """(bits, padded) of rows of `inputs` values in `words` 32-bit words; None where no width gives that."""
    for bits in BITS:
        if words == -(-inputs * bits // 32):
            return bits, None if words == -(-inputs // (32 // bits)) else False
    return next(((bits, True) for bits in BITS if words == -(-inputs // (32 // bits))), None)


_PACKED = (".weight", ".weight_packed", ".weight_scale", ".weight_shape", ".weight_zero_point", ".weight_g_idx")
Spec = tuple[str, tuple[int, ...]]


class _Wrong(Exception):
    """(check, what, fix) of a weight that cannot be read."""


def _form(part: Part, specs: Sequence[Spec | None]) -> Form:
    """How a weight is stored, from (dtype, shape) of the tensors that _PACKED names. Raises _Wrong."""
    plain, packed, scale, shape, points, order = specs
    if plain is not None and packed is not None:
        raise _Wrong("names", "weights are there twice, packed and not", "remove the file of another export")
    if plain is not None:
        if plain[1] != part.shape:
            what = f"of shape {list(plain[1])} where config.json gives {list(part.shape)}"
            raise _Wrong("shapes", what, "config.json and weights are of two models: take both from one revision")
        if plain[0] not in _FLOATS and part.kind != "optional":
            raise _Wrong("dtypes", f"stored as {plain[0]}, neither a float nor packed integers", _EXPORT_AGAIN)
        return Form(None, 0, None, plain[0])
    if packed is None or part.kind not in QUANTIZABLE:
        table = ".ngram_embedding." in part.name
        what = "shards of the n-gram table are missing" if table else "weights are missing"
        raise _Wrong("table" if table else "names", what, _TAKE_AGAIN)
    if scale is None or shape is None:
        lacks = "weight_scale" if scale is None else "weight_shape"
        raise _Wrong("names", f"packed weights lack their {lacks}", _TAKE_AGAIN)
    rows, inputs = part.shape
    bits = packing(packed[1][1], inputs) if len(packed[1]) == 2 and packed[0] == "I32" else None
    if bits is None or packed[1][0] != rows:
        what = f"packed as {packed[0]} {list(packed[1])}, which no width of {list(part.shape)} gives"
        raise _Wrong("packing", what, _EXPORT_AGAIN)
    groups = 1 if len(scale[1]) == 1 else scale[1][1] if len(scale[1]) == 2 else 0
    if not groups or scale[1][0] != rows or scale[0] not in _FLOATS:
        raise _Wrong("packing", f"scales of {scale[0]} {list(scale[1])} for {rows} rows", _EXPORT_AGAIN)
    if inputs % groups:
        what = f"{groups} scales for {inputs} inputs: the group size does not divide the row"
        raise _Wrong("group size", what, "quantize it with a group size that divides the row (64 or 32 for 320)")
    if order is not None:
        raise _Wrong("packing", "weights in activation order (weight_g_idx)", "export without actorder")
    return Form(bits[0], groups, bits[1], "I32", points is None)


def _ends(part: Part) -> tuple[str, ...]:
    """What may stand behind a weight's name."""
    if part.kind in ("bare", "optional"):
        return ("",)
    return _PACKED if part.kind in QUANTIZABLE else _PACKED[:1]


def _expert_ends(tensors: Tensors) -> frozenset[str]:
    """Those of _PACKED that an expert's tensor may end with in this checkpoint."""
    tails = {name[-7:] for name in tensors if ".experts." in name}  # no two of _PACKED have the same
    return frozenset(end for end in _PACKED if end[-7:] in tails)


def _stored(
    part: Part, tensors: Tensors, expert_ends: frozenset[str], found: Findings, verdict: str = "ERROR"
) -> tuple[list[Stored], int]:
    """(`part` as it is stored, one entry a form; number of tensors that it takes), with findings for what is wrong."""
    names = part.names()
    # A column for each end, not a row for each name, and none for an end that no expert has: the lookups take the time.
    asked = expert_ends if part.kind == "experts" else _ends(part)
    columns = [tensors.specs(names, end) if end in asked else [None] * len(names) for end in _ends(part)]
    rows = list(zip(*columns, strict=True))
    # As a rule all are alike, which is seen without hashing one.
    counts = {rows[0]: len(rows)} if rows.count(rows[0]) == len(rows) else Counter(rows)
    forms: dict[tuple[Spec | None, ...], Form | _Wrong | None] = {}
    for specs in counts:
        try:
            optional = part.kind == "optional" and specs == (None,)
            forms[specs] = None if optional else _form(part, specs + (None,) * (len(_PACKED) - len(specs)))
        except _Wrong as wrong:
            forms[specs] = wrong
    by_form: dict[Form, list[str]] = {}
    if len(forms) == 1 and isinstance(form := forms[rows[0]], Form):
        by_form[form] = names
    else:
        for name, specs in zip(names, rows, strict=True):
            form = forms[specs]
            if isinstance(form, Form):
                by_form.setdefault(form, []).append(name)
            elif form is not None:
                check, what, fix = form.args
                found.weight(check, what + _aside_words(verdict), name, fix, verdict=verdict)
    taken = sum(count * (len(specs) - specs.count(None)) for specs, count in counts.items())
    return [Stored(part=part, form=form, names=tuple(of)) for form, of in by_form.items()], taken


def _aside_words(verdict: str) -> str:
    return ", of a part that text serving does not load" if verdict == "WARN" else ""


def _is_in_one(experts: str, tensors: Tensors) -> bool:
    return f"{experts}.gate_up_proj" in tensors or f"{experts}.down_proj" in tensors


def _in_one_tensor(part: Part, tensors: Tensors, found: Findings, verdict: str) -> tuple[list[Stored], int] | None:
    """`_stored` for the experts of a layer in one 3-D tensor: [experts, rows, columns], gate and up one after the other.

    None where they are not stored so. Source: vLLM 0.30.0, RoutedExperts.load_weights takes a 3-D tensor for all experts.
    """
    at, _, shard = part.name.partition(".*.")
    if not _is_in_one(at, tensors):
        return None
    rows, columns = part.shape
    name, shape = f"{at}.gate_up_proj", (part.count, 2 * rows, columns)
    if shard == "down_proj":
        name, shape = f"{at}.down_proj", (part.count, rows, columns)
    (spec,) = tensors.specs([name])
    taken = int(spec is not None and shard != "up_proj")
    try:
        form = _form(Part(name, shape, "bare"), (spec,) + (None,) * (len(_PACKED) - 1))
    except _Wrong as wrong:
        check, what, fix = wrong.args
        if shard != "up_proj":
            found.weight(check, f"experts in one tensor: {what}{_aside_words(verdict)}", name, fix, verdict=verdict)
        return [], taken
    return [Stored(part=part, form=form, names=tuple(part.names()))], taken


# --- what the engine takes a weight for -------------------------------------------------------------------------------


class Groups:
    """vLLM's way from a module's name to its config group (0.30.0, layers/quantization/compressed_tensors).

    One scheme per target string, so a repeated target keeps its first place and its last scheme. A name is looked up
    as path or regular expression (anchored at its start only), then the class name by substring. Paths are renamed to
    the engine's module names, expressions and plain words are not; `Linear` also takes the experts.
    """

    def __init__(self, config: Mapping[str, Any], multimodal: bool, found: Findings):
        self.wrapper = multimodal
        self.args: dict[str, Mapping[str, Any]] = {}
        self._exact: dict[str, tuple[int, str]] = {}
        self._patterns: list[tuple[int, re.Pattern[str], str]] = []
        self._classes: list[tuple[str, str]] = []
        self._alike = True
        self.overlaps: dict[tuple[str, str], list[str]] = {}
        """(group that is taken, another that names it too, with another scheme) -> names of such weights."""
        of_target: dict[str, str] = {}
        for name, group in _groups(config, found):
            self.args[name] = group["weights"]
            for target in group["targets"]:
                if target in of_target and not _same(self.args[of_target[target]], group["weights"]):
                    found.add(
                        "ERROR",
                        "targets",
                        f"{of_target[target]} ({_words(self.args[of_target[target]])}) and {name} "
                        f"({_words(group['weights'])}) both target {target[:80]!r}: the engine keeps the last only",
                        "flashnext prepare and serve write a corrected config.json beside links to the weights",
                        "config",
                    )
                of_target[target] = name
        if "Linear" in of_target and "RoutedExperts" not in of_target:
            of_target["RoutedExperts"] = of_target["Linear"]
        for at, (target, name) in enumerate(of_target.items()):
            if target.startswith("re:"):
                pattern = self._compile(target, found)
                if pattern:
                    self._patterns.append((at, pattern, name))
            else:
                self._exact.setdefault(self.renamed(target) if "." in target else target, (at, name))
                self._classes.append((target.lower(), name))
        ignore = config.get("ignore")
        words = [w for w in ignore if isinstance(w, str)] if isinstance(ignore, list) else []
        if any(".experts." in word for word in (*self._exact, *words) if not word.startswith("re:")):
            self._alike = False
        self._ignored = {self.renamed(word) for word in words if not word.startswith("re:")}
        self._ignore_patterns = [p for w in words if w.startswith("re:") and (p := self._compile(w, found))]

    def _compile(self, target: str, found: Findings) -> re.Pattern[str] | None:
        try:
            pattern = re.compile(target[3:])
        except (re.error, RecursionError, OverflowError):
            found.add("ERROR", "targets", f"{target[:80]!r} is no regular expression", _FIX_CONFIG, "config")
            return None
        # Whether one expert, layer or shard could match where its neighbour does not.
        if re.search(r"experts.*[0-9]", re.sub(r"\\d|\[0-9\]", "", target)):
            self._alike = False
        return pattern

    def renamed(self, name: str) -> str:
        """The engine's module name of a checkpoint's."""
        if not self.wrapper:
            return name.replace("model.language_model.", "model.", 1)
        if name == "lm_head" or name.startswith("lm_head."):
            return f"language_model.{name}"
        return name.replace("model.language_model.", "language_model.model.", 1)

    def of(self, item: Stored) -> dict[str | None, list[str]]:
        """Config group -> names of the weights that the engine takes for it; None: unquantized."""
        if item.part.kind not in QUANTIZABLE:
            return {None: list(item.names)}
        # One expert answers for all of a layer, unless a target or an ignore could tell them apart.
        names = item.names[:1] if self._alike else item.names
        out: dict[str | None, list[str]] = {}
        for name in names:
            out.setdefault(self._find(self.renamed(name), item.part.kind), []).append(name)
        return {next(iter(out)): list(item.names)} if self._alike else out

    def _find(self, name: str, kind: str) -> str | None:
        if name in self._ignored or any(pattern.match(name) for pattern in self._ignore_patterns):
            return None
        hits = [(at, group) for at, pattern, group in self._patterns if pattern.match(name)]
        if name in self._exact:
            hits.append(self._exact[name])
        if hits:
            taken = min(hits)[1]
            for other in {group for _, group in hits if not _same(self.args[group], self.args[taken])}:
                self.overlaps.setdefault((taken, other), []).append(name)
            return taken
        cls = {"experts": "routedexperts", "embed": "vocabparallelembedding", "head": "parallellmhead"}
        return next((g for word, g in self._classes if word in cls.get(kind, "columnparallellinear")), None)


_FIX_CONFIG = "flashnext prepare and serve write a corrected config.json beside links to the weights"
_NUMBERS = re.compile(r"(?<=[._])[0-9]+(?=\.|$)")


def _template(name: str) -> str:
    return _NUMBERS.sub("*", name)


def _groups(config: Mapping[str, Any], found: Findings) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(name, group) of each well-formed config group."""
    groups = config.get("config_groups")
    for name, group in groups.items() if isinstance(groups, dict) else ():
        weights, targets = (group.get("weights"), group.get("targets")) if isinstance(group, dict) else (None, None)
        if (
            not isinstance(weights, dict)
            or not isinstance(targets, list)
            or not all(isinstance(t, str) for t in targets)
        ):
            found.add(
                "ERROR", "config groups", f"{name[:40]!r} is no group with weights and targets", _FIX_CONFIG, "config"
            )
            continue
        yield name, group


def group_size(args: Mapping[str, Any], inputs: int) -> int:
    """Inputs a scale by a group's `weights`: `inputs` where it says one scale a row. 0: not a size."""
    size, strategy = args.get("group_size"), args.get("strategy")
    if strategy == "channel" or size in (None, -1):
        return inputs
    return size if type(size) is int and size > 0 else 0


def _same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    keys = ("num_bits", "type", "symmetric", "group_size", "strategy")
    return all(a.get(key) == b.get(key) for key in keys)


def _words(args: Mapping[str, Any]) -> str:
    size = args.get("group_size")
    return f"{str(args.get('type', '?')).upper()[:8]}{str(args.get('num_bits'))[:8]} " + (
        f"g{size}" if type(size) is int and size > 0 else "per channel"
    )


def agrees(form: Form, args: Mapping[str, Any] | None, inputs: int) -> bool:
    """Whether a config group's `weights` (None: not quantized) describes the stored form."""
    if args is None or form.bits is None:
        return (args is None) == (form.bits is None)
    return (
        args.get("num_bits") == form.bits
        and args.get("type", "int") == "int"
        and (args.get("symmetric", True) is not False) == form.symmetric
        and group_size(args, inputs) == inputs // form.groups
    )


# --- the checks -------------------------------------------------------------------------------------------------------


def weights_of(checkpoint: Checkpoint, found: Findings) -> list[Stored]:
    """Every weight of the text model that can be read, with findings for those that cannot, and for what is left."""
    tensors = checkpoint.tensors
    loaded = tuple(parts(checkpoint.text, prefix_of(tensors)))
    aside = _aside(checkpoint, found)
    ends = _expert_ends(tensors)
    out, taken = _all_stored(loaded, tensors, ends, found, "ERROR")
    taken += _all_stored(aside, tensors, ends, found, "WARN")[1]
    # Naming what is left over takes as long as all the rest: only where the counts say that there is something.
    if taken < len(tensors):
        seen = {name for part in (*loaded, *aside) for name in _tensors_of(part, tensors)}
        for name in tensors:
            if name not in seen:
                what = "tensors that the architecture does not have"
                found.weight("names", what, name, _TAKE_AGAIN, verdict="WARN")
    return out


def unloaded(checkpoint: Checkpoint) -> list[Stored]:
    """The weights of the vision tower and of the draft head; [] where the checkpoint holds other tensors of them too."""
    found = Findings()
    tensors = checkpoint.tensors
    stored, taken = _all_stored(_aside(checkpoint, found), tensors, _expert_ends(tensors), found, "WARN")
    there = sum(map(methodcaller("startswith", _DRAFT + _TOWER), tensors))
    return [] if found.all() or taken != there else stored


_DRAFT = ("mtp.", "model.mtp.")
_TOWER = ("visual.", "model.visual.")
_LONGEST = max(map(len, _DRAFT + _TOWER))


def _aside(checkpoint: Checkpoint, found: Findings) -> tuple[Part, ...]:
    """The parts of the vision tower and of the draft head, of each where the checkpoint has a tensor of it."""
    out: list[Part] = []
    starts = {name[:_LONGEST] for name in checkpoint.tensors}
    for prefixes in (_DRAFT, _TOWER):
        prefix = next((p for p in prefixes if any(start.startswith(p) for start in starts)), None)
        if prefix is None:
            continue
        try:
            draft = prefixes is _DRAFT
            out += draft_parts(checkpoint.text, prefix) if draft else vision_parts(checkpoint.vision or {}, prefix)
        except KeyError as lacks:
            what = f"vision_config does not say {lacks.args[0]!r}, so that the vision tower's weights cannot be checked"
            found.add("WARN", "names", what, "take config.json from the model's repository")
    return tuple(out)


def _tensors_of(part: Part, tensors: Tensors) -> Iterator[str]:
    """Every tensor name that a part may have."""
    at = part.name.partition(".*.")[0]
    if part.kind == "experts" and _is_in_one(at, tensors):
        yield from (f"{at}.gate_up_proj", f"{at}.down_proj")
    else:
        for end in _ends(part):
            yield from (name + end for name in part.names())


def _all_stored(
    every: Sequence[Part], tensors: Tensors, expert_ends: frozenset[str], found: Findings, verdict: str
) -> tuple[list[Stored], int]:
    """(the parts as they are stored, number of tensors that they take)."""
    out, taken = [], 0
    for part in every:
        whole = _in_one_tensor(part, tensors, found, verdict) if part.kind == "experts" else None
        stored, count = whole or _stored(part, tensors, expert_ends, found, verdict)
        out += stored
        taken += count
    return out, taken


def _check_layout(stored: Sequence[Stored], found: Findings) -> None:
    for item in stored:
        padded, kind = item.form.padded, item.part.kind
        if padded is None:
            continue
        if padded and kind != "embed":
            what = f"{item.form.bits}-bit rows in whole words (compressed-tensors up to 0.17), which the engine reads as one bit stream"
            found.weights("packing", what, item.names, "repack them densely: a newer compressed-tensors writes that")
        if kind == "embed" and (not padded or item.part.shape[1] % (32 // item.form.bits)):
            what = f"{item.form.bits}-bit embeddings that do not fill whole words, which the engine cannot read"
            found.weights("packing", what, item.names, "quantize embed_tokens to 8 or 4 bits")


def _scheme(form: Form, inputs: int) -> tuple:
    """What must be equal in shards that the engine reads as one; one scale a row is both a group size and none."""
    return form.bits, form.padded, form.symmetric, form.dtype if form.bits is None else inputs // form.groups


def _check_fused(stored: Sequence[Stored], prefix: str, layers: int, found: Findings) -> None:
    forms = {i.part.name: (_scheme(i.form, i.part.shape[-1]), i) for i in stored if i.part.kind == "linear"}
    fix = "quantize all of them alike: the engine merges them into one matrix"
    for layer in range(layers):
        for module, shards in FUSED:
            at = f"{prefix}layers.{layer}.{module}"
            have = {shard: forms[f"{at}.{shard}"] for shard in shards if f"{at}.{shard}" in forms}
            if len({scheme for scheme, _ in have.values()}) > 1:
                named = [f"{shard} {i.form.words(i.part.shape[-1])}" for shard, (_, i) in have.items()]
                found.weight("fused shards", "merged shards disagree, " + ", ".join(named), at, fix)
    layers_of: dict[str, list[Stored]] = {}
    for item in stored:
        if item.part.kind == "experts":
            layers_of.setdefault(item.part.name.partition(".experts.")[0], []).append(item)
    for at, items in layers_of.items():
        schemes = {_scheme(i.form, i.part.shape[-1]) for i in items}
        if len({scheme[:3] for scheme in schemes}) > 1 or (len(schemes) > 1 and any(i.form.groups != 1 for i in items)):
            count: Counter[str] = Counter()
            for i in items:
                count[i.form.words(i.part.shape[-1])] += len(i.names)
            what = "experts of one layer disagree, " + ", ".join(
                f"{n:,} x {words}" for words, n in count.most_common(4)
            )
            found.weight("fused shards", what, at + ".experts", fix)


def _check_groups(stored: Sequence[Stored], checkpoint: Checkpoint, found: Findings) -> list[str]:
    """Hold each weight against its config group; returns what the config says of each, for the table."""
    config = checkpoint.quantization or {}
    method = config.get("quant_method", "compressed-tensors")
    if method != "compressed-tensors":
        found.add(
            "ERROR",
            "config groups",
            f"quant_method is {str(method)[:40]!r}",
            "export as compressed-tensors (pack-quantized)",
        )
        return ["?"] * len(stored)
    groups = Groups(config, checkpoint.multimodal, found)
    said = []
    for item in stored:
        inputs, words = item.part.shape[-1], []
        for name, names in groups.of(item).items():
            args = None if name is None else groups.args[name]
            words.append("-" if args is None else _words(args))
            if item.part.kind not in QUANTIZABLE or agrees(item.form, args, inputs):
                continue
            says = "not quantized" if args is None else f"{_words(args)} ({name})"
            what = f"stored {item.form.words(inputs)}, but the engine would take it for {says}"
            found.weights("config groups", what, names, _FIX_CONFIG, "config")
        said.append(", ".join(words) if item.part.kind in QUANTIZABLE else "")
    for (taken, other), names in groups.overlaps.items():
        both = " and ".join(f"{group} ({_words(groups.args[group])})" for group in (taken, other))
        fix = "write targets of which one at most matches a weight: as it is, the order of the groups decides"
        for name in names:
            found.weight("targets", f"{both} both match, the engine takes the first", name, fix, verdict="WARN")
    return said


class _Token(msgspec.Struct, gc=False):
    id: int


class _Vocabulary(msgspec.Struct):
    vocab: dict[str, int]


class _Tokenizer(msgspec.Struct):
    """The part of tokenizer.json that is looked at; its merges are half of the file."""

    model: _Vocabulary
    added_tokens: list[_Token] = []


_TOKENIZER = msgspec.json.Decoder(_Tokenizer)


@dataclass(frozen=True)
class _Tokens:
    """What tokenizer.json says: its largest token, and those of `wanted` that it lacks. `refused`: (message, fix)."""

    largest: int | None = None
    lacks: tuple[int, ...] = ()
    refused: tuple[str, str] | None = None


def _token_ids(text: bytes, name: str) -> list[int] | None:
    """The ids of a tokenizer.json; None where it holds no vocabulary. Raises Refusal."""
    found = quick(_TOKENIZER, text)
    if found is not None:
        return [*found.model.vocab.values(), *(token.id for token in found.added_tokens)]
    content = parse_object(text, name)
    model, added = content.get("model"), content.get("added_tokens")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(vocab, (dict, list)):
        return None
    ids = [i for i in vocab.values() if type(i) is int] if isinstance(vocab, dict) else list(range(len(vocab)))
    if isinstance(added, list):
        ids += [t["id"] for t in added if isinstance(t, dict) and type(t.get("id")) is int]
    return ids


def _tokens(folder: Path, wanted: Sequence[int]) -> _Tokens:
    name = "tokenizer.json"
    if not (folder / name).is_file():
        return _Tokens()
    try:
        ids = _token_ids(read_text(folder / name, name), name)
    except Refusal as refusal:
        return _Tokens(refused=(refusal.message, refusal.fix))
    if ids is None:
        return _Tokens(refused=("tokenizer.json holds no vocabulary", "download tokenizer.json again"))
    lacks = set(wanted).difference(ids)
    return _Tokens(max(ids), tuple(i for i in wanted if i in lacks)) if ids else _Tokens()


def _check_small_files(checkpoint: Checkpoint, found: Findings) -> None:
    tokens = _tokens(Path(checkpoint.path), eos_ids(checkpoint))
    if not checkpoint.tokenizer:
        found.add("ERROR", "tokenizer", "there is no tokenizer", "download tokenizer.json of the same repository")
    if not checkpoint.chat_template:
        what = "there is no chat template, without which the engine answers no chat request"
        found.add("WARN", "chat template", what, "download chat_template.jinja of the same repository")
    if tokens.refused:
        found.add("ERROR", "tokenizer", *tokens.refused)
    size = checkpoint.text.vocab_size
    if size is not None and tokens.largest is not None and tokens.largest >= size:
        what = f"tokenizer.json has the token {tokens.largest:,}, the model {size:,} rows"
        found.add("ERROR", "tokenizer", what, "take tokenizer.json of the same repository")
    if tokens.lacks:
        what = f"the tokenizer has no token {list(tokens.lacks)}"
        found.add("WARN", "EOS ids", what, "take tokenizer.json of the same repository")
    if not is_target(checkpoint.model_type, checkpoint.architectures):
        return
    repair = "flashnext prepare and serve write a corrected generation_config.json beside links to the weights"
    generation = checkpoint.generation or {}
    have = generation.get("eos_token_id")
    have = have if isinstance(have, list) else [have]
    if lost := [i for i in eos_ids(checkpoint) if i not in have]:
        what = f"generation_config.json does not end an answer at {lost}"
        found.add("WARN", "EOS ids", what, repair, "generation")
    if lost := sorted(
        key for key in data("published")["sampling"] if not isinstance(generation.get(key), (int, float))
    ):
        what = f"generation_config.json lacks {', '.join(lost)}: the whole vocabulary would be sampled"
        found.add("WARN", "sampling", what, repair, "generation")


def _published_eos() -> tuple[int, tuple[int, ...]]:
    """(vocabulary, ids that end an answer) of the published model."""
    text = data("published")["text_config"]
    return text["vocab_size"], tuple(text["eos_token_id"])


def eos_ids(checkpoint: Checkpoint) -> tuple[int, ...]:
    """Tokens that end an answer: the published ones where the vocabulary is the published one, else config.json's."""
    vocab, ids = _published_eos()
    target = is_target(checkpoint.model_type, checkpoint.architectures)
    return ids if target and checkpoint.text.vocab_size == vocab else checkpoint.text.eos_token_id or ()


def _fetch_note(folder: Path) -> Mapping[str, Any]:
    try:
        return read_json(folder / FETCH_NOTE, FETCH_NOTE)
    except Refusal:
        return {}


def revision_of(folder: Path) -> str | None:
    """The hub's commit, where a download left it: our own note, the cache's folder name, or the hub library's notes."""
    commit = _fetch_note(folder).get("commit")
    if isinstance(commit, str) and re.fullmatch(r"[0-9a-f]{40}", commit):
        return commit
    for part in reversed(folder.absolute().parts):
        if re.fullmatch(r"[0-9a-f]{40}", part):
            return part
    found = set()
    for note in folder.glob(".cache/huggingface/download/*.metadata"):
        try:
            with note.open(encoding="utf-8", errors="replace") as file:
                line = file.readline(64).strip()
        except OSError:
            continue
        if re.fullmatch(r"[0-9a-f]{40}", line):
            found.add(line)
    return found.pop() if len(found) == 1 else None


def examine(checkpoint: Checkpoint, deep: Callable[[Checkpoint, Findings], Mapping[str, str]] | None = None) -> Report:
    """All findings on a checkpoint whose headers were read. Raises Refusal (code 4) where config.json lacks a number."""
    begun = time.monotonic()
    found = Findings()
    rows: tuple[Row, ...] = ()
    with without_gc():
        if is_target(checkpoint.model_type, checkpoint.architectures):
            stored = weights_of(checkpoint, found)
            _check_layout(stored, found)
            said = _check_groups(stored, checkpoint, found)
            _check_fused(stored, prefix_of(checkpoint.tensors), checkpoint.text.need("num_hidden_layers"), found)
            rows = _rows(stored, said)
            if deep:
                _check_weight_shapes(checkpoint, stored, found)
        _check_small_files(checkpoint, found)
    hashes = deep(checkpoint, found) if deep else {}
    for name in checkpoint.unlisted:
        found.weight(
            "index", "files that the index does not name", name, "remove them, if nothing needs them", verdict="WARN"
        )
    return Report(
        path=checkpoint.path,
        findings=found.all(),
        rows=rows,
        total_bytes=checkpoint.total_bytes,
        files=len(checkpoint.shards),
        revision=revision_of(Path(checkpoint.path)),
        took_s=time.monotonic() - begun,
        hashes=hashes,
    )


def _rows(stored: Sequence[Stored], said: Sequence[str]) -> tuple[Row, ...]:
    counted: Counter[tuple] = Counter()
    for item, words in zip(stored, said, strict=True):
        form = item.form.words(item.part.shape[-1])
        counted[_template(item.part.name), item.part.shape, form, words] += len(item.names)
    return tuple(
        Row(name=name, count=n, shape=shape, form=form, config=words)
        for (name, shape, form, words), n in counted.items()
    )


# --- deep -------------------------------------------------------------------------------------------------------------


def _check_weight_shapes(checkpoint: Checkpoint, stored: Sequence[Stored], found: Findings) -> None:
    """`weight_shape` is data, not header: two int64 that must repeat the architecture's shape."""
    by_file: dict[str, list[tuple[int, str, Part]]] = {}
    for item in stored:
        for name in item.names if item.form.bits else ():
            tensor = checkpoint.tensors[f"{name}.weight_shape"]
            if (tensor.dtype, tensor.shape) != ("I64", (2,)):
                found.weight("packing", f"weight_shape is {tensor.dtype} {list(tensor.shape)}", name, _EXPORT_AGAIN)
            else:
                by_file.setdefault(tensor.file, []).append((tensor.offset, name, item.part))
    for file_name, places in by_file.items():
        with (Path(checkpoint.path) / file_name).open("rb") as file:
            for offset, name, part in sorted(places):
                file.seek(offset)
                says = struct.unpack("<2q", file.read(16))
                if says != part.shape:
                    found.weight(
                        "packing", f"weight_shape says {list(says)} for {list(part.shape)}", name, _EXPORT_AGAIN
                    )


def hasher(progress: Callable[[int, int], None]) -> Callable[[Checkpoint, Findings], Mapping[str, str]]:
    """A `deep` for `examine`: sha256 of every file, against the hash that a download noted beside it, where it did.

    `progress` is called with (bytes done, bytes in all).
    """

    def run(checkpoint: Checkpoint, found: Findings) -> Mapping[str, str]:
        folder, done = Path(checkpoint.path), 0
        total = sum(shard.size_bytes for shard in checkpoint.shards)
        out = {}
        for shard in checkpoint.shards:
            digest = hashlib.sha256()
            try:
                with (folder / shard.name).open("rb") as file:
                    while block := file.read(8 << 20):
                        digest.update(block)
                        done += len(block)
                        progress(done, total)
            except OSError as error:
                found.add(
                    "ERROR",
                    "hash",
                    f"{shard.name} cannot be read: {error.strerror}",
                    "check the disk, then download it again",
                )
                continue
            out[shard.name] = digest.hexdigest()
            noted = _noted_hash(folder, shard.name)
            if noted is not None and noted != out[shard.name]:
                found.add(
                    "ERROR",
                    "hash",
                    f"{shard.name} is not what the hub lists ({noted[:12]}...)",
                    "download that file again",
                )
        return out

    return run


def _noted_hash(folder: Path, name: str) -> str | None:
    """sha256 that the hub lists for a file: in our own note, or on the second line of huggingface_hub's."""
    files = _fetch_note(folder).get("files")
    entry = files.get(name) if isinstance(files, dict) else None
    if isinstance(entry, list) and entry and re.fullmatch(r"[0-9a-f]{64}", str(entry[-1])):
        return entry[-1]
    try:
        lines = (folder / ".cache/huggingface/download" / f"{name}.metadata").read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    return lines[1].strip() if len(lines) > 1 and re.fullmatch(r"[0-9a-f]{64}", lines[1].strip()) else None


def refuse(report: Report) -> None:
    """Raise the first ERROR as a Refusal (code 4)."""
    if report.errors:
        first, rest = report.errors[0], len(report.errors) - 1
        more = f" ({rest} more: flashnext checkpoint lists them)" if rest else ""
        raise Refusal(f"checkpoint: {first.check}: {first.message}{more}", first.fix, Exit.CHECKPOINT)


def show(report: Report, out: Console) -> None:
    """The table of weights and the findings."""
    from rich.table import Table
    from rich.text import Text

    if report.rows:
        t = Table(title="Weights", title_justify="left", box=None, pad_edge=False, header_style="dim")
        for column in ("count", "shape", "stored", "config", "name"):
            t.add_column(column, overflow="fold")
        for row in report.rows:
            t.add_row(f"{row.count:,}", " x ".join(f"{n:,}" for n in row.shape), row.form, row.config, row.name)
        out.print(t)
        out.print()
    for f in report.findings:
        out.print(Text(f"{f.verdict} {f.check}: {f.message}", style="red" if f.verdict == "ERROR" else "yellow"))
        out.print(Text(f"  Fix: {f.fix}"))
    for name, digest in report.hashes.items():
        out.print(f"{digest}  {name}")
    warnings = len(report.findings) - len(report.errors)
    out.print(
        f"{report.path}: {report.files} files, {format_gib(report.total_bytes)} of tensors, revision "
        f"{report.revision or 'unknown'}; {len(report.errors)} errors, {warnings} warnings in {report.took_s:.2f} s"
    )
