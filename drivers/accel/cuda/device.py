"""What the engine needs of a CUDA device: streams, events, graphs, pinned memory.  Thin, so that a CPU can stand in.

`CudaDevice` is torch.cuda.  `DryDevice` runs the same engine on CPU tensors, for tests and dry runs: its compute is done
when it is asked for, but what goes to a side stream (copies) is put off until somebody waits for an event behind it, as
late as a device could be.  A wait that the engine forgets shows there as KV that never came.  A call that it refuses is
told again to the next launch, as CUDA does.

Work for a side stream goes through `Stream.run`, which is also where a device and its stand-in differ least.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol

import torch

from .errors import answered, take_last_error

Work = Callable[[], None]


class Event(Protocol):
    """A point in a stream's work."""

    def wait(self) -> None:
        """What is given to the compute stream from now on runs after it.  Does not block the host."""
        ...

    def synchronize(self) -> None:
        """Block the host until it has been passed."""
        ...


class Stream(Protocol):
    """Work in order, beside the compute stream."""

    def run(self, work: Work) -> None:
        """Begin it after what was given before; it may not have happened when this returns."""
        ...

    def mark(self) -> Event:
        """The end of what was given so far."""
        ...


class Graph(Protocol):
    def replay(self) -> None: ...


class Device(Protocol):
    """name: part of the engine's, and so of every block key; interpreted: kernels run in Triton's interpreter, or in torch."""

    name: str
    torch_device: torch.device
    interpreted: bool

    def free_bytes(self) -> int: ...

    def stream(self) -> Stream: ...

    def mark(self) -> Event:
        """The end of what the compute stream was given so far, for the host."""
        ...

    def computing(self) -> contextlib.AbstractContextManager[Any]:
        """Inside it, work goes to the compute stream; one may be inside another.  Error: MemoryError for the device's out of
        memory; an error that sticks ends the process."""
        ...

    def capture(self, work: Work) -> Graph:
        """The work as a graph over the tensors it touches.  Inside `computing`; the work has been run before."""
        ...

    def staging(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Host memory that the device copies from and to without blocking."""
        ...

    def register(self, buffer: Any) -> str:
        """Make memory of ours reachable by the device (pinned).  Empty, or why it stays pageable."""
        ...

    def trim(self) -> None:
        """Give memory back that nobody uses, after it ran out."""
        ...


# -- CUDA -----------------------------------------------------------------------------------------------------------


class _CudaEvent:
    def __init__(self, stream: torch.cuda.Stream, compute: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(stream)
        self._compute = compute

    def wait(self) -> None:
        self._compute.wait_event(self._event)

    def synchronize(self) -> None:
        self._event.synchronize()


class _CudaStream:
    def __init__(self, device: CudaDevice) -> None:
        self._stream = torch.cuda.Stream(device.torch_device)  # type: ignore[no-untyped-call]
        self._device = device

    def run(self, work: Work) -> None:
        with torch.cuda.stream(self._stream):
            work()

    def mark(self) -> Event:
        return _CudaEvent(self._stream, self._device.compute_stream)


_REGISTER_FLAGS: Final = 1 | 2  # cudaHostRegisterPortable | cudaHostRegisterMapped


class _Registering:
    """`register` of a device and of its stand-in."""

    def register(self, buffer: Any) -> str:
        view = torch.frombuffer(buffer, dtype=torch.uint8)
        code = self._host_register(view)
        if not code:
            return ""
        take_last_error(self._launch)
        return f"cudaHostRegister of {view.numel()} bytes returned {code}"

    def _host_register(self, view: torch.Tensor) -> int:
        """What cudaHostRegister returns."""
        raise NotImplementedError

    def _launch(self) -> None:
        """Any kernel.  Error: AcceleratorError, when a call before it was refused."""
        raise NotImplementedError


class CudaDevice(_Registering):
    """Error at construction: ValueError, when the device cannot run the kernels."""

    interpreted = False

    def __init__(self, ordinal: int) -> None:
        if not torch.cuda.is_available() or ordinal >= torch.cuda.device_count():
            found = torch.cuda.device_count() if torch.cuda.is_available() else 0
            raise ValueError(f"there is no CUDA device {ordinal}: torch {torch.__version__} sees {found}")
        self.torch_device = torch.device("cuda", ordinal)
        torch.cuda.set_device(self.torch_device)
        major, minor = torch.cuda.get_device_capability(self.torch_device)
        if major < 8:
            raise ValueError(f"CUDA device {ordinal} has compute capability {major}.{minor}; the kernels need 8.0")
        self.name = f"cuda/sm_{major}{minor}"
        self.compute_stream = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()  # one for all graphs: none runs beside another

    def free_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self.torch_device)[0])

    def stream(self) -> Stream:
        return _CudaStream(self)

    def mark(self) -> Event:
        return _CudaEvent(self.compute_stream, self.compute_stream)

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        with answered(self.trim), torch.cuda.stream(self.compute_stream), torch.no_grad():
            yield

    def capture(self, work: Work) -> Graph:
        graph = torch.cuda.CUDAGraph()
        # thread_local: the mover's thread may call into CUDA meanwhile
        with torch.cuda.graph(graph, pool=self._pool, stream=self.compute_stream, capture_error_mode="thread_local"):
            work()
        return graph

    def staging(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def _host_register(self, view: torch.Tensor) -> int:
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        return int(runtime.cudaHostRegister(view.data_ptr(), view.numel(), _REGISTER_FLAGS))

    def _launch(self) -> None:
        torch.empty(1, device=self.torch_device).add_(1)  # not fill_, which may be a memset: that is told nothing

    def trim(self) -> None:
        torch.cuda.empty_cache()


# -- the stand-in ---------------------------------------------------------------------------------------------------


class _DryEvent:
    def __init__(self, stream: DryStream, end: int) -> None:
        self._stream, self._end = stream, end

    def wait(self) -> None:
        self._stream.catch_up(self._end)

    def synchronize(self) -> None:
        self._stream.catch_up(self._end)


class DryStream:
    """Work that waits until somebody needs it."""

    def __init__(self) -> None:
        self._work: deque[Work] = deque()
        self._given = self._done = 0
        self._lock = threading.RLock()

    def run(self, work: Work) -> None:
        with self._lock:
            self._work.append(work)
            self._given += 1

    def mark(self) -> Event:
        with self._lock:
            return _DryEvent(self, self._given)

    def catch_up(self, end: int) -> None:
        with self._lock:
            while self._done < end:
                self._work.popleft()()
                self._done += 1


class _DryGraph:
    def __init__(self, work: Work) -> None:
        self.replay = work


class DryDevice(_Registering):
    """memory_bytes: what `free_bytes` says; refuses: what registering memory returns, 0: it works."""

    interpreted = True
    torch_device: torch.device = torch.device("cpu")
    refuses = 0

    def __init__(self, name: str = "cuda-dry", memory_bytes: int = 1 << 30) -> None:
        self.name = name
        self._memory_bytes = memory_bytes
        self.registered: list[int] = []  # sizes
        self._last_error = 0

    def free_bytes(self) -> int:
        return self._memory_bytes

    def stream(self) -> Stream:
        return DryStream()

    def mark(self) -> Event:
        return _DryEvent(DryStream(), 0)

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        with answered(self.trim), torch.no_grad():
            self._launch()  # whatever is computed begins with one
            yield

    def capture(self, work: Work) -> Graph:
        return _DryGraph(work)

    def staging(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def _host_register(self, view: torch.Tensor) -> int:
        if self.refuses:
            self._last_error = self.refuses
        else:
            self.registered.append(view.numel())
        return self.refuses

    def _launch(self) -> None:
        code, self._last_error = self._last_error, 0
        if code:
            raise torch.AcceleratorError(f"CUDA error {code}, of a call before this launch")

    def trim(self) -> None:
        return
