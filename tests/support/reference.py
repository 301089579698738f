"""What transformers answers on the float32 weights that a checkpoint stands for: the file that answers are held against.

What it decides: nothing of the engine's. It runs transformers' own model of the architecture on the CPU in float32 and
writes, for each prompt, the greedy continuation, the log-probability of every prompt token, and the TOP most likely
tokens with their log-probabilities at every generated position. Two passes a prompt: a cached greedy generation gives the
continuation, and one uncached pass over prompt and continuation gives every number written; the two must agree on the
tokens, so a fault of the cache cannot become the reference.

`noise` says what BF16 arithmetic alone does to these numbers: the same model in bfloat16 over some of the prompts. The
tolerances of tests/gpu are multiples of it, since the engine computes in BF16 as well.

    python -m tests.support.reference VARIANT PLAIN OUT.json --checkpoint DIR [--short]

PLAIN is the folder that `checkpoints --dequantized` wrote; --checkpoint names the quantized one, whose digest goes into the
file; --short takes a third of the prompts.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib

import numpy as np
import torch

from . import checkpoints

TOP = 20
SCHEMA = 1


@dataclasses.dataclass(frozen=True)
class Prompt:
    """`length` random tokens, then `steps` greedy ones. `why`: the edge of the engine that this length touches."""

    name: str
    length: int
    steps: int
    why: str
    short: bool = False
    eos_at: tuple[int, ...] = ()


PROMPTS = (
    Prompt("one", 1, 16, "a single token; n-gram context and short convolutions start empty", short=True),
    Prompt("three", 3, 16, "shorter than a block of four keys"),
    Prompt("sixty-three", 63, 16, "generation crosses the linear attention's chunk of 64", short=True),
    Prompt("eos-inside", 200, 16, "the n-gram context restarts after an end token", eos_at=(70, 71, 150)),
    Prompt("chunk-less-one", 511, 12, "generation crosses the scheduler's chunk of 512"),
    Prompt("chunk-and-one", 513, 12, "a second chunk of a single token", short=True),
    Prompt("budget-edge", 2042, 16, "generation crosses 2048 and 2052 tokens, where selection begins"),
    Prompt("past-budget", 2500, 16, "blocks are left out of the attention; five chunks", short=True),
)


def tokens(prompt: Prompt, eos: int) -> list[int]:
    """The prompt's ids, a pure function of its name: anything but the special tokens, then EOS where asked."""
    raw = np.random.PCG64(int.from_bytes(prompt.name.encode()[:15], "little")).random_raw(prompt.length)
    ids = [int(v % np.uint64(eos)) for v in raw]
    for at in prompt.eos_at:
        ids[at] = eos
    return ids


def log_probs(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    """float32 [len(ids), vocab]: row i is the distribution of the token after ids[i]. No cache."""
    with torch.inference_mode():
        logits = model(torch.tensor([ids]), use_cache=False).logits[0]
    return torch.log_softmax(logits.float(), dim=-1)


def greedy(model: torch.nn.Module, ids: list[int], steps: int) -> list[int]:
    """The continuation by argmax with the cache, as a server generates it."""
    out: list[int] = []
    with torch.inference_mode():
        last = model(torch.tensor([ids]), use_cache=True)
        for _ in range(steps):
            out.append(int(last.logits[0, -1].argmax()))
            last = model(torch.tensor([out[-1:]]), cache=last.cache, use_cache=True)
    return out


def difference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """|a - b| at the TOP most likely tokens of `a`, rows by TOP."""
    return (a - b).gather(1, a.topk(TOP).indices).abs()


def run(
    prompt: Prompt, model: torch.nn.Module, coarse: torch.nn.Module | None, eos: int
) -> tuple[dict, torch.Tensor | None]:
    ids = tokens(prompt, eos)
    continuation = greedy(model, ids, prompt.steps)
    rows = log_probs(model, ids + continuation)
    own = rows[len(ids) - 1 : -1]
    if own.argmax(-1).tolist() != continuation:
        raise SystemExit(f"{prompt.name}: transformers disagrees with itself between cached and uncached passes")
    best = own.topk(TOP)
    given = torch.tensor(ids[1:], dtype=torch.long)
    result = {
        "name": prompt.name,
        "why": prompt.why,
        "prompt": ids,
        "greedy": continuation,
        "prompt_logprobs": [round(v, 4) for v in rows[: len(ids) - 1].gather(1, given[:, None])[:, 0].tolist()],
        "margin": [round(v, 4) for v in (best.values[:, 0] - best.values[:, 1]).tolist()],
        "top": [
            [[token, round(logp, 4)] for token, logp in zip(*step, strict=True)]
            for step in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ],
    }
    return result, difference(rows, log_probs(coarse, ids + continuation)) if coarse is not None else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variant", choices=checkpoints.VARIANTS)
    parser.add_argument("plain", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--checkpoint", type=pathlib.Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--short", action="store_true")
    opt = parser.parse_args()

    import transformers
    from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpForCausalLM

    transformers.logging.set_verbosity_error()
    model, report = Qwen4ExpForCausalLM.from_pretrained(opt.plain, dtype=torch.float32, output_loading_info=True)
    if report["missing_keys"] or report["unexpected_keys"] or report["mismatched_keys"]:
        raise SystemExit(f"transformers did not take the checkpoint as it is: {report}")
    coarse = Qwen4ExpForCausalLM.from_pretrained(opt.plain, dtype=torch.bfloat16).eval()
    eos = checkpoints.shape_of(opt.variant).eos
    results, noise = [], []
    for prompt in PROMPTS:
        if opt.short and not prompt.short:
            continue
        result, rough = run(prompt, model.eval(), coarse, eos)
        results.append(result)
        noise.append(rough.flatten())
        print(
            f"{prompt.name}: {prompt.length} tokens, BF16 moves log-probabilities by {rough.mean():.4f} (most {rough.max():.3f})",
            flush=True,
        )
    moved = torch.cat(noise)
    document = {
        "schema": SCHEMA,
        "variant": opt.variant,
        "seed": opt.seed,
        "digest": checkpoints.digest(opt.checkpoint),
        "made_with": {"transformers": transformers.__version__, "torch": torch.__version__},
        "noise": {
            "mean": round(float(moved.mean()), 5),
            "p99": round(float(np.quantile(moved.numpy(), 0.99)), 4),
            "max": round(float(moved.max()), 4),
            "values": moved.numel(),
        },
        "prompts": results,
    }
    opt.out.write_text(json.dumps(document, separators=(",", ":")) + "\n", encoding="utf-8")
    print(f"{opt.out}: {len(results)} prompts, {opt.out.stat().st_size / 1e3:.0f} kB, noise {document['noise']}")


if __name__ == "__main__":
    main()
