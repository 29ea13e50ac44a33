// Which charts the overview shows by itself, and which metrics are in them.

const OUTCOMES = {
  ok: "ok",
  malformed: "malformed call",
  unknown: "no such tool",
  raised: "tool raised an error",
  timed_out: "tool timed out",
};
const GRADIENT_SHARES = {
  "grad_share/policy": "policy loss",
  "grad_share/echo": "Echo",
  "grad_share/rollout_kl": "rollout KL term",
  "grad_share/ref_kl": "reference KL term",
};
const DIVERGENCES = {
  "mismatch_kl/all/mean": "trainer and generator",
  rollout_kl: "rollout KL term",
  ref_kl: "reference KL term",
};

/** The tasks among keys such as reward/<task>/mean; `all` first. */
export function tasksOf(keys, metric) {
  const found = keys
    .map((key) => key.split("/"))
    .filter((parts) => parts[0] === metric && parts.at(-1) === "mean");
  const names = [...new Set(found.map((parts) => parts.slice(1, -1).join("/")))];
  // With one task, "all" and the task are the same curve.
  const tasks = names.filter((name) => name !== "all");
  return tasks.length === 1 ? tasks : names.sort((a, b) => (b === "all") - (a === "all") || (a < b ? -1 : 1));
}

/** The phases of a step's time, in the order they happen. */
export function phasesOf(keys) {
  const order = ["read", "generate", "grade", "train", "sync", "evaluate"];
  const place = (name) => (order.indexOf(name) + 1 || order.length + 1) * 1000;
  const found = keys
    .filter((key) => key.startsWith("time/") && key !== "time/step")
    .map((key) => key.slice(5));
  return found.filter((name) => !name.includes("/")).sort((a, b) => place(a) - place(b) || (a < b ? -1 : 1));
}

/**
 * The charts of the overview for the metrics that there are: {id, title, about, share, keys: [{key,
 * label, like}]}; `like` is the number of the curve whose colour a curve shares. `wanted(task)` says
 * whether a task is shown, `moves(key)` whether a metric is ever not 0.
 */
export function defaultCharts(keys, wanted, moves) {
  const has = new Set(keys);
  const known = (labels) =>
    Object.entries(labels)
      .filter(([key]) => has.has(key))
      .map(([key, label]) => ({ key, label }));
  const byTask = (metric) =>
    tasksOf(keys, metric)
      .filter(wanted)
      .map((task) => ({ key: `${metric}/${task}/mean`, label: task || metric }));
  // Held out has the colour of the same task's samples, and dashes.
  const heldOut = (metric) => {
    const tasks = byTask(metric).map(({ label }) => label);
    return keys
      .filter((key) => key === `eval/${metric}` || key.startsWith(`eval/${metric}/`))
      .map((key) => ({ key, task: key.slice(`eval/${metric}/`.length) }))
      .filter(({ task }) => !task || wanted(task))
      .map(({ key, task }) => ({
        key,
        label: task ? `${task}, held out` : "held out",
        like: Math.max(0, tasks.indexOf(task || "all")),
      }));
  };
  const outcomes = Object.entries(OUTCOMES)
    .map(([name, label]) => ({ key: `tool_calls/${name}/all/mean`, label }))
    .filter(({ key, label }) => has.has(key) && (label === "ok" || moves(key)));
  const ages = byTask("policy_age").filter(({ key }) => moves(key));
  return [
    { id: "reward", title: "Reward", keys: [...byTask("reward"), ...heldOut("reward")] },
    { id: "accuracy", title: "Accuracy", share: true, keys: [...byTask("accuracy"), ...heldOut("accuracy")] },
    { id: "truncated", title: "Truncated at max_tokens", share: true, keys: byTask("truncated") },
    { id: "length", title: "Completion length", about: "tokens", keys: byTask("completion_tokens") },
    { id: "entropy", title: "Entropy", keys: byTask("entropy") },
    { id: "grad_norm", title: "Gradient norm", keys: known({ "train/grad_norm": "gradient norm" }) },
    {
      id: "grad_share",
      title: "Share of the gradient",
      about: "by term of the loss",
      share: true,
      keys: known(GRADIENT_SHARES),
    },
    { id: "kl", title: "KL", keys: known(DIVERGENCES) },
    {
      id: "echo",
      title: "Echo",
      about: "−logprob of a token",
      keys: known({ "echo_nll/mean": "−logprob" }),
    },
    { id: "tools", title: "Tool calls", about: "per rollout, by outcome", keys: outcomes },
    { id: "policy_age", title: "Policy age", about: "versions", keys: ages },
  ].filter((chart) => chart.keys.length);
}
