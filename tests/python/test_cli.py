"""The command line: every option arrives where it belongs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import specrt
from specrt.cli import app


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `specrt generate` gives to the engine."""
    seen: dict[str, Any] = {}

    class Recorder:
        def __init__(self, model: str, **settings: Any) -> None:
            seen.update(settings, model=model)

        def __enter__(self) -> Recorder:
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def stream(self, text: str, params: specrt.SamplingParams) -> Any:
            seen.update(text=text, params=params)
            yield specrt.Increment("out", [1])

    monkeypatch.setattr(specrt, "Engine", Recorder)
    return seen


def generate(*options: str) -> Any:
    return CliRunner().invoke(app, ["generate", "model", "in", "--no-metrics", *options])


def test_defaults_are_greedy(seen: dict[str, Any]) -> None:
    result = generate()
    assert (result.exit_code, result.output) == (0, "out\n")
    assert (seen["model"], seen["text"]) == ("model", "in")
    assert seen["params"] == specrt.SamplingParams()
    assert (seen["verification"], seen["policy"], seen["cpu_isa"]) == ("coupled", "goodput", "auto")


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        (["--repetition-penalty", "1.2"], {"repetition_penalty": 1.2}),
        (["--presence-penalty", "0.5"], {"presence_penalty": 0.5}),
        (["--frequency-penalty", "-1"], {"frequency_penalty": -1.0}),
        (
            ["--logit-bias", "5=-2.5", "--logit-bias", "7=-inf"],
            {"logit_bias": {5: -2.5, 7: float("-inf")}},
        ),
        (
            ["--allowed-token-ids", "3", "--allowed-token-ids", "4"],
            {"allowed_token_ids": [3, 4]},
        ),
        (["--bad-words", "cat", "--bad-words", "dog"], {"bad_words": ["cat", "dog"]}),
        (["--min-tokens", "9"], {"min_tokens": 9}),
        (["--regex", "a+"], {"structured_outputs": specrt.StructuredOutputs(regex="a+")}),
        (
            ["--choice", "yes", "--choice", "no"],
            {"structured_outputs": specrt.StructuredOutputs(choice=["yes", "no"])},
        ),
    ],
)
def test_sampling_options(options: list[str], fields: dict[str, Any], seen: dict[str, Any]) -> None:
    assert generate(*options).exit_code == 0
    for name, value in fields.items():
        assert getattr(seen["params"], name) == value


def test_schemas_and_grammars_come_from_files(tmp_path: Path, seen: dict[str, Any]) -> None:
    file = tmp_path / "file"
    file.write_text('{"type": "integer"}')
    assert generate("--json-schema", str(file)).exit_code == 0
    assert seen["params"].structured_outputs.json == '{"type": "integer"}'
    assert generate("--grammar", str(file)).exit_code == 0
    assert seen["params"].structured_outputs.grammar == '{"type": "integer"}'
    assert isinstance(generate("--grammar", str(tmp_path / "absent")).exception, OSError)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--logit-bias", "5"], r"[logit_bias] expected a token id and a number"),
        (["--logit-bias", "x=1"], r"[logit_bias] expected a token id and a number"),
        (["--regex", "a", "--choice", "b"], "exactly one of json, regex, choice and grammar"),
    ],
)
def test_wrong_options(options: list[str], says: str, seen: dict[str, Any]) -> None:
    error = generate(*options).exception
    assert isinstance(error, specrt.InvalidArgumentError)
    assert says in str(error)


def test_settings(seen: dict[str, Any]) -> None:
    assert generate("--verification", "block", "--cpu-isa", "amx").exit_code == 0
    assert (seen["verification"], seen["cpu_isa"]) == ("block", "amx")
    assert generate("--drafter", "suffix", "--num-speculative-tokens", "3").exit_code == 0
    assert (seen["drafter"], seen["num_speculative_tokens"]) == ("suffix", 3)
    assert generate().exit_code == 0
    assert (seen["drafter"], seen["num_speculative_tokens"]) == (None, None)
    assert generate("--policy", "off").exit_code == 0
    assert seen["policy"] == "off"


def test_a_drafter_that_was_asked_for_drafts(counter: Path) -> None:
    command = ["generate", str(counter), "0123456789012", "--max-tokens", "9", "--drafter", "ngram"]
    result = CliRunner().invoke(app, [*command, "--num-speculative-tokens", "2", "--threads", "1"])
    assert result.exit_code == 0, result.exception
    assert result.stdout == "3456789:;\n"
    assert "α" in result.stderr  # of drafted tokens: told where there were some
