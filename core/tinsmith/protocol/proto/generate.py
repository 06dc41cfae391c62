"""Write `tinker_public_pb2.py` and `.pyi` from `tinker_public.proto`: run `python -m tinsmith.protocol.proto.generate`.

Needs grpcio-tools, which brings protoc. protoc stamps its own version into the code and refuses older runtimes; the
code itself runs on every protobuf that the core allows, so the stamp is taken out.
"""

import re
from pathlib import Path

HERE = Path(__file__).parent
_STAMP = re.compile(
    r"from google\.protobuf import runtime_version as _runtime_version\n"
    r"|_runtime_version\.ValidateProtobufRuntimeVersion\(.*?\n\)\n",
    re.DOTALL,
)


def generate(directory: Path) -> None:
    """Write both files below `directory`, in `tinsmith/protocol/proto/`."""
    from grpc_tools import protoc

    source = "tinsmith/protocol/proto/tinker_public.proto"
    status = protoc.main(
        ["protoc", f"-I{HERE.parents[2]}", f"--python_out={directory}", f"--pyi_out={directory}", source]
    )
    if status != 0:
        msg = f"protoc failed with status {status} on {source}"
        raise RuntimeError(msg)
    module = directory / "tinsmith/protocol/proto/tinker_public_pb2.py"
    module.write_text(_STAMP.sub("", module.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    generate(HERE.parents[2])
