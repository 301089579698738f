# SPDX-License-Identifier: Apache-2.0
"""Decide how the projections of a hyper-connection are laid out: one fused linear for down and injection, or two.

From the schemes that the checkpoint's quantization_config gives to `input_mix_weight_down`, `block_inject_weight` and
`input_mix_weight_up`. Upstream fuses down [hc_lowrank, hc_count * hidden] and injection [hc_count, hc_count * hidden]
into one linear, padded to 16 rows, and never quantizes it. Rules, in order:

1. Any format but compressed-tensors: upstream's fused linear, no quantization, as before.
2. A group size that does not divide the row of its matrix is refused by name (`up` has rows of hc_lowrank values: 320
   with groups of 128 is two groups and a half).
3. Neither down nor injection quantized: upstream's fused linear, the same object as without this patch.
4. Both with one scheme: the fused linear, with that scheme.
5. Different schemes: two linears (`SplitDownInject`) in the place of the fused one.

`SplitDownInject` stands under the fused linear's name and takes its tensors under the names that upstream's weight
mapping makes of the checkpoint's (`...input_mix_weight_down_block_inject.X`, shard 0 or 1), so that mapping is left as
it is and each hyper-connection decides for itself. Both of its products are separate tensors with unit inner stride,
which the kernels after it take as they take slices of the fused product: no copy joins them, nothing in it depends on
the batch, and a CUDA graph captures it like any two linears.
"""

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, ReplicatedLinear
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from flashnext.quantized_vocab import scheme_source
from flashnext.scheme_map import Resolver, describe, resolver

DOWN, INJECT, UP = "input_mix_weight_down", "block_inject_weight", "input_mix_weight_up"
SHARDS = (DOWN, INJECT)  # index = shard id in upstream's weight mapping


def checked(quant_config: Any | None, prefix: str, residual: Any) -> Any | None:
    """The quantization config that the linears below `prefix` get (rule 1), after rule 2 for each of them.

    `residual` is the GatedResidual being built; hyper_hidden_size and lora_rank are read. Raises ValueError.
    """
    quant_config = scheme_source(quant_config)
    if quant_config is None:
        return None
    lookup = resolver(quant_config)
    in_features = {DOWN: residual.hyper_hidden_size, INJECT: residual.hyper_hidden_size, UP: residual.lora_rank}
    for projection, length in in_features.items():
        name = _child(prefix, projection)
        scheme = lookup.scheme(name, ReplicatedLinear.__name__)
        size = scheme["weights"].group_size if scheme and scheme.get("weights") else None
        if size and size > 0 and length % size:
            raise ValueError(
                f"flashnext: {name} is {describe(scheme)}, but its rows of {length} values are {length / size:g} groups "
                f"of {size}. Fix: quantize it per channel, or with a group size that divides {length} "
                f"(the kernels take {', '.join(str(s) for s in (32, 64, 128) if length % s == 0) or 'per channel only'})"
            )
    return quant_config


def _child(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _schemes(lookup: Resolver, parent: str) -> list[dict[str, Any] | None]:
    return [lookup.scheme(_child(parent, shard), ReplicatedLinear.__name__) for shard in SHARDS]


def down_and_inject_linear(
    input_size: int,
    output_sizes: Sequence[int],
    *,
    params_dtype: torch.dtype,
    quant_config: Any | None,
    prefix: str,
    **kwargs: Any,
) -> nn.Module:
    """Rules 3 to 5, called as upstream calls MergedColumnParallelLinear; `output_sizes` is [rank, hc_count, padding]."""

    def fused(config: Any | None) -> MergedColumnParallelLinear:
        return MergedColumnParallelLinear(
            input_size, list(output_sizes), params_dtype=params_dtype, quant_config=config, prefix=prefix, **kwargs
        )

    if quant_config is None:
        return fused(None)
    parent = prefix.rpartition(".")[0]
    lookup = resolver(quant_config)
    down, inject = _schemes(lookup, parent)
    if not lookup.same(down, inject):
        rank, hc_count = output_sizes[:2]
        return SplitDownInject(
            input_size, rank, hc_count, params_dtype=params_dtype, quant_config=quant_config, parent=parent
        )
    return fused(None if down is None else _without_padding_shard(quant_config, prefix.rpartition(".")[2]))


def _without_padding_shard(quant_config: Any, fused_name: str) -> Any:
    """A copy of the config for which the fused linear consists of the checkpoint's two shards only.

    The padding rows are in no checkpoint, so no target names them, and upstream would leave the whole linear in BF16.
    """
    own = copy.copy(quant_config)
    own.packed_modules_mapping = {**quant_config.packed_modules_mapping, fused_name: list(SHARDS)}
    return own


def down_and_inject(residual: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The down product [tokens, rank] and the injection logits [tokens, hc_count] of x [tokens, hc_count * hidden].

    `residual` is the GatedResidual whose projections are used.
    """
    product = residual.input_mix_weight_down_block_inject(x)
    if isinstance(product, tuple):
        return product
    down, injection, _ = product.split([residual.lora_rank, residual.hc_count, residual.pad_size], dim=-1)
    return down, injection


class SplitDownInject(nn.Module):
    """Down and injection as two linears with a scheme each, in the place of upstream's fused linear."""

    def __init__(
        self, input_size: int, rank: int, hc_count: int, *, params_dtype: torch.dtype, quant_config: Any, parent: str
    ) -> None:
        super().__init__()
        for shard, rows in zip(SHARDS, (rank, hc_count), strict=True):
            linear = ReplicatedLinear(
                input_size,
                rows,
                bias=False,
                params_dtype=params_dtype,
                quant_config=quant_config,
                prefix=_child(parent, shard),
                return_bias=False,
            )
            self.add_module(shard, linear)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.input_mix_weight_down(x), self.block_inject_weight(x)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Give each tensor to the shard that its mark (`shard_id`, set by upstream's mapping) or its name says.

        Raises ValueError for a tensor that its shard has no parameter for, naming both.
        """
        loaded: set[str] = set()
        for name, tensor in weights:
            shard_id = getattr(tensor, "shard_id", None)
            full = name if shard_id is None else f"{SHARDS[shard_id]}.{name}"
            shard, _, parameter = full.partition(".")
            linear = self._modules.get(shard)
            param = dict(linear.named_parameters()).get(parameter) if linear is not None else None
            if param is None:
                held = ", ".join(name for name, _ in self.named_parameters())
                raise ValueError(
                    f"flashnext: the checkpoint has {full} for a hyper-connection, which has {held}. "
                    "Fix: check that quantization_config in config.json belongs to these shards"
                )
            getattr(param, "weight_loader", default_weight_loader)(param, tensor)
            loaded.add(full)
        return loaded
