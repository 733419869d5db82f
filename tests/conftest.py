import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from threadpoolctl import threadpool_limits

# Small matrices: one BLAS thread is faster, and test workers must not fight for cores.
threadpool_limits(1)

settings.register_profile("flmarket", deadline=None, derandomize=True, max_examples=100)
settings.load_profile("flmarket")


def pytest_xdist_auto_num_workers():
    """`-n auto`: one more than there are cores, because many tests wait for other processes."""
    return (os.cpu_count() or 1) + 1


@pytest.fixture
def rng():
    return np.random.default_rng(20221217)


@pytest.fixture(scope="session")
def data_dir():
    """The real data sets: the directory named by FLMARKET_DATA, or shared/data beside the project."""
    candidates = [os.environ.get("FLMARKET_DATA"), Path(__file__).parents[2] / "shared" / "data"]
    for candidate in candidates:
        if candidate and Path(candidate).is_dir():
            return Path(candidate)
    pytest.skip("no real data: set FLMARKET_DATA to the directory that holds the data sets")
