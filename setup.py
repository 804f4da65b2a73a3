"""Build of the optional extension `_native`, with kernels for each instruction set, and of the
stubs of `mlvm.eager`.

All else about the package stands in pyproject.toml. `python setup.py build_ext --inplace` compiles
changed files. Where that fails, the numpy kernels run, unless MLVM_NATIVE=1 demands native
ones. In place, the kernels are those of this processor; a wheel, which may run elsewhere, has all.
MLVM_TARGETS names other instruction sets: `all`, `own`, names with commas between. `plain` is
always one of them. MLVM_SANITIZE=address,undefined or thread builds for that sanitizer.
MLVM_OPTIMIZE=0 builds in a tenth of the time, for tests of the build. MLVM_COVERAGE=1 counts the
lines that run, for gcov. Free-threaded Python has no limited API, so the extension is compiled for
that version alone.
"""

import os
import platform
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Distribution, Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import CompileError, LinkError

SOURCE = Path("mlvm/machines/native/src")
KERNELS = SOURCE / "plan" / "kernels"
MODULE = SOURCE / "module.c"
LISTS = SOURCE / "plan" / "tables.c"  # of the kernels of each set
# Before Python 3.15, headers and setuptools of a free-threaded Python refuse the limited API.
LIMITED = not sysconfig.get_config_var("Py_GIL_DISABLED")
SUFFIX = ".abi3.so" if LIMITED else sysconfig.get_config_var("EXT_SUFFIX")
LIBRARY = Path(f"mlvm/machines/native/_native{SUFFIX}")
WHEEL_OPTIONS = {"bdist_wheel": {"py_limited_api": "cp311"}} if LIMITED else {}
SECONDS = 3.0  # of a processor's time, for each file of kernels and set
INCLUDED = sorted([*SOURCE.rglob("*.h"), *SOURCE.rglob("*.def")])
# Passes by which gcc turns clamps into selects of all that follows, before it vectorizes.
GCC_FLAGS = ["-fno-tree-pre", "-fno-thread-jumps"]
# `-ffp-contract=off`: a product and a sum are rounded apart, as numpy rounds them.
OPTIMIZE = os.environ.get("MLVM_OPTIMIZE", "3")
COVERAGE = "MLVM_COVERAGE" in os.environ
FLAGS = ["-std=c11", f"-O{OPTIMIZE}", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
FLAGS += ["-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-psabi", "-Wno-unknown-pragmas", "-g0"]
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
# All else of these three is that of `avx512`.
ONLY = {"avx512_bf16": ["pairs.c"], "amx": ["amx.c"], "amx_emulated": ["amx.c"]}
MACHINES = {"x86_64": "x86", "amd64": "x86", "aarch64": "arm", "arm64": "arm"}


# As sysconfig has it: another machine, where the compiler is of that.
HOST = os.environ.get("_PYTHON_HOST_PLATFORM", platform.machine())
CC = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")


def macros(options):
    """Return the macros that the compiler defines with these options, instruction sets among them.
    None without a compiler, and for unknown options."""
    run = [*CC, *options.split(), "-dM", "-E", "-x", "c", os.devnull]
    try:
        done = subprocess.run(run, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return (
        None if done.returncode else set(re.findall(r"^#define (__[A-Z]\w+__)", done.stdout, re.M))
    )


def read_by(rule):
    """Return the headers that an object was compiled of, by the compiler's rule for make: all of
    them where it has not written one."""
    try:
        files = rule.read_text("utf-8").partition(":")[2]
    except OSError:
        return INCLUDED
    return [Path(name) for name in files.replace("\\\n", " ").split()]


def digest():
    """Return the digest of the sources, with which `extension.py` finds an outdated extension."""
    file = "mlvm/machines/native/sources.py"
    return str(runpy.run_path(file)["sources_digest"](SOURCE))


def built():
    """Return the instruction sets that the extension in place was built for."""
    names = re.findall(rb"kernels of (\w+)\0", LIBRARY.read_bytes()) if LIBRARY.exists() else []
    return {name.decode() for name in names}


def targets(in_place):
    """Choose the instruction sets to compile for, with their options."""
    there = TARGETS.get(MACHINES.get(re.split("[-.]", HOST)[-1].lower(), ""), {})
    there = {"plain": "", **{name: x for name, x in there.items() if macros(x) is not None}}
    here = macros("-march=native") if "_PYTHON_HOST_PLATFORM" not in os.environ else None
    own = {name for name, x in there.items() if here is None or macros(x) <= here}
    own -= {"amx_emulated", *(["avx2"] if "avx512" in own else [])}
    several = {"own": own, "all": {*there}, "built": there.keys() & built()}
    chosen = {"plain"}
    asked = os.environ.get("MLVM_TARGETS", "own" if in_place else "all")
    for name in asked.split(","):
        if name not in several and name not in there:
            lacking = f"{CC[0]} compiles no set {name!r} for this machine"
            lacking = f"there is no C compiler {CC[0]!r}" if macros("") is None else lacking
            raise SystemExit(f"MLVM_TARGETS: {lacking}; there are {' '.join(several | there)}")
        chosen |= several.get(name, {name})
    if chosen & {*ONLY}:
        chosen.add("avx512")
    if in_place and OPTIMIZE == "3" and len(own) > 1:  # plain runs when asked for by name
        there["plain"] = "-O1" if asked == "all" else "-O0"  # a third of the time, or a tenth
    return {name: options for name, options in there.items() if name in chosen}


class BuildStubs(build_py):
    """Command that copies the package and adds the stubs, in place for an editable install."""

    def run(self):
        super().run()
        into = "." if self.editable_mode else self.build_lib
        subprocess.run([sys.executable, "-m", "mlvm.eager.stub", into], check=True)


class BuildNative(build_ext):
    """Command that compiles `src/plan/kernels/*.c` for each target and all else once, on all
    cores."""

    def run(self):
        self.in_place = self.inplace
        with open(__file__) as file:
            if self.inplace and os.name == "posix":
                import fcntl

                fcntl.flock(file, fcntl.LOCK_EX)  # of several that build in place, one does
            if self.inplace and not self.force and all(map(self._is_new, self.extensions)):
                return  # an editable install has just built it
            super().run()

    def _is_new(self, ext):
        extension = Path(self.get_ext_filename(self.get_ext_fullname(ext.name)))
        sources = [*ext.sources, *ext.depends, __file__]
        changed = max(Path(source).stat().st_mtime for source in sources)
        if (
            "MLVM_SANITIZE" in os.environ
            or not extension.exists()
            or extension.stat().st_mtime <= changed
            or f"sources {digest()}\0".encode() not in extension.read_bytes()
        ):
            return False
        return targets(self.inplace).keys() <= built()

    def copy_extensions_to_source(self):
        """Replace each extension atomically, as others may load it; remove one that was not
        built."""
        for ext in self.extensions:
            name = self.get_ext_filename(self.get_ext_fullname(ext.name))
            built_file, place = Path(self.build_lib, name), Path(name)
            if built_file.exists():
                shutil.copy(built_file, place.with_suffix(".new"))
                place.with_suffix(".new").replace(place)
            else:
                place.unlink(missing_ok=True)

    def _gcc_flags(self):
        about = [*self.compiler.compiler_so, "--version"]
        try:
            version = subprocess.run(about, capture_output=True, text=True, check=False).stdout
        except OSError:  # there is no compiler, as compiling will say
            return []
        return GCC_FLAGS if "Free Software Foundation" in version else []

    def build_extension(self, ext):
        """Build the extension. If that fails and it is optional, report this in one line."""
        try:
            self._build(ext)
        except (CompileError, LinkError):
            if not ext.optional:
                raise
            about = f"mlvm: {CC[0]} cannot build the extension; the slower numpy kernels will run"
            print(about, file=sys.stderr, flush=True)

    def _build(self, ext):
        Path(self.get_ext_fullpath(ext.name)).unlink(missing_ok=True)
        unix = self.compiler.compiler_type == "unix"
        sets = targets(self.in_place) if unix else {"plain": ""}
        flags = [*FLAGS, "-pthread", "-MMD", *self._gcc_flags()] if unix else []
        sanitize = os.environ.get("MLVM_SANITIZE")
        if sanitize:
            flags += [f"-fsanitize={sanitize}", "-g", "-O1"]
            flags += ["-fno-omit-frame-pointer", "-fno-var-tracking"]  # which would take minutes
        if COVERAGE:
            flags += ["--coverage", "-O1", "-fprofile-update=atomic"]
        # An editable install has a temporary folder for objects: `make test` goes on from these.
        build = (
            Path("build", sys.implementation.cache_tag) if self.in_place else Path(self.build_temp)
        )
        variant = [*(sanitize or "").split(","), "coverage" * COVERAGE]
        build /= "-".join(["objects", f"O{OPTIMIZE}", *filter(None, variant)])
        # The name carries no folder: a build for coverage or a sanitizer has its own.
        jobs = [
            (source, build, "", [])
            for source in sorted(SOURCE.rglob("*.c"))
            if source.parent != KERNELS and source not in (LISTS, MODULE)
        ]
        of_sets = [(f"WITH_{name.upper()}", "1") for name in sets]
        jobs.append((MODULE, build / digest(), "", [("SOURCES", digest())]))
        jobs.append((LISTS, build / "-".join(sets), "", of_sets))
        for name, options in sets.items():
            folder = name + options if name == "plain" else name
            jobs += [
                (source, build / folder, options, [("TARGET", name)])
                for source in sorted(KERNELS.glob("*.c"))
                if source.name in ONLY.get(name, [source.name])
            ]

        def is_new(job):
            source, folder, _, _ = job
            object_file = folder / source.with_suffix(".o" if unix else ".obj")
            if not object_file.exists() or self.force:
                return False
            read = [source, *read_by(object_file.with_suffix(".d"))]
            compiled = object_file.stat().st_mtime
            return all(path.exists() and path.stat().st_mtime < compiled for path in read)

        def compile_(job):
            source, folder, options, macros = job
            if is_new(job):
                return str(folder / source.with_suffix(".o" if unix else ".obj"))
            [object_file] = self.compiler.compile(
                [str(source)],
                output_dir=str(folder),
                macros=macros,
                include_dirs=[*ext.include_dirs],
                extra_postargs=[*flags, *options.split()],
            )
            return object_file

        slow = [job for job in jobs if job[0].parent == KERNELS and job[2] != "-O0"]
        stale = sum(not is_new(job) for job in slow)
        seconds = round(stale * SECONDS / (os.cpu_count() or 1))
        if seconds > 5 and OPTIMIZE != "0":
            about = f"mlvm: compiling its kernels for {' '.join(sets)}, about {seconds} seconds"
            print(about, file=sys.stderr, flush=True)
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            objects = list(threads.map(compile_, jobs))
        link = ["-pthread", "-lm"] if unix else []
        if sanitize:
            link += [f"-fsanitize={sanitize}"]
        if COVERAGE:
            link += ["--coverage"]
        self.compiler.link_shared_object(
            objects,
            self.get_ext_fullpath(ext.name),
            libraries=self.get_libraries(ext),
            library_dirs=ext.library_dirs,
            extra_postargs=link,
            build_temp=self.build_temp,
            target_lang="c",
        )


class Project(Distribution):
    """The package. To compile the extension only, any setuptools suffices, for example that of a
    new environment: an older one rejects the metadata of pyproject.toml."""

    def parse_config_files(self, filenames=None, **options):
        if "build_ext" in sys.argv:
            filenames = self.find_config_files()  # those of setuptools, without pyproject.toml
        super().parse_config_files(filenames, **options)


setup(
    distclass=Project,
    ext_modules=[
        Extension(
            "mlvm.machines.native._native",
            sources=[str(path) for path in sorted(SOURCE.rglob("*.c"))],
            depends=[str(path) for path in INCLUDED],
            py_limited_api=LIMITED,
            optional=os.environ.get("MLVM_NATIVE") != "1",
        )
    ],
    cmdclass={"build_ext": BuildNative, "build_py": BuildStubs},
    options=WHEEL_OPTIONS,
)
