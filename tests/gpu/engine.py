"""Boot one engine in this process, let it answer the reference's prompts, and write what came out as JSON.

Run as a program by tests/gpu/experiments.py, one process an experiment, so that a fault of one cannot touch the next.
Nothing is judged here. For each prompt of the reference:

  alone      by itself: greedy tokens and the log-probabilities of the most likely ones, by decoding. Where the engine takes
             another token than the reference, the rest is asked for again behind the reference's own tokens, so that every
             position is compared under the same history. Log-probabilities of the prompt's tokens come from the prefill.
  together   four at a time, started at once, lengths mixed, so that prefill of one meets decoding of others
  again      the first prompts once more at the end, when every state slot has been used by others
  rounds     `together` as often again as --rounds says

    engine.py --model DIR --reference FILE --out FILE [--stages N] [--arguments JSON]      answers
    engine.py --model DIR --lengths N,... --out FILE [...]         a reference of its own: its greedy answers to such prompts
    engine.py --model DIR --dummy --out FILE --stages N [...]      no weights: boots, generates
    engine.py --model DIR --dummy --contexts N,... --out FILE [...]    no weights: rates and card memory, one request each, then four of the first
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import time

TOP = 20
STREAMS = 4


def arguments(opt: argparse.Namespace) -> dict:
    """What a 24 GB card is served with, on a small scale: chunks of 512, graphs for decoding only, no prefix cache."""
    base = {
        "model": opt.model,
        "dtype": "bfloat16",
        "pipeline_parallel_size": opt.stages,
        "skip_tokenizer_init": True,
        "max_model_len": 4096,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 512,
        "enable_prefix_caching": False,
        "gpu_memory_utilization": 0.9,
        "kv_cache_memory_bytes": 2_000_000_000,
        "max_logprobs": TOP,
        "gdn_prefill_backend": "triton",
        "kernel_config": {"enable_flashinfer_autotune": False},
        "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4]},
        "seed": 0,
    }
    if opt.stages > 1:
        base["distributed_executor_backend"] = "mp"
    if opt.dummy:
        base |= {"load_format": "dummy", "max_model_len": 32768}
    return base | json.loads(opt.arguments)


class Asker:
    """The engine, asked with token ids; answers are plain lists."""

    def __init__(self, llm) -> None:
        self.llm = llm

    def ask(self, requests: list[tuple[list[int], int]], prompt_logprobs: bool = False) -> list[dict]:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        sampling = [
            SamplingParams(
                temperature=0.0,
                max_tokens=steps,
                ignore_eos=True,
                logprobs=TOP,
                prompt_logprobs=0 if prompt_logprobs else None,
                detokenize=False,
            )
            for _, steps in requests
        ]
        outputs = self.llm.generate(
            [TokensPrompt(prompt_token_ids=ids) for ids, _ in requests], sampling, use_tqdm=False
        )
        answers = []
        for (ids, _), output in zip(requests, outputs, strict=True):
            best = output.outputs[0]
            top = [{str(token): entry.logprob for token, entry in step.items()} for step in best.logprobs]
            answer = {"tokens": list(best.token_ids), "top": top}
            if prompt_logprobs:
                rows = output.prompt_logprobs
                answer["prompt_logprobs"] = [rows[n][token].logprob for n, token in enumerate(ids) if n]
            answers.append(answer)
        return answers

    def alone(self, prompt: dict) -> dict:
        """Every position under the reference's history; `taken` are the engine's own tokens there."""
        ids, greedy = prompt["prompt"], prompt["greedy"]
        taken, top, given = [], [], None
        while len(taken) < len(greedy):
            done = len(taken)
            answer = self.ask([(ids + greedy[:done], len(greedy) - done)], prompt_logprobs=given is None)[0]
            given = given if given is not None else answer["prompt_logprobs"]
            for token, step in zip(answer["tokens"], answer["top"], strict=True):
                taken.append(token)
                top.append(step)
                if token != greedy[len(taken) - 1]:
                    break
        return {"tokens": taken, "top": top, "prompt_logprobs": given}


def tokens_of(length: int, most: int) -> list[int]:
    """A prompt of so many tokens below `most`, another for each length; the highest ids are the tokenizer's own."""
    return [random.Random(length * 7919 + n).randrange(most - 64) for n in range(length)]


def own_reference(asker: Asker, lengths: list[int], most: int) -> dict:
    """The engine's greedy answers as a document that `answers` and `compare` take for a reference."""
    prompts = []
    for length in lengths:
        ids = tokens_of(length, most)
        answer = asker.ask([(ids, 16)], prompt_logprobs=True)[0]
        top = [sorted(([int(t), logp] for t, logp in step.items()), key=lambda x: -x[1]) for step in answer["top"]]
        prompts.append(
            {
                "name": "one" if length == 1 else f"{length} tokens",
                "prompt": ids,
                "greedy": answer["tokens"],
                "top": top,
            }
            | {"prompt_logprobs": answer["prompt_logprobs"]}
        )
        print(f"ANSWERED {length} tokens", flush=True)
    return {"prompts": prompts}


def stream_rate(found: list[list[float]]) -> float:
    """Tokens per second of all streams together while every one of them decodes. `found`: for each, when each token came."""
    begin, end = max(times[0] for times in found), min(times[-1] for times in found)
    if end <= begin:
        raise ValueError("no time at which every stream decodes: ask for more tokens")
    return sum(sum(begin < t <= end for t in times) for times in found) / (end - begin)


def rates(asker: Asker, contexts: list[int], most: int) -> list[dict]:
    """One request of each context by itself, then STREAMS of the first at once: tokens per second of all of them before and
    after their first tokens, and the cards' memory."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    core = asker.llm.llm_engine
    rows = []
    asker.ask([(tokens_of(700, most), 16)])
    for context, streams in [(context, 1) for context in contexts] + [(contexts[0], STREAMS)]:
        # Streams begin one after another: enough tokens that the first still decodes when the last one does.
        sampling = SamplingParams(temperature=0.0, max_tokens=128 * streams + 1, ignore_eos=True, detokenize=False)
        came: dict[str, list[float]] = {f"{context}-{n}": [] for n in range(streams)}
        begun = time.monotonic()
        for n, name in enumerate(came):
            prompt = TokensPrompt(prompt_token_ids=tokens_of(context + n, most)[n:])
            core.add_request(name, prompt, sampling)
        while core.has_unfinished_requests():
            for output in core.step():
                new = len(output.outputs[0].token_ids) - len(came[output.request_id])
                came[output.request_id] += [time.monotonic()] * new
        mine = ["-i", os.environ["CUDA_VISIBLE_DEVICES"]]  # nvidia-smi itself lists every card
        query = ["--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        listed = subprocess.run(["nvidia-smi", *mine, *query], capture_output=True, text=True, check=True)
        rows.append(
            {
                "context": context,
                "streams": streams,
                "prefill_tokens_per_s": streams * context / (max(times[0] for times in came.values()) - begun),
                "decode_tokens_per_s": stream_rate(list(came.values())),
                "cards_mib": [int(line) for line in listed.stdout.split()],
            }
        )
        print(f"RATES {json.dumps(rows[-1])}", flush=True)
    return rows


def answers(asker: Asker, prompts: list[dict], rounds: int) -> dict:
    out: dict = {"alone": {}, "together": {}, "again": {}}
    start = time.monotonic()
    for prompt in prompts:
        out["alone"][prompt["name"]] = asker.alone(prompt)
        print(f"ANSWERED {prompt['name']} {time.monotonic() - start:.1f} s", flush=True)
    # Short and long in one group: the long ones are still in prefill when the short ones decode.
    order = sorted(prompts, key=lambda p: len(p["prompt"]))
    mixed = [p for pair in zip(order, reversed(order), strict=True) for p in pair][: len(order)]

    def together() -> dict:
        found = {}
        for at in range(0, len(mixed), 4):
            group = mixed[at : at + 4]
            for prompt, answer in zip(group, asker.ask([(p["prompt"], len(p["greedy"])) for p in group]), strict=True):
                found[prompt["name"]] = answer
        return found

    out["together"] = together()
    out["rounds"] = [together() for _ in range(rounds)]
    for prompt in prompts[:3]:
        out["again"][prompt["name"]] = asker.ask([(prompt["prompt"], len(prompt["greedy"]))])[0]
    out["answers_s"] = time.monotonic() - start
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--reference")
    parser.add_argument("--out", required=True)
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--arguments", default="{}")
    parser.add_argument("--dummy", action="store_true")
    parser.add_argument("--rounds", type=int, default=0)
    numbers = {"type": lambda text: [int(n) for n in text.split(",")], "default": []}
    parser.add_argument("--lengths", **numbers)
    parser.add_argument("--contexts", **numbers)
    opt = parser.parse_args()

    start = time.monotonic()
    from vllm import LLM

    llm = LLM(**arguments(opt))
    boot_s = time.monotonic() - start
    print(f"BOOTED {boot_s:.1f} s", flush=True)
    asker = Asker(llm)
    vocabulary = llm.llm_engine.model_config.get_vocab_size()
    if opt.contexts:
        result = {"rates": rates(asker, opt.contexts, vocabulary)}
    elif opt.lengths:
        result = own_reference(asker, opt.lengths, vocabulary)
    elif opt.dummy:
        # Random weights say nothing of quality: requests of one chunk and of several, past the budget, then four at once.
        requests = [([(7 * n + 3) % 2000 for n in range(length)], 16) for length in (2, 100, 700, 3000)]
        for request in requests:
            answer = asker.ask([request])[0]
            best = [max(step.values()) for step in answer["top"]]
            print(f"DUMMY {len(request[0])} tokens: {answer['tokens']} {best[0]:.3f} {best[-1]:.3f}", flush=True)
        result = {"lengths": [len(a["tokens"]) for a in asker.ask(requests)]}
    else:
        with open(opt.reference, encoding="utf-8") as file:
            result = answers(asker, json.load(file)["prompts"], opt.rounds)
    with open(opt.out, "w", encoding="utf-8") as file:
        json.dump(result | {"boot_s": boot_s}, file)
    print("DONE", flush=True)


if __name__ == "__main__":
    main()
