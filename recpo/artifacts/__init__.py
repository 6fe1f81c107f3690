"""Outputs appear complete or not at all, and replace only what recpo itself wrote.

Every output is written next to its target under a temporary name and renamed at the end. A directory has a
``recpo.json`` from the start, which names its kind (``kind_of``). So a later call can distinguish a directory of its
own kind, which it may replace, from a foreign directory, which it may not. It can also distinguish the leftovers of a
killed process from the work of a running one, which holds a lock on its working directory.
"""

from recpo.artifacts.archives import validate_archive
from recpo.artifacts.checksums import is_inside, seal, sha256, unseal, verify
from recpo.artifacts.class_names import lies_in, named_class
from recpo.artifacts.disk import flush
from recpo.artifacts.documents import parse_json, parse_yaml, read_json, read_yaml, validate_configuration_files
from recpo.artifacts.in_place import directory_in_place, directory_of_steps
from recpo.artifacts.kinds import MARKER, Kind, kind_of, marker, other_kind, verify_sealed
from recpo.artifacts.leavings import PARTIAL
from recpo.artifacts.locks import locked_directory
from recpo.artifacts.os_errors import describe_os_error
from recpo.artifacts.outputs import output_directory, output_file, validate_output_directory
from recpo.artifacts.tensors import write_tensors
from recpo.artifacts.writing import write_json

__all__ = [
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
