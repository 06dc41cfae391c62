"""What `tinsmith new-plugin` writes: one module per kind, whole and working, in which the name `skeleton` is replaced.

They are modules of ours, so that they are linted, type-checked and held by the contract suites like everything else.
"""
