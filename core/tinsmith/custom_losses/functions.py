"""The operations that the graph of a custom loss may name: torch's, by torch's names, with torch's derivatives.

Where a function has no derivative (at ties, kinks and bounds), torch's choice is taken, so that a loss has the same
gradient as in the client. Parameters have torch's names; an underscore is added to those that are Python's own.
Operands that do not fit raise ValueError or IndexError.
"""

from tinsmith.custom_losses import choices, elementwise, places, reductions, shapes
from tinsmith.custom_losses.registry import FUNCTIONS, METHODS

__all__ = ["FUNCTIONS", "METHODS", "choices", "elementwise", "places", "reductions", "shapes"]
