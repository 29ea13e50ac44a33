"""torchtitan's `Configurable` where torch is not there yet."""

import subprocess
import sys

CODE = """
import sys
from torchtitan_rl.actors import environment, grader
from torchtitan_rl.configurable import Configurable
from torchtitan_rl.tasks.calculator import Calculator
Calculator.Config().build(seed=0)
print(sorted({"torch", "torchtitan", "transformers", "vllm"} & sys.modules.keys()))

import torchtitan.config
from torchtitan.observability import structured_logger
assert torchtitan.config.Configurable is Configurable
spans = []
real = structured_logger.log_trace_span
structured_logger.log_trace_span = lambda name: spans.append(name) or real(name)
print(type(Calculator.Config().build(seed=0)).__name__, spans)
"""


def test_it_is_the_same_class_before_and_after_torch_is_imported():
    run = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == ["[]", "Calculator ['Calculator.Config.build']"]
