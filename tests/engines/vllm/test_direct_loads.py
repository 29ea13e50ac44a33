"""Weights loaded without vLLM's help, for each kind of model that this is for."""

import os
import shutil
import subprocess
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.models.support import noisy_copy
from torchtitan_rl.models.makers.tiny import TINY_QWEN3
from torchtitan_rl.platform import worker_env


def write_llama(tiny_model, folder, **settings):
    """With a vocabulary that vLLM pads, and noise on all weights, so that none are alike."""
    shape = {k: v for k, v in TINY_QWEN3.items() if k not in ("architectures", "model_type")}
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(**shape | {"vocab_size": 280, "num_hidden_layers": 2} | settings)
    )
    for weight in model.parameters():
        weight.data += torch.randn_like(weight) * 0.06
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_model / name, folder)
    return folder


def test_weights_loaded_directly_are_those_that_vllm_would_load(tiny_model, tmp_path):
    folders = [
        noisy_copy(tiny_model, tmp_path / "qwen3"),
        write_llama(tiny_model, tmp_path / "tied"),
        write_llama(
            *(tiny_model, tmp_path / "untied, biased"),
            **{"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
        ),
    ]
    run = subprocess.run(
        [sys.executable, "-m", "tests.engines.vllm.direct_checks", *map(str, folders)],
        env={**os.environ, **worker_env(1, role="generator"), "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert run.returncode == 0, run.stderr[-3000:]
