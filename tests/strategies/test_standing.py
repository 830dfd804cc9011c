"""Stages of models that run their blocks in a forward of their own: what passes between blocks, and
all families of public models, cut and run stage by stage in one process beside the whole model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.planner.adapters import adapter_of
from harness.resolve import resolve
from harness.subjects.library import families
from strategies.engines.pipeline import cut as cutting
from strategies.engines.pipeline import stage
from strategies.engines.pipeline.schedules import dealt
from tests.made.publics import MINIATURES, miniature

FAMILIES = [name for name in MINIATURES if families.table()[name].family.stages]


class Stages:
    """A model cut into stages that run one after the other, and backward."""

    def __init__(self, subject: Any, made: Callable[[], nn.Module], homes: tuple[int, ...]) -> None:
        self.subject, self.homes = subject, homes
        self.modules = [made() for _ in range(max(homes) + 1)]
        self.cuts = [
            cutting.cut(module, subject.blocks(module), index, homes)
            for index, module in enumerate(self.modules)
        ]
        self.ways = list(map(stage.way_of, self.modules, self.cuts))
        self.passed: list[tuple[Any, Any]] = []

    def forward(self, *sample: Any) -> Tensor:
        received, outputs, out = (), (), None
        for run, home in enumerate(self.homes):
            received = tuple(tensor.detach().requires_grad_() for tensor in received)
            way = self.ways[home]

            def own(*given: Any, way=way, asked=(run, received, outputs), **named: Any) -> Any:
                return way.own(*asked, given, named)

            model = SimpleNamespace(
                __call__=own, module=self.modules[home], parameters=self.modules[home].parameters
            )
            try:
                out = self.subject.predict(Called(model), *sample)
                self.passed.append((received, None))
            except stage.Handed as left:
                self.passed.append((received, left.tensors))
                received, outputs = left.tensors, left.outputs
        return out

    def backward(self, out: Tensor) -> None:
        out.square().mean().backward()
        for (_, handed), (received, _) in zip(self.passed[-2::-1], self.passed[:0:-1], strict=True):
            gradients = [tensor.grad for tensor in received]
            assert None not in gradients, "what passes is used"
            torch.autograd.backward(handed, gradients)

    def gradients(self) -> dict[str, Tensor]:
        """Of each parameter the sum over the stages that have it."""
        found: dict[str, Tensor] = {}
        for module in self.modules:
            for name, p in module.named_parameters():
                if p.grad is not None:
                    found[name] = found.get(name, 0) + p.grad
        return found


class Called:
    """What is called as a model is."""

    def __init__(self, model: Any) -> None:
        self.model, self.module, self.parameters = model, model.module, model.parameters

    def __call__(self, *given: Any, **named: Any) -> Any:
        return vars(self.model)["__call__"](*given, **named)


def random_sample(subject: Any) -> tuple[Any, ...]:
    x, t_B, conditions = subject.example("cpu")
    torch.manual_seed(1)
    drawn = {k: torch.randn_like(v) if v.is_floating_point() else v for k, v in conditions.items()}
    return torch.randn_like(x), t_B, drawn


@pytest.mark.parametrize("name", FAMILIES)
def test_stages_of_a_family_are_together_the_whole_model(name):
    subject = resolve(miniature(name, "pp", processes=2)).subject
    made = functools.partial(subject.build, 0, "awake")
    whole, sample = made(), random_sample(subject)
    depth = len(subject.blocks(whole))
    stages = Stages(subject, made, (0, 1, 1, 0) if depth >= 4 else (0, 1))
    wanted, out = subject.predict(whole, *sample), stages.forward(*sample)
    assert out.equal(wanted)
    wanted.square().mean().backward()
    stages.backward(out)
    found, shared = stages.gradients(), stages.cuts[0].shared
    held = [{*dict(module.named_parameters())} for module in stages.modules]
    assert set.union(*held) == {*dict(whole.named_parameters())}
    assert set.intersection(*held) == shared and shared
    for name, p in whole.named_parameters():
        if p.grad is not None and p.grad.norm() > 1e-9:
            assert (found[name] - p.grad).norm() < 1e-5 * p.grad.norm(), name
    one = dict(stages.modules[0].named_parameters())
    apart = [n for n in shared if one[n].grad is not None and not found[n].allclose(one[n].grad)]
    assert apart, "without the sum over stages some gradient is another"


def test_what_a_family_cannot_do_is_refused_by_name():
    reason = str(resolve(miniature("dit-xl-2", "pp", processes=2)).refusal)
    assert "dit-xl-2 has no forward pass that can be cut" in reason and "take ddp" in reason
    with pytest.raises(cutting.Unfit, match="of a block is used outside of it"):
        cutting.passage_between(resolve(miniature("dit-xl-2", "ddp", processes=2)).subject)
    for schedule in ("zero_bubble", "zbv"):
        reason = str(resolve(miniature("flux-dev", f"pp:schedule={schedule}", processes=2)).refusal)
        assert "flux-dev does not say" in reason and "schedule=interleaved" in reason
    reason = str(
        resolve(miniature("wan2.1-1.3b", "pp:stages=3", processes=3, global_batch=12)).refusal
    )
    assert "2 blocks are fewer than 3 stages have; take stages of 2 or fewer" in reason


@pytest.mark.parametrize(("depth", "runs"), [(57, 8), (4, 4), (30, 4), (5, 2)])
def test_blocks_are_dealt_in_order_and_alike(depth, runs):
    found = dealt(depth, runs)
    assert [n for first, end in found for n in range(first, end)] == [*range(depth)]
    sizes = [end - first for first, end in found]
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("model", "text", "wanted"),
    [
        # 40 blocks of a kind: those between the ends are alike.
        ("wan2.1-14b", "pp:stages=8,micro=8", [0, 1, 7]),
        # 19 double blocks and 38 single ones: stages of 8, 7, 7, 7 and so on.
        ("flux-dev", "pp:stages=8,micro=8", [0, 1, 2, 3, 7]),
    ],
)
def test_of_many_stages_those_that_differ_are_predicted(model, text, wanted):
    asked = miniature(model.replace("14b", "1.3b"), text, processes=8, global_batch=64)
    import dataclasses

    full = dataclasses.replace(asked, model=model, set="", resolution="", frames=0, text=0)
    row = resolve(full)
    assert row.refusal is None
    data = row.launch.layout.data
    ranks = adapter_of(row.launch.engine).distinct_ranks(row.launch)
    assert [rank // data for rank in ranks] == wanted


# ---- modules of a few lines ----


class Skips(nn.Module):
    """Later blocks are given what earlier ones returned: a U of four."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.behind = nn.Linear(4, 4), nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def run(self, x: Tensor) -> Tensor:
        first, second, third, fourth = self.blocks
        one = first(x).tanh()
        two = second(one).tanh()
        three = third(two) + two
        return fourth(three) + one

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(self.run(self.before(x)))


class Twice(Skips):
    def run(self, x: Tensor) -> Tensor:
        return self.blocks[0](super().run(x))


class Backwards(Skips):
    def run(self, x: Tensor) -> Tensor:
        for block in reversed(self.blocks):
            x = block(x)
        return x


class Few(Skips):
    def run(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](x))


class Outside(Skips):
    def run(self, x: Tensor) -> Tensor:
        return super().run(x @ self.blocks[2].weight)


class Tied(Skips):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].weight = self.blocks[0].weight


class Counts(Skips):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = Argmax()


class Argmax(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.argmax(-1, keepdim=True).expand(x.shape)


def subject_of(kind: type[nn.Module]) -> Any:
    """As much of a subject as stages ask for."""
    found = SimpleNamespace(
        make=kind,
        blocks=lambda module: list(module.blocks),
        predict=lambda model, x: model(x),
        example=lambda device: (torch.zeros(1, 4, device=device),),
    )
    return found


UNFIT = {
    Twice: "its block 0 runs behind 4 others",
    Backwards: "its block 3 runs behind 0 others",
    Few: "2 of its 4 blocks run",
    Outside: "blocks.2.weight of a block is used outside of it",
    Tied: "some of its blocks share weights",
    Counts: "its block 1 returns a tensor of torch.int64",
}


@pytest.mark.parametrize("kind", UNFIT)
def test_blocks_that_cannot_be_dealt_to_stages_are_known(kind):
    subject = subject_of(kind)
    with pytest.raises(cutting.Unfit, match=UNFIT[kind]):
        cutting.taken(subject, lambda: subject.example("cpu"))


@pytest.mark.parametrize("homes", [(0, 1), (0, 1, 2, 3), (0, 1, 1, 0)])
def test_what_skips_over_stages_passes_through_them(homes):
    subject = subject_of(Skips)
    known = cutting.taken(subject, lambda: subject.example("cpu"))
    # In front of the third block: its input, and what the fourth's output is added to.
    assert known.alive == ((), ((0, 0),), ((0, 0), (1, 0)), ((0, 0), (2, 0)), ((0, 0), (3, 0))) or (
        known.alive[2] == ((0, 0), (1, 0))
    )
    assert known.early == {"before.weight", "before.bias"}

    def made() -> nn.Module:
        torch.manual_seed(0)
        module = Skips()
        module.passage = lambda: known
        return module

    whole, x = made(), torch.randn(3, 4)
    stages = Stages(subject, made, homes)
    wanted, out = whole(x), stages.forward(x)
    assert out.equal(wanted)
    wanted.square().mean().backward()
    stages.backward(out)
    found = stages.gradients()
    for name, p in whole.named_parameters():
        assert found[name].allclose(p.grad, rtol=1e-4, atol=1e-7), name
