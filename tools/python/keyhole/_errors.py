"""Exceptions: one class for each status of the library, with the library's text."""


class Error(Exception):
    """A call of the library failed. str() says what was wrong, the value seen and the values allowed.

    A failed call changes nothing unless its description says what: the object stays usable. After DeviceError or Timeout
    nothing is known of the tokens on the device: the session can be read, saved, forked and closed, and every other call
    raises that error.
    """

    status: int = 0


class InvalidArgument(Error, ValueError):
    """A value, shape or spec is outside what is allowed."""


class Unsupported(Error, NotImplementedError):
    """Valid, but this build or machine cannot do it."""


class OutOfMemory(Error, MemoryError):
    """Host memory is exhausted, or the limit that the caller set on it is reached."""


class OutOfDeviceMemory(Error, MemoryError):
    """Device memory is exhausted, or the limit that the caller set on it is reached."""


class DeviceError(Error, RuntimeError):
    """The device failed."""


class Timeout(Error, TimeoutError):
    """The device or the host did not answer in time."""


class IOFailure(Error, OSError):
    """A file cannot be opened, read or written."""


class Corrupt(Error, ValueError):
    """A file contradicts itself or is cut short."""


class VersionMismatch(Error, ValueError):
    """A file or struct of another version."""


class Cancelled(Error):
    """The progress callback asked to stop."""


class Busy(Error, RuntimeError):
    """In use by another thread, or a begin without its end."""


class NotFinite(Error, ValueError):
    """NaN or infinity in K, V or q, or a value that overflows kv_dtype."""


class Internal(Error, RuntimeError):
    """An assumption inside the library does not hold: please report it."""


class RankFailed(Error, RuntimeError):
    """A rank of a communicator failed. Engines of Python have no communicator."""


BY_STATUS = {
    -1: InvalidArgument, -2: Unsupported, -3: OutOfMemory, -4: OutOfDeviceMemory, -5: DeviceError, -6: Timeout,
    -7: IOFailure, -8: Corrupt, -9: VersionMismatch, -10: Cancelled, -11: Busy, -12: NotFinite, -13: Internal, -14: RankFailed,
}  # fmt: skip
for _status, _kind in BY_STATUS.items():
    _kind.status = _status
