"""Outputs appear complete or not at all, and replace only what recpo itself wrote.

Every output is written next to its target under a temporary name and renamed at the end. A directory has a
``recpo.json`` from the start, which names its kind (``kind_of``). So a later call can distinguish a directory of its
own kind, which it may replace, from a foreign directory, which it may not. It can also distinguish the leftovers of a
killed process from the work of a running one, which holds a lock on its working directory.
"""

from recpo.artifacts.documents import (
    DOCUMENTS,
    MARKER,
    Kind,
    describe_os_error,
    flush,
    is_inside,
    kind_of,
    lies_in,
    marker,
    named_class,
    other_kind,
    parse_json,
    parse_yaml,
    read_json,
    read_yaml,
    seal,
    sha256,
    unseal,
    validate_archive,
    validate_configuration_files,
    verify,
    verify_sealed,
    write_tensors,
)
from recpo.artifacts.outputs import (
    PARTIAL,
    directory_in_place,
    directory_of_steps,
    locked_directory,
    output_directory,
    output_file,
    validate_output_directory,
    write_json,
)

__all__ = [
    "DOCUMENTS",
    "MARKER",
    "PARTIAL",
    "Kind",
    "describe_os_error",
    "directory_in_place",
    "directory_of_steps",
    "flush",
    "is_inside",
    "kind_of",
    "lies_in",
    "locked_directory",
    "marker",
    "named_class",
    "other_kind",
    "output_directory",
    "output_file",
    "parse_json",
    "parse_yaml",
    "read_json",
    "read_yaml",
    "seal",
    "sha256",
    "unseal",
    "validate_archive",
    "validate_configuration_files",
    "validate_output_directory",
    "verify",
    "verify_sealed",
    "write_json",
    "write_tensors",
]
