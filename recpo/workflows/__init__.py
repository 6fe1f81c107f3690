"""One function per verb: typed objects and paths in, objects out; nothing is printed."""
