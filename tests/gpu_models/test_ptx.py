"""The machine for PTX: what it computes, and what it refuses."""

from __future__ import annotations

import re
import struct

import pytest
import torch
from ptx.machine import Program, PtxError, program

# Each thread of 64 reads one of x [64] in fp32, and one of y [64] is written.
KERNEL = """
.version 8.7
.target sm_80
.address_size 64
.extern .shared .align 16 .b8 memory[];
.visible .entry kernel(.param .u64 kernel_x, .param .u64 kernel_y)
.reqntid 64
{{
  .reg .pred %p<4>;
  .reg .b32 %r<9>;
  .reg .b64 %rd<9>;
  ld.param.b64 %rd1, [kernel_x];
  ld.param.b64 %rd2, [kernel_y];
  mov.u32 %r1, %tid.x;
  mul.wide.u32 %rd3, %r1, 4;
  add.s64 %rd4, %rd1, %rd3;
  add.s64 %rd5, %rd2, %rd3;
  shl.b32 %r2, %r1, 2;
  mov.b32 %r3, memory;
  add.s32 %r4, %r3, %r2;
  xor.b32 %r5, %r4, 128;  // of the same lane of the other warp
  setp.lt.s32 %p1, %r1, 32;
  mov.u32 %r8, %laneid;
  setp.lt.s32 %p2, %r8, 16;
  {body}
  ret;
}}
"""
EXCHANGED = """ld.global.b32 %r6, [%rd4]; st.shared.b32 [%r4], %r6; bar.sync 0;
  ld.shared.b32 %r7, [%r5]; st.global.b32 [%rd5], %r7;"""
COPIED = """cp.async.ca.shared.global [%r4], [%rd4], 4; cp.async.commit_group;
  cp.async.wait_group 0; bar.sync 0; ld.shared.b32 %r7, [%r5]; st.global.b32 [%rd5], %r7;"""


COMES_TWICE = "@%p1 bar.arrive 1, 64; @%p1 bar.arrive 1, 64; @!%p1 bar.sync 1, 64; @!%p1 bar.sync 1, 64;"


def run(body: str, blocks: int = 1, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """x and y after the kernel with that body."""
    x, y = torch.randn(64), torch.zeros(64)
    ranges = [(tensor.data_ptr(), tensor.data_ptr() + 256) for tensor in (x, y)]
    values = [struct.pack("Q", begin) for begin, _ in ranges]
    Program(KERNEL.format(body=body)).launch((blocks, 1, 1), 64, 256, values, ranges, seed)
    return x, y


@pytest.mark.parametrize("body", [EXCHANGED, COPIED])
def test_warps_exchange_what_they_read(body):
    for seed in range(10):
        x, y = run(body, seed=seed)
        assert torch.equal(y, x.roll(32))


@pytest.mark.parametrize(
    ("body", "change", "fault"),
    [
        (EXCHANGED, ("bar.sync 0;", ""), "race|read before it is written"),
        (EXCHANGED, ("bar.sync 0;", "@%p1 bar.sync 0;"), "deadlock|race|read before it is written"),
        (
            EXCHANGED,
            ("bar.sync 0;", "@%p1 bar.sync 1; @!%p1 bar.sync 2;"),
            r"deadlock: all wait\n +warp 0 at .*\n +warp 1 at",
        ),
        (EXCHANGED, ("bar.sync 0;", "@%p2 bar.sync 0;"), "by a part of the warp"),
        (EXCHANGED, ("bar.sync 0;", "bar.sync 0, 96;"), "a barrier for 96 threads"),
        (EXCHANGED, ("[%rd4]", "[%rd4+4]"), "outside of every tensor"),
        (EXCHANGED, ("[%rd4]", "[%rd4+2]"), "no multiple of 4"),
        (EXCHANGED, ("[%r5]", "[%r5+4]"), "outside of the 256 bytes|race|read before"),
        (EXCHANGED, ("st.shared", "@%p1 st.shared"), "read before it is written"),
        (EXCHANGED, ("ld.global", "@%p2 ld.global"), "%r6 is undefined"),
        (EXCHANGED, ("ld.global", "@%p3 ld.global"), "%p3 is undefined"),
        (EXCHANGED, ("[%rd5]", "[%rd2]"), "race: writes global byte"),
        (COPIED, ("cp.async.wait_group 0;", ""), "an asynchronous copy that nobody waited for"),
        (COPIED, ("wait_group 0", "wait_group 1"), "an asynchronous copy that nobody waited for"),
        (COPIED, ("cp.async.commit_group;", ""), "an asynchronous copy that nobody waited for"),
        (COPIED, ("bar.sync 0;", ""), "race|read before|nobody waited for"),
        (
            EXCHANGED,
            ("[%rd5], %r7;", f"[%rd5], %r7; bar.sync 0; {COPIED[: COPIED.index(';')]};"),
            "has not waited for what",
        ),
        (EXCHANGED, ("bar.sync 0;", f"bar.sync 0; {COMES_TWICE}"), "may also come to the barrier"),
        (EXCHANGED, ("st.global.b32", "st.global.L1::no_allocate.b32"), "unknown instruction"),
        (EXCHANGED, ("%r7;", "%rd7;"), "%rd7 is undefined"),
        (EXCHANGED, ("bar.sync 0;", "bar.sync 0; add.s32 %rd7, %r1, 1;"), "has 64 bits"),
        (EXCHANGED, ("bar.sync 0;", "bar.sync 0; add.s32 %r7, %r1, %r1, 1;"), "another number of operands"),
        (EXCHANGED, ("bar.sync 0;", "bar.sync 0; .local .b32 x;"), "unknown directive"),
        (EXCHANGED, ("bar.sync 0;", "bar.sync 0; bra nowhere;"), "unknown label"),
    ],
)
def test_what_is_wrong_is_a_fault(body, change, fault):
    assert change[0] in body
    for seed in range(3):
        with pytest.raises(PtxError, match=fault):
            run(body.replace(*change), seed=seed)


@pytest.mark.parametrize(("select", "fault"), [("0x3120", None), ("0x3124", "%r7 is undefined")])
def test_permuted_bytes_are_undefined_where_they_are_of_an_undefined_register(select, fault):
    body = f"ld.global.b32 %r6, [%rd4]; prmt.b32 %r7, %r6, %r0, {select}U; st.global.b32 [%rd5], %r7;"
    if fault:
        with pytest.raises(PtxError, match=fault):
            run(body)
    else:
        x, y = run(body)
        assert torch.equal(y.view(torch.uint8).view(-1, 4), x.view(torch.uint8).view(-1, 4)[:, [0, 2, 1, 3]])


def test_an_approximate_quotient_is_zero_where_the_divisor_is_very_large():
    body = "ld.global.b32 %r6, [%rd4]; mov.b32 %r0, {}; div.approx.f32 %r7, %r6, %r0; st.global.b32 [%rd5], %r7;"
    x, y = run(body.format("0f40400000"))
    assert torch.allclose(y, x / 3, rtol=2.0**-22)
    assert (run(body.format("0f7F000000"))[1] == 0).all()  # 2^127


@pytest.mark.parametrize(("at", "n"), [(6, 26), (50, 26), (3, 0), (0, 64), (64, 1)])
def test_a_field_of_64_bits(at, n):
    x, field = 0xFEDCBA9876543210, f"mov.b64 %rd6, 0xFEDCBA9876543210; bfe.u64 %rd7, %rd6, {at}, {n};"
    expected = (x >> at) & ((1 << n) - 1)
    for shift in (0, 32):
        _, y = run(f"{field} shr.u64 %rd8, %rd7, {shift}; cvt.u32.u64 %r7, %rd8; st.global.b32 [%rd5], %r7;")
        assert y.view(torch.int32)[0].item() & 0xFFFFFFFF == expected >> shift & 0xFFFFFFFF


VOTED = """bar.red.or.pred %p3, 0, %p1; vote.sync.ballot.b32 %r6, %p2, -1; mov.b32 %r7, 0;
  @%p3 mov.b32 %r7, %r6; st.global.b32 [%rd5], %r7;"""


def test_all_threads_and_lanes_know_what_was_voted():
    for seed in range(10):
        _, y = run(VOTED, seed=seed)
        assert (y.view(torch.int32) == 0xFFFF).all()
        _, y = run(VOTED.replace("0, %p1;", "0, 0;"), seed=seed)
        assert (y == 0).all()


def test_a_vote_is_a_barrier():
    for seed in range(10):
        x, y = run(EXCHANGED.replace("bar.sync 0;", "bar.red.or.pred %p3, 0, %p1;"), seed=seed)
        assert torch.equal(y, x.roll(32))


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (("bar.red.or.pred %p3, 0, %p1;", "@%p2 bar.red.or.pred %p3, 0, %p1;"), "by a part of the warp"),
        (
            ("bar.red.or.pred %p3, 0, %p1;", "@%p1 bar.red.or.pred %p3, 0, %p1; @!%p1 bar.sync 0;"),
            "bar.red meets another instruction",
        ),
        (("0, %p1;", "0, %p3;"), "%p3 is undefined"),
        (("%r6, %p2, -1;", "%r6, %p2, 1;"), "only the members 0x1"),
        (("vote.sync", "@%p2 vote.sync"), "by a part of the warp"),
    ],
)
def test_a_wrong_vote_is_a_fault(change, fault):
    assert change[0] in VOTED
    for seed in range(3):
        with pytest.raises(PtxError, match=fault):
            run(VOTED.replace(*change), seed=seed)


# Thread i of 64 writes what the function makes of i and of a structure of two integers, of which it gets the address:
# i plus the second one, or the first one where i is less than 7.
CALLING = """
.version 9.0
.target sm_80
.address_size 64
.func (.param .align 4 .b8 result[8]) of_both(.param .b64 both, .param .b32 number);
.visible .entry kernel(.param .u64 kernel_y, .param .align 8 .b8 kernel_both[16])
.maxntid 64, 1, 1
{
  .reg .pred %p<4>;
  .reg .b32 %r<9>;
  .reg .b64 %rd<9>;
  mov.b64 %rd2, kernel_both;
  ld.param.u64 %rd1, [kernel_y];
  cvta.param.u64 %rd3, %rd2;
  mov.u32 %r1, %tid.x;
  setp.ge.s32 %p1, %r1, 32;
  @%p1 bra second;
  {
  .param .b64 param0; st.param.b64 [param0+0], %rd3; .param .b32 param1; st.param.b32 [param1+0], %r1;
  .param .align 4 .b8 back[8];
  call.uni (back), of_both, (param0, param1);
  ld.param.b32 %r4, [back+0]; ld.param.b32 %r5, [back+4];
  }
  bra.uni ended;
second:
  {
  .param .b64 param0; st.param.b64 [param0+0], %rd3; .param .b32 param1; st.param.b32 [param1+0], %r1;
  .param .align 4 .b8 back[8];
  call.uni (back), of_both, (param0, param1);
  ld.param.b32 %r4, [back+0]; ld.param.b32 %r5, [back+4];
  }
ended:
  add.s32 %r6, %r4, %r5;
  mul.wide.u32 %rd4, %r1, 4;
  add.s64 %rd4, %rd4, %rd1;
  st.global.u32 [%rd4], %r6;
  ret;
}
.func (.param .align 4 .b8 result[8]) of_both(.param .b64 both, .param .b32 number)
{
  .reg .pred %p<4>;
  .reg .b32 %r<9>;
  .reg .b64 %rd<9>;
  ld.param.u64 %rd1, [both];
  ld.param.u32 %r1, [number];
  st.param.b32 [result+0], %r1;
  setp.lt.s32 %p1, %r1, 7;
  @%p1 bra few;
  ld.u64 %rd2, [%rd1+8];
  cvt.u32.u64 %r2, %rd2;
  st.param.b32 [result+4], %r2;
  ret;
few:
  ld.u64 %rd2, [%rd1];
  cvt.u32.u64 %r2, %rd2;
  sub.s32 %r2, %r2, %r1;
  st.param.b32 [result+4], %r2;
  ret;
}
"""


def call(text: str) -> torch.Tensor:
    """y after the kernel, with 5 and 77 in the structure."""
    y = torch.zeros(64, dtype=torch.int32)
    values = struct.pack("Q", y.data_ptr()), struct.pack("QQ", 5, 77)
    Program(text).launch((1, 1, 1), 64, 0, values, [(y.data_ptr(), y.data_ptr() + 256)], 1)
    return y


def test_functions_are_called():
    i = torch.arange(64)
    assert torch.equal(call(CALLING), torch.where(i < 7, 5, i + 77).int())


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (("[%rd1+8]", "[%rd1+16]"), "outside of the parameters"),
        (("[%rd1+8]", "[%rd1+4]"), "parameter 0xc is no multiple of 8"),
        (("cvta.param.u64 %rd3, %rd2", "mov.b64 %rd3, %rd2"), "outside of every tensor"),
        (("add.s64 %rd4", "@%p1 ld.param.u64 %rd4, [%rd2+16]; add.s64 %rd4"), "outside of the parameters"),
        (("ld.u64 %rd2, [%rd1+8];", ""), "%rd2 is undefined|%r6 is undefined"),
        ((".maxntid 64", ".maxntid 32"), "wants fewer threads"),
        ((".maxntid 64, 1, 1", ".maxntid 32, 2, 1"), "PTX: .maxntid"),
        (("[both]", "[neither]"), "unknown neither"),
        (("[result+0]", "[result+8]"), "st.param.b32 of such a part"),
        (("[result+0]", "[result+2]"), "st.param.b32 of such a part"),
        (("  st.param.b32 [result+0], %r1;", ""), "a part that nobody stored"),
        (("ld.param.u32 %r1, [number]", "mov.b32 %r1, %r8"), "%p1 is undefined"),
        (("call.uni (back), of_both, (param0, param1)", "call.uni (back), of_both, (param0)"), "number of arguments"),
        (("call.uni (back), of_both", "call.uni (back), of_three"), "unknown function of_three"),
        (("(param0, param1);", "(param1, param0);"), "another argument"),
        (("@%p1 bra few", "@%p1 bra ended"), "unknown label ended"),
        (("@%p1 bra few", "@%p1 call.uni (back), of_both, (param0, param1)"), "unknown instruction @%p1 call"),
        (("  .reg .b64 %rd<9>;\n  ld.param.u64 %rd1, [both];", "  ld.param.u64 %rd1, [both];"), "unknown %rd1"),
        (("few:", "few: call.uni (result), of_both, (both, number);"), "calls within calls"),
    ],
)
def test_a_wrong_call_is_a_fault(change, fault):
    assert change[0] in CALLING
    with pytest.raises(PtxError, match=re.escape(fault) if "|" not in fault else fault):
        call(CALLING.replace(*change))


@pytest.mark.parametrize(
    ("K", "dtype"), [(16, torch.float16), (16, torch.bfloat16), (8, torch.float16), (8, torch.float32)], ids=str
)
@pytest.mark.parametrize(("arch", "at_once", "spare"), [(75, 4, 0), (80, 8, 1), (90, 16, 2)])
def test_products_are_those_of_the_manual(arch, at_once, spare, K, dtype):
    """By its figures: lane 4 g + t holds the rows g and g + 8, in each word of A and B one or two elements.

    The products of so many elements of 16 bits, or of half as many in TF32, are added at once, each cut off after so
    many bits more than a sum has.
    """
    name = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "tf32"}[dtype]
    in_word = 4 // dtype.itemsize
    words = K // (4 * in_word)  # of B; A has twice as many
    A, B, C = (torch.randint(-8, 9, shape).float() for shape in ((16, K), (K, 8), (16, 8)))
    C *= 1 + 2**-20 + 2**-23
    given = torch.empty(32, 3 * words + 4, dtype=torch.int32)
    for lane, (g, t) in enumerate((g, t) for g in range(8) for t in range(4)):
        parts = []
        for word in range(2 * words):
            first = 4 * in_word * (word // 2) + in_word * t
            parts.append(A[g + 8 * (word % 2), first : first + in_word].to(dtype))
        parts += [B[4 * in_word * word + in_word * t :, g][:in_word].to(dtype) for word in range(words)]
        of_c = torch.stack([C[g + 8 * (i // 2), 2 * t + i % 2] for i in range(4)])
        given[lane] = torch.cat([torch.cat(parts).view(torch.int32), of_c.view(torch.int32)])
    n = given.shape[1]
    registers = [f"%r{10 + i}" for i in range(n)]
    a, b, c = (", ".join(registers[i:j]) for i, j in ((0, 2 * words), (2 * words, 3 * words), (3 * words, n)))
    loads = "".join(f"ld.global.b32 {x}, [%rd3+{4 * i}];" for i, x in enumerate(registers))
    stores = "".join(f"st.global.b32 [%rd4+{4 * i}], %r{3 + i};" for i in range(4))
    product = (
        f"mma.sync.aligned.m16n8k{K}.row.col.f32.{name}.{name}.f32 {{%r3, %r4, %r5, %r6}}, {{{a}}}, {{{b}}}, {{{c}}};"
    )
    text = f""".version 8.7
.target sm_{arch}
.address_size 64
.visible .entry kernel(.param .u64 x, .param .u64 y)
{{
  .reg .b32 %r<40>; .reg .b64 %rd<9>;
  ld.param.b64 %rd1, [x]; ld.param.b64 %rd2, [y]; mov.u32 %r1, %tid.x;
  mad.wide.u32 %rd3, %r1, {4 * n}, %rd1; mad.wide.u32 %rd4, %r1, 16, %rd2;
  {loads} {product} {stores} ret;
}}"""
    D = torch.empty(32, 4)
    ranges = [(x.data_ptr(), x.data_ptr() + 4 * x.numel()) for x in (given, D)]
    Program(text).launch((1, 1, 1), 32, 0, [struct.pack("Q", begin) for begin, _ in ranges], ranges, 1)
    expected, at_once = C.double(), min(at_once // (2 if dtype == torch.float32 else 1), K)
    for first in range(0, K, at_once):
        left, right = A[:, first : first + at_once, None].double(), B[first : first + at_once].double()
        addends = torch.cat([expected[:, None], left * right], dim=1)
        exponents = torch.cat([expected[:, None].frexp()[1], left.frexp()[1] + right.frexp()[1] - 1], dim=1)
        largest = exponents.masked_fill(addends == 0, -100).amax(1, keepdim=True)  # of numbers from 0.5 on
        last_bit = 2.0 ** (largest.double() - 24 - spare)
        exact = ((addends / last_bit).trunc() * last_bit).sum(1)
        nearest = exact.float()
        expected = torch.where(nearest.abs() > exact.abs(), nearest.nextafter(torch.tensor(0.0)), nearest).double()
    for lane, (g, t) in enumerate((g, t) for g in range(8) for t in range(4)):
        assert D[lane].tolist() == [float(expected[g + 8 * (i // 2), 2 * t + i % 2]) for i in range(4)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rounding_to_16_bits(dtype):
    """To the nearest, ties to even; what overflows is infinite, and every NaN the same."""
    name = {torch.float16: "f16", torch.bfloat16: "bf16"}[dtype]
    body = f"""ld.global.b32 %r6, [%rd4]; {{ .reg .b16 half; cvt.rn.{name}.f32 half, %r6; cvt.f32.{name} %r7, half; }}
      st.global.b32 [%rd5], %r7;"""
    generator = torch.Generator().manual_seed(0)
    every = torch.randint(-(2**31), 2**31, (4096,), generator=generator).int().view(torch.float32)
    halves = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).float()
    near = halves + (halves.roll(1) - halves) / torch.tensor([2.0, 1.999, 2.001])[:, None]
    for x in torch.cat([every, near.flatten()[::7]]).split(64)[:-1]:
        y = torch.zeros(64)
        ranges = [(tensor.data_ptr(), tensor.data_ptr() + 256) for tensor in (x, y)]
        values = [struct.pack("Q", begin) for begin, _ in ranges]
        program(KERNEL.format(body=body)).launch((1, 1, 1), 64, 0, values, ranges, 1)
        torch.testing.assert_close(y, x.to(dtype).float(), rtol=0, atol=0, equal_nan=True)


def test_blocks_that_write_the_same_bytes_race():
    with pytest.raises(PtxError, match="which another block wrote"):
        run(EXCHANGED, blocks=2)


def test_only_the_elements_of_a_tensor_are_read():
    launch = pytest.importorskip("ptx.launch", reason="there is no triton for this platform")
    rows, y = torch.randn(2, 48)[:, :32], torch.zeros(64)
    ranges = [*launch.ranges_of(rows), *launch.ranges_of(y)]
    assert [int(end) - int(begin) for begin, end in ranges] == [128, 128, 256]
    values = [struct.pack("Q", x.data_ptr()) for x in (rows, y)]
    with pytest.raises(PtxError, match="outside of every tensor, 128 bytes from where elements begin"):
        Program(KERNEL.format(body=EXCHANGED)).launch((1, 1, 1), 64, 256, values, ranges, 0)


@pytest.mark.parametrize(
    "change",
    [
        {"address": 4104},
        {"strides": [71, 1]},
        {"shape": [0, 64]},
        {"box": [512, 64]},
        {"box": [64, 4]},  # 8 bytes
        {"box": [64, 128]},  # more than a row of the swizzle
        {"shape": [1] * 6, "strides": [8] * 5 + [1], "box": [1] * 5 + [64]},
    ],
    ids=str,
)
def test_descriptors_that_tma_refuses(change):
    gpu = pytest.importorskip("ptx.launch", reason="there is no triton for this platform").Gpu(90)
    right = {"address": 4096, "swizzle": 3, "element": 2, "kind": 6, "box": [64, 64], "shape": [64, 64], "padding": 0}
    right["strides"] = [72, 1]
    assert len(gpu.fill_tma_descriptor_tiled(**right).ranges) == 64
    with pytest.raises(AssertionError):
        gpu.fill_tma_descriptor_tiled(**right | change)


# A warp loads the 6 rows of x [6, 32] into a ring of two slots; two others sum them up into y [2, 32].
RING = """
.version 8.7
.target sm_90a
.address_size 64
.extern .shared .align 128 .b8 memory[];
.visible .entry kernel(.param .align 64 .b8 kernel_x[128], .param .u64 kernel_y)
.reqntid 96
{
  .reg .pred %p<9>;
  .reg .b32 %r<20>;
  .reg .b64 %rd<9>;
  ld.param.b64 %rd1, [kernel_y];
  mov.b64 %rd2, kernel_x;
  cvta.param.u64 %rd3, %rd2;
  mov.u32 %r1, %tid.x;
  shr.u32 %r2, %r1, 5;
  mov.u32 %r3, %laneid;
  mov.b32 %r4, memory;
  setp.eq.s32 %p1, %r3, 0;
  setp.eq.s32 %p2, %r1, 0;
  @%p2 mbarrier.init.shared::cta.b64 [%r4+256], 1;
  @%p2 mbarrier.init.shared::cta.b64 [%r4+264], 1;
  @%p2 mbarrier.init.shared::cta.b64 [%r4+272], 2;
  @%p2 mbarrier.init.shared::cta.b64 [%r4+280], 2;
  fence.proxy.async.shared::cta;
  bar.sync 0;
  mov.b32 %r5, 0;  // the row
  mov.b32 %r6, 0;
  mov.b32 %r14, 0;
  setp.eq.s32 %p3, %r2, 0;
next:
  and.b32 %r7, %r5, 1;  // its slot
  shr.u32 %r8, %r5, 1;
  and.b32 %r8, %r8, 1;  // parity of the phase in which it is full
  xor.b32 %r9, %r8, 1;
  shl.b32 %r10, %r7, 3;
  add.s32 %r10, %r10, %r4;
  shl.b32 %r11, %r7, 7;
  add.s32 %r11, %r11, %r4;
  @!%p3 bra consume;
empty:
  mbarrier.try_wait.parity.shared::cta.b64 %p4, [%r10+272], %r9;
  @!%p4 bra empty;
  @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r10+256], 128;
  @%p1 cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r11], [%rd3, {%r6, %r5}], [%r10+256];
  bra done;
consume:
full:
  mbarrier.try_wait.parity.shared::cta.b64 %p4, [%r10+256], %r8;
  @!%p4 bra full;
  shl.b32 %r12, %r3, 2;
  add.s32 %r12, %r12, %r11;
  ld.shared.b32 %r13, [%r12];
  add.s32 %r14, %r14, %r13;
  @%p1 mbarrier.arrive.shared::cta.b64 _, [%r10+272];
done:
  add.s32 %r5, %r5, 1;
  setp.lt.s32 %p5, %r5, 6;
  @%p5 bra next;
  @%p3 bra end;
  mul.wide.u32 %rd4, %r1, 4;
  add.s64 %rd5, %rd1, %rd4;
  st.global.b32 [%rd5+-128], %r14;
end:
  ret;
}
"""


def run_ring(text: str, seed: int) -> None:
    x, y = torch.randint(100, (6, 32), dtype=torch.int32), torch.zeros(2, 32, dtype=torch.int32)
    none = 0, 0, 0
    box = struct.pack("<Q10I4Q4I", x.data_ptr(), 32, 6, *none, 32, 1, *none, 128, *none, 2, 4, 0, 0)
    ranges = [(tensor.data_ptr(), tensor.data_ptr() + 4 * tensor.numel()) for tensor in (x, y)]
    Program(text).launch((1, 1, 1), 96, 2048, [box, struct.pack("Q", y.data_ptr())], ranges, seed)
    assert torch.equal(y, x.sum(0, dtype=torch.int32).expand(2, 32))


def test_a_ring_that_tma_fills():
    for seed in range(50):
        run_ring(RING, seed)


RELEASE, READ = "@%p1 mbarrier.arrive.shared::cta.b64 _, [%r10+272];", "ld.shared.b32 %r13, [%r12];"
UNREAD = (READ, "mov.b32 %r13, 0;")
UNFILLED = ("mbarrier.try_wait.parity.shared::cta.b64 %p4, [%r10+256], %r8;", "setp.eq.s32 %p4, %r6, 0;")
UNEMPTIED = ("mbarrier.try_wait.parity.shared::cta.b64 %p4, [%r10+272], %r9;", "setp.eq.s32 %p4, %r6, 0;")
EXPECT, FENCE = "@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r10+256], 128;", "fence.proxy.async.shared::cta;"
EARLY = "may also (arrive|end|pass|be begun)|may pass|more arrivals|lands after the phase"


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ([(RELEASE, "")], "deadlock"),
        ([(RELEASE, 2 * RELEASE)], f"{EARLY}|race"),
        (
            [(RELEASE, ""), (READ, RELEASE + READ)],
            "race: writes shared byte .*, which warp . reads|race: reads|under way|waited for",
        ),
        ([UNEMPTIED], f"race|{EARLY}"),
        ([UNFILLED], f"race|read before|waited for|{EARLY}"),
        ([("[%r10+272], %r9", "[%r10+272], %r8")], "deadlock"),
        ([("[%r10+256], %r8", "[%r10+256], %r9")], f"deadlock|race|read before|waited for|{EARLY}"),
        ([("[%r10+256], 128", "[%r10+256], 64")], "deadlock"),
        ([("[%r10+256], 128", "[%r10+256], 256")], "deadlock"),
        ([("[%r4+272], 2", "[%r4+272], 3")], "deadlock"),
        ([("[%r4+272], 2", "[%r4+272], 1")], f"race|{EARLY}"),
        ([("@%p2 mbarrier.init.shared::cta.b64 [%r4+280], 2;", "")], "there is no mbarrier"),
        ([(FENCE, "")], "no fence.proxy.async"),
        ([(EXPECT, EXPECT.replace("@%p1 ", ""))], "more arrivals"),
        ([("@%p1 cp.async", "cp.async")], "by the lanes 0xffffffff"),
        (
            [("%p5, %r5, 6;", "%p5, %r5, 6; @%p3 setp.lt.s32 %p5, %r5, 7;")],
            "loads by TMA have not|nobody has waited for",
        ),
    ],
)
def test_what_is_wrong_with_a_ring_is_a_fault_in_every_order(changes, fault):
    for seed in range(30):
        with pytest.raises(PtxError, match=fault):
            run_ring(changed(changes), seed)


def changed(changes: list[tuple[str, str]]) -> str:
    text = RING
    for old, new in changes:
        assert text.count(old) == 1
        text = text.replace(old, new)
    return text


ONLY_ONE_RELEASES = [("[%r4+272], 2", "[%r4+272], 1"), ("[%r4+280], 2", "[%r4+280], 1")]
APART = ("shl.b32 %r11, %r7, 7;", "shl.b32 %r11, %r5, 7; add.s32 %r11, %r11, 512;")  # each row in its own place
LOAD = next(line for line in RING.splitlines() if "cp.async.bulk" in line)
PHASES = {  # what is said in some order, of rings whose phases are mistaken in others: nobody reads, and nothing races
    "may also arrive in the phase before": [UNFILLED],
    "may also end before": [
        *ONLY_ONE_RELEASES,
        (RELEASE, f"setp.eq.s32 %p6, %r1, 32; {RELEASE.replace('p1', 'p6')}"),
    ],
    # In the place of the third warp, which has not waited for the third row, the second one releases it.
    "may also pass two phases before": [
        (
            "consume:",
            "consume: setp.eq.s32 %p6, %r5, 2; setp.eq.s32 %p7, %r2, 2; and.pred %p7, %p6, %p7; @%p7 bra done;",
        ),
        (RELEASE, f"{RELEASE} and.pred %p8, %p1, %p6; {RELEASE.replace('p1', 'p8')}"),
    ],
    # The third warp loads, without a wait.
    "may also be begun in the phase before": [
        *ONLY_ONE_RELEASES,
        APART,
        (f"{LOAD}\n", ""),
        (
            "consume:",
            f"consume: setp.eq.s32 %p7, %r2, 2; and.pred %p8, %p7, %p1; {LOAD.replace('%p1', '%p8')} @%p7 bra done;",
        ),
    ],
    # Of the first two rows no bytes are expected, and of the next ones twice as many.
    "lands after the phase": [
        APART,
        (EXPECT, "shl.b32 %r15, %r8, 8; setp.lt.s32 %p6, %r5, 4; selp.b32 %r15, %r15, 128, %p6;"),
        (LOAD, f"{LOAD} {EXPECT.replace('128', '%r15')}"),
    ],
}


@pytest.mark.parametrize("said", PHASES)
def test_phases_that_some_order_mistakes_are_a_fault_in_every_order(said):
    faults = []
    for seed in range(30):
        with pytest.raises(PtxError, match=f"deadlock|{EARLY}") as fault:
            run_ring(changed([UNREAD, *PHASES[said]]), seed)
        faults.append(str(fault.value))
    assert any(said in fault for fault in faults)
