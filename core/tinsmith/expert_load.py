"""How evenly a pass uses the experts of its model: the metrics of hosted Tinker, whichever backend has counted.

Legend: L = layers with experts, E = experts of a layer.
"""

from tinsmith.operations import IntArray


def expert_metrics(num_tokens_LE: IntArray) -> dict[str, float]:
    """Return the metrics of a pass, given how many of its own tokens each expert computes.

    A token counts for each of its experts. Names and meanings follow the SDK's `ForwardBackwardOutput`.
    """
    balance_L1 = num_tokens_LE.mean(axis=1, keepdims=True)
    violation_LE = (num_tokens_LE - balance_L1) / balance_L1
    most_L, least_L = violation_LE.max(axis=1), violation_LE.min(axis=1)
    return {
        "e_frac_with_tokens:mean": float((num_tokens_LE > 0).mean()),
        "e_frac_oversubscribed:mean": float((num_tokens_LE > balance_L1).mean()),
        "e_max_violation:mean": float(most_L.mean()),
        "e_max_violation:max": float(most_L.max()),
        "e_min_violation:mean": float(least_L.mean()),
    }
