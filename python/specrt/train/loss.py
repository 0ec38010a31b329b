"""Output head and cross-entropy together, without keeping logits for a backward pass."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["HeadLoss", "head_loss"]

CHUNK = 64
"""Rows whose float32 logits are held at a time: few enough to stay in a core's cache."""


class HeadLoss(torch.autograd.Function):
    """Weighted soft cross-entropy of several states a row against one teacher.

    The gradient of the logits, softmax minus teacher, is known as soon as the logits are: it takes
    their place in one buffer, in the products' dtype, and what flows back are two products over it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        states: torch.Tensor,
        head: torch.Tensor,
        teacher: torch.Tensor,
        weights: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        steps, rows, width = states.shape
        logits = torch.mm(states.reshape(steps * rows, width), head.t()).view(steps, rows, -1)
        right = torch.zeros(steps, rows, dtype=torch.bool)
        total = torch.zeros((), dtype=torch.float64)
        for at in range(0, rows, CHUNK):
            said = torch.softmax(teacher[at : at + CHUNK].float(), -1)
            best = said.argmax(-1, keepdim=True)
            for step in range(steps):
                part = logits[step, at : at + CHUNK]
                own = part.float()
                weight = weights[step, at : at + CHUNK]
                # The largest is found much faster than where it is.
                right[step, at : at + CHUNK] = own.gather(-1, best)[:, 0] >= own.amax(-1)
                own = torch.log_softmax(own, -1)
                total -= (weight * (said * own).sum(-1)).sum()
                part.copy_(own.exp_().sub_(said).mul_(weight[:, None]))
        ctx.save_for_backward(states, head, logits)
        ctx.mark_non_differentiable(right)
        return total.float(), right

    @staticmethod
    def backward(ctx: Any, *given: torch.Tensor) -> Any:
        states, head, gradient = ctx.saved_tensors
        steps, rows, width = states.shape
        flat = gradient.view(steps * rows, -1)
        of_states = torch.mm(flat, head).view(steps, rows, width) * given[0].to(flat.dtype)
        of_head = None
        if ctx.needs_input_grad[1]:
            of_head = torch.mm(flat.t(), states.reshape(steps * rows, width))
            of_head = of_head * given[0].to(flat.dtype)
        return of_states, of_head, None, None


def head_loss(
    states: torch.Tensor, head: torch.Tensor, teacher: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum of weights times cross-entropy, whether both have the same favourite [steps, rows]).

    states [steps, rows, hidden] and head [vocabulary, hidden] are of one dtype; teacher [rows,
    vocabulary] are logits of the same vocabulary; weights [steps, rows] float32, 0 leaves out.
    """
    loss, right = HeadLoss.apply(states, head, teacher, weights)  # type: ignore[no-untyped-call]
    return loss, right
