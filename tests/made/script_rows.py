"""Training scripts run in forks of the one start: as users run them, and as measured rows."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from harness import ROOT
from harness.launch import launch
from harness.result import Result
from harness.script.row import Script, row_of
from harness.system import process
from tests.made import one_start

SCRIPTS = ROOT / "tests" / "script" / "scripts"
ENV = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"}
MODULES = {"zero": ("deepspeed",), "fsdp": ("torch.distributed.fsdp",)}
"""What a launch file's name begins with -> what its ranks import; forks have it."""


def alone(start: one_start.Start, script: str, words: Sequence[str], out: Path) -> list[float]:
    """Return the losses that a script of ``SCRIPTS`` records in ``out``, run by itself."""
    module = f"tests.script.scripts.{script}"
    line = ["launch", "--config_file", "launch_configs/single.cpu.yaml", "-m", module]
    words = [*words, "--output_dir", str(out)]
    out.mkdir(parents=True, exist_ok=True)
    ask(start, line, words, ENV, out / "printed.txt", seconds=120)
    return [entry["loss"] for entry in json.loads((out / "log.json").read_text())]


def ask(
    start: one_start.Start,
    line: list[str],
    words: list[str],
    env: dict[str, str],
    log: Path,
    seconds: float,
) -> None:
    """Run what ``accelerate`` would start for ``line``, in forks; the module's ``words`` apart."""
    file = Path(line[line.index("--config_file") + 1]).name
    modules = [name for kind in MODULES if file.startswith(kind) for name in MODULES[kind]]
    asked = {"line": line, "env": env, "module": line[line.index("-m") + 1], "words": words}
    case = {**asked, "foreign": True, "resident": False, "copy": [], "modules": modules}
    start.case(case, log, seconds)


@contextlib.contextmanager
def rows_in_forks(begin: Callable[[], one_start.Start]) -> Iterator[None]:
    """Within this context the ranks of measured runs are forks; all else is the harness's own."""

    def run_child(
        argv: Sequence[str], *, env: dict[str, str], log: Path, **more: Any
    ) -> process.Ended:
        start, began = one_start.running(begin), time.monotonic()
        line = list(argv[argv.index("launch") :])
        ask(start, line, line[line.index("-m") + 2 :], {**env, **ENV}, log, seconds=240)
        return process.Ended(
            exit_code=int(not (log.parent / "result.json").exists()),
            signal=None,
            wall_seconds=time.monotonic() - began,
            stopped=None,
            tree_peak_bytes=0,
            tree_processes=0,
        )

    with mock.patch.object(launch.process, "run_child", run_child):
        yield


STEPS = {"warmup": 1, "steps": 1, "seed": 1, "device": "cpu"}
"""Of each row, besides the steps that a measurement takes anyway."""


def measure(
    begin: Callable[[], one_start.Start],
    recipe: str,
    out: Path,
    script: Path,
    words: Sequence[str] = (),
    *,
    clip: float | None = 1.0,
) -> Result:
    """Return the row of ``script`` under a recipe; two processes, but for ``single``.

    ``clip`` is the limit at which the script clips, as another row records it.
    """
    words = (*words, "--output_dir", str(out / "output"))
    asked = Script(path=script, arguments=words, folder=script.parent)
    row = row_of(asked, recipe, processes=2, clip=clip, **STEPS)
    with rows_in_forks(begin):
        return launch.run(row, out, timeout=200)


def edited(folder: Path, *edits: tuple[str, str], script: str = "train") -> Path:
    """Write a copy of a script with each text replaced; each is there once."""
    text = (SCRIPTS / f"{script}.py").read_text()
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{script}.py"
    path.write_text(text)
    return path


def pipeline(folder: Path) -> Path:
    """Write a miniature Flux pipeline in diffusers' format, of random weights, below ``folder``."""
    import diffusers
    import transformers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        parts = {
            "transformer": diffusers.FluxTransformer2DModel(
                in_channels=16, num_layers=2, num_single_layers=2, attention_head_dim=16,
                num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32,
                axes_dims_rope=(4, 4, 8), guidance_embeds=True,
            ),
            "vae": diffusers.AutoencoderKL(
                down_block_types=("DownEncoderBlock2D",) * 2, block_out_channels=(4, 4),
                up_block_types=("UpDecoderBlock2D",) * 2, norm_num_groups=1, shift_factor=0.06,
                scaling_factor=1.5, use_quant_conv=False, use_post_quant_conv=False,
            ),
            "text_encoder": transformers.CLIPTextModel(transformers.CLIPTextConfig(
                hidden_size=32, intermediate_size=37, num_attention_heads=4, num_hidden_layers=2,
                vocab_size=1000,
            )),
        }  # fmt: skip
        for parameter in parts["transformer"].parameters():
            if not parameter.any():  # what starts at zero would hide the gradients of others
                torch.nn.init.normal_(parameter.data, std=0.02)
    for name, part in parts.items():
        part.save_pretrained(folder / "flux" / name)
    return folder / "flux"


def diffusion(own: Path, *options: str) -> list[str]:
    """Return the words of ``train_diffusion`` for a pipeline."""
    return ["--pretrained_model_name_or_path", str(own), "--seed", "1", *options]
