"""Notes below tables, and the glossary of the HTML report."""

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
GLOSSARY = (
    ("Peak", "Live tensors on the fullest device at the fullest instant of a training step. On a "
     "GPU the caching allocator counts them (max_memory_allocated). Without a GPU a trace of one "
     "step does. A step that cannot be traced (compiled graphs) has none there."),
    ("Needs", "Free memory that a device must have for the whole run, set-up included. On a GPU: "
     "the largest of allocated, reserved and process memory. Without one: Peak. Rows are ranked "
     "by it."),
    ("On host", "Tensors in host memory at their fullest instant, which are not in Peak. On a GPU "
     "their device tells. Without one the lists of the engine or strategy that keeps them do."),
    ("Resident", "Without a GPU: the kernel's high-water mark of a process above its baseline, in "
     "any phase. It includes tensors of both placements, libraries' heap, and set-up."),
    ("Reserved", "GPU only: what the allocator took from the device. Reserved minus peak is cache "
     "and fragmentation."),
    ("Process", "The device's own count for the process, as nvidia-smi shows it: reserved memory, "
     "context, communication and library workspaces. It is sampled in steps that are not timed. "
     "Without a GPU: the plain resident mark."),
    ("Predicted need", "The least memory that the row was predicted to run in, with CUDA context, "
     "libraries and communication. For the host: the tensors of all processes."),
    ("Host, all", "Resident high-water mark of all processes of the run together. Offloaded "
     "optimizer state is in it."),
    ("Workspace, untraced", "Workspace: traced bytes of no other category, such as temporaries, "
     "communication buckets and kernel scratch. Untraced: what the meter counted beyond the "
     "traced tensors. It is negative if the meter counted less."),
    ("Samples/s", "Global batch over the median step, of the whole job and not of one device."),
    ("Disturbed", "Timed steps during which other work held the cores, or which took longer than "
     "the row's fastest without working more, by the kernel's counts. They stay in the median: "
     "measure again on a quieter machine."),
    ("x ref, vs ref %", "Samples/s relative to the reference row, and the change of its needs. "
     "An interval of ratios: the noise does not tell the two apart, which does not make them "
     "equal. Same: the whole interval lies within the noise floor."),
    ("Noise floor, #", "The difference that equal rows may show: 95 % lie within, by Student's t, "
     "from rows that were measured more than once. It is at least what the spread of the steps "
     "explains. #: the best and the worst rank that the noise leaves to a row."),
    ("MFU", "The model's FLOPs a second on each device, over its dense peak at the type the row "
     "computes in. Recomputation does not count as work."),
    ("Loss vs ref", "Equal: no loss or gradient norm of a step is further from the reference's "
     "than rounding explains (limits: below the losses). By design: the recipe changes the "
     "computation, and the distance is shown."),
    ("Samples vs ref", "Rows that draw samples: equal within rounding, or the distance of their "
     "latents to the reference's, relative to its norm."),
    ("Latency of one", "Seconds from noise to a sample that is drawn alone: the median of three."),
    ("Void", "The audit found other work than the spec asks for, so the row is not ranked."),
)  # fmt: skip
"""(head or heads, meaning), in the order of a reader's first questions."""
