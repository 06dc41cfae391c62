"""The environment variables through which ranks find the engine. Imports nothing."""

from typing import Final

CONTROL: Final = "TINSMITH_FSDP_CONTROL"  # the engine's address, "unix:<path>" or "tcp:<host>:<port>"
KEY: Final = "TINSMITH_FSDP_KEY"  # the secret that engine and ranks share
DEVICE: Final = "TINSMITH_FSDP_DEVICE"  # "cpu" or "cuda"; unset: cuda if the machine has a GPU
