"""Fitted baselines in one safetensors file with a checksum, which an evaluation keeps."""

import inspect
import json
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError
from safetensors.torch import load, save

from recpo.artifacts.checksums import sha256
from recpo.artifacts.documents import describe_os_error
from recpo.artifacts.outputs import output_file
from recpo.base.errors import RecpoError
from recpo.policies.baseline import BaselinePolicy, EasePolicy, ImplicitPolicy

_FILE_REMEDY: Final = "remove the file, it will be made again"
_KINDS: Final = {own.__name__: own for own in (ImplicitPolicy, EasePolicy)}

#: A policy that is fitted and kept.
FittedPolicy = ImplicitPolicy | EasePolicy


def options_of(policy: BaselinePolicy) -> dict[str, Any]:
    """The constructor options of a baseline, which keeps each under its name; without ``num_items``."""
    names = inspect.signature(type(policy)).parameters
    return {name: getattr(policy, name) for name in names if name != "num_items"}


def save_fitted(policy: FittedPolicy, path: Path | str) -> None:
    """Writes a file that appears complete or not at all: tensors, and options and facts as JSON.

    An existing file is replaced.
    """
    tensors = policy.state_dict()
    own = {"num_items": policy.num_items, **options_of(policy)}
    described = {"kind": type(policy).__name__, "options": own, "facts": policy.facts}
    content = json.dumps(described, sort_keys=True, allow_nan=False)
    checksum = sha256(save(tensors) + content.encode())
    with output_file(Path(path)) as working:  # one entry: safetensors writes several in any order
        working.write_bytes(save(tensors, {"recpo": f"{checksum} {content}"}))


def open_fitted(path: Path | str) -> FittedPolicy:
    """Reads a file that ``save_fitted`` wrote.

    Raises:
        RecpoError: there is no such file, it contains something else, or it is damaged.
    """
    path = Path(path)
    try:
        content = path.read_bytes()
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
        checksum, text = header["recpo"].split(" ", 1)
        described, tensors = json.loads(text), load(content)
        if sha256(save(tensors) + text.encode()) != checksum:
            raise RecpoError(
                f"{path} is not as it was written (its checksum differs); {_FILE_REMEDY}",
                code="damaged",
                field=str(path),
            )
        policy = _KINDS[described["kind"]](**described["options"])
        policy.load_state_dict(tensors, assign=True)  # a copy of a matrix of items by items may not fit
        policy.facts = described["facts"]
        return policy.eval()
    except OSError as error:
        raise RecpoError(describe_os_error(error, path), code="missing_file", field=str(path)) from error
    except (SafetensorError, ValueError, KeyError, TypeError, OverflowError, RuntimeError) as error:
        raise RecpoError(
            f"{path} is damaged or no model of recpo ({error!r}); {_FILE_REMEDY}", code="damaged", field=str(path)
        ) from error
