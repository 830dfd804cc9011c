"""Frozen teacher of a distillation run: storage, forward pass, hidden states and the student's
loss.

Imports torch. Shape suffixes: B batch, T tokens, D hidden size.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from strategies import initial
from strategies.base import BadInput, Watcher, demand
from strategies.distillation.distilled import chosen, renamed
from strategies.distillation.files import weights
from strategies.engine import TrainingRun
from strategies.evidence.readings import bytes_of, scales, stored
from strategies.evidence.rules import relative_error
from strategies.evidence.states import checksum
from strategies.evidence.watching import in_phase
from strategies.initial import keyed
from strategies.subject import Subject

# ---- weight storage ----


FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def pack(module: nn.Module, subject: Subject, store: str) -> None:
    """Convert ``module``, which may have no values yet, to the storage format ``store``."""
    if store in FLOATS:
        initial.cast(module, FLOATS[store])
    elif store == "int8":
        from strategies.adapters.quantised_base import code

        code(module, subject.linears, "int8")
    else:
        from strategies.adapters.quantised_base import quantize

        quantize(module, subject.linears)


def stored_facts(
    module: nn.Module, subject: Subject, store: str, weights: Iterable[Tensor]
) -> dict[str, Any]:
    """Return the bytes of the ``weights``, and check that their format is ``store``.

    Raises:
        NotInForce: they are stored in another format.
    """
    kinds = {p.dtype for p in module.parameters() if p.is_floating_point()}
    wanted = FLOATS.get(store, torch.float32)
    demand(kinds == {wanted}, f"the teacher is stored in {kinds}, expected {wanted}")
    elements, size = subject.parameters, bytes_of(weights)
    facts = {"elements": elements, "bytes": size, "stored": store}
    if store == "int8":
        from strategies.adapters.quantised_base import coded_facts

        return facts | coded_facts(module, len(subject.linears), "int8")
    if store == "nf4":
        from strategies.adapters.quantised_base import packed_facts

        return facts | packed_facts(module)
    most = elements * wanted.itemsize
    demand(size == most, f"{size} bytes hold the teacher's {elements} weights, expected {most}")
    return facts


# ---- hidden states ----


NAME = "hidden_states"
"""Name of the ``Hidden`` module in a student; its parameters are scaffolding, not the model's."""


class Hidden(nn.Module):
    """Recorder of the outputs of a model's chosen blocks; ``projections`` map them to the teacher's
    width.

    There are projections only if the widths differ. The recorder is part of the model, so that an
    engine shards and steps the projections like other parameters, within the model's forward pass.
    It records nothing while blocks are recomputed.
    """

    def __init__(self, count: int, width: int, wanted: int, dtype: torch.dtype) -> None:
        super().__init__()
        projected = count if width != wanted else 0
        self.projections = nn.ModuleList(
            nn.Linear(width, wanted, bias=False, dtype=dtype) for _ in range(projected)
        )
        for place, layer in enumerate(self.projections):
            chance = keyed(0, f"{NAME}.{place}")
            first = torch.randn(wanted, width, generator=chance, device="cpu") / width**0.5
            layer.weight = nn.Parameter(first.to(dtype))
        self.states: list[Tensor] = []
        self.listening = False

    @classmethod
    def deaf(cls) -> Hidden:
        """Return a recorder that no block reports to."""
        return cls(0, 1, 1, torch.float32)

    @contextlib.contextmanager
    def recording(self) -> Iterator[list[Tensor]]:
        """Yield the list of states [B, T, D] of one forward pass, complete after it."""
        self.states, self.listening = [], True
        try:
            yield self.states
        finally:
            self.states, self.listening = [], False

    def note(self, state: Any) -> None:
        """Record a block's output. A forward hook calls it."""
        if self.listening:
            self.states.append(state)

    def project(self) -> None:
        """Replace the states by their projections, at the end of the forward pass."""
        if self.listening and len(self.projections):
            pairs = zip(self.projections, self.states, strict=True)
            self.states[:] = [layer(state.to(layer.weight.dtype)) for layer, state in pairs]


def hear(module: nn.Module, blocks: Sequence[nn.Module], captured: Hidden) -> None:
    """Have ``heard`` record the output of each of ``blocks`` when ``module`` runs.

    Called before the engine's hooks, which then treat the projections as part of the forward pass.
    """
    for block in blocks:
        block.register_forward_hook(lambda part, given, out: captured.note(out))
    module.register_forward_hook(lambda part, given, out: captured.project())


class Teacher(Watcher):
    """Frozen model of ``subject`` with the weights of ``file``, in the storage format ``store``.

    Without a file the weights are drawn. It computes in the type of its unpacked weights, outside
    any autocast. Every rank holds the whole teacher: an engine that shards the student's weights
    does not shard it.

    ``calls``: number of its forward passes. ``pairs``: indices of its blocks whose hidden states
    are recorded. ``began``: distance of the student's first weights from the teacher's, if they
    were to be equal.
    """

    def __init__(
        self, subject: Subject, file: str, store: str, device: Any, pairs: Sequence[int]
    ) -> None:
        self.subject, self.calls = subject, 0
        self.began: float | None = None
        draw = weights(subject, file)
        self.module = initial.skeleton(subject.shell, draw)
        pack(self.module, subject, store)
        initial.fill(self.module, draw, device)
        self.module.to(device).requires_grad_(False).eval()
        self.captured = Hidden.deaf()
        blocks = subject.blocks(self.module)
        hear(self.module, [blocks[place] for place in pairs], self.captured)
        self.module.register_forward_hook(self._count)
        self.sums = self._sums()

    def _count(self, *_: Any) -> None:
        self.calls += 1

    def ask(
        self, x: Tensor, t_B: Tensor, conditions: Mapping[str, Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Return its output for noisy samples, and the hidden states of its ``pairs``, without a
        graph."""
        off = torch.autocast(x.device.type, enabled=False)
        with torch.no_grad(), off, in_phase("teacher"), self.captured.recording() as states:
            return self.subject.predict(self.module, x, t_B, conditions), states

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """Leave forward passes inside the context out of ``calls``; for evidence."""
        kept = self.calls
        try:
            yield
        finally:
            self.calls = kept

    def weights(self) -> list[Tensor]:
        """Return every tensor that holds its weights, including scales of packed ones."""
        own = [*self.module.parameters(), *self.module.buffers()]
        return [plain for tensor in own for plain in (*stored(tensor.data), *scales(tensor))]

    def tensors(self) -> Iterable[Tensor]:
        """Return its weights."""
        return self.weights()

    def _sums(self) -> list[int]:
        # Tensors without storage (in a prediction) have no sum.
        plain = [t for t in self.weights() if type(t) in (Tensor, nn.Parameter)]
        return [checksum(tensor) for tensor in plain if tensor.device.type != "meta"]

    def state_dict(self) -> dict[str, Any]:
        """Return checksums: its weights are in their own file."""
        return {"sums": self.sums}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Refuse to resume with another teacher."""
        if state["sums"] != self.sums:
            raise BadInput("the teacher is not the one that this training began with; give its own")

    def recut(self, states: Sequence[dict[str, Any]], pieces: Sequence[Sequence[Any]]) -> None:
        """Check the teacher; every rank holds all of it, for any number of ranks."""
        self.load_state_dict(states[0])

    def facts(self, store: str) -> dict[str, Any]:
        """Return its bytes and storage format, and check that it did not change.

        Raises:
            NotInForce: it changed, takes gradients, or is stored in another format.
        """
        parameters = list(self.module.parameters())
        free = [p for p in parameters if p.requires_grad or p.grad is not None]
        demand(not free, f"{len(free)} of the teacher's weights take a gradient")
        demand(bool(self.sums) and self._sums() == self.sums, "the teacher's weights have changed")
        facts = stored_facts(self.module, self.subject, store, self.weights())
        return {f"teacher_{name}": value for name, value in facts.items()}


# ---- distillation loss ----


Predict = Callable[[Tensor, Tensor], Tensor]
"""(noisy samples, timesteps [B]) -> the model's output."""


def squared(out: Tensor, target: Tensor) -> Tensor:
    """Return the mean squared error, a float32 scalar."""
    return (out.float() - target.float()).square().mean()


def relative(state_B: Tensor, target_B: Tensor) -> Tensor:
    """Return the squared error of hidden states relative to the target's square, per sample.

    A batch cut into micro-batches thus has the same loss. A float32 scalar.
    """
    gap_B = (state_B.float() - target_B.float()).square().flatten(1).mean(1)
    return (gap_B / target_B.float().square().flatten(1).mean(1)).mean()


@dataclass
class Moment:
    """Record of one micro step of a watched step.

    ``arrived``: term of the loss -> the gradient that reached it, which is its weight in the
    differentiated loss. ``gradient``: the gradient that reached the student's output.
    """

    x: Tensor
    t_B: Tensor
    conditions: Mapping[str, Tensor]
    out: Tensor
    true_loss: Callable[[Predict], Tensor]
    states: list[Tensor] = field(default_factory=list)
    values: dict[str, float] = field(default_factory=dict)
    arrived: dict[str, float] = field(default_factory=dict)
    gradient: Tensor | None = None


@dataclass
class Lesson:
    """Distillation loss, which replaces the true loss: the sum of its terms by their ``weights``.

    The terms are "true", "output" and "feature"; one of weight 0 is not computed. The teacher runs
    before the student, so that its memory is freed before activations are kept for backward.
    ``moments`` gets a record of each micro step, if set.
    """

    teacher: Teacher
    captured: Hidden
    weights: Mapping[str, float]
    moments: list[Moment] | None = None

    def __call__(
        self,
        true_loss: Callable[[Predict], Tensor],
        predict: Predict,
        conditions: Mapping[str, Tensor],
    ) -> Tensor:
        """Return the loss of one micro-batch, a scalar
        (``strategies.engine.TrainingRun.supervise``)."""
        said: list[Any] = []

        def ask(x: Tensor, t_B: Tensor) -> Tensor:
            target, wanted = self.teacher.ask(x, t_B, conditions)
            with self.captured.recording() as states:
                out = predict(x, t_B)
            said.append((x, t_B, out, target, states, wanted))
            return out

        true = true_loss(ask).mean()
        x, t_B, out, target, states, wanted = said.pop()
        terms = {"true": true, **self._terms(out, target, states, wanted)}
        if self.moments is not None:
            moment = Moment(x, t_B, conditions, out.detach(), true_loss)
            moment.states = [state.detach() for state in states]
            self._watch(moment, out, terms)
        return sum(self.weights[name] * term for name, term in terms.items() if self.weights[name])

    def _terms(
        self, out: Tensor, target: Tensor, states: list[Tensor], wanted: list[Tensor]
    ) -> dict[str, Tensor]:
        terms = {}
        if self.weights["output"]:
            terms["output"] = squared(out, target)
        if self.weights["feature"]:
            pairs = zip(states, wanted, strict=True)
            terms["feature"] = torch.stack([relative(*pair) for pair in pairs]).mean()
        return terms

    def _watch(self, moment: Moment, out: Tensor, terms: Mapping[str, Tensor]) -> None:
        moment.values = {name: float(term.detach()) for name, term in terms.items()}

        def came(name: str) -> Callable[[Tensor], None]:
            return lambda gradient: moment.arrived.__setitem__(name, float(gradient))

        for name, term in terms.items():
            term.register_hook(came(name))
        out.register_hook(lambda gradient: setattr(moment, "gradient", gradient.detach().clone()))
        self.moments.append(moment)  # type: ignore[union-attr]  # called while moments are set


# ---- initialization from the teacher ----
# A student may begin with evenly chosen blocks of its teacher, and all weights outside of blocks.


CLOSE = 1e-2
"""Largest relative distance of a weight from the teacher's, which may be stored in bfloat16."""


def prefixes(module: nn.Module, subject: Subject) -> list[str]:
    """Return the name prefixes under which the blocks of ``module`` are numbered."""
    groups = {id(group) for group in subject.groups(module)}
    return [name for name, part in module.named_modules() if id(part) in groups]


def begin(module: nn.Module, subject: Subject, teacher: Subject, file: str) -> None:
    """Initialize the trained parameters with the teacher's values.

    The first weights that all rows of a suite share are still drawn and hashed.
    """
    draw = weights(teacher, file)
    names = prefixes(module, subject)
    blocks = chosen(subject.dimensions.depth, teacher.dimensions.depth)
    for name, p in module.named_parameters():
        if not p.requires_grad:
            continue
        source = renamed(name, names, blocks)
        if initial.pending(p) is not None:
            initial.instead(p, functools.partial(draw, source))
        else:
            with torch.no_grad():
                p.copy_(draw(source, p))


def apart(trained: TrainingRun, teacher: nn.Module, depth: int) -> float:
    """Return the largest relative distance of the student's blocks from the teacher's chosen
    blocks.

    The largest matrix of each block is compared; every rank takes part.

    Raises:
        NotInForce: the distance is larger than the rounding of storage.
    """
    subject = trained.subject
    names, own = prefixes(trained.module, subject), dict(teacher.named_parameters())
    blocks = chosen(subject.dimensions.depth, depth)
    pairs = []
    for block in trained.blocks():
        pairs.append(_largest(trained, block, names, blocks, own))
    whole = trained.engine.whole(trained, [p for p, _ in pairs])
    found = [_far(p, wanted) for p, (_, wanted) in zip(whole, pairs, strict=True)]
    demand(
        max(found) <= CLOSE,
        f"a block's initial weights differ from the teacher's by {max(found):.2g} (relative)",
    )
    return max(found)


def _largest(
    trained: TrainingRun, block: nn.Module, names: Sequence[str], blocks: Sequence[int], own: Any
) -> tuple[Any, Tensor]:
    mine = {id(p) for p in block.parameters()}
    pairs = [
        (p, own[renamed(name, names, blocks)])
        for name, p in trained.module.named_parameters()
        if id(p) in mine and own[renamed(name, names, blocks)].is_floating_point()
    ]
    return max(pairs, key=lambda pair: pair[1].numel())


def _far(p: Any, wanted: Tensor) -> float:
    if type(wanted) not in (Tensor, nn.Parameter):
        return 0.0  # a prediction's weights have no values
    return relative_error(p.detach().double(), wanted.double())
