"""The contract of a subject: what is trained, as strategies and the training loop see it.

A subject is a model with the facts of its data. It says which of its modules are blocks, linear
layers and attentions, how one prediction is made, and which further parts it has (``PARTS``); a
strategy that needs a part asks for it, never for a class. Nothing here imports torch but the
methods that touch tensors, so that a recipe is refused without it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from strategies import survey
from strategies.sizes import Sizes
from strategies.survey import Survey

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

__all__ = ["PARTS", "DataFacts", "Dimensions", "Subject"]

PARTS = {
    "attend": "attention whose function can be replaced",
    "chain": "blocks that can be run several at a time",
    "halves": "blocks of one attention (qkv, proj) and one MLP (fc1, fc2)",
    "head": "final layer of its own",
    "label_table": "table of labels",
    "token_blocks": "blocks that take and give tokens",
}
"""Part -> what it is, in words that follow "has no". What a subject may have beside blocks:

``attend``: the layers of ``attentions`` compute by an attribute ``attend(q, k, v)``.
``chain``: the module runs its blocks by one call of an attribute ``run_blocks(blocks, *given)``.
``halves``: a block's ``attn`` has ``qkv``, ``proj``, ``num_heads``, its ``mlp`` ``fc1``, ``fc2``.
``head``, ``label_table``: what the methods of these names return.
``token_blocks``: ``groups`` is one ``ModuleList`` of blocks (tokens [B, T, D], condition), which
return tokens.
"""


@dataclass(frozen=True)
class DataFacts:
    """What a model must know of its data: samples are [channels, input_size, input_size]."""

    size: int
    channels: int
    input_size: int
    classes: int

    @property
    def sample_shape(self) -> tuple[int, int, int]:
        """(C, H, W) of one sample."""
        return (self.channels, self.input_size, self.input_size)


class Dimensions(NamedTuple):
    """The size of a model in four numbers; ``tokens`` and ``heads`` are those of its widest
    attention, 0 where it has none."""

    depth: int
    width: int
    heads: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model that can be trained, and the facts of its data.

    ``model`` is its name as a spec spells it. ``objectives`` are the ways in which it can be
    trained (``harness.subjects.objectives``); ``identity`` is what beside the name and Headroom's
    own sources decides what it is (of a file: its content's hash). ``random_blocks``: blocks may
    draw random numbers, so what is recomputed needs the generator's state again.
    """

    parts: ClassVar[frozenset[str]] = frozenset()
    objectives: ClassVar[tuple[str, ...]] = ("flow",)
    random_blocks: ClassVar[bool] = True

    model: str
    data: DataFacts
    objective: str = "flow"
    class_dropout: float = 0.0

    @property
    def name(self) -> str:
        """How a sentence calls it."""
        return type(self).__name__

    @property
    def identity(self) -> str:
        return ""

    @property
    def tile(self) -> int:
        """What the sides of a sample must be multiples of."""
        return 1

    # ---- what it is ----

    def check(self) -> None:
        """Refuse sizes or data that do not fit.

        Raises:
            BadInput: names the value and the way out.
        """

    def make(self) -> nn.Module:
        """The model on torch's current default device, with any weights."""
        raise NotImplementedError

    def build(self, seed: int, init: str) -> nn.Module:
        """The model on the CPU with float32 weights that depend on the arguments alone.

        ``init`` "awake": nothing that training starts at zero is zero (``wake``).
        """
        import torch

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = self.make()
            if init == "awake":
                self.wake(module)
        return module

    def wake(self, module: nn.Module) -> None:
        """Fill what is initialised with zeros. Where blocks begin as the identity the first steps
        leave most weights without a gradient, and a comparison of them tests almost nothing."""

    def small(self) -> Subject:
        """One of the same kind that is quick to build, step and drop."""
        return self

    def relatives(self) -> Sequence[tuple[str, Subject, int]]:
        """Small ones that differ in one size, for the laws of memory: (what varies, subject, batch
        size); none where no laws are known."""
        return ()

    def sizes_up(self) -> Sequence[tuple[str, int]]:
        """Models of growing size that are searched for the largest that fits: (name, trained
        elements); none where it comes in one size."""
        return ()

    # ---- facts ----

    @property
    def survey(self) -> Survey:
        """What one forward pass on tensors without memory shows; counted once a process."""
        return _survey(self)

    @property
    def parameters(self) -> int:
        """Elements of all parameters, the frozen ones included."""
        return self.survey.parameters

    @property
    def sizes(self) -> Sizes:
        """What the sizes of an engine's buffers follow from, with every weight trained."""
        return self.survey.sizes

    @property
    def dimensions(self) -> Dimensions:
        """Depth, width, heads and tokens."""
        widest = max(self.survey.attention, key=lambda a: a.heads * a.width, default=None)
        if widest is None:
            return Dimensions(self.survey.depth, 0, 0, 0)
        return Dimensions(
            self.survey.depth, widest.heads * widest.width, widest.heads, widest.queries
        )

    def train_flops(self, batch: int) -> int:
        """Model FLOPs of one training step: 3 x forward (backward costs two products for each one).

        Work that a strategy repeats (activation recompute) is not counted, so that a strategy
        cannot look faster by doing more (the MFU convention of PaLM, arXiv:2204.02311, appendix B).
        """
        return 3 * batch * self.survey.flops

    @property
    def linears(self) -> tuple[str, ...]:
        """Names, in the model as ``make`` gives it, of the blocks' linear layers that work on
        tokens: what adapters stand beside. Those that work on one vector a sample are not here."""
        return self.survey.linears

    def lacks(self, part: str, way_out: str = "leave this out") -> str | None:
        """Why a strategy that needs ``part`` cannot have it, with the way out; None where it is
        there."""
        return None if part in self.parts else f"{self.name} has no {PARTS[part]}; {way_out}"

    # ---- its modules ----

    def groups(self, module: nn.Module) -> list[Sequence[nn.Module]]:
        """The blocks, those of one class together, in the order in which they run."""
        raise NotImplementedError

    def blocks(self, module: nn.Module) -> list[nn.Module]:
        """All blocks in the order in which they run."""
        return [block for group in self.groups(module) for block in group]

    def sizes_of(self, module: nn.Module) -> Sizes:
        """The same of a model as it is: only what takes a gradient is trained."""
        trained = [p for p in module.parameters() if p.requires_grad]
        blocks = [sum(p.numel() for p in block.parameters()) for block in self.blocks(module)]
        return Sizes(
            total=sum(p.numel() for p in trained),
            block=max(blocks),
            tensor=max(p.numel() for p in trained),
            bias=max((p.numel() for p in module.parameters() if p.ndim == 1), default=0),
            weights=tuple(p.numel() for p in trained if p.ndim > 1),
        )

    def dtype(self, module: nn.Module) -> torch.dtype:
        """The type of the weights that no adapter or quantiser touches."""
        return next(p.dtype for p in module.parameters() if p.is_floating_point())

    def head(self, module: nn.Module) -> nn.Module:
        """The part "head"."""
        raise NotImplementedError

    def label_table(self, module: nn.Module) -> nn.Embedding:
        """The part "label_table"."""
        raise NotImplementedError

    def attentions(self, module: nn.Module) -> list[Any]:
        """The layers of the part "attend"; a copy that stands beside one is one more."""
        return [layer for layer in module.modules() if hasattr(layer, "attend")]

    # ---- one prediction ----

    def example(self, device: torch.device | str) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """One sample of zeros, its timestep and its conditions, as ``predict`` takes them."""
        import torch

        x = torch.zeros((1, *self.data.sample_shape), device=device)
        index_B = torch.zeros(1, dtype=torch.long, device=device)
        return x, index_B, {"y": index_B, "drop": torch.zeros_like(index_B, dtype=torch.bool)}

    def predict(self, model: Any, x: Tensor, t_B: Tensor, conditions: Mapping[str, Tensor]) -> Any:
        """What ``model`` (the prepared module) makes of noisy samples ``x`` at ``t_B``, in the
        layout of ``x``. ``conditions``: labels "y" int64 [B], and "drop" bool [B], which of them
        are withheld."""
        raise NotImplementedError

    # ---- weights in files ----

    def save(self, tensors: Mapping[str, Tensor], path: Path) -> None:
        """Write parameters by name to one file."""
        from safetensors.torch import save_file

        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(dict(tensors), str(path))

    def load(self, path: Path) -> dict[str, Tensor]:
        """Read what ``save`` wrote."""
        from safetensors.torch import load_file

        return load_file(str(path))


@functools.lru_cache(maxsize=64)
def _survey(subject: Subject) -> Survey:
    import torch

    with torch.device("meta"):
        module, sample = subject.make(), subject.example("meta")
    sizes = subject.sizes_of(module)
    return survey.take(
        module, subject.blocks(module), sizes, lambda: subject.predict(module, *sample)
    )
