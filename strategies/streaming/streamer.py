"""Blocks whose weights come and go: which of them are on the device at each moment of a step.

Imports torch: import it where torch is there.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from strategies.async_host_copy import Leaving
from strategies.base import Watcher
from strategies.engine import TrainingRun
from strategies.evidence.readings import stored
from strategies.inventory import AllocationScope
from strategies.streaming.weights import Flat, Streamed, Taken

SAMPLE = 16


@dataclass
class Seen:
    """What a watched step showed: the most bytes of the blocks' weights that were on the device
    where a block began, forward or backward; forward passes that were given weights in host memory;
    blocks that backward came to; copies, by direction."""

    resident: int = 0
    strangers: int = 0
    reached: set[int] = field(default_factory=set)
    moved: Counter[str] = field(default_factory=Counter)


class Streamer(Watcher):
    """Brings the weights of some of the model's blocks to the device, each with the next one's: in
    forward those of the block behind, in backward those of the block before. At most two of these
    blocks are there at a time.

    Backward comes to a block where the gradient of what it returned is there; those behind it have
    none to give any more. The last of them waits on the device from forward to backward.
    """

    def __init__(self, trained: TrainingRun, taken: dict[int, list[Taken]]) -> None:
        self.trained, self.blocks = trained, trained.blocks()
        device, self.moved = trained.accelerator.device, Counter()
        cuda = trained.launch.device == "cuda"  # in a prediction too
        lane, out = (torch.cuda.Stream(device) if cuda else None for _ in range(2))
        self.leaving = Leaving(out)
        self.streamed = {
            # One after the other, so that no two copies of all of them are ever there.
            index: Streamed(
                taken.pop(index), device, lane, self.leaving, self._averaged, self.moved
            )
            for index in sorted(taken)
        }
        self.start = self.sample()
        self.reached: int | None = None
        self.waiting: int | None = None
        self.seen: Seen | None = None
        for one in self.streamed.values():
            one.register(here=False)
        for index, block in enumerate(self.blocks):
            block.forward = functools.partial(self.run, index, block.forward)

    def _averaged(self, gradient: Tensor) -> Tensor:
        """The mean over replicas, where there are any, once the last micro batch is through."""
        replicas = "replicas" in self.trained.launch.traits
        if not replicas or not self.trained.accelerator.sync_gradients:
            return gradient
        return self.trained.engine.mean(self.trained, gradient)

    # ---- forward ----

    def run(self, index: int, plain: Any, *given: Any, **named: Any) -> Any:
        """A block, with its weights where it needs them; also where it is recomputed."""
        again = torch._C._current_graph_task_id() != -1
        self._bring_for(index, again)
        self._look(index)
        stays = again and index == self.reached
        try:
            with self._lent(index):
                out = plain(*given, **named)
            if not again and self._awaits_backward(index, out):
                stays = index == max(self.streamed)
                self.waiting = index if stays else self.waiting
        finally:
            if not stays:
                self._keep(set(self._there()) - {index})
        return out

    def _lent(self, index: int) -> contextlib.AbstractContextManager[None]:
        one = self.streamed.get(index)
        return one.lent() if one else contextlib.nullcontext()

    def _bring_for(self, index: int, again: bool) -> None:
        if again:  # within backward, which needs the block that it has come to behind this
            wanted = [index, self._before(index) if index == self.reached else self.reached]
        else:
            self.reached = None
            if self.waiting is not None and index <= self.waiting:
                self.waiting = None  # no backward has come: this is another forward pass
            ahead = min((i for i in self.streamed if i > index), default=None)
            wanted = [index, ahead, self.waiting]
        self._keep(wanted)

    def _keep(self, wanted: Iterable[int | None]) -> None:
        """These blocks' weights on the device, and no others'."""
        wanted = [index for index in wanted if index in self.streamed]
        for index in set(self._there()).difference(wanted):
            self.streamed[index].release()
        for index in wanted:
            self.streamed[index].fetch()

    def _there(self) -> list[int]:
        return [index for index, one in self.streamed.items() if one.there]

    # ---- backward ----

    def _awaits_backward(self, index: int, out: Any) -> bool:
        """Whether backward will come to a block that returned ``out``: it is then told."""
        leaves = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        awaited = [leaf for leaf in leaves if leaf.requires_grad]
        for leaf in awaited:
            leaf.register_hook(functools.partial(self._reach, index))
        return bool(awaited)

    def _before(self, index: int) -> int | None:
        return max((i for i in self.streamed if i < index), default=None)

    def _reach(self, index: int, gradient: Tensor) -> None:
        """Backward has come to a block."""
        if self.reached == index:
            return
        if self.reached is None:
            torch.autograd.Variable._execution_engine.queue_callback(self._ended)
        self.reached = index
        self._keep([index, self._before(index)])
        if index in self.streamed:
            self.streamed[index].wait()
        self._look(index, backward=True)

    def _ended(self) -> None:
        """Backward is through: gradients are where the optimizer finds them."""
        self.reached = self.waiting = None
        self._keep([])
        self.leaving.let_go()
        if self.leaving.stream is not None:
            self.leaving.stream.synchronize()

    # ---- what is seen of it ----

    @contextlib.contextmanager
    def watched(self) -> Iterator[Seen]:
        """While it lasts, what is on the device is noted at each block."""
        self.seen, before = Seen(), Counter(self.moved)
        try:
            yield self.seen
        finally:
            self.seen.moved, self.seen = self.moved - before, None

    def _look(self, index: int, backward: bool = False) -> None:
        if self.seen is None:
            return
        self.seen.resident = max(self.seen.resident, self.resident())
        if backward:
            self.seen.reached.add(index)
        else:
            with self._lent(index):
                self.seen.strangers += self._computes_elsewhere(index)

    def resident(self) -> int:
        """Bytes of the blocks' weights that are on the device now."""
        return self.stays() + sum(one.resident for one in self.streamed.values())

    def stays(self) -> int:
        """Bytes of the blocks' weights that are never elsewhere."""
        pairs = (w for one in self.streamed.values() for w in one.weights)
        own = {id(p) for w in pairs for p in (w.host, w.here)}
        kept = {id(p): p for block in self.blocks for p in block.parameters() if id(p) not in own}
        return sum(t.nbytes for p in kept.values() for t in stored(p.data))

    def _computes_elsewhere(self, index: int) -> bool:
        """Whether a block would be given weights that lie in host memory."""
        hosts = {_address(flat.host) for one in self.streamed.values() for flat in one.flats}
        given = (t for p in self.blocks[index].parameters() for t in stored(p.data))
        return any(_address(tensor) in hosts for tensor in given)

    def sample(self) -> list[Tensor]:
        """A few elements of each trained weight in host memory, as they are now."""
        free = [p for p in self.hosts if p.requires_grad]
        return [p.detach().flatten()[:SAMPLE].clone() for p in free]

    # ---- as an attachment ----

    @property
    def hosts(self) -> list[nn.Parameter]:
        """The parameters in host memory."""
        return [weight.host for one in self.streamed.values() for weight in one.weights]

    def hosted(self) -> Iterable[Tensor]:
        """The weights, their gradients, and what the optimizer keeps of them."""
        optimizer = self.trained.inner_optimizer.state
        for p in self.hosts:
            kept = optimizer.get(p, {}).values()
            grads = () if p.grad is None else (p.grad,)
            yield from (p.data, *grads, *(t for t in kept if isinstance(t, Tensor)))

    def makers(self) -> tuple[AllocationScope, ...]:
        """Weights come to the device by one method, gradients leave it by the other, both beside
        what is computed."""
        into = AllocationScope(Flat, "fetch", "parameters", place="device", beside=True)
        out = AllocationScope(
            Streamed, "leave", "gradients", place="host", pinned=True, beside=True
        )
        return into, out


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
