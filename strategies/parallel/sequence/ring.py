"""Ring attention: keys and values go round among the ranks that share samples, a part at a time,
and what a rank's queries make of each part is merged as it comes; no rank has more than two parts.

Source: Liu et al. 2023 (arXiv:2310.01889). Parts are merged by the logarithm of the sum in their
softmax, as torch's ring does (torch.distributed.tensor.experimental, ``_SDPAMerger``), which takes
kernels of GPUs alone.

Shape suffixes as in ``strategies.parallel.sequence.exchanges``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from strategies.parallel.sequence.exchanges import Around

__all__ = ["Ring", "of"]

aten = torch.ops.aten
Taken = Callable[[], Tensor]


def _passed(x: Tensor, group: Any) -> Taken:
    """Send ``x`` to the next rank; what is called for the previous one's waits until it is here.
    What is computed in between runs beside."""
    rank, size, got = group.rank(), group.size(), torch.empty_like(x)
    to, of = (rank + 1) % size, (rank - 1) % size
    if x.is_cuda:  # NCCL sends and receives at once only what it is given together
        send = dist.P2POp(dist.isend, x, group=group, group_peer=to)
        works = dist.batch_isend_irecv(
            [send, dist.P2POp(dist.irecv, got, group=group, group_peer=of)]
        )
    else:
        works = [
            dist.isend(x, group=group, group_dst=to),
            dist.irecv(got, group=group, group_src=of),
        ]

    def taken() -> Tensor:
        for work in works:
            work.wait()
        return got

    taken.sent = x  # until then it must not be freed
    return taken


def _attended(q_BNTK: Tensor, k_BNTK: Tensor, v_BNTK: Tensor) -> tuple[Tensor, Tensor, list[Any]]:
    """Attention, the logarithm of the sum in its softmax [B, N, T], and what backward wants."""
    if q_BNTK.device.type == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q_BNTK, k_BNTK, v_BNTK)
        return out, lse, []
    found = aten._scaled_dot_product_flash_attention(q_BNTK, k_BNTK, v_BNTK)
    out, lse, *rest = found
    return out, lse, rest[:6]


def _differentiated(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rest: list[Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, from the output and the sum over all parts."""
    if q.device.type == "cpu":
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
        return backward(grad, q, k, v, out, lse, 0.0, False)
    cum_q, cum_k, max_q, max_k, seed, offset = rest
    backward = aten._scaled_dot_product_flash_attention_backward
    return backward(grad, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, 0.0, False, seed, offset)


class Round(torch.autograd.Function):
    """Attention of this rank's queries to the keys and values of all ranks of ``group``."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: Any) -> Tensor:
        pair, merged = torch.stack([k, v]), None
        for left in reversed(range(group.size())):
            coming = _passed(pair, group) if left else None
            out, lse, ctx.rest = _attended(q, *pair)
            merged = _merged(merged, out.float(), lse.unsqueeze(-1))
            pair = coming() if coming else pair
        whole, sums = merged[0].to(q.dtype), merged[1].squeeze(-1)
        ctx.save_for_backward(q, k, v, whole, sums)
        ctx.group = group
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        pair, of_q, home = torch.stack([k, v]), torch.zeros_like(q, dtype=torch.float32), None
        for left in reversed(range(ctx.group.size())):
            coming = _passed(pair, ctx.group) if left else None
            mine, *of_pair = _differentiated(grad, q, *pair, out, lse, ctx.rest)
            of_q += mine
            so_far = torch.stack(of_pair).float()
            # They travel with the part that they are of, and after the last round to its owner.
            home = _passed(so_far if home is None else so_far.add_(home()), ctx.group)
            pair = coming() if coming else pair
        of_k, of_v = home().to(k.dtype)
        return of_q.to(q.dtype), of_k, of_v, None


def _merged(
    so_far: tuple[Tensor, Tensor] | None, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor]:
    if so_far is None:
        return out, lse
    whole, sums = so_far
    return whole - (lse - sums).sigmoid() * (whole - out), sums - F.logsigmoid(sums - lse)


class Ring(Around):
    """The kernel is torch's flash attention, which tells that sum, whatever ``inner`` is."""

    cut = frozenset({"queries", "keys"})

    def __call__(self, q_BNTK: Tensor, k_BNTK: Tensor, v_BNTK: Tensor) -> Tensor:
        return Round.apply(q_BNTK, k_BNTK, v_BNTK, self.group)


def of(ranks: int) -> type[Ring]:
    """The ring of so many: pairs of keys and values are sent on but for the last time, and in
    backward their gradients each time."""
    counts = {"forward_collectives": ranks - 1, "backward_collectives": 2 * ranks - 1}
    return type("Ring", (Ring,), counts)
