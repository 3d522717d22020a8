"""vLLM as an engine, in an environment of its own (`make test-vllm`, or SHOAL_VLLM_PYTHON): the conformance suite, then what is
vLLM's alone. Skipped where there is no such environment."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance.core_process import ROOT, CorePool
from tests.conformance.engine_suite import ModelSuite
from tests.conformance.engine_world import World, build_world

PYTHON = os.environ.get("SHOAL_VLLM_PYTHON") or str(ROOT / ".venv-vllm" / "bin" / "python")

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(not Path(PYTHON).exists(), reason="no environment with vLLM")]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CorePool]:
    pool = CorePool(PYTHON, "vllm", tmp_path_factory.mktemp("log") / "vllm.log")
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory, pool: CorePool) -> World:
    return build_world(tmp_path_factory.mktemp("model"), pool.core)


class TestVllm(ModelSuite):
    @pytest.fixture(scope="class")
    @classmethod
    def world(cls, real: World) -> World:
        return real
