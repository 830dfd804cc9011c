"""adapter: sampling with LoRA adapters, attached to the weights or merged into them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from strategies.base import BadInput, Parity, Slot, demand
from strategies.distillation import files
from strategies.engine import RunContext, TrainingRun
from strategies.sampling.trained_beside import rank_of
from strategies.strategy import Strategy
from strategies.subject import Subject
from strategies.workloads import SAMPLE

HOW = ("beside", "merged")
CLOSE, CLOSE_CODES = 0.05, 0.3
"""Largest distance from 1 of the share of each adapter in its layer's product; and of the mean of
all, if codes round weights to few values."""


@dataclass(frozen=True, kw_only=True)
class Adapter(Strategy):
    """Samples with a LoRA beside the weights or merged.

    ``file`` is a LoRA as ``train`` saves it; without a file, adapters of ``rank`` are drawn.

    ``how=beside`` costs their memory and two small products a layer, and they can be removed again.
    ``how=merged`` adds them to the weights before anything else, and costs nothing when samples are
    drawn.
    """

    name: ClassVar[str] = "adapter"
    slot: ClassVar[Slot] = Slot.ADAPT
    parity: ClassVar[Parity] = Parity.BY_DESIGN
    alters: ClassVar[tuple[str, ...]] = ("forward",)
    source: ClassVar[str] = "Hu et al. 2021, LoRA (arXiv:2106.09685), 4.1; peft"
    workloads: ClassVar[tuple[str, ...]] = (SAMPLE,)
    idle: ClassVar[str] = "it draws with an adapter; train one with lora, or take --workload sample"

    file: str = ""
    how: str = "beside"
    rank: int = 0

    def __post_init__(self) -> None:
        if self.how not in HOW:
            raise ValueError(f"how is {self.how!r}; one of {', '.join(HOW)}")
        if not isinstance(self.rank, int) or self.rank < 0:
            raise ValueError(f"rank is {self.rank!r}; a whole number, 0: the file's, or 8")

    @property
    def attached(self) -> bool:
        """True if the adapters are attached, not merged."""
        return self.how == "beside"

    def reads(self) -> tuple[str, ...]:
        return (self.file,) if self.file else ()

    def traits(self) -> frozenset[str]:
        return frozenset({"other_products", "replaced_layers"} if self.attached else ())

    def requires(self, launch: RunContext) -> tuple[str, ...]:
        return ("peft",) if self.attached else ()

    def known_rank(self) -> int:
        """Return the rank of its adapters.

        Raises:
            BadInput: there is no such file, or it has another rank, or other tensors.
        """
        if not self.file:
            return self.rank or 8
        found = rank_of(self.file, files.shapes(self.file))
        if self.rank and self.rank != found:
            raise BadInput(f"rank is {self.rank}, and {self.file} has {found}; leave rank out")
        return found

    def refuses(self, launch: RunContext) -> str | None:
        if self.attached and "quantized_weights" in launch.traits:
            return (
                "weights in codes have no adapters beside them here; take how=merged, which adds "
                "them before weights are stored"
            )
        if "streams_weights" in launch.traits:
            return (
                "it is proved by the layers' own products, and streamed weights are not there; "
                "leave block_swap out"
            )
        try:
            self.known_rank()
        except BadInput as error:
            return str(error)
        return None

    def edit_model(self, module: Any, subject: Subject) -> None:
        from strategies.sampling import adapting

        found = adapting.pairs(subject, self.file, self.known_rank())
        if self.attached:
            adapting.put_beside(module, subject, found)
        else:
            adapting.merge(module, found)

    def evidence(self, trained: TrainingRun) -> dict[str, Any]:
        from strategies.adapters.beside import adapted
        from strategies.sampling import adapting

        found = adapting.pairs(trained.subject, self.file, self.known_rank())
        beside, onto = adapted(trained.module), getattr(trained.module, "merged_onto", None)
        wanted = len(found) if self.attached else 0
        demand(len(beside) == wanted, f"{len(beside)} layers have an adapter, expected {wanted}")
        demand(
            self.attached == (onto is None),
            f"{len(onto or ())} adapters are merged into the weights",
        )
        codes = "quantized_weights" in trained.launch.traits
        adding = {name: pair for name, pair in found.items() if pair.product.any()}
        demand(bool(adding), "the adapters add nothing: they are untrained")
        shares = {n: adapting.share(trained, n, pair, onto) for n, pair in adding.items()}
        mean = sum(shares.values()) / len(shares)
        worst = max(shares.values(), key=lambda share: abs(share - 1))
        off = f"{mean:.2g} of the adapters' effect is in the outputs ({worst:.2g} for one)"
        # Codes round a layer's weights by more than a small adapter, equally up and down.
        held = abs(mean - 1) <= CLOSE_CODES if codes else abs(worst - 1) <= CLOSE
        demand(held, off)
        own = sum(m.numel() for pair in found.values() for m in pair) if self.attached else 0
        facts = {"adapters": len(found), "rank": self.known_rank(), "beside_elements": own}
        return facts | {"least_in_products": round(min(shares.values()), 3)}
