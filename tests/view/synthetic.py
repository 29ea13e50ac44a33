"""Runs that nobody has trained, in the files that a run writes: for tests and the benchmark."""

import json
import math
import os
import random
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ["<|im_start|>", "<|im_end|>"]
_TEXTS = [
    "user\nassistant\ntool\nsystem\n47 85 [ANSWER] 24",
    'the result is <tool_call>{"name": "calculator", "arguments": {"expression": "12 * 34"}}',
    "You compute with the calculator. Let me think: four and seven make eleven.",
]


class SyntheticRun:
    """Writes a run a step at a time; it gets better as it goes on.

    Example:
        run = SyntheticRun(tmp_path / "run")
        run.write(steps=3)
    """

    def __init__(
        self,
        folder: Path,
        *,
        prompts: int = 4,
        samples: int = 4,
        seed: int = 0,
        tokens: bool = True,
    ) -> None:
        self.folder, self.prompts, self.samples, self.tokens = folder, prompts, samples, tokens
        self.random = random.Random(seed)
        self.tokenizer = _tokenizer()
        self.clock = 0.0
        for name in ("rollouts", "logs", *(["tokens"] if tokens else [])):
            (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(
            json.dumps({"steps": 80, "seed": seed, "trainer": {"optimizer": {"lr": 1e-4}}})
        )
        self.tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "timeline.json").write_text("[\n")
        for number, name in enumerate(("controller", "generator", "grader", "trainer")):
            event = {"name": "thread_name", "ph": "M", "pid": 1, "tid": number}
            self._event({**event, "args": {"name": name}})

    def write(self, steps: int, first: int = 0) -> "SyntheticRun":
        for step in range(first, first + steps):
            self.write_step(step)
        return self

    def write_step(self, step: int, extra: list[dict[str, Any]] | None = None) -> None:
        """Rollouts first, as a run does: its metrics say that the step is done."""
        records = [
            self.record(step, prompt, sample)
            for prompt in range(self.prompts)
            for sample in range(self.samples)
        ]
        write_lines(self.folder / f"rollouts/step-{step:06}.jsonl", records + (extra or []))
        if step % 5 == 0:
            greedy = [self.record(step, p, 0, split="evaluation") for p in range(self.prompts)]
            write_lines(self.folder / f"rollouts/step-{step:06}-evaluation.jsonl", greedy)
        if self.tokens:
            exports = [export_of(record, self.random) for record in records]
            write_lines(self.folder / f"tokens/step-{step:06}-rank-0.jsonl", exports)
        self._metrics(step, records)

    def record(self, step: int, prompt: int, sample: int, split: str = "train") -> dict[str, Any]:
        task = "calculator" if prompt % 2 else "sum_digits"
        skill = 0.35 + 0.6 * (1 - math.exp(-step / 8))
        correct = self.random.random() < skill
        reward = 1.1 * correct + 0.1 * self.random.random()
        group = f"{task}/{split}/{step * self.prompts + prompt}"
        question = random.Random(group)  # the same for all samples of a group, in every run
        talk, expected = (_calculation if prompt % 2 else _sum)(question, correct)
        sequence = self._sequence(step, talk)
        return {
            "schema": 2,
            **{"step": step, "split": split, "task": task, "group": group, "sample": sample},
            **{"reward": reward, "correct": correct},
            "reward_parts": {"exact": float(correct), "format": round(reward - correct, 3)},
            "advantage": reward - skill if split == "train" else None,
            "status": self.random.choice(["finished"] * 9 + ["truncated"]),
            **{"failure": "", "turns": 1 + prompt % 2},
            "tokens": sum(version >= 0 for version in sequence["token_versions"]),
            "tool_calls": ["ok"] * (prompt % 2),
            **{"policy_version": step, "newest_version": step, "temperature": 1.0},
            "seconds": {"generate": self.random.uniform(0.2, 0.9), "respond": 0.0, "grade": 0.01},
            "messages": talk,
            "expected_answer": expected,
            "state": {"guesses": 3} if prompt % 2 else {},
            "sequences": [sequence],
        }

    def _sequence(self, step: int, talk: list[dict[str, str]]) -> dict[str, Any]:
        """One sequence, rendered as ChatML; tool results in it are echoed."""
        ids, sampled = [], []
        for message in talk:
            by_model = message["role"] == "assistant"
            for text, counts in (
                (f"<|im_start|>{message['role']}\n", False),
                (f"{message['content']}<|im_end|>", by_model),
                ("\n", False),
            ):
                new = self.tokenizer.encode(text).ids
                ids += new
                sampled += [counts] * len(new)
        ids, sampled = ids[:-1], sampled[:-1]  # nothing follows the last turn
        start = sampled.index(True)
        pull = self.random.randrange(start, len(ids)) if step else len(ids)
        said = list(zip(sampled, range(len(ids)), strict=True))[start:]
        return {
            **{"prompt_token_ids": ids[:start], "token_ids": ids[start:]},
            "token_logprobs": [
                round(-self.random.expovariate(3), 4) if s else None for s, _ in said
            ],
            "token_versions": [(step if i < pull else step + 1) if s else -1 for s, i in said],
            "loss_mask": [int(s) for s in sampled],
            "echo_alpha": [0.05 if i > start and not s else None for i, s in enumerate(sampled)],
        }

    def _metrics(self, step: int, records: list[dict[str, Any]]) -> None:
        row: dict[str, Any] = {"step": step}
        for task in ("all", "sum_digits", "calculator"):
            chosen = [r for r in records if task in ("all", r["task"])] or records
            for name, key in (("reward", "reward"), ("accuracy", "correct")):
                row[f"{name}/{task}/mean"] = sum(r[key] for r in chosen) / len(chosen)
            row[f"completion_tokens/{task}/mean"] = sum(r["tokens"] for r in chosen) / len(chosen)
            cut = sum(r["status"] == "truncated" for r in chosen)
            row[f"truncated/{task}/mean"] = cut / len(chosen)
            row[f"policy_age/{task}/mean"] = 0.0
        if step % 5 == 0:
            row["eval/accuracy"] = min(1.0, row["accuracy/all/mean"] + 0.1)
        phases = {"generate": 0.8, "grade": 0.05, "train": 0.6, "sync": 0.1}
        calls = ("generate", "grade", "train", "pull weights")
        lanes = zip((1, 2, 3, 1), calls, phases.items(), strict=True)
        for tid, call, (name, mean) in lanes:
            seconds = mean * self.random.uniform(0.8, 1.3)
            row[f"time/{name}"] = seconds
            span = {"name": call, "ph": "X", "pid": 1, "args": {"step": step}}
            span |= {"ts": self.clock * 1e6, "dur": seconds * 1e6}
            self._event({**span, "tid": tid})
            self._event({**span, "tid": 0})
            self.clock += seconds
        row["time/step"] = sum(row[f"time/{name}"] for name in phases)
        for outcome, mean in {"ok": 0.45, "malformed": 0.05, "raised": 0.0}.items():
            row[f"tool_calls/{outcome}/all/mean"] = mean * (1 + 0.2 * self.random.random())
        row["train/grad_norm"] = 0.2 + 0.1 * self.random.random()
        row["echo_nll/mean"] = 4 - step / 30
        row |= {"grad_share/policy": 0.7, "grad_share/echo": 0.3}
        row["entropy/all/mean"] = 2 * math.exp(-step / 20)
        row["mismatch_kl/all/mean"] = math.nan if step == 1 else 1e-4 * self.random.random()
        with (self.folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")

    def _event(self, event: dict[str, Any]) -> None:
        with (self.folder / "timeline.json").open("a") as file:
            file.write(json.dumps(event) + ",\n")


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    """A file appears whole, as a run's do."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps(record) + "\n" for record in records))
    os.replace(temporary, path)


def export_of(record: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """What a trainer would have computed for a rollout's first sequence."""
    [sequence] = record["sequences"]
    ids = sequence["prompt_token_ids"] + sequence["token_ids"]
    generator = [None] * len(sequence["prompt_token_ids"]) + sequence["token_logprobs"]
    trainer = [None if g is None else g + rng.gauss(0, 0.05) for g in generator]
    ratios = [
        math.nan if g is None or t is None else math.exp(t - g)
        for g, t in zip(generator, trainer, strict=True)
    ]
    ratios = [None if math.isnan(ratio) else ratio for ratio in ratios]
    return {
        **{"schema": 2, "step": record["step"], "rank": 0},
        "name": f"{record['group']}/{record['sample']}/0",
        **{"tokens": ids, "positions": list(range(len(ids)))},
        "rl": sequence["loss_mask"],
        "echo": [int(alpha is not None) for alpha in sequence["echo_alpha"]],
        "advantage": [record["advantage"] if rl else None for rl in sequence["loss_mask"]],
        **{"token_logprobs": generator, "trainer_logprobs": trainer},
        "entropies": [None if g is None else rng.random() for g in generator],
        "ratios": ratios,
        "mismatches": [None if ratio is None else abs(math.log(ratio)) for ratio in ratios],
        "masked": [0 if r is None or 0.9 < r < 1.1 else 1 if r > 1 else -1 for r in ratios],
    }


def _tokenizer() -> Tokenizer:
    """A small byte-level one, as most models have."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made.train_from_iterator(
        _TEXTS * 5,
        trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False),
    )
    made.add_special_tokens([AddedToken(token) for token in SPECIAL])
    return made


def _sum(rng: random.Random, correct: bool) -> tuple[list[dict[str, str]], int]:
    digits = [rng.randrange(10) for _ in range(4)]
    total, sums = 0, []
    for digit in digits:
        total += digit
        sums.append(str(total))
    answer = total if correct else total + rng.choice([-10, 1, 10])
    return [
        {"role": "user", "content": f"{digits[0]}{digits[1]} {digits[2]}{digits[3]}"},
        {"role": "assistant", "content": f"{' '.join(sums)} [ANSWER] {answer}"},
    ], total


def _calculation(rng: random.Random, correct: bool) -> tuple[list[dict[str, str]], int]:
    a, b = rng.randrange(10, 99), rng.randrange(10, 99)
    call = json.dumps({"name": "calculator", "arguments": {"expression": f"{a} * {b}"}})
    answer = a * b if correct else a * b + 7
    return [
        {"role": "system", "content": "You compute with the calculator."},
        {"role": "user", "content": f"What is {a} times {b}?"},
        {"role": "assistant", "content": f"Let me compute.\n<tool_call>{call}</tool_call>"},
        {"role": "tool", "content": f"{a} * {b} = {a * b}"},
        {"role": "assistant", "content": f"The result is {answer} 🙂"},
    ], a * b
