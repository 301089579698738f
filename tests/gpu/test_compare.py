"""The judge of the experiments, without a card: the reference's own answers pass, and each kind of fault is found."""

from __future__ import annotations

import copy
import json

import pytest

from . import compare, experiments


@pytest.fixture(scope="module")
def reference() -> dict:
    return json.loads((experiments.REFERENCES / "mixed.json").read_text())


@pytest.fixture
def answers(reference) -> dict:
    """The reference as an engine would have answered it, without any rounding."""
    own = {
        prompt["name"]: {
            "tokens": list(prompt["greedy"]),
            "top": [{str(token): logp for token, logp in step} for step in prompt["top"]],
            "prompt_logprobs": list(prompt["prompt_logprobs"]),
        }
        for prompt in reference["prompts"]
    }
    free = {name: {key: answer[key] for key in ("tokens", "top")} for name, answer in own.items()}
    return {"alone": own, "together": free, "again": {"one": free["one"]}}


def test_the_reference_passes_against_itself(reference, answers):
    assert compare.judge_all(reference, answers)["faults"] == []


def test_noise_of_the_measured_size_passes(reference, answers):
    for answer in answers["alone"].values():
        answer["top"] = [
            {t: v + reference["noise"]["mean"] * (-1) ** int(t) for t, v in step.items()} for step in answer["top"]
        ]
    assert compare.judge_all(reference, answers)["faults"] == []


def test_a_shift_above_the_tolerance_is_found(reference, answers):
    shift = 1.1 * compare.MEAN * reference["noise"]["mean"]
    answer = answers["alone"]["sixty-three"]
    answer["top"] = [{t: v + shift for t, v in step.items()} for step in answer["top"]]
    faults = compare.judge_all(reference, answers)["faults"]
    assert len(faults) == 1 and faults[0].startswith("alone sixty-three: mean distance")


def test_swapped_streams_are_found(reference, answers):
    together = answers["together"]
    together["sixty-three"], together["three"] = (
        copy.deepcopy(together["three"]),
        copy.deepcopy(together["sixty-three"]),
    )
    faults = compare.judge_all(reference, answers)["faults"]
    assert {fault.split(":")[0] for fault in faults} == {"together sixty-three", "together three"}


def test_known_faults_of_the_engine_are_told_apart(reference, answers):
    answers["alone"]["one"]["tokens"][1] = -1
    answers["alone"]["one"]["top"][1] = {"-1": 0.0}
    judged = compare.judge_all(reference, answers)
    assert judged["faults"] == [] and judged["known"] and all(" one: " in k for k in judged["known"])


def test_another_token_passes_only_where_the_reference_is_undecided(reference, answers):
    prompt = next(p for p in reference["prompts"] if p["name"] == "three")
    bound = 2 * compare.MOST * reference["noise"]["max"]
    for at, step in enumerate(prompt["top"]):
        wrong = copy.deepcopy(answers)
        second, second_logp = step[1]
        wrong["alone"][prompt["name"]]["tokens"][at] = second
        found = bool(compare.judge_all(reference, wrong)["faults"])
        assert found == (step[0][1] - second_logp > bound), at


def test_a_wrong_prompt_and_a_missing_answer_are_found(reference, answers):
    answers["alone"]["chunk-and-one"]["prompt_logprobs"][511] -= 5
    del answers["together"]["past-budget"]
    faults = compare.judge_all(reference, answers)["faults"]
    assert [fault.split(":")[0] for fault in faults] == ["alone chunk-and-one", "together past-budget"]
