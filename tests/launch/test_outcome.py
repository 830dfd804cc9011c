"""How a run ended, for many pieces of evidence, the misleading ones among them. No processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.launch.outcome import Facts, classify, decisive, retryable, tail, where
from harness.report.figures.predicted import OUT_OF_MEMORY
from harness.result import Status
from harness.system import machine

GPU, HOST, FAILED, TIMEOUT = Status.GPU_OOM, Status.HOST_OOM, Status.FAILED, Status.TIMEOUT


def fail(kind: str, message: str = "", trace: str = "", rank: int = 0, phase: str = "measure"):
    facts = {"rank": rank, "phase": phase, "step": 3, "type": kind, "message": message}
    return {**facts, "traceback": trace, "peak_bytes": 10}


TORCHRUN_KILL = """
Root Cause (first observed failure):
[0]:
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 6408)
  traceback : Signal 9 (SIGKILL) received by PID 6408
"""
SIMPLE_KILL = "subprocess.CalledProcessError: Command '[...]' died with <Signals.SIGKILL: 9>."
TRIED = "CUDA out of memory. Tried to allocate 2.00 GiB."
GLOO = "[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:2345"
ILLEGAL = "CUDA error: an illegal memory access was encountered"
CPU = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
PINNING = '  File "setup.py", line 3, in buffer\n    torch.empty(n, pin_memory=True)\n'
BUS = (
    "RuntimeError: DataLoader worker (pid 9) is killed by signal: Bus error. It is possible that "
    "dataloader's workers are out of shared memory."
)
SHM = "RuntimeError: unable to write to file </torch_77_1_2>: No space left on device (28)"

# name: (facts, status, words of the reason, words of the way out)
CASES = {
    "finished though exit code 1": (
        {"result": Status.OK, "exit_code": 1, "log": "terminate called"}, Status.OK, "", "",
    ),
    "finished, then the deadline": ({"result": Status.OK, "stopped": "timeout"}, Status.OK, "", ""),
    "void with its reason": (
        {"result": Status.VOID, "result_reason": "bf16 was not in force", "exit_code": 0},
        Status.VOID, "bf16 was not", "",
    ),
    "killed for memory below a shell, which exits with 128 and the signal's number": (
        {"exit_code": 137, "machine_kills": 1}, HOST, "out-of-memory killer", "",
    ),
    "finished, old OOM in the log": ({"result": Status.OK, "log": TRIED}, Status.OK, "", ""),
    "interrupted": ({"stopped": "interrupted"}, Status.INTERRUPTED, "phase start", "again"),
    "interrupted while an OOM was logged": (
        {"stopped": "interrupted", "log": TRIED}, Status.INTERRUPTED, "interrupted", "again",
    ),
    # GPU memory, in all spellings
    "torch.OutOfMemoryError": (
        {"failures": (fail("OutOfMemoryError", TRIED, rank=1),)}, GPU,
        "rank 1 ran out of GPU memory in phase measure, step 3", "checkpoint",
    ),
    "cuda runtime": (
        {"failures": (fail("RuntimeError", "CUDA error: out of memory"),)}, GPU, "", "",
    ),
    "error name": ({"log": "RuntimeError: cudaErrorMemoryAllocation"}, GPU, "", ""),
    "hip": ({"log": "[rank1]: torch.OutOfMemoryError: HIP out of memory. Tried"}, GPU, "HIP", ""),
    "c10, no failure file": (
        {"exit_code": -6, "log": "terminate called after throwing 'c10::OutOfMemoryError'"}, GPU,
        "c10::OutOfMemoryError", "",
    ),
    "driver": ({"log": "RuntimeError: CUDA driver error: out of memory"}, GPU, "", ""),
    "triton": ({"log": "RuntimeError: Triton Error [CUDA]: out of memory"}, GPU, "", ""),
    "another process on the GPU": (
        {
            "failures": (
                fail("OutOfMemoryError", TRIED + " Process 77 has 60.1 GiB memory in use."),
            )
        },
        GPU,
        "",
        "process 77 holds 60.1 GiB",
    ),
    "first rank out of memory, the others lose their peer": (
        {
            "failures": (
                fail("RuntimeError", GLOO),
                fail("OutOfMemoryError", TRIED, rank=1, phase="warmup"),
            ),
            "log": GLOO,
        },
        GPU,
        "rank 1 ran out of GPU memory in phase warmup",
        "",
    ),
    "out of memory, then hung until the deadline": (
        {"stopped": "timeout", "failures": (fail("OutOfMemoryError", TRIED),)}, GPU, "", "",
    ),
    # what sounds like it, and is not
    "illegal access": ({"failures": (fail("AcceleratorError", ILLEGAL),)}, FAILED, "illegal",
                       "attend:kernel=flash"),
    "illegal access beyond cuDNN's attention": (
        {"failures": (fail("AcceleratorError", ILLEGAL),), "recipe": "single+attend:kernel=flash"},
        FAILED, "illegal", "CUDA_LAUNCH_BLOCKING=1 shows the operation",
    ),
    "cudnn internal": (
        {"failures": (fail("RuntimeError", "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"),)}, FAILED,
        "INTERNAL_ERROR", "",
    ),
    "autotuner's skipped choice": (
        {"log": f"{TRIED} Ignoring this choice.\nValueError: nan", "exit_code": 1}, FAILED,
        "ValueError: nan", "log.txt",
    ),
    "autotuner's skipped choice, then the deadline": (
        {"log": TRIED, "stopped": "timeout", "timeout_seconds": 60.0}, TIMEOUT, "60 s", "--timeout",
    ),
    # host memory
    "MemoryError": (
        {"failures": (fail("MemoryError"),), "processes": 2}, HOST, "rank 0 ran out of host memory",
        "fewer --processes than 2",
    ),
    "MemoryError below a limit": (
        {"failures": (fail("MemoryError"),), "shell_limit": ("ulimit -v", 600 << 20)}, HOST,
        "below the limit ulimit -v of 0.6 GiB", "ulimit -v unlimited",
    ),
    "cpu allocator": ({"failures": (fail("RuntimeError", CPU),)}, HOST, "", ""),
    "windows' words": (
        {"log": "RuntimeError: DefaultCPUAllocator: not enough memory"}, HOST, "", "",
    ),
    "bad_alloc": ({"log": "terminate called after throwing 'std::bad_alloc'"}, HOST, "", ""),
    "fork": ({"log": "OSError: [Errno 12] Cannot allocate memory"}, HOST, "Errno 12", ""),
    "numpy": (
        {"failures": (fail("_ArrayMemoryError", "Unable to allocate 3.0 GiB for an array"),)}, HOST,
        "3.0 GiB", "",
    ),
    "pinned, by the call": (
        {"failures": (fail("RuntimeError", "cudaHostAlloc failed: out of memory"),)}, HOST,
        "pin host memory", "",
    ),
    "pinned, by the traceback": (
        {"failures": (fail("RuntimeError", "CUDA error: out of memory", PINNING),)}, HOST,
        "pin host memory", "",
    ),
    "device memory while pinning is near": (
        {"failures": (fail("OutOfMemoryError", TRIED, PINNING),)}, GPU, "GPU", "",
    ),
    # killed from outside
    "kernel's killer": (
        {"exit_code": 1, "log": TORCHRUN_KILL, "machine_kills": 1}, HOST,
        "the kernel's out-of-memory killer", "",
    ),
    "container's limit": (
        {"log": SIMPLE_KILL, "machine_kills": 1, "group_kills": 1, "group_limit_bytes": 8 << 30},
        HOST, "the container's memory limit of 8.0 GiB", "",
    ),
    "launcher itself killed": ({"signal": 9, "group_kills": 1}, HOST, "container", ""),
    "killed, and the peer reports the loss": (
        {"log": TORCHRUN_KILL, "machine_kills": 1, "failures": (fail("RuntimeError", GLOO),)}, HOST,
        "killer", "",
    ),
    "killed by hand": (
        {"log": TORCHRUN_KILL}, FAILED,
        "killed by SIGKILL from outside; the kernel counted no out-of-memory kill", "earlyoom",
    ),
    "a kill elsewhere on the machine": (
        {"exit_code": 1, "machine_kills": 1, "failures": (fail("ValueError", "nan"),)}, FAILED,
        "ValueError: nan", "",
    ),
    "our own SIGKILL at the deadline": (
        {"stopped": "timeout", "signal": 9, "machine_kills": 1, "log": TORCHRUN_KILL}, TIMEOUT, "",
        "--timeout",
    ),
    # the rest
    "deadline": (
        {
            "stopped": "timeout",
            "timeout_seconds": 90.0,
            "statuses": ({"phase": "measure", "step": 4}, {"phase": "measure", "step": 3}),
        },
        TIMEOUT,
        "not finished after 90 s: stopped in phase measure, step 3",
        "--timeout",
    ),
    "deadline of several processes": (
        {"stopped": "timeout", "timeout_seconds": 90.0, "processes": 2}, TIMEOUT,
        "this deadline came before the process groups' timeout of 150 s", "--timeout",
    ),
    "bus error": ({"log": BUS}, FAILED, "bus error", "--shm-size"),
    "SIGBUS": ({"log": "traceback : Signal 7 (SIGBUS) received by PID 1"}, FAILED, "bus", "shm"),
    "shm full": ({"log": SHM}, FAILED, "shared memory is full", "--shm-size"),
    "disk full": (
        {"failures": (fail("OSError", "[Errno 28] No space left on device: 'r.json'"),)}, FAILED,
        "No space", "disk",
    ),
    "port": (
        {"log": "RuntimeError: The server socket has failed to listen ... EADDRINUSE"}, FAILED,
        "port", "again",
    ),
    "crash": ({"log": "died with <Signals.SIGSEGV: 11>."}, FAILED, "SIGSEGV", "log.txt"),
    "too few GPUs": (
        {"failures": (fail("AcceleratorError", "CUDA error: invalid device ordinal"),)}, FAILED,
        "ordinal", "--processes",
    ),
    "only the peers were heard": (
        {"exit_code": 1, "failures": (fail("RuntimeError", GLOO),)}, FAILED, "Connection closed",
        "",
    ),
    "bad option": (
        {
            "exit_code": 2,
            "log": "usage: train.py [-h]\ntrain.py: error: unrecognized arguments: --x",
        },
        FAILED,
        "unrecognized arguments: --x",
        "",
    ),
    "silence": ({"exit_code": 0}, FAILED, "exit code 0, with no message", "log.txt"),
}  # fmt: skip


GITHUB = "https://github.com/"
NCCL = GITHUB + "NVIDIA/nccl/blob/master/src/include/alloc.h"
RAISED_BY_NCCL = (
    "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/"
    "NCCLUtils.cpp:76, unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version "
    "2.20.5\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
)
MESSAGES = {
    # ---- torch: pinned memory; no room for a library's handle; no NVML for its own message ----
    "CudaError: out of memory (2)": (
        HOST,
        GITHUB + "pytorch/pytorch/blob/main/torch/cuda/__init__.py",  # check_error
    ),
    "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`": (
        GPU,
        GITHUB + "pytorch/serve/issues/1993",
    ),
    "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`": (
        GPU,
        GITHUB + "QwenLM/Qwen3/issues/873",
    ),
    'RuntimeError: NVML_SUCCESS == r INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator'
    '.cpp":830, please report a bug to PyTorch.': (GPU, GITHUB + "pytorch/pytorch/issues/122068"),
    "RuntimeError: NVML_SUCCESS == DriverAPI::get()->nvmlInit_v2_() INTERNAL ASSERT FAILED at "
    '"../c10/cuda/CUDACachingAllocator.cpp":813, please report a bug to PyTorch.': (
        GPU,
        GITHUB + "pytorch/pytorch/issues/130486",
    ),
    "torch.AcceleratorError: CUDA error: out of memory": (
        GPU, GITHUB + "Lightricks/LTX-Desktop/issues/139",
    ),
    # ---- bitsandbytes prints and exits; a paged optimizer's memory is managed ----
    "Error out of memory at line 88 in file D:\\a\\bitsandbytes-windows-webui\\"
    "bitsandbytes-windows-webui\\csrc\\ops.cu": (
        GPU,
        GITHUB + "jllllll/bitsandbytes-windows-webui/issues/14",
    ),
    "Error out of memory at line 351 in file /home/developer/bitsandbytes/csrc/pythonInterface.c": (
        HOST,
        GITHUB + "bitsandbytes-foundation/bitsandbytes/issues/464",
    ),
    # ---- cuDNN: 8 and older; 9 (include/cudnn_graph_v9.h of the package) ----
    "RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED": (
        GPU, GITHUB + "torch/torch7/issues/780",
    ),
    "RuntimeError: cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED": (
        GPU, "https://pypi.org/project/nvidia-cudnn-cu13",
    ),
    "RuntimeError: cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED": (
        HOST, "https://pypi.org/project/nvidia-cudnn-cu13",
    ),
    # ---- NCCL: in the log, and as torch raises its last warning ----
    "ng30903:3063028:3066152 [3] include/alloc.h:178 NCCL WARN Cuda failure 'out of memory'": (
        GPU, GITHUB + "NVIDIA/nccl/issues/1235",
    ),
    "ng30903:3063028:3066152 [3] include/alloc.h:185 NCCL WARN Failed to CUDA calloc 6291456 "
    "bytes": (GPU, GITHUB + "NVIDIA/nccl/issues/1235"),
    "n3:28:66152 [3] include/alloc.h:159 NCCL WARN Failed to CUDA host alloc 4096 bytes": (
        HOST, NCCL,
    ),
    f"{RAISED_BY_NCCL}Failed to CUDA calloc 67108864 bytes": (
        GPU, GITHUB + "sgl-project/sglang/issues/1116",
    ),
    f"{RAISED_BY_NCCL}Failed to CUDA malloc 67108864 bytes": (GPU, NCCL),
    f"{RAISED_BY_NCCL}Failed to CUDA host alloc 4096 bytes": (HOST, NCCL),
    f"{RAISED_BY_NCCL}Cuda failure 2 'out of memory'": (
        GPU, GITHUB + "NVIDIA/nccl/blob/master/src/include/cudawrap.h",
    ),
    f"{RAISED_BY_NCCL}Cuda failure 'invalid argument'": (
        FAILED, GITHUB + "pytorch/pytorch/issues/111187",
    ),
    # The limit of locked memory (ulimit -l), which is no want of memory.
    "msm-h200-2:4016:4653 [7] misc/ibvwrap.cc:190 NCCL WARN Call to ibv_create_cq failed with "
    "error Cannot allocate memory": (FAILED, GITHUB + "deepseek-ai/DeepEP/issues/143"),
    # ---- Triton, and Inductor's name for the same: shared memory of a block ----
    "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 131072, "
    "Hardware limit: 101376. Reducing block sizes or `num_stages` may help.": (
        FAILED,
        GITHUB + "triton-lang/triton/issues/8182",
    ),
    "ERROR:torch._inductor.select_algorithm:Exception No valid triton configs. OutOfMemoryError: "
    "out of resource: triton_mm Required: 294912 Hardware limit:232448": (
        FAILED,
        GITHUB + "pytorch/pytorch/pull/181198",
    ),
}  # fmt: skip
"""A line that a library writes -> the end that it means, and where it was seen or is written."""


@pytest.mark.parametrize("reported", [True, False], ids=["raised", "logged"])
@pytest.mark.parametrize("message", MESSAGES)
def test_a_library_s_own_words_for_full_memory_are_recognised(message, reported):
    kind, named, said = message.partition("Error: ")
    failure = fail(f"{kind.rpartition(' ')[2]}Error", said) if named else fail("Exception", message)
    known = {"failures": (failure,)} if reported else {"log": message}
    ended = classify(Facts(exit_code=1, **known))
    assert ended.status is MESSAGES[message][0], ended.reason
    if ended.status is not FAILED:
        assert ended.status in OUT_OF_MEMORY, "a search for the largest batch goes on"


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


@pytest.mark.parametrize("name", CASES)
def test_outcome(name):
    facts, status, reason, hint = CASES[name]
    found = classify(Facts(**{"recipe": "zero2+bf16"} | facts))
    assert found.status is status
    assert reason in (found.reason or "") and hint in (found.hint or "")
    if status not in (Status.OK, Status.VOID):
        assert found.reason and found.hint and "\n" not in found.reason
        assert len(found.reason) < 400


@pytest.mark.parametrize(
    ("recipe", "kind", "has", "has_not"),
    [
        ("ddp", "OutOfMemoryError", ("checkpoint", "accumulate", "zero3"), ("offload",)),
        ("zero3+checkpoint", "OutOfMemoryError", ("zero3_offload",), ("add checkpoint",)),
        ("zero3+accumulate:steps=4", "OutOfMemoryError", ("checkpoint",), ("accumulate",)),
        ("zero3_offload", "MemoryError", ("zero3_nvme",), ()),
    ],
)
def test_the_way_out_names_what_the_recipe_has_not_tried(recipe, kind, has, has_not):
    hint = classify(Facts(recipe=recipe, processes=2, failures=(fail(kind),))).hint
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


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def test_kernel_counters_of_both_versions(tmp_path):
    two, one = tmp_path / "two", tmp_path / "one"
    write(
        two,
        {
            "proc/vmstat": "pgfault 1\noom_kill 5\n",
            "proc/self/cgroup": "0::/a/b\n",
            "sys/a/b/memory.events": "oom 9\noom_kill 3\n",
            "sys/a/b/memory.max": "max\n",
            "sys/a/memory.max": "1024\n",
            "sys/cpu.max": "200000 100000\n",
        },
    )
    write(
        one,
        {
            "proc/vmstat": "pgfault 1\n",
            "proc/self/cgroup": "4:memory:/host/path\n1:cpu:/\n0::/\n",
            "sys/memory/memory.oom_control": "under_oom 0\noom_kill 2\n",
            "sys/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/cpu/cpu.cfs_quota_us": "-1\n",
        },
    )
    assert machine.memory_kills(two / "proc", two / "sys") == machine.MemoryKills(5, 3, 1024)
    assert machine.memory_kills(one / "proc", one / "sys") == machine.MemoryKills(0, 2, None)
    assert machine.cores(two / "sys") <= 2 and machine.cores(one / "sys") >= 1
    assert machine.MemoryKills(5, 3, 1).since(machine.MemoryKills(4, 3, 1)).machine == 1


def test_one_gpu_has_nobody_to_share_with():
    lost = Facts(recipe="single+checkpoint", failures=(fail("OutOfMemoryError"),))
    assert "hold less with zero2_offload or zero3_offload" in classify(lost).hint
