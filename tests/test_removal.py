"""Extensions can be deleted: the core runs without each, and a missing command says so."""

from __future__ import annotations

import sys
import types

import pytest

from harness import cli, extensions


@pytest.fixture
def made(monkeypatch):
    """An extension ``made`` that is installed, and another that is not."""
    words = extensions.Command(
        "fly away", "./run.sh fly", "docs/fly.md", f"{__name__}:options", f"{__name__}:fly"
    )
    table = types.SimpleNamespace(COMMANDS={"fly": words}, HOOKS={"lift": f"{__name__}:fly"})
    monkeypatch.setitem(sys.modules, "harness.made", types.ModuleType("harness.made"))
    monkeypatch.setitem(sys.modules, "harness.made.register", table)
    monkeypatch.setattr(
        extensions, "EXTENSIONS", {"gone": ("swim", "--fins"), "made": ("fly", "--wings")}
    )
    extensions._register.cache_clear()
    yield
    extensions._register.cache_clear()


def options(parser):
    parser.add_argument("--height", type=int)


def fly(asked):
    return asked.height


def test_a_command_of_an_extension_runs_with_its_options(made, capsys):
    assert cli.main(["fly", "--height", "7"]) == 7
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    assert "fly away" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "absent"), [(["swim", "--deep"], "swim"), (["list", "--fins"], "--fins")]
)
def test_a_missing_extension_is_named(made, words, absent, capsys):
    try:
        code = cli.main(words)
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    told = capsys.readouterr().err
    assert told == f"error: {absent} is not installed: harness/gone is missing\n"


def test_hooks_come_from_those_that_are_installed(made):
    assert extensions.hooks("lift") == [fly]
    assert extensions.hook("lift", print) is fly
    assert extensions.hook("sink", print) is print
