"""A fault of the GPU inside an engine, when a file appears: an entry point of its plugins, for measurements alone.

Owns one thread in the process that has the model. When the file that `MIDSTREAM_GPU_FAULT` names appears it launches
a kernel that writes to an address which is nobody's, and the context is lost as by a real fault. Without the variable
it does nothing; no engine finds it unless `dist_info` was called for a folder on its path.
"""

import os
import threading
import time
from pathlib import Path

VARIABLE = "MIDSTREAM_GPU_FAULT"
LOOK_S = 0.01
_GROUPS = ("vllm.general_plugins", "sglang.srt.plugins")
_KERNEL = 'extern "C" __global__ void fault(long long* nowhere) { nowhere[threadIdx.x] = 1; }'


def dist_info(folder: Path) -> None:
    """Let engines that have `folder` on their path find this plugin."""
    information = folder / "midstream_gpu_fault-0.dist-info"
    information.mkdir(parents=True, exist_ok=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: midstream-gpu-fault\nVersion: 0\n")
    points = "".join(f"[{group}]\nmidstream_gpu_fault = {__name__}:arm\n" for group in _GROUPS)
    (information / "entry_points.txt").write_text(points)


def arm() -> None:
    """Wait for the file beside whatever this process does."""
    if path := os.environ.get(VARIABLE):
        threading.Thread(target=_wait, args=(Path(path),), name="midstream-gpu-fault", daemon=True).start()


def _wait(path: Path) -> None:
    while not path.exists():
        time.sleep(LOOK_S)
    import torch

    # All processes of an engine wait; the fault belongs where the KV is.
    if torch.cuda.is_initialized():
        import cupy

        cupy.RawKernel(_KERNEL, "fault")((1,), (32,), (0x10,))
        print("midstream: a kernel that faults was launched", flush=True)
