"""Model families of the library: sample layouts, conditions and presets.

A class's ``forward`` does not define its sample layout: of 69 layouts 22 are packed tokens and 25
have five axes, in two orders. So a ``Family`` states it for its class, as numbers that need no
torch. The calls themselves are in ``calls``.

Shape suffixes: C channels, F frames, H height, W width of a latent; T tokens.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from harness.json_files import BadFile, read_json
from strategies.base import BadInput
from strategies.files import own_table, parse_yaml
from strategies.subject import MOST_BLOCKS

Config = Mapping[str, Any]
TOKENS = "tokens of text"
Conditions = Mapping[str, Sequence[str | int]]
"""Name of a condition -> its shape for one sample, of numbers, of ``TOKENS`` and of keys of the
configuration. Masks are all true, "y" are labels, and others are normal."""


class Space(NamedTuple):
    """Size of one sample: frames, height and width of its latent, tokens of its text."""

    frames: int
    height: int
    width: int
    text: int


@dataclass(frozen=True, kw_only=True)
class Family:
    """Facts of a class and of the call that trains it.

    ``name`` is the class, ``call`` the function in ``calls``. ``depths``: attribute with blocks ->
    key of the configuration with their number, in execution order. An attribute with an empty key
    has a fixed number of blocks, given by the key ``refiners``. ``defaults`` are the class's
    defaults of the keys that are read here. ``text`` is the key of the text's width.

    ``channels`` is the key of a sample's channels: a class can take conditions as further ones.

    ``down``: pixels per side of one element of a latent. ``every``: frames of a video per frame of
    a latent (0: images only). ``clip``: frames of a latent that the VAE encodes by themselves, the
    first of them from one frame of the video (0: all). ``sound``: latents of sound per second, and
    its channels. ``tile``: factor of every side of a latent. ``resolution``, ``frames`` and
    ``text_tokens`` are usual values.

    ``time``: the model's time argument from noise (0) to data (1): "falling" from 1 to 0, "rising"
    from 0 to 1, each also as "..._1000". A rising one predicts data minus noise, a falling one
    noise minus data. For the steps of a diffusion it is "steps".
    """

    name: str
    depths: Mapping[str, str]
    defaults: Config
    call: str = "usual"
    text: str = ""
    channels: str = "in_channels"
    refiners: str = ""
    objectives: tuple[str, ...] = ("flow",)
    time: str = "falling_1000"
    head: str = "proj_out"
    layout: str = "image"
    masked: bool = False
    pooled: str = ""
    more: Conditions | Callable[[Config, Space], Conditions] = field(default_factory=dict)
    down: int = 8
    every: int = 0
    clip: int = 0
    sound: tuple[int, int] = (0, 0)
    tile: int = 2
    resolution: str = "1024x1024"
    frames: int = 1
    text_tokens: int = 256
    unread: tuple[str, ...] = ()
    """Layers of the first group's last block that compute queries whose results are not read: their
    gradient exists and is zero."""
    stripes: str = ""
    """Way in which ranks can share a sample: "height", a stripe of each frame; "tokens", some of
    its input tokens; empty: unknown."""
    joint: bool = False
    """Whether one attention covers the tokens of sample and text, so that ranks share both. With
    cross-attention each rank has the whole text."""
    stripes_if: str = ""
    """Key of the configuration without which ranks cannot share samples."""
    whole_masks: bool = False
    """Whether the class reads values of its mask, which are all true here."""
    beside: str = ""
    """Attribute with one more module for each block, outside of it."""
    routed: bool = False
    """Whether a router sends tokens to experts; where they go, its values decide."""
    one_time: bool = False
    """Whether all samples of a forward have one time, so that it takes one sample."""
    lends: tuple[str, ...] = ()
    """Modules of blocks that the model calls outside of their block."""

    own: tuple[str, ...] = ()
    """Keys of the configuration that are of its samples: its class does not take them."""

    def value(self, config: Config, key: str) -> Any:
        """Return a number of the configuration."""
        return config.get(key, self.defaults[key])

    def shares(self, config: Config) -> bool:
        """Return whether ranks can share a sample."""
        key = self.stripes_if
        whole = not any(config.get(one) for one in self.own)
        return bool(self.stripes and whole and (not key or self.value(config, key)))

    def sample(self, config: Config, space: Space) -> tuple[int, ...]:
        """Return the shape of one sample, in the class's layout."""
        channels = self.value(config, self.channels)
        first, *others = LAYOUTS[self.layout](channels, space)
        return (first + self.sounds(space), *others)

    def sounds(self, space: Space) -> int:
        """Return the latents of a video's sound, which follow its own in a sample."""
        per_second, channels = self.sound
        return channels * round(self.frames_of(space.frames) / FPS * per_second)

    @property
    def lengths(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return (frames, frames of the latent) of the shortest video, and what makes it longer."""
        if self.clip:
            return (1 + self.every, 2), (1 + self.every * (self.clip - 1), self.clip)
        return (1, 1), (self.every, 1)

    def frames_of(self, latents: int) -> int:
        """Return the frames of a video whose latent has ``latents``."""
        (frames, shortest), (more, each) = self.lengths
        return 1 if latents == 1 else frames + (latents - shortest) // each * more

    def latents_of(self, frames: int) -> int:
        """Return the frames of the latent of a video of ``frames``; 0 if no latent has them."""
        (first, shortest), (more, each) = self.lengths
        if frames == 1 or not more:
            return int(frames == 1)
        count, rest = divmod(frames - first, more)
        return 0 if rest or count < 0 else shortest + each * count

    def conditions(self, config: Config, space: Space) -> dict[str, tuple[int, ...]]:
        """Return the shape of each condition of one sample, by name."""
        found: dict[str, Sequence[str | int]] = {"text": (TOKENS, self.text)} if self.text else {}
        if self.masked:
            found["mask"] = (TOKENS,)
        if self.pooled:
            found["pooled"] = (self.pooled,)
        found |= self.more(config, space) if callable(self.more) else self.more
        known = {**self.defaults, **config, TOKENS: space.text}
        return {
            name: tuple(known[n] if isinstance(n, str) else n for n in shape)
            for name, shape in found.items()
        }


LAYOUTS: dict[str, Callable[[int, Space], tuple[int, ...]]] = {
    "image": lambda c, s: (c, s.height, s.width),
    "video": lambda c, s: (c, s.frames, s.height, s.width),
    "frames": lambda c, s: (s.frames, c, s.height, s.width),
    "packed": lambda c, s: (s.height * s.width // 4, c),
    "tokens": lambda c, s: (s.frames * s.height * s.width, c),
    "rows": lambda c, s: (s.frames * s.height * s.width * c // ROW, ROW),
}
"""Layout of a sample -> its shape: CHW, CFHW, FCHW, tokens of 2 x 2 elements, tokens of one, and
tokens of 2 x 2 as rows as wide as a latent of sound."""

ROW = 32
"""Channels of MiniMax-H3's latents of sound."""
FPS = 24
"""Frames per second of a video with sound."""
BOTH = {"transformer_blocks": "num_layers", "single_transformer_blocks": "num_single_layers"}
QUERIES = ("attn.add_q_proj.", "attn.norm_added_q.")
ONE = {"transformer_blocks": "num_layers"}
FLUX = {"in_channels": 64, "joint_attention_dim": 4096, "num_layers": 19, "num_single_layers": 38}
KREA = {"in_channels": 64, "text_hidden_dim": 2560, "num_text_layers": 12, "num_layers": 28}

REFERENCES, MOST_REFERENCES = "references", 10
"""Key with the number of reference images of an edit, and the largest one."""
GLYPHS_AND_IMAGE = {"glyphs": (256, "text_embed_2_dim"), "glyph_mask": (256,),
                    "image": (729, "image_embed_dim")}  # fmt: skip
"""What each sample of HunyuanVideo 1.5 has beside its text, all valid: tokens of ByT5, which reads
the words to be written in the video, and of SigLIP, which sees the first frame. A prompt without
words, or a video without an image, has as many, and masks them."""
HIDREAM = {"in_channels": 64, "caption_channels": None, "llama_layers": None,
           "text_emb_dim": 2048, "num_layers": 16, "num_single_layers": 32}  # fmt: skip
HUNYUAN15 = {"in_channels": 65, "out_channels": 32, "text_embed_dim": 3584,
             "text_embed_2_dim": 1472, "image_embed_dim": 1152, "num_layers": 54}  # fmt: skip
LTX2 = {"in_channels": 128, "caption_channels": 3840, "cross_attention_dim": 4096,
        "audio_cross_attention_dim": 2048, "use_prompt_embeddings": True,
        "num_layers": 48}  # fmt: skip


def _references(config: Config, space: Space) -> Conditions:
    """Return the packed latents of an edit's reference images, each of the target's size.

    Raises:
        BadInput: no number of images.
    """
    count = config.get(REFERENCES, 0)
    if type(count) is not int or not 0 <= count <= MOST_REFERENCES:
        raise BadInput(f"set has {REFERENCES}={count}; write a number from 0 to {MOST_REFERENCES}")
    shape = LAYOUTS["packed"](config.get("in_channels", 64), space)
    return {"reference": (count * shape[0], shape[1])} if count else {}


def _for_sight_and_sound(config: Config, space: Space) -> Conditions:
    """Return LTX-2's texts of video and sound. From 2.3 on, the connectors project them to the
    widths of their cross-attention, and the transformer does not."""
    if {**LTX2, **config}["use_prompt_embeddings"]:
        return dict.fromkeys(("text", "audio_text"), (TOKENS, "caption_channels"))
    return {
        "text": (TOKENS, "cross_attention_dim"),
        "audio_text": (TOKENS, "audio_cross_attention_dim"),
    }


def _of_two_encoders(config: Config, space: Space) -> Conditions:
    """Return text of T5, and of each layer of Llama: HiDream's blocks take one layer each."""
    widths, layers = config.get("caption_channels"), config.get("llama_layers")
    if not widths or not layers:
        raise BadInput(
            "caption_channels and llama_layers have no defaults; give --config config.json"
        )
    return {"text": (TOKENS, widths[0]), "llama": (max(layers) + 1, TOKENS, widths[1])}


_ALL = [
    Family(
        name="FluxTransformer2DModel", call="flux", depths=BOTH, time="falling", layout="packed",
        defaults={**FLUX, "pooled_projection_dim": 768, "guidance_embeds": False},
        text="joint_attention_dim", pooled="pooled_projection_dim", text_tokens=512,
        stripes="tokens", joint=True,
    ),
    Family(
        name="ChromaTransformer2DModel", call="chroma", depths=BOTH, time="falling",
        layout="packed", defaults=FLUX, text="joint_attention_dim", masked=True, text_tokens=512,
    ),
    Family(
        name="Flux2Transformer2DModel", call="flux2", depths=BOTH, time="falling", layout="packed",
        defaults={"in_channels": 128, "joint_attention_dim": 15360, "guidance_embeds": True,
                  "num_layers": 8, "num_single_layers": 48},
        text="joint_attention_dim", text_tokens=512, stripes="tokens", joint=True,
    ),
    Family(
        name="SD3Transformer2DModel", depths=ONE, text="joint_attention_dim",
        defaults={"in_channels": 16, "joint_attention_dim": 4096, "pooled_projection_dim": 2048,
                  "num_layers": 18},
        pooled="pooled_projection_dim", text_tokens=333, unread=QUERIES, stripes="height",
        joint=True,
    ),
    Family(
        name="PixArtTransformer2DModel", call="pixart", depths=ONE, text="caption_channels",
        defaults={"in_channels": 4, "caption_channels": None, "num_layers": 28, "sample_size": 128,
                  "use_additional_conditions": None},
        objectives=("epsilon",), time="steps", masked=True, text_tokens=120, stripes="height",
    ),
    Family(
        name="DiTTransformer2DModel", call="dit", depths=ONE, head="proj_out_2", time="steps",
        defaults={"in_channels": 4, "num_embeds_ada_norm": 1000, "num_layers": 28},
        objectives=("epsilon",),
        more={"y": ()}, resolution="256x256", text_tokens=0,
        lends=("transformer_blocks.0.norm1.emb",),
    ),
    Family(
        name="WanTransformer3DModel", depths={"blocks": "num_layers"}, layout="video",
        defaults={"in_channels": 16, "text_dim": 4096, "num_layers": 40}, text="text_dim", every=4,
        resolution="480x832", frames=81, text_tokens=512, stripes="height",
    ),
    Family(
        name="HunyuanVideoTransformer3DModel", call="hunyuanvideo", depths=BOTH, layout="video",
        defaults={"in_channels": 16, "text_embed_dim": 4096, "pooled_projection_dim": 768,
                  "guidance_embeds": True, "num_layers": 20, "num_single_layers": 40},
        text="text_embed_dim", masked=True, pooled="pooled_projection_dim", every=4,
        resolution="512x768", frames=49, text_tokens=256,
    ),
    Family(
        name="HunyuanVideo15Transformer3DModel", call="hunyuanvideo15", depths=ONE, layout="video",
        defaults=HUNYUAN15, text="text_embed_dim", channels="out_channels", masked=True,
        more=GLYPHS_AND_IMAGE, down=16, every=4, tile=1, resolution="480x832", frames=61,
        text_tokens=1000, unread=QUERIES, whole_masks=True,
    ),
    Family(
        name="QwenImageTransformer2DModel", call="qwen", depths=ONE, time="falling",
        layout="packed", text="joint_attention_dim", masked=True, text_tokens=512,
        defaults={"in_channels": 64, "joint_attention_dim": 3584, "num_layers": 60}, unread=QUERIES,
        stripes="tokens", joint=True, more=_references, own=(REFERENCES,),
    ),
    Family(
        name="QwenImage21Transformer2DModel", call="qwen21", depths=ONE, time="falling",
        layout="tokens", text="context_in_dim", text_tokens=512, down=16,
        defaults={"in_channels": 64, "context_in_dim": 4096, "num_layers": 32},
    ),
    Family(
        name="ZImageTransformer2DModel", call="zimage", time="rising", text="cap_feat_dim",
        depths={"noise_refiner": "", "context_refiner": "", "layers": "n_layers"},
        defaults={"in_channels": 16, "cap_feat_dim": 2560, "n_layers": 30, "n_refiner_layers": 2},
        refiners="n_refiner_layers", head="", text_tokens=512,
    ),
    Family(
        name="LTXVideoTransformer3DModel", call="ltx", depths=ONE, layout="tokens", down=32,
        defaults={"in_channels": 128, "caption_channels": 4096, "num_layers": 28},
        text="caption_channels", masked=True, every=8, tile=1, resolution="512x768", frames=49,
        text_tokens=128, stripes="tokens",
    ),
    Family(
        name="CogVideoXTransformer3DModel", call="cogvideox", depths=ONE, layout="frames", every=4,
        defaults={"in_channels": 16, "text_embed_dim": 4096, "attention_head_dim": 64,
                  "use_rotary_positional_embeddings": False, "num_layers": 30,
                  "patch_size_t": None, "sample_height": 60, "sample_width": 90},
        text="text_embed_dim", objectives=("velocity",), time="steps", resolution="480x720",
        frames=49, text_tokens=226, stripes="height", joint=True,
        stripes_if="use_rotary_positional_embeddings",
    ),
    Family(
        name="CogView4Transformer2DModel", call="cogview4", depths=ONE, text="text_embed_dim",
        defaults={"in_channels": 16, "text_embed_dim": 4096, "num_layers": 30}, text_tokens=224,
    ),
    Family(
        name="MochiTransformer3DModel", depths=ONE, layout="video", every=6,
        defaults={"in_channels": 12, "text_embed_dim": 4096, "num_layers": 48},
        text="text_embed_dim", masked=True, time="rising_1000", resolution="480x848", frames=61,
        text_tokens=256, whole_masks=True, unread=("attn1.add_q_proj.", "attn1.norm_added_q."),
    ),
    Family(
        name="SanaTransformer2DModel", depths=ONE, text="caption_channels", down=32,
        defaults={"in_channels": 32, "caption_channels": 2304, "num_layers": 20}, masked=True,
        tile=1, text_tokens=300,
    ),
    Family(
        name="Lumina2Transformer2DModel", time="rising", text="cap_feat_dim",
        depths={"context_refiner": "", "noise_refiner": "", "layers": "num_layers"},
        defaults={"in_channels": 16, "cap_feat_dim": 1024, "num_layers": 26,
                  "num_refiner_layers": 2},
        refiners="num_refiner_layers", masked=True, head="", text_tokens=256, whole_masks=True,
    ),
    Family(
        name="AuraFlowTransformer2DModel", time="falling", text="joint_attention_dim",
        depths={"joint_transformer_blocks": "num_mmdit_layers",
                "single_transformer_blocks": "num_single_dit_layers"},
        defaults={"in_channels": 4, "joint_attention_dim": 2048, "num_mmdit_layers": 4,
                  "num_single_dit_layers": 32},
        text_tokens=256,
    ),
    Family(
        name="Krea2Transformer2DModel", call="krea2", depths=ONE, time="falling", layout="packed",
        defaults=KREA, text="text_hidden_dim", masked=True, head="final_layer",
        more={"text": (TOKENS, "num_text_layers", "text_hidden_dim")}, text_tokens=512,
    ),
    Family(
        name="Ideogram4Transformer2DModel", call="ideogram4", depths={"layers": "num_layers"},
        defaults={"in_channels": 128, "llm_features_dim": 53248, "num_layers": 34},
        text="llm_features_dim", time="rising", layout="packed", head="final_layer",
        text_tokens=512,
    ),
    Family(
        name="LTX2VideoTransformer3DModel", call="ltx2", depths=ONE, layout="tokens", down=32,
        defaults=LTX2, text="caption_channels", masked=True, every=8, sound=(25, 1), tile=1,
        more=_for_sight_and_sound, resolution="512x768", frames=121, text_tokens=1024,
    ),
    Family(
        name="HiDreamImageTransformer2DModel", call="hidream", defaults=HIDREAM, routed=True,
        depths={"double_stream_blocks": "num_layers", "single_stream_blocks": "num_single_layers"},
        text="caption_channels", more=_of_two_encoders, pooled="text_emb_dim", text_tokens=128,
        beside="caption_projection", head="final_layer",
    ),
    Family(
        name="MiniMaxH3Transformer3DModel", call="minimax_h3", depths=ONE, layout="rows", down=16,
        defaults={"in_channels": 24, "text_dim": 5120, "num_layers": 50}, text="text_dim",
        time="rising", every=4, clip=5, sound=(40, 2), one_time=True, resolution="768x1344",
        frames=124, text_tokens=256,
    ),
]  # fmt: skip
FAMILIES = {family.name: family for family in _ALL}
"""Class -> family."""

_SHAPES = "the shapes in its forward depend on {what}, which has no values before it runs; "
_HELP = (
    "give it as a module of your own, with shapes fixed: --model mine.py:make "
    "(docs/tutorial/your-own-model.md)"
)
REFUSED = {
    name: _SHAPES.format(what=what) + _HELP
    for name, what in {
        "GlmImageTransformer2DModel": "the positions of its prior tokens (nonzero)",
        "HunyuanVideoFramepackTransformer3DModel": "the lengths that its masks have (item)",
        "NucleusMoEImageTransformer2DModel": "where its router sends tokens (tolist)",
        "OmniGenTransformer2DModel": "the lengths of its prompts (item)",
        "WanAnimateTransformer3DModel": "the sizes of its face clips (item)",
        "WanAnimate2Transformer3DModel": "the sizes of its grids (tolist)",
    }.items()
}
"""Class -> why it cannot be trained here, with a remedy."""


# ---- presets ----
# The presets' facts are in ``presets.yaml``. Imports no torch.


PREFIX = "diffusers:"
FILE = Path(__file__).with_name("presets.yaml")
NOT_CONFIG = ("_class_name", "_diffusers_version", "_name_or_path")


@dataclass(frozen=True)
class Known:
    """One model: its class, its differences from the class's defaults, and its usual sizes.

    ``config``: key -> value. ``parameters``: elements "built" and "published", and the source
    "told"; empty if it is no preset. ``usual``: values that replace those of the family. ``hub``:
    its names on the Hugging Face Hub.
    """

    family: Family
    config: Mapping[str, Any]
    parameters: Mapping[str, Any] = field(default_factory=dict)
    usual: Mapping[str, Any] = field(default_factory=dict)
    hub: Sequence[str] = ()


@functools.cache
def table() -> dict[str, Known]:
    """Return name -> preset."""
    rows = own_table(FILE)
    return {
        name: Known(
            family=FAMILIES[row["class"]],
            config=row["config"],
            parameters=row["parameters"],
            hub=row["hub"],
            usual={k: row[k] for k in ("down", "resolution", "frames", "text") if k in row},
        )
        for name, row in rows.items()
    }


@functools.cache
def spellings(*, own: bool = True) -> dict[str, str]:
    """Return letters and digits of a Hub name, with and without its owner, and of a preset's
    ``own`` name -> preset."""
    hub = [(name, key) for key, known in table().items() for name in known.hub]
    found = {letters(text): key for name, key in hub for text in (name, tail(name))}
    return found | {letters(key): key for key in table()} if own else found


def letters(name: str) -> str:
    """Return a name's letters and digits, in lower case."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def tail(name: str) -> str:
    """Return a Hub name without its owner, or the last part of an address."""
    return name.rstrip("/").rpartition("/")[2]


def canonical(model: str) -> str:
    """Return the preset that ``model`` names, by its own name or one on the Hub; else ``model``.

    The Hub's name may have its address, or lack its owner.
    """
    dit = re.fullmatch(r"(?i:dit)-([a-zA-Z]+)(/\d)?", model)
    if dit:
        return f"DiT-{dit[1].upper()}{dit[2] or ''}"
    page = re.match(r"(https?://)?(huggingface\.co|hf\.co)/(?P<name>[^/]+/[^/]+)", model)
    name = page["name"] if page else model
    if name in table() or set(name) & set(":="):
        return model
    return spellings(own=not name.startswith("DiT")).get(letters(name), model)


def is_named(model: str) -> bool:
    """Return whether ``model`` is a name of this library's."""
    return model in table() or model.startswith(PREFIX)


def find(model: str, config: str = "", changes: str = "") -> Known:
    """Return the model of that name, with its configuration read and changed.

    Args:
        config: a config.json as the library writes it; for ``diffusers:CLASS`` only.
        changes: KEY=VALUE,KEY=VALUE that override it.

    Raises:
        BadInput: an unknown class, one that cannot be planned, an unreadable file.
    """
    if model in table():
        if config:
            raise BadInput(
                f"config is {config}, and model {model} has its own; leave --config out, or give "
                f"--model {PREFIX}CLASS"
            )
        known = table()[model]
    else:
        read = _read(config) if config else {}
        own = {key: value for key, value in read.items() if key not in NOT_CONFIG}
        known = Known(family=_family(model, read.get("_class_name", "")), config=own)
    whole = {**known.config, **values(changes)}
    for key, value in whole.items():
        if key.endswith("layers") and isinstance(value, int) and value > MOST_BLOCKS:
            raise BadInput(f"model {model}: {key} is {value}; at most {MOST_BLOCKS} blocks")
    return dataclasses.replace(known, config=whole)


def _family(model: str, written: str) -> Family:
    name = model.removeprefix(PREFIX)
    if name in REFUSED:
        raise BadInput(f"model {model} cannot be trained here: {REFUSED[name]}")
    if name not in FAMILIES:
        raise BadInput(
            f"model {model}: what {name or 'it'} is given is not known; one of "
            f"{', '.join(sorted(FAMILIES))}, or give it as a module of your own with a batch: "
            "--model mine.py:make (docs/tutorial/your-own-model.md)"
        )
    if written and written != name:
        raise BadInput(f"config is of a {written}; give --model {PREFIX}{written}")
    return FAMILIES[name]


def _read(path: str) -> dict[str, Any]:
    try:
        found = read_json(path)
    except BadFile as error:
        raise BadInput(f"config is {error}; give a model's config.json") from None
    if not isinstance(found, dict):
        raise BadInput(f"config is {path}, which holds no object; give a model's config.json")
    return found


def values(text: str) -> dict[str, Any]:
    """Parse ``num_layers=2,axes_dims_rope=[4,4,8]`` into a mapping; values are YAML's.

    Raises:
        BadInput: a part that is no KEY=VALUE.
    """
    found = {}
    for part in filter(None, re.split(r",(?![^\[]*\])", text)):
        key, equals, value = part.partition("=")
        if not equals or not key.strip().isidentifier():
            raise BadInput(f"set is {text!r:.80}; write KEY=VALUE,KEY=VALUE, as in num_layers=2")
        try:
            found[key.strip()] = parse_yaml(value)
        except ValueError as error:
            name = f"set is {text!r:.80}: {key.strip()} is {value!r:.40}"
            raise BadInput(f"{name}: {error}") from None
    return found
