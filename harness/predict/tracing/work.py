"""Counts the work of a traced step: FLOPs and bytes of every op, by kind."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Container
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from harness.memory.free_ops import is_free
from harness.predict.speed.roofline import Work
from harness.predict.tracing.remembered import device_of
from strategies.evidence.collectives import group_of
from strategies.evidence.flops import formulas

__all__ = ["Counter"]

WIRE = {"allreduce_": 2, "allreduce_coalesced_": 2}
"""Collective -> passes over the wire; an all-reduce is a reduce-scatter and an all-gather."""
PASSED = ("send", "recv_")
"""From one rank to one other; counted where it is sent."""
AWAITED = ("alltoall_base_", "allgather_")
"""Collectives within a layer, which the next op waits for, whatever an engine runs beside it."""


FIELDS = ("phase", "kind", "dtype", "flops", "bytes", "group", "stride")
"""Of ``Work``, in the order of a tally's keys."""


class Counter:
    """Told of every op of a trace; ``begin`` forgets what came before the step that counts.
    ``beside``: phases whose collectives run beside the computation, but for those of ranks that
    have parts of the same weights: ``neighbours`` (how many, how far apart), which are awaited.
    ``rounds``: whether what is sent to one rank travels while attention is computed, as in a ring.
    """

    def __init__(
        self,
        device: str,
        host: str | None,
        beside: Container[str] = (),
        neighbours: tuple[int, int] | None = None,
        rounds: bool = False,
    ) -> None:
        self.device, self.host, self.beside = device, host, beside
        self.neighbours, self.rounds = neighbours, rounds
        self.under_way: list[tuple[str, int, int]] = []
        self.formulas = formulas()
        self.tally: Tally[tuple[str, str, str, int, int, int, int]] = Tally()

    def begin(self) -> None:
        """Forget what was counted so far."""
        self.tally.clear()
        self.under_way.clear()

    def see(self, phase: str, func: Any, args: Any, out: Any, beside: bool = False) -> None:
        """Count one op; ``beside``: where it copies it does so beside the computation."""
        ins, outs = _tensors(args), _tensors(out)
        if func.namespace == "c10d":
            name = func._schema.name.rpartition("::")[2]
            if name == "send":  # all of it is on the wire once: half of what two ranks pass around
                self._send(phase, 2 * _bytes(ins), _distance(args))
            if name in PASSED:
                return
            # What is gathered, or cut: one of the arguments, and not with what it is made of.
            size = max(_bytes(_tensors(arg)) for arg in (*args, out)) * WIRE.get(name, 1)
            among = _ranks(args)
            awaited = name in AWAITED or among == self.neighbours
            kind = "overlapped" if phase in self.beside and not awaited else "collective"
            self.add(phase, kind, "", 0, size, *among)
            return
        outs = outs or _written(func, args)
        if outs and not is_free(func):
            kind, *rest = self._kind(func, args, ins, outs, out)
            if self.under_way and kind in ("attention", "product"):
                self._arrive(phase, kind, *rest)
            streamed = beside and kind == "transfer"
            self.add(phase, "streamed" if streamed else kind, *rest)

    def add(
        self,
        phase: str,
        kind: str,
        dtype: str,
        flops: int,
        size: int,
        group: int = 0,
        stride: int = 1,
    ) -> None:
        """Count work, also such as no op shows (a C++ reducer, a left-out kernel)."""
        self.tally[phase, kind, dtype, flops, size, group, stride] += 1

    def _send(self, phase: str, size: int, distance: int) -> None:
        """Count what goes to one other rank: at once, or when it is known what ran beside it."""
        if self.rounds:
            self.under_way.append((phase, size, distance))
        else:
            self.add(phase, "collective", "", 0, size, 2, distance)

    def _arrive(self, phase: str, kind: str, dtype: str, flops: int, size: int) -> None:
        """What is under way as ``kind`` begins travels beside an attention, all of it together;
        another product wants its result, and has waited for it."""
        if kind == "attention":
            total, distance = sum(s for _, s, _ in self.under_way), self.under_way[0][2]
            self.add(phase, "passed", dtype, flops, total, 2, distance)
        else:
            for sent_in, total, distance in self.under_way:
                self.add(sent_in, "collective", "", 0, total, 2, distance)
        self.under_way.clear()

    def work(self) -> list[Work]:
        """What was counted since ``begin``."""
        for sent_in, total, distance in self.under_way:
            self.add(sent_in, "collective", "", 0, total, 2, distance)
        self.under_way.clear()
        return [
            Work(**dict(zip(FIELDS, key, strict=True)), count=count)
            for key, count in self.tally.items()
        ]

    def _rounds(self, func: Any) -> bool:
        """True for a convolution on a GPU while cuDNN may compute float32 in TF32, its default.
        Matrix products follow the recipe instead (``roofline.seconds``)."""
        is_convolution = "convolution" in func._schema.name
        return self.device != "cpu" and is_convolution and torch.backends.cudnn.allow_tf32

    def _kind(
        self, func: Any, args: Any, ins: list[Any], outs: list[Any], out: Any
    ) -> tuple[str, str, int, int]:
        size, dtype = _bytes(ins) + _bytes(outs), str(outs[0].dtype).removeprefix("torch.")
        devices = {device_of(t).type for t in (*ins, *outs) if t.ndim}
        if self.host in devices and self.device in devices and self.host != self.device:
            return "transfer", "", 0, _bytes(outs)
        if self.host != self.device and devices == {self.host}:
            return "host", "", 0, size
        formula = self.formulas.get(func._overloadpacket)
        if formula is None:
            return "memory", dtype, 0, size
        flops = int(formula(*args, out_val=out))
        if dtype == "float32" and self._rounds(func):
            dtype = "tf32"
        kind = "attention" if "attention" in func._schema.name else "product"
        return kind, dtype, flops, size


def _written(func: Any, args: Any) -> list[Any]:
    """Tensors that an op without output changes (fused and foreach optimizers)."""
    named = zip(func._schema.arguments, args, strict=False)
    changed = [value for name, value in named if name.alias_info and name.alias_info.is_write]
    return _tensors(changed)


def _ranks(args: Any) -> tuple[int, int]:
    """How many ranks a collective is among, and how far apart they are; (0, 1) for all."""
    from torch.distributed import distributed_c10d as c10d

    group = group_of(args)
    if group is None:
        return 0, 1
    ranks = c10d.get_process_group_ranks(c10d._resolve_process_group(group.group_name))
    stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    return (0, 1) if len(ranks) == c10d.get_world_size() else (len(ranks), stride)


def _distance(args: Any) -> int:
    """How far the rank is to which a tensor is sent."""
    from torch.distributed import distributed_c10d as c10d

    group = c10d._resolve_process_group(group_of(args).group_name)
    peer = next(value for value in args if isinstance(value, int))
    return abs(c10d.get_process_group_ranks(group)[peer] - c10d.get_rank())


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if type(value) in (list, tuple):
        return [tensor for each in value for tensor in _tensors(each)]
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _bytes(tensors: list[Any]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)
