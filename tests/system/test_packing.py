"""What is carried to a machine without network access: what is needed, trimmed, and unpacked."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from harness import ROOT
from harness.system import carried, packing
from harness.system.packing import Target
from strategies.base import BadInput

HERE = Target(python="3.11", torch="2.13.0")
NEEDS = {
    "torch": ["sympy", "filelock", "setuptools<82; python_version >= '3.12'"],
    "accelerate": ["torch>=2", "numpy", "huggingface_hub[cli]"],
    "huggingface-hub": ["filelock", "hf-xet; platform_machine == 'x86_64'", "tqdm"],
    "diffusers": ["Pillow", "importlib_metadata; python_version < '3.8'"],
}


def closure(names, without=()) -> set[str]:
    return packing.closure(names, HERE, NEEDS.get, without)


def test_what_is_needed_in_turn_is_carried_and_what_torch_brings_is_not() -> None:
    there = closure(["torch"]) | packing.LEFT_OUT
    assert there >= {"torch", "sympy", "filelock"} and "setuptools" not in there
    found = closure(["accelerate", "diffusers"], there)
    assert found == {"accelerate", "numpy", "huggingface-hub", "tqdm", "diffusers", "pillow"}
    assert "numpy" not in closure(["accelerate"], there | {"numpy"})


def test_pins_are_the_project_s_for_that_python() -> None:
    older = packing.roots(Target(python="3.10", torch="2.13.0"))
    newer = packing.roots(HERE)
    assert older["numpy"].startswith("2.2") and newer["numpy"].startswith("2.4")
    assert {"deepspeed", "accelerate", "transformers", "torchao", "pytest"} <= set(newer)
    assert not packing.LEFT_OUT & set(newer)


@pytest.mark.parametrize(
    ("torch", "library"),
    [("2.13.0", "cuda130"), ("2.11.0+cu126", "cuda126"), ("2.12.1+cpu", "cpu")],
)
def test_one_library_is_kept_that_of_the_cuda_that_torch_is_built_for(torch, library) -> None:
    target = Target(python="3.12", torch=torch)
    files = [f"bitsandbytes/libbitsandbytes_{name}.so" for name in
             ("cpu", "cuda126", "cuda130", "rocm70")]  # fmt: skip
    kept = [f for f in files if not packing.unused(f, target, frozenset())]
    assert kept == sorted({files[0], f"bitsandbytes/libbitsandbytes_{library}.so"})


def test_models_that_nothing_loads_are_left_out() -> None:
    keep = frozenset({"transformers.models", "transformers.models.auto"})
    kept = {
        "transformers/models/__init__.py", "transformers/models/auto/modeling_auto.py",
        "transformers/integrations/deepspeed.py", "diffusers/models/unet.py", "numpy/core.py",
        "transformers-5.dist-info/METADATA", "diffusers/pipelines/pipeline_utils.py",
    }  # fmt: skip
    dropped = {"transformers/models/bert/modeling_bert.py", "numpy/lib/tests/test_io.py",
               "diffusers/pipelines/wan/pipeline_wan.py"}  # fmt: skip
    assert {f for f in kept | dropped if packing.unused(f, HERE, keep)} == dropped


@pytest.mark.parametrize(
    ("target", "said"),
    [(Target(python="3.9", torch="2.13.0"), "--python 3.10 to 3.13"),
     (Target(python="3.11", torch="2.10.0"), "--torch 2.11.0 to 2.13.0"),
     (Target(python="3.11", torch="latest"), "torch is latest")],
)  # fmt: skip
def test_a_target_that_cannot_be_is_bad_input(target, said, tmp_path) -> None:
    with pytest.raises(BadInput, match=said):
        packing.pack(target, tmp_path / "wheels", 2**26)


def wheel(
    folder: Path, name: str, files: dict[str, str], tags: str = "py3-none-any", needs: str = ""
) -> Path:
    """A wheel with these files beside its own."""
    path, info = folder / f"{name}-1.0-{tags}.whl", f"{name}-1.0.dist-info"
    own = {f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{needs}"}
    record = "".join(f"{file},sha256=x,1\n" for file in [*files, *own])
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in {**files, **own, f"{info}/RECORD": record}.items():
            archive.writestr(file, text)
    return path


def test_a_folder_is_packed_trimmed_and_held_to_its_limit(tmp_path, monkeypatch) -> None:
    def download(wanted, target, folder) -> None:
        assert "deepspeed" in wanted and "torch" not in wanted
        wheel(folder, "transformers", {"transformers/models/bert/big.py": "x" * 9999,
                                       "transformers/__init__.py": ""})  # fmt: skip

    monkeypatch.setattr(packing, "download", download)
    monkeypatch.setattr(packing, "loaded", frozenset)
    folder = tmp_path / "wheels"
    with pytest.raises(BadInput, match=r"more than --limit.*transformers"):
        packing.pack(HERE, folder, 100)
    assert not folder.exists()
    sizes = packing.pack(HERE, folder, 2**20)
    (found,) = folder.iterdir()
    assert sizes == {found.name: found.stat().st_size}
    with zipfile.ZipFile(found) as archive:
        assert not any("bert" in name for name in archive.namelist())
        record = archive.read("transformers-1.0.dist-info/RECORD").decode()
    assert "bert" not in record and "transformers/__init__.py,sha256=x,1" in record
    with pytest.raises(BadInput, match="is there already"):
        packing.pack(HERE, folder, 2**20)


@pytest.mark.parametrize(
    ("tags", "version", "fit"),
    [("py3-none-any", (3, 12), True), ("py2.py3-none-any", (3, 11), True),
     ("cp311-cp311-manylinux_2_28_x86_64", (3, 11), True),
     ("cp311-cp311-manylinux_2_28_x86_64", (3, 12), False),
     ("cp310-abi3-manylinux2014_x86_64", (3, 12), True),
     ("cp312-abi3-manylinux2014_x86_64", (3, 11), False),
     ("py3-none-manylinux_2_28_x86_64", (3, 13), True), ("py2-none-any", (3, 13), False)],
)  # fmt: skip
def test_a_wheel_is_for_some_pythons(tags, version, fit) -> None:
    assert carried.fits(Path(f"some_thing-1.0-{tags}.whl"), version) is fit


def started(*words: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "harness.system.carried", *words]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True)


def test_only_what_this_python_lacks_is_unpacked_and_once(tmp_path) -> None:
    wheel(tmp_path, "numpy", {"numpy/__init__.py": "raise ImportError('the wrong one')"})
    tool = {"carried_probe.py": "HERE = 1", "carried_probe-1.0.data/scripts/probe": "#!python\nhi",
            "carried_probe-1.0.data/purelib/beside.py": ""}  # fmt: skip
    wheel(tmp_path, "carried_probe", tool)
    first, again = started(str(tmp_path)), started(str(tmp_path))
    folder = Path(first.stdout.strip())
    assert first.returncode == 0 and folder.is_dir() and again.stdout == first.stdout
    assert (folder / "carried_probe.py").exists() and (folder / "beside.py").exists()
    assert not (folder / "numpy").exists(), "what is installed is never hidden"
    script = folder / "bin" / "probe"
    assert script.read_text() == f"#!{sys.executable}\nhi" and script.stat().st_mode & 0o100
    assert [p for p in tmp_path.iterdir() if p.is_dir()] == [folder]


def test_what_is_too_old_for_another_wheel_is_taken_from_the_wheels(tmp_path) -> None:
    """Else an accelerate of today would meet a huggingface_hub of years ago."""
    wheel(tmp_path, "numpy", {"numpy/__init__.py": ""})
    assert carried.lacking(tmp_path) == []
    need = "Requires-Dist: NumPy[x]<99,>=77.1; python_version > '3'\n"
    asking = wheel(tmp_path, "user", {}, needs=need)
    assert carried.needs(asking) == [("numpy", (77, 1))]
    assert [carried.name_of(w) for w in carried.lacking(tmp_path)] == ["numpy", "user"]


def test_wheels_that_are_of_no_use_here_are_told(tmp_path) -> None:
    empty = started(str(tmp_path))
    assert empty.returncode == 2 and "./run.sh pack" in empty.stderr
    wheel(tmp_path, "carried_probe", {}, "cp39-cp39-manylinux2014_x86_64")
    other = started(str(tmp_path))
    assert other.returncode == 2 and "another Python" in other.stderr and not other.stdout


def test_run_sh_gives_them_to_the_python_that_it_was_named(tmp_path) -> None:
    (tmp_path / "bin").mkdir()
    python, wheels = tmp_path / "bin" / "python", tmp_path / "wheels"
    python.write_text(
        '#!/bin/bash\ncase "$*" in\n  "-m harness list") echo "$PYTHONPATH|$PATH" ;;\n'
        f'  *) exec {sys.executable} "$@" ;;\nesac\n'
    )
    python.chmod(0o755)
    wheels.mkdir()
    wheel(wheels, "carried_probe", {"carried_probe.py": ""})
    env = {**os.environ, "HEADROOM_PYTHON": str(python), "HEADROOM_WHEELS": str(wheels)}
    words = [str(ROOT / "run.sh"), "list"]
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=True)
    path, commands = done.stdout.strip().split("|")
    (unpacked,) = (p for p in wheels.iterdir() if p.is_dir())
    assert path.split(":")[:2] == [str(ROOT), str(unpacked)] and f"{unpacked}/bin:" in commands
    env["HEADROOM_WHEELS"] = str(tmp_path / "nowhere")
    lost = subprocess.run(words, env=env, capture_output=True, text=True)
    assert lost.returncode == 2 and "has no wheels" in lost.stderr
