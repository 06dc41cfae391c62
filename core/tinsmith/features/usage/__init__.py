"""The usage of tenants by hour: the SDK's billing calls, without prices, and counters for Prometheus."""
