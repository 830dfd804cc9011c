"""A frozen model beside the trained one: how it is made, stored and asked.

Imports torch: import it where torch is there.
"""

from __future__ import annotations

import contextlib
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
from strategies.evidence.watching import beside
from strategies.initial import keyed
from strategies.subject import Subject

# ---- storing ----
# How a frozen model is stored: as floats of one type, or its blocks' linear layers packed.
#
# Imports torch: import it where torch is there.


FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def pack(module: nn.Module, subject: Subject, store: str) -> None:
    """Have ``module``, which may have no values yet, stored as ``store`` says."""
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
    """The bytes of its ``weights``, and that they are what ``store`` says.

    Raises:
        NotInForce: they are stored in another way.
    """
    kinds = {p.dtype for p in module.parameters() if p.is_floating_point()}
    wanted = FLOATS.get(store, torch.float32)
    demand(kinds == {wanted}, f"it is stored in {kinds}, not {wanted}")
    elements, size = subject.parameters, bytes_of(weights)
    facts = {"elements": elements, "bytes": size, "stored": store}
    if store == "int8":
        from strategies.adapters.quantised_base import coded_facts

        return facts | coded_facts(module, len(subject.linears), "int8")
    if store == "nf4":
        from strategies.adapters.quantised_base import packed_facts

        return facts | packed_facts(module)
    most = elements * wanted.itemsize
    demand(size == most, f"{size} bytes hold {elements} weights, not {most}")
    return facts


# ---- hidden ----
# Hidden states of blocks, heard as a model runs, and projected where a teacher is wider.
#
# Imports torch: import it where torch is there. Shape suffixes: B batch, T tokens, D hidden size.


NAME = "hidden_states"
"""The name, in a student, of what hears it: its parameters are the training's, not the model's."""


class Hidden(nn.Module):
    """What the chosen blocks of a model return, while it is listened to; ``projections`` take each
    to the width of the teacher, where that is another.

    It is part of the model, so that an engine shards and steps the projections as all else, and
    that they run within its forward pass. It hears nothing while blocks are recomputed.
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
        """One that nothing is told to."""
        return cls(0, 1, 1, torch.float32)

    @contextlib.contextmanager
    def heard(self) -> Iterator[list[Tensor]]:
        """A list of the states [B, T, D] of one forward pass, complete behind it."""
        self.states, self.listening = [], True
        try:
            yield self.states
        finally:
            self.states, self.listening = [], False

    def note(self, state: Any) -> None:
        """What a block returned: a forward hook calls it."""
        if self.listening:
            self.states.append(state)

    def project(self) -> None:
        """At the end of the forward pass: in the place of states their projections."""
        if self.listening and len(self.projections):
            pairs = zip(self.projections, self.states, strict=True)
            self.states[:] = [layer(state.to(layer.weight.dtype)) for layer, state in pairs]


def hear(module: nn.Module, blocks: Sequence[nn.Module], heard: Hidden) -> None:
    """Have ``heard`` note what each of ``blocks`` returns when ``module`` runs. Called before the
    engine's hooks, so that these see what is projected as part of the forward pass."""
    for block in blocks:
        block.register_forward_hook(lambda part, given, out: heard.note(out))
    module.register_forward_hook(lambda part, given, out: heard.project())


class Teacher(Watcher):
    """The frozen model of ``subject`` with the weights of ``file`` (without one, drawn), stored as
    ``store`` says. It computes in the type of what it does not pack, outside of any autocast.

    ``calls`` counts its forward passes; ``pairs`` are its blocks whose hidden states are kept;
    ``began`` is how far the student's first weights were from its own, where they were to be those.
    Every rank has all of it: an engine that shards the student's weights does not know of it.
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
        self.heard = Hidden.deaf()
        blocks = subject.blocks(self.module)
        hear(self.module, [blocks[place] for place in pairs], self.heard)
        self.module.register_forward_hook(self._count)
        self.sums = self._sums()

    def _count(self, *_: Any) -> None:
        self.calls += 1

    def ask(
        self, x: Tensor, t_B: Tensor, conditions: Mapping[str, Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Its prediction for noisy samples, and the hidden states of its ``pairs``: no graph is
        kept of either."""
        off = torch.autocast(x.device.type, enabled=False)
        with torch.no_grad(), off, beside("teacher"), self.heard.heard() as states:
            return self.subject.predict(self.module, x, t_B, conditions), states

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """Forward passes that are nobody's: of evidence."""
        kept = self.calls
        try:
            yield
        finally:
            self.calls = kept

    def weights(self) -> list[Tensor]:
        """Every tensor that holds its weights, scales of packed ones included."""
        own = [*self.module.parameters(), *self.module.buffers()]
        return [plain for tensor in own for plain in (*stored(tensor.data), *scales(tensor))]

    def tensors(self) -> Iterable[Tensor]:
        """Its weights."""
        return self.weights()

    def _sums(self) -> list[int]:
        # A sum of tensors without storage (a prediction's) is no number.
        plain = [t for t in self.weights() if type(t) in (Tensor, nn.Parameter)]
        return [checksum(tensor) for tensor in plain if tensor.device.type != "meta"]

    def state_dict(self) -> dict[str, Any]:
        """Checksums: its weights are in their own file."""
        return {"sums": self.sums}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Refuse to go on with another teacher."""
        if state["sums"] != self.sums:
            raise BadInput("the teacher is not the one that this training began with; give its own")

    def recut(self, states: Sequence[dict[str, Any]], pieces: Sequence[Sequence[Any]]) -> None:
        """Every rank has all of it, however many there are."""
        self.load_state_dict(states[0])

    def facts(self, store: str) -> dict[str, Any]:
        """What it is by now: ``store``d in how many bytes, and that it did not move.

        Raises:
            NotInForce: it moved, takes gradients, or is stored in another way.
        """
        parameters = list(self.module.parameters())
        free = [p for p in parameters if p.requires_grad or p.grad is not None]
        demand(not free, f"{len(free)} of the teacher's weights take a gradient")
        demand(bool(self.sums) and self._sums() == self.sums, "the teacher's weights have moved")
        facts = stored_facts(self.module, self.subject, store, self.weights())
        return {f"teacher_{name}": value for name, value in facts.items()}


# ---- lesson ----
# The loss of a student: the true one, the distance to its teacher's prediction, and to its
# teacher's hidden states.
#
# Imports torch: import it where torch is there. Shape suffixes: B batch; anything may follow it.


Predict = Callable[[Tensor, Tensor], Tensor]
"""(noisy samples, timesteps [B]) -> the model's output."""


def squared(out: Tensor, target: Tensor) -> Tensor:
    """Mean squared error, float32 scalar."""
    return (out.float() - target.float()).square().mean()


def relative(state_B: Tensor, target_B: Tensor) -> Tensor:
    """Squared error of hidden states as a share of the target's square, each sample by itself, so
    that the cut of a batch into micro batches changes nothing; float32 scalar."""
    gap_B = (state_B.float() - target_B.float()).square().flatten(1).mean(1)
    return (gap_B / target_B.float().square().flatten(1).mean(1)).mean()


@dataclass
class Moment:
    """What one micro step of a watched step showed. ``arrived`` is the gradient that came to each
    term of the loss, by its name: its weight in what was differentiated; ``gradient`` what came to
    the student's output."""

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
    """What is differentiated in the place of the true loss: the sum of its terms by their
    ``weights`` ("true", "output", "feature"; one of weight 0 is not computed).

    The teacher answers before the student does, so that what it needs meanwhile is gone before
    anything is kept for backward. ``moments`` gets one for each micro step, where somebody asks.
    """

    teacher: Teacher
    heard: Hidden
    weights: Mapping[str, float]
    moments: list[Moment] | None = None

    def __call__(
        self,
        true_loss: Callable[[Predict], Tensor],
        predict: Predict,
        conditions: Mapping[str, Tensor],
    ) -> Tensor:
        """The loss of one micro batch, a scalar (``strategies.engine.Trained.supervise``)."""
        said: list[Any] = []

        def ask(x: Tensor, t_B: Tensor) -> Tensor:
            target, wanted = self.teacher.ask(x, t_B, conditions)
            with self.heard.heard() as states:
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
        self.moments.append(moment)


# ---- begun ----
# A student that begins with its teacher's weights: blocks chosen evenly, and all that is no block.
#
# Imports torch: import it where torch is there.


CLOSE = 1e-2
"""How far a weight may be from the teacher's, which may be stored in bfloat16, as a share of it."""


def prefixes(module: nn.Module, subject: Subject) -> list[str]:
    """The names under which the blocks of ``module`` are numbered."""
    groups = {id(group) for group in subject.groups(module)}
    return [name for name, part in module.named_modules() if id(part) in groups]


def begin(module: nn.Module, subject: Subject, teacher: Subject, file: str) -> None:
    """Give the parameters that train the teacher's values, once they get any. The first weights
    that all rows of a suite draw are drawn as ever, and hashed as ever."""
    draw = weights(teacher, file)
    names = prefixes(module, subject)
    blocks = chosen(subject.dimensions.depth, teacher.dimensions.depth)
    for name, p in module.named_parameters():
        if not p.requires_grad:
            continue
        source = renamed(name, names, blocks)
        if initial.pending(p) is not None:
            initial.instead(p, lambda drawn, source=source: draw(source, drawn))
        else:
            with torch.no_grad():
                p.copy_(draw(source, p))


def apart(trained: TrainingRun, teacher: nn.Module, depth: int) -> float:
    """How far the largest matrix of each of the student's blocks is from that of the teacher's
    block that was chosen for it, at most, as a share of it; every rank takes part.

    Raises:
        NotInForce: further than what storing rounds.
    """
    subject = trained.subject
    names, own = prefixes(trained.module, subject), dict(teacher.named_parameters())
    blocks = chosen(subject.dimensions.depth, depth)
    pairs = []
    for block in trained.blocks():
        pairs.append(_largest(trained, block, names, blocks, own))
    whole = trained.engine.whole(trained, [p for p, _ in pairs])
    found = [_far(p, wanted) for p, (_, wanted) in zip(whole, pairs, strict=True)]
    demand(max(found) <= CLOSE, f"a block begins {max(found):.2g} away from the teacher's")
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
