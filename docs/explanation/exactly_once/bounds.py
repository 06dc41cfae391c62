"""How much is searched.

In the programs, t trains, n's gradient is not finite, p is poison, r was refused, o steps, and s is a sample.
"""

from exactly_once.values import Bounds, Faults

BOUNDS = {
    # each rule once, in a few seconds
    "small:takeover": Bounds(programs=("tt", "t"), faults=Faults(crashes=1, takeovers=1), in_order=True),
    "small:answers": Bounds(programs=("tt", "s"), faults=Faults(takeovers=1, lost_answers=1), in_order=True),
    "small:gaps": Bounds(programs=("trt",), faults=Faults(crashes=1, stops=1, takeovers=1)),
    "small:poison": Bounds(programs=("pt", "t"), faults=Faults(crashes=1), in_order=True),
    "small:points": Bounds(programs=("tt",), faults=Faults(crashes=1, takeovers=1), keep=1, in_order=True),
    "small:damage": Bounds(programs=("ttt",), faults=Faults(crashes=1, damages=1), keep=2, in_order=True),
    "small:given-up": Bounds(
        programs=("t",), faults=Faults(crashes=2, takeovers=1), keep=1, in_order=True, max_interruptions=2
    ),
    "small:windows": Bounds(programs=("trto",), faults=Faults(crashes=1), keep=1, in_order=True),
    "small:not-finite": Bounds(programs=("noto",), faults=Faults(crashes=1), keep=1, in_order=True),
    "small:next-window": Bounds(programs=("tpoto",), faults=Faults(crashes=1), in_order=True),
    # the same, with more of everything
    "large:takeover": Bounds(programs=("tt", "tt"), faults=Faults(crashes=1, takeovers=2), in_order=True),
    "large:answers": Bounds(
        programs=("tt", "s"), faults=Faults(crashes=1, takeovers=1, lost_answers=1, stops=1), in_order=True
    ),
    "large:gaps": Bounds(programs=("trtt", "t"), faults=Faults(crashes=1, takeovers=1)),
    "large:gaps-stop": Bounds(programs=("trtt",), faults=Faults(crashes=1, stops=1, takeovers=1)),
    "large:poison": Bounds(programs=("tpt", "t"), faults=Faults(crashes=1, takeovers=1), in_order=True),
    "large:points": Bounds(programs=("ttt",), faults=Faults(crashes=1, takeovers=1), keep=1, in_order=True),
    "large:damage": Bounds(programs=("ttt",), faults=Faults(crashes=1, takeovers=1, damages=1), keep=2, in_order=True),
    "large:windows": Bounds(programs=("trotpo",), faults=Faults(crashes=1, takeovers=1), keep=1, in_order=True),
    "large:poison-points": Bounds(programs=("tpt",), faults=Faults(crashes=1), keep=1, in_order=True),
}
