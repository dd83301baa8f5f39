"""Loops in machine code, found where they are."""

from sass import clocks, count, innermost_loops, instructions

# A loop over tiles around a loop of two products, which waits in code that stands after everything else. Only a jump to
# one of several places leads there.
SASS = """
.text.kernel:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
        /*0008*/                   BRX R4 -0x10  (*"BRANCH_TARGETS .L_x_1,.L_x_10"*);
.L_x_1:
        /*0010*/                   IADD3 R2, R2, 0x1, RZ ;
        /*0020*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24 ;
.L_x_2:
        /*0030*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R3], R4 ;
        /*0040*/              @!P0 BRA `(.L_x_9) ;
.L_x_3:
        /*0050*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24 ;
        /*0060*/              @!P1 STL [R1], R2 ;
        /*0070*/               @P2 BRA `(.L_x_2) ;
        /*0080*/               @P3 BRA `(.L_x_1) ;
        /*0090*/                   EXIT ;
.L_x_9:
        /*00a0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R3], R4 ;
        /*00b0*/              @!P0 BRA `(.L_x_9) ;
        /*00c0*/                   BRA `(.L_x_3) ;
.L_x_10:
        /*00d0*/                   BRA `(.L_x_10);
"""


def names(texts):
    return [text.split()[1 if text.startswith("@") else 0].partition(".")[0] for text in texts]


def test_instructions_are_counted_by_name():
    every = instructions(SASS)
    assert len(every) == 15
    assert [count(name, every) for name in ("HGMMA", "STL", "BRA", "(?:STL|EXIT)", "HG")] == [2, 1, 6, 2, 0]


def test_code_that_waits_elsewhere_belongs_to_its_loop():
    (loop,) = innermost_loops(SASS, "HGMMA")
    assert names(loop.every) == ["SYNCS", "BRA", "HGMMA", "STL", "BRA", "SYNCS", "BRA", "BRA"]
    assert [len(loop.every) for loop in innermost_loops(SASS, "SYNCS")] == [2]
    assert [len(loop.every) for loop in innermost_loops(SASS, "IADD3")] == [11]
    assert innermost_loops(SASS, "EXIT") == innermost_loops(SASS, "MOV") == []


def test_the_shortest_way_round_a_loop_does_not_wait():
    (loop,) = innermost_loops(SASS, "HGMMA")
    assert names(loop.shortest_way) == ["SYNCS", "BRA", "HGMMA", "STL", "BRA"]
    (around,) = innermost_loops(SASS, "IADD3")
    assert names(around.shortest_way) == ["IADD3", "HGMMA", "SYNCS", "BRA", "HGMMA", "STL", "BRA", "BRA"]
    (waiting,) = innermost_loops(SASS, "SYNCS")
    assert waiting.shortest_way == waiting.every


def test_clocks_are_those_of_the_busiest_parts():
    texts = [
        "HMMA.16816.F32.BF16 R4, R8, R12, R4",
        "LDSM.16.M88.4 R8, [R3]",
        "LDSM.16.MT88.2 R8, [R3]",
        "@!P0 LDS.128 R4, [R3]",
        "STS.U16 [R3], R4",
        "LDGSTS.E.BYPASS.128 [R3], [R4.64]",
        "STL [R1], R2",
        "MUFU.EX2 R5, R6",
    ]
    products, shared, exponentials, issue = clocks(texts, warps=4, flops=2048)
    assert (products, exponentials, issue) == (8.0, 8.0, 8.0)
    assert shared == 4 * (4 + 2 + 4 + 0.5 + 4 + 1)
    both_in_shared = "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24, gsb0"
    from_registers = "HGMMA.64x128x16.F32.BF16 R24, R88, gdesc[UR4], R24"
    of_both = clocks([both_in_shared], warps=8, flops=4096)
    assert of_both.products == 2 * 2 * 64 * 128 * 16 / 4096
    assert of_both.shared == 2 * (128 + 64) * 16 * 2 / 128
    assert clocks([from_registers], warps=8, flops=4096).shared == 2 * 128 * 16 * 2 / 128
