"""Scores any server of the Tinker API, through the official SDK and plain HTTP. It never imports tinsmith.

A check is a function that takes a `Tester` and raises if the server does not behave (`registry.py`). A child process
runs the checks (`worker.py`), so that one that hangs can be ended (`runner.py`).
"""
