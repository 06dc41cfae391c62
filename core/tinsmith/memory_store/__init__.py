"""The request store in the memory of one process: nothing survives it.

It is for trying things out, and for reading: it shows what a store takes, without a database. `memory.py` holds the
rows and the rules of the log, `store.py` the methods of the interface.
"""
