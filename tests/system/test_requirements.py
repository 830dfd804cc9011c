"""What a machine lacks, and the way out: made-up machines, nvidia-smi's text, the probe."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from rich.console import Console

from harness import ROOT
from harness.commands import doctor, run
from harness.launch import command
from harness.report.figures.derive import hindered, spilled
from harness.resolve import resolve
from harness.result import GpuSample, Peak
from harness.spec import Spec, SpecError
from harness.suite.file import load_suite
from harness.system import gpus, probe
from harness.system import machine as kernel
from harness.system import machine as machines
from harness.system.requirements import lacks, notes, obstacle
from strategies import CATALOG
from tests.made.machines import machine
from tests.made.results import ok

GIB = 2**30
NVME = resolve(Spec(recipe="zero3_nvme", data="synthetic"))


LIMITED = """
import resource
from harness.system import machine as kernel
print(kernel.shell_limit())
resource.setrlimit(resource.RLIMIT_AS, (600 << 20, resource.RLIM_INFINITY))
print(kernel.shell_limit())
"""


def test_a_limit_of_the_shell_is_read_from_the_kernel():
    said = subprocess.run([sys.executable, "-c", LIMITED], cwd=ROOT, capture_output=True, text=True)
    assert said.stdout.splitlines()[-1] == str(("ulimit -v", 600 << 20)), said.stderr


def test_a_limit_of_the_shell_is_named_before_the_installation(tmp_path, monkeypatch):
    here = machine(tmp_path)
    here.probe["errors"] = {"probe": "ABORT"}
    monkeypatch.setattr(kernel, "shell_limit", lambda: None)
    assert "install" in obstacle(NVME, here).hint
    monkeypatch.setattr(kernel, "shell_limit", lambda: ("ulimit -v", 600 << 20))
    lack = obstacle(NVME, here)
    assert "ulimit -v of 0.6 GiB" in lack.text and lack.hint.startswith("ulimit -v unlimited")


CARD = gpus.Gpu(index=0, name="NVIDIA H200", total_bytes=139 * GIB)
CPU, CUDA = {"data": "synthetic"}, {"data": "synthetic", "device": "cuda", "processes": 2}
ALONE = {**CUDA, "processes": 1}


def on_gpu(**changes: object) -> Spec:
    return Spec(**{"recipe": "ddp", **CUDA, **changes})


def with_op(folder: Path, name: str, reason: str) -> machines.Machine:
    here = machine(folder)
    here.probe["ops"][name] = {"ok": False, "reason": reason, "file": None, "built": True}
    return here


# ld's line on a machine with libaio and a driver, and without a CUDA toolkit's libraries.
NO_CUDART = "/usr/bin/ld: cannot find -lcudart: No such file"
NO_PYTHON = "x.cpp:1:10: fatal error: Python.h: No such file"


@pytest.mark.parametrize(
    ("op", "reason", "way"),
    [
        ("async_io", "RuntimeError: not compatible", "apt-get install libaio-dev"),
        ("async_io", NO_CUDART, "LIBRARY_PATH"),
        ("cpu_adam", NO_PYTHON, "python3-dev"),
    ],
)
def test_what_an_op_s_build_lacks_is_named(tmp_path, op, reason, way):
    hint = lacks(op, with_op(tmp_path, op, reason), NVME.spec).hint
    assert way in hint and ("libaio" in hint) == ("libaio" in way)


def test_an_environment_whose_path_has_a_space_is_the_cause(tmp_path, monkeypatch):
    """Not a missing compiler: torch's build commands do not quote the folders of headers."""
    here = with_op(tmp_path, "cpu_adam", "g++: error: files/venv/include: No such file")
    monkeypatch.setattr(sys, "prefix", "/home/some files/venv")
    lack = lacks("cpu_adam", here, NVME.spec)
    assert "/home/some files/venv has a space" in lack.text and "HEADROOM_VENV" in lack.hint


@pytest.mark.parametrize(("tool", "name"), [("compiler", "g++"), ("ninja", "ninja")])
def test_a_missing_compiler_is_named(tmp_path, tool, name):
    lack = lacks("cpu_adam", machine(tmp_path, **{tool: None}), NVME.spec)
    assert name in lack.text and "apt-get install g++ ninja-build" in lack.hint


def used(gib: float, *others: tuple[int, str, int]) -> tuple[gpus.Gpu]:
    return (dataclasses.replace(CARD, used_bytes=int(gib * GIB), others=others),)


# case: (recipe, further fields of its spec, what differs of the machine, words of the refusal)
LACKS = {
    "no room to swap": ("zero3_nvme", CPU, {"disk_free_bytes": 1000}, ["{folder}", "--out"]),
    "too few GPUs": ("ddp", CUDA, {"gpus": (CARD,)}, ["has 1 GPU", "use --processes 1"]),
    "no NCCL": ("ddp", CUDA, {"gpus": (CARD, CARD)}, ["NCCL"]),
    "a busy GPU": (
        "single", ALONE, {"gpus": used(5, (4711, "python", 5 * GIB))},
        ["pid 4711 (python) 5.0 GiB", "CUDA_VISIBLE_DEVICES"]),
    "a process that is not seen": (
        "single", ALONE, {"gpus": used(70)}, ["a process that is not visible from here"]),
    "a process of unknown size": (
        "single", ALONE, {"gpus": used(3, (7, "python", 0))}, ["pid 7 (python)"]),
}  # fmt: skip


@pytest.mark.parametrize("case", LACKS)
def test_what_a_machine_lacks_is_named_with_the_way_out(tmp_path, case):
    recipe, fields, changes, words = LACKS[case]
    lack = obstacle(resolve(Spec(recipe=recipe, **fields)), machine(tmp_path, **changes))
    assert [w for w in words if w.format(folder=tmp_path) not in f"{lack.text} {lack.hint}"] == []


@pytest.mark.parametrize(
    ("recipe", "key", "fault", "word"),
    [
        ("ddp+bf16", "abilities", {"bf16": {"cpu": "no such product"}}, "leave bf16 out"),
        ("ddp", "errors", {"torch": "ImportError: libfoo.so: cannot open"}, "libfoo.so"),
        ("ddp+compile", "abilities", {"inductor": {"cpu": NO_PYTHON}}, "python3-dev"),
        ("ddp+compile", "abilities", {"inductor": {"cpu": "in vain"}}, "backend=aot_eager"),
        (
            "ddp+attend:kernel=cudnn",
            "abilities",
            {"attention_cudnn": {"cpu": "in vain"}},
            "another kernel",
        ),
    ],
)
def test_what_the_probe_found_broken_stops_a_row(tmp_path, recipe, key, fault, word):
    here, row = machine(tmp_path), resolve(Spec(recipe=recipe, data="synthetic"))
    assert obstacle(row, here) is None
    here.probe[key] = fault
    lack = obstacle(row, here)
    assert word in f"{lack.text} {lack.hint}"
    without = resolve(Spec(recipe="ddp+attend+compile:backend=aot_eager", data="synthetic"))
    assert (obstacle(without, here) is None) == (key != "errors")


def test_a_desktop_is_noted_and_its_memory_is_not_planned_with(tmp_path):
    desktop = dataclasses.replace(CARD, total_bytes=24 * GIB, used_bytes=3 * GIB)
    here, row = machine(tmp_path, gpus=(desktop,)), resolve(on_gpu(processes=1))
    assert obstacle(row, here) is None
    assert "3.0 GiB of GPU 0 are held by a desktop" in notes(row, here)[0]
    assert here.smallest_gpu_bytes == 21 * GIB


@pytest.mark.parametrize("fault", ["", "main.c:1:10: fatal error: Python.h: No such file"])
def test_triton_counts_once_a_kernel_of_it_has_run(fault, monkeypatch):
    """It is there without Python's headers too, and fails in the first step."""
    from torch.utils import _triton

    tried = Mock(side_effect=RuntimeError(fault) if fault else None)
    monkeypatch.setattr(_triton, "has_triton", lambda: True)
    monkeypatch.setattr(probe, "_triton_kernel", tried)
    assert ("Python.h" in probe._no_triton()) is bool(fault) and tried.called


def test_nvidia_smi_is_read(monkeypatch):
    cards = "0, GPU-aa, NVIDIA H200, 143771, 1\n1, GPU-bb, NVIDIA H200, 143771, 2048\nnonsense"
    apps = "GPU-bb, 99, /usr/bin/python3, 2040\nGPU-bb, 98, [Not Found], [N/A]"
    found = gpus.parse(cards, apps)
    assert [g.index for g in found] == [0, 1]
    assert found[0].total_bytes == 143771 * 2**20
    assert found[1].others == ((99, "python3", 2040 * 2**20), (98, "[Not Found]", 0))
    monkeypatch.setattr(gpus, "smi", lambda query: cards if "query-gpu" in query else apps)
    monkeypatch.setattr(gpus.os.path, "exists", lambda path: True)
    for chosen, seen in {"1": [1], "1,0": [1, 0], "GPU-aa": [0], "": [], "7,0": []}.items():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
        assert [g.index for g in gpus.visible()] == seen


def probe_says(monkeypatch, folder: Path, cards: tuple = (), **facts: object) -> list[set[str]]:
    """The ops that a probe is asked to build, each time it is asked; it answers with the facts."""
    asked, told = [], {"errors": {}, "ops": {}, "gpus": [], **facts}
    monkeypatch.setattr(gpus, "visible", lambda: cards)
    monkeypatch.setattr(machines, "_cache_path", lambda machine: folder / "probe.json")
    monkeypatch.setattr(machines, "_ask", lambda ops, on_wait: asked.append(ops) or told)
    return asked


@pytest.mark.parametrize(
    ("smi", "torch_bytes"),
    [
        ("[N/A], [N/A]", 119 * 2**30),  # GB10, Jetson: the GPU shares the host's memory
        ("81559, 700", 79 * 2**30),  # nvidia-smi counts what no process can allocate
        ("81559, 60000", 20 * 2**30),  # a slice of a card (MIG)
    ],
)
def test_a_card_has_the_size_that_torch_reads(smi, torch_bytes, monkeypatch, tmp_path):
    known = {"name": "NVIDIA X", "uuid": "aa", "total_bytes": torch_bytes}
    cards = tuple(gpus.parse(f"0, GPU-aa, NVIDIA X, {smi}", "GPU-aa, 7, python, 300"))
    probe_says(monkeypatch, tmp_path, cards, gpus=[known])
    (card,) = machines.examine(tmp_path).gpus
    assert card.total_bytes == card.free_bytes == torch_bytes and not card.busy
    assert bool(card.others) == (torch_bytes != 20 * 2**30), "nvidia-smi still names the processes"


def test_the_table_says_why_and_the_way_out(tmp_path, capsys):
    here = with_op(tmp_path, "async_io", "RuntimeError: DeepSpeed finds it not compatible")
    doctor.print_doctor(here, Console(width=100))
    text = capsys.readouterr().out
    able, _, unable = text.partition("can run: ")[2].partition("cannot run")
    assert "zero3_offload" in able and "async_io" in unable
    assert "zero3_nvme" in unable and "zero3_nvme" not in able


def test_on_few_gpus_the_table_says_how_many_a_strategy_needs(tmp_path):
    here = machine(tmp_path, gpus=(CARD,))
    for name, needed in (("ddp", 2), ("hsdp", 4), ("sp", 2)):
        lack = doctor.why_not(name, here)
        assert f"{name} needs {needed} GPUs; this machine has 1 GPU" in lack.text
        assert f"--gpus {needed}" in lack.hint
    assert doctor.why_not("zero2", here) is None
    here.probe["torch"] = {"built_for": ["sm_100"]}
    assert "built for sm_100" in doctor.why_not("ddp", here).text, "more such GPUs do not help"


def test_the_cache_covers_what_was_asked(tmp_path, monkeypatch):
    path, so = tmp_path / "probe.json", tmp_path / "op.so"
    so.touch()
    op = {"ok": True, "reason": "", "file": str(so), "built": True}
    ops = {"cpu_adam": op, "async_io": {**op, "built": False}}
    asked = probe_says(monkeypatch, tmp_path, ops=ops)
    for name, wanted in (("cpu_adam", {"cpu_adam"}), ("async_io", {"cpu_adam", "async_io"})):
        machines.examine(tmp_path, [name])
        assert asked.pop() >= wanted
        machines.examine(tmp_path, ["cpu_adam"])
        assert asked == [], "it is known"
    so.unlink()
    assert machines.recall(tmp_path).probe is None
    path.write_text("{half")
    assert machines.recall(tmp_path).probe is None


def test_a_probe_that_dies_is_an_answer(tmp_path, monkeypatch):
    monkeypatch.setattr(machines.sys, "executable", "/bin/false")
    monkeypatch.setattr(machines, "_cache_path", lambda machine: tmp_path / "none.json")
    found = machines.examine(tmp_path)
    assert "exit code 1" in found.probe["errors"]["probe"]
    assert obstacle(NVME, found) is not None
    assert not (tmp_path / "none.json").exists()


def probed(*words: str) -> dict:
    """What the probe says, in a line."""
    line = [sys.executable, *words]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True)
    (said,) = done.stdout.splitlines()
    return json.loads(said)


BARE = """
import sys
sys.modules |= dict.fromkeys(("torch", "deepspeed", "accelerate"))  # an import of it fails
sys.path.insert(0, {root!r})
from harness.system import probe
probe.main([])
"""


def test_the_probe_here():
    found = probed("-m", "harness.system.probe")
    assert found["torch"]["version"] and "gloo" in found["backends"]


def test_missing_packages_do_not_crash_the_probe():
    """Neither torch nor DeepSpeed can be imported."""
    found = probed("-I", "-c", BARE.format(root=str(ROOT)))
    assert "import of torch halted" in found["errors"]["torch"]
    assert found["gpus"] == []


def test_what_the_machine_lacks_is_all_that_the_doctor_refuses(tmp_path):
    """A part that only wants other company (a master, four processes, a vocabulary) can run."""
    found = {name: doctor.why_not(name, machine(tmp_path)) for name in CATALOG}
    refused = {name for name, lack in found.items() if lack}
    assert refused > {"tf32", "sparse24", "offload_adamw", "paged_adam8bit"}
    assert not refused & {"optimizer_in_backward", "sparse_embedding", "adamw_bf16"}
    assert "NVIDIA GPU" in found["sparse24"].text
    assert {name for name in refused if "./run.sh list" in found[name].hint} == set()


@pytest.mark.parametrize(
    ("why", "way"),
    [
        ("The NVIDIA driver on your system is too old (found version 12020)", "update the NVIDIA"),
        ("torch 2.13.0+cpu is built without CUDA", "install torch's CUDA build"),
        ("it finds no device", "mend the driver"),
    ],
)
def test_a_gpu_that_torch_does_not_see_is_no_reason_to_run_on_the_cpu(tmp_path, why, way):
    here = machine(tmp_path, gpus=(CARD,))
    assert here.device == "cuda" and obstacle(resolve(on_gpu(processes=1)), here) is None
    built = {"cuda": None if "without CUDA" in why else "13.0"}
    here.probe.update(gpus=[], no_cuda=why, torch=built)
    assert here.device == "cuda", "asked for nothing, a run must not end up on the CPU"
    lack = obstacle(resolve(on_gpu(processes=1)), here)
    assert lack.text == f"nvidia-smi sees 1 GPU and torch none: {why}"
    assert lack.hint.startswith(way) and "--device cpu" in lack.hint
    assert obstacle(resolve(Spec(recipe="ddp", data="synthetic", processes=2)), here) is None


def test_why_torch_sees_no_gpu_is_asked_each_time(tmp_path, monkeypatch):
    asked = probe_says(monkeypatch, tmp_path, (CARD,), no_cuda="the driver is too old")
    for _ in range(2):
        assert machines.examine(tmp_path).blind == "the driver is too old"
    assert len(asked) == 2
    monkeypatch.setattr(gpus, "visible", lambda: ())
    for _ in range(2):
        assert machines.examine(tmp_path).blind == ""
    assert len(asked) == 3, "a machine without GPUs is asked once"


def test_gpus_that_torch_cannot_use_end_a_suite_and_doctor_says_why(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(doctor, "WINDOWS", tmp_path)
    blind = machine(tmp_path, gpus=(CARD,))
    blind.probe.update(gpus=[], no_cuda="the driver is too old")
    with pytest.raises(SpecError, match="torch none: the driver is too old; update the NVIDIA"):
        run._warnings(load_suite("default", "cuda"), blind, None)
    run._warnings(load_suite("default", "cpu"), blind, None)
    doctor.print_doctor(blind, Console(width=400))
    said = capsys.readouterr().out
    assert "torch sees none: the driver is too old" in said and "shared GPU memory" in said


@pytest.mark.parametrize(("driver", "told"), [(True, 1), (False, 0)])
def test_a_run_on_the_cpu_beside_a_driver_says_so(driver, told, tmp_path, monkeypatch):
    here = machine(tmp_path)
    here.probe["no_cuda"] = "no CUDA-capable device is detected"
    monkeypatch.setattr(run, "has_driver", lambda: driver)
    found = run._warnings(load_suite("default", "cpu"), here, None)
    assert sum("CUDA-capable" in line for line in found) == told
    found = run._warnings(load_suite("default", "cpu"), here, "cpu")
    assert not any("CUDA-capable" in line for line in found), "it was asked for"


@pytest.mark.parametrize(
    ("capability", "built_for", "there"),
    [
        ((6, 1), ["sm_75", "sm_80", "sm_90"], False),
        ((8, 9), ["sm_80", "sm_86"], True),
        ((8, 0), ["sm_86", "sm_90"], False),
        ((12, 0), ["sm_80", "compute_90"], True),
        ((10, 3), ["sm_100", "sm_120"], True),
        ((6, 1), [], True),
    ],
)
def test_torch_has_machine_code_for_some_cards(tmp_path, capability, built_for, there):
    here = machine(tmp_path, gpus=(CARD,))
    here.probe["torch"] = {"version": "2.13.0", "built_for": built_for}
    here.probe["gpus"] = [{"name": "a card", "capability": list(capability)}]
    lack = obstacle(resolve(on_gpu(processes=1)), here)
    assert (lack is None) == there
    assert there or ("built for" in lack.text and "a card" in lack.text)


def test_sparse_cores_are_of_newer_gpus(tmp_path):
    here = machine(tmp_path, gpus=(CARD,))
    spec = on_gpu(recipe="ddp+bf16", processes=1)
    for capability, there in (([7, 5], False), ([9, 0], True)):
        reason = probe._too_old("sparse24", [{"name": "a card", "capability": capability}])
        here.probe["abilities"] = {"sparse24": {"cuda": reason}}
        assert (lacks("sparse24", here, spec) is None) == there


SMALL = gpus.Gpu(index=0, name="NVIDIA T4", total_bytes=15 * GIB, uuid="GPU-aa")
LARGE = gpus.Gpu(index=1, name="NVIDIA H200", total_bytes=139 * GIB, uuid="GPU-bb", used_bytes=7)


def known(card: gpus.Gpu, **more: object) -> dict[str, object]:
    """A card as torch tells it."""
    uuid = card.uuid.removeprefix("GPU-")
    return {"name": card.name, "total_bytes": card.total_bytes, "uuid": uuid, **more}


def test_mixed_cards_are_told_apart_by_their_identifiers_not_by_their_places():
    """CUDA's own order has the fastest first, nvidia-smi's that of the bus."""
    assert machines._merged((SMALL, LARGE), [known(LARGE), known(SMALL)]) == (LARGE, SMALL)
    assert machines._merged((SMALL, LARGE), [known(LARGE)]) == (LARGE,)
    unnamed = [known(SMALL, uuid=""), known(LARGE, uuid="")]
    assert machines._merged((SMALL, LARGE), unnamed) == (SMALL, LARGE)
    assert machines._merged((SMALL, LARGE), []) == (SMALL, LARGE)


def test_cuda_counts_cards_as_nvidia_smi_does_in_every_process_of_ours(monkeypatch):
    monkeypatch.delenv(gpus.ORDER, raising=False)
    row = resolve(on_gpu(processes=1, recipe="single"))
    assert command.environment(row)[gpus.ORDER] == "PCI_BUS_ID"
    monkeypatch.setenv(gpus.ORDER, "FASTEST_FIRST")
    assert command.environment(row)[gpus.ORDER] == "FASTEST_FIRST", "asked for, it stays"
    monkeypatch.setattr(gpus, "has_driver", lambda: True)
    monkeypatch.setattr(gpus, "smi", None)  # no card could be told from another by its number
    assert gpus.sample("before", 1) == []


def test_what_the_probe_said_is_kept_for_one_order_of_cards_and_one_driver(monkeypatch):
    paths, cases = set(), ("FASTEST_FIRST 535.1", "PCI_BUS_ID 535.1", "PCI_BUS_ID 580.2")
    for order, driver in map(str.split, cases):
        told = {"/proc/driver/nvidia/version": driver}
        monkeypatch.setattr(machines, "_read_text", lambda path, told=told: told.get(str(path), ""))
        monkeypatch.setenv(gpus.ORDER, order)
        paths.add(machines._cache_path(machine(Path())))
    assert len(paths) == 3


def test_torchao_s_optimizers_want_what_compiles_their_step_on_a_gpu(tmp_path):
    for recipe in ("single+adam4bit", "single+adam8bit:lib=torchao"):
        here = machine(tmp_path, gpus=(CARD,))
        row = resolve(on_gpu(processes=1, recipe=recipe))
        here.probe["abilities"] = {"inductor": {"cuda": "main.c:5: fatal error: Python.h: none"}}
        assert "python3-dev" in obstacle(row, here).hint
        on_cpu = resolve(Spec(recipe=recipe, data="synthetic"))
        assert "inductor" not in on_cpu.needs
    assert "inductor" not in resolve(on_gpu(processes=1, recipe="single+adam8bit")).needs


# ---- clocks, throttling and other processes of GPUs, as nvidia-smi would tell ----


LINES = """0, GPU-aa, 1980, 0x0000000000000000
1, GPU-bb, 1410, 0x0000000000000065
2, GPU-cc, [N/A], [N/A]
nonsense
"""
APPS = "GPU-aa, 100, python, 9\nGPU-bb, 101, python, 9\nGPU-bb, 999, [N/A], [N/A]\n"


def test_what_nvidia_smi_says_is_read():
    first, second, third = gpus.parse_states("before", LINES, APPS)
    assert first == GpuSample(
        when="before", index=0, uuid="GPU-aa", sm_clock_hz=1_980_000_000,
        held_back_by=[], processes=1,
    )  # fmt: skip
    slow = ["software power cap", "software thermal slowdown", "hardware thermal slowdown"]
    assert second.held_back_by == slow and second.processes == 2, "the bit of idleness is none"
    assert (third.sm_clock_hz, third.held_back_by, third.processes) == (0, [], 0)


def test_old_drivers_are_asked_by_the_old_name_and_only_the_run_s_gpus_count(monkeypatch):
    asked = []

    def smi(query):
        asked.append(query)
        old = "clocks_throttle_reasons" in query
        return APPS if query == gpus.APP_QUERY else LINES * old

    monkeypatch.setattr(gpus, "has_driver", lambda: True)
    monkeypatch.setattr(gpus, "smi", smi)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,1,0")
    assert [s.index for s in gpus.sample("after", 2)] == [2, 1]
    assert len(asked) == 3
    monkeypatch.setattr(gpus, "smi", lambda query: "")  # nvidia-smi is missing
    assert gpus.sample("after", 2) == []


def seen_at(when: str, **more) -> GpuSample:
    usual = {"index": 0, "uuid": "GPU-aa", "sm_clock_hz": 1_900_000_000}
    free = {"held_back_by": [], "processes": 1}
    return GpuSample(when=when, **{**usual, **free, **more})


@pytest.mark.parametrize(
    ("after", "said"),
    [
        ({}, []),
        ({"sm_clock_hz": 1_850_000_000}, []),  # a step or two of the clock
        ({"sm_clock_hz": 1_500_000_000}, ["GPU 0 clock 1900 -> 1500 MHz"]),
        ({"sm_clock_hz": 0}, []),  # not told
        ({"held_back_by": ["power brake"]}, ["GPU 0 held back by power brake"]),
        ({"processes": 2}, ["GPU 0 shared by 2 processes"]),
        ({"processes": 0}, []),  # a container that does not show even ours
    ],
)
def test_what_was_in_the_way_is_said(after, said):
    assert hindered([seen_at("before"), seen_at("after", **after)]) == said


@pytest.mark.parametrize(
    ("held", "card", "said"), [(13, 12, True), (12, 12, False), (13, 0, False)]
)
def test_memory_that_windows_moved_to_the_host_is_said(held, card, said):
    found = ok("single")
    found.environment["device_bytes"] = card * GIB
    found.ranks[0].phases["steady"] = Peak(allocated=GIB, reserved=held * GIB)
    assert any("13.0 GiB on a GPU of 12.0 GiB" in word for word in spilled(found)) is said
    found.ranks.append(dataclasses.replace(found.ranks[0], device="another GPU"))
    assert spilled(found) == []
