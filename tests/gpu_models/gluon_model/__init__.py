"""A model of Gluon on a Hopper GPU: runs the source of the kernels on the CPU, and finds what a GPU leaves undefined.

`modelled()` gives copies of the modules of fastattn/backends/{triton,hopper} that are imported over the model. Their
host functions take tensors on the CPU, and a launch runs its programs one after another:

    from gluon_model import modelled, running_with

    flash_forward = modelled("hopper.flash_forward")  # a copy of that module
    o, lse = flash_forward.forward(q, k, v, spec)  # raises KernelError where a kernel does something wrong
    with running_with(order="random", timing="late", seed=3):  # see machine.Settings
        o, lse = flash_forward.forward(q, k, v, spec)

(tests/gpu_models/modelled_hopper.py also gives them a GPU to ask for its properties.) A kernel of one's own imports its
names from `gluon_model.gluon` and is launched as usual: `kernel[(programs,)](*arguments, num_warps=4)`. Tensors and
descriptors are arguments.

What is found, whatever the order in which the model happens to run things (`shared.py` says how): a slot of shared
memory read before it is filled, or filled again before all have read it; a missing fence between the proxies;
deadlocks; a wait whose parity lets it pass in the wrong phase; bytes and arrivals that do not add up; a product used
before its wait; reads and writes outside of the elements of a tensor; what TMA and wgmma do not take; what a program
leaves undone at its end. Shared memory begins as NaN. Not modelled: layouts, registers, bank conflicts, clusters, time.
"""

from .errors import DeadlockError, KernelError
from .machine import ORDERS, TIMINGS, Settings, running_with
from .modules import modelled

__all__ = ["ORDERS", "TIMINGS", "DeadlockError", "KernelError", "Settings", "modelled", "running_with"]
