"""Arrays between the API's binary and JSON forms and NumPy: little-endian bytes, dense or sparse rows (CSR).

Decoded dense arrays are read-only views of the request's bytes.
"""

from collections.abc import Sequence

import numpy as np

from tinsmith import operations as ops
from tinsmith.errors import UnsupportedError, UserError
from tinsmith.protocol import wire
from tinsmith.protocol.proto import tinker_public_pb2 as pb

MAX_DENSE_ELEMENTS = 1 << 24
"""Of a request's sparse tensors made dense: a few bytes of request must not become gigabytes of memory."""

_DTYPES: dict[int, np.dtype[np.generic]] = {
    pb.DTYPE_FLOAT32: np.dtype("<f4"),
    pb.DTYPE_INT64: np.dtype("<i8"),
    pb.DTYPE_INT32: np.dtype("<i4"),
    pb.DTYPE_BFLOAT16: np.dtype("<u2"),
}
_INT64 = np.dtype("<i8")
_INT32 = np.dtype("<i4")
_EXACT_FLOAT32 = 1 << 24
_EXACT_FLOAT64 = 1 << 53


def read_tokens(chunks: Sequence[bytes]) -> ops.TokenArray:
    """Concatenate text chunks: int32 arrays."""
    return read_array(b"".join(chunks), _INT32, "model_input")


def read_array(data: bytes, dtype: np.dtype[np.generic], name: str) -> ops.Array:
    if len(data) % dtype.itemsize:
        msg = f"{name}: {len(data)} bytes are not a whole number of {dtype.name} values"
        raise UserError(msg)
    return np.frombuffer(data, dtype)


def tensor_from_proto(name: str, tensor: pb.Tensor) -> ops.Array:
    """Return int64 or float32; int32 and bfloat16 are widened, sparse rows filled up with zeros."""
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        msg = f"{name}: dtype {tensor.dtype} is not known; send float32 or int64"
        raise UserError(msg)
    shape = list(tensor.shape)
    match tensor.WhichOneof("encoding"):
        case "dense":
            values = read_array(tensor.dense, dtype, name)
            dense = _shaped(name, values, shape or [values.size])
        case "sparse_csr":
            csr = tensor.sparse_csr
            dense = dense_from_csr(
                name,
                read_array(csr.values, dtype, name),
                read_array(csr.crow_indices, _INT64, f"{name}: crow_indices"),
                read_array(csr.col_indices, _INT64, f"{name}: col_indices"),
                shape,
                fill=0,
            )
        case None:
            dense = _shaped(name, np.zeros(0, dtype), shape or [0])  # proto3 leaves empty bytes out
    return _widened(dense, tensor.dtype)


def listed(tensor: pb.Tensor, shape: tuple[int, ...]) -> ops.FloatArray:
    """Return 1.0 for every cell that the tensor holds and 0.0 for the others; `tensor_from_proto` has checked it."""
    if tensor.WhichOneof("encoding") != "sparse_csr":
        return np.ones(shape, np.float32)
    csr = tensor.sparse_csr
    rows = np.repeat(np.arange(shape[0]), np.diff(np.frombuffer(csr.crow_indices, _INT64)))
    cells = np.zeros(shape, np.float32)
    cells[rows, np.frombuffer(csr.col_indices, _INT64)] = 1.0
    return cells


def target_tokens_from_json(name: str, tensor: wire.TensorData) -> ops.IntArray:
    """Return int64 [rows, columns]; what a sparse tensor does not list is -1, for "skip"."""
    if tensor.dtype != "int64":
        msg = f"{name}: dtype {tensor.dtype!r} is not allowed; send int64"
        raise UserError(msg)
    values = _whole(name, tensor.data)
    if tensor.sparse_crow_indices is None and tensor.sparse_col_indices is None:
        return _shaped(name, values, tensor.shape or [values.size])
    return dense_from_csr(
        name,
        values,
        _indices(tensor.sparse_crow_indices),
        _indices(tensor.sparse_col_indices),
        tensor.shape or [],
        fill=-1,
    )


def tensor_to_proto(name: str, tensor: wire.TensorData) -> pb.Tensor:
    """Return the tensor as the SDK writes it. Raises UserError if its dtype cannot hold a value."""
    if tensor.dtype == "int64":
        values, message = to_bytes(_whole(name, tensor.data), "<i8"), pb.Tensor(dtype=pb.DTYPE_INT64)
    else:
        values, message = to_bytes(_single(name, tensor.data), "<f4"), pb.Tensor(dtype=pb.DTYPE_FLOAT32)
    message.shape.extend(tensor.shape or [])
    layout = layout_from_json(tensor)
    if layout is None:
        message.dense = values
    else:
        message.sparse_csr.values = values
        message.sparse_csr.crow_indices = to_bytes(layout.crow_indices, "<i8")
        message.sparse_csr.col_indices = to_bytes(layout.col_indices, "<i8")
    return message


def tokens_from_json(name: str, chunks: Sequence[wire.Chunk]) -> ops.TokenArray:
    """Concatenate text chunks."""
    for chunk in chunks:
        if chunk.type != "encoded_text":
            msg = f"{name}: {chunk.type!r} chunks are not offered; send encoded_text"
            raise UnsupportedError(msg)
    tokens = np.concatenate([np.zeros(0, np.int64), *(chunk.tokens for chunk in chunks)])
    bad = (tokens < -(2**31)) | (tokens >= 2**31)
    if bad.any():
        msg = f"{name}: token id {tokens[bad.argmax()]} is out of range"
        raise UserError(msg)
    tokens_T: ops.TokenArray = tokens.astype(np.int32)
    return tokens_T


def layout_from_json(tensor: wire.TensorData) -> ops.SparseLayout | None:
    """Return which cells a sparse tensor lists; None of a dense one. `target_tokens_from_json` has checked it."""
    if tensor.sparse_crow_indices is None and tensor.sparse_col_indices is None:
        return None
    return ops.SparseLayout(
        crow_indices=_indices(tensor.sparse_crow_indices),
        col_indices=_indices(tensor.sparse_col_indices),
    )


def check_sparse_shape(name: str, shape: Sequence[int]) -> None:
    if len(shape) != 2 or min(shape) < 0:
        msg = f"{name}: a sparse tensor needs a shape [rows, columns], this one has {list(shape)}"
        raise UserError(msg)
    num_rows, num_columns = shape
    if max(num_rows, num_columns, num_rows * num_columns) > MAX_DENSE_ELEMENTS:
        msg = f"{name}: shape {list(shape)} has more than {MAX_DENSE_ELEMENTS} elements; send shorter sequences"
        raise UserError(msg)


def dense_from_csr(
    name: str,
    values: ops.Array,
    crow_indices: ops.IntArray,
    col_indices: ops.IntArray,
    shape: Sequence[int],
    *,
    fill: int,
) -> ops.Array:
    check_sparse_shape(name, shape)
    num_rows, num_columns = shape
    if (
        len(crow_indices) != num_rows + 1
        or crow_indices[0] != 0
        or crow_indices[-1] != len(values)
        or len(col_indices) != len(values)
        or (np.diff(crow_indices) < 0).any()
        or ((col_indices < 0) | (col_indices >= num_columns)).any()
    ):
        msg = f"{name}: the indices of this sparse tensor do not describe {len(values)} values in shape {list(shape)}"
        raise UserError(msg)
    rows = np.repeat(np.arange(num_rows), np.diff(crow_indices))
    _refuse_repeated_cells(name, rows, col_indices)
    dense = np.full((num_rows, num_columns), fill, values.dtype)
    dense[rows, col_indices] = values
    return dense


def _refuse_repeated_cells(name: str, rows: ops.IntArray, col_indices: ops.IntArray) -> None:
    """The last value of a cell would win without a word."""
    if not ((np.diff(rows) == 0) & (np.diff(col_indices) <= 0)).any():  # sorted, as every library writes them
        return
    order = np.lexsort((col_indices, rows))
    rows, columns = rows[order], col_indices[order]
    repeated = (np.diff(rows) == 0) & (np.diff(columns) == 0)
    if repeated.any():
        at = repeated.argmax()
        msg = f"{name}: this sparse tensor has several values for row {rows[at]}, column {columns[at]}; send one"
        raise UserError(msg)


def as_float32(name: str, values: ops.Array) -> ops.FloatArray:
    """Accept whole numbers too if float32 holds them exactly."""
    if values.dtype == np.float32:
        return values
    if values.size and int(np.abs(values).max()) > _EXACT_FLOAT32:
        msg = f"{name}: is int64 and holds values that float32 cannot hold; send float32"
        raise UserError(msg)
    return values.astype(np.float32)


def to_bytes(values: ops.Array, dtype: str) -> bytes:
    return np.ascontiguousarray(values, dtype).tobytes()


def _shaped(name: str, values: ops.Array, shape: Sequence[int]) -> ops.Array:
    if min(shape, default=0) < 0 or int(np.prod(shape, dtype=object)) != values.size:
        msg = f"{name}: shape {list(shape)} does not hold {values.size} values"
        raise UserError(msg)
    try:
        return values.reshape(shape)
    except ValueError as error:  # more axes than NumPy has, or beside an empty one longer ones than memory could hold
        msg = f"{name}: shape {list(shape)} is not supported: {error}"
        raise UserError(msg) from error


def _widened(values: ops.Array, dtype: int) -> ops.Array:
    if dtype == pb.DTYPE_INT32:
        return values.astype(np.int64)
    if dtype == pb.DTYPE_BFLOAT16:  # the upper half of a float32
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values


def _whole(name: str, values: ops.Array) -> ops.IntArray:
    """Return int64. JSON does not tell 1.0 from 1."""
    wrong = (np.abs(values) > _EXACT_FLOAT64) | (values != np.trunc(values))
    if wrong.any():
        msg = f"{name}: {values[wrong.argmax()]} is no int64, or too large for JSON; send whole numbers up to 2**53"
        raise UserError(msg)
    whole: ops.IntArray = values.astype(np.int64)
    return whole


def _single(name: str, values: ops.Array) -> ops.FloatArray:
    wrong = np.abs(values) > np.finfo(np.float32).max
    if wrong.any():
        msg = f"{name}: {values[wrong.argmax()]} is too large for float32"
        raise UserError(msg)
    single: ops.FloatArray = values.astype(np.float32)
    return single


def _indices(indices: ops.IntArray | None) -> ops.IntArray:
    return np.zeros(0, np.int64) if indices is None else indices
