"""Ask from Python: what fits a card, what a loop of your own takes, and what was measured before.

    python docs/examples/library.py OUT

It plans from records, which needs no torch, then measures a small loop with accelerate into OUT.
"""

import sys

from harness.api import load_results, measured, plan

GIB = 2**30

# %% Which recipes fit a card? The answers come first.
rows = plan("flux-dev", "RTX-4090")
for row in rows[:3]:
    need = f"{row.need_bytes / GIB:.1f} GiB" if row.need_bytes else row.why
    print(f"{row.recipe}: {row.verdict}, {need}")

# %% One recipe: does it fit?
(row,) = plan("flux-dev", "RTX-4090", recipes=["single+bf16_pure+qlora:rank=16+checkpoint"])
print(row.verdict, row.samples_per_second)

# %% What does a loop of my own take? Run this as it stands, or under `accelerate launch`.
import torch  # noqa: E402 (planning needs none)
from accelerate import Accelerator  # noqa: E402

accelerator = Accelerator(cpu=True)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 1))
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
out = sys.argv[1]
with measured(accelerator, out, warmup=2, steps=4, name="my loop"):
    while True:
        accelerator.backward(model(torch.randn(16, 64)).square().mean())
        optimizer.step()
        optimizer.zero_grad()

# %% What was measured, here or by `headroom run`?
for result in load_results(out):
    print(result.spec.recipe, result.status.value, f"{result.ranks[0].step_seconds[-1]:.4f} s")
