// A prompt is sent, and its answer streams.

import { Problem, ask } from "./api.js";
import { Answer } from "./answer.js";
import { byId, say, show } from "./element.js";
import { follow } from "./stream.js";
import { count, duration } from "./units.js";

const TRIES = 3;

export class Compose {
  #frame;
  #form = byId("compose");
  #answer = new Answer();
  #running = null; // the AbortController of what streams
  #requestId = null;

  constructor(frame) {
    this.#frame = frame;
    this.#form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    this.#form.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
      event.preventDefault();
      this.#form.requestSubmit();
    });
    byId("stop").addEventListener("click", () => this.#stop());
  }

  async #send() {
    if (this.#running) return;
    const running = (this.#running = new AbortController());
    const began = performance.now();
    this.#refuse(null);
    this.#busy(true);
    try {
      const { id } = await submit(bodyOf(new FormData(this.#form)));
      this.#requestId = id;
      this.#begin(id);
      await this.#stream(id, began, running.signal);
    } catch (problem) {
      if (!running.signal.aborted) this.#refuse(problem);
    } finally {
      this.#running = this.#requestId = null;
      this.#busy(false);
    }
  }

  #begin(id) {
    this.#answer.clear();
    byId("answer-link").href = `/console/requests/${encodeURIComponent(id)}`;
    show(byId("answer"), true);
    this.#status("queued");
    show(byId("stop"), true);
  }

  async #stream(id, began, signal) {
    let tokens = 0;
    let first = null;
    for await (const { name, data } of follow(id, signal)) {
      this.#answer.write(data.text);
      if (name === "end") {
        this.#status(endText(data, performance.now() - began, first));
        this.#answer.end();
        return;
      }
      tokens += 1;
      first ??= performance.now() - began;
      this.#status(`writing · ${count(tokens)} tokens · first after ${duration(first)}`);
    }
  }

  /** The end of the stream says how it went. */
  async #stop() {
    try {
      if (this.#requestId) await ask("DELETE", `/v1/requests/${encodeURIComponent(this.#requestId)}`);
    } catch (problem) {
      this.#refuse(problem);
    }
  }

  #status(text) {
    say(byId("answer-status"), text);
  }

  #busy(busy) {
    byId("send").disabled = busy;
    if (!busy) show(byId("stop"), false);
  }

  #refuse(problem) {
    for (const field of this.#form.elements) field.removeAttribute?.("aria-invalid");
    show(byId("refusal"), problem !== null && problem.kind !== "key");
    if (problem === null) return;
    if (problem.kind === "key") return void this.#frame.refused(problem);
    say(byId("refusal"), problem.message);
    const field = problem.param && this.#form.elements[problem.param];
    if (!field) return;
    field.setAttribute("aria-invalid", "true");
    field.focus();
  }
}

function bodyOf(fields) {
  const prompt = fields.get("prompt");
  const asked = fields.get("mode") === "chat" ? { messages: [{ role: "user", content: prompt }] } : { prompt };
  return { ...asked, max_tokens: Number(fields.get("max_tokens")), temperature: Number(fields.get("temperature")) };
}

/** The same key each time, so that an answer which was lost on its way does not make two requests. */
async function submit(body) {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  const headers = { "Idempotency-Key": `console-${[...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("")}` };
  for (let tried = 1; ; tried += 1) {
    try {
      return await (await ask("POST", "/v1/requests", { body, headers })).json();
    } catch (problem) {
      if (!(problem instanceof Problem) || problem.code !== "gateway_away" || tried === TRIES) throw problem;
    }
  }
}

function endText({ status, usage, finish_reason: reason, error }, ms, first) {
  if (error) return `${status}: ${error.message}`;
  const tokens = usage?.completion_tokens ?? 0;
  const rate = first !== null && tokens > 1 ? ` · ${((1000 * (tokens - 1)) / (ms - first)).toFixed(1)} tokens/s` : "";
  const why = reason === "length" ? " · reached the most tokens" : "";
  return `${status} · ${count(tokens)} tokens · first after ${duration(first)}${rate}${why}`;
}
