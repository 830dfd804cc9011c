"""Prediction against truth: the same step on real CPU tensors, as torch's own profiler counts it.

The profiler sees what c10's allocator gives and takes, below Python and whatever dispatches: it
shares no code with the trace.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from conftest import forget, highest, launchable, profiled, settle
from torch.profiler import ProfilerActivity, profile

from harness.memory import op_facts
from harness.memory.record import peak
from harness.planner.tracing.simulate import kernel_scratch, simulate, trace_training
from harness.planner.worker import predict
from harness.resolve import Resolved, resolve
from harness.sampling.measure import Drawing
from harness.spec import Spec
from harness.worker import setup
from strategies.activations.attend import KERNELS
from strategies.sampling import eight_bits

BASE = Spec(recipe="single", model="DiT-T/2", data="synthetic", global_batch=8)
LIMIT, DRAWN_LIMIT = 0.005, 0.01
# Autograd adds gradients that meet in place, but not while something watches it
# (can_accumulate_inplace, torch/csrc/autograd/input_buffer.cpp): one more [B, T, D] for a moment.
WIDER = {"single+controlnet": 0.02}

# recipe, model, global batch, further fields
CONFIGURATIONS = [
    ("single", "DiT-T/2:depth=2", 8, {}),
    ("single+bf16", "DiT-S/8:depth=4", 8, {}),
    ("single+checkpoint:every=2", "DiT-T/2", 8, {}),
    ("single+ema:place=cpu", "DiT-T/2:depth=2", 4, {}),
    ("single", "DiT-T/2:depth=2", 4, {"grad_clip": 0.5}),
    ("single+checkpoint:keep=products", "DiT-T/2:depth=2", 8, {}),
    ("single+optimizer_in_backward", "DiT-T/8", 4, {}),
]
OTHERS = [  # test_rehearsed has further ones
    ("single+bf16_pure:autocast=on+lora:dtype=fp32+checkpoint", "DiT-S/8:depth=4", 8, {}),
    ("single", "DiT-S/8:depth=4", 8, {}),
    ("single", "DiT-T/2:depth=2", 4, {"objective": "flow", "init": "adaln_zero"}),
    # CPU kernels of 16 bits take up to 1 MiB inside an op, which is 1 % of a DiT-T.
    ("single+bf16+checkpoint", "DiT-S/8:depth=4", 8, {}),
    ("single+lora+bf16+checkpoint", "DiT-S/8:depth=4", 8, {}),
    ("single+lokr", "DiT-T/2:depth=2", 8, {}),
    ("single+bf16_pure+adamw_bf16:write=kahan", "DiT-S/8:depth=4", 8, {}),
    ("single+block_swap+checkpoint+adafactor+optimizer_in_backward", "DiT-S/8:depth=4", 8, {}),
    ("single+bf16+lokr:rank=64,factor=4+checkpoint", "DiT-S/8:depth=4", 8, {}),
    ("single+loha+checkpoint", "DiT-S/8:depth=4", 8, {}),
    ("single+bf16+oft+checkpoint", "DiT-S/8:depth=4", 8, {}),
    ("single+controlnet", "DiT-T/2:depth=2", 8, {}),
    ("single+checkpoint:part=ffn", "DiT-S/8:depth=4", 8, {}),
    ("single+bf16_pure+cast:dynamic=on+lora", "DiT-S/4:depth=2", 8, {}),
    ("single+fp8:emulate=on,scaling=rowwise", "DiT-S/4:depth=2", 8, {}),
    ("single+adam16bit", "DiT-T/8", 4, {}),
    ("single+came", "DiT-T/8", 4, {}),
    ("single+prodigy:slice=2", "DiT-T/8", 4, {}),
]


def case(recipe: str, model: str, batch: int, more: dict) -> Resolved:
    given = {"recipe": recipe, "model": model, "global_batch": batch, **more}
    return resolve(dataclasses.replace(BASE, **given))


@pytest.fixture(autouse=True)
def fresh():
    """accelerate keeps its state in classes; one test's must not be the next one's."""
    settle()
    torch.set_num_threads(1)
    forget()
    yield forget
    forget()


@pytest.mark.parametrize(
    "given",
    [*CONFIGURATIONS, *(pytest.param(other, marks=pytest.mark.thorough) for other in OTHERS)],
    ids=lambda g: f"{g[0]}@{g[1]}x{g[2]}",
)
def test_the_trace_is_the_profiler_s_peak_within_half_a_percent(given, fresh):
    resolved = case(*given)
    predicted = simulate(resolved).peak.bytes
    fresh()
    true = profiled(resolved)
    assert true > 5 * 2**20, "too small a case to tell anything"
    assert predicted == pytest.approx(true, rel=WIDER.get(given[0], LIMIT))


DRAWN = ("float8", "palette:bits=3")


@pytest.mark.parametrize("parts", launchable(DRAWN, ("float8",)))
def test_a_batch_of_samples_is_the_profiler_s_peak_too(parts, fresh):
    """Of few samples, so that weights and what a product holds of them are most of it."""
    spec = dataclasses.replace(BASE, recipe=f"single+{parts}", model="DiT-S/8:depth=3")
    drawn = {"workload": "sample", "objective": "flow", "sampler_steps": 1, "global_batch": 1}
    resolved = resolve(dataclasses.replace(spec, **drawn))
    predicted = simulate(resolved).peak.bytes
    fresh()
    accelerator = setup.make_accelerator(resolved)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        scratch = Path("unused")
        setup.prepare(resolved, None, accelerator, scratch, lambda phase: None, Drawing).step()
    assert predicted == pytest.approx(highest(prof), rel=DRAWN_LIMIT)


# ---- a GPU that is not there ----


def on_gpu(recipe: str, model: str, batch: int) -> Resolved:
    return case(recipe, model, batch, {"device": "cuda"})


def test_a_gpu_s_autocast_keeps_what_cuda_s_keeps():
    """By hand from CUDA's op lists: 52 bytes of a block per element of [B, T, D], and every
    weight of a matrix product once in bfloat16."""
    resolved = on_gpu("single+bf16", "DiT-B/2:depth=6", 16)
    tracer, _, first = trace_training(resolved)
    found = peak(tracer.record, "device", first)
    shape = resolved.subject.shape
    tokens = 16 * 256 * shape.hidden_size
    kept = found.categories["activations"] / tokens / shape.depth
    assert kept == pytest.approx(52, rel=0.03)
    products = resolved.subject.parameters - 256 * shape.hidden_size - 1001 * shape.hidden_size
    assert found.categories["autocast"] == pytest.approx(2 * products, rel=0.01)
    ops = {storage.op for storage in tracer.record.storages}
    assert "aten._scaled_dot_product_flash_attention.default" in ops
    assert not {op for op in ops if "bmm" in op or "softmax" in op}


SAMPLES = {"workload": "sample", "objective": "flow", "sampler_steps": 1}
QLORA = "single+bf16+qlora", "single+bf16+lora"
IN_FOUR_BITS = {
    # stored, whole -> bytes of a whole weight, and of the spec
    ("single+bf16_pure+nf4", "single+bf16_pure"): (2, SAMPLES),
    QLORA: (4, {}),
    ("single+bf16+qlora:layers=blocks", "single+bf16+lora"): (4, {}),
}


def four_bits(elements: int) -> int:
    """Bytes of bitsandbytes' layout: half a byte a weight, a scale of a byte for 64 of them and one
    of four bytes for 256 of those, tables of 16 and 256 numbers, and an offset."""
    scales = -(-elements // 64)
    return elements // 2 + scales + 4 * -(-scales // 256) + 4 * (16 + 256) + 4


@pytest.mark.parametrize("texts", launchable(IN_FOUR_BITS, [QLORA]), ids=lambda texts: texts[0])
def test_a_gpu_holds_weights_in_four_bits_as_their_library_lays_them_out(texts, fresh):
    size, fields = IN_FOUR_BITS[texts]
    rows = [on_gpu(text, "DiT-S/4:depth=2", 4) for text in texts]
    specs = [dataclasses.replace(row.spec, **fields) for row in rows]
    found = []
    for spec in specs:
        fresh()
        found.append(simulate(resolve(spec)))
    plain = rows[0].subject.make()
    names = rows[0].subject.linears
    if fields:
        names = eight_bits.linears(plain, rows[0].subject)
    elif "layers" not in texts[0]:
        names = [name for name, part in plain.named_modules() if isinstance(part, torch.nn.Linear)]
    counts = [plain.get_submodule(name).weight.numel() for name in names]
    stored, whole = found
    assert whole.between - stored.between == sum(size * n - four_bits(n) for n in counts)
    products = [[w for w in one.work if w.kind == "product"] for one in found]
    flops = [sum(w.flops * w.count for w in some) for some in products]
    assert flops[0] == flops[1], "the same products, by weights that are turned back"


@pytest.mark.parametrize(("rows", "times"), [(4, 0), (5, 1), (2048, 1)])
def test_a_gpu_turns_a_weight_in_four_bits_back_where_rows_are_many(rows, times):
    """For up to four rows it multiplies by the codes; else bfloat16 values, the output, and its
    scales twice."""
    func = "bitsandbytes.gemm_4bit.default"
    codes = torch.empty((128 * 512 // 2, 1), dtype=torch.uint8)
    given = torch.empty((rows, 128), device="meta", dtype=torch.bfloat16)
    asked = (given, codes.to("meta"), [512, 128], None, 64)
    wanted = 2 * (512 * 128 + rows * 512) + 2 * 4 * (512 * 128 // 64)
    assert op_facts.scratch(func, asked) == times * wanted
    assert op_facts.scratch(func, (given, codes, *asked[2:])) == wanted - 4 * (512 * 128 // 64)


MODELLED = {
    "naive": [], "math": ["math"], "efficient": ["efficient"], "flash": ["flash"],
    "cudnn": ["cudnn"], "flex": None,
}  # fmt: skip


@pytest.mark.parametrize("kernel", launchable(KERNELS, ("naive", "flash", "cudnn", "flex")))
def test_a_forced_kernel_of_attention_is_the_one_that_is_modelled(kernel):
    resolved = on_gpu(f"single+bf16+attend:kernel={kernel}", "DiT-T/4:depth=1", 4)
    found = predict(resolved)
    if MODELLED[kernel] is None:
        assert found.method == "none" and "compiled" in found.reason
        return
    assert found.method == "trace" and found.attention == MODELLED[kernel], found.reason
    scores = [w for w in found.work if w.kind == "attention" and w.phase == "backward"]
    assert bool(scores) == (kernel not in ("naive", "math"))


FORWARD = 2 * 8 * 64 * (4 + 8) * 384**2
"""FLOPs of a block of DiT-S/4 in forward: four products of attention's width, eight of the MLP's,
for eight samples of 64 tokens."""


@pytest.mark.parametrize("more", launchable(["", ":scaling=rowwise"], [""]))
def test_products_of_float8_operands_are_told_from_those_of_their_results_type(more):
    work = simulate(on_gpu(f"single+fp8{more}", "DiT-S/4:depth=1", 8)).work
    found = {phase: sum(w.flops * w.count for w in work if w.phase == phase
                        and (w.kind, w.dtype) == ("product", "float8"))
             for phase in ("forward", "backward")}  # fmt: skip
    assert found == {"forward": FORWARD, "backward": 2 * FORWARD}


@pytest.mark.parametrize(("op", "given", "place"), [
    # A copy in which overflow is looked for; a mask and one more matrix of attention's scores.
    (torch.ops.aten.isinf.default, (torch.zeros(10_000, dtype=torch.float16),), 0),
    (torch.ops.aten._safe_softmax.default, (torch.randn(100, 100), -1), 1),
])  # fmt: skip
def test_what_a_kernel_holds_while_it_runs_is_what_the_profiler_counts(op, given, place):
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        op(*given)
    sizes = [e.nbytes() for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
    assert kernel_scratch(op, (given[0].to("meta"), *given[1:]), None) == sizes[place] > 9_000
    backward = torch.ops.aten._softmax_backward_data.default  # CUDA's holds gradient times output
    assert kernel_scratch(backward, (given[0].to("meta"),), None) == given[0].nbytes


# ---- what has no trace ----


@pytest.mark.parametrize(("recipe", "reason"), [
    ("single", "a library failed on tensors without storage (NotImplementedError)"),
    ("ddp+compress", "compress hooks into DDP's C++ reducer, which needs real memory"),
    ("ddp+adam8bit:lib=torchao", "torchao compiles the step of adam8bit, and torch compiles only "
                                 "tensors with memory"),
])  # fmt: skip
def test_what_cannot_be_traced_says_why(recipe, reason, monkeypatch):
    said = "a kernel that knows no tensors without storage"

    def stumble(resolved: Resolved, kind: str, rank: int) -> None:
        raise NotImplementedError(said)

    monkeypatch.setattr("harness.planner.tracing.simulate.simulate", stumble)
    found = predict(on_gpu(recipe, "DiT-T/2", 8))
    assert (found.method, found.bytes, found.reason) == ("none", None, reason)
    assert found.fault == f"NotImplementedError: {said}"
