"""The environment variable that the ranks read. Imports nothing."""

from typing import Final

DEVICE: Final = "TINSMITH_MEGATRON_DEVICE"  # "cpu" or "cuda"; unset: cuda if the machine has a GPU
