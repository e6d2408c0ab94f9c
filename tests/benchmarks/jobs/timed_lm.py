"""`examples/train_lm.py` that writes when each step ended. Usage: timed_lm.py SETTINGS STEPS FOLDER.

All processes stop after the step whose number is in the file `stop` of FOLDER, which must be written ahead of time.
Each writes the SHA-256 of the final weights there, to `digest-<pid>.txt`.
"""

import sys
from pathlib import Path

from byte_lm.settings import Settings
from byte_lm.text import read_standard_library
from train_lm import make_trainer

import resilient_jax as rj
from resilient_jax.config import load_toml
from tests.benchmarks.run_end import read_stop, write_digest
from tests.benchmarks.step_times import StepTimeWriter

if __name__ == "__main__":
    path, steps, folder = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    settings = load_toml(path, Settings)
    text = read_standard_library(settings.text.max_bytes)

    def must_stop(report: rj.StepReport) -> bool:
        return report.step >= read_stop(folder)

    callbacks = [StepTimeWriter(folder), must_stop]
    result = make_trainer(settings, text, path.parent, callbacks=callbacks).fit(steps)
    write_digest(folder, result.params_sha256)
