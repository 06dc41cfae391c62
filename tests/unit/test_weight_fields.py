"""What stands beside the tensors of safetensors files: honoured, refused by name, or announced."""

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from tinsmith.errors import ServerError
from tinsmith_checkpoints.huggingface import StoredTensors
from tinsmith_checkpoints.huggingface.fields import announced

TENSORS = {"model.norm.weight": np.ones(3, np.float32)}


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}, {"format": "mlx", "by": "anybody"}, {"anything": "else"}])
def test_tensors_of_pytorchs_layout_are_read(tmp_path: Path, metadata: dict[str, str] | None) -> None:
    safetensors.numpy.save_file(TENSORS, tmp_path / "model.safetensors", metadata=metadata)
    np.testing.assert_array_equal(StoredTensors.of(tmp_path, "model")["model.norm.weight"], np.ones(3))


@pytest.mark.parametrize("layout", ["tf", "flax", "gguf"])
def test_tensors_of_another_layout_are_refused_by_name(tmp_path: Path, layout: str) -> None:
    safetensors.numpy.save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": layout})
    with pytest.raises(ServerError, match=rf"model\.safetensors: format is '{layout}': its tensors have other names"):
        StoredTensors.of(tmp_path, "model")


def test_what_an_index_has_beside_its_tensors_is_announced(tmp_path: Path) -> None:
    safetensors.numpy.save_file(TENSORS, tmp_path / "model-00001-of-00001.safetensors")
    files = dict.fromkeys(TENSORS, "model-00001-of-00001.safetensors")
    index = {"metadata": {"total_size": 12}, "weight_map": files, "newest": 1}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with announced() as said:
        assert list(StoredTensors.of(tmp_path, "model")) == list(TENSORS)
    assert [each.partition("reads: ")[2].partition(";")[0] for each in said] == ["newest"]
