"""Types of ranges: numbers that the parser made are plain once the options are built."""

from dataclasses import dataclass

import pytest

from recpo.base.errors import NonNegativeFloat, PositiveInt, validate_ranges
from tests.refusals import refused


@dataclass(frozen=True)
class Options:
    rate: NonNegativeFloat = 0.5
    size: PositiveInt | None = None
    sizes: tuple[PositiveInt, ...] = ()

    def __post_init__(self):
        validate_ranges(self, "group.")


def test_numbers_are_plain():
    options = Options(NonNegativeFloat(0.25), PositiveInt(3), (PositiveInt(1), 2))
    assert [type(one) for one in (options.rate, options.size, *options.sizes)] == [float, int, int, int]
    assert options == Options(0.25, 3, (1, 2))


@pytest.mark.parametrize(("name", "value"), [("rate", -1.0), ("rate", float("nan")), ("size", 0), ("size", 1.5)])
def test_values_outside_are_refused(name, value):
    with refused("out_of_range", f"group.{name}"):
        Options(**{name: value})


def test_a_class_of_ones_own_may_have_types_that_only_a_type_checker_knows():
    @dataclass(frozen=True)
    class Own(Options):
        fitted: "OnlyForTypeCheckers | None" = None  # noqa: F821

    assert Own(rate=0.25).fitted is None
    with refused("out_of_range", "group.rate"):
        Own(rate=-1.0)
