"""Workloads: training and sampling. No torch.

A strategy lists the workloads in which it has an effect (``Strategy.workloads``). In another it is
refused by its slot's reason (``conflicts.yaml``) or its own (``Strategy.idle``).
"""

TRAIN, SAMPLE = "train", "sample"
WORKLOADS = {
    TRAIN: "optimizer steps over the data",
    SAMPLE: "samples drawn from noise, by the model as it is",
}
BOTH = (TRAIN, SAMPLE)
