"""An engine of another vLLM than the patches are for: it works as it comes, without any of them."""

import os
import subprocess
import sys

from tests.models.support import noisy_copy
from torchtitan_rl.platform import worker_env

SCRIPT = """
import asyncio, logging, sys
import vllm
vllm.__version__ = "0.33.0"
logging.basicConfig(level=logging.WARNING)
from tests.engines.vllm.direct_checks import CHANGES, Served

async def main(folder):
    served = Served(folder)
    model = served.worker.model_runner.get_model()
    assert not any("forward" in vars(layer) for layer in model.model.layers)
    made_by = {type(module).__module__ for module in model.modules()}
    made_by.add(vllm.v1.sample.sampler.Sampler.gather_logprobs.__module__)
    assert not [name for name in made_by if name.startswith("torchtitan_rl")], made_by
    await served.versions(folder)  # each version's logprobs are those of transformers
    assert served.reloads == sum(names != [] for names in CHANGES), "vLLM loads them all"
    served.engine.close()

if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
"""


def test_another_vllm_runs_without_patches_and_the_log_says_so(tiny_model, tmp_path):
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(noisy_copy(tiny_model, tmp_path / "model"))],
        env={**os.environ, **worker_env(1, role="generator"), "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stderr.count("vLLM 0.33.0 runs without our CPU patches, which are for 0.32.0") == 1
