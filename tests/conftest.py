"""Options and fixtures that all tests share."""

import os
import sys
from pathlib import Path

import pytest

# `python -m pytest` puts the checkout first on the path. Test what is installed: the
# checkout has no binaries unless the install is an editable one, which is found anyway.
CHECKOUT = Path(__file__).resolve().parents[1]
sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != CHECKOUT]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--data-root",
        default=os.environ.get("TORCH_SGMCMC_DATA"),
        help="folder with data sets as torchvision lays them out (MNIST/raw/...); "
        "default: the environment variable TORCH_SGMCMC_DATA. Tests that need data "
        "are skipped without it",
    )


@pytest.fixture(scope="session")
def data_root(pytestconfig: pytest.Config) -> Path:
    """The folder given by --data-root; skips the test if there is none."""
    root = pytestconfig.getoption("--data-root")
    if not root:
        pytest.skip("needs data: give --data-root or set TORCH_SGMCMC_DATA")
    return Path(root)
