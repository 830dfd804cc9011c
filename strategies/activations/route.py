"""route: a random share of the tokens bypasses the middle blocks (TREAD)."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from strategies.activations.runners import runner_of, surround
from strategies.base import Parity, Slot, demand
from strategies.engine import RunContext, TrainingRun
from strategies.strategy import Strategy

if TYPE_CHECKING:
    from torch import Tensor

BESIDE = {
    "compiled": "blocks would be compiled for two numbers of tokens; leave compile out",
    "cut_weights": "ranks that share a sample would choose other tokens each; leave tp out",
    "doubles_tokens": "what is joined to the blocks is of all tokens; leave controlnet out",
}
"""Trait of another part -> why tokens are not routed beside it."""


def kept(tokens: int, share: float) -> int:
    """Return how many of ``tokens`` the middle blocks get if ``share`` of them bypasses."""
    return tokens - round(tokens * share)


class Routed:
    """Runner of blocks [B, T, D] that leaves a random choice of tokens out of the middle ones.

    The choice of each sample is its own. The tokens that were left out join again as they were.
    Without gradients all blocks get all tokens. ``forwards``: tokens that the middle blocks got ->
    number of forwards.
    """

    def __init__(self, inner: Any, share: float, ends: int) -> None:
        self.inner, self.share, self.ends = inner, share, ends
        self.forwards: Counter[int] = Counter()

    def __call__(self, blocks: Any, x_BTD: Tensor, *given: Any) -> Tensor:
        import torch

        if not torch.is_grad_enabled():
            return self.inner(blocks, x_BTD, *given)
        first, last = self.ends, len(blocks) - self.ends
        x_BTD = self.inner(blocks[:first], x_BTD, *given)
        count = kept(x_BTD.shape[1], self.share)
        order_BT = torch.rand(x_BTD.shape[:2], device=x_BTD.device).argsort(1)
        # In the order of the sample: a model may read a token's place off its neighbours'.
        chosen_BKD = order_BT[:, :count].sort(1).values.unsqueeze(-1).expand(-1, -1, x_BTD.shape[2])
        some_BKD = x_BTD.gather(1, chosen_BKD)
        self.forwards[some_BKD.shape[1]] += 1
        some_BKD = self.inner(blocks[first:last], some_BKD, *given)
        x_BTD = x_BTD.to(some_BKD.dtype).scatter(1, chosen_BKD, some_BKD)
        return self.inner(blocks[last:], x_BTD, *given)


@dataclass(frozen=True, kw_only=True)
class Route(Strategy):
    """A random share of tokens bypasses the middle blocks.

    Each forward of training leaves ``share`` of a sample's tokens out of all blocks but the first
    ``ends`` and the last ``ends``. They join the others again unchanged. Time and activations of
    the middle blocks shrink. Samples are drawn with all tokens.
    """

    name: ClassVar[str] = "route"
    slot: ClassVar[Slot] = Slot.SEQUENCE
    parity: ClassVar[Parity] = Parity.BY_DESIGN
    alters: ClassVar[tuple[str, ...]] = ("forward",)
    source: ClassVar[str] = (
        "Krause et al. 2025, TREAD (arXiv:2501.04765); SimpleTuner, helpers/training/tread.py"
    )

    share: float = 0.5
    ends: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise ValueError(f"share is {self.share:g}; between 0 and 1")
        if not isinstance(self.ends, int) or self.ends < 1:
            raise ValueError(f"ends is {self.ends!r}; a number of blocks from 1")

    def traits(self) -> frozenset[str]:
        return frozenset({"other_products", "routed_tokens"})

    def refuses(self, launch: RunContext) -> str | None:
        subject = launch.subject
        met = next((why for trait, why in BESIDE.items() if trait in launch.traits), None)
        lack = met or subject.lacks("chain", ALONE) or subject.lacks("token_blocks", ALONE)
        if lack:
            return lack
        depth, tokens = subject.depth, subject.dimensions.tokens
        if depth <= 2 * self.ends:
            most = (depth - 1) // 2
            text = f"{depth} blocks have none between {self.ends} at each end"
            return f"{text}; take ends={most}" if most else f"{text}; leave route out"
        if not 0 < kept(tokens, self.share) < tokens:
            return f"share={self.share:g} of {tokens} tokens is none or all; take another share"
        return None

    def by_block(self, depth: int) -> Sequence[int]:
        """Return 1 for a block that some tokens bypass, else 0."""
        return [int(self.ends <= i < depth - self.ends) for i in range(depth)]

    def configure(self, accelerator: Any, module: Any, launch: RunContext) -> None:
        # Outside of all other runners, so that a block is recomputed for the same tokens.
        surround(module, launch.subject, lambda run: Routed(run, self.share, self.ends))

    def observe(self, trained: TrainingRun) -> contextlib.AbstractContextManager[Any]:
        return _watched(trained.blocks(), self.ends)

    def evidence(self, trained: TrainingRun) -> dict[str, Any]:
        seen, tokens = self.note(trained), trained.subject.dimensions.tokens
        count, depth = kept(tokens, self.share), trained.subject.depth
        runner = runner_of(trained.module, Routed)
        ran, wanted = dict(runner.forwards if runner else {}), {count: trained.micro_steps}
        text = f"the middle blocks got tokens in so many forwards: {ran}"
        demand(ran == wanted, f"{text}, expected {wanted}")
        middle = depth - 2 * self.ends
        facts = {"tokens": tokens, "tokens_inside": count, "blocks_inside": middle}
        return facts if seen is None else facts | self._watched(seen, tokens, count, depth)

    def _watched(self, seen: Passed, tokens: int, count: int, depth: int) -> dict[str, Any]:
        """Check the tokens that the blocks got in a watched step, and those that bypassed some."""
        wanted = [{count if routed else tokens} for routed in self.by_block(depth)]
        found = [seen.tokens.get(place, set()) for place in range(depth)]
        demand(found == wanted, f"blocks got {found} tokens, expected {wanted}")
        bypassed = _bypassed(seen)
        choices = len({tuple(row) for row in bypassed.tolist()})
        demand(len(bypassed) == 1 or choices > 1, "all samples have the same tokens left out")
        return {"bypassed": int(bypassed.sum(1).max()), "choices": choices}


ALONE = (
    "a library's model computes positions and masks of all tokens outside of its blocks, and would "
    "need another forward; leave route out"
)


# ---- evidence ----


class Passed:
    """Tokens at the borders of the middle blocks in a watched step.

    ``tokens``: place of a block -> numbers of tokens that it got. ``before``, ``inside``, ``out``
    and ``after``: the last tokens that the first blocks gave, that the middle blocks got and gave,
    and that the last blocks got.
    """

    def __init__(self) -> None:
        self.tokens: dict[int, set[int]] = {}
        self.before: Any = None
        self.inside: Any = None
        self.out: Any = None
        self.after: Any = None


@contextlib.contextmanager
def _watched(blocks: Sequence[Any], ends: int) -> Iterator[Passed]:
    """Record the tokens that blocks get and give while the context lasts."""
    seen, last = Passed(), len(blocks) - ends
    got, gave = {ends: "inside", last: "after"}, {ends - 1: "before", last - 1: "out"}
    handles = []
    for place, block in enumerate(blocks):

        def entered(_: Any, given: Any, place: int = place) -> None:
            seen.tokens.setdefault(place, set()).add(given[0].shape[1])
            if place in got:
                setattr(seen, got[place], given[0].detach())

        def left(_: Any, given: Any, output: Any, place: int = place) -> None:
            if place in gave:
                setattr(seen, gave[place], output.detach())

        handles += [block.register_forward_pre_hook(entered), block.register_forward_hook(left)]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _bypassed(seen: Passed) -> Tensor:
    """Return which tokens bypassed the middle blocks, bool [B, T].

    Raises:
        NotInForce: tokens that bypassed came back changed, or the others not as they left.
    """
    import torch

    values = (seen.before, seen.inside, seen.out, seen.after)
    before, inside, out, after = (_marks(x_BTD.to(seen.after.dtype)) for x_BTD in values)
    places = (before.unsqueeze(1) == inside.unsqueeze(2)).any(1)
    known = bool((places.sum(1) == inside.shape[1]).all())
    demand(known, "the middle blocks got other tokens than the first blocks gave")
    demand(torch.equal(before[~places], after[~places]), "tokens that bypass came back changed")
    demand(torch.equal(out.flatten(), after[places]), "tokens of the middle blocks did not join")
    return ~places


def _marks(x_BTD: Tensor) -> Tensor:
    """Return a number [B, T] for each token; other bits give another one."""
    import torch

    bits = x_BTD.contiguous().view({2: torch.int16, 4: torch.int32}[x_BTD.itemsize]).long()
    odd = 2 * torch.arange(1, 1 + bits.shape[2], device=bits.device) ** 2 + 1
    return (bits * odd * 0x9E3779B1).sum(2)
