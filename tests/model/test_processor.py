"""Different processors have different names."""

import pytest

from draftlab.model.processor import PARTS, processor_name


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ("fpu avx avx2 fma", "AMD EPYC, AVX2"),
        ("avx2 avx512f avx512_bf16", "AMD EPYC, AVX512_BF16"),
        ("sse2", "AMD EPYC"),
    ],
)
def test_processors_of_one_name_are_told_apart(flags, name):
    one = f"model\t\t: 1\nmodel name\t: AMD EPYC\nflags\t\t: {flags}\nvmx flags\t: none\n"
    assert processor_name(one + "\n" + one) == name


ARM = """processor\t: {}
BogoMIPS\t: 100.00
Features\t: fp asimd {}
CPU implementer\t: {}
CPU architecture: 8
CPU variant\t: 0x0
CPU part\t: {}
CPU revision\t: 1

"""


@pytest.mark.parametrize(
    ("cores", "features", "name"),
    [  # names of lscpu of util-linux
        ([("0x41", "0xd0c")], "asimddp", "Neoverse-N1"),
        ([("0x41", "0xd40")], "sve bf16", "Neoverse-V1, SVE"),
        ([("0x41", "0xd4f")], "sve bf16 sve2", "Neoverse-V2, SVE2"),
        ([("0x41", "0xd05"), ("0x41", "0xd0b")], "asimddp", "Cortex-A55 + Cortex-A76"),
        ([("0x61", "0x000")], "bf16", "Apple 0x61 part 0x000, BF16"),
        ([("0x99", "0xfff")], "", "implementer 0x99 part 0xfff"),
    ],
)
def test_an_arm_processor_is_named_by_its_parts(cores, features, name):
    """/proc/cpuinfo has no names of Arm processors. A Raspberry Pi adds the name of the board."""
    text = "".join(ARM.format(2 * at + twin, features, *part) for at, part in enumerate(cores) for twin in (0, 1))
    assert processor_name(text + "Revision\t: c04170\nModel\t\t: Raspberry Pi\n") == name


def test_no_two_parts_share_a_name():
    assert len(set(PARTS.values())) == len(PARTS)
