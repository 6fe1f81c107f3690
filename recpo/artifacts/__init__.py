"""What recpo writes: it appears whole or not at all, and takes the place of nothing that recpo did not write itself.

Every output is made under a name of its own beside its target and renamed in the end. A directory carries
``recpo.json`` from the first moment, which says what kind it is (``kind_of``). So a later call can tell its own kind,
which it may replace, from a directory of somebody else's, which it may not, and the leavings of a killed process from
the work of a living one: that one holds a lock on its working directory.
"""

from recpo.artifacts.checksums import seal, sha256, unseal, verify
from recpo.artifacts.disk import flush
from recpo.artifacts.documents import parse_json, read_json, read_yaml, validate_configuration_files
from recpo.artifacts.in_place import directory_in_place, directory_of_steps
from recpo.artifacts.kinds import MARKER, Kind, kind_of, marker, verify_sealed
from recpo.artifacts.leavings import PARTIAL
from recpo.artifacts.locks import locked_directory
from recpo.artifacts.os_errors import describe_os_error
from recpo.artifacts.outputs import output_directory, output_file
from recpo.artifacts.writing import RESOLVED, write_json, write_resolved

__all__ = [
    "MARKER",
    "PARTIAL",
    "RESOLVED",
    "Kind",
    "describe_os_error",
    "directory_in_place",
    "directory_of_steps",
    "flush",
    "kind_of",
    "locked_directory",
    "marker",
    "output_directory",
    "output_file",
    "parse_json",
    "read_json",
    "read_yaml",
    "seal",
    "sha256",
    "unseal",
    "validate_configuration_files",
    "verify",
    "verify_sealed",
    "write_json",
    "write_resolved",
]
