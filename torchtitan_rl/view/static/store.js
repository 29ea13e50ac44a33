// Which runs are shown, and what is known of them. The server is asked for what is new only.

const POLL_MS = 2000;
const INDEXING_POLL_MS = 200; // while its progress is to be seen

export async function get(name, parameters = {}) {
  const response = await fetch(`api/${name}?${new URLSearchParams(parameters)}`);
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.error || response.statusText);
  return answer;
}

/** Changes something; the server accepts it from this page only. */
export async function post(name, values) {
  const headers = { "Content-Type": "application/json" };
  const response = await fetch(`api/${name}`, { method: "POST", headers, body: JSON.stringify(values) });
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.error || response.statusText);
  return answer;
}

class Store {
  runs = [];
  chosen = [];
  error = "";
  #known = new Map();
  #listeners = new Set();

  async start() {
    const { runs, chosen } = await get("runs");
    this.runs = runs;
    const kept = JSON.parse(sessionStorage.getItem("chosen") || "null");
    this.chosen = (kept || []).filter((run) => runs.includes(run));
    if (!this.chosen.length) this.chosen = chosen;
    this.#loop();
  }

  choose(runs) {
    this.chosen = this.runs.filter((run) => runs.includes(run));
    sessionStorage.setItem("chosen", JSON.stringify(this.chosen));
    this.#tell();
    this.poll();
  }

  /** {metrics: Map of step to row, status, broken} */
  run(name) {
    if (!this.#known.has(name))
      this.#known.set(name, { metrics: new Map(), keys: new Set(), cursor: "", broken: 0, status: null });
    return this.#known.get(name);
  }

  /** Calls back after a change; returns how to end that. */
  subscribe(listener) {
    this.#listeners.add(listener);
    return () => this.#listeners.delete(listener);
  }

  async poll() {
    let more = false;
    try {
      for (const name of this.chosen) more = (await this.#update(name)) || more;
      if (this.error) this.#tell();
      this.error = "";
    } catch (error) {
      this.error = `the server does not respond (${error.message})`;
      this.#tell();
    }
    return more;
  }

  async #loop() {
    // A long file comes in pieces: then the next one is asked for at once.
    const more = await this.poll();
    const indexing = this.chosen.some((name) => this.run(name).status?.files_pending !== 0);
    setTimeout(() => this.#loop(), more ? 0 : indexing ? INDEXING_POLL_MS : POLL_MS);
  }

  async #update(name) {
    const run = this.run(name);
    const { cursor } = run;
    const config_version = run.status?.config_version || "";
    const answer = await get("status", { run: name, cursor, config_version });
    if (run.cursor !== cursor) return true; // two were asked at once, and the other has come first
    if (answer.reset) {
      run.metrics.clear();
      run.broken = 0;
    }
    for (const row of answer.metrics) {
      run.metrics.set(row.step, { ...run.metrics.get(row.step), ...row });
      for (const key of Object.keys(row)) run.keys.add(key);
    }
    run.cursor = answer.cursor;
    run.broken += answer.metrics_broken;
    const { metrics, ...status } = answer;
    const changed = JSON.stringify({ ...status, config: 0 }) !== JSON.stringify({ ...run.status, config: 0 });
    run.status = { ...status, config: status.config || run.status?.config };
    if (changed || metrics.length) this.#tell();
    return metrics.length > 0;
  }

  #tell() {
    for (const listener of this.#listeners) listener();
  }

  /** Lines that could not be read, in all of a run's files. */
  broken(name) {
    const { broken, status } = this.run(name);
    const files = Object.values(status?.broken || {}).reduce((a, b) => a + b, 0);
    return broken + files + (status?.metrics_pending ? 1 : 0);
  }
}

export const store = new Store();
