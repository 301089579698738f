"""What one stage's card holds beside the KV pool, line by line. No decision here.

Order of the lines: weights by category after placement, what the kernels keep beside them, the peak of a step (`activation`), the
middle stages' buffers, graphs, CUDA itself, fragmentation where segments cannot grow, margin. Rules of thumb are rules.yaml's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from . import activation
from .activation import Step
from .budget import Line, Shapes, bounds
from .model import KINDS, REST, Model


@dataclass(frozen=True, kw_only=True)
class Cards:
    """The sizes of a model on any stage. `thumb` is rules.yaml, `expandable` PYTORCH_CUDA_ALLOC_CONF's expandable_segments."""

    shapes: Shapes
    model: Model
    thumb: Mapping[str, Mapping[str, Any]]
    expandable: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "_before", (0, *accumulate(self.model.layer_bytes)))

    def weight_bytes(self, start: int, stop: int) -> int:
        """Weights of the layers [start, stop), with the vocabulary where they are the first or the last ones."""
        whole = self._before[stop] - self._before[start]
        first = self.model.embed_bytes if start == 0 else 0
        return whole + first + (self.model.head_bytes if stop == self.shapes.layers else 0)

    def other(self, step: Step, graphs: int, middle: bool) -> tuple[Line, ...]:
        """Everything but weights and KV. `graphs` counts the captured sizes; `middle`: a stage that receives and sends."""

        def rule(name: str) -> tuple[int, str]:
            return self.thumb[name]["value"], self.thumb[name]["source"]

        fixed, source = rule("activation_fixed_bytes")
        why = f"derived: {step.rows} rows, context {step.context} (activation.py)"
        lines = [Line("workspaces of quantized weights", *rule("workspace_bytes"))]
        for what, size in activation.lines(self.shapes, step, fixed).items():
            lines.append(Line(f"peak of a step: {what}", size, source if what.startswith("workspaces") else why))
        if middle:
            row = self.thumb["middle_stage_bytes"]
            scaled = row["value"] * max(step.rows, row["rows"]) // row["rows"]
            lines.append(Line("middle stage: send and receive buffers", scaled, row["source"]))
        each, source = rule("graph_bytes")
        lines.append(Line(f"CUDA graphs, {graphs} sizes", graphs * each, source))
        lines.append(Line("CUDA context and NCCL", *rule("context_bytes")))
        if not self.expandable:
            lines.append(Line("fragmentation", *rule("fragmentation_bytes")))
        lines.append(Line("margin", *rule("margin_bytes")))
        return tuple(lines)

    def lines(self, partition: Sequence[int], stage: int, step: Step, graphs: int) -> tuple[Line, ...]:
        """The lines of a stage, whose sum is `weight_bytes` and the sum of `other`."""
        start, stop = bounds(partition)[stage]
        layers = self.model.layers[start:stop]
        out = []
        known = {category for categories in KINDS.values() for category in categories}
        rest = {category for layer in layers for category in layer} - known
        for what, categories in {**KINDS, REST: tuple(sorted(rest))}.items():
            size = sum(layer.get(category, 0) for layer in layers for category in categories)
            if size:
                out.append(Line(f"{what}, layers {start}-{stop - 1}", size, self.model.origin))
        if start == 0:
            out.append(Line("embedding", self.model.embed_bytes, self.model.origin))
        if stop == self.shapes.layers:
            head = self.model.last.get("head", 0)
            out.append(Line("output head", head, self.model.origin))
            if self.model.head_bytes > head:
                out.append(Line("last mixer and norm", self.model.head_bytes - head, self.model.origin))
        return (*out, *self.other(step, graphs, 0 < stage < len(partition) - 1))
