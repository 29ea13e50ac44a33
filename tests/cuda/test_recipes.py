"""Every built-in recipe on every generation of GPU, as far as a machine without one can go."""

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import current_flash_attention_impl

from tests.cuda.pretend import CAPABILITIES, model_folder, pretend_gpus
from torchtitan_rl.config import RunConfig
from torchtitan_rl.hosts.cluster import Cluster
from torchtitan_rl.models.cuda.attention import PackedFlashAttention
from torchtitan_rl.models.spec import build_on_meta, model_spec
from torchtitan_rl.platform import device_type, resolve_dtype
from torchtitan_rl.platform.flash_attention import MODULES, activate_kernel, choose_kernel
from torchtitan_rl.recipes.registry import built_in_recipes
from torchtitan_rl.run.checks import check_code, check_machine, checked_model, resolved
from torchtitan_rl.run.placements import place_actors


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return tmp_path_factory.mktemp("shapes")


@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
@pytest.mark.parametrize("name", built_in_recipes())
def test_every_recipe_passes_its_checks_and_its_model_is_built(name, capability, folders):
    with pretend_gpus(capability):
        config: RunConfig = built_in_recipes()[name]()
        config = replace(config, model=str(model_folder(config, folders)))
        check_code(config)
        config = resolved(config)
        check_machine(config)
        hf = checked_model(config)
        model = build_on_meta(model_spec(config.model))
        assert device_type() == "cuda"
        assert resolve_dtype(config.trainer.dtype) == "bfloat16"
    kinds = {type(layer.attention.inner_attention) for layer in model.layers.values()}
    assert kinds == {PackedFlashAttention}
    assert len(model.layers) == hf["num_hidden_layers"]


def test_the_actors_of_a_recipe_get_gpus_of_their_own():
    with pretend_gpus((9, 0)):
        config = built_in_recipes()["grpo_sum_digits_qwen3_14b"]()
        placements = place_actors(config, Cluster(config.cluster, run=""))
    generators = [placement.gpus for placement in placements.generators]
    assert [placements.trainer.gpus, *generators] == [(range(4),), (range(4, 8),)]


def test_a_machine_with_too_few_gpus_is_refused():
    with (
        pretend_gpus((9, 0), count=4),
        pytest.raises(ValueError, match="needs 8 GPUs, and there are 4"),
    ):
        check_machine(built_in_recipes()["grpo_sum_digits_qwen3_14b"]())


@pytest.mark.parametrize(
    ("capability", "installed", "kernel"),
    [
        ((8, 0), ["FA3", "FA4"], "FA2"),
        ((8, 9), [], "FA2"),
        ((9, 0), [], "FA2"),
        ((9, 0), ["FA3"], "FA3"),
        ((9, 0), ["FA4"], "FA4"),
        ((9, 0), ["FA3", "FA4"], "FA3"),
        ((10, 0), ["FA3"], "FA2"),
        ((10, 3), ["FA4"], "FA4"),
        ((12, 0), ["FA3", "FA4"], "FA2"),  # torch refuses FA4 there
    ],
)
def test_the_best_kernel_that_is_installed_and_made_for_the_gpu(capability, installed, kernel):
    modules = {MODULES[name] for name in installed}
    assert choose_kernel(capability, modules.__contains__) == kernel


@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
def test_without_their_packages_torchs_own_kernel_is_used(capability):
    with pretend_gpus(capability):
        assert activate_kernel() == "FA2"
    assert current_flash_attention_impl() is None


def test_a_package_that_works_is_used(monkeypatch, tmp_path):
    (tmp_path / "flash_attn_interface.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    activated = []
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", activated.append)
    with pretend_gpus((9, 0)):
        splits = [PackedFlashAttention.Config().build()._splits for _ in range(2)]
        assert activate_kernel() == "FA3"
    assert activated == ["FA3"]  # once a process
    assert splits == [None, None]  # FlashAttention 3 chooses by itself


def test_a_package_that_does_not_work_is_named(monkeypatch, tmp_path):
    (tmp_path / "flash_attn_interface.py").write_text("raise ImportError('built for torch 2.9')")
    monkeypatch.syspath_prepend(tmp_path)
    with (
        pretend_gpus((9, 0)),
        pytest.raises(RuntimeError, match=r"flash_attn_interface is .*built for torch 2\.9.*unin"),
    ):
        activate_kernel()
    assert not torch.cuda.is_available()
