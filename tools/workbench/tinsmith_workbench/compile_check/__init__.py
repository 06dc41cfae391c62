"""Compile the backend's programs for a TPU slice that is not there, and tell what they need and cost.

`command` starts one `child` process per program, which compiles it with libtpu. The compiler leaves the optimized
program as text; `hlo` reads it, `work` and `collectives` count, `formula` says what should come out, and `figures`
puts it together.
"""
