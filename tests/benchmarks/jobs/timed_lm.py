"""`examples/train_lm.py` that writes when each step ended. Usage: timed_lm.py SETTINGS STEPS FOLDER."""

import sys
from pathlib import Path

from byte_lm.settings import Settings
from byte_lm.text import read_standard_library
from train_lm import make_trainer

from resilient_jax.config import load_toml
from tests.benchmarks.step_times import StepTimeWriter

if __name__ == "__main__":
    path, steps, folder = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    settings = load_toml(path, Settings)
    text = read_standard_library(settings.text.max_bytes)
    make_trainer(settings, text, path.parent, callbacks=[StepTimeWriter(folder)]).fit(steps)
