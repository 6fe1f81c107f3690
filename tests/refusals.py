"""What a refused input is: its code and the field it names, not its wording."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from recpo.base.errors import Code, RecpoError


@contextmanager
def refused(code: Code, field: str | None = None) -> Iterator[pytest.ExceptionInfo[RecpoError]]:
    """Passes if the block raises ``RecpoError`` with this code and field."""
    with pytest.raises(RecpoError) as caught:
        yield caught
    assert (caught.value.code, caught.value.field) == (code, field), str(caught.value)
