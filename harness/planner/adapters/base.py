"""Base class of the engines' adapters for predictions, and the types that they use. No torch."""

from __future__ import annotations

import contextlib
import functools
import tempfile
from argparse import Namespace
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

from harness.planner.overhead import NoTrace
from strategies import users_launch
from strategies.engine import Engine, RunContext, TrainingRun, Workload
from strategies.launch_file import LaunchFile


class AllocationRecorder(Protocol):
    """Recorder of allocations that the dispatch trace cannot see.
    The tracer of a prediction implements it (``harness.planner.tracing.trace``)."""

    def hold(self, pool: str, size: int, op: str, category: str) -> Callable[[], None]:
        """Record ``size`` bytes of pool "device", "host" or "nvme" as held from now on.
        ``op`` is a name for the reader. Call the result to record that they are freed. Pool
        "passing" is device memory that no later step holds."""

    def pin(self, tensor: Any, pinned: bool = True) -> None:
        """Count a host tensor by its pinned size (``strategies.base.pinned_block``), or if False by
        its bytes."""

    def tag(self, category: str, tensors: Iterable[Any]) -> None:
        """Set the category of live tensors that have none."""

    def move(self, category: str, source: str, target: str) -> int:
        """Count all of ``category`` in pool ``source`` as in pool ``target``, from the trace's
        start on.
        Returns the bytes of it that are held now."""

    def work(self, phase: str, kind: str, size: int, group: int = 0, stride: int = 1) -> None:
        """Record ``size`` bytes moved in a phase of the step.
        ``kind`` is overlapped, host or nvme. ``group`` and ``stride`` give the ranks that take part
        (``harness.prediction.Work``)."""


class ResolvedConfig(NamedTuple):
    """Launch file with every number filled in, for use without Headroom.
    ``content``: accelerate's YAML. ``files``: name -> content of each JSON that it names.
    ``blanks``: values that only the user knows: "file: key" -> description."""

    content: dict[str, Any]
    files: Mapping[str, dict[str, Any]] = {}
    blanks: Mapping[str, str] = {}


@dataclass(frozen=True)
class TraceAdapter:
    """Adapter of ``engine`` for predictions of ``rank``, one of ``distinct_ranks``.
    The methods below "trace" are called in the order in which they are defined
    (``harness.planner.tracing.simulate``). The defaults suit an engine whose ranks are alike and
    run without storage unchanged. ``ranks``: the engine needs a process group (a fake one is
    made)."""

    engine: Engine
    rank: int = 0
    ranks: ClassVar[bool] = True
    shapes_in: ClassVar[tuple[str, ...]] = ()
    """Endings of library file names whose tensors on ``meta`` only record shapes.
    They are not counted as GPU memory, although the simulated GPU's tensors are on ``meta`` too."""

    def by_block(self, depth: int) -> Sequence[Hashable]:
        """Return a key per block of a model of ``depth`` blocks, as ``Strategy.by_block``."""
        return [None] * depth

    def distinct_ranks(self, launch: RunContext) -> Sequence[int]:
        """Return one rank of each group of ranks with equal work and memory.
        A prediction is that of the rank with the highest memory."""
        return (0,)

    @property
    def bubble_fraction(self) -> Fraction:
        """Pipeline bubble of a step, as a multiple of a rank's forward and backward time (0:
        none)."""
        return Fraction(0)

    def resolved_config(
        self,
        launch: RunContext,
        work: Callable[[Path], Workload],
        mixed_precision: str,
        configure: Callable[[Any], None],
        folder: Path,
    ) -> ResolvedConfig:
        """Return the launch file with the numbers that a run sets, for use without Headroom.

        An engine whose launch file names other files returns them too.

        Args:
            work: makes the workload, given a swap folder. An edited model's sizes cost a process of
                their own, so it is called only when they are needed.
            mixed_precision: accelerate's word: no, bf16 or fp16.
            configure: the precision strategy's ``configure``; it takes a replacement of the
                ``Accelerator``.
            folder: destination of the files.
        """
        own = {"num_processes": launch.processes, "mixed_precision": mixed_precision}
        return ResolvedConfig({**self.engine.file.content, **own})

    # ---- trace ----

    def overlapped_phases(self, launch: RunContext) -> frozenset[str]:
        """Return the step phases in which collectives overlap with computation.
        Phases that the adapter itself records (``AllocationRecorder.work``) are left out."""
        return frozenset()

    def environment(self, launch: RunContext) -> dict[str, str]:
        """Return variables that accelerate's launcher would add to a rank's environment for this
        engine. They are set during the prediction."""
        return {}

    def begin(self, launch: RunContext, device: str) -> None:
        """Give the library its view of the device.
        Called after the process group exists and before ``Accelerator`` is made. ``device`` is the
        device type whose tensors represent the GPU's ("meta")."""

    def patches(
        self, launch: RunContext, recorder: AllocationRecorder
    ) -> list[contextlib.AbstractContextManager[Any]]:
        """Return contexts that replace operations which need real bytes, each with its reason.
        They are entered before the set-up and left after the last step."""
        return []

    def adapt_accelerator(self, accelerator: Any, launch: RunContext) -> None:
        """Set the new ``Accelerator``'s state to its state on GPUs."""

    def prepared(self, run: TrainingRun, recorder: AllocationRecorder) -> Callable[[], None]:
        """Record the memory that lives outside the prepared objects.
        Called between ``Engine.ready`` and the first step. The returned function is called after
        the last step."""
        return lambda: None


class SingleProcess(TraceAdapter):
    """Adapter without a process group."""

    ranks: ClassVar[bool] = False


class NoAdapter(TraceAdapter):
    """Placeholder for an engine that has no adapter."""

    def environment(self, launch: RunContext) -> dict[str, str]:
        """Refuse the trace.

        Raises:
            NoTrace: always.
        """
        name = type(self.engine).__name__
        raise NoTrace(f"the engine {name} has no adapter in harness/planner/adapters")


@functools.cache
def _copies() -> tempfile.TemporaryDirectory[str]:
    """Return a folder for copies of users' launch files, which lasts as long as this process."""
    return tempfile.TemporaryDirectory(prefix="headroom-launch-")


def launcher_arguments(file: LaunchFile, processes: int) -> tuple[Namespace, Any]:
    """Return the parsed arguments of ``accelerate launch`` for ``processes``, and the file's
    defaults."""
    from accelerate.commands import launch

    path = file.path
    if not file.own:
        path = users_launch.write(users_launch.opened(file), Path(_copies().name))
    words = ["--config_file", str(path), "--num_processes", str(processes)]
    words += ["--main_process_port", "0", "-m", "none"]
    args = launch.launch_command_parser().parse_args(words)
    args, defaults, _ = launch._validate_launch_command(args)
    return args, defaults
