"""The processor's name and instructions."""

import platform
import subprocess
import sys

from draftlab.reading import text_of_system

# processor flags and their names in messages, the fastest instructions first
INSTRUCTIONS = {
    "amx_bf16": "AMX",
    "avx512_bf16": "AVX512_BF16",
    "avx512f": "AVX-512",
    "avx2": "AVX2",
    "sve2": "SVE2",
    "sve": "SVE",
    "bf16": "BF16",
}
IMPLEMENTERS = {
    0x41: "Arm",
    0x42: "Broadcom",
    0x43: "Cavium",
    0x46: "Fujitsu",
    0x48: "HiSilicon",
    0x4E: "NVIDIA",
    0x50: "APM",
    0x51: "Qualcomm",
    0x53: "Samsung",
    0x56: "Marvell",
    0x61: "Apple",
    0x6D: "Microsoft",
    0x70: "Phytium",
    0xC0: "Ampere",
}
# Arm's processors do not say their names. Implementer and part of servers, single-board computers and Apple's chips,
# with the names of util-linux (lscpu-arm.c).
PARTS = {
    (0x41, 0xD03): "Cortex-A53",
    (0x41, 0xD05): "Cortex-A55",
    (0x41, 0xD07): "Cortex-A57",
    (0x41, 0xD08): "Cortex-A72",
    (0x41, 0xD0B): "Cortex-A76",
    (0x41, 0xD0C): "Neoverse-N1",
    (0x41, 0xD40): "Neoverse-V1",
    (0x41, 0xD41): "Cortex-A78",
    (0x41, 0xD42): "Cortex-A78AE",
    (0x41, 0xD49): "Neoverse-N2",
    (0x41, 0xD4A): "Neoverse-E1",
    (0x41, 0xD4F): "Neoverse-V2",
    (0x41, 0xD83): "Neoverse-V3AE",
    (0x41, 0xD84): "Neoverse-V3",
    (0x41, 0xD85): "Cortex-X925",
    (0x41, 0xD87): "Cortex-A725",
    (0x41, 0xD8E): "Neoverse-N3",
    (0x43, 0x0AF): "ThunderX2-99xx",
    (0x46, 0x001): "A64FX",
    (0x48, 0xD01): "Kunpeng-920",
    (0x4E, 0x004): "Carmel",
    (0x4E, 0x010): "Olympus",
    (0x51, 0x001): "Oryon",
    (0x61, 0x022): "Icestorm-M1",
    (0x61, 0x023): "Firestorm-M1",
    (0x61, 0x024): "Icestorm-M1-Pro",
    (0x61, 0x025): "Firestorm-M1-Pro",
    (0x61, 0x028): "Icestorm-M1-Max",
    (0x61, 0x029): "Firestorm-M1-Max",
    (0x61, 0x032): "Blizzard-M2",
    (0x61, 0x033): "Avalanche-M2",
    (0x61, 0x034): "Blizzard-M2-Pro",
    (0x61, 0x035): "Avalanche-M2-Pro",
    (0x61, 0x038): "Blizzard-M2-Max",
    (0x61, 0x039): "Avalanche-M2-Max",
    (0x6D, 0xD49): "Azure-Cobalt-100",
    (0xC0, 0xAC3): "Ampere-1",
    (0xC0, 0xAC4): "Ampere-1a",
}


def processor_model(cpuinfo: str) -> str:
    """Return the processor's name, such as ``AMD EPYC`` or ``Neoverse-V2``. Unknown parts of Arm are named by numbers.

    cpuinfo: Content of /proc/cpuinfo. If it has no name, the name comes from macOS or from Python's platform module.
    """
    fields = [line.partition(":")[::2] for line in cpuinfo.splitlines()]
    implementers, parts, models = (
        [value.strip() for name, value in fields if name.strip() == wanted]
        for wanted in ("CPU implementer", "CPU part", "model name")
    )
    cores = zip(implementers, parts, strict=False)
    if names := dict.fromkeys(_part(int(made_by, 0), int(part, 0)) for made_by, part in cores):
        return " + ".join(names)
    if models and models[0]:
        return models[0]
    return _name_on_macos() or platform.processor() or platform.machine()


def processor_name(cpuinfo: str) -> str:
    """Return the processor's name with its fastest instructions, such as ``AMD EPYC, AVX2``.

    cpuinfo: Same as in processor_model.
    """
    flags = instructions(cpuinfo)
    fastest = [called for flag, called in INSTRUCTIONS.items() if flag in flags][:1]
    return ", ".join([processor_model(cpuinfo), *fastest])


def instructions(cpuinfo: str) -> list[str]:
    """Return the flags of the first processor in the content of /proc/cpuinfo."""
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return value.split()
    return []


def read_cpuinfo() -> str:
    """Return the content of /proc/cpuinfo, or nothing where this file is missing."""
    return text_of_system("/proc/cpuinfo")


def _part(implementer: int, part: int) -> str:
    if known := PARTS.get((implementer, part)):
        return known
    return f"{IMPLEMENTERS.get(implementer, 'implementer')} {implementer:#x} part {part:#05x}"


def _name_on_macos() -> str | None:
    if sys.platform != "darwin":
        return None
    command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
