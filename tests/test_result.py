"""Result files: typed, versioned, written whole or not at all; a bad one is named."""

from __future__ import annotations

import dataclasses
import json
import stat

import pytest

from harness import json_files
from harness.result import BadResult, Check, Peak, Rank, Result, Status, load
from harness.spec import Spec


def example() -> Result:
    rank = Rank(
        rank=0, device="cpu", baseline_bytes=5, phases={"load": Peak(allocated=7)},
        categories=None, nvme_bytes=0, warmup_seconds=[2.0],
        step_seconds=[1.0, 1.5], phase_seconds={"load": 0.5},
    )  # fmt: skip
    check = Check(name="processes", asked=2, found=2, ok=True)
    return Result(
        status=Status.OK, spec=Spec(recipe="ddp"), losses=[1.0, 0.5], ranks=[rank], audit=[check]
    )


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "runs" / "a" / "result.json"
    example().write(path)
    assert load(path) == example()
    assert stat.S_IMODE(path.stat().st_mode) & 0o044 == 0o044, "colleagues may read it"


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "result.json"
    example().write(path)
    monkeypatch.setattr(json_files.os, "replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    changed = example()
    changed.losses = [9.0]
    with pytest.raises(OSError, match="full"):
        changed.write(path)
    assert load(path).losses == [1.0, 0.5]
    assert [p.name for p in tmp_path.iterdir()] == ["result.json"]


def broken(**changes) -> str:
    data = json.loads(json.dumps(dataclasses.asdict(example())))
    data.update(changes)
    return json.dumps({k: v for k, v in data.items() if v != "DROP"})


@pytest.mark.parametrize(("text", "fault"), [
    ("{", "unreadable"), ("[]", "not a result"), ('{"a": 1}', "not a result"),
    (broken(schema=99), "schema 99"), (broken(status="fine"), "fine"),
    (broken(losses="many"), "losses"), (broken(losses=["a"]), r"losses\[0\]"),
    (broken(surprise=1), "surprise"), (broken(status="DROP"), "status"),
    (broken(parameters=True), "parameters"),
])  # fmt: skip
def test_a_bad_file_is_named_with_its_fault(tmp_path, text, fault):
    path = tmp_path / "result.json"
    path.write_text(text)
    with pytest.raises(BadResult, match=fault) as error:
        load(path)
    assert str(path) in str(error.value)


def test_a_field_that_has_ended_is_skipped_in_older_files():
    @dataclasses.dataclass
    class Row:
        ENDED = ("wire",)
        kept: int

    assert json_files.build(Row, {"kept": 3, "wire": {"backend": "nccl"}}, "row") == Row(3)
    with pytest.raises(ValueError, match="unknown field 'wired'"):
        json_files.build(Row, {"kept": 3, "wired": None}, "row")
