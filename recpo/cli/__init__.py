"""The verbs of the command line, one typed function each."""
