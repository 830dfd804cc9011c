import torch
from accelerate import Accelerator

torch.manual_seed(1)
accelerator = Accelerator()
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
trained = filter(lambda p: p.requires_grad, model.parameters())
optimizer = torch.optim.AdamW(trained, lr=1e-3)
data = torch.utils.data.TensorDataset(torch.randn(512, 32), torch.randn(512, 1))
loader = torch.utils.data.DataLoader(data, batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for _ in range(4):
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(trained, 1.0)  # nothing is left in it
            optimizer.step()
            optimizer.zero_grad()
