"""Settings of a run: dataclasses that import no torch, no vLLM and no Monarch."""

from dataclasses import is_dataclass

from torchtitan_rl.config.advantage import AdvantageConfig
from torchtitan_rl.config.batch_filter import BatchFilterConfig
from torchtitan_rl.config.checkpoint import CheckpointConfig
from torchtitan_rl.config.cluster import ClusterConfig, RolesConfig, SlurmConfig
from torchtitan_rl.config.correction import CorrectionConfig
from torchtitan_rl.config.echo import EchoConfig, RoleEcho, ToolEcho
from torchtitan_rl.config.environment import EnvironmentConfig
from torchtitan_rl.config.evaluation import EvaluationConfig
from torchtitan_rl.config.generator import EngineConfig, GeneratorConfig
from torchtitan_rl.config.grader import GraderConfig
from torchtitan_rl.config.log import LogConfig
from torchtitan_rl.config.loss import KLConfig, LossConfig
from torchtitan_rl.config.parallelism import Parallelism
from torchtitan_rl.config.reference import ReferenceConfig
from torchtitan_rl.config.rollout import RolloutConfig
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.config.sampling import SamplingConfig
from torchtitan_rl.config.supervision import SupervisionConfig
from torchtitan_rl.config.task import TaskConfig
from torchtitan_rl.config.trainer import (
    LRScheduleConfig,
    OptimizerConfig,
    TrainerConfig,
    annealed_lr,
    constant_lr,
)
from torchtitan_rl.config.warm_start import WarmStartConfig
from torchtitan_rl.config.weight_sync import WeightSyncConfig
from torchtitan_rl.core.settings import checks_numbers

__all__ = [
    "AdvantageConfig",
    "BatchFilterConfig",
    "CheckpointConfig",
    "ClusterConfig",
    "CorrectionConfig",
    "EchoConfig",
    "EngineConfig",
    "EnvironmentConfig",
    "EvaluationConfig",
    "GeneratorConfig",
    "GraderConfig",
    "KLConfig",
    "LRScheduleConfig",
    "LogConfig",
    "LossConfig",
    "OptimizerConfig",
    "Parallelism",
    "ReferenceConfig",
    "RoleEcho",
    "RolesConfig",
    "RolloutConfig",
    "RunConfig",
    "SamplingConfig",
    "SlurmConfig",
    "SupervisionConfig",
    "TaskConfig",
    "ToolEcho",
    "TrainerConfig",
    "WarmStartConfig",
    "WeightSyncConfig",
    "annealed_lr",
    "constant_lr",
]

# Here and not above each class, so that no config can be without it.
for _config in map(globals().get, __all__):
    if isinstance(_config, type) and is_dataclass(_config):
        checks_numbers(_config)
