"""Which weights ZeRO-3 gathers when, by DeepSpeed's own rules of fetching ahead and letting go,
replayed over the modules of a step. No torch.

Source: deepspeed 0.19, runtime/zero/partitioned_param_coordinator.py (fetch_sub_module,
release_sub_module) and partition_parameters.py (AllGatherCoalescedHandle: several weights come in
one flat buffer, are copied out of it, and it lives until each of them was asked for).
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.oracle.layers import Layer
from tests.oracle.sizes import Sizes

__all__ = ["Gathered", "Limits", "Module", "gathered", "modules", "replay"]


@dataclass(frozen=True)
class Module:
    """A visit to a module; ``layer`` is None for one without weights. ``during``: forward, again
    (recomputed) or backward."""

    layer: Layer | None
    during: str


@dataclass(frozen=True, kw_only=True)
class Limits:
    """DeepSpeed's, in elements: of a fetch ahead, of gathered weights, of the way to a reuse.
    ``singly``: a fetch copies each weight to where it stays, and needs no flat buffer."""

    prefetch: int
    live: int
    reuse: int
    singly: bool = False


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """Bytes of gathered weights: at the loss, and when a layer is entered by forward, again to
    be recomputed, and by backward."""

    loss: float = 0.0
    forward: dict[Layer, float] = field(default_factory=dict)
    again: dict[Layer, float] = field(default_factory=dict)
    backward: dict[Layer, float] = field(default_factory=dict)


def gathered(s: Sizes) -> Gathered:
    """What a step of ``s`` gathers: nothing below stage 3, nor where one rank has it all."""
    if s.stage < 3 or (s.ways == 1 and not s.offloads):
        return Gathered()
    zero, root = s.zero, Layer("positions", -1, s.frozen, 0)
    limits = Limits(
        prefetch=zero["stage3_prefetch_bucket_size"],
        live=zero["stage3_max_live_parameters"],
        reuse=zero["stage3_max_reuse_distance"],
        singly=s.ways == 1,
    )
    visits = modules(s.layers, root, s.depth, s.segment)
    held = replay(visits, limits)
    resident = s.weight * sum(layer.bias for layer in s.layers)
    found = Gathered()
    for visit, elements in zip(visits, held, strict=True):
        if visit.layer:
            getattr(found, visit.during)[visit.layer] = resident + s.weight * elements
    return dataclasses.replace(found, loss=found.forward[s.layers[-1]])


def modules(found: Sequence[Layer], root: Layer, depth: int, segment: int) -> list[Module]:
    """The visits of a step in order; ``segment`` blocks are recomputed together, 0 none."""
    by_block: dict[int, dict[str, Layer]] = defaultdict(dict)
    for layer in found:
        by_block[layer.block][layer.name] = layer
    start, end = by_block[-1], by_block[depth]
    time = [None, None, start["time0"], None, start["time2"]]
    entered = [root, None, start["patches"], *time, None, start["labels"]]
    for i in range(depth):
        entered += _entered(by_block[i])
    visits = _as("forward", [*entered, None, None, None, end["adaLN"], None, end["linear"]])
    visits += _as("backward", [root, None, end["linear"], None, None, end["adaLN"], None])
    for i in reversed(range(depth)):
        visits += _as("backward", [None])
        if segment and (i == depth - 1 or (i + 1) % segment == 0):
            for j in range(i // segment * segment, i + 1):
                visits += _as("again", _entered(by_block[j]))
        visits += _as("backward", _left(by_block[i]))
    behind = [None, start["labels"], None, None, start["time2"], None, start["time0"], None]
    return visits + _as("backward", [*behind, start["patches"]])


def _as(during: str, found: Sequence[Layer | None]) -> list[Module]:
    return [Module(layer, during) for layer in found]


def _entered(b: dict[str, Layer]) -> list[Layer | None]:
    """A block's modules as forward enters them, containers and activations included."""
    first = [None, None, None, b["adaLN"], None, None, b["qkv"], b["proj"]]
    return [*first, None, None, b["fc1"], None, b["fc2"]]


def _left(b: dict[str, Layer]) -> list[Layer | None]:
    """The same behind the block itself, as backward enters them."""
    first = [None, b["fc2"], None, b["fc1"], None, None, b["proj"], b["qkv"], None]
    return [*first, None, b["adaLN"], None]


@dataclass
class _State:
    """``coming``: layer -> the fetch that brings it, until the layer is asked for. ``saved``: let
    go, but what was recomputed holds its storage until backward has used it."""

    limits: Limits
    available: set[Layer] = field(default_factory=set)
    coming: dict[Layer, int] = field(default_factory=dict)
    fetches: list[list[Layer]] = field(default_factory=list)
    landed: set[int] = field(default_factory=set)
    saved: set[Layer] = field(default_factory=set)
    counted: int = 0

    def held(self) -> int:
        """Elements on the device. What is fetched alone lands where it stays."""
        open_fetches = [self.fetches[i] for i in set(self.coming.values())]
        flat = [x.weight for fetch in open_fetches if len(fetch) > 1 for x in fetch]
        alone = {fetch[0] for fetch in open_fetches if len(fetch) == 1}
        return sum(x.weight for x in (*(self.available | alone), *self.saved)) + sum(flat)

    def known(self, layer: Layer) -> bool:
        """Whether it is there or on its way."""
        return layer in self.available or layer in self.coming

    def fetch(self, wanted: list[Layer]) -> None:
        """Start an all-gather, or one for each."""
        for one in [[x] for x in wanted] if self.limits.singly else [wanted] * bool(wanted):
            self.coming |= dict.fromkeys(one, len(self.fetches))
            self.fetches.append(one)
            self.counted += sum(x.weight for x in one)

    def land(self, layer: Layer) -> None:
        """Copy a fetch out of its buffer, if ``layer`` is the first of it that is asked for."""
        index = self.coming.get(layer)
        if index is not None and index not in self.landed:
            self.landed.add(index)
            self.available |= set(self.fetches[index])

    def release(self, layer: Layer) -> None:
        """Let go of a weight."""
        self.available.discard(layer)
        self.counted -= layer.weight


def replay(visits: Sequence[Module], limits: Limits) -> list[int]:
    """Elements gathered at the fullest instant of each visit."""
    state, found = _State(limits), []
    queue = deque((v.layer, step) for step, v in enumerate(visits) if v.layer)
    asked: dict[Layer, int] = defaultdict(lambda: -1)
    for step, visit in enumerate(visits):
        layer, most = visit.layer, 0
        if layer:
            state.fetch([] if state.known(layer) else [layer])
            state.land(layer)
            most = state.held()
            state.coming.pop(layer, None)
            if asked[layer] < step:
                popped, last = queue.popleft()
                asked[popped] = last
        _fetch_ahead(state, queue, asked)
        found.append(max(most, state.held()))
        if visit.during == "backward":
            state.saved.discard(layer)
        if layer and _lets_go(visits, step, asked[layer], limits.reuse):
            state.release(layer)
            state.saved |= {layer} if visit.during == "again" else set()
    return found


def _fetch_ahead(state: _State, queue: deque, asked: dict[Layer, int]) -> None:
    """Fetch what comes next, as far as the limits go. What is there already is passed over, and
    stays until then: that is why ZeRO-3 keeps more than its reuse distance says."""
    room = min(state.limits.live - state.counted, state.limits.prefetch)
    wanted: list[Layer] = []
    while queue and sum(x.weight for x in wanted) < room:
        layer, last = queue.popleft()
        asked[layer] = max(asked[layer], last)
        if not state.known(layer) and layer not in wanted:
            wanted.append(layer)
    state.fetch(wanted)


def _lets_go(visits: Sequence[Module], step: int, asked: int, reuse: int) -> bool:
    """Whether a weight is released behind this visit: not the root's, nor in backward what has
    no input with a gradient (its hook never fires), nor what is used again soon."""
    visit, crossed = visits[step], 0
    held = ("positions", *(("labels", "time0", "patches") if visit.during == "backward" else ()))
    if visit.layer.name in held or asked > step + 1:
        return False
    for later in visits[step + 1 :]:
        if crossed >= reuse:
            break
        if later.layer is visit.layer:
            return False
        crossed += later.layer.weight if later.layer else 0
    return True
