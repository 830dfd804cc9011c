"""Notes below tables."""

from __future__ import annotations

from harness.report.figures import parity

MEASURED = {
    "loss": "a loss",
    "norm": "a gradient norm",
    "moment": "a moment",
    "update": "an update",
    "average": "an average",
}


def _limits() -> str:
    tight, wide = (
        ", ".join(f"{getattr(limits, m):.0e} of {words}" for m, words in MEASURED.items())
        for limits in (parity.FLOAT32, parity.WIDE)
    )
    return (
        f"Limits: in float32 on CPUs {tight} in the first {parity.EARLY_STEPS} steps. On "
        f"GPUs: {parity.SLACK:g} times the distance between repetitions of the reference. "
        f"Otherwise: {wide}."
    ).replace("e-0", "e-")


RECORDED_NOTE = (
    "Recorded with --profile or --snapshot: the recording costs time and memory, so these runs are "
    "not ranked. Open *.pt.trace.json.gz in Perfetto (ui.perfetto.dev), chrome://tracing or "
    "TensorBoard, snapshot.rank*.pickle in pytorch.org/memory_viz."
)
NOTES = {
    "ranking": "#: rank by speed; a range if the noise leaves several to the row. Samples/s: "
    "global batch over the median step, of the whole job. x ref: samples/s relative to the "
    "reference, an interval if the noise does not tell them apart; 'same' if all of it lies within "
    "the noise floor. Peak: live tensors on the fullest device at the fullest instant of a step. "
    "Needs (GPU): free memory that the device must have for the whole run. vs ref %: change of "
    "Needs, without a GPU of Peak. Loss vs ref: 'equal' within rounding; 'by design' if the recipe "
    "changes the computation. Front: no other row is both faster and smaller. Noisy: (p90 - p10) / "
    "median above 20 %, or medians of repetitions more than 10 % apart. On host: tensors in host "
    "memory. Resident: high-water mark of one process, with libraries and set-up.",
    "phases": (
        "Highest of all ranks in each phase, before the timed steps. On a GPU: live tensors "
        "by the caching allocator. Without a GPU: the resident mark above the baseline, "
        "which is not Peak. Steady is the step after the warm-up; forward, backward and "
        "optimizer are from the step after that. Colour: the share of the table's highest "
        "value."
    ),
    "split": (
        "Alive at the traced peak of one step on the fullest rank. EMA: the average, and "
        "everything else that a strategy keeps beside the model (masks, gradients not sent "
        "yet). Workspace: temporaries, buckets, kernel scratch. Without a GPU the traced "
        "peak is the Peak. Untraced: bytes that the meter counted in the steps (a GPU's "
        "allocator, or the resident mark) beyond the traced tensors on device and host. It "
        "is negative if the meter counted less."
    ),
    "time": (
        "Each step counts as its slowest rank's. On CPUs the timed steps use glibc's default "
        "heap, and the steps whose memory is read use one that returns freed memory at once. "
        "Disturbed: other work held 10 % of the cores or more, and less than 25 % were idle. "
        "Also disturbed: a step 10 % longer than the row's fastest, with a smaller share of "
        "the cores or far more forced switches. Set-up: import to prepared; warm-up and "
        "compilation are not timed steps. Compile: time of torch.compile within the warm-up, "
        "from an empty cache."
    ),
    "parity": (
        "Distance: the largest step's |a - b| / |b| to the reference row. For updates it is that "
        "of the block that is furthest away, by a few signed sums of the changes. A row that must "
        f"not change the computation DIFFERS beyond what rounding explains. {_limits()}"
    ),
    "predicted": (
        "Predicted by tracing the same set-up and step without memory, on this machine, in a "
        "separate process. Step: live tensors at the peak of one later step, against the run's own "
        "trace (rank 0), which is not an independent measure. Run: the whole run with set-up, "
        "against an independent measure: the allocator's highest phase on a GPU, else Resident."
    ),
    "effects": (
        "Two rows that differ in one part only, and its effect on speed and on the memory "
        "that rows are ranked by. An interval: the noise does not tell the two speeds apart."
    ),
}
"""Key of a table -> the note below it."""
