"""Subject contract: a model that can be trained, with the facts of its data.

A subject must define ``make``, ``groups`` and ``predict``, and ``example`` if its conditions are
not labels. Everything else has a default: facts are read from one forward pass on tensors without
memory (``survey``). A strategy checks for a part (``PARTS``) that it needs, never for a class. Only
methods that touch tensors import torch, so a recipe is refused without it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from strategies import survey
from strategies.base import BadInput, Sizes
from strategies.survey import Survey

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from strategies.initial import Draw


LAYERS = {
    "ffn": re.compile(r"(img_|txt_|audio_)?(ff|ffn|mlp|feed_forward)(_context|_i|_t)?"),
    "attention": re.compile(r"((audio|video)_to_)?((self|cross|audio|video)_)?(attn\d?|attention)"),
}
"""Part of a block -> names of the modules that compute it, in this project's DiT and diffusers."""
PARTS = {
    "attend": "attention whose function can be replaced",
    "chain": "blocks that can be run several at a time",
    "ends": "word on what runs in front of its blocks and what behind them",
    "halves": "blocks of one attention (qkv, proj) and one MLP (fc1, fc2)",
    "head": "final layer of its own",
    "label_table": "table of labels",
    "layers": "FFN and attention with names that are known",
    "sized": "depth and width that can be given as numbers",
    "stripes": "samples that can be cut into stripes of tokens",
    "token_blocks": "blocks that take and give tokens",
    "tp_plan": "plan of diffusers (_tp_plan) by which its layers are cut",
    "vocabulary": "layer over a vocabulary that takes its own loss",
}
"""Part that a subject may have besides blocks -> its description, in words that follow "has no".

A part that is a module has its path as value in ``Subject.parts``; others have "".

- ``attend``: layers compute by an attribute ``attend(q, k, v)``, wherever they are.
- ``chain``: the module runs its blocks by one call of an attribute ``run_blocks(blocks, *given)``.
- ``head``, ``label_table``: a module that can be trained alone; an ``nn.Embedding``.
- ``layers``: some blocks have modules of each kind in ``LAYERS``, whatever the model's size.
- ``token_blocks``: ``groups`` is one ``ModuleList`` of blocks (tokens [B, T, D], condition), which
  return tokens.
- ``vocabulary``: a layer that computes by an attribute ``cross_entropy``.

docs/adding/model.md has what the others need.
"""


MOST_BLOCKS = 10_000
"""Blocks of the deepest model: each is made, or planned, on its own."""


@dataclass(frozen=True)
class DataFacts:
    """Data facts: ``size`` samples of ``classes`` classes, of ``sample_shape`` each."""

    size: int
    channels: int
    input_size: int
    classes: int
    shape: tuple[int, ...] = ()

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """Shape of one sample: (C, H, W), or ``shape``."""
        return self.shape or (self.channels, self.input_size, self.input_size)


@dataclass(frozen=True, kw_only=True)
class Shaping:
    """Spec fields that shape a model and its samples (empty or 0: the model's own); ``data``: the
    spec's kind of data, in front of a colon."""

    config: str = ""
    set: str = ""
    resolution: str = ""
    frames: int = 0
    text: int = 0
    data: str = "synthetic"


class Stripes(NamedTuple):
    """Equal parts of a sample, of which ranks take one each: the ``axis`` of samples [B, ...] and
    noise along which they are cut, and the ``most`` parts, whose divisors are possible. The loss
    of a sample must be the mean over its parts."""

    axis: int
    most: int


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Trainable model and the facts of its data.

    ``model``: its name in a spec. ``objectives``: those that it can be trained on, the usual one
    first. ``brings_samples``: ``samples`` returns data. ``random_blocks``: blocks may draw random
    numbers, so recomputation needs the generator's state. ``one_at_a_time``: a forward takes one
    sample. ``parts``: see ``PARTS``. ``needs``: packages that build it. ``tile``: required divisor
    of a sample's sides, in elements of a latent: the patch.
    """

    parts: ClassVar[Mapping[str, str]] = {}
    needs: ClassVar[tuple[str, ...]] = ()
    objectives: ClassVar[tuple[str, ...]] = ("flow",)
    brings_samples: ClassVar[bool] = False
    one_at_a_time: ClassVar[bool] = False
    random_blocks: ClassVar[bool] = True
    tile: ClassVar[int] = 1

    model: str
    data: DataFacts
    objective: str = "flow"
    class_dropout: float = 0.0

    @classmethod
    def of(cls, shaping: Shaping, **fields: Any) -> Subject:
        """Return a subject with these ``fields``, shaped as a spec requests.

        Raises:
            BadInput: the spec sets a field that the model does not support.
        """
        for name, value in vars(shaping).items():
            if value and name != "data":
                text = f"{name} is {value}, which model {fields['model']} does not know"
                raise BadInput(f"{text}; leave --{name} out")
        return cls(**fields)

    def check(self) -> None:
        """Refuse sizes or data that do not fit, without torch.

        Raises:
            BadInput: names the value and the remedy.
        """

    @property
    def name(self) -> str:
        """Name in messages, as in "NAME has no head of its own"."""
        return type(self).__name__

    @property
    def identity(self) -> str:
        """Short word for what the name leaves open, such as a hash of a configuration file.
        Results of another identity are not reused."""
        return ""

    @property
    def size_in_words(self) -> str:
        """Sample size at the head of a plan: pixels, 8 for each element."""
        return "x".join([str(8 * self.data.input_size)] * 2)

    # ---- construction and size ----

    def make(self) -> nn.Module:
        """Return the model in float32 on torch's default device, which may be "meta". Inside of
        ``strategies.initial.valueless``, computed tensors that are no parameters may have their
        values."""
        raise NotImplementedError

    def draws(self, seed: int, init: str) -> Draw | None:
        """Return a function that draws each parameter's and buffer's first value by its name
        (``strategies.initial``); None: the model is built whole in host memory."""
        return None

    def small(self) -> Subject:
        """Return a subject of the same kind that is quick to step, to load what a step loads."""
        return self

    @property
    def depths(self) -> Mapping[str, int]:
        """Group name -> number of its blocks, for ``deep``; empty if the model is not predicted
        from shallow ones."""
        return {}

    @property
    def depth(self) -> int:
        """Number of blocks; read from ``depths`` if possible, without building the model."""
        return sum(self.depths.values()) or self.survey.depth

    def deep(self, depths: Mapping[str, int]) -> Subject:
        """Return the same model with other ``depths``, if it has any, for a prediction."""
        raise NotImplementedError

    def sized(self, depth: int, width: int, heads: int) -> Subject:
        """Return the same model in another size, with the part "sized": a teacher or student.

        0 keeps a value; if only the width changes, heads keep their size.

        Raises:
            BadInput: it cannot have that size.
        """
        raise NotImplementedError

    def sizes_in(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
        """Return depth and width of the model of this kind with parameters of these names and
        shapes; 0 if unknown."""
        return 0, 0

    def samples_up(self, axis: str) -> Sequence[tuple[Mapping[str, Any], float]]:
        """Return growing sample sizes along ``axis`` ("resolution", "frames"): (changed spec
        fields, number of tokens relative to this one's); empty if it has one size."""
        return ()

    # ---- model facts ----

    @property
    def survey(self) -> Survey:
        """Facts from one forward pass of ``example`` on tensors without memory, cached. It imports
        torch; with a formula in its place, a subject's recipes are checked without torch."""
        return surveyed(self)

    @property
    def parameters(self) -> int:
        """Elements of all parameters, including frozen ones."""
        return self.survey.parameters

    @property
    def block_parameters(self) -> tuple[int, ...]:
        """Elements of each block's parameters, in order; blocks of a group are equal."""
        depths = self.depths
        if not depths:
            return (self.survey.sizes.block,) * self.depth
        few = dict.fromkeys(depths, 2)
        base = self.deep(few).parameters
        each = {key: self.deep({**few, key: 3}).parameters - base for key in depths}
        return tuple(each[key] for key, count in depths.items() for _ in range(count))

    @property
    def linears(self) -> tuple[str, ...]:
        """Names of the blocks' linear layers that work on tokens, in the model of ``make``, without
        those that work on one vector per sample. Adapters attach to them."""
        return self.survey.linears

    @property
    def lent(self) -> tuple[str, ...]:
        """Names of modules of blocks that code outside of them calls (``Survey``)."""
        return self.survey.lent

    # ---- modules ----

    def groups(self, module: nn.Module) -> list[Sequence[nn.Module]]:
        """Return the blocks of the bare, perhaps edited, model in execution order, one sequence for
        each run of blocks of one class."""
        raise NotImplementedError

    def blocks(self, module: nn.Module) -> list[nn.Module]:
        """Return all blocks in execution order."""
        return [block for group in self.groups(module) for block in group]

    def sizes_of(self, module: nn.Module) -> Sizes:
        """Return ``survey.sizes`` of a model that strategies have edited; parameters with a
        gradient count as trained."""
        return survey.sizes_of(module, self.blocks(module))

    def lacks(self, part: str, hint: str = "leave this out") -> str | None:
        """Return why a strategy cannot have ``part`` (a key of ``PARTS``), with the remedy, for its
        ``refuses``; None if it can."""
        return None if part in self.parts else f"{self.name} has no {PARTS[part]}; {hint}"

    def part(self, module: nn.Module, part: str) -> Any:
        """Return the module that is this part; None if it is on another pipeline stage."""
        path, found = self.parts[part], module
        for name in path.split("."):
            if found is not None and not hasattr(found, name):
                raise BadInput(f"{self.name}.parts has {part} at {path!r}, which is not there")
            found = getattr(found, name, None)
        return found

    @property
    def stripes(self) -> Stripes:
        """The parts of a sample, with the part "stripes"."""
        raise NotImplementedError

    def take_part(self, module: nn.Module, part: int, parts: int) -> None:
        """Make the bare model take and return the ``part``-th part of each sample, with its
        positions; (0, 1) restores whole samples. Weights must not change: DDP broadcasts them."""
        raise NotImplementedError

    # ---- samples and output ----

    def samples(self) -> dict[str, Tensor] | None:
        """Return samples in host memory if the model brings its own: ``data.size`` rows of "x" and
        of each condition, by name. None: the spec's data."""
        return None

    def example(self, device: torch.device | str) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return one sample of zeros [1, C, H, W], its timestep [1] and its conditions, for
        ``predict``; ``device`` may be "meta"."""
        import torch

        x = torch.zeros((1, *self.data.sample_shape), device=device)
        index_B = torch.zeros(1, dtype=torch.long, device=device)
        return x, index_B, {"y": index_B, "drop": torch.zeros_like(index_B, dtype=torch.bool)}

    def predict(self, model: Any, x: Tensor, t_B: Tensor, conditions: Mapping[str, Tensor]) -> Any:
        """Return the output of ``model`` for noisy samples ``x`` [B, C, H, W] at timesteps ``t_B``
        [B]: noise or velocity in the layout of ``x``; with a learned variance (objective "epsilon")
        twice the channels, the variance last.

        The only call of the model, prepared or bare. ``conditions``, by name: labels "y" int64 [B],
        and "drop" bool [B], those that are withheld (it may be missing).
        """
        raise NotImplementedError


def weights_dtype(module: nn.Module) -> torch.dtype:
    """Return the type for new weights: of those that no adapter or quantizer changes."""
    return next(p.dtype for p in module.parameters() if p.is_floating_point())


def attentions(module: nn.Module) -> list[Any]:
    """Return the layers of the part "attend", with copies of strategies."""
    return [layer for layer in module.modules() if hasattr(layer, "attend")]


@functools.lru_cache(maxsize=64)
def surveyed(subject: Subject, unread: tuple[str, ...] = ()) -> Survey:
    """Return a survey on fake tensors, which behave like a CPU's and use no memory; models read a
    device's name or a mask's values, which "meta" lacks. ``unread``: see ``survey.of``."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        module, sample = subject.make(), subject.example("cpu")
        return survey.of(subject, module, lambda: subject.predict(module, *sample), unread)
