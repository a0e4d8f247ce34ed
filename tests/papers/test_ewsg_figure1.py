"""The EWSG figure's example.

Bounds lie at least six standard errors from what a right sampler gives, at fixed seeds.
"""

import numpy as np
import pytest
from ewsg2021.gaussian.chains import METHODS
from ewsg2021.gaussian.learning import learning_curves
from ewsg2021.gaussian.target import Gaussian
from harness.examples import run_experiment


@pytest.mark.full
def test_ewsg_is_below_sghmc_at_equal_budget():
    methods = {name: METHODS[name] for name in ("EWSG", "SGHMC")}
    sizes = {"chains": 4000, "passes": 30, "seeds": range(2)}
    results = learning_curves(Gaussian.draw(0), methods, **sizes)
    both = (results[name]["kl"] for name in methods)
    for ewsg, sghmc in zip(*both, strict=True):
        assert ewsg[-1] < 0.5 * sghmc[-1]
    for row in results.values():
        assert row["passes"][0] == 0
        assert row["passes"][-1] == 30
        assert len(row["kl"][0]) == len(row["passes"])


def test_everything_is_reported(tmp_path, monkeypatch):
    for name, few in {
        **{"STEPS": (0.02, 0.08), "LENGTHS": (0, 1, 4), "LENGTHS_ELSEWHERE": (4,)},
        **{"DATA_SIZES": (20, 25), "LONGER": (0, 1, 4), "STEPS_BY_KIND": (0.02, 0.05)},
    }.items():
        monkeypatch.setattr(f"ewsg2021.figure1.{name}", few)
    options = "--chains 100 --passes 3 --seeds 2 --other-data 2 --error-chains 400"
    options += " --smallest-step 9 --longest-time 3 --length-seeds 2"
    printed, found = run_experiment("ewsg2021.figure1", tmp_path, *options.split())
    panels = ("a", "b", "c", "i")
    for panel in (*(f"Panel {p}" for p in panels), "Panels f to h", "Panels j, k, l"):
        assert panel in printed
    assert {f.stem for f in tmp_path.glob("*.png")} == {"kl", "errors", "lengths"}
    names = ["fresh 0", "fresh 1", "fresh 4", "persistent 1", "persistent 4"]
    for n in ("20", "25"):
        assert list(found["lengths"]["fgh"][n]) == names
        assert list(found["lengths"]["i"][n]) == names
    kl, errors = found["kl"], found["errors"]
    assert list(kl["a"]) == list(METHODS) and list(kl["e"]) == list(kl["d"])
    for row in (*kl["a"].values(), *kl["c"].values()):
        assert len(row["kl"]) == 2 and all(np.isfinite(row["kl"][0]))
    assert len(kl["other_data"]["EWSG"]) == 2
    for points in kl["b"].values():
        taus = [p["tau_steps"] for p in points]
        assert taus[0] > 2 * taus[-1]
    for panel in "kl":
        assert errors[panel]["steps"] == [2.0**-e for e in range(9, 3, -1)]
        low, high = errors[panel]["slope"]["interval"]
        assert low <= high
