"""Loaded by each Python that finds this folder in PYTHONPATH: CUDA tensors get CPU kernels when
torch is imported."""

import importlib.abc
import importlib.util
import os
import sys


class AfterTorch(importlib.abc.MetaPathFinder):
    """Finds torch as before, and installs the kernels behind its import."""

    def find_spec(self, name, path, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            install(module)

        spec.loader.exec_module = exec_module
        return spec


def install(torch):
    import ctypes

    ctypes.CDLL(os.environ["REHEARSAL_KERNELS"]).rehearsal_install()
    from tests.rehearsal import attention

    torch.rehearsal = attention.install()


if os.environ.get("REHEARSAL_KERNELS"):
    sys.meta_path.insert(0, AfterTorch())
