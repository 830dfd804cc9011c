"""Figures of other projects' memory predictors for the public rows, and the tables of
``docs/reference/other-predictors.md``.

``python -m tests.made.other_predictors`` computes the formulas of every row of memory, keeps them
in ``docs/other-predictors.json`` and writes the tables anew. ``... trace NUMBER ...`` also traces
these rows (counted from 1) with torch's MemTracker, or with FakeGPU's estimator if its checkout is
on PYTHONPATH; a row takes one to five minutes. Only these functions import torch.
"""

from __future__ import annotations

import importlib.metadata
import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from harness import ROOT
from harness.resolve import Resolved, resolve
from harness.result import write_json
from tests.made.pages import anew, line
from tests.made.public_rows import WHOLE, kept, rows

RECORD = ROOT / "docs" / "other-predictors.json"
PAGE = ROOT / "docs/reference/other-predictors.md"
GIB = 2**30
PREDICTORS = {
    "headroom": "Headroom",
    "accelerate": "accelerate",
    "deepspeed": "DeepSpeed",
    "sixteen": "16 bytes",
    "memtracker": "MemTracker",
    "fakegpu": "FakeGPU",
}
FAKEGPU = "7d5cf83"
"""Commit of github.com/FanBB2333/FakeGPU whose figures are on record; it is no package."""
NEAR, WIDE = 0.05, 0.18
ADAPTERS = frozenset({"lora", "qlora", "dora", "oft", "loha", "lokr"})
SUMMARY = ("rows of", "predictor", "rows", "median error", "worst", "within 5 %", "within 18 %")
EACH = ("run", "figure", "measured", *PREDICTORS.values())
Figures = dict[str, float]
"""Predictor -> GiB; ``elements`` and ``largest`` are counts of parameters."""


def of_memory() -> list[dict[str, Any]]:
    """Return the public rows that state a peak of memory."""
    return [row for row in rows() if {"reserved", "allocated"} & row.keys()]


def record() -> dict[str, Figures]:
    """Return the figures by the rows' names."""
    return json.loads(RECORD.read_text(encoding="utf-8"))["rows"]


# ---- formulas ----


def built(resolved: Resolved) -> Any:
    """Return the row's model on ``meta``, without adapters, in float32."""
    import torch

    with torch.device("meta"):
        return resolved.subject.make()


def accelerate_figure(model: Any, dtype: str) -> float:
    """Return accelerate's "Training using Adam", as ``accelerate estimate-memory`` prints it.

    Source: accelerate 1.15, commands/estimate.py, gather_data and estimate_command.
    """
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    total, _ = calculate_maximum_sizes(model)
    return max(estimate_training_usage(total, dtype).values()) / GIB


def deepspeed_figure(engine: str, processes: int, elements: int, largest: int) -> float:
    """Return DeepSpeed's GPU memory for model states; its ZeRO-2 on one GPU if there is no ZeRO.

    The variants that take a model count by ``data_ptr``, which is 0 for every tensor on ``meta``,
    so the counts are passed.
    """
    from deepspeed.runtime.zero import stage3, stage_1_and_2

    offload = engine.endswith("offload")
    if engine.startswith("zero3"):
        found = stage3.estimate_zero3_model_states_mem_needs(
            elements, largest, processes, 1, cpu_offload=offload, cpu_offload_params=offload
        )
    else:
        found = stage_1_and_2.estimate_zero2_model_states_mem_needs(
            elements, processes, 1, cpu_offload=offload
        )
    return found[1] / GIB


def formulas(row: Mapping[str, Any]) -> Figures:
    """Return the counts of a row's model, and what the three formulas make of them."""
    from deepspeed.runtime.zero.stage3 import model_to_params

    from tests.made.published import spec_of

    resolved = resolve(spec_of(dict(row)))
    model, names = built(resolved), _names(row)
    elements, largest = sum(p.numel() for p in model.parameters()), model_to_params(model)[1]
    wide = not names & {"bf16", "fp16", "bf16_pure"}
    processes = resolved.spec.processes
    return {
        "elements": elements,
        "largest": largest,
        "accelerate": accelerate_figure(model, "float32" if wide else "float16"),
        "deepspeed": deepspeed_figure(_engine(row), processes, elements, largest),
        "sixteen": 16 * elements / GIB,
    }


def _engine(row: Mapping[str, Any]) -> str:
    return row["run"]["recipe"].partition("+")[0]


def _names(row: Mapping[str, Any]) -> set[str]:
    return {word.partition(":")[0] for word in row["run"]["recipe"].split("+")}


# ---- traces ----


def batch(resolved: Resolved, device: str) -> tuple[Any, Any, dict[str, Any]]:
    """Return samples, times and conditions of one micro-batch."""
    import torch

    def several(one: Any) -> Any:
        return torch.cat([one] * resolved.spec.global_batch)

    x, t_B, given = resolved.subject.example(device)
    return several(x), several(t_B), {name: several(one) for name, one in given.items()}


def cast(row: Mapping[str, Any], resolved: Resolved) -> tuple[Any, Any]:
    """Return the row's model on ``meta`` in the type of its weights, and the type of autocast."""
    import torch

    names, model = _names(row), built(resolved)
    model.to(torch.bfloat16 if "bf16_pure" in names else torch.float32)
    if "checkpoint" in names:
        model.enable_gradient_checkpointing()
    model.train()
    kind = torch.float16 if "fp16" in names else torch.bfloat16
    return model, kind if "bf16_pure" not in names or "autocast=on" in str(row["run"]) else None


def loss_of(out: Any) -> Any:
    """Return a scalar loss of a model's output."""
    first = out[0] if isinstance(out, tuple | list) else out
    return first.float().square().mean()


def memtracker_figure(row: Mapping[str, Any], steps: int = 2) -> float:
    """Return MemTracker's peak of whole fake steps of AdamW, clipped at 1. Full training only.

    Raises:
        RuntimeError: the model has frozen parameters, on which MemTracker puts hooks.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    from tests.made.published import spec_of

    resolved = resolve(spec_of(dict(row)))
    model, kind = cast(row, resolved)
    with FakeTensorMode(allow_non_fake_inputs=True):
        _materialise(model)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        given, tracker = batch(resolved, "cpu"), MemTracker()
        tracker.track_external(model, optimizer)
        with tracker:
            for _ in range(steps):
                with torch.autocast("cpu", kind or torch.bfloat16, enabled=kind is not None):
                    out = resolved.subject.predict(model, *given)
                loss = loss_of(out)
                del out
                loss.backward()
                del loss
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                tracker.reset_mod_stats()  # its documentation asks for it between iterations
        found = tracker.get_tracker_snapshot("peak")
    return sum(one["Total"] for one in found.values()) / GIB


def _materialise(model: Any) -> None:
    """Replace a model's tensors on ``meta`` by fake ones of a device."""
    import torch

    for module in model.modules():
        for name, one in module._parameters.items():
            if one is not None:
                fake = torch.empty(one.shape, dtype=one.dtype)
                module._parameters[name] = torch.nn.Parameter(fake)
        for name, one in module._buffers.items():
            if one is not None:
                module._buffers[name] = torch.empty(one.shape, dtype=one.dtype)


def fakegpu_figure(row: Mapping[str, Any]) -> float:
    """Return the expected peak of FakeGPU's ``estimate_module_memory`` for a row of LoRA.

    Raises:
        RuntimeError: the row has checkpoints; torch.func has no hooks for saved tensors.
    """
    import torch
    from fakegpu.memory_estimator import estimate_module_memory

    from strategies.adapters import lora
    from tests.made.published import spec_of

    resolved = resolve(spec_of(dict(row)))
    model, kind = cast(row, resolved)
    part = next(one for one in resolved.recipe.strategies if one.name == "lora")
    width = torch.float32 if part.dtype == "fp32" else None
    model.requires_grad_(False)
    names, dropped = resolved.subject.attention_linears, row.get("dropout", 0.0)
    with torch.device("meta"):
        lora.inject(model, resolved.subject, part.rank, names, width, lora_dropout=dropped)

    class Step(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *given: Any) -> Any:
            with torch.autocast("cpu", kind or torch.bfloat16, enabled=kind is not None):
                return resolved.subject.predict(self.model, *given)

    told = estimate_module_memory(
        Step(), batch(resolved, "meta"), optimizer="adamw", target_device="cpu", loss_fn=loss_of
    )
    return told["estimated_peak_interval_bytes"]["expected"] / GIB


def traced(row: Mapping[str, Any]) -> Figures:
    """Return the figure of the tracer that can express the row, or nothing."""
    names = _names(row)
    if _engine(row) == "single" and not names & ADAPTERS:
        return {"memtracker": memtracker_figure(row)}
    # A model of one's own would be built with its weights for an example.
    own = ".py:" in row["run"]["model"]
    plain = "targets=attention" in str(row["run"]) and not names & {"checkpoint", "cast"}
    if _engine(row) == "single" and "lora" in names and plain and not own:
        return {"fakegpu": fakegpu_figure(row)}
    return {}


# ---- tables ----


def kind_of(row: Mapping[str, Any]) -> str:
    """Return the class under which the page counts a row."""
    figure = "reserved" if "reserved" in row else "allocated"
    if _engine(row).startswith("zero"):
        return f"full training under ZeRO-2 offload, {figure}"
    if _names(row) & ADAPTERS:
        kept_back = "with" if "checkpoint" in _names(row) else "without"
        return f"adapters {kept_back} checkpoints, {figure}"
    if "offload_adamw" in _names(row):
        return f"full training with AdamW in host memory, {figure}"
    return f"full training on one GPU, {figure}"


def compared(row: Mapping[str, Any], got: Figures, ours: Mapping[str, Any]) -> Figures:
    """Return each predictor's GiB for the figure that the row states."""
    figure = "reserved" if "reserved" in row else "allocated"
    theirs = {name: got[name] for name in PREDICTORS if name in got}
    return ({"headroom": ours[figure]} if figure in ours else {}) | theirs


def measured(row: Mapping[str, Any]) -> float:
    return row.get("reserved", row.get("allocated"))


def summary_table(known: Mapping[str, Figures]) -> Iterator[str]:
    """Errors of each predictor by class of row, without whole runs, which none of them claims."""
    yield line(SUMMARY)
    yield "|---|---|--:|--:|--:|--:|--:|"
    errors: dict[tuple[str, str], list[float]] = {}
    ours = kept()
    steps = [row for row in of_memory() if row.get("figure") != WHOLE]
    for row in steps:
        for name, value in compared(row, known[row["name"]], ours[row["name"]]).items():
            errors.setdefault((kind_of(row), name), []).append(value / measured(row) - 1)
    for kind in sorted({kind for kind, _ in errors}):
        for name, words in PREDICTORS.items():
            if own := errors.get((kind, name)):
                yield line((kind, words, *_counts(own)))


def _counts(errors: Sequence[float]) -> tuple[str, ...]:
    sizes = [abs(error) for error in errors]
    worst = max(errors, key=abs)
    within = (f"{sum(size <= limit for size in sizes)}" for limit in (NEAR, WIDE))
    middle = f"{100 * statistics.median(sizes):.1f} %"
    return f"{len(errors)}", middle, f"{100 * worst:+.0f} %", *within


def each_table(known: Mapping[str, Figures]) -> Iterator[str]:
    """GiB of each row by each predictor."""
    yield line(EACH)
    yield "|---|---|" + "--:|" * (1 + len(PREDICTORS))
    ours = kept()
    for row in of_memory():
        got = compared(row, known[row["name"]], ours[row["name"]])
        cells = (f"{got[name]:.2f}" if name in got else "-" for name in PREDICTORS)
        figure = kind_of(row).rpartition(", ")[2]
        figure += ", whole run" if row.get("figure") == WHOLE else ""
        yield line((row["name"], figure, f"{measured(row):.2f}", *cells))


def write_pages(known: Mapping[str, Figures]) -> None:
    page = PAGE.read_text(encoding="utf-8")
    for table in (summary_table(known), each_table(known)):
        page = anew(page, list(table))
    PAGE.write_text(page, encoding="utf-8")


def main(words: Sequence[str]) -> None:
    """Compute the formulas of all rows, and trace those of the numbers after "trace"."""
    known = record() if RECORD.exists() else {}
    numbers = {int(word) for word in words[1:]} if words[:1] == ["trace"] else set()
    found: dict[str, Figures] = {}
    for number, row in enumerate(rows(), 1):
        if {"reserved", "allocated"} & row.keys():
            old = known.get(row["name"], {})
            new = traced(row) if number in numbers else {}
            found[row["name"]] = {**old, **formulas(row), **new}
            if new:
                print(row["name"], new, flush=True)
    versions = {name: importlib.metadata.version(name) for name in ("accelerate", "deepspeed")}
    versions |= {"torch": importlib.metadata.version("torch").partition("+")[0]}
    versions |= {"fakegpu": FAKEGPU}
    write_json(RECORD, {"versions": versions, "rows": found})
    write_pages(found)


if __name__ == "__main__":
    main(sys.argv[1:])
