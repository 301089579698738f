"""The judge of the experiments, without a card: the reference's own answers pass, and each kind of fault is found."""

from __future__ import annotations

import copy
import json
import sys

import pytest

from . import compare, engine, experiments, trace


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


def test_every_round_is_judged(reference, answers):
    rounds = [copy.deepcopy(answers["together"]) for _ in range(3)]
    assert compare.judge_all(reference, answers | {"rounds": rounds})["faults"] == []
    rounds[1]["sixty-three"], rounds[1]["three"] = rounds[1]["three"], rounds[1]["sixty-three"]
    del rounds[2]["past-budget"]
    faults = compare.judge_all(reference, answers | {"rounds": rounds})["faults"]
    assert {fault.split(":")[0] for fault in faults} == {"round 2 sixty-three", "round 2 three", "round 3 past-budget"}


def rates(**changes) -> list[dict]:
    """Rates of a run at three contexts; `changes`: {"decode 1": factor} for one row."""
    rows = [
        {
            "context": context,
            "streams": 1,
            "prefill_tokens_per_s": prefill,
            "decode_tokens_per_s": 120.0,
            "cards_mib": [70_000],
        }
        for context, prefill in ((4_096, 3_000.0), (131_072, 2_000.0), (253_952, 1_500.0))
    ]
    for name, value in changes.items():
        kind, row = name.rsplit("_", 1)
        if kind == "mib":
            rows[int(row)]["cards_mib"] = [70_000 + value]
        else:
            rows[int(row)][f"{kind}_tokens_per_s"] *= value
    return [*rows, rows[0] | {"streams": 4, "cards_mib": [90_000], "decode_tokens_per_s": 1.0}]


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({}, None),
        ({"decode_0": 0.94, "decode_1": 0.94, "decode_2": 0.94, "prefill_1": 0.81, "mib_2": 16}, None),
        ({"decode_2": 0.96}, "decode at 253952 against 4096: 115.2 tokens/s, 0.960 of 120.0, bar 0.97"),
        ({"decode_0": 0.92, "decode_2": 0.92}, "decode at 4096 against K/V on the card: 110.4 tokens/s, 0.920 of"),
        ({"prefill_1": 0.79}, "prefill of 131072 against K/V on the card: 1580.0 tokens/s, 0.790 of 2000.0, bar 0.8"),
        ({"prefill_2": 0.5}, None),
        ({"mib_2": 17}, "card 0: 17 MiB more at 253952 than at 4096"),
    ],
)
def test_bars_for_rates(changes, fault):
    faults = compare.judge_rates(rates(**changes), rates())
    assert faults == [] if fault is None else len(faults) == 1 and faults[0].startswith(fault), faults


def test_rates_are_held_to_one_another_when_all_have_ended(tmp_path):
    card = {"name": "full-1-rates", "rates": rates(), "faults": []}
    host = {"name": "full-1-rates-host", "rates": rates(prefill_1=0.5), "faults": ["an own one"]}
    other = {"name": "mixed-1", "faults": []}
    assert experiments.hold_rates([host, other, card], tmp_path) == [
        "full-1-rates-host: prefill of 131072 against K/V on the card: 1000.0 tokens/s, 0.500 of 2000.0, bar 0.8"
    ]
    assert (len(host["faults"]), card["faults"], other["faults"]) == (2, [], [])
    host = {"name": "full-1-rates-host", "rates": rates(), "faults": []}
    assert experiments.hold_rates([host], tmp_path) == [
        "full-1-rates-host: full-1-rates has left no rates to be held to: run it before, with the same work folder"
    ]
    (tmp_path / "full-1-rates.answers.json").write_text(json.dumps({"rates": rates(decode_0=10.0)}))
    (fault,) = experiments.hold_rates([host], tmp_path)
    assert fault.startswith("full-1-rates-host: decode at 4096 against K/V on the card: 120.0 tokens/s, 0.100 of")


def test_what_an_experiment_is_held_to_is_there_or_run_before(tmp_path):
    place = experiments.Place(tmp_path, tmp_path, tmp_path / "out")
    names = [experiment.name for experiment in experiments.EXPERIMENTS]
    for at, experiment in enumerate(experiments.EXPERIMENTS):
        reference = experiments.reference_of(experiment, place)
        if experiment.against:
            assert experiment.against in names[:at]
            assert reference.parent == tmp_path
            if experiment.contexts:
                continue
            result = experiments.run(experiment, place, "0")
            assert result["faults"] == [
                f"{experiment.against} has left no answers to be held to: run it before, with the same work folder"
            ]
            assert experiments.summary(result).startswith(f"FAIL {experiment.name}")
        elif not experiment.dummy:
            assert reference.exists()


@pytest.mark.parametrize(
    ("code", "limit_s", "ended", "status"),
    [
        ("print('BOOTED')", 60, "in time", 0),
        ("raise SystemExit(3)", 60, "in time", 3),
        ("import time; time.sleep(60)", 0.5, "killed at its limit of 0 s", -9),
    ],
)
def test_an_engine_is_watched_to_its_end_or_its_limit(tmp_path, code, limit_s, ended, status):
    place = experiments.Place(tmp_path, tmp_path, tmp_path)
    experiment = experiments.BY_NAME["bf16-1-host-again"]
    assert experiment.host_kv and not experiments.BY_NAME["bf16-1"].host_kv
    log = tmp_path / "log"
    log.write_text("before\n")
    got = experiments.watch(experiment, place, "0", [sys.executable, "-c", code], log, limit_s)
    assert got == (ended, status)
    assert log.read_text().startswith("before\n")


def test_steps_that_wait_on_another_stream_are_a_fault():
    line = "(Worker_PP0 pid=1) step_trace {} apply waiting=[True, False] landed=True streams=main 0x{} current 0x{} tokens=[[1]]\n"
    assert experiments.stray_waits(line.format(1, 5, 5) + line.format(2, 5, 5)) == []
    faults = experiments.stray_waits(line.format(1, 0, 0) + line.format(2, 0, 5) + line.format(3, 0, 5))
    assert faults == ["2 of 3 steps wait on another stream, step 2 first"]
    assert experiments.stray_waits("step_trace 1 receive needed=None slots=[0]") == ["no step was traced"]


def test_rates_that_were_taken_before_the_limit_are_kept(tmp_path, monkeypatch):
    def killed(experiment, place, cards, command, log, limit_s):
        log.write_text("BOOTED 51.5 s\n" + "".join(f"RATES {json.dumps(row)}\n" for row in rates()[:2]))
        return "killed at its limit of 130 s", -9

    monkeypatch.setattr(experiments, "watch", killed)
    place = experiments.Place(tmp_path, tmp_path, tmp_path / "out")
    result = experiments.run(experiments.BY_NAME["full-1-rates"], place, "0")
    assert result["rates"] == rates()[:2]
    assert result["faults"] == ["no answers: killed at its limit of 130 s, exit status -9"]
    # They are told, and nothing is held to them.
    host = {"name": "full-1-rates-host", "rates": rates(), "faults": []}
    (fault,) = experiments.hold_rates([result, host], tmp_path)
    assert "full-1-rates has left no rates" in fault and len(result["faults"]) == 1


def test_stages_on_one_card_are_told_so(tmp_path):
    two = experiments.BY_NAME["mixed-2"]
    for one_card, cards, memory in ((False, 2, None), (True, 1, 0.45)):
        place = experiments.Place(tmp_path, tmp_path, tmp_path, one_card)
        assert place.cards(two) == cards
        assert experiments.arguments_of(two, place).get("gpu_memory_utilization") == memory
        assert ("support/one_card" in experiments.environment(two, place, "0")["PYTHONPATH"]) is one_card
    place = experiments.Place(tmp_path, tmp_path, tmp_path, one_card=True, at_once=4)
    shares = [experiments.arguments_of(experiments.BY_NAME[name], place) for name in ("mixed-1", "mixed-2")]
    assert [share["gpu_memory_utilization"] for share in shares] == [0.22, 0.11]


def test_a_trace_is_summed_up_by_step():
    def event(kind, name, start, length, **more):
        return {"cat": kind, "name": name, "ts": start, "dur": length, "args": more}

    events = [
        event("kernel", "a", 0, 1000, stream=7),
        event("kernel", "a", 500, 1000, stream=9),  # half of it beside the first
        event("gpu_memcpy", "copy", 3000, 1000, stream=7),
        event("cuda_runtime", "cudaLaunchKernel", 0, 10),
        event("cuda_driver", "cuLaunchKernelEx", 0, 10),
        event("cuda_runtime", "cudaEventSynchronize", 20, 400),
        {"cat": "cpu_op", "name": "aten::add", "ts": 0, "dur": 5},
        {"name": "process_name", "ph": "M"},
    ]
    found = trace.read_trace(events, 2)
    assert found["card_busy_ms"] == 1.25 and found["streams_busy_ms"] == {"7": 1.0, "9": 0.5}
    assert found["launches"] == 1 and found["waits"] == {"cudaEventSynchronize": 0.5}
    assert found["kernels"] == [["a", 1.0, 1.0], ["copy", 0.5, 0.5]]


def test_the_rate_of_streams_counts_while_all_of_them_decode():
    every_ten_ms = [[start + n * 0.01 for n in range(200)] for start in (0.0, 0.5, 1.0)]
    assert engine.stream_rate(every_ten_ms) == pytest.approx(300, rel=0.02)
    assert engine.stream_rate(every_ten_ms[:1]) == pytest.approx(100, rel=0.01)
    with pytest.raises(ValueError, match="more tokens"):
        engine.stream_rate([[0.0, 1.0], [2.0, 3.0]])
