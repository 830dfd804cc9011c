"""Public models: their facts against the library's classes, their samples, what is refused."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
import torch
from conftest import launchable

from harness.resolve import resolve
from harness.subjects import kind_of, subject_of
from harness.subjects.library import calls, families
from harness.subjects.library.families import FAMILIES, REFUSED
from harness.subjects.library.subject import Library, _linears
from harness.subjects.objectives import Velocity
from strategies import initial, parse
from strategies.activations.checkpoint import parts_of
from strategies.base import BadInput, Slot
from strategies.subject import LAYERS, DataFacts, Shaping
from tests.made.publics import MINIATURES, miniature

ANY = DataFacts(256, 4, 32, 1000)


def public(model: str, **shaping) -> Library:
    family = families.find(model, shaping.get("config", ""), shaping.get("set", "")).family
    return subject_of(model, ANY, objective=family.objectives[0], shaping=Shaping(**shaping))


def elements(subject: Library) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in subject.make().parameters())


# ---- facts ----


def test_each_family_has_a_miniature():
    assert {FAMILIES[name].name for name in FAMILIES} == {
        families.table()[name].family.name for name in MINIATURES
    }


@pytest.mark.parametrize("name", families.table())
def test_a_preset_has_as_many_parameters_as_was_published(name):
    """To the last element where somebody counted, else to the digits that were written."""
    told = families.table()[name].parameters
    with torch.device("meta"):
        module = public(name).make()
    found = sum(p.numel() for p in module.parameters())
    assert found == told["built"]
    subject = public(name)
    blocks = [subject.block_of(module, key) for key in subject.depths]
    assert [sum(p.numel() for p in block.parameters()) for block in blocks] == told["blocks"]
    counted = found + sum(many * held(module, at) for at, many in told.get("other", {}).items())
    if isinstance(told["published"], int):
        assert counted == told["published"]
        return
    digits, word = told["published"].split()
    assert word == "billion" and f"{counted / 1e9:.{len(digits.partition('.')[2])}f}" == digits


def held(module: torch.nn.Module, at: str) -> int:
    """Elements of a tensor, or of all tensors of a module; there are some."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    sizes = [t.numel() for name, t in tensors.items() if f"{name}.".startswith(f"{at}.")]
    assert sizes
    return sum(sizes)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
def test_what_a_family_says_of_its_class_is_the_class_s_own(family):
    import diffusers

    signature = inspect.signature(getattr(diffusers, family.name).__init__).parameters
    assert {key: signature[key].default for key in family.defaults} == dict(family.defaults)
    counted = [key for key in family.depths.values() if key]
    assert set(counted) <= set(family.defaults)


@pytest.mark.parametrize("name", REFUSED)
def test_a_class_whose_shapes_depend_on_values_is_refused_by_name(name):
    import diffusers

    assert hasattr(diffusers, name)
    with pytest.raises(BadInput, match=rf"{name} cannot be trained.*--model mine.py:make"):
        public(f"diffusers:{name}")


# ---- by name, by configuration ----


def test_a_configuration_file_makes_the_model_that_it_is_of(tmp_path):
    import diffusers

    sizes = {"num_layers": 2, "attention_head_dim": 12, "ffn_dim": 32, "text_dim": 8}
    with torch.device("meta"):
        made = diffusers.WanTransformer3DModel(num_attention_heads=2, **sizes)
    made.save_config(tmp_path)
    name = "diffusers:WanTransformer3DModel"
    found = public(name, config=f"{tmp_path}/config.json", frames=5, resolution="64")
    assert elements(found) == sum(p.numel() for p in made.parameters())
    assert found.data.sample_shape == (16, 2, 8, 8)
    assert found.samples()["text"].shape[1:] == (512, 8)
    deeper = public(name, config=f"{tmp_path}/config.json", set="num_layers=3")
    assert elements(deeper) > elements(found)
    with pytest.raises(BadInput, match="config is of a WanTransformer3DModel"):
        public("diffusers:FluxTransformer2DModel", config=f"{tmp_path}/config.json")


def test_a_related_model_is_not_suggested_as_the_same():
    with pytest.raises(BadInput, match=r"of its kind there is wan2\.1-14b") as caught:
        kind_of("Wan2.1-I2V-14B-720P")
    assert "did you mean" not in str(caught.value)
    assert "--model diffusers:CLASS --config config.json" in str(caught.value)


@pytest.mark.parametrize(
    ("model", "shaping", "words"),
    [
        ("flux-dev", {"resolution": "1000"}, "multiples of 16 pixels, as 992"),
        ("flux-dev", {"frames": 9}, "frames is 9; the model takes images: 1"),
        ("wan2.1-1.3b", {"frames": 80}, r"1 \+ a multiple of 4, as 81"),
        ("dit-xl-2", {"text": 8}, "the model reads no text"),
        ("flux-dev", {"data": "digits"}, "give --data synthetic"),
        ("flux-dev", {"config": "x.json"}, "has its own; leave --config out"),
        ("flux-dev", {"set": "num_layers"}, "write KEY=VALUE"),
        ("diffusers:NoSuchModel", {}, "what NoSuchModel is given is not known; one of Aura"),
        ("DiT-S/4", {"text": 9}, "text is 9, which model DiT-S/4 does not know"),
        ("flux.1", {}, r"did you mean flux-dev or flux-schnell\?"),
        ("FluxTransformer2DModel", {}, "did you mean diffusers:FluxTransformer2DModel"),
        ("stabilityai/stable-diffusion-xl-base-1.0", {}, "it is a UNet"),
        ("circlestone-labs/Anima", {}, "cannot be planned; the nearest in size is sana-1.6b"),
        ("SiT-XL/2", {}, "take DiT-XL/2"),
        ("llama-3-8b", {}, "unknown model 'llama-3-8b'; ./run.sh list models"),
        ("minimax-h3", {"frames": 120}, r"5 \+ a multiple of 17, as 124"),
        ("cogvideox-5b", {}, r"cogvideox-5b cannot be trained to 'flow'.*velocity"),
    ],
)
def test_bad_input_names_the_way_out(model, shaping, words):
    with pytest.raises(BadInput, match=words):
        subject_of(model, ANY, objective="flow", shaping=Shaping(**shaping))


def test_what_decides_a_model_is_its_identity():
    others = ({"set": "num_layers=18"}, {"text": 256}, {"resolution": "512"})
    found = [public("flux-dev", **one).identity for one in ({}, {}, *others)]
    assert len({*found, public("flux-schnell").identity}) == 5


@pytest.mark.parametrize("name", families.table())
def test_a_sample_is_as_large_as_its_size_says(name):
    subject = public(name)
    space, facts = subject.space, subject.data
    tokens = space.frames * space.height * space.width
    pixels = {"packed": tokens // 4, "tokens": tokens}.get(subject.family.layout)
    first, *others = facts.sample_shape
    shape = (first - subject.family.sounds(space), *others)
    assert shape[0] == pixels if pixels else torch.Size(shape).numel() == facts.channels * tokens


def test_the_sound_of_a_video_follows_it_in_its_sample():
    ltx, h3 = public("ltx-2"), public("minimax-h3")
    assert ltx.space.frames == 16 and h3.space.frames == 37
    assert ltx.data.sample_shape == (16 * 16 * 24 + 126, 128), "5 s at 25 a second"
    assert h3.data.sample_shape == (37 * 48 * 84 * 24 // 32 + 2 * 207, 32), "2 channels at 40"
    for latents in (1, 2, 7, 37):
        assert h3.family.latents_of(h3.family.frames_of(latents)) == latents


def test_an_edit_has_the_tokens_of_its_reference_images():
    plain, one = public("qwen-image"), public("qwen-image-edit")
    two = public("qwen-image-edit", set="references=2")
    shape = one.data.sample_shape
    assert shape == plain.data.sample_shape == (4096, 64), "the loss is of the target alone"
    assert one.samples()["reference"].shape[1:] == (4096, 64)
    assert two.samples()["reference"].shape[1:] == (8192, 64) and "reference" not in plain.samples()
    assert "stripes" in plain.parts and "stripes" not in one.parts
    assert len({plain.identity, one.identity, two.identity}) == 3
    with pytest.raises(BadInput, match="references=-1; write a number from 0 to 10"):
        public("qwen-image-edit", set="references=-1").samples()


def test_reference_images_change_the_output_of_the_target():
    sizes = MINIATURES["qwen-image-edit-2511"][0].replace(",references=2", "")
    for name in ("qwen-image-edit", "qwen-image-edit-2511"):
        subject = public(name, set=sizes, resolution="64", text=8)
        module = initial.build(subject, 0, "awake")
        x, t_B, conditions = subject.example("cpu")
        chance = torch.Generator().manual_seed(0)
        other = {**conditions, "reference": torch.randn(x.shape, generator=chance)}
        with torch.no_grad():
            first, second = (subject.predict(module, x, t_B, one) for one in (conditions, other))
        assert first.shape == x.shape and not torch.allclose(first, second)


def test_a_model_with_one_time_takes_one_sample_at_a_time():
    spec = dataclasses.replace(miniature("minimax-h3", "single"), recipe="single")
    refusal = resolve(spec).refusal
    assert refusal and "micro-batch is 4" in refusal.text
    assert refusal.hint == "add accumulate:steps=4"
    assert resolve(miniature("minimax-h3", "single")).refusal is None


def test_a_frame_without_a_pair_is_paired_with_the_first():
    sizes = f"{MINIATURES['cogvideox-5b'][0]},patch_size_t=2,sample_height=32,sample_width=32"
    three, four = (
        public("cogvideox-5b", set=sizes, resolution="64", frames=frames, text=8)
        for frames in (9, 13)
    )
    module = initial.build(three, 0, "awake")
    x, t_B, conditions = three.example("cpu")
    x = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found = three.predict(module, x, t_B, conditions)
        paired = four.predict(module, torch.cat([x[:, :1], x], 1), t_B, conditions)
    assert found.shape == x.shape == (1, 3, 4, 8, 8)
    torch.testing.assert_close(found, paired[:, 1:])


@pytest.mark.parametrize("name", ["hunyuanvideo-1.5", "qwen-image-2.1"])
def test_a_prediction_takes_masks_for_what_they_are_at_run_time(name, monkeypatch):
    subject = resolve(miniature(name, "single")).subject
    module, batch = initial.build(subject, 0, "awake"), subject.samples()
    x, t_B = batch.pop("x"), torch.linspace(0, 1, 8)
    with torch.no_grad():
        read = subject.predict(module, x, t_B, batch)
        monkeypatch.setattr(calls, "_valueless", lambda x: True)
        told = subject.predict(module, x, t_B, batch)
    assert read.shape == x.shape and torch.equal(read, told)


# ---- parameters without a gradient ----


def test_what_gets_no_gradient_is_found_frozen_and_said(train_here):
    spec = miniature("qwen-image", "single")
    subject = resolve(spec).subject
    idle = subject.survey.idle
    assert len(idle) == 9 and all("transformer_blocks.1" in name for name in idle)
    assert not {f"{n}.weight" for n in subject.linears} & set(idle)
    run = train_here(spec, 1)
    named = dict(run.module.named_parameters())
    still = {n for n, p in named.items() if n not in idle and not moved(run, p)}
    assert not still, "all others are trained"
    assert not any(named[name].requires_grad for name in idle)
    assert any("9 parameters" in note and "get no gradient" in note for note in run.notes)
    assert resolve(miniature("flux-dev", "single")).subject.survey.idle == ()


@pytest.mark.parametrize("name", MINIATURES)
def test_a_model_has_the_layers_that_its_parts_name(name):
    subject = resolve(miniature(name, "single")).subject
    assert "layers" in subject.parts
    with torch.device("meta"):
        blocks = subject.blocks(subject.make())
    assert all(parts_of(blocks, layer) for layer in LAYERS)


def moved(run, p) -> bool:
    state = run.inner_optimizer.state.get(p, {})
    return "exp_avg" in state and bool(state["exp_avg"].abs().sum() > 0)


# ---- the same weights however they come ----


def test_its_first_weights_depend_on_their_names_alone():
    subject = resolve(miniature("lumina2", "single")).subject
    whole, again = (initial.build(subject, 0, "awake") for _ in range(2))
    pairs = zip(whole.parameters(), again.parameters(), strict=True)
    assert all(torch.equal(p, q) for p, q in pairs)
    assert not any((p == 0).all() for p in whole.parameters()), "nothing starts at zero"
    library = subject.make()  # as the class makes it: what is computed must be the same
    for name, buffer in library.named_buffers():
        assert torch.equal(buffer, whole.get_buffer(name)), name
    rotary, wanted = whole.rope_embedder.freqs_cis, library.rope_embedder.freqs_cis
    assert all(torch.equal(a, b) for a, b in zip(rotary, wanted, strict=True))


# ---- objectives ----


def test_a_velocity_that_is_known_costs_nothing():
    shape = (3, 2, 4, 4)
    goal, chance = Velocity(), torch.Generator().manual_seed(0)
    t_B, noise = goal.draw(chance, 3, shape, "cpu")
    x = torch.randn((3, *shape), generator=chance)
    signal, scale = goal.tables.at(t_B, x, "signal", "noise")
    assert goal.loss(lambda noisy, t: signal * noise - scale * x, x, t_B, noise).max() < 1e-10
    assert goal.loss(lambda noisy, t: noise, x, t_B, noise).min() > 1e-4


# ---- a module of one's own ----

OWN = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.unused = nn.Linear(4, 4)
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

def loss(model, batch):
    return (model(batch["image"]) - batch["wanted"]).square().mean()

def make():
    batch = {"image": torch.randn(6, 5, 16), "wanted": torch.zeros(6, 5, 16)}
    return Net(), batch, loss

def uneven():
    return Net(), {"image": torch.zeros(6, 5, 16), "wanted": torch.zeros(4, 5, 16)}, loss
"""


@pytest.mark.parametrize(("name", "part"), [("flux-dev", "ffn"), ("wan2.1-1.3b", "attention")])
def test_layers_of_a_public_model_s_blocks_are_recomputed(name, part, train_here):
    """Flux's blocks of one stream have no FFN of their own."""
    recipe = f"single+checkpoint:part={part}"
    run = train_here(miniature(name, recipe), 2)
    found = parse(recipe).in_slot(Slot.RECOMPUTE).evidence(run)
    assert (found["parts"], found["block_forwards"]) == (4, 2)
    plain = train_here(miniature(name, "single"), 2)
    assert run.log.losses == plain.log.losses


@pytest.fixture
def own(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(OWN)
    return file


def test_a_module_of_one_s_own_trains_with_its_own_batch_and_loss(own, train_here):
    spec = dataclasses.replace(
        miniature("flux-dev", "single+checkpoint"), model=f"{own}:make", objective="own", set="",
        resolution="", text=0, learning_rate=1e-2,
    )  # fmt: skip
    subject = resolve(spec).subject
    assert subject.survey.depth == 3 and len(subject.linears) == 6
    assert subject.survey.idle == ("unused.weight", "unused.bias") and subject.data.size == 6
    run = train_here(spec, 6)
    assert run.log.losses[-1] < 0.9 * run.log.losses[0]
    assert train_here(spec, 1).log.losses[0] == run.log.losses[0], "the example is drawn anew"
    part = parse("single+checkpoint").in_slot(Slot.RECOMPUTE)
    assert part.evidence(run)["block_forwards"] == 2


@pytest.mark.parametrize(
    ("name", "words"),
    [("uneven", "differ in length"), ("nothing", "no strat")],
)
def test_a_function_that_makes_something_else_is_bad_input(own, name, words):
    with pytest.raises(BadInput, match=words):
        resolve(dataclasses.replace(miniature("flux-dev", "single"), model=f"{own}:{name}",
                                    objective="own", set="", resolution="", text=0))  # fmt: skip


@pytest.mark.parametrize("name", launchable(families.table(), often=["flux-dev", "sana-1.6b"]))
def test_the_names_of_linear_layers_are_a_survey_s(name):
    """They are recorded, so that adapters of some layers are planned without torch."""
    found = public(name)
    assert found.model in _linears() and found.linears == found.survey.linears
