"""The model of time: loops whose time is known, and what they wait for."""

from __future__ import annotations

import pytest
from cycles import RATES, cycles_of_step, tflops
from sass import Instruction, innermost_loops

AMPERE, HOPPER = RATES[80], RATES[90]
NONE = 7  # no scoreboard


def instruction(text: str, stall: int = 1, waits: int = 0, written: int = NONE, read: int = NONE) -> Instruction:
    """One with the control codes that say so; waits: a bit for each scoreboard."""
    result = Instruction(text)
    result.control = stall | written << 5 | read << 8 | waits << 11
    return result


def times(n: int, text: str, **control: int) -> list[Instruction]:
    return [instruction(text, **control)] * n


MEET = instruction("BAR.SYNC.DEFER_BLOCKING 0x0")
"""Without it a warp that can always go on lets no other one have its turn."""


@pytest.mark.parametrize(
    ("text", "rates", "cycles"),
    [
        ("HMMA.16816.F32.BF16 R4, R8, R12, R4", AMPERE, 8),
        ("HMMA.16816.F32.BF16 R4, R8, R12, R4", HOPPER, 6.4),
        ("HMMA.1688.F32 R4, R8, R12, R4", AMPERE, 4),
        ("MUFU.EX2 R4, R5", AMPERE, 8),
        ("FFMA R4, R5, R6, R7", AMPERE, 2),
        ("FFMA R4, R5, R6, R7", HOPPER, 1),
        ("FMNMX R4, R5, R6, !PT", HOPPER, 2),
    ],
)
@pytest.mark.parametrize("warps", [4, 8, 16])
def test_a_pipe_is_shared_by_the_warps_of_a_scheduler(text, rates, cycles, warps):
    loop = [*times(200, text), MEET]
    assert cycles_of_step(loop, rates, warps, 1) == pytest.approx(200 * cycles * warps / 4 + 20, rel=0.03)


def test_what_is_issued_takes_a_cycle_of_its_scheduler():
    assert cycles_of_step([*times(400, "NOP"), MEET], HOPPER, 16, 1) == pytest.approx(400 * 16 / 4 + 20, rel=0.03)


def test_shared_memory_is_shared_by_all_warps():
    loads = [*times(64, "LDSM.16.M88.4 R8, [R3]"), MEET]
    assert cycles_of_step(loads, AMPERE, 8, 1) == pytest.approx(64 * 8 * 512 / 128, rel=0.1)
    assert cycles_of_step(loads, AMPERE, 4, 2) == pytest.approx(64 * 8 * 512 / 128, rel=0.1)


def test_a_stall_is_waited_for_and_filled_by_other_warps():
    loop = [*times(100, "FFMA R4, R5, R6, R7", stall=8), MEET]
    assert cycles_of_step(loop, HOPPER, 4, 1) == pytest.approx(800 + 20, rel=0.03)
    assert cycles_of_step(loop, HOPPER, 12, 1) == pytest.approx(800 + 20, rel=0.03)


def test_a_scoreboard_is_waited_for_by_those_who_name_it():
    load = instruction("LDG.E.128 R4, [R8.64]", written=2)
    other = times(30, "FFMA R4, R5, R6, R7", stall=4)
    needed = instruction("FADD R4, R4, R5", waits=1 << 2)
    assert cycles_of_step([load, *other, needed], HOPPER, 4, 1) > HOPPER.latency
    unneeded = instruction("FADD R4, R4, R5", waits=1 << 3)
    assert cycles_of_step([load, *other, unneeded], HOPPER, 4, 1) < HOPPER.latency


def test_copies_are_waited_for_up_to_so_many_groups():
    copy = [instruction("LDGSTS.E.BYPASS.128 [R3], [R4.64]"), instruction("LDGDEPBAR")]
    steps = [instruction(f"DEPBAR.LE SB0, {hex(n)}") for n in (0, 1, 4)]
    of_each, of_next, of_none = (cycles_of_step([*copy, step], AMPERE, 4, 1) for step in steps)
    assert of_each > AMPERE.latency > of_next > AMPERE.latency / 2 - 20 > of_none


def test_many_copies_take_the_bandwidth_of_the_l2_cache():
    loop = [*times(8, "LDGSTS.E.BYPASS.128 [R3], [R4.64]"), instruction("LDGDEPBAR"), instruction("DEPBAR.LE SB0, 0x3")]
    assert cycles_of_step(loop, HOPPER, 8, 1) == pytest.approx(8 * 8 * 512 / HOPPER.l2, rel=0.05)


def test_a_group_of_wgmma_ends_with_its_last_one():
    product = "HGMMA.64x128x16.F32.BF16 R24, R88, gdesc[UR4], R24"
    loop = [*times(7, product), instruction(f"{product}, gsb0"), instruction("WARPGROUP.DEPBAR.LE gsb0, 0x0")]
    one_group, two = (cycles_of_step(loop, HOPPER, warps, 1) for warps in (4, 8))
    assert one_group == pytest.approx(8 * 64, rel=0.15)
    assert two == pytest.approx(2 * 8 * 64, rel=0.05)  # each waits while the other multiplies
    one_by_one = [loop[-2], loop[-1]] * 8
    assert cycles_of_step(one_by_one, HOPPER, 4, 1) > 1.3 * one_group


def test_operands_of_wgmma_in_shared_memory_are_read_there():
    def product(columns: int, left: str) -> list[Instruction]:
        text = f"HGMMA.64x{columns}x16.F32.BF16 R24, {left}gdesc[UR4], R24, gsb0"
        return [*times(16, text), instruction("WARPGROUP.DEPBAR.LE gsb0, 0x0")]

    in_registers, in_memory = (cycles_of_step(product(32, left), HOPPER, 8, 1) for left in ("R88, ", ""))
    assert in_registers == pytest.approx(2 * 16 * 16, rel=0.1)  # the products of both groups
    assert in_memory == pytest.approx(2 * 16 * (32 + 64) * 16 * 2 / 128, rel=0.1)  # their operands


def test_warps_of_a_program_meet_at_a_barrier_and_those_of_others_do_not():
    work = times(100, "MUFU.EX2 R4, R5")
    assert cycles_of_step([*work, MEET], AMPERE, 8, 1) == pytest.approx(1600 + 20, rel=0.05)
    load = instruction("LDG.E R4, [R8.64]", written=0), instruction("FADD R4, R4, R5", waits=1)
    one_program, two = (cycles_of_step([*load, *work, MEET], AMPERE, *shape) for shape in ((8, 1), (4, 2)))
    assert one_program > 1600 + AMPERE.latency
    assert two == pytest.approx(1600, rel=0.05)  # one waits while the other computes


def test_what_never_runs_takes_its_issue_alone():
    assert cycles_of_step(times(50, "@!PT LDS RZ, [RZ]"), AMPERE, 4, 1) == pytest.approx(50, rel=0.2)


def test_a_loop_that_cannot_go_on_is_an_error(monkeypatch):
    monkeypatch.setattr("cycles._Multiprocessor._MOST", 12)
    with pytest.raises(RuntimeError, match="a loop of 100 instructions does not end"):
        cycles_of_step(times(100, "MUFU.EX2 R4, R5"), AMPERE, 8, 1)


def test_rates_count_all_multiprocessors():
    products_alone = tflops(4096, 4 * 128, AMPERE, "mma.sync")
    assert products_alone == pytest.approx(2048 * 108 * AMPERE.gigahertz["mma.sync"] / 1000)


ENCODED = """
.L_x_1:
        /*0000*/                   MUFU.EX2 R5, R6 ;      /* 0x0000000600057308 */
                                                          /* 0x0000a40000000800 */
        /*0010*/              @!P0 BRA `(.L_x_1) ;        /* 0xffffffff00008947 */
                                                          /* 0x022fea000383ffff */
"""


def test_control_codes_are_read_from_the_encoding():
    (loop,) = innermost_loops(ENCODED, "MUFU")
    first, jump = (text.control for text in loop.shortest_way)
    assert (first & 15, first >> 5 & 7, first >> 8 & 7) == (2, 2, NONE - 7)
    assert (jump & 15, jump >> 5 & 7, jump >> 11 & 63) == (5, NONE, 1 << 1 | 1 << 5)
