"""Draft heads on their way from a folder, or the target's own checkpoint, to the core."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import _core
from .drafters import MTP, Eagle, Eagle3
from .errors import InvalidArgumentError, LoadError
from .loaded import progress
from .loading.eagle import TargetShape, open_eagle
from .planning import Features, HeadShape, ModelShape, Sizes

if TYPE_CHECKING:
    from .loading import Checkpoint
    from .loading.head_fields import HeadCheckpoint

__all__ = ["OpenedHead", "open_head"]


class OpenedHead:
    """A head whose shape is known and whose weights are still to be read."""

    def __init__(
        self, spec: Eagle | MTP, checkpoint: HeadCheckpoint, shape: HeadShape, draft_tokens: int
    ) -> None:
        self.spec, self.checkpoint, self.shape = spec, checkpoint, shape
        self.draft_tokens = draft_tokens
        """Nodes a round."""

    def load(self) -> list[_core.Model]:
        """Packed weights, of each module; a progress bar on a terminal. Closes the checkpoint."""
        used = [self.checkpoint, *self.checkpoint.later][: self.shape.modules]
        try:
            return [self._load(one) for one in used]
        except InvalidArgumentError as error:
            raise LoadError(f"[{self.checkpoint.name}] {error}") from error
        finally:
            self.close()

    def _load(self, checkpoint: HeadCheckpoint) -> _core.Model:
        builder = _core.ModelBuilder(self.shape.config, self.shape.dtype)
        for name in progress(checkpoint.names, f"Loading the head as {self.shape.dtype}"):
            tensor = checkpoint.tensor(name)
            builder.set(name, tensor.dtype, tensor.array)
        return builder.build()

    def drafter(
        self,
        modules: list[_core.Model],
        target: _core.Model,
        sizes: Sizes,
        team: _core.ThreadTeam,
        isa: str,
        check_invariants: bool,
    ) -> _core.CoreDrafter:
        options = self.shape.options()
        del options["modules"]
        return _core.make_head_drafter(
            modules,
            target,
            name=type(self.spec).__name__.lower(),
            target_of_draft=list(self.shape.target_of_draft),
            **sizes.options(sizes.drafter_kv_cache_bytes, sizes.drafter_max_model_len),
            **options,
            team=team,
            cpu_isa=isa,
            device=sizes.device,
            check_invariants=check_invariants,
        )

    def close(self) -> None:
        self.checkpoint.close()


def open_head(
    spec: Eagle | MTP,
    target: ModelShape,
    checkpoint: Checkpoint | None,
    tokens: int | None,
    max_model_len: int | None,
    merged: bool = False,
) -> OpenedHead:
    """Open and check a head for a target; `tokens` draft tokens a round, None for its own number.

    `merged`: they are those of a `Merge`. `checkpoint` is the target's, None where it came from a
    saved file. Raises as `open_eagle` and `open_mtp` do.
    """
    config = target.config
    # Where a target is in float16, what it shares with its head is as well.
    dtype = "float16" if (spec.dtype, target.dtype) == ("auto", "float16") else spec.dtype
    shape = TargetShape(config.vocab_size, config.hidden_size, config.num_layers)
    if isinstance(spec, Eagle):
        head = open_eagle(
            spec.model,
            shape,
            kind="eagle3" if isinstance(spec, Eagle3) else "eagle",
            dtype=dtype,
            aux_layer_ids=spec.aux_layer_ids if isinstance(spec, Eagle3) else None,
            aux_convention=spec.aux_convention if isinstance(spec, Eagle3) else "input",
            max_model_len=max_model_len,
        )
    else:
        from .loading.mtp import open_mtp

        head = open_mtp(checkpoint, dtype=dtype)
    features = Features(layers=head.feature_layers, normed=head.feature_normed)
    nodes, levels = spec.sizes(tokens, 1 + len(head.later), merged)
    return OpenedHead(
        spec,
        head,
        HeadShape(
            config=head.config,
            dtype=head.dtype,
            features=features,
            levels=levels,
            top_k=spec.top_k,
            modules=min(1 + len(head.later), levels),
            target_of_draft=head.target_of_draft,
        ),
        nodes,
    )
