"""`python -m torchtitan_rl.train`: the command `torchtitan-rl train`.

python -m torchtitan_rl.train --list
python -m torchtitan_rl.train --config grpo_sum_digits_tiny --generator.sampling.n 4 --steps 20
"""

from torchtitan_rl.core.interrupts import end_on_interrupt

with end_on_interrupt():
    from torchtitan_rl.cli.main import leave
    from torchtitan_rl.cli.train import main

if __name__ == "__main__":
    try:
        code = main(prog="python -m torchtitan_rl.train")
    except KeyboardInterrupt:
        code = 130
    leave(code)
