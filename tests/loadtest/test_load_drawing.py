"""What a load test sends, and when: drawn from a seed, within its bounds, and refused in words where it is nonsense."""

import json
from itertools import islice, pairwise
from pathlib import Path
from random import Random
from statistics import fmean, median

import pytest

from midstream.loadtest.load.arrivals import Arrival, constant, poisson, read_trace, repeated
from midstream.loadtest.load.dataset import read_dataset
from midstream.loadtest.load.lengths import LENGTH_MAX, parse_lengths
from midstream.loadtest.load.synthetic import Tokens, prompt_of, text_of
from midstream.loadtest.load.workload import CHAT, COMPLETIONS, Shape, draw_asks
from midstream.session.errors import ConfigError

BLIND = Tokens(3.0, 1.0, None)


def drawn(text: str, count: int = 4000, seed: int = 1) -> list[int]:
    lengths, chance = parse_lengths(text, "--prompt-tokens"), Random(seed)
    return [lengths.draw(chance) for _ in range(count)]


def shape(prompt: str = "20", output: str = "10", **more: object) -> Shape:
    return Shape(parse_lengths(prompt, "-"), parse_lengths(output, "-"), **more)  # type: ignore[arg-type]


# ---- lengths


def test_a_fixed_length_is_always_the_same() -> None:
    assert set(drawn("128")) == set(drawn("fixed:128")) == {128}


def test_uniform_lengths_take_each_value_about_equally_often_and_none_outside() -> None:
    found = drawn("uniform:3-6")
    assert set(found) == {3, 4, 5, 6}
    assert all(0.2 < found.count(value) / len(found) < 0.3 for value in (3, 4, 5, 6))


def test_lognormal_lengths_lie_around_their_median_with_a_long_tail_and_within_their_bounds() -> None:
    found = drawn("lognormal:200,0.6")
    assert median(found) == pytest.approx(200, rel=0.08)
    assert fmean(found) > 1.1 * median(found)
    clipped = drawn("lognormal:200,0.6:100-300")
    assert (min(clipped), max(clipped)) == (100, 300)


def test_draws_stay_in_step_whatever_their_kind() -> None:
    chances = [Random(7) for _ in range(3)]
    for text, chance in zip(("5", "uniform:1-9", "lognormal:50,1"), chances, strict=True):
        parse_lengths(text, "-").draw(chance)
    assert len({chance.random() for chance in chances}) == 1


@pytest.mark.parametrize(
    "text",
    ["", "x", "0", "-5", "1.5", "uniform:9-3", "uniform:1", "lognormal:5", "lognormal:0,1", "lognormal:5,-1",
     "lognormal:nan,1", "lognormal:5,1:", "zipf:2", f"{LENGTH_MAX + 1}", "fixed:"],
)  # fmt: skip
def test_what_is_no_distribution_is_refused_with_what_there_is(text: str) -> None:
    if text == "lognormal:5,1:":
        assert parse_lengths(text, "--x").most == LENGTH_MAX  # no bounds are bounds, too
        return
    with pytest.raises(ConfigError, match=r"--output-tokens: .*uniform:LEAST-MOST"):
        parse_lengths(text, "--output-tokens")


# ---- arrivals


def test_poisson_arrivals_have_their_rate_and_the_spread_of_an_exponential() -> None:
    times = [a.at_s for a in islice(poisson(5.0, Random(3)), 5000)]
    waits = [b - a for a, b in pairwise(times)]
    mean = fmean(waits)
    assert mean == pytest.approx(0.2, rel=0.06)
    assert fmean([(w - mean) ** 2 for w in waits]) ** 0.5 == pytest.approx(mean, rel=0.1)
    assert times == [a.at_s for a in islice(poisson(5.0, Random(3)), 5000)]


def test_constant_arrivals_do_not_drift() -> None:
    assert [a.at_s for a in islice(constant(4.0), 5)] == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert next(islice(constant(3.0), 3_000_000, None)).at_s == 1_000_000.0


def test_a_trace_is_gone_through_again_after_a_pause_of_its_own_kind() -> None:
    trace = [Arrival(0.0), Arrival(1.0, 7, 8), Arrival(4.0)]
    assert [a.at_s for a in islice(repeated(trace), 7)] == [0.0, 1.0, 4.0, 6.0, 7.0, 10.0, 12.0]
    assert [a.at_s for a in islice(repeated([Arrival(0.0)]), 3)] == [0.0, 1.0, 2.0]


def test_traces_are_read_as_seconds_objects_or_milliseconds(tmp_path: Path) -> None:
    file = tmp_path / "trace"
    file.write_text('2.5\n\n{"at_s": 3}\n{"timestamp": 4500, "input_length": 70, "output_length": 9}\n')
    assert read_trace(file) == [Arrival(0.0), Arrival(0.5), Arrival(2.0, 70, 9)]


@pytest.mark.parametrize(
    "line", ["x", "{}", "[1]", "null", '{"at_s": "soon"}', '{"at_s": 1, "input_length": 0}', "-1", "NaN", "true x"]
)
def test_a_line_that_is_no_arrival_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "trace"
    file.write_text(f"0\n{line}\n")
    with pytest.raises(ConfigError, match=r"trace:2: "):
        read_trace(file)


def test_a_trace_that_goes_back_or_holds_nothing_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "trace"
    file.write_text("0\n5\n4\n")
    with pytest.raises(ConfigError, match="arrival 3 comes before"):
        read_trace(file)
    file.write_text("\n")
    with pytest.raises(ConfigError, match="0 arrivals"):
        read_trace(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "none")


# ---- data sets


def test_data_sets_are_prompts_messages_or_conversations(tmp_path: Path) -> None:
    lines = tmp_path / "lines.jsonl"
    messages = [{"role": "user", "content": "B"}]
    lines.write_text(
        "\n".join(
            json.dumps(line)
            for line in (
                {"prompt": "A", "output_tokens": 5},
                {"messages": messages, "max_tokens": 6},
                {"conversations": [{"from": "human", "value": "C"}, {"from": "gpt", "value": "D"}]},
            )
        )
    )
    one, two, three = read_dataset(lines)
    assert (one.prompt, one.output_tokens) == ("A", 5)
    assert (list(two.messages), two.output_tokens) == (messages, 6)
    assert three.prompt == "C"
    whole = tmp_path / "sharegpt.json"
    whole.write_text(
        json.dumps(
            [
                {"id": "1", "conversations": [{"from": "gpt", "value": "an answer first"}]},
                {"id": "2", "conversations": []},
                {"id": "3", "conversations": [{"from": "human", "value": "C"}]},
            ]
        )
    )
    assert [entry.prompt for entry in read_dataset(whole)] == ["C"]


@pytest.mark.parametrize(
    "text", ["", "[]", "[1]", "{", '{"text": "x"}', '{"prompt": ""}', '{"prompt": "x", "max_tokens": 0}', "[{]", "3"]
)
def test_a_file_without_prompts_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "set"
    file.write_text(text)
    with pytest.raises(ConfigError, match="ShareGPT"):
        read_dataset(file)


# ---- prompts


async def test_prompts_have_exactly_so_many_tokens_where_they_can_be_counted() -> None:
    async def count(text: str) -> int:
        # A tokenizer that takes long words apart.
        return sum(1 + len(word) // 5 for word in text.split())

    for index, wanted in enumerate((12, 150, 1500)):
        text = await prompt_of(wanted, index, 1, Tokens(4.0, 1.3, count))
        assert abs(await count(text) - wanted) <= 2


async def test_prompts_are_of_their_seed_and_none_begins_as_another_does() -> None:
    texts = [await prompt_of(60, index, 1, BLIND) for index in range(50)]
    assert texts == [await prompt_of(60, index, 1, BLIND) for index in range(50)]
    assert len({text[:17] for text in texts}) == 50
    assert texts[0] != await prompt_of(60, 0, 2, BLIND)
    assert text_of(50, 3, 1).startswith(text_of(20, 3, 1))


async def test_a_seed_draws_the_same_requests() -> None:
    async def asks(seed: int) -> list[object]:
        made = await draw_asks(
            6, shape("uniform:10-50", "uniform:5-9", temperature=0.7), model="m", seed=seed, tokens=BLIND
        )
        return [(ask.path, ask.body, ask.output_tokens) for ask in made]

    assert await asks(1) == await asks(1)
    assert await asks(1) != await asks(2)


async def test_requests_take_their_lengths_from_the_data_set_first_then_the_trace_then_the_distributions(
    tmp_path: Path,
) -> None:
    file = tmp_path / "set.jsonl"
    file.write_text('{"prompt": "A", "output_tokens": 33}\n{"prompt": "B"}\n')
    entries = read_dataset(file)
    trace = [Arrival(0.0, 40, 21)]
    of_set = await draw_asks(4, shape(), model="m", seed=1, tokens=BLIND, entries=entries, arrivals=trace)
    assert {ask.body["prompt"]: ask.output_tokens for ask in of_set} == {"A": 33, "B": 21}
    [of_trace] = await draw_asks(1, shape(), model="m", seed=1, tokens=BLIND, arrivals=trace)
    assert (of_trace.output_tokens, len(of_trace.body["prompt"].split())) == (21, 2 + 37)
    [plain] = await draw_asks(1, shape(), model="m", seed=1, tokens=BLIND)
    assert plain.output_tokens == 10


async def test_greedy_requests_need_no_seed_and_sampled_ones_get_one_each() -> None:
    greedy = await draw_asks(3, shape(), model="m", seed=1, tokens=BLIND)
    assert all("seed" not in ask.body and ask.body["ignore_eos"] for ask in greedy)
    sampled = await draw_asks(3, shape(temperature=1.0, ignore_eos=False), model="m", seed=1, tokens=BLIND)
    assert len({ask.body["seed"] for ask in sampled}) == 3
    assert all("ignore_eos" not in ask.body for ask in sampled)


async def test_chats_go_to_their_path_and_extra_fields_go_over_everything() -> None:
    [chat] = await draw_asks(
        1, shape(chat=True, extra={"top_p": 0.5, "max_tokens": 3}), model="m", seed=1, tokens=BLIND
    )
    assert (chat.path, chat.body["messages"][0]["role"], chat.body["top_p"], chat.output_tokens) == (
        CHAT,
        "user",
        0.5,
        3,
    )
    [plain] = await draw_asks(1, shape(), model="m", seed=1, tokens=BLIND)
    assert plain.path == COMPLETIONS
    with pytest.raises(ConfigError, match="max_tokens is 'x'"):
        await draw_asks(1, shape(extra={"max_tokens": "x"}), model="m", seed=1, tokens=BLIND)
