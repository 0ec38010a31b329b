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
from .benchmark import Totals
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
from .sampling import SamplingParams

if TYPE_CHECKING:
    from rich.table import Table

    from .loading import Checkpoint
    from .loading.source import Tensor

__all__ = ["Diagnosis", "Finding", "diagnose"]

PROMPTS = (
    "What makes the leaves change their colour in autumn?",
    "Write a short story about a shepherd who finds a map.",
    "List the steps for washing a woollen jumper by hand.",
    "Explain what a function is in a programming language.",
    "The river rose for three days before anybody in the valley noticed that",
    "Which is further north, Rome or New York, and how can one tell?",
)
GAMMA = 4
TOKENS = 40

NOTHING = 0.05
"""Accepted tokens a round below which a drafter is of no use at all."""
BETTER = 1.2
"""By so much another reading has to beat the given one to be believed."""


@dataclass(frozen=True)
class Finding:
    """One reading of the drafter and what it came to; `error` where it cannot be read so."""

    name: str
    cure: str = ""
    accepted: float = 0.0
    """Tokens a round: τ - 1 of a chain of four."""
    alpha: tuple[float, ...] = ()
    error: str = ""


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
        from rich.table import Table

        table = Table()
        table.add_column("reading")
        table.add_column("τ", justify="right")
        table.add_column("α at 1, 2, ...", justify="right")
        table.add_column("")
        for one in self.findings:
            alpha = " ".join(f"{value:.2f}" for value in one.alpha)
            if one.error:
                table.add_row(one.name, "–", "–", one.error)
            else:
                mark = "best" if one is self.best else ""
                table.add_row(one.name, f"{1.0 + one.accepted:.2f}", alpha, mark)
        return table


class _Bench:
    """The target, loaded once, and how much of a drafter's chains it accepts."""

    def __init__(self, opened: Opened, features: Features, max_model_len: int) -> None:
        self.opened, self.shape = opened, opened.shape
        self.sizes = self.sizes_for(None, features, max_model_len)
        self._prompts = [self._encode(one) for one in PROMPTS]
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
            max_batch_size=len(PROMPTS), max_num_batched_tokens=256, block_size=16,
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
        params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
        core = params.to_core(eos_token_ids=())
        for prompt in self._prompts:
            self.decoder.add(prompt, core, drafter)
        ended = []
        while not self.decoder.idle:
            for *_, finish, counters, error in self.decoder.round(
                _core.plan_fixed(self.decoder, GAMMA)
            ):
                if error:
                    return Finding(name, cure, error=error)
                if finish and counters is not None:
                    ended.append(Metrics.of(counters, ttft=0.0, total=0.0))
        totals = Totals.of(ended)
        return Finding(name, cure, totals.acceptance_length - 1.0, tuple(totals.alpha_per_position))


def diagnose(target: Any, drafter: Any, *, dtype: str = "auto", tokenizer: Any = None) -> Diagnosis:
    """Try every reading of a trained drafter: an EAGLE or Medusa head, "mtp", or a smaller model.

    Raises InvalidArgumentError for drafters that are not trained, and what `Engine` raises for a
    target or a drafter that cannot be read in any way.
    """
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
            findings = examine(spec, opened, stack)
    return conclude(findings)


def conclude(findings: list[Finding]) -> Diagnosis:
    """What follows from what each reading came to; the first is the drafter as given."""
    given = findings[0]
    best = max(
        (one for one in findings if not one.error), key=lambda one: one.accepted, default=given
    )
    if best.error:
        return Diagnosis(findings, best, False, f"it cannot be read: {given.error}")
    if best.accepted < NOTHING:
        text = (
            "no reading helps: its weights are random, untrained, or made for another target "
            f"(τ {1 + best.accepted:.2f} at best)"
        )
        return Diagnosis(findings, best, False, text)
    if given.error or best.accepted > max(BETTER * given.accepted, given.accepted + NOTHING):
        was = "is refused" if given.error else f"comes to τ {1 + given.accepted:.2f}"
        text = (
            f"misread: as it stands it {was}, with {best.name!r} to τ {1 + best.accepted:.2f}; "
            f"{best.cure}"
        )
        return Diagnosis(findings, best, False, text)
    text = f"as it should be: τ {1 + given.accepted:.2f}, no other reading is better"
    return Diagnosis(findings, given, True, text)


AS_GIVEN = "as given"


def _heads(spec: Eagle | MTP, opened: Opened, stack: ExitStack) -> list[Finding]:
    shape = opened.shape
    config = shape.config
    facts = TargetFacts(
        config.num_layers,
        tuple(config.rope_inv_freq),
        config.head_dim,
        lambda: _lm_head(opened.checkpoint, config.tied_embeddings),
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
                head = OpenedHead(spec, other, _shape_of(other))
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
        tried.append((one.name, one.cure, OpenedHead(spec, revised, _shape_of(revised)), ""))
    layers = sorted({i for _, _, head, _ in tried if head for i in head.shape.features.layers})
    # Read while all files are open; each is small beside the target.
    loaded = [(name, cure, head, head and _load(head), error) for name, cure, head, error in tried]
    limit = min(config.max_position_embeddings, given.shape.config.max_position_embeddings, 512)
    bench = _Bench(opened, Features(layers=tuple(layers), normed=True), limit)
    findings = []
    for name, cure, head, model, error in loaded:
        if head is None or model is None:
            findings.append(Finding(name, cure, error=error))
            continue
        made = _core.make_head_drafter(
            model, bench.model, name="head", target_of_draft=list(head.shape.target_of_draft),
            **bench.cached(head.shape), **head.shape.options(),
        )  # fmt: skip
        findings.append(bench.measure(name, cure, made))
    return findings


def _shape_of(head: Any) -> Any:
    from .planning import HeadShape

    features = Features(layers=head.feature_layers, normed=head.feature_normed)
    return HeadShape(
        config=head.config, dtype=head.dtype, features=features, levels=GAMMA, top_k=1,
        target_of_draft=head.target_of_draft,
    )  # fmt: skip


def _load(head: OpenedHead) -> _core.Model:
    builder = _core.ModelBuilder(head.shape.config, head.shape.dtype)
    for name in head.checkpoint.names:
        tensor = head.checkpoint.tensor(name)
        builder.set(name, tensor.dtype, tensor.array)
    return builder.build()


def _lm_head(checkpoint: Checkpoint | None, tied: bool) -> Tensor:
    if checkpoint is None:
        raise InvalidArgumentError("[target] expected a checkpoint, got a packed file")
    return checkpoint.tensor("embedding" if tied else "lm_head")


def _draft_models(spec: DraftModel, opened: Opened, stack: ExitStack) -> list[Finding]:
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
    limit = min(opened.shape.config.max_position_embeddings, config.max_position_embeddings, 512)
    bench = _Bench(opened, Features(), limit)
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

    target = opened.shape.config
    own = tuple(target.rope_inv_freq)
    if fields.head_dim == target.head_dim and own != tuple(fields.rope_inv_freq):
        add("rotary factors: the target's", {}, rope_inv_freq=own)
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


def _medusa(spec: Medusa, opened: Opened, stack: ExitStack) -> list[Finding]:
    checkpoint, _ = spec.open(opened.shape.config, opened.shape.dtype)
    stack.callback(checkpoint.close)
    heads = checkpoint.load()
    count = min(checkpoint.config.num_heads, GAMMA)
    bench = _Bench(opened, MEDUSA_FEATURES, min(opened.shape.config.max_position_embeddings, 512))
    drafter = _core.make_medusa_drafter(
        heads, tree=_core.StaticTree.chain(count), max_batch_size=len(PROMPTS), team=bench.team,
        cpu_isa=bench.isa,
    )  # fmt: skip
    return [bench.measure(AS_GIVEN, "", drafter)]


def warn_if_useless(measured: Sequence[tuple[int, int]], name: str) -> None:
    """Warn where not one draft of a self-test was accepted; pairs are (accepted, rejected)."""
    accepted, rejected = (sum(one[i] for one in measured) for i in (0, 1))
    if accepted == 0 and rejected > 0:
        warnings.warn(
            f"none of {rejected} drafts of {name} was accepted in a self-test: it may be meant for "
            "another target, or be misread; `specrt doctor TARGET DRAFTER` tries how",
            stacklevel=3,
        )
