"""How a run ended, for many pieces of evidence, the misleading ones among them. No processes."""

from __future__ import annotations

import pytest

from harness.launch.outcome import Facts, classify, decisive, retryable, tail, where
from harness.report.figures.predicted import OUT_OF_MEMORY
from harness.result import Status
from harness.system import machine

GPU, HOST, FAILED, TIMEOUT = Status.GPU_OOM, Status.HOST_OOM, Status.FAILED, Status.TIMEOUT


def fail(kind: str, message: str = "", trace: str = "", rank: int = 0, phase: str = "measure"):
    facts = {"rank": rank, "phase": phase, "step": 3, "type": kind, "message": message}
    return {**facts, "traceback": trace, "peak_bytes": 10}


def raised(*given: str, **more) -> dict:
    """The facts of a run in which a rank raised that; ``more`` facts."""
    return {"failures": (fail(*given),), **more}


TORCHRUN_KILL = """
Root Cause (first observed failure):
[0]:
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 6408)
  traceback : Signal 9 (SIGKILL) received by PID 6408
"""
SIMPLE_KILL = "subprocess.CalledProcessError: Command '[...]' died with <Signals.SIGKILL: 9>."
TRIED = "CUDA out of memory. Tried to allocate 2.00 GiB."
FULL = ("OutOfMemoryError", TRIED)
GLOO = "[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:2345"
LOST = fail("RuntimeError", GLOO)
ILLEGAL = raised("AcceleratorError", "CUDA error: an illegal memory access was encountered")
PINNING = '  File "setup.py", line 3, in buffer\n    torch.empty(n, pin_memory=True)\n'
BUS = "traceback : Signal 7 (SIGBUS) received by PID 1"
SHM = "RuntimeError: unable to write to file </torch_77_1_2>: No space left on device (28)"
LATE = {"stopped": "timeout", "timeout_seconds": 90.0}
SLOW = ({"phase": "measure", "step": 4}, {"phase": "measure", "step": 3})
OPTION = "usage: train.py [-h]\ntrain.py: error: unrecognized arguments: --x"

# name: (facts, status, words of the reason, words of the way out)
CASES = {
    "finished though exit code 1": (
        {"result": Status.OK, "exit_code": 1, "log": "terminate called"}, Status.OK, "", ""),
    "finished, old OOM in the log": ({"result": Status.OK, "log": TRIED}, Status.OK, "", ""),
    "void with its reason": (
        {"result": Status.VOID, "result_reason": "bf16 was not in force", "exit_code": 0},
        Status.VOID, "bf16 was not", ""),
    "interrupted while an OOM was logged": (
        {"stopped": "interrupted", "log": TRIED}, Status.INTERRUPTED,
        "interrupted in phase start", "again"),
    # GPU memory
    "torch.OutOfMemoryError": (
        {"failures": (fail(*FULL, rank=1),)}, GPU,
        "rank 1 ran out of GPU memory in phase measure, step 3", "checkpoint"),
    "another process on the GPU": (
        raised("OutOfMemoryError", f"{TRIED} Process 77 has 60.1 GiB memory in use."), GPU, "",
        "process 77 holds 60.1 GiB"),
    "first rank out of memory, the others lose their peer": (
        {"failures": (LOST, fail(*FULL, rank=1, phase="warmup")), "log": GLOO}, GPU,
        "rank 1 ran out of GPU memory in phase warmup", ""),
    "out of memory, then hung until the deadline": (raised(*FULL, **LATE), GPU, "", ""),
    # what sounds like it, and is not
    "illegal access": (ILLEGAL, FAILED, "illegal", "attend:kernel=flash"),
    "illegal access beyond cuDNN's attention": (
        {**ILLEGAL, "recipe": "single+attend:kernel=flash"}, FAILED, "illegal",
        "CUDA_LAUNCH_BLOCKING=1 shows the operation"),
    "cudnn internal": (
        raised("RuntimeError", "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"), FAILED,
        "INTERNAL_ERROR", ""),
    "autotuner's skipped choice": (
        {"log": f"{TRIED} Ignoring this choice.\nValueError: nan", "exit_code": 1}, FAILED,
        "ValueError: nan", "log.txt"),
    "autotuner's skipped choice, then the deadline": (
        {"log": TRIED, **LATE}, TIMEOUT, "90 s", "--timeout"),
    # host memory
    "MemoryError": (
        raised("MemoryError", processes=2), HOST, "rank 0 ran out of host memory",
        "fewer --processes than 2"),
    "MemoryError below a limit": (
        raised("MemoryError", shell_limit=("ulimit -v", 600 << 20)), HOST,
        "below the limit ulimit -v of 0.6 GiB", "ulimit -v unlimited"),
    "pinned, by the call": (
        raised("RuntimeError", "cudaHostAlloc failed: out of memory"), HOST, "pin host memory", ""),
    "pinned, by the traceback": (
        raised("RuntimeError", "CUDA error: out of memory", PINNING), HOST, "pin host memory", ""),
    "device memory while pinning is near": (raised(*FULL, PINNING), GPU, "GPU", ""),
    # killed from outside
    "kernel's killer": (
        {"exit_code": 1, "log": TORCHRUN_KILL, "machine_kills": 1}, HOST,
        "the kernel's out-of-memory killer", ""),
    "killed for memory below a shell, which exits with 128 and the signal's number": (
        {"exit_code": 137, "machine_kills": 1}, HOST, "out-of-memory killer", ""),
    "container's limit": (
        {"log": SIMPLE_KILL, "machine_kills": 1, "group_kills": 1, "group_limit_bytes": 8 << 30},
        HOST, "the container's memory limit of 8.0 GiB", ""),
    "launcher itself killed": ({"signal": 9, "group_kills": 1}, HOST, "container", ""),
    "killed, and the peer reports the loss": (
        {"log": TORCHRUN_KILL, "machine_kills": 1, "failures": (LOST,)}, HOST, "killer", ""),
    "killed by hand": (
        {"log": TORCHRUN_KILL}, FAILED,
        "killed by SIGKILL from outside; the kernel counted no out-of-memory kill", "earlyoom"),
    "a kill elsewhere on the machine": (
        raised("ValueError", "nan", exit_code=1, machine_kills=1), FAILED, "ValueError: nan", ""),
    "our own SIGKILL at the deadline": (
        {**LATE, "signal": 9, "machine_kills": 1, "log": TORCHRUN_KILL}, TIMEOUT, "", "--timeout"),
    # the rest
    "deadline": (
        {**LATE, "statuses": SLOW}, TIMEOUT,
        "not finished after 90 s: stopped in phase measure, step 3", "--timeout"),
    "deadline of several processes": (
        {**LATE, "processes": 2}, TIMEOUT,
        "this deadline came before the process groups' timeout of 150 s", "--timeout"),
    "bus error": ({"log": BUS}, FAILED, "bus error", "--shm-size"),
    "shm full": ({"log": SHM}, FAILED, "shared memory is full", "--shm-size"),
    "disk full": (
        raised("OSError", "[Errno 28] No space left on device: 'r.json'"), FAILED, "No space",
        "disk"),
    "port": (
        {"log": "RuntimeError: The server socket has failed to listen ... EADDRINUSE"}, FAILED,
        "port", "again"),
    "crash": ({"log": "died with <Signals.SIGSEGV: 11>."}, FAILED, "SIGSEGV", "log.txt"),
    "too few GPUs": (
        raised("AcceleratorError", "CUDA error: invalid device ordinal"), FAILED, "ordinal",
        "--processes"),
    "only the peers were heard": (
        {"exit_code": 1, "failures": (LOST,)}, FAILED, "Connection closed", ""),
    "bad option": (
        {"exit_code": 2, "log": OPTION}, FAILED, "unrecognized arguments: --x", ""),
    "silence": ({"exit_code": 0}, FAILED, "exit code 0, with no message", "log.txt"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_outcome(name):
    facts, status, reason, hint = CASES[name]
    found = classify(Facts(**{"recipe": "zero2+bf16"} | facts))
    assert found.status is status
    assert reason in (found.reason or "") and hint in (found.hint or "")
    if status not in (Status.OK, Status.VOID):
        assert found.reason and found.hint and "\n" not in found.reason
        assert len(found.reason) < 400


NCCL = "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:76\nLast error:\n"
CUDNN = "RuntimeError: cuDNN error: CUDNN_STATUS_"
CUBLAS = "RuntimeError: CUDA error: CUBLAS_STATUS_{} when calling `cublasCreate(handle)`"
BNB = "Error out of memory at line 88 in file bitsandbytes/csrc/"
ASSERT = 'RuntimeError: NVML_SUCCESS == r INTERNAL ASSERT FAILED at "CUDACachingAllocator.cpp"'
# A line that a library writes, the end that it means, and where it was seen or is written.
MESSAGES = [
    ("RuntimeError: CUDA error: out of memory", GPU),
    ("RuntimeError: cudaErrorMemoryAllocation", GPU),
    ("[rank1]: torch.OutOfMemoryError: HIP out of memory. Tried", GPU),
    ("terminate called after throwing 'c10::OutOfMemoryError'", GPU),
    ("RuntimeError: CUDA driver error: out of memory", GPU),
    ("RuntimeError: Triton Error [CUDA]: out of memory", GPU),
    ("RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: ", HOST),
    ("RuntimeError: DefaultCPUAllocator: not enough memory", HOST),  # Windows
    ("terminate called after throwing 'std::bad_alloc'", HOST),
    ("OSError: [Errno 12] Cannot allocate memory", HOST),
    ("numpy._ArrayMemoryError: Unable to allocate 3.0 GiB for an array", HOST),
    # torch: pinned memory; no room for a library's handle; no NVML for its own message
    ("CudaError: out of memory (2)", HOST),  # torch/cuda/__init__.py, check_error
    (CUBLAS.format("NOT_INITIALIZED"), GPU),  # pytorch/serve#1993
    (CUBLAS.format("ALLOC_FAILED"), GPU),  # QwenLM/Qwen3#873
    (ASSERT, GPU),  # pytorch/pytorch#122068, pytorch/pytorch#130486
    ("torch.AcceleratorError: CUDA error: out of memory", GPU),  # Lightricks/LTX-Desktop#139
    # bitsandbytes prints and exits; a paged optimizer's memory is managed
    (f"{BNB}ops.cu", GPU),  # jllllll/bitsandbytes-windows-webui#14
    (f"{BNB}pythonInterface.c", HOST),  # bitsandbytes-foundation/bitsandbytes#464
    # cuDNN: 8 and older; 9 (include/cudnn_graph_v9.h of nvidia-cudnn-cu13)
    (f"{CUDNN}ALLOC_FAILED", GPU),  # torch/torch7#780
    (f"{CUDNN}INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", GPU),
    (f"{CUDNN}INTERNAL_ERROR_HOST_ALLOCATION_FAILED", HOST),
    # NCCL: in the log, and as torch raises its last warning (NVIDIA/nccl, src/include/alloc.h)
    ("include/alloc.h:178 NCCL WARN Cuda failure 'out of memory'", GPU),  # NVIDIA/nccl#1235
    (f"{NCCL}Failed to CUDA calloc 67108864 bytes", GPU),  # sgl-project/sglang#1116
    (f"{NCCL}Failed to CUDA malloc 67108864 bytes", GPU),
    (f"{NCCL}Failed to CUDA host alloc 4096 bytes", HOST),
    (f"{NCCL}Cuda failure 2 'out of memory'", GPU),  # NVIDIA/nccl, src/include/cudawrap.h
    (f"{NCCL}Cuda failure 'invalid argument'", FAILED),  # pytorch/pytorch#111187
    # The limit of locked memory (ulimit -l), which is no want of memory: deepseek-ai/DeepEP#143
    ("NCCL WARN Call to ibv_create_cq failed with error Cannot allocate memory", FAILED),
    # Shared memory of a block: triton-lang/triton#8182, pytorch/pytorch#181198
    ("triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 1", FAILED),
    ("ERROR:select_algorithm:Exception OutOfMemoryError: out of resource: triton_mm", FAILED),
]


@pytest.mark.parametrize("reported", [True, False], ids=["raised", "logged"])
@pytest.mark.parametrize(("message", "status"), MESSAGES)
def test_a_library_s_own_words_for_full_memory_are_recognised(message, status, reported):
    kind, named, said = message.partition("Error: ")
    failure = fail(f"{kind.rpartition(' ')[2]}Error", said) if named else fail("Exception", message)
    ended = classify(Facts(exit_code=1, **({"failures": (failure,)} if reported else
                                           {"log": message})))  # fmt: skip
    assert ended.status is status, ended.reason
    if status is not FAILED:
        assert status in OUT_OF_MEMORY, "a search for the largest batch goes on"


def test_a_library_s_handle_after_a_failed_assertion_is_no_full_card():
    handle = "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"
    log = "Indexing.cu:1231: indexSelectSmallIndex: Assertion `srcIndex < n` failed.\n"
    for known in ({"failures": (fail("RuntimeError", handle),)}, {}):
        assert classify(Facts(log=log + handle, **known)).status is FAILED


TIMED_OUT = (  # pytorch/pytorch#118369, hiyouga/LlamaFactory#7396
    "[rank0]:[E321 02:07:08.40 ProcessGroupNCCL.cpp:607] [Rank 0] Watchdog caught collective "
    "operation timeout: WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, NumelIn=4, NumelOut=4, "
    "Timeout(ms)=600000) ran for 600060 milliseconds before timing out.\n"
    "terminate called after throwing an instance of 'c10::DistBackendError'\n"
    "  what():  [PG ID 0 Rank 0] Process group watchdog thread terminated with exception\n"
)
ABORTED = "traceback : Signal 6 (SIGABRT) received by PID 9\n"


def test_an_abort_is_explained_by_what_was_said_before_it():
    ended = classify(Facts(exit_code=1, log=TIMED_OUT + ABORTED))
    assert ended.status is FAILED and "OpType=ALLREDUCE" in ended.reason
    assert "waited" in ended.hint
    thrown = TIMED_OUT.partition("\n")[2] + ABORTED
    ended = classify(Facts(exit_code=1, log=thrown))
    assert "SIGABRT" in ended.reason and "watchdog thread terminated" in ended.reason
    assert classify(Facts(exit_code=1, log=ABORTED)).reason.endswith("SIGABRT in phase start")


@pytest.mark.parametrize(
    ("recipe", "kind", "has", "has_not"),
    [
        ("ddp", "OutOfMemoryError", ("checkpoint", "accumulate", "zero3"), ("offload",)),
        ("zero3+checkpoint", "OutOfMemoryError", ("zero3_offload",), ("add checkpoint",)),
        ("zero3+accumulate:steps=4", "OutOfMemoryError", ("checkpoint",), ("accumulate",)),
        ("zero3_offload", "MemoryError", ("zero3_nvme",), ()),
        ("single+checkpoint", "OutOfMemoryError", ("with zero2_offload or zero3_offload",), ()),
    ],
)
def test_the_way_out_names_what_the_recipe_has_not_tried(recipe, kind, has, has_not):
    processes = 1 if recipe.startswith("single") else 2
    hint = classify(Facts(recipe=recipe, processes=processes, failures=(fail(kind),))).hint
    assert all(word in hint for word in has)
    assert not any(word in hint for word in has_not)


def test_only_a_taken_port_before_training_is_tried_again():
    taken = "torch.distributed.DistNetworkError: ... EADDRINUSE, Address already in use"
    assert retryable(Facts(exit_code=1, log=taken, statuses=({"phase": "start"},)))
    assert not retryable(Facts(exit_code=1, log=taken, statuses=({"phase": "measure"},)))
    assert not retryable(Facts(exit_code=1, log=taken, result=Status.OK))
    assert not retryable(Facts(stopped="interrupted", log=taken))
    assert not retryable(Facts(exit_code=1, log="ValueError: nan"))


def test_where_is_the_rank_that_failed_else_the_slowest():
    slow = ({"phase": "measure", "step": 3}, {"phase": "warmup", "step": 1})
    assert where(Facts(statuses=slow)) == ("warmup", 1)
    assert where(Facts(statuses=slow, failures=(fail("ValueError"),))) == ("measure", 3)
    assert where(Facts()) == ("start", 0)
    assert where(Facts(statuses=({"phase": "unheard of", "step": None},))) == ("start", 0)


def test_the_log_without_noise():
    text = (
        "W1121 04:50 9 torch/distributed/run.py:874] Setting OMP_NUM_THREADS environment variable\n"
        "  0%|   | 0/9\r 50%|##  | 4/9 [00:01<00:01, 3.9it/s]\nloaded\nloaded\n"
        "Traceback (most recent call last):\n"
        '  File "train.py", line 3, in main\n'
        "ValueError: the loss is nan\n"
        "Traceback (most recent call last):\n"
        '  File "/venv/bin/accelerate", line 8, in <module>\n'
        '  File "/x/accelerate/commands/launch.py", line 999, in simple_launcher\n'
        "    raise subprocess.CalledProcessError(1)\n"
        "subprocess.CalledProcessError: Command '[]' returned non-zero exit status 1.\n"
    )
    lines = tail(text).splitlines()
    assert lines[0] == "loaded" and lines[1].startswith("Traceback") and len(lines) == 5
    assert decisive(text) == "ValueError: the loss is nan"
    assert tail("x\n" * 3 + "\n".join(map(str, range(100))), lines=2) == "98\n99"


KERNELS = {
    "two": {
        "proc/vmstat": "pgfault 1\noom_kill 5\n",
        "proc/self/cgroup": "0::/a/b\n",
        "sys/a/b/memory.events": "oom 9\noom_kill 3\n",
        "sys/a/b/memory.max": "max\n",
        "sys/a/memory.max": "1024\n",
        "sys/cpu.max": "200000 100000\n",
    },
    "one": {
        "proc/vmstat": "pgfault 1\n",
        "proc/self/cgroup": "4:memory:/host/path\n1:cpu:/\n0::/\n",
        "sys/memory/memory.oom_control": "under_oom 0\noom_kill 2\n",
        "sys/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/cpu/cpu.cfs_quota_us": "-1\n",
    },
}
"""Version of control groups -> files of the kernel."""


def test_kernel_counters_of_both_versions(tmp_path):
    two, one = tmp_path / "two", tmp_path / "one"
    for version, files in KERNELS.items():
        for name, text in files.items():
            path = tmp_path / version / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    assert machine.memory_kills(two / "proc", two / "sys") == machine.MemoryKills(5, 3, 1024)
    assert machine.memory_kills(one / "proc", one / "sys") == machine.MemoryKills(0, 2, None)
    assert machine.cores(two / "sys") <= 2 and machine.cores(one / "sys") >= 1
    assert machine.MemoryKills(5, 3, 1).since(machine.MemoryKills(4, 3, 1)).machine == 1
