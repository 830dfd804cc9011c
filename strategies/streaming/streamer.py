"""Streaming of block weights: which blocks are on the device at each moment of a step.

Imports torch.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from strategies.async_host_copy import AsyncHostCopy
from strategies.base import Attachment, demand
from strategies.engine import TrainingRun
from strategies.inventory import AllocationScope
from strategies.streaming.weights import Flat, Streamed, Taken


class Streamer(Attachment):
    """Streamer of some blocks' weights to the device, each together with the next block's.

    The next block is the following one in forward, the preceding one in backward. At most two of
    these blocks are on the device at a time. Backward reaches a block when the gradient of its
    output exists; blocks after it are then complete. The last of them stays on the device from
    forward to backward.

    If gradients are freed within backward, the optimizer has the weights on the device, where its
    state is too, and each weight returns to host memory when it is stepped (``fused``). Else it has
    those in host memory, and gradients go there.
    """

    def __init__(self, run: TrainingRun, taken: dict[int, list[Taken]]) -> None:
        self.run = run
        device, fused = run.accelerator.device, "frees_gradients" in run.launch.traits
        cuda = run.launch.device == "cuda"  # in a prediction too
        lane, out = (torch.cuda.Stream(device) if cuda else None for _ in range(2))
        self.host_copy = AsyncHostCopy(out)
        self.streamed = {
            # In turn, so that two copies of all of them never exist.
            index: Streamed(taken.pop(index), device, lane, self.host_copy, self._averaged, fused)
            for index in sorted(taken)
        }
        pairs = [(one, w) for one in self.streamed.values() for w in one.weights]
        self.hosts = [weight.host for _, weight in pairs]
        self.fused = {w.here: (one, w) for one, w in pairs if fused and w.here.requires_grad}
        if self.fused:
            run.inner_optimizer.register_step_post_hook(self._stepped)
        self.reached: int | None = None
        self.waiting: int | None = None
        self.seen: Counter[str] | None = None
        for index, block in enumerate(run.blocks()):
            block.forward = functools.partial(self.run_block, index, block.forward)

    def _averaged(self, gradient: Tensor) -> Tensor:
        """Return the mean of a gradient over replicas, if any, after the last micro-batch."""
        replicas = "replicas" in self.run.launch.traits
        if not replicas or not self.run.accelerator.sync_gradients:
            return gradient
        return self.run.accelerator.reduce(gradient, reduction="mean")

    # ---- forward ----

    def run_block(self, index: int, plain: Any, *given: Any, **named: Any) -> Any:
        """Run a block with its weights on the device, also in recomputation."""
        again = torch._C._current_graph_task_id() != -1
        if again:  # in backward, which needs the reached block after this one
            self._keep([index, self._before(index) if index == self.reached else self.reached])
        else:
            self.reached = None
            if self.waiting is not None and index <= self.waiting:
                self.waiting = None  # no backward ran: this is another forward pass
            ahead = min((i for i in self.streamed if i > index), default=None)
            self._keep([index, ahead, self.waiting])
        self._look()
        stays = again and index == self.reached
        one = self.streamed.get(index)
        try:
            with one.lent() if one else contextlib.nullcontext():
                out = plain(*given, **named)
            if not again and self._awaits_backward(index, out):
                stays = index == max(self.streamed)
                self.waiting = index if stays else self.waiting
        finally:
            if not stays:
                self._keep(set(self._there()) - {index})
        return out

    def _keep(self, wanted: Iterable[int | None]) -> None:
        """Fetch these blocks' weights to the device, and release all others."""
        near = [index for index in wanted if index is not None and index in self.streamed]
        for index in set(self._there()).difference(near):
            self._compare(self.streamed[index])
            self.streamed[index].release()
        for index in near:
            self.streamed[index].fetch()

    def _there(self) -> list[int]:
        return [index for index, one in self.streamed.items() if one.there]

    def _before(self, index: int) -> int | None:
        return max((i for i in self.streamed if i < index), default=None)

    # ---- backward ----

    def _awaits_backward(self, index: int, out: Any) -> bool:
        """Register hooks that report when backward reaches a block that returned ``out``; return
        whether it will."""
        leaves = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        awaited = [leaf for leaf in leaves if leaf.requires_grad]
        for leaf in awaited:
            leaf.register_hook(functools.partial(self._reach, index))
        return bool(awaited)

    def _reach(self, index: int, gradient: Tensor) -> None:
        """Move weights when backward reaches a block."""
        if self.reached == index:
            return
        if self.reached is None:
            torch.autograd.Variable._execution_engine.queue_callback(self._ended)
        self.reached = index
        self._keep([index, self._before(index)])
        if index in self.streamed:
            self.streamed[index].wait()
        self._look()

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Copy the weights of a step to host memory; those without a gradient did not step."""
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            if p.grad is not None and p in self.fused:
                one, weight = self.fused[p]
                one.keep(weight)

    def _ended(self) -> None:
        """Finish backward: wait until all gradients are in host memory for the optimizer."""
        self.reached = self.waiting = None
        self._keep([])
        self.host_copy.let_go()
        if self.host_copy.stream is not None:
            self.host_copy.stream.synchronize()

    # ---- evidence ----

    @contextlib.contextmanager
    def watched(self) -> Iterator[Counter[str]]:
        """Record, inside the context: "resident", the most bytes of streamed weights on the device
        when a block began, and "stale", blocks that left it with weights unlike the host's."""
        self.seen = Counter()
        try:
            yield self.seen
        finally:
            self.seen = None

    def _look(self) -> None:
        if self.seen is not None:
            self.seen["resident"] = max(self.seen["resident"], self._resident())

    def _compare(self, one: Streamed) -> None:
        if self.seen is not None:
            one.wait()
            self.host_copy.let_go()
            pairs = [(flat.here.cpu(), flat.host) for flat in one.flats]
            bits = [tuple(side.view(torch.uint8) for side in pair) for pair in pairs]
            self.seen["stale"] += any(not here.equal(host) for here, host in bits)

    def _resident(self) -> int:
        """Return the bytes of streamed weights that are on the device now."""
        flats = (flat for one in self.streamed.values() for flat in one.flats)
        return sum(flat.here.untyped_storage().nbytes() for flat in flats)

    def facts(self, seen: Counter[str] | None, at_once: int) -> dict[str, Any]:
        """Return the bytes in host memory, and on the device at once: at most ``at_once`` blocks'.

        ``seen``: the record of a watched step, None if there was none.
        """
        sizes = [one.size for one in self.streamed.values()]
        demand(not self._resident(), "weights of streamed blocks stay on the device between uses")
        places = {p.device.type for p in self.hosts}
        demand(places == {"cpu"}, f"the streamed weights are stored on {places}, expected cpu")
        pinned = all(flat.host.is_pinned() for one in self.streamed.values() for flat in one.flats)
        demand(pinned or self.run.launch.device != "cuda", "the host memory is not pinned")
        engine = self.run.engine
        stepped = {id(s.tensor): s.state() for s in engine.shards(self.run)}
        states = [stepped.get(id(p), {}) for p in self.hosts if p.requires_grad]
        demand(all(states), f"{states.count({})} of {len(states)} weights were never stepped")
        facts = {"blocks": len(sizes), "host_weight_bytes": sum(sizes)}
        if seen is None:
            return facts
        stale, resident, most = seen["stale"], seen["resident"], at_once * max(sizes)
        demand(not stale, f"{stale} blocks left the device with weights unlike the host's")
        text = f"{resident} bytes of streamed weights were on the device at once"
        demand(resident <= most, f"{text}, expected at most {most}")
        return facts | {"most_resident_bytes": resident}

    # ---- attachment interface ----

    def stepped(self) -> list[nn.Parameter]:
        """Return the parameters that the optimizer steps."""
        return [*self.fused] or [p for p in self.hosts if p.requires_grad]

    def leaves(self) -> Iterable[Tensor]:
        return self.fused

    def hosted(self) -> Iterable[Tensor]:
        optimizer = self.run.inner_optimizer.state
        for p in self.hosts:
            states = optimizer.get(p, {}).values()
            grads = () if p.grad is None else (p.grad,)
            yield from (p.data, *grads, *(t for t in states if isinstance(t, Tensor)))

    def makers(self) -> tuple[AllocationScope, ...]:
        """Return the methods that copy weights in, and gradients or weights out; all overlap with
        computation."""
        into = AllocationScope(Flat, "fetch", "parameters", place="device", beside=True)
        out = AllocationScope(
            Streamed, "leave", "gradients", place="host", pinned=True, beside=True
        )
        return into, out, AllocationScope(Streamed, "keep", "", beside=True)
