"""The request store in the memory of one process: nothing survives it.

It is for trying things out, and for reading: it shows what a store takes, without a database. `memory.py` has the
tables and `rows.py` their rows, `subjects` what each method does, and `store.py` the methods of the interface.
"""
