"""Fine-tune the transformer of a Flux or Stable Diffusion 3 pipeline, whole or with LoRA."""

import argparse
import json
import logging
import os
from pathlib import Path

import numpy
import torch
import transformers
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import DistributedDataParallelKwargs, ProjectConfiguration, set_seed
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    FluxTransformer2DModel,
    SD3Transformer2DModel,
)
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel
from peft import LoraConfig
from PIL import Image
from torch.utils.data import DataLoader, Dataset

logger = get_logger(__name__)


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--pretrained_model_name_or_path", required=True)
    parser.add_argument("--instance_data_dir", required=True)
    parser.add_argument("--prompt", default="a picture")
    parser.add_argument("--output_dir", default="out")
    parser.add_argument("--rank", type=int, help="of LoRA; the whole transformer without it")
    parser.add_argument("--resolution", type=int, default=32)
    parser.add_argument("--train_batch_size", type=int, default=1)
    parser.add_argument("--max_train_steps", type=int, default=6)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--gradient_checkpointing", action="store_true")
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--max_grad_norm", type=float, default=1.0)
    parser.add_argument("--mixed_precision", choices=["no", "fp16", "bf16"])
    parser.add_argument("--use_ema", action="store_true")
    parser.add_argument("--validation_steps", type=int)
    parser.add_argument("--checkpointing_steps", type=int)
    parser.add_argument("--resume_from_checkpoint", action="store_true")
    parser.add_argument("--seed", type=int)
    return parser.parse_args()


class Pictures(Dataset):
    def __init__(self, folder, resolution):
        self.paths = sorted(p for p in Path(folder).iterdir() if p.suffix == ".png")
        self.resolution = resolution

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        picture = Image.open(self.paths[index]).convert("RGB")
        picture = picture.resize((self.resolution, self.resolution))
        pixels = torch.from_numpy(numpy.array(picture)).permute(2, 0, 1) / 127.5 - 1.0
        return {"pixel_values": pixels}


class Flux:
    transformer, vae = FluxTransformer2DModel, AutoencoderKL
    text_encoders = ("CLIPTextModel", "T5EncoderModel")
    targets = ("to_q", "to_k", "to_v", "to_out.0")

    @staticmethod
    def embed(hidden, pooled):
        return {"encoder_hidden_states": hidden[1], "pooled_projections": pooled[0]}

    @staticmethod
    def forward(transformer, x, t, sigma, text):
        b, c, h, w = x.shape
        packed = x.view(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5)
        ids = torch.zeros(h // 2, w // 2, 3, device=x.device)
        ids[..., 1] += torch.arange(h // 2, device=x.device)[:, None]
        ids[..., 2] += torch.arange(w // 2, device=x.device)[None, :]
        out = transformer(
            hidden_states=packed.reshape(b, h * w // 4, 4 * c),
            timestep=t / 1000,
            guidance=torch.ones(b, device=x.device),
            img_ids=ids.view(-1, 3),
            txt_ids=torch.zeros(text["encoder_hidden_states"].shape[1], 3, device=x.device),
            return_dict=False,
            **text,
        )[0]
        out = out.view(b, h // 2, w // 2, c, 2, 2).permute(0, 3, 1, 4, 2, 5)
        return out.reshape(b, c, h, w)


class SD3:
    transformer, vae = SD3Transformer2DModel, AutoencoderKL
    text_encoders = (*["CLIPTextModelWithProjection"] * 2, "T5EncoderModel")
    targets = ("to_q", "to_k", "to_v", "to_out.0")

    @staticmethod
    def embed(hidden, pooled):
        width = hidden[2].shape[-1]
        clip = torch.cat(hidden[:2], dim=-1)[..., :width]
        return {
            "encoder_hidden_states": torch.cat([clip, hidden[2]], dim=1),
            "pooled_projections": torch.cat(pooled[:2], dim=-1),
        }

    @staticmethod
    def forward(transformer, x, t, sigma, text):
        out = transformer(hidden_states=x, timestep=t, return_dict=False, **text)[0]
        return x - sigma * out


FAMILIES = {"FluxPipeline": Flux, "StableDiffusion3Pipeline": SD3}


def encode_prompt(args, family, device):
    hidden, pooled = [], []
    for number, kind in enumerate(family.text_encoders):
        ending = f"_{number + 1}" if number else ""
        path = args.pretrained_model_name_or_path
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, subfolder=f"tokenizer{ending}")
        encoder = getattr(transformers, kind).from_pretrained(
            path, subfolder=f"text_encoder{ending}"
        )
        encoder.requires_grad_(False)
        encoder.to(device)
        ids = tokenizer(
            args.prompt, padding="max_length", max_length=16, truncation=True, return_tensors="pt"
        ).input_ids
        with torch.no_grad():
            out = encoder(ids.to(device))
        hidden.append(out[0] if "WithProjection" not in kind else out.last_hidden_state)
        pooled.append(out.text_embeds if "WithProjection" in kind else out.get("pooler_output"))
    return family.embed(hidden, pooled)


def main():
    args = parse_args()
    accelerator = Accelerator(
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        mixed_precision=args.mixed_precision,
        project_config=ProjectConfiguration(project_dir=args.output_dir),
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],
    )
    logging.basicConfig(level=logging.INFO)
    logger.info(accelerator.state, main_process_only=False)
    if args.seed is not None:
        set_seed(args.seed)
    if accelerator.is_main_process:
        os.makedirs(args.output_dir, exist_ok=True)

    path = args.pretrained_model_name_or_path
    index = json.loads((Path(path) / "model_index.json").read_text())
    family = FAMILIES[index["_class_name"]]
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(path, subfolder="scheduler")
    vae = family.vae.from_pretrained(path, subfolder="vae")
    transformer = family.transformer.from_pretrained(path, subfolder="transformer")
    vae.requires_grad_(False)
    transformer.requires_grad_(args.rank is None)

    weight_dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(
        accelerator.mixed_precision, torch.float32
    )
    vae.to(accelerator.device)
    transformer.to(accelerator.device, dtype=weight_dtype if args.rank else torch.float32)
    if args.gradient_checkpointing:
        transformer.enable_gradient_checkpointing()
    if args.rank:
        transformer.add_adapter(
            LoraConfig(
                r=args.rank,
                lora_alpha=args.rank,
                init_lora_weights="gaussian",
                target_modules=list(family.targets),
            )
        )
        for parameter in transformer.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()

    text = encode_prompt(args, family, accelerator.device)
    trained = [p for p in transformer.parameters() if p.requires_grad]
    ema = EMAModel(trained, decay=0.9) if args.use_ema else None
    optimizer = torch.optim.AdamW(trained, lr=args.learning_rate, weight_decay=1e-4)
    dataset = Pictures(args.instance_data_dir, args.resolution)
    loader = DataLoader(dataset, batch_size=args.train_batch_size, shuffle=True)
    lr_scheduler = get_scheduler(
        "constant_with_warmup",
        optimizer=optimizer,
        num_warmup_steps=2 * accelerator.num_processes,
        num_training_steps=args.max_train_steps * accelerator.num_processes,
    )
    transformer, optimizer, loader, lr_scheduler = accelerator.prepare(
        transformer, optimizer, loader, lr_scheduler
    )
    if ema is not None:
        ema.to(accelerator.device)

    global_step = 0
    if args.resume_from_checkpoint:
        saved = sorted(Path(args.output_dir).glob("checkpoint-*"), key=lambda p: p.name)
        accelerator.print(f"Resuming from {saved[-1].name}")
        accelerator.load_state(saved[-1])
        global_step = int(saved[-1].name.split("-")[1])

    def denoise(pixels):
        with torch.no_grad():
            latents = vae.encode(pixels.to(vae.dtype)).latent_dist.sample()
        latents = (latents - vae.config.shift_factor) * vae.config.scaling_factor
        noise = torch.randn_like(latents)
        u = torch.sigmoid(torch.randn(len(latents)))
        indices = (u * scheduler.config.num_train_timesteps).long()
        t = scheduler.timesteps[indices].to(latents.device)
        sigma = scheduler.sigmas[indices].to(latents.device)
        sigma = sigma.view(-1, *[1] * (latents.ndim - 1))
        noisy = ((1.0 - sigma) * latents + sigma * noise).to(weight_dtype)
        embeds = {
            name: value.repeat(len(latents), *[1] * (value.ndim - 1)).to(weight_dtype)
            for name, value in text.items()
        }
        out = family.forward(transformer, noisy, t, sigma, embeds)
        target = latents if family is SD3 else noise - latents
        return (out.float() - target.float()).square().mean()

    def validate():
        transformer.eval()
        with torch.no_grad():
            pixels = torch.stack([dataset[n]["pixel_values"] for n in range(2)])
            value = denoise(pixels.to(accelerator.device)).item()
        transformer.train()
        logger.info(f"validation loss {value}")

    log = []
    transformer.train()
    while global_step < args.max_train_steps:
        for batch in loader:
            models_to_accumulate = [transformer]
            with accelerator.accumulate(models_to_accumulate):
                loss = denoise(batch["pixel_values"])
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(transformer.parameters(), args.max_grad_norm)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()

            if accelerator.sync_gradients:
                if ema is not None:
                    ema.step(p for p in transformer.parameters() if p.requires_grad)
                global_step += 1
                saves = args.checkpointing_steps and global_step % args.checkpointing_steps == 0
                if accelerator.is_main_process and saves:
                    accelerator.save_state(f"{args.output_dir}/checkpoint-{global_step}")
                if args.validation_steps and global_step % args.validation_steps == 0:
                    validate()
            log.append({"step": global_step, "loss": loss.detach().item()})
            if global_step >= args.max_train_steps:
                break

    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        Path(args.output_dir, "log.json").write_text(json.dumps(log))
        accelerator.unwrap_model(transformer).save_pretrained(Path(args.output_dir, "transformer"))
    accelerator.end_training()


if __name__ == "__main__":
    main()
