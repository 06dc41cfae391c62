"""What the card can do: products of matrices and copies of memory, measured."""

import torch

from gpu_parts.common import Options, Report, bandwidth_limit, matmul_limit


def run(options: Options) -> Report:
    device = options.device
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "matmul_tflops": matmul_limit(options) / 1e12,
        "bandwidth_gb_per_s": bandwidth_limit(options) / 1e9,
    }
