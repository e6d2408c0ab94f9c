"""The parsed files of the package, once for all tests of the house."""

import ast
from pathlib import Path

import resilient_jax

ROOT = Path(resilient_jax.__file__).parent
TEXTS = {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in sorted(ROOT.rglob("*.py"))}
TREES = {name: ast.parse(text) for name, text in TEXTS.items()}
