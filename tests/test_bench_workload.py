"""What a workload draws: lengths, arrivals, prefixes; and that the seed alone decides it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from minserve.bench.lengths import Lengths, clipped_log_normal_mean
from minserve.bench.slo import Slo
from minserve.bench.workload import TimedRequest, Workload
from minserve.errors import ParameterError

FOUR = Lengths.parse("fixed:4", "input")


def draw(spec: str, side: str = "input", count: int = 100_000, **options: float) -> np.ndarray:
    return Lengths.parse(spec, side, **options).draw(np.random.default_rng(0), 0, count)


def requests(workload: Workload, *, vocab_size: int = 1000, max_model_len: int = 4096) -> list[TimedRequest]:
    return list(workload.requests(vocab_size, max_model_len, special_ids={0, 1, 2}))


@pytest.mark.parametrize(
    ("spec", "side", "scale", "mean"),
    [
        ("sharegpt", "input", 1.0, 161.31),
        ("sharegpt", "output", 1.0, 337.99),
        ("alpaca", "input", 1.0, 19.31),
        ("alpaca", "output", 1.0, 58.45),
        ("sharegpt", "input", 0.25, 161.31 / 4),
        ("sharegpt", "output", 0.25, 337.99 / 4),
    ],
)
def test_named_lengths_have_the_papers_means_and_a_long_tail(spec: str, side: str, scale: float, mean: float) -> None:
    lengths = draw(spec, side, 200_000, scale=scale)
    assert lengths.mean() == pytest.approx(mean, rel=0.02)
    assert np.median(lengths) < 0.85 * mean
    assert np.quantile(lengths, 0.99) > 2.5 * mean
    assert lengths.min() >= 1
    assert lengths.max() <= 2048 * scale


def test_the_clipped_mean_is_that_of_the_samples() -> None:
    samples = np.minimum(np.random.default_rng(5).lognormal(3.0, 1.4, 1_000_000), 100.0)
    assert clipped_log_normal_mean(3.0, 1.4, 100.0) == pytest.approx(samples.mean(), rel=0.005)


@pytest.mark.parametrize(
    ("spec", "low", "high"), [("fixed:7", 7, 7), ("12", 12, 12), ("uniform:3:6", 3, 6), ("uniform:5:5", 5, 5)]
)
def test_lengths_that_are_spelled_out(spec: str, low: int, high: int) -> None:
    lengths = draw(spec, scale=0.1)  # which is not for them
    assert (lengths.min(), lengths.max()) == (low, high)
    assert lengths.mean() == pytest.approx((low + high) / 2, rel=0.01)


def test_a_files_pairs_stay_together_and_repeat(tmp_path: Path) -> None:
    pairs = [(5, 50), (6, 60), (7, 70)]
    path = tmp_path / "lengths.jsonl"
    path.write_text("\n".join(json.dumps({"input_len": i, "output_len": o}) for i, o in pairs) + "\n\n")
    load = Workload(600, Lengths.parse(str(path), "input"), Lengths.parse(str(path), "output"))
    drawn = [(len(t.request.prompt_token_ids), t.request.sampling_params.max_tokens) for t in requests(load)]
    assert drawn == (pairs * 200)[:600]
    with pytest.raises(ParameterError, match="7 tokens of prompt and 70 of answer"):
        load.check(76)
    load.check(77)


@pytest.mark.parametrize(
    ("max_model_len", "pool_tokens", "context", "where", "advice"),
    [
        (64, 32, 256, "the KV cache, which holds 32 tokens", "or raise --num-kv-blocks or --kv-cache-memory"),
        (32, 64, 256, "max_model_len 32", "or raise --max-model-len"),
        (32, None, None, "max_model_len 32", "or raise --max-model-len"),
        (32, 64, 32, "max_model_len 32", "ask for shorter requests"),  # the model's own maximum cannot be raised
    ],
)
def test_a_load_that_does_not_fit_is_told_by_the_smaller_limit(
    max_model_len: int, pool_tokens: int | None, context: int | None, where: str, advice: str
) -> None:
    """The advice was always to raise --max-model-len, which did nothing where the pool was too small, and was refused
    where it stood at the model's maximum already.
    """
    load = Workload(2, Lengths.parse("fixed:1", "input"), Lengths.parse("fixed:40", "output"))
    with pytest.raises(ParameterError) as caught:
        load.check(max_model_len, pool_tokens=pool_tokens, context=context)
    message = str(caught.value)
    assert f"1 token of prompt and 40 of answer, does not fit {where}; ask for shorter requests" in message
    assert message.endswith(advice)
    load.check(41, pool_tokens=41)


def test_requests_that_were_cut_say_so() -> None:
    """Named lengths were cut to the context in silence."""
    load = Workload(200, Lengths.parse("sharegpt", "input"), Lengths.parse("fixed:4", "output"))
    timed = list(load.requests(100, 256))
    lengths = [len(each.request.prompt_token_ids) for each in timed]
    assert 0 < sum(each.cut for each in timed) < 200
    assert all(length == 255 for each, length in zip(timed, lengths, strict=True) if each.cut)
    assert not any(each.cut for each in load.requests(100, 4096))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no lengths"),
        ('{"input_len": 5}\n{"output_len": 3}', "line 2: expected an object"),
        ('{"input_len": 0}', "line 1: input_len must be a whole number of at least 1, not 0"),
        ('{"input_len": true}', "whole number"),
        ("[1, 2]", "line 1: expected"),
        ("nothing", "line 1: expected"),
    ],
)
def test_a_wrong_file_of_lengths_is_named_with_its_line(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "lengths.jsonl"
    path.write_text(content)
    with pytest.raises(ParameterError, match=message):
        Lengths.parse(str(path), "input")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("sharegtp", "did you mean sharegpt"),
        ("fixed:0", "at least 1"),
        ("fixed:-3", "at least 1"),
        ("fixed:", "at least 1"),
        ("uniform:9:3", "smallest length is above the largest"),
        ("uniform:9", "is no length"),
        ("uniform:a:b", "whole number"),
        ("", "is no length"),
    ],
)
def test_wrong_lengths(spec: str, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        Lengths.parse(spec, "input")


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf])
def test_wrong_scales(scale: float) -> None:
    with pytest.raises(ParameterError, match="scale must be"):
        Lengths.parse("sharegpt", "input", scale=scale)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_between_arrivals_are_gamma(burstiness: float) -> None:
    """Mean 1 / rate, and a coefficient of variation of 1 / sqrt(burstiness)."""
    load = Workload(20_000, FOUR, FOUR, request_rate=8.0, burstiness=burstiness)
    gaps = np.diff([0.0, *(timed.arrival for timed in requests(load))])
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_at_an_infinite_rate_all_arrive_at_the_start() -> None:
    assert {timed.arrival for timed in requests(Workload(600, FOUR, FOUR))} == {0.0}


def as_values(timed: list[TimedRequest]) -> list[tuple[object, ...]]:
    return [(t.arrival, t.request.request_id, t.request.prompt_token_ids, t.request.priority) for t in timed]


def test_the_seed_alone_decides() -> None:
    lengths = Lengths.parse("sharegpt", "input", scale=0.1)
    options = {"request_rate": 3.0, "shared_prefix_len": 4, "prefix_share": 0.5, "priority_levels": 3}
    load, again = (Workload(1200, lengths, lengths, seed=7, **options) for _ in range(2))  # type: ignore[arg-type]
    other = Workload(1200, lengths, lengths, seed=8, **options)  # type: ignore[arg-type]
    assert as_values(requests(load)) == as_values(requests(again))
    assert as_values(requests(load)) != as_values(requests(other))
    first, second = requests(load), load.requests(1000, 4096, special_ids={0, 1, 2})
    for expected in first[:5]:  # taken one by one, they are the same
        assert as_values([expected]) == as_values([next(second)])


def test_another_rate_leaves_the_requests_and_other_lengths_leave_the_arrivals() -> None:
    short, long = Lengths.parse("uniform:5:9", "input"), Lengths.parse("uniform:50:90", "input")
    slow = requests(Workload(700, short, short, request_rate=1.0))
    fast = requests(Workload(700, short, short, request_rate=100.0))
    assert [t.request.prompt_token_ids for t in slow] == [t.request.prompt_token_ids for t in fast]
    longer = requests(Workload(700, long, long, request_rate=1.0))
    assert [t.arrival for t in slow] == [t.arrival for t in longer]


def test_prompts_are_ordinary_tokens_from_all_of_the_vocabulary() -> None:
    ids = {i for t in requests(Workload(500, Lengths.parse("fixed:40", "input"), FOUR), vocab_size=50) for i in
           t.request.prompt_token_ids}  # fmt: skip
    assert ids == set(range(3, 50))
    assert all(type(i) is int for i in ids)
    with pytest.raises(ParameterError, match="no ordinary token"):
        requests(Workload(5, FOUR, FOUR), vocab_size=3)


def test_shared_prefixes() -> None:
    load = Workload(2000, FOUR, FOUR, shared_prefix_len=16, num_prefixes=3, prefix_share=0.6)
    prompts = [t.request.prompt_token_ids for t in requests(load)]
    prefixed = [prompt for prompt in prompts if len(prompt) == 20]
    assert {len(prompt) for prompt in prompts} == {4, 20}
    assert len(prefixed) == pytest.approx(1200, abs=90)
    assert len({tuple(prompt[:16]) for prompt in prefixed}) == 3
    assert len({tuple(prompt[16:]) for prompt in prefixed}) > 1000
    prefixed[0].append(5)  # each prompt is its own list
    assert len(prefixed[1]) == 20


def test_answers_end_at_their_length_only_and_seeds_are_the_requests_own() -> None:
    greedy = requests(Workload(30, FOUR, Lengths.parse("uniform:1:3", "output")))
    params = greedy[0].request.sampling_params
    assert (params.temperature, params.ignore_eos, params.detokenize) == (0.0, True, False)
    drawn = requests(Workload(30, FOUR, FOUR, temperature=0.7, seed=3))
    assert len({t.request.sampling_params.seed for t in drawn}) == 30
    assert {t.request.sampling_params.temperature for t in drawn} == {0.7}


def test_named_lengths_are_cut_to_the_context_and_others_refused() -> None:
    named = Workload(800, shared_prefix_len=30)
    for timed in requests(named, max_model_len=100):
        prompt, answer = len(timed.request.prompt_token_ids), timed.request.sampling_params.max_tokens or 0
        assert prompt > 30
        assert answer >= 1
        assert prompt + answer <= 100
    with pytest.raises(ParameterError, match="31 tokens of prompt and 1 of answer, does not fit max_model_len 31"):
        named.requests(1000, 31)
    with pytest.raises(ParameterError, match="4 tokens of prompt and 4 of answer, does not fit max_model_len 7"):
        Workload(1, FOUR, FOUR).requests(1000, 7)  # at once, not when the first one is asked for


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_requests": 0}, "num_requests"),
        ({"request_rate": 0.0}, "request_rate must be a number above 0"),
        ({"request_rate": -2.0}, "request_rate"),
        ({"request_rate": math.nan}, "request_rate"),
        ({"burstiness": 0.0}, "burstiness"),
        ({"burstiness": math.inf}, "burstiness"),
        ({"max_concurrency": 0}, "max_concurrency"),
        ({"shared_prefix_len": -1}, "shared_prefix_len"),
        ({"num_prefixes": 0}, "num_prefixes"),
        ({"prefix_share": 1.5}, "prefix_share must be from 0 to 1"),
        ({"priority_levels": 0}, "priority_levels"),
        ({"temperature": -1.0}, "temperature"),
        ({"seed": -1}, "seed"),
    ],
)
def test_wrong_workloads(options: dict[str, float], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        Workload(**options)  # type: ignore[arg-type]


def test_requests_are_made_as_they_are_asked_for() -> None:
    """A million requests must not be held in memory: the first ones of very many come at once."""
    timed = Workload(10**12, FOUR, FOUR).requests(1000, 4096)
    assert [next(timed).request.request_id for _ in range(3)] == ["load-0", "load-1", "load-2"]


@pytest.mark.parametrize(
    ("text", "limits"),
    [
        ("ttft=0.5", {"ttft": 0.5}),
        ("ttft=500ms,itl=50ms,e2e=3", {"ttft": 0.5, "itl": 0.05, "e2e": 3.0}),
        ("tpot=0.1s, e2el=2", {"tpot": 0.1, "e2el": 2.0}),
        ("itl=50ms,tpot=20ms", {"tpot": 0.02}),
        ("itl=20ms,tpot=50ms", {"itl": 0.02}),
    ],
)
def test_slos(text: str, limits: dict[str, float]) -> None:
    """Whoever asked for itl=50ms was told of a limit on tpot, a word that they had not used."""
    assert Slo.parse(text).limits() == pytest.approx(limits)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tftt=1", "did you mean ttft"),
        ("ttft", "must be seconds above 0"),
        ("ttft=fast", "not 'fast'"),
        ("ttft=-1", "not '-1'"),
        ("ttft=0", "not '0'"),
        ("ttft=nan", "not 'nan'"),
        ("ttft=inf", "not 'inf'"),
        ("", "cannot be set for ''"),
        ("ttft=1,", "cannot be set for ''"),
    ],
)
def test_wrong_slos(text: str, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        Slo.parse(text)
