"""How a frozen model is stored: as floats of one type, or its blocks' linear layers packed.

Imports torch: import it where torch is there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from strategies import initial
from strategies.base import demand
from strategies.evidence.stored import bytes_of
from strategies.subject import Subject

__all__ = ["pack", "stored_facts"]

FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def pack(module: nn.Module, subject: Subject, store: str) -> None:
    """Have ``module``, which may have no values yet, stored as ``store`` says."""
    if store in FLOATS:
        initial.cast(module, FLOATS[store])
    elif store == "int8":
        from strategies.adapters.coded import code

        code(module, subject.linears, "int8")
    else:
        from strategies.adapters.nf4 import quantize

        quantize(module, subject.linears)


def stored_facts(
    module: nn.Module, subject: Subject, store: str, weights: Iterable[Tensor]
) -> dict[str, Any]:
    """The bytes of its ``weights``, and that they are what ``store`` says.

    Raises:
        NotInForce: they are stored in another way.
    """
    kinds = {p.dtype for p in module.parameters() if p.is_floating_point()}
    wanted = FLOATS.get(store, torch.float32)
    demand(kinds == {wanted}, f"it is stored in {kinds}, not {wanted}")
    elements, size = subject.parameters, bytes_of(weights)
    facts = {"elements": elements, "bytes": size, "stored": store}
    if store == "int8":
        from strategies.adapters.coded import coded_facts

        return facts | coded_facts(module, len(subject.linears), "int8")
    if store == "nf4":
        from strategies.adapters.nf4 import packed_facts

        return facts | packed_facts(module)
    most = elements * wanted.itemsize
    demand(size == most, f"{size} bytes hold {elements} weights, not {most}")
    return facts
