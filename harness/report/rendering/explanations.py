"""What each column means: the note below a table, and the glossary of the HTML report."""

from __future__ import annotations

__all__ = ["GLOSSARY", "NOTES"]

NOTES = {
    "ranking": "Samples/s of the whole job: global batch over the median step. Peak: the fullest "
    "rank's highest phase. Front: no other row has both a lower peak and more samples/s. Noisy: "
    "(p90 - p10) / median above 20 %, or repetitions' medians more than 10 % apart.",
    "simulated": "Peak: rank 0's highest phase; smallest first. A step's time is computation "
    "alone.",
    "phases": "Highest of all ranks in each phase. Forward, backward and optimizer are from one "
    "untimed step; steady covers the timed steps. Colour: the share of the table's highest value.",
    "split": "Alive at the traced peak of one step on the fullest rank. EMA: and what else a "
    "strategy keeps beside the model (masks, gradients not sent yet). Workspace: temporaries, "
    "buckets, kernel scratch. Untraced: the measured peak beyond the traced tensors.",
    "host": "Tensors in host memory at the traced peak of one step, on the fullest rank: offloaded "
    "state is here.",
    "time": "Each step counts as its slowest rank's. Set-up: import to prepared; warm-up and "
    "compilation are not timed steps. Compile: torch.compile's own, within the warm-up, from an "
    "empty cache.",
    "parity": "Distance: the largest step's |a - b| / |b| to the reference row. A row that must "
    "not change the computation DIFFERS beyond what rounding explains: in float32 on CPUs 1e-5 of "
    "a loss and 2e-5 of a gradient norm in the first 16 steps, else 1e-3 (GPUs may round products "
    "to TF32, and add in any order).",
    "buckets": "As the engine used them, in elements, and MiB at the type the row computes in.",
    "predicted": "Predicted by tracing the same set-up and step without memory, on this machine, "
    "in a process of its own. Step: live tensors at the peak of one later step, against the run's "
    "own trace (rank 0): not an independent measure, for one tracer makes both. Worst category: of "
    "those above 5 % of that peak, the one with the largest error; both sides name categories by "
    "the same rules. Run: the whole run, against Peak, an independent measure where an allocator "
    "or the kernel counted it; on a GPU both hold cuBLAS's workspaces; without one "
    "Peak is a process's resident high-water mark, which has libraries' scratch in it that no "
    "tensor holds. Reserved, on a GPU: in the allocator's mode that ran (expandable segments or "
    "not).",
    "types": "Read back from the trained model and its optimizer. Updated weights wider than the "
    "model's are a master copy.",
    "effects": "Two rows that differ in one part only: what adding this part did.",
}
"""Key of a table -> the note below it."""
GLOSSARY = (
    ("Peak", "The most a device's fullest rank held in any phase: on a GPU, live tensors by the "
     "caching allocator (max_memory_allocated); without one, the resident high-water mark above "
     "the baseline."),
    ("Active, reserved", "GPU only. Active: tensors and blocks waiting to be reused by a stream. "
     "Reserved: what the allocator took from the device; the difference to the peak is cache and "
     "fragmentation."),
    ("Process", "The device's own count for the process: reserved, plus context, communication "
     "and library workspaces. nvidia-smi shows this one. Without a GPU, the plain resident mark."),
    ("Needs", "What must fit: on a GPU the largest of peak, reserved and process; else the peak."),
    ("Predicted need", "The least that the row was predicted to run in, with the CUDA context, "
     "libraries and communication; of the host, the tensors of all processes."),
    ("Baseline", "What the process held before the model was built, subtracted without a GPU."),
    ("Host", "Resident high-water mark of one rank, and of all processes of the run together; "
     "offloaded optimizer state is here."),
    ("Ranks max/min", "Highest over lowest peak of the ranks: 1.00 is balanced."),
    ("Workspace, untraced", "Workspace: traced bytes of no other category: temporaries of "
     "backward and the optimizer, communication buckets, kernel scratch. Untraced: what the "
     "measured peak has beyond the traced tensors."),
    ("Samples/s", "Global batch over the median step, of the whole job, not of one device."),
    ("x ref, vs ref %", "Samples/s as a multiple of the reference row's; change of the peak."),
    ("MFU", "The model's FLOPs a second on each device, over its dense peak at the type the row "
     "computes in. Recomputation does not count as work."),
    ("Loss vs ref", "Equal: no step's loss or gradient norm is further from the reference's than "
     "rounding explains (limits: below the losses). By design: the recipe changes the computation, "
     "and how far."),
    ("Void", "The audit found other work than was asked for, so the row is not ranked."),
)  # fmt: skip
"""(head or heads, meaning), in the order of a reader's first questions."""
