"""What a refused input is: its code and the field it names, not its wording."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import EllipsisType

import pytest

from recpo.base.errors import Code, RecpoError


@contextmanager
def refused(
    code: Code | tuple[Code, ...], field: str | EllipsisType | None = None
) -> Iterator[pytest.ExceptionInfo[RecpoError]]:
    """Passes if the block raises ``RecpoError`` with this code (or one of these) and field; ``...`` is any field."""
    with pytest.raises(RecpoError) as caught:
        yield caught
    found = f"{caught.value.code}, {caught.value.field}: {caught.value}"
    assert caught.value.code in ((code,) if isinstance(code, str) else code), found
    assert field is ... or caught.value.field == field, found
