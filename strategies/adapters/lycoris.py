"""Other adapters of peft on frozen linear layers, a row each: lokr, loha, oft."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass
from typing import Any, ClassVar

from strategies.adapters.beside import Beside, adapted, add_adapters, own
from strategies.base import demand
from strategies.engine import TrainingRun
from strategies.subject import Subject


@dataclass(frozen=True, kw_only=True)
class Row:
    """One kind: peft's configuration, and what it is made of.

    ``fields``: parameter -> (default, least value). ``silent``: as ``Beside.silent``. ``products``:
    its layers multiply parameters of their own in ``forward``.
    """

    config: str
    given: Callable[[Any], dict[str, Any]]
    silent: str
    about: str
    source: str
    fields: Mapping[str, tuple[int, int]]
    products: bool = True


LIKE_LORA = "``targets``, ``blocks``, ``dtype`` and ``reach`` are ``lora``'s."
WHOLE = f"""In each forward pass peft computes the whole change of a weight. It is kept for
    backward, and is as large as the weight. {LIKE_LORA}"""
TABLE = {
    "lokr": Row(
        config="LoKrConfig",
        given=lambda p: {"r": p.rank, "alpha": p.rank, "decompose_factor": p.factor},
        silent="lokr_w1",
        about=f"""Trains Kronecker products beside frozen linear layers.

    The change of a weight is the Kronecker product of a small matrix and a large one. The large one
    is a product of two matrices of ``rank``; it is whole if ``rank`` is at least half of its longer
    side. ``factor`` divides each side of the weight; the small matrix has that size. ``factor=-1``
    divides each side near its root.

    {WHOLE}""",
        source="Yeh et al. 2023, LyCORIS (arXiv:2309.14859); peft",
        fields={"rank": (8, 1), "factor": (-1, 1)},
    ),
    "loha": Row(
        config="LoHaConfig",
        given=lambda p: {"r": p.rank, "alpha": p.rank},
        silent="hada_w2_b",
        about=f"""Trains Hadamard products beside frozen linear layers.

    The change of a weight is the elementwise product of two products of matrices of ``rank``. Its
    rank is up to the square of ``rank``.

    {WHOLE}""",
        source="Hyeon-Woo et al. 2021, FedPara (arXiv:2108.06098); peft",
        fields={"rank": (8, 1)},
    ),
    "oft": Row(
        config="OFTConfig",
        given=lambda p: {"oft_block_size": p.size},
        silent="oft_R",
        about=f"""Trains rotations of the inputs of frozen linear layers.

    The features of an input are cut into groups of ``size``, and each group is multiplied by an
    orthogonal matrix. If ``size`` does not divide a layer's features, peft takes the nearest number
    that does. {LIKE_LORA}""",
        source="Qiu et al. 2023, OFT (arXiv:2306.07280); Qiu et al. 2025, OFTv2 "
        "(arXiv:2506.19847); peft",
        fields={"size": (32, 2)},
        products=False,
    ),
}


class _Below:
    """Dropout of 0 in a prediction, where peft's random number has no value to compare."""

    def __lt__(self, drawn: Any) -> bool:
        return True


class FromTable(Beside):
    """Base of these adapters; ``row`` is the one of the table."""

    row: ClassVar[Row]

    def __post_init__(self) -> None:
        for name, (usual, least) in self.row.fields.items():
            value = getattr(self, name)
            if value != usual and (not isinstance(value, int) or value < least):
                raise ValueError(f"{name} is {value!r}; a whole number from {least}")
        super().__post_init__()

    def config(self) -> Any:
        """Return peft's configuration, without its target modules."""
        import peft

        return getattr(peft, self.row.config)(**self.row.given(self))

    def inject(self, module: Any, subject: Subject, names: Sequence[str], dtype: Any) -> None:
        from strategies import initial

        add_adapters(module, subject, self.config(), names, dtype)
        if initial.storageless() and self.row.products:
            for layer in adapted(module).values():
                layer.module_dropout["default"] = _Below()

    def shapes(self, trained: TrainingRun, layers: Collection[Any]) -> dict[str, Any]:
        """Check the number of elements against adapters of the same layers on meta."""
        import peft
        import torch

        config, engine = self.config(), trained.engine
        config.target_modules = r"\d+"
        with torch.device("meta"):
            plain = (torch.nn.Linear(m.in_features, m.out_features) for m in layers)
            alone = peft.inject_adapter_in_model(config, torch.nn.Sequential(*plain))
        wanted = sum(p.numel() for p in own(alone).values())
        found = sum(engine.part(p).shape.numel() for p in own(trained.module).values())
        demand(found == wanted, f"the adapters have {found} elements, expected {wanted}")
        return {"adapter_elements": found}


def adapter_kind(name: str) -> type[FromTable]:
    """Return the strategy of the table's row ``name``."""
    row = TABLE[name]
    members = {"name": name, "row": row, "silent": row.silent, "source": row.source}
    members |= {"__doc__": row.about, "__module__": __name__}
    first = [(n, int, field(default=usual)) for n, (usual, _) in row.fields.items()]
    texts = {"targets": "all", "dtype": "model", "blocks": "all", "reach": "blocks"}
    more = [(n, str, field(default=usual)) for n, usual in texts.items()]
    return make_dataclass(
        name, [*first, *more], bases=(FromTable,), namespace=members, frozen=True, kw_only=True
    )
