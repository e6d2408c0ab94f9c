"""Checks of what is installed: Python, JAX and what goes with it, CUDA's plugin, NCCL."""

import importlib.metadata
import platform as python_platform
import re
from collections.abc import Callable, Sequence
from typing import Final

from resilient_jax.doctor.check_result import CheckResult, CheckVerdict
from resilient_jax.jax_runtime import TESTED_VERSIONS
from resilient_jax.jax_runtime.worker_environment import Platform

GROUP: Final = "versions"
CHECKED_PACKAGES: Final = ("jax", "flax", "optax", "orbax-checkpoint")
CUDA_PLUGINS: Final = ("jax-cuda13-plugin", "jax-cuda12-plugin")
NCCL_PACKAGES: Final = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
SUSPECT_NCCL: Final = ((2, 28, 3), (2, 28, 8))
"""First and last version in which others report that an abort hangs; not confirmed by this project."""

FindVersion = Callable[[str], str | None]
"""Returns the installed version of a distribution, None without it."""


def find_installed_version(name: str) -> str | None:
    """Return the version of an installed distribution; None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_versions(
    platform: Platform, find_version: FindVersion, requirements: Sequence[str]
) -> list[CheckResult]:
    """Return a result for each package.

    Args:
        requirements: requirements of this package, as its metadata has them.
    """
    results = [_make_result("python", python_platform.python_version())]
    results += [_check_package(name, find_version(name), requirements) for name in CHECKED_PACKAGES]
    results.insert(2, _check_jaxlib(find_version("jax"), find_version("jaxlib")))
    return [*results, _check_cuda_plugin(platform, find_version), _check_nccl(platform, find_version)]


def parse_version(text: str) -> tuple[int, ...]:
    """Return the numbers that a version begins with: (0, 12, 8) of "0.12.8.dev1"."""
    matched = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(number) for number in matched[0].split(".")) if matched else ()


def find_bounds(name: str, requirements: Sequence[str]) -> str:
    """Return what the requirements, without those of extras, say of a distribution, such as "<0.13,>=0.10"."""
    for requirement in requirements:
        matched = re.fullmatch(r"([\w-]+)([^;]*)", requirement)
        if matched and matched[1] == name:
            return matched[2].strip()
    return ""


def is_within(version: str, bounds: str) -> bool:
    """Return whether a version satisfies bounds of the kinds `>=`, `<` and `==`."""
    numbers = parse_version(version)
    for bound in filter(None, bounds.split(",")):
        operator, limit = bound.rstrip("0123456789."), parse_version(bound.lstrip("<>=! "))
        if not {">=": numbers >= limit, "<": numbers < limit, "==": numbers == limit}.get(operator, True):
            return False
    return True


def _make_result(
    name: str, found: str, remedy: str = "", verdict: CheckVerdict = CheckVerdict.OK
) -> CheckResult:
    return CheckResult(group=GROUP, name=name, verdict=verdict, found=found, remedy=remedy)


def _check_package(name: str, version: str | None, requirements: Sequence[str]) -> CheckResult:
    bounds = find_bounds(name, requirements)
    if version is None:
        return _make_result(
            name, "not installed", f"pip install '{name}{bounds}'", verdict=CheckVerdict.PROBLEM
        )
    if not is_within(version, bounds):
        remedy = f"pip install '{name}{bounds}'"
        return _make_result(name, f"{version}, expected {bounds}", remedy, verdict=CheckVerdict.PROBLEM)
    if name == "jax" and version not in TESTED_VERSIONS:
        tested = " and ".join(TESTED_VERSIONS)
        return _make_result(
            name,
            f"{version}; the private parts of JAX in use are tested with {tested}",
            "the experiments below show whether they work here; else install a tested version",
            verdict=CheckVerdict.WARNING,
        )
    return _make_result(name, version)


def _check_jaxlib(jax: str | None, jaxlib: str | None) -> CheckResult:
    if jaxlib is None or jax is None or parse_version(jax) == parse_version(jaxlib):
        verdict = CheckVerdict.OK if jaxlib else CheckVerdict.PROBLEM
        return _make_result(
            "jaxlib", jaxlib or "not installed", "" if jaxlib else "pip install jaxlib", verdict=verdict
        )
    return _make_result(
        "jaxlib", f"{jaxlib} with jax {jax}", f"pip install jaxlib=={jax}", verdict=CheckVerdict.WARNING
    )


def _check_cuda_plugin(platform: Platform, find_version: FindVersion) -> CheckResult:
    name = "CUDA plugin"
    found = {plugin: version for plugin in CUDA_PLUGINS if (version := find_version(plugin)) is not None}
    listed = ", ".join(f"{plugin} {version}" for plugin, version in found.items())
    if platform == "cpu":
        return _make_result(name, listed or "none; not needed on CPU", verdict=CheckVerdict.NOT_RUN)
    if not found:
        return _make_result(
            name,
            "none: JAX trains on CPU without a word",
            "pip install -e '.[cuda12]' (CUDA 12 driver), or 'jax[cuda13]'",
            verdict=CheckVerdict.PROBLEM,
        )
    jax = find_version("jax") or ""
    if any(parse_version(version) != parse_version(jax) for version in found.values()):
        return _make_result(
            name,
            f"{listed} with jax {jax}",
            "install plugin, jax and jaxlib of one version",
            verdict=CheckVerdict.WARNING,
        )
    return _make_result(name, listed)


def _check_nccl(platform: Platform, find_version: FindVersion) -> CheckResult:
    found = next((version for name in NCCL_PACKAGES if (version := find_version(name)) is not None), None)
    if platform == "cpu":
        return _make_result("NCCL", found or "none; not needed on CPU", verdict=CheckVerdict.NOT_RUN)
    if found is None:
        return _make_result(
            "NCCL",
            "not installed by pip; the system's is used",
            "see its version in the log of NCCL_DEBUG=VERSION",
            verdict=CheckVerdict.WARNING,
        )
    first, last = SUSPECT_NCCL
    if first <= parse_version(found)[:3] <= last:
        return _make_result(
            "NCCL",
            f"{found}: aborts of a collective are reported to hang in 2.28.3 to 2.28.8",
            "see the experiment 'collective abort' below, or install another version",
            verdict=CheckVerdict.WARNING,
        )
    return _make_result("NCCL", found)
