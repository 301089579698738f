"""Does an engine give the reference's answers? Decided from two JSON documents and the tolerances below; no engine here.

The reference is float32 on the CPU, the engine computes in BF16. What BF16 alone does was measured where the reference
was made: the same transformers model in bfloat16, at every position (`noise`: mean and largest movement of a
log-probability among the 20 most likely tokens). The engine rounds in other places (its kernels keep more in float32 than
PyTorch modules do, Marlin rounds dequantized weights once more), so its distance should be of that size, not equal to it.
Rule order:
1. mean distance over a prompt's generated positions at most MEAN times the noise's mean;
2. no single distance above MOST times the noise's largest;
3. the engine's token is the reference's wherever the reference's margin is above twice the bound of rule 2, and it is
   never one that the reference puts more than that below its best;
4. the prompt's own tokens: rules 1 and 2 again (they are compared at their own log-probability, likely or not);
5. `together` (each round of it) and `again`: rules 1 to 3 up to the first token that differs from the reference, and at least
   one position.
A wrong kernel, a swapped stream or a mis-read scale moves log-probabilities by tenths to whole nats at most positions
(tests/engine/test_checkpoints.py measures that for each part of the model), which rule 1 does not let through.
"""

from __future__ import annotations

MEAN = 2.0
MOST = 2.0

KNOWN = {
    "one": "vLLM 0.30.0 without any patch gives the very same wrong tokens for a prompt of a single token under full decode graphs: "
    "its first step is replayed as a decode, with state of an earlier request. A chat template never makes such a prompt"
}
"""Prompts whose faults are told apart (`known`) and do not fail an experiment, each with what was found."""


def distances(wanted: list, got: dict) -> list[float]:
    """|difference| at each of the reference's most likely tokens that the engine reports too (at least half must be)."""
    common = [abs(logp - got[str(token)]) for token, logp in wanted if str(token) in got]
    if 2 * len(common) < len(wanted):
        return [float("inf")]
    return common


def judge(prompt: dict, answer: dict, noise: dict) -> dict:
    """One prompt in one mode: what was measured and which rules failed (none: right)."""
    bound, faults, moved, flips = MOST * noise["max"], [], [], 0
    steps = len(prompt["greedy"])
    seen = 0
    for at, (token, got) in enumerate(zip(answer["tokens"], answer["top"], strict=True)):
        moved += distances(prompt["top"][at], got)
        seen += 1
        if token == prompt["greedy"][at]:
            continue
        flips += 1
        wanted = dict(map(tuple, prompt["top"][at]))
        below = prompt["top"][at][0][1] - wanted.get(token, float("-inf"))
        if below > 2 * bound:
            faults.append(f"position {at}: token {token} instead of {prompt['greedy'][at]}, {below:.2f} below it")
        if "prompt_logprobs" not in answer:
            break  # its history is no longer the reference's
    mean, most = sum(moved) / max(1, len(moved)), max(moved, default=0.0)
    if seen == 0 or ("prompt_logprobs" in answer and seen != steps):
        faults.append(f"{seen} of {steps} positions were answered")
    if mean > MEAN * noise["mean"]:
        faults.append(f"mean distance {mean:.4f} is above {MEAN * noise['mean']:.4f}")
    if most > bound:
        faults.append(f"largest distance {most:.3f} is above {bound:.3f}")
    out = {"positions": seen, "mean": mean, "most": most, "flips": flips}
    if "prompt_logprobs" in answer:
        given = [abs(a - b) for a, b in zip(prompt["prompt_logprobs"], answer["prompt_logprobs"], strict=True)]
        if given:
            out |= {"prompt_mean": sum(given) / len(given), "prompt_most": max(given)}
            if len(given) >= 20 and out["prompt_mean"] > MEAN * noise["mean"]:
                faults.append(f"prompt: mean distance {out['prompt_mean']:.4f} is above {MEAN * noise['mean']:.4f}")
            if out["prompt_most"] > bound:
                faults.append(f"prompt: largest distance {out['prompt_most']:.3f} is above {bound:.3f}")
    return out | {"faults": faults}


def judge_all(reference: dict, answers: dict) -> dict:
    """{mode: {prompt: judgement}}, `faults`, a flat list of all, and `known`, those of prompts in KNOWN."""
    modes: dict = {}
    faults: list[str] = []
    known: list[str] = []
    given = {mode: answers[mode] for mode in ("alone", "together", "again")}
    given |= {f"round {number}": found for number, found in enumerate(answers.get("rounds", []), 1)}
    for mode, found in given.items():
        modes[mode] = {}
        for prompt in reference["prompts"]:
            if prompt["name"] not in found:
                if mode != "again":
                    faults.append(f"{mode} {prompt['name']}: no answer")
                continue
            judged = judge(prompt, found[prompt["name"]], reference["noise"])
            modes[mode][prompt["name"]] = judged
            told = known if prompt["name"] in KNOWN else faults
            told += [f"{mode} {prompt['name']}: {fault}" for fault in judged["faults"]]
    return {"modes": modes, "faults": faults, "known": known}


BARS = {"decode far": 0.97, "decode": 0.93, "prefill": 0.8, "memory_mib": 16}
"""Least decode rate at the longest context against the shortest; least decode rate at the shortest context, and prefill rate at
the longest context up to 131,072 tokens, against K/V on the card; most card memory that the longest context may take above the shortest."""


def judge_rates(host: list[dict], card: list[dict]) -> list[str]:
    """What is below the bars, K/V in host memory against K/V on the card; [] if nothing is."""
    faults = []
    host, card = ([row for row in rows if row["streams"] == 1] for rows in (host, card))
    by_context = {row["context"]: row for row in card}
    near, far = host[0], host[-1]

    def bar(name: str, what: str, got: float, against: float) -> None:
        if got < BARS[name] * against:
            faults.append(f"{what}: {got:.1f} tokens/s, {got / against:.3f} of {against:.1f}, bar {BARS[name]}")

    bar(
        "decode far",
        f"decode at {far['context']} against {near['context']}",
        far["decode_tokens_per_s"],
        near["decode_tokens_per_s"],
    )
    other = by_context[near["context"]]
    bar(
        "decode",
        f"decode at {near['context']} against K/V on the card",
        near["decode_tokens_per_s"],
        other["decode_tokens_per_s"],
    )
    long = max(row["context"] for row in host if row["context"] <= 131_072)
    mine = next(row for row in host if row["context"] == long)
    bar(
        "prefill",
        f"prefill of {long} against K/V on the card",
        mine["prefill_tokens_per_s"],
        by_context[long]["prefill_tokens_per_s"],
    )
    for number, (first, last) in enumerate(zip(near["cards_mib"], far["cards_mib"], strict=True)):
        if last - first > BARS["memory_mib"]:
            faults.append(f"card {number}: {last - first} MiB more at {far['context']} than at {near['context']}")
    return faults
