"""What arrays of the caller's need beside DLPack: one like another, and the stream that they are made on."""

import sys
from typing import Any, Optional


def like(name: str, model: Any, shape: tuple[int, ...]) -> Any:
    """An array of `shape` for a result, of the kind, dtype and device of `model`."""
    if hasattr(model, "new_empty"):  # torch
        return model.new_empty(shape)
    kind = type(model).__module__.partition(".")[0]
    if kind in ("numpy", "cupy"):
        return sys.modules[kind].empty(shape, dtype=model.dtype)
    raise TypeError(f"{name} must be given: no array can be made like one of type {type(model).__name__}")


def on_device(array: Any) -> bool:
    if array is None or type(array).__module__.partition(".")[0] == "numpy":
        return False
    cuda = getattr(array, "is_cuda", None)  # torch
    if cuda is not None:
        return bool(cuda)
    device = getattr(array, "__dlpack_device__", None)
    return device is not None and device()[0] in (2, 13)


def stream_of(array: Any) -> Optional[int]:
    """The cudaStream_t on which work of the array's framework is enqueued now; None for arrays in host memory."""
    if not on_device(array):
        return None
    kind = type(array).__module__.partition(".")[0]
    if kind == "torch":
        return int(sys.modules["torch"].cuda.current_stream(array.device).cuda_stream)
    if kind == "cupy":
        return int(sys.modules["cupy"].cuda.get_current_stream().ptr)
    return 0  # the default stream, on which DLPack hands over
