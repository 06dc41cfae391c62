"""The request store's values: a frozen record for each kind of row, and the effects that change rows."""
