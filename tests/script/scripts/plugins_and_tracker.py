import os

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import TorchDynamoPlugin

sharded = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false") == "true"
accelerator = Accelerator(
    deepspeed_plugin=DeepSpeedPlugin() if sharded else None, dynamo_plugin=TorchDynamoPlugin(),
    log_with="tensorboard", project_dir=".",
)  # fmt: skip
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = torch.utils.data.TensorDataset(torch.randn(1024, 32), torch.randn(1024, 1))
model, optimizer, loader = accelerator.prepare(
    model, optimizer, torch.utils.data.DataLoader(data, batch_size=4)
)
accelerator.init_trackers("t08")
for x, y in loader:
    with accelerator.accumulate(model):
        loss = torch.nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        tracker = accelerator.get_tracker("tensorboard", unwrap=True)
        if accelerator.is_main_process:
            tracker.add_scalar("loss", loss.item())
