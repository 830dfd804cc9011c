"""Public models in miniature: each family of the diffusers library with two narrow layers."""

from __future__ import annotations

from typing import Any

from harness.spec import Spec
from harness.subjects.library import families

TWO = "num_layers=2,attention_head_dim=16,num_attention_heads=2,"
"""What most have in common."""
SIZES = {
    "flux-dev": TWO + "num_single_layers=2,joint_attention_dim=32,pooled_projection_dim=16,"
        "axes_dims_rope=[4,4,8],in_channels=16",
    "chroma": TWO + "num_single_layers=2,joint_attention_dim=32,axes_dims_rope=[4,4,8],"
        "in_channels=16,approximator_hidden_dim=32,approximator_layers=1",
    "flux2-dev": TWO + "num_single_layers=2,joint_attention_dim=32,axes_dims_rope=[4,4,4,4],"
        "in_channels=16",
    "sd3.5-medium": TWO + "joint_attention_dim=32,caption_projection_dim=32,"
        "pooled_projection_dim=16,pos_embed_max_size=16,sample_size=16,dual_attention_layers=[0]",
    "pixart-sigma": TWO + "cross_attention_dim=32,caption_channels=32,sample_size=8",
    "dit-xl-2": TWO + "sample_size=8,num_embeds_ada_norm=16",
    "wan2.1-1.3b": "num_layers=2,attention_head_dim=12,num_attention_heads=2,text_dim=16,"
        "freq_dim=32,ffn_dim=32,in_channels=4,out_channels=4",
    "hunyuanvideo": "num_layers=2,num_single_layers=2,num_refiner_layers=1,attention_head_dim=10,"
        "num_attention_heads=2,text_embed_dim=16,pooled_projection_dim=8,rope_axes_dim=[2,4,4],"
        "in_channels=4,out_channels=4",
    "qwen-image": TWO + "joint_attention_dim=16,axes_dims_rope=[8,4,4],in_channels=16,"
        "out_channels=4",
    "z-image": "n_layers=2,n_refiner_layers=1,n_heads=2,n_kv_heads=2,dim=32,cap_feat_dim=16,"
        "axes_dims=[8,4,4],axes_lens=[256,32,32],in_channels=4",
    "ltx-video-2b": TWO + "cross_attention_dim=32,caption_channels=16,in_channels=8,out_channels=8",
    "cogvideox-5b": TWO + "text_embed_dim=16,time_embed_dim=8,sample_width=8,sample_height=8,"
        "sample_frames=5,max_text_seq_length=8,in_channels=4,out_channels=4",
    "cogview4-6b": TWO + "text_embed_dim=16,time_embed_dim=8,condition_dim=4,pos_embed_max_size=8,"
        "sample_size=8,in_channels=4,out_channels=4,rope_axes_dim=[8,8]",
    "mochi": "num_layers=2,attention_head_dim=8,num_attention_heads=2,pooled_projection_dim=16,"
        "in_channels=4,text_embed_dim=16,time_embed_dim=4",
    "sana-1.6b": "num_layers=2,attention_head_dim=8,num_attention_heads=2,"
        "num_cross_attention_heads=2,cross_attention_head_dim=8,cross_attention_dim=16,"
        "caption_channels=8,sample_size=8,in_channels=4,out_channels=4",
    "lumina2": "hidden_size=24,num_layers=2,num_refiner_layers=1,num_attention_heads=3,"
        "num_kv_heads=1,multiple_of=16,axes_dim_rope=[4,2,2],axes_lens=[128,128,128],"
        "cap_feat_dim=32,in_channels=4,sample_size=8",
    "auraflow": "num_mmdit_layers=2,num_single_dit_layers=2,attention_head_dim=16,"
        "num_attention_heads=2,caption_projection_dim=32,joint_attention_dim=16,"
        "pos_embed_max_size=256,sample_size=8",
    "krea-2": "num_layers=2,attention_head_dim=8,num_attention_heads=4,num_key_value_heads=2,"
        "intermediate_size=32,timestep_embed_dim=8,text_hidden_dim=16,num_text_layers=3,"
        "text_num_attention_heads=2,text_num_key_value_heads=1,text_intermediate_size=16,"
        "num_layerwise_text_blocks=1,num_refiner_text_blocks=1,axes_dims_rope=[4,2,2],"
        "in_channels=16",
    "ideogram-4": TWO + "intermediate_size=32,adaln_dim=16,llm_features_dim=24,"
        "mrope_section=[4,2,2],in_channels=16",
    "ltx-2": TWO + "cross_attention_dim=32,audio_attention_head_dim=8,audio_num_attention_heads=2,"
        "audio_cross_attention_dim=16,caption_channels=16,in_channels=8,out_channels=8,"
        "audio_in_channels=8,audio_out_channels=8",
    "hidream-i1": "num_layers=2,num_single_layers=2,attention_head_dim=8,num_attention_heads=4,"
        "caption_channels=[8,8],text_emb_dim=8,axes_dims_rope=[4,2,2],max_resolution=[16,16],"
        "llama_layers=[0,1,1,1],in_channels=4,out_channels=4",
    "minimax-h3": TWO + "num_refiner_layers=1,hidden_size=24,ffn_dim=32,text_dim=16,freq_dim=8,"
        "time_embed_hidden_dim=24,time_embed_dim=16,rope_freq_dim=2",
    "ltx-2.5": TWO + "cross_attention_dim=32,audio_attention_head_dim=8,"
        "audio_num_attention_heads=2,audio_cross_attention_dim=16,in_channels=8,out_channels=8,"
        "audio_in_channels=8,audio_out_channels=8",
    "qwen-image-edit-2511": TWO + "joint_attention_dim=16,axes_dims_rope=[8,4,4],in_channels=16,"
        "out_channels=4,references=2",
    "hunyuanvideo-1.5": TWO + "num_refiner_layers=1,text_embed_dim=16,text_embed_2_dim=8,"
        "image_embed_dim=8,rope_axes_dim=[4,6,6],in_channels=9,out_channels=4",
    "qwen-image-2.1": TWO + "context_in_dim=16,axes_dims_rope=[8,4,4],in_channels=8,out_channels=8",
}  # fmt: skip
"""Preset -> sizes: of each family one, or one of each kind of call."""
PIXELS = {
    **dict.fromkeys(("ltx-video-2b", "ltx-2", "ltx-2.5", "qwen-image-2.1"), "128"),
    "sana-1.6b": "256",
}
"""A side, where it is not 64."""
FRAMES = {
    **dict.fromkeys(("ltx-video-2b", "ltx-2", "ltx-2.5"), 9), "mochi": 7,
    **dict.fromkeys(("wan2.1-1.3b", "hunyuanvideo", "cogvideox-5b", "minimax-h3",
                     "hunyuanvideo-1.5"), 5),
}  # fmt: skip
MINIATURES = {n: (some, PIXELS.get(n, "64"), FRAMES.get(n, 0)) for n, some in SIZES.items()}
"""Preset -> sizes, pixels a side, frames."""


def miniature(name: str, recipe: str, **change: Any) -> Spec:
    """A run of the miniature of a preset."""
    sizes, pixels, frames = MINIATURES[name]
    family = families.table()[name].family
    if family.one_time:
        recipe += f"+accumulate:steps={4 // change.get('processes', 1)}"
    given = dict(
        recipe=recipe,
        model=name,
        set=sizes,
        resolution=pixels,
        frames=frames,
        text=8 if family.text else 0,
        data="synthetic",
        objective=family.objectives[0],
        global_batch=4,
        warmup=1,
        steps=2,
        learning_rate=1e-3,
    )
    return Spec(**given | change)
