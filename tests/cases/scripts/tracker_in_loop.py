import torch
from accelerate import Accelerator

torch.manual_seed(1)
accelerator = Accelerator(log_with="tensorboard", project_dir=".")
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = torch.utils.data.TensorDataset(torch.randn(512, 32), torch.randn(512, 1))
loader = torch.utils.data.DataLoader(data, batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.init_trackers("t08")
for x, y in loader:
    loss = torch.nn.functional.mse_loss(model(x), y)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.get_tracker("tensorboard", unwrap=True).add_scalar("loss", loss.item())
