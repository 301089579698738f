"""Test only: what a pipeline stage that does not sample knows of the sampled tokens, step by step.

vLLM 0.30.0 sends a sampled token from the last stage to the others on a stream of its own and applies it some steps later
(v1/worker/gpu/pp_utils.py). The trace says for each step whether a token was there to apply, which one, on which streams, and which
token the step then took as its input. Values are copied on the device in stream order and looked at when STEPS have passed, so the
trace waits for nothing and does not change who comes first. Lines of a step in the worker's log:

    step_trace 12 apply waiting=[True, False] landed=False streams=main 0x... current 0x... tokens=[[877]] slots=[0]
    step_trace 12 input rows=1 before=[877, ...] ids=[877, ...] slots=[0] last=[[877], ...] context=[[...], ...]
"""

from __future__ import annotations

import sys

STEPS = 160


class Trace:
    """Lines of one process. `keep` takes tensors (copied now, read at the end) and anything that can be printed."""

    def __init__(self) -> None:
        self.steps = 0
        self.kept: list[tuple[str, dict]] = []
        self.is_told = False

    def keep(self, event: str, **values) -> None:
        if self.is_told:
            return
        if event == "apply":
            self.steps += 1
        if self.steps > STEPS:
            self.tell()
            return
        self.kept.append((event, {name: v.clone() if hasattr(v, "clone") else v for name, v in values.items()}))

    def tell(self) -> None:
        import torch

        self.is_told = True
        torch.accelerator.synchronize()
        step = 0
        for event, values in self.kept:
            step += event == "apply"
            words = " ".join(f"{k}={v.tolist() if hasattr(v, 'tolist') else v}" for k, v in values.items())
            print(f"step_trace {step} {event} {words}", file=sys.stderr, flush=True)


def register() -> None:
    import torch
    from vllm.v1.worker.gpu import pp_utils

    handler, trace = pp_utils.PPHandler, Trace()
    if hasattr(handler, "step_trace"):  # plugins are asked for more than once
        return
    handler.step_trace = trace
    get, receive = handler.get_prev_sampled_outputs, handler.receive

    def streams(self) -> str:
        return f"main {self.main_stream.cuda_stream:#x} current {torch.cuda.current_stream().cuda_stream:#x}"

    def traced_get(self, *args):
        waiting = [entry is not None for entry in self.queue]
        landed = self.queue[0].event.query() if self.queue and self.queue[0] is not None else None
        out = get(self, *args)
        if not self.is_last_rank:
            there = {} if out is None else {"tokens": out["sampled_tokens"], "slots": out["idx_mapping"]}
            trace.keep("apply", waiting=waiting, landed=landed, streams=streams(self), **there)
        return out

    def traced_receive(self, input_batch):
        needed = pp_utils.compute_need_sampled_mask(input_batch)
        trace.keep(
            "receive", needed=None if needed is None else needed.tolist(), slots=input_batch.idx_mapping_np.tolist()
        )
        return receive(self, input_batch)

    handler.get_prev_sampled_outputs, handler.receive = traced_get, traced_receive

    init = handler.__init__

    def traced_init(self, *args, **kwargs):
        init(self, *args, **kwargs)
        if not self.is_last_rank:
            _trace_inputs(trace)  # here, where the model's modules are about to be imported anyway

    handler.__init__ = traced_init


def _trace_inputs(trace: Trace) -> None:
    import vllm.models.qwen4_exp.nvidia.model  # noqa: F401  first: its modules import one another
    from vllm.models.qwen4_exp.nvidia import model_state

    prepare = model_state.Qwen4ExpModelState.prepare_inputs

    def traced_prepare(self, input_batch, req_states):
        before = input_batch.input_ids[:8].clone()
        out = prepare(self, input_batch, req_states)
        # Again behind the step's own waits: a token that came in between is a difference.
        trace.keep(
            "input",
            rows=input_batch.num_tokens,
            before=before,
            ids=input_batch.input_ids[:8],
            slots=input_batch.idx_mapping_np.tolist(),
            last=req_states.last_sampled_tokens[:4],
            context=self.ngram_context[:4],
        )
        return out

    model_state.Qwen4ExpModelState.prepare_inputs = traced_prepare
