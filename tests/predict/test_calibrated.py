"""Times of a card by its typical or calibrated figures, and over several machines; what stands
beside, and a calibration's own uncertainty."""

from __future__ import annotations

import dataclasses
import json

import pytest

from harness import cli
from harness.planner import overhead, uncertainty, verdict
from harness.planner.calibration import store
from harness.planner.plan.candidates import on_nodes
from harness.planner.speed import rates, roofline
from harness.planner.speed.roofline import SPREAD
from harness.prediction import Work
from harness.system import cards
from strategies.base import BadInput
from tests.made.calibrations import CPU, GIB, H200, MIB, made, row, rows
from tests.made.predictions import asked, made_up, prediction


@pytest.fixture(autouse=True)
def kept(monkeypatch, tmp_path):
    """A store of this test alone, on a machine with that CPU."""
    monkeypatch.setattr(store, "OWN", tmp_path / "own")
    monkeypatch.setattr(store, "torch", lambda: "2.13.0")
    monkeypatch.setattr(store, "processor", lambda: CPU.name)
    return tmp_path / "own"


def keep(calibration, folder) -> None:
    calibration.write(store.file_of(calibration, folder))


def card(calibration=None):
    found = store.applied(calibration or made())
    return dataclasses.replace(rates.of_device(found.calibration.device), calibrated=found)


def work(kind: str, **more) -> Work:
    usual = {"phase": "forward", "dtype": "bfloat16", "flops": 0, "bytes": 8, "count": 1}
    return Work(kind=kind, **{**usual, **more})


def one(kind: str, processes: int = 1, on=None, **more) -> roofline.Seconds:
    return roofline.seconds([work(kind, **more)], on or card(made(rows=[])), processes)


# ---- rates ----


@pytest.mark.parametrize(("kind", "given", "seconds"), [
    ("product", {"flops": 10**15, "bytes": 2 * 10**12}, 10**15 / 600e12),  # 500 products a number
    ("product", {"flops": 10**15}, 10**15 / 800e12),
    ("product", {"flops": 10**15, "dtype": "float32"}, 10**15 / 50e12),
    ("attention", {"flops": 10**15}, 10**15 / 250e12),
    ("memory", {"bytes": 5 * MIB}, 3e-6),  # a launch
    ("memory", {"bytes": 100 * MIB}, 100 * MIB / 8e12),
    ("memory", {"bytes": 1000 * MIB}, 1000 * MIB / 4e12),
    ("transfer", {"bytes": 9 * 10**9}, 9e9 / 45e9),
    ("streamed", {"bytes": 9 * 10**9}, 9e9 / 45e9),  # nothing hides it
])  # fmt: skip
def test_each_kind_of_work_takes_what_was_measured(kind, given, seconds):
    found = one(kind, **given)
    assert found.compute + found.offload == pytest.approx(seconds)


def test_copies_and_collectives_take_what_was_measured_where_nothing_hides_them():
    streamed = {"bytes": 9 * 10**9}
    busy = [work("product", flops=600 * 10**12), work("streamed", **streamed)]
    assert roofline.seconds(busy, card(made(rows=[])), 1).offload == 0
    # As an optimizer in host memory does: weights go back while the host steps the next ones.
    aside = [work(kind, phase="optimizer", **streamed) for kind in ("host", "streamed")]
    both, host = (roofline.seconds(some, card(made(rows=[])), 1) for some in (aside, aside[:1]))
    assert both.offload == pytest.approx(max(9e9 / 45e9, host.offload)) and host.offload > 0
    sent = one("collective", 8, bytes=8 * 10**9).communication
    assert sent == pytest.approx(2e-5 + 7e9 / 300e9)


def test_rows_that_wait_for_the_host_tell_its_speed_and_not_the_card_s():
    """Rows of a GPU at 1.25 times its ceilings, beside two whose host takes 40 us an operation."""
    device = [dataclasses.replace(one, operations=1000) for one in rows(1.25, 0.02)]
    waiting = [row("single", 0.4, 0.01, operations=10_000), row("ddp", 0.2, 0.02, operations=5000)]
    bound = made(rows=[waiting[0], *device, waiting[1]])
    fit = store.applied(bound).fitted
    assert fit.host == pytest.approx(40e-6) and fit.rows == 6
    assert fit.factors["compute"] == pytest.approx(1.25, rel=0.03)
    many = one("memory", on=card(bound), bytes=8, count=10_000)
    assert many.total == pytest.approx(0.4) and many.spread < 0.15 * many.total
    share = max(fit.shares.values())
    assert (many.total / many.low, many.high / many.total) == pytest.approx((1 + share,) * 2)
    assert one("product", on=card(bound), flops=10**15).overhead == 0
    without = store.applied(made(rows=rows(1.25, 0.02))).fitted
    assert without.host == 0 and without.factors["compute"] == pytest.approx(1.25, rel=0.03)


def test_processes_share_a_cpu_and_hide_nothing_behind_it():
    cpu = cards.of_cpu("some CPU", 4, 16 * GIB)
    alone, two = (one("product", n, cpu, flops=10**12, dtype="float32") for n in (1, 2))
    assert two.compute == pytest.approx(2 * alone.compute)
    busy = work("product", flops=10**12, dtype="float32", phase="backward")
    sent = work("overlapped", bytes=10**9, phase="backward")
    assert roofline.seconds([busy, sent], cpu, 2).communication > 0.01
    gpu = cards.find("A100-80GB")
    assert roofline.seconds([busy, sent], gpu, 2).communication == 0


def test_a_drive_is_as_fast_as_data_sheets_of_pcie_3_and_4_say():
    """A Samsung 970 EVO Plus reads 3.5 GB/s and writes 3.3, a 980 PRO 7 and 5."""
    seconds = one("nvme", on=rates.of_device(H200), bytes=7 * 10**9).offload
    assert 7 / 7 < seconds < 7 / 3.3 * 1.5


def test_the_uncertainty_is_of_the_rows_and_narrower():
    busy = {"flops": 10**15}
    typical = one("product", on=rates.of_device(H200), **busy)
    found = one("product", on=card(made(rows=rows(1.25, 0.03))), **busy)
    bare = one("product", **busy)
    assert found.compute == pytest.approx(bare.compute * 1.25, rel=0.01)
    assert found.high / found.total < 1.15 < typical.high / typical.total
    reach = uncertainty.reach()
    for one_of in (typical, bare):  # without rows there is no uncertainty of its own
        ends = one_of.low / one_of.total, one_of.high / one_of.total
        assert ends == pytest.approx((reach.low, reach.high))
    offload = one("nvme", on=card(made(rows=rows())), bytes=10**9)
    assert offload.high / offload.total == pytest.approx(1 + SPREAD["offload"])


def test_what_stands_beside_a_training_is_what_was_measured():
    found = overhead.fixed_overhead(card(), 8)
    assert (found.context, found.libraries, found.communication) == (500 * MIB, 70 * MIB, 200 * MIB)
    assert overhead.fixed_overhead(card(), 1).communication == 0
    typical = overhead.fixed_overhead(rates.of_device(H200), 8)
    assert found != typical and typical.libraries == 64 * MIB
    partly = made(standing=dataclasses.replace(made().standing, communication=None))
    assert overhead.fixed_overhead(card(partly), 8).communication == typical.communication


def test_a_card_that_no_table_knows_is_planned_for_once_it_was_measured(kept):
    unknown = dataclasses.replace(H200, name="NVIDIA Rubin R100", memory_bytes=280 * GIB)
    with pytest.raises(BadInput):
        rates.find("NVIDIA Rubin R100")
    keep(made(device=unknown), kept)
    found = rates.as_calibrated(rates.find("nvidia rubin r100"))
    assert found.words == "NVIDIA Rubin R100 (280.0 GiB)" and found.calibrated is not None


def test_the_calibration_of_another_card_is_not_taken(kept):
    keep(made(), kept)
    assert rates.as_calibrated(cards.find("H200")).calibrated is not None
    assert rates.as_calibrated(cards.find("H100-80GB")).calibrated is None
    assert rates.as_calibrated(cards.of_size(139 * GIB)).calibrated is None
    assert rates.as_calibrated(rates.this_cpu()).calibrated is None
    keep(made(CPU), kept)
    assert rates.as_calibrated(rates.this_cpu()).calibrated is not None


# ---- plans ----


def on_cpu(gib: float):
    none = {"allocated": None, "reserved": None, "least": None, "host": None}
    return dataclasses.replace(prediction(gib), device="cpu", **none)


def test_a_cpu_must_hold_all_processes():
    cpu = cards.of_cpu("some CPU", 2, 10 * GIB)
    found = verdict.judge(asked("ddp", device="cpu", processes=2), on_cpu(3), cpu)
    interpreters = 2 * overhead.fixed_overhead(cpu, 1).total
    assert found.need_bytes == 6 * GIB + interpreters and found.verdict == "fits"
    assert verdict.judge(asked("ddp", device="cpu", processes=4), on_cpu(3), cpu).verdict == "no"


def planned(capsys, monkeypatch, *words: str) -> str:
    made_up(monkeypatch, lambda row: on_cpu(1) if "--cpu" in words else 1)
    assert cli.main(["plan", "--recipes", "ddp", "zero2", *words]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_a_plan_says_what_its_times_rest_on(kept, capsys, monkeypatch, tmp_path):
    typical = planned(capsys, monkeypatch, "--gpu", "H200")
    assert "typical figures. ./run.sh calibrate" in typical and "Calibrated" not in typical
    keep(made(), kept)
    own = planned(capsys, monkeypatch, "--gpu", "H200", "--json", str(tmp_path / "p.json"))
    assert "Calibrated: NVIDIA H200, driver 580.65, torch 2.13.0+cu130, 2026-11-22" in own
    assert "typical figures" not in own
    data = json.loads((tmp_path / "p.json").read_text())
    low, total, high = (data["rows"][0][f"step_seconds{end}"] for end in ("_low", "", "_high"))
    assert (total / low, high / total) == pytest.approx((1.03, 1.03))
    assert data["rests_on"].startswith("Calibrated: NVIDIA H200")
    assert planned(capsys, monkeypatch, "--gpu", "H200", "--calibration", "none") == typical


def test_a_plan_for_this_cpu(kept, capsys, monkeypatch):
    found = planned(capsys, monkeypatch, "--cpu", "--model", "DiT-S/4", "--global-batch", "8")
    assert f"2 processes on {CPU.name}" in found and "of all processes" in found
    keep(made(CPU), kept)
    assert "Calibrated: Intel" in planned(capsys, monkeypatch, "--cpu", "--global-batch", "8")


def test_a_calibration_of_a_cpu_is_none_of_a_gpu(tmp_path, capsys):
    made(CPU).write(tmp_path / "cpu.json")
    words = ["plan", "--gpu", "H200", "--calibration", str(tmp_path / "cpu.json")]
    assert cli.main(words) == 2
    assert "is of Intel(R) Xeon(R) Processor, 2 cores; give one of" in capsys.readouterr().err


def test_rows_that_only_wait_for_others_do_not_set_the_pace_of_computing():
    waits = row("ddp", 9.0, 1.0, communication=1.0, processes=2)
    found = card(made(rows=[*rows(), waits])).calibrated.fitted
    assert found.factors["compute"] == pytest.approx(1.25)


# ---- several machines ----

CARD = cards.find("A100-80GB")


def sent(on, gpus: int, kind: str = "collective", **more) -> float:
    """Seconds of a GB that all send, unless ``more`` says otherwise."""
    return one(kind, gpus, on, **{"phase": "backward", "bytes": 10**9, **more}).communication


def taken(gpus: int, nodes: int | None) -> float:
    return sent(on_nodes(CARD, gpus, nodes), gpus)


def test_gpus_of_one_machine_do_not_take_the_network():
    near, far = (10**9 * 15 / 16 / rate for rate in (CARD.link_bandwidth, CARD.network_bandwidth))
    assert near < 0.9 * far
    assert taken(16, 1) == pytest.approx(near, rel=0.02)
    assert taken(16, 2) == taken(16, None) == pytest.approx(far, rel=0.02)
    assert taken(16, 2) < taken(16, 16) == pytest.approx(far, rel=0.03)
    assert taken(4, 2) > taken(4, 1) == taken(4, None)


def test_gpus_that_nvlink_joins_beyond_a_machine_do_not_take_the_network():
    card = dataclasses.replace(cards.find("GB200"), network_bandwidth=90e9)

    def bandwidth(gpus: int) -> float:
        return 10**9 * (gpus - 1) / gpus / (sent(card, gpus) - rates.COLLECTIVE)

    assert (card.node, card.domain) == (4, 72)
    assert bandwidth(4) == pytest.approx(card.link_bandwidth, rel=0.02)
    assert bandwidth(72) == pytest.approx(card.link_bandwidth, rel=0.02)
    assert bandwidth(144) == pytest.approx(90e9, rel=0.02)
    assert card.host_bytes(72) == 4 * card.host_share, "memory is of a machine"


def test_a_collective_of_512_ranks_waits_for_each_of_them():
    """NCCL's model of a ring over 64 nodes of 8, by its source: 1.9 and 4 microseconds a rank."""
    card = cards.find("MI300X")
    within = sent(card, 8, bytes=8)
    assert within == pytest.approx(rates.COLLECTIVE, rel=0.01)
    ring = sent(card, 512, bytes=8) - within
    assert ring == pytest.approx(440 * 1.9e-6 + 64 * 4e-6, rel=0.01)
    busy = work("product", phase="backward", flops=int(10 * 0.5 * 1307e12))  # for ten seconds
    gathers = [work(kind, phase="backward", bytes=3 * 10**8, count=100)
               for kind in ("collective", "overlapped")]  # fmt: skip
    shown, hidden = (roofline.seconds([busy, one], card, 512).communication for one in gathers)
    assert hidden == 0 and shown > 0.15, "overlap is what the engine's launch file says"


def test_rings_of_ranks_that_are_a_node_apart_share_its_network():
    """HSDP on 8 nodes: eight rings, each of a share of the gradients, use the rails at once."""
    eight = sent(CARD, 64, group=8, stride=8, bytes=10**9 // 8)
    assert eight == pytest.approx(sent(CARD, 64, group=64), rel=0.15)
    assert sent(CARD, 64, group=8, stride=1, bytes=10**9 // 8) < 0.2 * eight


def test_a_network_of_the_users_own_counts():
    for wrong in (0.0, -3.0, float("nan"), float("inf")):
        with pytest.raises(BadInput, match="give --network GB/s above 0"):
            rates.with_network(CARD, wrong)
    found = rates.with_network(CARD, 7.0)
    assert found.network_bandwidth == 7e9 and found.network_told == "as given"
