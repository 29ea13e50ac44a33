"""The modules that a model is put together from; a platform replaces some of torchtitan's."""

from dataclasses import dataclass, fields

from torchtitan.models.common import Linear
from torchtitan.models.common.attention import VarlenAttention
from torchtitan.protocols.module import Module


@dataclass(frozen=True, slots=True)
class Parts:
    """Module classes of a model; the defaults are torchtitan's own."""

    attention: type[Module] = VarlenAttention
    """Never attends across the documents of a row."""
    linear: type[Linear] = Linear

    def as_linear(self, config: Linear.Config) -> Linear.Config:
        """The config of a layer that torchtitan's helpers have described, for `linear`."""
        return self.linear.Config(**{f.name: getattr(config, f.name) for f in fields(config)})
