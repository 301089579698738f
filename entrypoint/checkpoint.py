"""What the checkpoint is: the model's numbers, which files make it whole, and the bytes of each tensor. Without torch.

Rule order of `read_checkpoint`
1. A folder is read. A text that is no path but looks like a hub id (`owner/name`) is the fact `local=False`; anything
   else is refused.
2. config.json: the text model is `text_config` inside the multimodal wrapper, or the top level. Numbers are read, never
   assumed; one that is missing is None, and `TextConfig.need` refuses by name where it is needed.
3. The files are those that the index names; without an index, every *.safetensors of the folder.
4. Each header is checked before any byte of it is believed: a regular file, no git-lfs pointer, a length that fits,
   JSON, known dtypes, shapes that give their bytes, tensors that follow one another without gap, and the last offset =
   the file's size. One name in two files, and a name of the index that its file lacks, are refused.
   A header that is right, and written as safetensors writes it, is proven so a column at a time (`_whole_at_once`); any
   other is parsed as JSON and looked at entry by entry, which also finds the words for what is wrong.

What is wrong with a checkpoint is a `Refusal` with code 4 that names the file.
Format: https://github.com/huggingface/safetensors#format (8 bytes little-endian header length, JSON, data).
"""

from __future__ import annotations

import gc
import json
import os
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import accumulate, chain, filterfalse
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from .documents import bad, parse, parse_object, quick, read_json, read_text, refuse_pointer, size_of, start_of
from .errors import Exit, Refusal

INDEX_NAME = "model.safetensors.index.json"

# The format's own bound; a larger length is garbage, not a header.
_LARGEST_HEADER_BYTES = 100_000_000
_MOST_DIMENSIONS = 32
_MOST_LAYERS = 10_000
_LARGEST_NUMBER = 1 << 40

# Bits of one element by the format's dtype names.
DTYPE_BITS: dict[str, int] = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}

# Which part of the model a tensor belongs to: the first pattern that is found in its name decides.
CATEGORIES: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (category, re.compile(pattern))
    for category, pattern in (
        ("mtp", r"(^|\.)mtp\."),
        ("vision", r"(^|\.)(visual|vision_tower|vision_model)\."),
        ("table", r"\.ngram_embedding\."),
        ("ple", r"\.ple\."),
        ("hyper_connection", r"hyper_connection"),
        ("experts", r"\.mlp\.experts\."),
        ("shared_experts", r"\.mlp\.shared_expert\."),
        ("router", r"\.mlp\.(gate|shared_expert_gate)\."),
        ("indexer", r"\.self_attn\.indexer\."),
        ("linear_attention", r"\.linear_attn\."),
        ("attention", r"\.self_attn\."),
        ("mlp", r"\.mlp\."),
        ("embed", r"(^|\.)embed_tokens\."),
        ("head", r"(^|\.)lm_head\."),
        ("norms", r"(^|\.)[a-z_]*norm\."),
    )
)
DENSE = ("linear_attention", "attention", "shared_experts", "mlp")
"""Categories of matrices that every token passes through; experts, table and vocabulary apart."""

# Not parts of the decoder stack, although their names may contain `layers.N`.
_OUTSIDE = frozenset({"mtp", "vision"})

_LAYER = re.compile(r"(?:^|\.)layers\.([0-9]{1,6})\.")
_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9][A-Za-z0-9_.-]*")
_SHARD_NAME = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})\.safetensors")
_TAKE_CONFIG = "take config.json from the model's repository"


class Tensor(NamedTuple):
    """One tensor as its header states it: bytes of data, the file of the folder that holds it, and where they begin."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: str
    offset: int


class Spec(NamedTuple):
    """What tensors of one kind have in common; one object serves all of them."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class Header(NamedTuple):
    """One file's tensors in the order of its header: their specs by name, and where the data of each begins."""

    specs: dict[str, Spec]
    offsets: list[int]


class Tensors(Mapping[str, Tensor]):
    """Tensors by name, in the order of their files and headers.

    Kept in columns and made into a Tensor when asked: a quarter of a million small objects cost as much again as reading
    the headers, half of it for the garbage collector's walks. Specs are looked up in one file's table where all of them are
    there, in a third of the time that a table of all names takes: the processor's caches hold it.
    """

    __slots__ = ("_headers", "_home", "_rows")

    def __init__(self, headers: Mapping[str, Header] | None = None, home: Mapping[str, str] | None = None) -> None:
        """Headers by file. `home`: the file of each tensor, if somebody has made that table."""
        self._headers = dict(headers or {})
        self._home = home if home is not None else {n: file for file, h in self._headers.items() for n in h.specs}
        self._rows: dict[str, dict[str, int]] = {}

    def __getitem__(self, name: str) -> Tensor:
        file = self._home[name]
        header = self._headers[file]
        if file not in self._rows:
            self._rows[file] = dict(zip(header.specs, range(len(header.specs)), strict=True))
        return Tensor(*header.specs[name], file, header.offsets[self._rows[file][name]])

    def __contains__(self, name: object) -> bool:
        return name in self._home

    def __iter__(self) -> Iterator[str]:
        return chain.from_iterable(header.specs for header in self._headers.values())

    def __len__(self) -> int:
        return len(self._home)

    def specs(self, names: Sequence[str], end: str = "") -> list[Spec | None]:
        """Spec of each of the tensors NAME + `end`, None where there is none of that name."""
        wanted = [name + end for name in names] if end else names
        file = self._home.get(wanted[0]) if wanted else None
        found = [None] * len(wanted) if file is None else list(map(self._headers[file].specs.get, wanted))
        if not all(found):
            for at, name in enumerate(wanted):
                if found[at] is None and (file := self._home.get(name)) is not None:
                    found[at] = self._headers[file].specs[name]
        return found

    def sizes(self) -> Iterator[tuple[str, int]]:
        """(name, bytes) of each tensor."""
        return ((name, spec.nbytes) for header in self._headers.values() for name, spec in header.specs.items())


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One file of the checkpoint. `header_bytes` counts the 8 bytes of the length too, so the data begins there."""

    name: str
    size_bytes: int
    header_bytes: int
    tensor_count: int


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """Numbers of the text model under the names that config.json uses. None: config.json does not say.

    `ple_layer_ids` are 1-based (see `ple_layers`). `dtype` is config.json's `dtype` or `torch_dtype`.
    """

    hidden_size: int | None = None
    num_hidden_layers: int | None = None
    layer_types: tuple[str, ...] | None = None
    full_attention_interval: int | None = None
    vocab_size: int | None = None
    max_position_embeddings: int | None = None
    intermediate_size: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    num_experts: int | None = None
    num_experts_per_tok: int | None = None
    moe_intermediate_size: int | None = None
    shared_expert_intermediate_size: int | None = None
    linear_num_key_heads: int | None = None
    linear_num_value_heads: int | None = None
    linear_key_head_dim: int | None = None
    linear_value_head_dim: int | None = None
    linear_conv_kernel_dim: int | None = None
    mamba_ssm_dtype: str | None = None
    indexer_n_heads: int | None = None
    indexer_kv_heads: int | None = None
    indexer_head_dim: int | None = None
    indexer_budget: int | None = None
    indexer_compress_ratio: int | None = None
    hc_count: int | None = None
    hc_lowrank: int | None = None
    ngram_size: int | None = None
    heads_per_ngram: int | None = None
    ngram_vocab_size_base: int | None = None
    make_ngram_vocab_size_divisible_by: int | None = None
    split_ngram_parts: int | None = None
    ple_layer_ids: tuple[int, ...] | None = None
    ple_embed_dim: int | None = None
    ple_conv_kernel_size: int | None = None
    mtp_num_hidden_layers: int | None = None
    output_gate_type: str | None = None
    dtype: str | None = None
    tie_word_embeddings: bool | None = None
    eos_token_id: tuple[int, ...] | None = None

    def need(self, name: str) -> Any:
        """The value of a field, or a Refusal (code 4) that names the missing key."""
        value = getattr(self, name)
        if value is None:
            raise Refusal(
                f"config.json does not say {name!r}, which the plan is computed from",
                "take config.json from the model's original repository; the text model's keys stand in text_config",
                Exit.CHECKPOINT,
            )
        return value

    @property
    def attention_layers(self) -> tuple[int, ...] | None:
        """0-based decoder layers with a K/V cache (every type but linear_attention); None where it is not known."""
        if self.layer_types is not None:
            return tuple(at for at, kind in enumerate(self.layer_types) if kind != "linear_attention")
        if self.full_attention_interval and self.num_hidden_layers is not None:
            return tuple(range(self.full_attention_interval - 1, self.num_hidden_layers, self.full_attention_interval))
        return None

    @property
    def linear_layers(self) -> tuple[int, ...] | None:
        """0-based decoder layers with a recurrent state."""
        full = self.attention_layers
        if full is None or self.num_hidden_layers is None:
            return None
        return tuple(sorted(set(range(self.num_hidden_layers)) - set(full)))

    @property
    def ple_layers(self) -> tuple[int, ...]:
        """0-based decoder layers that look up the n-gram table."""
        return tuple(layer_id - 1 for layer_id in self.ple_layer_ids or ())


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Bytes by category: `layers[n]` of decoder layer n, `outside` of everything else (embed, head, vision, mtp,
    ...)."""

    layers: tuple[Mapping[str, int], ...]
    outside: Mapping[str, int]

    def of(self, *categories: str) -> int:
        """Bytes of these categories, in the layers and outside."""
        return sum(part.get(category, 0) for part in (*self.layers, self.outside) for category in categories)

    @property
    def by_category(self) -> dict[str, int]:
        """Bytes of each category that occurs, in the order of CATEGORIES, `other` last."""
        names = (*(category for category, _ in CATEGORIES), "other")
        return {name: total for name in names if (total := self.of(name))}


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A model folder as its small files and headers state it. With `local=False` (a hub id) everything else is empty.

    `quantization` is the raw quantization_config, `generation` the raw generation_config.json, `vision` the raw
    vision_config; None where there is none.
    `unlisted` names files of the folder that the index leaves out. `counted`: the weights, where `tensors` were not read
    because they had been counted before (account.py).
    """

    path: str
    local: bool = True
    architectures: tuple[str, ...] = ()
    model_type: str | None = None
    multimodal: bool = False
    text: TextConfig = field(default_factory=TextConfig)
    generation: Mapping[str, Any] | None = field(default=None, hash=False)
    quantization: Mapping[str, Any] | None = field(default=None, hash=False)
    vision: Mapping[str, Any] | None = field(default=None, hash=False)
    tokenizer: bool = False
    chat_template: bool = False
    shards: tuple[Shard, ...] = ()
    unlisted: tuple[str, ...] = ()
    tensors: Tensors = field(default_factory=Tensors, hash=False, repr=False)
    counted: Weights | None = field(default=None, hash=False, repr=False)

    @property
    def quantization_groups(self) -> Mapping[str, Any]:
        """The raw config_groups by name; {} for an unquantized or otherwise described checkpoint."""
        groups = (self.quantization or {}).get("config_groups")
        return groups if isinstance(groups, dict) else {}

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors, which fill the files behind their headers."""
        return sum(shard.size_bytes - shard.header_bytes for shard in self.shards)

    @property
    def has_weights(self) -> bool:
        return self.counted is not None or bool(self.tensors)

    @cached_property
    def weights(self) -> Weights:
        """Bytes by decoder layer and category; all empty where nothing is known (`has_weights`)."""
        return self.counted or weigh(self.tensors.sizes(), self.text.num_hidden_layers)


# --- tensors ----------------------------------------------------------------------------------------------------------


def category_of(name: str) -> str:
    """The part of the model that a tensor belongs to, 'other' where no pattern is found in its name."""
    return next((category for category, pattern in CATEGORIES if pattern.search(name)), "other")


def weigh(sizes: Iterable[tuple[str, int]], layer_count: int | None = None) -> Weights:
    """Sum the (name, bytes) pairs by decoder layer and category.

    Layers are numbered by `layers.N.` in the names; at least `layer_count` of them are returned (empty where nothing
    was found).
    """
    layers: dict[int, dict[str, int]] = {}
    outside: dict[str, int] = {}
    known: dict[str, tuple[dict[str, int], str]] = {}
    for name, nbytes in sizes:
        # Nine names of ten differ behind `.experts.` only, where no pattern looks: decide once for what stands before.
        head, mark, _ = name.partition(".experts.")
        place = known.get(head)
        if place is None or not mark:
            category = category_of(name)
            found = None if category in _OUTSIDE else _LAYER.search(name)
            place = (outside if found is None else layers.setdefault(int(found.group(1)), {})), category
            if mark:
                known[head] = place
        part, category = place
        part[category] = part.get(category, 0) + nbytes
    # A number beyond any sane depth must not become a list of that length.
    count = max(layer_count or 0, 1 + max((at for at in layers if at < _MOST_LAYERS), default=-1))
    for at in [at for at in layers if at >= count]:
        for category, total in layers.pop(at).items():
            outside[category] = outside.get(category, 0) + total
    return Weights(layers=tuple(layers.get(at, {}) for at in range(count)), outside=outside)


# --- files ------------------------------------------------------------------------------------------------------------


def read_header(path: Path, name: str | None = None) -> tuple[Shard, Tensors]:
    """The tensors of one safetensors file, proven to cover it exactly.

    Reads the header only; raises Refusal (code 4).
    """
    name = name or path.name
    shard, header = _read_header(path, name)
    return shard, Tensors({name: header})


def _read_header(path: Path, name: str) -> tuple[Shard, Header]:
    size_bytes = size_of(path, name)
    text = _header_text(path, name, size_bytes)
    data_start = 8 + len(text)
    header = _whole_at_once(text, data_start, size_bytes)
    if header is None:
        entries = parse(text, name, "its header")
        if not isinstance(entries, dict):
            raise bad(name, "has no JSON object as its header")
        entries.pop("__metadata__", None)
        header = _one_by_one(entries, name, data_start)
        _refuse_gaps(header, name, data_start, size_bytes)
    shard = Shard(name=name, size_bytes=size_bytes, header_bytes=data_start, tensor_count=len(header.specs))
    return shard, header


def _header_text(path: Path, name: str, size_bytes: int) -> bytes:
    """The bytes that the first 8 announce as the header. Raises Refusal (code 4) where they cannot be one."""
    try:
        with path.open("rb") as file:
            start = file.read(256)
            if not start:
                raise bad(name, "is empty")
            refuse_pointer(start, name)
            if size_bytes < 8:
                raise bad(name, f"has {size_bytes} bytes, less than a header's length takes")
            (length,) = struct.unpack("<Q", start[:8])
            if length == 0:
                zeros = not start.strip(b"\0")
                raise bad(name, "is filled with zeros (reserved and never written)" if zeros else "has no header")
            if length > _LARGEST_HEADER_BYTES:
                most = f"at most {_LARGEST_HEADER_BYTES:,}"
                raise bad(name, f"states a header of {length:,} bytes ({most}): not safetensors")
            if 8 + length > size_bytes:
                raise bad(name, f"ends inside its header ({size_bytes:,} of at least {8 + length:,} bytes)")
            text = start[8 : 8 + length] + file.read(max(0, 8 + length - len(start)))
    except OSError as error:
        raise bad(name, f"cannot be read ({error.strerror})", "give this user read access to it") from None
    if len(text) < length:
        raise bad(name, "became shorter while it was read", "let the download end first")
    if not text.startswith(b"{"):
        zeros = not text.strip(b"\0")
        raise bad(name, "has a header of zeros" if zeros else "has no JSON object as its header: not safetensors")
    return text


# An entry as safetensors' own writer puts it, up to the comma before the next one or the header's last bracket.
_ENTRY = re.compile(
    r'"([!#-\[\]-~]+)":\{("dtype":"[^"]+","shape":\[[^]]*\]),"data_offsets":\[([0-9]+),([0-9]+)\]\}(?:,|\} *\Z)'
)
_METADATA = re.compile(r'\{"__metadata__":(\{[^{}]*\}),')


class _Specs(dict[str, Spec]):
    """Specs by their text in the header: a file has a handful of them. Raises ValueError for what is none."""

    def __missing__(self, text: str) -> Spec:
        entry = json.loads("{" + text + "}")
        spec = _spec_of(entry["dtype"], entry["shape"]) if entry.keys() == {"dtype", "shape"} else None
        if spec is None:
            raise ValueError
        self[text] = spec
        return spec


def _whole_at_once(text: bytes, data_start: int, size_bytes: int) -> Header | None:
    """A header that is right and written without a space or an escape; None says nothing about it.

    Entries are the whole header where nothing is left between them. Names, specs and offsets are then held against what the
    format asks for, a column at a time: that is a third of the time of parsing and looking at one entry after another.
    """
    try:
        # What stands before the first entry, then four groups of each and what stands behind it.
        pieces = _ENTRY.split(text.decode("ascii"))
        before, between = pieces[0], pieces[5::5]
        metadata = _METADATA.fullmatch(before)
        if metadata:
            json.loads(metadata[1])
        if not (metadata or before == "{") or any(between) or not text.rstrip(b" ").endswith(b"]}}"):
            return None
        names, begins, ends = pieces[1::5], pieces[3::5], pieces[4::5]
        specs = list(map(_Specs().__getitem__, pieces[2::5]))
    except (ValueError, RecursionError):
        return None
    offsets = list(accumulate([spec.nbytes for spec in specs], initial=0))
    right = list(map(str, offsets))
    if begins != right[:-1] or ends != right[1:] or data_start + offsets.pop() != size_bytes:
        return None
    by_name = dict(zip(names, specs, strict=True))
    if len(by_name) < len(names) or "__metadata__" in by_name:
        return None
    return Header(by_name, [data_start + offset for offset in offsets])


def _spec_of(dtype: Any, shape: Any) -> Spec | None:
    """The Spec of a known dtype and a list of sizes that fill whole bytes, None for anything else."""
    bits = DTYPE_BITS.get(dtype) if isinstance(dtype, str) else None
    if bits is None or not isinstance(shape, (list, tuple)) or len(shape) > _MOST_DIMENSIONS:
        return None
    for size in shape:
        if type(size) is not int or not 0 <= size < _LARGEST_NUMBER:
            return None
        bits *= size
    return None if bits % 8 else Spec(dtype, tuple(shape), bits // 8)


def _one_by_one(entries: Mapping[str, Any], file: str, data_start: int) -> Header:
    """A parsed header's tensors, each proven to be of one piece."""
    specs, offsets = {}, []
    known: dict[Spec, Spec] = {}
    for name, entry in entries.items():
        try:
            dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
            DTYPE_BITS[dtype]
        except (TypeError, KeyError, ValueError):
            raise bad(file, f"has a tensor {name[:120]!r} {_what_lacks(entry)}") from None
        spec = _spec_of(dtype, shape)
        if spec is None or not (type(begin) is type(end) is int and begin >= 0 and end - begin == spec.nbytes):
            raise bad(file, f"has a tensor {name[:120]!r} whose shape does not give its bytes")
        specs[name] = known.setdefault(spec, spec)
        offsets.append(data_start + begin)
    return Header(specs, offsets)


def _refuse_gaps(header: Header, file: str, data_start: int, size_bytes: int) -> None:
    """The tensors must follow one another from the header's end to the file's end."""
    at = data_start
    sizes = [spec.nbytes for spec in header.specs.values()]
    for offset, nbytes in sorted(zip(header.offsets, sizes, strict=True)):
        if offset != at:
            what = "overlapping tensors" if offset < at else "a gap"
            raise bad(file, f"has {what} at byte {min(offset, at):,}")
        at += nbytes
    if at != size_bytes:
        short = at - size_bytes
        cut = f"is {short:,} bytes short (cut off)" if short > 0 else f"has {-short:,} bytes after its last tensor"
        raise bad(file, f"{cut}: {size_bytes:,} bytes, its header says {at:,}")


def _what_lacks(entry: Any) -> str:
    dtype = entry.get("dtype") if isinstance(entry, dict) else None
    if isinstance(dtype, str) and dtype not in DTYPE_BITS:
        return f"of the unknown dtype {dtype[:20]!r}"
    return "without dtype, shape and data_offsets"


def _weight_map(text: bytes, present: Sequence[str]) -> Any:
    """The index's weight_map; at once, if it is one and names files of `present` only. Raises Refusal for what is no JSON."""
    if present:
        of_present = msgspec.defstruct("Index", [("weight_map", dict[str, Literal[tuple(present)]])])
        if (index := quick(msgspec.json.Decoder(of_present), text)) is not None:
            return index.weight_map
    return parse_object(text, INDEX_NAME).get("weight_map")


def _files_of(folder: Path) -> tuple[list[str], Mapping[str, str] | None, tuple[str, ...]]:
    """(the checkpoint's files in name order, the index's map or None, files that the index leaves out)."""
    present = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".safetensors"))
    index = folder / INDEX_NAME
    if index.exists() or index.is_symlink():
        weight_map = _weight_map(read_text(index, INDEX_NAME), present)
        if not isinstance(weight_map, dict) or not weight_map:
            raise bad(INDEX_NAME, "has no weight_map")
        try:
            named = set(weight_map.values())
        except TypeError:
            named = {None}
        for file in named:
            if not isinstance(file, str) or not file.isprintable() or "/" in file or file in ("", ".", ".."):
                raise bad(INDEX_NAME, f"names the file {str(file)[:80]!r}, which is not one of the folder")
        missing = sorted(name for name in named if not (folder / name).exists())
        if missing:
            some = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
            raise Refusal(
                f"checkpoint: {len(missing)} of {len(named)} files named by {INDEX_NAME} are missing: {some}",
                "download them into the same folder; an interrupted download resumes",
                Exit.CHECKPOINT,
            )
        return sorted(named), weight_map, tuple(name for name in present if name not in named)
    if not present:
        others = sorted({entry.suffix for entry in folder.iterdir()} & {".gguf", ".bin", ".pt", ".pth"})
        raise Refusal(
            f"checkpoint folder {folder} holds no *.safetensors" + (f" (only {', '.join(others)})" if others else ""),
            "mount the folder of a safetensors checkpoint",
            Exit.CHECKPOINT,
        )
    _refuse_lost_parts(present)
    return present, None, ()


def _refuse_lost_parts(present: Iterable[str]) -> None:
    """Without an index the names themselves tell how many parts there are."""
    sets: dict[tuple[str, int], set[int]] = {}
    for name in present:
        found = _SHARD_NAME.fullmatch(name)
        if found:
            sets.setdefault((found.group(1), int(found.group(3))), set()).add(int(found.group(2)))
    for (stem, count), numbers in sets.items():
        if len(numbers) < count:
            raise Refusal(
                f"checkpoint: {INDEX_NAME} is missing, and only {len(numbers)} of {count} parts of {stem} are here",
                "download the missing files into the same folder",
                Exit.CHECKPOINT,
            )


def _refuse_twice(headers: Mapping[str, Header]) -> None:
    """Raise the Refusal of a tensor that two files have."""
    first: dict[str, str] = {}
    for file, header in headers.items():
        for name in header.specs:
            if (before := first.setdefault(name, file)) != file:
                what = f"has the tensor {name[:120]!r}, and so has {before}"
                raise bad(file, what, "remove the file that does not belong to this checkpoint")


def read_tensors(folder: Path) -> tuple[tuple[Shard, ...], Tensors, tuple[str, ...]]:
    """(files, tensors by name, files left out by the index) of a checkpoint folder. Raises Refusal (code 4)."""
    shards: list[Shard] = []
    headers: dict[str, Header] = {}
    with without_gc():
        files, weight_map, unlisted = _files_of(folder)
        for file in files:
            shard, headers[file] = _read_header(folder / file, file)
            shards.append(shard)
        # A header may hold more than the index lists, never less.
        listed: dict[str, list[str]] = {file: [] for file in files}
        for name, file in (weight_map or {}).items():
            listed[file].append(name)
        for file, names in listed.items():
            lost = next(filterfalse(headers[file].specs.__contains__, names), None)
            if lost is not None:
                raise bad(file, f"lacks the tensor {lost[:120]!r} that {INDEX_NAME} places there")
        count = sum(shard.tensor_count for shard in shards)
        tensors = Tensors(headers, weight_map if weight_map and len(weight_map) == count else None)
        if len(tensors) < count:
            _refuse_twice(headers)
    return tuple(shards), tensors, unlisted


@contextmanager
def without_gc() -> Iterator[None]:
    """Millions of small objects and no cycle among them: the collector would only walk them, for half of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


# --- config -----------------------------------------------------------------------------------------------------------


def _is_number(value: Any) -> bool:
    # The bound keeps a slip of the keyboard from becoming a list or a search of that length.
    return type(value) is int and 0 <= value < _LARGEST_NUMBER


_KINDS: dict[str, tuple[str, Any]] = {
    "int": ("a whole number", lambda value: _is_number(value)),
    "str": ("a text", lambda value: isinstance(value, str)),
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "tuple[str, ...]": ("a list of texts", lambda value: all(isinstance(item, str) for item in value)),
    "tuple[int, ...]": (
        "a list of whole numbers",
        lambda value: all(_is_number(item) for item in value),
    ),
}
# Keys that the wrapper may state for the text model, and other spellings of a key.
_ALSO_OUTSIDE = frozenset({"split_ngram_parts", "tie_word_embeddings", "dtype", "eos_token_id"})
_OTHER_NAMES = {"dtype": "torch_dtype"}


def read_text_config(config: Mapping[str, Any], file: str = "config.json") -> TextConfig:
    """The text model's numbers out of a config.json, wrapper or flat.

    A value of the wrong kind, or one that contradicts another, is a Refusal (code 4).
    """
    inner = config.get("text_config", config)
    if not isinstance(inner, dict):
        raise bad(file, "has a text_config that is not an object")
    values = {}
    for entry in fields(TextConfig):
        places = (inner, config) if entry.name in _ALSO_OUTSIDE else (inner,)
        names = (entry.name, _OTHER_NAMES.get(entry.name, entry.name))
        value = next((place[name] for place in places for name in names if place.get(name) is not None), None)
        if value is None:
            continue
        kind = entry.type.removesuffix(" | None")
        if kind.startswith("tuple"):
            value = tuple(value) if isinstance(value, list) else (value,)
        words, right = _KINDS[kind]
        if not right(value):
            raise bad(file, f"{entry.name} is {str(value)[:60]!r}, not {words}", _TAKE_CONFIG)
        values[entry.name] = value
    text = TextConfig(**values)
    if text.num_hidden_layers is not None and not 0 < text.num_hidden_layers <= _MOST_LAYERS:
        raise bad(file, f"num_hidden_layers is {text.num_hidden_layers:,}", _TAKE_CONFIG)
    if text.layer_types is not None and text.num_hidden_layers not in (None, len(text.layer_types)):
        raise bad(
            file,
            f"names {len(text.layer_types)} layer_types for num_hidden_layers = {text.num_hidden_layers}",
            _TAKE_CONFIG,
        )
    for layer_id in text.ple_layer_ids or ():
        if not 1 <= layer_id <= (text.num_hidden_layers or layer_id):
            raise bad(
                file,
                f"ple_layer_ids names layer {layer_id} of {text.num_hidden_layers} (they count from 1)",
                _TAKE_CONFIG,
            )
    return text


def _small_files(folder: Path) -> tuple[Mapping[str, Any] | None, bool, bool]:
    """(generation config, is there a tokenizer, is there a chat template)."""

    def start(name: str) -> bytes | None:
        path = folder / name
        if not (path.exists() or path.is_symlink()):
            return None
        size_of(path, name)
        found = start_of(path, name, 256)
        refuse_pointer(found, name)
        return found

    def there(name: str) -> bool:
        return start(name) is not None

    def content(name: str) -> dict[str, Any] | None:
        return read_json(folder / name, name) if there(name) else None

    generation = content("generation_config.json")
    tokenizer = there("tokenizer.json") or there("tokenizer.model") or (there("vocab.json") and there("merges.txt"))
    template = any((start(name) or b"").strip() for name in ("chat_template.jinja", "chat_template.json"))
    if not template:
        template = bool((content("tokenizer_config.json") or {}).get("chat_template"))
    return generation, tokenizer, template


def read_checkpoint(path: str | Path, headers: bool = True, counted: Weights | None = None) -> Checkpoint:
    """The facts of the checkpoint in the folder `path`; `headers=False` reads the small files only, whose weights may be `counted`.

    Raises Refusal (code 4) for a folder that is not whole. A hub id gives a Checkpoint with local=False.
    """
    text_path = str(path)
    folder = Path(os.path.expanduser(path))
    name_it = "name the folder that holds config.json and the *.safetensors files (--model); flashnext fetch brings one"
    try:
        names = {entry.name for entry in folder.iterdir()}
    except (FileNotFoundError, ValueError):
        if _HUB_ID.fullmatch(text_path):
            return Checkpoint(path=text_path, local=False)
        raise Refusal(f"checkpoint folder {text_path!r} does not exist", name_it, Exit.CHECKPOINT) from None
    except NotADirectoryError:
        raise Refusal(f"checkpoint {text_path!r} is not a folder", name_it, Exit.CHECKPOINT) from None
    except OSError as error:
        fix = "give this user read access to it"
        raise Refusal(f"checkpoint folder {text_path!r}: {error.strerror}", fix, Exit.CHECKPOINT) from None
    if "config.json" not in names:
        what = "has no config.json" if names else "is empty (is the volume mounted?)"
        raise Refusal(f"checkpoint folder {text_path!r} {what}", name_it, Exit.CHECKPOINT)
    config = read_json(folder / "config.json", "config.json")
    text = read_text_config(config)
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise bad("config.json", "architectures is not a list of names", _TAKE_CONFIG)
    inner = config.get("text_config")
    quantization = config.get("quantization_config") or (inner or {}).get("quantization_config")
    if quantization is not None and not isinstance(quantization, dict):
        raise bad("config.json", "quantization_config is not an object", _TAKE_CONFIG)
    generation, tokenizer, chat_template = _small_files(folder)
    shards, tensors, unlisted = read_tensors(folder) if headers else ((), Tensors(), ())
    model_type, vision = config.get("model_type"), config.get("vision_config")
    return Checkpoint(
        path=text_path,
        architectures=tuple(architectures),
        model_type=model_type if isinstance(model_type, str) else None,
        multimodal=inner is not None,
        text=text,
        generation=generation,
        quantization=quantization,
        vision=vision if isinstance(vision, dict) else None,
        tokenizer=tokenizer,
        chat_template=chat_template,
        shards=shards,
        unlisted=unlisted,
        tensors=tensors,
        counted=counted,
    )
