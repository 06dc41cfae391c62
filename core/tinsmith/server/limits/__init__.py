"""The limits at the edge: of requests, connections, tenants, and callers without a key.

A connection meets those of `bounded_http` first: how many, how slow, how large a head. `edge` takes each request past a
list of limits, which `create_app` shows, in this order:

    gate         foreign names for a keyless server, and unreadable paths
    probes       health probes, which pass no other limit
    strangers    who sends, and how many requests without a key
    edge.Rates   how many requests of a tenant, and how many at a time (`quotas`)
    bodies       bytes of a body (`body_budget`), unpacked and parsed by turns (`heavy_work`)

Routes ask `quotas` what a tenant may have: pending work, models, sessions, checkpoints, and disk (`disk_quota`). They
build large answers one at a time (`heavy_work`). `counts` counts for all of them.
"""
