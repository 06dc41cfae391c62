"""Copies the curves of runs to experiment trackers, and adds a script's own metrics to them (`track`).

A tracker of a third party derives from `Tracker` and `RunLog`.
"""

from tinsmith_trackers.tracker import Destination, Run, RunLog, Tracker, TrackerError
from tinsmith_trackers.tracking import ScriptLog, track

__all__ = ["Destination", "Run", "RunLog", "ScriptLog", "Tracker", "TrackerError", "track"]
