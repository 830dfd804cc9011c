"""Claims on inference: the verdict that known rows must give, and rows that are not there."""

from __future__ import annotations

import base64

import numpy as np
import pytest

from harness.analyses import claims, samples
from harness.analyses.claim_sweeps import Verdict
from harness.report import build
from harness.report.data.lookup import Rows
from harness.report.data.rows import SuiteHead
from harness.report.rendering import analyses
from harness.result import Drawn
from tests.made.results import done

FIELDS = {"workload": "sample", "processes": 1, "model": "DiT-T/4", "objective": "flow"}
SAMPLES = 40
RIGHT = [index % 10 for index in range(SAMPLES)]


def drawn(recipe: str, held: float, beyond: float, *, wrong: int = 0, away: float = 0.0, **spec):
    """A row of so many MiB of weights and beyond them, ``wrong`` of whose samples look like another
    digit, ``away`` from the others' latents."""
    spec = {"global_batch": SAMPLES, **FIELDS, **spec}
    parts = (held, 0.0, 0.0, 0.0, beyond, 0.0)
    parity = "by design" if recipe != "single" else "exact"
    result = done(recipe, 1.0, parts, parity=parity, **spec)
    result.losses = result.grad_norms = []
    result.drawn = Drawn(
        samples=SAMPLES, evaluations=16, products=24, shape=[1, 1, 2, 2],
        latents=base64.b64encode(np.array([1 + away, -1 - away] * 2, "<f4").tobytes()).decode(),
        labels=RIGHT, noise="n", latency_seconds=[0.1], echo=1e-7,
        taken_for=[(d + 1) % 10 if i < wrong else d for i, d in enumerate(RIGHT)],
    )  # fmt: skip
    return result


def finding(words: str, *results):
    """What the one claim that contains ``words`` finds in these rows."""
    (claim,) = [c for c in samples.CLAIMS if words in c.says]
    report = build(list(results), [], SuiteHead(reference="single"))
    ((_, found),) = claims.judged([claim], Rows(report))
    return found


def test_memory_is_halved_where_weights_are_most_of_it():
    """Of 100 + b in 16 bits 50 are saved: a half (45 %) up to b = 11."""
    rows = [drawn("single", 200, 1)]
    for batch in (1, 40):
        rows.append(drawn("single+bf16_pure", 100, batch, global_batch=batch))
        for part in ("int8", "float8"):
            rows.append(drawn(f"single+bf16_pure+{part}", 50, batch, global_batch=batch))
    found = finding("8 bits halve", *rows)
    edge = "up to batch 11.1, between 1 (1% activations) and 40 (29% activations)"
    assert found.verdict is Verdict.ONLY
    assert found.condition == f"of int8 {edge} and of float8 {edge}"
    assert "int8: peak -50% at batch 1, -36% at batch 40" in found.numbers


def test_a_claim_without_its_rows_stays_open_with_the_reason():
    found = finding("4 bits quarter", drawn("single", 200, 1))
    assert found.verdict is Verdict.OPEN
    assert found.numbers == "single+bf16_pure is not among the results"
    found = finding("distillation", drawn("single", 200, 1))
    assert found.numbers == "no student of DiT-T/4 with trained weights is among the results"


def test_clusters_compress_as_far_as_their_bits():
    rows = [drawn("single", 100, 1), drawn("single+palette:bits=8", 60, 1)]
    found = finding("clustered", *rows, drawn("single+palette:bits=2", 40, 1))
    assert (found.verdict, found.condition) == (Verdict.ONLY, "of 2 bits")
    assert found.numbers.endswith("-40% in 8 bits, -60% in 2 bits")


@pytest.mark.parametrize(
    ("wrong", "verdict", "condition"),
    [((2, 2), Verdict.HOLDS, ""), ((2, 3), Verdict.ONLY, "of nf4"), ((3, 40), Verdict.NOT, "")],
)
def test_quality_is_kept_while_a_classifier_takes_samples_for_the_same(wrong, verdict, condition):
    parts = zip(("nf4", "palette"), wrong, strict=True)
    rows = [drawn(f"single+{part}", 50, 1, wrong=count, away=0.1) for part, count in parts]
    found = finding("4 bits keep", drawn("single", 200, 1), *rows)
    assert (found.verdict, found.condition) == (verdict, condition)
    assert "of 40 samples taken for the same" in found.numbers and "1.0e-01 away" in found.numbers


def test_other_data_are_known_to_no_classifier():
    rows = [drawn("single", 200, 1), drawn("single+nf4", 50, 1), drawn("single+palette", 50, 1)]
    for result in rows:
        result.drawn.taken_for = None
    found = finding("4 bits keep", *rows)
    assert found.verdict is Verdict.OPEN and "digits alone" in found.numbers


SMALLER = ("single", {"model": "DiT-T/4:depth=2", "weights": "student.safetensors"})
INSTEAD = ("single+distilled:student=student.safetensors", {})


@pytest.mark.parametrize("asked", [SMALLER, INSTEAD], ids=["a model", "in its teacher's place"])
@pytest.mark.parametrize(("wrong", "verdict"), [(2, Verdict.HOLDS), (3, Verdict.NOT)])
def test_a_student_is_held_to_its_teacher(wrong, verdict, asked):
    recipe, fields = asked
    student = drawn(recipe, 60, 1, wrong=wrong, **fields)
    others = [drawn("single", 100, 1), drawn("single+int8", 40, 1)]
    found = finding("distillation", *others, student)
    assert found.verdict is verdict
    assert "100% of its teacher's; weights -40%, samples/s x" in found.numbers
    assert found.numbers.startswith(fields.get("model", "student.safetensors") + ": ")


def test_the_story_shows_shares_of_the_row_s_own_batch():
    """Rows of other batches are for the claims alone."""
    rows = [drawn("single", 200, 1), drawn("single+int8", 50, 1, wrong=4, away=0.1)]
    rows += [drawn("single", 200, 0.5, global_batch=1)]
    head = SuiteHead(reference="single", story="quality", order=("single", "single+int8", "single"))
    table, judged = analyses.tables(build(rows, [], head))
    assert [line[0] for line in table.lines] == ["single", "single+int8"]
    cells = dict(zip(table.heads, table.lines[1], strict=True))
    assert (cells["Recognised %"], cells["As reference's %"]) == ("90.0", "90.0")
    assert cells["Peak vs ref"] == "-74.6 %" and cells["Samples"] == "by design 1.0e-01"
    assert len(judged.lines) == len(samples.CLAIMS)
