# SPDX-License-Identifier: Apache-2.0
"""Decide whether a compressed-tensors checkpoint leaves the N-gram table in BF16, from its targets and ignores.

The table is one embedding in vLLM (`...ple.ple_embedding.ngram_embedding`), `split_ngram_parts` tensors named
`shard_K` below it in a checkpoint, and an nn.Embedding for an exporter. vLLM 0.30.0 has no way to read it quantized by
compressed-tensors, and refuses the format as such; most such checkpoints never touch the table. Rules, in order:

1. Another format: not for us to say (False); upstream decides.
2. A target that names the table or one of its shards by path or regular expression, or embeddings by class name, and no
   ignore entry that takes it out again: refused, naming the target.
3. Otherwise the table is not quantized (True).
"""

from typing import Any

from flashnext.quantized_vocab import scheme_source
from flashnext.scheme_map import describe, resolver

EXPORT_CLASS = "Embedding"
SHARDS_TO_ASK = 512  # the architecture's default number of parts; the published table has 128


def is_unquantized(quant_config: Any | None, prefix: str) -> bool:
    """True if `quant_config` is compressed-tensors and leaves the table `prefix` alone; False if it is another format.

    Raises ValueError, one line, if a group names the table.
    """
    quant_config = scheme_source(quant_config)
    if quant_config is None:
        return False
    lookup = resolver(quant_config)
    for name in (prefix, *(f"{prefix}.shard_{part}" for part in range(SHARDS_TO_ASK))):
        if lookup.is_ignored(name) or lookup.is_ignored(EXPORT_CLASS):
            continue
        target = lookup.target(name, EXPORT_CLASS)
        if target is not None:
            scheme = lookup.schemes[target]
            group = lookup.group_of(target)
            raise ValueError(
                f"flashnext: target `{target}`{f' of {group}' if group else ''} quantizes the N-gram table ({name}: "
                f"{describe(scheme)}), and this engine reads the table in BF16 only. Fix: leave the table in BF16 and "
                f"take it out of the targets, or add `re:.*ngram_embedding.*` to ignore if it is in BF16 already"
            )
    return True
