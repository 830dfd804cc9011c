"""Spec of one run: every setting that decides the computation."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from harness import ROOT
from harness.phases import PLANNED, planned
from strategies.base import BadInput
from strategies.workloads import SAMPLE, TRAIN, WORKLOADS

INITS = ("awake", "adaln_zero")
OBJECTIVES = ("epsilon", "flow", "velocity", "own", "masked")
DEVICES = ("cpu", "cuda")
IN_FOLDERS = ("latents",)
"""Data sources that are folders."""
LATER = {"config": "", "set": "", "resolution": "", "frames": 0, "text": 0, "nodes": 1}
LATER |= {"workload": TRAIN, "weights": "", "sampler_steps": 0, "cfg_scale": 0.0}
LATER |= {"phases": ""}
"""Fields added after results were recorded, with their defaults."""
SAMPLER_STEPS, CFG_SCALE = 8, 2.0
"""Defaults of a sampling run."""


class SpecError(BadInput):
    """A spec cannot run; the message names the field, its value and a remedy."""


OF_MODEL = "the model's own"
"""Default, in words, of an option that shapes a public model."""


def _option(default: Any, text: str, usual: str = "") -> Any:
    return dataclasses.field(default=default, metadata={"help": text, "usual": usual})


MOST = {
    "processes": 2**16,
    "nodes": 2**13,
    "global_batch": 2**24,
    "per_process_batch": 2**16,
    "steps": 10**7,
    "warmup": 10**6,
    "frames": 10**4,
    "text": 10**6,
    "repeat": 1000,
    "noise_floor": 100,
    "timeout_seconds": 10**7,
    "seed": 2**63 - 1,  # that every generator accepts
}
"""Setting -> the largest value that is no mistake. Some code takes time or memory for each."""


def check_sizes(given: Mapping[str, Any], mark: str = "") -> None:
    """Refuse numbers above ``MOST``, by a SpecError with ``mark`` before the setting's name."""
    for name, most in MOST.items():
        value = given.get(name)
        if isinstance(value, (int, float)) and not value <= most:
            where = f"{mark}{name.replace('_', '-') if mark else name}"
            raise SpecError(f"{name} is {value}; give {where} at most {most}")


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One run. Rows of a suite differ only in ``recipe`` (and ``processes`` for ``single``)."""

    ENDED: ClassVar = ("before", "world")

    recipe: str = dataclasses.field(metadata={"help": "strategies joined by +, as in zero3+bf16"})
    model: str = _option(
        "DiT-S/4",
        "model: DiT-S/4, with sizes as DiT-S/4:depth=24, or over tokens as "
        "DiT-S/4:tokens=8192; or a public model, diffusers:CLASS, FILE.py:CLASS or "
        "FILE.py:FUNCTION (docs/reference/models.md)",
    )
    config: str = _option("", "with diffusers:CLASS: config.json of the model", OF_MODEL)
    set: str = _option(
        "",
        "with a public model: sizes that replace its configuration's, such as num_layers=2",
        OF_MODEL,
    )
    resolution: str = _option(
        "", "with a public model: pixels, such as 1024 or HEIGHTxWIDTH", OF_MODEL
    )
    frames: int = _option(0, "with a public video model: frames", OF_MODEL)
    text: int = _option(0, "with a public model: tokens of a text", OF_MODEL)
    data: str = _option(
        "digits",
        "digits, synthetic[:SIZE], latents:FOLDER, vae[:PIXELS]; a public model: synthetic",
    )
    objective: str = _option("epsilon", "epsilon (DiT), flow (SiT), velocity, masked, own")
    init: str = _option(
        "awake", "initial weights: awake, or adaln_zero as in the reference training"
    )
    global_batch: int = _option(16, "samples in one optimizer step, over all processes")
    steps: int = _option(8, "timed optimizer steps")
    warmup: int = _option(2, "optimizer steps before memory is read and time is measured")
    seed: int = _option(0, "seed of weights, data order and noise")
    processes: int = _option(1, "processes, one on each GPU if there are GPUs")
    nodes: int = _option(1, "machines, each with the same number of processes")
    device: str = _option("cpu", "cpu or cuda")
    learning_rate: float = _option(1e-4, "AdamW's learning rate")
    weight_decay: float = _option(0.0, "AdamW's weight decay")
    beta2: float = _option(0.999, "AdamW's second beta")
    grad_clip: float = _option(0.0, "limit of the gradient norm; 0: no clipping")
    ema: float = _option(0.9999, "decay of the weight average; 0: no average")
    class_dropout: float = _option(0.1, "share of labels that training drops, for guidance")
    workload: str = _option(TRAIN, "train, or sample: draw samples from noise, in batches")
    weights: str = _option(
        "", "with sample: file of weights that train wrote (default: random weights)"
    )
    sampler_steps: int = _option(0, f"with sample: steps of the sampler (0: {SAMPLER_STEPS})")
    cfg_scale: float = _option(0.0, f"with sample: guidance scale, 1: none (0: {CFG_SCALE:g})")
    phases: str = _option(
        "", f"for plan: phases that count besides the step, of {', '.join(PLANNED)}"
    )
    repeat: int = _option(0, "index of this repetition")
    profile: bool = _option(False, "record a profiler's trace of extra steps; not ranked")
    snapshot: bool = _option(False, "record the CUDA allocator's history; not ranked")

    def check(self) -> None:
        """Refuse values that no run can use; the SpecError has field, value and remedy."""
        ones = ("processes", "nodes", "global_batch", "steps", "warmup")
        for name, low in {**dict.fromkeys(ones, 1), "seed": 0, "text": 0}.items():
            if getattr(self, name) < low:
                flag = name.replace("_", "-")
                raise SpecError(f"{name} is {getattr(self, name)}; give --{flag} at least {low}")
        check_sizes(dataclasses.asdict(self), "--")
        if self.processes % self.nodes:
            below = self.processes // self.nodes * self.nodes
            near = f"{below} or {below + self.nodes}" if below else str(self.nodes)
            raise SpecError(
                f"processes is {self.processes} and nodes is {self.nodes}: each node "
                f"needs the same number; give --processes {near}"
            )
        for name, (most, hint) in {
            "grad_clip": (float("inf"), "it cannot be negative"),
            "weight_decay": (float("inf"), "it cannot be negative"),
            "ema": (1, "give a decay in [0, 1), or 0 for no average"),
            "class_dropout": (1, "give a share in [0, 1)"),
            "beta2": (1, "give a value in [0, 1)"),
        }.items():
            if not 0 <= getattr(self, name) < most:
                raise SpecError(f"{name} is {getattr(self, name)}; {hint}")
        if not 0 < self.learning_rate < float("inf"):
            raise SpecError(f"learning_rate is {self.learning_rate}; it must be positive")
        known = {"objective": OBJECTIVES, "init": INITS, "device": DEVICES, "workload": WORKLOADS}
        for name, words in known.items():
            if getattr(self, name) not in words:
                raise SpecError(f"{name} is {getattr(self, name)!r}; one of {', '.join(words)}")
        if planned(self.phases) and (self.device != "cuda" or self.sampling):
            text = f"phases is {self.phases}, but phases are planned only for training on GPUs"
            raise SpecError(f"{text}; leave --phases out")
        if self.sampling:
            self._check_sampling()
            return
        for name in ("weights", "sampler_steps", "cfg_scale"):
            if value := getattr(self, name):
                hint = f"give --workload sample, or leave --{name.replace('_', '-')} out"
                raise SpecError(f"{name} is {value}, which only sampling uses; {hint}")

    def _check_sampling(self) -> None:
        least, fault = 2 if self.objective == "epsilon" else 1, ""
        if not 0 <= self.cfg_scale < float("inf"):
            fault = f"cfg_scale is {self.cfg_scale}; give a scale above 0 (1: no guidance)"
        elif not least <= self.drawn_steps <= 1000:
            fault = f"sampler_steps is {self.sampler_steps}; give --sampler-steps {least} to 1000"
        elif self.objective not in ("epsilon", "flow"):
            fault = f"objective is {self.objective!r}; only models of epsilon and flow draw samples"
        elif self.scale != 1 and not self.class_dropout:
            fault = "class_dropout is 0, so the model was not trained without labels, which "
            fault += "guidance needs; give --cfg-scale 1"
        elif self.profile:
            fault = "profile is for training only; leave --profile out"
        elif self.weights and not (ROOT / self.weights).is_file():
            fault = f"weights is {self.weights}, but there is no such file; train one"
        if fault:
            raise SpecError(fault)

    @property
    def sampling(self) -> bool:
        return self.workload == SAMPLE

    @property
    def drawn_steps(self) -> int:
        return self.sampler_steps or SAMPLER_STEPS

    @property
    def scale(self) -> float:
        """Return the guidance scale; 1 is no guidance."""
        return self.cfg_scale or CFG_SCALE

    @property
    def local_processes(self) -> int:
        return self.processes // self.nodes

    @property
    def recorded(self) -> bool:
        """Return whether a recording disturbs the measurements; such a run is not ranked."""
        return self.profile or self.snapshot

    def micro_batch(self, shares: int, accumulation: int) -> int:
        """Return samples per rank and pass, or name the nearest batch that divides."""
        parts = shares * accumulation
        if self.global_batch % parts:
            below = self.global_batch // parts * parts
            near = f"{below} or {below + parts}" if below else str(parts)
            raise SpecError(
                f"global_batch {self.global_batch} does not divide by {shares} processes x "
                f"{accumulation} accumulation steps; use {near}"
            )
        return self.global_batch // parts

    def to_dict(self) -> dict[str, Any]:
        """Return every field by name; newer fields only if they differ from their default."""
        found = {
            k: v for k, v in dataclasses.asdict(self).items() if k not in LATER or v != LATER[k]
        }
        return found | {"world": 0}  # names of stored runs and predictions have this old field

    @property
    def key(self) -> str:
        """Return a stable short hash of all fields; equal specs have equal keys."""
        text = json.dumps(self.to_dict(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:10]

    def arguments(self) -> list[str]:
        """Return the worker's command line: the recipe and all non-default fields."""
        words = ["--recipe", self.recipe]
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if value is True:
                words.append(f"--{f.name}")
            elif f.name != "recipe" and value != f.default:
                words += [f"--{f.name.replace('_', '-')}", str(value)]
        return words

    def __str__(self) -> str:
        return shlex.join(self.arguments())


def located(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``settings`` (fields of a spec) with absolute paths: a worker starts elsewhere."""
    absolute = dict(settings)
    kind, colon, folder = str(absolute.get("data", "")).partition(":")
    if kind in IN_FOLDERS and folder:
        absolute["data"] = f"{kind}{colon}{Path(folder).absolute()}"
    if absolute.get("config"):
        absolute["config"] = str(Path(absolute["config"]).absolute())
    if absolute.get("weights"):
        path = Path(absolute["weights"]).absolute()
        # A worker starts at the root, and a recorded command should name no folder of a machine.
        absolute["weights"] = str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)
    file, colon, name = str(absolute.get("model", "")).partition(":")
    if file.endswith(".py"):
        absolute["model"] = f"{Path(file).absolute()}{colon}{name}"
    return absolute


def model_name(text: str) -> str:
    """Return the model's name. Sizes alone, as ``CUSTOM``, change those of DiT-XL/2."""
    if "=" not in text or ":" in text:
        return located({"model": text})["model"]
    return f"DiT-XL/2:{text}"


def add_arguments(
    parser: argparse.ArgumentParser,
    *,
    leave_out: tuple[str, ...] = (),
    defaults: Mapping[str, Any] | None = None,
) -> None:
    """Add one option per spec field; None if it is not given. ``defaults`` are for the help."""
    for f in dataclasses.fields(Spec):
        if f.name in leave_out:
            continue
        text, kind = f.metadata["help"], str if f.name == "recipe" else type(f.default)
        if kind is bool:
            parser.add_argument(f"--{f.name}", action="store_true", default=None, help=text)
            continue
        usual = (defaults or {}).get(f.name, f.metadata.get("usual") or f.default)
        parser.add_argument(
            f"--{f.name.replace('_', '-')}",
            type=kind,
            required=f.name == "recipe",
            metavar=kind.__name__.upper() if kind is not str else f.name.upper(),
            help=text + ("" if f.name == "recipe" else f" (default: {usual})"),
        )


def from_arguments(arguments: argparse.Namespace, **given: Any) -> Spec:
    """Return the spec of the parsed options; ``given`` are defaults for options left out."""
    names = {f.name for f in dataclasses.fields(Spec)}
    chosen = {k: v for k, v in vars(arguments).items() if k in names and v is not None}
    return Spec(**given | chosen)
