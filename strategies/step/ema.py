"""ema: the exponential moving average of the weights, from which a DiT samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from strategies.base import Attachment, Slot, demand
from strategies.engine import TrainingRun
from strategies.evidence.rules import label
from strategies.strategy import Strategy

# ---- reading a GPU's tensors from the host ----


class Staging:
    """Reader of device tensors in pieces, through two buffers of pinned host memory.

    The buffers are filled in turns on a stream of their own: the next piece is copied while the
    host processes one. A copy to unpinned memory would block both, and use a small buffer of the
    driver. In a prediction, where the device has no streams, pieces are copied on request.

    Args:
        device: device of the tensors.
        dtype: their type.
        elements: size of a piece; a power of two, since the allocator rounds pinned blocks up to
            one.
    """

    def __init__(self, device: Any, dtype: Any, elements: int) -> None:
        import torch

        cuda = device.type == "cuda"
        self.elements = elements
        self.buffers = [torch.empty(elements, dtype=dtype, pin_memory=cuda) for _ in range(2)]
        self.stream = torch.cuda.Stream(device) if cuda else None

    def read(self, tensor: Any) -> Iterator[Any]:
        """Yield the elements of ``tensor`` in order, flat and in pieces on the host.

        Each piece is valid until the next is requested.
        """
        pieces = tensor.flatten().split(self.elements)
        waits = [self._begin(0, pieces[0])]
        for index, piece in enumerate(pieces):
            if index + 1 < len(pieces):
                waits.append(self._begin(index + 1, pieces[index + 1]))
            waits.pop(0)()
            yield self.buffers[index % 2][: piece.numel()]

    def _begin(self, index: int, piece: Any) -> Callable[[], None]:
        """Begin to copy a piece into its buffer; call the result to wait for the copy."""
        import torch

        buffer = self.buffers[index % 2][: piece.numel()]
        if self.stream is None:
            buffer.copy_(piece)
            return lambda: None
        self.stream.wait_stream(torch.cuda.current_stream(piece.device))
        with torch.cuda.stream(self.stream):
            buffer.copy_(piece, non_blocking=True)
        return self.stream.record_event().synchronize


PIECE = 2**22
"""Elements copied at a time if the master is on another device than the average.

A whole shard at once would be as large as what was offloaded.
"""
# Enough elements that some change even if only a hundredth of the gradients is sent.
WITNESS = 2048


class Average(Attachment):
    """float32 averages of this rank's master weights, laid out as the engine shards them.

    Each rank averages its own shard, and nothing is gathered. The average is of the float32 master
    even if the model is bfloat16, whose 8 bits of mantissa cannot take steps of 1 - 0.9999.
    ``start``: a few elements of the weights at the beginning.
    """

    def __init__(self, run: TrainingRun, decay: float, place: str) -> None:
        self.run, self.decay, self.updates = run, decay, 0
        device = run.accelerator.device if place == "device" else "cpu"
        self.on_host = place != "device"
        self.swapped = "swapped_weights" in run.launch.traits
        self.shards: list[Any] = []
        self.staging: Staging | None = None
        for _, master, *_ in run.engine.shards(run):
            self.shards.append(master.detach().float().clone().to(device))
            self._stage(master)
        self.start = self.followed(self.shards[0])

    def followed(self, shard: Any) -> Any:
        """Return a few elements of a shard, spread over it, in float64."""
        flat = shard.detach().flatten()
        return flat[:: max(1, len(flat) // WITNESS)][:WITNESS].double()

    def after_step(self) -> None:
        """Compute average += (1 - decay) * (weights - average)."""
        import torch

        weight, here, there = 1 - self.decay, [], []
        with torch.no_grad():
            for index, master, *_ in self.run.engine.shards(self.run):
                mine, theirs = self.shards[index], master.detach()
                if (theirs.device, theirs.dtype) != (mine.device, torch.float32):
                    self._follow(mine, theirs, weight)
                elif self.swapped:  # the master is only in memory until the next one is read
                    mine.lerp_(theirs, weight)
                elif theirs.numel():
                    here.append(mine)
                    there.append(theirs)
            if here:
                torch._foreach_lerp_(here, there, weight)
        self.updates += 1

    def _stage(self, master: Any) -> None:
        """Allocate buffers for masters that the host reads from another device, as large as
        needed."""
        if not self.on_host or master.device.type == "cpu":
            return
        wanted = min(PIECE, 1 << max(0, master.numel() - 1).bit_length())
        if self.staging is None or self.staging.elements < wanted:
            self.staging = Staging(master.device, master.dtype, wanted)

    def _follow(self, shard: Any, master: Any, weight: float) -> None:
        """Take one step towards a master of another device or type, in pieces."""
        if not master.numel():
            return
        staging = None if master.device.type == "cpu" else self.staging
        size = staging.elements if staging else PIECE
        theirs = staging.read(master) if staging else master.flatten().split(size)
        for mine, piece in zip(shard.flatten().split(size), theirs, strict=True):
            mine.lerp_(piece.to(mine), weight)

    def tensors(self) -> Iterable[Any]:
        return [*self.shards, *(self.staging.buffers if self.staging else ())]

    def averages(self) -> list[Any]:
        return self.shards

    def hosted(self) -> Iterable[Any]:
        return self.tensors() if self.on_host else ()

    def state_dict(self) -> dict[str, Any]:
        return {"shards": self.shards, "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for mine, saved in zip(self.shards, state["shards"], strict=True):
            mine.copy_(saved)
        self.updates = state["updates"]

    def full_state(self) -> dict[str, Any]:
        """Return the whole averaged trainable parameters on rank 0 (empty elsewhere); all ranks
        call it.

        Parameters are assembled one at a time, so no rank holds more than the largest one besides
        its shards.
        """
        import torch

        device, first = self.run.accelerator.device, self.run.accelerator.is_main_process
        pieces: dict[str, list[Any]] = {}
        for shard in self.run.engine.shards(self.run):
            for piece in shard.pieces():
                pieces.setdefault(piece.name, []).append((self.shards[shard.number], piece))
        state = {}
        for name, p in self.run.engine.global_parameters(self.run).items():
            if not p.requires_grad:
                continue
            shape = self.run.engine.part(p).shape
            average = torch.zeros(shape.numel(), device=device)
            for mine, f in pieces.get(name, ()):
                part = mine.flatten()[f.start : f.start + f.numel]
                average[f.offset : f.offset + f.numel] = part.to(device)
            if self.run.launch.processes > 1:
                torch.distributed.reduce(average, dst=0)
            if first:
                state[name] = average.view(shape).cpu()
        return state


@dataclass(frozen=True, kw_only=True)
class Ema(Strategy):
    """Averages the weights after every step.

    ``place`` is the location of the average: the training device, host memory (``cpu``), or none
    (``none``: no average is kept).
    """

    name: ClassVar[str] = "ema"
    slot: ClassVar[Slot] = Slot.AVERAGE
    source: ClassVar[str] = "Polyak and Juditsky 1992; facebookresearch/DiT train.py (decay 0.9999)"
    values: ClassVar[dict[str, Any]] = {"place": ("device", "cpu", "none")}

    place: str = "device"

    def attach(self, run: TrainingRun) -> Average | None:
        if self.place == "none":
            return None
        return Average(run, run.settings.ema_decay, self.place)

    def evidence(self, run: TrainingRun) -> dict[str, Any]:
        average: Any = run.attached.get(self.name)
        if self.place == "none":
            demand(average is None, "there is an average, expected none")
            return {"bytes": 0}
        demand(isinstance(average, Average), "there is no average")
        found = (average.updates, average.decay)
        wanted = (run.optimizer_steps, run.settings.ema_decay)
        demand(found == wanted, f"updates and decay of the average are {found}, expected {wanted}")
        self._moved(run, average)
        devices = {s.device.type for s in average.shards}
        place = "cpu" if self.place == "cpu" else run.accelerator.device.type
        demand(devices == {place}, f"the average is on {devices}, expected {place}")
        size = sum(s.numel() * s.element_size() for s in average.shards)
        facts = {"device": place, "bytes": size, "updates": average.updates}
        # If training is in host memory, the placement is the same for every setting.
        return label(facts, "device") if run.launch.device == "cpu" else facts

    def _moved(self, run: TrainingRun, average: Average) -> None:
        """Demand that the average has followed the weights, and is not the weights."""
        shards = run.engine.shards(run)
        (weights,) = [average.followed(p).cpu() for index, p, *_ in shards if index == 0]
        followed, start = average.followed(average.shards[0]).cpu(), average.start.cpu()
        # A float32 average stands still under steps below an ulp of it.
        step = (weights - start).abs() * (1 - average.decay)
        far = bool((step > 2**-22 * followed.abs()).any())
        demand(not (far and followed.equal(start)), "the average has not changed with the weights")
        moved = not weights.equal(start)
        demand(not (moved and weights.equal(followed)), "the average equals the weights")
