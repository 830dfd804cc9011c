"""Setting up, with a stand-in for Python and pip: cut short wherever, the same command mends it.

The stand-in makes a folder for an environment and a file for each thing that pip installs: half of
it first, and the whole at the end of the step. At a step that a test names it stops there.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import ROOT, cli
from tests.made.living import until

STAND_IN = """#!/bin/bash
here=$(dirname "$0"); venv=$(dirname "$here")
step() {  # NAME FOLDER
    : > "$2/half-$1"
    if [ "$AT" = "$1" ]; then
        : > "$REACHED"
        if [ "$HOW" = fail ]; then echo "no route to host" >&2; exit 1; fi
        while [ ! -e "$GO" ]; do sleep 0.02; done
    fi
    rm "$2/half-$1"; : > "$2/whole-$1"
    echo "$1" >> "$JOURNAL"
}
safe=
if [ "$1" = -P ]; then safe=-P; shift; fi
case "$1 $2" in
"-m venv") mkdir -p "$3/bin"; : > "$3/pyvenv.cfg"; cp "$0" "$3/bin/python"
    cp "$0" "$3/bin/python3"; step venv "$3"; exit ;;
"-m pip")
    [ -e "$venv/whole-venv" ] || { echo "No module named pip" >&2; exit 1; }
    case "$*" in *--version) ;; *) echo "WARNING: pip chatters" >&2 ;; esac
    case "$*" in
    *--version) ;; *torch==*) step torch "$venv" ;; *setuptools*) step tools "$venv" ;;
    *) step rest "$venv" ;;
    esac
    exit ;;
"-m harness.system.probe")
    mkdir -p "$TORCH_EXTENSIONS_DIR"
    [ ! -e "$TORCH_EXTENSIONS_DIR/lock" ] || { echo "waits for a lock for ever" >&2; exit 1; }
    : > "$TORCH_EXTENSIONS_DIR/lock"; step probe "$venv"; rm "$TORCH_EXTENSIONS_DIR/lock"; exit ;;
"-m harness") echo "runs with $TORCH_EXTENSIONS_DIR"
    echo "bytecode: $PYTHONDONTWRITEBYTECODE$PYTHONPYCACHEPREFIX"; exit ;;
esac
exec "%s" $safe "$@"
"""
STEPS = ["venv", "torch", "tools", "rest", "probe"]


class Checkout:
    """A checkout in a folder of its own, whose only Python is the stand-in."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.venv = folder, folder / ".venv"
        self.children: list[subprocess.Popen] = []
        for name in ("run.sh", "pyproject.toml"):
            shutil.copy(ROOT / name, folder / name)
        (folder / "bin").mkdir()
        self.tool("python3", STAND_IN % sys.executable)

    def tool(self, name: str, text: str) -> None:
        (self.folder / "bin" / name).write_text(text)
        (self.folder / "bin" / name).chmod(0o755)

    def start(self, *words: str, at: str = "", how: str = "", **more: str) -> subprocess.Popen:
        kept = ("HOME", "LANG", "TMPDIR")
        env = {name: os.environ[name] for name in kept if name in os.environ}
        env |= {"PATH": f"{self.folder}/bin:/usr/bin:/bin", "AT": at, "HOW": how}
        env |= {n: str(self.folder / n.lower()) for n in ("REACHED", "GO", "JOURNAL")}
        child = subprocess.Popen(
            ["bash", "run.sh", *(words or ("doctor",))],
            cwd=self.folder, env=env | more, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        self.children.append(child)
        return child

    def end(self) -> None:
        """What a trial that failed has left."""
        for child in self.children:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)

    def run(self, *words: str, **more: str) -> tuple[int, str]:
        child = self.start(*words, **more)
        said = "".join(child.communicate(timeout=60))
        return child.returncode, said

    def cut(self, at: str, number: int) -> str:
        """A set-up that gets a signal at a step, and all it started with it; what it said."""
        child = self.start(at=at)
        self.reached()
        os.killpg(child.pid, number)
        said = "".join(child.communicate(timeout=60))
        assert child.returncode != 0
        return said

    def cut_short_by_an_update(self) -> int:
        """An update of the pins is killed at its last step of pip; the next set-up's exit code."""
        pins = (ROOT / "pyproject.toml").read_text()
        (self.folder / "pyproject.toml").write_text(f"{pins}\n# new\n")
        self.cut("rest", signal.SIGKILL)
        return self.run()[0]

    def reached(self) -> None:
        until((self.folder / "reached").exists, 60, 0.02)
        (self.folder / "reached").unlink()

    @property
    def whole(self) -> bool:
        names = {path.name for path in self.venv.iterdir()}
        halves = {name for name in names if name.startswith("half-")}
        return halves == set() and {f"whole-{step}" for step in STEPS} <= names

    @property
    def journal(self) -> list[str]:
        return (self.folder / "journal").read_text().split()


@pytest.fixture
def checkout(tmp_path: Path) -> Iterator[Checkout]:
    made = Checkout(tmp_path)
    yield made
    made.end()


def test_a_set_up_to_its_end_happens_once(checkout):
    code, said = checkout.run()
    assert (code, checkout.whole) == (0, True) and f"runs with {checkout.venv}" in said
    assert "chatters" not in said and [f"step {n} of 3" in said for n in (1, 2, 3)] == [True] * 3
    assert (checkout.venv / "headroom.log").read_text().count("pip chatters") == 3
    assert checkout.run()[0] == 0 and checkout.journal == STEPS
    assert checkout.cut_short_by_an_update() == 0 and checkout.whole
    assert checkout.journal[len(STEPS) :] == ["torch", "tools", *STEPS], "made anew"


CUTS = [(step, signal.SIGINT) for step in ("venv", "torch", "probe")]
CUTS += [(step, signal.SIGKILL) for step in ("venv", "rest")]


@pytest.mark.parametrize(("at", "number"), CUTS)
def test_a_set_up_that_was_cut_short_is_mended_by_the_same_command(checkout, at, number):
    said = checkout.cut(at, number)
    assert (checkout.venv / f"half-{at}").exists(), "the trial left half a step"
    assert number is signal.SIGKILL or "The same command mends it" in said
    code, said = checkout.run()
    assert (code, checkout.whole) == (0, True), said
    assert ("making it anew" in said) is (at != "probe"), "what pip installed is whole by then"
    assert "runs with" in said


def test_a_lost_network_is_said_and_the_next_set_up_is_whole(checkout):
    code, said = checkout.run(at="rest", how="fail")
    assert code != 0 and "no route to host" in said and "did not end" in said
    assert "pip chatters" in said, "the end of pip's log"
    assert checkout.run()[0] == 0 and checkout.whole


IGNORED = shutil.ignore_patterns("__pycache__")
BARE = f'#!/bin/bash\nexec "{sys.executable}" -S "$@"\n'
"""A Python without packages of its own."""


@pytest.mark.parametrize("words", ["--version", "--help", "-h"])
def test_help_and_the_version_set_up_nothing(words, checkout, monkeypatch, capsys):
    """On a Python without packages they are the same as in the environment."""
    checkout.tool("python3", BARE)
    monkeypatch.setenv("COLUMNS", "80")
    shutil.copytree(ROOT / "harness", checkout.folder / "harness", ignore=IGNORED)
    shutil.copytree(ROOT / "strategies", checkout.folder / "strategies", ignore=IGNORED)
    code, said = checkout.run(*words.split(), COLUMNS="80")
    assert (code, checkout.venv.exists()) == (0, False), said
    with pytest.raises(SystemExit):
        cli.main(words.split())
    assert said == capsys.readouterr().out != ""


def test_list_sets_up_nothing_where_a_python_has_its_packages(checkout):
    code, said = checkout.run("list")
    assert (code, checkout.venv.exists()) == (0, False) and "runs with" in said
    checkout.tool("python3", STAND_IN % f"{checkout.folder}/bin/bare")
    checkout.tool("bare", BARE)
    code, said = checkout.run("list")
    assert code == 0 and checkout.whole
    needs = "has jinja2, psutil, rich and PyYAML, which list needs; setting up"
    assert f"no Python on the PATH {needs}" in said


def test_an_image_that_forbids_bytecode_gets_it_in_the_environment(checkout):
    """Each launch would compile torch's modules anew."""
    assert f"bytecode: {checkout.venv}/pycache\n" in checkout.run(PYTHONDONTWRITEBYTECODE="1")[1]
    assert "bytecode: \n" in checkout.run()[1]


@pytest.mark.parametrize(
    ("driver", "old"), [("570.86.10", True), ("580.65.06", False), ("", False)]
)
def test_a_driver_too_old_for_the_pinned_torch_is_told_of(driver, old, checkout):
    checkout.tool("nvidia-smi", f"#!/bin/bash\necho '{driver}'\n")
    code, said = checkout.run()
    assert (code, checkout.whole, checkout.journal) == (0, True, STEPS), said
    assert (f"the NVIDIA driver {driver} is too old" in said and "HEADROOM_PYTHON" in said) == old


def test_a_full_disk_is_named_with_what_is_free(checkout):
    checkout.tool("df", "#!/bin/bash\nprintf 'x\\n/dev/x 9 9 4096 99%% /\\n'\n")
    code, said = checkout.run(at="torch", how="fail")
    assert code != 0 and f"the disk of {checkout.venv} has 4 MiB free" in said


def test_two_set_ups_at_once_follow_one_another(checkout):
    first = checkout.start(at="torch")
    checkout.reached()
    second = checkout.start()
    waits = second.stderr.readline()
    (checkout.folder / "go").touch()
    assert "another set-up" in waits and "waiting for it" in waits
    assert [child.wait(60) for child in (first, second)] == [0, 0]
    assert checkout.journal == STEPS, "each step once"
    for child in (first, second):
        child.communicate()


def test_a_half_environment_of_an_older_version_gets_its_pip(checkout):
    """As an interrupted ``python -m venv`` leaves it, with no mark of ours."""
    (checkout.venv / "bin").mkdir(parents=True)
    (checkout.venv / "pyvenv.cfg").touch()
    shutil.copy(checkout.folder / "bin" / "python3", checkout.venv / "bin" / "python")
    (checkout.venv / "mine").touch()
    assert checkout.run()[0] == 0 and checkout.whole
    assert (checkout.venv / "mine").exists(), "what we did not make is not removed"
    assert checkout.cut_short_by_an_update() == 0 and (checkout.venv / "mine").exists()


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("VENV", "{folder}/home", "is no environment, and not empty"),
        ("VENV", "/proc/nothing/venv", "cannot write to /proc/nothing/venv; name another folder"),
        ("PYTHON", "{folder}/bin/broken", "bin/broken is no working Python 3.11 to 3.13"),
    ],
)
def test_what_cannot_be_used_is_refused_and_left_as_it_is(checkout, name, value, words):
    checkout.tool("broken", "#!/bin/bash\nexit 1\n")
    (checkout.folder / "home").mkdir()
    (checkout.folder / "home" / "letter").write_text("dear")
    code, said = checkout.run(**{f"HEADROOM_{name}": value.format(folder=checkout.folder)})
    assert code == 2 and words in said and f"HEADROOM_{name}=" in said, said
    assert [path.name for path in (checkout.folder / "home").iterdir()] == ["letter"]


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user may look into."""
    folder = Path(tempfile.mkdtemp(prefix="headroom-faults-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
def test_another_user_of_an_environment_compiles_into_a_folder_of_their_own(open_folder):
    checkout = Checkout(open_folder)
    assert checkout.run()[0] == 0
    (checkout.folder / "bin" / "python3").write_text("#!/bin/bash\nexit 1\n")  # nothing to make
    child = subprocess.run(
        ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "bash", "run.sh", "doctor"],
        cwd=checkout.folder,
        env={"PATH": f"{checkout.folder}/bin:/usr/bin:/bin", "HOME": "/nonexistent"},
        capture_output=True,
        text=True,
    )
    assert child.returncode == 0, child.stderr
    assert "runs with /nonexistent/.cache/headroom/ops-" in child.stdout


@pytest.mark.parametrize("command", ["report", "compare", "list"])
def test_a_bare_python_for_reports_is_told_what_it_lacks(checkout, command):
    checkout.tool("bare", f'#!/bin/bash\nexec "{sys.executable}" -I -S "$@"\n')
    code, said = checkout.run(command, "x", HEADROOM_PYTHON=f"{checkout.folder}/bin/bare")
    assert code == 2 and f"lacks: jinja2, psutil, rich, pyyaml, which {command} needs" in said
    assert "Traceback" not in said and "-m pip install jinja2 psutil rich pyyaml" in said
