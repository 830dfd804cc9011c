"""The real worker, and one more look when its evidence has been collected.

Started by accelerate instead of ``harness.train``, with the same words. Beside ``result.json`` it
leaves what this run says to the launch of every *other* sharding strategy (``crossed.json``), also
where DeepSpeed's flags say what that launch asks for (``pretended.json``), and what the replicas
say once one of them drifts (ddp).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from harness import train
from harness.worker import measure
from strategies import CATALOG, parse, sharding
from strategies.base import NotInForce
from strategies.engine import TrainingRun
from strategies.evidence import states
from strategies.evidence.watching import observing

FOLDER = Path(sys.argv[sys.argv.index("--out") + 1])


def answer(name: str, run: TrainingRun) -> str:
    """What the evidence of sharding strategy ``name`` finds in this run."""
    try:
        CATALOG[name]().evidence(run)
    except NotInForce as error:
        return f"NotInForce: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "shown"


def crossed(run: TrainingRun) -> dict[str, str]:
    """Answers to each launch; all ranks ask in the same order, since some answers communicate."""
    found = {}
    for name in sharding.sharding_kinds():
        launch = parse(name).launch("cpu", run.launch.processes, run.subject)
        found[name] = answer(name, dataclasses.replace(run, launch=launch))
    if run.launch.layout.replicate > 1:
        first = run.engine.part(next(p for p in run.module.parameters() if p.requires_grad)).tensor
        with torch.no_grad():
            first.flatten()[0] += run.accelerator.process_index
        found["drifted"] = answer(run.launch.sharding, run)
    return found


def pretended(run: TrainingRun) -> dict[str, str]:
    """Answers to other launches with DeepSpeed's flags as theirs: what was done is still that."""
    found = {}
    for name in os.environ.get("PRETEND", "").split():
        launch = parse(name).launch("cpu", run.launch.processes, run.subject)
        with flags_as(launch.engine, run.model):
            found[name] = answer(name, dataclasses.replace(run, launch=launch))
    return found


@contextlib.contextmanager
def flags_as(engine: Any, ds: Any) -> Iterator[None]:
    """DeepSpeed's flags as ``engine`` asks for them."""
    host = {what: engine.place(what) != "device" for what in ("optimizer", "parameters")}
    flags = {
        "partition_gradients": engine.stage == 2,
        "cpu_offload": host["optimizer"],
        "offload_optimizer": host["optimizer"],
        "offload_param": host["parameters"],
        "swap_optimizer": engine.place("optimizer") == "nvme",
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(ds, "zero_optimization_stage", lambda: engine.stage))
        for flag, value in flags.items():
            if hasattr(ds.optimizer, flag):
                stack.enter_context(mock.patch.object(ds.optimizer, flag, value))
        yield


def watched_again(run: TrainingRun, backward: Callable[[Any], None]) -> str:
    """The answer to its own launch after one more watched ``backward`` of a loss, and no step of
    the optimizer. The method is looked up in the step: watching replaces it by one that marks."""

    def step() -> None:
        backward(states.loss_once(run))
        run.micro_steps += 1

    with observing(run, ()):
        step()
    return answer(run.launch.sharding, run)


def in_other_types(run: TrainingRun) -> str:
    """What DDP's evidence says when gradients travel in bfloat16, and no setting tells it."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    # DDP refuses this hook by its name where it was not tried; gloo takes bfloat16.
    run.model.register_comm_hook(None, lambda state, bucket: bf16_compress_hook(state, bucket))
    return watched_again(run, lambda loss: run.accelerator.backward(loss))


def kept_whole(run: TrainingRun) -> str:
    """What ZeRO-3's evidence says where weights stay whole because they are used again later."""
    coordinator = run.model.optimizer.parameter_offload.get_param_coordinator()
    reach = "_PartitionedParameterCoordinator__max_reuse_dist_in_numel"
    with mock.patch.object(coordinator, reach, 2**60):
        # accelerate's would step, too
        return watched_again(run, lambda loss: run.model.backward(loss))


def observe(run: TrainingRun) -> Any:
    """Stands in for ``collect_evidence``: its answer, and the further look after it."""
    collected = real(run)
    pretending = pretended(run)
    if "replicas" in run.launch.traits:
        pretending["bfloat16 on the wire"] = in_other_types(dataclasses.replace(run))
    found = crossed(run)
    if run.launch.sharding.startswith("zero3"):
        pretending["kept whole"] = kept_whole(dataclasses.replace(run))
    rank = run.accelerator.process_index
    (FOLDER / f"crossed{rank}.json").write_text(json.dumps(found))
    (FOLDER / f"pretended{rank}.json").write_text(json.dumps(pretending))
    return collected


if __name__ == "__main__":
    real, measure.collect_evidence = measure.collect_evidence, observe
    sys.exit(train.main())
