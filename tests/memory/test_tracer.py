"""What the tracer of tensor storage makes of what a library allocates by itself."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from harness.memory.tracer import Tracer
from strategies.engine import Maker


class Library:
    """Flattens gradients into a bucket, and hands them to a collective that copies them."""

    def reduce(self) -> tuple[torch.Tensor, torch.Tensor]:
        bucket = torch.cat([torch.ones(96), torch.ones(32)])
        with _disable_current_modes():  # C++ allocates where no dispatch mode looks
            copy = bucket.clone()
        return bucket, copy.split(64)[0]


@pytest.mark.parametrize("phases", [(), ("backward",), ("optimizer",)])
def test_a_maker_names_what_it_makes_and_not_what_cpp_made(phases):
    tracer = Tracer({"cpu": "device"})
    tracer.enter("backward")
    with tracer.watching([Maker(Library, "reduce", "buckets", phases)]), tracer:
        kept = Library().reduce()
    assert len(kept) == 2
    named = {s.op: s.category for s in tracer.record.storages if s.size == 4 * 128}
    bucket = None if phases == ("optimizer",) else "buckets"
    assert named == {"aten.cat.default": bucket, "aten.split.Tensor": None}
