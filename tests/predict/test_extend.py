"""A deep model predicted from shallow ones against a trace of all its blocks."""

from __future__ import annotations

import functools
from collections import Counter

import pytest
import torch
from conftest import traced

from harness.planner.tracing import extend
from harness.planner.worker import predict
from harness.resolve import Resolved, resolve
from harness.spec import Spec
from harness.subjects.library import families
from strategies import CATALOG, initial
from strategies.activations.checkpoint import Checkpoint
from strategies.adapters.beside import Beside
from strategies.strategy import Strategy
from strategies.streaming.block_swap import BlockSwap
from strategies.workloads import TRAIN

pytestmark = pytest.mark.nightly

LAYERS = {
    "flux-dev": "num_layers=5,num_single_layers=7",
    "sd3.5-medium": "num_layers=10,dual_attention_layers=[0,1,2,3,4,5]",
    "pixart-sigma": "num_layers=10",
    "lumina2": "num_layers=10",
}
CASES = [
    ("flux-dev", "single+bf16_pure+lora:rank=16+checkpoint", 1, "flow"),
    ("pixart-sigma", "zero2+bf16", 8, "epsilon"),
    ("sd3.5-medium", "single+bf16_pure+lora:rank=16", 1, "flow"),
    ("lumina2", "zero3+bf16+lora:rank=16+checkpoint", 8, "flow"),
]
BYTES, POOL, UNTOLD, WORK = 0.005, 0.01, 0.10, 0.03
LAUNCHES = 0.05
"""How far tensors, the allocator's reserve (where its allocations are told from shallow models',
and where not) and the work may be off."""


def spec_of(model: str, recipe: str, ranks: int, objective: str) -> Spec:
    return Spec(
        recipe=recipe, model=model, set=LAYERS[model], objective=objective, data="synthetic",
        global_batch=ranks, processes=ranks, device="cuda", ema=0.0,
        phases="validate",
    )  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("extended")
    cases = [vars(spec_of(*case)) for case in CASES]
    each = zip(*(traced(kind, cases, folder) for kind in ("extended", "whole")), strict=True)
    return [{"extended": deep, "whole": true} for deep, true in each]


@pytest.mark.parametrize("case", range(len(CASES)), ids=lambda i: f"{CASES[i][0]}-{CASES[i][1]}")
def test_two_blocks_of_each_group_tell_of_all(case, found):
    made, whole = found[case]["extended"], found[case]["whole"]
    # ZeRO-3 gathers ahead in a forward pass, and shallow models have little to gather.
    assert -BYTES < made["denoising"] / whole["denoising"] - 1 < 0.06
    for name in ("allocated", "between"):
        assert made[name] == pytest.approx(whole[name], rel=BYTES), name
    for name in ("peak", "steady", "host"):
        assert made[name]["bytes"] == pytest.approx(whole[name]["bytes"], rel=BYTES), name
    assert max(whole["beyond"].values()) < whole["steady"]["bytes"]
    for phase in ("forward", "backward"):
        assert made["beyond"][phase] == pytest.approx(whole["beyond"][phase], rel=BYTES), phase
    # Buckets fill across blocks, so that those of one are not told; a note says so.
    assert not (CASES[case][1].startswith("single") and made["notes"])
    pool = UNTOLD if made["notes"] else POOL
    for name in ("reserved", "reserved_expandable", "least"):
        assert made[name] == pytest.approx(whole[name], rel=pool), name
    parts = sum(made["peak"]["categories"].values())
    assert parts == pytest.approx(made["peak"]["bytes"], rel=BYTES)
    for name in ("flops", "bytes", "count"):
        sums = [sum(w[name] * (1 if name == "count" else w["count"]) for w in p["work"])
                for p in (made, whole)]  # fmt: skip
        # Collectives go by buckets, which fill across blocks: their number is not a block's.
        assert sums[0] == pytest.approx(sums[1], rel=LAUNCHES if name == "count" else WORK), name


def test_a_straight_line_through_two_blocks_would_not_do(found):
    assert found[0]["extended"]["shallow"] < 0.8 * found[0]["whole"]["allocated"]


def test_a_deep_model_on_a_cpu_has_nothing_in_host_memory():
    sizes = "num_layers=10,num_attention_heads=2,attention_head_dim=32,cross_attention_dim=64"
    asked = Spec(recipe="single", model="pixart-sigma", set=sizes, resolution="64", text=8,
                 data="synthetic", global_batch=1, device="cpu")  # fmt: skip
    found = predict(resolve(asked), "flash")
    assert found.host_steady.bytes == 0 < found.steady.bytes <= found.peak.bytes


def test_a_shallow_model_is_traced_whole():
    assert extend.shallow(resolve(Spec(recipe="single", model="DiT-XL/2", device="cuda"))) == []
    few = Spec(recipe="single", model="flux-dev", set="num_layers=2,num_single_layers=3",
               data="synthetic", objective="flow", device="cuda")  # fmt: skip
    assert extend.shallow(resolve(few)) == []
    deep = extend.shallow(resolve(spec_of("sd3.5-medium", "ddp+bf16", 8, "flow")))
    assert deep[0][0] == {"dual_attention_layers": 2, "num_layers": 2}
    assert [more for _, more in deep] == [0, 2, 1]


# ---- blocks that are treated otherwise than others ----

UNLIKE = (
    "single+bf16_pure+checkpoint:share=0.5", "single+bf16_pure+checkpoint:share=0.9",
    "single+bf16_pure+checkpoint:share=0.5,spread=on",
    "single+bf16_pure+lora+block_swap:blocks=3", "zero3_offload+bf16", "pp+bf16",
    "zero2_offload+bf16", "zero3_offload+bf16", "zero3_nvme+bf16+lora",
    "single+bf16_pure+lora:blocks=first2", "single+bf16_pure+qlora:blocks=0/last2",
)  # fmt: skip
ALIKE = (
    "single+bf16", "single+bf16_pure+lora+checkpoint", "zero3+bf16+checkpoint",
    "single+bf16_pure+checkpoint:keep=products", "fsdp2+bf16_pure+dora", "fsdp2_offload+bf16",
)  # fmt: skip


def row_of(model: str, recipe: str, changes: str = "") -> Resolved:
    objective = families.find(model).family.objectives[0]
    return resolve(Spec(recipe=recipe, model=model, set=changes, objective=objective, device="cuda",
                        data="synthetic", global_batch=8, processes=1 if "single" in recipe else 2,
                        ema=0.0))  # fmt: skip


@pytest.mark.parametrize("model", families.table())
def test_a_model_is_extended_only_where_all_its_blocks_are_treated_alike(model):
    for recipe in UNLIKE:
        assert extend.shallow(row_of(model, recipe)) == [], recipe
    for recipe in ALIKE:
        assert extend.shallow(row_of(model, recipe)), recipe


@pytest.mark.parametrize(("blocks", "alike"), [("0-20/21-56", True), ("0-20/22-56", False)])
def test_adapters_in_all_blocks_by_numbers_are_alike(blocks, alike):
    row = row_of("flux-dev", f"single+bf16_pure+lora:blocks={blocks}")
    assert bool(extend.shallow(row)) == alike


def test_blocks_that_attend_twice_in_another_order_are_not_extended():
    odd = row_of("sd3.5-medium", "single+bf16", "dual_attention_layers=[0,2,5]")
    assert odd.subject.depths == {} and extend.shallow(odd) == []


Kind = tuple[object, ...]


def looks(row: Resolved, blocks: int) -> Counter[tuple[Kind, str]]:
    """((Group, how the parts say that they treat it), its modules and how often it ran forward) of
    each block of a model with so many ``blocks`` in each group, as the strategies have edited
    it, counted."""
    subject = row.subject.deep({key: min(blocks, n) for key, n in row.subject.depths.items()})
    module = initial.skeleton(subject, subject.draws(0, "drawn"))
    if any(part.reads_weights for part in row.recipe.strategies):
        with torch.device("meta"):
            module = subject.make()
    for part in row.recipe.strategies:
        part.edit_model(module, subject)
    groups = [number for number, group in enumerate(subject.groups(module)) for _ in group]
    treated = zip(*(p.by_block(len(groups)) for p in row.recipe.strategies), strict=True)
    made = [made_of(block) for block in subject.blocks(module)]
    found = zip(groups, treated, made, ran(subject.blocks(module)), strict=True)
    return Counter(((group, how), f"{what} {runs} runs") for group, how, what, runs in found)


def made_of(block: torch.nn.Module) -> list[object]:
    """The modules of a block: classes, attributes, hooks, and weights with what is to be made of
    their first values."""
    found: list[object] = []
    for name, m in block.named_modules():
        hooks = len(m._forward_hooks), len(m._forward_pre_hooks)
        found.append((name, type(m).__name__, sorted(vars(m)), hooks))
        for own, p in m.named_parameters(recurse=False):
            keep = getattr(getattr(initial.pending(p), "keep", None), "__qualname__", "")
            found.append((own, p.shape, p.dtype, p.requires_grad, keep))
    return found


def ran(blocks: list[torch.nn.Module]) -> list[int]:
    """How often each block runs forward in a forward and backward pass, through the strategies' own
    wrappers of a cheap function in its place."""
    runs: Counter[int] = Counter()

    def forward(x: torch.Tensor, place: int) -> torch.Tensor:
        runs[place] += 1
        return x.exp()

    x = torch.zeros(1, requires_grad=True)
    for place, block in enumerate(blocks):
        block.forward = functools.partial(forward, place=place)
        x = block(x)
    x.sum().backward()
    return [runs[place] for place in range(len(blocks))]


def told_apart(row: Resolved) -> list[Kind]:
    """Blocks that the strategies say they treat alike, and that are not.

    Of such blocks one kind may be more in a deeper model. A kind of which there is always the same
    number, such as Qwen-Image's last block, has no part in what is extended.
    """
    each = [looks(row, blocks) for blocks in (2, 4, 7)]
    growing = [key for key in set().union(*each) if len({found[key] for found in each}) > 1]
    return [kind for kind, count in Counter(kind for kind, _ in growing).items() if count > 1]


SOME_BLOCKS = {"checkpoint": ":share=0.4", "block_swap": ":blocks=3", "lora": ":blocks=0/3"}
EDITS = {
    name: SOME_BLOCKS.get(name, "")
    for name, kind in CATALOG.items()
    if kind.edit_model is not Strategy.edit_model and TRAIN in kind.workloads
}
"""Strategies that edit a model -> parameters by which they tell blocks apart, where some do."""


ONE_OF_EACH = {known.family.name: name for name, known in families.table().items()}
SMALL = {"sd3.5-large": "pos_embed_max_size=64"}
"""Model -> a change that keeps its blocks, where a table of positions takes seconds to make."""


@pytest.mark.parametrize("model", ONE_OF_EACH.values())
def test_every_family_is_extended_only_where_its_blocks_are_treated_alike(model):
    for name, parameters in EDITS.items():
        row = row_of(model, f"single+{name}{parameters}", SMALL.get(model, ""))
        if not row.recipe.refusal(row.launch) and extend.shallow(row):
            assert told_apart(row) == [], name


@pytest.mark.parametrize(("kind", "part"), [
    (Checkpoint, "checkpoint:share=0.4"), (BlockSwap, "block_swap:blocks=3"),
    (Beside, "oft:blocks=0/3"),
])  # fmt: skip
def test_a_strategy_that_hides_how_it_treats_blocks_is_seen(kind, part, monkeypatch):
    row = row_of("pixart-sigma", f"single+{part}")
    monkeypatch.setattr(kind, "by_block", Strategy.by_block)
    assert told_apart(row)
