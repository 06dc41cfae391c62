"""Copies the curves of runs to experiment trackers. A tracker of a third party derives from `Tracker` and `RunLog`."""

from tinsmith_trackers.tracker import Destination, Run, RunLog, Tracker, TrackerError

__all__ = ["Destination", "Run", "RunLog", "Tracker", "TrackerError"]
