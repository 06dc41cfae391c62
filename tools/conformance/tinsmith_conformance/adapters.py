"""The weights of an adapter, as a server exports them: PEFT's files, read without PEFT."""

from __future__ import annotations

import json
from typing import Any, Final

import httpx
import numpy as np

from tinsmith_conformance.oracle import Floats
from tinsmith_conformance.tester import Model, Tester
from tinsmith_conformance.verdicts import RequestFailedError, expect, skip

_DTYPES: Final = {"F32": "<f4", "F64": "<f8", "F16": "<f2"}
_WIDENED: Final = "BF16"
_FILES_S: Final = 60.0


def links(t: Tester, model: Model, name: str) -> dict[str, Any]:
    """Export the adapter and return the answer with the links of its files."""
    try:
        path = model.export(name)
    except RequestFailedError as error:
        skip(f"adapters cannot be exported: {error.message}")
    return t.get(f"training_runs/{model.id}/checkpoints/{path.split('/', 3)[3]}/external_weights_urls")


def exported(t: Tester, model: Model, name: str) -> dict[str, Floats]:
    """Return the adapter's weights by their names."""
    urls = links(t, model, name)["urls"]
    expect("adapter_model.safetensors" in urls, f"the export has no adapter_model.safetensors: {sorted(urls)}")
    return _read(httpx.get(urls["adapter_model.safetensors"], timeout=_FILES_S).raise_for_status().content)


def _read(content: bytes) -> dict[str, Floats]:
    size = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + size]), content[8 + size :]
    header.pop("__metadata__", None)
    return {name: _tensor(about, data) for name, about in header.items()}


def _tensor(about: Any, data: bytes) -> Floats:
    start, stop = about["data_offsets"]
    if about["dtype"] == _WIDENED:
        values = (np.frombuffer(data[start:stop], "<u2").astype("<u4") << 16).view("<f4")
    else:
        values = np.frombuffer(data[start:stop], _DTYPES[about["dtype"]])
    return values.reshape(about["shape"]).astype(np.float64)
