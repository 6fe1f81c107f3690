"""Outputs appear complete or not at all, and replace only what recpo itself wrote.

Every output is written next to its target under a temporary name and renamed at the end. A directory has a
``recpo.json`` from the start, which names its kind (``kind_of``). So a later call can distinguish a directory of its
own kind, which it may replace, from a foreign directory, which it may not. It can also distinguish the leftovers of a
killed process from the work of a running one, which holds a lock on its working directory.
"""
