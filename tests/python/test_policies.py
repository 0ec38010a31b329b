"""How much is drafted: per request, by policy, by cost, and that it never changes the text."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import Counting, Oracle, Tally, assert_same, greedy, known

import specrt
from specrt import DraftTree, Engine, SamplingParams, Speculation, StructuredOutputs, _core
from specrt.drafters import DraftModel, Merge, NGram, SelfDraft, Suffix
from specrt.errors import InvalidArgumentError, UnsupportedError
from specrt.speculation import Defaults

SMALL: dict[str, Any] = {"max_model_len": 256, "max_batch_size": 8, "threads": 1}


def prompts(count: int = 6) -> list[list[int]]:
    return [[1 + i, 40 + 3 * i, 7, 1 + i, 40 + 3 * i] for i in range(count)]


class Budgets(Counting):
    """Notes what it was asked for, and what became of it."""

    def __init__(self, step: int = 1) -> None:
        super().__init__(step)
        self.asked: list[int] = []
        self.accepted: list[int] = []

    def propose(self, tokens: list[int], budget: int) -> DraftTree | None:
        self.asked.append(budget)
        return super().propose(tokens, budget)

    def observe(self, committed: list[int]) -> None:
        self.accepted.append(len(committed) - 1)


# Requests of one batch that speculate differently.


def test_one_batch_mixes_them(l2: Path, l2_close: Path) -> None:
    mixes = [
        Speculation(policy="fixed", num_speculative_tokens=5),
        Speculation(policy="goodput"),
        Speculation(drafter=False),
        Speculation(policy="ema_tiers"),
        Speculation(policy="brake", num_speculative_tokens=2),
        Speculation(policy="goodput", target_tpot_seconds=0.001, target_ttft_seconds=0.001),
    ]
    settings = [greedy(50, seed=i, temperature=0.8 * (i % 2)) for i in range(6)]
    with Engine(l2, **SMALL) as engine:
        expected = engine.generate(prompts(), settings)
    mixed = [
        SamplingParams(**{**vars(one), "speculation": how})
        for one, how in zip(settings, mixes, strict=True)
    ]
    for policy in ("goodput", "fixed", "brake", "ema_tiers", "off"):
        with Engine(
            l2, DraftModel(model=l2_close), policy=policy, check_invariants=True, **SMALL
        ) as engine:
            got = engine.generate(prompts(), mixed)
            assert_same(got, expected, policy)
            assert got[2].metrics.drafted_tokens == 0
            fixed = got[0].metrics
            assert fixed.drafted_tokens > 5 * (fixed.rounds - 2)
            assert got[4].metrics.drafted_tokens <= 2 * got[4].metrics.rounds
            # The draft model is as large as the target: by its costs it may well not be worth it.
            assert all(got[i].metrics.drafted_tokens > 0 for i in (0, 3, 4))
            plain = engine.generate(prompts(), settings)
            assert_same(plain, expected, policy)
            if policy != "goodput":
                assert (plain[0].metrics.drafted_tokens == 0) == (policy == "off")


def test_verifications_in_one_batch(l2: Path, l2_close: Path) -> None:
    """Each says what it says in an engine of that verification, alone."""
    sizes = {**SMALL, "num_speculative_tokens": 3, "policy": "fixed"}
    kinds = ("coupled", "rejection", "block", "typical")
    params = [SamplingParams(max_tokens=40, temperature=0.9, seed=i) for i in range(4)]
    alone = []
    for kind, one, prompt in zip(kinds, params, prompts(4), strict=True):
        with Engine(l2, DraftModel(model=l2_close), verification=kind, **sizes) as engine:
            alone.append(engine.generate(prompt, one))
    mixed = [
        SamplingParams(**{**vars(one), "speculation": Speculation(verification=kind)})
        for kind, one in zip(kinds, params, strict=True)
    ]
    with Engine(l2, DraftModel(model=l2_close), **sizes) as engine:
        batch = engine.generate(prompts(4), mixed)
    assert_same(batch, alone, "mixed")
    assert [one.lossless for one in batch] == [True, True, True, False]


def test_policies_that_look_around_leave_laws_alone(l2: Path, l2_close: Path) -> None:
    """With `rejection` a seed repeats its text, whatever the policy and whatever runs beside it."""
    params = [SamplingParams(max_tokens=40, temperature=0.9, seed=i) for i in range(6)]
    texts = []
    for policy in ("brake", "goodput", "ema_tiers"):
        sizes = {**SMALL, "num_speculative_tokens": 3, "verification": "rejection"}
        with Engine(l2, DraftModel(model=l2_close), policy=policy, **sizes) as engine:
            batch = engine.generate(prompts(), params)
            alone = [engine.generate(*pair) for pair in zip(prompts(), params, strict=True)]
        assert_same(batch, alone, policy)
        texts.append([one.token_ids for one in batch])
    assert texts[0] == texts[1] == texts[2]


def test_refusals(counter: Path, l2: Path, l2_close: Path) -> None:
    for options, name in (
        ({"drafter": 1}, "drafter"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens"),
        ({"num_speculative_tokens": 2.0}, "num_speculative_tokens"),
        ({"policy": "fast"}, "policy"),
        ({"verification": "exact"}, "verification"),
        ({"target_tpot_seconds": 0}, "target_tpot_seconds"),
        ({"target_ttft_seconds": float("nan")}, "target_ttft_seconds"),
        ({"policy": "fixed", "target_tpot_seconds": 0.1}, "target_tpot_seconds"),
        ({"drafter": False, "num_speculative_tokens": 3}, "num_speculative_tokens"),
        ({"drafter": False, "policy": "fixed"}, "policy"),
        ({"policy": "off", "num_speculative_tokens": 3}, "num_speculative_tokens"),
        ({"num_speculative_tokens": 0, "target_tpot_seconds": 1.0}, "target_tpot_seconds"),
    ):
        with pytest.raises(InvalidArgumentError, match=rf"\[{name}\]"):
            Speculation(**options)
    with pytest.raises(InvalidArgumentError, match=r"\[speculation\]"):
        SamplingParams(speculation={"policy": "fixed"})  # type: ignore[arg-type]
    with Engine(counter, **SMALL) as engine:
        for how in (Speculation(policy="fixed"), Speculation(num_speculative_tokens=3)):
            with pytest.raises(InvalidArgumentError, match="an engine with a drafter"):
                engine.generate([1], greedy(4, speculation=how))
        for how in (Speculation(drafter=False), Speculation(policy="off"), Speculation()):
            assert engine.generate([1], greedy(2, speculation=how)).token_ids == [2, 3]
    with Engine(counter, "ngram", policy="fixed", **SMALL) as engine:
        how = Speculation(target_tpot_seconds=0.1)
        with pytest.raises(InvalidArgumentError, match=r"\[target_tpot_seconds\] expected policy"):
            engine.generate([1], greedy(4, speculation=how))
        how = Speculation(verification="block", num_speculative_tokens=60)
        with pytest.raises(InvalidArgumentError, match=r"\[max_num_batched_tokens\]"):
            engine.generate([1], greedy(4, temperature=1.0, speculation=how))
        with pytest.raises(InvalidArgumentError, match=r"\[posterior_alpha\]"):
            engine.generate([1], greedy(4, temperature=1.0, posterior_alpha=0.2))
        how = Speculation(verification="typical")
        engine.generate([1], greedy(4, temperature=1.0, posterior_alpha=0.2, speculation=how))
    for drafter in ("ngram", Merge([DraftModel(model=counter), "ngram"]), Counting()):
        with pytest.raises(UnsupportedError, match=r"\[policy\].*'adasd'"):
            Engine(counter, drafter, policy="adasd", **SMALL)
    with pytest.raises(InvalidArgumentError, match=r"\[target_tpot_seconds\]"):
        Engine(counter, "ngram", policy="fixed", target_tpot_seconds=0.1, **SMALL)
    with pytest.raises(InvalidArgumentError, match=r"\[verification\].*'adasd'"):
        Engine(l2, "self", policy="adasd", verification="rejection", **SMALL)
    with (
        Engine(l2, DraftModel(model=l2_close), policy="adasd", **SMALL) as engine,
        pytest.raises(UnsupportedError, match=r"\[structured_outputs\]"),
    ):
        engine.generate([1], greedy(4, structured_outputs=StructuredOutputs(regex="[0-9]+")))


# Off.


def test_off_is_as_if_there_were_none(l2: Path, l2_close: Path) -> None:
    class Never(specrt.Drafter):
        def propose(self, tokens: list[int], budget: int) -> DraftTree | None:
            raise AssertionError("asked")

        def observe(self, committed: list[int]) -> None:
            raise AssertionError("told")

    with Engine(l2, Never(), policy="off", **SMALL) as engine:
        output = engine.generate([1, 2], greedy(10))
        assert output.metrics.drafted_tokens == 0
        assert output.metrics.draft_seconds < 0.01
        with pytest.raises(specrt.SpecrtError, match=r"asked|told"):
            engine.generate([1, 2], greedy(10, speculation=Speculation(policy="fixed")))
    with Engine(l2, Never(), **SMALL) as engine:
        for how in (
            Speculation(drafter=False),
            Speculation(policy="off"),
            Speculation(num_speculative_tokens=0),
        ):
            assert engine.generate([1, 2], greedy(10, speculation=how)).token_ids == (
                output.token_ids
            )


# Costs.


@pytest.mark.alone
def test_targets_hold_for_requests_that_draft_nothing(counter: Path) -> None:
    own = {"verification": "coupled", "most_draft_tokens": None, "has_drafter": True}
    targets = {"target_tpot_seconds": 0.05, "target_ttft_seconds": 2.0}
    defaults = Defaults(policy="goodput", draft_tokens=4, **own, **targets)
    for asked in (
        Speculation(drafter=False),
        Speculation(policy="off"),
        Speculation(num_speculative_tokens=0),
    ):
        core = defaults.core_options(asked)
        assert core["policy"] == "goodput"
        assert core["num_speculative_tokens"] == 0
        assert {name: core[name] for name in targets} == targets
    fixed = defaults.core_options(Speculation(policy="fixed"))
    assert (fixed["policy"], fixed["target_tpot_seconds"]) == ("fixed", 0.0)
    without = Defaults(policy="goodput", draft_tokens=4, **own)
    assert without.core_options(Speculation(drafter=False))["policy"] == "off"
    engine_of = {"policy": "goodput", **targets, **SMALL}
    with Engine(counter, Counting(), **engine_of) as engine:
        params = SamplingParams(max_tokens=20, speculation=Speculation(drafter=False))
        output = engine.generate([3], params)
        assert output.token_ids == list(range(4, 24))
        assert output.metrics.drafted_tokens == 0


def test_drafts_asked_for_where_there_are_none(counter: Path) -> None:
    for options, asked, name in (
        ({"policy": "off"}, Speculation(num_speculative_tokens=3), "num_speculative_tokens"),
        ({"num_speculative_tokens": 0}, Speculation(policy="fixed"), "policy"),
    ):
        with Engine(counter, Counting(), **options, **SMALL) as engine:
            with pytest.raises(InvalidArgumentError, match=rf"\[{name}\] expected"):
                engine.generate([3], SamplingParams(max_tokens=5, speculation=asked))
            assert engine.generate([3], greedy(5)).token_ids == [4, 5, 6, 7, 8]
            off = SamplingParams(max_tokens=5, speculation=Speculation(policy="off"))
            assert engine.generate([3], off).token_ids == [4, 5, 6, 7, 8]


def test_cost_model_is_measured_and_kept(l2: Path, l2_close: Path, tmp_path: Path) -> None:
    options = {**SMALL, "policy": "goodput", "cost_cache": tmp_path / "costs"}
    with Engine(l2, DraftModel(model=l2_close), **options) as engine:
        first = engine.cost_model
        assert first.measured
        assert "pass 1 " in str(first)
        rows = [rows for rows, _ in first.table]
        assert rows[0] == 1
        assert len(rows) > 8
        seconds = [seconds for _, seconds in first.table]
        assert seconds == sorted(seconds)
        assert first.drafters == ["draft_model"]
        assert first.draft_seconds("draft_model", steps=4) > 0
    files = list((tmp_path / "costs").iterdir())
    assert [one.suffix for one in files] == [".cost"]
    with Engine(l2, DraftModel(model=l2_close), **options) as engine:
        again = engine.cost_model.table
        assert [one for one, _ in again] == rows
        assert [one for _, one in again] == pytest.approx(seconds)
    whole = files[0].read_text()
    for damaged in (b"damaged", b"\xff", whole[: len(whole) // 2].encode(), b""):
        files[0].write_bytes(damaged)
        with Engine(l2, DraftModel(model=l2_close), **options) as engine:
            assert engine.cost_model.measured
        assert files[0].read_text().count("\n") == whole.count("\n")
    with Engine(l2, "ngram", **options) as engine:  # another drafter, another file
        assert engine.generate([1, 2, 3], greedy(5)).token_ids
    with Engine(l2, NGram(prompt_lookup_max=2), **options):  # nor is one made otherwise the same
        pass
    assert len(list((tmp_path / "costs").iterdir())) == 3
    # Nothing is measured where nothing goes by it.
    with Engine(l2, "ngram", **{**options, "policy": "fixed", "cost_cache": None}) as engine:
        assert not engine.cost_model.measured
    for drafter, wrong in (
        *(("ngram", {"cost_cache": one}) for one in (3, "", b"x", "a\0b", "\ud800")),
        ("ngram", {"policy": "fixed"}),
        (None, {}),
    ):
        with pytest.raises(InvalidArgumentError, match=r"\[cost_cache\]"):
            Engine(l2, drafter, **{**options, **wrong})
    with pytest.raises(InvalidArgumentError, match=r"\[cost_cache\] expected a folder that can be"):
        Engine(l2, "ngram", **{**options, "cost_cache": files[0] / "no"})


def engine_with(model: Path, drafter: Any, cost: str, **options: Any) -> Engine:
    """An engine that goes by a cost model made by hand."""
    engine = Engine(model, drafter, policy="goodput", **{**SMALL, **options})
    assert engine._decoder is not None
    engine._decoder.cost_model = _core.CostModel.parse("specrt-cost 1\n" + cost)
    return engine


FREE = "pass 1 0.001\npass 512 0.001\n"
FULL_PRICE = "pass 1 0.001\npass 2 0.002\npass 512 0.512\n"


@pytest.mark.alone
def test_goodput_follows_the_costs(counter: Path) -> None:
    """Costs follow what passes take, so hand-made ones hold for a few rounds only."""
    free = Budgets()
    with engine_with(counter, free, FREE, num_speculative_tokens=6) as engine:
        engine.generate([0], greedy(30))
    assert free.asked[:3] == [6, 6, 6]
    dear = Budgets(step=2)  # always wrong
    with engine_with(counter, dear, FULL_PRICE, num_speculative_tokens=6) as engine:
        metrics = engine.generate([0], greedy(12)).metrics
    assert metrics.drafted_tokens <= 1


@pytest.mark.alone
def test_goodput_gives_up_on_hopeless_drafts_and_tries_again(counter: Path) -> None:
    wrong = Budgets(step=2)
    with Engine(counter, wrong, policy="goodput", cpu_isa="scalar", **SMALL) as engine:
        metrics = engine.generate([0], greedy(250)).metrics
        assert 0 < metrics.drafted_tokens < 60
        # What is known of the drafter holds for the next ones, which try it again sooner or later;
        # how soon depends on what a draft costs here.
        again = [engine.generate([0], greedy(250)).metrics.drafted_tokens for _ in range(12)]
    assert max(again) < 40
    assert sum(again) > 0
    right = Budgets()
    with Engine(counter, right, policy="goodput", cpu_isa="scalar", **SMALL) as engine:
        assert engine.generate([0], greedy(250)).metrics.rounds < 120


def test_goodput_never_changes_a_text(l2_eos: Path, l2_close: Path) -> None:
    l2 = l2_eos
    settings = [
        greedy(60),
        greedy(60, repetition_penalty=1.3, logprobs=1),
        SamplingParams(max_tokens=60, temperature=0.9, seed=2),
        SamplingParams(max_tokens=60, temperature=0.7, top_p=0.9, seed=3),
        SamplingParams(max_tokens=60, temperature=1.1, min_p=0.05, seed=4, n=2),
        greedy(60, structured_outputs=StructuredOutputs(regex="[a-z0-9 ]+")),
    ]
    with Engine(l2, **SMALL) as engine:
        expected = engine.generate(prompts(), settings)
    tally = Tally()
    for drafter in (
        DraftModel(model=l2_close),
        SelfDraft(layers=1),
        NGram(),
        Suffix(),
        Merge([NGram(), DraftModel(model=l2_close)]),
        Oracle(known(expected), 264),
    ):
        for cost in (FREE, FULL_PRICE):
            with engine_with(
                l2, drafter, cost, num_speculative_tokens=5, check_invariants=True
            ) as engine:
                got = engine.generate(prompts(), settings)
                alone = [engine.generate(*pair) for pair in zip(prompts(), settings, strict=True)]
            assert_same(got, expected, (drafter, cost))
            assert_same(alone, expected, (drafter, cost))
            tally.add(got)
    assert tally.accepted > 300
    assert tally.drafted - tally.accepted > 300


# SGLang's tiers.


class Sglang:
    """The rule as published, for one tier."""

    def __init__(self, steps: int, candidates: list[int], down: float) -> None:
        self.candidates, self.down = candidates, down
        self.steps = min(candidates, key=lambda one: (abs(one - steps), one))
        self.ema, self.batches = self.steps - 1.0, 0

    def verified(self, accepted: float) -> None:
        if self.steps > 0:
            self.ema = 0.8 * self.ema + 0.2 * accepted
        self.batches += 1
        if self.batches <= 10 or (self.batches - 10) % 5:
            return
        moved = False
        at = self.candidates.index(self.steps)
        while at > 0:
            prev = self.candidates[at - 1]
            if self.ema > (0.5 if prev == 0 else prev - 0.5) + self.down:
                break
            at, moved = at - 1, True
        if not moved:
            while at + 1 < len(self.candidates) and self.ema > self.candidates[at] - 0.5:
                at += 1
        self.steps = self.candidates[at]


@pytest.mark.parametrize("rates", [[0.9], [0.7, 0.5], [0.3], [0.98]])
def test_ema_tiers_alone(counter: Path, rates: list[float]) -> None:
    drafter = Budgets()
    sizes = {**SMALL, "max_model_len": 600, "num_speculative_tokens": 4, "policy": "ema_tiers"}
    with Engine(counter, drafter, synthetic_acceptance_rates=rates, **sizes) as engine:
        engine.generate([0], greedy(500))
    rule = Sglang(4, [1, 3, 5, 7], -0.25)
    seen = set()
    # The first thing that it is told is prefill's token.
    for asked, accepted in zip(drafter.asked[:-3], drafter.accepted[1:], strict=False):
        assert asked == min(rule.steps, 4)
        seen.add(rule.steps)
        rule.verified(accepted)
    assert len(drafter.asked) > 90
    assert seen - {3} or rates == [0.7, 0.5]


def test_ema_tiers_of_eight(counter: Path) -> None:
    """The second tier can come to drafting nothing, and tries again after every interval."""
    drafter = Budgets()
    sizes = {**SMALL, "num_speculative_tokens": 4, "policy": "ema_tiers"}
    with Engine(counter, drafter, synthetic_acceptance_rate=0.1, **sizes) as engine:
        outputs = engine.generate([[i] for i in range(8)], greedy(60))
    rule = Sglang(4, [0, 1, 3], 0.0)
    asked, accepted = drafter.asked, drafter.accepted
    drafts, told = 0, 8  # behind what prefill gave
    for _ in range(45):  # all eight still run
        if rule.steps:
            assert asked[drafts : drafts + 8] == [rule.steps] * 8
            drafts += 8
        rule.verified(float(np.mean(accepted[told : told + 8])))
        told += 8
    assert 0 < drafts < 45 * 8
    assert all(one.metrics.rounds >= 45 for one in outputs)


# AdaSD.


def law(engine: Engine, tokens: list[int]) -> np.ndarray:
    """What a model says of the next token, at temperature 1."""
    output = engine.generate(tokens, greedy(1, logprobs=264, ignore_eos=True))
    assert output.logprobs is not None
    out = np.zeros(264)
    for token, one in output.logprobs[0].items():
        out[token] = math.exp(one.logprob)
    return out / out.sum()


def crossing(accepted: list[float], rejected: list[float]) -> float:
    """Where two Gaussian kernel density estimates cross between their means; -1: nowhere."""

    def density(values: list[float], x: np.ndarray) -> np.ndarray:
        width = np.std(values, ddof=1) * len(values) ** (-1 / 5)
        z = (x[:, None] - np.array(values)) / width
        return np.exp(-0.5 * z * z).sum(1) / (len(values) * width)

    low, high = np.mean(accepted), np.mean(rejected)
    if low >= high:
        return -1.0
    x = np.linspace(low, high, 6401)
    ahead = density(accepted, x) > density(rejected, x)
    if not ahead[0] or ahead.all():
        return -1.0
    return float(x[np.argmin(ahead)])


def test_adasd_is_its_definition(l2: Path, l2_close: Path) -> None:
    """The whole text, from the two models' laws alone."""
    prompt, count, gamma = [1, 2, 3], 280, 4
    sizes = {"max_model_len": 300, "max_batch_size": 1, "threads": 1}
    with Engine(
        l2, DraftModel(model=l2_close), policy="adasd", num_speculative_tokens=gamma, **sizes
    ) as engine:
        got = engine.generate(prompt, greedy(count, ignore_eos=True))
        assert not got.lossless
    with Engine(l2, **sizes) as target, Engine(l2_close, **sizes) as draft:
        plain = target.generate(prompt, greedy(count, ignore_eos=True))
        tokens = [*prompt, int(np.argmax(law(target, prompt)))]
        accepted: list[float] = []
        rejected: list[float] = []
        entropies: list[float] = []
        within = -1.0
        lossy = stopped = drafted = rounds = 0
        while len(tokens) < len(prompt) + count:
            rounds += 1
            left = len(prompt) + count - len(tokens)
            stop = float(np.mean(entropies)) if entropies else math.inf
            guesses: list[tuple[int, np.ndarray]] = []
            while len(guesses) < min(gamma, left - 1):
                q = law(draft, [*tokens, *(one for one, _ in guesses)])
                guesses.append((int(np.argmax(q)), q))
                if -np.sum(q[q > 0] * np.log(q[q > 0])) > stop:
                    stopped += 1
                    break
            drafted += len(guesses)
            for guess, q in guesses:
                p = law(target, tokens)
                middle = (p + q) / 2
                distance = math.sqrt(
                    max(
                        0.0,
                        sum(
                            0.5 * np.sum(one[one > 0] * np.log2(one[one > 0] / middle[one > 0]))
                            for one in (p, q)
                        ),
                    )
                )
                choice = int(np.argmax(p))
                (accepted if choice == guess else rejected).append(distance)
                if choice != guess and not (distance <= within and p[guess] >= 1e-4):
                    entropies.append(float(-np.sum(q[q > 0] * np.log(q[q > 0]))))
                    tokens.append(choice)
                    break
                lossy += choice != guess
                tokens.append(guess)
                if len(tokens) == len(prompt) + count:
                    break
            else:
                tokens.append(int(np.argmax(law(target, tokens))))
            if len(accepted) >= 16 and len(rejected) >= 16:
                within = crossing(accepted, rejected)
    assert got.token_ids == tokens[len(prompt) :]
    assert got.metrics.rounds == rounds
    assert got.metrics.drafted_tokens == drafted
    assert lossy > 0
    assert stopped > 0
    assert got.token_ids != plain.token_ids


def test_adasd_begins_exactly(l2: Path, l2_close: Path) -> None:
    """Until sixteen of each are known it is coupled verification; self-drafts are all accepted."""
    with Engine(l2, **SMALL) as engine:
        plain = engine.generate([1, 2, 3], greedy(12))
        sampled = SamplingParams(max_tokens=12, temperature=0.9, seed=5)
        expected = engine.generate([1, 2, 3], sampled)
    for drafter in (DraftModel(model=l2_close), SelfDraft(layers=1)):
        with Engine(l2, drafter, policy="adasd", **SMALL) as engine:
            got = engine.generate([1, 2, 3], greedy(12))
            assert got.token_ids == plain.token_ids
            assert not got.lossless
            assert engine.generate([1, 2, 3], sampled).token_ids == expected.token_ids
            off = engine.generate([1, 2, 3], greedy(12, speculation=Speculation(policy="fixed")))
            assert off.lossless
            assert off.token_ids == plain.token_ids
