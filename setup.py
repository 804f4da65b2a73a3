"""Builds the optional extension `_native`: its kernels once for each instruction set. Writes what
type checkers read of `mlvm.eager`.

All else about the package stands in pyproject.toml. `python setup.py build_ext --inplace` compiles
what has changed. Where that fails, the numpy kernels run, unless MLVM_NATIVE=1 demands native
ones. MLVM_SANITIZE=address,undefined or thread builds for that sanitizer. MLVM_OPTIMIZE=0 builds in
a tenth of the time, and MLVM_TARGETS=plain without other instruction sets in a third of that, for
tests of what is built.
"""

import os
import platform
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

SOURCE = Path("mlvm/machines/native/src")
KERNELS = SOURCE / "plan" / "kernels"
INCLUDED = sorted([*SOURCE.rglob("*.h"), *SOURCE.rglob("*.def")])
# What gcc makes of clamps before it vectorizes: selects of everything that follows.
GCC_FLAGS = ["-fno-tree-pre", "-fno-thread-jumps"]
# `-ffp-contract=off`: a product and a sum are rounded apart, as numpy rounds them.
OPTIMIZE = os.environ.get("MLVM_OPTIMIZE", "3")
FLAGS = ["-std=c11", f"-O{OPTIMIZE}", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
FLAGS += ["-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-psabi", "-Wno-unknown-pragmas"]
AVX512 = "-mavx2 -mfma -mavx512f -mavx512bw -mavx512dq -mavx512vl -mprefer-vector-width=512"
# The kernels once more for each of these, with such options.
TARGETS = {
    "x86": {
        "avx2": "-mavx2 -mfma",
        "avx512": AVX512,
        "avx512_bf16": f"{AVX512} -mavx512bf16",
        "amx": f"{AVX512} -mamx-tile -mamx-bf16 -DUSE_AMX",
        "amx_emulated": f"{AVX512} -DAMX_EMULATED",
    },
    "arm": {"neon": "-DUSE_NEON"},
}
# All else is that of `avx512`.
ONLY = {"avx512_bf16": ["linalg.c"], "amx": ["amx.c"], "amx_emulated": ["amx.c"]}
MACHINES = {"x86_64": "x86", "amd64": "x86", "aarch64": "arm", "arm64": "arm"}


class BuildStubs(build_py):
    """Copies the package, and adds the stubs; in place where the package is used in place."""

    def run(self):
        super().run()
        into = "." if self.editable_mode else self.build_lib
        subprocess.run([sys.executable, "-m", "mlvm.eager.stub", into], check=True)


class BuildNative(build_ext):
    """Compiles `src/plan/kernels/*.c` for each target and all else once, on all cores."""

    def run(self):
        if self.inplace and not self.force and all(map(self._is_new, self.extensions)):
            return  # an editable install has just built it
        super().run()

    def _is_new(self, ext):
        made = Path(self.get_ext_filename(self.get_ext_fullname(ext.name)))
        sources = [*ext.sources, *ext.depends, __file__]
        changed = max(Path(source).stat().st_mtime for source in sources)
        sanitized = "MLVM_SANITIZE" in os.environ
        return not sanitized and made.exists() and made.stat().st_mtime > changed

    def copy_extensions_to_source(self):
        for ext in self.extensions:  # what could not be built anew is not to stay as it was
            Path(self.get_ext_filename(self.get_ext_fullname(ext.name))).unlink(missing_ok=True)
        super().copy_extensions_to_source()

    def _gcc_flags(self):
        about = [*self.compiler.compiler_so, "--version"]
        try:
            version = subprocess.run(about, capture_output=True, text=True, check=False).stdout
        except OSError:  # there is no compiler, as compiling will say
            return []
        return GCC_FLAGS if "Free Software Foundation" in version else []

    def _takes(self, options):
        """Whether the compiler knows these options: an old one has fewer instruction sets."""
        if not options:
            return True
        run = [*self.compiler.compiler_so, *options.split(), "-E", "-x", "c", os.devnull]
        return subprocess.run(run, capture_output=True, check=False).returncode == 0

    def build_extension(self, ext):
        Path(self.get_ext_fullpath(ext.name)).unlink(missing_ok=True)
        unix = self.compiler.compiler_type == "unix"
        # What is compiled for, as sysconfig has it: another machine, where a compiler is of that.
        host = os.environ.get("_PYTHON_HOST_PLATFORM", platform.machine())
        machine = MACHINES.get(re.split("[-.]", host)[-1].lower(), "") if unix else ""
        targets = {"plain": "", **TARGETS.get(machine, {})}
        chosen = os.environ.get("MLVM_TARGETS", ",".join(targets)).split(",")
        targets = {name: targets[name] for name in chosen if self._takes(targets[name])}
        flags = [*FLAGS, "-pthread", *self._gcc_flags()] if unix else []
        sanitize = os.environ.get("MLVM_SANITIZE")
        if sanitize:
            flags += [f"-fsanitize={sanitize}", "-g", "-O1"]
            flags += ["-fno-omit-frame-pointer", "-fno-var-tracking"]  # which would take minutes
        kinds = "-".join(["objects", f"O{OPTIMIZE}", *targets, *(sanitize or "").split(",")])
        build = Path(self.build_temp) / kinds.rstrip("-")
        # The name carries no folder: a build for coverage or a sanitizer has its own.
        jobs = [
            (source, build, "", [(f"WITH_{name.upper()}", "1") for name in targets])
            for source in sorted(SOURCE.rglob("*.c"))
            if source.parent != KERNELS
        ]
        for name, options in targets.items():
            jobs += [
                (source, build / name, options, [("TARGET", name)])
                for source in sorted(KERNELS.glob("*.c"))
                if source.name in ONLY.get(name, [source.name])
            ]
        newest_header = max(path.stat().st_mtime for path in INCLUDED)

        def compile_(job):
            source, folder, options, macros = job
            made = folder / source.with_suffix(".o" if unix else ".obj")
            changed = max(source.stat().st_mtime, newest_header)
            if made.exists() and made.stat().st_mtime > changed and not self.force:
                return str(made)
            [made] = self.compiler.compile(
                [str(source)],
                output_dir=str(folder),
                macros=macros,
                include_dirs=[*ext.include_dirs],
                extra_postargs=[*flags, *options.split()],
            )
            return made

        with ThreadPoolExecutor(os.cpu_count()) as threads:
            objects = list(threads.map(compile_, jobs))
        link = ["-pthread", "-lm"] if unix else []
        if sanitize:
            link += [f"-fsanitize={sanitize}"]
        self.compiler.link_shared_object(
            objects,
            self.get_ext_fullpath(ext.name),
            libraries=self.get_libraries(ext),
            library_dirs=ext.library_dirs,
            extra_postargs=link,
            build_temp=self.build_temp,
            target_lang="c",
        )


setup(
    ext_modules=[
        Extension(
            "mlvm.machines.native._native",
            sources=[str(path) for path in sorted(SOURCE.rglob("*.c"))],
            depends=[str(path) for path in INCLUDED],
            py_limited_api=True,
            optional=os.environ.get("MLVM_NATIVE") != "1",
        )
    ],
    cmdclass={"build_ext": BuildNative, "build_py": BuildStubs},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
