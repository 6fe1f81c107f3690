"""A factor model of the small simulated log."""

import pytest

from recpo.data.prepared import Prepared
from recpo.factorization.graded import FactorOptions
from recpo.factorization.selection import fit_factors


@pytest.fixture(scope="session")
def data(prepared):
    return Prepared.open(prepared)


@pytest.fixture(scope="session")
def factors(data):
    return fit_factors(data, FactorOptions(ranks=(3,), ridges=(2.0,), sweeps=3))
