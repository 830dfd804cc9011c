"""Adam with its two moments in few bits, block by block with a scale each."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

from strategies.base import Parity, Settings, Slot, demand
from strategies.engine import Launch, Trained
from strategies.evidence.settings import label
from strategies.optimizers.quantised import (
    low_bit_facts,
    torchao_adam,
    torchao_needs,
    watch_low_bit,
)
from strategies.strategy import Strategy

__all__ = ["Adam4bit", "Adam8bit", "PagedAdam8bit"]

IN_HOST_MEMORY = {"host_optimizer", "host_weights"}
HOST = "the launch file keeps the optimizer in host memory; take the same sharding without offload"


@dataclass(frozen=True, kw_only=True)
class Adam8bit(Strategy):
    """AdamW with 8-bit moments, by bitsandbytes (``lib=bnb``) or torchao (``lib=torchao``)."""

    name: ClassVar[str] = "adam8bit"
    slot: ClassVar[Slot] = Slot.OPTIMIZE
    parity: ClassVar[Parity] = Parity.BY_DESIGN
    alters: ClassVar[tuple[str, ...]] = ("update",)
    source: ClassVar[str] = "Dettmers et al. 2022, 8-bit Optimizers (arXiv:2110.02861)"
    needs: ClassVar[tuple[str, ...]] = ("bitsandbytes",)

    lib: str = "bnb"

    def __post_init__(self) -> None:
        if self.lib not in ("bnb", "torchao"):
            raise ValueError(f"lib is {self.lib!r}; one of bnb, torchao")

    def requires(self, launch: Launch) -> tuple[str, ...]:
        return self.needs if self.lib == "bnb" else torchao_needs(launch)

    def traits(self) -> frozenset[str]:
        return frozenset({"own_state", "rounds_state"})

    def refuses(self, launch: Launch) -> str | None:
        if self.lib == "bnb" and "dtensor_weights" in launch.traits:
            return "bitsandbytes' kernels take no DTensor; use adam8bit:lib=torchao, zero2 or ddp"
        return HOST if launch.traits & IN_HOST_MEMORY else None

    def make_optimizer(self, params: list[Any], settings: Settings, launch: Launch) -> Any:
        if self.lib == "torchao":
            return torchao_adam("AdamW8bit", params, settings, launch.device)
        from bitsandbytes.optim import AdamW8bit

        return AdamW8bit(params, **settings.adam)

    def observe(self, trained: Trained) -> AbstractContextManager[Any]:
        return watch_low_bit(trained)

    def evidence(self, trained: Trained) -> dict[str, Any]:
        return low_bit_facts(trained, "AdamW8bit", self._home(), 8, self.note(trained))

    def _home(self) -> str:
        return "bitsandbytes" if self.lib == "bnb" else "torchao"


@dataclass(frozen=True, kw_only=True)
class PagedAdam8bit(Adam8bit):
    """8-bit AdamW whose moments live in memory that the driver moves between host and GPU."""

    name: ClassVar[str] = "paged_adam8bit"
    source: ClassVar[str] = "Dettmers et al. 2023, QLoRA, section 3 (arXiv:2305.14314)"
    # On a CPU bitsandbytes warns and keeps ordinary memory.
    needs: ClassVar[tuple[str, ...]] = ("bitsandbytes", "cuda")

    def __post_init__(self) -> None:
        if self.lib != "bnb":
            raise ValueError(f"lib is {self.lib!r}; only bnb pages")

    def make_optimizer(self, params: list[Any], settings: Settings, launch: Launch) -> Any:
        from bitsandbytes.optim import PagedAdamW8bit

        return PagedAdamW8bit(params, **settings.adam)

    def evidence(self, trained: Trained) -> dict[str, Any]:
        facts = low_bit_facts(trained, "PagedAdamW8bit", "bitsandbytes", 8, self.note(trained))
        moments = [s["state1"] for s in trained.inner_optimizer.state.values()]
        # Moments below 1e5 elements are not worth a page and stay on the device.
        paged = [getattr(m, "is_paged", False) for m in moments if m.numel() >= 1e5]
        demand(bool(paged) and all(paged), f"{sum(paged)} of {len(paged)} moments are paged")
        # bitsandbytes' own mark: what the driver does with the pages is not seen from here.
        return label({**facts, "paged_moments": len(paged)}, "paged_moments")


@dataclass(frozen=True, kw_only=True)
class Adam4bit(Strategy):
    """AdamW with 4-bit moments, two to a byte."""

    name: ClassVar[str] = "adam4bit"
    slot: ClassVar[Slot] = Slot.OPTIMIZE
    parity: ClassVar[Parity] = Parity.BY_DESIGN
    alters: ClassVar[tuple[str, ...]] = ("update",)
    source: ClassVar[str] = "Li et al. 2023, 4-bit States (arXiv:2309.01507); torchao.optim"
    needs: ClassVar[tuple[str, ...]] = ("torchao",)

    def requires(self, launch: Launch) -> tuple[str, ...]:
        return torchao_needs(launch)

    def traits(self) -> frozenset[str]:
        return frozenset({"own_state", "rounds_state"})

    def refuses(self, launch: Launch) -> str | None:
        return HOST if launch.traits & IN_HOST_MEMORY else None

    def make_optimizer(self, params: list[Any], settings: Settings, launch: Launch) -> Any:
        return torchao_adam("AdamW4bit", params, settings, launch.device)

    def observe(self, trained: Trained) -> AbstractContextManager[Any]:
        return watch_low_bit(trained)

    def evidence(self, trained: Trained) -> dict[str, Any]:
        return low_bit_facts(trained, "AdamW4bit", "torchao", 4, self.note(trained))
