"""Archives of tensors and programs (zip files of torch), checked before torch reads them."""

from __future__ import annotations

from pathlib import Path
from zipfile import ZIP_STORED, ZipFile


def validate_archive(file: Path, *, contents: bool) -> None:
    """Raises unless torch reads an archive as it is here, and none of its records is larger than the archive.

    torch stores records as they are. A compressed record could become thousands of times its size in memory (a "zip
    bomb"), and a memory-mapped one would be read as the bytes that it was compressed to. A record that its attributes
    mark as a directory gives torch nothing to read: the tensor would keep whatever its memory contained.

    Args:
        file: the archive.
        contents: also compare the CRC-32 of every record, which torch does not do. This reads the whole file.

    Raises:
        ValueError, OSError, zipfile.BadZipFile, EOFError, NotImplementedError: it is no such archive, or is damaged.
    """
    with ZipFile(file) as archive:
        names = set[str]()
        for record in archive.infolist():
            if record.compress_type != ZIP_STORED or record.compress_size != record.file_size:
                raise ValueError(f"{record.filename} is compressed")
            if record.filename in names:
                raise ValueError(f"{record.filename}: two records have this name")
            if record.external_attr or record.is_dir():
                raise ValueError(f"{record.filename}: its attributes have changed")
            names.add(record.filename)
        if sum(record.file_size for record in archive.infolist()) > file.stat().st_size:
            raise ValueError("its records are larger than the file")
        for record in archive.infolist() if contents else ():
            with archive.open(record) as content:
                while content.read(1 << 20):
                    pass
