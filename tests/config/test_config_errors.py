"""The command line: a bad config is refused before any process starts, with what is allowed."""

import json
import os
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from torchtitan_rl.cli import train
from torchtitan_rl.config.resume import fixed_settings
from torchtitan_rl.hosts.cluster import Cluster
from torchtitan_rl.observability.run_folder import RunFolder, RunFolderError
from torchtitan_rl.observability.run_lock import RunLock
from torchtitan_rl.run import launch
from torchtitan_rl.run.checks import resolved
from torchtitan_rl.run.fork import resolve_fork
from torchtitan_rl.run.placements import place_actors
from torchtitan_rl.run.warm_start import supervised

ROOT = Path(__file__).parents[2]

REGISTRY = '''
from dataclasses import dataclass

from torchtitan_rl.config import (
    EchoConfig, EngineConfig, GeneratorConfig, RunConfig, SamplingConfig, ToolEcho, WarmStartConfig
)
from torchtitan_rl.tasks.mixture import Mixture
from torchtitan_rl.tasks.spelling import Spelling
from torchtitan_rl.tasks.sum_digits import SumDigits
from torchtitan_rl.tasks.tools.tool import tool

GENERATOR = GeneratorConfig(
    sampling=SamplingConfig(n=8, max_tokens=24), engine=EngineConfig(max_model_len=128)
)

def tiny() -> RunConfig:
    """From a folder."""
    return RunConfig(model="model", task=SumDigits.Config(), generator=GENERATOR)

def warm() -> RunConfig:
    """From a model that is made first."""
    return RunConfig(
        warm_start=WarmStartConfig(), task=SumDigits.Config(), generator=GENERATOR
    )

def mixed() -> RunConfig:
    """Two tasks, one with a tool and its own sampling."""
    spelling = Spelling.Config(
        show_tools=False,
        sampling=SamplingConfig(n=4, max_tokens=32),
        echo=EchoConfig(tool=ToolEcho(tool_names=("spell",))),
    )
    task = Mixture.Config(tasks=[SumDigits.Config(), spelling])
    return RunConfig(model="model", task=task, generator=GENERATOR)

class Vague(SumDigits):
    @dataclass(kw_only=True, slots=True)
    class Config(SumDigits.Config):
        name: str = "vague"

    @tool
    def ask(self, anything) -> str:
        return ""

def vague() -> RunConfig:
    """A tool that cannot be described."""
    return RunConfig(model="model", task=Vague.Config(), generator=GENERATOR)
'''


PLUG_INS = """
from torchtitan_rl.algorithms.policy_loss import LossOutput

def forgets_weights(inputs):
    return LossOutput(-(inputs.advantages * inputs.logprobs).sum())

def misspelt(group):
    return [scored.rewards for scored in group]
"""


class Started(BaseException):
    """The config was accepted: from here on there are processes. Not to be caught as an error."""


@pytest.fixture(autouse=True)
def folder(tmp_path, tiny_model, monkeypatch):
    """A working directory with recipes and a model, where starting the run raises instead."""

    async def start(config, lock):
        raise Started

    (tmp_path / "config_registry.py").write_text(REGISTRY)
    (tmp_path / "plug_ins.py").write_text(PLUG_INS)
    shutil.copytree(tiny_model, tmp_path / "model")
    monkeypatch.delitem(sys.modules, "config_registry", raising=False)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if Path(path) != ROOT])
    monkeypatch.setattr(launch, "train", start)
    # It would end what other tests have started in this process.
    monkeypatch.setattr(launch, "end_all_processes", lambda: None)
    monkeypatch.setattr(launch, "adopt_orphans", lambda: None)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("config_registry", None)


@pytest.fixture
def refusal(capsys):
    """What the command line says to arguments that it refuses, without boxes and line breaks."""

    def run(*arguments):
        try:
            code = train.main(list(arguments))
        except SystemExit as exit:
            code = exit.code
        assert code == 2
        captured = capsys.readouterr()
        return re.sub(r"[│\s]+", " ", captured.out + captured.err)

    return run


def change_model(folder, *, name="model", **changes):
    file = folder / name / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


@pytest.mark.parametrize("recipe", ["tiny", "warm", "mixed"])
def test_a_good_config_starts(recipe, folder):
    with pytest.raises(Started):
        train.main(["--config", recipe])
    assert not (folder / "outputs").exists()


@pytest.mark.parametrize(
    ("arguments", "note"),
    [
        ("--trainer.loss.rollout_kl.coef 0.1 --trainer.loss.rollout_kl.estimator k1", "zero expec"),
        (
            "--trainer.loss.name dppo --generator.sampling.no_logprobs",
            "trainer.loss.name dppo needs the generator's logprobs: recording is switched on",
        ),
        ("--max_offpolicy_steps 1", "grpo counts them as new; trainer.loss.name dppo or"),
    ],
)
def test_a_doubtful_config_starts_with_a_note(arguments, note, capsys):
    with pytest.raises(Started):
        train.main(["--config", "tiny", *arguments.split()])
    assert note in re.sub(r"\s+", " ", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "gpus"),
    [
        ("", ["0", "1", "2"]),
        ("--placement colocated", ["0", "0", "0"]),
        (
            "--placement colocated --generator.tensor_parallel_degree 2"
            " --trainer.parallelism.data_parallel_shard_degree 2",
            ["0,1", "0,1", "0"],
        ),
        (
            "--placement colocated --generator.replicas 2"
            " --trainer.parallelism.data_parallel_shard_degree 2",
            ["0,1", "0", "1", "0"],
        ),
    ],
)
def test_colocated_actors_get_the_same_gpus(arguments, gpus):
    """In the order trainer, generators, reference."""
    parts = ["--config", "tiny", "--trainer.loss.ref_kl.coef", "0.1", *arguments.split()]
    config = resolved(train.parse(parts))
    placed = place_actors(config, Cluster(config.cluster, run=""))
    actors = [placed.trainer, *placed.generators, placed.reference]
    assert [",".join(map(str, actor.gpus[0])) for actor in actors] == gpus
    assert config.generator.engine.can_sleep == (config.placement == "colocated")


def test_what_a_loss_needs_is_switched_on():
    off = ["--config", "tiny", "--generator.sampling.no_logprobs"]
    assert not resolved(train.parse(off)).generator.sampling.logprobs
    needed = train.parse([*off, "--trainer.loss.rollout_kl.coef", "0.1"])
    assert resolved(needed).generator.sampling.logprobs


@pytest.mark.parametrize("recipe", ["tiny", "warm"])
def test_truncated_sampling_goes_with_a_loss_that_has_no_ratio(recipe):
    reinforce = ["--trainer.loss.name", "reinforce", "--generator.sampling.top_p", "0.9"]
    with pytest.raises(Started):
        train.main(["--config", recipe, *reinforce])
    if recipe == "warm":
        config = train.parse(["--config", recipe, *reinforce])
        assert supervised(config, Path("work")).trainer.loss.name == "reinforce"


def test_what_is_switched_on_does_not_stand_in_the_way_of_a_resume(folder):
    arguments = ["--config", "tiny", "--run_name", "old", "--generator.sampling.no_logprobs"]
    arguments += ["--trainer.loss.name", "dppo"]
    config = resolved(train.parse(arguments))
    (folder / "outputs" / "old").mkdir(parents=True)
    (folder / "outputs" / "old" / "config.json").write_text(json.dumps(config.to_dict()))
    with pytest.raises(Started):
        train.main([*arguments, "--resume"])


def test_overrides_reach_the_config():
    overrides = ["--generator.sampling.n=4", "--trainer.optimizer.lr=0.5", "--run_name=x"]
    config = train.parse(["--config", "tiny", *overrides])
    assert config.generator.sampling.n == config.samples_per_prompt == 4
    assert config.trainer.optimizer.lr == 0.5
    assert config.run_name == "x"
    assert config.generator.sampling.max_tokens == 24


def test_a_run_without_a_name_is_called_after_its_recipe_and_the_time():
    name = train.parse(["--config", "tiny"]).run_name
    assert re.fullmatch(r"tiny-\d{8}-\d{6}", name)


def test_the_list_of_recipes(capsys):
    assert train.main(["--list"]) == 0
    listed = capsys.readouterr().out
    assert re.search(r"tiny +From a folder\.", listed)
    assert re.search(r"warm +From a model that is made first\.", listed)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--generator.sampling.temperature 0", ["temperature"]),
        (
            "--generator.sampling.temperature 0 --generator.sampling.n 1",
            ["generator.sampling.temperature is 0", "use a temperature above 0"],
        ),
        ("--generator.sampling.temperature -1", ["temperature must be 0 (greedy) or more"]),
        ("--generator.sampling.top_p 0.9", ["generator.sampling.top_p", "use top_p = 1"]),
        ("--generator.sampling.top_p 2", ["sampling.top_p must be in (0, 1]; got 2"]),
        ("--generator.sampling.top_k 5", ["top_k", "top_k = 0"]),
        ("--generator.sampling.n 0", ["sampling.n must be at least 1; got 0"]),
        ("--generator.sampling.max_tokens 128", ["generator.sampling.max_tokens (128)"]),
        ("--generator.engine.max_model_len 0", ["max_model_len"]),
        ("--generator.tensor_parallel_degree 0", ["tensor_parallel_degree", "at least 1"]),
        (
            "--trainer.tokens_per_microbatch 64",
            ["trainer.tokens_per_microbatch (64)", "max_model_len (128)", "trainer.overlong"],
        ),
        ("--trainer.router_replay", ["trainer.router_replay", "has no experts; switch it off"]),
        ("--trainer.optimizer.lr -1", ["optimizer.lr must be positive; got -1"]),
        ("--trainer.optimizer.betas 0.9 1.0", ["optimizer.betas must lie in [0, 1)"]),
        ("--trainer.max_grad_norm 0", ["trainer.max_grad_norm must be positive"]),
        ("--trainer.parallelism.tensor_parallel_degree 3", ["3 does not divide", "heads (4)"]),
        (
            "--trainer.parallelism.expert_parallel_degree 2",
            ["expert_parallel_degree (2) must divide", "data_parallel_shard_degree (1)"],
        ),
        (
            "--trainer.parallelism.expert_parallel_degree 2 "
            "--trainer.parallelism.data_parallel_shard_degree 2",
            ["trainer expert parallelism is 2, but the model has no experts"],
        ),
        (
            "--trainer.parallelism.expert_parallel_degree 2 "
            "--trainer.parallelism.data_parallel_shard_degree 2 "
            "--trainer.parallelism.tensor_parallel_degree 2",
            ["expert_parallel_degree works without tensor parallelism only"],
        ),
        ("--generator.tensor_parallel_degree 4", ["generator tensor parallelism", "heads (2)"]),
        ("--trainer.loss.name grop", ["unknown loss 'grop'; did you mean 'grpo'"]),
        ("--trainer.loss.name dpo", ["did you mean 'dppo'", "cispo", "gspo", "reinforce"]),
        ("--trainer.loss.kwargs clip_low -0.1", ["clip_low must be a number 0 to 1; got -0.1"]),
        ("--trainer.loss.kwargs clip_high wide", ["clip_high must be a number from 0 up"]),
        ("--trainer.loss.kwargs clip_hihg 0.3", ["loss 'grpo' cannot take", "clip_hihg"]),
        ("--trainer.loss.reduction mean", ["unknown reduction 'mean'", "token_mean"]),
        ("--trainer.loss.rollout_kl.coef -1", ["coef", "0 (off) or a positive number; got -1"]),
        (
            "--trainer.loss.rollout_kl.estimator k4",
            ["unknown KL estimator 'k4'", "Known: abs, k1, k2, k3"],
        ),
        (
            "--trainer.loss.correction.token_mask on "
            "--trainer.loss.correction.token_mask_bounds 9 5",
            ["token_mask_bounds must be 0 <= low < high; got (9.0, 5.0)"],
        ),
        ("--trainer.loss.correction.importance_cap 3", ["importance_cap has no effect", "is off"]),
        ("--trainer.updates_per_step 0", ["updates_per_step must be at least 1"]),
        ("--trainer.updates_per_step 33", ["updates_per_step (33)", "prompts_per_step (32)"]),
        ("--trainer.optimizer.lr nan", ["optimizer.lr must be positive; got nan"]),
        ("--generator.sampling.temperature inf", ["temperature must be 0 (greedy) or more"]),
        (
            "--trainer.reference.parallelism.tensor_parallel_degree 0",
            ["parallelism.tensor_parallel_degr"],
        ),
        ("--trainer.reference.threads -3", ["trainer.reference.threads"]),
        ("--advantage.name plug_ins:misspelt", ["advantage function 'plug_ins:misspelt' failed"]),
        (
            "--generator.sampling.top_k 5 --trainer.loss.name reinforce "
            "--trainer.loss.rollout_kl.coef 0.1",
            ["top_k", "the ratios", "without rollout_kl and correction"],
        ),
        (
            "--trainer.loss.ref_kl.coef 0.1 "
            "--trainer.reference.parallelism.tensor_parallel_degree 3",
            ["reference tensor parallelism of 3 does not divide"],
        ),
        ("--trainer.loss.name plug_ins:forgets_weights", ["leaves out inputs.weights"]),
        ("--advantage.name grop", ["unknown advantage 'grop'; did you mean 'grpo'", "rloo"]),
        ("--advantage.name nowhere:f", ["advantage 'nowhere:f'", "cannot import 'nowhere'"]),
        ("--steps 0", ["steps must be positive; got 0"]),
        ("--prompts_per_step -1", ["prompts_per_step must be positive; got -1"]),
        ("--evaluation.every 0", ["evaluation.every", "at least 1"]),
        ("--evaluation.prompts 1000 --task.digits 1 --task.max_numbers 2", ["held-out"]),
        ("--checkpoint.keep 1", ["checkpoint.keep must be 0 (all) or at least 2"]),
        ("--task.digits 0", ["task.digits must be at least 1; got 0"]),
        ("--rollout.grader.timeout_seconds 0", ["rollout.grader.timeout_seconds must be"]),
        ("--model nowhere", ["no config.json in", "nowhere", "model"]),
        ("--model=", ["model is empty"]),
        ("--resume", ["--resume needs the --run_name", "There are no runs in outputs"]),
        ("--resume --run_name lost", ["--resume found no run in outputs/lost"]),
        ("--stepz 3", ["there is no setting --stepz: did you mean --steps", "--help lists"]),
        ("--learning_rate 1e-4", ["--learning_rate: did you mean --trainer.optimizer.lr?"]),
        ("--fork_from lost", ["--fork_from: there is no run 'lost'. There are no runs in outputs"]),
        ("3 --foo", ["there is no setting --foo ("]),
        ("wide", ["unexpected argument 'wide'"]),
        (r"--model C:\[models]\x", [r"C:\\[models]\\x'"]),  # as Python writes a backslash
        (
            "--output_dir model/config.json --run_name x",
            ["model/config.json/x cannot be written to (Not a directory): choose another --output"],
        ),
        ("--steps many", ["--steps", "'many'"]),
        ("--trainer.dtype float16", ["--trainer.dtype", "'auto', 'float32', 'bfloat16'"]),
        ("--trainer.weight_sync.transport pigeon", ["weight_sync.transport", "'shm', 'relay'"]),
        ("--trainer.weight_sync.folder w", ["weight_sync.folder is 'w'", "is auto", "to file"]),
    ],
)
def test_a_bad_value_is_refused_with_its_name_and_what_is_allowed(refusal, folder, arguments, said):
    answer = refusal("--config", "tiny", *arguments.split())
    for words in said:
        assert words in answer
    assert not (folder / "outputs").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            "--config tinny",
            "unknown recipe 'tinny'; did you mean 'tiny'? Known: dppo_sum_digits_async_tiny,",
        ),
        ("--config xyz", "unknown recipe 'xyz'; Known: dppo_sum_digits_async_tiny, echo"),
        ("--config a[red]b", "unknown recipe 'a[red]b'"),
        ("--config a[/b]", "unknown recipe 'a[/b]'"),
        ("--steps 3", "--config is missing; recipes: grpo_sum_digits_tiny, "),
        ("--confg tiny", "--config is missing (is '--confg' meant to be it?); recipes: "),
        ("--config tiny --module nowhere", "no nowhere.py in"),
    ],
)
def test_an_unknown_recipe_is_refused(refusal, arguments, said):
    assert said in refusal(*arguments.split())


def test_an_existing_run_is_not_overwritten(refusal, folder):
    (folder / "outputs" / "old").mkdir(parents=True)
    (folder / "outputs" / "old" / "config.json").write_text("{}")
    answer = refusal("--config", "tiny", "--run_name", "old")
    assert "outputs/old already holds a run: continue it with --resume" in answer
    with pytest.raises(Started):
        train.main(["--config", "tiny", "--run_name", "old", "--resume"])


def test_a_run_that_goes_on_is_neither_resumed_nor_replaced(refusal, folder):
    (folder / "outputs" / "old").mkdir(parents=True)
    (folder / "outputs" / "old" / "config.json").write_text("{}")
    (folder / "outputs" / "old" / "metrics.jsonl").write_text('{"step": 0}\n')
    lock = RunLock(folder / "outputs" / "old")
    lock.acquire()
    for more in ([], ["--resume"]):
        answer = refusal("--config", "tiny", "--run_name", "old", *more)
        assert f"a run is going on in outputs/old, by process {os.getpid()} on" in answer
        assert "--resume" not in answer.partition("since")[0]
    lock.release()
    assert (folder / "outputs" / "old" / "metrics.jsonl").read_text()
    with pytest.raises(Started):
        train.main(["--config", "tiny", "--run_name", "old", "--resume"])


def a_run(folder, name, *, steps=(), model="model", **settings):
    """The folder of a run, with its settings and checkpoints of these steps."""
    path = folder / "outputs" / name
    (path / "logs").mkdir(parents=True)
    started = {"model": model, "starting_model": str(folder / "model"), **settings}
    (path / "config.json").write_text(json.dumps(started))
    for step in steps:
        (path / "checkpoints" / f"step-{step}").mkdir(parents=True)
        (path / "checkpoints" / f"step-{step}" / ".metadata").touch()
    return path


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("lost", "--fork_from: there is no run 'lost'. Runs in outputs: "),
        ("new", "--fork_from: outputs/new has no checkpoint yet"),
        ("old@3", "outputs/old has no checkpoint of step 3; it has those of 2, 4 (checkpoint.keep"),
        ("old@x", "there is no run 'old@x'"),
        ("done", "steps (100) must be more than the 100 steps that outputs/done has done"),
        ("big", "checkpoint of outputs/big is of another model than model: hidden_size 8, not"),
    ],
)
def test_a_fork_that_cannot_be_is_refused(refusal, folder, source, said):
    a_run(folder, "new")
    a_run(folder, "old", steps=(2, 4))
    a_run(folder, "done", steps=(100,))
    shutil.copytree(folder / "model", folder / "big")
    change_model(folder, name="big", hidden_size=8)
    a_run(folder, "big", steps=(2,), starting_model=str(folder / "big"))
    assert said in refusal("--config", "tiny", "--run_name", "mine", "--fork_from", source)
    assert not (folder / "outputs" / "mine").exists()


def test_a_fork_takes_the_model_in_place_of_a_warm_start_and_is_resumed_by_the_same_command(folder):
    a_run(folder, "old", steps=(2, 4), model="")
    command = ["--config", "warm", "--run_name", "mine"]
    for given in ("old", "old@4", "outputs/old"):
        forked = resolve_fork(train.parse([*command, "--fork_from", given]))
        assert (forked.fork_from, forked.model) == ("old@4", str(folder / "model"))
    a_run(folder, "mine", **{"fork_from": "old@4", "model": str(folder / "model")})
    for again in ([], ["--fork_from", "old"], ["--fork_from", "outputs/old@4"]):
        resumed = resolve_fork(train.parse([*command, *again, "--resume"]))
        assert (resumed.fork_from, resumed.model) == ("old@4", str(folder / "model"))
    other = resolve_fork(train.parse([*command, "--fork_from", "old@2", "--resume"]))
    assert other.fork_from == "old@2"  # which is refused, as a setting that is fixed
    with pytest.raises(RunFolderError, match="cannot change fork_from: old@4 → old@2"):
        RunFolder(folder / "outputs" / "mine", resume=True).changes(
            other.to_dict(), fixed=fixed_settings(other)
        )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "'GPT2LMHeadModel'; supported: Llama"),
        ({"num_key_value_heads": None}, "lacks the field 'num_key_value_heads'"),
        ({"vocab_size": None}, "lacks the field 'vocab_size'"),
        ({"intermediate_size": None}, "lacks the field 'intermediate_size'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "RoPE scaling 'yarn'"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused(refusal, folder, changes, said):
    change_model(folder, **changes)
    assert said in refusal("--config", "tiny")


def test_a_model_without_a_tokenizer_is_refused(refusal, folder):
    for file in (folder / "model").glob("tokenizer*"):
        file.unlink()
    assert "tokenizer" in refusal("--config", "tiny")


# With a warm start the model is made first, which takes minutes: nothing may come up after that.


def test_a_given_model_that_is_missing_is_refused_though_there_is_a_warm_start(refusal):
    assert "nowhere" in refusal("--config", "warm", "--model", "nowhere")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--resume --run_name lost", "--resume found no run in outputs/lost"),
        ("--evaluation.prompts 1000 --task.digits 1 --task.max_numbers 2", "evaluation.prompts"),
        ("--trainer.parallelism.tensor_parallel_degree 3", "3 does not divide"),
        (r"--task.answer =(\d+)", "demonstration of task 'sum_digits': it ends in '[ANSWER] "),
    ],
)
def test_a_bad_value_is_refused_before_the_warm_start(refusal, arguments, said):
    assert said in refusal("--config", "warm", *arguments.split())


def test_an_existing_run_is_seen_before_the_warm_start(folder):
    (folder / "outputs" / "old").mkdir(parents=True)
    (folder / "outputs" / "old" / "config.json").write_text("{}")
    config = replace(train.parse(["--config", "warm"]), run_name="old")
    with pytest.raises(RunFolderError, match="already holds a run"):
        launch.check(config)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--task.name all", "a task cannot be named 'all'"),
        ("--rollout.max_tokens 999", "rollout.max_tokens (999) is more than"),
        ("--rollout.max_turns 0", "rollout.max_turns must be at least 1"),
        ("--rollout.environment.timeout_seconds 0", "environment.timeout_seconds must be positive"),
    ],
)
def test_bad_rollouts_are_refused(refusal, arguments, message):
    assert message in refusal("--config", "tiny", *arguments.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--task.tasks.1.sampling.n 1", "use sampling of task 'spelling'.n of 2 or more"),
        ("--task.tasks.1.sampling.temperature 0 --task.tasks.1.sampling.n 1", "greedy samples"),
        ("--task.tasks.1.sampling.max_tokens 128", "leaves no room for a prompt"),
        ("--task.tasks.1.echo.tool.tool_names spel", "it has no tool 'spel'; did you mean 'spell'"),
        ("--task.tasks.1.echo.tool.alpha nan", "echo alpha must be a finite number"),
        ("--task.tasks.1.name sum_digits", "names of their own"),
        ("--task.tasks.1.name all", "a task cannot be named 'all'"),
        ("--task.weights 1", "a positive number for each of"),
    ],
)
def test_bad_settings_of_one_task_are_refused(refusal, arguments, message):
    assert message in refusal("--config", "mixed", *arguments.split())


def test_a_tool_that_cannot_be_described_is_refused(refusal):
    assert "argument 'anything' a type" in refusal("--config", "vague")


def test_a_model_whose_tool_calls_nobody_can_read_is_refused(refusal, folder):
    change_model(folder, model_type="llama", architectures=["LlamaForCausalLM"])
    assert "no tool calls that can be read" in refusal("--config", "mixed")
