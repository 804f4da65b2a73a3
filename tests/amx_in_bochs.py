"""Commands in a machine that Bochs emulates, which has AMX where no processor here has it:

    python -m tests.amx_in_bochs --bochs PATH --share DIR --kernel PATH \\
        "python -m mlvm info" "MLVM_SIMD=amx python -m pytest tests/machines/native/test_amx.py"

It boots an image of this Python, of the packages that tests need and of this checkout, prints what
the guest writes, and exits with the first status that is not 0, or with 0. The guest has no other
files: its only commands are `sh` and `python`. It takes 1.5 GB of memory. The times in there mean
nothing.

It wants Debian's packages `xorriso`, `isolinux` and `syslinux-common`. `--kernel` is the file
/boot/vmlinuz-* of any `linux-image-*-amd64` of Debian; 6.1 was tried.

Bochs (https://github.com/bochs-emu/Bochs) is built of its sources (here 3.1 in development, commit
783b58fd), in their folder bochs/:

    patch -p1 < CHECKOUT/tests/amx_in_bochs.patch
    ./configure --enable-x86-64 --enable-avx --enable-evex --enable-amx \\
        --enable-all-optimizations --with-nogui && make

`--bochs` is the file `bochs` that this makes. `--share` is a folder with its files
BIOS-bochs-latest and VGABIOS-lgpl-latest.bin, which lie in bios/ and below.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import stat
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO, Final

ROOT: Final = Path(__file__).resolve().parents[1]
PYTHON: Final = Path(sys.executable).resolve()
PACKAGES: Final = Path(sysconfig.get_path("purelib"))
NEEDED: Final = "numpy numpy.libs pytest _pytest pluggy iniconfig packaging pygments hypothesis"
UNUSED: Final = {"test", "tests", "idlelib", "tkinter", "ensurepip", "site-packages", "lib2to3"}
LOADER: Final = "isolinux.bin", "ldlinux.c32"
FIRMWARE: Final = "BIOS-bochs-latest", "VGABIOS-lgpl-latest.bin"
ENDS: Final = "The guest ends with "
LINE: Final = "initrd=initrd console=ttyS0 quiet panic=-1 mitigations=off nokaslr"
HARDWARE: Final = """display_library: nogui
romimage: file={share}/BIOS-bochs-latest
vgaromimage: file={share}/VGABIOS-lgpl-latest.bin
cpu: model=sapphire_rapids, ips=100000000, ignore_bad_msrs=1, exclude_features="{without}"
memory: guest=1536, host=1536
ata0-master: type=cdrom, path={folder}/image.iso, status=inserted
boot: cdrom
com1: enabled=1, mode=file, dev={folder}/serial.txt
log: {folder}/bochs.txt
panic: action=fatal
"""
WITHOUT: Final = "la57,pks,pku,serialize,waitpkg,movdiri,movdir64b,sca_mitigations,umip,rdpid"
"""With all of these Debian's kernel of Linux 6.1 did not start; which of them it is was not looked
for."""
INIT: Final = """#!{python} -S
import ctypes, os, subprocess, time
for kind, place in (("proc", "/proc"), ("devtmpfs", "/dev"), ("tmpfs", "/tmp"), ("sysfs", "/sys")):
    os.makedirs(place, exist_ok=True)
    ctypes.CDLL(None).mount(kind.encode(), place.encode(), kind.encode(), 0, None)
os.chdir({root!r})
os.environ.update(PATH={path!r}, PYTHONPATH={packages!r}, HOME="/tmp", PYTHONDONTWRITEBYTECODE="1")
status = 0
for command in {commands!r}:
    print("$", command, flush=True)
    now = subprocess.run(command, shell=True).returncode
    status = status or now
print({ends!r} + str(status), flush=True)
time.sleep(3600)
"""


def files() -> dict[str, Path]:
    """What the guest has: its paths, and where they are here."""
    found = {f"{PYTHON.parent}/python": PYTHON, str(PYTHON): PYTHON, "/bin/sh": Path("/bin/sh")}
    folders = [Path(sysconfig.get_path("stdlib")), *(PACKAGES / name for name in NEEDED.split())]
    for folder in [*folders, *(ROOT / name for name in ("mlvm", "tests", "bench", "models"))]:
        for path, inner, names in os.walk(folder):
            unused = UNUSED if folder in folders else set()
            inner[:] = [name for name in inner if name not in unused and name[:7] != "config-"]
            found |= {f"{path}/{name}": Path(path, name) for name in names}
    for pattern in ("*.py", "*.dist-info/METADATA"):
        found |= {str(path): path for path in PACKAGES.glob(pattern)}
    found[str(ROOT / "pyproject.toml")] = ROOT / "pyproject.toml"
    for name, source in list(found.items()):
        if ".so" in name or source in (PYTHON, Path("/bin/sh")):
            told = subprocess.run(["ldd", source], capture_output=True, text=True, check=False)
            libraries = re.findall(r"(/\S+) \(0x", told.stdout)
            found |= {library: Path(library) for library in libraries}
    return {name: source for name, source in found.items() if source.is_file()}


def archive(to: BinaryIO, found: dict[str, Path], init: bytes) -> None:
    """The guest's root, as the kernel unpacks it (cpio, newc)."""

    def entry(name: str, mode: int, data: bytes = b"", mtime: int = 0, device: int = 0) -> None:
        major, minor = divmod(device, 256)
        numbers = 0, mode, 0, 0, 1, mtime, len(data), 0, 0, major, minor, len(name) + 1, 0
        to.write(b"070701" + "".join(f"{number:08X}" for number in numbers).encode())
        to.write(name.encode() + b"\0" * (1 + (-len(name) - 111) % 4))
        to.write(data + b"\0" * (-len(data) % 4))

    folders = {str(folder) for name in found for folder in Path(name).parents}
    for folder in sorted({"/", "/dev", *folders})[1:]:
        entry(folder[1:], stat.S_IFDIR | 0o755)
    entry("dev/console", stat.S_IFCHR | 0o600, device=5 * 256 + 1)
    entry("init", stat.S_IFREG | 0o755, init)
    for name, path in found.items():
        entry(name[1:], stat.S_IFREG | 0o755, path.read_bytes(), int(path.stat().st_mtime))
    entry("TRAILER!!!", 0)


def make_image(options: argparse.Namespace, folder: Path) -> None:
    """`image.iso` in the folder."""
    disk = folder / "disk"
    disk.mkdir()
    told = {"python": PYTHON, "root": str(ROOT), "ends": ENDS, "commands": options.commands}
    paths = {"path": f"{PYTHON.parent}:/bin", "packages": f"{ROOT}:{PACKAGES}"}
    with open(disk / "initrd", "wb") as to:
        archive(to, files(), INIT.format(**told, **paths).encode())
    shutil.copy(options.kernel, disk / "kernel")
    for name in LOADER:
        shutil.copy(next(Path("/usr/lib").rglob(name)), disk)
    line = f"{LINE} clearcpuid=fsrm,erms{options.clear}"
    (disk / "isolinux.cfg").write_text(f"default it\nlabel it\nkernel kernel\nappend {line}\n")
    make = "xorriso -as mkisofs -quiet -b isolinux.bin -c boot.cat -no-emul-boot"
    make += " -boot-load-size 4 -boot-info-table -o"
    subprocess.run([*make.split(), folder / "image.iso", disk], check=True)


def boot(options: argparse.Namespace, folder: Path) -> int:
    """The status of what ran."""
    make_image(options, folder)
    text = HARDWARE.format(folder=folder, share=options.share, without=WITHOUT)
    (folder / "bochsrc").write_text(text)
    (folder / "serial.txt").touch()
    command = ["nice", "-n", "5", options.bochs, "-q", "-f", folder / "bochsrc"]
    environment, nothing = os.environ | {"BXSHARE": str(options.share)}, subprocess.DEVNULL
    guest = subprocess.Popen(
        command, stdin=nothing, stdout=nothing, stderr=nothing, env=environment
    )
    with open(folder / "serial.txt", errors="replace") as serial:
        try:
            while guest.poll() is None:
                time.sleep(0.5)
                for row in iter(serial.readline, ""):
                    print(row, end="", flush=True)
                    if row.startswith(ENDS):
                        return int(row.removeprefix(ENDS))
        finally:
            guest.kill()
    print("Bochs ended:", (folder / "bochs.txt").read_text()[-1000:])
    return 1


def missing(options: argparse.Namespace) -> list[str]:
    """What there is none of: files, or what brings them."""
    files = [options.kernel, *(options.share / name for name in FIRMWARE)]
    absent = [str(file) for file in files if not file.is_file()]
    absent += [name for name in (options.bochs, "xorriso") if not shutil.which(name)]
    parts = [name for name in LOADER if next(Path("/usr/lib").rglob(name), None) is None]
    return absent + [f"{name} of isolinux and syslinux-common" for name in parts]


def main() -> None:
    raw = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--bochs", required=True, help="the emulator")
    parser.add_argument("--share", type=Path, required=True, help="the folder of its BIOS")
    parser.add_argument("--kernel", type=Path, required=True, help="of Linux, x86-64")
    told = "what Linux is to hide of the processor, as in ,amx_tile"
    parser.add_argument("--clear", default="", metavar="FEATURES", help=told)
    parser.add_argument("commands", nargs="+", help="run in turn, in the checkout's folder")
    options = parser.parse_args()
    if absent := missing(options):
        parser.error(f"there is no {', no '.join(absent)}; see --help")
    with TemporaryDirectory() as folder:
        sys.exit(boot(options, Path(folder)))


if __name__ == "__main__":
    main()
