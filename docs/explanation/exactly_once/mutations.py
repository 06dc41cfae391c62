"""Mistakes that the checker must find: one rule of the protocol left out, and the bounds in which it shows."""

MUTATIONS = {
    "complete_unfenced": ("`complete` does not ask whether a later engine has taken over", "small:takeover"),
    "complete_twice": ("`complete` does not ask whether the operation is still running", "small:answers"),
    "claim_unfenced": ("`claim` does not ask whether a later engine has taken over", "small:takeover"),
    "claim_not_atomic": (
        "`claim` reads in one transaction, and marks in another",
        "small:takeover",
    ),
    "claim_answer_lost": ("an engine without an answer to `claim` does not ask for its operations", "small:answers"),
    "requeue_unfenced": ("`requeue` does not ask whether a later engine has taken over", "small:takeover"),
    "requeue_without_attempts": ("`requeue` does not count", "small:poison"),
    "requeue_in_company": ("`requeue` does not mark operations that must run alone", "small:poison"),
    "requeue_keeps_position": ("`requeue` leaves `next_seq_id` where it is", "small:takeover"),
    "no_requeue": ("a starting engine does not requeue the running operations", "small:takeover"),
    "resubmit_runs_again": ("a repeat queues the operation again", "small:takeover"),
    "point_early": (
        "a recovery point is registered before the results up to it are recorded",
        "small:points",
    ),
    "point_unfenced": (
        "`add_recovery_point` does not ask whether a later engine has taken over",
        "small:points",
    ),
    "point_shared_names": (
        "engines write their recovery points of one seq_id to one directory",
        "small:given-up",
    ),
    "tidy_removes_newer": (
        "an unregistered recovery point is removed although it is newer than the registered ones",
        "small:points",
    ),
    "prune_past_oldest": ("`prune` keeps the log after the newest recovery point, not the oldest", "small:damage"),
    "gap_closed_while_running": ("`fail_gaps` continues while an operation before the gap runs", "small:gaps"),
    "windows_ignored": ("a step is applied although a pass of its window has failed", "small:windows"),
    "windows_forgotten": ("an engine knows of no pass that failed before it started", "small:next-window"),
    "discards_not_replayed": ("recovery applies a discarded step", "small:windows"),
    "discards_are_failures": (
        "`complete` records a discarded step as an operation without effect",
        "small:not-finite",
    ),
    "prune_failed_passes": ("`prune` keeps no failed pass whose window is open", "small:windows"),
    "replay_from_start": ("recovery replays the whole log on top of the recovery point", "small:points"),
}
