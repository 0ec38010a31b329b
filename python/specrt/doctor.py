"""`specrt doctor`: does a drafter go with its target, and if not, how was it meant?

A drafter cannot change what comes out, so one that is misread shows in nothing but its speed. The
doctor reads it in every way that is known to be got wrong, answers some prompts with each, and
compares how much the target accepts.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from . import _core
from .assembly import vocabulary_map
from .bench.prompts import Totals
from .drafters import MTP, DraftModel, Eagle, Eagle3, Medusa, resolve
from .errors import InvalidArgumentError, LoadError, SpecrtError
from .heads import OpenedHead, open_head
from .hypotheses import Reading, TargetFacts, absolute, head_readings
from .loaded import Opened, open_target, set_tensor
from .loading.eagle import TargetShape
from .outputs import Metrics
from .planning import (
    MEDUSA_FEATURES,
    DrafterShape,
    Features,
    ModelShape,
    Sizes,
    core_config,
    plan_sizes,
)
from .trial import try_chains

if TYPE_CHECKING:
    from rich.table import Table


__all__ = ["Diagnosis", "Finding", "diagnose"]

PROMPTS = (
    "What makes the leaves change their colour in autumn?",
    "Write a short story about a shepherd who finds a map.",
    "List the steps for washing a woollen jumper by hand.",
    "Explain what a function is in a programming language.",
    "The river rose for three days before anybody in the valley noticed that",
    "Which is further north, Rome or New York, and how can one tell?",
    "Give three reasons why a small town might want a cinema.",
    "Describe a market in the early morning, before the first customers come.",
    "How does a compass work, and when does it fail?",
    "Once upon a time there was a miller who could not sleep, and",
)
GAMMA = 4
TOKENS = 64
"""Of each answer."""

MOST = 4608
"""Tokens of a prompt and its answer."""
NOTHING = 0.05
"""Accepted tokens a round below which a drafter is of no use at all."""
SIGMAS = 3.0
"""By so many standard errors another reading has to beat the given one to be believed: a dozen are
tried, and the best of a dozen is somewhat better by chance alone."""


@dataclass(frozen=True)
class Finding:
    """One reading of the drafter and what it came to; `error` where it cannot be read so."""

    name: str
    cure: str = ""
    accepted: float = 0.0
    """Tokens a round: τ - 1 of a chain of four."""
    alpha: tuple[float, ...] = ()
    rounds: int = 0
    error: str = ""

    @property
    def variance(self) -> float:
        """Of `accepted`, at most: a round's number lies between 0 and `GAMMA`; where drafts are
        accepted with one chance at every position, it is less."""
        spread = min(1.0 + self.accepted, max(0.0, GAMMA - self.accepted))
        return self.accepted * spread / max(1, self.rounds)


@dataclass(frozen=True)
class Diagnosis:
    """All findings, the one as given first, and what follows from them."""

    findings: list[Finding]
    best: Finding
    healthy: bool
    """The drafter is of use as it is read."""
    verdict: str

    def table(self) -> Table:
        """One row a reading."""
        from rich.markup import escape
        from rich.table import Table

        table = Table()
        table.add_column("reading")
        table.add_column("τ", justify="right")
        table.add_column("α at 1, 2, ...", justify="right")
        table.add_column("")
        for one in self.findings:
            alpha = " ".join(f"{value:.2f}" for value in one.alpha)
            if one.error:
                table.add_row(one.name, "–", "–", escape(one.error))
            else:
                mark = "best" if one is self.best else ""
                table.add_row(one.name, f"{1.0 + one.accepted:.2f}", alpha, mark)
        return table


@dataclass(frozen=True)
class _Asked:
    """What the target is asked, and how much it answers."""

    opened: Opened
    prompts: Sequence[str]
    tokens: int


class _Bench:
    """The target, loaded once, and how much of a drafter's chains it accepts."""

    def __init__(self, asked: _Asked, features: Features, max_model_len: int) -> None:
        self.opened, self.shape, self.asked = asked.opened, asked.opened.shape, asked
        opened = asked.opened
        self._prompts = [self._encode(one) for one in asked.prompts]
        self.sizes = self.sizes_for(None, features, max_model_len)
        self.model = opened.load()
        self.team = _core.ThreadTeam(0, False)
        self.isa = _core.resolve_cpu_isa("auto")
        self.decoder = _core.Decoder(
            self.model, **self.sizes.target_options(), team=self.team, cpu_isa=self.isa,
            check_invariants=False,
        )  # fmt: skip

    def sizes_for(
        self, drafter: DrafterShape | None, features: Features, max_model_len: int
    ) -> Sizes:
        return plan_sizes(
            self.shape, drafter, max_model_len=max_model_len, kv_cache_bytes=None,
            max_batch_size=len(self._prompts), max_num_batched_tokens=256, block_size=16,
            kv_cache_dtype="auto", enable_prefix_caching=False, features=features,
        )  # fmt: skip

    def _encode(self, text: str) -> list[int]:
        tokenizer = self.opened.tokenizer
        if tokenizer is None:
            raise InvalidArgumentError("[tokenizer] expected one to ask the target with, got none")
        if getattr(tokenizer.hf, "chat_template", None):
            return tokenizer.apply_chat_template([{"role": "user", "content": text}])
        return tokenizer.encode(text)

    def cached(self, drafter: DrafterShape) -> dict[str, Any]:
        """Arguments of a drafter with a KV cache of its own."""
        sizes = self.sizes_for(drafter, self.sizes.features, self.sizes.max_model_len)
        return {
            **sizes.options(sizes.drafter_kv_cache_bytes, sizes.drafter_max_model_len),
            "team": self.team, "cpu_isa": self.isa,
        }  # fmt: skip

    def measure(self, name: str, cure: str, drafter: _core.CoreDrafter) -> Finding:
        """Answer the prompts, greedily."""
        try:
            ended = try_chains(
                self.decoder, drafter, self._prompts, tokens=self.asked.tokens, gamma=GAMMA
            )
        except SpecrtError as error:
            return Finding(name, cure, error=str(error))
        totals = Totals.of(Metrics.of(one, ttft=0.0, total=0.0) for one in ended)
        alpha = tuple(totals.alpha_per_position)
        return Finding(name, cure, totals.acceptance_length - 1.0, alpha, totals.rounds)


def diagnose(
    target: Any,
    drafter: Any,
    *,
    dtype: str = "auto",
    tokenizer: Any = None,
    prompts: Sequence[str] = PROMPTS,
    tokens: int = TOKENS,
) -> Diagnosis:
    """Try every reading of a trained drafter: an EAGLE or Medusa head, "mtp", or a smaller model.

    `prompts` should be like what the drafter was made for; the target answers each with `tokens`.

    Raises InvalidArgumentError for drafters that are not trained, and what `Engine` raises for a
    target or a drafter that cannot be read in any way.
    """
    if not prompts or not all(isinstance(one, str) and one for one in prompts):
        raise InvalidArgumentError(f"[prompts] expected at least one text, got {prompts!r}")
    if isinstance(tokens, bool) or not isinstance(tokens, int) or not 2 <= tokens <= 4096:
        raise InvalidArgumentError(f"[tokens] expected an integer from 2 to 4096, got {tokens!r}")
    spec = resolve(drafter)
    if isinstance(spec, (Eagle, MTP)):
        examine: Callable[..., list[Finding]] = _heads
    elif isinstance(spec, DraftModel):
        examine = _draft_models
    elif isinstance(spec, Medusa):
        examine = _medusa
    else:
        raise InvalidArgumentError(
            f"[drafter] expected a trained head or a smaller model, got {drafter!r}"
        )
    with ExitStack() as stack:
        opened = open_target(target, tokenizer=tokenizer, dtype=dtype, max_model_len=None)
        stack.callback(opened.close)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # what they warn of is tried here
            findings = examine(spec, _Asked(opened, prompts, tokens), stack)
    return conclude(findings)


def conclude(findings: list[Finding]) -> Diagnosis:
    """What follows from what each reading came to; the first is the drafter as given."""
    given = findings[0]
    best = max(
        (one for one in findings if not one.error), key=lambda one: one.accepted, default=given
    )
    if best.error:
        return Diagnosis(findings, best, False, f"it cannot be read: {given.error}")
    doubt = SIGMAS * (best.variance + given.variance) ** 0.5
    better = bool(given.error) or best.accepted > given.accepted + max(doubt, NOTHING)
    if best.accepted < NOTHING or (not better and given.accepted < NOTHING):
        text = (
            "no reading helps: its weights are random, untrained, or made for another target "
            f"(τ {1 + best.accepted:.2f} at best)"
        )
        return Diagnosis(findings, best, False, text)
    if better:
        was = "is refused" if given.error else f"comes to τ {1 + given.accepted:.2f}"
        text = (
            f"misread: as it stands it {was}, with {best.name!r} to τ {1 + best.accepted:.2f}; "
            f"{best.cure}"
        )
        return Diagnosis(findings, best, False, text)
    text = f"as it should be: τ {1 + given.accepted:.2f}, no other reading is clearly better"
    return Diagnosis(findings, given, True, text)


AS_GIVEN = "as given"


def _heads(spec: Eagle | MTP, asked: _Asked, stack: ExitStack) -> list[Finding]:
    opened, shape = asked.opened, asked.opened.shape
    config, checkpoint = shape.config, opened.checkpoint
    if checkpoint is None:
        raise InvalidArgumentError("[target] expected a checkpoint, got a packed file")
    fields = checkpoint.config
    facts = TargetFacts(
        fields.num_layers,
        fields.rope_inv_freq,
        fields.head_dim,
        lambda: checkpoint.tensor("embedding" if fields.tied_embeddings else "lm_head"),
    )
    tried: list[tuple[str, str, OpenedHead | None, str]] = []
    try:
        given: OpenedHead | None = open_head(spec, shape, opened.checkpoint, GAMMA, None)
        tried.append((AS_GIVEN, "", given, ""))
    except LoadError as error:
        given = None
        tried.append((AS_GIVEN, "", None, str(error)))
    if isinstance(spec, Eagle3):
        try:
            other = absolute(
                spec.model,
                target=TargetShape(config.vocab_size, config.hidden_size, config.num_layers),
                kind="eagle3", dtype=spec.dtype, aux_layer_ids=spec.aux_layer_ids,
                aux_convention=spec.aux_convention,
            )  # fmt: skip
            stack.callback(other.close)
            if other.target_of_draft and (
                given is None or other.target_of_draft != given.checkpoint.target_of_draft
            ):
                head = OpenedHead(spec, other, _shape_of(other), GAMMA)
                cure = "store d2t as offsets: target id minus draft id"
                tried.append(("d2t: target ids, not offsets", cure, head, ""))
                given = given or head
        except LoadError:
            pass  # its ids are no ids
    if given is None:
        return [Finding(AS_GIVEN, error=tried[0][3])]
    stack.callback(given.close)
    # The tables of the target are read before it lets go of its checkpoint.
    readings: list[Reading] = list(head_readings(given.checkpoint, facts))
    for one in readings:
        revised = one.read(given.checkpoint)
        tried.append(
            (
                one.name,
                one.cure,
                OpenedHead(spec, revised, _shape_of(revised), GAMMA),
                "",
            )
        )
    layers = sorted({i for _, _, head, _ in tried if head for i in head.shape.features.layers})
    # Read while all files are open; each is small beside the target.
    loaded = [
        (name, cure, read, _load(read) if read else None, refused)
        for name, cure, read, refused in tried
    ]
    limit = min(config.max_position_embeddings, given.shape.config.max_position_embeddings, MOST)
    bench = _Bench(asked, Features(layers=tuple(layers), normed=True), limit)
    findings = []
    for name, cure, read, model, refused in loaded:
        if read is None or model is None:
            findings.append(Finding(name, cure, error=refused))
            continue
        options = read.shape.options()
        del options["modules"]
        made = _core.make_head_drafter(
            [model],
            bench.model,
            name="head",
            target_of_draft=list(read.shape.target_of_draft),
            **bench.cached(read.shape),
            **options,
        )
        findings.append(bench.measure(name, cure, made))
    return findings


def _shape_of(head: Any) -> Any:
    from .planning import HeadShape

    features = Features(layers=head.feature_layers, normed=head.feature_normed)
    return HeadShape(
        config=head.config, dtype=head.dtype, features=features, levels=GAMMA, top_k=1,
        modules=1, target_of_draft=head.target_of_draft,
    )  # fmt: skip


def _load(head: OpenedHead) -> _core.Model:
    builder = _core.ModelBuilder(head.shape.config, head.shape.dtype)
    for name in head.checkpoint.names:
        tensor = head.checkpoint.tensor(name)
        builder.set(name, tensor.dtype, tensor.array)
    return builder.build()


def _draft_models(spec: DraftModel, asked: _Asked, stack: ExitStack) -> list[Finding]:
    opened = asked.opened
    draft = open_target(spec.model, tokenizer=spec.tokenizer, dtype=spec.dtype, max_model_len=None)
    stack.callback(draft.close)
    checkpoint, config = draft.checkpoint, draft.shape.config
    sizes = (opened.shape.config.vocab_size, config.vocab_size)
    try:
        known = vocabulary_map(opened, draft)
        given = Finding(AS_GIVEN)
    except SpecrtError as error:
        known, given = None, Finding(AS_GIVEN, error=str(error))
    model = _build(draft, draft.shape)
    tried: list[tuple[str, str, ModelShape, _core.Model, bool]] = []
    if not given.error:
        tried.append((AS_GIVEN, "", draft.shape, model, known is not None))
    if (known is not None or given.error) and sizes[0] == sizes[1]:
        cure = "give it the target's tokenizer files: its own are another model's"
        tried.append(("token ids as the target's", cure, draft.shape, model, False))
    for name, shape, tensors in _draft_readings(opened, draft):
        if checkpoint is not None:
            other = _build(draft, shape, tensors)
            tried.append((name, f"config.json: {name}", shape, other, known is not None))
    limit = min(opened.shape.config.max_position_embeddings, config.max_position_embeddings, MOST)
    bench = _Bench(asked, Features(), limit)
    findings = [given] if given.error else []
    for name, cure, shape, other, mapped in tried:
        pieces = (known.draft_of_target, known.pieces) if mapped and known else None
        made = _core.make_model_drafter(
            other, target_vocab_size=sizes[0], vocabulary=pieces, **bench.cached(shape)
        )
        findings.append(bench.measure(name, cure, made))
    return findings


def _draft_readings(opened: Opened, draft: Opened) -> list[tuple[str, ModelShape, dict[str, str]]]:
    """Name, shape, and canonical tensors that are read in place of others."""
    checkpoint = draft.checkpoint
    if checkpoint is None:
        return []
    fields = checkpoint.config
    found = []

    def add(name: str, tensors: dict[str, str], **changes: Any) -> None:
        other = replace(fields, **changes)
        shape = ModelShape(core_config(other, checkpoint.eos_token_ids), draft.shape.dtype)
        found.append((name, shape, tensors))

    if opened.checkpoint is not None:
        own = opened.checkpoint.config
        if fields.head_dim == own.head_dim and fields.rope_inv_freq != own.rope_inv_freq:
            add("rotary factors: the target's", {}, rope_inv_freq=own.rope_inv_freq)
    if not fields.tied_embeddings:
        add("output head tied to the embedding", {"lm_head": "embedding"})
    return found


def _build(draft: Opened, shape: ModelShape, instead: dict[str, str] | None = None) -> _core.Model:
    checkpoint = draft.checkpoint
    if checkpoint is None:
        return draft.load()
    builder = _core.ModelBuilder(shape.config, shape.dtype)
    for name in checkpoint.names:
        if instead and name in instead:
            tensor = checkpoint.tensor(instead[name])
            builder.set(name, tensor.dtype, tensor.array)
        else:
            set_tensor(builder, checkpoint, name)
    return builder.build()


def _medusa(spec: Medusa, asked: _Asked, stack: ExitStack) -> list[Finding]:
    opened = asked.opened
    checkpoint, _ = spec.open(opened.shape.config, opened.shape.dtype)
    stack.callback(checkpoint.close)
    heads = checkpoint.load()
    count = min(checkpoint.config.num_heads, GAMMA)
    bench = _Bench(asked, MEDUSA_FEATURES, min(opened.shape.config.max_position_embeddings, MOST))
    drafter = _core.make_medusa_drafter(
        heads,
        tree=_core.StaticTree.chain(count),
        max_batch_size=len(asked.prompts),
        team=bench.team,
        cpu_isa=bench.isa,
    )
    return [bench.measure(AS_GIVEN, "", drafter)]
