"""The real worker, and one more look when its evidence has been collected.

Started by accelerate instead of ``harness.train``, with the same words. Beside ``result.json`` it
leaves what this run says to the launch of every *other* sharding strategy (``crossed.json``), what
the replicas say once one of them drifts (ddp), and the averaged weights put together (``ema.pt``).
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import torch

from harness import train
from harness.worker import measure
from strategies import CATALOG, sharding
from strategies.base import NotInForce
from strategies.engine import Trained

FOLDER = Path(sys.argv[sys.argv.index("--out") + 1])


def answer(name: str, trained: Trained) -> str:
    """What the evidence of sharding strategy ``name`` finds in this run."""
    try:
        CATALOG[name]().evidence(trained)
    except NotInForce as error:
        return f"NotInForce: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "shown"


def crossed(trained: Trained) -> dict[str, str]:
    """Answers to each launch; all ranks ask in the same order, since some answers communicate."""
    found = {}
    for name in sharding.sharding_kinds():
        launch = CATALOG[name].launch("cpu", trained.launch.processes, trained.subject)
        found[name] = answer(name, dataclasses.replace(trained, launch=launch))
    if "replicas" in trained.launch.traits:
        with torch.no_grad():
            next(trained.module.parameters()).flatten()[0] += trained.accelerator.process_index
        found["drifted"] = answer(trained.launch.sharding, trained)
    return found


def observe(resolved: Any, trained: Trained) -> Any:
    """Stands in for ``collect_evidence``: its answer, and the further look after it."""
    collected = real(resolved, trained)
    average = trained.attached.get("ema")
    state = average.full_state() if average else None
    found = crossed(trained)
    rank = trained.accelerator.process_index
    (FOLDER / f"crossed{rank}.json").write_text(json.dumps(found))
    if rank == 0:
        torch.save(state, FOLDER / "ema.pt")
    return collected


if __name__ == "__main__":
    real, measure.collect_evidence = measure.collect_evidence, observe
    sys.exit(train.main())
