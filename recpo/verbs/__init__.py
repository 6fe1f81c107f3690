"""One file per verb: a frozen dataclass whose fields are the options and whose ``execute`` does the work."""
