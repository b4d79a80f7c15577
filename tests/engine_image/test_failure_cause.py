"""The cause of a failed start is found in vLLM's log, whatever follows it."""

import pytest

from launcher.failure_cause import MAX_CHARS, FailureCause

CORE = "(EngineCore_DP0 pid=70) ERROR 11-26 03:00:00 [core.py:866] "
WORKER = "(Worker_TP1 pid=71) ERROR 11-26 03:00:00 [multiproc_executor.py:597] "
API = "(APIServer pid=8) "
NO_ROOM = "ValueError: To serve at least one request with the model's max seq len (131072), 16.0 GiB are needed."
NO_MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
GATED = "huggingface_hub.errors.GatedRepoError: 401 Client Error. Cannot access gated repo"
UPWARDS = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"
USAGE = "error: unrecognized arguments: --none"
DIED = "Engine core proc EngineCore_DP0 died unexpectedly, shutting down client."
DEAD_ERROR = "EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the root cause."
DEAD = API + "ERROR 11-26 03:00:00 [async_llm.py:700] " + DEAD_ERROR
# vLLM 0.32, whose engine core was killed.
EXITED = "engine core exited unexpectedly; starting cleanup"
MP_CLIENT = "(APIServer pid=1530) WARNING 11-26 22:50:13 [core_client.py:817] [shutdown] MPClient: "
INVALID = "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig"
VALUE_ERROR = (
    "  Value error, Model architectures ['X'] are not supported for now. [type=value_error, input_value=ArgsKwargs("
)
UNSUPPORTED = "Value error, Model architectures ['X'] are not supported for now."
NOT_AN_INTEGER = "  Input should be an integer [type=int_type, input_value='x', input_type=str]"
NCCL = "torch.distributed.DistBackendError: NCCL error in: /pytorch/NCCLUtils.cpp:94, unhandled system error"
NO_SHARED_MEMORY = "Error while creating shared memory segment /dev/shm/nccl-7 (size 9637888), error: No space left"
OUT_OF_RESOURCES = "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 151680"
SEGFAULT = "Fatal Python error: Segmentation fault"
CORE_COLOURS = "\x1b[1;36m(EngineCore_DP0 pid=70)\x1b[0;0m \x1b[31mERROR\x1b[0m 11-26 03:00:00 [core.py:866] "
BFLOAT16 = (
    "ValueError: Bfloat16 is only supported on GPUs with compute capability of at least 8.0. Your Tesla T4 GPU has"
    " compute capability 7.5. You can use float16 instead by explicitly setting the`dtype` flag in CLI, for"
    " example: --dtype=half."
)
NO_DTYPE = "argument --dtype: invalid choice: 'int3' (choose from auto, bfloat16, float, float16, float32, half)"
WORKER_FAILED = (
    "Exception: WorkerProc initialization failed due to an exception in a background process. See stack trace for"
    " root cause."
)
PORT_IN_USE = "OSError: [Errno 98] Address already in use"
RENDEZVOUS_IN_USE = (
    "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address."
    " port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use"
)
SOCKET_IN_USE = "zmq.error.ZMQError: Address already in use (addr='tcp://127.0.0.1:5557')"
OLD_DRIVER = (
    "The NVIDIA driver on your system is too old (found version 12020). Please update your GPU driver by downloading"
    " and installing a new version from the URL: http://www.nvidia.com/Download/index.aspx"
)
DRIVER_WARNING = "/usr/lib/python3/torch/cuda/__init__.py:187: UserWarning: CUDA initialization: " + OLD_DRIVER
TRIGGERED = " (Triggered internally at /pytorch/c10/cuda/CUDAFunctions.cpp:119.)"
NO_DEVICE = (
    "RuntimeError: Failed to infer device type, please set the environment variable `VLLM_LOGGING_LEVEL=DEBUG` to turn"
    " on verbose logging to help debug the issue."
)
NO_KERNEL = "torch.AcceleratorError: CUDA error: no kernel image is available for execution on the device"
AFTER_CUDA_ERROR = (
    "Search for `cudaErrorNoKernelImageForDevice' in https://docs.nvidia.com/cuda for more information.",
    "CUDA kernel errors might be asynchronously reported at some other API call.",
    "For debugging consider passing CUDA_LAUNCH_BLOCKING=1",
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.",
    "",
)
TRACE = f'{API}  File "/usr/lib/python3/api_server.py", line 1900, in run\n{API}    return await call(config)'


def cause(*lines: str) -> str:
    found = FailureCause()
    for line in "\n".join(lines).splitlines():
        found.observe(line.encode() + b"\n")
    return found.message


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ((CORE + "EngineCore failed to start.", CORE + NO_ROOM, API + "Traceback", TRACE, API + UPWARDS), NO_ROOM),
        (
            (
                WORKER + NO_MEMORY,
                CORE + "RuntimeError: Worker failed, please check the stack trace above for the root cause",
                API + UPWARDS,
            ),
            NO_MEMORY,
        ),
        ((CORE + NO_ROOM, API + "ValueError: something later in the API server"), NO_ROOM),
        ((API + "Traceback (most recent call last):", TRACE, API + GATED), GATED),
        (("Traceback (most recent call last):", "KeyError: 'x'", "OSError: no such model"), "OSError: no such model"),
        ((CORE + "KeyError",), "KeyError"),
        ((API + UPWARDS,), UPWARDS),
        (("INFO 11-26 03:00:00 [x.py:1] Errors are logged to ValueError: no",), ""),
        (("usage: vllm serve [-h]", "vllm serve: error: unrecognized arguments: --none"), USAGE),
        ((API + "asyncio.CancelledError", DEAD, API + DIED, API + "asyncio.CancelledError"), DIED),
        ((DEAD, API + "Shutting down"), DEAD_ERROR),
        ((MP_CLIENT + EXITED, MP_CLIENT + "complete", DEAD), EXITED),
        ((API + "Traceback", TRACE, API + INVALID, API + VALUE_ERROR, API + "  For further information"), UNSUPPORTED),
        ((CORE + INVALID, CORE + VALUE_ERROR, API + TRACE, API + UPWARDS), UNSUPPORTED),
        ((API + INVALID, API + "max_model_len", API + NOT_AN_INTEGER), "max_model_len: Input should be an integer"),
        ((API + INVALID,), INVALID),
        ((WORKER + NCCL, WORKER + "Last error:", WORKER + NO_SHARED_MEMORY, API + UPWARDS), NO_SHARED_MEMORY),
        ((WORKER + OUT_OF_RESOURCES, CORE + UPWARDS, API + UPWARDS), OUT_OF_RESOURCES),
        ((API + "httpx.ConnectTimeout: timed out",), "httpx.ConnectTimeout: timed out"),
        ((SEGFAULT, "", 'Thread 0x0 (most recent call first):', '  File "x.py", line 1 in f', DEAD), SEGFAULT),
        ((CORE_COLOURS + NO_ROOM, API + GATED), NO_ROOM),
        ((WORKER + BFLOAT16, CORE + WORKER_FAILED, API + UPWARDS), BFLOAT16),
        (("usage: vllm serve [-h]", "vllm serve: error: " + NO_DTYPE), "error: " + NO_DTYPE),
        ((API + "Traceback (most recent call last):", TRACE, API + PORT_IN_USE), PORT_IN_USE),
        ((WORKER + RENDEZVOUS_IN_USE, CORE + WORKER_FAILED, API + UPWARDS), RENDEZVOUS_IN_USE),
        ((CORE + SOCKET_IN_USE, API + UPWARDS), SOCKET_IN_USE),
        ((WORKER + "RuntimeError: " + OLD_DRIVER, CORE + WORKER_FAILED, API + UPWARDS), "RuntimeError: " + OLD_DRIVER),
        ((DRIVER_WARNING + TRIGGERED, "  return torch._C._cuda_getDeviceCount() > 0", NO_DEVICE), OLD_DRIVER),
        ((API + DRIVER_WARNING + TRIGGERED, CORE + NO_ROOM, API + UPWARDS), NO_ROOM),
        ((NO_DEVICE,), NO_DEVICE),
        ((WORKER + NO_KERNEL, *(WORKER + line for line in AFTER_CUDA_ERROR), API + UPWARDS), NO_KERNEL),
        (("torch.Size([4, 8])", "vllm.v1 says: no", "https://example.com/A: b"), ""),
        (("",), ""),
    ],
)  # fmt: skip
def test_cause_is_the_last_error_that_points_nowhere_else(lines: tuple[str, ...], expected: str) -> None:
    assert cause(*lines) == expected


def test_cause_is_bounded() -> None:
    found = FailureCause()
    found.observe(b"ValueError: " + b"x" * 10_000_000 + b"\n")
    assert len(found.message) == MAX_CHARS
    found.observe(b"\xff\xfe ValueError: \xff\n")
    assert len(found.message) == MAX_CHARS


def test_an_error_after_which_vllm_went_on_is_no_cause() -> None:
    optional = "(EngineCore pid=116) WARNING 11-28 05:11:01 [import_utils.py:417] ImportError: nixl is not installed"
    assert cause(optional, DEAD) == DEAD_ERROR
