"""The page on a loop of one's own: its blocks run in order on a small Flux."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any
from unittest import mock

import bitsandbytes
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from diffusers import FluxTransformer2DModel
from safetensors.torch import load_file

from harness import ROOT

PAGE = ROOT / "docs/how-to/own-loop.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.S | re.M)
SIZES = {
    "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2,
    "joint_attention_dim": 32, "pooled_projection_dim": 16, "axes_dims_rope": (4, 6, 6),
    "in_channels": 16,
}  # fmt: skip
STEPS = 3


def sample(seed: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(seed)
    return {
        "hidden_states": torch.randn(1, 16, 16, generator=draw).to(dtype),
        "encoder_hidden_states": torch.randn(1, 8, 32, generator=draw).to(dtype),
        "pooled_projections": torch.randn(1, 16, generator=draw).to(dtype),
        "timestep": torch.tensor([0.5], dtype=dtype),
        "guidance": torch.tensor([1.0], dtype=dtype),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(8, 3),
    }


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> Iterator[dict[str, Any]]:
    """What the blocks leave; graphs are run by torch's operators, and each loss is kept."""
    tmp_path = tmp_path_factory.mktemp("own")
    torch.manual_seed(0)
    small = FluxTransformer2DModel(**SIZES, guidance_embeds=True)
    small.save_pretrained(tmp_path / "model" / "transformer")
    batches = [(sample(0), sample(1)["hidden_states"])] * STEPS
    losses: list[float] = []
    backward = Accelerator.backward

    def seen(self: Accelerator, loss: torch.Tensor) -> None:
        losses.append(loss.item())
        backward(self, loss)

    space = {"model": tmp_path / "model", "out": tmp_path / "out", "batches": batches}
    with mock.patch.object(Accelerator, "backward", seen):
        for block in BLOCKS:
            exec(block.replace("_blocks()", '_blocks(backend="aot_eager")'), space)
    yield space | {"losses": losses}
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    torch._dynamo.reset()


def test_what_the_blocks_are_for_is_in_force(ran):
    inner = ran["optimizer"].optimizer
    assert isinstance(inner, bitsandbytes.optim.AdamW8bit)
    assert {state["state1"].dtype for state in inner.state.values()} <= {torch.uint8, torch.float32}
    assert {p.dtype for p in ran["trained"]} == {torch.float32}
    frozen = [p for p in ran["bare"].parameters() if not p.requires_grad]
    assert {p.dtype for p in frozen} == {torch.bfloat16}
    assert ran["bare"].gradient_checkpointing
    blocks = [*ran["bare"].transformer_blocks, *ran["bare"].single_transformer_blocks]
    assert all(block._compiled_call_impl is not None for block in blocks)


def test_the_blocks_train_save_and_load_back(ran):
    assert len(BLOCKS) == 10 and len(ran["losses"]) == STEPS
    assert ran["losses"][-1] < ran["losses"][0], "it learns"
    state = load_file(next(ran["out"].glob("*.safetensors")))
    up = [name for name in state if "lora_B" in name]
    assert up and all(state[name].abs().sum() > 0 for name in up), "keys of trained adapters"
    # The file has the average, and the model its own weights again.
    bare, again = ran["bare"].eval(), ran["again"].eval()
    again.to(torch.bfloat16)
    with torch.no_grad():
        plain = again(**sample(2), return_dict=False)[0]
        ran["average"].copy_to(ran["trained"])
        bare.to(torch.bfloat16)
        averaged = bare(**sample(2), return_dict=False)[0]
    assert torch.equal(plain, averaged)
    fresh = FluxTransformer2DModel.from_pretrained(
        ran["model"], subfolder="transformer", torch_dtype=torch.bfloat16
    )
    with torch.no_grad():
        assert not torch.equal(plain, fresh.eval()(**sample(2), return_dict=False)[0])
