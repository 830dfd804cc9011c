"""Predictions of compiled blocks, held to what the profiler counts of inductor's own code on a CPU,
and to one row on a GPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from conftest import counted, forget, predictions, profiled, settle
from torch._inductor import compile_fx
from torch._inductor import config as inductor

from harness.memory.record import peak
from harness.planner import uncertainty
from harness.planner.speed.roofline import compiles, issued, issues
from harness.planner.tracing import extend
from harness.planner.tracing.simulate import simulate, trace_training
from harness.planner.worker import predict
from harness.prediction import Work
from harness.resolve import Resolved, resolve
from harness.spec import Spec

LIMIT = 0.01
MIB = 2**20
FLOW = {"objective": "flow", "resolution": "256", "text": 16}
QUICK = {"aot_inductor.debug_compile": True, "cpp.simdlen": 1}
"""Inductor's settings with which its C++ compiles fast: no optimisation, no vectors."""
HEADS = "num_attention_heads=4,attention_head_dim=32"
SMALL = {
    "pixart-sigma": f"num_layers=3,{HEADS},cross_attention_dim=128",
    "flux-dev": f"num_layers=2,num_single_layers=2,{HEADS},axes_dims_rope=[8,12,12],"
    "joint_attention_dim=64,pooled_projection_dim=64",
    "sd3-medium": f"num_layers=3,{HEADS},joint_attention_dim=64,caption_projection_dim=128,"
    "pooled_projection_dim=64",
    "wan2.1-1.3b": f"num_layers=3,{HEADS},ffn_dim=512,text_dim=64",
    "z-image": "n_layers=2,n_refiner_layers=1,dim=128,n_heads=4,n_kv_heads=4,"
    "axes_dims=[8,12,12],cap_feat_dim=64",
    "lumina2": "num_layers=3,num_refiner_layers=1,hidden_size=128,num_attention_heads=4,"
    "num_kv_heads=4,axes_dim_rope=[8,12,12],cap_feat_dim=64",
    "qwen-image": f"num_layers=3,{HEADS},axes_dims_rope=[8,12,12],joint_attention_dim=64",
}
"""Model -> changes that make it small."""
CASES = [
    ("single+compile", "DiT-T/2:depth=2", 8, {}),
]
OTHERS = [
    ("single+compile+checkpoint", "DiT-S/4:depth=4", 8, {}),
    ("single+bf16+compile", "DiT-S/4:depth=4", 8, {}),
    ("single+bf16+compile", "DiT-B/4:depth=3", 16, {}),
    ("single+bf16+compile:budget=0.5", "DiT-S/4:depth=4", 8, {}),
    ("single+bf16+checkpoint:keep=products+compile", "DiT-S/4:depth=4", 8, {}),
    ("single+compile", "pixart-sigma", 4, {"resolution": "256", "text": 16}),
    ("single+bf16+compile", "flux-dev", 2, FLOW),
    ("single+compile", "sd3-medium", 2, FLOW),
    ("single+compile", "wan2.1-1.3b", 2, {**FLOW, "resolution": "128"}),
    ("single+bf16+compile", "z-image", 2, {**FLOW, "text": 32}),
    ("single+bf16+compile", "qwen-image", 2, {**FLOW, "text": 32}),
    ("single+compile", "lumina2", 2, {**FLOW, "text": 32}),
]


def row(recipe: str, model: str, batch: int, more: dict) -> Resolved:
    changes = {"set": SMALL[model]} if model in SMALL else {}
    base = Spec(recipe=recipe, model=model, data="synthetic", global_batch=batch, **changes)
    return resolve(dataclasses.replace(base, **more))


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
    [*CASES, *(pytest.param(other, marks=pytest.mark.thorough) for other in OTHERS)],
    ids=lambda g: f"{g[0]}@{g[1]}x{g[2]}",
)
def test_a_compiled_step_takes_what_inductor_s_code_takes(given, fresh):
    resolved = row(*given)
    predicted = simulate(resolved).peak.bytes
    fresh()
    with inductor.patch(QUICK if given in CASES else {}):
        assert predicted == pytest.approx(profiled(resolved), rel=LIMIT)


ON_H100 = ("DiT-XL/2", 32, {"device": "cuda"})
ALLOCATED, RESERVED, FIRST = (21_048 - 64) * MIB, (22_026 - 64) * MIB, (15_891 - 64) * MIB
"""An H100 with torch 2.11, without 64 MiB of cuBLAS's workspaces: peaks of the steady step, and of
the first. No figure was chosen on them."""


def test_a_row_of_a_gpu_is_predicted_within_one_percent_from_one_lowered_block(monkeypatch):
    lowered, lower = [], compile_fx.compile_fx

    def counted(*given, **more):
        lowered.append(1)
        return lower(*given, **more)

    monkeypatch.setattr(compile_fx, "compile_fx", counted)
    found = simulate(row("single+bf16+compile", *ON_H100), "cudnn")
    assert len(lowered) == 1
    assert found.allocated == pytest.approx(ALLOCATED, rel=0.002)
    assert found.reserved == pytest.approx(RESERVED, rel=0.01)
    assert found.first_step == pytest.approx(FIRST, rel=0.01)
    assert found.attention == ["cudnn"]


def test_work_of_products_is_that_of_an_eager_step_and_other_traffic_is_less():
    sums = []
    for recipe in ("single+bf16", "single+bf16+compile"):
        work = simulate(row(recipe, "DiT-S/4:depth=2", 8, {"device": "cuda"})).work
        products = sum(w.flops * w.count for w in work if w.kind in ("product", "attention"))
        passed = sum(w.bytes * w.count for w in work if w.kind == "memory" and w.phase == "forward")
        sums.append((products, passed))
        forget()
    (eager, moved), (compiled, fused) = sums
    assert compiled == pytest.approx(eager, rel=0.01)
    assert 0.3 * moved < fused < 0.9 * moved


@pytest.mark.thorough
def test_a_second_trace_in_a_process_is_of_its_own_device():
    for device in ("cpu", "cuda"):
        resolved = row("single+compile", "DiT-T/4:depth=2", 4, {"device": device})
        tracer, _, first = trace_training(resolved)
        found = peak(tracer.record, "device", first)
        assert found.categories["activations"] > 10 * found.categories["gradients"]
        forget()


@pytest.mark.thorough
@pytest.mark.parametrize(
    "recipe",
    [
        "single+bf16+compile",
        "single+bf16+checkpoint+compile",
        "single+bf16+compile:mode=reduce-overhead",
    ],
)
def test_shallow_models_tell_of_a_deep_compiled_one(recipe):
    sizes = "num_layers=10,num_attention_heads=8,attention_head_dim=64,cross_attention_dim=512"
    resolved = row(recipe, "pixart-sigma", 2, {"set": sizes, "device": "cuda"})
    made, whole = extend.extended(resolved, "flash"), simulate(resolved)
    assert made.steady.bytes == pytest.approx(whole.steady.bytes, rel=0.002)
    assert made.reserved == pytest.approx(whole.reserved, rel=0.01)
    assert issued(made.work) == pytest.approx(issued(whole.work), rel=0.01)


@pytest.mark.parametrize(
    ("recipe", "processes", "why"),
    [
        ("single+compile:scope=model", 1, "scope=model"),
        ("single+compile:backend=aot_eager", 1, "aot_eager"),
        ("single+compile+checkpoint+offload_activations:what=checkpoints", 1, "offload"),
        ("ddp+compile", 2, "DDP splits the graph of a compiled block"),
        ("zero3+compile", 2, "ZeRO-3 gathers"),
        ("zero1+tp:ranks=2+compile", 4, "leave tp and sp out"),
        ("single+bf16+attend:kernel=flex+compile", 1, "flex"),
    ],
)
def test_graphs_that_are_not_traced_have_a_reason(recipe, processes, why):
    found = predict(row(recipe, "DiT-T/4:depth=1", 4, {"processes": processes, "device": "cuda"}))
    if torch.distributed.is_initialized():  # DDP's trace ended within its ranks
        torch.distributed.destroy_process_group()
        forget()
    assert found.method == "none" and why in found.reason


PAIR = {"processes": 2, "model": "DiT-T/2:depth=3", "global_batch": 32, "data": "synthetic"}
BESIDE = ("zero1+compile", "zero2+bf16+compile", "zero1+bf16+checkpoint+compile",
          "ddp+lora+compile", "fsdp2+bf16+compile", "fsdp2+checkpoint+compile")  # fmt: skip
"""Recipes whose ranks leave a block's graph as it is."""
NEAR = 0.002


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Recipe -> what c10's allocator counted of a step of two real processes over gloo."""
    spec = Spec(recipe="zero2", warmup=1, steps=2, **PAIR)
    quick = {"AOT_INDUCTOR_DEBUG_COMPILE": "1"}  # C++ that compiles fast
    return counted(spec, tmp_path_factory.mktemp("pairs"), BESIDE, **quick)


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", BESIDE)
def test_ranks_take_what_their_compiled_code_takes(recipe, pairs, tmp_path):
    asked = {"recipe": recipe, "device": "cpu", **PAIR}
    (found,) = predictions([asked], tmp_path)
    assert found["method"] == "trace", found["reason"]
    assert found["steady"]["bytes"] == pytest.approx(pairs[recipe]["allocated"], rel=NEAR)


@pytest.mark.parametrize("scaling", ["", pytest.param(":format=mx", marks=pytest.mark.thorough)])
def test_a_compiled_float8_step_does_the_products_of_an_eager_one_by_fewer_operations(scaling):
    sums = []
    for more in ("", "+compile"):
        spec = row(f"single+fp8{scaling}{more}", "DiT-S/4:depth=1", 8, {"device": "cuda"})
        work = simulate(spec).work
        narrow = [w for w in work if (w.kind, w.dtype) == ("product", "float8")]
        sums.append((sum(w.flops * w.count for w in narrow), sum(w.count for w in work)))
        forget()
    (eager, many), (compiled, few) = sums
    assert compiled == eager > 0 and few < 0.5 * many


GRAPHS = ":mode=reduce-overhead"
BLOCKS = 3


def test_the_host_issues_one_operation_for_each_recorded_graph():
    """A block's forward and backward are a graph each. The conditions are copied into each block's
    forward, and of the rest the first block's input and the last one's gradient."""
    plain, graphs = [], []
    for more, found in (("", plain), (GRAPHS, graphs)):
        spec = row(f"single+bf16+compile{more}", f"DiT-S/4:depth={BLOCKS}", 8, {"device": "cuda"})
        found.extend(simulate(spec).work)
        forget()
    saved = {w.phase: w.count for w in graphs if w.kind == "replayed"}
    copies = sum(w.count for w in graphs if w.kind == "memory") - sum(
        w.count for w in plain if w.kind == "memory"
    )
    assert set(saved) == {"forward", "backward"} and copies == BLOCKS + 1
    assert all(count % BLOCKS == 0 for count in saved.values())
    assert issued(plain) - issued(graphs) == sum(saved.values()) - copies
    flops = [sum(w.flops * w.count for w in work) for work in (plain, graphs)]
    assert flops[0] == flops[1] > 0


def test_what_a_graph_recomputes_takes_no_host():
    """An eager step counts recomputed operations twice (``roofline.issues``)."""
    kernels = {"kind": "attention", "dtype": "bfloat16", "flops": 8, "bytes": 8, "count": 10}
    eager = [Work(phase="forward", **kernels), Work(phase="backward", **kernels)]
    none = {"kind": "replayed", "dtype": "", "flops": 0, "bytes": 0, "count": 9}
    recorded = [*eager, Work(phase="forward", **none), Work(phase="backward", **none)]
    assert (issues(eager), issues(eager, compiled=True), issues(recorded)) == (30, 20, 3)
    assert compiles("single+bf16+compile:scope=blocks") and not compiles("single+checkpoint")


def test_recorded_graphs_allocate_from_a_pool_of_their_own():
    found = {}
    for more in ("", GRAPHS):
        spec = row(f"single+bf16+compile{more}", f"DiT-S/4:depth={BLOCKS}", 8, {"device": "cuda"})
        tracer, _, first = trace_training(spec, "cudnn")
        storages = tracer.record.storages
        found[more] = {s.stream for s in storages if s.pool == "device"}
        kept = [s for s in storages if s.kind == "activations" and s.phase == "forward"]
        inside = sum(s.size for s in kept if s.stream) / sum(s.size for s in kept)
        assert inside > 0.8 if more else inside == 0
        predicted = peak(tracer.record, "device", first).bytes
        found[f"peak{more}"] = predicted
        forget()
    assert found[""] == {0} and len(found[GRAPHS]) == 2
    more = found[f"peak{GRAPHS}"] - found["peak"]
    assert 28 * MIB < more < 36 * MIB, "cuBLAS's 32 MiB, and copies; without them another instant"


def test_graphs_of_a_cpu_have_no_prediction():
    found = predict(row(f"single+compile{GRAPHS}", "DiT-T/4:depth=1", 4, {}))
    assert found.method == "none" and "a CPU records no CUDA graphs" in found.reason


def test_a_compiled_block_is_refused_where_its_activations_move_to_the_host():
    """It ran, and ended by inductor's check of strides."""
    resolved = row("single+compile+offload_activations", "DiT-T/4:depth=1", 4, {})
    assert "strides" in str(resolved.refusal)


def test_compiled_rows_have_a_class_of_their_own():
    resolved = row("single+compile:scope=model", "DiT-T/4:depth=1", 4, {})
    kind = uncertainty.class_of(resolved.launch.traits, predict(resolved))
    assert kind == "compiled" and uncertainty.shares()[kind].pooled
