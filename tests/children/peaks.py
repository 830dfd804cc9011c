"""Cases in forks, for process groups and patches are global to a process; the libraries are
imported once for all of them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

os.environ |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}

import deepspeed  # noqa: F401
import torch

from harness.system.capability import imported, load

LIBRARIES = [
    "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.zero.stage_1_and_2",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.export",
]
"""What an engine would import again in every fork."""


def in_forks(function: Callable[[Any], Any], cases: Iterable[Any]) -> list[Any]:
    """What ``function`` makes of each case, as JSON has it; None where a fork failed."""
    torch.set_num_threads(1)
    load(LIBRARIES)
    found = []
    for one in cases:
        into, child = os.pipe(), os.fork()
        if child == 0:
            torch.set_num_threads(1)  # as in harness.planner.tracing.forks
            before = set(sys.modules)
            with os.fdopen(into[1], "w") as pipe:
                json.dump([function(one), imported(before)], pipe)
            os._exit(0)
        os.close(into[1])
        with os.fdopen(into[0]) as pipe:
            text = pipe.read()
        os.waitpid(child, 0)
        made, names = json.loads(text) if text else (None, [])
        load(names)
        found.append(made)
    return found
