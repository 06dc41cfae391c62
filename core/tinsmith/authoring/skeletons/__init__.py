"""The output of `tinsmith new-plugin`: one working module per kind, in which the name `skeleton` is replaced.

They are modules of ours, so that they are linted, type-checked and held by the contract suites like everything else.
"""
