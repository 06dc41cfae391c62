"""An explicit-state model of the operation log and its engines; see ../exactly-once.md.

Run `python -m exactly_once` in docs/explanation. Nothing of tinsmith is imported: names are the same, code is not.
"""
