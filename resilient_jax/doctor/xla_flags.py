"""Checks of the environment variables that a worker inherits, and of the flags that it gets in addition."""

import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Final

from resilient_jax.doctor.check_result import CheckResult, CheckVerdict, judge
from resilient_jax.jax_runtime.worker_environment import (
    GPU_ENVIRONMENT,
    GPU_XLA_FLAGS,
    Platform,
    make_worker_environment,
)

GROUP: Final = "environment"
COLLECTIVE_TIMEOUT_S: Final = 300.0
"""As a job's default; only the flag's name matters here."""
PROBE_TIMEOUT_S: Final = 60.0
UNKNOWN_FLAG: Final = re.compile(r"Unknown flags? in XLA_FLAGS: (.*)")
PROXIES: Final = ("grpc_proxy", "http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")

FindUnknownFlags = Callable[[Mapping[str, str]], str | None]
"""Returns the flags that XLA refuses in an environment; empty: none; None: that could not be found out."""


def check_environment(
    platform: Platform, environment: Mapping[str, str], find_unknown_flags: FindUnknownFlags
) -> list[CheckResult]:
    """Return a result for each thing that a worker's environment decides.

    Args:
        environment: environment that an agent would inherit from this process.
        find_unknown_flags: asks XLA which flags it does not know.
    """
    return [
        _check_known_flags(environment, find_unknown_flags),
        _check_own_flags(platform, environment),
        _check_platforms(platform, environment),
        _check_proxies(environment),
    ]


def find_unknown_flags(environment: Mapping[str, str]) -> str | None:
    """Return the flags that XLA refuses, by making JAX's CPU devices in a process of its own."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", "import jax; jax.devices()"],
            env={**environment, "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "0"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PROBE_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None
    if done.returncode == 0:
        return ""
    matched = UNKNOWN_FLAG.search(done.stderr)
    return matched[1].strip() if matched else None


def make_gpu_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` with all that an agent adds for workers on GPUs."""
    added = make_worker_environment(
        platform="gpu",
        devices_per_host=None,
        cache_dir=None,
        collective_timeout_s=COLLECTIVE_TIMEOUT_S,
        base=environment,
    )
    return {**environment, **added}


def _check_known_flags(environment: Mapping[str, str], find_unknown: FindUnknownFlags) -> CheckResult:
    # Also on CPU: it says whether this jaxlib knows what a GPU worker is given.
    unknown = find_unknown(make_gpu_environment(environment))
    found = "yes, those for GPUs too"
    remedy = "take your own flags out of XLA_FLAGS; if it is none of yours, install a tested jaxlib"
    if unknown is None:
        found = "JAX made no CPU devices with a worker's XLA_FLAGS"
        remedy = "run: JAX_PLATFORMS=cpu python -c 'import jax; jax.devices()'"
    elif unknown:
        found = f"XLA refuses {unknown}, and ends every process that has it"
    is_bad = unknown != ""
    return judge(
        GROUP, "flags known to XLA", found, is_bad=is_bad, remedy=remedy, verdict=CheckVerdict.PROBLEM
    )


def _check_own_flags(platform: Platform, environment: Mapping[str, str]) -> CheckResult:
    flags = [flag.partition("=") for flag in environment.get("XLA_FLAGS", "").split()]
    theirs = {name: value for name, _, value in flags}
    changed = [f"{n}={theirs[n]}" for n, value in GPU_XLA_FLAGS.items() if theirs.get(n, value) != value]
    changed += [f"{n}={environment[n]}" for n, v in GPU_ENVIRONMENT.items() if environment.get(n, v) != v]
    is_bad = platform == "gpu" and bool(changed)
    return judge(
        GROUP,
        "settings for survival",
        f"yours take precedence: {', '.join(changed)}" if is_bad else "nothing of yours contradicts them",
        is_bad=is_bad,
        remedy="unset them: with these a worker may not survive a peer's death",
    )


def _check_platforms(platform: Platform, environment: Mapping[str, str]) -> CheckResult:
    found = environment.get("JAX_PLATFORMS", "")
    is_bad = platform == "gpu" and found != "" and found.split(",")[0] not in ("cuda", "gpu", "rocm")
    return judge(
        GROUP,
        "JAX_PLATFORMS",
        f"{found}: workers would train there, not on GPUs" if is_bad else found or "not set",
        is_bad=is_bad,
        remedy="unset JAX_PLATFORMS",
        verdict=CheckVerdict.PROBLEM,
    )


def _check_proxies(environment: Mapping[str, str]) -> CheckResult:
    proxies = [name for name in PROXIES if environment.get(name)]
    found = f"{', '.join(proxies)}; a job's own connections use none" if proxies else "none"
    return CheckResult(group=GROUP, name="proxies", verdict=CheckVerdict.OK, found=found)
