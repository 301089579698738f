"""Decides what becomes of the user's own arguments for `vllm serve`: merged, appended, or refused by name.

Rule order
1. A flag that carries an invariant of the plan is refused with that invariant (`OURS`).
2. `--compilation-config` in either form (one JSON, or dotted `--compilation-config.key value`) is merged into the plan's one JSON:
   vLLM 0.30.0 silently keeps only the last of two forms. Keys that carry an invariant are refused.
3. A flag that the plan also sets replaces the plan's value; any other is appended as it stands, for vLLM's parser to judge.
"""

from __future__ import annotations

import json
import shlex
from typing import Any

from .errors import Exit, Refusal

# flag -> why the plan owns it, and the wish that changes it where there is one
OURS = {
    "--model": ("the checkpoint is checked before the start", "FLASHNEXT_MODEL"),
    "--tensor-parallel-size": ("the table and host K/V belong to one card per stage", None),
    "-tp": ("the table and host K/V belong to one card per stage", None),
    "--pipeline-parallel-size": ("it follows from the cards", "CUDA_VISIBLE_DEVICES"),
    "-pp": ("it follows from the cards", "CUDA_VISIBLE_DEVICES"),
    "--data-parallel-size": ("one engine owns all cards", None),
    "--kv-cache-memory-bytes": ("the host pool is sized from it", "FLASHNEXT_KV_CACHE_MEMORY"),
    "--kv-cache-memory": ("the host pool is sized from it", "FLASHNEXT_KV_CACHE_MEMORY"),
    "--max-model-len": ("the pool must hold one full request", "FLASHNEXT_CONTEXT"),
    "--max-num-seqs": ("graphs are captured for each batch size", "FLASHNEXT_STREAMS"),
    "--max-num-batched-tokens": ("the activation peak follows from it", "FLASHNEXT_CHUNK"),
    "--enable-prefix-caching": ("prefill would be cut at blocks larger than a step and never be scheduled", None),
    "--no-async-scheduling": ("it costs 15 % of decoding", None),
    "--kv-cache-dtype": ("FP8 K/V does not compile on compute capability 8.6 with this engine", None),
    "--block-size": ("the block follows from the state page", None),
    "--speculative-config": ("drafts are not supported together with the host pool", None),
    "--api-key": ("a key on the command line is visible to every process", "FLASHNEXT_API_KEY_FILE"),
    "--host": ("the healthcheck must find the server", "FLASHNEXT_HOST"),
    "--port": ("the healthcheck must find the server", "FLASHNEXT_PORT"),
    "--served-model-name": ("the plan names the model", "FLASHNEXT_MODEL_NAME"),
    "--additional-config": ("it carries this kit's own settings", None),
    "--config": ("a second source of settings would not be checked", None),
}
OUR_COMPILATION_KEYS = {
    "cudagraph_capture_sizes": "a batch size without a graph costs four times the step; FLASHNEXT_STREAMS sets the sizes",
    "mode": "this architecture runs without compilation in vLLM 0.30.0",
}
CC = "--compilation-config"


def _refuse(flag: str, why: str, wish: str | None) -> Refusal:
    return Refusal(
        f"FLASHNEXT_EXTRA_ARGS sets {flag}: {why}", f"use {wish} instead" if wish else f"leave {flag} out", Exit.PLAN
    )


def split(text: str) -> list[tuple[str, str | None]]:
    """(flag, value or None) pairs of a shell-like string. Raises Refusal (code 2) for open quotes or a value without a flag."""
    try:
        words = shlex.split(text)
    except ValueError as e:
        raise Refusal(f"FLASHNEXT_EXTRA_ARGS cannot be read: {e}", "close the quotes", Exit.USAGE) from None
    pairs: list[tuple[str, str | None]] = []
    for word in words:
        if word.startswith("-") and not word.lstrip("-").replace(".", "").isdigit():
            flag, equals, value = word.partition("=")
            pairs.append((flag.replace("_", "-") if not flag.startswith(CC + ".") else flag, value if equals else None))
        elif pairs and pairs[-1][1] is None:
            pairs[-1] = (pairs[-1][0], word)
        else:
            raise Refusal(
                f"FLASHNEXT_EXTRA_ARGS: {word!r} belongs to no flag",
                "write --flag value, quoted where there are spaces",
                Exit.USAGE,
            )
    return pairs


def _set(target: dict[str, Any], path: list[str], value: Any) -> None:
    for key in path[:-1]:
        target = target.setdefault(key, {})
    target[path[-1]] = value


def _compilation(flag: str, value: str | None) -> dict[str, Any]:
    """What one --compilation-config argument sets, as a nested dict."""
    try:
        if flag == CC:
            parsed = json.loads(value or "")
            if not isinstance(parsed, dict):
                raise ValueError
            return parsed
        out: dict[str, Any] = {}
        try:
            inner: Any = json.loads(value or "")
        except ValueError:
            inner = value
        _set(out, flag.removeprefix(CC + ".").split("."), inner)
        return out
    except (ValueError, AttributeError):
        raise Refusal(
            f"FLASHNEXT_EXTRA_ARGS: {flag} {value!r} is not a JSON object",
            f"write {CC} '{{\"key\": value}}'",
            Exit.USAGE,
        ) from None


def merge(settings: list, text: str, source: str) -> list:
    """`settings` (plan.Setting) with the user's arguments in `text` worked in. Raises Refusal (code 2 or 3)."""
    if not text.strip():
        return settings
    make = type(settings[0])
    out = list(settings)
    at = {s.name: i for i, s in enumerate(out) if s.kind == "arg"}
    for flag, value in split(text):
        if flag in OURS and flag not in (CC,):
            raise _refuse(flag, *OURS[flag])
        if flag == CC or flag.startswith(CC + "."):
            added = _compilation(flag, value)
            for key in added:
                if key in OUR_COMPILATION_KEYS:
                    raise _refuse(f"{CC}.{key}", OUR_COMPILATION_KEYS[key], None)
            if CC in at:
                old = out[at[CC]]
                merged = {**json.loads(old.value), **added}
                out[at[CC]] = make(
                    "arg",
                    CC,
                    json.dumps(merged, separators=(",", ":")),
                    "wished",
                    f"merged with {source}; {old.reason}",
                )
                continue
            flag, value = CC, json.dumps(added, separators=(",", ":"))
        if not flag.startswith("--"):
            raise Refusal(
                f"FLASHNEXT_EXTRA_ARGS: {flag} is a short form", "write the long form, which can be checked", Exit.USAGE
            )
        row = make("arg", flag, value, "wished", source)
        if flag in at:
            out[at[flag]] = row
        else:
            at[flag] = len(out)
            out.append(row)
    return out
