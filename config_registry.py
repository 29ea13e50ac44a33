"""Recipes of this folder: functions that return a RunConfig.

`torchtitan-rl train --config <name>` runs one; any field can be overridden from the command line.
The built-in recipes are in torchtitan_rl/recipes and are offered everywhere; here they are imported
so that yours can build on them. A `config_registry.py` of your own lies in the folder you work in.
"""

from torchtitan_rl.recipes import *  # noqa: F403
