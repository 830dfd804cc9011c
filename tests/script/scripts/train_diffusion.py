"""Fine-tune the transformer of a Flux pipeline as diffusers' examples do, whole or with LoRA."""

import argparse
import json
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, set_seed
from diffusers import AutoencoderKL, FluxTransformer2DModel
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel
from peft import LoraConfig
from torch.utils.data import DataLoader, Dataset
from transformers import CLIPTextModel


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--pretrained_model_name_or_path", required=True)
    parser.add_argument("--output_dir", default="out")
    parser.add_argument("--rank", type=int, help="of LoRA; the whole transformer without it")
    parser.add_argument("--max_train_steps", type=int, default=6)
    parser.add_argument("--use_ema", action="store_true")
    parser.add_argument("--validation_steps", type=int)
    parser.add_argument("--checkpointing_steps", type=int)
    parser.add_argument("--resume_from_checkpoint", action="store_true")
    parser.add_argument("--seed", type=int)
    return parser.parse_args()


class Pictures(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return 2 * torch.rand(3, 32, 32, generator=torch.Generator().manual_seed(index)) - 1


def encode_prompt(path, device):
    encoder = CLIPTextModel.from_pretrained(path, subfolder="text_encoder")
    encoder.requires_grad_(False)
    encoder.to(device)
    with torch.no_grad():
        out = encoder(torch.arange(16, device=device)[None])
    return out.last_hidden_state, out.pooler_output


def velocity(transformer, x, sigma, text):
    b, c, h, w = x.shape
    packed = x.view(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5)
    ids = torch.zeros(h // 2, w // 2, 3, device=x.device)
    ids[..., 1] += torch.arange(h // 2, device=x.device)[:, None]
    ids[..., 2] += torch.arange(w // 2, device=x.device)[None, :]
    hidden, pooled = (value.repeat(b, *[1] * (value.ndim - 1)) for value in text)
    out = transformer(
        hidden_states=packed.reshape(b, h * w // 4, 4 * c),
        timestep=sigma,
        guidance=torch.ones(b, device=x.device),
        img_ids=ids.view(-1, 3),
        txt_ids=torch.zeros(hidden.shape[1], 3, device=x.device),
        encoder_hidden_states=hidden,
        pooled_projections=pooled,
        return_dict=False,
    )[0]
    out = out.view(b, h // 2, w // 2, c, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return out.reshape(b, c, h, w)


def main():
    args = parse_args()
    accelerator = Accelerator(
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)]
    )
    if args.seed is not None:
        set_seed(args.seed)
    output = Path(args.output_dir)
    if accelerator.is_main_process:
        output.mkdir(parents=True, exist_ok=True)

    path = args.pretrained_model_name_or_path
    vae = AutoencoderKL.from_pretrained(path, subfolder="vae").to(accelerator.device)
    transformer = FluxTransformer2DModel.from_pretrained(path, subfolder="transformer")
    vae.requires_grad_(False)
    transformer.requires_grad_(args.rank is None)
    transformer.to(accelerator.device)
    if args.rank:
        targets = ["to_q", "to_k", "to_v", "to_out.0"]
        transformer.add_adapter(
            LoraConfig(r=args.rank, init_lora_weights="gaussian", target_modules=targets)
        )

    text = encode_prompt(path, accelerator.device)
    trained = [p for p in transformer.parameters() if p.requires_grad]
    ema = EMAModel(trained, decay=0.9) if args.use_ema else None
    optimizer = torch.optim.AdamW(trained, lr=1e-3, weight_decay=1e-4)
    pictures = Pictures()
    loader = DataLoader(pictures, batch_size=1, shuffle=True)
    lr_scheduler = get_scheduler(
        "constant_with_warmup", optimizer=optimizer, num_warmup_steps=2 * accelerator.num_processes
    )
    transformer, optimizer, loader, lr_scheduler = accelerator.prepare(
        transformer, optimizer, loader, lr_scheduler
    )
    if ema is not None:
        ema.to(accelerator.device)

    global_step = 0
    if args.resume_from_checkpoint:
        saved = sorted(output.glob("checkpoint-*"))[-1]
        accelerator.load_state(saved)
        global_step = int(saved.name.split("-")[1])

    def denoise(pixels):
        with torch.no_grad():
            latents = vae.encode(pixels).latent_dist.sample()
        latents = (latents - vae.config.shift_factor) * vae.config.scaling_factor
        noise = torch.randn_like(latents)
        sigma = torch.sigmoid(torch.randn(len(latents), device=latents.device))
        noisy = torch.lerp(latents, noise, sigma.view(-1, 1, 1, 1))
        out = velocity(transformer, noisy, sigma, text)
        return (out - (noise - latents)).square().mean()

    def validate():
        transformer.eval()
        with torch.no_grad():
            pixels = torch.stack([pictures[n] for n in range(2)])
            accelerator.print("validation loss", denoise(pixels.to(accelerator.device)))
        transformer.train()

    log = []
    transformer.train()
    while global_step < args.max_train_steps:
        for pixels in loader:
            with accelerator.accumulate([transformer]):
                loss = denoise(pixels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(transformer.parameters(), 1.0)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()

            if accelerator.sync_gradients:
                if ema is not None:
                    ema.step(p for p in transformer.parameters() if p.requires_grad)
                global_step += 1
                saves = args.checkpointing_steps and global_step % args.checkpointing_steps == 0
                if accelerator.is_main_process and saves:
                    accelerator.save_state(output / f"checkpoint-{global_step}")
                if args.validation_steps and global_step % args.validation_steps == 0:
                    validate()
            log.append({"step": global_step, "loss": loss.detach().item()})
            if global_step >= args.max_train_steps:
                break

    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        (output / "log.json").write_text(json.dumps(log))
        accelerator.unwrap_model(transformer).save_pretrained(output / "transformer")
    accelerator.end_training()


if __name__ == "__main__":
    main()
