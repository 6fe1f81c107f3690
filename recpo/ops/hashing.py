"""Integers that look random and depend on other integers alone, so that nothing has to be drawn or stored."""

from torch import Tensor


def mixed_bits(numbers: Tensor, bits: int, start: int = 0) -> Tensor:
    """The first ``bits`` bits, 0 .. 2^bits - 1, of these numbers of the sequence SplitMix64 that begins at ``start``.

    Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014).
    """
    values = numbers * _signed(0x9E3779B97F4A7C15) + _signed(start)  # products wrap around
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        values = (values ^ _shifted(values, shift)) * _signed(factor)
    return _shifted(values ^ _shifted(values, 31), 64 - bits)


def _signed(value: int) -> int:
    """The int64 with the lowest 64 bits of ``value``."""
    value &= 2**64 - 1
    return value - 2**64 if value >= 2**63 else value


def _shifted(values: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64 (fills with zeros)."""
    return (values >> bits) & (2 ** (64 - bits) - 1)
