"""The fields beside the tensors of safetensors files and of their index."""

from typing import Final

from tinsmith_checkpoints.huggingface.fields import FileFields, honoured, no_meaning, only

METADATA_FIELDS: Final = FileFields(
    "the metadata of a safetensors file",
    {
        "format": only(
            *(None, "pt", "mlx", "np", "numpy"),
            otherwise="its tensors have other names and axes than PyTorch's; load it with transformers, and save it",
        ),
    },
)
"""Other fields are free text of the program that wrote the file."""

INDEX_FIELDS: Final = FileFields(
    "model.safetensors.index.json",
    {
        "weight_map": honoured("the file of each tensor"),
        "metadata": no_meaning("sizes, which the shards tell themselves, and free text of the program that wrote it"),
    },
)
