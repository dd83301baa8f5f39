"""Compares launches of Triton kernels that fastattn repeats with those that Triton makes of the same calls.

Calls that differ in one thing each are made one after the other, and a twin of the first with other tensors, whose
launches are all to be repeated; and each again when all that was remembered of launches is forgotten: the same compiled
kernels must be launched with the same arguments. Nothing is compiled, and no GPU is needed: a kernel is what Triton
would compile. No argument is one that Triton 3.6 would compile wrongly. Prints how many launches were repeated.
"""

from __future__ import annotations

import itertools
import random
import sys
from pathlib import Path
from types import ModuleType
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import triton
from parts import drawn_at, places_of_a_part
from torch import Tensor
from triton.compiler.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

import fastattn
from benchmarks.launches import handed_to
from fastattn import Mask, RelativeBias, backends
from fastattn.backends.compiling import compile_only
from fastattn.backends.triton import launches
from fastattn.paged import prepared

SERIES = 40
LAYOUTS = ["BHND", "BNHD", "sliced", "columns", "shifted"]
CHOICES: dict[str, list] = {
    "B": [1, 2],
    "H_kv": [1, 2],
    "group": [1, 2],
    "D": [16, 40],
    "n_q": [1, 16, 17, 128],
    "n_k": [1, 17, 128, 600],
    "dtype": [torch.float16, torch.float32],
    "layouts": list(itertools.product(LAYOUTS, repeat=4)),
    "one tensor for k and v": [False, False, False, True],
    "pages": [None, None, None, (16, torch.int32, 0), (16, torch.int64, 0), (16, torch.int32, 1), (7, torch.int32, 0)],
    "pool": [9, 12],  # pages in all
    "stored": [None, None, torch.int8, torch.float8_e4m3fn],  # of pages
    "precision": ["highest", "high"],
    "causal": [False, True],
    "q_offset": [0, 1, 16, 300, "of samples", "of queries"],
    "window": [(None, None), (None, None), (1, None), (8, 8)],
    "real_keys": [None, None, 0, 1],  # where they begin in memory
    "segment_ids": [None, None, None, torch.int32, torch.int64],
    "dense": [None, None, None, 0, 1],
    "scale": [None, 1.0, 0.5, -0.5],
    "bias": [None, None, "BHND", "shifted", "sliced", "by distance", "by distance, shifted"],
    "alibi_slopes": [None, None, 0, 1],
    "sinks": [None, None, 0, 1],
    "softcap": [None, None, 2.0, 3.0],
    "dropout_p": [0.0, 0.0, 0.1, 0.25, 0.75],
    "places": [None, None, 0, 1],
    "wanted": list(itertools.product([False, True], repeat=6)),
}
OF_HOPPER: dict[str, list] = {
    "dtype": [torch.float16, torch.bfloat16],
    "dropout_p": [0.0],
    "deterministic": [True, False],
    "D": [16, 40, 200],
    **{name: [None] for name in ("pages", "dense", "bias", "alibi_slopes", "sinks", "softcap")},
}
LEARNED = ("bias", "alibi_slopes", "sinks")
PREPARATION = {"spans_kernel", "documents_kernel", "positions_kernel", "ranges_kernel", "query_ranges_kernel"}


def compiled(src: object, **_: object) -> CompiledKernel:
    """In the place of what Triton would compile of `src`."""
    kernel = CompiledKernel.__new__(CompiledKernel)
    kernel.src, kernel.function, kernel.packed_metadata, kernel.name = src, 0, (), src.fn.__name__
    return kernel


def tensor(layout: str, *shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    """Zeros in an order in memory, "shifted" from a multiple of 16 bytes."""
    B, H, n, D = shape
    if layout == "BNHD":
        return torch.zeros(B, n, H, D, dtype=dtype).transpose(1, 2)
    if layout == "sliced":
        return torch.zeros(B, H, n, 3 * D, dtype=dtype)[..., D : 2 * D]
    if layout == "columns":
        return torch.zeros(B, H, D, n, dtype=dtype).mT
    if layout == "shifted":
        return torch.zeros(B * H * n * D + 1, dtype=dtype)[1:].view(B, H, n, D)
    return torch.zeros(shape, dtype=dtype)


def call(chosen: dict[str, object]) -> tuple[list[Tensor], Mask, dict[str, object]]:
    """(q, k, v, do), mask and options, by what was chosen of each of CHOICES."""
    B, H_kv, D, n_q, n_k, dtype = (chosen[name] for name in ("B", "H_kv", "D", "n_q", "n_k", "dtype"))
    H = H_kv * chosen["group"]
    shapes = (B, H, n_q, D), (B, H_kv, n_k, D), (B, H_kv, n_k, D), (B, H, n_q, D)
    tensors = [tensor(layout, *shape, dtype=dtype) for layout, shape in zip(chosen["layouts"], shapes, strict=True)]
    if chosen["one tensor for k and v"]:
        tensors[2] = tensors[1]
    fields = {name: chosen[name] for name in ("causal", "q_offset", "window")}
    if fields["q_offset"] == "of samples":
        fields["q_offset"] = torch.zeros(B, dtype=torch.int64)
    if fields["q_offset"] == "of queries":
        fields["q_offset"] = torch.zeros(B, n_q, dtype=torch.int32)
    if (begin := chosen["real_keys"]) is not None:
        fields["real_keys"] = torch.ones(B * n_k + 1, dtype=torch.bool)[begin:][: B * n_k].view(B, n_k)
    if (of_ids := chosen["segment_ids"]) is not None:
        fields["segment_ids"] = tuple(torch.zeros(B, n, dtype=of_ids) for n in (n_q, n_k))
    if (begin := chosen["dense"]) is not None:
        fields["dense"] = torch.ones(n_q * n_k + 1, dtype=torch.bool)[begin:][: n_q * n_k].view(n_q, n_k)
    options = {name: chosen[name] for name in ("scale", "softcap", "dropout_p", "precision")}
    if "deterministic" in chosen:
        options["deterministic"] = chosen["deterministic"]
    if (layout := chosen["bias"]) is not None:
        options["bias"] = tensor(layout, 1, H, n_q, n_k)
        if "distance" in layout:
            fields.pop("segment_ids", None)  # of queries and keys each their own
            options["bias"] = RelativeBias(tensor(layout.removeprefix("by distance, "), 1, 1, H, n_q + n_k - 1)[0, 0])
    for name in ("alibi_slopes", "sinks"):
        if (begin := chosen[name]) is not None:
            options[name] = torch.ones(H + 1)[begin:][:H]
    if chosen["pages"] is not None and "bias" not in options and not options["dropout_p"]:
        del options["dropout_p"]
        size, of_table, begin = chosen["pages"]
        n = n_k // size
        table = torch.zeros(B * n + 1, dtype=of_table)[begin:][: B * n].view(B, n)
        stored = chosen["stored"]
        tensors[1:3] = (
            tensor(layout, chosen["pool"], H_kv, size, D, dtype=torch.int8 if stored else dtype).view(stored or dtype)
            for layout in chosen["layouts"][1:3]
        )
        if stored is not None:
            scales = torch.ones(2, chosen["pool"], size, H_kv)
            options["scales"] = scales[0], scales[1]
        for name in ("real_keys", "dense", "segment_ids"):  # of as many keys as are in the pages
            if name in fields and n_k % size:
                del fields[name]
        return [*tensors, table], Mask(**fields), options
    if (begin := chosen["places"]) is not None and options["dropout_p"]:
        places = places_of_a_part(n_q, n_k)
        options["places"] = torch.cat([places.new_zeros(begin), places])[begin:]
    learned = (*tensors[:3], *learned_of(options))
    for wanted, x in zip(chosen["wanted"], learned, strict=True):
        if wanted and x is not None:
            x.requires_grad_()
    return tensors, Mask(**fields), options


def learned_of(options: dict[str, object]) -> list[Tensor | None]:
    terms = [options.get(name) for name in LEARNED]
    return [x.table if isinstance(x, RelativeBias) else x for x in terms]


def launched(of_call: tuple, taken: list, backend: str = "triton") -> list:
    """The kernels of a call and their arguments, of which a tensor is its metadata and which one it is."""
    taken.clear()
    (q, k, v, do, *table), mask, options = of_call
    places = options.get("places")
    terms = {name: x for name, x in options.items() if name not in ("places", "precision")}
    torch.set_float32_matmul_precision(options["precision"])
    torch.manual_seed(0)
    if table:
        prepared(q, k.transpose(1, 2), v.transpose(1, 2), *table, mask, **terms, backend=backend)()
    else:
        with drawn_at(places):
            o = fastattn.attention(q, k, v, mask, **terms, backend=backend)
    leaves = [x for x in (q, k, v, *learned_of(options)) if x is not None and x.requires_grad]
    if leaves:
        torch.autograd.grad(o, leaves, do)
    terms = (*learned_of(options), *options.values(), *options.get("scales", ()))
    inputs = (q, k, v, do, *table, *mask.tensors().values(), *(x for x in terms if isinstance(x, Tensor)))
    known = {x.data_ptr(): f"input {i}" for i, x in enumerate(inputs)}

    def described(x: object) -> object:
        if isinstance(x, Tensor):
            which = known.setdefault(x.data_ptr(), f"new {len(known)}")
            return x.dtype, tuple(x.shape), x.stride(), x.data_ptr() % 16, which
        if hasattr(x, "base"):  # a descriptor
            return {name: described(value) if name == "base" else value for name, value in vars(x).items()}
        return tuple(map(described, x)) if isinstance(x, tuple) else (type(x), x)

    return [(id(kernel), grid, described(arguments)) for kernel, grid, arguments in taken]


def has_one(x: object) -> bool:
    """Whether a 1, which Triton compiles into the kernel, stands in an argument."""
    return any(map(has_one, x)) if isinstance(x, tuple) else type(x) is int and x == 1


def is_safe(x: object) -> bool:
    """Whether Triton 3.6 knows every 1 in an argument for what it is also in loops; see `Rules`."""
    if not isinstance(x, tuple):
        return True
    tuples = [member for member in x if isinstance(member, tuple)]
    behind = x[
        max((i for i, member in enumerate(x) if isinstance(member, tuple) and has_one(member)), default=len(x)) :
    ]
    constant = any(member is None or has_one(member) for member in behind if not isinstance(member, tuple))
    return all(map(is_safe, tuples)) and (constant or not behind or len(tuples) == len(x))


def main() -> None:
    """Raises AssertionError where a call is not launched as Triton launches it, or not as Triton 3.6 compiles it."""
    repeated = compared(backends.triton, 80, CHOICES) + compared(backends.hopper, 90, CHOICES | OF_HOPPER)
    print(f"{repeated} launches of {2 * SERIES} calls were repeated as Triton makes them")


def compared(backend: ModuleType, arch: int, choices_of: dict[str, list]) -> int:
    """How many launches of a backend were repeated, all of them rightly."""
    taken: list = []
    watched: list = []

    def take(kernel: CompiledKernel, *launch: object) -> None:
        assert backend is backends.hopper or all(map(is_safe, launch[9:])), (kernel.name, launch[9:])
        if kernel.name not in PREPARATION:
            taken.append((kernel, launch[:3], launch[9:]))
            watched.append(launch[6:9])

    draw, repeated, hooks = random.Random(0), 0, triton.knobs.runtime
    with mock.patch.object(triton.compiler, "compile", compiled), handed_to(take, backend, arch):
        for _ in range(SERIES):
            chosen = {name: draw.choice(choices) for name, choices in choices_of.items()}
            series = [chosen] + [chosen | {name: draw.choice(choices)} for name, choices in choices_of.items()]
            for other in series:
                of_call = call(other)
                again = forgotten(of_call, taken, backend.NAME)
                assert launched(of_call, taken, backend.NAME) == again, (chosen, other)
            twin = call(chosen | {"one tensor for k and v": False})
            launched(twin, taken, backend.NAME)
            with mock.patch.object(JITFunction, "run", autospec=True, side_effect=JITFunction.run) as by_triton:
                again = launched(twin, taken, backend.NAME)
            assert all(kernel.args[0].__name__ in PREPARATION for kernel in by_triton.call_args_list), chosen
            assert again == forgotten(twin, taken, backend.NAME), chosen
            with compile_only():
                assert launched(twin, taken, backend.NAME) == [], chosen
            watched.clear()
            with mock.patch.object(hooks.launch_exit_hook, "calls", [print]):
                assert again == launched(twin, taken, backend.NAME), chosen
            assert [seen[1:] for seen in watched] == [(hooks.launch_enter_hook, hooks.launch_exit_hook)] * len(again)
            assert [seen[0].get()["name"] for seen in watched] == [kernel.name for kernel, *_ in taken], chosen
            repeated += len(again)
            kept = [x for known in launches._known.values() for launch in known.launches for x in launch.arguments]
            assert not any(map(launches._has_tensors, kept)), "the memory of a call is kept for good"
        if backend is backends.hopper:
            return repeated
        every_term = {name: choices[0] for name, choices in CHOICES.items()} | {"alibi_slopes": 0, "sinks": 0}
        for bias, wanted in itertools.product(
            (None, "BHND", "by distance"), CHOICES["wanted"]
        ):  # which sums there are differs too
            of_call = call(every_term | {"bias": bias, "wanted": wanted, "n_q": 128, "n_k": 128})
            assert launched(of_call, taken) == forgotten(of_call, taken), (bias, wanted)
        for n_q, stored in itertools.product(CHOICES["n_q"], CHOICES["stored"]):  # which kernels read as int8
            of_call = call(every_term | {"pages": (16, torch.int32, 0), "n_q": n_q, "stored": stored})
            assert launched(of_call, taken) == forgotten(of_call, taken), (n_q, stored)
    return repeated


def forgotten(of_call: tuple, taken: list, backend: str = "triton") -> list:
    """What `launched` returns when nothing is remembered."""
    known = dict(launches._known)
    launches._known.clear()
    result = launched(of_call, taken, backend)
    launches._known.update(known)
    return result


if __name__ == "__main__":
    main()
