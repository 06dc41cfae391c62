"""The limits at the edge: of requests, connections, tenants, and callers without a key.

In the order in which a request meets them:

    bounded_http    connections: how many, how slow, how large a head
    gate            foreign names for a keyless server, and unreadable paths
    admission       by the head alone: who sends (`strangers`, `probes`), and how much of it (`quotas`)
    bodies          bytes of a body (`body_budget`), unpacked and parsed by turns (`heavy_work`)
    quotas          what a tenant may have: pending work, models, sessions, checkpoints, disk (`disk_quota`)
    value_limits    what the request store can hold
    large_answers   answers of a hundred thousand rows, one at a time

`token_buckets` and `tallies` count for them.
"""
