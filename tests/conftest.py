"""Fixtures shared by all tests: the device, the seed, tier selection and output poisoning."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=20261129, help="seed of all random inputs")


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def pytest_configure(config: pytest.Config) -> None:
    # Triton reads this once at import: without a GPU every kernel test runs in the interpreter.
    if "TRITON_INTERPRET" not in os.environ and not _has_gpu():
        os.environ["TRITON_INTERPRET"] = "1"
    import torch

    torch.set_num_threads(int(os.environ.get("TINFER_TEST_THREADS", "1")))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if _has_gpu():
        return
    skip = pytest.mark.skip(reason="needs an accelerator; run on one with `pytest -m gpu`")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda" if _has_gpu() else "cpu"


@pytest.fixture(autouse=True)
def _return_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """Cached GPU memory goes back after a test, so that several suites can share one card."""
    yield
    if "gpu" in request.keywords and _has_gpu():
        import torch

        torch.cuda.empty_cache()


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--seed"))
