"""`tools.gpu_code`: what is read off a GPU's code and its assembler."""

from tools import gpu_code

PTX = """\
.visible .entry walk(
.param .u64 .ptr .global .align 16 walk_param_0
)
{
  @%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
  @%p1 ld.global.L1::evict_last.v2.b64 { %rd3, %rd4 }, [ %rd1 + 16 ];
  ld.global.nc.u16 %rs1, [%rd2];
  ld.shared.b32 %r5, [%r6];
  @%p2 cp.async.cg.shared.global [ %r7 + 0 ], [ %rd5 + 0 ], 0x10, %r8;
  @%p2 cp.async.ca.shared.global [ %r7 + 64 ], [ %rd5 + 64 ], 4, %r8;
  st.global.b32 [%rd2], %r1;
}
"""
ASSEMBLER = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'walk' for 'sm_90a'
ptxas info    : Function properties for walk
    16 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 16 bytes cumulative stack size
ptxas info    : Compile time = 35.199 ms
ptxas info    : Compiling entry function 'other' for 'sm_90a'
ptxas info    : Function properties for other
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers
"""


def test_widths_of_loads_and_stores():
    """A copy to shared memory reads global memory as a load does."""
    assert gpu_code.widths(PTX, "ld") == {2: 1, 4: 1, 16: 3}
    assert gpu_code.widths(PTX, "st") == {4: 1}


def test_registers_and_spills_of_each_kernel():
    assert gpu_code.parse_resources(ASSEMBLER) == {
        "walk": {"registers": 255, "spill_bytes": 32},
        "other": {"registers": 8, "spill_bytes": 0},
    }


def test_without_an_assembler_nothing_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_code.assembler, "path", lambda: None)
    assert gpu_code.kernels(gpu_code.Dump(tmp_path), 90) is None
