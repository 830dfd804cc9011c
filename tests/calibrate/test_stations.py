"""The stations themselves, on this CPU with small shapes: what they return fits a calibration."""

from __future__ import annotations

import json

import pytest
import torch

from harness.planner.calibrate import stations
from harness.planner.calibrate.command import Outcome, build_from
from harness.planner.calibrate.stations import MEASURES, Asked, main, measure_collective
from harness.planner.calibration.record import Ceilings

HERE = Asked(device=torch.device("cpu"), small=True)


@pytest.mark.thorough
def test_what_the_stations_of_a_cpu_find_fits_a_calibration():
    found = {
        "products": stations.measure(HERE),
        "streams": stations.measure_streams(HERE),
        "attention": stations.measure_attention(HERE),
        "collective": measure_collective(HERE),
    }
    outcomes = [
        Outcome(station=name, status="ok", facts=facts)
        for name, facts in json.loads(json.dumps(found)).items()
    ]
    ceilings = build_from(outcomes, Ceilings)
    assert {"float32", "bfloat16"} <= set(ceilings.products) >= set(ceilings.model_products)
    assert all(1e6 < rate < 1e15 for rate in ceilings.products.values())
    assert [s.bytes for s in ceilings.streams] == [2**20, 4 * 2**20]
    assert 1e-8 < ceilings.launch_seconds < 1e-3 and ceilings.host_rate > 1e7
    kinds = {(a.kernel, a.tokens, a.width) for a in ceilings.attention}
    assert kinds >= {(kernel, 64, width) for kernel in ("flash", "math") for width in (64, 72)}
    assert ceilings.collective.ranks == 2 and ceilings.collective.rate > 1e5
    assert 1e-6 < ceilings.collective.seconds < 1.0


def test_a_type_that_a_library_lacks_is_a_reason_and_no_end(monkeypatch):
    def square(name, side, asked):
        if name == "bfloat16":
            raise RuntimeError("not implemented for 'BFloat16'\nmore")
        return 1e9

    monkeypatch.setattr(stations, "_square", square)
    found = stations.measure(HERE)
    assert found["missing"] == {"bfloat16": "RuntimeError: not implemented for 'BFloat16'"}
    assert "float32" in found["products"] and "bfloat16" not in found["model_products"]


def test_a_station_writes_what_it_measured(tmp_path):
    assert main(["streams", str(tmp_path / "s.json"), "--small"]) == 0
    assert json.loads((tmp_path / "s.json").read_text())["launch_seconds"] > 0
    assert "rank" in MEASURES
    with pytest.raises(SystemExit):
        main(["strems", str(tmp_path / "s.json")])
