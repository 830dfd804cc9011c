"""The contract of a subject: what is trained, as strategies and the training loop see it.

A subject is a model with the facts of its data. It says which of its modules are blocks, linear
layers and attentions, how one prediction is made, and which further parts it has (``PARTS``); a
strategy that needs a part asks for it, never for a class. Nothing here imports torch but the
methods that touch tensors, so that a recipe is refused without it.

A new subject must give ``make``, ``groups`` and ``predict``, and ``example`` where its conditions
are not labels. All else has a default: facts are read from one forward pass on tensors without
memory (``survey``). Many strategies refuse a subject without the part that they need.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from strategies import survey
from strategies.base import BadInput, Sizes
from strategies.survey import Survey

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from strategies.initial import Draw


PARTS = {
    "attend": "attention whose function can be replaced",
    "chain": "blocks that can be run several at a time",
    "ends": "word on what runs in front of its blocks and what behind them",
    "halves": "blocks of one attention (qkv, proj) and one MLP (fc1, fc2)",
    "head": "final layer of its own",
    "label_table": "table of labels",
    "sized": "depth and width that can be given as numbers",
    "stages": "forward pass that can be cut between its blocks",
    "stripes": "samples that can be cut into stripes of tokens",
    "token_blocks": "blocks that take and give tokens",
    "vocabulary": "layer over a vocabulary that takes its own loss",
}
"""Part -> what it is, in words that follow "has no". What a subject may have beside blocks:

``attend``: the layers of ``attentions`` compute by an attribute ``attend(q, k, v)``.
``chain``: the module runs its blocks by one call of an attribute ``run_blocks(blocks, *given)``.
``ends``: the module has the part "chain", ``enter(*given)`` from what it is called with to the
tensors that its blocks are given, ``leave(*tensors, *given)`` from those to what it returns, and
``ends``: names of the modules and parameters that each of the two uses. Blocks return the first
tensor anew.
``halves``: a block's ``attn`` has ``qkv``, ``proj``, ``num_heads``, its ``mlp`` ``fc1``, ``fc2``;
what it makes of the condition for all tokens alike is returned by ``adaLN_modulation``.
``head``, ``label_table``: what the methods of these names return.
``sized``: ``sized`` gives the same model in another size.
``stages``: the module has the part "ends", or ``passage()``: what passes between its blocks in a
forward pass of its own (``strategies.engines.pipeline.cut``).
``stripes``: ``rows`` says into how many parts samples can be cut, ``cut`` and ``take_part`` do it.
``token_blocks``: ``groups`` is one ``ModuleList`` of blocks (tokens [B, T, D], condition), which
return tokens.
``vocabulary``: the layer that ``vocabulary`` returns computes by an attribute ``cross_entropy``
(``strategies.losses.functions``).
"""


@dataclass(frozen=True)
class DataFacts:
    """What a model must know of its data: ``size`` samples of [channels, input_size, input_size],
    each of one of ``classes``; or of another ``shape``, where that is given."""

    size: int
    channels: int
    input_size: int
    classes: int
    shape: tuple[int, ...] = ()

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """The shape of one sample: (C, H, W), or as the model takes it."""
        return self.shape or (self.channels, self.input_size, self.input_size)


@dataclass(frozen=True, kw_only=True)
class Shaping:
    """What a spec says of a model and its samples beside the model's name; empty or 0 where the
    model's own is meant. The fields are a spec's, ``data`` its kind without what follows a colon;
    a cache that another trainer wrote is named whole.
    """

    config: str = ""
    set: str = ""
    resolution: str = ""
    frames: int = 0
    text: int = 0
    data: str = "synthetic"


class Dimensions(NamedTuple):
    """The size of a model in numbers: ``depth`` in blocks; ``width`` in units, ``heads`` and
    ``tokens`` of its widest attention, 0 where it has none; ``inner`` features of a block's MLP, 0
    where that is not known."""

    depth: int
    width: int
    heads: int
    tokens: int
    inner: int = 0


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model that can be trained, and the facts of its data.

    ``model`` is its name as a spec spells it. ``objectives`` are the ways in which it can be
    trained (``harness.subjects.objectives``), the usual one first. ``brings_samples``: whether
    ``samples`` gives any, so that the spec's data is "synthetic". ``of_library``: its model is a
    library's, or a user's, and draws no noise of other ranks.
    ``random_blocks``: blocks may draw random numbers, so what is recomputed needs the generator's
    state again. ``parts`` are keys of ``PARTS``.
    """

    parts: ClassVar[frozenset[str]] = frozenset()
    objectives: ClassVar[tuple[str, ...]] = ("flow",)
    brings_samples: ClassVar[bool] = False
    of_library: ClassVar[bool] = False
    random_blocks: ClassVar[bool] = True

    model: str
    data: DataFacts
    objective: str = "flow"
    class_dropout: float = 0.0

    @property
    def name(self) -> str:
        """How a sentence calls it, as in a refusal: "NAME has no head of its own"."""
        return type(self).__name__

    @property
    def identity(self) -> str:
        """What beside its name, the file that the name gives and Headroom's own sources decides
        what it is, as a short word for file names: a hash of a configuration file, say. Results
        and predictions of another identity are not taken for its own."""
        return ""

    @property
    def tile(self) -> int:
        """What the sides of a sample, in elements of a latent, must be multiples of: the patch.
        ``plan`` refuses other resolutions."""
        return 1

    @classmethod
    def of(cls, shaping: Shaping, **fields: Any) -> Subject:
        """One with these ``fields``, shaped as a spec asks. By default nothing but its name and its
        data shapes a model.

        Raises:
            BadInput: it is asked for something that it does not know.
        """
        asked = {name: value for name, value in vars(shaping).items() if value and name != "data"}
        for name, value in asked.items():
            raise BadInput(
                f"{name} is {value}, which model {fields['model']} does not know; leave "
                f"--{name} out"
            )
        return cls(**fields)

    @classmethod
    def usual_objective(cls, shaping: Shaping, model: str) -> str:
        """What ``model`` of this kind is trained to where nobody says."""
        return cls.objectives[0]

    # ---- what it is ----

    def check(self) -> None:
        """Refuse sizes or data that do not fit. Called whenever a spec is resolved, without torch;
        by default nothing is refused.

        Raises:
            BadInput: names the value and the way out.
        """

    def make(self) -> nn.Module:
        """The model on torch's current default device, which may be "meta", with any weights in
        float32. Must be given."""
        raise NotImplementedError

    def shell(self) -> nn.Module:
        """The model as ``draws`` will fill it: parameters on "meta", torch's default device then;
        what is computed and is no parameter may have its values already. By default ``make``."""
        return self.make()

    def build(self, seed: int, init: str) -> nn.Module:
        """The whole model on the CPU with float32 weights that depend on the arguments alone, so
        that all ranks and all rows of a suite begin alike (the audit compares them).

        ``init`` "awake": nothing that training starts at zero is zero (``wake``).
        """
        import torch

        draw = self.draws(seed, init)
        if draw is not None:
            from strategies import initial

            module = initial.skeleton(self.shell, draw)
            initial.fill(module, draw, "cpu")
            return module
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = self.make()
            if init == "awake":
                self.wake(module)
        return module

    def draws(self, seed: int, init: str) -> Draw | None:
        """How each parameter (and buffer) of ``make`` gets its first value by its name alone, in
        any order, without the rest of the model: then no rank ever holds the whole model in
        float32, unless it trains it so (``strategies.initial``, whose ``keyed`` gives a generator
        for a name). None, the default: the model is built whole in host memory (``build``)."""
        return None

    def wake(self, module: nn.Module) -> None:
        """Fill what is initialised with zeros, in place, by torch's generator; not asked where
        there are ``draws``. Where blocks begin
        as the identity the first steps leave most weights without a gradient, and a comparison of
        them tests almost nothing. By default nothing is filled."""

    def small(self) -> Subject:
        """One of the same kind that is quick to build, step and drop: a rank without a GPU does so
        once before its meter begins, to load what a step loads. By default the subject itself."""
        return self

    @property
    def depths(self) -> Mapping[str, int]:
        """How many blocks each group has, by a name that ``deep`` takes: of a model that is
        predicted from shallow ones of its kind. Empty where it is not, the default."""
        return {}

    @property
    def depth(self) -> int:
        """How many blocks there are, by the configuration where that says so: the model need not be
        built to know it."""
        return sum(self.depths.values()) or self.dimensions.depth

    def deep(self, depths: Mapping[str, int]) -> Subject:
        """The same model with so many blocks, which stands for this one in a prediction. Called
        only where there are ``depths``."""
        raise NotImplementedError

    def sized(self, depth: int, width: int, heads: int) -> Subject:
        """The same model of so many blocks, ``width`` and ``heads``; 0: as it is, but heads of as
        many units as its own where the width alone is another. A teacher or a student of this one.
        Called only with the part "sized".

        Raises:
            BadInput: it cannot have that size.
        """
        raise NotImplementedError

    def sizes_in(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
        """Depth and width of the model of this kind whose parameters, by name, have these shapes;
        0 where that cannot be told, the default."""
        return 0, 0

    def relatives(self) -> Sequence[tuple[str, Subject, int]]:
        """Small ones that differ in one size, for the laws of memory on an ``anatomy`` page: (what
        varies, subject, batch size in samples); none where no laws are known. What varies is batch,
        depth, tokens or width."""
        return ()

    def sizes_up(self) -> Sequence[tuple[str, int]]:
        """Models of growing size among which ``plan --largest model`` searches: (name as a spec
        spells it, trained elements); none where it comes in one size."""
        return ()

    def samples_up(self, axis: str) -> Sequence[tuple[Mapping[str, Any], float]]:
        """Samples of growing size among which ``plan --largest`` searches along ``axis``
        ("resolution", "frames"), all else being as it is here: (fields of a spec that ask for it,
        how many times this one's tokens it has); none where it comes in one size."""
        return ()

    # ---- facts ----

    @property
    def survey(self) -> Survey:
        """What one forward pass of ``example`` on tensors without memory shows; taken once a
        process. It imports torch: a subject that knows ``parameters``, ``sizes``, ``dimensions``
        and ``linears`` by formula gives these, and its recipes are checked without torch."""
        return _survey(self)

    @property
    def parameters(self) -> int:
        """Elements of all parameters, the frozen ones included."""
        return self.survey.parameters

    @property
    def block_parameters(self) -> tuple[int, ...]:
        """Elements of each block's parameters, in order; blocks of a group are alike."""
        depths = self.depths
        if not depths:
            return (self.sizes.block,) * self.depth
        few = dict.fromkeys(depths, 2)
        base = self.deep(few).parameters
        each = {key: self.deep({**few, key: 3}).parameters - base for key in depths}
        return tuple(each[key] for key, count in depths.items() for _ in range(count))

    @property
    def sizes(self) -> Sizes:
        """What the sizes of an engine's buffers follow from, in elements, with every weight
        trained."""
        return self.survey.sizes

    @property
    def dimensions(self) -> Dimensions:
        """Depth, width, heads, tokens and inner features."""
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

    @property
    def attention_linears(self) -> tuple[str, ...]:
        """Those of ``linears`` that make queries, keys, values and the output of attention; none
        where they are not known by their names."""
        return ()

    @property
    def idle(self) -> tuple[str, ...]:
        """Names of the parameters that get no gradient whatever is trained (the last block's text
        stream, whose output nobody reads): they are frozen before anything else, and it is said."""
        return self.survey.idle

    @property
    def size_in_words(self) -> str:
        """How the head of a plan tells the size of a sample: pixels, 8 for each element."""
        return "x".join([str(8 * self.data.input_size)] * 2)

    def lacks(self, part: str, way_out: str = "leave this out") -> str | None:
        """Why a strategy that needs ``part`` (a key of ``PARTS``) cannot have it, with the way out;
        None where it is there. Strategies return it from ``refuses``."""
        return None if part in self.parts else f"{self.name} has no {PARTS[part]}; {way_out}"

    # ---- its modules ----

    def groups(self, module: nn.Module) -> list[Sequence[nn.Module]]:
        """The blocks in the order in which they run, a sequence for each run of blocks of one class
        (a ``ModuleList`` where the part "token_blocks" is there: blocks are replaced in it).
        ``module`` is the bare model, perhaps edited by strategies. Must be given."""
        raise NotImplementedError

    def blocks(self, module: nn.Module) -> list[nn.Module]:
        """All blocks in the order in which they run."""
        return [block for group in self.groups(module) for block in group]

    def sizes_of(self, module: nn.Module) -> Sizes:
        """``sizes`` of a model that strategies have edited: only what takes a gradient counts as
        trained. An engine sizes its buffers by it (``Workload``)."""
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
        """The type of the weights that no adapter or quantiser touches; new weights are made in it.
        By default that of the first floating-point parameter."""
        return next(p.dtype for p in module.parameters() if p.is_floating_point())

    def head(self, module: nn.Module) -> nn.Module:
        """The final layer, which can be trained alone. Called only with the part "head"."""
        raise NotImplementedError

    def label_table(self, module: nn.Module) -> nn.Embedding:
        """The table of labels. Called only with the part "label_table"."""
        raise NotImplementedError

    def vocabulary(self, module: nn.Module) -> Any:
        """The layer over a vocabulary; None where it is on another stage of a pipeline. Called only
        with the part "vocabulary"."""
        raise NotImplementedError

    def attentions(self, module: nn.Module) -> list[Any]:
        """The layers that compute by an attribute ``attend``, copies that strategies made of them
        too. Called only with the part "attend"."""
        return [layer for layer in module.modules() if hasattr(layer, "attend")]

    # ---- one prediction ----

    @property
    def rows(self) -> int:
        """Samples can be cut into as many equal parts as divide this number, each of whole tokens.
        Asked only with the part "stripes"; so are ``cut`` and ``take_part``."""
        raise NotImplementedError

    def cut(self, samples: Tensor, part: int, parts: int) -> Tensor:
        """The ``part``-th of so many equal ``parts`` of samples, or of their noise: what the model
        of one rank is given and predicts. The loss of a sample must be the mean over its parts."""
        raise NotImplementedError

    def take_part(self, module: nn.Module, part: int, parts: int) -> None:
        """Have the bare model take and predict the ``part``-th part of each sample from now on,
        with the positions of that part; (0, 1): whole samples. Weights are not touched: what an
        engine spreads from one rank to all would overwrite a rank's own."""
        raise NotImplementedError

    def samples(self) -> dict[str, Tensor] | None:
        """Samples in host memory where the model brings its own: ``data.size`` rows of "x", and of
        each condition that goes with it, by name. None, the default: the spec's data."""
        return None

    def reader(self) -> Callable[[int], dict[str, Tensor]] | None:
        """What reads the sample of an index (below ``data.size``), where samples lie in files: "x"
        and each condition, without an axis of samples. None, the default: they do not."""
        return None

    @classmethod
    def buckets(cls, shaping: Shaping, model: str) -> list[Mapping[str, Any]]:
        """The sizes of the samples in a cache, the largest first: for each the fields of a spec
        that ask for made-up ones of that size, and how many "samples" there are. By default a
        model is trained from none.

        Raises:
            BadInput: the cache is not of this model, or something is missing in it.
        """
        raise BadInput(
            f"data is {shaping.data}, a cache of a public model's latents and texts, which "
            f"{model} is not trained from; give --model as in docs/models.md"
        )

    def example(self, device: torch.device | str) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """One sample of zeros [1, C, H, W], its timestep [1] and its conditions, as ``predict``
        takes them; ``device`` may be "meta". By default with one label. For the survey, for the
        forward passes of evidence, and to load libraries before a measurement."""
        import torch

        x = torch.zeros((1, *self.data.sample_shape), device=device)
        index_B = torch.zeros(1, dtype=torch.long, device=device)
        return x, index_B, {"y": index_B, "drop": torch.zeros_like(index_B, dtype=torch.bool)}

    def predict(self, model: Any, x: Tensor, t_B: Tensor, conditions: Mapping[str, Tensor]) -> Any:
        """What ``model`` makes of noisy samples ``x`` [B, C, H, W] at timesteps ``t_B`` [B]: noise
        or velocity in the layout of ``x``; with a learned variance (objective "epsilon") twice the
        channels, the variance behind.

        The one place where the model is called: by every loss, sample and trace. ``model`` is the
        prepared module (wrapped by the engine), or the bare one. ``conditions``, by name: labels
        "y" int64 [B], and "drop" bool [B], which of them are withheld (it may be missing). Must be
        given.
        """
        raise NotImplementedError

    @property
    def undrawn(self) -> str:
        """Why samples of it cannot be drawn from noise and labels; empty where they can."""
        told = "takes conditions of its own (texts), which sampling does not make"
        return told if self.brings_samples else ""

    def without_targets(self, x: Tensor) -> Tensor:
        """The samples of ``example`` as ``predict`` takes them to return what it makes of them, and
        no loss: by default as they are. For evidence, which compares outputs."""
        return x

    # ---- weights in files ----

    def save(self, tensors: Mapping[str, Tensor], path: Path) -> None:
        """Write parameters by name to one file, as ``load`` reads it (``train --trained``). Called
        on the main process, with whole tensors on the CPU."""
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
    return survey.of(subject, module, lambda: subject.predict(module, *sample))
