"""Engines of plain torch: one process, and DistributedDataParallel (DDP), with a replica in every
process and gradients averaged in backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from strategies.base import demand
from strategies.engine import Engine
from strategies.evidence.rules import copies
from strategies.inventory import TensorInventory

if TYPE_CHECKING:
    from strategies.engine import RunContext, TrainingRun


class Alone(Engine):
    """Engine that trains the unwrapped model in one process."""

    @property
    def traits(self) -> frozenset[str]:
        return frozenset({"one_process"})

    def refuses(self, launch: RunContext) -> str | None:
        if launch.processes > 1:
            return f"trains one process, not {launch.processes}; use --processes 1, or ddp"
        return None

    def evidence(self, run: TrainingRun) -> dict[str, Any]:
        demand(run.model is run.module, f"the model is a {type(run.model).__name__}")
        return {"wrapper": "none"}


@dataclass(frozen=True)
class Broken(Engine):
    """Placeholder for an unusable launch file; refuses every launch with the reason ``why``."""

    why: str = ""

    def refuses(self, launch: RunContext) -> str | None:
        return f"{self.why}; mend the file, or take another sharding"


class Replicas(Engine):
    """Engine whose ranks hold the whole model each."""

    @property
    def traits(self) -> frozenset[str]:
        return frozenset({"replicas"})

    def refuses(self, launch: RunContext) -> str | None:
        if launch.processes == 1:
            # accelerate 1.15 wraps a model in DDP from two processes on: no DDP would be in force.
            return "one process has no replica to average with; use single, or more processes"
        return None

    def held(self, run: TrainingRun) -> TensorInventory:
        """Return the inventory with the bytes of DDP's gradient buckets, which live in C++.

        Storages that a communication hook has seen are not hidden.
        """
        logged = run.model._get_ddp_logging_data()
        sizes = logged.get("rebuilt_bucket_sizes") or logged["bucket_sizes"]
        hooks = (getattr(state, "storages", ()) for _, state in run.model._comm_hooks)
        size = sum(int(size) for size in sizes.split(","))
        return super().held(run)._replace(hidden=size, seen=frozenset().union(*hooks))

    def evidence(self, run: TrainingRun) -> dict[str, Any]:
        """Return DDP's class and its effect: replicas that saw other samples are equal."""
        from torch.nn.parallel import DistributedDataParallel

        kind = type(run.model).__name__
        demand(isinstance(run.model, DistributedDataParallel), f"the model is a {kind}")
        return {"wrapper": kind, **copies(run), **self._wire(run)}

    def _wire(self, run: TrainingRun) -> dict[str, Any]:
        """Return the type of averaged gradients, from the collectives of a watched backward.

        Strategies that replace these collectives report their own.
        """
        own = {"edits_gradients", "sparse_gradients"} & run.launch.traits
        if own or not run.observed.ran:
            return {}
        averages = [s for s in run.observed.sent if s.collective.startswith("allreduce")]
        among = run.model.process_group.group_name
        sent = [s for s in averages if s.phase == "backward" and s.group in ("", among)]
        # With find_unused_parameters, DDP sums a map of the parameters that were used.
        sent = [s for s in sent if s.dtype != "int32"]
        trainable = [p for p in run.module.parameters() if p.requires_grad]
        wanted = {str(p.dtype).removeprefix("torch.") for p in trainable}
        found, size = {s.dtype for s in sent}, sum(s.bytes for s in sent)
        demand(
            found == wanted, f"gradients were sent as {sorted(found)}, expected {sorted(wanted)}"
        )
        whole = sum(p.nbytes for p in trainable)
        if "own_loop" in run.launch.traits and size != whole:
            whole *= run.observed.micro_steps
        demand(size == whole, f"{size} bytes of gradients were sent, expected {whole}")
        return {"gradients_sent_as": "+".join(sorted(found)), "gradient_bytes_sent": size}
