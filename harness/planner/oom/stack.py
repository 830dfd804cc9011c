"""Phases of a training, read from the frames of a Python stack."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple


class Frame(NamedTuple):
    """One frame: file, line, function, and its source line if known."""

    path: str
    line: int
    name: str
    code: str = ""

    @property
    def text(self) -> str:
        """The last three parts of the path, the function and the code, for the rules."""
        path = "/".join(self.path.replace("\\", "/").split("/")[-3:])
        return f"{path} {self.name} {self.code}"

    @property
    def place(self) -> str:
        """File and line, for a table."""
        return f"{self.text.split(' ')[0]}:{self.line}"


class Phase(NamedTuple):
    """A phase in words, what its memory mostly is, and the pattern of its frames."""

    words: str
    holds: str
    pattern: str


PHASES = {
    "save": Phase(
        "while a checkpoint was saved",
        "copies for saving",
        r"\b_?(?:safe_)?save_(?:state|check|pretrained|model|ckpt|lora|file|hf)|fsdp_save|_save\b"
        r"|_full_pre_state_dict| state_dict |\.state_dict\(|torch\.save\("
        r"|Failed to clone\(\) tensor",
    ),
    "validate": Phase(
        "in validation or sampling",
        "validation",
        r"log_validation|run_validation|validation_step|evaluation_loop|prediction_step"
        r"|sample_image|generate_sample|latents_to_image|decode_latents|\.decode\(| decode\b",
    ),
    "encode": Phase(
        "while texts or samples were encoded",
        "encoders",
        r"cache_text_encoder|cache_latents|encode_prompt|text_embedding|text_encoders?\b"
        r"|vae\.encode|encode_first_stage| encode\b",
    ),
    "optimizer": Phase(
        "in the optimizer's step",
        "optimizer state",
        r"torch/optim/|accelerate/optimizer\.py|bitsandbytes/optim/|optimizer\.step|exp_avg"
        r"|_init_group|_take_model_step|initialize_optimizer_states|clip_grad|_maybe_opt_step",
    ),
    "backward": Phase(
        "in the backward pass",
        "gradients and backward",
        r"\bbackward\b|_engine_run_backward|torch::autograd|recompute_fn|unpack_hook",
    ),
    "forward": Phase(
        "in the forward pass",
        "activations",
        r"\bforward\b|_call_impl|forward_call|training_step|compute_loss",
    ),
    "load": Phase(
        "while the model was loaded or moved to the GPU",
        "model, as loaded",
        r"from_pretrained|load_state_dict|load_model|load_checkpoint|_apply\b|\.to\(|\bcuda\("
        r"|deepspeed\.initialize|_configure_distributed_model|\bprepare\b|_init_weights"
        r"|reset_parameters|partition_parameters",
    ),
}
"""Phase -> its words and pattern; the first whose pattern is found in any frame counts.
Backward runs a checkpointed block's forward, and saving moves modules, so the order matters."""
STATE = re.compile(r"_init_group|init_state|zeros_like|initialize_optimizer_states")
"""Frames of an optimizer that allocates its state, which most do in the first step."""
LIBRARY = re.compile(r"-packages/torch/|/pytorch/torch/|contextlib\.py|^\?\?|^<|\.(?:cpp|h)$")
"""Paths of torch's own frames, which say little about whose tensor it is."""


def phase_of(frames: Iterable[Frame], line: str = "") -> str:
    """Return the phase of a stack, or of a message without a stack; empty if unknown."""
    text = "\n".join([*(frame.text for frame in frames), f" {line}"])
    return next((name for name, phase in PHASES.items() if re.search(phase.pattern, text)), "")


def allocates_state(frames: Iterable[Frame]) -> bool:
    """Return True if the optimizer allocates its state in this stack."""
    return any(STATE.search(frame.text) for frame in frames)


def owner(frames: Iterable[Frame]) -> Frame | None:
    """Return the innermost frame outside of torch; the innermost of all if there is none.
    ``frames`` begin with the innermost, as in a snapshot."""
    frames = list(frames)
    own = (frame for frame in frames if not LIBRARY.search(frame.path.replace("\\", "/")))
    return next(own, frames[0] if frames else None)
