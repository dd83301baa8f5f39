"""Limits that `make cuda` holds the compiled CUDA kernels to."""

from __future__ import annotations

import dataclasses
import shutil

import cuda_record
import pytest
from cuda_compile import MOST_SHARED_KIB, Kernel, known_archs, summary, version_of

PLAIN = Kernel(80, "forward_kernel<Tiling<bf16, 64, 4, 2, 64>, false>", 248, 0, 33296, 128, 24, 16, 8)
NO_PRODUCTS = {"mma": 0, "matrices": 0, "transposed": 0}
FP32 = dataclasses.replace(PLAIN, name="forward_kernel<Tiling<float, 64, 4, 1, 32>, false>", **NO_PRODUCTS)
GENERAL = dataclasses.replace(PLAIN, name="forward_kernel<Tiling<f16, 64, 4, 2, 64>, true>")
WIDE = dataclasses.replace(PLAIN, name="forward_kernel<Tiling<f16, 256, 4, 1, 16>, false>")
OF_KEYS = dataclasses.replace(PLAIN, name="backward_kernel<Tiling<f16, 128, 4, 1, 32>, false, (Wanted)3, false>")
OF_KEYS_ON_75 = dataclasses.replace(OF_KEYS, arch=75, copies=0)
OF_BIAS = dataclasses.replace(PLAIN, name="bias_gradient_kernel<Tiling<f16, 64, 4, 1, 32> >", transposed=0)
OF_QUERIES = dataclasses.replace(PLAIN, name="query_facts_kernel<bf16>", copies=0, **NO_PRODUCTS)


@pytest.mark.parametrize(
    "kernel", [PLAIN, FP32, GENERAL, WIDE, OF_KEYS_ON_75, OF_BIAS, OF_QUERIES], ids=lambda kernel: kernel.name
)
def test_a_kernel_as_it_should_be(kernel):
    assert list(kernel.complaints()) == []


@pytest.mark.parametrize(
    ("kernel", "changes", "complaint"),
    [
        (PLAIN, {"mma": 0}, "has no matrix instruction"),
        (GENERAL, {"mma": 0}, "has no matrix instruction"),
        (PLAIN, {"matrices": 0}, "loads no matrix from shared memory"),
        (OF_BIAS, {"matrices": 0}, "loads no matrix from shared memory"),
        (PLAIN, {"transposed": 0}, "loads no transposed matrix from shared memory"),
        (OF_KEYS_ON_75, {"transposed": 0}, "loads no transposed matrix from shared memory"),
        (PLAIN, {"copies": 0}, "has 0 asynchronous copies"),
        (FP32, {"copies": 0}, "has 0 asynchronous copies"),
        (OF_KEYS_ON_75, {"copies": 8}, "has 8 asynchronous copies"),
        (FP32, {"mma": 8}, "has 8 matrix instructions, which are not true fp32 arithmetic"),
        (PLAIN, {"spilled": 4}, "spills 4 bytes"),
        (OF_KEYS, {"spilled": 4}, "spills 4 bytes"),
        (PLAIN, {"arch": 75, "copies": 0, "spilled": 4}, "spills 4 bytes"),
        (PLAIN, {"arch": 75, "copies": 0, "shared": 64 * 1024 + 1}, "takes 65537 bytes of shared memory, of 64 KiB"),
        (FP32, {"arch": 120, "shared": 99 * 1024 + 1}, "takes 101377 bytes of shared memory, of 99 KiB"),
    ],
)
def test_what_is_wrong_is_a_sentence(kernel, changes, complaint):
    assert list(dataclasses.replace(kernel, **changes).complaints()) == [complaint]


@pytest.mark.parametrize("kernel", [FP32, GENERAL, WIDE, OF_KEYS_ON_75], ids=lambda kernel: kernel.name)
def test_what_few_calls_take_may_spill(kernel):
    assert list(dataclasses.replace(kernel, spilled=4).complaints()) == []


def test_every_part_takes_as_much_as_it_has():
    for arch, kib in MOST_SHARED_KIB.items():
        full = dataclasses.replace(PLAIN, arch=arch, shared=1024 * kib, copies=8 if arch >= 80 else 0)
        assert list(full.complaints()) == []


def test_a_kernel_of_bf16_is_empty_where_there_are_no_instructions_for_it():
    empty = dataclasses.replace(PLAIN, arch=75, copies=0, **NO_PRODUCTS)
    assert list(empty.complaints()) == []
    assert empty.is_empty
    assert not any(kernel.is_empty for kernel in (PLAIN, FP32, OF_KEYS_ON_75))


def test_the_summary_of_an_arch_is_a_row():
    spilling = [dataclasses.replace(kernel, arch=75, spilled=8) for kernel in (OF_KEYS, WIDE, FP32)]
    wide = dataclasses.replace(FP32, arch=75, shared=63 * 1024, spilled=20)
    empty = dataclasses.replace(PLAIN, arch=75, mma=0, registers=4)
    row = summary("12.4", 75, [*spilling, wide, empty, dataclasses.replace(OF_QUERIES, arch=75)])
    lines = cuda_record.table({75: row}).splitlines()
    assert lines[-1] == "| 12.4 | 7.5 | 5 | 4 | 1 | 20 | 63 of 64 KiB |"
    assert {line.count("|") for line in lines} == {8}


def test_the_record_is_of_these_sources():
    assert cuda_record.is_current(), "run make cuda, then python -m docs.render"


def test_a_record_is_of_all_archs_and_of_these_sources(tmp_path, monkeypatch):
    sources = shutil.copytree(cuda_record._SOURCES, tmp_path / "csrc")
    monkeypatch.setattr(cuda_record, "_SOURCES", sources)
    monkeypatch.setattr(cuda_record, "FILE", tmp_path / "record.json")
    assert not cuda_record.is_current()
    rows = {arch: summary("13.0", arch, [dataclasses.replace(FP32, arch=arch)]) for arch in cuda_record.ARCHS}
    cuda_record.record({arch: row for arch, row in rows.items() if arch != 90})
    assert not cuda_record.is_current()
    cuda_record.record(rows)
    assert cuda_record.is_current()
    assert cuda_record.table(cuda_record.recorded()[1]) == cuda_record.table(rows)
    for changed in ("mask.h", "cuda/forward.cuh", "cuda/f16.cu"):
        before = (sources / changed).read_text()
        (sources / changed).write_text(before + "\n")
        assert not cuda_record.is_current()
        (sources / changed).write_text(before)
    assert cuda_record.is_current()


def test_what_nvcc_knows_is_asked_of_it(tmp_path):
    nvcc = tmp_path / "nvcc"
    nvcc.write_text(
        "#!/bin/sh\n[ $1 = --version ] && echo 'tools, release 12.4, V12.4.131' || printf 'sm_75\\nsm_90\\nsm_90a\\n'\n"
    )
    nvcc.chmod(0o755)
    assert known_archs(str(nvcc)) == {75, 90}
    assert version_of(str(nvcc)) == "12.4"
